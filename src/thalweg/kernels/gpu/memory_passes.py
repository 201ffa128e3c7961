"""Passes of queries over patterns on a GPU: programs that ``gpu.memory`` launches.

Products are float32's own (``PRECISION`` "ieee") or three of TF32 each, which keep nearly as many digits. Scores are
kept in units of log 2 (``factor`` is beta log2 e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero
from thalweg.kernels.gpu.memory_steps import move, offset, step

__all__ = ["HELD", "joint", "once", "part", "whole"]

# Features of queries that stay in registers; wider ones are read again for every block of patterns.
HELD = tl.constexpr(128)


@triton.jit
def _score(
    q,
    source,
    keys,
    row,
    inside,
    inner,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Dot products (BQ, BN) where queries are too wide to be held: a piece of the features at a time."""
    total = tl.zeros((BQ, BN), tl.float32)
    for first in tl.static_range(0, DP, CHUNK):
        column = first + tl.arange(0, CHUNK)
        within = (column < inner)[None, :]
        piece = tl.load(source + column[None, :], mask=within & (q > 0), other=0.0)
        near = tl.load(keys + row * inner + column[None, :], mask=within & inside[:, None], other=0.0)
        total = tl.dot(piece, tl.trans(near), total, input_precision=PRECISION)
    return total


@triton.jit
def _look(
    q,
    source,
    keys,
    values,
    mask,
    low,
    high,
    inner,
    outer,
    factor,
    MASKED: tl.constexpr,
    SAME: tl.constexpr,
    MIX: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A pass of queries (BQ, DP) over the patterns low..high: top (BQ,), total (BQ,) and mixed (BQ, EP).

    Wide queries (DP > HELD) are read at ``source`` (BQ, 1) over and over; q (BQ, 1) says which of them there are.
    """
    place, column, other = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, EP)
    top = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    mixed = tl.zeros((BQ, EP), tl.float32)
    for start in range(low, high, BN):
        n = start + place
        inside = n < high
        if MASKED:
            inside = inside & (tl.load(mask + n, mask=inside, other=0) != 0)
        row = n.to(tl.int64)[:, None]
        if DP > HELD:
            scores = _score(q, source, keys, row, inside, inner, BQ, BN, HELD, DP, PRECISION) * factor
        else:
            near = tl.load(
                keys + row * inner + column[None, :], mask=(column < inner)[None, :] & inside[:, None], other=0.0
            )
            scores = tl.dot(q, tl.trans(near), input_precision=PRECISION) * factor
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        level = finite_or_zero(higher)
        weights = tl.exp2(scores - level[:, None])
        decay = tl.exp2(top - level)
        total = total * decay + tl.sum(weights, axis=1)
        if MIX:
            if SAME and DP <= HELD:
                held = near
            else:
                within = inside[:, None] & (other < outer)[None, :]
                held = tl.load(values + row * outer + other[None, :], mask=within, other=0.0)
            if PRECISION == "ieee":
                mixed = tl.dot(weights, held, mixed * decay[:, None], input_precision=PRECISION)
            else:
                # Matrix units cut off what they add up: sums over many blocks are taken outside of them.
                mixed = tl.fma(
                    mixed, tl.broadcast_to(decay[:, None], (BQ, EP)), tl.dot(weights, held, input_precision=PRECISION)
                )
        top = higher
    return top, total, mixed


@triton.jit
def whole(
    state,
    patterns,
    mask,
    facts,
    energies,
    steps,
    converged,
    status,
    rows,
    count,
    inner,
    most,
    factor,
    tol,
    rest,
    MASKED: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All steps of a block of queries."""
    row, column = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, DP)
    inside = row < rows
    place = state + row.to(tl.int64)[:, None] * inner + column[None, :]
    within = inside[:, None] & (column < inner)[None, :]
    q = tl.load(place, mask=within, other=0.0)
    beside = offset(facts, rest)
    status = tl.load(status + row, mask=inside, other=2)
    counts = tl.zeros((BQ,), tl.int32)
    still = tl.zeros((BQ,), tl.int32)
    for t in range(most + 1):
        going = tl.min(status, axis=0)
        if going < 2:
            if going == 0:
                top, total, mixed = _look(
                    q,
                    state,
                    patterns,
                    patterns,
                    mask,
                    0,
                    count,
                    inner,
                    inner,
                    factor,
                    MASKED,
                    True,
                    True,
                    BQ,
                    BN,
                    DP,
                    DP,
                    PRECISION,
                )
            else:
                top, total, mixed = _look(
                    q,
                    state,
                    patterns,
                    patterns,
                    mask,
                    0,
                    count,
                    inner,
                    inner,
                    factor,
                    MASKED,
                    True,
                    False,
                    BQ,
                    BN,
                    DP,
                    DP,
                    PRECISION,
                )
            q, status, counts, still = step(
                t, row, q, top, total, mixed, status, counts, still, energies, most, factor, tol, beside, 16
            )
    tl.store(place, q, mask=within)
    tl.store(steps + row, counts.to(tl.int64), mask=inside)
    tl.store(converged + row, still.to(tl.uint8), mask=inside)


@triton.jit
def once(
    queries,
    patterns,
    out,
    rows,
    count,
    inner,
    factor,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a block of queries that can be held is given in one association with all patterns."""
    row, column = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, DP)
    place = row.to(tl.int64)[:, None] * inner + column[None, :]
    within = (row < rows)[:, None] & (column < inner)[None, :]
    q = tl.load(queries + place, mask=within, other=0.0)
    _, total, mixed = _look(  # pyright: ignore[reportGeneralTypeIssues]
        *(q, queries, patterns, patterns, patterns, 0, count, inner, inner, factor),
        *(False, True, True, BQ, BN, DP, DP, PRECISION),
    )
    tl.store(out + place, mixed / total[:, None], mask=within)


@triton.jit
def part(
    queries,
    keys,
    values,
    mask,
    tops,
    totals,
    mixes,
    rows,
    count,
    length,
    inner,
    outer,
    factor,
    MASKED: tl.constexpr,
    SAME: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A pass of a block of queries over one part of the patterns."""
    row, column, other = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, DP), tl.arange(0, EP)
    which = tl.program_id(1)
    inside = row < rows
    start = queries + row.to(tl.int64)[:, None] * inner
    if DP > HELD:  # Triton's own `if`, decided while compiling
        q = inside[:, None].to(tl.int32)
    else:
        q = tl.load(start + column[None, :], mask=inside[:, None] & (column < inner)[None, :], other=0.0)
    low = which * length
    high = tl.minimum(low + length, count)
    top, total, mixed = _look(  # pyright: ignore[reportGeneralTypeIssues]
        q, start, keys, values, mask, low, high, inner, outer, factor, MASKED, SAME, True, BQ, BN, DP, EP, PRECISION
    )
    place = which * rows + row
    tl.store(tops + place, top, mask=inside)
    tl.store(totals + place, total, mask=inside)
    to = mixes + place.to(tl.int64)[:, None] * outer + other[None, :]
    tl.store(to, mixed, mask=inside[:, None] & (other < outer)[None, :])


@triton.jit
def _meet(count, wanted):
    """Go on when so many arrivals have been counted; what those who arrived had written can then be read."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")
    while tl.atomic_add(count, 0, sem="acquire") < wanted:
        pass
    tl.debug_barrier()


@triton.jit
def joint(
    state,
    patterns,
    mask,
    facts,
    energies,
    steps,
    converged,
    status,
    tops,
    totals,
    mixes,
    meetings,
    rows,
    count,
    length,
    inner,
    parts,
    most,
    factor,
    tol,
    rest,
    MASKED: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    DP: tl.constexpr,
    PC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All steps of a block of queries by as many programs as there are parts, which meet twice in every step.

    They wait for one another: all programs must be running at once (a cooperative launch).
    """
    block, which = tl.program_id(0), tl.program_id(1)
    own = tl.arange(0, BQ)
    row, column = block * BQ + own, tl.arange(0, DP)
    inside = row < rows
    start = state + row.to(tl.int64)[:, None] * inner
    low = which * length
    high = tl.minimum(low + length, count)
    place = which * rows + row
    to = mixes + place.to(tl.int64)[:, None] * inner + column[None, :]
    within = inside[:, None] & (column < inner)[None, :]
    for t in range(most + 1):
        going = tl.min(tl.load(status + row, mask=inside, other=2), axis=0)
        if going < 2:
            if DP > HELD:  # noqa: SIM108  # Triton's own `if`, decided while compiling
                q = inside[:, None].to(tl.int32)
            else:
                q = tl.load(start + column[None, :], mask=within, other=0.0)
            if going == 0:
                top, total, mixed = _look(  # pyright: ignore[reportGeneralTypeIssues]
                    *(q, start, patterns, patterns, mask, low, high, inner, inner, factor),
                    *(MASKED, True, True, BQ, BN, DP, DP, PRECISION),
                )
                tl.store(to, mixed, mask=within)
            else:
                top, total, _ = _look(  # pyright: ignore[reportGeneralTypeIssues]
                    *(q, start, patterns, patterns, mask, low, high, inner, inner, factor),
                    *(MASKED, True, False, BQ, BN, DP, DP, PRECISION),
                )
            tl.store(tops + place, top, mask=inside)
            tl.store(totals + place, total, mask=inside)
            _meet(meetings + block, (2 * t + 1) * parts)
            for mine in range(which, BQ, parts):
                if block * BQ + mine < rows:
                    move(
                        *(state, status, tops, totals, mixes, facts, energies, steps, converged, meetings),
                        *(block * BQ + mine + tl.arange(0, 1), rows, inner, parts, most, factor, tol, rest),
                        *(True, False, PC, DP),
                    )
            _meet(meetings + block, (2 * t + 2) * parts)
