"""Distributions over label sequences by enumeration of every labelling; the standard library alone, float64.

A *weighted list* is every structure of positive weight with its score, ``[(structure, score), ...]``: all that follows
:func:`paths` needs no more than that and holds for any structure. A *part* is anything hashable that a structure may
contain; ``parts(structure)`` lists those it does contain.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from typing import NamedTuple


class Item(NamedTuple):
    """One chain without its padding."""

    emissions: list  # L x C
    moves: list  # L - 1 matrices, C x C
    start: list  # C
    end: list  # C


def items(emissions, transitions, start=None, end=None, lengths=None):
    """The chains of a batch given as nested lists; the depth of ``transitions`` says which kind they are."""
    zeros = [0.0] * len(emissions[0][0])
    found = []
    for b, rows in enumerate(emissions):
        length = lengths[b] if lengths is not None else len(rows)
        if _depth(transitions) == 2:
            moves = [transitions] * (length - 1)
        elif _depth(transitions) == 3:
            moves = [transitions[b]] * (length - 1)
        else:
            moves = transitions[b][: length - 1]
        found.append(Item(rows[:length], moves, start or zeros, end or zeros))
    return found


def _depth(nested):
    """How many lists lie inside one another; where there are no moves at all, too few, but then none is used."""
    if not isinstance(nested, list):
        return 0
    return 1 + max(map(_depth, nested), default=0)


def score(item, labels):
    """start[y_1] + sum_t emissions[t][y_t] + sum_t moves[t][y_t][y_t+1] + end[y_L], rounded once."""
    terms = [item.start[labels[0]], item.end[labels[-1]]]
    terms += [row[label] for row, label in zip(item.emissions, labels, strict=True)]
    terms += [move[i][j] for move, (i, j) in zip(item.moves, itertools.pairwise(labels), strict=True)]
    return -math.inf if -math.inf in terms else float(sum(map(Fraction, terms)))


def paths(item):
    """Every labelling of positive weight with its score."""
    every = itertools.product(range(len(item.start)), repeat=len(item.emissions))
    scored = [(labels, score(item, labels)) for labels in every]
    return [(labels, value) for labels, value in scored if value > -math.inf]


def given(weighted, allowed):
    """The labellings that keep to ``allowed[t]``, a set of labels for each position."""
    return [(y, s) for y, s in weighted if all(label in ok for label, ok in zip(y, allowed, strict=True))]


def labels_at(labels):
    """Parts (position, label)."""
    return list(enumerate(labels))


def moves_at(labels):
    """Parts (position, label, next label)."""
    return [(t, i, j) for t, (i, j) in enumerate(itertools.pairwise(labels))]


def tempered(weighted, temperature):
    return [(y, s / temperature) for y, s in weighted]


def log_partition(weighted):
    if not weighted:
        return -math.inf
    top = max(s for _, s in weighted)
    return top + math.log(math.fsum(math.exp(s - top) for _, s in weighted))


def log_probabilities(weighted):
    total = log_partition(weighted)
    return {y: s - total for y, s in weighted}


def expectation(weighted, function):
    """E[function(y)]; what has probability zero counts for nothing, even where the function is infinite."""
    terms = [(math.exp(value), function(y)) for y, value in log_probabilities(weighted).items()]
    return sum(p * f for p, f in terms if p > 0)


def entropy(weighted):
    logs = log_probabilities(weighted)
    return -expectation(weighted, logs.__getitem__)


def cross_entropy(weighted, other):
    logs = log_probabilities(other)
    return -expectation(weighted, lambda y: logs.get(y, -math.inf))


def kl_divergence(weighted, other):
    mine, theirs = log_probabilities(weighted), log_probabilities(other)
    return expectation(weighted, lambda y: mine[y] - theirs.get(y, -math.inf))


def top_k(weighted, k):
    """The k best, best first."""
    return sorted(weighted, key=lambda pair: -pair[1])[:k]


def modes(weighted, slack=0.0):
    """All structures within ``slack`` of the best score."""
    best = max(s for _, s in weighted)
    return [y for y, s in weighted if s >= best - slack]


def first_mode(weighted):
    """Of the best labellings the one whose last label is lowest, then the one before it, and so on."""
    return min(modes(weighted), key=lambda labels: labels[::-1])


def marginals(weighted, parts):
    """The probability of each part that some structure contains."""
    result = Counter()
    for y, value in log_probabilities(weighted).items():
        for part in parts(y):
            result[part] += math.exp(value)
    return dict(result)


def covariance(weighted, parts):
    """Cov(1[a in y], 1[b in y]) for each ordered pair of parts."""
    single, both = marginals(weighted, parts), marginals(weighted, lambda y: itertools.product(parts(y), repeat=2))
    return {(a, b): both.get((a, b), 0.0) - single[a] * single[b] for a in single for b in single}


def hamming_risk(weighted, labels):
    """How many positions of ``labels`` are wrong on average."""
    return expectation(weighted, lambda y: sum(a != b for a, b in zip(labels, y, strict=True)))


def least_risk(weighted, size):
    """The least :func:`hamming_risk` of all labellings, those of no weight included."""
    length = len(weighted[0][0])
    return min(hamming_risk(weighted, labels) for labels in itertools.product(range(size), repeat=length))


def total_variation(counts, probabilities):
    """Half the sum of |frequency - probability| over the outcomes; 1 for an outcome that cannot be."""
    total = sum(counts.values())
    if any(outcome not in probabilities for outcome in counts):
        return 1.0
    return sum(abs(counts.get(y, 0) / total - p) for y, p in probabilities.items()) / 2


def variation_bound(draws, outcomes, risk=1e-9):
    """What :func:`total_variation` of honest independent draws exceeds with probability at most ``risk``.

    Its mean is at most sqrt(outcomes / draws) / 2 (Jensen, Cauchy-Schwarz), and one draw moves it by at most 1 / draws
    (McDiarmid 1989).
    """
    return math.sqrt(outcomes / draws) / 2 + math.sqrt(-math.log(risk) / (2 * draws))


def frequency_bound(draws, events, risk=1e-9):
    """What the worst |frequency - probability| of some events exceeds at most with ``risk`` (Hoeffding 1963)."""
    return math.sqrt(math.log(2 * events / risk) / (2 * draws))


def count(item):
    """The exact sum over all labellings of the product of integer weights exp(score), by powers of matrices.

    The second algorithm: it knows nothing of enumeration. Scores are given as the weights themselves.
    """
    row = [Fraction(s) * Fraction(e) for s, e in zip(item.start, item.emissions[0], strict=True)]
    for move, emissions in zip(item.moves, item.emissions[1:], strict=True):
        row = [
            sum(row[i] * Fraction(move[i][j]) for i in range(len(row))) * Fraction(emissions[j])
            for j in range(len(row))
        ]
    return sum(r * Fraction(e) for r, e in zip(row, item.end, strict=True))


def markov_divergence(p: tuple[list[list[float]], list[list[float]]], q: tuple[list[list[float]], list[list[float]]]):
    """KL(p || q) of two chains (emissions, transitions) as a sum of terms >= 0, each small where p and q are close.

    Each chain as first label and conditional moves; the divergence is the mean of p log(p / q) - p + q over those,
    written by expm1, so that nothing cancels.
    """

    def softmax_log(scores: list[float]) -> list[float]:
        top = max(scores)
        total = top + math.log(math.fsum(math.exp(x - top) for x in scores))
        return [x - total for x in scores]

    def conditionals(emissions: list[list[float]], moves: list[list[float]]):
        labels, after, found = range(len(emissions[0])), [0.0] * len(emissions[0]), []
        for column in reversed(emissions[1:]):
            rows = [[moves[i][j] + column[j] + after[j] for j in labels] for i in labels]
            found.append([softmax_log(row) for row in rows])
            after = [max(row) + math.log(math.fsum(math.exp(x - max(row)) for x in row)) for row in rows]
            after = [x - max(after) for x in after]
        return softmax_log([x + y for x, y in zip(emissions[0], after, strict=True)]), found[::-1]

    def term(log_p: list[float], log_q: list[float]) -> float:
        return math.fsum(math.exp(a) * (math.expm1(b - a) + a - b) for a, b in zip(log_p, log_q, strict=True))

    (first_p, moves_p), (first_q, moves_q) = conditionals(*p), conditionals(*q)
    total, here = [term(first_p, first_q)], [math.exp(x) for x in first_p]
    for rows_p, rows_q in zip(moves_p, moves_q, strict=True):
        total += [weight * term(a, b) for weight, a, b in zip(here, rows_p, rows_q, strict=True)]
        here = [math.fsum(here[i] * math.exp(rows_p[i][j]) for i in range(len(here))) for j in range(len(here))]
    return math.fsum(total)
