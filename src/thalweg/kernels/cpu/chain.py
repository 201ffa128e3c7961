"""Linear chains on the CPU: the kernels of this folder behind the names that every backend has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.cpu import chain_decode, chain_groups, chain_log, chain_moments, chain_rows, chain_scaled
from thalweg.kernels.cpu.chain_groups import Gradients, Grouped, times
from thalweg.kernels.cpu.chain_scaled import FLOOR, GROUP, SAFE_GAP, SAFE_OVERLAP, Scaled, zeros
from thalweg.kernels.cpu.simd import padded
from thalweg.kernels.cpu.threads import parts
from thalweg.kernels.potentials import Chain

__all__ = ["at_once", "backward", "edge_marginals", "expectation", "forward", "sample", "times", "top_k", "viterbi"]

_NO_GOLD = np.zeros((0, 0), np.int64)
checks_labels = True  # forward raises for a gold label out of range


class _Arrays(NamedTuple):
    emissions: np.ndarray
    transitions: np.ndarray  # (1 or B, 1 or T-1, C, C)
    start: np.ndarray
    end: np.ndarray
    lengths: np.ndarray
    ranges: list[tuple[int, int]]

    @property
    def width(self) -> int:
        return padded(self.emissions.shape[2])

    def log_scratch(self, rows: int, matrices: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 room for each part: (parts, T + rows, P) and (parts, matrices, P, P)."""
        count, width = len(self.ranges), self.width
        return (
            np.zeros((count, self.emissions.shape[1] + rows, width)),
            np.zeros((count, matrices, width, width)),
        )


class Rowed:
    """What :func:`at_once` leaves where the items of a chain went side by side: that they did."""


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass; no ``scaled`` where all is done in the log domain."""

    arrays: _Arrays
    scaled: Scaled | None
    alpha: np.ndarray  # (B, rows, P)
    log_z: np.ndarray  # (B,), NaN for items of the log domain
    every: int  # positions between the kept rows


def _arrays(chain: Chain) -> _Arrays:
    transitions = chain.transitions
    assert isinstance(transitions, Tensor)
    matrices = transitions.numpy()
    if matrices.ndim < 4:
        matrices = matrices.reshape(-1, 1, *matrices.shape[-2:])
    lengths = chain.lengths.numpy()
    size = chain.size
    return _Arrays(
        chain.emissions.numpy(), matrices, chain.start.numpy(), chain.end.numpy(), lengths, parts(lengths, size * size)
    )


def _by_step(chain: Chain) -> bool:
    return isinstance(chain.transitions, Tensor) and chain.transitions.dim() == 4


def _filter(a: _Arrays, keep: bool, low_memory: bool) -> Saved:
    """The scaled forward pass, with NaN wherever it cannot be trusted."""
    batch, steps, _ = a.emissions.shape
    dtype = a.emissions.dtype
    scaled = Scaled(a.transitions[:, 0], a.end)
    every = math.isqrt(steps - 1) + 1 if low_memory and steps > 1 and not scaled.risky else 1
    rows = -(-steps // every) if keep else 0
    alpha = np.empty((batch, rows, a.width), dtype)
    log_z = np.empty(batch)
    scratch = zeros((len(a.ranges), 6, a.width), dtype)
    chain_scaled.forward.share(
        a.ranges,
        *(a.emissions, scaled.power, scaled.top, a.start, a.end, a.lengths, every, alpha, log_z, scratch),
    )
    if scaled.risky:
        kind = dtype.char
        floor, gap, overlap = a.emissions.shape[2] * FLOOR[kind], SAFE_GAP[kind], SAFE_OVERLAP[kind]
        ways = ((False, scaled.power, a.start, a.end), (True, scaled.transposed, a.end, a.start))
        for backwards, matrix, opening, closing in ways[: 2 if keep else 1]:
            chain_scaled.bracket.share(
                a.ranges,
                *(a.emissions, matrix, scaled.top, opening, closing, a.lengths, backwards),
                *(dtype.type(floor), gap, overlap, alpha, log_z, scratch),
            )
    return Saved(a, scaled, alpha, log_z, every)


def _unfiltered(a: _Arrays) -> Saved:
    return Saved(a, None, np.empty((0, 0, a.width), a.emissions.dtype), np.full(len(a.emissions), np.nan), 1)


def forward(
    chain: Chain, gold: Tensor | None = None, *, keep: bool = True, low_memory: bool = False
) -> tuple[Tensor, Saved | Grouped | None]:
    """log Z, less score(gold) where gold (B, T) is given; (B,), and what :func:`backward` needs.

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> forward(chain)[0].exp()
    tensor([8.])
    """
    if keep and not low_memory and chain_groups.fits(chain):
        found = chain_groups.forward(chain, gold)
        if found is not None:
            values, grouped = found
            if gold is not None and grouped.wrong >= 0:
                raise _wrong_label(gold.numpy(), grouped.wrong, chain.size)
            if grouped.lost:
                values = _complete(_arrays(chain), grouped.log_z.numpy(), gold)
            return values, grouped
    a = _arrays(chain)
    saved = _unfiltered(a) if _by_step(chain) else _filter(a, keep, low_memory)
    return _complete(a, saved.log_z, gold), saved if keep else None


def at_once(
    chain: Chain, gold: Tensor | None, total: bool, look: bool = False
) -> tuple[Tensor, Rowed | None, Gradients, bool] | None:
    """log Z, or score(gold) - log Z; what :func:`backward` needs; the gradient; whether all is finite, ``look`` or not.

    What lies between the passes never leaves the cache; a forward pass alone would take half as long. As
    :func:`thalweg.kernels.cpu.chain_groups.at_once` or that of ``chain_rows``, and None where that is.

    >>> import torch
    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 1, 2), torch.zeros(2, 2), none, none, torch.full((16,), 1))
    >>> at_once(chain, None, False)[2][1:]
    (tensor([[0., 0.],
            [0., 0.]]), tensor([8., 8.]), tensor([8., 8.]))
    """
    lanes = chain_groups.fits(chain)
    found = (chain_groups if lanes else chain_rows).at_once(chain, gold, total)
    return None if found is None else (found[0], None if lanes else Rowed(), *found[1:])


def _complete(a: _Arrays, log_z: np.ndarray, gold: Tensor | None) -> Tensor:
    """The values of :func:`forward`: what is NaN in ``log_z`` by the log domain, less the score of the gold labels."""
    chosen = np.isnan(log_z)
    if chosen.any():
        log_z = log_z.copy()
        rows, matrix = a.log_scratch(2, 1)
        chain_log.partition.share(a.ranges, *a[:5], chosen, log_z, rows, matrix[:, 0])
    if gold is not None:
        labels, scores = gold.numpy(), np.empty(len(log_z))
        wrong = chain_scaled.path_scores(*a[:5], labels, scores)
        if wrong >= 0:
            raise _wrong_label(labels, wrong, a.emissions.shape[2])
        log_z = np.subtract(log_z, scores, out=np.full_like(log_z, -np.inf), where=log_z > -np.inf)
    return torch.from_numpy(log_z.astype(a.emissions.dtype, copy=False))


def _again(chain: Chain, weights: Tensor, gold: Tensor | None) -> Gradients | None:
    """The gradient of :func:`at_once` once more, for any weights of log Z - score(gold), by the same steps."""
    alike = weights[:1].expand(len(weights))
    if not torch.equal(weights, alike):
        found = chain_rows.at_once(chain, gold, False, weights)
        return found and found[1]
    found = chain_rows.at_once(chain, gold, False)
    return found and times(found[1], alike, None)


def _wrong_label(labels: np.ndarray, place: int, size: int) -> ShapeError:
    item, position = divmod(place, labels.shape[1])
    return ShapeError(
        f"labels must lie in 0..{size - 1}, got {labels[item, position]} at position {position} of batch item {item}"
    )


def backward(chain: Chain, saved: Saved | Grouped | Rowed, weights: Tensor, gold: Tensor | None = None) -> Gradients:
    """The gradient of sum_b weights[b] value[b] in emissions, transitions, start and end.

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> backward(chain, forward(chain)[1], torch.ones(1))[0]
    tensor([[[0.5000, 0.5000]]])
    """
    if isinstance(saved, Rowed):
        found = _again(chain, weights, gold)
        return backward(chain, forward(chain, gold)[1], weights, gold) if found is None else found  # type: ignore[arg-type]
    if isinstance(saved, Grouped):
        return (
            _mended(chain, saved, weights, gold) if saved.lost else chain_groups.backward(chain, saved, weights, gold)
        )
    a = saved.arrays
    shared = chain.transitions.dim() == 2  # type: ignore[union-attr]
    dtype, count, size = a.emissions.dtype, len(a.ranges), chain.size
    factor = weights.numpy()
    d_emissions = np.empty_like(a.emissions)
    # Sums over the batch are taken in float64: many small terms into one large sum.
    d_moves = np.zeros((count, 1, size, size)) if shared else np.zeros(a.transitions.shape, dtype)
    d_start, d_end = np.zeros((2, size))
    _posteriors(a, saved, factor, d_emissions, d_moves)
    labels = _NO_GOLD if gold is None else gold.numpy()
    chain_scaled.finish(labels, a.lengths, factor, shared, d_emissions, d_moves, d_start, d_end)
    d_transitions = d_moves.sum((0, 1)).astype(dtype) if shared else d_moves
    return (
        torch.from_numpy(d_emissions),
        torch.from_numpy(d_transitions).view(chain.transitions.shape),  # type: ignore[union-attr]
        torch.from_numpy(d_start.astype(dtype)),
        torch.from_numpy(d_end.astype(dtype)),
    )


def _posteriors(a: _Arrays, saved: Saved, weights: np.ndarray, d_emissions: np.ndarray, d_moves: np.ndarray) -> None:
    """Weighted posteriors of labels and moves by whichever domain each item needs."""
    chosen = np.isnan(saved.log_z)
    if saved.scaled is not None and not chosen.all():
        count, width, dtype = len(a.ranges), a.width, a.emissions.dtype
        scratch = zeros((count, 2 + 2 * GROUP + width, width), dtype)
        power, transposed = saved.scaled.power, saved.scaled.transposed
        if saved.every == 1:
            chain_scaled.gradient.share(
                a.ranges,
                *(a.emissions, power, transposed, a.end, a.lengths, saved.alpha, saved.log_z),
                *(weights, d_emissions, d_moves[:, 0], scratch),
            )
        else:
            rows = np.zeros((count, saved.every + 2, width), dtype)
            chain_scaled.gradient_refilled.share(
                a.ranges,
                *(a.emissions, power, transposed, a.end, a.lengths, saved.every, saved.alpha, saved.log_z),
                *(weights, d_emissions, d_moves[:, 0], scratch, rows),
            )
    if chosen.any():
        rows, matrix = a.log_scratch(4, 2)
        chain_log.gradient.share(a.ranges, *a[:5], chosen, weights, d_emissions, d_moves, rows, matrix)


def _mended(chain: Chain, saved: Grouped, weights: Tensor, gold: Tensor | None) -> Gradients:
    """The gradient where the groups lost some items: those by the log domain, the others by groups."""
    a, lost = _arrays(chain), torch.isnan(saved.log_z)
    gradients = chain_groups.backward(chain, saved, weights.masked_fill(lost, 0.0), gold)
    d_emissions = gradients[0].numpy()
    chosen, factor = lost.numpy(), weights.numpy()
    d_moves = np.zeros((len(a.ranges), 1, chain.size, chain.size))
    d_start, d_end = np.zeros((2, chain.size))
    rows, matrix = a.log_scratch(4, 2)
    chain_log.gradient.share(a.ranges, *a[:5], chosen, factor, d_emissions, d_moves, rows, matrix)
    labels = np.zeros((int(chosen.sum()), 0), np.int64) if gold is None else gold.numpy()[chosen]
    own = d_emissions[chosen]
    chain_scaled.finish(labels, a.lengths[chosen], factor[chosen], True, own, d_moves, d_start, d_end)
    d_emissions[chosen] = own
    for total, more in zip(gradients[1:], (d_moves.sum((0, 1)), d_start, d_end), strict=True):
        total += torch.from_numpy(more).to(total.dtype)
    return gradients


def edge_marginals(chain: Chain) -> Tensor:
    """p(y_t = i, y_t+1 = j), (B, T-1, C, C).

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> edge_marginals(chain).sum()
    tensor(1.)
    """
    a = _arrays(chain)
    batch, steps, size = a.emissions.shape
    dtype = a.emissions.dtype
    out = np.zeros((batch, steps - 1, size, size), dtype)
    if steps == 1:
        return torch.from_numpy(out)
    saved = _unfiltered(a) if _by_step(chain) else _filter(a, True, False)
    chosen = np.isnan(saved.log_z)
    if saved.scaled is not None:
        scratch = np.zeros((len(a.ranges), 2, a.width), dtype)
        power, transposed = saved.scaled.power, saved.scaled.transposed
        chain_moments.edges.share(
            a.ranges,
            *(a.emissions, power, transposed, a.end, a.lengths, saved.alpha, saved.log_z, out, scratch),
        )
    if chosen.any():
        rows, matrix = a.log_scratch(4, 2)
        spare = np.empty_like(a.emissions)
        chain_log.gradient.share(a.ranges, *a[:5], chosen, np.ones(batch, dtype), spare, out, rows, matrix)
    return torch.from_numpy(out)


def expectation(chain: Chain, saved: Saved | None, other: Chain) -> Tensor:
    """E_{y ~ chain}[score_other(y)], (B,).

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 2, 2), torch.ones(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> expectation(chain, None, chain)
    tensor([1.])
    """
    a, q = _arrays(chain), _arrays(other)
    values = np.empty(len(a.emissions))
    filtered = _unfiltered(a)
    if not _by_step(chain) and not _by_step(other):
        filtered = _expected_scaled(a, q, values)
    chosen = np.isnan(filtered.log_z)
    if chosen.any():
        rows, matrix = a.log_scratch(4, 2)
        chain_log.expectation.share(
            a.ranges,
            *(*a[:5], chosen, q.emissions, q.transitions, q.start, q.end, values, rows, matrix),
        )
    return torch.from_numpy(values.astype(a.emissions.dtype, copy=False))


def _expected_scaled(a: _Arrays, q: _Arrays, values: np.ndarray) -> Saved:
    """Expected scores by the scaled domain, with NaN in ``log_z`` for the items it cannot serve."""
    saved = _filter(a, True, False)
    assert saved.scaled is not None
    size = a.emissions.shape[2]
    power = saved.scaled.power[:, :size, :size]
    moves = q.transitions[:, 0]
    if (np.isneginf(moves) & (power > 0)).any():  # 0 * -inf waits along some paths
        return _unfiltered(a)
    products = np.zeros((max(len(power), len(moves)), a.width, a.width), a.emissions.dtype)
    products[:, :size, :size] = np.multiply(power, moves, out=np.zeros_like(products[:, :size, :size]), where=power > 0)
    products = np.ascontiguousarray(products.transpose(0, 2, 1))
    scratch = np.zeros((len(a.ranges), 3, a.width), a.emissions.dtype)
    chain_moments.expectation.share(
        a.ranges,
        *(a.emissions, saved.scaled.transposed, a.end, a.lengths, saved.alpha, saved.log_z),
        *(q.emissions, products, q.start, q.end, values, scratch),
    )
    return saved


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The highest score (B,) and its labelling (B, T), -1 past the length.

    >>> import torch
    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> viterbi(chain)
    (tensor([2.]), tensor([[0, 1]]))
    """
    emissions, moves, start, end, lengths = chain
    assert isinstance(moves, Tensor)
    batch, steps, size = emissions.shape
    moves = moves if moves.dim() == 4 else moves.view(-1, 1, size, size)
    width, ranges = padded(size), parts(lengths.numpy(), size * size)
    scores, labels = emissions.new_empty(batch), torch.empty(batch, steps, dtype=torch.int64)
    room = emissions.new_empty(len(ranges), steps + 1 + 2 * width, width)
    chain_decode.best.share(ranges, emissions, moves, start, end, lengths, scores, labels, room)
    return scores, labels


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores (B, k) and labellings (B, k, T); missing ones -inf and -1.

    >>> import torch
    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> top_k(chain, 2)[0]
    tensor([[2., 1.]])
    """
    a = _arrays(chain)
    batch, steps, size = a.emissions.shape
    # No more than C^T labellings exist; lists longer than that would only be filled with nothing.
    most = k if steps * math.log(max(size, 1)) > math.log(k) else min(k, size**steps)
    scores, labels = np.empty((batch, most), a.emissions.dtype), np.empty((batch, most, steps), np.int64)
    lists = np.empty((len(a.ranges), 2, size, most))
    back = np.zeros((len(a.ranges), steps + 1, 2, size, most), np.int32)
    matrix = np.zeros((len(a.ranges), size + 1, size))
    chain_decode.k_best.share(a.ranges, *a[:5], scores, labels, lists, back, matrix)
    if most < k:
        scores = np.pad(scores, ((0, 0), (0, k - most)), constant_values=-np.inf)
        labels = np.pad(labels, ((0, 0), (0, k - most), (0, 0)), constant_values=-1)
    return torch.from_numpy(scores), torch.from_numpy(labels)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples (S, B, T) from uniform numbers of that shape.

    >>> import torch
    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> sample(chain, torch.zeros(1, 1, 2))
    tensor([[[0, 0]]])
    """
    a = _arrays(chain)
    saved: Any = _unfiltered(a) if _by_step(chain) else _filter(a, True, False)
    numbers = uniforms.contiguous().numpy()
    labels = np.empty(numbers.shape, np.int64)
    weights = np.zeros((len(a.ranges), a.width))
    if saved.scaled is not None:
        chain_decode.sample_scaled.share(
            a.ranges,
            *(saved.scaled.transposed, a.end, a.lengths, saved.alpha, saved.log_z, numbers, labels, weights),
        )
    chosen = np.isnan(saved.log_z)
    if chosen.any():
        rows, matrix = a.log_scratch(1, 1)
        chain_decode.sample_log.share(a.ranges, *a[:5], chosen, numbers, labels, rows, matrix[:, 0], weights)
    return torch.from_numpy(labels)
