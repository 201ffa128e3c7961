"""Structural SVMs by enumeration: every structure of every example has its features and its cost in a list."""

from __future__ import annotations

import itertools

import numpy as np


def chain_features(x, y, labels):
    """Emission, transition, start and end counts of one labelling, in the order of a tagger's weights."""
    emission, moves = np.zeros((x.shape[1], labels)), np.zeros((labels, labels))
    start, end = np.zeros(labels), np.zeros(labels)
    for row, label in zip(x, y, strict=True):
        emission[:, label] += row
    for a, b in itertools.pairwise(y):
        moves[a, b] += 1
    start[y[0]], end[y[-1]] = 1, 1
    return np.concatenate([emission.ravel(), moves.ravel(), start, end])


def all_labellings(x, gold, labels, cost):
    """Features of gold less those of every labelling (Y, d), and what each costs (Y,)."""
    right = chain_features(x, gold, labels)
    every = list(itertools.product(range(labels), repeat=len(x)))
    psi = np.array([right - chain_features(x, y, labels) for y in every])
    return psi, np.array([sum(cost[a, b] for a, b in zip(gold, y, strict=True)) for y in every])


def primal(w, examples, scale):
    """The objective: lambda / 2 |w|^2 and the mean of the greatest cost less margin."""
    return scale / 2 * w @ w + np.mean([np.max(costs - psi @ w) for psi, costs in examples])


def optimum(examples, scale, steps=6000):
    """Bounds of the optimal objective, by accelerated projected gradient on the dual over all structures; weights."""
    count = len(examples)
    psi = np.concatenate([each for each, _ in examples]) / (scale * count)
    costs = np.concatenate([each for _, each in examples]) / count
    ends = np.cumsum([0] + [len(each) for _, each in examples])
    rate = 1 / (scale * np.linalg.norm(psi, 2) ** 2 + 1e-12)
    p = np.concatenate([np.full(len(each), 1 / len(each)) for _, each in examples])
    ahead, momentum = p, 1.0
    for _ in range(steps):
        climbed = ahead + rate * (costs - scale * psi @ (ahead @ psi))
        fresh = np.concatenate([nearest_in_simplex(climbed[a:b]) for a, b in itertools.pairwise(ends)])
        following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, p, momentum = fresh + (momentum - 1) / following * (fresh - p), fresh, following
    w = p @ psi
    return costs @ p - scale / 2 * w @ w, primal(w, examples, scale), w


def nearest_in_simplex(v):
    """The point of the simplex nearest to v, by sorting."""
    falling = np.sort(v)[::-1]
    over = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - over[np.nonzero(falling > over)[0][-1]], 0)


def segment_features(x, sizes, longest):
    """For each length of a segment the sum of x at the ends of such segments; sizes are those of the segments."""
    found, at = np.zeros((x.shape[1], longest)), -1
    for size in sizes:
        at += size
        found[:, size - 1] += x[at]
    return found.ravel()


def all_segmentations(length, longest):
    """Every way to cut a sequence, as the sizes of its segments."""
    if length == 0:
        return [()]
    return [(k, *rest) for k in range(1, min(longest, length) + 1) for rest in all_segmentations(length - k, longest)]
