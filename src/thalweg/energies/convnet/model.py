"""Convolutional networks: the energy of a class given an image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thalweg.energies.convnet.config import ConvNetConfig, Head
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.blocks import Residual
from thalweg.layers.convolution import (
    ACTIVATIONS,
    RISING,
    DropPath,
    SqueezeExcite,
    connected_maps,
    convolution,
    image_norm,
)
from thalweg.layers.dropout import Dropout
from thalweg.layers.norms import normalisation, normalise_weights


class ConvNet(nn.Module):
    r"""The energy of each class given an image, lower is better.

    .. math:: E(x, y) = -\big(W h_L + b\big)_y, \qquad h_l = s(N(W_l h_{l-1} + b_l)),
              \qquad h_0 = \mathrm{head}(B_n(\dots B_1(\mathrm{stem}(x))))

    A block B is its units, pooling and dropout; a unit is ``x -> s(N(K * x + b))``, so many times, with whatever the
    config puts round it. p(y | x) = softmax(-E(x, .)). The defaults are LeCun's layout of convolution, activation and
    pooling; flattened, nearly all weights are in the first hidden layer, since it reads every pixel of every map.

    Args:
        config: the shape.
        classes: number of classes.
        channels: of an image: 3 for RGB, 1 for grey.
        size: (H, W) of the images in pixels.

    Cost: the sum over convolutions of H W K^2 C C' multiply-adds an image; ``thalweg.diagnostics.cost_table`` prints
    it by layer. Maps are kept with channels last in memory, which convolutions read faster. LeCun et al. (1998).

    >>> flat = ConvNet(ConvNetConfig(), classes=6, channels=3, size=(48, 48))
    >>> pooled = ConvNet(ConvNetConfig(norm="batch", hidden_norm=True, head="average"), classes=6)
    >>> [sum(p.numel() for p in model.parameters()) for model in (flat, pooled)]
    [5340742, 756742]
    >>> flat(torch.zeros(2, 3, 48, 48)).shape
    torch.Size([2, 6])
    """

    def __init__(self, config: ConvNetConfig, classes: int, channels: int = 3, size: tuple[int, int] = (48, 48)):
        super().__init__()
        if classes < 1 or channels < 1 or min(size) < 1:
            raise ConfigError(
                "a convolutional network needs at least 1 class, 1 channel and 1 x 1 pixels, "
                f"got {classes}, {channels} and {size[0]} x {size[1]}"
            )
        self.config, self.classes, self.channels = config, classes, channels
        self.size = (int(size[0]), int(size[1]))
        sizes = _sizes(config, self.size)
        width = config.stem or channels
        self.stem = _stem(config, channels) if config.stem else nn.Sequential()
        total, done = sum(config.unit_counts), 0
        blocks: list[nn.Module] = []
        for number, outputs in enumerate(config.channels):
            count = config.unit_counts[number]
            shares = [(done + 1 + i) / total for i in range(count)]
            blocks.append(_block(config, width, outputs, config.pools[number], shares))
            width, done = outputs, done + count
        self.blocks = nn.Sequential(*blocks)
        final = [("norm", image_norm(config.norm, width)), ("activation", _activation(config))]
        self.last = _named(final if config.order == "pre" else [])
        self.head = _MapHead(config.head, width)
        features = {"flatten": width * math.prod(sizes[-1]), "average_max": 2 * width}.get(config.head, width)
        self.classifier = _classifier(config, features, classes)
        _initialise(self, config)
        if config.norm == "weight":
            normalise_weights(self.blocks)
            normalise_weights(self.stem)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` -> the maps ``(B, C', H', W')`` that the head reads."""
        self._check(images)
        images = images.contiguous(memory_format=torch.channels_last)
        return self.last(self.blocks(self.stem(images)))

    def vectors(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` -> ``(B, D)``: what the head makes of the maps."""
        return self.head(self.maps(images))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` -> energies ``(B, classes)``, lower is better."""
        energies = -self.classifier(self.vectors(images))
        if self.config.mirror and not self.training:
            energies = (energies - self.classifier(self.vectors(images.flip(-1)))) / 2
        return energies

    def log_probs(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` -> log p(y | x) ``(B, classes)``, in float32 at least."""
        energies = self(images)
        return torch.log_softmax(-energies.to(torch.promote_types(energies.dtype, torch.float32)), -1)

    def _check(self, images: Tensor) -> None:
        H, W = self.size
        exact = self.config.head == "flatten"
        if images.dim() != 4 or images.shape[1] != self.channels or (exact and images.shape[2:] != self.size):
            place = f"{H}, {W}" if exact else "H, W"
            raise ShapeError(f"`images` must be (B, {self.channels}, {place}), got {tuple(images.shape)}")
        if not images.is_floating_point():
            raise ShapeError(f"`images` must be normalised floats, got {images.dtype}; divide by 255 first")

    def extra_repr(self) -> str:
        """Channels, size and classes, for ``print(model)``."""
        return f"{self.channels} x {self.size[0]} x {self.size[1]} -> {self.classes}"


class _MapHead(nn.Module):
    """Maps ``(B, C, H, W)`` to vectors ``(B, D)``."""

    def __init__(self, kind: Head, channels: int):
        super().__init__()
        self.kind = kind
        self.score = nn.Conv2d(channels, 1, 1) if kind == "attention" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "flatten":
            return x.flatten(1)
        if self.kind == "average":
            return x.mean((2, 3))
        if self.kind == "max":
            return x.amax((2, 3))
        if self.kind == "average_max":
            return torch.cat((x.mean((2, 3)), x.amax((2, 3))), 1)
        assert self.score is not None
        weights = self.score(x).flatten(2).softmax(-1)  # (B, 1, P)
        return (x.flatten(2) * weights).sum(-1)

    def extra_repr(self) -> str:
        return self.kind


class _MapDropout(Dropout):
    """Dropout that keeps channels last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def _sizes(config: ConvNetConfig, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes of the maps after the stem and after each block; refuses what leaves nothing."""
    step = config.stem_stride if config.stem else 1
    sizes = [(math.ceil(size[0] / step), math.ceil(size[1] / step))]
    for number, by in enumerate(config.pools):
        H, W = sizes[-1]
        # A convolution that takes steps is padded and rounds up; pooling windows that do not fit are left out.
        sizes.append((math.ceil(H / by), math.ceil(W / by)) if config.pooling == "stride" else (H // by, W // by))
        if min(sizes[-1]) < 1:
            raise ConfigError(
                f"block {number + 1} of model.channels gets maps of {H} x {W} from images of {size[0]} x {size[1]}, "
                f"too small to pool by {by}; use larger images, fewer channels, or model.pooling=stride"
            )
        if config.norm == "instance" and _least(config, sizes[-2], sizes[-1]) == 1:
            raise ConfigError(
                f"instance norm in block {number + 1} of model.channels sees maps of a single pixel, of which nothing "
                "is left; use larger images, fewer channels or another model.norm"
            )
    return sizes


def _least(config: ConvNetConfig, before: tuple[int, int], after: tuple[int, int]) -> int:
    """Pixels of the smallest map that a norm of a block sees."""
    return math.prod(after if config.pooling == "stride" or config.order == "pre" else before)


def _activation(config: ConvNetConfig) -> nn.Module:
    return ACTIVATIONS[config.activation]()


def _named(parts: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Parts in a row by their names, numbered where a name comes again; what does nothing is left out."""
    real = [(name, part) for name, part in parts if not isinstance(part, nn.Identity)]
    often, seen = Counter(name for name, _ in real), Counter[str]()
    row = nn.Sequential()
    for name, part in real:
        seen[name] += 1
        row.add_module(f"{name}{seen[name]}" if often[name] > 1 else name, part)
    return row


def _stem(config: ConvNetConfig, channels: int) -> nn.Sequential:
    """With a norm and an activation of its own only where none opens the first unit."""
    first = convolution(channels, config.stem, config.stem_kernel, stride=config.stem_stride, bias=config.bias)
    if config.order == "pre":
        return _named([("convolution", first)])
    return _named(
        [("convolution", first), ("norm", image_norm(config.norm, config.stem)), ("activation", _activation(config))]
    )


def _block(config: ConvNetConfig, inputs: int, outputs: int, by: int, shares: list[float]) -> nn.Sequential:
    """Units, pooling, dropout; ``shares`` are the units' shares of the largest ``drop_path``."""
    parts: list[tuple[str, nn.Module]] = []
    dense, width = config.skip == "dense", inputs
    for number, share in enumerate(shares):
        stride = by if number == 0 and config.pooling == "stride" else 1
        made = config.growth if dense else outputs
        parts += _unit(config, width, made, stride, config.drop_path * share)
        width = width + made if dense else made
    if width != outputs:
        parts += _step(config, width, outputs, 1)
    if by > 1 and config.pooling in ("max", "average"):
        pool = nn.MaxPool2d(by) if config.pooling == "max" else nn.AvgPool2d(by)
        # The largest of rising values is the value of the largest: the activation then has 1/by^2 as much to do.
        rises = config.pooling == "max" and config.activation in RISING and parts[-1][0] == "activation"
        parts.insert(len(parts) - 1 if rises else len(parts), ("pool", pool))
    if config.dropout:
        parts.append(("dropout", _MapDropout(config.dropout)))
    return _named(parts)


def _unit(config: ConvNetConfig, inputs: int, outputs: int, stride: int, drop: float) -> list[tuple[str, nn.Module]]:
    """What ``skip`` goes round; without one, its parts."""
    parts: list[tuple[str, nn.Module]] = []
    # After a sum the activation comes behind it, so that the path round the unit is not cut twice.
    behind = config.order == "post" and config.skip == "residual"
    inner = max(1, round(config.expansion * outputs))
    for number, kernel in enumerate(config.kernels):
        last = number == config.convolutions - 1
        step = _step(config, inner if number else inputs, outputs if last else inner, kernel, 1 if number else stride)
        parts += step[:-1] if behind and last else step
    if config.squeeze:
        parts.append(("squeeze", SqueezeExcite(outputs, max(1, outputs // config.squeeze))))
    if drop:
        parts.append(("drop_path", DropPath(drop)))
    if config.skip == "none":
        return parts
    unit = connected_maps(config.skip, _named(parts), inputs, outputs, stride=stride)
    return [("unit", unit), ("activation", _activation(config))] if behind else [("unit", unit)]


def _step(
    config: ConvNetConfig, inputs: int, outputs: int, kernel: int, stride: int = 1
) -> list[tuple[str, nn.Module]]:
    """A convolution with its norm and activation, behind it or before it."""
    layer = convolution(inputs, outputs, kernel, stride=stride, bias=config.bias, separable=config.separable)
    pre = config.order == "pre"
    own = [("norm", image_norm(config.norm, inputs if pre else outputs)), ("activation", _activation(config))]
    return [*own, ("convolution", layer)] if pre else [("convolution", layer), *own]


def _classifier(config: ConvNetConfig, features: int, classes: int) -> nn.Sequential:
    parts: list[tuple[str, nn.Module]] = []
    if config.head_dropout:
        parts.append(("head_dropout", Dropout(config.head_dropout)))
    for width in config.hidden:
        linear = nn.Linear(features, width)
        parts.append(
            ("hidden", normalise_weights(linear) if config.hidden_norm and config.norm == "weight" else linear)
        )
        if config.hidden_norm:
            # The batch norm of vectors takes a single row too.
            norm = normalisation("batch", width) if config.norm == "batch" else image_norm(config.norm, width)
            parts.append(("norm", norm))
        parts.append(("activation", _activation(config)))
        if config.hidden_dropout:
            parts.append(("dropout", Dropout(config.hidden_dropout)))
        features = width
    return _named([*parts, ("output", nn.Linear(features, classes))])


def _initialise(model: ConvNet, config: ConvNetConfig) -> None:
    if config.initialisation == "he":
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                outgoing = part.out_channels // part.groups * part.weight[0, 0].numel()
                nn.init.normal_(part.weight, std=math.sqrt(2 / outgoing))
    for part in model.modules() if config.zero_last else ():
        if isinstance(part, Residual):
            last = [p for p in part.inner.modules() if isinstance(p, nn.Conv2d | nn.GroupNorm | nn.BatchNorm1d)][-1]
            nn.init.zeros_(last.weight)
            if last.bias is not None:
                nn.init.zeros_(last.bias)
