"""Chains whose moves are a list of edges, on the CPU: O(T E) work, scaled as in ``chain_scaled``.

Missing edges make every such chain risky, so each item is verified; the rare one that fails, and the quantities that
are not asked for in a hurry, are computed by the reference in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thalweg.kernels.cpu.chain_decode import draw
from thalweg.kernels.cpu.chain_scaled import FLOOR, SAFE_GAP, SAFE_OVERLAP, first
from thalweg.kernels.cpu.simd import dot, exp_row, max_row, multiply_row, padded, raise_row, scale_row, write_product
from thalweg.kernels.cpu.threads import parts, run
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.reference import sparse_chain as reference
from thalweg.kernels.reference.sparse_chain import edge_marginals, top_k

__all__ = ["backward", "edge_marginals", "expectation", "forward", "sample", "top_k", "viterbi"]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


class _Edges(NamedTuple):
    """Edges grouped by target (``sources``, ``into``) and by source (``targets``, ``out_of``); exp(score - top)."""

    sources: np.ndarray  # (E,)
    into: np.ndarray  # (C + 1,): edges into[j]..into[j + 1] lead to j
    power: np.ndarray  # (E,)
    targets: np.ndarray  # (E,), by source
    out_of: np.ndarray  # (C + 1,)
    power_out: np.ndarray  # (E,)
    top: float

    @classmethod
    def of(cls, moves: SparseTransitions) -> _Edges:
        scores = moves.scores.numpy()
        sources, targets = moves.sources.numpy(), moves.targets.numpy()
        places = np.arange(moves.size + 1)
        order = np.argsort(sources, kind="stable")
        top = float(scores.max(initial=-np.inf))
        top = top if top > -np.inf else 0.0
        power = np.exp(scores - scores.dtype.type(top))
        return cls(
            *(sources, np.searchsorted(targets, places), power),
            *(targets[order], np.searchsorted(sources[order], places), power[order], top),
        )


class Saved(NamedTuple):
    """Forward weights (B, T, P) and log Z, NaN where the reference takes over."""

    edges: _Edges
    alpha: np.ndarray
    log_z: np.ndarray


@njit(**_options)
def _gather(values, indices, offsets, power, size, out):
    """``out[c]`` = sum of power * values over the edges of c."""
    for c in range(size):
        total = values.dtype.type(0)
        for k in range(offsets[c], offsets[c + 1]):
            total += power[k] * values[indices[k]]
        out[c] = total


@njit(**_options)
def _forward(emissions, sources, into, power, top, start, end, lengths, alpha, log_z, scratch, part, low, high):
    """As the dense kernel; ``alpha`` (B, T, P) is always kept, for the verification."""
    size = emissions.shape[2]
    after, weights, sums = scratch[part, 0], scratch[part, 1], scratch[part, 2]
    one = weights.dtype.type(1)
    for b in range(low, high):
        log_z[b] = np.nan
        total = np.float64(first(emissions, start, b, size, sums, weights))
        s = scale_row(weights, one, alpha[b, 0])
        if s > 0:
            total += math.log(s)
            scale_row(alpha[b, 0], one / s, alpha[b, 0])
        for t in range(1, lengths[b]):
            m = max_row(emissions[b, t], size)
            if not (m > -np.inf and s > 0):
                total = -np.inf
                break
            exp_row(emissions[b, t], size, m, weights)
            _gather(alpha[b, t - 1], sources, into, power, size, after)
            s = multiply_row(weights, after, one, weights)
            if s > 0:
                total += m + top + math.log(s)
                scale_row(weights, one / s, alpha[b, t])
        m = max_row(end, size)
        if total == -np.inf or m == -np.inf or not s > 0:
            continue
        exp_row(end, size, m, weights)
        s = dot(alpha[b, lengths[b] - 1], weights)
        if s > 0:
            log_z[b] = total + m + math.log(s)


@njit(**_options)
def _bracket(
    emissions, indices, offsets, power, top, opening, closing, lengths, backwards, floor, gap, overlap, alpha, log_z,
    scratch, part, low, high,
):  # fmt: skip
    """As the dense kernel of that name; the edges are those into each label forwards, those out of it backwards."""
    size = emissions.shape[2]
    raised, plain, after = scratch[part, 0], scratch[part, 1], scratch[part, 2]
    weights, sums, last = scratch[part, 3], scratch[part, 4], scratch[part, 5]
    one = weights.dtype.type(1)
    m_last = max_row(closing, size)
    exp_row(closing, size, m_last, last)
    for b in range(low, high):
        length = lengths[b]
        s = s_plain = one
        ratio = 1.0
        for k in range(length):
            if math.isnan(log_z[b]):
                break
            t = length - 1 - k if backwards else k
            if k == 0:
                for c in range(size):
                    sums[c] = emissions[b, t, c] + opening[c]
                exp_row(sums, size, max_row(sums, size), weights)
                s = scale_row(weights, one, raised)
                s_plain = scale_row(weights, one, plain)
            else:
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                _gather(raised, indices, offsets, power, size, after)
                s = multiply_row(weights, after, one, raised)
                _gather(plain, indices, offsets, power, size, after)
                if backwards and not dot(alpha[b, t], after) >= overlap * max_row(after, size):
                    log_z[b] = np.nan
                s_plain = multiply_row(weights, after, one, plain)
            ratio *= np.float64(s) / s_plain
            scale_row(raised, one / s, raised)
            scale_row(plain, one / s_plain, plain)
            ratio *= raise_row(raised, floor)
        if not math.log(ratio * (np.float64(dot(raised, last)) / dot(plain, last))) <= gap:
            log_z[b] = np.nan


@njit(**_options)
def _backward(
    emissions, sources, into, targets, out_of, power_out, end, lengths, alpha, log_z, weight, d_emissions, d_edges,
    scratch, part, low, high,
):  # fmt: skip
    """Gradients in emissions, and in edges, (parts, E), before the factor exp(score - top)."""
    size = emissions.shape[2]
    beta, weights = scratch[part, 0], scratch[part, 1]
    one = weights.dtype.type(1)
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        exp_row(end, size, max_row(end, size), beta)
        for t in range(lengths[b] - 1, -1, -1):
            here = alpha[b, t]
            overlap = dot(here, beta)
            factor = weight[b] / overlap
            write_product(here, beta, factor, size, d_emissions[b, t])
            if t < lengths[b] - 1:
                for c in range(size):
                    share = weights[c] * factor
                    if share != 0:
                        for k in range(into[c], into[c + 1]):
                            d_edges[part, k] += here[sources[k]] * share
            if t > 0:
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                multiply_row(weights, beta, one / overlap, weights)
                _gather(weights, targets, out_of, power_out, size, beta)
        for t in range(lengths[b], emissions.shape[1]):
            for c in range(size):
                d_emissions[b, t, c] = 0


@njit(**_options)
def _best(emissions, sources, into, scores, start, end, lengths, values, labels, delta, part, low, high):
    """Viterbi over edges; -1 past the length, the lowest label on ties."""
    size = emissions.shape[2]
    for b in range(low, high):
        length = lengths[b]
        rows = delta[part]
        for c in range(size):
            rows[0, c] = np.float64(emissions[b, 0, c]) + start[c]
        for t in range(1, length):
            for c in range(size):
                most = -np.inf
                for k in range(into[c], into[c + 1]):
                    most = max(most, rows[t - 1, sources[k]] + scores[k])
                rows[t, c] = most + emissions[b, t, c]
        label = 0
        values[b] = rows[length - 1, 0] + end[0]
        for c in range(1, size):
            if rows[length - 1, c] + end[c] > values[b]:
                values[b] = rows[length - 1, c] + end[c]
                label = c
        for t in range(length, labels.shape[1]):
            labels[b, t] = -1
        for t in range(length - 1, -1, -1):
            labels[b, t] = label
            if t > 0:
                most = -np.inf
                origin = 0
                for k in range(into[label], into[label + 1]):
                    if rows[t - 1, sources[k]] + scores[k] > most:
                        most = rows[t - 1, sources[k]] + scores[k]
                        origin = sources[k]
                label = origin


@njit(**_options)
def _sample(sources, into, power, end, lengths, alpha, log_z, uniforms, labels, weights, part, low, high):
    """Backward sampling over edges for the items whose ``log_z`` is not NaN."""
    size = len(end)
    top = max_row(end, size)
    spare = weights[part]
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        for s in range(len(uniforms)):
            for c in range(size):
                spare[c] = alpha[b, lengths[b] - 1, c] * math.exp(end[c] - top)
            label = draw(spare, size, uniforms[s, b, lengths[b] - 1])
            for t in range(lengths[b] - 1, -1, -1):
                labels[s, b, t] = label
                if t > 0:
                    begin, count = into[label], into[label + 1] - into[label]
                    for k in range(count):
                        spare[k] = alpha[b, t - 1, sources[begin + k]] * power[begin + k]
                    label = sources[begin + draw(spare, count, uniforms[s, b, t - 1])]
            for t in range(lengths[b], labels.shape[2]):
                labels[s, b, t] = -1


def _subset(chain: Chain, items: np.ndarray) -> Chain:
    """Some items of the batch in float64."""
    index = torch.from_numpy(items)
    moves = chain.transitions
    assert isinstance(moves, SparseTransitions)
    return Chain(
        chain.emissions[index].double(),
        moves._replace(scores=moves.scores.double()),
        *(chain.start.double(), chain.end.double(), chain.lengths[index]),
    )


def _filter(chain: Chain) -> tuple[Saved, list[tuple[int, int]]]:
    moves = chain.transitions
    assert isinstance(moves, SparseTransitions)
    emissions, start, end, lengths = (x.numpy() for x in (chain.emissions, chain.start, chain.end, chain.lengths))
    edges = _Edges.of(moves)
    batch, steps, size = emissions.shape
    ranges = parts(lengths, 4 * size + len(edges.sources))
    alpha = np.empty((batch, steps, padded(size)), emissions.dtype)
    alpha[:, :, size:] = 0
    log_z = np.empty(batch)
    kind = emissions.dtype.type
    scratch = np.zeros((len(ranges), 6, padded(size)), kind)
    run(_forward, ranges, emissions, *edges[:3], edges.top, start, end, lengths, alpha, log_z, scratch)
    char = emissions.dtype.char
    ways = ((False, *edges[:3], start, end), (True, *edges[3:6], end, start))
    for backwards, indices, offsets, power, opening, closing in ways:
        run(
            _bracket,
            ranges,
            *(emissions, indices, offsets, power, edges.top, opening, closing, lengths, backwards),
            *(kind(size * FLOOR[char]), SAFE_GAP[char], SAFE_OVERLAP[char], alpha, log_z, scratch),
        )
    return Saved(edges, alpha, log_z), ranges


def forward(
    chain: Chain, gold: Tensor | None = None, *, keep: bool = True, low_memory: bool = False
) -> tuple[Tensor, Saved | None]:
    """log Z, less score(gold) where gold (B, T) is given; (B,). ``low_memory`` changes nothing here.

    >>> moves = SparseTransitions.banded(torch.zeros(2, 2), lower=0)
    >>> forward(Chain(torch.zeros(1, 3, 2), moves, torch.zeros(2), torch.zeros(2), torch.tensor([3])))[0].exp()
    tensor([4.])
    """
    saved, _ = _filter(chain)
    log_z = saved.log_z
    chosen = np.flatnonzero(np.isnan(log_z))
    if len(chosen):
        log_z = log_z.copy()
        log_z[chosen] = reference.log_partition(_subset(chain, chosen)).numpy()
    values = torch.from_numpy(log_z)
    if gold is not None:
        scores = reference.score(_subset(chain, np.arange(len(log_z))), gold)
        values = torch.where(torch.isneginf(values), values, values - scores)
    return values.to(chain.emissions.dtype), saved if keep else None


def backward(
    chain: Chain, saved: Saved, weights: Tensor, gold: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of sum_b weights[b] value[b] in emissions, edge scores, start and end.

    >>> moves = SparseTransitions.banded(torch.zeros(2, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 3, 2), moves, torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> backward(chain, forward(chain)[1], torch.ones(1))[1]
    tensor([0.7500, 0.5000, 0.7500])
    """
    emissions, end, lengths = chain.emissions.numpy(), chain.end.numpy(), chain.lengths.numpy()
    edges, size = saved.edges, chain.size
    ranges = parts(lengths, 4 * size + len(edges.sources))
    d_emissions = np.zeros_like(emissions)
    d_edges = np.zeros((len(ranges), len(edges.sources)))
    scratch = np.zeros((len(ranges), 3, padded(size)), emissions.dtype)
    run(
        _backward,
        ranges,
        *(emissions, edges.sources, edges.into, edges.targets, edges.out_of, edges.power_out, end, lengths),
        *(saved.alpha, saved.log_z, weights.numpy(), d_emissions, d_edges, scratch),
    )
    by_label = torch.from_numpy(d_emissions)
    by_edge = torch.from_numpy(d_edges.sum(0) * edges.power)
    chosen = np.flatnonzero(np.isnan(saved.log_z))
    if len(chosen):
        again, moves = _reference_gradient(_subset(chain, chosen), weights[torch.from_numpy(chosen)])
        by_label[torch.from_numpy(chosen)] = again.to(by_label.dtype)
        by_edge += moves
    if gold is not None:
        _take_gold(chain, gold, weights, by_label, by_edge)
    last = by_label[torch.arange(len(lengths)), chain.lengths - 1]
    return by_label, by_edge.to(by_label.dtype), by_label[:, 0].sum(0), last.sum(0)


def _reference_gradient(chain: Chain, weights: Tensor) -> tuple[Tensor, Tensor]:
    moves = chain.transitions
    assert isinstance(moves, SparseTransitions)
    with torch.enable_grad():
        emissions, scores = chain.emissions.requires_grad_(), moves.scores.requires_grad_()
        value = reference.log_partition(chain._replace(transitions=moves._replace(scores=scores)))
        return torch.autograd.grad((value * weights).sum(), (emissions, scores), materialize_grads=True)  # type: ignore


def _take_gold(chain: Chain, gold: Tensor, weights: Tensor, by_label: Tensor, by_edge: Tensor) -> None:
    """Take the gold labelling off; a move without an edge has no score to take it from."""
    moves = chain.transitions
    assert isinstance(moves, SparseTransitions)
    inside = torch.arange(chain.steps) < chain.lengths.unsqueeze(1)
    labels = gold.masked_fill(~inside, 0)
    by_label.scatter_add_(2, labels.unsqueeze(-1), -(weights.unsqueeze(1) * inside).unsqueeze(-1))
    keys = moves.targets * moves.size + moves.sources
    wanted = (labels[:, 1:] * moves.size + labels[:, :-1])[inside[:, 1:]]
    place = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
    if len(keys):
        amounts = weights.unsqueeze(1).expand(labels[:, 1:].shape)[inside[:, 1:]].double()
        by_edge.index_add_(0, place, -(amounts * (keys[place] == wanted)))


def expectation(chain: Chain, saved: Saved, other: Chain) -> Tensor:
    """E_{y ~ chain}[score_other(y)], (B,), by the reference.

    >>> moves = SparseTransitions.banded(torch.ones(2, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 3, 2), moves, torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> expectation(chain, forward(chain)[1], chain)
    tensor([2.])
    """
    return reference.expectation(chain, other)


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The highest score (B,) and its labelling (B, T), -1 past the length.

    >>> moves = SparseTransitions.banded(torch.zeros(2, 2), lower=0)
    >>> viterbi(Chain(torch.eye(2)[None], moves, torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    (tensor([2.]), tensor([[0, 1]]))
    """
    moves = chain.transitions
    assert isinstance(moves, SparseTransitions)
    emissions, start, end, lengths = (x.numpy() for x in (chain.emissions, chain.start, chain.end, chain.lengths))
    batch, steps, size = emissions.shape
    scores = moves.scores.numpy()
    ranges = parts(lengths, 4 * size + len(scores))
    into = np.searchsorted(moves.targets.numpy(), np.arange(size + 1))
    values, labels = np.empty(batch), np.empty((batch, steps), np.int64)
    delta = np.empty((len(ranges), steps, size))
    run(_best, ranges, emissions, moves.sources.numpy(), into, scores, start, end, lengths, values, labels, delta)
    return torch.from_numpy(values).to(chain.emissions.dtype), torch.from_numpy(labels)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples (S, B, T) from uniform numbers of that shape.

    >>> moves = SparseTransitions.banded(torch.zeros(2, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 2), moves, torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> sample(chain, torch.tensor([[[0.9, 0.5]]]))
    tensor([[[1, 1]]])
    """
    saved, ranges = _filter(chain)
    edges = saved.edges
    numbers = uniforms.numpy()
    labels = np.empty(numbers.shape, np.int64)
    weights = np.zeros((len(ranges), padded(chain.size)))
    end, lengths = chain.end.numpy(), chain.lengths.numpy()
    run(_sample, ranges, *edges[:3], end, lengths, saved.alpha, saved.log_z, numbers, labels, weights)
    chosen = np.flatnonzero(np.isnan(saved.log_z))
    if len(chosen):
        labels[:, chosen] = reference.sample(
            _subset(chain, chosen), uniforms[:, torch.from_numpy(chosen)].double()
        ).numpy()
    return torch.from_numpy(labels)
