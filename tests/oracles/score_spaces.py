"""Score spaces of mixtures point by point: the formulas as they are written down, one number at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np


def normal(x, mean, variance):
    """N(x; m, s^2) of numbers."""
    return math.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


def posterior(x, weights, means, variances):
    """P(i | x) of a number."""
    parts = [w * normal(x, m, v) for w, m, v in zip(weights, means, variances, strict=True)]
    return [part / sum(parts) for part in parts]


def log_likelihood(sequence, weights, means, variances):
    """log p of numbers that are independent draws."""
    triples = list(zip(weights, means, variances, strict=True))
    return sum(math.log(sum(w * normal(x, m, v) for w, m, v in triples)) for x in sequence)


def first_order(sequence, weights, means, variances):
    """d / d m_i = sum_t P(i | x_t) (x_t - m_i) / s_i^2."""
    total = [0.0] * len(means)
    for x in sequence:
        shares = posterior(x, weights, means, variances)
        for i, (m, v) in enumerate(zip(means, variances, strict=True)):
            total[i] += shares[i] * (x - m) / v
    return total


def second_order(sequence, weights, means, variances):
    """The lower triangle, row by row, of d^2 / d m_i d m_j.

    i != j: -sum_t P(i | x_t) P(j | x_t) (x_t - m_i)(x_t - m_j) / (s_i^2 s_j^2);
    i == j: sum_t P(i | x_t) ((1 - P(i | x_t)) (x_t - m_i)^2 / s_i^4 - 1 / s_i^2).
    """
    found = []
    for i in range(len(means)):
        for j in range(i + 1):
            total = 0.0
            for x in sequence:
                shares = posterior(x, weights, means, variances)
                one, other = (x - means[i]) / variances[i], (x - means[j]) / variances[j]
                if i == j:
                    total += shares[i] * ((1 - shares[i]) * one**2 - 1 / variances[i])
                else:
                    total -= shares[i] * shares[j] * one * other
            found.append(total)
    return found


def fisher_vector(points, weights, means, variances, improved):
    """Perronnin's vector of points (T, D) with diagonal covariances: weights, means, variances."""
    N, D = means.shape
    in_weights, in_means, in_deviations = np.zeros(N), np.zeros((N, D)), np.zeros((N, D))
    for point in points:
        shares = _shares(point, weights, means, variances)
        for k, share in enumerate(shares):
            in_weights[k] += (share - weights[k]) / math.sqrt(weights[k])
            for d in range(D):
                apart = (point[d] - means[k, d]) / math.sqrt(variances[k, d])
                in_means[k, d] += share * apart / math.sqrt(weights[k])
                in_deviations[k, d] += share * (apart**2 - 1) / math.sqrt(2 * weights[k])
    vector = np.concatenate([in_weights, in_means.ravel(), in_deviations.ravel()]) / len(points)
    if improved:
        vector = np.sign(vector) * np.sqrt(np.abs(vector))
        vector = vector / np.linalg.norm(vector)
    return vector


def fisher_vector_from_moments(points, weights, means, variances):
    """The same as scikit-image normalises it, from means of r, r x and r x^2: the sign of the last part is opposite."""
    shares = np.array([_shares(point, weights, means, variances) for point in points])  # (T, N)
    mass = shares.mean(axis=0)[:, None]
    first, second = shares.T @ points / len(points), shares.T @ points**2 / len(points)
    in_weights = (mass[:, 0] - weights) / np.sqrt(weights)
    rooted = np.sqrt(weights)[:, None]
    in_means = (first - mass * means) / (rooted * np.sqrt(variances))
    spread = second - 2 * first * means + mass * means**2
    in_variances = (mass * variances - spread) / (math.sqrt(2) * rooted * variances)
    return np.concatenate([in_weights, in_means.ravel(), in_variances.ravel()])


def _shares(point, weights, means, variances):
    parts = [
        w * math.prod(normal(x, m, v) for x, m, v in zip(point, ms, vs, strict=True))
        for w, ms, vs in zip(weights, means, variances, strict=True)
    ]
    return [part / sum(parts) for part in parts]


def chain_second_order(sequence, initial, moves, means, variances):
    """d^2 log p / d m_i d m_j of a chain of numbers, the lower triangle, by going through all paths of states.

    With P(z | x) of each path and its slope S_i = sum_t [z_t = i] (x_t - m_i) / s_i^2:
    E[S_i S_j] - E[S_i] E[S_j] - [i = j] E[how often i] / s_i^2.
    """
    N = len(means)
    total, once, often = 0.0, [0.0] * N, [0.0] * N
    twice = [[0.0] * N for _ in range(N)]
    for path in itertools.product(range(N), repeat=len(sequence)):
        chance = initial[path[0]]
        for i, j in itertools.pairwise(path):
            chance *= moves[i][j]
        for x, z in zip(sequence, path, strict=True):
            chance *= normal(x, means[z], variances[z])
        slope = [
            sum((x - means[i]) / variances[i] for x, z in zip(sequence, path, strict=True) if z == i) for i in range(N)
        ]
        total += chance
        for i in range(N):
            once[i] += chance * slope[i]
            often[i] += chance * path.count(i)
            for j in range(N):
                twice[i][j] += chance * slope[i] * slope[j]
    return [
        twice[i][j] / total - once[i] * once[j] / total**2 - (often[i] / total / variances[i] if i == j else 0.0)
        for i in range(N)
        for j in range(i + 1)
    ]


def fisher_information_1d(weights, means, variances, points=200_001):
    """E[U U'] of one draw in means, variances and logits of weights, by a sum over a fine grid."""
    w, m, v = (np.array(each)[:, None] for each in (weights, means, variances))
    x = np.linspace((m - 14 * np.sqrt(v)).min(), (m + 14 * np.sqrt(v)).max(), points)
    parts = w * np.exp(-((x - m) ** 2) / (2 * v)) / np.sqrt(2 * math.pi * v)
    density = parts.sum(axis=0)
    shares = parts / np.maximum(density, 1e-300)
    scores = np.concatenate([shares * (x - m) / v, 0.5 * shares * ((x - m) ** 2 / v**2 - 1 / v), shares - w])
    return (scores * density * (x[1] - x[0])) @ scores.T
