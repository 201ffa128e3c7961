"""The way back along chains: the best labels, or samples.

There are no back-pointers: Viterbi's walk stores delta_t(j), the best score of any labelling that ends with j at t, and
the way back finds argmax_i delta_(t-1)(i) + A(i, y_t) again for the one label chosen, O(C) a step. Sums are the same
float operations both times, so the maximum is met exactly. Now and then a constant is taken off all of delta_t, which
keeps float32 precise on long chains and changes no argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.gpu.arithmetic import argmax_lowest, finite_or_zero, log_or_minus_inf, matrix_at

__all__: list[str] = []


@triton.jit
def _draw(x, a, u, j, is_log):
    """A label with chances alpha exp(a): the one whose stretch of the cumulative sum holds u, never one of chance 0.

    By way of logarithms, so that nothing vanishes.
    """
    logs = tl.where(is_log, x, log_or_minus_inf(tl.where(is_log, 1.0, x))) + a
    weights = tl.exp(logs - finite_or_zero(tl.max(logs, axis=0)))
    cumulative = tl.cumsum(weights, axis=0)
    label = tl.sum((cumulative <= u * tl.sum(weights, axis=0)).to(tl.int32), axis=0)
    return tl.minimum(label, tl.max(tl.where(weights > 0, j, 0), axis=0))


@triton.jit(do_not_specialize=["T", "C"])
def way_back(
    emissions, transitions, start, end, lengths, messages, flags, uniforms, labels, scores,
    T, C,
    CP: tl.constexpr, KIND: tl.constexpr, DRAW: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """Labels (S, B, T), -1 past the length; grid (B, S), one warp each.

    The best by delta, ``messages`` (B, T, C), and their score summed in float64. With DRAW a sample by alpha, of which
    LOGS or ``flags`` say that it is logarithms: p(y_t = i | y_(t+1)) is proportional to alpha_t(i) exp(A(i, y_(t+1))).
    """
    item = tl.program_id(0)
    wide = item.to(tl.int64)
    path = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + item) * T
    length = tl.load(lengths + item).to(tl.int32)
    final = length - 1
    j = tl.arange(0, CP)
    inside = j < C
    low = -float("inf")
    is_log = item >= 0
    if DRAW and not LOGS:
        is_log = tl.load(flags + item) != 0
    for begin in range(length, T, 128):
        t = begin + tl.arange(0, 128)
        tl.store(labels + path + t, -1, mask=t < T)
    row = messages + (wide * T + final) * C + j
    e_row = emissions + (wide * T + final) * C
    x0 = tl.load(row, mask=inside, other=0.0)
    x1 = tl.load(row - C, mask=inside & (length > 1), other=0.0)
    x2 = tl.load(row - 2 * C, mask=inside & (length > 2), other=0.0)
    x3 = tl.load(row - 3 * C, mask=inside & (length > 3), other=0.0)
    move = matrix_at(transitions, item, final, T, C, KIND)  # from the position at hand to the next, if there is one
    total = tl.zeros([1], tl.float64)
    y = item * 0
    for n in range(length):
        x = x0
        x0, x1, x2 = x1, x2, x3
        x3 = tl.load(row - 4 * C, mask=inside & (n + 4 < length), other=0.0)
        a = tl.load(move + j * C + y, mask=inside & (n > 0), other=0.0)
        a = tl.where(inside, a, low)
        if DRAW:
            before = _draw(x, a, tl.load(uniforms + path + final - n).to(x.dtype), j, is_log)
        else:
            before = argmax_lowest(x + a, j, CP)
            total += tl.load(e_row + before).to(tl.float64)
            total += tl.load(end + before, mask=n == 0, other=0.0).to(tl.float64)
            total += tl.load(move + before * C + y, mask=n > 0, other=0.0).to(tl.float64)
        tl.store(labels + path + final - n, before)
        y = before
        row -= C
        e_row -= C
        if KIND == 2:
            move -= C * C
    if not DRAW:
        total += tl.load(start + y).to(tl.float64)
        tl.store(scores + item, tl.sum(total, axis=0))
