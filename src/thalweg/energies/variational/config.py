"""The shape of a variational autoencoder, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thalweg.errors import ConfigError
from thalweg.layers.convolution import ACTIVATIONS
from thalweg.limits import COUNT, DEPTH, WIDTH, check_choice, check_choices, check_numbers

Network = Literal["dense", "convolution"]
"""What reads x and what writes it: layers of units, or of convolutions that halve and double the sides of an image."""

Likelihood = Literal["bernoulli", "gaussian"]
"""How x varies round what is decoded: pixels that are on or off, or numbers with Gaussian noise."""

Annealing = Literal["none", "linear", "cyclic"]
"""How the weight of the divergence rises during training."""

# Samples of z for one x.
_SAMPLES = 10_000
# Rates and nats: what a float32 holds with room to spare.
_LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """Shape of a variational autoencoder.

    Attributes:
        shape: of one x: ``(D,)``, ``(H, W)`` or ``(channels, H, W)``.
        latent: size of z.
        network: ``dense`` or ``convolution``; the latter needs images.
        hidden: widths of the encoder's layers, or channels of its convolutions; the decoder has them in reverse.
        activation: as in :class:`ConvNetConfig`.
        likelihood: ``bernoulli`` (values in [0, 1]) or ``gaussian``.
        scale: standard deviation of the Gaussian likelihood; 0 learns one for all numbers of x.

    >>> VAEConfig(shape=(8, 8), hidden=(32,)).size
    64
    """

    shape: tuple[int, ...]
    latent: int = 2
    network: Network = "dense"
    hidden: tuple[int, ...] = (128, 64)
    activation: str = "silu"
    likelihood: Likelihood = "bernoulli"
    scale: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, "model")
        check_choice("model.activation", self.activation, ACTIVATIONS)
        for name, most in (("shape", 3), ("hidden", DEPTH)):
            numbers = getattr(self, name)
            whole = isinstance(numbers, tuple) and all(type(one) is int and 1 <= one <= WIDTH for one in numbers)
            if not whole or not len(numbers) <= most or (name == "shape" and not numbers):
                raise ConfigError(
                    f"model.{name} must be at most {most:,} whole numbers from 1 to {WIDTH:,}, got {numbers!r}"
                )
        if self.network == "convolution" and (len(self.shape) < 2 or not self.hidden):
            raise ConfigError(
                "model.network = convolution needs model.shape = (H, W) or (channels, H, W) and channels in "
                f"model.hidden, got {self.shape} and {self.hidden}; use dense"
            )
        check_numbers(self, "model", 1, WIDTH, "latent")
        check_numbers(self, "model", 0, math.inf, "scale", whole=False)

    @property
    def size(self) -> int:
        """Numbers of one x."""
        return math.prod(self.shape)

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape with its channels."""
        channels, height, width = (1, *self.shape)[-3:]
        return channels, height, width


@dataclass(frozen=True, kw_only=True)
class VAETraining:
    """How :meth:`VAE.fit` trains: Adam on minus the bound.

    Attributes:
        epochs: passes over the data.
        batch_size: items of a step.
        learning_rate: of Adam.
        samples: of z for each x in a step.
        annealing: ``none``, ``linear`` (once from 0 to 1) or ``cyclic`` (over and over, rising in the first half).
        annealing_epochs: how long the weight of the divergence takes to rise, or one of its cycles.
        free_bits: nats that each latent dimension may carry for nothing.

    >>> VAETraining(annealing="linear", annealing_epochs=10).free_bits
    0.0
    """

    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 2e-3
    samples: int = 1
    annealing: Annealing = "none"
    annealing_epochs: int = 10
    free_bits: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, "training")
        check_numbers(self, "training", 1, COUNT, "epochs", "batch_size", "annealing_epochs")
        check_numbers(self, "training", 1, _SAMPLES, "samples")
        check_numbers(self, "training", 0, _LARGEST, "learning_rate", whole=False, strict=True)
        check_numbers(self, "training", 0, _LARGEST, "free_bits", whole=False)
