"""What follows a pass of queries over patterns: its parts put together, the queries moved, energies written."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero

__all__ = ["FEW", "SLOTS", "begin", "join", "join_step", "move", "offset", "pick_step", "step", "tell", "weigh"]

# Patterns that a query is mixed from one by one; of more, all are read.
FEW = tl.constexpr(32)
# Where programs that begin leave the largest square of their patterns, each in its own: none need be cleared before.
SLOTS = tl.constexpr(128)
# Share of the weights that may be left out: no more than what rounding does to the largest entry of a mixture.
_LEFT_OUT = tl.constexpr(2.0**-24)


@triton.jit
def offset(facts, rest):
    """What energies have beside the query: half the largest of the SLOTS squares at ``facts``, and the rest."""
    return tl.max(tl.load(facts + tl.arange(0, SLOTS)), axis=0) / 2 + rest


@triton.jit
def begin(
    queries,
    patterns,
    before,
    state,
    status,
    steps,
    converged,
    meetings,
    counters,
    facts,
    rows,
    count,
    inner,
    GIVEN: tl.constexpr,
    STANDS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    DP: tl.constexpr,
):
    """Before the first step: queries copied, all counts cleared, patterns looked through, a share by every program.

    Every query has the status STANDS, or its own of those that are ``before`` (GIVEN). ``facts`` (SLOTS,) has the
    largest squared norm of every program's patterns, 0 where it has none; a program has EACH of the slots.
    """
    which, column, place = tl.program_id(0), tl.arange(0, DP), tl.arange(0, BLOCK)
    within = (column < inner)[None, :]
    programs = SLOTS // EACH
    share = (rows + programs - 1) // programs
    high = tl.minimum((which + 1) * share, rows)
    for first in range(which * share, high, BLOCK):
        row = first + place
        inside = row < high
        spot = row.to(tl.int64)[:, None] * inner + column[None, :]
        here = inside[:, None] & within
        tl.store(state + spot, tl.load(queries + spot, mask=here, other=0.0), mask=here)
        if GIVEN:  # noqa: SIM108  # decided while compiling
            stands = tl.load(before + row, mask=inside, other=0)
        else:
            stands = tl.full((BLOCK,), STANDS, tl.int32)
        tl.store(status + row, stands, mask=inside)
        tl.store(steps + row, tl.zeros((BLOCK,), tl.int64), mask=inside)
        tl.store(converged + row, tl.zeros((BLOCK,), tl.uint8), mask=inside)
        tl.store(meetings + row, tl.zeros((BLOCK,), tl.int32), mask=inside)
    if which == 0:
        tl.store(counters + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    part = (count + programs - 1) // programs
    last = tl.minimum((which + 1) * part, count)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(which * part, last, BLOCK):
        row = first + place
        spot = row.to(tl.int64)[:, None] * inner + column[None, :]
        entries = tl.load(patterns + spot, mask=(row < last)[:, None] & within, other=0.0)
        largest = tl.maximum(largest, tl.sum(entries * entries, axis=1))
    tl.store(facts + which * EACH + tl.arange(0, EACH), tl.max(largest, axis=0) + tl.zeros((EACH,), tl.float32))


@triton.jit
def _report(counters, box):
    """The program that comes here last writes both counters down where the host looks, as one number: many, done.

    One that is never torn, so that the host need not wait for anything else; ``counters[2]`` has who came.
    """
    tl.debug_barrier()
    if tl.atomic_add(counters + 2, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        many = tl.atomic_add(counters, 0, sem="relaxed").to(tl.int64)
        done = tl.atomic_add(counters + 1, 0, sem="relaxed").to(tl.int64)
        tl.store(counters + 2, 0)
        tl.store(box, (many << 32) | done, cache_modifier=".wt")


@triton.jit
def tell(counters, box):
    """What the counters are now."""
    _report(counters, box)


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
    # Divided as float32 is, so that a pattern divided by a total of 1 is that pattern.
    new = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None])
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
def _advance(
    state,
    status,
    facts,
    energies,
    steps,
    converged,
    counters,
    row,
    top,
    total,
    mixed,
    inner,
    most,
    factor,
    tol,
    rest,
    COUNT: tl.constexpr,
    DP: tl.constexpr,
):
    """Move one query that is not done to where a pass sends it; row, top, total are (1,), mixed is (1, DP).

    The query itself says how many steps it made: not all are equally far. ``counters[1]`` has the queries that are
    done (COUNT).
    """
    column = tl.arange(0, DP)
    place = state + row.to(tl.int64)[:, None] * inner + column[None, :]
    within = (column < inner)[None, :]
    q = tl.load(place, mask=within, other=0.0)
    stands, counts = tl.load(status + row), tl.load(steps + row).to(tl.int32)
    still = tl.load(converged + row).to(tl.int32)
    q, stands, counts, still = step(  # pyright: ignore[reportGeneralTypeIssues]
        counts, row, q, top, total, mixed, stands, counts, still, energies, most, factor, tol, offset(facts, rest), 16
    )
    tl.store(place, q, mask=within)
    tl.store(status + row, stands)
    tl.store(steps + row, counts.to(tl.int64))
    tl.store(converged + row, still.to(tl.uint8))
    if COUNT:  # noqa: SIM102  # decided while compiling
        if tl.min(stands, axis=0) == 2:
            tl.atomic_add(counters + 1, 1, sem="relaxed")


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
    counters,
    row,
    rows,
    inner,
    parts,
    most,
    factor,
    tol,
    rest,
    MIX: tl.constexpr,
    COUNT: tl.constexpr,
    PC: tl.constexpr,
    DP: tl.constexpr,
):
    """Put the parts together for one query and move it; row is (1,)."""
    if tl.min(tl.load(status + row), axis=0) < 2:
        top, total, mixed = _together(tops, totals, mixes, row, rows, inner, parts, MIX, PC, DP)
        _advance(
            *(state, status, facts, energies, steps, converged, counters, row, top, total, mixed),
            *(inner, most, factor, tol, rest, COUNT, DP),
        )


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
    counters,
    rows,
    inner,
    parts,
    most,
    factor,
    tol,
    rest,
    MIX: tl.constexpr,
    PC: tl.constexpr,
    DP: tl.constexpr,
):
    """Put the parts together for one query and move it; counts those that are done."""
    row = tl.program_id(0) + tl.arange(0, 1)
    move(
        *(state, status, tops, totals, mixes, facts, energies, steps, converged, counters, row),
        *(rows, inner, parts, most, factor, tol, rest, MIX, True, PC, DP),
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
def _weights(here, place, count, factor):
    """exp2(factor s - top) of all scores of a query, 0 beyond them; top, and the total."""
    entries = tl.load(here + place, mask=place < count, other=-float("inf")) * factor
    top = tl.max(entries, axis=0)
    weights = tl.exp2(entries - finite_or_zero(top))
    return weights, top, tl.sum(weights, axis=0)


@triton.jit
def _chosen(weights, place, count, total):
    """Which weights matter, and how many these are: all others together are no more than _LEFT_OUT of the total.

    What is left out are the weights up to a level, lowered until they are light enough, or until FEW weights of the
    level could not make up for what is too much: then nothing is left out. NaN always matters.
    """
    bound = total * _LEFT_OUT
    level = bound
    light = tl.sum(tl.where(weights <= level, weights, 0.0), axis=0)
    while (light > bound) & (light <= bound + FEW * level):
        level = level / 4
        light = tl.sum(tl.where(weights <= level, weights, 0.0), axis=0)
    level = tl.where(light > bound, 0.0, level)
    chosen = (place < count) & ~(weights <= level)
    return chosen, tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def weigh(
    scores,
    status,
    tops,
    totals,
    counters,
    box,
    count,
    factor,
    KEEP: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,
    BN: tl.constexpr,
):
    """Scores of one query in place to exp2(factor s - top), if they are to be kept; top, and the total of these.

    A row of no more than BN entries (WHOLE) is read once; ``counters[0]`` then has the queries for which more than FEW
    weights matter, and the host is told (COUNT).
    """
    row = tl.program_id(0)
    if tl.load(status + row) < 2:
        here, place = scores + row.to(tl.int64) * count, tl.arange(0, BN)
        if WHOLE:
            weights, top, total = _weights(here, place, count, factor)  # pyright: ignore[reportGeneralTypeIssues]
            if KEEP:
                tl.store(here + place, weights, mask=place < count)
            if COUNT:
                _, many = _chosen(weights, place, count, total)  # pyright: ignore[reportGeneralTypeIssues]
                if many > FEW:
                    tl.atomic_add(counters, 1, sem="relaxed")
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
    if COUNT:
        _report(counters, box)


@triton.jit
def _mix_few(weights, chosen, many, place, patterns, inner, BN: tl.constexpr, DP: tl.constexpr):
    """The chosen patterns (1, DP), one after another by their places: equal weights are no matter."""
    column = tl.arange(0, DP)
    mixed = tl.zeros((1, DP), tl.float32)
    last = tl.full((), -1, tl.int32)
    for _ in range(many):
        last = tl.min(tl.where(chosen & (place > last), place, BN), axis=0)
        # From the registers: computed again, a weight may round otherwise than it did for the total.
        weight = tl.sum(tl.where(place == last, weights, 0.0), axis=0)
        pattern = tl.load(patterns + last.to(tl.int64) * inner + column, mask=column < inner, other=0.0)
        mixed += (weight * pattern)[None, :]
    return mixed


@triton.jit
def _mix_all(weights, here, place, count, patterns, inner, BLOCK: tl.constexpr, DP: tl.constexpr):
    """All patterns (1, DP), a block at a time; the weights go through the memory of the scores."""
    column = tl.arange(0, DP)
    tl.debug_barrier()
    tl.store(here + place, weights, mask=place < count)
    tl.debug_barrier()
    mixed = tl.zeros((1, DP), tl.float32)
    for first in range(0, count, BLOCK):
        n = first + tl.arange(0, BLOCK)
        weight = tl.load(here + n, mask=n < count, other=0.0)
        within = (n < count)[:, None] & (column < inner)[None, :]
        held = tl.load(patterns + n.to(tl.int64)[:, None] * inner + column[None, :], mask=within, other=0.0)
        mixed += tl.sum(weight[:, None] * held, axis=0)[None, :]
    return mixed


@triton.jit
def pick_step(
    scores,
    patterns,
    state,
    status,
    facts,
    energies,
    steps,
    converged,
    counters,
    box,
    count,
    inner,
    most,
    factor,
    tol,
    rest,
    ALL: tl.constexpr,
    REPORT: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    DP: tl.constexpr,
):
    """Weigh the patterns for one query, mix the few that matter, and move it; no weights are written.

    Where more than FEW matter (``counters[0]`` has these queries), all patterns are mixed (ALL), slowly, or the query
    stays where it is, with a step less than others. The host may be told (REPORT).
    """
    row, place = tl.program_id(0), tl.arange(0, BN)
    stands = tl.load(status + row)
    if stands < 2:
        here = scores + row.to(tl.int64) * count
        weights, top, total = _weights(here, place, count, factor)  # pyright: ignore[reportGeneralTypeIssues]
        chosen, many = _chosen(weights, place, count, total)  # pyright: ignore[reportGeneralTypeIssues]
        many = tl.where(stands == 0, many, 0)  # at rest it only wants an energy
        mixed = tl.zeros((1, DP), tl.float32)
        if many > FEW:
            tl.atomic_add(counters, 1, sem="relaxed")
            if ALL:
                mixed = _mix_all(weights, here, place, count, patterns, inner, BLOCK, DP)
        else:
            mixed = _mix_few(weights, chosen, many, place, patterns, inner, BN, DP)
        if (many <= FEW) | ALL:
            one = tl.arange(0, 1)
            _advance(
                *(state, status, facts, energies, steps, converged, counters, row + one, top + one, total + one, mixed),
                *(inner, most, factor, tol, rest, True, DP),
            )
    if REPORT:
        _report(counters, box)
