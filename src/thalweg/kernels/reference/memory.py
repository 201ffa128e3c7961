"""Memories in plain PyTorch, a block of patterns at a time: what the compiled kernels must give.

A pass keeps, for every query, the largest score so far, the sum of exponentials relative to it and the weighted sum of
values, so that the Q x N weights are never held (online softmax, Milakov and Gimelshein 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_HELD = 1 << 22  # scores that a pass holds at once
_BLOCK = 4096  # patterns of a block unless told


class Settled(NamedTuple):
    """Where queries came to rest."""

    state: Tensor  # (Q, D)
    energies: Tensor  # (Q, max_steps + 1); entries after a query stopped repeat its last
    steps: Tensor  # (Q,) int64, updates done
    converged: Tensor  # (Q,) bool, whether the last update moved the query by no more than the tolerance


def _wide(x: Tensor) -> Tensor:
    """Numbers in the type that sums are kept in: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _blocks(count: int, block: int | None) -> Iterator[slice]:
    size = block or _BLOCK
    return (slice(low, min(low + size, count)) for low in range(0, count, size))


def _rows(queries: Tensor, count: int, block: int | None) -> Iterator[slice]:
    """Ranges of queries whose scores against one block of patterns are no more than may be held."""
    size = max(1, _HELD // max(1, min(block or _BLOCK, count)))
    return (slice(low, low + size) for low in range(0, len(queries), size))


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    scores = queries @ keys.mT
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _clean(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Values with zeros where a pattern is absent: what lies there may be anything, NaN included."""
    return rows if mask is None else rows.masked_fill(~mask[:, None], 0.0)


def _pass(
    queries: Tensor, keys: Tensor, values: Tensor | None, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """The mixed values and the log-sum-exp of one range of queries; without values only the latter."""
    largest = queries.new_full((len(queries), 1), -torch.inf)
    total = torch.zeros_like(largest)
    mixed = queries.new_zeros(len(queries), 0 if values is None else values.shape[1])
    for part in _blocks(len(keys), block):
        present = None if mask is None else mask[part]
        scores = beta * _scores(queries, _wide(keys[part]), present)
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        shift = torch.where(new == -torch.inf, 0.0, new)  # nothing present so far: exp gives zeros
        weights, shrink = (scores - shift).exp(), (largest - shift).exp()
        total = total * shrink + weights.sum(1, keepdim=True)
        if values is not None:
            mixed = mixed * shrink + weights @ _clean(_wide(values[part]), present)
        largest = new
    # Where nothing is present they are 0 and -inf; where all that is there scores -inf, a query is not a number.
    there = torch.nan if mask is None else torch.where(mask.any(), torch.nan, 1.0).to(total.dtype)
    total = torch.where(total == 0, there if len(keys) else 1.0, total)
    lse = torch.where(largest == -torch.inf, total.log() - torch.inf, largest + total.log()) / beta
    return mixed / total, lse[:, 0]


def _passes(
    queries: Tensor, keys: Tensor, values: Tensor | None, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`_pass` of all queries, in the type that sums are kept in."""
    parts = [_pass(queries[rows], keys, values, beta, mask, block) for rows in _rows(queries, len(keys), block)]
    if not parts:
        return queries.new_zeros(0, 0 if values is None else values.shape[1]), queries.new_zeros(0)
    mixed, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return mixed, lse


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` block by block."""
    mixed, lse = _passes(_wide(queries), keys, values, beta, mask, block)
    return mixed.to(values.dtype), lse


def associate_gradient(
    inputs: tuple[Tensor, Tensor, Tensor, float | Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    block: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Gradients of :func:`associate` in queries, keys, values and beta, weights computed anew block by block.

    With p the weights, g the gradient in the mixed values y and h that in the log-sum-exp l,

    .. math:: \frac{\partial L}{\partial s_{qi}} = p_{qi}\,\big(h_q + \beta\, g_q \cdot (v_i - y_q)\big), \qquad
        \frac{\partial L}{\partial \beta} = \sum_q \Big(\sum_i p_{qi} s_{qi}\, g_q \cdot (v_i - y_q)
        + \frac{h_q}{\beta} \big(\sum_i p_{qi} s_{qi} - l_q\big)\Big).
    """
    queries, keys, values, beta, mask = inputs
    mixed, lse = outputs
    wide, outward, upward = _wide(queries), _wide(gradients[0]), gradients[1][:, None]
    base = torch.where(lse == -torch.inf, 0.0, lse)[:, None]
    along = (outward * _wide(mixed)).sum(1, keepdim=True)
    of_beta = -(upward * base).sum() / beta if torch.is_tensor(beta) else wide.new_zeros(())
    of_queries = [torch.zeros_like(wide[rows]) for rows in _rows(queries, len(keys), block)]
    of_keys, of_values = [], []
    for part in _blocks(len(keys), block):
        present = None if mask is None else mask[part]
        near, held = _clean(_wide(keys[part]), present), _clean(_wide(values[part]), present)
        key_sum, value_sum = torch.zeros_like(near), torch.zeros_like(held)
        for place, rows in enumerate(_rows(queries, len(keys), block)):
            scores = _scores(wide[rows], near, None)
            weights = (beta * (scores - base[rows])).exp()
            weights = weights if present is None else weights.masked_fill(~present, 0.0)
            slope = weights * (outward[rows] @ held.mT - along[rows])
            of_scores = weights * upward[rows] + beta * slope
            of_queries[place] = of_queries[place] + of_scores @ near
            key_sum = key_sum + of_scores.mT @ wide[rows]
            value_sum = value_sum + weights.mT @ outward[rows]
            if torch.is_tensor(beta):
                of_beta = of_beta + (scores * (slope + weights * upward[rows] / beta)).sum()
        of_keys.append(key_sum.to(keys.dtype))
        of_values.append(value_sum.to(values.dtype))
    joined = torch.cat(of_queries).to(queries.dtype) if of_queries else torch.zeros_like(queries)
    if not of_keys:
        return joined, torch.zeros_like(keys), torch.zeros_like(values), of_beta
    return joined, torch.cat(of_keys), torch.cat(of_values), of_beta


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` step by step; queries that have come to rest are left out of a step."""
    wide, count = _wide(queries), len(queries)
    base = offset(patterns, beta, mask)
    state, steps = wide.clone(), torch.zeros(count, dtype=torch.int64, device=wide.device)
    converged = torch.zeros(count, dtype=torch.bool, device=wide.device)
    energies = wide.new_zeros(count, max_steps + 1)
    going = torch.arange(count, device=wide.device)
    resting = going[:0]
    for step in range(max_steps + 1):
        if not len(going) and not len(resting):
            break
        last = step == max_steps
        now = torch.cat((going, resting))  # those at rest only want the energy of where they are
        here = state[now]
        new, lse = _passes(here, patterns, None if last else patterns, beta, mask, block)
        energies[now, step:] = (base + (here * here).sum(1) / 2 - lse)[:, None]
        if last:
            break
        new = new[: len(going)]
        moved = (new - here[: len(going)]).norm(dim=1)
        state[going], steps[going] = new, step + 1
        converged[going] = moved <= tol
        resting, going = going[moved <= tol], going[~(moved <= tol)]
    return Settled(state.to(queries.dtype), energies, steps, converged)


def offset(patterns: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """What an energy has beside the query: (1/b) log N + M^2 / 2 of the patterns that are present; of shape ()."""
    norms = torch.linalg.vector_norm(_wide(patterns), dim=1)
    logs = math.log(max(len(norms), 1)) if mask is None else mask.sum().clamp(min=1).to(norms.dtype).log()
    norms = norms if mask is None else norms.masked_fill(~mask, 0.0)
    largest = norms.amax() if len(norms) else norms.new_zeros(())
    return largest * largest / 2 + logs / beta


def nearest(queries: Tensor, keys: Tensor, k: int, mask: Tensor | None, block: int | None) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.nearest` by merging the best of every block with the best so far."""
    wide = _wide(queries)
    best = wide.new_full((len(queries), k), -torch.inf)
    where = torch.full((len(queries), k), -1, device=queries.device)
    size = max(block or _BLOCK, k)
    for rows in _rows(queries, len(keys), size):
        top, place = best[rows], where[rows]
        for part in _blocks(len(keys), size):
            scores = _scores(wide[rows], _wide(keys[part]), None if mask is None else mask[part])
            found, index = scores.topk(min(k, scores.shape[1]), dim=1)
            index = torch.where(found == -torch.inf, -1, index + part.start)
            top, order = torch.cat((top, found), 1).topk(k, dim=1)
            place = torch.cat((place, index), 1).gather(1, order)
        best[rows], where[rows] = top, place
    return best, where
