"""Mixtures of Gaussians point by point: densities, what is observed of a point, one step of EM."""

from __future__ import annotations

import math

import numpy as np


def gaussian(point, mean, covariance):
    """log N(x; m, S) of what is not NaN in x."""
    seen = ~np.isnan(point)
    if not seen.any():
        return 0.0
    part = covariance[np.ix_(seen, seen)]
    difference = (point - mean)[seen]
    distance = difference @ np.linalg.inv(part) @ difference
    return -0.5 * (distance + math.log(np.linalg.det(part)) + seen.sum() * math.log(2 * math.pi))


def joint(point, weights, means, covariances):
    """log p(x, z) for each z."""
    return [math.log(w) + gaussian(point, m, s) for w, m, s in zip(weights, means, covariances, strict=True)]


def log_density(point, weights, means, covariances):
    """log p(x)."""
    return math.log(sum(math.exp(value) for value in joint(point, weights, means, covariances)))


def log_likelihood(points, weights, means, covariances):
    """The sum of log p(x)."""
    return sum(log_density(point, weights, means, covariances) for point in points)


def step(points, weights, means, covariances):
    """One step of EM with full covariances; missing values by their conditional mean and covariance."""
    shares = np.array([np.exp(joint(x, weights, means, covariances)) for x in points])
    shares /= shares.sum(axis=1, keepdims=True)
    found = []
    for k, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
        filled, spread = [], []
        for point in points:
            gone = np.isnan(point)
            seen = ~gone
            full, rest = point.copy(), np.zeros_like(covariance)
            gain = covariance[np.ix_(gone, seen)] @ np.linalg.pinv(covariance[np.ix_(seen, seen)])
            full[gone] = mean[gone] + gain @ (point - mean)[seen]
            rest[np.ix_(gone, gone)] = covariance[np.ix_(gone, gone)] - gain @ covariance[np.ix_(seen, gone)]
            filled.append(full)
            spread.append(rest)
        mass = shares[:, k].sum()
        centre = sum(r * x for r, x in zip(shares[:, k], filled, strict=True)) / mass
        total = sum(
            r * (np.outer(x - centre, x - centre) + s) for r, x, s in zip(shares[:, k], filled, spread, strict=True)
        )
        found.append((mass / len(points), centre, total / mass))
    return tuple(np.array(each) for each in zip(*found, strict=True))
