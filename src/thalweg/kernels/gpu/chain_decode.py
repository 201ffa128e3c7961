"""The best labels of a chain and samples from it.

Viterbi keeps no back-pointers: the walk stores delta_t(j), the best score of any labelling that ends with j at t, and
the way back finds argmax_i delta_(t-1)(i) + A(i, y_t) again for the one label chosen, O(C) a step. Sums are the same
float operations both times, so the maximum is met exactly. Now and then a constant is taken off all of delta_t, which
keeps float32 precise on long chains and changes no argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import (
    argmax_lowest,
    finite_or_zero,
    held_matrix,
    log_or_minus_inf,
    spread_max,
    vector_matrix_max,
)

__all__: list[str] = []


@triton.jit(do_not_specialize=["T", "C", "per_item"])
def max_walk(
    emissions,
    transitions,
    start,
    end,
    lengths,
    delta,
    turned,
    redo,
    T,
    C,
    per_item,
    CP: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """delta (B, T, C) with the transitions held in registers; grid (B,).

    ``turned`` (1 or B, CP, CP) gets them transposed, for :func:`trace`. With ``AGAIN`` only items with ``redo``.
    """
    item = tl.program_id(0)
    if AGAIN and tl.load(redo + item) == 0:
        return
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    j = tl.arange(0, CP)
    inside = j < C
    low = -float("inf")
    which = item * per_item
    matrix = held_matrix(transitions + which.to(tl.int64) * C * C, C, C, CP, low)
    if which == item:
        i = (tl.arange(0, CP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, :, None]
        tl.store(turned + which.to(tl.int64) * CP * CP + j[None, None, :] * CP + i, matrix)
    last = tl.load(end + j, mask=inside, other=0.0)
    e_row = emissions + item.to(tl.int64) * T * C + j
    kept = delta + item.to(tl.int64) * T * C + j
    x = tl.load(e_row, mask=inside, other=low) + tl.load(start + j, mask=inside, other=0.0)
    x = tl.where(final == 0, x + last, x)
    tl.store(kept, x, mask=inside)
    e0 = tl.load(e_row + C, mask=inside & (length > 1), other=low)
    e1 = tl.load(e_row + 2 * C, mask=inside & (length > 2), other=low)
    e2 = tl.load(e_row + 3 * C, mask=inside & (length > 3), other=low)
    e3 = tl.load(e_row + 4 * C, mask=inside & (length > 4), other=low)
    for n in range(1, length, 4):
        e_row += 4 * C
        f0 = tl.where(n == final, e0 + last, e0)
        f1 = tl.where(n + 1 == final, e1 + last, e1)
        f2 = tl.where(n + 2 == final, e2 + last, e2)
        f3 = tl.where(n + 3 == final, e3 + last, e3)
        e0 = tl.load(e_row + C, mask=inside & (n + 4 < length), other=low)
        e1 = tl.load(e_row + 2 * C, mask=inside & (n + 5 < length), other=low)
        e2 = tl.load(e_row + 3 * C, mask=inside & (n + 6 < length), other=low)
        e3 = tl.load(e_row + 4 * C, mask=inside & (n + 7 < length), other=low)
        f0 -= finite_or_zero(spread_max(x, CP))
        x = vector_matrix_max(x, matrix, CP) + f0
        tl.store(kept + C, x, mask=inside)
        x = vector_matrix_max(x, matrix, CP) + f1
        tl.store(kept + 2 * C, x, mask=inside & (n + 1 < length))
        x = vector_matrix_max(x, matrix, CP) + f2
        tl.store(kept + 3 * C, x, mask=inside & (n + 2 < length))
        x = vector_matrix_max(x, matrix, CP) + f3
        kept += 4 * C
        tl.store(kept, x, mask=inside & (n + 3 < length))


@triton.jit(do_not_specialize=["T", "C", "stride_item", "stride_step"])
def max_walk_streamed(
    emissions,
    transitions,
    start,
    end,
    lengths,
    delta,
    T,
    C,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    BR: tl.constexpr,
):
    """delta (B, T, C) for per-step transitions or many labels, reading A in tiles of BR rows; grid (B,)."""
    item = tl.program_id(0)
    length = tl.load(lengths + item).to(tl.int32)
    j = tl.arange(0, CP)
    r = tl.arange(0, BR)
    inside = j < C
    low = -float("inf")
    last = tl.load(end + j, mask=inside, other=0.0)
    row = item.to(tl.int64) * T * C
    x = tl.load(emissions + row + j, mask=inside, other=low) + tl.load(start + j, mask=inside, other=0.0)
    x = tl.where(length == 1, x + last, x)
    tl.store(delta + row + j, x, mask=inside)
    matrix = transitions + item.to(tl.int64) * stride_item
    for t in range(1, length):
        tl.debug_barrier()
        best = tl.full([CP], low, emissions.dtype.element_ty)
        for begin in range(0, C, BR):
            i = begin + r
            pairs = (i < C)[:, None] & inside[None, :]
            scores = tl.load(matrix + i[:, None] * C + j[None, :], mask=pairs, other=low)
            before = tl.load(delta + row + i, mask=i < C, other=low)
            best = tl.maximum(best, tl.max(before[:, None] + scores, axis=0))
        row += C
        matrix += stride_step
        e = tl.load(emissions + row + j, mask=inside, other=low)
        x = best + tl.where(t == length - 1, e + last, e)
        x -= finite_or_zero(tl.max(x, axis=0))
        tl.store(delta + row + j, x, mask=inside)


@triton.jit(do_not_specialize=["T", "C", "stride_item", "stride_step", "column_item", "column_step"])
def trace(
    emissions,
    transitions,
    columns,
    start,
    end,
    lengths,
    delta,
    redo,
    scores,
    labels,
    T,
    C,
    stride_item,
    stride_step,
    column_item,
    column_step,
    stride_label,
    stride_before,
    CP: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The way back: labels (B, T), -1 past the length, and their score summed in float64; grid (B,), one warp.

    ``columns[b, t, y, i]`` are the transitions into y, with strides of their own: transposed they are read in one go.
    With ``AGAIN`` only items with ``redo``.
    """
    item = tl.program_id(0)
    if AGAIN and tl.load(redo + item) == 0:
        return
    wide = item.to(tl.int64)
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    j = tl.arange(0, CP)
    inside = j < C
    low = -float("inf")
    d_row = delta + (wide * T + final) * C + j
    e_row = emissions + (wide * T + final) * C
    y = argmax_lowest(tl.load(d_row, mask=inside, other=low), j, CP)
    total = (tl.load(e_row + y) + tl.load(end + y)).to(tl.float64)
    tl.store(labels + wide * T + final, y)
    for begin in range(length, T, 128):
        t = begin + tl.arange(0, 128)
        tl.store(labels + wide * T + t, -1, mask=t < T)
    into = columns + wide * column_item + (final - 1).to(tl.int64) * column_step + j * stride_before
    move = transitions + wide * stride_item + (final - 1).to(tl.int64) * stride_step
    d0 = tl.load(d_row - C, mask=inside & (length > 1), other=low)
    d1 = tl.load(d_row - 2 * C, mask=inside & (length > 2), other=low)
    d2 = tl.load(d_row - 3 * C, mask=inside & (length > 3), other=low)
    d3 = tl.load(d_row - 4 * C, mask=inside & (length > 4), other=low)
    for n in range(1, length):
        d = d0
        d0 = d1
        d1 = d2
        d2 = d3
        d3 = tl.load(d_row - (n + 4) * C, mask=inside & (n + 4 < length), other=low)
        before = argmax_lowest(d + tl.load(into + y * stride_label, mask=inside, other=low), j, CP)
        e_row -= C
        total += tl.load(e_row + before).to(tl.float64) + tl.load(move + before * C + y).to(tl.float64)
        tl.store(labels + wide * T + final - n, before)
        into -= column_step
        move -= stride_step
        y = before
    total += tl.load(start + y).to(tl.float64)
    tl.store(scores + item, total)


@triton.jit
def _draw(weights, u, j, CP: tl.constexpr):
    """The label whose stretch of the cumulative sum holds u, never one without weight."""
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0)
    label = tl.sum((cumulative <= u * total).to(tl.int32), axis=0)
    return tl.minimum(label, tl.max(tl.where(weights > 0, j, 0), axis=0))


@triton.jit
def _weights(x, a, is_log):
    """alpha exp(a) up to a factor, by way of logarithms so that nothing vanishes."""
    logs = tl.where(is_log, x, log_or_minus_inf(tl.where(is_log, 1.0, x))) + a
    return tl.exp(logs - finite_or_zero(tl.max(logs, axis=0)))


@triton.jit(do_not_specialize=["B", "T", "C", "stride_item", "stride_step"])
def sample_back(
    transitions,
    lengths,
    flags,
    messages,
    uniforms,
    labels,
    B,
    T,
    C,
    stride_item,
    stride_step,
    CP: tl.constexpr,
    ALWAYS: tl.constexpr,
):
    """Labels (S, B, T) drawn backwards from the filtered messages alpha (B, T, C); grid (B, S), one warp each.

    p(y_t = i | y_(t+1)) is proportional to alpha_t(i) exp(A(i, y_(t+1))).
    """
    item = tl.program_id(0)
    wide = item.to(tl.int64)
    path = (tl.program_id(1).to(tl.int64) * B + item) * T
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    j = tl.arange(0, CP)
    inside = j < C
    is_log = True if ALWAYS else tl.load(flags + item) != 0
    fill = tl.where(is_log, -float("inf"), 0.0)
    for begin in range(length, T, 128):
        t = begin + tl.arange(0, 128)
        tl.store(labels + path + t, -1, mask=t < T)
    row = messages + (wide * T + final) * C + j
    x = tl.load(row, mask=inside, other=fill)
    y = _draw(_weights(x, 0.0, is_log), tl.load(uniforms + path + final).to(x.dtype), j, CP)
    tl.store(labels + path + final, y)
    move = transitions + wide * stride_item + (final - 1).to(tl.int64) * stride_step + j * C
    for n in range(1, length):
        row -= C
        x = tl.load(row, mask=inside, other=fill)
        a = tl.load(move + y, mask=inside, other=-float("inf"))
        move -= stride_step
        y = _draw(_weights(x, a, is_log), tl.load(uniforms + path + final - n).to(x.dtype), j, CP)
        tl.store(labels + path + final - n, y)
