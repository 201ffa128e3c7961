"""Sequences as people have them: padded batches, lists, or all in one array; and answers in the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thalweg.energies.rows import as_table
from thalweg.errors import ShapeError


@dataclass(frozen=True)
class Sequences:
    """A padded batch and how it was given.

    Attributes:
        values: ``(B, T)`` or ``(B, T, D)``.
        lengths: ``(B,)`` int64 on the host, or None where all are T long.
        observed: ``(B, T)`` or ``(B, T, D)`` bool, or None where nothing is missing.
        form: ``padded``, ``joined`` (one after the other in one array) or ``list``.
        array: whether answers are arrays of numpy.

    >>> read_sequences([[0, 1], [2]], 0).values
    tensor([[0, 1],
            [2, 0]])
    """

    values: Tensor
    lengths: Tensor | None
    observed: Tensor | None
    form: Literal["padded", "joined", "list"]
    array: bool

    def like(self, answer: Tensor) -> Any:
        """An answer ``(B, T, ...)`` in the form of the question; ``(B,)`` as it is."""
        answer = answer.detach().to(self.values.device)
        if self.form != "padded" and answer.dim() > 1:
            B, T = answer.shape[:2]
            counts = [T] * B if self.lengths is None else self.lengths.tolist()
            if self.form == "list":
                return [self._plain(row[:count]) for row, count in zip(answer, counts, strict=True)]
            inside = None if self.lengths is None else torch.arange(T) < self.lengths.unsqueeze(1)
            answer = answer.flatten(0, 1) if inside is None else answer[inside.to(answer.device)]
        return self._plain(answer)

    def _plain(self, answer: Tensor) -> Any:
        return answer.cpu().numpy() if self.array else answer


class Known:
    """The observations that are there, without padding and missing ones, and the way back into the batch.

    Attributes:
        values: ``(M,)`` or ``(M, D)``; present: ``(M, D)`` bool, or None where vectors are whole.
        shape: (B, T).
        where: ``(M,)``, places in the flattened batch; None where all of it is known.

    >>> known = known_of(torch.tensor([[7, 8]]), None, torch.tensor([[False, True]]))
    >>> known.values, known.place(torch.ones(1, 3))
    (tensor([8]), tensor([[[0., 0., 0.],
             [1., 1., 1.]]]))
    """

    def __init__(self, values: Tensor, shape: tuple[int, int], where: Tensor | None, present: Tensor | None):
        self.values, self.shape, self.where, self.present = values, shape, where, present

    def place(self, scores: Tensor) -> Tensor:
        """Scores (M, C) at their places of (B, T, C), 0 elsewhere; differentiable."""
        B, T = self.shape
        if self.where is None:
            return scores.view(B, T, -1)
        return scores.new_zeros(B * T, scores.size(1)).index_copy(0, self.where, scores).view(B, T, -1)

    def at(self, which: int) -> tuple[int, int]:
        """The batch item and the position of one of the M."""
        place = which if self.where is None else int(self.where[which])
        return divmod(place, self.shape[1])


def known_of(values: Tensor, lengths: Tensor | Sequence[int] | None, observed: Tensor | None) -> Known:
    """What is known of a padded batch; ``observed`` (B, T), or (B, T, D) for vectors known in part.

    >>> known_of(torch.tensor([[7, 8], [9, 0]]), [2, 1], None).values
    tensor([7, 8, 9])
    """
    shape = (values.shape[0], values.shape[1])
    known = present = None
    if observed is not None:
        if observed.dtype != torch.bool or (observed.shape != shape and observed.shape != values.shape):
            vectors = f" or (B, T, D) = {tuple(values.shape)}" if values.dim() > 2 else ""
            raise ShapeError(
                f"`observed` must be bool (B, T) = {shape}{vectors}, got {tuple(observed.shape)} {observed.dtype}"
            )
        known = observed.to(values.device)
        if known.dim() > 2:
            present, known = known, known.flatten(2).any(2)
    if lengths is not None:
        counts = torch.as_tensor(lengths, device=values.device)
        if counts.shape != shape[:1]:
            raise ShapeError(f"`lengths` must be (B,) with B = {shape[0]}, got {tuple(counts.shape)}")
        inside = torch.arange(shape[1], device=values.device) < counts.unsqueeze(1)
        known = inside if known is None else known & inside
    flat = values.flatten(0, 1)
    if known is None:
        return Known(flat, shape, None, None)
    # Only what is known is looked at: what is missing may lie outside the support, or be NaN.
    where = known.flatten().nonzero().squeeze(1)
    return Known(flat[where], shape, where, None if present is None else present.flatten(0, 1)[where])


def read_sequences(X: Any, event_dim: int, lengths: Any = None, observed: Any = None) -> Sequences:
    """Observations in any form as a padded batch; one line says what is wrong with them.

    Args:
        X: a tensor or an array ``(B, T, ...)`` with ``event_dim`` axes for one observation, a list of sequences, or all
            of them one after the other, ``(n, ...)``: one sequence, or several with ``lengths`` that sum to n. A column
            ``(n, 1)`` of single numbers is read as ``(n,)``.
        event_dim: 0 for symbols and numbers, 1 for vectors.
        lengths: ``(B,)``.
        observed: bool, in the form of X without its last axes; for vectors also with them.

    >>> read_sequences(np.zeros((5, 2)), 1, lengths=[3, 2]).values.shape
    torch.Size([2, 3, 2])
    """
    if isinstance(X, list | tuple) and len(X) and not np.isscalar(X[0]) and _is_list(X, event_dim):
        if lengths is not None:
            raise ShapeError("`lengths` must be None with a list of sequences, which have their own")
        rows = [_tensor(row, f"sequence {b}") for b, row in enumerate(X)]
        _check_alike(rows, event_dim)
        counts = [len(row) for row in rows]
        marks = None if observed is None else [_mask(row) for row in observed]
        if marks is not None and [len(row) for row in marks] != counts:
            raise ShapeError("`observed` must be a list of masks as long as their sequences")
        return _padded(rows, counts, marks, "list", not isinstance(X[0], Tensor))
    values, array = _tensor(X, "X"), not isinstance(X, Tensor)
    if event_dim == 0 and values.dim() == 2 and values.size(1) == 1:
        values = values.squeeze(1)  # hmmlearn's column of symbols
        observed = observed if observed is None else _mask(observed).view(-1)
    _check_dimensions(values, event_dim)
    mask = None if observed is None else _mask(observed)
    if values.dim() == 2 + event_dim:
        counts = None if lengths is None else _counts(lengths)
        return Sequences(values, counts, mask, "padded", array)
    n = len(values)
    counts = [n] if lengths is None else _counts(lengths).tolist()
    if sum(counts) != n or min(counts, default=0) < 1:
        wrong = next((f"{count} at place {b}" for b, count in enumerate(counts) if count < 1), f"{sum(counts)}")
        raise ShapeError(f"`lengths` must be at least 1 each and sum to the {n} observations of X, got {wrong}")
    if mask is not None and len(mask) != n:
        raise ShapeError(f"`observed` must be bool with {n} rows as X, got {tuple(mask.shape)}")
    if len(set(counts)) == 1:
        shape = (len(counts), counts[0])
        mask = None if mask is None else mask.unflatten(0, shape)
        return Sequences(values.unflatten(0, shape), None, mask, "joined", array)
    marks = None if mask is None else list(mask.split(counts))
    return _padded(list(values.split(counts)), counts, marks, "joined", array)


def _padded(
    rows: list[Tensor], counts: list[int], marks: list[Tensor] | None, form: Literal["joined", "list"], array: bool
) -> Sequences:
    lengths = torch.tensor(counts)
    observed = None if marks is None else pad_sequence(marks, batch_first=True)
    return Sequences(pad_sequence(rows, batch_first=True), lengths, observed, form, array)


def _is_list(X: Sequence[Any], event_dim: int) -> bool:
    """Whether this is a list of sequences, and not one table written as lists."""
    first = X[0]
    dims = first.dim() if isinstance(first, Tensor) else np.ndim(first) if isinstance(first, np.ndarray) else None
    if dims is None:
        dims = _depth(first)
    return dims == 1 + event_dim


def _depth(values: Any) -> int:
    depth = 0
    while isinstance(values, list | tuple):
        depth, values = depth + 1, (values[0] if len(values) else None)
    return depth + (np.ndim(values) if isinstance(values, np.ndarray | Tensor) else 0)


def _check_alike(rows: list[Tensor], event_dim: int) -> None:
    for b, row in enumerate(rows):
        if row.dim() != 1 + event_dim:
            shape = "(T, D)" if event_dim else "(T,)"
            raise ShapeError(f"sequence {b} must be {shape}, got {tuple(row.shape)}")
        if 0 in row.shape:
            raise ShapeError(f"sequence {b} is empty, {tuple(row.shape)}; leave it out")
        if row.shape[1:] != rows[0].shape[1:]:
            raise ShapeError(
                f"sequences must have observations of one size, got {tuple(rows[0].shape[1:])} in sequence 0 and "
                f"{tuple(row.shape[1:])} in sequence {b}"
            )


def _check_dimensions(values: Tensor, event_dim: int) -> None:
    shape = tuple(values.shape)
    if values.dim() not in (1 + event_dim, 2 + event_dim):
        forms = "(n, D) or (B, T, D)" if event_dim else "(n,), (n, 1) or (B, T)"
        remedy = ". Reshape your data: X.reshape(-1, 1) is one feature" if event_dim and values.dim() == 1 else ""
        raise ShapeError(f"X must be {forms}, got {shape}{remedy}")
    if 0 in shape:
        if event_dim and not shape[-1]:
            raise ShapeError(f"X is empty: 0 feature(s) (shape={shape}) while a minimum of 1 is required.")
        raise ShapeError(f"X is empty: 0 sample(s) (shape={shape}) while a minimum of 1 is required.")


def _tensor(values: Any, name: str) -> Tensor:
    """Numbers as a tensor that shares memory where it can; types stay as they are."""
    array = as_table(values, name)
    if isinstance(array, Tensor):
        return array.detach()
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and array.dtype.itemsize not in (4, 8):
        native = np.dtype(np.float32 if array.dtype.itemsize < 4 else np.float64)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        native = np.dtype(np.int64)
    return torch.from_numpy(np.require(array, native, ["C", "W"]))


def _mask(values: Any) -> Tensor:
    try:
        mask = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"`observed` must be bool, got {type(values).__name__}") from error
    if mask.dtype != torch.bool:
        raise ShapeError(f"`observed` must be bool, got {mask.dtype}")
    return mask


def _counts(lengths: Any) -> Tensor:
    try:
        counts = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"`lengths` must be integers (B,), got {type(lengths).__name__}") from error
    if counts.dim() != 1 or counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise ShapeError(f"`lengths` must be integers (B,), got {tuple(counts.shape)} {counts.dtype}")
    return counts.long().cpu()
