"""How a function bends at a point: convex, concave or neither, by the ends of the spectrum of its Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.diagnostics.jacobians import check_request, orthogonal
from thalweg.errors import ConfigError, ShapeError

Function = Callable[[Tensor], Tensor]
# "auto" builds the Hessian up to this many features, and up to this many entries for the whole batch.
_DENSE, _ENTRIES = 2000, 1 << 27
# Steps of Lanczos at most, and the residual at which it ends, relative to the largest eigenvalue found.
_STEPS, _SMALL = 300, 1e-8


@dataclass(frozen=True)
class Convexity:
    """How a function bends at each point: ``kinds`` of "convex", "concave", "neither" and "flat", one for each point.

    ``lowest`` and ``highest`` curvature, ``(B,)`` or a number each, as float64 tensors; a curvature within
    ``tolerance`` (same shape) of zero counts as zero.

    >>> found = convexity(lambda x: x.square().sum(-1), torch.zeros(3))
    >>> found.kind, float(found.lowest), float(found.highest)
    ('convex', 2.0, 2.0)
    """

    kinds: tuple[str, ...]
    lowest: Tensor
    highest: Tensor
    tolerance: Tensor

    @property
    def kind(self) -> str:
        """What holds at all points: flat and convex ones together are convex, convex and concave ones neither."""
        found = set(self.kinds) - {"flat"}
        return found.pop() if len(found) == 1 else "neither" if found else "flat"

    def __str__(self) -> str:
        """One line."""
        if not self.lowest.numel():
            return "no points"
        low, high = float(self.lowest.amin()), float(self.highest.amax())
        return f"{self.kind}: curvature from {low:.4g} to {high:.4g}, tolerance {float(self.tolerance.amax()):.1g}"


def convexity(function: Function, point: Tensor, *, tolerance: float | None = None, method: str = "auto") -> Convexity:
    r"""Whether a function is convex at a point: its Hessian has no eigenvalue below zero there.

    "convex" where the smallest eigenvalue is at least -tolerance, "concave" where the largest is at most tolerance,
    "flat" where both hold, "neither" where none does. By default the tolerance is 100 times the rounding of the
    Hessian, and never less than the error of the eigenvalues; a given one is used as it is. A Hessian says how the
    function bends at the point alone; a convex function passes at every point.

    ``"dense"`` builds the Hessian by D products of it with unit vectors and takes it apart, O(D) gradients and O(D^3).
    ``"lanczos"`` needs products alone: m steps from a random start with full reorthogonalisation (Lanczos 1950; Paige
    1971), O(m) gradients and O(m^2 D) for each point, at most 300. For each of its values :math:`\theta` with vector u
    an eigenvalue lies within the residual :math:`\|Hu - \theta u\|`; the values never lie outside the spectrum.

    Args:
        function: maps ``(D,)`` to a number or ``(B, D)`` to ``(B,)``, each row by itself, as energies do; twice
            differentiable in autograd.
        point: ``(D,)`` or ``(B, D)``; the products are computed in its type, the eigenvalues in float64.
        method: ``"auto"`` is dense up to D = 2,000.

    >>> print(convexity(lambda x: torch.logsumexp(x, -1), torch.tensor([[0.0, 1.0], [3.0, 3.0]])))
    convex: curvature from 0 to 0.5, tolerance 5e-05
    """
    check_request(point, method)
    rows, size = point.shape[:-1].numel(), point.shape[-1]
    if method == "dense" or (method == "auto" and size <= _DENSE and rows * size * size <= _ENTRIES):
        low, high, error = _dense(function, point)
    elif point.dim() == 1 or not rows:
        low, high, error = _lanczos(function, point)
    else:
        low, high, error = map(torch.cat, zip(*(_lanczos(function, row[None]) for row in point), strict=True))
    limit = torch.maximum(100 * _rounding(point) * torch.maximum(low.abs(), high.abs()), error)
    return _judged(low, high, limit if tolerance is None else torch.full_like(low, tolerance))


def _judged(low: Tensor, high: Tensor, limit: Tensor) -> Convexity:
    """What curvatures say where values within the limit count as zero."""
    up, down = (low >= -limit).view(-1).tolist(), (high <= limit).view(-1).tolist()
    names = {(True, True): "flat", (True, False): "convex", (False, True): "concave", (False, False): "neither"}
    return Convexity(tuple(names[pair] for pair in zip(up, down, strict=True)), low, high, limit)


class _Hessian:
    """Products of the Hessian at each point with vectors of the points' shape, float64 out."""

    def __init__(self, function: Function, point: Tensor):
        self.point, self.slope = self._slope(function, point)
        if not self.slope.requires_grad:  # a linear function, or a gradient that autograd takes for a constant
            moved = self._slope(function, 1.01 * point + 0.01)[1]
            if not torch.allclose(moved, self.slope, rtol=1e-4):
                raise ConfigError(
                    "the function must be twice differentiable, got one whose gradient autograd cannot differentiate"
                )

    @staticmethod
    def _slope(function: Function, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().clone().requires_grad_()
        with torch.enable_grad():
            values = function(point)
            if values.numel() != point.shape[:-1].numel():
                raise ShapeError(
                    f"the function must map {tuple(point.shape)} to one number for each point, "
                    f"got {tuple(values.shape)}"
                )
            return point, _derivative(values.sum(), point, create_graph=True)

    def __call__(self, vectors: Tensor) -> Tensor:
        return _derivative(self.slope, self.point, vectors.to(self.point), retain_graph=True).detach().double()


def _derivative(values: Tensor, point: Tensor, weights: Tensor | None = None, **options: bool) -> Tensor:
    """Zero where the values do not depend on the point."""
    if not values.requires_grad:
        return torch.zeros_like(point)
    return torch.autograd.grad(values, point, weights, allow_unused=True, materialize_grads=True, **options)[0]


def _rounding(point: Tensor) -> float:
    """The relative error of a product."""
    return 8 * torch.finfo(point.dtype).eps


def _dense(function: Function, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest and the highest eigenvalue at each point, and an error of both."""
    hessian, size = _Hessian(function, point), point.shape[-1]
    units = torch.eye(size, dtype=point.dtype, device=point.device)
    matrix = torch.stack([hessian(unit.expand_as(point)) for unit in units], dim=-1)
    skew = 0.5 * (matrix - matrix.mT)
    values = torch.linalg.eigvalsh(matrix - skew)
    # By Weyl's inequality no eigenvalue moves by more than the norm of what was taken off.
    error = _rounding(point) * values.abs().amax(-1) + skew.flatten(-2).norm(dim=-1)
    return values[..., 0], values[..., -1], error


def _lanczos(function: Function, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a single point, (D,) or (1, D), by products alone."""
    hessian, size, rounding = _Hessian(function, point), point.shape[-1], _rounding(point)
    if not point.numel():
        empty = torch.zeros(point.shape[:-1], dtype=torch.float64, device=point.device)
        return empty, empty, empty
    draw = torch.Generator().manual_seed(0)  # on the host, so that every device starts alike
    vector = torch.randn(size, generator=draw, dtype=torch.float64).to(point.device)
    steps = min(size, _STEPS)
    basis, table, values, error = vector.new_zeros(steps, size), vector.new_zeros(steps, steps), vector, vector
    for step in range(steps):
        basis[step] = vector = vector / vector.norm()
        image = hessian(vector.view_as(point)).view(size)
        table[step, step] = image @ vector
        vector = orthogonal(image[None], basis[None, : step + 1])[0]
        beyond = vector.norm()
        values, vectors = torch.linalg.eigh(table[: step + 1, : step + 1])
        scale = values.abs().amax()
        error = beyond * vectors[-1, [0, -1]].abs().amax() + rounding * scale
        if step + 1 == steps or beyond <= rounding * scale or error <= _SMALL * scale:
            break
        table[step, step + 1] = table[step + 1, step] = beyond
    shape = point.shape[:-1]
    return values[0].view(shape), values[-1].view(shape), error.view(shape)


class Split(Protocol):
    """An energy as a sum of a convex and a concave part, each mapping (B, D) to (B,); a Hopfield memory is one."""

    def convex(self, q: Tensor) -> Tensor:
        """The convex part."""
        ...

    def concave(self, q: Tensor) -> Tensor:
        """The concave part."""
        ...


@dataclass(frozen=True)
class ConvexConcave:
    """Whether both parts of a convex-concave energy bend as they should; printed, it is a table.

    >>> class Cap:
    ...     def convex(self, q): return q.square().sum(-1)
    ...     def concave(self, q): return -torch.logsumexp(q, -1)
    >>> print(convex_concave_report(Cap(), torch.zeros(2)))
    part         should be  is        lowest     highest    tolerance
    E1 convex    convex     convex    2          2          0.0002
    -E2 convex   convex     convex    0          0.5        0.0002
    E1 + E2                 convex    1.5        2          0.0002
    """

    convex: Convexity
    negated_concave: Convexity
    energy: Convexity

    @property
    def holds(self) -> bool:
        """Whether E1 and -E2 are convex at every point."""
        return all(part.kind in ("convex", "flat") for part in (self.convex, self.negated_concave))

    def __str__(self) -> str:
        """A table of four lines."""
        lines = [f"{'part':<13}{'should be':<11}{'is':<10}{'lowest':<11}{'highest':<11}tolerance"]
        parts = (("E1 convex", "convex", self.convex), ("-E2 convex", "convex", self.negated_concave))
        for name, wanted, part in (*parts, ("E1 + E2", "", self.energy)):
            if not part.lowest.numel():
                return "no points"
            low, high = float(part.lowest.amin()), float(part.highest.amax())
            limit = float(part.tolerance.amax())
            lines.append(f"{name:<13}{wanted:<11}{part.kind:<10}{low:<11.4g}{high:<11.4g}{limit:.1g}")
        return "\n".join(lines)


def convex_concave_report(energy: Split, point: Tensor, **options: Any) -> ConvexConcave:
    """The convexity of E1 and of -E2 at a point, for an energy E = E1 + E2 that says which is which; and of E.

    That E1 is convex and E2 concave is what makes the convex-concave procedure descend (Yuille and Rangarajan 2003).
    ``energy`` is any object with ``convex(q)`` and ``concave(q)``; ``options`` as in :func:`convexity`. The tolerance
    is the largest of the three: where one part has gone flat its curvature is rounding on the scale of the other.

    >>> class Tilted:
    ...     def convex(self, q): return -q.square().sum(-1)
    ...     def concave(self, q): return q.sum(-1)
    >>> report = convex_concave_report(Tilted(), torch.zeros(1, 2))
    >>> report.holds, report.convex.kind, report.negated_concave.kind
    (False, 'concave', 'flat')
    """
    parts = [
        convexity(energy.convex, point, **options),
        convexity(lambda q: -energy.concave(q), point, **options),
        convexity(lambda q: energy.convex(q) + energy.concave(q), point, **options),
    ]
    limit = torch.stack([part.tolerance for part in parts]).amax(0)
    return ConvexConcave(*(_judged(part.lowest, part.highest, limit) for part in parts))
