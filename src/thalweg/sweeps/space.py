"""What a sweep varies: keys of a config, each with its list or range of values."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


# Settings of a range besides its list of choices.
RANGE = ("low", "high", "log", "step")
# A grid of more points along one key is a mistake more often than a wish.
MOST_POINTS = 1000
# The ends of a range, which are computed with.
_LARGEST = 1e300


@dataclass(frozen=True)
class Parameter:
    """One key of the space: a list of values, or a range of numbers from ``low`` to ``high``, both included.

    Attributes:
        key: of the config, as in ``key=value`` words: ``learning_rate`` or ``training.learning_rate``.
        choices: the values of a list, of any kind that YAML has; empty for a range.
        low, high: ends of a range; whole numbers where both (and the step) are whole.
        log: the range is even in the logarithm.
        step: distance of the values of a range; 0 is any number between (1 for whole numbers).

    >>> Parameter("hidden", low=16, high=64, step=16).points()
    [16, 32, 48, 64]
    >>> Parameter("cell", choices=("lstm", "gru")).points()
    ['lstm', 'gru']
    """

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether a range holds whole numbers alone.

        >>> Parameter("layers", low=1, high=4).whole, Parameter("dropout", low=0.0, high=0.5).whole
        (True, False)
        """
        return all(isinstance(number, int) for number in (self.low, self.high)) and self.step == int(self.step)

    def points(self) -> list[Any]:
        """The values that a grid tries.

        >>> Parameter("dropout", low=0.0, high=0.5).points()
        Traceback (most recent call last):
        ...
        thalweg.errors.ConfigError: sweep.space.dropout: a grid needs a list or a step, got a range of any number; ...
        """
        if self.choices:
            return list(self.choices)
        if not self.step and not (self.whole and not self.log):
            raise ConfigError(
                f"sweep.space.{self.key}: a grid needs a list or a step, got a range of any number; "
                f"write `{self.key}: [a, b, c]`, add `step`, or use `method: random`"
            )
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MOST_POINTS:
            raise ConfigError(
                f"sweep.space.{self.key}: expected {MOST_POINTS} values at most, got {count}; raise `step`"
            )
        if self.whole:
            return [int(self.low + place * step) for place in range(count)]
        # Decimal steps add up to 0.30000000000000004; fifteen digits are what was meant.
        return [float(f"{self.low + place * step:.15g}") for place in range(count)]

    def distribution(self, *, grid: bool = False) -> BaseDistribution:
        """The same as Optuna has it; values of lists are stored as JSON, so that they may be of any kind.

        >>> Parameter("hidden", choices=(64, [64, 32])).distribution().choices
        ('64', '[64, 32]')
        """
        from optuna import distributions

        if grid or self.choices:
            return distributions.CategoricalDistribution([json.dumps(value) for value in self.points()])
        if self.whole:
            step = 1 if self.log else int(self.step or 1)
            high = int(self.high) if self.log else int(self.high - (self.high - self.low) % step)
            return distributions.IntDistribution(int(self.low), high, log=self.log, step=step)
        if not self.step:
            return distributions.FloatDistribution(self.low, self.high, log=self.log)
        steps = math.floor((self.high - self.low) / self.step + 1e-9)
        return distributions.FloatDistribution(self.low, float(f"{self.low + steps * self.step:.15g}"), step=self.step)

    @staticmethod
    def value(stored: Any) -> Any:
        """The value that a stored one stands for.

        >>> Parameter.value('[64, 32]'), Parameter.value(0.5)
        ([64, 32], 0.5)
        """
        return json.loads(stored) if isinstance(stored, str) else stored


def read_space(raw: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The space that plain settings describe: ``key: [values]``, ``key: {choices: [values]}`` or
    ``key: {low, high, log, step}``.

    >>> read_space({"learning_rate": {"low": "1e-4", "high": 0.1, "log": True}, "hidden": [32, 64]})[0].low
    0.0001
    >>> read_space({"hidden": 64})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: sweep.space.hidden: expected a list of values or {low, high}, got 64; ...
    """
    if not isinstance(raw, Mapping) or not raw:
        raise ConfigError(
            "sweep.space: expected at least one key and its values, got none; "
            "write `space: {learning_rate: [0.1, 0.01]}`"
        )
    return tuple(_parameter(str(key), values) for key, values in raw.items())


def _parameter(key: str, values: Any) -> Parameter:
    place = f"sweep.space.{key}"
    if isinstance(values, Mapping):
        unknown = [name for name in values if name not in (*RANGE, "choices")]
        if unknown:
            raise ConfigError(f"{place}: `{unknown[0]}` is not known; {nearest(str(unknown[0]), (*RANGE, 'choices'))}")
        if "choices" not in values:
            return _range(key, values)
        if len(values) > 1:
            raise ConfigError(f"{place}: expected either `choices` or `low` and `high`, got both; leave one out")
        values = values["choices"]
    if not isinstance(values, (list, tuple)) or not values:
        got = values if not isinstance(values, (list, tuple)) else "an empty list"
        raise ConfigError(
            f"{place}: expected a list of values or {{low, high}}, got {got}; for example `{key}: [1, 2]`"
        )
    try:
        written = [json.dumps(value) for value in values]
    except TypeError:
        raise ConfigError(f"{place}: expected plain values, got {values}; put dates and the like in quotes") from None
    if len(set(written)) < len(written):
        raise ConfigError(f"{place}: expected every value once, got {values}; leave the repeated one out")
    return Parameter(key, choices=tuple(values))


def _range(key: str, values: Mapping[str, Any]) -> Parameter:
    place = f"sweep.space.{key}"
    for end in ("low", "high"):
        if end not in values:
            raise ConfigError(f"{place}: expected `low` and `high`, got no `{end}`; add it")
    low, high, step = (_number(place, name, values.get(name, 0)) for name in ("low", "high", "step"))
    log = values.get("log", False)
    if not isinstance(log, bool):
        raise ConfigError(f"{place}: `log` must be true or false, got {log!r}")
    if not low < high:
        raise ConfigError(f"{place}: expected low < high, got {low} and {high}; swap them or give a list")
    if step < 0 or step > high - low:
        raise ConfigError(f"{place}: expected a step in (0, {high - low:g}], got {step:g}")
    if log and low <= 0:
        raise ConfigError(f"{place}: a logarithmic range needs low > 0, got {low}; leave `log` out or raise it")
    if log and step:
        raise ConfigError(f"{place}: expected `log` or `step`, got both; leave one out, or give a list")
    if not all(isinstance(number, int) for number in (low, high, step)):
        low, high, step = float(low), float(high), float(step)
    return Parameter(key, low=low, high=high, log=log, step=step)


def _number(place: str, name: str, value: Any) -> float:
    """YAML takes `1e-4` for text: a number needs a dot there, which nobody knows."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:  # NaN too
        raise ConfigError(f"{place}: `{name}` must be a number, got {value!r}")
    return value
