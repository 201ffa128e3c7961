"""How a sweep goes: one frozen, checked set of settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from thalweg.errors import ConfigError
from thalweg.limits import COUNT, SEED, check_choices, check_numbers
from thalweg.metrics import metric_direction
from thalweg.sweeps.space import Parameter, read_space

# How many settings are tried where neither the config nor a grid says.
TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Which settings are tried, in what order, and how they are compared.

    Attributes:
        space: config keys with their values, see :func:`~thalweg.sweeps.space.read_space`.
        method: ``grid`` (every combination, in order), ``random``, ``tpe`` (tree-structured Parzen estimator, which
            learns from what it has seen) or ``halving`` (random, and only the best share of the settings goes on at
            epochs ``min_epochs``, times ``reduction``, times its square ...).
        trials: settings tried; 0 means all of a grid, 20 otherwise.
        seeds: seeds of training; every setting is trained with each, and settings are compared by their mean.
        metric: dev metric, measured at each run's best epoch; "" is the one that training goes by.
        direction: ``min``, ``max``, or ``auto`` as the metric has it.
        prune: ``none``, ``median`` (a setting stops when it is worse than the median of the others at that epoch) or
            ``halving``; ``auto`` is halving for the method of that name and none for the others.
        min_epochs: epochs that every setting gets before it can be pruned; reduction: one in so many goes on (halving).
        startup: settings that are drawn at random before TPE begins to learn, and that finish before the median counts.
        hours: no setting is begun after so many hours of one command; 0 is no limit.
        seed: of the choice of settings.
        retries: how often a run is begun again whose process was lost (killed for memory, a machine gone).

    >>> SweepConfig(space={"learning_rate": [0.1, 0.01]}, method="grid", seeds=(0, 1)).settings
    2
    """

    space: dict[str, Any] = field(default_factory=dict)
    method: Literal["grid", "random", "tpe", "halving"] = "tpe"
    trials: int = 0
    seeds: tuple[int, ...] = (0,)
    metric: str = ""
    direction: Literal["auto", "min", "max"] = "auto"
    prune: Literal["auto", "none", "median", "halving"] = "auto"
    min_epochs: int = 1
    reduction: int = 3
    startup: int = 10
    hours: float = 0.0
    seed: int = 0
    retries: int = 1

    def __post_init__(self) -> None:
        check_choices(self, "sweep")
        for name, least in (("trials", 0), ("min_epochs", 1), ("reduction", 2), ("startup", 1)):
            check_numbers(self, "sweep", least, COUNT, name)
        check_numbers(self, "sweep", 0, SEED, "seed")
        if self.retries < 0 or not self.hours >= 0:
            raise ConfigError(f"sweep.retries and sweep.hours must be 0 or more, got {self.retries} and {self.hours}")
        distinct = len(set(self.seeds)) == len(self.seeds) > 0
        if not distinct or not 0 <= min(self.seeds) <= max(self.seeds) <= SEED:
            raise ConfigError(
                f"sweep.seeds: expected different numbers from 0 on, got {list(self.seeds)}; write `seeds: [0, 1, 2]`"
            )
        if self.metric and self.direction == "auto":
            metric_direction(self.metric)
        if self.method == "halving" and self.prune not in ("auto", "halving"):
            raise ConfigError(f"sweep.prune: the method halving prunes by halving, got `{self.prune}`; leave it out")
        if self.method == "grid" and self.trials and self.trials < self.settings:
            raise ConfigError(
                f"sweep.trials: the grid has {self.settings} settings, got {self.trials}; "
                "leave trials out, shorten the lists, or use `method: random`"
            )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The keys of the space."""
        return read_space(self.space)

    @property
    def settings(self) -> int:
        """How many settings are tried in all."""
        if self.method != "grid":
            return self.trials or TRIALS
        return math.prod(len(parameter.points()) for parameter in self.parameters)

    @property
    def pruner(self) -> str:
        """What prunes: ``none``, ``median`` or ``halving``.

        >>> SweepConfig(method="halving").pruner, SweepConfig().pruner
        ('halving', 'none')
        """
        return self.prune if self.prune != "auto" else "halving" if self.method == "halving" else "none"

    def higher(self, metric: str) -> bool:
        """Whether a higher value of the metric wins.

        >>> SweepConfig().higher("accuracy"), SweepConfig(direction="min").higher("accuracy")
        (True, False)
        """
        return self.direction == "max" if self.direction != "auto" else metric_direction(metric)
