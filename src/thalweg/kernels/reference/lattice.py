r"""Paths through a grid of cells, in any algebra: the recursion that edits, CTC and many-to-many alignments share.

A path goes from cell (0, 0) to an end, and every move (a, b) leads from (i - a, j - b) to (i, j) at a score of its own:

.. math:: \alpha(i, j) = \bigoplus_{m = (a, b)} \alpha(i - a, j - b) \otimes s(i, j, m)

Cells are visited in *sweeps* of cells that do not depend on each other: rows where every move leads to a later row,
anti-diagonals i + j otherwise. A *lane* is the column of a cell within its sweep.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.semirings import Semiring

__all__ = ["Lattice", "fold", "inside"]


class Lattice(NamedTuple):
    """B grids and the scores of the moves in them.

    >>> Lattice(torch.zeros(2, 4, 3, 1), ((1, 1),), torch.tensor([3, 2]), torch.tensor([2, 2])).sweeps
    4
    """

    scores: Tensor  # (B, I + 1, J + 1, M) of the moves into each cell; with labels (B, I, C), of what a row emits
    moves: tuple[tuple[int, int], ...]  # M pairs (rows, columns), neither negative nor both 0
    rows: Tensor  # (B,) int64: I of each item
    columns: Tensor  # (B,) int64: J of each item
    labels: Tensor | None = (
        None  # (B, J + 1) int64: what a column emits; two columns are left out of unlike labels only
    )
    ends: int = 1  # a path ends in the last row and one of so many last columns; 0: it begins and ends anywhere
    band: int | None = None  # how far a path may stray from the straight line between the corners

    @property
    def skew(self) -> int:
        """1 where sweeps are anti-diagonals, 0 where they are rows."""
        return int(any(a == 0 for a, _ in self.moves))

    @property
    def height(self) -> int:
        """I + 1."""
        return self.scores.shape[-2] + 1 if self.labels is not None else self.scores.shape[-3]

    @property
    def width(self) -> int:
        """J + 1."""
        return self.labels.shape[-1] if self.labels is not None else self.scores.shape[-2]

    @property
    def sweeps(self) -> int:
        """How many there are."""
        return self.height + self.skew * (self.width - 1)


def inside(lattice: Lattice) -> Tensor:
    """Which moves lie within their item, and within the band where there is one: (B, I + 1, J + 1, M) bool.

    >>> inside(Lattice(torch.zeros(1, 2, 2, 1), ((1, 0),), torch.tensor([1]), torch.tensor([0])))[0, :, :, 0]
    tensor([[False, False],
            [ True, False]])
    """
    device = lattice.rows.device
    rows, columns = (x.view(-1, 1, 1, 1) for x in (lattice.rows, lattice.columns))
    i = torch.arange(lattice.height, device=device).view(-1, 1, 1)
    j = torch.arange(lattice.width, device=device).view(-1, 1)
    a, b = torch.tensor(lattice.moves, device=device).unbind(-1)  # (M,)
    kept = (i <= rows) & (j <= columns) & (i >= a) & (j >= b)
    if lattice.band is None:
        return kept
    limit = lattice.band * torch.maximum(rows, columns)
    ahead = j * rows - i * columns  # of both ends of a move: this, and this less what the move adds to it
    return kept & (ahead.abs() <= limit) & ((ahead - b * rows + a * columns).abs() <= limit)


def _cells(lattice: Lattice, scores: Tensor, nothing: float) -> Tensor:
    """Scores by sweep and lane, (.., B, D, L, M), ``nothing`` where there is no move."""
    kept = torch.where(inside(lattice), scores, nothing)
    lane = torch.arange(lattice.width, device=scores.device)
    row = torch.arange(lattice.sweeps, device=scores.device).unsqueeze(-1) - lattice.skew * lane
    there = ((row >= 0) & (row < lattice.height)).unsqueeze(-1)
    return torch.where(there, kept[..., row.clamp(0, lattice.height - 1), lane, :], nothing)


def _emitted(lattice: Lattice, scores: Tensor, nothing: float) -> Tensor:
    """What rows emit, by sweep and lane, (.., B, I + 1, L, M); row 0 emits nothing."""
    labels = lattice.labels
    assert labels is not None
    found = scores.gather(-1, labels.unsqueeze(1).expand(*scores.shape[:-1], -1))  # (.., B, I, L)
    found = torch.nn.functional.pad(found, (0, 0, 1, 0))
    unlike = torch.nn.functional.pad(labels[:, 2:] != labels[:, :-2], (min(2, lattice.width), 0))[:, : lattice.width]
    barred = torch.zeros(*unlike.shape, len(lattice.moves), device=scores.device, dtype=scores.dtype)
    for m, (_, b) in enumerate(lattice.moves):
        if b == 2:
            barred[..., m] = torch.where(unlike, 0.0, nothing)
    return found.unsqueeze(-1) + barred.unsqueeze(1)


def fold(lattice: Lattice, semiring: Semiring, *scores: Tensor) -> Tensor:
    """The sum over all paths in an algebra, (.., B), of ``scores`` in place of the lattice's; more of them are values.

    O(I + J) steps of O(J M) each; memory O((I + J) J M).

    >>> from thalweg.kernels.semirings import Log
    >>> grid = Lattice(torch.zeros(1, 3, 3, 3), ((1, 1), (1, 0), (0, 1)), torch.tensor([2]), torch.tensor([2]))
    >>> fold(grid, Log(), grid.scores).exp()
    tensor([13.0000])
    """
    by_sweep = _cells if lattice.labels is None else _emitted
    layers = [by_sweep(lattice, x, 0.0 if n else -math.inf) for n, x in enumerate(scores)]
    lane = torch.arange(lattice.width, device=lattice.rows.device)
    # (.., B, L); where no move is possible the gradient is 0 rather than none.
    blank = torch.zeros_like(layers[0][..., 0, :, 0]) + scores[0][..., :0].sum()
    anywhere = lattice.ends == 0
    found = [semiring.lift(torch.where((lane == 0) & (not anywhere), blank, -math.inf))]
    begun = [_or_begun(semiring, found[0]) if anywhere else found[0]]
    for d in range(1, lattice.sweeps):
        terms = []
        for m, (a, b) in enumerate(lattice.moves):
            back = a + lattice.skew * b
            if back > d or b >= lattice.width:
                continue
            before = begun[d - back]
            if b:
                before = torch.cat((semiring.zero(blank[..., :b]), before[..., : lattice.width - b]), -1)
            terms.append(semiring.act(before, *(layer[..., d, :, m] for layer in layers)))
        found.append(semiring.sum(torch.stack(terms, -1), -1) if terms else semiring.zero(blank))
        begun.append(_or_begun(semiring, found[d]) if anywhere else found[d])
    every = torch.stack(found, -2).flatten(-2)  # (.., B, D L)
    return semiring.sum(every if anywhere else _at_ends(lattice, semiring, every), -1)


def _or_begun(semiring: Semiring, found: Tensor) -> Tensor:
    """Paths that end in each cell, or the one that begins there."""
    one = semiring.one(semiring.weight(found).detach())
    return semiring.sum(torch.stack((found, one), -1), -1)


def _at_ends(lattice: Lattice, semiring: Semiring, every: Tensor) -> Tensor:
    back = torch.arange(lattice.ends, device=every.device)
    column = lattice.columns.unsqueeze(-1) - back  # (B, E)
    place = (lattice.rows.unsqueeze(-1) + lattice.skew * column) * lattice.width + column
    ends = every.gather(-1, place.clamp(min=0).expand(*every.shape[:-1], -1))
    return torch.where(column >= 0, ends, semiring.zero(semiring.weight(ends).detach()))
