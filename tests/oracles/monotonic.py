"""Hard monotonic attention by enumeration: every alignment that never goes back, one after the other."""

from __future__ import annotations

import itertools
import math


def _softmax(scores):
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _move(pull, jumps, i, S, backwards=False):
    """Probabilities of the next position, given that the last one was i; ``backwards`` breaks the definition."""
    open_ = range(S) if backwards else range(i, S)
    chosen = [pull[j] + (jumps[i][max(0, min(j - i, len(jumps[i]) - 1))] if jumps else 0.0) for j in open_]
    return dict(zip(open_, _softmax(chosen), strict=True))


def alignments(pull, jumps, outputs, target, backwards=False):
    """Every alignment of one target with its joint probability p(a, y | x).

    pull: T x S, jumps: T x S x J or None, outputs: T x S x V scores of the symbols that may stand (None for others).
    """
    S, T = len(pull[0]), len(target)
    ways = itertools.product(range(S), repeat=T)
    found = {}
    for way in ways:
        if not backwards and any(a > b for a, b in itertools.pairwise(way)):
            continue
        joint, before = 1.0, 0
        for t, (a, symbol) in enumerate(zip(way, target, strict=True)):
            move = _move(pull[t], jumps[t] if jumps else None, before, S, backwards)
            scores = [score for score in outputs[t][a] if score is not None]
            place = sum(score is not None for score in outputs[t][a][:symbol])
            joint *= move[a] * _softmax(scores)[place]
            before = a
        found[way] = joint
    return found


def posterior(found, T, S):
    """T x S: the share of the probability that has position s at step t."""
    total = sum(found.values())
    return [[sum(p for way, p in found.items() if way[t] == s) / total for s in range(S)] for t in range(T)]
