"""Gradients of a chain from its scaled messages: every position by itself, transitions by matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import binary_exponent, power_of_two, precise_exp

__all__: list[str] = []


@triton.jit(do_not_specialize=["B", "T", "C"])
def posterior(
    emissions, mats, end, lengths, gold, weights, scales, messages, flags, d_emissions, d_transitions,
    B, T, C,
    CP: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, GOLD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    r"""Marginals and sums of edge marginals: grid (programs, CP / BI), each with BI rows of the transitions.

    With alpha and beta brought to a maximum in [1, 2) by powers of two, position t has n_t = sum_j alpha_t(j)
    beta_t(j), marginals alpha_t beta_t / n_t and edges P(i, j) alpha_(t-1)(i) w_t(j), where w_t = E_t beta_t / n_t up
    to the powers of two between alpha_(t-1) and alpha_t. So the sum over positions of a unit is one matrix product.
    KIND 0 (shared): program g takes units g, g + programs, ... (BT positions of an item) and writes the partial sum
    ``d_transitions[g]`` (CP, CP); KIND 1: item g, written in place. Flagged items are left to `chain_log`.
    """
    program = tl.program_id(0)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    j = tl.arange(0, CP)
    row = tl.arange(0, BT)
    inside = j < C
    last = tl.load(end + j, mask=inside, other=0.0)
    kind: tl.constexpr = emissions.dtype.element_ty
    total = tl.zeros([BI, CP], kind)
    gold_total = tl.zeros([BI, CP], kind)
    blocks = tl.cdiv(T, BT)
    first = program * blocks if KIND == 1 else program
    stop = first + blocks if KIND == 1 else B * blocks
    stride = 1 if KIND == 1 else tl.num_programs(0)
    for unit in range(first, stop, stride):
        item = unit // blocks
        wide = item.to(tl.int64)
        length = tl.load(lengths + item).to(tl.int32)
        weight = tl.load(weights + item)
        sound = tl.load(flags + item) == 0
        t = (unit % blocks) * BT + row
        live = (t < length) & sound
        moved = live & (t > 0)
        place = ((wide * T + t) * C)[:, None] + j[None, :]
        forth = messages + wide * T * C
        mask = live[:, None] & inside[None, :]
        mask_before = moved[:, None] & inside[None, :]
        alpha = tl.load(forth + place, mask=mask, other=0.0)
        beta = tl.load(forth + place + T.to(tl.int64) * C, mask=mask, other=0.0)
        before = tl.load(forth + place - C, mask=mask_before, other=0.0)
        # Only where something came before: m_1 has the start scores in it, which e_1 alone may exceed by far.
        e = tl.load(emissions + place, mask=mask_before, other=-float("inf"))
        e = tl.where((t == length - 1)[:, None], e + last[None, :], e)
        m = tl.load(scales + wide * T + t, mask=live, other=0.0)
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
        scale = tl.load(scales + (B + wide) * T + t, mask=moved & (t % 4 == 1), other=1.0)
        scale = scale * power_of_two(before_exponent, kind) * weight
        scale = tl.where(reached, scale / tl.where(reached, mass * power_of_two(alpha_exponent, kind), 1.0), 0.0)
        onward = factor * beta * scale[:, None]
        if BI == CP:
            block = before
        else:
            columns = ((wide * T + t) * C)[:, None] - C + i[None, :]
            block = tl.load(forth + columns, mask=moved[:, None] & (i < C)[None, :], other=0.0)
        block *= power_of_two(-before_exponent, kind)[:, None]
        precision: tl.constexpr = "ieee" if kind == tl.float64 else "tf32x3"
        total = tl.dot(tl.trans(block), onward, total, input_precision=precision, out_dtype=kind)
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
    pairs = (i < C)[:, None] & inside[None, :]
    own = program.to(tl.int64) * KIND
    moves = tl.load(mats + own * 2 * C * C + i[:, None] * C + j[None, :], mask=pairs, other=0.0)
    result = total * moves - gold_total
    if KIND == 1:
        target = d_transitions + own * C * C
        tl.store(target + i[:, None] * C + j[None, :], result, mask=pairs & (tl.load(flags + program) == 0))
    else:
        target = d_transitions + program.to(tl.int64) * CP * CP
        tl.store(target + i[:, None] * CP + j[None, :], result)


@triton.jit
def _added(partial, parts, entry, CP: tl.constexpr, BB: tl.constexpr):
    """The sum of some entries of (parts, CP, CP), float64, always in the same order."""
    total = tl.zeros([BB, entry.shape[0]], tl.float64)
    for begin in range(0, parts, BB):
        part = begin + tl.arange(0, BB)
        place = (part.to(tl.int64) * CP * CP)[:, None] + entry[None, :]
        total += tl.load(partial + place, mask=(part < parts)[:, None], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["B", "T", "C", "parts", "log_parts"])
def finish(
    lengths, d_emissions, partial, log_partial, d_transitions, d_start, d_end,
    B, T, C, parts, log_parts,
    CP: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Add up, always in the same order: partial sums of shared transitions, and both ends of the items.

    All programs but the last two take BK entries of the (CP, CP) partial sums of `posterior` and of `chain_log`. Those
    two sum ``d_emissions`` at the first and at the last position.
    """
    program, tiles = tl.program_id(0), tl.num_programs(0) - 2
    if program < tiles:
        entry = program * BK + tl.arange(0, BK)
        found = _added(partial, parts, entry, CP, BB) + _added(log_partial, log_parts, entry, CP, BB)
        i = entry // CP
        j = entry % CP
        tl.store(d_transitions + i * C + j, found, mask=(i < C) & (j < C))
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
