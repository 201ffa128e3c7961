"""Messages and posteriors of a chain in the log domain, exact for any scores and for transitions of any kind.

Serves per-step transitions, more labels than registers hold, and the items that underflow in `chain_walks`. Each step

    z(j) = log sum_i exp(x(i) + A(i, j)) + e(j) - m,      x = z - max z,

where the maximum of every column is taken off before the exponential; for Viterbi a maximum stands for log sum exp.
Tiles are (BR, CP); with BR < CP the vector goes through global memory and the rows of A are visited in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero, log_or_minus_inf, matrix_at
from thalweg.kernels.gpu.chain_walks import RISK, ROWS, SUMS, TOP

__all__: list[str] = []


@triton.jit
def _tile(source, row, backwards, C, live, CP: tl.constexpr, BR: tl.constexpr):
    """Rows ``row ..`` of A, or of its transpose walking backwards; -inf outside. Read along its rows either way."""
    block = row + tl.arange(0, BR)
    j = tl.arange(0, CP)
    if backwards == 1:
        turned_mask = (j < C)[:, None] & (block < C)[None, :] & live
        turned = tl.load(source + j[:, None] * C + block[None, :], mask=turned_mask, other=-float("inf"))
        tile = tl.trans(turned)
    else:
        mask = (block < C)[:, None] & (j < C)[None, :] & live
        tile = tl.load(source + block[:, None] * C + j[None, :], mask=mask, other=-float("inf"))
    return tile


@triton.jit
def _columns(v, MAX: tl.constexpr, BR: tl.constexpr, CP: tl.constexpr):
    """Column maxima and sums of exp(v - maximum); four chains of additions side by side."""
    cube = tl.reshape(v, [BR // 4, 4, CP])
    top = tl.max(tl.max(cube, axis=0), axis=0)
    total = top
    if not MAX:
        total = tl.sum(tl.sum(tl.exp(cube - finite_or_zero(top)[None, None, :]), axis=0), axis=0)
    return top, total


@triton.jit
def _lost(facts, item, B, backwards: tl.constexpr, tolerance):
    """Whether a scaled walk lost all of its value, or some: then it and that of the floored walk differ."""
    low = tl.load(facts + B * backwards + item)
    risky = tl.load(facts + B * RISK + item) != 0.0
    high = tl.load(facts + B * (backwards + 2) + item, mask=risky, other=-float("inf"))
    return ((low > -float("inf")) & (high - finite_or_zero(low) <= tolerance)) == 0


@triton.jit
def _constants(facts, item, B, T):
    """What was taken off emissions, less the gold score: a sum in the same order every time."""
    blocks = tl.cdiv(T, ROWS)
    total = tl.zeros([128], tl.float64)
    for begin in range(0, blocks, 128):
        block = begin + tl.arange(0, 128)
        total += tl.load(facts + (block + SUMS) * B + item, mask=block < blocks, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["T", "C"])
def log_walk(
    emissions, transitions, start, end, lengths, scales, facts, flags, values, messages, work,
    T, C, every,
    CP: tl.constexpr, BR: tl.constexpr, KIND: tl.constexpr, MAX: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """The values, and the walk along one item in the log domain: grid (B, 2) or, without the way backwards, (B, 1).

    Where there was a scaled walk (the matrix fits, and serves all steps), an item that came well through it is done,
    and ``flags[b]`` says which did not. ``messages`` (B, 1 or 2, slots, C) gets log alpha and log beta, or Viterbi's
    delta, with maximum 0 at every so manieth position, ``scales[1]`` (B, T) what was taken off log beta. For BR < CP
    there is ``work`` (B, 1 or 2, 2, CP).
    """
    item, backwards = tl.program_id(0), tl.program_id(1)
    wide, B, ways = item.to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    kind: tl.constexpr = emissions.dtype.element_ty
    low = -float("inf")
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    if KIND < 2 and BR == CP:
        tolerance = 1e-13 if kind == tl.float64 else 1e-6
        bad = _lost(facts, item, B, 0, tolerance)
        if ways == 2:
            bad = bad | _lost(facts, item, B, 1, tolerance)
        value = finite_or_zero(tl.load(facts + item)) + _constants(facts, item, B, T)
        value += tl.where(final > 0, final.to(tl.float64) * tl.load(facts + B * TOP + item), 0.0)
        tl.store(flags + item, bad.to(tl.int32), mask=backwards == 0)
        tl.store(values + item, SIGN * value, mask=(backwards == 0) & (bad == 0))
        if bad == 0:
            return
    j = tl.arange(0, CP)
    inside = j < C
    at_start = tl.load(start + j, mask=inside, other=0.0)
    at_end = tl.load(end + j, mask=inside, other=0.0)
    opening = tl.where(backwards == 1, at_end, at_start)
    extra = tl.where(backwards == 1, at_start, at_end)
    sign = 1 - 2 * backwards
    position = backwards * final
    e = tl.load(emissions + (wide * T + position) * C + j, mask=inside, other=low) + opening
    e = tl.where(final == 0, e + extra, e)
    if not MAX:
        e -= tl.load(scales + wide * T + position)
    kept = messages + (wide * ways + backwards) * tl.cdiv(T, every) * C + j
    scratch = work + (wide * ways + backwards) * 2 * CP
    x = e
    first = tl.where(backwards == 1, 0.0, x)
    tl.store(kept + (position // every).to(tl.int64) * C, first, mask=inside & (position % every == 0))
    offset = tl.zeros([1], tl.float64)
    # The matrix between n - 1 and n walking forwards, between final - n and final - n + 1 walking backwards.
    matrix = matrix_at(transitions, item, backwards * (final - 1), T, C, KIND)
    held = x
    if BR == CP:
        held = _tile(matrix, 0, backwards, C, final > 0, CP, BR)
    for n in range(1, length):
        if BR == CP:
            top, total = _columns(x[:, None] + held, MAX, BR, CP)
            if KIND == 2:
                matrix += sign * C * C
                held = _tile(matrix, 0, backwards, C, n < final, CP, BR)
        else:
            vector = scratch + (n % 2) * CP
            tl.store(vector + j, x)
            tl.debug_barrier()
            top = tl.full([CP], low, kind)
            total = tl.zeros([CP], kind)
            for row in range(0, CP, BR):
                tile = _tile(matrix, row, backwards, C, n > 0, CP, BR)
                block = tl.load(vector + row + tl.arange(0, BR))
                tile_top, tile_total = _columns(block[:, None] + tile, MAX, BR, CP)
                larger = tl.maximum(top, tile_top)
                if not MAX:
                    base = finite_or_zero(larger)
                    total = total * tl.exp(top - base) + tile_total * tl.exp(finite_or_zero(tile_top) - base)
                top = larger
            if KIND == 2:
                matrix += sign * C * C
        position += sign
        at = wide * T + position
        e = tl.load(emissions + at * C + j, mask=inside, other=low)
        e = tl.where(n == final, e + extra, e)
        z = top
        if not MAX:
            e -= tl.load(scales + at)
            z += log_or_minus_inf(total)
        z = tl.where(backwards == 1, z, z + e)
        norm = finite_or_zero(tl.max(z, axis=0))
        z -= norm
        offset += norm.to(tl.float64)
        tl.store(kept + (position // every).to(tl.int64) * C, z, mask=inside & (position % every == 0))
        if not MAX:
            tl.store(scales + at + B.to(tl.int64) * T, norm, mask=backwards == 1)
        x = tl.where(backwards == 1, z + e, z)
    if not MAX:
        top = finite_or_zero(tl.max(x, axis=0))
        mass = tl.sum(tl.exp(x - top).to(tl.float64), axis=0)
        value = tl.log(tl.where(mass > 0, mass, 1.0)) + top.to(tl.float64) + tl.sum(offset, axis=0)
        value += _constants(facts, item, B, T)
        tl.store(values + item, SIGN * tl.where(mass > 0, value, low), mask=backwards == 0)


@triton.jit
def _softmax(z):
    """exp(z) / sum exp(z); zeros where all is -inf."""
    weights = tl.exp(z - finite_or_zero(tl.max(z, axis=0)))
    total = tl.sum(weights, axis=0)
    return weights / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["B", "T", "C"])
def log_posterior(
    emissions, transitions, end, lengths, gold, weights, scales, messages, flags, d_emissions, d_transitions,
    B, T, C,
    CP: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, GOLD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Gradients of the items that live in the log domain: grid (programs, CP / BI), each with BI rows of A.

    KIND 0 (shared): program g takes units g, g + programs, ... of BT positions of an item and writes the partial sum
    ``d_transitions[g]`` (CP, CP). KIND 1: an item each. KIND 2: as 0, but every step's matrix is written in its place.
    """
    program = tl.program_id(0)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    j = tl.arange(0, CP)
    inside = j < C
    pairs = (i < C)[:, None] & inside[None, :]
    owns_rows = tl.program_id(1) == 0
    last = tl.load(end + j, mask=inside, other=0.0)
    kind: tl.constexpr = emissions.dtype.element_ty
    total = tl.zeros([BI, CP], kind)
    any_used = program * 0
    blocks = tl.cdiv(T, BT)
    first = program * blocks if KIND == 1 else program
    stop = first + blocks if KIND == 1 else B * blocks
    stride = 1 if KIND == 1 else tl.num_programs(0)
    for unit in range(first, stop, stride):
        item = unit // blocks
        wide = item.to(tl.int64)
        flagged = 1
        if KIND < 2 and BI == CP:  # there was a scaled walk
            flagged = tl.load(flags + item)
        if flagged != 0:
            any_used = program * 0 + 1
            length = tl.load(lengths + item).to(tl.int32)
            weight = tl.load(weights + item)
            begin = (unit % blocks) * BT
            for t in range(begin, tl.minimum(begin + BT, T)):
                live = t < length
                moved = live & (t > 0)
                row = (wide * T + t) * C
                forth = messages + row + wide * T * C
                back = forth + T.to(tl.int64) * C
                here = inside & live
                alpha = tl.load(forth + j, mask=here, other=-float("inf"))
                beta = tl.load(back + j, mask=here, other=-float("inf"))
                slope = weight * _softmax(alpha + beta)
                e = tl.load(emissions + row + j, mask=here, other=-float("inf"))
                e = tl.where(t == length - 1, e + last, e) - tl.load(scales + wide * T + t, mask=live, other=0.0)
                before = tl.load(forth - C + i, mask=(i < C) & moved, other=-float("inf"))
                move = matrix_at(transitions, item, t - 1, T, C, KIND)
                scores = tl.load(move + i[:, None] * C + j[None, :], mask=pairs & moved, other=-float("inf"))
                if BI == CP:
                    v = before[:, None] + scores + (beta + e)[None, :]
                    v = tl.exp(v - finite_or_zero(tl.max(tl.max(v, axis=0), axis=0)))
                    mass = tl.sum(tl.sum(v, axis=0), axis=0)
                    v = v * (weight / tl.where(mass > 0, mass, 1.0))
                else:
                    # The mass of a step from the messages around it, as A is not seen whole here.
                    norm = tl.load(scales + (B + wide) * T + t - 1, mask=moved, other=0.0)
                    both = tl.load(forth - C + j, mask=inside & moved, other=-float("inf"))
                    both += tl.load(back - C + j, mask=inside & moved, other=-float("inf"))
                    top = finite_or_zero(tl.max(both, axis=0))
                    mass = tl.sum(tl.exp(both - top), axis=0)
                    top += tl.log(tl.where(mass > 0, mass, 1.0))
                    v = weight * tl.exp((scores - norm) + before[:, None] + (beta + e)[None, :] - top)
                if GOLD:
                    y = tl.load(gold + wide * T + t, mask=live, other=-1)
                    slope -= tl.where(j == y, weight, 0.0)
                    y_before = tl.load(gold + wide * T + t - 1, mask=moved, other=-1)
                    v -= tl.where((i == y_before)[:, None] & (j == y)[None, :] & moved, weight, 0.0)
                tl.store(d_emissions + row + j, tl.where(live, slope, 0.0), mask=inside & owns_rows)
                if KIND == 2:
                    target = d_transitions + (wide * (T - 1) + t - 1) * C * C
                    tl.store(target + i[:, None] * C + j[None, :], v, mask=pairs & (t > 0))
                else:
                    total += v
    if KIND == 0:
        target = d_transitions + program.to(tl.int64) * CP * CP
        tl.store(target + i[:, None] * CP + j[None, :], total)
    if KIND == 1:
        target = d_transitions + program.to(tl.int64) * C * C
        tl.store(target + i[:, None] * C + j[None, :], total, mask=pairs & (any_used != 0))
