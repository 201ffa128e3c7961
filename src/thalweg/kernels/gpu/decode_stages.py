"""Stages of a decoder layer for a block of rows: what the programs of ``gpu.decode_layer`` are made of.

Several programs may share a block: each has its columns, or its heads, and they meet where one reads what others wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import finite_or_zero
from thalweg.kernels.gpu.decode_linear import _finish, _product, _statistics

__all__ = ["dense", "meet", "read"]


@triton.jit
def meet(count, PARTS: tl.constexpr):
    """Go on when all programs of the block have come as far; what they had written can then be read."""
    tl.debug_barrier()
    if PARTS > 1:
        wanted = (tl.atomic_add(count, 1, sem="acq_rel") // PARTS + 1) * PARTS
        while tl.atomic_add(count, 0, sem="acquire") < wanted:
            pass
        tl.debug_barrier()


@triton.jit
def _normed(entries, gain, shift, place, there, mean, inverse):
    g = tl.load(gain + place, mask=there, other=0.0).to(tl.float32)
    s = tl.load(shift + place, mask=there, other=0.0).to(tl.float32)
    return (entries.to(tl.float32) - mean[:, None]) * inverse[:, None] * g[None, :] + s[None, :]


@triton.jit
def dense(
    x,
    weight,
    bias,
    gate,
    gate_bias,
    gain,
    shift,
    eps,
    residual,
    out,
    cache,
    position,
    meeting,
    first,
    part,
    rows,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCKS: tl.constexpr,  # of columns, each of which the programs share out
    WAIT: tl.constexpr,  # programs to meet before x is read; 0 where it was there from the start
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CACHE: tl.constexpr,
    EXACT: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    MP: tl.constexpr,
    NP: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
):
    """``f(norm(x) W' + b) + residual`` for a block's rows and this program's columns; one norm is for either."""
    EACH: tl.constexpr = (OUTER // BLOCKS + PARTS - 1) // PARTS
    QP: tl.constexpr = MP if FEW or MP > 16 else 16  # pyright: ignore[reportAssignmentType]
    WHOLE: tl.constexpr = FEW and EACH * BLOCKS <= NP and INNER <= KP and ACTIVATION != 4
    index = tl.arange(0, QP)[:, None]
    row = first + index
    within = (index < MP) & (row < rows)
    k = tl.arange(0, KP)
    held = tl.zeros((1, 1), tl.float32)
    if WHOLE:  # one waits for the matrix while one waits for the others
        n = tl.arange(0, NP)
        column = n // EACH * (OUTER // BLOCKS) + part * EACH + n % EACH
        there = (n < EACH * BLOCKS) & (part * EACH + n % EACH < OUTER // BLOCKS)
        mask = there[:, None] & (k < INNER)[None, :]
        held = tl.load(weight + column[:, None] * INNER + k[None, :], mask=mask, other=0.0).to(tl.float32)
    if WAIT > 0:
        meet(meeting, WAIT)
    mean = tl.zeros((QP,), tl.float32)
    inverse = mean
    if NORM:
        mean, inverse = _statistics(x, row, within, INNER, eps, SP, KP)
    if RESIDUAL == 2:
        mean, inverse = _statistics(residual, row, within, OUTER, eps, SP, KP)
    for begin in range(0, EACH * BLOCKS, NP):
        n = begin + tl.arange(0, NP)
        column = n // EACH * (OUTER // BLOCKS) + part * EACH + n % EACH
        there = (n < EACH * BLOCKS) & (part * EACH + n % EACH < OUTER // BLOCKS)
        column = tl.where(there, column, OUTER)
        total = tl.zeros((QP, NP), tl.float32)
        gated = tl.zeros((QP, NP), tl.float32)
        for low in range(0, INNER, KP):
            place = low + k
            known = place < INNER
            entries = tl.load(x + row * INNER + place[None, :], mask=within & known[None, :], other=0.0)
            if FEW:
                entries = entries.to(tl.float32)
                if NORM:
                    entries = _normed(entries, gain, shift, place, known, mean, inverse)
                tile = column[:, None] * INNER + place[None, :]
                mask = there[:, None] & known[None, :]
                matrix = held if WHOLE else tl.load(weight + tile, mask=mask, other=0.0).to(tl.float32)
                total += tl.sum(entries[:, None, :] * matrix[None, :, :], axis=2)
                if ACTIVATION == 4:
                    gates = tl.load(gate + tile, mask=mask, other=0.0).to(tl.float32)
                    gated += tl.sum(entries[:, None, :] * gates[None, :, :], axis=2)
            else:
                if NORM:
                    entries = _normed(entries, gain, shift, place, known, mean, inverse).to(x.dtype.element_ty)
                tile = column[None, :] * INNER + place[:, None]
                mask = there[None, :] & known[:, None]
                total = _product(entries, tl.load(weight + tile, mask=mask, other=0.0), total, EXACT)
                if ACTIVATION == 4:
                    gated = _product(entries, tl.load(gate + tile, mask=mask, other=0.0), gated, EXACT)
        _finish(
            *(total, gated, row, column, within, bias, gate_bias, residual, gain, shift, mean, inverse),
            *(out, cache, position, rows, OUTER, ACTIVATION, RESIDUAL, CACHE),
        )


@triton.jit
def read(
    queries,
    store,
    lineage,
    counts,
    out,
    first,
    part,
    rows,
    stride,
    scale,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    MP: tl.constexpr,
    RP: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
    SP: tl.constexpr,
):
    """Softmax readings of a block's rows by this program's heads, of some of the rows if programs outnumber heads.

    With ``GROUP`` rows to a source: places of ``store`` (A, S = stride, 2, D), so many as ``counts`` (A,) says. With 0:
    of ``store`` (T, R, 2, D), the row that ``lineage`` (R, T = stride) says, up to and with step ``counts``.
    """
    SIZE: tl.constexpr = WIDTH // HEADS
    EACH: tl.constexpr = HEADS // PARTS if PARTS <= HEADS else 1  # pyright: ignore[reportAssignmentType]
    # Programs for one head.
    SHARE: tl.constexpr = 1 if PARTS <= HEADS else PARTS // HEADS  # pyright: ignore[reportAssignmentType]
    if part % SHARE * RP < MP:
        index = part % SHARE * RP + tl.arange(0, RP)
        row = first + index
        within = row < rows
        c = tl.arange(0, HP * DP)
        column = part // SHARE * EACH * SIZE + (c if DP == SIZE else c // DP * SIZE + c % DP)
        known = (c // DP < EACH) & (c % DP < SIZE)
        own = within[:, None] & known[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        query = tl.load(queries + at, mask=own, other=0.0).to(tl.float32) * scale
        if GROUP > 0:
            item = (row // GROUP).to(tl.int64)
            count = tl.load(counts + item, mask=within, other=0).to(tl.int32)
            longest = tl.max(count, axis=0)
        else:
            item = row.to(tl.int64)
            longest = tl.load(counts).to(tl.int32) + 1
            count = tl.where(within, longest, 0)
        # Every one of the SP slots has a softmax of its own: only the last step looks across them.
        most = tl.full((RP, SP, HP), -float("inf"), tl.float32)
        total = tl.zeros((RP, SP, HP), tl.float32)
        reading = tl.zeros((RP, SP, HP, DP), tl.float32)
        for begin in range(0, longest, SP):
            s = begin + tl.arange(0, SP)
            inside = s[None, :] < count[:, None]
            if GROUP > 0:
                place = item[:, None] * stride + s[None, :]
            else:
                place = s.to(tl.int64)[None, :] * rows
                place += tl.load(lineage + item[:, None] * stride + s[None, :], mask=inside, other=0)
            there = store + (place * (2 * WIDTH))[:, :, None] + column[None, None, :]
            mask = inside[:, :, None] & known[None, None, :]
            keys = tl.load(there, mask=mask, other=0.0).to(tl.float32)
            values = tl.load(there + WIDTH, mask=mask, other=0.0).to(tl.float32)
            scores = tl.sum(tl.reshape(keys * query[:, None, :], (RP, SP, HP, DP)), axis=3)
            scores = tl.where(inside[:, :, None], scores, -float("inf"))
            higher = tl.maximum(most, scores)
            level = finite_or_zero(higher)
            weights = tl.exp(scores - level)
            decay = tl.exp(most - level)
            values = tl.reshape(values, (RP, SP, HP, DP))
            reading = reading * decay[:, :, :, None] + values * weights[:, :, :, None]
            total = total * decay + weights
            most = higher
        share = tl.exp(most - finite_or_zero(tl.max(most, axis=1))[:, None, :])
        total = tl.where(count[:, None] > 0, tl.sum(total * share, axis=1), 1.0)  # nothing to read gives zeros
        mixed = tl.sum(reading * share[:, :, :, None], axis=1) / total[:, :, None]
        result = tl.reshape(mixed, (RP, HP * DP))
        tl.store(out + at, result.to(out.dtype.element_ty), mask=own)
