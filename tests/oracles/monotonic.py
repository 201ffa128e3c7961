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


def _walk(decisions, i, S):
    """Probabilities of the next position of a reader who walks, from S pairs of scores: of staying, of skipping."""

    def yes(score):
        return 1 / (1 + math.exp(-score))

    found, left = {i: yes(decisions[i][0]) if i < S - 1 else 1.0}, 1.0
    left -= found[i]
    for j in range(i + 1, S):
        skipped = yes(decisions[j][1]) if j < S - 1 else 0.0
        found[j], left = left * (1 - skipped), left * skipped
    return found


def alignments(pull, jumps, outputs, target, backwards=False, walk=None):
    """Every alignment of one target with its joint probability p(a, y | x).

    pull: T x S, jumps: T x S x J or None, outputs: T x S x V scores of the symbols that may stand (None for others);
    walk: T x S x 2 in place of the first two.
    """
    S, T = len(outputs[0]), len(target)
    ways = itertools.product(range(S), repeat=T)
    found = {}
    for way in ways:
        if not backwards and any(a > b for a, b in itertools.pairwise(way)):
            continue
        joint, before = 1.0, 0
        for t, (a, symbol) in enumerate(zip(way, target, strict=True)):
            if walk:
                move = _walk(walk[t], before, S)
            else:
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
