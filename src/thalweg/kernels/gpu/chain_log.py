"""Messages and posteriors of a chain in the log domain, exact for any scores and for transitions of any kind.

Serves per-step transitions, more labels than registers hold, and the items that underflow in `chain_scaled`. Each step

    z(j) = log sum_i exp(x(i) + A(i, j)) + e(j) - m,      x = z - max z,

where the maximum of every column is taken off before the exponential. Tiles are (BR, CP); with BR < CP the vector goes
through global memory and the rows of A are visited in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero, log_or_minus_inf
from thalweg.kernels.gpu.chain_scaled import sum_of

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
def _log_sum_columns(v, BR: tl.constexpr, CP: tl.constexpr):
    """Column maxima (finite) and sums of exp(v - maximum); four chains of additions side by side."""
    cube = tl.reshape(v, [BR // 4, 4, CP])
    top = tl.max(tl.max(cube, axis=0), axis=0)
    base = finite_or_zero(top)
    return top, tl.sum(tl.sum(tl.exp(cube - base[None, None, :]), axis=0), axis=0)


@triton.jit
def failed(stats, totals, which, item, here, kind: tl.constexpr, BOTH: tl.constexpr):
    """Whether the scaled walk over an item lost anything: all of it, or its value and the floored walk's differ.

    Of one item or of several, those that are ``here``.
    """
    risky = tl.load(stats + 2 * which + 1, mask=here, other=0.0) != 0.0
    tolerance = 1e-13 if kind == tl.float64 else 1e-6
    sound = _sound(totals + item * 4, here, risky, tolerance)
    if BOTH:
        sound = sound & _sound(totals + item * 4 + 1, here, risky, tolerance)
    return sound == 0


@triton.jit
def _sound(totals, here, risky, tolerance):
    low = tl.load(totals, mask=here, other=0.0)
    high = tl.load(totals + 2, mask=risky, other=-float("inf"))
    return (low > -float("inf")) & (high - finite_or_zero(low) <= tolerance)


@triton.jit(do_not_specialize=["B", "T", "C", "blocks", "per_item", "stride_item", "stride_step"])
def log_recurse(
    emissions,
    transitions,
    start,
    end,
    lengths,
    shift,
    sums,
    stats,
    totals,
    flags,
    values,
    messages,
    norms,
    work,
    B,
    T,
    C,
    blocks,
    per_item,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    BR: tl.constexpr,
    KEEP: tl.constexpr,
    BOTH: tl.constexpr,
    ALWAYS: tl.constexpr,
    PER_STEP: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Walk along one item in the log domain: grid (B, 2) or, without the backward walk, (B, 1).

    Unless ALWAYS, an item that came well through the scaled walk is left alone at once and ``flags[b]`` says which.
    With KEEP, ``messages`` (2, B, T, C) gets log alpha and log beta with maximum 0 at each position. For BR < CP
    there are ``norms`` (B, T), what was taken off log beta, and ``work`` (B, 2, 2, CP).
    """
    item = tl.program_id(0)
    backwards = tl.program_id(1)
    kind: tl.constexpr = emissions.dtype.element_ty
    if not ALWAYS:
        bad = failed(stats, totals, item * per_item, item, item < B, kind, BOTH)
        if backwards == 0:
            tl.store(flags + item, bad.to(tl.int32))
        if bad == 0:
            return
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    j = tl.arange(0, CP)
    inside = j < C
    at_start = tl.load(start + j, mask=inside, other=0.0)
    at_end = tl.load(end + j, mask=inside, other=0.0)
    extra = tl.where(backwards == 1, at_start, at_end)
    sign = 1 - 2 * backwards
    origin = item.to(tl.int64) * T + backwards * final
    e = tl.load(emissions + origin * C + j, mask=inside, other=-float("inf"))
    e += tl.where(backwards == 1, at_end, at_start)
    e = tl.where(final == 0, e + extra, e) - tl.load(shift + origin)
    kept = messages + (backwards * B.to(tl.int64) * T + origin) * C + j
    scratch = work + (item * 2 + backwards).to(tl.int64) * 2 * CP
    x = tl.where(inside, e, -float("inf"))
    if KEEP:
        tl.store(kept, tl.where(backwards == 1, 0.0, x), mask=inside)
    offset = tl.zeros([1], tl.float64)
    matrices = transitions + item.to(tl.int64) * stride_item
    # The matrix between n - 1 and n walking forwards, between final - n and final - n + 1 walking backwards.
    place = backwards * (final - 1)
    if BR == CP:
        held = _tile(matrices + place.to(tl.int64) * stride_step, 0, backwards, C, final > 0, CP, BR)
    for n in range(1, length):
        if BR == CP:
            top, total = _log_sum_columns(x[:, None] + held, BR, CP)
            if PER_STEP:
                place += sign
                held = _tile(matrices + place.to(tl.int64) * stride_step, 0, backwards, C, n < final, CP, BR)
        else:
            vector = scratch + (n % 2) * CP
            tl.store(vector + j, x)
            tl.debug_barrier()
            top = tl.full([CP], -float("inf"), kind)
            total = tl.zeros([CP], kind)
            for row in range(0, CP, BR):
                tile = _tile(matrices + place.to(tl.int64) * stride_step, row, backwards, C, n > 0, CP, BR)
                block = tl.load(vector + row + tl.arange(0, BR))
                tile_top, tile_total = _log_sum_columns(block[:, None] + tile, BR, CP)
                larger = tl.maximum(top, tile_top)
                base = finite_or_zero(larger)
                total = total * tl.exp(top - base) + tile_total * tl.exp(finite_or_zero(tile_top) - base)
                top = larger
            if PER_STEP:
                place += sign
        at = origin + n * sign
        e = tl.load(emissions + at * C + j, mask=inside, other=-float("inf"))
        e = tl.where(n == final, e + extra, e) - tl.load(shift + at)
        z = log_or_minus_inf(total) + top
        z = tl.where(backwards == 1, z, z + e)
        norm = finite_or_zero(tl.max(z, axis=0))
        z = z - norm
        offset += norm.to(tl.float64)
        if KEEP:
            kept += sign * C
            tl.store(kept, z, mask=inside)
            if BOTH and BR < CP:
                tl.store(norms + at, norm, mask=backwards == 1)
        x = tl.where(backwards == 1, z + e, z)
    if backwards == 0:
        top = tl.max(x, axis=0)
        total = tl.sum(tl.exp(x - finite_or_zero(top)).to(tl.float64), axis=0)
        value = tl.log(tl.where(total > 0, total, 1.0)) + finite_or_zero(top).to(tl.float64) + tl.sum(offset, axis=0)
        constants = sum_of(sums + item * blocks, blocks)
        tl.store(values + item, SIGN * tl.where(total > 0, value + constants, -float("inf")))


@triton.jit
def _softmax(z):
    """exp(z) / sum exp(z); zeros where all is -inf."""
    weights = tl.exp(z - finite_or_zero(tl.max(z, axis=0)))
    total = tl.sum(weights, axis=0)
    return weights / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["B", "T", "C", "blocks", "programs", "offset", "stride_item", "stride_step"])
def log_posterior(
    emissions,
    transitions,
    end,
    lengths,
    gold,
    weights,
    shift,
    messages,
    norms,
    flags,
    used,
    d_emissions,
    d_transitions,
    B,
    T,
    C,
    blocks,
    programs,
    offset,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    BI: tl.constexpr,
    BT: tl.constexpr,
    GOLD: tl.constexpr,
    ALWAYS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Gradients of the items that live in the log domain: grid (programs, CP / BI), each with BI rows of A.

    KIND 0 (shared): program g takes units g, g + programs, ... of BT positions of an item and writes the partial sum
    ``d_transitions[offset + g]`` (CP, CP), ``used[g]`` saying whether there is one. KIND 1: an item each. KIND 2:
    as 0, but every step's matrix is written where it belongs.
    """
    program = tl.program_id(0)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    j = tl.arange(0, CP)
    inside = j < C
    owns_rows = tl.program_id(1) == 0
    last = tl.load(end + j, mask=inside, other=0.0)
    kind: tl.constexpr = emissions.dtype.element_ty
    total = tl.zeros([BI, CP], kind)
    any_used = program * 0
    units = B * blocks
    first = program * blocks if KIND == 1 else program
    stop = first + blocks if KIND == 1 else units
    stride = 1 if KIND == 1 else programs
    for unit in range(first, stop, stride):
        item = unit // blocks
        wide = item.to(tl.int64)
        flagged = 1 if ALWAYS else tl.load(flags + item)
        if flagged != 0:
            any_used = program * 0 + 1
            length = tl.load(lengths + item).to(tl.int32)
            weight = tl.load(weights + item)
            begin = (unit % blocks) * BT
            for t in range(begin, tl.minimum(begin + BT, T)):
                live = t < length
                moved = live & (t > 0)
                row = (wide * T + t) * C
                here = inside & live
                alpha = tl.load(messages + row + j, mask=here, other=-float("inf"))
                beta = tl.load(messages + B.to(tl.int64) * T * C + row + j, mask=here, other=-float("inf"))
                marginal = _softmax(alpha + beta)
                e = tl.load(emissions + row + j, mask=here, other=-float("inf"))
                e = tl.where(t == length - 1, e + last, e) - tl.load(shift + wide * T + t, mask=live, other=0.0)
                before = tl.load(messages + row - C + i, mask=(i < C) & moved, other=-float("inf"))
                move = transitions + wide * stride_item + (wide * 0 + t - 1) * stride_step
                pairs = (i < C)[:, None] & inside[None, :]
                scores = tl.load(move + i[:, None] * C + j[None, :], mask=pairs & moved, other=-float("inf"))
                if BI == CP:
                    v = before[:, None] + scores + (beta + e)[None, :]
                    v = tl.exp(v - finite_or_zero(tl.max(tl.max(v, axis=0), axis=0)))
                    mass = tl.sum(tl.sum(v, axis=0), axis=0)
                    v = v * (weight / tl.where(mass > 0, mass, 1.0))
                else:
                    # The mass of a step from the messages around it, as A is not seen whole here.
                    norm = tl.load(norms + wide * T + t - 1, mask=moved, other=0.0)
                    alpha_before = tl.load(messages + row - C + j, mask=inside & moved, other=-float("inf"))
                    behind = messages + B.to(tl.int64) * T * C + row - C
                    both = alpha_before + tl.load(behind + j, mask=inside & moved, other=-float("inf"))
                    top = finite_or_zero(tl.max(both, axis=0))
                    mass = tl.sum(tl.exp(both - top), axis=0)
                    top += tl.log(tl.where(mass > 0, mass, 1.0))
                    v = weight * tl.exp((scores - norm) + before[:, None] + (beta + e)[None, :] - top)
                slope = weight * marginal
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
        tl.store(used + program, any_used, mask=owns_rows)
        target = d_transitions + (offset + program).to(tl.int64) * CP * CP
        tl.store(target + i[:, None] * CP + j[None, :], total, mask=(i[:, None] < CP) & (any_used != 0))
    if KIND == 1:
        target = d_transitions + program.to(tl.int64) * C * C
        pairs = (i < C)[:, None] & inside[None, :]
        tl.store(target + i[:, None] * C + j[None, :], total, mask=pairs & (any_used != 0))
