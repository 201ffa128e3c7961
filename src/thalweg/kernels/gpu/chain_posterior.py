"""Gradients of a chain from its scaled messages: every position by itself, transitions by matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import binary_exponent, power_of_two, precise_exp
from thalweg.kernels.gpu.chain_log import failed

__all__: list[str] = []


@triton.jit
def _look(stats, totals, values, flags, total, box, B, per_item, BB: tl.constexpr, TOTAL: tl.constexpr):
    """Tell the host whether all values are finite and none needs `chain_log`: 1, else 2.

    No item is flagged. With TOTAL, the sum of the values, in the same order every time.
    """
    row = tl.arange(0, BB)
    wrong = tl.zeros([BB], tl.int32)
    added = tl.zeros([BB], tl.float64)
    for begin in range(0, B, BB):
        item = begin + row
        here = item < B
        value = tl.load(values + item, mask=here, other=0.0).to(tl.float64)
        bad = failed(stats, totals, item * per_item, item, here, values.dtype.element_ty, True)
        sound = (bad == 0) & (tl.abs(value) < float("inf"))
        wrong += (here & (sound == 0)).to(tl.int32)
        added += value
        tl.store(flags + item, wrong * 0, mask=here)
    if TOTAL:
        tl.store(total, tl.sum(added, axis=0))
    # Past all caches: the host looks there.
    tl.store(box, tl.where(tl.sum(wrong, axis=0) > 0, 2, 1).to(tl.int64), cache_modifier=".wt")


@triton.jit(do_not_specialize=["B", "T", "blocks", "groups", "programs", "matrix_stride", "per_item"])
def posterior(
    emissions,
    end,
    lengths,
    gold,
    weights,
    shift,
    scales,
    mats,
    messages,
    flags,
    d_emissions,
    d_transitions,
    stats,
    totals,
    values,
    whole,
    box,
    B,
    T,
    C,
    blocks,
    groups,
    programs,
    matrix_stride,
    per_item,
    CP: tl.constexpr,
    BI: tl.constexpr,
    BT: tl.constexpr,
    GOLD: tl.constexpr,
    PER_ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    LOOK: tl.constexpr,
    BB: tl.constexpr,
):
    r"""Marginals and sums of edge marginals: grid (programs, CP / BI), each with BI rows of the transitions.

    With alpha and beta brought to a maximum in [1, 2) by powers of two, position t has n_t = sum_j alpha_t(j)
    beta_t(j), marginals alpha_t beta_t / n_t and edges P(i, j) alpha_(t-1)(i) w_t(j), where w_t = E_t beta_t / n_t up
    to the powers of two between alpha_(t-1) and alpha_t. So the sum over positions of a unit is one matrix product.
    Shared transitions: program g takes units g, g + programs, ... (BT positions of an item) and writes the partial sum
    ``d_transitions[g]`` (CP, CP); PER_ITEM: item g, written in place. Flagged items are left to `chain_log`.

    LOOK 1 or 2: none is flagged yet, and all go through; one more program, the first, says in ``box`` whether that was
    right, and for LOOK 2 has the sum of the ``values`` in ``whole``.
    """
    program = tl.program_id(0)
    if LOOK:
        program -= 1
        if program < 0:
            if tl.program_id(1) == 0:
                _look(stats, totals, values, flags, whole, box, B, per_item, BB, LOOK == 2)
            return
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    j = tl.arange(0, CP)
    row = tl.arange(0, BT)
    inside = j < C
    last = tl.load(end + j, mask=inside, other=0.0)
    kind: tl.constexpr = emissions.dtype.element_ty
    total = tl.zeros([BI, CP], kind)
    gold_total = tl.zeros([BI, CP], kind)
    first = program * blocks if PER_ITEM else program
    stop = first + blocks if PER_ITEM else B * blocks
    stride = 1 if PER_ITEM else programs
    for unit in range(first, stop, stride):
        item = unit // blocks
        wide = item.to(tl.int64)
        length = tl.load(lengths + item).to(tl.int32)
        weight = tl.load(weights + item)
        sound = item < B if LOOK else tl.load(flags + item) == 0
        t = (unit % blocks) * BT + row
        live = (t < length) & sound
        moved = live & (t > 0)
        place = ((wide * T + t) * C)[:, None] + j[None, :]
        mask = live[:, None] & inside[None, :]
        mask_before = moved[:, None] & inside[None, :]
        alpha = tl.load(messages + place, mask=mask, other=0.0)
        beta = tl.load(messages + B.to(tl.int64) * T * C + place, mask=mask, other=0.0)
        before = tl.load(messages + place - C, mask=mask_before, other=0.0)
        # Only where something came before: m_1 has the start scores in it, which e_1 alone may exceed by far.
        e = tl.load(emissions + place, mask=mask_before, other=-float("inf"))
        e = tl.where((t == length - 1)[:, None], e + last[None, :], e)
        m = tl.load(shift + wide * T + t, mask=live, other=0.0)
        factor = precise_exp(e - m[:, None])
        alpha_exponent = binary_exponent(tl.max(alpha, axis=1))
        before_exponent = binary_exponent(tl.max(before, axis=1))
        alpha *= power_of_two(-alpha_exponent, kind)[:, None]
        beta *= power_of_two(-binary_exponent(tl.max(beta, axis=1)), kind)[:, None]
        both = alpha * beta
        mass = tl.sum(both, axis=1)
        reached = moved & (mass > 0)
        mass = tl.where(mass > 0, mass, 1.0)
        slope = both * (weight / mass)[:, None]
        # alpha_t was made from alpha_(t-1) times this power of two, every fourth step.
        scale = tl.load(scales + wide * groups + (t - 1) // 4, mask=moved & ((t - 1) % 4 == 0), other=1.0)
        scale = scale * power_of_two(before_exponent, kind) * weight
        scale = tl.where(reached, scale / tl.where(reached, mass * power_of_two(alpha_exponent, kind), 1.0), 0.0)
        onward = factor * beta * scale[:, None]
        if BI == CP:
            block = before
        else:
            columns = ((wide * T + t) * C)[:, None] - C + i[None, :]
            block = tl.load(messages + columns, mask=moved[:, None] & (i < C)[None, :], other=0.0)
        block *= power_of_two(-before_exponent, kind)[:, None]
        total = tl.dot(tl.trans(block), onward, total, input_precision=PRECISION, out_dtype=kind)
        if GOLD:
            labels = gold + wide * T + t
            y = tl.load(labels, mask=live, other=-1)
            y_before = tl.load(labels - 1, mask=moved, other=-1)
            slope -= tl.where(y[:, None] == j[None, :], weight, 0.0)
            ones = (y_before[None, :] == i[:, None]).to(tl.bfloat16)
            counts = tl.dot(ones, (y[:, None] == j[None, :]).to(tl.bfloat16))
            gold_total += counts.to(kind) * weight
        covered = (t < T) & sound & (tl.program_id(1) == 0)
        tl.store(d_emissions + place, tl.where(mask, slope, 0.0), mask=covered[:, None] & inside[None, :])
    if PER_ITEM:
        matrix = mats + program.to(tl.int64) * matrix_stride
        target = d_transitions + program.to(tl.int64) * C * C
        pairs = (i < C)[:, None] & inside[None, :]
        if not LOOK:
            pairs = pairs & (tl.load(flags + program) == 0)
        result = total * tl.load(matrix + i[:, None] * CP + j[None, :]) - gold_total
        tl.store(target + i[:, None] * C + j[None, :], result, mask=pairs)
    else:
        target = d_transitions + program.to(tl.int64) * CP * CP
        result = total * tl.load(mats + i[:, None] * CP + j[None, :]) - gold_total
        tl.store(target + i[:, None] * CP + j[None, :], result)


@triton.jit(do_not_specialize=["B", "T", "C", "parts", "log_parts", "tiles"])
def finish(
    lengths,
    d_emissions,
    partial,
    used,
    d_transitions,
    d_start,
    d_end,
    B,
    T,
    C,
    parts,
    log_parts,
    tiles,
    CP: tl.constexpr,
    BK: tl.constexpr,
    BB: tl.constexpr,
):
    """Add up, always in the same order: partial sums of shared transitions, and both ends of the items.

    Programs below ``tiles`` take BK entries of the (CP, CP) partial sums; those of `chain_log` come after ``parts``
    and count where ``used``. The last two programs sum ``d_emissions`` at the first and at the last position.
    """
    program = tl.program_id(0)
    if program < tiles:
        entry = program * BK + tl.arange(0, BK)
        row = tl.arange(0, BB)
        total = tl.zeros([BB, BK], tl.float64)
        for begin in range(0, parts, BB):
            part = begin + row
            here = (part < parts)[:, None]
            total += tl.load(partial + (part.to(tl.int64) * CP * CP)[:, None] + entry[None, :], mask=here, other=0.0)
        any_used = 0
        for begin in range(0, log_parts, BB):
            any_used += tl.sum(tl.load(used + begin + row, mask=begin + row < log_parts, other=0), axis=0)
        for begin in range(0, tl.where(any_used > 0, log_parts, 0), BB):
            part = begin + row
            here = (tl.load(used + part, mask=part < log_parts, other=0) != 0)[:, None]
            place = ((parts + part).to(tl.int64) * CP * CP)[:, None] + entry[None, :]
            total += tl.load(partial + place, mask=here, other=0.0)
        i = entry // CP
        j = entry % CP
        tl.store(d_transitions + i * C + j, tl.sum(total, axis=0), mask=(i < C) & (j < C))
    else:
        at_end = program - tiles
        # A name of its own: one that both branches bind must have one shape.
        label = tl.arange(0, CP)
        inside = label < C
        ends = tl.zeros([CP], tl.float64)
        for begin in range(0, B, BB):
            item = begin + tl.arange(0, BB)
            here = item < B
            t = (tl.load(lengths + item, mask=here, other=1) - 1) * at_end
            place = ((item.to(tl.int64) * T + t) * C)[:, None] + label[None, :]
            slopes = tl.load(d_emissions + place, mask=here[:, None] & inside[None, :], other=0.0)
            ends += tl.sum(slopes.to(tl.float64), axis=0)
        tl.store(d_start + label, ends, mask=inside & (at_end == 0))
        tl.store(d_end + label, ends, mask=inside & (at_end == 1))


@triton.jit(do_not_specialize=["count", "moves", "C"])
def scale(
    d_emissions,
    d_transitions,
    d_start,
    d_end,
    weight,
    count,
    moves,
    C,
    CP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply gradients by one number, in place: programs with BLOCK entries of the larger two each."""
    program = tl.program_id(0)
    by = tl.load(weight)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(d_emissions + at, tl.load(d_emissions + at, mask=at < count, other=0.0) * by, mask=at < count)
    tl.store(d_transitions + at, tl.load(d_transitions + at, mask=at < moves, other=0.0) * by, mask=at < moves)
    label = tl.arange(0, CP)
    ends = (label < C) & (program == 0)
    tl.store(d_start + label, tl.load(d_start + label, mask=ends, other=0.0) * by, mask=ends)
    tl.store(d_end + label, tl.load(d_end + label, mask=ends, other=0.0) * by, mask=ends)
