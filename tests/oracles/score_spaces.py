"""Score spaces of mixtures point by point: the formulas as they are written down, one number at a time."""

from __future__ import annotations

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
        parts = [
            weights[k] * math.prod(normal(point[d], means[k, d], variances[k, d]) for d in range(D)) for k in range(N)
        ]
        for k in range(N):
            share = parts[k] / sum(parts)
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
