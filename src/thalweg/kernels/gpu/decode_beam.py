"""The search's part of a decoding step in one launch: a program for each item ranks, ends, keeps and reorders.

It does what :mod:`thalweg.inference.search.beam.search` does with tensors, on rows whose number never changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import pending
from thalweg.kernels.gpu.launching import ceiling, overlapped

__all__ = ["MOST_CANDIDATES", "Beam", "Traced", "advance", "fits", "start", "trace"]


class Beam(NamedTuple):
    """Where the search stands, for A items of W rows each; all is changed in place.

    >>> beam = Beam.empty(2, 3, 1, 5, torch.device("cpu"))
    >>> beam.live.shape, beam.history.shape
    (torch.Size([2, 3]), torch.Size([5, 2, 3]))
    """

    tokens: Tensor  # (A W,) int64: what each row is fed next
    parents: Tensor  # (A W,) int64: the row it comes from
    live: Tensor  # (A, W) log-probabilities, -inf where there is no row
    rank: Tensor  # (A, k) of the finished, best first
    score: Tensor  # (A, k)
    code: Tensor  # (A, k) int64: step * W V + row * V + symbol of the last choice
    history: Tensor  # (T, A, W) int64: row * V + symbol
    dropped: Tensor  # (A,) the best score that was ever let go of
    done: Tensor  # (A,) int32: the number of the step after which nothing can change; 0 before
    position: Tensor  # (1,) int64: steps taken
    remaining: Tensor  # (1,) int32: items that are not done
    arrived: Tensor  # (1,) int32: programs of a launch that have come to their end; 0 between launches
    notes: Tensor  # (2,) int32: what programs tell the last of them; 0 between launches

    @classmethod
    def empty(cls, items: int, width: int, k: int, capacity: int, device: torch.device) -> Beam:
        """Room for a search of at most ``capacity`` steps."""

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        single = torch.float32
        return cls(
            *(room(items * width), room(items * width), room(items, width, dtype=single)),
            *(room(items, k, dtype=single), room(items, k, dtype=single), room(items, k)),
            *(room(capacity, items, width), room(items, dtype=single), room(items, dtype=torch.int32), room(1)),
            *(room(count, dtype=torch.int32) for count in (1, 1, 2)),
        )


MOST_CANDIDATES = 16384  # continuations of an item that one program can hold
_GONE = tl.constexpr(-2147483647 - 1)  # the key of what is not there


def fits(width: int, vocab_size: int) -> bool:
    """Whether one program can hold the continuations of an item.

    >>> fits(5, 100), fits(5, 50_000)
    (True, False)
    """
    return ceiling(width) * ceiling(vocab_size) <= MOST_CANDIDATES


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
    logits, beam, lineage, seen, items, V, eos, max_length, min_length, capacity, penalty,
    W: tl.constexpr, K: tl.constexpr, WP: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, TP: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    pending(WAIT)
    item = tl.program_id(0)
    now = tl.load(beam.position)
    if tl.load(beam.done + item) == 0:
        step = now.to(tl.int32) + 1
        w = tl.arange(0, WP)
        v = tl.arange(0, VP)
        inside = (w < W)[:, None] & (v < V)[None, :]
        x = tl.load(logits + (item * W + w)[:, None] * V + v[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, axis=1)
        top = tl.where(top == -float("inf"), 0.0, top)
        norm = top + tl.log(tl.where(w < W, tl.sum(tl.exp(x - top[:, None]), axis=1), 1.0))
        alive = tl.load(beam.live + item * W + w, mask=w < W, other=-float("inf"))
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
        lost = tl.load(beam.dropped + item)
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
        tl.store(beam.dropped + item, tl.where(rest > lost, rest, lost))

        j = tl.arange(0, KP)
        mine = item * K + j
        old_rank = tl.load(beam.rank + mine, mask=j < K, other=-float("inf"))
        old_score = tl.load(beam.score + mine, mask=j < K, other=-float("inf"))
        old_code = tl.load(beam.code + mine, mask=j < K, other=0)
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
            tl.store(beam.rank + item * K + i, last)
            tl.store(beam.score + item * K + i, its_score)
            tl.store(beam.code + item * K + i, number)
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
        tl.store(beam.live + own, kept, mask=w < W)
        tl.store(beam.history + ((step - 1).to(tl.int64) * items + item) * W + w, follows.to(tl.int64), mask=w < W)
        tl.store(beam.tokens + own, (follows % V).to(tl.int64), mask=w < W)
        source = item * W + follows // V
        tl.store(beam.parents + own, source.to(tl.int64), mask=w < W)
        if TP > 0:
            t = tl.arange(0, TP)
            there = (w < W)[:, None] & (t < capacity)[None, :]
            past = tl.load(lineage + source[:, None] * capacity + t[None, :], mask=there, other=0)
            past = tl.where(t[None, :] == step, own[:, None].to(past.dtype), past)
            tl.debug_barrier()  # all rows are read before one is written
            tl.store(lineage + own[:, None] * capacity + t[None, :], past, mask=there)
        if over | (step == max_length):
            tl.store(beam.done + item, step)
            tl.atomic_add(beam.remaining, -1)
    # All have read where the search stands when the last one comes by.
    if tl.atomic_add(beam.arrived, 1) == tl.num_programs(0) - 1:
        tl.store(beam.arrived, 0)
        tl.store(beam.position, now + 1)
        tl.store(seen, tl.load(beam.remaining))


def _warps(width: int, V: int) -> int:
    """As few as can hold the candidates: one warp chooses among its own without waiting for others."""
    return max(1, min(8, ceiling(width) * ceiling(V) // 1024))


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
    (items, width), k, V = beam.live.shape, beam.rank.shape[1], logits.shape[1]
    capacity = 0 if lineage is None else lineage.shape[1]
    launched = overlapped(logits)
    kernel: Any = _advance
    kernel[(items,)](
        logits, beam, beam.tokens if lineage is None else lineage, beam.remaining if seen is None else seen,
        items, V, -1 if eos is None else eos, max_length, min_length, capacity, float(penalty),
        W=width, K=k, WP=max(2, ceiling(width)), KP=max(2, ceiling(k)), VP=ceiling(V),
        TP=ceiling(capacity) if capacity else 0, WAIT=bool(launched), num_warps=_warps(width, V), **launched,
    )  # fmt: skip


def start(beam: Beam, count: Tensor, bos: int, lineage: Tensor | None = None) -> None:
    """Begin anew with the first ``count`` (1,) int32 items; the others are done before they begin.

    ``lineage`` (A W, T), where given: rows come from themselves in the first step.
    """
    beam.tokens.fill_(bos)
    for scores in (beam.live, beam.rank, beam.score, beam.dropped):
        scores.fill_(-torch.inf)
    beam.live[:, 0] = 0.0
    beam.done.copy_(torch.arange(len(beam.done), device=beam.done.device) >= count)
    beam.position.zero_()
    beam.remaining.copy_(count)
    beam.arrived.zero_()
    if lineage is not None:
        lineage[:, 0] = torch.arange(len(lineage), device=lineage.device)


@triton.jit
def _trace(beam, count, found, summary, items, capacity, V, W: tl.constexpr, K: tl.constexpr):
    """Walk each hypothesis back from its last symbol; live rows of the last step fill what is missing."""
    item, slot = tl.program_id(0), tl.program_id(1)
    span = W * V
    steps = tl.load(beam.done + item)
    number = tl.load(beam.code + item * K + slot)
    value = tl.load(beam.score + item * K + slot)
    ended = value > -float("inf")
    many = 0
    for i in range(K):
        many += (tl.load(beam.score + item * K + i) > -float("inf")).to(tl.int32)
    spare = slot - many
    # What finished comes first, so a missing one stands behind all of it.
    if (ended == 0) & (spare < W):
        value = tl.load(beam.live + item * W + spare)
        last = beam.history + ((steps - 1).to(tl.int64) * items + item) * W
        number = tl.load(last + spare) + steps.to(tl.int64) * span
    there = (value == value) & (value > -float("inf"))
    length = tl.where(there, number // span, 0).to(tl.int32)
    place = number % span
    tl.store(found.lengths + item * K + slot, length.to(tl.int64))
    tl.store(found.scores + item * K + slot, tl.where(there | (value != value), value, -float("inf")))
    tl.store(found.finished + item * K + slot, (ended & there).to(tl.uint8))
    target = found.tokens + (item.to(tl.int64) * K + slot) * capacity
    for back in range(length):
        step = length - 1 - back
        tl.store(target + step, place % V)
        if step > 0:
            place = tl.load(beam.history + ((step - 1).to(tl.int64) * items + item) * W + place // V)
    for step in range(length, capacity):
        tl.store(target + step, -1)
    best, row = tl.load(beam.rank + item * K), tl.load(beam.live + item * W)
    if slot == 0:
        proved = (best >= tl.load(beam.dropped + item)) & ended & there
        tl.store(found.optimal + item, proved.to(tl.uint8))
        wrong = ((row < float("inf")) & (best < float("inf"))) == 0  # NaN or +inf
        tl.atomic_max(beam.notes + 1, wrong.to(tl.int32))
    tl.atomic_max(beam.notes, tl.where(item < tl.load(count), length, 0))
    if tl.atomic_add(beam.arrived, 1) == tl.num_programs(0) * K - 1:
        tl.store(beam.arrived, 0)
        two = tl.arange(0, 2)
        tl.store(summary + two, tl.load(beam.notes + two).to(tl.int64))
        tl.store(beam.notes + two, tl.zeros((2,), tl.int32))


class Traced(NamedTuple):
    """Answers of a search."""

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
    (capacity, items, width), k = beam.history.shape, beam.rank.shape[1]
    flags = (beam.code.new_empty(shape, dtype=torch.uint8) for shape in ((items, k), (items,)))
    found = Traced(
        beam.code.new_empty(items, k, capacity), torch.empty_like(beam.code), torch.empty_like(beam.score), *flags
    )
    kernel: Any = _trace
    kernel[items, k](beam, count, found, summary, items, capacity, vocab_size, W=width, K=k, num_warps=1)
    return found._replace(finished=found.finished.view(torch.bool), optimal=found.optimal.view(torch.bool))
