"""What follows a pass of queries over patterns: its parts put together, the queries moved, energies written."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero

__all__ = ["join", "join_step", "move", "offset", "step", "weigh"]


@triton.jit
def offset(facts, rest):
    """What energies have beside the query: half the square of the largest norm, and the rest."""
    largest = tl.load(facts)
    return largest * largest / 2 + rest


@triton.jit
def step(
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
def move(
    state,
    status,
    tops,
    totals,
    mixes,
    facts,
    energies,
    steps,
    converged,
    row,
    rows,
    inner,
    parts,
    t,
    most,
    factor,
    tol,
    rest,
    MIX: tl.constexpr,
    PC: tl.constexpr,
    DP: tl.constexpr,
):
    """Put the parts together for one query and move it; row is (1,)."""
    column = tl.arange(0, DP)
    stands = tl.load(status + row)
    if tl.min(stands, axis=0) < 2:
        top, total, mixed = _together(tops, totals, mixes, row, rows, inner, parts, MIX, PC, DP)
        place = state + row.to(tl.int64)[:, None] * inner + column[None, :]
        within = (column < inner)[None, :]
        q = tl.load(place, mask=within, other=0.0)
        counts, still = tl.load(steps + row).to(tl.int32), tl.load(converged + row).to(tl.int32)
        q, stands, counts, still = step(
            t, row, q, top, total, mixed, stands, counts, still, energies, most, factor, tol, offset(facts, rest), 16
        )
        tl.store(place, q, mask=within)
        tl.store(status + row, stands)
        tl.store(steps + row, counts.to(tl.int64))
        tl.store(converged + row, still.to(tl.uint8))


@triton.jit(do_not_specialize=["t"])
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
    rest,
    MIX: tl.constexpr,
    PC: tl.constexpr,
    DP: tl.constexpr,
):
    """Put the parts together for one query and move it."""
    row = tl.program_id(0) + tl.arange(0, 1)
    move(
        *(state, status, tops, totals, mixes, facts, energies, steps, converged, row),
        *(rows, inner, parts, t, most, factor, tol, rest, MIX, PC, DP),
    )


@triton.jit
def join(out, lse, tops, totals, mixes, rows, outer, parts, factor, PC: tl.constexpr, EP: tl.constexpr):
    """Put the parts together for one query: what it is given and its log-sum-exp."""
    row, other = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, EP)
    found = _together(tops, totals, mixes, row, rows, outer, parts, True, PC, EP)
    top, total, mixed = found  # pyright: ignore[reportGeneralTypeIssues]
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * outer + other[None, :], mixed, mask=(other < outer)[None, :])
    tl.store(lse + row, (top + tl.log2(tl.where(total > 0, total, 1.0))) / factor)


@triton.jit
def weigh(scores, status, tops, totals, count, factor, KEEP: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr):
    """Scores of one query in place to exp2(factor s - top), if they are to be kept; top, and the total of these.

    A row of no more than BN entries (WHOLE) is read once.
    """
    row = tl.program_id(0)
    if tl.load(status + row) < 2:
        here, place = scores + row.to(tl.int64) * count, tl.arange(0, BN)
        if WHOLE:
            entries = tl.load(here + place, mask=place < count, other=-float("inf")) * factor
            top = tl.max(entries, axis=0)
            weights = tl.exp2(entries - finite_or_zero(top))
            total = tl.sum(weights, axis=0)
            if KEEP:
                tl.store(here + place, weights, mask=place < count)
        else:
            top = -float("inf")
            for first in range(0, count, BN):
                entries = tl.load(here + first + place, mask=first + place < count, other=-float("inf"))
                top = tl.maximum(top, tl.max(entries * factor, axis=0))
            total = 0.0
            for first in range(0, count, BN):
                inside = first + place < count
                entries = tl.load(here + first + place, mask=inside, other=-float("inf"))
                weights = tl.exp2(entries * factor - finite_or_zero(top))
                if KEEP:
                    tl.store(here + first + place, weights, mask=inside)
                total += tl.sum(weights, axis=0)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
