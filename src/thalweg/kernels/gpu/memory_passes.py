"""What follows the products of queries and patterns on a GPU: weights, and queries that are moved by what they mix.

Scores are kept in units of log 2 (``factor`` is beta log2 e).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero

__all__ = ["DONE", "RESTS", "Cut", "join", "move", "weigh"]

# How a query stands: 0 on its way, RESTS at rest without an energy, DONE.
RESTS, DONE = tl.constexpr(1), tl.constexpr(2)

if TYPE_CHECKING:  # who checks types knows no members of constants
    constexpr = Any
else:
    constexpr = tl.constexpr


class Cut(NamedTuple):
    """What kernels know when they are compiled; widths are powers of two."""

    BN: int  # patterns that are looked at together
    PC: int  # parts that are put together at once
    EP: int  # entries of a value
    MASKED: bool  # not all patterns are present
    MIX: bool  # values are mixed; else only the log-sum-exp is wanted


@triton.jit
def _scores(here, mask, first, place, size, factor, CUT: constexpr):
    inside = place < size
    if CUT.MASKED:  # decided while compiling, as are all `if` on what is written in capitals
        inside = inside & (tl.load(mask + first + place, mask=inside, other=0) != 0)
    return tl.where(inside, tl.load(here + place, mask=inside, other=0.0) * factor, -float("inf"))


@triton.jit(do_not_specialize=["rows", "length", "step"])
def weigh(scores, mask, sums, rows, length, step, factor, CUT: constexpr):
    """Scores (parts, rows, length) of one query and one part in place to exp2(factor s - top); top and total to sums.

    Parts begin ``step`` patterns apart. What the next one has, too, has no weight here: only the last has all its own.
    """
    row, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = part * rows + row
    here, first = scores + place * length, part * step
    size = tl.where(part == tl.num_programs(1) - 1, length, step)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, size, CUT.BN):
        entries = _scores(here, mask, first, begin + tl.arange(0, CUT.BN), size, factor, CUT)
        higher = tl.maximum(top, tl.max(entries, axis=0))
        level = finite_or_zero(higher)
        total = total * tl.exp2(top - level) + tl.sum(tl.exp2(entries - level), axis=0)
        top = higher
    if CUT.MIX:
        level = finite_or_zero(top)
        for begin in range(0, length, CUT.BN):
            n = begin + tl.arange(0, CUT.BN)
            weights = tl.exp2(_scores(here, mask, first, n, size, factor, CUT) - level)
            tl.store(here + n, weights, mask=n < length)
    tl.store(sums + place * 2, top)
    tl.store(sums + place * 2 + 1, total)


@triton.jit
def _together(sums, mixes, nothing, place, rows, outer, parts, factor, CUT: constexpr):
    """The parts of one query as one: its mixture (EP,), not yet divided, the total and the log-sum-exp.

    ``nothing`` is a total of 0: 1 where no pattern is present; not a number where all that are score -inf.
    """
    which, other = tl.arange(0, CUT.PC), tl.arange(0, CUT.EP)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.full((CUT.EP,), 0.0, tl.float32)
    for first in range(0, parts, CUT.PC):
        part = first + which
        inside = part < parts
        at = part.to(tl.int64) * rows + place
        above = tl.load(sums + at * 2, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(above, axis=0))
        level = finite_or_zero(higher)
        decay, scale = tl.exp2(top - level), tl.exp2(above - level)
        total = total * decay + tl.sum(tl.load(sums + at * 2 + 1, mask=inside, other=0.0) * scale, axis=0)
        if CUT.MIX:
            within = inside[:, None] & (other < outer)[None, :]
            entries = tl.load(mixes + at[:, None] * outer + other[None, :], mask=within, other=0.0)
            mixed = mixed * decay + tl.sum(entries * scale[:, None], axis=0)
        top = higher
    if CUT.MASKED:
        total = tl.where(total == 0.0, tl.load(nothing), total)
    else:
        total = tl.where(total == 0.0, float("nan"), total)
    return mixed, total, (top + tl.log2(total)) / factor


@triton.jit(do_not_specialize=["rows", "parts"])
def join(out, lse, sums, mixes, nothing, rows, outer, parts, factor, CUT: constexpr):
    """What one query is given, and its log-sum-exp."""
    row, other = tl.program_id(0), tl.arange(0, CUT.EP)
    mixed, total, found = _together(  # pyright: ignore[reportGeneralTypeIssues]
        sums, mixes, nothing, row, rows, outer, parts, factor, CUT
    )
    tl.store(out + row.to(tl.int64) * outer + other, tl.div_rn(mixed, total), mask=other < outer)
    tl.store(lse + row, found)


@triton.jit(do_not_specialize=["rows", "parts", "most"])
def move(
    state, energies, stands, queries, order, offset, sums, mixes, nothing,
    rows, inner, parts, factor, most, tol, CUT: constexpr,
):  # fmt: skip
    """One query that is not done is moved to its mixture, or given the energy of where it rests.

    ``order`` (rows,) says whose query is at a place of ``queries``; it is written there and to its own place in
    ``state``, which may be the same. ``stands`` (Q, 3) has how it stands, its steps, and whether the last was no longer
    than ``tol``; ``offset`` what energies have beside the query. Energies (Q, most + 1) are filled to the end for who
    is done.
    """
    place, column = tl.program_id(0), tl.arange(0, CUT.EP)
    row = tl.load(order + place)
    own, here = stands + row * 3, energies + row * (most + 1)
    status, made = tl.load(own), tl.load(own + 1)
    if status < DONE:
        mixed, total, lse = _together(  # pyright: ignore[reportGeneralTypeIssues]
            sums, mixes, nothing, place, rows, inner, parts, factor, CUT
        )
        at, within, beside = queries + place.to(tl.int64) * inner + column, column < inner, tl.load(offset)
        q = tl.load(at, mask=within, other=0.0)
        active = status == 0
        energy = beside + tl.sum(q * q, axis=0) / 2 - lse
        tl.store(here + made, energy, mask=active)
        # Divided as float32 is, so that a pattern divided by a total of 1 is that pattern.
        new = tl.div_rn(mixed, total)
        way = new - q
        square = tl.sum(way * way, axis=0)
        short = active & (tl.sqrt(square) <= tol)
        # lse is convex with a curvature of at most beta M^2, so that its line is off by less than 1e-7 M^2 here.
        known = short & (factor * 0.6931471805599453 * square < 2e-7)
        ahead = beside + tl.sum(new * new, axis=0) / 2 - (lse + tl.sum(new * way, axis=0))
        last = tl.where(active, ahead, energy)
        made += active.to(tl.int32)
        after = tl.where(known | (status == RESTS), DONE, tl.where(short | (made >= most), RESTS, 0))
        tl.store(at, new, mask=within & active)
        tl.store(state + row * inner + column, new, mask=within & active)
        tl.store(own, after)
        tl.store(own + 1, made)
        tl.store(own + 2, short.to(tl.int32), mask=active)
        if after == DONE:
            for first in range(made, most + 1, 32):
                step = first + tl.arange(0, 32)
                tl.store(here + step, last + tl.zeros((32,), tl.float32), mask=step <= most)
