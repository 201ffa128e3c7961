"""Tables of numbers: CSV or TSV files and NumPy's ``.npy``, rows alone or rows in sequences."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thalweg.errors import DataError, nearest

_DELIMITERS = ",\t;"
_LONGEST = 2**24  # characters of a line
_MISSING = frozenset({"", "na", "nan", "null", "?"})


@dataclass(frozen=True)
class Table:
    """Rows of D numbers, NaN where one is missing.

    Attributes:
        path: where they are from.
        values: ``(N, D)``; float64, or what a ``.npy`` holds, which stays on the disk.
        names: of the D columns.
        lengths: of the sequences that the rows make up, in order; empty where each row stands alone.
        labels: of the sequences, as many; empty where they have none.

    >>> table = read_table("x.csv", text="who,height\\na,1.5\\na,1.6\\nb,\\n", sequence="who")
    >>> table.values.tolist(), table.names, table.lengths, table.labels
    ([[1.5], [1.6], [nan]], ('height',), (2, 1), ('a', 'b'))
    """

    path: str
    values: NDArray[np.floating]
    names: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Sequences, or rows where each stands alone."""
        return len(self.lengths) or len(self.values)

    @property
    def missing(self) -> int:
        """How many numbers are missing; reads all of them.

        >>> read_table("x.csv", text="1,\\n,\\n").missing
        3
        """
        blocks = (self.values[start : start + 65536] for start in range(0, len(self.values), 65536))
        return sum(int(np.isnan(block).sum()) for block in blocks)

    def take(self, chosen: Iterable[int]) -> Table:
        """The rows, or the sequences, of these numbers, in that order.

        >>> read_table("x.csv", text="1,2\\n3,4\\n5,6\\n").take([2, 0]).values.tolist()
        [[5.0, 6.0], [1.0, 2.0]]
        """
        chosen = list(chosen)
        if not self.lengths:
            return Table(self.path, np.asarray(self.values[chosen]), self.names)
        ends = np.cumsum(self.lengths)
        rows = [np.arange(ends[each] - self.lengths[each], ends[each]) for each in chosen]
        values = self.values[np.concatenate(rows)] if rows else self.values[:0]
        labels = tuple(self.labels[each] for each in chosen) if self.labels else ()
        return Table(self.path, np.asarray(values), self.names, tuple(self.lengths[each] for each in chosen), labels)


def read_table(path: str | Path, *, sequence: str = "", text: str | None = None) -> Table:
    """Read a table; what is wrong is told with its line.

    A first line with anything but numbers names the columns. Empty cells, ``NA``, ``NaN``, ``null`` and ``?`` are none.
    A ``.npy`` holds ``(N, D)``, or ``(B, T, D)`` for B sequences; it is memory-mapped, and nothing in it is executed.

    Args:
        path: a ``.npy`` file, or text with commas, tabs or semicolons between cells.
        sequence: the column that tells sequences apart: rows one after the other with the same value are one.
        text: what is read instead of the file.

    >>> read_table("x.csv", text="1,2\\n3,oops\\n")
    Traceback (most recent call last):
    ...
    thalweg.errors.DataError: x.csv:2: expected a number in column 2, got `oops`; mend the cell, or leave it empty
    """
    if text is None and Path(path).suffix == ".npy":
        return _read_array(Path(path), sequence)
    rows = list(_cells(str(path), _text(Path(path)) if text is None else text))
    if not rows:
        raise DataError(f"{path}: expected rows of numbers, got an empty file; give a CSV file or a .npy")
    named = [_number(cell) is None for cell in rows[0][1]]
    names = [cell.strip() for cell in rows[0][1]] if any(named) else [f"x{n}" for n in range(1, len(named) + 1)]
    if sequence and sequence not in names:
        raise DataError(f"{path}:1: expected a column `{sequence}`, got none; {nearest(sequence, names)}")
    rows = rows[1:] if any(named) else rows
    if not rows:
        raise DataError(f"{path}: expected rows of numbers, got a heading alone; add rows")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}:1: expected columns of different names, got `{twice}` twice; rename one")
    key = names.index(sequence) if sequence else -1
    values = np.array([_numbers(str(path), line, cells, len(names), key) for line, cells in rows], dtype=np.float64)
    groups = (
        [(label, len(list(group))) for label, group in groupby(cells[key] for _, cells in rows)] if sequence else []
    )
    kept = tuple(name for name in names if name != sequence)
    if not kept:
        raise DataError(f"{path}: expected a column of numbers beside `{sequence}`, got none; add one")
    return Table(
        str(path), values, kept, tuple(count for _, count in groups), tuple(label.strip() for label, _ in groups)
    )


def _read_array(path: Path, sequence: str) -> Table:
    if sequence:
        raise DataError(f"{path}: a .npy has no columns by name; leave `sequence` out and give it as (B, T, D)")
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: expected a table, got no such file; give a CSV file or a .npy") from None
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: expected an array of numbers, got a file that is none ({reason})") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu" or values.ndim not in (1, 2, 3):
        kind = f"{values.shape} {values.dtype}" if isinstance(values, np.ndarray) else "an archive of several"
        raise DataError(f"{path}: expected real numbers (N, D) or (B, T, D), got {kind}; save such an array")
    if 0 in values.shape:
        raise DataError(f"{path}: expected at least one row and one column, got {values.shape}; add some")
    lengths = (values.shape[1],) * values.shape[0] if values.ndim == 3 else ()
    rows = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    return Table(str(path), rows, tuple(f"x{n}" for n in range(1, rows.shape[1] + 1)), lengths)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = iter(lambda: file.readline(_LONGEST), "")
            return "".join(_line(path, number, line) for number, line in enumerate(lines, 1))
    except FileNotFoundError:
        raise DataError(f"{path}: expected a table, got no such file; give a CSV file or a .npy") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected UTF-8 text, got something else; give a CSV file or a .npy") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a CSV file or a .npy") from None


def _line(path: Path, number: int, line: str) -> str:
    if len(line) < _LONGEST:
        return line
    raise DataError(f"{path}:{number}: expected less than {_LONGEST:,} characters a line, got more; mend the line")


def _cells(path: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not empty, with the line where each ends."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    reader = csv.reader(text.splitlines(), delimiter=max(_DELIMITERS, key=first.count))
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: expected cells, got something else ({error})") from None


def _number(cell: str) -> float | None:
    """The cell's number, NaN where it is missing, None where it is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan if cell.strip().lower() in _MISSING else None


def _numbers(path: str, line: int, cells: list[str], columns: int, key: int) -> list[float]:
    if len(cells) != columns:
        raise DataError(
            f"{path}:{line}: expected {columns} cells as in the first line, got {len(cells)}; mend the line"
        )
    values = [_number(cell) for place, cell in enumerate(cells) if place != key]
    for place, value in enumerate(values):
        if value is None or math.isinf(value):
            place += 0 <= key <= place
            raise DataError(
                f"{path}:{line}: expected a number in column {place + 1}, got `{cells[place][:40]}`; "
                "mend the cell, or leave it empty"
            )
    return [value for value in values if value is not None]
