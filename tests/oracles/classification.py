"""Scores of predicted classes from their definitions, in plain Python."""

from __future__ import annotations

import math


def predicted(row):
    return max(range(len(row)), key=lambda c: (row[c], -c))


def accuracy(rows, labels):
    return sum(predicted(row) == y for row, y in zip(rows, labels, strict=True)) / len(labels)


def accuracy_at(rows, labels, k):
    found = 0
    for row, y in zip(rows, labels, strict=True):
        best = sorted(range(len(row)), key=lambda c: (-row[c], c))[:k]
        found += y in best
    return found / len(labels)


def macro_f1(rows, labels):
    answers = [predicted(row) for row in rows]
    scores = []
    for c in range(len(rows[0])):
        right = sum(a == y == c for a, y in zip(answers, labels, strict=True))
        taken, held = answers.count(c), list(labels).count(c)
        if taken + held:
            precision, recall = right / max(taken, 1), right / max(held, 1)
            scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return math.fsum(scores) / len(scores)


def nll(rows, labels):
    return -math.fsum(row[y] for row, y in zip(rows, labels, strict=True)) / len(labels)


def brier(rows, labels):
    total = [(math.exp(v) - (c == y)) ** 2 for row, y in zip(rows, labels, strict=True) for c, v in enumerate(row)]
    return math.fsum(total) / len(labels)


def ece(rows, labels, bins):
    held = [[] for _ in range(bins)]
    for row, y in zip(rows, labels, strict=True):
        best = predicted(row)
        confidence = math.exp(row[best])
        number = next(b for b in range(bins) if confidence <= (b + 1) / bins + 1e-12)
        held[number].append((confidence, best == y))
    total = 0.0
    for each in held:
        if each:
            total += abs(math.fsum(c for c, _ in each) - sum(r for _, r in each))
    return total / len(labels)


def tempered_nll(rows, labels, temperature):
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        scaled = [value / temperature for value in row]
        top = max(scaled)
        total += top + math.log(math.fsum(math.exp(v - top) for v in scaled)) - scaled[y]
    return total / len(labels)


def best_temperature(rows, labels, low=0.05, high=20.0, rounds=8, points=41):
    """The best of a grid of temperatures, then of a finer one round it, and so on."""
    for _ in range(rounds):
        step = (high / low) ** (1 / (points - 1))
        grid = [low * step**i for i in range(points)]
        best = min(grid, key=lambda t: tempered_nll(rows, labels, t))
        low, high = best / step, best * step
    return best
