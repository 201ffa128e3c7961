"""Figures with percentile bootstrap intervals, from what is counted of each item.

A :class:`Tally` holds the counts and gives every score of a data set in which each item lies so many times. Scores,
their intervals and the differences of two models on the same items all follow from that.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.errors import ConfigError

Floats = NDArray[np.float64]
"""Numbers in double precision."""

# Counts drawn at once by the bootstrap: 8 MiB of float64 whatever the number of items.
_CHUNK = 1 << 20


def full_scale(name: str) -> float:
    """What a perfect or a worst score is, by key or by name: 100 for BLEU and chrF, 1 for rates.

    >>> full_scale("bleu-13a"), full_scale("chrF"), full_scale("CER")
    (100.0, 100.0, 1.0)
    """
    return 100.0 if re.search("bleu|chrf", name, re.IGNORECASE) else 1.0


@dataclass(frozen=True)
class Score:
    """One figure with its interval.

    Attributes:
        name: for display (``"CER"``; use ``dataclasses.replace(score, name="PER")`` for phones).
        value: the figure on all items; rates are fractions (0.2 is 20 %), BLEU and chrF are 0..100.
        low: lower end of the bootstrap interval.
        high: upper end; equal to ``low`` and ``value`` where nothing was resampled.
        n: number of items.
        higher_is_better: the direction.
        signature: sacrebleu's, where it is a figure of theirs: all that others need to get the same.

    Printing leaves out an interval of no width.

    >>> print(Score("CER", 0.20717, 0.199, 0.21512, 1000, higher_is_better=False))
    CER 0.2072 [0.1990, 0.2151]
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    higher_is_better: bool
    signature: str = ""

    @property
    def digits(self) -> int:
        """Decimals that are worth printing."""
        return 2 if full_scale(self.name) > 1 else 4

    def __str__(self) -> str:
        text = f"{self.name} {self.value:.{self.digits}f}"
        if self.low == self.high:
            return text
        return f"{text} [{self.low:.{self.digits}f}, {self.high:.{self.digits}f}]"

    def to_json(self) -> dict[str, Any]:
        """The attributes as a dictionary that ``json`` can write; ``Score(**d)`` reads it back."""
        return {key: value for key, value in asdict(self).items() if key != "signature" or value}


class Measure(NamedTuple):
    """What is to be said of a score beside its figure.

    Attributes:
        name: for display; higher_is_better: the direction; signature: as :class:`Score` has it.
        unit: what is counted. Scores of two models are compared where their names, units and signatures are the same.

    >>> Measure("CER", False, unit="characters").unit
    'characters'
    """

    name: str
    higher_is_better: bool
    signature: str = ""
    unit: str = ""


class Tally(ABC):
    """What was counted of N items, and the scores that follow.

    Attributes:
        measures: what is to be said of each score, by its key; the order is that in which they are shown.

    >>> class Largest(Tally):
    ...     measures = {"largest": Measure("largest", True)}
    ...
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def scores(self, times):
    ...         return {"largest": np.where(times > 0, [1.0, 2.0, 4.0], 0.0).max(1)}
    >>> print(scored(Largest(), resamples=0)["largest"])
    largest 4.0000
    """

    measures: Mapping[str, Measure]

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def scores(self, times: Floats) -> dict[str, Floats]:
        """Every score of R data sets, ``(R,)`` each, from how often every item lies in them, ``(R, N)``."""


class Means(Tally):
    """Scores that are means of a number for each item.

    >>> tally = Means({"nll": [1.0, 3.0]}, {"nll": Measure("NLL", False)})
    >>> print(scored(tally, resamples=0)["nll"])
    NLL 2.0000
    """

    def __init__(self, values: Mapping[str, Sequence[float] | Floats], measures: Mapping[str, Measure]):
        self.values = {key: np.asarray(each, dtype=np.float64) for key, each in values.items()}
        self.measures = measures

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def scores(self, times: Floats) -> dict[str, Floats]:
        """Means of the items, each as often as it lies in the data set."""
        return {key: _mean(times, values) for key, values in self.values.items()}


def _mean(times: Floats, values: Floats) -> Floats:
    # An infinite value counts where it was drawn; 0 times infinity would be no number.
    infinite = ~np.isfinite(values)
    means = times @ np.where(infinite, 0.0, values) / len(values)
    return np.where(times @ infinite > 0, values[infinite].sum(), means) if infinite.any() else means


def scored(tally: Tally, *, resamples: int = 1000, seed: int = 0, level: float = 0.95) -> dict[str, Score]:
    """Every score of a tally with its percentile bootstrap interval (Efron, 1979).

    Args:
        resamples: draws of N items with replacement, shared by all scores; 0 gives no intervals.
        seed: of the draws; level: coverage of the interval between the ``(1 ± level) / 2`` quantiles.

    Time that of ``resamples`` data sets; memory O(N) beside them, since they are drawn in pieces.

    >>> print(scored(Means({"x": [0.0, 1.0]}, {"x": Measure("X", True)}))["x"])
    X 0.5000 [0.0000, 1.0000]
    """
    check_options((), resamples, level)
    n = len(tally)
    values = tally.scores(np.ones((1, n)))
    ends = {key: (float(value[0]), float(value[0])) for key, value in values.items()}
    if resamples:
        drawn = [tally.scores(times) for times in draws(n, resamples, seed)]
        ends = {key: ends_of(np.concatenate([each[key] for each in drawn]), level) for key in values}
    return {
        key: Score(told.name, float(values[key][0]), *ends[key], n, told.higher_is_better, told.signature)
        for key, told in tally.measures.items()
    }


def ends_of(of_draws: Floats, level: float) -> tuple[float, float]:
    """The quantiles between which the middle ``level`` of some draws lie.

    >>> ends_of(np.arange(101.0), 0.5)
    (25.0, 75.0)
    """
    tail = (1 - level) / 2
    of_draws = np.sort(of_draws)
    if np.isfinite(of_draws).all():
        low, high = np.quantile(of_draws, (tail, 1 - tail))
    else:  # between numbers and infinity nothing can be interpolated
        inside = int(tail * (len(of_draws) - 1))
        low, high = of_draws[inside], of_draws[-1 - inside]
    return float(low), float(high)


def draws(n: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each of N items is drawn in each of so many draws with replacement, ``(some, N)`` at a time."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // n)
    for done in range(0, resamples, at_once):
        count = min(at_once, resamples - done)
        rows = generator.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
        yield np.bincount(rows.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


def check_options(ks: Sequence[int], resamples: int, level: float) -> None:
    """Raise unless the ranks, the number of draws and the coverage of scores make sense."""
    for k in ks:
        if k != int(k) or k < 1:
            raise ConfigError(f"`ks` must hold whole numbers of at least 1, got {k}; e.g. ks=(1, 5)")
    if resamples < 0:
        raise ConfigError(f"`resamples` must be 0 or more, got {resamples}; 1000 is usual, 0 gives no intervals")
    if not 0 < level < 1:
        raise ConfigError(f"`level` must lie between 0 and 1, got {level}; 0.95 is usual")
