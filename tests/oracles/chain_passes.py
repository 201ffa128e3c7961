"""Forward and backward over one chain in logarithms and float64, position by position, as the textbooks have it."""

from itertools import pairwise

import numpy as np


def _log_sum(x, axis):
    top = x.max(axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.exp(x - top).sum(axis))


def passes(emissions, transitions, start, end):
    """log Z, posteriors of labels (T, C) and expected numbers of moves (C, C) of one item."""
    emissions, transitions = np.asarray(emissions, np.float64), np.asarray(transitions, np.float64)
    steps, size = emissions.shape
    ahead = [np.asarray(start, np.float64) + emissions[0]]
    for t in range(1, steps):
        ahead.append(emissions[t] + _log_sum(ahead[-1][:, None] + transitions, 0))
    back = [np.asarray(end, np.float64)]
    for t in range(steps - 1, 0, -1):
        back.append(_log_sum(transitions + (emissions[t] + back[-1])[None, :], 1))
    back.reverse()
    log_z = _log_sum(ahead[-1] + back[-1], 0)
    labels = np.exp(np.stack(ahead) + np.stack(back) - log_z)
    moves = np.zeros((size, size))
    for t in range(1, steps):
        moves += np.exp(ahead[t - 1][:, None] + transitions + (emissions[t] + back[t])[None, :] - log_z)
    return log_z, labels, moves


def loss(emissions, transitions, start, end, lengths, gold=None):
    """Values (B,), log Z or score(gold) - log Z, and the gradients of the sum of log Z - score(gold)."""
    emissions = np.asarray(emissions, np.float64)
    values, d_emissions = [], np.zeros_like(emissions)
    d_moves, d_start, d_end = np.zeros(np.shape(transitions)), np.zeros(len(start)), np.zeros(len(end))
    for b, length in enumerate(lengths):
        value, labels, moves = passes(emissions[b, :length], transitions, start, end)
        if gold is not None:
            path = [int(label) for label in gold[b][:length]]
            value = sum(emissions[b, t, label] for t, label in enumerate(path)) - value
            value += float(start[path[0]]) + float(end[path[-1]])
            for one, two in pairwise(path):
                value += float(transitions[one][two])
                moves[one, two] -= 1
            for t, label in enumerate(path):
                labels[t, label] -= 1
        values.append(value)
        d_emissions[b, :length] = labels
        d_moves += moves
        d_start += labels[0]
        d_end += labels[-1]
    return np.array(values), d_emissions, d_moves, d_start, d_end
