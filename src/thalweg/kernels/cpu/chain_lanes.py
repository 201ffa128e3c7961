"""Chains of few labels, many items at a time: one item a lane.

With nine labels a row fills its vectors badly and a step is all latency. Here a row holds one label of L items; the
recursion is that of :mod:`~thalweg.kernels.cpu.chain_scaled`, for shared transitions of safe range only. Lanes past
their item's length hold zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from thalweg.kernels.cpu.emitter import LANES
from thalweg.kernels.cpu.simd import fill_rows, sweep_sum
from thalweg.kernels.cpu.simd_lanes import (
    add_products,
    exp_lanes,
    from_lanes,
    larger_lanes,
    multiply_lanes,
    to_lanes,
)

__all__ = ["MOST_LABELS", "backward", "forward"]

# Labels up to which lanes beat rows.
MOST_LABELS = 24
_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(**_options)
def _powers(emissions, start, first, t, block, most, weights):
    """exp(e_t - most) of the items from ``first`` on, as lanes; ``most`` is the largest score of each (0 for none)."""
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
    for lane in range(lanes):
        if most[lane] == -np.inf:
            most[lane] = 0
    for c in range(size):
        exp_lanes(block[c], most, weights[c])


@njit(**_options)
def forward(emissions, flipped, top, start, end, lengths, alpha, log_z, blocks, rows, part, low, high):
    """log Z, NaN where weights vanish, and forward weights ``alpha`` (G, T, C, L) of groups low..high-1.

    ``flipped`` is exp(A - top) transposed, ``end`` the exponential of the end scores. ``blocks`` is (parts, 3, C, L),
    ``rows`` (parts, 3, L); ``log_z`` (G * L,).
    """
    batch, _, size = emissions.shape
    lanes = alpha.shape[3]
    block, weights, after = blocks[part, 0], blocks[part, 1], blocks[part, 2]
    most, total, factor = rows[part, 0], rows[part, 1], rows[part, 2]
    nothing = most.dtype.type(0)
    scale = np.ones(lanes)
    for g in range(low, high):
        first = g * lanes
        last = 0
        for lane in range(lanes):
            log_z[first + lane] = 0.0
            scale[lane] = 1.0
            factor[lane] = 1
            last = max(last, lengths[min(first + lane, batch - 1)])
        for t in range(last):
            _powers(emissions, start, first, t, block, most, weights)
            for lane in range(lanes):
                if t < lengths[min(first + lane, batch - 1)]:
                    log_z[first + lane] += most[lane]
            now = alpha[g, t]
            if t > 0:
                for c in range(size):
                    sweep_sum(flipped[c], alpha[g, t - 1], size, after[c])
            else:
                fill_rows(after, most.dtype.type(1))
            fill_rows(total, nothing)
            for c in range(size):
                multiply_lanes(weights[c], after[c], factor, now[c], total)
            for lane in range(lanes):
                if t < lengths[min(first + lane, batch - 1)]:
                    factor[lane] = 1 / total[lane]
                    if t < lengths[min(first + lane, batch - 1)] - 1:
                        scale[lane] *= total[lane]
                        if not 1e-200 < scale[lane] < 1e200:
                            log_z[first + lane] += math.log(scale[lane])
                            scale[lane] = 1.0
                else:
                    factor[lane] = 0
                    for c in range(size):
                        now[c, lane] = 0
        for lane in range(lanes):
            length = lengths[min(first + lane, batch - 1)]
            s = 0.0
            for c in range(size):
                s += alpha[g, length - 1, c, lane] * end[c]
            value = log_z[first + lane] + math.log(scale[lane]) + math.log(s) + (length - 1) * top
            log_z[first + lane] = value if s > 0 and value > -np.inf else np.nan


@njit(**_options)
def backward(
    emissions, power, start, end, lengths, alpha, weight, d_emissions, d_moves, blocks, rows, sums, part, low, high
):
    """Posterior weights of labels into ``d_emissions``, of moves (over exp(A - top)) into ``d_moves`` (parts, C, C).

    ``weight`` is (G * L,) with 0 for items to leave out and past the batch. ``blocks`` is (parts, 5, C, L), ``rows``
    (parts, 5, L), ``sums`` (parts, C, C, LANES).
    """
    batch, steps, size = emissions.shape
    lanes = alpha.shape[3]
    block, weights, beta = blocks[part, 0], blocks[part, 1], blocks[part, 2]
    ahead, share = blocks[part, 3], blocks[part, 4]
    most, total, inverse = rows[part, 0], rows[part, 1], rows[part, 2]
    factor, spare = rows[part, 3], rows[part, 4]
    nothing = most.dtype.type(0)
    ones = np.ones(lanes, most.dtype)
    whole = size - size % LANES
    for g in range(low, high):
        first = g * lanes
        fill_rows(beta, nothing)
        fill_rows(ahead, nothing)
        fill_rows(sums[part], nothing)
        last = 0
        for lane in range(lanes):
            last = max(last, lengths[min(first + lane, batch - 1)])
        for b in range(first, min(first + lanes, batch)):
            for t in range(last, steps):
                for c in range(size):
                    d_emissions[b, t, c] = 0
        for t in range(last - 1, -1, -1):
            now = alpha[g, t]
            for c in range(size):
                sweep_sum(power[c], ahead, size, beta[c])
            for lane in range(lanes):
                if t == lengths[min(first + lane, batch - 1)] - 1:
                    for c in range(size):
                        beta[c, lane] = end[c]
            fill_rows(total, nothing)
            for c in range(size):
                multiply_lanes(now[c], beta[c], ones, block[c], total)
            for lane in range(lanes):
                inside = t < lengths[min(first + lane, batch - 1)] and weight[first + lane] != 0
                inverse[lane] = 1 / total[lane] if inside else nothing
                factor[lane] = inverse[lane] * weight[first + lane]
            for c in range(size):
                multiply_lanes(block[c], ones, factor, block[c], spare)
                multiply_lanes(ahead[c], ones, factor, share[c], spare)
            for c in range(size):
                add_products(now[c], share, size, sums[part, c])
            for lane in range(0, lanes, LANES):
                b = first + lane
                if b + LANES <= batch:
                    for c in range(0, whole, LANES):
                        from_lanes(block, lane, c, d_emissions, b, t)
                    for c in range(whole, size):
                        for r in range(LANES):
                            d_emissions[b + r, t, c] = block[c, lane + r]
                else:
                    for r in range(min(LANES, batch - b)):
                        for c in range(size):
                            d_emissions[b + r, t, c] = block[c, lane + r]
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
