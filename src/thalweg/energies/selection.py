"""How many components, how many states: fit each number, and keep the one with the lowest criterion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from thalweg.energies.hmm.model import HMM
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError

M = TypeVar("M", GaussianMixture, HMM)


class Choice(NamedTuple, Generic[M]):
    """A number and what it was preferred to.

    Attributes:
        model: fitted, the one with the lowest criterion.
        criteria: the criterion of each number that was tried.

    >>> Choice(GaussianMixture(2), {1: 90.0, 2: 80.0}).best
    2
    """

    model: M
    criteria: dict[int, float]

    @property
    def best(self) -> int:
        """The number."""
        return min(self.criteria, key=self.criteria.__getitem__)


def choose_size(model: M, X: Any, counts: Iterable[int], criterion: str = "bic", **data: Any) -> Choice[M]:
    r"""Fit a mixture for each number of components, or an HMM for each number of states; of equal ones the first wins.

    .. math:: BIC = -2 \log p(x) + k \log n, \qquad AIC = -2 \log p(x) + 2 k

    with k the number of free parameters and n that of observations. Schwarz (1978); Akaike (1974).

    Args:
        model: the settings; its own number is not looked at, and parameters that fix one may not be given.
        X, data: as its ``fit`` takes them: ``lengths``, ``observed``, ``sample_weight`` (no criterion looks at that).
        counts: the numbers to try.
        criterion: ``bic`` or ``aic``.

    >>> import torch
    >>> points = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> points[:150] += 6
    >>> choose_size(GaussianMixture(random_state=0), points, range(1, 4)).best
    2
    """
    numbers, setting = list(counts), "n_states" if isinstance(model, HMM) else "n_components"
    if criterion not in ("bic", "aic"):
        raise ConfigError(f"`criterion` must be `bic` or `aic`, got {criterion!r}")
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise ConfigError(f"`counts` must be integers of at least 1, got {numbers!r}")
    asked = {name: value for name, value in data.items() if name != "sample_weight"}
    best: M | None = None
    criteria: dict[int, float] = {}
    for count in numbers:
        fitted = type(model)(**{**model.get_params(deep=False), setting: count}).fit(X, **data)
        criteria[count] = getattr(fitted, criterion)(X, **asked)
        if best is None or criteria[count] < min(value for n, value in criteria.items() if n != count):
            best = fitted
    assert best is not None
    return Choice(best, criteria)
