"""Distributions over segmentations by enumeration of every one; the standard library alone, float64.

A segmentation is a tuple of segments ``(first, past, label)`` that follow one another without a gap. Weighted lists are
those of :mod:`oracles.chains`, whose functions hold for any structure.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import NamedTuple

from oracles.chains import (  # noqa: F401  # the laws look for them here
    covariance,
    cross_entropy,
    entropy,
    frequency_bound,
    kl_divergence,
    log_partition,
    log_probabilities,
    marginals,
    modes,
    tempered,
    top_k,
    total_variation,
    variation_bound,
)


class Item(NamedTuple):
    """One sequence without its padding."""

    content: list  # L x C
    begins: list  # L x C
    durations: list  # K x C, or L x K x C
    moves: list  # C x C
    start: list  # C
    end: list  # C


def cuts(length, most):
    """All ways to write a length as a sum of numbers from 1 to `most`."""
    if length == 0:
        return [()]
    return [(*rest, last) for last in range(1, min(length, most) + 1) for rest in cuts(length - last, most)]


def score(item, segments):
    """The sum of what the class of the library says, term by term, rounded once."""
    terms = [item.start[segments[0][2]], item.end[segments[-1][2]]]
    for first, past, label in segments:
        table = item.durations[past - 1] if isinstance(item.durations[0][0], list) else item.durations
        terms += [item.content[t][label] for t in range(first, past)]
        terms += [item.begins[first][label], table[past - first - 1][label]]
    terms += [item.moves[a[2]][b[2]] for a, b in itertools.pairwise(segments)]
    return -math.inf if -math.inf in terms else float(sum(map(Fraction, terms)))


def segmentations(item):
    """Every segmentation of positive weight with its score."""
    table = item.durations[0] if isinstance(item.durations[0][0], list) else item.durations
    found = []
    for sizes in cuts(len(item.content), len(table)):
        ends = list(itertools.accumulate(sizes))
        for labels in itertools.product(range(len(item.start)), repeat=len(sizes)):
            y = tuple((past - d, past, c) for past, d, c in zip(ends, sizes, labels, strict=True))
            found.append((y, score(item, y)))
    return [(y, s) for y, s in found if s > -math.inf]


def parts(segments):
    """Where a segmentation marks (position, 0, label) for each position and (position, 1, label) where one begins."""
    inside = [(t, 0, label) for first, past, label in segments for t in range(first, past)]
    return inside + [(first, 1, label) for first, _, label in segments]


def durations(segments):
    """Parts (number of positions less 1, label), one for each segment."""
    return [(past - first - 1, label) for first, past, label in segments]
