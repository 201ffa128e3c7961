"""Small device functions that the kernels of this room share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__: list[str] = []


@triton.jit
def pending(WAIT: tl.constexpr):
    """Wait for what earlier kernels write, where this one was started before their end; the next may start as early."""
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def precise_exp(x):
    """exp(x) for x <= 0 to about one unit in the last place; 0 for -inf.

    The hardware's float32 exponential multiplies by log2(e) first and so loses a digit for x around -10 already. The
    multiple of log 2 is therefore taken off in two exact parts (Cody and Waite).
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        x = tl.maximum(x, -200.0)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = x - n * 0.693145751953125
        rest = rest - n * 1.42860677e-6
        return tl.exp2(n) * tl.exp2(rest * 1.4426950408889634)


@triton.jit
def binary_exponent(x):
    """floor(log2(x)) of normal numbers x > 0 from their bits, int32; for 0 the smallest exponent there is."""
    if x.dtype == tl.float64:
        return (((x.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023).to(tl.int32)
    else:
        return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def power_of_two(k, kind: tl.constexpr):
    """2^k made from its bits, for every k that :func:`binary_exponent` gives and its negative."""
    if kind == tl.float64:
        return ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log_or_minus_inf(x):
    """log(x), -inf for 0, with no 0 handed to the logarithm."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), -float("inf"))


@triton.jit
def finite_or_zero(x):
    """x, or 0 where x is -inf: a maximum that may be subtracted."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def vector_matrix(x, matrix, CP: tl.constexpr):
    """sum_i x[i] matrix[i, j], with the matrix held in registers as (CP / 4, 4, CP).

    Each thread owns whole columns, so that the sum crosses no threads: x goes once through shared memory, and four
    sums run side by side so that one addition need not wait for the last.
    """
    spread = tl.reshape(x, [CP // 4, 4])[:, :, None]
    return tl.sum(tl.sum(spread * matrix, axis=0), axis=0)


@triton.jit
def vector_matrix_max(x, matrix, CP: tl.constexpr):
    """max_i (x[i] + matrix[i, j]); layout as in :func:`vector_matrix`."""
    spread = tl.reshape(x, [CP // 4, 4])[:, :, None]
    return tl.max(tl.max(spread + matrix, axis=0), axis=0)


@triton.jit
def spread_max(x, CP: tl.constexpr):
    """max_i x[i] as a vector of CP equal entries, found by each thread for itself: no exchange between warps."""
    spread = tl.reshape(x, [CP // 4, 4])[:, :, None]
    return tl.max(tl.max(tl.broadcast_to(spread, [CP // 4, 4, CP]), axis=0), axis=0)


@triton.jit
def held_matrix(source, rows, columns, CP: tl.constexpr, fill: tl.constexpr):
    """A (rows, columns) matrix with row stride ``columns`` as (CP / 4, 4, CP), ``fill`` outside.

    ``columns`` must not be specialised: knowing it divisible by four, the compiler would give each thread four
    neighbouring columns and the sums of :func:`vector_matrix` would cross threads.
    """
    i = (tl.arange(0, CP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, :, None]
    j = tl.arange(0, CP)[None, None, :]
    return tl.load(source + i * columns + j, mask=(i < rows) & (j < columns), other=fill)


@triton.jit
def matrix_at(transitions, item, step, T, C, KIND: tl.constexpr):
    """Where the matrix of moves from position ``step`` to the next begins; KIND 0: shared, 1: by item, 2: by step."""
    place = transitions
    if KIND == 1:
        place += item.to(tl.int64) * C * C
    if KIND == 2:
        place += (item.to(tl.int64) * (T - 1) + step) * C * C
    return place


@triton.jit
def argmax_lowest(x, index, CP: tl.constexpr):
    """The lowest index of the maximum of x, int32.

    float32 is compared as integers of the same order, for which the hardware reduces a warp in one instruction.
    """
    if x.dtype == tl.float64:
        best = tl.max(x, axis=0)
        return tl.min(tl.where(x == best, index, CP), axis=0)
    else:
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        best = tl.max(key, axis=0)
        return tl.min(tl.where(key == best, index, CP), axis=0)
