"""Whether two models differ by more than the choice of items explains: paired bootstrap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from thalweg.errors import ConfigError, ShapeError
from thalweg.metrics.bootstrap import Floats, Tally, check_options, draws, ends_of, full_scale


@dataclass(frozen=True)
class Difference:
    r"""How much higher a score of one model is than that of another on the same items.

    With d the difference on all items and :math:`d^*_r` that on the r-th of R draws, which take the same items for
    both models:

    .. math:: p = \frac{1 + \#\{r : |d^*_r - d| \ge |d|\}}{R + 1}

    the share of draws whose error is as great as the difference: two-sided, and never 0. Models that answer alike
    have p = 1.

    Attributes:
        name: of the score; value: d; low, high: quantiles of :math:`d^*`; NaN where d is no number.
        p: as above; corrected: p after Holm's correction for several models, p itself where there is one.
        better: whether d is an improvement; None where it is 0 or no number.

    Efron and Tibshirani (1993, chapter 16), Koehn (2004), Riezler and Maxwell (2005).

    >>> print(Difference("CER", -0.02, -0.031, -0.009, 0.002, 0.004, better=True))
    CER -0.0200 [-0.0310, -0.0090], p = 0.0020
    """

    name: str
    value: float
    low: float
    high: float
    p: float
    corrected: float
    better: bool | None

    def shown(self, number: float) -> str:
        """A difference with its sign, which 0 has not."""
        digits = 2 if full_scale(self.name) > 1 else 4
        return f"{number:{'+' if number else ''}.{digits}f}" if math.isfinite(number) else "–"

    @property
    def interval(self) -> str:
        """Both ends."""
        return f"{self.shown(self.low)} to {self.shown(self.high)}"

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shown(self.value)} [{self.shown(self.low)}, {self.shown(self.high)}], p = {self.p:.4f}"
        )

    def to_json(self) -> dict[str, Any]:
        """The attributes as ``json`` can write them; None for what is no number."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def compare_tallies(
    first: Tally,
    others: Sequence[Tally],
    keys: Iterable[str],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> list[dict[str, Difference]]:
    """Differences of each of some models from the first, score by score.

    Args:
        first, others: what was counted of the same N items, in the same order.
        keys: of the scores, which all must have.
        resamples, seed, level: as those of :func:`~thalweg.metrics.bootstrap.scored`, whose draws are these.

    With several others each score's p-values are corrected together (:func:`holm`); scores are not corrected for one
    another, since they look at the same answers. Time and memory as ``scored`` for each model.

    >>> from thalweg.metrics.bootstrap import Means, Measure
    >>> told = {"accuracy": Measure("accuracy", True)}
    >>> worse, better = (Means({"accuracy": right}, told) for right in ([0, 1] * 50, [1, 1] * 50))
    >>> print(compare_tallies(worse, [better], ["accuracy"])[0]["accuracy"])
    accuracy +0.5000 [+0.4000, +0.6000], p = 0.0010
    """
    check_options((), resamples, level)
    if not resamples:
        raise ConfigError("a comparison needs `resamples` of at least 1, got 0; 1000 is usual")
    tallies, keys = [first, *others], list(keys)
    sizes = [len(tally) for tally in tallies]
    if len(set(sizes)) > 1:
        raise ShapeError(f"models must be compared on the same items, got {', '.join(map(str, sizes))} of them")
    whole = [tally.scores(np.ones((1, sizes[0]))) for tally in tallies]
    drawn: list[list[dict[str, Floats]]] = [[] for _ in tallies]
    for times in draws(sizes[0], resamples, seed):
        for parts, tally in zip(drawn, tallies, strict=True):
            parts.append(tally.scores(times))

    def difference(key: str, other: int) -> Difference:
        with np.errstate(invalid="ignore"):  # infinite scores have no difference
            value = float((whole[other][key] - whole[0][key])[0])
            of_draws = np.concatenate([b[key] - a[key] for a, b in zip(drawn[0], drawn[other], strict=True)])
        told = first.measures[key]
        if not np.isfinite(of_draws).all() or not math.isfinite(value):
            return Difference(told.name, value, math.nan, math.nan, math.nan, math.nan, better=None)
        p = _p_value(value, of_draws)
        better = (value > 0) == told.higher_is_better if value else None
        return Difference(told.name, value, *ends_of(of_draws, level), p, p, better)

    found = [{key: difference(key, other) for key in keys} for other in range(1, len(tallies))]
    for key in keys:
        corrected = holm([each[key].p for each in found])
        for each, p in zip(found, corrected, strict=True):
            each[key] = replace(each[key], corrected=p)
    return found


def _p_value(value: float, of_draws: Floats) -> float:
    # Ratios of whole numbers are often exactly twice the difference; rounding must not decide whether they count.
    as_great = np.abs(of_draws - value) >= abs(value) * (1 - 1e-9)
    return (1 + int(as_great.sum())) / (1 + len(of_draws))


def holm(ps: Sequence[float]) -> list[float]:
    r"""p-values of M tests, corrected so that the chance of any false alarm stays below the level (Holm, 1979).

    .. math:: \tilde p_{(i)} = \max_{j \le i} \min(1, (M - j + 1)\, p_{(j)})

    in ascending order of p; a NaN stays as it is and counts as no test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted((place for place, p in enumerate(ps) if not math.isnan(p)), key=lambda place: ps[place])
    corrected, least = list(ps), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * ps[place]))
        corrected[place] = least
    return corrected
