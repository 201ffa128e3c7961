"""Chains in the log domain and in float64: exact for any scores, and the way for transitions that differ by step.

Costs C^2 exponentials a step where the scaled domain has C. Everything an item needs is recomputed from its scores, so
that memory beyond inputs and outputs is O(T C) a thread. Weights are kept relative to their largest.
"""

from __future__ import annotations

import math

import numpy as np

from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.simd import log_sum_row, max_row

__all__ = ["expectation", "filtered", "gradient", "load_moves", "partition"]


@kernel
def load_moves(transitions, b, t, size, matrix, flipped):
    """The scores of step t -> t + 1 as float64 padded rows, as they are or transposed."""
    moves = transitions[b if len(transitions) > 1 else 0, t if transitions.shape[1] > 1 else 0]
    if flipped:
        for i in range(size):
            for j in range(size):
                matrix[j, i] = moves[i, j]
    else:
        for i in range(size):
            for j in range(size):
                matrix[i, j] = moves[i, j]


@kernel
def filtered(emissions, transitions, start, lengths, b, rows, matrix, spare):
    """Log forward weights of item b into ``rows`` (T, P), each relative to its largest; the sum of those, or -inf."""
    size = emissions.shape[2]
    total = 0.0
    for t in range(lengths[b]):
        if t == 0:
            for c in range(size):
                rows[0, c] = np.float64(emissions[b, 0, c]) + start[c]
        else:
            if t == 1 or transitions.shape[1] > 1:
                load_moves(transitions, b, t - 1, size, matrix, True)
            for c in range(size):
                m, s = log_sum_row(matrix[c], rows[t - 1], size, spare)
                rows[t, c] = emissions[b, t, c] + m + math.log(s) if s > 0 else -np.inf
        top = max_row(rows[t], size)
        if top == -np.inf:
            return top
        total += top
        for c in range(size):
            rows[t, c] -= top
    return total


@kernel
def _step_back(emissions, transitions, b, t, moves, beta, ahead, shift, powers):
    """Log backward weights of t, from those of t + 1, in ``beta``.

    ``powers[i, j]`` exp(``shift[i]``) is what they are the sum of: exp(A(i, j) + e_t+1(j) + beta_t+1(j)).
    """
    size = emissions.shape[2]
    load_moves(transitions, b, t, size, moves, False)
    for c in range(size):
        ahead[c] = emissions[b, t + 1, c] + beta[c]
    for i in range(size):
        m, s = log_sum_row(moves[i], ahead, size, powers[i])
        shift[i] = m
        beta[i] = m + math.log(s) if s > 0 else -np.inf


@kernel
def partition(emissions, transitions, start, end, lengths, chosen, log_z, rows, matrix, part, low, high):
    """log Z of the ``chosen`` items, -inf for infeasible ones.

    ``rows`` is (parts, T + 2, P), ``matrix`` (parts, P, P).
    """
    size = emissions.shape[2]
    for b in range(low, high):
        if not chosen[b]:
            continue
        spare, last = rows[part, -1], rows[part, -2]
        total = filtered(emissions, transitions, start, lengths, b, rows[part], matrix[part], spare)
        log_z[b] = -np.inf
        if total > -np.inf:
            for c in range(size):
                last[c] = end[c]
            m, s = log_sum_row(last, rows[part, lengths[b] - 1], size, spare)
            if s > 0:
                log_z[b] = total + m + math.log(s)


@kernel
def gradient(
    emissions, transitions, start, end, lengths, chosen, weight, d_emissions, d_moves, rows, matrix, part, low, high
):
    """As :func:`thalweg.kernels.cpu.chain_scaled.gradient` for the ``chosen`` items.

    ``d_moves`` is (B, T-1, C, C) for a gradient by step, (B, 1, C, C) by item, (parts, 1, C, C) in all. ``rows`` is
    (parts, T + 4, P), ``matrix`` (parts, 2, P, P), both float64.
    """
    size = emissions.shape[2]
    steps = emissions.shape[1]
    for b in range(low, high):
        if not chosen[b]:
            continue
        length = lengths[b]
        factor = weight[b]
        for t in range(steps):
            for c in range(size):
                d_emissions[b, t, c] = 0
        alpha, powers, moves = rows[part], matrix[part, 0], matrix[part, 1]
        beta, ahead, shift, spare = rows[part, -1], rows[part, -2], rows[part, -3], rows[part, -4]
        if filtered(emissions, transitions, start, lengths, b, alpha, moves, spare) == -np.inf:
            continue
        for c in range(size):
            beta[c] = end[c]
        out = d_moves[b if len(d_moves) == len(emissions) else part]
        for t in range(length - 1, -1, -1):
            if t < length - 1:
                _step_back(emissions, transitions, b, t, moves, beta, ahead, shift, powers)
            top, norm = log_sum_row(alpha[t], beta, size, spare)
            if not norm > 0:
                break  # infeasible
            for c in range(size):
                d_emissions[b, t, c] = factor * (spare[c] / norm)
            if t < length - 1:
                into = out[t if out.shape[0] > 1 else 0]
                for i in range(size):
                    at = alpha[t, i] + shift[i] - top
                    if at > -np.inf:
                        share = factor * math.exp(at) / norm
                        for j in range(size):
                            into[i, j] += share * powers[i, j]
            largest = max_row(beta, size)
            for c in range(size):
                beta[c] -= largest


@kernel
def expectation(
    emissions,
    transitions,
    start,
    end,
    lengths,
    chosen,
    other,
    moves_of,
    start_of,
    end_of,
    values,
    rows,
    matrix,
    part,
    low,
    high,
):
    """E_p[score_q(y)] of the ``chosen`` items; 0 * -inf = 0.

    q's emissions, transitions, start and end are ``other`` .. ``end_of``. ``rows`` is (parts, T + 4, P),
    ``matrix`` (parts, 2, P, P), both float64.
    """
    size = emissions.shape[2]
    for b in range(low, high):
        if not chosen[b]:
            continue
        length = lengths[b]
        alpha, powers, moves = rows[part], matrix[part, 0], matrix[part, 1]
        beta, ahead, shift, spare = rows[part, -1], rows[part, -2], rows[part, -3], rows[part, -4]
        values[b] = 0.0
        if filtered(emissions, transitions, start, lengths, b, alpha, moves, spare) == -np.inf:
            continue
        for c in range(size):
            beta[c] = end[c]
        total = 0.0
        for t in range(length - 1, -1, -1):
            if t < length - 1:
                _step_back(emissions, transitions, b, t, moves, beta, ahead, shift, powers)
            top, norm = log_sum_row(alpha[t], beta, size, spare)
            if not norm > 0:
                break
            for c in range(size):
                p = spare[c] / norm
                if p > 0:
                    score = np.float64(other[b, t, c])
                    if t == 0:
                        score += start_of[c]
                    if t == length - 1:
                        score += end_of[c]
                    total += p * score
            if t < length - 1:
                scores = moves_of[b if len(moves_of) > 1 else 0, t if moves_of.shape[1] > 1 else 0]
                for i in range(size):
                    at = alpha[t, i] + shift[i] - top
                    if at > -np.inf:
                        share = math.exp(at) / norm
                        for j in range(size):
                            p = share * powers[i, j]
                            if p > 0:
                                total += p * scores[i, j]
            largest = max_row(beta, size)
            for c in range(size):
                beta[c] -= largest
        values[b] = total
