"""One step of Baum-Welch by its definition: every path of states, in float64, with nothing but numpy."""

from __future__ import annotations

import itertools

import numpy as np


def paths_of(initial, transition, densities):
    """All state paths of one sequence and p(path, x); ``densities[t]`` is (C,), or None where x_t is missing."""
    C, T = len(initial), len(densities)
    paths = list(itertools.product(range(C), repeat=T))
    joint = []
    for path in paths:
        p = initial[path[0]]
        for i, j in itertools.pairwise(path):
            p *= transition[i][j]
        for t, z in enumerate(path):
            p *= 1.0 if densities[t] is None else densities[t][z]
        joint.append(p)
    return paths, np.array(joint)


def posteriors(initial, transition, sequences_of_densities):
    """log p of all, first states (C,), moves (C, C), and for each sequence the posteriors (T, C)."""
    C = len(initial)
    total, first, moves, every = 0.0, np.zeros(C), np.zeros((C, C)), []
    for densities in sequences_of_densities:
        paths, joint = paths_of(initial, transition, densities)
        total += np.log(joint.sum())
        weights = joint / joint.sum()
        states = np.zeros((len(densities), C))
        for path, w in zip(paths, weights, strict=True):
            first[path[0]] += w
            for i, j in itertools.pairwise(path):
                moves[i, j] += w
            for t, z in enumerate(path):
                states[t, z] += w
        every.append(states)
    return total, first, moves, every


def rows(counts):
    """Each row divided by its sum."""
    return counts / counts.sum(-1, keepdims=True)


def normal(x, mean, covariance):
    """The density of a normal distribution, from its formula."""
    away = np.asarray(x) - mean
    inverse, determinant = np.linalg.inv(covariance), np.linalg.det(2 * np.pi * covariance)
    return np.exp(-0.5 * away @ inverse @ away) / np.sqrt(determinant)


def weighted_moments(values, weights):
    """Mean and covariance of (M, D) values under weights (M,)."""
    mean = (weights[:, None] * values).sum(0) / weights.sum()
    away = values - mean
    return mean, np.einsum("m,mi,mj->ij", weights, away, away) / weights.sum()
