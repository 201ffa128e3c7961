"""Passes of queries over patterns on a GPU, and what follows a pass: the programs that ``gpu.memory`` launches.

Products are float32's own (``PRECISION`` "ieee") or three of TF32 each, which keep nearly as many digits. Scores are
kept in units of log 2 (``factor`` is beta log2 e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero

__all__ = ["HELD", "join", "join_step", "part", "whole"]

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
            mixed = tl.dot(weights, held, mixed * decay[:, None], input_precision=PRECISION)
        top = higher
    return top, total, mixed


@triton.jit
def _step(
    t,
    row,
    q,
    top,
    total,
    mixed,
    status,
    counts,
    still,
    energies,
    most,
    factor,
    tol,
    offset,
    SP: tl.constexpr,
):
    """Where queries stand after a pass at step t; ``status`` is 0 on the way, 1 at rest without an energy, 2 done.

    Writes the energies that are known now; returns the queries, their status, how many steps they made and whether
    the last one was short enough.
    """
    active, resting = status == 0, status == 1
    beta = factor * 0.6931471805599453
    lse = (top + tl.log2(tl.where(total > 0, total, 1.0))) / factor
    energy = offset + tl.sum(q * q, axis=1) / 2 - lse
    here = energies + row.to(tl.int64) * (most + 1)
    tl.store(here + t, energy, mask=active)
    new = mixed / tl.where(total > 0, total, 1.0)[:, None]
    way = new - q
    square = tl.sum(way * way, axis=1)
    short = active & (tl.sqrt(square) <= tol)
    counts = tl.where(active, t + 1, counts)
    still = tl.where(active, short.to(tl.int32), still)
    # lse is convex with a curvature of at most beta M^2, so that its line is off by less than 1e-7 M^2 here.
    known = short & (beta * square < 2e-7)
    ahead = offset + tl.sum(new * new, axis=1) / 2 - (lse + tl.sum(new * way, axis=1))
    last = tl.where(resting, energy, ahead)
    ended = resting | known
    if tl.max(ended.to(tl.int32), axis=0) > 0:
        for first in range(0, most + 1, SP):
            s = first + tl.arange(0, SP)
            left = (s[None, :] >= counts[:, None]) & (s[None, :] <= most) & ended[:, None]
            tl.store(here[:, None] + s[None, :], last[:, None] + tl.zeros((1, SP), tl.float32), mask=left)
    q = tl.where(active[:, None], new, q)
    rests = active & (short | (t + 1 >= most))
    status = tl.where(ended, 2, tl.where(rests, 1, status))
    return q, status, counts, still


@triton.jit
def whole(
    state,
    patterns,
    mask,
    facts,
    energies,
    steps,
    converged,
    rows,
    count,
    inner,
    most,
    factor,
    tol,
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
    offset = tl.load(facts)
    status = tl.where(inside, tl.where(most > 0, 0, 1), 2)
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
            q, status, counts, still = _step(
                t, row, q, top, total, mixed, status, counts, still, energies, most, factor, tol, offset, 16
            )
    tl.store(place, q, mask=within)
    tl.store(steps + row, counts.to(tl.int64), mask=inside)
    tl.store(converged + row, still, mask=inside)


@triton.jit
def part(
    queries,
    keys,
    values,
    mask,
    status,
    tops,
    totals,
    mixes,
    rows,
    count,
    length,
    inner,
    outer,
    factor,
    STATUS: tl.constexpr,
    MASKED: tl.constexpr,
    SAME: tl.constexpr,
    MIX: tl.constexpr,
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
    going = 0
    if STATUS:
        going = tl.min(tl.load(status + row, mask=inside, other=2), axis=0)
    if going < 2:
        start = queries + row.to(tl.int64)[:, None] * inner
        if DP > HELD:
            q = inside[:, None].to(tl.int32)
        else:
            q = tl.load(start + column[None, :], mask=inside[:, None] & (column < inner)[None, :], other=0.0)
        low = which * length
        high = tl.minimum(low + length, count)
        top, total, mixed = _look(  # pyright: ignore[reportGeneralTypeIssues]
            q, start, keys, values, mask, low, high, inner, outer, factor, MASKED, SAME, MIX, BQ, BN, DP, EP, PRECISION
        )
        place = which * rows + row
        tl.store(tops + place, top, mask=inside)
        tl.store(totals + place, total, mask=inside)
        if MIX:
            to = mixes + place.to(tl.int64)[:, None] * outer + other[None, :]
            tl.store(to, mixed, mask=inside[:, None] & (other < outer)[None, :])


@triton.jit
def _together(tops, totals, mixes, row, rows, outer, parts, MIX: tl.constexpr, PC: tl.constexpr, EP: tl.constexpr):
    """The passes over all parts as one, for a single query: top (1,), total (1,), mixed (1, EP)."""
    which, other = tl.arange(0, PC), tl.arange(0, EP)
    top = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, EP), tl.float32)
    for first in range(0, parts, PC):
        part = first + which
        inside = part < parts
        place = part * rows + row
        above = tl.load(tops + place, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(above, axis=0))
        level = finite_or_zero(higher)
        decay, scale = tl.exp2(top - level), tl.exp2(above - level)
        total = total * decay + tl.sum(tl.load(totals + place, mask=inside, other=0.0) * scale, axis=0)
        if MIX:
            within = inside[:, None] & (other < outer)[None, :]
            entries = tl.load(mixes + place.to(tl.int64)[:, None] * outer + other[None, :], mask=within, other=0.0)
            mixed = mixed * decay[:, None] + tl.sum(entries * scale[:, None], axis=0)[None, :]
        top = higher
    return top, total, mixed


@triton.jit
def join_step(
    state,
    status,
    tops,
    totals,
    mixes,
    facts,
    energies,
    steps,
    converged,
    rows,
    inner,
    parts,
    t,
    most,
    factor,
    tol,
    MIX: tl.constexpr,
    PC: tl.constexpr,
    DP: tl.constexpr,
):
    """Put the parts together for one query and move it."""
    row, column = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, DP)
    stands = tl.load(status + row)
    if tl.min(stands, axis=0) < 2:
        top, total, mixed = _together(tops, totals, mixes, row, rows, inner, parts, MIX, PC, DP)
        place = state + row.to(tl.int64)[:, None] * inner + column[None, :]
        within = (column < inner)[None, :]
        q = tl.load(place, mask=within, other=0.0)
        counts, still = tl.load(steps + row).to(tl.int32), tl.load(converged + row)
        q, stands, counts, still = _step(
            t, row, q, top, total, mixed, stands, counts, still, energies, most, factor, tol, tl.load(facts), 16
        )
        tl.store(place, q, mask=within)
        tl.store(status + row, stands)
        tl.store(steps + row, counts.to(tl.int64))
        tl.store(converged + row, still)


@triton.jit
def join(out, lse, tops, totals, mixes, rows, outer, parts, factor, PC: tl.constexpr, EP: tl.constexpr):
    """Put the parts together for one query: what it is given and its log-sum-exp."""
    row, other = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, EP)
    found = _together(tops, totals, mixes, row, rows, outer, parts, True, PC, EP)
    top, total, mixed = found  # pyright: ignore[reportGeneralTypeIssues]
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * outer + other[None, :], mixed, mask=(other < outer)[None, :])
    tl.store(lse + row, (top + tl.log2(tl.where(total > 0, total, 1.0))) / factor)
