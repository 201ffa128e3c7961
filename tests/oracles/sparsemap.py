"""SparseMAP over enumerated labellings in float64: brute force over supports, and a certificate for any mixture.

``weighted`` is a list of every labelling of one chain with its score, ``[(labels, score), ...]``.
"""

from __future__ import annotations

import itertools

import numpy as np


def onehots(weighted, size):
    """The unary vectors of the labellings as rows, (Y, L C)."""
    rows = []
    for labels, _ in weighted:
        row = np.zeros((len(labels), size))
        row[np.arange(len(labels)), list(labels)] = 1.0
        rows.append(row.ravel())
    return np.array(rows)


def solve(weighted, size, curvature=1.0, slack=1e-9):
    """(marginals (L, C), value): the first support whose stationary point is feasible and beaten by no labelling.

    Every subset of the labellings is tried, so this is for a dozen of them at most. ``curvature`` other than 1 makes a
    broken twin.
    """
    vectors, scores = onehots(weighted, size), np.array([score for _, score in weighted])
    gram = curvature * vectors @ vectors.T
    for count in range(1, len(scores) + 1):
        for support in map(list, itertools.combinations(range(len(scores)), count)):
            matrix = np.ones((count + 1, count + 1))
            matrix[0, 0], matrix[1:, 1:] = 0.0, gram[np.ix_(support, support)]
            right = np.concatenate(([1.0], scores[support]))
            found, *_ = np.linalg.lstsq(matrix, right, rcond=None)
            if np.abs(matrix @ found - right).max() > slack or found[1:].min() < -slack:
                continue
            weights = np.zeros(len(scores))
            weights[support] = found[1:]
            gains = scores - gram @ weights
            if gains.max() <= found[0] + slack:
                value = weights @ scores - 0.5 * weights @ gram @ weights
                return (weights @ vectors).reshape(-1, size), value
    raise AssertionError("no support satisfies the conditions of optimality")


def gap(weighted, size, mixture):
    """How much any labelling gains on a mixture {labels: weight}: at least what the mixture's value lacks."""
    scores = dict(weighted)
    vectors = dict(zip(scores, onehots(weighted, size), strict=True))
    mean = sum(weight * vectors[labels] for labels, weight in mixture.items())
    gains = {labels: score - mean @ vectors[labels] for labels, score in scores.items()}
    return max(gains.values()) - sum(weight * gains[labels] for labels, weight in mixture.items())


def sparsemax(scores):
    """The point of the simplex nearest to a vector, by bisection of its threshold."""
    low, high = np.max(scores) - 1.0, np.max(scores)
    for _ in range(100):
        middle = (low + high) / 2
        if np.maximum(scores - middle, 0).sum() > 1:
            low = middle
        else:
            high = middle
    weights = np.maximum(scores - (low + high) / 2, 0)
    return weights / weights.sum()


def sparsemax_jacobian(scores):
    """diag(s) - s s' / |s| with s the indicator of the support."""
    support = (sparsemax(scores) > 1e-12).astype(float)
    return np.diag(support) - np.outer(support, support) / support.sum()
