"""Walks along chains with the matrix of transitions held in registers: sums in the scaled domain, and maxima.

Write m_t for the largest emission of position t (start and end scores added at the first and last position), E_t =
exp(e_t - m_t), and P = exp(A - max A). Both recursions are then one: with x_0 = E at the first position of the walk,

    x_n = (x_(n-1) M) * E,        M = P walking forwards, P transposed walking backwards,

and log Z = log sum(x_last) + sum_t m_t + (L - 1) max A, whichever way one walks. Every fourth step x is divided by a
power of two, which costs no accuracy and whose exponents add up as integers. What is kept is alpha (with its own
emission) and beta (without). Viterbi's delta is the same walk with maxima for sums and sums for products.

Underflow. If A has no -inf and spans at most 12 (120 in float64), what can underflow has a posterior below 1e-10.
Otherwise the walk is repeated by a second program that replaces every entry below a floor by the floor: whatever the
first program lost it counts too much, so that the two values of log Z bracket the truth, and with it the loss of every
marginal. Where they differ, `chain_log` starts afresh.

Few long chains are walked in chunks, each from a guess made some way before it: products with matrices of positive
entries bring vectors closer (in Hilbert's metric) and never further apart, and the best ways to all labels soon have a
common past. Whether the guess was right is looked at wherever two chunks meet; an item where it was not goes again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import (
    binary_exponent,
    finite_or_zero,
    held_matrix,
    log_or_minus_inf,
    matrix_at,
    power_of_two,
    precise_exp,
    spread_max,
    vector_matrix,
    vector_matrix_max,
)

__all__: list[str] = []

ROWS = tl.constexpr(32)  # positions of a block in `prepare`
FEW = tl.constexpr(16)  # rows of a matrix, and chunks, at a time
# Rows of `facts` (6 + blocks, B), float64: log sum(x_last) of four walks (forwards, backwards, and with a floor), then
TOP = tl.constexpr(4)  # max A
RISK = tl.constexpr(5)  # whether A is such that walks with a floor are needed
SUMS = tl.constexpr(6)  # of every block of positions: sum of m_t, less the score of the gold labels


@triton.jit(do_not_specialize=["T", "C"])
def prepare(
    emissions, transitions, start, end, lengths, gold, scales, facts, mats,
    T, C,
    CP: tl.constexpr, GOLD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """What needs no order: m_t (``scales[0]``), ``facts`` and, by the programs after the last block, P in ``mats``.

    Grid (B, blocks), or one more where there is a P: ``mats`` (1 or B, 2, C, C), itself and its transpose.
    """
    item, block, B = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    wide = item.to(tl.int64)
    if block * ROWS >= T:
        if item * (1 - KIND) == 0:  # the only one of shared transitions
            sharing = B if KIND == 0 else 1
            _prepare_matrix(transitions + wide * C * C, mats + wide * 2 * C * C, facts + item, B, sharing, C, CP)
        return
    length = tl.load(lengths + item).to(tl.int32)
    t = block * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, CP)
    live = t < length
    inside = j < C
    row = (wide * T + t) * C
    e = tl.load(emissions + row[:, None] + j[None, :], mask=live[:, None] & inside[None, :], other=-float("inf"))
    first = tl.load(start + j, mask=inside, other=0.0)
    last = tl.load(end + j, mask=inside, other=0.0)
    e = tl.where((t == 0)[:, None], e + first[None, :], e)
    e = tl.where((t == length - 1)[:, None], e + last[None, :], e)
    top = finite_or_zero(tl.max(e, axis=1))
    tl.store(scales + wide * T + t, top, mask=live)
    total = tl.sum(tl.where(live, top, 0.0).to(tl.float64), axis=0)
    # Maxima pass over what is not a number: it is put where the value cannot miss it.
    total = tl.where(tl.sum(tl.sum((e != e).to(tl.int32), axis=1), axis=0) > 0, float("nan"), total)
    if GOLD:
        labels = gold + wide * T + t
        y = tl.load(labels, mask=live, other=0)
        # A label out of range is not looked up, and makes its item's value NaN.
        known = live & (y >= 0) & (y < C)
        score = tl.load(emissions + row + y, mask=known, other=0.0).to(tl.float64)
        score += tl.load(start + y, mask=known & (t == 0), other=0.0).to(tl.float64)
        score += tl.load(end + y, mask=known & (t == length - 1), other=0.0).to(tl.float64)
        score = tl.where(live & (known == 0), float("nan"), score)
        before = tl.load(labels - 1, mask=live & (t > 0), other=-1)
        move = matrix_at(transitions, item, t - 1, T, C, KIND) + before * C + y
        score += tl.load(move, mask=known & (before >= 0) & (before < C), other=0.0).to(tl.float64)
        total -= tl.sum(score, axis=0)
    tl.store(facts + (block + SUMS) * B + item, total)


@triton.jit
def _prepare_matrix(source, target, facts, B, items, C, CP: tl.constexpr):
    j = tl.arange(0, CP)[None, :]
    strange = tl.zeros([FEW], tl.int32)
    lowest = tl.full([FEW], float("inf"), source.dtype.element_ty)
    highest = tl.full([FEW], -float("inf"), source.dtype.element_ty)
    for row in range(0, CP, FEW):
        i = row + tl.arange(0, FEW)[:, None]
        inside = (i < C) & (j < C)
        scores = tl.load(source + i * C + j, mask=inside, other=-float("inf"))
        strange += tl.sum((scores != scores).to(tl.int32), axis=1)
        highest = tl.maximum(highest, tl.max(scores, axis=1))
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, scores, float("inf")), axis=1))
    top = finite_or_zero(tl.max(highest, axis=0))
    # Over four steps and to the end of the chain, e^(5 range) may separate what weighs the same.
    risky = tl.min(lowest, axis=0) < top - (120.0 if source.dtype.element_ty == tl.float64 else 12.0)
    told = tl.where(tl.sum(strange, axis=0) > 0, float("nan"), top.to(tl.float64))
    for begin in range(0, items, 128):
        item = begin + tl.arange(0, 128)
        tl.store(facts + B * TOP + item, told, mask=item < items)
        tl.store(facts + B * RISK + item, risky.to(tl.float64), mask=item < items)
    for row in range(0, CP, FEW):
        i = row + tl.arange(0, FEW)[:, None]
        inside = (i < C) & (j < C)
        weights = precise_exp(tl.load(source + i * C + j, mask=inside, other=-float("inf")) - top)
        tl.store(target + i * C + j, weights, mask=inside)
        tl.store(target + C * C + j * C + i, weights, mask=inside)


@triton.jit
def _ahead(e_row, m_row, here, inside, MAX: tl.constexpr):
    """Emissions and their maximum, fetched four steps before they are used."""
    e = tl.load(e_row, mask=inside & here, other=-float("inf"))
    m = 0.0
    if not MAX:
        m = tl.load(m_row, mask=here, other=0.0)
    return e, m


@triton.jit(do_not_specialize=["T", "C", "chunk"])
def walk(
    emissions, matrices, start, end, lengths, scales, facts, messages, flags, entries,
    T, C, chunk, every,
    CP: tl.constexpr, KIND: tl.constexpr, MAX: tl.constexpr, WAYS: tl.constexpr, WARM_UP: tl.constexpr,
):  # fmt: skip
    """Walk along the items that have ``flags``: grid (B, roles), forwards, with WAYS 2 backwards too.

    ``messages`` (B, WAYS, slots, C) gets what is found at every so manieth position. Of sums there are as many roles
    again, with a floor; ``facts`` gets log sum(x_last) and ``scales[1]`` (B, T) the powers of two of the way forwards.
    With WARM_UP: grid (B, WAYS, chunks), all items but those at risk, ``chunk`` steps from a guess made so many steps
    before; see :func:`join`.
    """
    item, role, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wide, B = item.to(tl.int64), tl.num_programs(0)
    kind: tl.constexpr = emissions.dtype.element_ty
    low = -float("inf")
    backwards, floored = role % WAYS, role // WAYS
    final = tl.load(lengths + item).to(tl.int32) - 1
    enter, opened, leave = part * chunk, part * chunk, final
    risky = item < 0 if MAX else tl.load(facts + B * RISK + item) != 0.0
    if WARM_UP:
        opened = tl.maximum(enter - WARM_UP, 0)
        leave = tl.minimum(enter + chunk, final)
        idle = risky | ((enter >= final) & (enter > 0))
    else:
        idle = (tl.load(flags + item) == 0) | ((floored == 1) & (risky == 0))
    if idle:
        return
    j = tl.arange(0, CP)
    inside = j < C
    # Nothing lost in four steps, from at most 2 C^4, can be larger than this.
    least = power_of_two(tl.full([CP], -900 if kind == tl.float64 else -90, tl.int32), kind)
    least = tl.where((floored == 1) & inside, least, 0.0)
    which = (wide * KIND) * (1 if MAX else 2) + backwards
    matrix = held_matrix(matrices + which * C * C, C, C, CP, float("-inf") if MAX else 0.0)
    at_start = tl.load(start + j, mask=inside, other=0.0)
    at_end = tl.load(end + j, mask=inside, other=0.0)
    opening = tl.where(backwards == 1, at_end, at_start)
    extra = tl.where(backwards == 1, at_start, at_end)
    sign = 1 - 2 * backwards
    position = backwards * final + sign * opened
    row = wide * T + position
    e_row, m_row, step = emissions + row * C + j, scales + row, sign * C
    kept = messages + (wide * WAYS + backwards) * tl.cdiv(T, every) * C + j
    keeps = inside & (floored == 0)
    e = tl.load(e_row, mask=inside, other=low)
    e = tl.where(opened == 0, e + opening, e)
    x = tl.where(final == 0, e + extra, e)
    if not MAX:
        x = tl.maximum(precise_exp(x - tl.load(m_row)), least)
    tl.store(
        kept + (position // every).to(tl.int64) * C,
        tl.where((backwards == 1) & (MAX == 0), 1.0, x),
        mask=keeps & (enter == 0) & (position % every == 0),
    )
    e0, m0 = _ahead(e_row + step, m_row + sign, opened + 1 <= leave, inside, MAX)
    e1, m1 = _ahead(e_row + 2 * step, m_row + 2 * sign, opened + 2 <= leave, inside, MAX)
    e2, m2 = _ahead(e_row + 3 * step, m_row + 3 * sign, opened + 3 <= leave, inside, MAX)
    e3, m3 = _ahead(e_row + 4 * step, m_row + 4 * sign, opened + 4 <= leave, inside, MAX)
    exponent = tl.zeros([CP], tl.int32)
    entry, entry_exponent = x, exponent
    for n in range(opened + 1, leave + 1):
        e_row += step
        m_row += sign
        position += sign
        fresh = n > enter
        e, m = tl.where(n == final, e0 + extra, e0), m0
        e0, e1, e2, m0, m1, m2 = e1, e2, e3, m1, m2, m3
        e3, m3 = _ahead(e_row + 4 * step, m_row + 4 * sign, n + 4 <= leave, inside, MAX)
        if MAX:
            if n % 4 == 1:
                e -= finite_or_zero(spread_max(x, CP))
            s = vector_matrix_max(x, matrix, CP) + e
            x = s
        else:
            # Before the product: after it, x would be in registers twice.
            scale = tl.full([CP], 1.0, kind)
            if n % 4 == 1:
                k = binary_exponent(spread_max(x, CP))
                exponent += k
                scale = power_of_two(-k, kind)
                place = m_row + B.to(tl.int64) * T + tl.zeros_like(j)
                tl.store(place, scale, mask=keeps & (j == 0) & (backwards == 0) & fresh)
            s = vector_matrix(x, matrix, CP) * scale
            x = tl.maximum(s * precise_exp(e - m), least)
        slot = kept + (position // every).to(tl.int64) * C
        tl.store(slot, tl.where(backwards == 1, s, x), mask=keeps & fresh & (position % every == 0))
        if WARM_UP:
            entry = tl.where(n == enter, x, entry)
            entry_exponent = tl.where(n == enter, exponent, entry_exponent)
    if WARM_UP:
        at = entries + ((wide * WAYS + backwards) * tl.num_programs(2) + part) * 3 * CP + j
        tl.store(at, entry)
        tl.store(at + CP, x)
        tl.store(at + 2 * CP, (exponent - entry_exponent).to(kind))
    elif not MAX:
        total = log_or_minus_inf(tl.sum(x.to(tl.float64), axis=0))
        total += tl.max(exponent, axis=0).to(tl.float64) * 0.6931471805599453
        tl.store(facts + (backwards + 2 * floored) * B + item, total)


@triton.jit(do_not_specialize=["T", "chunk", "chunks"])
def join(
    lengths, scales, facts, flags, entries,
    T, chunk, chunks,
    CP: tl.constexpr, MAX: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """``flags`` where chunks of an item do not fit together, and log sum(x_last) where they do; grid (B,).

    ``entries`` (B, WAYS, chunks, 3, CP): the vector from which a chunk starts, by its own guess, the one with which it
    ends, and how many powers of two lie between. Where one ends and the next starts they must be equal up to a factor
    (of maxima a term) and rounding.
    """
    item, B = tl.program_id(0), tl.num_programs(0)
    wide = item.to(tl.int64)
    kind: tl.constexpr = entries.dtype.element_ty
    final = tl.load(lengths + item).to(tl.int32) - 1
    living = tl.maximum((final + chunk - 1) // chunk, 1)
    risky = item < 0 if MAX else tl.load(facts + B * RISK + item) != 0.0
    j = tl.arange(0, CP)[None, :]
    wrong = tl.zeros([FEW], tl.int32)
    total = tl.zeros([FEW], tl.float64)
    for begin in range(0, tl.where(risky, 0, living), FEW):
        k = begin + tl.arange(0, FEW)
        lives = k < living
        joined = lives & (k > 0)
        for backwards in tl.static_range(WAYS):
            at = entries + ((wide * WAYS + backwards) * chunks + k)[:, None] * 3 * CP + j
            entry = tl.load(at, mask=joined[:, None], other=1.0)
            before = tl.load(at - 2 * CP, mask=joined[:, None], other=1.0)
            if MAX:
                entry = tl.maximum(entry - finite_or_zero(tl.max(entry, axis=1))[:, None], -1e30)
                before = tl.maximum(before - finite_or_zero(tl.max(before, axis=1))[:, None], -1e30)
                slack = 1e-5 * (1.0 - tl.maximum(entry, before))
            else:
                ours = tl.sum(entry.to(tl.float64), axis=1)
                theirs = tl.sum(before.to(tl.float64), axis=1)
                entry = (entry / tl.where(ours > 0, ours, 1.0)[:, None]).to(kind)
                before = (before / tl.where(theirs > 0, theirs, 1.0)[:, None]).to(kind)
                slack = tl.maximum(entry, before) * (1e-12 if kind == tl.float64 else 5e-6) + 1e-30
                if backwards == 0:
                    closing = tl.sum(tl.load(at + CP, mask=lives[:, None], other=1.0).to(tl.float64), axis=1)
                    twos = tl.max(tl.load(at + 2 * CP, mask=lives[:, None], other=0.0), axis=1).to(tl.float64)
                    gained = log_or_minus_inf(closing) + twos * 0.6931471805599453
                    gained -= tl.where(joined & (ours > 0), finite_or_zero(log_or_minus_inf(ours)), 0.0)
                    total += tl.where(lives, gained, 0.0)
                    # The first step of a chunk starts from its own guess, not from what was kept before it.
                    place = scales + (wide + B) * T + k * chunk + 1
                    scale = tl.load(place, mask=joined, other=1.0)
                    factor = (ours / tl.where(theirs > 0, theirs, 1.0)).to(kind)
                    tl.store(place, scale * factor, mask=joined)
            wrong += tl.sum((tl.abs(entry - before) > slack).to(tl.int32), axis=1)
    value = tl.sum(total, axis=0)
    bad = risky | (tl.sum(wrong, axis=0) > 0) | (value == -float("inf"))
    tl.store(flags + item, bad.to(tl.int32))
    if not MAX:
        tl.store(facts + item, value)
        if WAYS == 2:
            tl.store(facts + B + item, value)
