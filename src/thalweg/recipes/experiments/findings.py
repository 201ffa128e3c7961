"""What an experiment finds: tables, pictures, and the figures behind them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thalweg.errors import ConfigError

Say = Callable[[str], None]
"""Takes one line about the progress of an experiment."""


@dataclass(frozen=True)
class Table:
    """Rows with the same keys, which become the heading; ``note`` says how they were measured.

    >>> Table("Rates", [{"noise": "0.5", "rate": "0.93"}]).note
    ''
    """

    title: str
    rows: list[dict[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG; ``name`` is part of its file name, ``caption`` says what is to be seen.

    >>> Picture("paths", "Descent paths.", b"").name
    'paths'
    """

    name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Findings:
    """What one experiment gives; the first table is the one that the terminal shows.

    ``figures`` hold all numbers, of every seed, as plain lists and dictionaries.

    >>> Findings([Table("Rates", [])], []).figures
    {}
    """

    tables: list[Table]
    pictures: list[Picture]
    figures: dict[str, Any] = field(default_factory=dict)


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and after several runs the sample standard deviation.

    >>> mean_and_spread([0.5, 0.7]), mean_and_spread([0.5])
    ('0.600 ± 0.141', '0.500')
    """
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def check_positive(settings: object, *names: str) -> None:
    """Settings that must be more than 0, or a list of such numbers that is not empty.

    >>> check_positive(Table("", []), "note")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: `note` must be more than 0, got ''
    """
    for name in names:
        given: Any = getattr(settings, name)
        each = given if isinstance(given, tuple) else (given,)
        if not each or not all(isinstance(one, int | float) and one > 0 for one in each):
            raise ConfigError(f"`{name}` must be more than 0, got {given!r}")
