"""Chains of few labels, many items at a time: one item a lane.

With nine labels a row fills its vectors badly and a step is all latency. Here a row holds one label of L items; the
recursion is that of :mod:`~thalweg.kernels.cpu.chain_scaled`, for shared transitions of safe range only. Lanes past
their item's length hold finite numbers that are multiplied by zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from thalweg.kernels.cpu.emitter import LANES
from thalweg.kernels.cpu.simd import fill_rows
from thalweg.kernels.cpu.simd_lanes import (
    exp_lanes,
    from_lanes,
    larger_lanes,
    mix_lanes,
    multiply_lanes,
    outer_lanes,
    to_lanes,
)

__all__ = ["MOST_LABELS", "backward", "forward"]

# Labels up to which lanes beat rows.
MOST_LABELS = 24
_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(**_options)
def _powers(emissions, start, first, t, block, most, weights):
    """exp(e_t - most) of the items from ``first`` on, as lanes; ``most`` is the largest score of each."""
    batch, _, size = emissions.shape
    lanes = block.shape[1]
    whole = size - size % LANES
    for lane in range(0, lanes, LANES):
        b = first + lane
        if b + LANES <= batch:
            for c in range(0, whole, LANES):
                to_lanes(emissions, b, t, c, block, lane)
            for c in range(whole, size):
                for r in range(LANES):
                    block[c, lane + r] = emissions[b + r, t, c]
        else:
            for r in range(LANES):
                item = min(b + r, batch - 1)
                for c in range(size):
                    block[c, lane + r] = emissions[item, t, c]
    if t == 0:
        for c in range(size):
            for lane in range(lanes):
                block[c, lane] += start[c]
    fill_rows(most, most.dtype.type(-np.inf))
    for c in range(size):
        larger_lanes(block[c], most)
    for c in range(size):
        exp_lanes(block[c], most, weights[c])


@njit(**_options)
def forward(emissions, flipped, top, start, end, lengths, every, alpha, log_z, blocks, rows, scales, part, low, high):
    """log Z, NaN where weights vanish, and forward weights ``alpha`` (G, T, C, L) of groups low..high-1.

    ``flipped`` is exp(A - top) transposed, ``end`` the exponential of the end scores; ``lengths`` (G * L,), those past
    the batch like the last. Scales are multiplied over ``every`` steps before their logarithm is taken. ``blocks`` is
    (parts, 3, C, L), ``rows`` (parts, 3, L), ``scales`` float64 (parts, L); ``log_z`` (G * L,).
    """
    size = emissions.shape[2]
    lanes = alpha.shape[3]
    block, weights, after = blocks[part, 0], blocks[part, 1], blocks[part, 2]
    most, total, factor = rows[part, 0], rows[part, 1], rows[part, 2]
    nothing, one = most.dtype.type(0), most.dtype.type(1)
    scale = scales[part]
    for g in range(low, high):
        first = g * lanes
        last, least = 0, emissions.shape[1]
        for lane in range(lanes):
            log_z[first + lane] = (lengths[first + lane] - 1) * top
            scale[lane] = 1.0
            last = max(last, lengths[first + lane])
            least = min(least, lengths[first + lane])
        fill_rows(factor, one)
        for t in range(last):
            _powers(emissions, start, first, t, block, most, weights)
            now = alpha[g, t]
            if t > 0:
                mix_lanes(flipped, alpha[g, t - 1], size, after)
            else:
                fill_rows(after, one)
            fill_rows(total, nothing)
            for c in range(size):
                multiply_lanes(weights[c], after[c], factor, now[c], total)
            if t < least:  # no item has ended: no questions asked
                for lane in range(lanes):
                    log_z[first + lane] += most[lane]
                    scale[lane] *= total[lane]
                    factor[lane] = 1 / total[lane]
            else:
                for lane in range(lanes):
                    if t < lengths[first + lane]:
                        log_z[first + lane] += most[lane]
                        scale[lane] *= total[lane]
                        factor[lane] = 1 / total[lane]
                    else:
                        factor[lane] = 0
            if t % every == every - 1:
                for lane in range(lanes):
                    log_z[first + lane] += math.log(scale[lane])
                    scale[lane] = 1.0
        for lane in range(lanes):
            length = lengths[first + lane]
            s = 0.0
            own = 0.0  # the sum of the last weights is in the scale already
            for c in range(size):
                s += alpha[g, length - 1, c, lane] * end[c]
                own += alpha[g, length - 1, c, lane]
            value = log_z[first + lane] + math.log(scale[lane]) + math.log(s / own)
            log_z[first + lane] = value if s > 0 and value > -np.inf else np.nan


@njit(**_options)
def backward(
    emissions, power, start, end, lengths, alpha, weight, d_emissions, d_moves, blocks, rows, sums, part, low, high
):
    """Posterior weights of labels into ``d_emissions``, of moves (over exp(A - top)) into ``d_moves`` (parts, C, C).

    ``weight`` and ``lengths`` are (G * L,), the weights 0 for items to leave out and past the batch. ``blocks`` is
    (parts, 5, C, L), ``rows`` (parts, 6, L) of zeros, ``sums`` (parts, C, C, LANES).
    """
    batch, steps, size = emissions.shape
    lanes = alpha.shape[3]
    block, weights, beta = blocks[part, 0], blocks[part, 1], blocks[part, 2]
    ahead, share = blocks[part, 3], blocks[part, 4]
    most, total, inverse = rows[part, 0], rows[part, 1], rows[part, 2]
    factor, spare, ones = rows[part, 3], rows[part, 4], rows[part, 5]
    nothing = most.dtype.type(0)
    fill_rows(ones, most.dtype.type(1))
    for g in range(low, high):
        first = g * lanes
        fill_rows(beta, nothing)
        fill_rows(ahead, nothing)
        fill_rows(sums[part], nothing)
        last, least = 0, steps
        sound = True
        for lane in range(lanes):
            last = max(last, lengths[first + lane])
            least = min(least, lengths[first + lane])
            sound = sound and weight[first + lane] != 0
        for b in range(first, min(first + lanes, batch)):
            for t in range(last, steps):
                for c in range(size):
                    d_emissions[b, t, c] = 0
        for t in range(last - 1, -1, -1):
            now = alpha[g, t]
            mix_lanes(power, ahead, size, beta)
            if t >= least - 1:
                for lane in range(lanes):
                    if t == lengths[first + lane] - 1:
                        for c in range(size):
                            beta[c, lane] = end[c]
            fill_rows(total, nothing)
            for c in range(size):
                multiply_lanes(now[c], beta[c], ones, block[c], total)
            if t < least and sound:
                for lane in range(lanes):
                    inverse[lane] = 1 / total[lane]
                    factor[lane] = inverse[lane] * weight[first + lane]
            else:
                for lane in range(lanes):
                    inside = t < lengths[first + lane] and weight[first + lane] != 0
                    inverse[lane] = 1 / total[lane] if inside else nothing
                    factor[lane] = inverse[lane] * weight[first + lane]
            for c in range(size):
                multiply_lanes(block[c], ones, factor, block[c], spare)
                multiply_lanes(ahead[c], ones, factor, share[c], spare)
            outer_lanes(now, share, size, sums[part])
            _write(block, d_emissions, first, t)
            if t > 0:
                _powers(emissions, start, first, t, block, most, weights)
                for c in range(size):
                    multiply_lanes(weights[c], beta[c], inverse, ahead[c], spare)
        for i in range(size):
            for j in range(size):
                total_of = 0.0
                for lane in range(LANES):
                    total_of += sums[part, i, j, lane]
                d_moves[part, i, j] += total_of


@njit(**_options)
def _write(block, out, first, t):
    """Lanes back to rows: ``out[first + lane, t, c] = block[c, lane]`` for the items of the batch."""
    batch, _, size = out.shape
    whole = size - size % LANES
    for lane in range(0, block.shape[1], LANES):
        b = first + lane
        if b + LANES <= batch:
            for c in range(0, whole, LANES):
                from_lanes(block, lane, c, out, b, t)
            for c in range(whole, size):
                for r in range(LANES):
                    out[b + r, t, c] = block[c, lane + r]
        else:
            for r in range(min(LANES, batch - b)):
                for c in range(size):
                    out[b + r, t, c] = block[c, lane + r]
