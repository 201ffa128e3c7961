"""Rows of probabilities: checked, in logarithms, normalised, and re-estimated from counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.potentials import SparseTransitions

_TOLERANCE = 1e-5  # by which a row of probabilities may miss one


def floats(name: str, values: Any) -> Tensor:
    """Numbers as a floating tensor, or a ShapeError.

    >>> floats("initial", [1, 0])
    tensor([1., 0.])
    """
    try:
        values = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"`{name}` must be a tensor, an array or lists of numbers, got {_kind(values)}") from error
    if values.is_complex() or values.dtype == torch.bool:
        raise ShapeError(f"`{name}` must be real numbers, got {values.dtype}")
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _kind(values: Any) -> str:
    dtype = getattr(values, "dtype", None)
    return type(values).__name__ if dtype is None else f"an array of {dtype}"


def log_of(probabilities: Tensor) -> Tensor:
    """The logarithm, with gradient 0 where it is -inf.

    >>> log_of(torch.tensor([1.0, 0.0]))
    tensor([0., -inf])
    """
    positive = probabilities > 0
    return torch.where(positive, torch.where(positive, probabilities, 1).log(), float("-inf"))


def row_logarithms(name: str, values: Tensor, logarithms: bool) -> Tensor:
    """The logarithms of rows that are distributions, or a ShapeError that names the first row that is none.

    >>> row_logarithms("initial", torch.tensor([0.5, 0.5]), False).exp()
    tensor([0.5000, 0.5000])
    """
    given = torch.atleast_2d(values.detach())
    sums = (given.exp() if logarithms else given).sum(-1)
    negative = (given < 0).any(-1) & (not logarithms)
    check_rows(name, sums, negative, logarithms)
    return values if logarithms else log_of(values)


def sparse_logarithms(moves: SparseTransitions, logarithms: bool) -> SparseTransitions:
    """The same for transitions along edges, where a row is the edges of one source.

    >>> moves = SparseTransitions.of_edges([0, 0, 1], [0, 1, 1], torch.tensor([0.5, 0.5, 1.0]), size=2)
    >>> sparse_logarithms(moves, False).scores.exp()
    tensor([0.5000, 0.5000, 1.0000])
    """
    given = moves.scores.detach()
    sums = given.new_zeros(moves.size).index_add(0, moves.sources, given.exp() if logarithms else given)
    negative = torch.zeros_like(sums, dtype=torch.bool)
    if not logarithms:
        negative[moves.sources[given < 0]] = True
    check_rows("transition", sums, negative, logarithms)
    return moves if logarithms else moves._replace(scores=log_of(moves.scores))


def check_rows(name: str, sums: Tensor, negative: Tensor, logarithms: bool) -> None:
    """Raise a ShapeError for the first row that does not sum to one or has a negative entry.

    >>> check_rows("transition", torch.tensor([1.0, 0.5]), torch.tensor([False, False]), False)
    Traceback (most recent call last):
    ...
    thalweg.errors.ShapeError: row 1 of `transition` must be probabilities that sum to one, got the sum 0.5; ...
    """
    wrong = ~((sums - 1).abs() <= _TOLERANCE) | negative  # true for NaN too
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    got = "a negative entry" if bool(negative[row]) else f"the sum {float(sums[row]):.6g}"
    where = f"row {row} of `{name}`" if name != "initial" else "`initial`"
    remedy = "normalise with log_softmax(-1)" if logarithms else "divide by its sum"
    if not logarithms and bool(negative[row]):
        remedy = "pass logarithms=True if these are log-probabilities"
    raise ShapeError(f"{where} must be probabilities that sum to one, got {got}; {remedy}")


def from_counts(counts: Tensor, log_rows: Tensor, pseudo_count: float, rows: Tensor | None = None) -> Tensor:
    r"""The logarithms of the most probable rows given expected counts.

    .. math:: p(j) \propto n_j + a \quad\text{where } p(j) > 0 \text{ was allowed, else } 0

    with a the pseudo-count, the mode under a Dirichlet prior of 1 + a. A row without any count stays as it was.

    Args:
        counts: ``(..., N)`` in float64, 0 or more; log_rows: the present rows, in the same shape.
        pseudo_count: a, 0 or more.
        rows: ``(N,)``, the row of each entry where entries of several rows stand in one line (edges by source).

    >>> from_counts(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 0.0]).log(), 0.0).exp()
    tensor([0.7500, 0.2500, 0.0000])
    """
    allowed = ~torch.isneginf(log_rows)
    counts = torch.where(allowed, counts.clamp(min=0) + pseudo_count, 0.0)
    totals = counts.sum(-1, keepdim=True)
    if rows is not None:  # of which there are no more than entries
        totals = torch.zeros_like(counts).index_add(0, rows, counts)[rows]
    return torch.where(totals > 0, counts.log() - totals.log(), log_rows.to(counts.dtype))
