"""Paired bootstrap and Holm's correction from their definitions; shares nothing with the library."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np


def indices(n, resamples, seed):
    """Rows of drawn items, in the order in which NumPy's generator gives them."""
    return np.random.default_rng(seed).integers(0, n, size=(resamples, n)).tolist()


def paired(score, first, other, rows, level=0.95):
    """(difference, low, high, p) of ``score(items)`` on lists of items, each draw taken from both."""
    observed = score(other) - score(first)
    found = [score([other[i] for i in row]) - score([first[i] for i in row]) for row in rows]
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(found, [tail, 100 - tail])
    extreme = sum(abs(each - observed) >= abs(observed) - 1e-9 for each in found)
    return observed, low, high, (extreme + 1) / (len(found) + 1)


def closed_holm(ps):
    """The closure of Bonferroni tests: the greatest |S| min p(S) over all sets S that hold the test, at most 1."""
    places = range(len(ps))
    sets = [s for size in range(1, len(ps) + 1) for s in combinations(places, size)]
    exact = [Fraction(p) for p in ps]
    return [float(min(1, max(len(s) * min(exact[i] for i in s) for s in sets if place in s))) for place in places]
