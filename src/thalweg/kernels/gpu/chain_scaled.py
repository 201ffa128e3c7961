"""Forward and backward messages of a chain in the scaled linear domain, the matrix of transitions held in registers.

Write m_t for the largest emission of position t (start and end scores added at the first and last position), E_t =
exp(e_t - m_t), and P = exp(A - max A). Both recursions are then one: with x_0 = E at the first position of the walk,

    x_n = (x_(n-1) M) * E,        M = P walking forwards, P transposed walking backwards,

and log Z = log sum(x_last) + sum_t m_t + (L - 1) max A, whichever way one walks. Every fourth step x is divided by a
power of two, which costs no accuracy and whose exponents add up as integers. What is kept at each position is alpha
(with its own emission) and beta (without).

Underflow. If A has no -inf and spans at most 12 (120 in float64), what can underflow has a posterior below 1e-10.
Otherwise the walk is repeated by a second program that replaces every entry below a floor by the floor: whatever the
first program lost it counts too much, so that the two values of log Z bracket the truth, and with it the loss of every
marginal. Where they differ, `chain_log` starts afresh.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import (
    binary_exponent,
    finite_or_zero,
    held_matrix,
    log_or_minus_inf,
    power_of_two,
    precise_exp,
    spread_max,
    vector_matrix,
)

__all__: list[str] = []


@triton.jit(do_not_specialize=["B", "T", "blocks", "stride_item", "stride_step"])
def prepare(
    emissions,
    transitions,
    start,
    end,
    lengths,
    gold,
    shift,
    sums,
    stats,
    mats,
    B,
    T,
    C,
    blocks,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    GOLD: tl.constexpr,
):
    """What needs no order: m_t, its sums less the score of the gold labels, and P with its transpose.

    Programs below B * blocks take BT positions of an item each, the others a matrix each.
    """
    program = tl.program_id(0)
    if program < B * blocks:
        _prepare_positions(
            emissions, transitions, start, end, lengths, gold, shift, sums, program,
            T, C, blocks, stride_item, stride_step, CP, BT, GOLD,
        )  # fmt: skip
    else:
        which = program - B * blocks
        source = transitions + which.to(tl.int64) * C * C
        _prepare_matrix(source, stats + 2 * which, mats + which.to(tl.int64) * 2 * CP * CP, C, CP, BR)


@triton.jit
def _prepare_positions(
    emissions,
    transitions,
    start,
    end,
    lengths,
    gold,
    shift,
    sums,
    program,
    T,
    C,
    blocks,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    BT: tl.constexpr,
    GOLD: tl.constexpr,
):
    item = program // blocks
    length = tl.load(lengths + item).to(tl.int32)
    t = (program % blocks) * BT + tl.arange(0, BT)
    j = tl.arange(0, CP)
    live = t < length
    inside = j < C
    row = (item.to(tl.int64) * T + t) * C
    e = tl.load(emissions + row[:, None] + j[None, :], mask=live[:, None] & inside[None, :], other=-float("inf"))
    first = tl.load(start + j, mask=inside, other=0.0)
    last = tl.load(end + j, mask=inside, other=0.0)
    e = tl.where((t == 0)[:, None], e + first[None, :], e)
    e = tl.where((t == length - 1)[:, None], e + last[None, :], e)
    top = finite_or_zero(tl.max(e, axis=1))
    tl.store(shift + item.to(tl.int64) * T + t, top, mask=live)
    total = tl.sum(tl.where(live, top, 0.0).to(tl.float64), axis=0)
    # Maxima pass over what is not a number: it is put where the value cannot miss it.
    total = tl.where(tl.sum(tl.sum((e != e).to(tl.int32), axis=1), axis=0) > 0, float("nan"), total)
    if GOLD:
        labels = gold + item.to(tl.int64) * T + t
        y = tl.load(labels, mask=live, other=0)
        # A label out of range is not looked up, and makes its item's value NaN.
        known = live & (y >= 0) & (y < C)
        score = tl.load(emissions + row + y, mask=known, other=0.0).to(tl.float64)
        score += tl.load(start + y, mask=known & (t == 0), other=0.0).to(tl.float64)
        score += tl.load(end + y, mask=known & (t == length - 1), other=0.0).to(tl.float64)
        score = tl.where(live & (known == 0), float("nan"), score)
        before = tl.load(labels - 1, mask=live & (t > 0), other=-1)
        moved = known & (before >= 0) & (before < C)
        move = item.to(tl.int64) * stride_item + (t - 1).to(tl.int64) * stride_step + before * C + y
        score += tl.load(transitions + move, mask=moved, other=0.0).to(tl.float64)
        total -= tl.sum(score, axis=0)
    tl.store(sums + program, total)


@triton.jit
def _prepare_matrix(source, stats, target, C, CP: tl.constexpr, BR: tl.constexpr):
    j = tl.arange(0, CP)[None, :]
    strange = tl.zeros([BR], tl.int32)
    lowest = tl.full([BR], float("inf"), source.dtype.element_ty)
    highest = tl.full([BR], -float("inf"), source.dtype.element_ty)
    for row in range(0, CP, BR):
        i = row + tl.arange(0, BR)[:, None]
        inside = (i < C) & (j < C)
        scores = tl.load(source + i * C + j, mask=inside, other=-float("inf"))
        strange += tl.sum((scores != scores).to(tl.int32), axis=1)
        highest = tl.maximum(highest, tl.max(scores, axis=1))
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, scores, float("inf")), axis=1))
    top = finite_or_zero(tl.max(highest, axis=0))
    # Over four steps and to the end of the chain, e^(5 range) may separate what weighs the same.
    risky = tl.min(lowest, axis=0) < top - (120.0 if source.dtype.element_ty == tl.float64 else 12.0)
    tl.store(stats, tl.where(tl.sum(strange, axis=0) > 0, float("nan"), top.to(tl.float64)))
    tl.store(stats + 1, risky.to(tl.float64))
    for row in range(0, CP, BR):
        i = row + tl.arange(0, BR)[:, None]
        scores = tl.load(source + i * C + j, mask=(i < C) & (j < C), other=-float("inf"))
        weights = precise_exp(scores - top)
        tl.store(target + i * CP + j, weights)
        tl.store(target + CP * CP + j * CP + i, weights)


@triton.jit
def _emission_factor(e, m, extra, is_last):
    """exp(e - m), ``extra`` (the start or end scores) added at the last position of the walk."""
    return precise_exp(tl.where(is_last, e + extra, e) - m)


@triton.jit(do_not_specialize=["B", "T", "C", "blocks", "groups", "width", "per_item", "chunk", "warm_up", "chunks"])
def recurse(
    emissions,
    start,
    end,
    lengths,
    shift,
    sums,
    stats,
    mats,
    totals,
    values,
    messages,
    scales,
    redo,
    entries,
    joints,
    B,
    T,
    C,
    blocks,
    groups,
    width,
    per_item,
    chunk,
    warm_up,
    chunks,
    CP: tl.constexpr,
    KEEP: tl.constexpr,
    BOTH: tl.constexpr,
    MODE: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Walk along one item: grid (B, 4) for forwards, backwards and the two floored walks, (B, 2) without backwards.

    Writes ``totals[b, walk]`` = log sum(x_last) less its constants, and forwards SIGN times ``values[b]``. With KEEP,
    ``messages`` (2, B, T, C) gets alpha and beta and ``scales`` (B, groups) the powers of two of the forward walk.
    MODE 1 walks only where ``redo[b]``. MODE 2 walks ``chunk`` steps from a guess made ``warm_up`` steps before, grid
    (B, 2 or 1, chunks): see :func:`join`.
    """
    item = tl.program_id(0)
    role = tl.program_id(1)
    backwards = role % 2 if BOTH else role * 0
    floored = role * 0 if MODE == 2 else role // (2 if BOTH else 1)
    which = item * per_item
    risky = tl.load(stats + 2 * which + 1) != 0.0
    kind: tl.constexpr = emissions.dtype.element_ty
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    enter = role * 0
    leave = final
    opened = role * 0
    if MODE == 2:
        enter = tl.program_id(2) * chunk
        leave = tl.minimum(enter + chunk, final)
        opened = tl.maximum(enter - warm_up, 0)
        if risky | ((enter >= final) & (enter > 0)):
            return
    else:
        if (floored == 1) & (risky == 0):
            return
    if MODE == 1:  # noqa: SIM102 (the compiler must not see the second where the first is false)
        if tl.load(redo + item) == 0:
            return
    j = tl.arange(0, CP)
    inside = j < C
    # Nothing lost in four steps, from at most 2 C^4, can be larger than this.
    least = power_of_two(tl.full([CP], -900 if kind == tl.float64 else -90, tl.int32), kind)
    least = tl.where((floored == 1) & inside, least, 0.0)
    matrix = held_matrix(mats + (2 * which + backwards).to(tl.int64) * width * width, width, width, CP, 0.0)
    at_start = tl.load(start + j, mask=inside, other=0.0)
    at_end = tl.load(end + j, mask=inside, other=0.0)
    opening = tl.where(backwards == 1, at_end, at_start)
    extra = tl.where(backwards == 1, at_start, at_end)
    sign = 1 - 2 * backwards
    origin = item.to(tl.int64) * T + backwards * final + sign * opened
    e_row = emissions + origin * C + j
    m_row = shift + origin
    kept = messages + (backwards * B.to(tl.int64) * T + origin) * C + j
    keeps = inside & (floored == 0)
    step = sign * C
    low = -float("inf")
    e = tl.load(e_row, mask=inside, other=low)
    e = tl.where(opened == 0, e + opening, e)
    x = tl.maximum(_emission_factor(e, tl.load(m_row), extra, final == 0), least)
    if KEEP:
        tl.store(kept, tl.where(backwards == 1, 1.0, x), mask=keeps & (enter == 0))
    e0 = tl.load(e_row + step, mask=inside & (opened + 1 <= leave), other=low)
    e1 = tl.load(e_row + 2 * step, mask=inside & (opened + 2 <= leave), other=low)
    e2 = tl.load(e_row + 3 * step, mask=inside & (opened + 3 <= leave), other=low)
    e3 = tl.load(e_row + 4 * step, mask=inside & (opened + 4 <= leave), other=low)
    m0 = tl.load(m_row + sign, mask=opened + 1 <= leave, other=0.0)
    m1 = tl.load(m_row + 2 * sign, mask=opened + 2 <= leave, other=0.0)
    m2 = tl.load(m_row + 3 * sign, mask=opened + 3 <= leave, other=0.0)
    m3 = tl.load(m_row + 4 * sign, mask=opened + 4 <= leave, other=0.0)
    exponent = tl.zeros([CP], tl.int32)
    entry = x
    entry_exponent = exponent
    closing = x
    # Four steps a round, their emissions fetched a round ahead; what goes past the end is computed and dropped.
    for n in range(opened + 1, leave + 1, 4):
        e_row += 4 * step
        m_row += 4 * sign
        f0 = _emission_factor(e0, m0, extra, n == final)
        f1 = _emission_factor(e1, m1, extra, n + 1 == final)
        f2 = _emission_factor(e2, m2, extra, n + 2 == final)
        f3 = _emission_factor(e3, m3, extra, n + 3 == final)
        e0 = tl.load(e_row + step, mask=inside & (n + 4 <= leave), other=low)
        e1 = tl.load(e_row + 2 * step, mask=inside & (n + 5 <= leave), other=low)
        e2 = tl.load(e_row + 3 * step, mask=inside & (n + 6 <= leave), other=low)
        e3 = tl.load(e_row + 4 * step, mask=inside & (n + 7 <= leave), other=low)
        m0 = tl.load(m_row + sign, mask=n + 4 <= leave, other=0.0)
        m1 = tl.load(m_row + 2 * sign, mask=n + 5 <= leave, other=0.0)
        m2 = tl.load(m_row + 3 * sign, mask=n + 6 <= leave, other=0.0)
        m3 = tl.load(m_row + 4 * sign, mask=n + 7 <= leave, other=0.0)
        k = binary_exponent(spread_max(x, CP))
        exponent += k
        scale = power_of_two(-k, kind)
        if KEEP and BOTH:
            place = scales + item.to(tl.int64) * groups + n // 4 + tl.zeros_like(j)
            tl.store(place, scale, mask=keeps & (j == 0) & (backwards == 0) & (n > enter))
        s = vector_matrix(x, matrix, CP) * scale
        x = tl.maximum(s * f0, least)
        closing = tl.where(n == leave, x, closing)
        if KEEP:
            tl.store(kept + step, tl.where(backwards == 1, s, x), mask=keeps & (n > enter))
        s = vector_matrix(x, matrix, CP)
        x = tl.maximum(s * f1, least)
        closing = tl.where(n + 1 == leave, x, closing)
        if KEEP:
            tl.store(kept + 2 * step, tl.where(backwards == 1, s, x), mask=keeps & (n > enter) & (n + 1 <= leave))
        s = vector_matrix(x, matrix, CP)
        x = tl.maximum(s * f2, least)
        closing = tl.where(n + 2 == leave, x, closing)
        if KEEP:
            tl.store(kept + 3 * step, tl.where(backwards == 1, s, x), mask=keeps & (n > enter) & (n + 2 <= leave))
        s = vector_matrix(x, matrix, CP)
        x = tl.maximum(s * f3, least)
        closing = tl.where(n + 3 == leave, x, closing)
        if KEEP:
            kept += 4 * step
            tl.store(kept, tl.where(backwards == 1, s, x), mask=keeps & (n > enter) & (n + 3 <= leave))
        if MODE == 2:
            entry = tl.where(n + 3 == enter, x, entry)
            entry_exponent = tl.where(n + 3 == enter, exponent, entry_exponent)
    mass = tl.sum(closing.to(tl.float64), axis=0)
    total = log_or_minus_inf(mass) + tl.max(exponent, axis=0).to(tl.float64) * 0.6931471805599453
    if MODE == 2:
        at = (item * 2 + backwards).to(tl.int64) * chunks + tl.program_id(2)
        entry_mass = tl.sum(entry.to(tl.float64), axis=0)
        entered = log_or_minus_inf(entry_mass) + tl.max(entry_exponent, axis=0).to(tl.float64) * 0.6931471805599453
        lost = (mass == 0) | (entry_mass == 0)
        tl.store(entries + at * 2 * CP + j, (entry / tl.where(lost, 1.0, entry_mass)).to(kind))
        tl.store(entries + at * 2 * CP + CP + j, (closing / tl.where(lost, 1.0, mass)).to(kind))
        gained = tl.where(enter > 0, total - tl.where(lost, 0.0, entered), total)
        tl.store(joints + at * 3, tl.where(lost, low, gained))
        tl.store(joints + at * 3 + 1, entry_mass)
        tl.store(joints + at * 3 + 2, mass)
    else:
        tl.store(totals + item * 4 + backwards + 2 * floored, total)
        if (backwards == 0) & (floored == 0):
            constants = constants_of(sums + item * blocks, blocks, stats + 2 * which, final)
            tl.store(values + item, SIGN * tl.where(total == low, low, finite_or_zero(total) + constants))


@triton.jit(do_not_specialize=["blocks", "groups", "per_item", "chunk", "chunks"])
def join(
    lengths,
    sums,
    stats,
    totals,
    values,
    scales,
    redo,
    entries,
    joints,
    blocks,
    groups,
    per_item,
    chunk,
    chunks,
    CP: tl.constexpr,
    BK: tl.constexpr,
    KEEP: tl.constexpr,
    BOTH: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Whether the chunks of an item fit together, and its value if they do; grid (B,).

    A chunk guessed the vector it starts from by walking ``warm_up`` steps from E. Where that guess is parallel to the
    vector with which the chunk before it ended, entry by entry up to rounding, the chunks are one walk: products with
    matrices of positive entries bring vectors closer (in Hilbert's metric) and never further apart. Else ``redo[b]``.
    """
    item = tl.program_id(0)
    which = item * per_item
    kind: tl.constexpr = entries.dtype.element_ty
    final = tl.load(lengths + item).to(tl.int32) - 1
    living = tl.maximum((final + chunk - 1) // chunk, 1)
    risky = tl.load(stats + 2 * which + 1) != 0.0
    j = tl.arange(0, CP)[None, :]
    wrong = tl.zeros([BK], tl.int32)
    total = tl.zeros([BK], tl.float64)
    for begin in range(0, tl.where(risky, 0, living), BK):
        k = begin + tl.arange(0, BK)
        for backwards in tl.static_range(2 if BOTH else 1):
            at = (item * 2 + backwards).to(tl.int64) * chunks + k
            joined = (k > 0) & (k < living)
            entry = tl.load(entries + at[:, None] * 2 * CP + j, mask=joined[:, None], other=0.0)
            closing = tl.load(entries + (at - 1)[:, None] * 2 * CP + CP + j, mask=joined[:, None], other=0.0)
            slack = tl.maximum(entry, closing) * (1e-12 if kind == tl.float64 else 5e-6) + 1e-30
            wrong += tl.sum((tl.abs(entry - closing) > slack).to(tl.int32), axis=1)
        forwards = (item * 2).to(tl.int64) * chunks + k
        total += tl.load(joints + forwards * 3, mask=k < living, other=0.0)
        if KEEP and BOTH:
            # The first step of a chunk starts from its own guess, not from what was kept before it.
            ours = tl.load(joints + forwards * 3 + 1, mask=joined, other=1.0)
            theirs = tl.load(joints + (forwards - 1) * 3 + 2, mask=joined, other=1.0)
            place = scales + item.to(tl.int64) * groups + k * (chunk // 4)
            scale = tl.load(place, mask=joined, other=1.0)
            tl.store(place, scale * (ours / theirs), mask=joined)
    value = tl.sum(total, axis=0)
    bad = risky | (tl.sum(wrong, axis=0) > 0) | (value == -float("inf"))
    tl.store(redo + item, bad.to(tl.int32))
    tl.store(totals + item * 4 + tl.arange(0, 2), tl.zeros([2], tl.float64))
    constants = constants_of(sums + item * blocks, blocks, stats + 2 * which, final)
    tl.store(values + item, SIGN * (finite_or_zero(value) + constants))


@triton.jit
def constants_of(sums, blocks, stats, moves):
    """What was taken off emissions, less the gold score, and off each of the moves."""
    return sum_of(sums, blocks) + tl.where(moves > 0, moves.to(tl.float64) * tl.load(stats), 0.0)


@triton.jit
def sum_of(source, count):
    """The sum of ``count`` float64 numbers, in the same order every time."""
    i = tl.arange(0, 128)
    total = tl.zeros([128], tl.float64)
    for at in range(0, count, 128):
        total += tl.load(source + at + i, mask=at + i < count, other=0.0)
    return tl.sum(total, axis=0)
