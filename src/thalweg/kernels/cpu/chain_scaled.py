"""Forward and backward over a chain in the scaled linear domain: one small matrix-vector product a step.

exp(A - max A) is taken once; a step is then a product with it, an elementwise product with exp(e_t - max e_t) and a
factor that undoes the scale of the step before. Scales go into float64 sums of logarithms.

A state that falls below the smallest number is lost. With a finite A of range r a step shrinks the weights by exp(-r)
at most, and the backward weights of any two states differ by exp(r) at most, so what is lost had a posterior below
exp(2 r) times that smallest number, and nothing needs checking for r <= :data:`SAFE_RANGE`. Otherwise :func:`bracket`
walks once more and raises every weight to a floor above all that can be lost: its log Z is too large where the first
is too small, and if the two agree, nothing that matters was lost. It does so in both directions, since the backward
weights are computed anew. An item that fails is computed in the log domain instead.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.simd import (
    add_outer,
    copy_row,
    dot,
    exp_row,
    fill_rows,
    max_row,
    multiply_row,
    padded,
    raise_row,
    scale_row,
    sweep_sum,
    write_product,
)

__all__ = [
    "FLOOR",
    "GROUP",
    "SAFE_GAP",
    "SAFE_OVERLAP",
    "SAFE_RANGE",
    "Scaled",
    "bracket",
    "finish",
    "first",
    "forward",
    "gradient",
    "gradient_refilled",
    "path_scores",
    "zeros",
]

# By type of float: what its smallest number, 1e-38 or 1e-308, leaves room for.
SAFE_RANGE = {"f": 25.0, "d": 200.0}
# The least that forward and backward weights may share, for their products to stay in range.
SAFE_OVERLAP = {"f": 1e-15, "d": 1e-100}
# What a floor is for each label: above e^-87 and e^-708, where powers end.
FLOOR = {"f": 4e-38, "d": 1e-307}
# How far apart in log Z the two walks may be.
SAFE_GAP = {"f": 1e-6, "d": 1e-12}
# Steps whose moves are added up in one go: the sums are then read and written that much less often.
GROUP = 16


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin where a cache line does: vectors that straddle two lines cost a fifth of a pass.

    >>> zeros((2, 3), np.dtype(np.float32)).ctypes.data % 64
    0
    """
    kind = torch.float32 if dtype.char == "f" else torch.float64
    return torch.zeros(shape, dtype=kind).numpy()


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
        top = transitions.max((1, 2))
        safe = SAFE_RANGE[transitions.dtype.char]
        # Negated comparisons, so that an infinite range and the NaN of two infinities count as risky.
        with np.errstate(invalid="ignore"):
            self.risky = not (top.max() - transitions.min() <= safe and end.max() - end.min() <= safe)
        if self.risky:
            top[np.isneginf(top)] = 0  # a matrix of -inf alone has no power: its items go to the log domain
        self.top = top.astype(np.float64)
        self.power, self.transposed = zeros((2, count, width, width), transitions.dtype)
        np.exp(transitions - top.reshape(-1, 1, 1), out=self.power[:, :size, :size])
        self.transposed[:, :size, :size] = self.power[:, :size, :size].transpose(0, 2, 1)


@kernel
def first(emissions, start, b, size, sums, weights):
    """exp(e_1 + start - m) into ``weights``; returns m."""
    for c in range(size):
        sums[c] = emissions[b, 0, c] + start[c]
    top = max_row(sums, size)
    if top > -np.inf:
        exp_row(sums, size, top, weights)
    return top


@kernel
def forward(emissions, power, top, start, end, lengths, every, alpha, log_z, scratch, part, low, high):
    """log Z in ``log_z``; forward weights of positions 0, every, 2 every, .. in ``alpha`` (B, rows, P) if it has rows.

    The weights of a position add up to 1. An item whose weights vanish gets NaN: infeasible, or out of range.
    ``scratch`` is (parts, 6, P) of zeros. Time O(T C^2) an item.
    """
    size = emissions.shape[2]
    before, after, weights, sums = scratch[part, 0], scratch[part, 1], scratch[part, 2], scratch[part, 3]
    one = weights.dtype.type(1)
    keep = alpha.shape[1] > 0
    for b in range(low, high):
        n = b if len(power) > 1 else 0
        log_z[b] = np.nan
        m = first(emissions, start, b, size, sums, weights)
        total = np.float64(m)
        scale = 1.0
        s = scale_row(weights, one, before)
        due = every
        if keep:
            scale_row(before, one / s, alpha[b, 0])
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
                scale_row(before, one / s, alpha[b, t // every])
                due += every
        m = max_row(end, size)
        if total == -np.inf or m == -np.inf or not s > 0:
            continue
        exp_row(end, size, m, weights)
        s = dot(before, weights)
        if s > 0:
            moved = (lengths[b] - 1) * top[n] if lengths[b] > 1 else 0.0
            log_z[b] = total + moved + m + math.log(scale) + math.log(s)


@kernel
def bracket(
    emissions, matrix, top, opening, closing, lengths, backwards, floor, gap, overlap, alpha, log_z, scratch,
    part, low, high,
):  # fmt: skip
    """Set ``log_z`` to NaN where a walk with weights raised to ``floor`` ends higher than a plain one, by over ``gap``.

    Forwards, ``matrix`` is the power of A, ``opening`` and ``closing`` are start and end, and the plain walk is that of
    :func:`forward`; backwards, the transposed power, end and start, and the plain walk is made here: only then do both
    round alike. Backwards, forward and backward weights must also share ``overlap`` at every position. ``scratch`` is
    (parts, 6, P) of zeros.
    """
    size = emissions.shape[2]
    raised, plain, after = scratch[part, 0], scratch[part, 1], scratch[part, 2]
    weights, sums, last = scratch[part, 3], scratch[part, 4], scratch[part, 5]
    one = weights.dtype.type(1)
    m_last = max_row(closing, size)
    exp_row(closing, size, m_last, last)
    for b in range(low, high):
        n = b if len(matrix) > 1 else 0
        length = lengths[b]
        s = s_plain = one
        total = 0.0
        scale = ratio = 1.0
        for k in range(length):
            if math.isnan(log_z[b]):
                break
            t = length - 1 - k if backwards else k
            if k == 0:
                for c in range(size):
                    sums[c] = emissions[b, t, c] + opening[c]
                m = max_row(sums, size)
                exp_row(sums, size, m, weights)
                copy_row(weights, raised)
                s_plain = scale_row(weights, one, plain)
            else:
                m = max_row(emissions[b, t], size)
                exp_row(emissions[b, t], size, m, weights)
                scale *= s
                ratio *= s / s_plain
                sweep_sum(raised, matrix[n], size, after)
                multiply_row(weights, after, one / s, raised)
                if backwards:
                    sweep_sum(plain, matrix[n], size, after)
                    if not dot(alpha[b, t], after) >= overlap * max_row(after, size):
                        log_z[b] = np.nan
                    s_plain = multiply_row(weights, after, one / s_plain, plain)
            s = raise_row(raised, floor)
            total += m
            if not 1e-200 < scale < 1e200:
                total += math.log(scale)
                scale = 1.0
        if backwards:
            excess = math.log(ratio * (dot(raised, last) / dot(plain, last)))
        else:
            moved = (length - 1) * top[n] if length > 1 else 0.0
            excess = total + moved + m_last + math.log(scale) + math.log(dot(raised, last)) - log_z[b]
        if not excess <= gap:
            log_z[b] = np.nan


@kernel
def _walk_back(emissions, transposed, b, length, begin, stop, rows, factor, d_emissions, scratch):
    """Backward over positions stop-1..begin with their forward weights in ``rows``; see :func:`gradient`.

    Between calls ``scratch[0]`` holds the backward weights of ``stop - 1`` and ``scratch[1]`` what they were made of.
    """
    size = emissions.shape[2]
    beta, weights = scratch[0], scratch[1]
    left, right = scratch[2 : 2 + GROUP], scratch[2 + GROUP : 2 + 2 * GROUP]
    moves = scratch[2 + 2 * GROUP :]
    one = weights.dtype.type(1)
    filled = 0
    for t in range(stop - 1, begin - 1, -1):
        here = rows[t - begin]
        inverse = one / dot(here, beta)
        if t < length - 1:
            # `weights` still holds exp(e_t+1) times the backward weights of t + 1, and `beta` its product with A.
            copy_row(here, left[filled])
            scale_row(weights, inverse * factor, right[filled])
            filled += 1
            if filled == GROUP:
                add_outer(left, right, filled, moves)
                filled = 0
        write_product(here, beta, inverse * factor, size, d_emissions[b, t])
        if t > 0:
            exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
            multiply_row(weights, beta, inverse, weights)
            sweep_sum(weights, transposed, size, beta)
    add_outer(left, right, filled, moves)


@kernel
def _settle(power, length, b, out, d_emissions, moves):
    """The sums over moves into ``out`` (C, C), zeros past the length."""
    size = d_emissions.shape[2]
    for i in range(size):
        for j in range(size):
            out[i, j] += moves[i, j] * power[i, j]
    for t in range(length, d_emissions.shape[1]):
        for c in range(size):
            d_emissions[b, t, c] = 0


@kernel
def gradient(
    emissions, power, transposed, end, lengths, alpha, log_z, weight, d_emissions, d_moves, scratch, part, low, high
):
    """Posterior weights of labels into ``d_emissions``, of moves into ``d_moves``, each times the item's weight.

    ``d_moves`` is float64 (parts, C, C) for shared transitions, summed over the items of a part, else (B, C, C).
    Items with ``log_z`` NaN are left alone. ``scratch`` is (parts, 2 + 2 GROUP + P, P) of zeros.
    """
    size = emissions.shape[2]
    for b in range(low, high):
        if not math.isnan(log_z[b]):
            n = b if len(power) > 1 else 0
            room = scratch[part]
            moves = room[2 + 2 * GROUP :]
            fill_rows(moves, moves.dtype.type(0))
            exp_row(end, size, max_row(end, size), room[0])
            _walk_back(emissions, transposed[n], b, lengths[b], 0, lengths[b], alpha[b], weight[b], d_emissions, room)
            _settle(power[n], lengths[b], b, d_moves[b if len(power) > 1 else part], d_emissions, moves)


@kernel
def gradient_refilled(
    emissions, power, transposed, end, lengths, every, alpha, log_z, weight, d_emissions, d_moves, scratch, rows, part,
    low, high,
):  # fmt: skip
    """As :func:`gradient`, where ``alpha`` has the forward weights of every so-manieth position alone.

    Those in between are computed again, one stretch at a time, into ``rows`` (parts, every + 2, P).
    """
    size = emissions.shape[2]
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        n = b if len(power) > 1 else 0
        room = scratch[part]
        own, after, weights = rows[part], rows[part, -1], rows[part, -2]
        moves = room[2 + 2 * GROUP :]
        one = moves.dtype.type(1)
        fill_rows(moves, moves.dtype.type(0))
        exp_row(end, size, max_row(end, size), room[0])
        stop = lengths[b]
        while stop > 0:
            begin = (stop - 1) // every * every
            copy_row(alpha[b, begin // every], own[0])
            for t in range(begin + 1, stop):
                exp_row(emissions[b, t], size, max_row(emissions[b, t], size), weights)
                sweep_sum(own[t - begin - 1], power[n], size, after)
                s = multiply_row(weights, after, one, weights)
                scale_row(weights, one / s, own[t - begin])
            _walk_back(emissions, transposed[n], b, lengths[b], begin, stop, own, weight[b], d_emissions, room)
            stop = begin
        _settle(power[n], lengths[b], b, d_moves[b if len(power) > 1 else part], d_emissions, moves)


@kernel
def path_scores(emissions, transitions, start, end, lengths, labels, scores):
    """The score of one labelling (B, T) of each item in float64; transitions are (1 or B, 1 or T-1, C, C).

    Returns the number of the first label out of range, counted through the batch, or -1.
    """
    size = emissions.shape[2]
    for b in range(len(emissions)):
        length = lengths[b]
        total = 0.0
        for t in range(length):
            label = labels[b, t]
            if label < 0 or label >= size:
                return b * labels.shape[1] + t
            total += emissions[b, t, label]
            if t > 0:
                total += transitions[
                    b if len(transitions) > 1 else 0, t - 1 if transitions.shape[1] > 1 else 0, labels[b, t - 1], label
                ]
        scores[b] = total + start[labels[b, 0]] + end[labels[b, length - 1]]
    return -1


@kernel
def finish(gold, lengths, weight, shared, d_emissions, d_moves, d_start, d_end):
    """Take each item's weight off its gold labelling (if ``gold`` has columns); sum up what start and end get."""
    size = d_emissions.shape[2]
    for b in range(len(lengths)):
        length = lengths[b]
        if gold.shape[1] > 0:
            for t in range(length):
                d_emissions[b, t, gold[b, t]] -= weight[b]
                if t > 0:
                    step = t - 1 if d_moves.shape[1] > 1 else 0
                    d_moves[0 if shared else b, step, gold[b, t - 1], gold[b, t]] -= weight[b]
        for c in range(size):
            d_start[c] += d_emissions[b, 0, c]
            d_end[c] += d_emissions[b, length - 1, c]
