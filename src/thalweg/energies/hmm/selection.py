"""How many states there should be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from thalweg.energies.hmm.model import HMM
from thalweg.errors import ConfigError

__all__ = ["StateChoice", "choose_states"]


class StateChoice(NamedTuple):
    """The number of states with the lowest criterion.

    Attributes:
        model: fitted with that number.
        bic: the criterion of each number that was tried, in that order.

    >>> StateChoice(HMM(n_states=2), {1: 30.0, 2: 20.0}).best
    2
    """

    model: HMM
    bic: dict[int, float]

    @property
    def best(self) -> int:
        """The number of states."""
        return min(self.bic, key=self.bic.__getitem__)


def choose_states(
    model: HMM, X: Any, lengths: Any = None, *, observed: Any = None, states: Iterable[int] = range(1, 7)
) -> StateChoice:
    r"""Fit a model for each number of states and keep the one with the lowest Bayesian information criterion.

    .. math:: BIC = -2 \log p(x) + k \log n

    with k the number of free parameters and n that of observations. Schwarz (1978).

    Args:
        model: the settings; its own number of states is not looked at, and nothing that fixes one may be given.
        X, lengths, observed: as in :meth:`HMM.fit`.
        states: the numbers to try.

    >>> import numpy as np
    >>> steps = np.repeat([[0.0], [9.0]], 20, axis=0) + np.random.default_rng(0).normal(size=(40, 1))
    >>> choose_states(HMM(), steps, states=[1, 2]).best
    2
    """
    numbers = list(states)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise ConfigError(f"`states` must be integers of at least 1, got {numbers!r}")
    settings = model.get_params(deep=False)
    fixed = [name for name in ("initial", "transition", "tied") if settings[name] is not None]
    if fixed or not isinstance(settings["emission"], str):
        raise ConfigError(
            f"`model` must leave the number of states open, got one with `{(fixed or ['emission'])[0]}`; give the "
            "emission by name, and no parameters"
        )
    found: dict[int, float] = {}
    best: HMM | None = None
    for n in numbers:
        fitted = HMM(**{**settings, "n_states": n}).fit(X, lengths, observed=observed)
        found[n] = fitted.bic(X, lengths, observed=observed)
        if best is None or found[n] <= min(found.values()):
            best = fitted
    assert best is not None
    return StateChoice(best, found)
