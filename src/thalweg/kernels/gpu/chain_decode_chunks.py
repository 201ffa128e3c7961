"""Viterbi over few long chains: chunks are walked at the same time, each from a guess made some way before it.

The best ways to all labels of a position soon have a common past. From there on delta_t is the same wherever a walk
began, but for a constant, which changes no argmax; and so is the way back from any later label. Whether that came about
within the warm-up is looked at wherever two chunks meet: delta must agree up to a constant and rounding, the ways back
must meet in the same label. An item where one does not is marked, and walked again from end to end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import (
    argmax_lowest,
    finite_or_zero,
    held_matrix,
    spread_max,
    vector_matrix_max,
)

__all__: list[str] = []


@triton.jit
def _step(x, matrix, e, n, CP: tl.constexpr):
    """delta of the next position; every fourth time its maximum is taken off first."""
    if n % 4 == 1:
        e -= finite_or_zero(spread_max(x, CP))
    return vector_matrix_max(x, matrix, CP) + e


@triton.jit(do_not_specialize=["T", "C", "per_item", "chunk", "warm_up", "chunks"])
def max_chunks(
    emissions,
    transitions,
    start,
    end,
    lengths,
    delta,
    turned,
    entries,
    redo,
    T,
    C,
    per_item,
    chunk,
    warm_up,
    chunks,
    CP: tl.constexpr,
):
    """delta (B, T, C); grid (B, chunks).

    ``entries`` (B, chunks, CP) gets each chunk's guess of delta at the position before it, ``turned`` (1 or B, CP, CP)
    the transitions transposed. ``redo`` (B,) is set to 0.
    """
    item, number = tl.program_id(0), tl.program_id(1)
    wide = item.to(tl.int64)
    length = tl.load(lengths + item).to(tl.int32)
    if number == 0:
        tl.store(redo + item, 0)
    first = number * chunk
    if first < length:
        final = length - 1
        j = tl.arange(0, CP)
        inside = j < C
        low = -float("inf")
        which = item * per_item
        matrix = held_matrix(transitions + which.to(tl.int64) * C * C, C, C, CP, low)
        if (which == item) & (number == 0):
            i = (tl.arange(0, CP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, :, None]
            tl.store(turned + which.to(tl.int64) * CP * CP + j[None, None, :] * CP + i, matrix)
        closing = tl.load(end + j, mask=inside, other=0.0)
        begin = tl.maximum(first - warm_up, 0)
        e_row = emissions + (wide * T + begin) * C + j
        x = tl.load(e_row, mask=inside, other=low)
        x = tl.where(begin == 0, x + tl.load(start + j, mask=inside, other=0.0), x)
        x = tl.where(final == 0, x + closing, x)
        kept = delta + wide * T * C + j
        tl.store(kept, x, mask=inside & (first == 0))
        stop = tl.minimum(first + chunk, length)
        e0 = tl.load(e_row + C, mask=inside & (begin + 1 < stop), other=low)
        e1 = tl.load(e_row + 2 * C, mask=inside & (begin + 2 < stop), other=low)
        e2 = tl.load(e_row + 3 * C, mask=inside & (begin + 3 < stop), other=low)
        e3 = tl.load(e_row + 4 * C, mask=inside & (begin + 4 < stop), other=low)
        kept += begin.to(tl.int64) * C
        for t in range(begin + 1, stop):
            e_row += C
            kept += C
            e = tl.where(t == final, e0 + closing, e0)
            e0 = e1
            e1 = e2
            e2 = e3
            e3 = tl.load(e_row + 4 * C, mask=inside & (t + 4 < stop), other=low)
            tl.store(entries + (wide * chunks + number) * CP + j, x, mask=(j >= 0) & (t == first))
            x = _step(x, matrix, e, t - begin, CP)
            tl.store(kept, x, mask=inside & (t >= first))


@triton.jit(do_not_specialize=["T", "C", "per_item", "chunk", "warm_up", "chunks"])
def trace_chunks(
    emissions,
    transitions,
    turned,
    start,
    end,
    lengths,
    delta,
    entries,
    redo,
    sums,
    meetings,
    labels,
    T,
    C,
    per_item,
    chunk,
    warm_up,
    chunks,
    WIDTH: tl.constexpr,
    CP: tl.constexpr,
):
    """The way back through each chunk; grid (B, chunks), one warp.

    ``turned`` has rows of WIDTH. ``labels`` (B, T) of the chunk, -1 past the length; ``sums`` (B, chunks) its share of
    their score, float64, with the moves into its labels; ``meetings`` (B, chunks) the label that it believes the next
    chunk to begin with. ``redo`` becomes 1 where the chunk's guess was not what the chunk before it found.
    """
    item, number = tl.program_id(0), tl.program_id(1)
    wide = item.to(tl.int64)
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    first = number * chunk
    past = first + tl.arange(0, 128)
    for begin in range(0, chunk, 128):
        t = past + begin
        tl.store(labels + wide * T + t, -1, mask=(t >= length) & (t < first + chunk) & (t < T))
    if first < length:
        j = tl.arange(0, CP)
        inside = j < C
        low = -float("inf")
        rows = delta + wide * T * C + j
        if number > 0:
            found = tl.load(rows + (first - 1).to(tl.int64) * C, mask=inside, other=low)
            guess = tl.load(entries + (wide * chunks + number) * WIDTH + j, mask=inside, other=low)
            there = (found > low) & (guess > low)
            apart = tl.where(there, found, 0.0) - tl.where(there, guess, 0.0)
            most = tl.max(tl.where(there, apart, low), axis=0)
            least = tl.min(tl.where(there, apart, -low), axis=0)
            spread = tl.max(tl.where(there, guess, low), axis=0) - tl.min(tl.where(there, guess, -low), axis=0)
            alike = tl.sum((inside & ((found > low) != (guess > low))).to(tl.int32), axis=0) == 0
            fits = (most - least <= 1e-5 * tl.maximum(spread, 1.0)) | (tl.sum(there.to(tl.int32), axis=0) == 0)
            if (alike & fits) == 0:
                tl.store(redo + item, 1)
        which = (item * per_item).to(tl.int64)
        move, into = transitions + which * C * C, turned + which * WIDTH * WIDTH + j
        e_row = emissions + wide * T * C
        stop = tl.minimum(first + chunk, length)  # the position after the chunk
        t = tl.minimum(stop - 1 + warm_up, final)
        row = rows + t.to(tl.int64) * C
        y = argmax_lowest(tl.load(row, mask=inside, other=low), j, CP)
        mine = t < stop
        total = tl.where(mine, (tl.load(e_row + t.to(tl.int64) * C + y) + tl.load(end + y)).to(tl.float64), 0.0)
        tl.store(labels + wide * T + t, y, mask=mine)
        tl.store(meetings + wide * chunks + number, y, mask=t == stop)
        begin = tl.maximum(first - 1, 0)
        steps = t - begin
        d0 = tl.load(row - C, mask=inside & (steps > 0), other=low)
        d1 = tl.load(row - 2 * C, mask=inside & (steps > 1), other=low)
        d2 = tl.load(row - 3 * C, mask=inside & (steps > 2), other=low)
        d3 = tl.load(row - 4 * C, mask=inside & (steps > 3), other=low)
        for n in range(1, steps + 1):
            at = t - n
            row -= C
            d = d0
            d0 = d1
            d1 = d2
            d2 = d3
            d3 = tl.load(row - 4 * C, mask=inside & (n + 4 <= steps), other=low)
            before = argmax_lowest(d + tl.load(into + y * WIDTH, mask=inside, other=low), j, CP)
            # Into the first label of the chunk, too, from what the chunk before it must end with.
            cost = tl.load(move + before * C + y).to(tl.float64)
            total += tl.where(at + 1 < stop, cost, 0.0)
            here = (at < stop) & (at >= first)
            total += tl.where(here, tl.load(e_row + at.to(tl.int64) * C + before).to(tl.float64), 0.0)
            tl.store(labels + wide * T + at, before, mask=here)
            tl.store(meetings + wide * chunks + number, before, mask=at == stop)
            y = before
        total += tl.where(first == 0, tl.load(start + y).to(tl.float64), 0.0)
        tl.store(sums + wide * chunks + number, total)


@triton.jit(do_not_specialize=["T", "chunk", "chunks"])
def join_chunks(lengths, redo, sums, meetings, labels, scores, T, chunk, chunks, BK: tl.constexpr):
    """Scores (B,), where all chunks meet; elsewhere ``redo`` becomes 1. Grid (B,)."""
    item = tl.program_id(0)
    wide = item.to(tl.int64)
    length = tl.load(lengths + item).to(tl.int32)
    total = tl.zeros((BK,), tl.float64)
    apart = tl.zeros((BK,), tl.int32)
    for begin in range(0, chunks, BK):
        n = begin + tl.arange(0, BK)
        there = n * chunk < length
        total += tl.load(sums + wide * chunks + n, mask=there, other=0.0)
        next_one = (n + 1) * chunk
        met = next_one < length
        believed = tl.load(meetings + wide * chunks + n, mask=met, other=0)
        is_so = tl.load(labels + wide * T + next_one, mask=met, other=0).to(tl.int32)
        apart += (believed != is_so).to(tl.int32)
    if tl.sum(apart, axis=0) > 0:
        tl.store(redo + item, 1)
    tl.store(scores + item, tl.sum(total, axis=0))
