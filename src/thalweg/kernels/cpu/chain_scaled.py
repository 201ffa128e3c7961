"""Forward and backward over a chain in the scaled linear domain: one small matrix-vector product a step.

exp(A - max A) is taken once; a step is then a product with it, an elementwise product with exp(e_t - max e_t) and a
factor that undoes the scale of the step before. Scales go into float64 sums of logarithms.

A state that falls below the smallest number is lost. With a finite A of range r the backward weights of any two states
differ by exp(r) at most, so what is lost had a posterior below exp(r) times that smallest number, and nothing needs
checking for r <= :data:`SAFE_RANGE`. Otherwise :func:`verify` looks at every position: if the forward and backward
weights, each with largest entry 1, overlap by at least :data:`SAFE_OVERLAP`, then all that was lost is negligible; if
they do not, the item is computed in the log domain instead (:mod:`~thalweg.kernels.cpu.chain_log`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from thalweg.kernels.cpu.simd import (
    add_outer,
    copy_row,
    dot,
    exp_row,
    fill_rows,
    max_row,
    multiply_row,
    padded,
    scale_row,
    sweep_sum,
    write_product,
)

__all__ = [
    "SAFE_OVERLAP",
    "SAFE_RANGE",
    "Scaled",
    "first",
    "forward",
    "gradient",
    "path_scores",
    "take_gold",
    "verify",
]

# By type of float: what the largest and the smallest number of each leave room for.
SAFE_RANGE = {"f": 40.0, "d": 600.0}
# The posterior of anything lost is below the smallest number over this.
SAFE_OVERLAP = {"f": 1e-20, "d": 1e-200}
_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


class Scaled:
    """Shared or per-item transitions as padded powers: ``power`` and its transpose (N, P, P), N = 1 or B.

    ``risky`` tells whether the range of a matrix, or of ``end``, asks for :func:`verify`.

    >>> scaled = Scaled(np.zeros((1, 2, 2), np.float32), np.zeros(2, np.float32))
    >>> scaled.power[0, :2, :3], scaled.risky
    (array([[1., 1., 0.],
           [1., 1., 0.]], dtype=float32), False)
    """

    def __init__(self, transitions: np.ndarray, end: np.ndarray):
        count, size, _ = transitions.shape
        width = padded(size)
        self.top = transitions.max((1, 2))
        safe = SAFE_RANGE[transitions.dtype.char]
        # Negated comparisons, so that an infinite range and the NaN of two infinities count as risky.
        with np.errstate(invalid="ignore"):
            self.risky = not (self.top.max() - transitions.min() <= safe and end.max() - end.min() <= safe)
        self.top[np.isneginf(self.top)] = 0  # a matrix of -inf alone has no power: its items go to the log domain
        power = np.exp(transitions - self.top.reshape(-1, 1, 1))
        self.power = np.zeros((count, width, width), transitions.dtype)
        self.power[:, :size, :size] = power
        self.transposed = np.ascontiguousarray(self.power.transpose(0, 2, 1))


@njit(**_options)
def first(emissions, start, b, size, sums, weights):
    """exp(e_1 + start - m) into ``weights``; returns m."""
    for c in range(size):
        sums[c] = emissions[b, 0, c] + start[c]
    top = max_row(sums, size)
    if top > -np.inf:
        exp_row(sums, size, top, weights)
    return top


@njit(**_options)
def forward(emissions, power, top, start, end, lengths, every, alpha, log_z, scratch, part, low, high):
    """log Z in ``log_z``; forward weights of positions 0, every, 2 every, .. in ``alpha`` (B, rows, P) if it has rows.

    An item whose weights vanish gets NaN: infeasible, or out of range. ``scratch`` is (parts, 4, P) of zeros. Time
    O(T C^2) an item.
    """
    size = emissions.shape[2]
    before, after, weights, sums = scratch[part, 0], scratch[part, 1], scratch[part, 2], scratch[part, 3]
    one = weights.dtype.type(1)
    keep = alpha.shape[1] > 0
    for b in range(low, high):
        n = b if len(power) > 1 else 0
        log_z[b] = np.nan
        m = first(emissions, start, b, size, sums, weights)
        total = float(m)
        scale = 1.0
        s = scale_row(weights, one, before)
        due = every
        if keep:
            copy_row(before, alpha[b, 0])
        for t in range(1, lengths[b]):
            m = max_row(emissions[b, t], size)
            if not (m > -np.inf and s > 0):
                total = -np.inf
                break
            exp_row(emissions[b, t], size, m, weights)
            sweep_sum(before, power[n], size, after)
            # Dividing by the sum of the step before keeps that sum off the critical path.
            scale *= s
            s = multiply_row(weights, after, one / s, before)
            total += m
            if not 1e-200 < scale < 1e200:
                total += math.log(scale)
                scale = 1.0
            if keep and t == due:
                copy_row(before, alpha[b, t // every])
                due += every
        m = max_row(end, size)
        if total == -np.inf or m == -np.inf:
            continue
        exp_row(end, size, m, weights)
        s = dot(before, weights)
        if s > 0:
            moved = (lengths[b] - 1) * top[n] if lengths[b] > 1 else 0.0
            log_z[b] = total + moved + m + math.log(scale) + math.log(s)


@njit(**_options)
def verify(emissions, transposed, end, lengths, least, alpha, log_z, scratch, part, low, high):
    """Set ``log_z`` to NaN where forward and backward weights do not overlap enough at some position."""
    size = emissions.shape[2]
    beta, weights = scratch[part, 0], scratch[part, 1]
    one = weights.dtype.type(1)
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        n = b if len(transposed) > 1 else 0
        exp_row(end, size, max_row(end, size), beta)
        for t in range(lengths[b] - 1, -1, -1):
            most = max_row(beta, size)
            bound = least * max_row(alpha[b, t], size) * most
            if not (dot(alpha[b, t], beta) >= bound and bound > 0):
                log_z[b] = np.nan
                break
            if t > 0:
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                multiply_row(weights, beta, one / most, weights)
                sweep_sum(weights, transposed[n], size, beta)


@njit(**_options)
def _refill(emissions, power, begin, stop, b, after, weights, rows):
    """The forward weights of positions begin + 1..stop-1 from that of ``begin`` in ``rows[0]``."""
    size = emissions.shape[2]
    one = weights.dtype.type(1)
    s = scale_row(rows[0], one, after)
    for t in range(begin + 1, stop):
        exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
        sweep_sum(rows[t - begin - 1], power, size, after)
        s = multiply_row(weights, after, one / s, rows[t - begin])


@njit(**_options)
def gradient(
    emissions,
    power,
    transposed,
    end,
    lengths,
    every,
    alpha,
    log_z,
    weight,
    d_emissions,
    d_moves,
    scratch,
    rows,
    part,
    low,
    high,
):
    """Posterior weights of labels into ``d_emissions``, of moves into ``d_moves``, each times the item's weight.

    ``d_moves`` is float64 (parts, C, C) for shared transitions, summed over the items of a part, else (B, C, C).
    Items with ``log_z`` NaN are left alone. ``scratch`` is
    (parts, 12 + P, P) of zeros; ``rows`` (parts, every, P) takes recomputed forward weights if ``every`` exceeds 1.
    """
    size = emissions.shape[2]
    steps = emissions.shape[1]
    beta, after, weights, spare = scratch[part, 0], scratch[part, 1], scratch[part, 2], scratch[part, 3]
    left, right, moves = scratch[part, 4:8], scratch[part, 8:12], scratch[part, 12:]
    one = weights.dtype.type(1)
    nothing = weights.dtype.type(0)
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        n = b if len(power) > 1 else 0
        length = lengths[b]
        factor = weight[b]
        fill_rows(moves, nothing)
        exp_row(end, size, max_row(end, size), beta)
        filled = 0
        begin = length  # the first position whose forward weights are at hand
        for t in range(length - 1, -1, -1):
            here = alpha[b, t // every]
            if every > 1:
                if t < begin:
                    begin = t // every * every
                    copy_row(here, rows[part, 0])
                    _refill(emissions, power[n], begin, t + 1, b, after, spare, rows[part])
                here = rows[part, t - begin]
            inverse = one / dot(here, beta)
            if t < length - 1:
                # `weights` still holds exp(e_t+1) times the backward weights of t + 1, and `beta` its product with A.
                copy_row(here, left[filled])
                scale_row(weights, inverse * factor, right[filled])
                filled += 1
                if filled == 4:
                    add_outer(left, right, size, moves)
                    filled = 0
            write_product(here, beta, inverse * factor, size, d_emissions[b, t])
            if t > 0:
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                multiply_row(weights, beta, inverse, weights)
                sweep_sum(weights, transposed[n], size, beta)
        for k in range(filled, 4):
            fill_rows(left[k], nothing)
        add_outer(left, right, size, moves)
        out = d_moves[b if len(d_moves) == len(emissions) and len(power) > 1 else part]
        for i in range(size):
            for j in range(size):
                out[i, j] += moves[i, j] * power[n, i, j]
        for t in range(length, steps):
            for c in range(size):
                d_emissions[b, t, c] = 0


@njit(**_options)
def path_scores(emissions, transitions, start, end, lengths, labels, scores):
    """The score of one labelling (B, T) of each item in float64; transitions are (1 or B, 1 or T-1, C, C)."""
    for b in range(len(emissions)):
        length = lengths[b]
        total = float(start[labels[b, 0]]) + end[labels[b, length - 1]] + emissions[b, 0, labels[b, 0]]
        for t in range(1, length):
            moves = transitions[b if len(transitions) > 1 else 0, t - 1 if transitions.shape[1] > 1 else 0]
            total += float(emissions[b, t, labels[b, t]]) + moves[labels[b, t - 1], labels[b, t]]
        scores[b] = total


@njit(**_options)
def take_gold(gold, lengths, weight, d_emissions, d_moves, shared, part, low, high):
    """Take each item's weight off the labels and moves of its gold labelling."""
    for b in range(low, high):
        out = d_moves[part if shared else b]
        for t in range(lengths[b]):
            d_emissions[b, t, gold[b, t]] -= weight[b]
            if t > 0:
                out[t - 1 if out.shape[0] > 1 else 0, gold[b, t - 1], gold[b, t]] -= weight[b]
