"""The dual of a support vector machine where its Gram matrix fits nowhere: steps by a model of it, to a proved gap.

The bulk of a Gram matrix K is smooth: a few hundred landmarks explain it but for a remainder that is nearly diagonal.
With such a model, L L' + diag(D), in the place of K, the dual is a problem in as many unknowns as there are landmarks,
which Newton's method solves in a few iterations. A step here solves that problem around the present multipliers, then
goes towards its answer as far as the true dual rises. For that it needs the columns of K whose multipliers move, made
tile by tile and never kept. The model decides only how many steps it takes: objective, line search and gap are of K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.errors import ShapeError

# Rows and columns of K that are made together: a core's cache holds them; other devices are kept busy by more.
_TILE, _LARGE_TILE = (1024, 4096), (16384, 8192)
# Entries of L at most: 2 GiB of float32.
_FACTORS = 2**29
# A part of K's diagonal that the model has more than K: it keeps corners round for Newton's method.
_BLUR = 0.1
# The steepness that stands for a jump where an offset is looked for.
_JUMP = 1e-6


@dataclass(frozen=True)
class Dual:
    """What :func:`solve_dual` found.

    Attributes:
        alpha: ``(N,)``, between 0 and C, with sum_i alpha_i t_i = 0 up to rounding.
        intercept: b of f(x) = sum_i alpha_i t_i k(x, x_i) + b.
        objective: the dual's value.
        gap: the primal's value at f less the objective, which is at most this far below the best.
        steps: how many were taken.

    >>> Dual(torch.tensor([0.5, 0.5]), 0.0, 0.5, 0.0, 1).objective
    0.5
    """

    alpha: Tensor
    intercept: float
    objective: float
    gap: float
    steps: int


def solve_dual(
    kernel: Kernel,
    items: Prepared,
    t: Tensor,
    C: Tensor,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 200,
    landmarks: int | None = None,
    seed: int = 0,
) -> Dual:
    r"""Maximise the dual of a support vector machine with a soft margin, until its relative gap is small.

    .. math:: \max_\alpha \sum_i \alpha_i - \tfrac12 \sum_{ij} \alpha_i \alpha_j t_i t_j k(x_i, x_j), \qquad
        0 \le \alpha_i \le C_i, \quad \sum_i \alpha_i t_i = 0

    Args:
        kernel: a positive semi-definite one.
        items: N points as the kernel has prepared them; all is computed where and in the type in which they are.
        t: ``(N,)`` of 1 and -1, both present.
        C: ``(N,)``, above 0 and finite.
        tolerance: it ends when gap <= tolerance * objective. Steps are many below 1e-4; below 1e-5 it needs float64.
        max_steps: it ends there in any case.
        landmarks: M; 4 sqrt(N) unless given.
        seed: chooses landmarks.

    A step costs N D for each column of K that it needs, and at most O(N M^2); memory is O(N M). Landmarks as Williams
    and Seeger (2001) have them; a step is one of a proximal Newton method, Lee, Sun and Saunders (2014). Few steps are
    needed where most multipliers end at 0 or C; with a large C and most of them between, libsvm is the better choice.

    >>> from thalweg.energies import RBF
    >>> points, t = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> found = solve_dual(RBF(0.5), RBF(0.5).prepare(points), t, torch.ones(4))
    >>> round(found.objective, 2), found.gap <= 1e-3 * found.objective
    (1.89, True)
    """
    _check(len(items), t, C)
    N, generator = len(items), torch.Generator().manual_seed(seed)
    M = landmarks or math.ceil(4 * math.sqrt(N))
    model = _Model.of(kernel, items, t, C, _some(torch.arange(N, device=t.device), M, generator))
    here = best = _Iterate(torch.zeros_like(t), torch.zeros_like(t), 0.0, t, C)
    gaps, far = [here.gap], 1.0
    while len(gaps) <= max_steps:
        target = model.maximiser(here)
        move = _worth_moving(target, here, spared=0.01 if far > 0.2 else 0.0)
        change = _mixed_columns(kernel, items, t * move)
        cross, curve = _dot(t * here.alpha, change), _dot(t * move, change)
        rise = _dot(move, 1 - t * here.f)
        far = min(1.0, rise / curve) if curve > 0 else 1.0
        # The gap is asked for at the best place for the dual, and half-way, where it is often smaller.
        ways = [here.moved(s, move, change, here.norm + 2 * s * cross + s * s * curve) for s in (far, 0.5)]
        here, best = ways[0], min(ways, key=lambda way: way.gap)
        gaps.append(best.gap)
        if best.gap <= tolerance * abs(best.objective) or not bool(move.any()):
            break
        if len(gaps) % 3 == 1 and best.gap > gaps[-4] / 2:
            # Slow. The model is exact at its landmarks, so let them be points whose multiplier is between its bounds.
            free = ((target > 0) & (target < C)).nonzero().squeeze(1)
            M = max(1, min(2 * M, max(M, len(free)), _FACTORS // N))
            model = _Model.of(kernel, items, t, C, _some(free, M, generator))
    return Dual(best.alpha, best.offset, best.objective, best.gap, len(gaps) - 1)


def _check(N: int, t: Tensor, C: Tensor) -> None:
    for name, each in (("t", t), ("C", C)):
        if tuple(each.shape) != (N,) or not each.is_floating_point():
            raise ShapeError(
                f"`{name}` must be floating point ({N},), one for each item, got {tuple(each.shape)} {each.dtype}"
            )
    if not bool((t.abs() == 1).all()) or bool((t == t[0]).all()):
        raise ShapeError("`t` must be 1 or -1 for each item, with both among them")
    if not bool((C > 0).all()) or not bool(C.isfinite().all()):
        raise ShapeError("`C` must be above 0 and finite for each item")


class _Iterate:
    """Multipliers ``(N,)``, f = K (t alpha) and its norm alpha't K t alpha."""

    def __init__(self, alpha: Tensor, f: Tensor, norm: float, t: Tensor, C: Tensor):
        self.alpha, self.f, self.norm, self.t, self.C = alpha, f, norm, t, C
        self.objective = float(alpha.sum(dtype=torch.float64)) - norm / 2
        wanting = 1 - t * f
        self.offset = _offset(wanting, t, C, torch.full_like(C, _JUMP))
        self.gap = norm / 2 + _dot(C, (wanting - t * self.offset).clamp(min=0)) - self.objective

    def moved(self, s: float, move: Tensor, change: Tensor, norm: float) -> _Iterate:
        """A part ``s`` of the way along ``move``, along which f changes by ``change``."""
        return _Iterate(self.alpha + s * move, self.f + s * change, norm, self.t, self.C)


@dataclass(frozen=True)
class _Model:
    """K as L L' + diag(D): ``factors`` L ``(N, M)`` and ``rest`` D ``(N,)``."""

    factors: Tensor
    rest: Tensor
    t: Tensor
    C: Tensor

    @classmethod
    def of(cls, kernel: Kernel, items: Prepared, t: Tensor, C: Tensor, chosen: Tensor) -> _Model:
        among = kernel.block(items[chosen], items[chosen]).double()
        diagonal = kernel.diagonal_of(items).to(t.dtype)
        among.diagonal().add_(1e-6 * diagonal.mean())
        root = torch.linalg.cholesky(among).to(t.dtype)
        columns = kernel.block(items[chosen], items).to(t.dtype)
        factors = torch.linalg.solve_triangular(root, columns, upper=False).mT.contiguous()
        left = (diagonal - factors.square().sum(dim=1)).clamp(min=0)
        # Twice what is left stands for what is beside the diagonal too.
        return cls(factors, 2 * left + _BLUR * diagonal.mean(), t, C)

    def maximiser(self, here: _Iterate) -> Tensor:
        r"""The multipliers ``(N,)`` that are best for the model around those of ``here``.

        With c = f - (L L' + D) t alpha, they are :math:`a_i(u) = \min(C_i, \max(0, (1 - t_i u_i) / D_i))` at
        u = c + L w + b for the w and b that minimise

        .. math:: \tfrac12 |w|^2 + \sum_i a_i (1 - t_i u_i - D_i a_i / 2)

        hinges with their corners rounded off. What the answer wins is within a fiftieth of the most.
        """
        L, D, t, C = self.factors, self.rest, self.t, self.C
        beta = t * here.alpha
        a, w = here.alpha, L.mT @ beta
        start = w
        smooth = L @ w
        fixed = here.f - smooth - D * beta
        u, value = self._value(fixed, smooth, w)
        for _ in range(50):
            raw = (1 - t * u) / D
            a = raw.clamp(min=0).minimum(C)
            mixed = L.mT @ (t * a)
            slope, moved, move = w - mixed, mixed - start, a - here.alpha
            won = _dot(move, 1 - t * here.f) - (_dot(moved, moved) + _dot(D * move, move)) / 2
            # |slope|^2 / 2 is the gap of this problem: what a could still win.
            if _dot(slope, slope) / 2 <= max(0.02 * won, 1e-12 * abs(value)):
                break
            way = self._newton(slope, ((raw > 0) & (raw < C)).nonzero().squeeze(1))
            descent, far, along = -_dot(slope, way), 1.0, L @ way
            while True:
                u, lower = self._value(fixed, smooth + far * along, w + far * way)
                if lower <= value - 0.1 * far * descent or far < 1e-6:
                    break
                far /= 2
            w, smooth, value = w + far * way, smooth + far * along, lower
        return a

    def _newton(self, slope: Tensor, between: Tensor) -> Tensor:
        """The step in w ``(M,)``; ``between`` are the places on the round part of a hinge, which have the curvature."""
        rows, weight = self.factors[between], self.rest[between].reciprocal().unsqueeze(1)
        # The offset follows w, being always at its best: it takes the mean away.
        mean = (weight * rows).sum(dim=0) / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
        rows = (rows - mean) * weight.sqrt()
        curvature = rows.mT @ rows
        curvature.diagonal().add_(1)
        return -torch.cholesky_solve(slope.unsqueeze(1), torch.linalg.cholesky(curvature)).squeeze(1)

    def _value(self, fixed: Tensor, smooth: Tensor, w: Tensor) -> tuple[Tensor, float]:
        """u with the best offset, and the function that is minimised."""
        u = fixed + smooth
        u = u + _offset(1 - self.t * u, self.t, self.C, self.rest)
        wanting = 1 - self.t * u
        a = (wanting / self.rest).clamp(min=0).minimum(self.C)
        return u, _dot(w, w) / 2 + _dot(a, wanting - self.rest * a / 2)


def _some(places: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return places[torch.randperm(len(places), generator=generator)[:count].to(places.device)]


def _offset(wanting: Tensor, t: Tensor, C: Tensor, D: Tensor) -> float:
    """b with sum_i t_i a_i = 0 for a_i = min(C_i, max(0, (wanting_i - t_i b) / D_i)): where a broken line is 0."""
    D, C = D.double(), C.double()
    ends = t * wanting.double() + D * C * (t < 0)
    at = torch.cat([ends - D * C, ends])
    bends = torch.cat([1 / D, -1 / D])
    at, order = at.sort()
    slopes = bends[order].cumsum(0)
    fallen = torch.cat([at.new_zeros(1), (slopes[:-1] * at.diff()).cumsum(0)])
    height = float(C[t > 0].sum(dtype=torch.float64))
    place = int(torch.searchsorted(fallen, height).clamp(1, len(at) - 1))
    below, slope = float(fallen[place - 1]), float(slopes[place - 1])
    return float(at[place - 1]) + ((height - below) / slope if slope > 0 else 0.0)


def _worth_moving(target: Tensor, here: _Iterate, spared: float) -> Tensor:
    """The way to the target without its smallest parts, ``spared`` of the sum, still balanced between the classes."""
    move = target - here.alpha
    sizes = move.abs().sort().values
    kept = int(torch.searchsorted(sizes.cumsum(0, dtype=torch.float64), spared * float(sizes.sum(dtype=torch.float64))))
    move = torch.where(move.abs() < sizes[min(kept, len(sizes) - 1)], 0.0, move)
    moved = move != 0
    for some in (moved & (target > 0) & (target < here.C), moved, moved):
        excess, reached = _dot(here.t, move), here.alpha + move
        some = some & torch.where(here.t * excess > 0, reached > 0, reached < here.C)
        balanced = (reached - here.t * excess / max(1, int(some.sum()))).clamp(min=0).minimum(here.C) - here.alpha
        move = torch.where(some, balanced, move)
    return move


def _mixed_columns(kernel: Kernel, items: Prepared, weights: Tensor) -> Tensor:
    """K weights, ``(N,)``, by the columns whose weight is not 0."""
    places = weights.nonzero().squeeze(1)
    height, width = _TILE if weights.device.type == "cpu" else _LARGE_TILE
    out = torch.zeros_like(weights)
    for left in range(0, len(places), width):
        some = places[left : left + width]
        columns, factors = items[some], weights[some]
        for top in range(0, len(items), height):
            out[top : top + height] += kernel.block(items[top : top + height], columns).to(factors.dtype) @ factors
    return out


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))
