"""The best, the k best and samples of a chain."""

from __future__ import annotations

import math

import numpy as np

from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.chain_log import filtered, load_moves
from thalweg.kernels.cpu.simd import add_row, fill_rows, max_row, sweep_max, top_place

__all__ = ["best", "draw", "k_best", "sample_log", "sample_scaled"]


@kernel
def _path_score(emissions, transitions, start, end, b, length, labels):
    """The score of one labelling in float64."""
    total = np.float64(start[labels[0]]) + end[labels[length - 1]] + emissions[b, 0, labels[0]]
    for t in range(1, length):
        moves = transitions[b if len(transitions) > 1 else 0, t - 1 if transitions.shape[1] > 1 else 0]
        total += np.float64(emissions[b, t, labels[t]]) + moves[labels[t - 1], labels[t]]
    return total


@kernel
def _load(moves, size, rows, columns):
    """A matrix of scores into padded rows, and its transpose."""
    for i in range(size):
        for j in range(size):
            rows[i, j] = moves[i, j]
            columns[j, i] = moves[i, j]


@kernel
def best(emissions, transitions, start, end, lengths, scores, labels, room, part, low, high):
    """Viterbi: highest scores and their labellings, -1 past the length; the lowest label wins a tie.

    Only maxima are kept on the way; the back-pointers of the one path that is wanted are found on the way back.
    Transitions are (1 or B, 1 or T-1, C, C), ``room`` is (parts, T + 1 + 2 P, P).
    """
    size = emissions.shape[2]
    steps = emissions.shape[1]
    by_step = transitions.shape[1] > 1
    nothing = room.dtype.type(0)
    rows, ahead = room[part], room[part, steps]
    moves, arrivals = rows[steps + 1 : steps + 1 + rows.shape[1]], rows[steps + 1 + rows.shape[1] :]
    fill_rows(rows, room.dtype.type(-np.inf))
    for b in range(low, high):
        length = lengths[b]
        n = b if len(transitions) > 1 else 0
        for c in range(size):
            rows[0, c] = emissions[b, 0, c] + start[c]
        if transitions.shape[1] > 0 and (b == low or len(transitions) > 1):
            _load(transitions[n, 0], size, moves, arrivals)
        for t in range(1, length):
            if by_step and t > 1:
                _load(transitions[n, t - 1], size, moves, arrivals)
            # Relative to the largest: float32 keeps its digits along any length.
            top = max_row(rows[t - 1], size)
            sweep_max(rows[t - 1], moves, size, ahead)
            add_row(ahead, emissions[b, t], -top if top > -np.inf else nothing, size, rows[t])
        label = top_place(rows[length - 1], end, size)
        for t in range(length, steps):
            labels[b, t] = -1
        labels[b, length - 1] = label
        for t in range(length - 1, 0, -1):
            if by_step:
                for c in range(size):
                    ahead[c] = transitions[n, t - 1, c, label]
                label = top_place(rows[t - 1], ahead, size)
            else:
                label = top_place(rows[t - 1], arrivals[label], size)
            labels[b, t - 1] = label
        scores[b] = _path_score(emissions, transitions, start, end, b, length, labels[b])


@kernel
def _insert(value, label, rank, scores, labels, ranks, filled):
    """Put an entry into a falling list of at most k; returns how many it holds."""
    k = len(scores)
    place = filled if filled < k else k - 1
    if filled == k and not value > scores[k - 1]:
        return filled
    while place > 0 and value > scores[place - 1]:
        scores[place] = scores[place - 1]
        labels[place] = labels[place - 1]
        ranks[place] = ranks[place - 1]
        place -= 1
    scores[place] = value
    labels[place] = label
    ranks[place] = rank
    return filled + 1 if filled < k else k


@kernel
def _merge(old, moves, size, scores, labels, ranks):
    """The k best of ``old[i, rank] + moves[i]`` over i < size and all ranks, falling; the lists of ``old`` fall too."""
    k = len(scores)
    filled = 0
    for r in range(k):
        scores[r] = -np.inf
    for i in range(size):
        move = moves[i]
        # One look at the head of a list settles most of them.
        if filled == k and not old[i, 0] + move > scores[k - 1]:
            continue
        for rank in range(k):
            value = old[i, rank] + move
            if value == -np.inf or (filled == k and not value > scores[k - 1]):
                break
            filled = _insert(value, i, rank, scores, labels, ranks, filled)


@kernel
def k_best(emissions, transitions, start, end, lengths, scores, labels, lists, back, matrix, part, low, high):
    """The k highest scores (B, k) and labellings (B, k, T); missing ones -inf and -1.

    Each state keeps its k best partial scores in ``lists`` (parts, 2, C, k); where each came from is in ``back``
    (parts, T + 1, 2, C, k): labels and ranks. ``matrix`` is (parts, C + 1, C); all scores are float64.
    """
    size = emissions.shape[2]
    k = scores.shape[1]
    for b in range(low, high):
        length = lengths[b]
        old, new, origin, moves = lists[part, 0], lists[part, 1], back[part], matrix[part]
        for c in range(size):
            moves[size, c] = end[c]
            for r in range(k):
                old[c, r] = -np.inf
            old[c, 0] = np.float64(emissions[b, 0, c]) + start[c]
        for t in range(1, length):
            if t == 1 or transitions.shape[1] > 1:
                load_moves(transitions, b, t - 1, size, moves, True)
            for j in range(size):
                _merge(old, moves[j], size, new[j], origin[t, 0, j], origin[t, 1, j])
                for r in range(k):
                    new[j, r] += emissions[b, t, j]
            old, new = new, old
        _merge(old, moves[size], size, new[0], origin[length, 0, 0], origin[length, 1, 0])
        for r in range(k):
            scores[b, r] = new[0, r]
            for t in range(labels.shape[2]):
                labels[b, r, t] = -1
            if new[0, r] > -np.inf:
                label, rank = origin[length, 0, 0, r], origin[length, 1, 0, r]
                for t in range(length - 1, -1, -1):
                    labels[b, r, t] = label
                    if t > 0:
                        label, rank = origin[t, 0, label, rank], origin[t, 1, label, rank]
                scores[b, r] = _path_score(emissions, transitions, start, end, b, length, labels[b, r])


@kernel
def draw(weights, size, u):
    """The label at which the running sum of weights passes u times their sum."""
    total = 0.0
    last = 0
    for c in range(size):
        total += weights[c]
        if weights[c] > 0:
            last = c
    bound = u * total
    running = 0.0
    for c in range(size):
        running += weights[c]
        if running > bound:
            return c
    return last


@kernel
def sample_scaled(transposed, end, lengths, alpha, log_z, uniforms, labels, weights, part, low, high):
    """Samples (S, B, T) of the items whose ``log_z`` is not NaN, from their scaled forward weights. O(C) a step."""
    size = len(end)
    top = max_row(end, size)
    spare = weights[part]
    for b in range(low, high):
        if math.isnan(log_z[b]):
            continue
        n = b if len(transposed) > 1 else 0
        for s in range(len(uniforms)):
            for c in range(size):
                spare[c] = alpha[b, lengths[b] - 1, c] * math.exp(end[c] - top)
            for t in range(lengths[b] - 1, -1, -1):
                label = draw(spare, size, uniforms[s, b, t])
                labels[s, b, t] = label
                if t > 0:
                    for c in range(size):
                        spare[c] = alpha[b, t - 1, c] * transposed[n, label, c]
            for t in range(lengths[b], labels.shape[2]):
                labels[s, b, t] = -1


@kernel
def sample_log(
    emissions, transitions, start, end, lengths, chosen, uniforms, labels, rows, matrix, weights, part, low, high
):
    """Samples of the ``chosen`` items by log forward weights; infeasible ones get -1."""
    size = len(end)
    for b in range(low, high):
        if not chosen[b]:
            continue
        alpha, spare = rows[part], weights[part]
        total = filtered(emissions, transitions, start, lengths, b, alpha, matrix[part], rows[part, -1])
        for s in range(len(uniforms)):
            for t in range(labels.shape[2]):
                labels[s, b, t] = -1
            if total == -np.inf:
                continue
            top = -np.inf
            for c in range(size):
                spare[c] = alpha[lengths[b] - 1, c] + end[c]
                top = max(top, spare[c])
            for t in range(lengths[b] - 1, -1, -1):
                if top == -np.inf:
                    break
                for c in range(size):
                    spare[c] = math.exp(spare[c] - top)
                label = draw(spare, size, uniforms[s, b, t])
                labels[s, b, t] = label
                if t > 0:
                    moves = transitions[b if len(transitions) > 1 else 0, t - 1 if transitions.shape[1] > 1 else 0]
                    top = -np.inf
                    for c in range(size):
                        spare[c] = alpha[t - 1, c] + moves[c, label]
                        top = max(top, spare[c])
