"""How a model is trained: one frozen, checked set of settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from thalweg.errors import ConfigError, nearest
from thalweg.learning.optimisers import Decayed, ForcingSchedule, OptimiserName, ScheduleName
from thalweg.metrics import metric_direction

__all__ = ["LossName", "TrainingConfig"]

LossName = Literal["nll", "margin", "risk", "softmax_margin", "mce"]
"""``nll`` goes symbol by symbol; the others are over lists of a model's best answers, see ``sequence_losses``."""


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
        decay: what the decay acts on: ``matrices`` (not norms, biases and other vectors) or ``all`` parameters.
        beta2: of ``adam_l2`` and ``adamw``: decay of the mean of squared gradients, the second of torch's ``betas``.
        clip: largest norm of the whole gradient; 0 leaves it alone.
        schedule: ``constant``, ``plateau``, ``inverse_sqrt`` or ``cosine``; warmup: steps of linear rise before it.
        plateau_factor, plateau_patience: of ``plateau``; epochs without improvement before the rate is cut.
        teacher_forcing: probability of feeding the true previous symbol; ``teacher_forcing_end`` its last value.
        teacher_forcing_schedule: ``constant``, ``linear`` or ``inverse_sigmoid`` between the two.
        label_smoothing: mass spread evenly over all symbols.
        loss: ``nll`` (each symbol's likelihood), or a loss over lists of the model's ``loss_width`` best answers and
            the right one: ``margin`` (the right one leads the others by ``loss_margin`` nats), ``risk`` (expected edit
            distance), ``softmax_margin`` (likelihood in the list, answers favoured by ``loss_margin`` times their edit
            distance) or ``mce`` (errors counted softly). A step then takes several times as long.
        loss_after: epochs of ``nll`` before that loss; -1 means half of all.
        nll_weight: weight of ``nll`` beside that loss.
        loss_width: beam width of the search for answers.
        loss_margin: of ``margin`` and ``softmax_margin``; loss_beta: inverse temperature of the list, of all but
            ``margin``.
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
    decay: Decayed = "matrices"
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
    loss: LossName = "nll"
    loss_after: int = -1
    nll_weight: float = 0.3
    loss_width: int = 5
    loss_margin: float = 1.0
    loss_beta: float = 1.0
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
        self._check_loss()
        metric_direction(self.metric)
        if "@" in self.metric:
            raise ConfigError(
                f"training.metric must be one that a single answer has, got `{self.metric}`; use `wer` or `cer`"
            )

    def _check_loss(self) -> None:
        if self.loss not in get_args(LossName):
            raise ConfigError(f"training.loss `{self.loss}` is not known; {nearest(self.loss, get_args(LossName))}")
        if self.loss_width < 1:
            raise ConfigError(f"training.loss_width must be at least 1, got {self.loss_width}")
        if self.loss_after < -1:
            raise ConfigError(f"training.loss_after must be 0 or more, or -1 for half, got {self.loss_after}")
        for name in ("nll_weight", "loss_margin"):
            if not 0 <= getattr(self, name) < math.inf:  # NaN too
                raise ConfigError(f"training.{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not 0 < self.loss_beta < math.inf:
            raise ConfigError(f"training.loss_beta must be above 0 and finite, got {self.loss_beta}")
        if self.loss != "nll" and self.epochs and self.loss_after >= self.epochs:
            raise ConfigError(
                f"training.loss_after must be below training.epochs = {self.epochs}, or `{self.loss}` is never used, "
                f"got {self.loss_after}; lower it or leave it out for half"
            )

    def planned(self, batches: int) -> TrainingConfig:
        """The same with the number of epochs settled for so many batches an epoch, and when the loss begins.

        A small file wants many passes: 4,000 steps are the aim, 200 epochs the most; both grow with a warm-up of more
        than 800 steps, which is a fifth of the whole at most.

        >>> [TrainingConfig().planned(batches).epochs for batches in (1, 40, 400)]
        [200, 100, 20]
        >>> [TrainingConfig(warmup=4000).planned(batches).epochs for batches in (1, 40, 400)]
        [1000, 500, 50]
        >>> TrainingConfig(epochs=3).planned(40).epochs
        3
        >>> TrainingConfig(epochs=15, loss="risk").planned(40).loss_after
        7
        """
        aim = max(4000, 5 * self.warmup)
        epochs = self.epochs or min(aim // 20, max(20, math.ceil(aim / max(1, batches))))
        if self.loss != "nll" and self.loss_after < 0:
            return replace(self, epochs=epochs, loss_after=epochs // 2)
        return replace(self, epochs=epochs)
