"""Settings of a density: where the numbers are, the model, how it is fitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from thalweg.errors import ConfigError
from thalweg.learning.settings import TrainerConfig
from thalweg.limits import COUNT, DEPTH, SEED, WIDTH, check_numbers, check_shares
from thalweg.tasks.config import learnt_with

Covariance = Literal["full", "tied", "diagonal", "spherical"]


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Where the numbers are and what is made of them.

    Attributes:
        path: a CSV or TSV file, or a ``.npy`` of (N, D), or of (B, T, D) for sequences.
        sequence: the column of a CSV file that tells sequences apart; without, a file is one sequence.
        held_out: the share of rows, or of sequences, kept apart to choose the best iteration by.
        split_seed: of that choice, which never moves with the seed of the training.
        standardise: fit numbers of mean 0 and deviation 1; densities are told in the units of the file all the same.

    >>> TableConfig(path="x.csv").held_out
    0.1
    """

    path: str = ""
    sequence: str = ""
    held_out: float = 0.1
    split_seed: int = 0
    standardise: bool = True

    def __post_init__(self) -> None:
        check_shares(self, "data", "(0, 1)", "held_out")
        check_numbers(self, "data", 0, SEED, "split_seed")


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """Gaussians, and of which kind.

    Attributes:
        floor: the least variance in any direction, of standardised columns; more keeps components off single rows.

    >>> MixtureShape(components=3).covariance
    'full'
    """

    components: int = 8
    covariance: Covariance = "full"
    floor: float = 1e-4

    def __post_init__(self) -> None:
        check_numbers(self, "model", 1, WIDTH, "components")
        check_numbers(self, "model", 0, 1, "floor", whole=False, strict=True)


@dataclass(frozen=True, kw_only=True)
class HMMShape:
    """States, the Gaussians of each, and which state may follow which.

    Attributes:
        components: Gaussians of each state.
        floor: the least variance, as in a mixture.
        topology: ``any``, or ``left-to-right``: a state may be followed by itself and by the next.

    >>> HMMShape(states=3).topology
    'any'
    """

    states: int = 4
    components: int = 1
    covariance: Covariance = "diagonal"
    floor: float = 1e-4
    topology: Literal["any", "left-to-right"] = "any"

    def __post_init__(self) -> None:
        check_numbers(self, "model", 1, WIDTH, "states", "components")
        check_numbers(self, "model", 0, 1, "floor", whole=False, strict=True)


@dataclass(frozen=True, kw_only=True)
class VAEShape:
    """Sizes of the latent and of the layers of encoder and decoder.

    >>> VAEShape().latent
    2
    """

    latent: int = 2
    hidden: tuple[int, ...] = (64, 64)

    def __post_init__(self) -> None:
        check_numbers(self, "model", 1, WIDTH, "latent")
        if len(self.hidden) > DEPTH or not all(1 <= width <= WIDTH for width in self.hidden):
            raise ConfigError(f"model.hidden must be at most {DEPTH:,} widths from 1 to {WIDTH:,}, got {self.hidden}")


@dataclass(frozen=True, kw_only=True)
class DensityTraining(TrainerConfig):
    """How a density is fitted. Mixtures and HMMs learn by EM, which has no use for rates and batches.

    Attributes:
        epochs: iterations of EM at most, or passes over the data of a VAE.
        patience: as always; the best by the likelihood of what was held out is kept.
        restarts: starts that are tried for a few iterations; the best goes on.

    >>> DensityTraining().metric
    'nll'
    """

    epochs: int = 100
    metric: str = "nll"
    average: float = 0.0
    patience: int = 10
    restarts: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "training", 1, COUNT, "epochs", "restarts")


FAMILIES: dict[str, type] = {"mixture": MixtureShape, "hmm": HMMShape, "vae": VAEShape}
"""The settings of each family's models; the first is the default."""

LEARNS_WITH: dict[str, dict[str, Any]] = {
    "vae": {
        "batch_size": 64,
        "learning_rate": 2e-3,
        "weight_decay": 0.0,
        "schedule": "constant",
        "warmup": 0,
        "label_smoothing": 0.0,
    }
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {"task": "density", "model": {"family": name}} for name in ("mixture", "hmm", "vae")
}
"""Settings by the name given to ``--model``, or to ``model`` in YAML and Python."""


@dataclass(frozen=True, kw_only=True)
class DensityConfig:
    """Everything about the fit of a density.

    >>> DensityConfig(data=TableConfig(path="x.csv")).model.components
    8
    """

    task: Literal["density"] = "density"
    data: TableConfig = field(default_factory=TableConfig)
    model: MixtureShape | HMMShape | VAEShape = field(default_factory=MixtureShape)
    training: DensityTraining = field(default=cast(DensityTraining, None))  # its family's, which an instance knows

    presets = PRESETS
    families = FAMILIES
    learns_with = LEARNS_WITH

    def __post_init__(self) -> None:
        if self.training is None:
            family = next(name for name, kind in FAMILIES.items() if isinstance(self.model, kind))
            object.__setattr__(self, "training", DensityTraining(**learnt_with(type(self), family, {})))
