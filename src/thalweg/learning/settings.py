"""How a model is trained: one frozen, checked set of settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from thalweg.errors import ConfigError
from thalweg.learning.optimisers import ForcingSchedule, OptimiserName, ScheduleName
from thalweg.metrics import metric_direction

__all__ = ["TrainingConfig"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    Attributes:
        epochs: passes over the training data at most; 0 means 20, and more where those are under 4,000 steps (or
            five times the warm-up where that is more).
        batch_size: pairs per step.
        batch_tokens: symbols per step at most instead, sources and targets with padding; 0 goes by ``batch_size``.
        optimiser: ``sgd``, ``adam_l2`` (L2 in the gradient) or ``adamw`` (decoupled decay).
        learning_rate, weight_decay, momentum: as torch's optimiser of that name.
        beta2: of ``adam_l2`` and ``adamw``: decay of the mean of squared gradients, the second of torch's ``betas``.
        clip: largest norm of the whole gradient; 0 leaves it alone.
        schedule: ``constant``, ``plateau``, ``inverse_sqrt`` or ``cosine``; warmup: steps of linear rise before it.
        plateau_factor, plateau_patience: of ``plateau``; epochs without improvement before the rate is cut.
        teacher_forcing: probability of feeding the true previous symbol; ``teacher_forcing_end`` its last value.
        teacher_forcing_schedule: ``constant``, ``linear`` or ``inverse_sigmoid`` between the two.
        label_smoothing: mass spread evenly over all symbols.
        average: decay of an exponential moving average of the weights, which is what is evaluated and kept;
            0 keeps the plain weights.
        metric: dev metric that chooses the best model (``loss``, ``accuracy``, ``cer``, ``wer``, ``bleu``, ...).
        patience: epochs without improvement before stopping; 0 never stops early.
        seed: of everything random.
        precision: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        threads: CPU threads while training; 0 leaves torch's choice. Results are the same to the bit only for the
            same number; on a machine that others use, 1 can be several times faster than all.
        checkpoint_every: steps between checkpoints inside an epoch; each epoch ends with one anyway.

    >>> TrainingConfig(epochs=3).optimiser
    'adamw'
    """

    epochs: int = 0
    batch_size: int = 32
    batch_tokens: int = 0
    optimiser: OptimiserName = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    momentum: float = 0.0
    beta2: float = 0.999
    clip: float = 1.0
    schedule: ScheduleName = "cosine"
    warmup: int = 100
    plateau_factor: float = 0.5
    plateau_patience: int = 2
    teacher_forcing: float = 1.0
    teacher_forcing_end: float = 0.0
    teacher_forcing_schedule: ForcingSchedule = "constant"
    label_smoothing: float = 0.1
    average: float = 0.999
    metric: str = "cer"
    patience: int = 0
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int = 0
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "epochs",
            "batch_tokens",
            "weight_decay",
            "momentum",
            "clip",
            "warmup",
            "patience",
            "plateau_patience",
            "seed",
            "threads",
        ):
            if not getattr(self, name) >= 0:  # NaN too
                raise ConfigError(f"training.{name} must be 0 or more, got {getattr(self, name)}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"training.learning_rate must be positive, got {self.learning_rate}")
        for name in ("teacher_forcing", "teacher_forcing_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"training.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("label_smoothing", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("plateau_factor", "beta2"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be in (0, 1), got {getattr(self, name)}")
        metric_direction(self.metric)
        if "@" in self.metric:
            raise ConfigError(
                f"training.metric must be one that a single answer has, got `{self.metric}`; use `wer` or `cer`"
            )

    def planned(self, batches: int) -> TrainingConfig:
        """The same with the number of epochs settled for so many batches an epoch.

        A small file wants many passes: 4,000 steps are the aim, 200 epochs the most; both grow with a warm-up of more
        than 800 steps, which is a fifth of the whole at most.

        >>> [TrainingConfig().planned(batches).epochs for batches in (1, 40, 400)]
        [200, 100, 20]
        >>> [TrainingConfig(warmup=4000).planned(batches).epochs for batches in (1, 40, 400)]
        [1000, 500, 50]
        >>> TrainingConfig(epochs=3).planned(40).epochs
        3
        """
        if self.epochs:
            return self
        aim = max(4000, 5 * self.warmup)
        return replace(self, epochs=min(aim // 20, max(20, math.ceil(aim / max(1, batches)))))
