"""Layers of image networks: norms over channels, squeeze and excitation, and units with a path round them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.errors import ConfigError
from thalweg.layers.blocks import CARRY, Chained, Residual
from thalweg.layers.norms import BatchNorm
from thalweg.limits import check_choice

ImageNorm = Literal["none", "batch", "layer", "instance", "group", "weight"]
"""Kinds of normalisation of maps; ``weight`` acts on kernels, the others on activations."""

Skip = Literal["none", "residual", "highway", "dense"]
"""What goes round a unit: nothing, its input, as much of it as a gate lets by; or the input stays beside the output."""

Order = Literal["post", "pre"]
"""Convolution, norm, activation; or norm, activation, convolution (He et al., 2016b)."""

# Activations by name.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "mish": nn.Mish,
}

# Those that never fall, so that they may change places with taking a maximum.
RISING = frozenset({"relu", "tanh", "leaky_relu", "elu"})

# Most groups that ``group`` makes of the channels.
_GROUPS = 8


class ImageBatchNorm(BatchNorm):
    """Batch norm of ``(B, C, H, W)``: each channel over all positions of all images (Ioffe and Szegedy, 2015).

    As torch's ``BatchNorm2d``, except that while training a single value of a channel, which has variance 0, becomes
    the shift where torch refuses.

    >>> ImageBatchNorm(1)(torch.tensor([[[[1.0, 3.0]]]])).flatten().round(decimals=2).tolist()
    [-1.0, 1.0]
    >>> ImageBatchNorm(1)(torch.tensor([[[[5.0]]]])).item()
    0.0
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(B, C, H, W)`` -> the same shape; a mask is not taken."""
        if mask is not None:
            raise ConfigError("batch norm of images takes no mask, got one; crop or pad the images to one size")
        if not (self.training or self.running_mean is None) or input.numel() > input.shape[1]:
            return _BatchNorm.forward(self, input)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of places; torch's one-dimensional norm would refuse four dimensions."""


def image_norm(name: ImageNorm, channels: int) -> nn.Module:
    r"""The norm of that name for maps ``(B, C, H, W)``, with a learnt scale and shift for each channel.

    .. math:: y = \gamma_c \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta_c

    with mean and variance over: ``batch``, a channel in all images; ``layer``, all channels and positions of an image;
    ``instance``, a channel of an image; ``group``, each of up to 8 equal groups of two or more channels of an image (Wu
    and He, 2018). ``none`` and ``weight`` are the identity here. ``layer``, ``instance`` and ``group`` are torch's
    group norm with 1, C or that many groups.

    >>> image_norm("layer", 16).num_groups, image_norm("none", 16)
    (1, Identity())
    >>> image_norm("bach", 16)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: norm `bach` is not known; did you mean `batch`?
    """
    check_choice("norm", name, get_args(ImageNorm))
    if name == "batch":
        return ImageBatchNorm(channels)
    shared = max(g for g in range(1, _GROUPS + 1) if channels % g == 0 and (g == 1 or channels >= 2 * g))
    groups = {"layer": 1, "instance": channels, "group": shared}
    return _GroupNorm(groups[name], channels) if name in groups else nn.Identity()


class _GroupNorm(nn.GroupNorm):
    """Torch's, without its refusal of a single value, which becomes the shift."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class Separable(nn.Sequential):
    """A convolution of each channel alone, then one of 1 x 1 over channels (Sifre, 2014; Chollet, 2017).

    K^2 C + C C' weights instead of K^2 C C'.

    >>> sum(p.numel() for p in Separable(16, 32, 3, bias=False).parameters())
    656
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = True):
        pad = kernel // 2
        super().__init__(
            nn.Conv2d(inputs, inputs, kernel, stride, pad, groups=inputs, bias=False),
            nn.Conv2d(inputs, outputs, 1, bias=bias),
        )


def convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = True, separable: bool = False
) -> nn.Module:
    """A convolution, padded so that a stride of 1 keeps the size: ``(B, C, H, W)`` to ``(B, C', H / s, W / s)``.

    Sizes are rounded up. With ``separable``, kernels beyond 1 x 1 on more than 3 channels are :class:`Separable`.

    >>> convolution(3, 8, 3, stride=2)(torch.zeros(1, 3, 5, 4)).shape
    torch.Size([1, 8, 3, 2])
    """
    if separable and kernel > 1 and inputs > 3:
        return Separable(inputs, outputs, kernel, stride=stride, bias=bias)
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)


class SqueezeExcite(nn.Module):
    r"""Scales every channel by a gate that sees the means of all channels (Hu et al., 2018).

    .. math:: y_c = x_c\, \sigma(W_2 \max(0, W_1 \bar x + b_1) + b_2)_c

    Args:
        channels: C; hidden: rows of W_1.

    Time O(H W C + C hidden) an image.

    >>> layer = SqueezeExcite(16, 4)
    >>> layer(torch.zeros(2, 16, 5, 5)).shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 16, 5, 5]), 148)
    """

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.down, self.up = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` -> the same shape."""
        gate = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class DropPath(nn.Module):
    """Leaves out a unit's change for whole images with probability p while training (Huang et al., 2016).

    Those kept are scaled by 1/(1 - p), so that the mean is the same.

    >>> _ = torch.manual_seed(0)
    >>> sorted(set(DropPath(0.5)(torch.ones(50, 2)).flatten().tolist())), DropPath(0.5).eval()(torch.ones(1)).item()
    ([0.0, 2.0], 1.0)
    """

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"drop path must be in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """``(B, ...)`` -> the same shape."""
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self.p
        return x * (kept.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        """What torch prints inside the brackets."""
        return f"p={self.p:g}"


class ConvHighway(Residual):
    r"""y = (1 - i) x + i f(x), i = sigma(W_g * x + b_g), the gate a 1 x 1 convolution (Srivastava et al., 2015).

    Args:
        inner: f; inputs, outputs: its channels; stride: its stride; shortcut: as in :class:`Residual`.

    >>> block = ConvHighway(nn.Conv2d(4, 4, 3, padding=1), 4, 4)
    >>> block(torch.zeros(2, 4, 5, 5)).shape, block.gate.bias.tolist()
    (torch.Size([2, 4, 5, 5]), [-2.0, -2.0, -2.0, -2.0])
    """

    def __init__(
        self, inner: nn.Module, inputs: int, outputs: int, *, stride: int = 1, shortcut: nn.Module | None = None
    ):
        super().__init__(inner, shortcut=shortcut)
        self.gate = nn.Conv2d(inputs, outputs, 1, stride)
        assert self.gate.bias is not None
        nn.init.constant_(self.gate.bias, CARRY)

    def join(self, x: Tensor, change: Tensor) -> Tensor:
        """(1 - i) x + i f(x), as x + i (f(x) - x)."""
        carried = self.carried(x)
        return carried + torch.sigmoid(self.gate(x)) * (change - carried)


class Dense(Chained):
    """y = (x, f(x)) along channels: what was made before stays as it is, and is read by all that follows.

    Huang et al. (2017).

    >>> Dense(nn.Conv2d(4, 2, 3, padding=1))(torch.zeros(1, 4, 5, 5)).shape
    torch.Size([1, 6, 5, 5])
    """

    def join(self, x: Tensor, change: Tensor) -> Tensor:
        """x and f(x), one after the other."""
        return torch.cat((x, change), 1)


def connected_maps(name: Skip, inner: nn.Module, inputs: int, outputs: int, *, stride: int = 1) -> Chained:
    """A unit of that name round f on maps; what goes round is pooled by ``stride`` and mapped to the new channels.

    ``dense`` keeps the input beside f(x), at a stride of 1. The pooling is an average and the map a 1 x 1 convolution
    without a bias (He et al., 2019, section 4).

    >>> unit = connected_maps("residual", convolution(4, 8, 3, stride=2), 4, 8, stride=2)
    >>> unit(torch.zeros(1, 4, 5, 5)).shape, unit.shortcut(torch.zeros(1, 4, 5, 5)).shape
    (torch.Size([1, 8, 3, 3]), torch.Size([1, 8, 3, 3]))
    """
    check_choice("skip", name, get_args(Skip))
    if name in ("none", "dense"):
        return Chained(inner) if name == "none" else Dense(inner)
    parts: list[nn.Module] = [] if stride == 1 else [nn.AvgPool2d(stride, ceil_mode=True)]
    if inputs != outputs:
        parts.append(nn.Conv2d(inputs, outputs, 1, bias=False))
    shortcut = nn.Sequential(*parts) if parts else None
    if name == "residual":
        return Residual(inner, shortcut=shortcut)
    return ConvHighway(inner, inputs, outputs, stride=stride, shortcut=shortcut)
