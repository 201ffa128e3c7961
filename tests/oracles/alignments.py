"""Alignments, CTC and their likelihoods by enumeration of every path; the standard library alone, float64.

A path is a tuple of (i, j, m): move m = (a, b) led from (i - a, j - b) to (i, j). The weighted lists are those of
`oracles.chains`, whose functions hold for any structure.
"""

from __future__ import annotations

import itertools
import math

EDITS = ((1, 1), (1, 0), (0, 1))


def in_band(i, j, rows, columns, band):
    return band is None or abs(j * rows - i * columns) <= band * max(rows, columns)


def walks(cell, goal, moves, allowed):
    """All ways from a cell to the goal, backwards from the goal."""
    if cell == goal:
        return [()]
    found = []
    for m, (a, b) in enumerate(moves):
        before = (goal[0] - a, goal[1] - b)
        if before[0] >= cell[0] and before[1] >= cell[1] and allowed(before):
            found += [(*walk, (*goal, m)) for walk in walks(cell, before, moves, allowed)]
    return found


def paths(rows, columns, moves=EDITS, *, local=False, band=None):
    """Every alignment of sequences of these lengths; a local one has a move and begins and ends anywhere."""

    def allowed(cell):
        return in_band(*cell, rows, columns, band)

    if not local:
        return walks((0, 0), (rows, columns), moves, allowed)
    cells = [cell for cell in itertools.product(range(rows + 1), range(columns + 1)) if allowed(cell)]
    every = [walk for first in cells for last in cells for walk in walks(first, last, moves, allowed)]
    return [walk for walk in every if walk]


def weighted(scores, rows, columns, moves=EDITS, **settings):
    """Every alignment of positive weight with its score; ``scores[i][j][m]``."""
    found = [(y, math.fsum(scores[i][j][m] for i, j, m in y)) for y in paths(rows, columns, moves, **settings)]
    return [(y, s) for y, s in found if s > -math.inf]


def joined(labels, blank=0):
    """What labels of frames become: runs of equal ones are one, then blanks go."""
    return tuple(label for label, _ in itertools.groupby(labels) if label != blank)


def frames_of(frames, target, blank=0):
    """Every sequence of one label a frame that becomes the target, with its score; ``frames[t][c]``."""
    found = []
    for labels in itertools.product(range(len(frames[0]) if frames else 0), repeat=len(frames)):
        if joined(labels, blank) == tuple(target):
            score = math.fsum(row[label] for row, label in zip(frames, labels, strict=True))
            if score > -math.inf:
                found.append((labels, score))
    return found


def labellings(frames, blank=0):
    """The probability of every labelling of the frames."""
    totals = {}
    for labels in itertools.product(range(len(frames[0])), repeat=len(frames)):
        weight = math.exp(math.fsum(row[label] for row, label in zip(frames, labels, strict=True)))
        totals[joined(labels, blank)] = totals.get(joined(labels, blank), 0.0) + weight
    return totals
