"""The search's part of a decoding step in one launch: a program for each item ranks, ends, keeps and reorders.

It does what :mod:`thalweg.inference.search.beam.search` does with tensors, on rows whose number never changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.fixed_beam import Beam
from thalweg.kernels.gpu.arithmetic import pending
from thalweg.kernels.gpu.launching import launch, overlapped

__all__ = ["MOST_CANDIDATES", "Beam", "Traced", "advance", "fits", "start", "trace"]

MOST_CANDIDATES = 16384  # continuations of an item that one program can hold


_GONE = tl.constexpr(-2147483647 - 1)  # the key of what is not there


def fits(width: int, vocab_size: int) -> bool:
    """Whether one program can hold the continuations of an item.

    >>> fits(5, 100), fits(5, 50_000)
    (True, False)
    """
    return bool(triton.next_power_of_2(width) * triton.next_power_of_2(vocab_size) <= MOST_CANDIDATES)


@triton.jit
def _ordered(x):
    """Integers in the order of the floats; NaN comes before all (float32)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _value(key):
    """What :func:`_ordered` was given; -inf for the key of what is gone."""
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == _GONE, -float("inf"), value)


@triton.jit
def _pick(vector, index, at):
    """One entry of a vector; the others must not be NaN."""
    return tl.sum(tl.where(index == at, vector, 0), axis=0)


@triton.jit
def _advance(
    logits,
    tokens,
    parents,
    live,
    rank,
    score,
    code,
    history,
    dropped,
    done,
    position,
    remaining,
    arrived,
    seen,
    lineage,
    items,
    V,
    eos,
    max_length,
    min_length,
    capacity,
    penalty,
    W: tl.constexpr,
    K: tl.constexpr,
    WP: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    TP: tl.constexpr,
    WAIT: tl.constexpr,
):
    pending(WAIT)
    item = tl.program_id(0)
    now = tl.load(position)
    if tl.load(done + item) == 0:
        step = now.to(tl.int32) + 1
        w = tl.arange(0, WP)
        v = tl.arange(0, VP)
        inside = (w < W)[:, None] & (v < V)[None, :]
        x = tl.load(logits + (item * W + w)[:, None] * V + v[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, axis=1)
        top = tl.where(top == -float("inf"), 0.0, top)
        norm = top + tl.log(tl.where(w < W, tl.sum(tl.exp(x - top[:, None]), axis=1), 1.0))
        alive = tl.load(live + item * W + w, mask=w < W, other=-float("inf"))
        total = x - norm[:, None] + alive[:, None]
        symbol = tl.broadcast_to(v[None, :], (WP, VP))
        total = tl.where(inside & ~((symbol == eos) & (step < min_length)), total, -float("inf"))
        choice = w[:, None] * V + symbol
        key = tl.where(inside, _ordered(total), _GONE)

        kept = tl.full((WP,), -float("inf"), tl.float32)
        kept_code = tl.zeros((WP,), tl.int32)
        ended = tl.full((WP,), -float("inf"), tl.float32)
        ended_code = tl.zeros((WP,), tl.int32)
        count = 0
        lost = tl.load(dropped + item)
        cut = (eos >= 0) & (step == max_length)  # from here on only eos can make a hypothesis
        for i in tl.static_range(2 * W):
            best = tl.max(tl.max(key, axis=1), axis=0)
            chosen = tl.min(tl.min(tl.where(key == best, choice, 2147483647), axis=1), axis=0)
            key = tl.where(choice == chosen, _GONE, key)
            value = _value(best)
            ends = (chosen % V == eos) | ((eos < 0) & (step == max_length))
            if i == 0:  # what is not a number comes first, and must stay to be found even where all end
                kept = tl.where((w == 0) & (best == 0x7FFFFFFF), value, kept)
            if i < W:
                ended = tl.where((w == i) & ends & (best < 0x7FFFFFFF), value, ended)
                ended_code = tl.where(w == i, chosen, ended_code)
            if i >= W:
                lost = tl.where((ends | ((count >= W) & (cut == 0))) & (value > lost), value, lost)
            goes_on = (w == count) & (ends == 0) & (count < W)
            kept = tl.where(goes_on, value, kept)
            kept_code = tl.where(goes_on, chosen, kept_code)
            count = tl.where(ends, count, count + 1)
        key = tl.where(cut & (symbol != eos), _GONE, key)
        rest = _value(tl.max(tl.max(key, axis=1), axis=0))
        tl.store(dropped + item, tl.where(rest > lost, rest, lost))

        j = tl.arange(0, KP)
        mine = item * K + j
        old_rank = tl.load(rank + mine, mask=j < K, other=-float("inf"))
        old_score = tl.load(score + mine, mask=j < K, other=-float("inf"))
        old_code = tl.load(code + mine, mask=j < K, other=0)
        new_rank = ended
        if penalty != 0:
            new_rank = ended / tl.exp(penalty * tl.log(step.to(tl.float32)))
        last = -float("inf")
        for i in tl.static_range(K):
            old, new = tl.max(old_rank, axis=0), tl.max(new_rank, axis=0)
            old_at = tl.min(tl.where(old_rank == old, j, KP - 1), axis=0)
            new_at = tl.min(tl.where(new_rank == new, w, WP - 1), axis=0)
            older = old >= new
            last = tl.where(older, old, new)
            from_old = tl.sum(tl.where(j == old_at, tl.where(old_score > -float("inf"), old_score, 0.0), 0.0), axis=0)
            from_new = tl.sum(tl.where(w == new_at, tl.where(ended > -float("inf"), ended, 0.0), 0.0), axis=0)
            its_score = tl.where(older, from_old, from_new)
            its_score = tl.where(last == -float("inf"), -float("inf"), its_score)
            number = step.to(tl.int64) * W * V + _pick(ended_code, w, new_at).to(tl.int64)
            number = tl.where(older, _pick(old_code, j, old_at), number)
            tl.store(rank + item * K + i, last)
            tl.store(score + item * K + i, its_score)
            tl.store(code + item * K + i, number)
            old_rank = tl.where(j == tl.where(older, old_at, -1), -float("inf"), old_rank)
            new_rank = tl.where(w == tl.where(older, -1, new_at), -float("inf"), new_rank)

        dead = kept == -float("inf")
        none = tl.max(((w == 0) & dead).to(tl.int32), axis=0) > 0
        first = tl.sum(tl.where((w == 0) & ~dead, kept, 0.0), axis=0)
        bound = first
        if penalty > 0:
            reach = step * 0 + max_length  # a tensor even where the launch makes a constant of a 1
            bound = first / tl.exp(penalty * tl.log(reach.to(tl.float32)))
        if penalty < 0:
            bound = first / tl.exp(penalty * tl.log((step + 1).to(tl.float32)))
        bound = tl.where(none, -float("inf"), bound)
        over = (last < bound) == 0
        first_code = _pick(kept_code, w, 0)
        # A dead slot follows the best row, so that the model is never asked about an impossible sequence.
        follows = tl.where(dead, first_code, kept_code)
        own = item * W + w
        tl.store(live + own, kept, mask=w < W)
        tl.store(history + ((step - 1).to(tl.int64) * items + item) * W + w, follows.to(tl.int64), mask=w < W)
        tl.store(tokens + own, (follows % V).to(tl.int64), mask=w < W)
        source = item * W + follows // V
        tl.store(parents + own, source.to(tl.int64), mask=w < W)
        if TP > 0:
            t = tl.arange(0, TP)
            there = (w < W)[:, None] & (t < capacity)[None, :]
            past = tl.load(lineage + source[:, None] * capacity + t[None, :], mask=there, other=0)
            past = tl.where(t[None, :] == step, own[:, None].to(past.dtype), past)
            tl.debug_barrier()  # all rows are read before one is written
            tl.store(lineage + own[:, None] * capacity + t[None, :], past, mask=there)
        if over | (step == max_length):
            tl.store(done + item, step)
            tl.atomic_add(remaining, -1)
    # All have read where the search stands when the last one comes by.
    if tl.atomic_add(arrived, 1) == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        tl.store(position, now + 1)
        tl.store(seen, tl.load(remaining))


def _warps(width: int, V: int) -> int:
    """As few as can hold the candidates: one warp chooses among its own without waiting for others."""
    candidates: Any = triton.next_power_of_2(width) * triton.next_power_of_2(V)
    return max(1, min(8, candidates // 1024))


def advance(
    beam: Beam,
    logits: Tensor,
    lineage: Tensor | None,
    *,
    eos: int | None,
    max_length: int,
    min_length: int,
    penalty: float,
    seen: Tensor | None = None,
) -> None:
    """One step of every item that is not done: ``logits`` (A W, V) need not be normalised.

    ``lineage`` (A W, T), where given, is reordered with the rows and gets each row's own number for the step to come.
    ``seen`` (1,) int32 gets the number of items that are not done; it may be memory of the host.
    """
    (items, width), V = beam.live.shape, logits.shape[1]
    capacity = 0 if lineage is None else lineage.shape[1]
    launched = overlapped(logits)
    kernel: Any = _advance
    kernel[(items,)](
        *(logits, beam.tokens, beam.parents, beam.live, beam.rank, beam.score, beam.code, beam.history),
        *(beam.dropped, beam.done, beam.position, beam.remaining, beam.arrived),
        *(beam.remaining if seen is None else seen, beam.tokens if lineage is None else lineage),
        *(items, V, -1 if eos is None else eos, max_length, min_length, capacity, float(penalty)),
        W=width,
        K=beam.rank.shape[1],
        WP=max(2, triton.next_power_of_2(width)),
        KP=max(2, triton.next_power_of_2(beam.rank.shape[1])),
        VP=triton.next_power_of_2(V),
        TP=triton.next_power_of_2(capacity) if capacity else 0,
        WAIT=bool(launched),
        num_warps=_warps(width, V),
        **launched,
    )


@triton.jit
def _start(
    tokens,
    live,
    rank,
    score,
    dropped,
    done,
    position,
    remaining,
    arrived,
    lineage,
    count,
    bos,
    capacity,
    W: tl.constexpr,
    K: tl.constexpr,
    WP: tl.constexpr,
    KP: tl.constexpr,
    PAST: tl.constexpr,
    WAIT: tl.constexpr,
):
    pending(WAIT)
    item = tl.program_id(0)
    known = tl.load(count)
    w = tl.arange(0, WP)
    own, there = item * W + w, w < W
    tl.store(tokens + own, tl.zeros((WP,), tl.int64) + bos, mask=there)
    tl.store(live + own, tl.where(w == 0, 0.0, -float("inf")), mask=there)
    j = tl.arange(0, KP)
    nothing = tl.full((KP,), -float("inf"), tl.float32)
    tl.store(rank + item * K + j, nothing, mask=j < K)
    tl.store(score + item * K + j, nothing, mask=j < K)
    tl.store(dropped + item, -float("inf"))
    tl.store(done + item, (item >= known).to(tl.int32))
    if PAST:
        tl.store(lineage + own * capacity, own, mask=there)
    if item == 0:
        tl.store(position, 0)
        tl.store(remaining, known)
        tl.store(arrived, 0)


def start(beam: Beam, count: Tensor, bos: int, lineage: Tensor | None = None) -> None:
    """Begin anew with the first ``count`` (1,) int32 items; the others are done before they begin.

    ``lineage`` (A W, T), where given: rows come from themselves in the first step.
    """
    (items, width), k = beam.live.shape, beam.rank.shape[1]
    launched = overlapped(beam.live)
    kernel: Any = _start
    kernel[(items,)](
        *(beam.tokens, beam.live, beam.rank, beam.score, beam.dropped, beam.done, beam.position, beam.remaining),
        *(beam.arrived, beam.tokens if lineage is None else lineage, count, bos),
        0 if lineage is None else lineage.shape[1],
        W=width,
        K=k,
        WP=triton.next_power_of_2(width),
        KP=triton.next_power_of_2(k),
        PAST=lineage is not None,
        WAIT=bool(launched),
        num_warps=1,
        **launched,
    )


@triton.jit
def _trace(
    live,
    rank,
    score,
    code,
    history,
    dropped,
    done,
    arrived,
    count,
    tokens,
    lengths,
    scores,
    finished,
    optimal,
    notes,
    summary,
    items,
    capacity,
    V,
    W: tl.constexpr,
    K: tl.constexpr,
):
    """Walk each hypothesis back from its last symbol; live rows of the last step fill what is missing."""
    item, slot = tl.program_id(0), tl.program_id(1)
    span = W * V
    steps = tl.load(done + item)
    number = tl.load(code + item * K + slot)
    value = tl.load(score + item * K + slot)
    ended = value > -float("inf")
    many = 0
    for i in range(K):
        many += (tl.load(score + item * K + i) > -float("inf")).to(tl.int32)
    spare = slot - many
    # What finished comes first, so a missing one stands behind all of it.
    if (ended == 0) & (spare < W):
        value = tl.load(live + item * W + spare)
        number = tl.load(history + ((steps - 1).to(tl.int64) * items + item) * W + spare) + steps.to(tl.int64) * span
    there = (value == value) & (value > -float("inf"))
    length = tl.where(there, number // span, 0).to(tl.int32)
    place = number % span
    tl.store(lengths + item * K + slot, length.to(tl.int64))
    tl.store(scores + item * K + slot, tl.where(there | (value != value), value, -float("inf")))
    tl.store(finished + item * K + slot, (ended & there).to(tl.uint8))
    target = tokens + (item.to(tl.int64) * K + slot) * capacity
    for back in range(length):
        step = length - 1 - back
        tl.store(target + step, place % V)
        if step > 0:
            place = tl.load(history + ((step - 1).to(tl.int64) * items + item) * W + place // V)
    for step in range(length, capacity):
        tl.store(target + step, -1)
    best, row = tl.load(rank + item * K), tl.load(live + item * W)
    if slot == 0:
        proved = (best >= tl.load(dropped + item)) & ended & there
        tl.store(optimal + item, proved.to(tl.uint8))
        wrong = ((row < float("inf")) & (best < float("inf"))) == 0  # NaN or +inf
        tl.atomic_max(notes + 1, wrong.to(tl.int32))
    tl.atomic_max(notes, tl.where(item < tl.load(count), length, 0))
    if tl.atomic_add(arrived, 1) == tl.num_programs(0) * K - 1:
        tl.store(arrived, 0)
        two = tl.arange(0, 2)
        tl.store(summary + two, tl.load(notes + two).to(tl.int64))
        tl.store(notes + two, tl.zeros((2,), tl.int32))


class Traced(NamedTuple):
    """Answers of a search.

    >>> Traced._fields
    ('tokens', 'lengths', 'scores', 'finished', 'optimal')
    """

    tokens: Tensor  # (A, k, T) with -1 past the end
    lengths: Tensor  # (A, k)
    scores: Tensor  # (A, k)
    finished: Tensor  # (A, k) bool
    optimal: Tensor  # (A,) bool: the best was never behind what was let go of; says nothing under a penalty


def trace(beam: Beam, vocab_size: int, count: Tensor, summary: Tensor) -> Traced:
    """Read the answers off; ``summary`` (2,) int64, of the host if need be, gets two facts.

    They are the length of the longest among the first ``count`` (1,) items, and whether the best of an item is NaN or
    +inf.
    """
    capacity, items, width = beam.history.shape
    k = beam.rank.shape[1]
    finished, optimal = (beam.code.new_empty(shape, dtype=torch.uint8) for shape in ((items, k), (items,)))
    tokens = beam.code.new_empty(items, k, capacity)
    lengths, scores = torch.empty_like(beam.code), torch.empty_like(beam.score)
    launch(
        *(_trace, (items, k)),
        *(beam.live, beam.rank, beam.score, beam.code, beam.history, beam.dropped, beam.done, beam.arrived, count),
        *(tokens, lengths, scores, finished, optimal, beam.notes, summary, items, capacity, vocab_size),
        W=width,
        K=k,
        num_warps=1,
    )
    return Traced(tokens, lengths, scores, finished.view(torch.bool), optimal.view(torch.bool))
