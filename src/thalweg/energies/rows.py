"""Rows of numbers as people have them: arrays, memory-mapped files, tensors on any device, frames, lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ShapeError, ThalwegError

# Numbers that are looked at together where all of them are: 4 MB of float64.
_LOOKED_AT = 2**19


class NotNumbersError(ThalwegError, TypeError):
    """What should be numbers is something else."""


class Rows:
    """A table ``(B, D)`` of floating-point numbers that is read in blocks, so that it may be larger than memory.

    Made by :func:`read_rows`.

    Attributes:
        dtype: float32 or float64, as the table; float64 for integers and lists.
        device: where a tensor lies; none for anything else.
        width: D.
        names: the D names of a frame's columns, where they are strings.

    >>> rows = read_rows(np.arange(6).reshape(3, 2))
    >>> len(rows), rows.width, rows.dtype, rows.block(1, 3)
    (3, 2, torch.float64, tensor([[2., 3.],
            [4., 5.]], dtype=torch.float64))
    """

    def __init__(self, table: np.ndarray | Tensor, names: list[str] | None = None):
        self.table, self.names = table, names
        self.width = int(table.shape[1])
        self.device = table.device if isinstance(table, Tensor) else None
        self.dtype = _floating(table)

    def __len__(self) -> int:
        return len(self.table)

    def block(
        self, start: int, stop: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Rows from ``start`` to before ``stop``, by default as they are; never to be written to."""
        some = self._tensor(self.table[start:stop])
        return some.to(device=device or some.device, dtype=dtype or self.dtype)

    def pick(self, places: Tensor) -> Tensor:
        """The rows at ``places``, ``(K, D)``."""
        if isinstance(self.table, Tensor):
            return self._tensor(self.table[places.to(self.table.device)]).to(self.dtype)
        return self._tensor(self.table[places.cpu().numpy()])

    def _tensor(self, some: Any) -> Tensor:
        if not isinstance(some, Tensor):
            # Torch shares no memory that may not be written to, nor with other byte orders or backward strides.
            some = torch.from_numpy(np.require(some, _NUMPY[self.dtype], ["C", "W"]))
        return some.detach()

    def blocks(self, size: int, **how: Any) -> Iterator[tuple[slice, Tensor]]:
        """All rows, ``size`` at a time, with their places; ``how`` as in :meth:`block`."""
        for start in range(0, len(self), size):
            place = slice(start, min(start + size, len(self)))
            yield place, self.block(place.start, place.stop, **how)

    def like(self, answer: Tensor) -> Any:
        """An answer as the table was given: a tensor where it was, otherwise an array."""
        answer = answer.detach()
        return answer.cpu().numpy() if self.device is None else answer.to(self.device)


def read_rows(X: Any, *, missing: bool = False) -> Rows:
    """Check a table of numbers without copying it; one line says what is wrong with it.

    Args:
        X: ``(B, D)``: array, memory-mapped array, tensor, frame, or lists of numbers.
        missing: NaN stands for a missing number and is let through.

    >>> read_rows([1.0, 2.0])
    Traceback (most recent call last):
    ...
    thalweg.errors.ShapeError: X must be (B, D), got (2,). Reshape your data: X.reshape(-1, 1) is one feature
    """
    table = as_table(X)
    shape = tuple(table.shape)
    if len(shape) != 2:
        raise ShapeError(f"X must be (B, D), got {shape}. Reshape your data: X.reshape(-1, 1) is one feature")
    for count, what in zip(shape, ("sample(s)", "feature(s)"), strict=True):
        if not count:
            raise ShapeError(f"X is empty: 0 {what} (shape={shape}) while a minimum of 1 is required.")
    columns = getattr(X, "columns", None)
    names = None if columns is None else list(columns)
    rows = Rows(table, names if names and all(isinstance(name, str) for name in names) else None)
    # What lies in a device's memory is asked once.
    together = len(rows) if isinstance(table, Tensor) else max(1, _LOOKED_AT // rows.width)
    for place, block in rows.blocks(together):
        _check_finite(block, place.start, missing)
    return rows


def read_weights(sample_weight: Any, count: int) -> Tensor | None:
    """The weights ``(B,)`` of B rows: finite, none below zero, not all zero; float64 unless a tensor of floats.

    >>> read_weights([1, 2], 2)
    tensor([1., 2.], dtype=torch.float64)
    """
    if sample_weight is None:
        return None
    weights = as_table(sample_weight, "sample_weight")
    if tuple(weights.shape) != (count,):
        raise ShapeError(f"`sample_weight` must be (B,) with B = {count} as in X, got {tuple(weights.shape)}")
    if not isinstance(weights, Tensor):
        weights = torch.from_numpy(np.require(weights, np.float64, ["C", "W"]))
    weights = weights.detach().double()
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        raise ShapeError("`sample_weight` must be finite and 0 or more everywhere; leave out such rows")
    if not bool(weights.sum().isfinite()):
        raise ShapeError("`sample_weight` must have a finite sum, got weights too large to add up; divide them all")
    if not bool(weights.any()):
        raise ShapeError("`sample_weight` is zero everywhere: at least one weight must be above 0")
    return weights


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def as_table(values: Any, name: str = "X") -> np.ndarray | Tensor:
    """Values as an array or tensor of real numbers; a memory-mapped array as it is.

    >>> as_table([[1, 2]])
    array([[1, 2]])
    """
    if isinstance(values, Tensor):
        if values.layout is not torch.strided:
            raise ShapeError(f"{name} is a sparse tensor, which is not supported; pass {name}.to_dense()")
        if values.is_complex():
            raise ShapeError(f"Complex data not supported: {name} is {values.dtype}")
        return values
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise NotNumbersError(f"{name} is sparse, which is not supported; pass {name}.toarray()")
    try:
        array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
        if array.dtype.kind in "OUS":
            array = array.astype(np.float64)
    except TypeError as error:
        raise NotNumbersError(f"{name} must hold numbers: {error}") from None
    except ValueError as error:
        raise ShapeError(f"{name} must hold numbers, as many in each row: {error}") from None
    if array.dtype.kind == "c":
        raise ShapeError(f"Complex data not supported: {name} is {array.dtype}")
    if array.dtype.kind not in "fiub":
        raise NotNumbersError(f"{name} must hold numbers, got {array.dtype}")
    return array


def _floating(table: np.ndarray | Tensor) -> torch.dtype:
    """The type to calculate in."""
    if isinstance(table, Tensor):
        if not table.is_floating_point():
            return torch.get_default_dtype()
        return torch.float64 if table.dtype is torch.float64 else torch.float32
    return torch.float32 if table.dtype.kind == "f" and table.dtype.itemsize <= 4 else torch.float64


def _check_finite(block: Tensor, start: int, missing: bool) -> None:
    # A sum is finite where all are, but for an overflow; it needs no memory.
    if bool(block.sum().isfinite()):
        return
    wrong = block.isinf() if missing else ~block.isfinite()
    if bool(wrong.any()):
        row, column = (int(each) for each in wrong.nonzero()[0])
        what = "NaN" if bool(block[row, column].isnan()) else "infinity (inf)"
        remedy = "set it to NaN where it is missing" if missing else "leave such rows out"
        if what == "NaN":
            remedy = "with `missing=True` NaN is a missing value, where a model offers that"
        raise ShapeError(f"X contains {what} at row {start + row}, column {column}; {remedy}")
