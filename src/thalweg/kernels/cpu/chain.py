"""Linear chains on the CPU: the kernels of this folder behind the names that every backend has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.kernels.cpu import chain_decode, chain_log, chain_scaled
from thalweg.kernels.cpu.chain_scaled import SAFE_OVERLAP, Scaled
from thalweg.kernels.cpu.simd import padded
from thalweg.kernels.cpu.threads import parts, run
from thalweg.kernels.potentials import Chain

__all__ = ["backward", "edge_marginals", "expectation", "forward", "sample", "top_k", "viterbi"]

_NO_GOLD = np.zeros((0, 0), np.int64)


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass; no ``scaled`` where all is done in the log domain."""

    scaled: Scaled | None
    alpha: np.ndarray  # (B, rows, P)
    log_z: np.ndarray  # (B,), NaN for items of the log domain
    every: int  # positions between the kept rows


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
    rows = -(-steps // every) if keep or scaled.risky else 0
    alpha = np.empty((batch, rows, a.width), dtype)
    log_z = np.empty(batch)
    scratch = np.zeros((len(a.ranges), 4, a.width), dtype)
    run(
        chain_scaled.forward,
        a.ranges,
        *(a.emissions, scaled.power, scaled.top, a.start, a.end, a.lengths, every, alpha, log_z, scratch),
    )
    if scaled.risky:
        least = SAFE_OVERLAP[dtype.char]
        run(
            chain_scaled.verify,
            a.ranges,
            a.emissions,
            scaled.transposed,
            a.end,
            a.lengths,
            least,
            alpha,
            log_z,
            scratch,
        )
    return Saved(scaled, alpha, log_z, every)


def _unfiltered(a: _Arrays) -> Saved:
    return Saved(None, np.empty((0, 0, a.width), a.emissions.dtype), np.full(len(a.emissions), np.nan), 1)


def forward(
    chain: Chain, gold: Tensor | None = None, *, keep: bool = True, low_memory: bool = False
) -> tuple[Tensor, Saved | None]:
    """log Z, less score(gold) where gold (B, T) is given; (B,), and what :func:`backward` needs.

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> forward(chain)[0].exp()
    tensor([8.])
    """
    a = _arrays(chain)
    saved = _unfiltered(a) if _by_step(chain) else _filter(a, keep, low_memory)
    log_z = saved.log_z
    chosen = np.isnan(log_z)
    if chosen.any():
        log_z = log_z.copy()
        rows, matrix = a.log_scratch(2, 1)
        run(
            chain_log.partition,
            a.ranges,
            *(a.emissions, a.transitions, a.start, a.end, a.lengths, chosen, log_z, rows, matrix[:, 0]),
        )
    if gold is not None:
        scores = np.empty(len(log_z))
        chain_scaled.path_scores(*a[:5], gold.numpy(), scores)
        log_z = np.subtract(log_z, scores, out=np.full_like(log_z, -np.inf), where=log_z > -np.inf)
    values = torch.from_numpy(log_z.astype(a.emissions.dtype, copy=False))
    return values, saved if keep else None


def backward(
    chain: Chain, saved: Saved, weights: Tensor, gold: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of sum_b weights[b] value[b] in emissions, transitions, start and end.

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> backward(chain, forward(chain)[1], torch.ones(1))[0]
    tensor([[[0.5000, 0.5000]]])
    """
    a = _arrays(chain)
    shared = chain.transitions.dim() == 2  # type: ignore[union-attr]
    d_emissions = np.empty_like(a.emissions)
    shape = (len(a.ranges), 1, *a.transitions.shape[2:]) if shared else a.transitions.shape
    d_moves = np.zeros(shape, np.float64 if shared else a.transitions.dtype)
    _posteriors(a, saved, weights.numpy(), d_emissions, d_moves)
    if gold is not None:
        run(chain_scaled.take_gold, a.ranges, gold.numpy(), a.lengths, weights.numpy(), d_emissions, d_moves, shared)
    d_start = d_emissions[:, 0].sum(0)
    d_end = d_emissions[np.arange(len(a.lengths)), a.lengths - 1].sum(0)
    total = d_moves.sum(0) if shared else d_moves
    d_transitions = np.ascontiguousarray(total.astype(a.transitions.dtype, copy=False)).reshape(chain.transitions.shape)  # type: ignore[union-attr]
    return tuple(torch.from_numpy(x) for x in (d_emissions, d_transitions, d_start, d_end))  # type: ignore[return-value]


def _posteriors(a: _Arrays, saved: Saved, weights: np.ndarray, d_emissions: np.ndarray, d_moves: np.ndarray) -> None:
    """Weighted posteriors of labels and moves by whichever domain each item needs."""
    chosen = np.isnan(saved.log_z)
    if saved.scaled is not None and not chosen.all():
        count, width, dtype = len(a.ranges), a.width, a.emissions.dtype
        scratch = np.zeros((count, 12 + width, width), dtype)
        rows = np.zeros((count, saved.every if saved.every > 1 else 0, width), dtype)
        run(
            chain_scaled.gradient,
            a.ranges,
            *(a.emissions, saved.scaled.power, saved.scaled.transposed, a.end, a.lengths, saved.every, saved.alpha),
            *(saved.log_z, weights, d_emissions, d_moves[:, 0], scratch, rows),
        )
    if chosen.any():
        rows, matrix = a.log_scratch(4, 2)
        run(
            chain_log.gradient,
            a.ranges,
            *(
                a.emissions,
                a.transitions,
                a.start,
                a.end,
                a.lengths,
                chosen,
                weights,
                d_emissions,
                d_moves,
                rows,
                matrix,
            ),
        )


def edge_marginals(chain: Chain) -> Tensor:
    """p(y_t = i, y_t+1 = j), (B, T-1, C, C).

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> edge_marginals(chain).sum()
    tensor(1.)
    """
    a = _arrays(chain)
    batch, steps, size = a.emissions.shape
    out = np.zeros((batch, steps - 1, size, size), a.emissions.dtype)
    rows, matrix = a.log_scratch(4, 2)
    ones = np.ones(batch, a.emissions.dtype)
    if steps > 1:
        run(
            chain_log.gradient,
            a.ranges,
            *(a.emissions, a.transitions, a.start, a.end, a.lengths, np.ones(batch, np.bool_), ones),
            *(np.empty_like(a.emissions), out, rows, matrix),
        )
    return torch.from_numpy(out)


def expectation(chain: Chain, saved: Saved, other: Chain) -> Tensor:
    """E_{y ~ chain}[score_other(y)], (B,).

    >>> import torch
    >>> chain = Chain(torch.zeros(1, 2, 2), torch.ones(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> expectation(chain, forward(chain)[1], chain)
    tensor([1.])
    """
    a, q = _arrays(chain), _arrays(other)
    values = np.empty(len(a.emissions))
    rows, matrix = a.log_scratch(4, 2)
    run(
        chain_log.expectation,
        a.ranges,
        *(a.emissions, a.transitions, a.start, a.end, a.lengths),
        *(q.emissions, q.transitions, q.start, q.end, values, rows, matrix),
    )
    return torch.from_numpy(values.astype(a.emissions.dtype, copy=False))


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The highest score (B,) and its labelling (B, T), -1 past the length.

    >>> import torch
    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> viterbi(chain)
    (tensor([2.]), tensor([[0, 1]]))
    """
    a = _arrays(chain)
    batch, steps, _ = a.emissions.shape
    dtype = a.emissions.dtype
    if _by_step(chain):
        flipped = np.empty((0, *a.transitions.shape[2:]), dtype)
    else:
        flipped = np.ascontiguousarray(a.transitions[:, 0].transpose(0, 2, 1))
    scores, labels = np.empty(batch, dtype), np.empty((batch, steps), np.int64)
    delta = np.full((len(a.ranges), steps + 1, a.width), -np.inf, dtype)
    matrix = np.full((len(a.ranges), a.width, a.width), -np.inf, dtype)
    run(chain_decode.best, a.ranges, *a[:5], flipped, scores, labels, delta, matrix)
    return torch.from_numpy(scores), torch.from_numpy(labels)


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
    scores = np.full((batch, k), -np.inf, a.emissions.dtype)
    labels = np.full((batch, k, steps), -1, np.int64)
    lists = np.empty((len(a.ranges), 2, size, most))
    back = np.zeros((len(a.ranges), steps + 1, size, most, 2), np.int32)
    run(chain_decode.k_best, a.ranges, *a[:5], scores[:, :most], labels[:, :most], lists, back)
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
    numbers = uniforms.numpy()
    labels = np.empty(numbers.shape, np.int64)
    weights = np.zeros((len(a.ranges), a.width))
    if saved.scaled is not None:
        run(
            chain_decode.sample_scaled,
            a.ranges,
            *(saved.scaled.transposed, a.end, a.lengths, saved.alpha, saved.log_z, numbers, labels, weights),
        )
    chosen = np.isnan(saved.log_z)
    if chosen.any():
        rows, matrix = a.log_scratch(1, 1)
        run(chain_decode.sample_log, a.ranges, *a[:5], chosen, numbers, labels, rows, matrix[:, 0], weights)
    return torch.from_numpy(labels)
