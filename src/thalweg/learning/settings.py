"""How a model is trained: frozen, checked settings; what all tasks share, and what each kind adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, get_args

import torch
from torch import nn

from thalweg.errors import ConfigError
from thalweg.learning.optimisers import (
    Decayed,
    ForcingSchedule,
    OptimiserName,
    ScheduleName,
    build_optimiser,
    teacher_forcing_at,
)
from thalweg.limits import ANSWERS, COUNT, SEED, check_choice, check_numbers, check_shares
from thalweg.metrics import metric_direction

LossName = Literal["nll", "margin", "risk", "softmax_margin", "mce"]
"""``nll`` goes symbol by symbol; the others are over lists of a model's best answers, see ``sequence_losses``."""

ClassLossName = Literal[
    "nll",
    "hinge",
    "perceptron",
    "log",
    "simple",
    "square_square",
    "square_exponential",
    "mce",
    "softmax_margin",
    "sparsemax",
    "entmax15",
]
"""Losses of class energies, see ``class_losses``."""

# Models of an ensemble: all are in memory when it answers.
MEMBERS = 1000

# Steps from one measurement on the dev data to the next where the number of epochs between them is left open.
_MEASURED_STEPS = 100

# Of any machine; whether this one can start them is asked when training begins.
_THREADS = 4096

CLASS_METRICS = ("accuracy", "f1", "loss", "ece")
"""What is measured of a classifier after each epoch."""


class Moment(NamedTuple):
    """Where a training is: the epoch and step from 0, and the ``share`` in [0, 1] of all steps that is done.

    >>> Moment(epoch=0, step=5, share=0.5).share
    0.5
    """

    epoch: int
    step: int
    share: float


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What the trainer needs, whatever is trained.

    Attributes:
        epochs: passes over the training data at most; 0 means 20, and more where those are under ``steps`` (or five
            times the warm-up where that is more).
        steps: what ``epochs=0`` aims at.
        batch_size: items of a batch.
        accumulate: batches per step: the gradient is that of one large batch.
        optimiser: ``sgd``, ``adam_l2`` (L2 in the gradient), ``adamw`` (decoupled decay) or ``adafactor`` (steps in
            proportion to each matrix; a rate of 0.01 is usual).
        learning_rate, weight_decay, momentum: as torch's optimiser of that name.
        decay: what the decay acts on: ``matrices`` (not norms, biases and other vectors) or ``all`` parameters.
        layer_decay: the learning rate of a layer is that of the one above it times this; embeddings have the lowest. Of
            pretrained models.
        beta2: of ``adam_l2`` and ``adamw``: decay of the mean of squared gradients, the second of torch's ``betas``.
        clip: largest norm of the whole gradient; 0 leaves it alone.
        schedule: ``constant``, ``plateau``, ``inverse_sqrt`` or ``cosine``; warmup: steps of linear rise before it.
        plateau_factor, plateau_patience: of ``plateau``; epochs without improvement before the rate is cut.
        label_smoothing: mass spread evenly over all answers.
        average: decay of an exponential moving average of the weights, which is what is evaluated and kept;
            0 keeps the plain weights.
        metric: dev metric that chooses the best model.
        patience: epochs without improvement before stopping; 0 never stops early.
        evaluate_every: epochs from one measurement on the dev data to the next; the last is always measured. 0 means
            as many as hold 100 steps, at least 1 and at most a twentieth of all.
        seed: of everything random.
        precision: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        threads: CPU threads while training; 0 leaves torch's choice. Results are the same to the bit only for the
            same number; on a machine that others use, 1 can be several times faster than all.
        checkpoint_every: steps between checkpoints inside an epoch; each epoch ends with one anyway.
        checkpoint_seconds: an epoch that ends sooner than this after the last checkpoint writes none, unless training
            ends or is stopped with it; a kill then repeats that much, to the same result.

    >>> TrainerConfig(epochs=3).optimiser
    'adamw'
    """

    epochs: int = 0
    steps: int = 4000
    batch_size: int = 32
    accumulate: int = 1
    optimiser: OptimiserName = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    decay: Decayed = "matrices"
    momentum: float = 0.0
    layer_decay: float = 1.0
    beta2: float = 0.999
    clip: float = 1.0
    schedule: ScheduleName = "cosine"
    warmup: int = 100
    plateau_factor: float = 0.5
    plateau_patience: int = 2
    label_smoothing: float = 0.1
    average: float = 0.999
    metric: str = "loss"
    patience: int = 0
    evaluate_every: int = 1
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int = 0
    checkpoint_every: int = 1000
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._check(1, COUNT, "batch_size", "checkpoint_every", "accumulate", "steps")
        self._check(0, COUNT, "epochs", "evaluate_every", "warmup", "patience", "plateau_patience")
        self._check(0, SEED, "seed")
        self._check(0, _THREADS, "threads")
        self._check(0, math.inf, "weight_decay", "momentum", "clip", "checkpoint_seconds", whole=False)
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"training.learning_rate must be positive, got {self.learning_rate}")
        check_shares(self, "training", "[0, 1)", "label_smoothing", "average")
        check_shares(self, "training", "(0, 1)", "plateau_factor", "beta2")
        check_shares(self, "training", "(0, 1]", "layer_decay")
        metric_direction(self.metric)

    def _check(self, least: float, most: float, *names: str, whole: bool = True) -> None:
        check_numbers(self, "training", least, most, *names, whole=whole)

    def planned(self, batches: int) -> Self:
        """The same with the epochs, and those between two measurements, settled for so many batches an epoch.

        A small file wants many passes: ``steps`` are the aim, a twentieth of them as epochs the most; both grow with a
        warm-up of more than a fifth of them, which is a fifth of the whole at most.

        >>> [TrainerConfig().planned(batches).epochs for batches in (1, 40, 400)]
        [200, 100, 20]
        >>> [TrainerConfig(steps=1500).planned(batches).epochs for batches in (1, 25, 400)]
        [75, 60, 20]
        >>> [TrainerConfig(warmup=4000).planned(batches).epochs for batches in (1, 40, 400)]
        [1000, 500, 50]
        >>> TrainerConfig(epochs=3).planned(40).epochs
        3
        >>> [TrainerConfig(evaluate_every=0).planned(batches).evaluate_every for batches in (1, 25, 400)]
        [10, 4, 1]
        """
        batches = max(1, -(-batches // self.accumulate))
        aim = max(self.steps, 5 * self.warmup)
        return self._settled(batches, min(max(20, aim // 20), max(20, math.ceil(aim / batches))))

    def optimiser_of(self, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
        """The optimiser of a model's parameters; ``fused`` as of :func:`~thalweg.learning.optimisers.build_optimiser`.

        >>> TrainerConfig(learning_rate=0.1).optimiser_of(nn.Linear(2, 2)).param_groups[0]["lr"]
        0.1
        """
        names = ("learning_rate", "weight_decay", "decay", "momentum", "beta2", "layer_decay")
        return build_optimiser(self.optimiser, model, fused=fused, **{name: getattr(self, name) for name in names})

    def _settled(self, batches: int, epochs: int) -> Self:
        """With so many epochs where their number is left open, and with those between two measurements."""
        epochs = self.epochs or epochs
        every = max(1, min(_MEASURED_STEPS // max(1, batches), epochs // 20))
        return replace(self, epochs=epochs, evaluate_every=self.evaluate_every or every)


def _check_weights(config: TrainingConfig | ClassTraining, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:  # NaN too
            raise ConfigError(f"training.{name} must be 0 or more and finite, got {getattr(config, name)}")
    if not 0 < config.loss_beta < math.inf:
        raise ConfigError(f"training.loss_beta must be above 0 and finite, got {config.loss_beta}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """How a model of sequences is trained: what :class:`TrainerConfig` has, and what follows.

    Attributes:
        batch_size: pairs per step.
        batch_tokens: symbols per step at most instead, sources and targets with padding; 0 goes by ``batch_size``.
        teacher_forcing: probability of feeding the true previous symbol; ``teacher_forcing_end`` its last value.
        teacher_forcing_schedule: ``constant``, ``linear`` or ``inverse_sigmoid`` between the two.
        loss: ``nll`` (each symbol's likelihood), or a loss over lists of the model's ``loss_width`` best answers and
            the right one: ``margin`` (the right one leads the others by ``loss_margin`` nats), ``risk`` (expected edit
            distance), ``softmax_margin`` (likelihood in the list, answers favoured by ``loss_margin`` times their edit
            distance) or ``mce`` (errors counted softly). A step then takes several times as long.
        loss_after: epochs of ``nll`` before that loss; -1 means half of all.
        nll_weight: weight of ``nll`` beside that loss.
        loss_width: beam width of the search for answers.
        loss_margin: of ``margin`` and ``softmax_margin``; loss_beta: inverse temperature of the list, of all but
            ``margin``.
        ensemble: models to train, one after the other, with seeds ``seed``, ``seed + 1`` ...; they answer as one.
        metric: dev metric that chooses the best model (``loss``, ``accuracy``, ``cer``, ``wer``, ``bleu``, ...).
        evaluate_every, checkpoint_seconds: an epoch of few pairs takes a second or less; searching the answers to the
            dev data, and writing all that resuming needs, would take as long.

    >>> TrainingConfig(epochs=3).optimiser
    'adamw'
    """

    batch_tokens: int = 0
    teacher_forcing: float = 1.0
    teacher_forcing_end: float = 0.0
    teacher_forcing_schedule: ForcingSchedule = "constant"
    loss: LossName = "nll"
    loss_after: int = -1
    nll_weight: float = 0.3
    loss_width: int = 5
    loss_margin: float = 1.0
    loss_beta: float = 1.0
    ensemble: int = 1
    metric: str = "cer"
    evaluate_every: int = 0
    checkpoint_seconds: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(0, COUNT, "batch_tokens")
        self._check(1, MEMBERS, "ensemble")
        self._check(0, SEED - self.ensemble + 1, "seed")
        check_shares(self, "training", "[0, 1]", "teacher_forcing", "teacher_forcing_end")
        self._check_loss()
        if "@" in self.metric:
            raise ConfigError(
                f"training.metric must be one that a single answer has, got `{self.metric}`; use `wer` or `cer`"
            )

    def _check_loss(self) -> None:
        check_choice("training.loss", self.loss, get_args(LossName))
        self._check(1, ANSWERS, "loss_width")
        if self.loss_after < -1:
            raise ConfigError(f"training.loss_after must be 0 or more, or -1 for half, got {self.loss_after}")
        self._check(-1, COUNT, "loss_after")
        _check_weights(self, "nll_weight", "loss_margin")
        if self.loss != "nll" and self.epochs and self.loss_after >= self.epochs:
            raise ConfigError(
                f"training.loss_after must be below training.epochs = {self.epochs}, or `{self.loss}` is never used, "
                f"got {self.loss_after}; lower it or leave it out for half"
            )

    def forcing_at(self, share: float) -> float:
        """Probability of feeding the true previous symbol when ``share`` in [0, 1] of the training is done.

        >>> TrainingConfig(teacher_forcing=0.8, teacher_forcing_schedule="linear").forcing_at(0.5)
        0.4
        """
        return teacher_forcing_at(self.teacher_forcing_schedule, self.teacher_forcing, self.teacher_forcing_end, share)

    def planned(self, batches: int) -> Self:
        """As that of :class:`TrainerConfig`, and when the loss begins.

        >>> TrainingConfig(epochs=15, loss="risk").planned(40).loss_after
        7
        """
        planned = super().planned(batches)
        if self.loss != "nll" and self.loss_after < 0:
            return replace(planned, loss_after=planned.epochs // 2)
        return planned


@dataclass(frozen=True, kw_only=True)
class ClassTraining(TrainerConfig):
    """How a classifier is trained: what :class:`TrainerConfig` has, and what follows.

    Attributes:
        epochs: 0 means 30, and more where those are under ``steps``, up to 60.
        batch_size: images per step.
        loss: of the class energies: ``nll``, ``softmax_margin``, ``sparsemax`` and ``entmax15`` (Fenchel-Young losses)
            look at all classes; ``hinge``, ``perceptron``, ``log``, ``simple``, ``square_square``,
            ``square_exponential`` and ``mce`` at the right class and the most offending wrong one.
        loss_margin: of ``hinge``, ``softmax_margin``, ``simple`` and ``square_square``.
        loss_beta: inverse temperature of ``nll``, ``softmax_margin`` and ``mce``; above 0.
        label_smoothing: of ``nll`` alone.
        mixup: two images are blended with a weight from Beta(mixup, mixup), and so are their losses; 0 is off.
        metric: dev metric that chooses the best epoch: ``accuracy``, ``f1``, ``loss`` (mean negative log-likelihood,
            whatever the training loss) or ``ece``.
        checkpoint_seconds: an epoch of images may take a second; writing all that resuming needs takes as long.

    >>> ClassTraining(loss="hinge").metric
    'accuracy'
    >>> [ClassTraining().planned(batches).epochs for batches in (1, 30, 400)]
    [60, 40, 30]
    """

    steps: int = 1200
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    clip: float = 0.0
    loss: ClassLossName = "nll"
    loss_margin: float = 1.0
    loss_beta: float = 1.0
    mixup: float = 0.0
    average: float = 0.99
    metric: str = "accuracy"
    checkpoint_seconds: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("training.loss", self.loss, get_args(ClassLossName))
        _check_weights(self, "mixup", "loss_margin")
        check_choice("training.metric", self.metric, CLASS_METRICS)

    def planned(self, batches: int) -> Self:
        """The same with the number of epochs settled for so many batches an epoch.

        >>> ClassTraining(epochs=3).planned(40).epochs
        3
        """
        return self._settled(batches, min(60, max(30, math.ceil(self.steps / max(1, batches)))))
