"""The shape of a convolutional network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thalweg.errors import ConfigError
from thalweg.layers.convolution import ACTIVATIONS, ImageNorm, Order, Skip
from thalweg.limits import DEPTH, SIDE, WIDTH, check_choice, check_choices, check_numbers, check_shares

Pooling = Literal["max", "average", "stride", "none"]
"""How a block makes its maps smaller: by the largest or the mean of each window, by its first convolution, not."""

Head = Literal["flatten", "average", "max", "average_max", "attention"]
"""How maps become a vector: all their values, or each channel's mean, maximum, both, or weighted mean."""

# Times as many channels inside a unit as outside, at most.
_EXPANSION = 1000


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Shape of a convolutional network: a stem, blocks of units of convolutions, a head, hidden layers.

    Attributes:
        stem: channels of a convolution before the blocks; 0 has none. stem_kernel, stem_stride: of it.
        channels: of each block.
        units: in each block, one number or one for each; a unit is what ``skip`` goes round.
        convolutions: in each unit; each comes with a norm and an activation.
        expansion: width of a unit's convolutions but the last, relative to that of the last; below 1 makes a waist.
        kernel: width of the convolutions in pixels, odd; one number, or one for each convolution of a unit.
        separable: convolutions of single channels followed by 1 x 1 ones; far fewer weights for the same width.
        norm: ``none``, ``batch``, ``layer``, ``instance``, ``group`` or ``weight``.
        order: ``post`` (convolution, norm, activation) or ``pre`` (norm, activation, convolution; one more norm and
            activation follow the blocks).
        activation: ``relu``, ``gelu``, ``silu``, ``tanh``, ``leaky_relu``, ``elu`` or ``mish``.
        bias: convolutions have one; a norm after them makes it needless.
        skip: round each unit: ``none``, ``residual``, ``highway``, or ``dense``: a unit adds ``growth`` channels to its
            input, and a convolution of 1 x 1 at the end of the block brings them to its ``channels`` where they differ
            (Huang et al., 2017).
        squeeze: each unit ends with squeeze and excitation through 1/squeeze of its channels; 0 has none.
        pooling: ``max``, ``average``, ``stride`` (the block's first convolution takes steps) or ``none``.
        pool: by how much each block makes its maps smaller, one number or one for each block.
        dropout: probability, after each block; drop_path: of leaving out the last residual unit, less in those
            before (Huang et al., 2016).
        head: ``flatten``, ``average``, ``max``, ``average_max`` (both) or ``attention`` (a softmax over positions).
        head_dropout: probability, between the head and what follows it.
        hidden: widths of the hidden layers; may be empty. hidden_norm: each has the norm too; hidden_dropout:
            probability after each.
        initialisation: ``default`` (torch's) or ``he`` (normal, variance 2 / outgoing weights; He et al., 2015).
        zero_last: the last norm of each residual unit, or the convolution behind it, starts at 0, so that the unit
            begins as the identity.
        mirror: outside training, the energy is the mean over the image and its mirror image, at twice the cost.

    >>> ConvNetConfig(channels=(8, 16)).pooling
    'max'
    """

    stem: int = 0
    stem_kernel: int = 3
    stem_stride: int = 1
    channels: tuple[int, ...] = (32, 64, 128)
    units: int | tuple[int, ...] = 1
    convolutions: int = 1
    expansion: float = 1.0
    kernel: int | tuple[int, ...] = 3
    separable: bool = False
    norm: ImageNorm = "none"
    order: Order = "post"
    activation: str = "relu"
    bias: bool = True
    skip: Skip = "none"
    growth: int = 12
    squeeze: int = 0
    pooling: Pooling = "max"
    pool: int | tuple[int, ...] = 2
    dropout: float = 0.25
    drop_path: float = 0.0
    head: Head = "flatten"
    head_dropout: float = 0.0
    hidden: tuple[int, ...] = (1024, 512)
    hidden_norm: bool = False
    hidden_dropout: float = 0.0
    initialisation: Literal["default", "he"] = "default"
    zero_last: bool = False
    mirror: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "model")
        check_choice("model.activation", self.activation, ACTIVATIONS)
        check_numbers(self, "model", 1, WIDTH, "stem_stride", "growth")
        check_numbers(self, "model", 0, WIDTH, "stem", "squeeze")
        check_numbers(self, "model", 1, DEPTH, "convolutions")
        check_numbers(self, "model", 0, _EXPANSION, "expansion", whole=False, strict=True)
        for name, sides in (("kernel", self.kernels), ("stem_kernel", (self.stem_kernel,))):
            if any(not 1 <= side <= SIDE or side % 2 == 0 for side in sides):
                raise ConfigError(
                    f"model.{name} must be odd, so that maps keep their size, and at most {SIDE:,}, "
                    f"got {getattr(self, name)}"
                )
        check_shares(self, "model", "[0, 1)", "dropout", "drop_path", "head_dropout", "hidden_dropout")
        self._check_lists()
        self._check_norms()

    def _check_lists(self) -> None:
        if not self.channels:
            raise ConfigError("model.channels must name at least one block, got none; e.g. [32, 64, 128]")
        for name in ("channels", "hidden", "units", "pool"):
            value = getattr(self, name)
            for number in (value,) if isinstance(value, int) else value:
                if not 1 <= number <= WIDTH:
                    raise ConfigError(
                        f"model.{name} must hold numbers of at least 1 and at most {WIDTH:,}, got {number}"
                    )
        for name, layers in (("units", sum(self.unit_counts) * self.convolutions), ("hidden", len(self.hidden))):
            if layers > DEPTH:
                raise ConfigError(f"model.{name} must give at most {DEPTH:,} layers, got {layers:,}; lower it")
        if len(self.kernels) != self.convolutions:
            raise ConfigError(
                f"model.kernel must be one number or one for each of the {self.convolutions} convolutions of a unit, "
                f"got {len(self.kernels)}"
            )
        for name in ("units", "pool"):
            value = getattr(self, name)
            if not isinstance(value, int) and len(value) != len(self.channels):
                raise ConfigError(
                    f"model.{name} must be one number or one for each of the {len(self.channels)} blocks of "
                    f"model.channels, got {len(value)}"
                )

    def _check_norms(self) -> None:
        if self.hidden and self.hidden_norm and self.norm in ("none", "instance"):
            reason = "has nothing to average over in a vector" if self.norm == "instance" else "is no norm"
            raise ConfigError(
                f"model.hidden_norm takes model.norm, which {reason}, got norm = {self.norm}; "
                "set model.hidden_norm=false or choose batch, layer, group or weight"
            )
        if self.skip == "dense" and self.pooling == "stride":
            raise ConfigError(
                "model.skip = dense keeps maps of one size side by side, got model.pooling = stride; "
                "set model.pooling to average, max or none"
            )
        if self.order == "pre" and not self.stem:
            raise ConfigError(
                "model.order = pre would activate the pixels before any convolution, got model.stem = 0; "
                "set model.stem to some channels, e.g. 32"
            )
        if self.zero_last and (self.norm == "weight" or self.skip != "residual"):
            raise ConfigError(
                "model.zero_last needs residual units and kernels that may be 0, "
                f"got model.skip = {self.skip} and model.norm = {self.norm}; set model.zero_last=false"
            )
        if self.drop_path and self.skip != "residual":
            raise ConfigError(
                f"model.drop_path needs a path round each unit, got model.skip = {self.skip}; set model.skip=residual"
            )

    @property
    def unit_counts(self) -> tuple[int, ...]:
        """Units of each block.

        >>> ConvNetConfig(units=2).unit_counts
        (2, 2, 2)
        """
        return (self.units,) * len(self.channels) if isinstance(self.units, int) else self.units

    @property
    def kernels(self) -> tuple[int, ...]:
        """Of each convolution of a unit.

        >>> ConvNetConfig(convolutions=2).kernels, ConvNetConfig(convolutions=2, kernel=(1, 3)).kernels
        ((3, 3), (1, 3))
        """
        return (self.kernel,) * self.convolutions if isinstance(self.kernel, int) else self.kernel

    @property
    def pools(self) -> tuple[int, ...]:
        """By how much each block makes its maps smaller.

        >>> ConvNetConfig(pool=(1, 2, 2)).pools, ConvNetConfig(pooling="none").pools
        ((1, 2, 2), (1, 1, 1))
        """
        if self.pooling == "none":
            return (1,) * len(self.channels)
        return (self.pool,) * len(self.channels) if isinstance(self.pool, int) else self.pool
