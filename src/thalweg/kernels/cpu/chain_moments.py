"""Posteriors of moves, and expected scores, in the scaled domain of :mod:`~thalweg.kernels.cpu.chain_scaled`."""

from __future__ import annotations

import math

import numpy as np

from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.simd import dot, exp_row, max_row, multiply_row, sweep_sum, write_product

__all__ = ["edges", "expectation"]


@kernel
def edges(emissions, power, transposed, end, lengths, alpha, log_z, out, scratch, part, low, high):
    """p(y_t = i, y_t+1 = j) into ``out`` (B, T-1, C, C), zero on entry; items with ``log_z`` NaN are left alone."""
    size = emissions.shape[2]
    beta, weights = scratch[part, 0], scratch[part, 1]
    one = weights.dtype.type(1)
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        n = b if len(power) > 1 else 0
        exp_row(end, size, max_row(end, size), beta)
        inverse = one / dot(alpha[b, lengths[b] - 1], beta)
        for t in range(lengths[b] - 1, 0, -1):
            exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
            multiply_row(weights, beta, inverse, weights)
            sweep_sum(weights, transposed[n], size, beta)
            inverse = one / dot(alpha[b, t - 1], beta)
            for i in range(size):
                write_product(power[n, i], weights, alpha[b, t - 1, i] * inverse, size, out[b, t - 1, i])


@kernel
def expectation(
    emissions,
    transposed,
    end,
    lengths,
    alpha,
    log_z,
    other,
    products,
    start_of,
    end_of,
    values,
    scratch,
    part,
    low,
    high,
):
    """E_p[score_q(y)] of the items whose ``log_z`` is not NaN.

    ``products`` is the transpose of exp(A_p - max) * A_q, 0 where the first is; ``other`` .. ``end_of`` are q's
    emissions, start and end, which count only where p is positive.
    """
    size = emissions.shape[2]
    beta, weights, moved = scratch[part, 0], scratch[part, 1], scratch[part, 2]
    one = weights.dtype.type(1)
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        length = lengths[b]
        exp_row(end, size, max_row(end, size), beta)
        total = 0.0
        for t in range(length - 1, -1, -1):
            here = alpha[b, t]
            inverse = one / dot(here, beta)
            if t < length - 1:
                sweep_sum(weights, products[b if len(products) > 1 else 0], size, moved)
                total += dot(here, moved) * inverse
            for c in range(size):
                p = here[c] * beta[c] * inverse
                if p > 0:
                    score = np.float64(other[b, t, c])
                    if t == 0:
                        score += start_of[c]
                    if t == length - 1:
                        score += end_of[c]
                    total += p * score
            if t > 0:
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                multiply_row(weights, beta, inverse, weights)
                sweep_sum(weights, transposed[b if len(transposed) > 1 else 0], size, beta)
        values[b] = total
