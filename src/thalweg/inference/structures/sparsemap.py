"""SparseMAP: the marginals of a chain under a quadratic regulariser, exact and sparse in whole labellings."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.chain_inputs import nan_items
from thalweg.kernels import chain as ops
from thalweg.kernels.potentials import Chain

_EPS = torch.finfo(torch.float64).eps
# Squared distances of a labelling to the affine hull of others are rational with small denominators: less is zero.
_DEPENDENT = 1e-9
# Probabilities and, in units of the scores, differences that count as nothing when labellings that tie are looked for.
_ABSENT = 1e-9
# So many labellings may come in without halving the gap before it counts as the floor that rounding sets.
_PATIENCE = 12
# A relative residual above this says that the updated inverse has drifted.
_DRIFT = 1e-5
# After so many labellings the inverse, which has been updated step by step, is computed anew.
_REFRESH = 64


class SparseMode(NamedTuple):
    r"""A few labellings of each chain and how they are mixed; what :func:`sparse_map` gives.

    With :math:`M` the one-hot vectors of the K labellings as columns, ``marginals`` are :math:`M w`. They are unique;
    the labellings and their weights need not be (several mixtures may have the same marginals and the same score).
    ``marginals``, ``weights`` and ``value`` are differentiable in the scores; the gradient of ``value`` are the
    expected parts (in the emissions: the marginals), and its second derivative is that of the marginals.

    ``gap`` is the largest amount by which any labelling would improve the linearised objective: ``value`` lies at most
    ``gap`` below the maximum, and the marginals at most sqrt(2 gap) from the true ones.

    >>> found = sparse_map(LinearChain(torch.tensor([[[0.5, 0.0, -3.0]]]), torch.zeros(3, 3)))
    >>> found.marginals, found.weights
    (tensor([[[0.7500, 0.2500, 0.0000]]]), tensor([[0.7500, 0.2500]]))
    >>> found.structures
    tensor([[[0],
             [1]]])
    """

    marginals: Tensor  # (B, T, C), zero past each length
    structures: Tensor  # (B, K, T) int64, heaviest first; -1 past the length and where an item has fewer than K
    weights: Tensor  # (B, K), falling, sum 1; 0 where an item has fewer than K
    value: Tensor  # (B,)
    gap: Tensor  # (B,) >= 0


def sparse_map(chain: LinearChain, *, tol: float | None = None, max_steps: int | None = None) -> SparseMode:
    r"""The maximiser over the marginal polytope of a chain of a score with a quadratic regulariser.

    .. math:: \max_{\mu \in \mathcal{M}} \langle \theta, \mu \rangle - \tfrac12 \|\mu_{unary}\|^2

    where :math:`\theta` are all scores of the chain, :math:`\mu` holds the probability of each label at each position
    (unary, regularised) and of each move (not regularised). Without moves it is sparsemax of each position; with them
    it lies between the mode (scores times infinity) and a mixture of few labellings, at most T (C - 1) + 1.

    An active-set method (Niculae et al. 2018, as Wolfe's of 1976 for the point of least norm): the weights of the
    labellings kept solve a linear system; the chain's Viterbi names the labelling that gains most; it comes in, and
    whatever its weight pushes to zero goes out. It ends after finitely many steps with the exact solution, when no
    labelling gains more than rounding. The Gram matrix of labellings counts the positions where they agree; its
    inverse is updated, O(K^2 + K T) for each step beside one Viterbi pass, O(T C^2). All items step together, and those
    that are done drop out. Computed in float64 whatever the type of the scores.

    On a fixed set of labellings the solution is affine in the scores, which gives the exact gradient, in emissions,
    transitions, start and end; where the set changes, the function has a kink and the gradient is that of one side.

    Args:
        chain: B chains; -inf forbids, lengths and transitions of every kind as there. An item without any labelling is
            an InfeasibleError; a chain that checks nothing gives value -inf and zeros for it.
        tol: stop when the gap is at most this; by default what rounding of the scores amounts to.
        max_steps: stop after this many Viterbi passes with the gap reached; by default far more than ever seen.

    >>> chain = LinearChain(torch.tensor([[[0.2, 0.0], [0.0, 0.4]]]), torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    >>> sparse_map(chain).marginals
    tensor([[[0.4500, 0.5500],
             [0.4500, 0.5500]]])
    """
    if not isinstance(chain, LinearChain):
        raise ShapeError(f"`chain` must be a LinearChain, got {type(chain).__name__}")
    if tol is not None and not tol >= 0:
        raise ConfigError(f"`tol` must be at least 0, got {tol}")
    if max_steps is not None and max_steps < 1:
        raise ConfigError(f"`max_steps` must be at least 1, got {max_steps}")
    chain._require_feasible()  # here, where items have their own numbers
    double = ops.with_inputs(chain.potentials, [x.double() for x in ops.inputs_of(chain.potentials)])
    wanted = ops.carries_graph(double)
    diverged = nan_items(double)
    with torch.no_grad():
        given = ops.with_inputs(double, [x.nan_to_num(nan=0.0, neginf=-math.inf) for x in ops.inputs_of(double)])
        solver = _Solver(_shifted(given), chain.backend, tol)
        solver.run(max_steps if max_steps is not None else 1000 + 20 * double.steps * double.size)
        if wanted:
            solver.complete()
        labels, weights, jacobian = solver.answer()
    result = _expanded(double, labels, weights, jacobian, solver.gap)
    dtype = chain.potentials.emissions.dtype

    def shown(x: Tensor) -> Tensor:
        lost = diverged.view(-1, *[1] * (x.dim() - 1))  # an item with a score of NaN has no solution
        return torch.where(lost, math.nan, x).to(dtype) if x.is_floating_point() else x

    return SparseMode(*map(shown, result))


def sparse_map_loss(chain: LinearChain, gold: Tensor) -> Tensor:
    r"""The Fenchel-Young loss of SparseMAP, (B,), for gold labels (B, T); labels past a length are ignored.

    .. math:: \ell(\theta, y) = \max_{\mu \in \mathcal{M}} \big(\langle \theta, \mu \rangle
        - \tfrac12 \|\mu_{unary}\|^2\big) + \tfrac12 \|y_{unary}\|^2 - \text{score}(y) \ge 0

    Convex in the scores, and zero exactly where the solution is y alone: where y beats every other labelling by the
    number of positions at which they differ. The gradient is the expected parts less the parts of y. +inf for labels
    that the chain forbids. Blondel, Martins and Niculae (2020).

    >>> chain = LinearChain(torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), torch.zeros(2, 2))
    >>> sparse_map_loss(chain, torch.tensor([[0], [1]]))
    tensor([0.0000, 0.2500])
    """
    gold = chain._labels(gold)
    if gold.dim() != 2:
        raise ShapeError(f"`gold` must be (B, T), got {tuple(gold.shape)}")
    # The value and the score are large and nearly equal: their difference needs the digits.
    double = chain._like(ops.with_inputs(chain.potentials, [x.double() for x in ops.inputs_of(chain.potentials)]))
    loss = sparse_map(double).value + 0.5 * double.potentials.lengths - ops.score(double.potentials, gold)
    loss = loss - loss.detach().clamp(max=0)  # rounding may go below zero; the gradient stays
    return loss.to(chain.potentials.emissions.dtype)


def _expanded(chain: Chain, labels: Tensor, weights: Tensor, jacobian: Tensor, gap: Tensor) -> SparseMode:
    """The solution as a function of the scores: its Taylor series, which on a fixed set of labellings is exact."""
    absent = (labels[:, :, :1] < 0).expand_as(labels)
    tidy = torch.where(absent, labels[:, :1], labels)  # an empty slot may hold any feasible labelling
    scores = _scores(chain, tidy)
    possible = ~torch.isneginf(scores.detach())
    scores = torch.where(possible, scores, 0.0)
    change = scores - scores.detach()  # (B, K), zero: it carries the gradient alone
    moved = (jacobian @ change.unsqueeze(-1)).squeeze(-1)
    mixed = weights + moved
    marginals = _mixture(tidy, mixed, chain.size)
    norms = _mixture(tidy, weights, chain.size).square().sum((1, 2))
    value = (weights * scores).sum(1) - 0.5 * norms + 0.5 * (change * moved).sum(1)
    value = torch.where(weights[:, 0] > 0, value, -torch.inf)
    # Labellings without weight served the gradient.
    heavy = weights > 0
    count = max(1, int(heavy.sum(1).max())) if len(heavy) else 1
    structures = labels.masked_fill(~heavy.unsqueeze(-1), -1)[:, :count]
    return SparseMode(marginals, structures, mixed[:, :count], value, gap)


def _scores(chain: Chain, labels: Tensor) -> Tensor:
    """The scores (B, K) of labellings (B, K, T); memory O(B K T) for the gradient too."""
    inside = labels >= 0
    tidy = labels.clamp(min=0)
    bare = chain._replace(emissions=torch.zeros_like(chain.emissions.detach()))
    moved = ops.score(bare, tidy.transpose(0, 1)).transpose(0, 1)
    emissions = torch.where(inside[:, 0].unsqueeze(-1), chain.emissions, 0.0)  # padding may be NaN
    emitted = emissions.gather(2, tidy.transpose(1, 2))  # (B, T, K)
    return emitted.sum(1) + moved


def _mixture(labels: Tensor, weights: Tensor, size: int) -> Tensor:
    """The weighted sum (B, T, C) of one-hot labellings (B, K, T); zero past the length."""
    inside = (labels[:, 0] >= 0).unsqueeze(-1)
    places = labels.clamp(min=0).transpose(1, 2)  # (B, T, K)
    share = weights.unsqueeze(1) * inside
    return torch.zeros(*places.shape[:2], size, dtype=weights.dtype, device=weights.device).scatter_add(
        2, places, share
    )


def _shifted(chain: Chain) -> Chain:
    """The detached chain with the largest emission of each position taken off: the same solution, smaller numbers."""
    plain = ops.with_inputs(chain, [x.detach() for x in ops.inputs_of(chain)])
    inside = torch.arange(plain.steps, device=plain.lengths.device) < plain.lengths.unsqueeze(1)
    emissions = torch.where(inside.unsqueeze(-1), plain.emissions, 0.0)
    top = emissions.amax(2, keepdim=True)
    return plain._replace(emissions=emissions - torch.where(torch.isfinite(top), top, 0.0))


def _rows(chain: Chain, rows: Tensor) -> Chain:
    """Some items of a batch."""
    moves = chain.transitions
    moves = moves[rows] if isinstance(moves, Tensor) and moves.dim() > 2 else moves
    return chain._replace(emissions=chain.emissions[rows], transitions=moves, lengths=chain.lengths[rows])


class _Solver:
    r"""The labellings kept for each item, in slots, with their bordered Gram matrix and its inverse.

    The weights w and the multiplier :math:`\tau` of their sum solve :math:`1'w = 1, \; G w + \tau 1 = s`. The matrix of
    that system (B, K+1, K+1), border first, and its inverse have zeros at slots that are not in use. The matrix holds
    small integers and is exact; the inverse is updated and drifts, so what it gives is corrected by residuals.
    """

    def __init__(self, chain: Chain, backend: str, tol: float | None):
        self.chain, self.backend, self.tol = chain, backend, tol
        self.sizes = chain.lengths.double()
        self.magnitudes = ops.with_inputs(chain, [x.abs() for x in ops.inputs_of(chain)])
        scores, labels = ops.viterbi(chain, backend=backend)
        batch, slots = len(scores), 4
        self.labels = labels.unsqueeze(1).repeat(1, slots, 1)
        self.scores = scores.unsqueeze(1).repeat(1, slots)
        self.used = torch.zeros(batch, slots, dtype=torch.bool, device=scores.device)
        self.weights = scores.new_zeros(batch, slots)
        self.matrix = scores.new_zeros(batch, slots + 1, slots + 1)
        self.inverse = torch.zeros_like(self.matrix)
        self.gap = torch.zeros_like(scores)
        self.feasible = scores > -torch.inf
        rows = torch.arange(batch, device=scores.device)
        self._restart(rows, torch.zeros_like(rows))
        self.lowest, self.since = torch.full_like(scores, torch.inf), torch.zeros_like(rows)
        self.stale = torch.zeros_like(rows, dtype=torch.bool)

    def run(self, max_steps: int) -> None:
        """Until no labelling gains more than rounding, by an inverse that is fresh."""
        rows = torch.arange(len(self.sizes), device=self.sizes.device)
        for step in range(1, max_steps + 1):
            if not len(rows):
                return
            labels, scores, gap, done = self._best(rows)
            self.gap[rows] = gap
            # What ends with an updated inverse is looked at once more with a fresh one.
            again = self.stale[rows] & (done | (step % _REFRESH == 0))
            going = ~done & ~again
            self._enter(rows[going], labels[going], scores[going], gap[going])
            self._refresh(rows[again])
            rows = rows[going | again]

    def _best(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The labelling that gains most, its score, its gain, and whether the item is done."""
        own = _rows(self.chain, rows)
        kept = self.labels[rows]
        mean = _mixture(kept, self.weights[rows], own.size)
        best, labels = ops.viterbi(own._replace(emissions=own.emissions - mean), backend=self.backend)
        taken = mean.gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).sum(1)
        gap = best - (self.weights[rows] * self.scores[rows]).sum(1) + mean.square().sum((1, 2))
        known = ((kept == labels.unsqueeze(1)).all(2) & self.used[rows]).any(1)
        gap = torch.where(self.feasible[rows], gap.clamp(min=0), 0.0)
        return labels, best + taken, gap, known | (gap <= self._limit(rows, labels, gap).nan_to_num())

    def _limit(self, rows: Tensor, labels: Tensor, gap: Tensor) -> Tensor:
        """What gap is as good as none, (R,): a few roundings of the scores, or many where it falls no further."""
        if self.tol is not None:
            return torch.full_like(gap, self.tol)
        both = torch.stack((labels, self.labels[rows, 0]), 1)
        rounding = _EPS * (_scores(_rows(self.magnitudes, rows), both).sum(1) + self.sizes[rows])
        better = gap < 0.5 * self.lowest[rows]
        self.lowest[rows] = torch.where(better, gap, self.lowest[rows])
        self.since[rows] = torch.where(better, 0, self.since[rows] + 1)
        return rounding * torch.where(self.since[rows] > _PATIENCE, 8.0 + 4.0 * self.chain.steps, 8.0)

    def _enter(self, rows: Tensor, labels: Tensor, scores: Tensor, gap: Tensor) -> None:
        """Raise the weight of a new labelling for each row until it gains no more; what falls to zero goes out."""
        if len(rows) and bool(self.used[rows].all(1).any()):
            self._grow()
        self.stale[rows] = True
        column = self._column(rows, labels)
        held = torch.zeros_like(gap)
        while len(rows):
            inside, slot, gap, held = self._pivot(rows, column, gap, held)
            self.labels[rows[inside], slot[inside]] = labels[inside]
            self.scores[rows[inside], slot[inside]] = scores[inside]
            rest = ~inside
            rows, labels, scores, column, gap, held = (x[rest] for x in (rows, labels, scores, column, gap, held))

    def _column(self, rows: Tensor, labels: Tensor) -> Tensor:
        """A labelling's column of the matrix, (R, K+1): 1, and at how many positions it agrees with those in slots."""
        agree = (self.labels[rows] == labels.unsqueeze(1)) & (labels >= 0).unsqueeze(1)
        return torch.nn.functional.pad(agree.sum(2).double(), (1, 0), value=1.0)

    def _pivot(self, rows: Tensor, column: Tensor, gap: Tensor, held: Tensor):
        """One step: the new labelling comes in (true, and where), or one that was kept goes out and more is to do.

        The new labelling has weight ``held`` and gains ``gap`` by each further unit; those kept gain all the same.
        """
        used, weights, sizes = self.used[rows], self.weights[rows], self.sizes[rows]
        count = used.sum(1)
        column = column * torch.nn.functional.pad(used, (1, 0), value=True)
        shift = self._solve(rows, column)  # how those kept give way to a unit of the new
        distance = sizes - (column * shift).sum(1)  # squared, from their affine hull
        apart = (distance > _DEPENDENT * sizes) & (count <= sizes * (self.chain.size - 1))
        enough = torch.where(apart, gap / torch.where(apart, distance, 1.0), torch.inf)
        falling = used & (shift[:, 1:] > 1e-12)
        room, out = torch.where(falling, weights / torch.where(falling, shift[:, 1:], 1.0), torch.inf).min(1)
        comes = enough <= room
        by = torch.minimum(enough, room)
        held, gap = held + by, gap - torch.where(apart, by * distance, 0.0)
        weights = (weights - by.unsqueeze(1) * shift[:, 1:]).clamp(min=0)
        slot = torch.where(comes, used.logical_not().to(torch.int8).argmax(1), out)
        swaps = ~comes & (count == 1)  # the last one kept makes way altogether, and the new one takes its slot
        each = torch.arange(len(rows), device=rows.device)
        weights[each, slot] = torch.where(comes, held, 0.0)
        self.weights[rows] = weights
        self._add(rows[comes], slot[comes], column[comes], shift[comes], distance[comes])
        drops = ~comes & ~swaps
        self._drop(rows[drops], slot[drops])
        self._restart(rows[swaps], slot[swaps])
        return comes | swaps, slot, gap, held

    def _solve(self, rows: Tensor, right: Tensor) -> Tensor:
        """The bordered systems of some items for one right-hand side each, (R, K+1)."""
        matrix, inverse, right = self.matrix[rows], self.inverse[rows], right.unsqueeze(-1)
        found = inverse @ right
        residual = right - matrix @ found
        drifted = residual.abs().amax((1, 2)) > _DRIFT * right.abs().amax((1, 2))
        if bool(drifted.any()):
            self._invert(rows[drifted])
            inverse = self.inverse[rows]
            found = inverse @ right
            residual = right - matrix @ found
        found = found + inverse @ residual
        found = found + inverse @ (right - matrix @ found)
        return found.squeeze(-1)

    def _invert(self, rows: Tensor) -> None:
        """The inverse of some items computed anew."""
        free = torch.nn.functional.pad(self.used[rows].logical_not().double(), (1, 0)).diag_embed()
        inverse = torch.linalg.inv_ex(self.matrix[rows] + free).inverse - free
        self.inverse[rows] = 0.5 * (inverse + inverse.transpose(1, 2))

    def _add(self, rows: Tensor, slot: Tensor, column: Tensor, shift: Tensor, distance: Tensor) -> None:
        """A labelling comes in: one more row and column, and a matrix of rank one onto the inverse."""
        if not len(rows):
            return
        place = slot + 1
        self.used[rows, slot] = True
        self.matrix[rows, place] = column
        self.matrix[rows, :, place] = column
        self.matrix[rows, place, place] = self.sizes[rows]
        along = shift.scatter(1, place.unsqueeze(1), -1.0)
        self.inverse[rows] += (along / distance.unsqueeze(1)).unsqueeze(2) * along.unsqueeze(1)

    def _drop(self, rows: Tensor, slot: Tensor) -> None:
        """A labelling goes out: the opposite."""
        if not len(rows):
            return
        place = slot + 1
        unit = torch.zeros_like(self.inverse[rows, 0]).scatter(1, place.unsqueeze(1), 1.0)
        along = self._solve(rows, unit)
        pivot = along.gather(1, place.unsqueeze(1))
        self.inverse[rows] -= (along / pivot).unsqueeze(2) * along.unsqueeze(1)
        self.used[rows, slot] = False
        for table in (self.inverse, self.matrix):
            table[rows, place] = 0.0
            table[rows, :, place] = 0.0

    def _restart(self, rows: Tensor, slot: Tensor) -> None:
        """A single labelling, in a slot."""
        if not len(rows):
            return
        self.used[rows], self.weights[rows], self.matrix[rows], self.inverse[rows] = False, 0.0, 0.0, 0.0
        self.used[rows, slot], self.weights[rows, slot] = True, 1.0
        self.matrix[rows, slot + 1, slot + 1], self.inverse[rows, 0, 0] = self.sizes[rows], -self.sizes[rows]
        for table in (self.matrix, self.inverse):
            table[rows, 0, slot + 1] = 1.0
            table[rows, slot + 1, 0] = 1.0

    def _grow(self) -> None:
        """Twice the slots."""
        slots = self.used.shape[1]
        self.labels = torch.cat((self.labels, self.labels[:, :1].expand(-1, slots, -1)), 1)
        self.scores = torch.cat((self.scores, self.scores[:, :1].expand(-1, slots)), 1)
        self.used = torch.nn.functional.pad(self.used, (0, slots))
        self.weights = torch.nn.functional.pad(self.weights, (0, slots))
        self.matrix = torch.nn.functional.pad(self.matrix, (0, slots, 0, slots))
        self.inverse = torch.nn.functional.pad(self.inverse, (0, slots, 0, slots))

    def _refresh(self, rows: Tensor) -> None:
        """The inverse of some items computed anew, and their weights by it; what it finds negative goes out."""
        self.stale[rows] = False
        if len(rows):
            self._invert(rows)
        while len(rows):
            used, weights = self.used[rows], self.weights[rows]
            right = torch.nn.functional.pad(self.scores[rows] * used, (1, 0), value=1.0)
            wanted = self._solve(rows, right)[:, 1:]
            # A weight of exactly nothing goes out too: it is no part of the mixture.
            negative = used & (wanted <= 0)
            share = torch.where(negative, weights / torch.where(negative, weights - wanted, 1.0), 1.0)
            step, out = share.nan_to_num(0.0).min(1)
            self.weights[rows] = (weights + step.unsqueeze(1) * (wanted - weights)).clamp(min=0) * used
            blocked = negative.any(1)
            rows, out = rows[blocked], out[blocked]
            self.weights[rows, out] = 0.0
            self._drop(rows, out)

    def complete(self) -> None:
        """Bring in labellings of weight zero until those kept span all that tie: the gradient needs the whole face.

        A mixture of two labellings may have the marginals of a thousand that score the same; then the marginals move in
        more directions than those two span. A direction that is constant on those kept is added to the scores, too
        small to break anything but ties; a labelling that it prefers is not in their affine hull. Labels that have no
        weight in the mixture stay out: at a kink the gradient is that of the smaller set.
        """
        own = self.chain
        mean = _mixture(self.labels, self.weights, own.size)
        scores = torch.where(mean > _ABSENT, own.emissions - mean, -torch.inf)
        sizes = _scores(self.magnitudes, self.labels[:, :1]).squeeze(1) / self.sizes + 1  # of one term of a score
        draw = torch.Generator(device=mean.device).manual_seed(0)
        rows = self.feasible.nonzero().squeeze(1)
        while len(rows):
            normal = torch.randn(mean[rows].shape, generator=draw, dtype=mean.dtype, device=mean.device)
            along = self._orthogonal(rows, torch.where(mean[rows] > _ABSENT, normal, 0.0))
            top = along.abs().amax((1, 2), keepdim=True)
            along = along / top.clamp(min=1e-6) * (_ABSENT * sizes[rows]).view(-1, 1, 1)
            grown = torch.zeros_like(rows, dtype=torch.bool)
            for sign in (1, -1):
                tilted = _rows(own, rows)._replace(emissions=scores[rows] + sign * along)
                grown |= self._append(rows, ops.viterbi(tilted, backend=self.backend)[1])
            rows = rows[grown & (top.flatten() > 1e-6)]
        self._invert(self.feasible.nonzero().squeeze(1))

    def _orthogonal(self, rows: Tensor, along: Tensor) -> Tensor:
        """What of a direction (R, T, C) is constant on the labellings kept."""
        labels = self.labels[rows]
        inside = (labels[:, 0] >= 0).unsqueeze(-1)
        products = (along.gather(2, labels.clamp(min=0).transpose(1, 2)) * inside).sum(1) * self.used[rows]
        parts = self._solve(rows, torch.nn.functional.pad(products, (1, 0)))[:, 1:]
        return (along - _mixture(labels, parts, self.chain.size)) * inside

    def _append(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Bring in a labelling of weight zero where it is affinely independent of those kept; whether it was, (R,)."""
        if bool(self.used[rows].all(1).any()):
            self._grow()
        used, sizes = self.used[rows], self.sizes[rows]
        column = self._column(rows, labels) * torch.nn.functional.pad(used, (1, 0), value=True)
        shift = self._solve(rows, column)
        distance = sizes - (column * shift).sum(1)
        apart = (distance > 1e-6) & (used.sum(1) <= sizes * (self.chain.size - 1))
        slot = used.logical_not().to(torch.int8).argmax(1)
        self._add(rows[apart], slot[apart], column[apart], shift[apart], distance[apart])
        self.labels[rows[apart], slot[apart]] = labels[apart]
        return apart

    def answer(self) -> tuple[Tensor, Tensor, Tensor]:
        """Labellings (B, K, T), heaviest first, -1 where there is none; weights (B, K) and their derivative in the
        scores (B, K, K).
        """
        rank = torch.where(self.used, self.weights, -1.0)
        rank, order = rank.sort(dim=1, descending=True, stable=True)
        filled = rank >= 0
        slots = max(1, int(filled.sum(1).max())) if len(rank) else 1
        rank, order, filled = rank[:, :slots], order[:, :slots], filled[:, :slots]
        labels = self.labels.gather(1, order.unsqueeze(-1).expand(-1, -1, self.labels.shape[2]))
        jacobian = self.inverse.gather(1, (order.unsqueeze(2) + 1).expand(-1, -1, self.inverse.shape[2]))
        jacobian = jacobian.gather(2, (order.unsqueeze(1) + 1).expand(-1, slots, -1))
        filled &= self.feasible.unsqueeze(1)
        jacobian = torch.where(filled.unsqueeze(1) & filled.unsqueeze(2), jacobian, 0.0)
        return labels.masked_fill(~filled.unsqueeze(-1), -1), torch.where(filled, rank, 0.0), jacobian
