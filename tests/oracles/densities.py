"""Densities, their scores and what learning makes of them, by their formulas; numpy in float64 alone."""

from __future__ import annotations

import math

import numpy as np


def gaussian_energy(x, mean, precision):
    return 0.5 * float((x - mean) @ precision @ (x - mean))


def mixture_density(x, means, scales, weights):
    total = 0.0
    for mean, scale, weight in zip(means, scales, weights, strict=True):
        normal = (2 * math.pi * scale**2) ** (len(x) / 2)
        total += weight * math.exp(-float((x - mean) @ (x - mean)) / (2 * scale**2)) / normal
    return total


def mixture_score(x, means, scales, weights):
    """d log p / dx, each component in proportion to its share."""
    shares = [mixture_density(x, [m], [s], [w]) for m, s, w in zip(means, scales, weights, strict=True)]
    pulls = [(m - x) / s**2 for m, s in zip(means, scales, strict=True)]
    return sum(share * pull for share, pull in zip(shares, pulls, strict=True)) / sum(shares)


def gaussian_score_matching(x, mean, precision):
    """1/2 ||P (x - m)||^2 - tr P."""
    slope = precision @ (x - mean)
    return 0.5 * float(slope @ slope) - float(np.trace(precision))


def gaussian_denoising(x, mean, precision, sigma, shake):
    pull = sigma * precision @ (x + sigma * shake - mean) - shake
    return 0.5 * float(pull @ pull)


def score_matching_by_differences(energy, x, width=1e-4):
    """Hyvarinen's objective of any energy, its derivatives by central differences."""
    slope, curvature = 0.0, 0.0
    for place in range(len(x)):
        e = np.zeros(len(x))
        e[place] = width
        above, here, below = energy(x + e), energy(x), energy(x - e)
        slope += ((above - below) / (2 * width)) ** 2
        curvature += (above - 2 * here + below) / width**2
    return 0.5 * slope - curvature


def langevin_variance(precision, step):
    """Where the variance of an unadjusted walk in a Gaussian settles: v = (1 - step a)^2 v + 2 step."""
    return 2 * step / (1 - (1 - step * precision) ** 2)


def langevin_precision(variance, step):
    """The precision at which such a walk has that variance: a (1 - step a / 2) = 1 / variance, the smaller root."""
    return (1 - math.sqrt(1 - 2 * step / variance)) / step


def free_energy(energies, beta, over):
    finite = [e for e in energies if e != math.inf]
    if not finite:
        return math.inf
    least = min(finite)
    if over == "minimum":
        return least
    return least - math.log(math.fsum(math.exp(-beta * (e - least)) for e in finite)) / beta


def free_energy_gradient(energies, beta, over):
    """P(z), or one at the first least."""
    if over == "minimum":
        return [float(z == energies.index(min(energies))) for z in range(len(energies))]
    least = min(energies)
    weights = [0.0 if e == math.inf else math.exp(-beta * (e - least)) for e in energies]
    return [w / math.fsum(weights) for w in weights]
