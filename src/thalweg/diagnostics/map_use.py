"""How an image network is used: channels that do not vary, what its norms measure, how its layers stretch changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.diagnostics.jacobians import jacobian_spectrum
from thalweg.diagnostics.layer_names import map_layers, naming_of
from thalweg.diagnostics.normalisation import normalisation_statistics
from thalweg.energies.convnet.model import ConvNet

# A channel whose standard deviation is below this share of its layer's root mean square is the same on all images.
CONSTANT = 1e-3
# Maps of more numbers than this are not taken apart: Lanczos keeps some dozens of them.
WIDEST = 1 << 18
# Steps of Lanczos, two products each, and how exact its largest value need be.
STEPS, TOLERANCE = 24, 0.01
# Random directions by which the mean gain is estimated.
PROBES = 4


@dataclass(frozen=True)
class ChannelUse:
    """The outputs of one layer on a batch.

    Attributes:
        name, stack, depth: of the layer; channels: how many it has, of a hidden layer its units.
        constant: share of channels that hardly vary over images and positions: by less than a thousandth of the
            layer's root mean square.
        deviation: least and greatest standard deviation of a channel.

    >>> ChannelUse("convolutions 1", "convolutions", 1, 32, 0.25, (0.0, 1.5)).constant
    0.25
    """

    name: str
    stack: str
    depth: int
    channels: int
    constant: float
    deviation: tuple[float, float]


@dataclass(frozen=True)
class LayerStretch:
    """Singular values of the Jacobian of one layer alone, from the output of the layer before to its own.

    Attributes:
        name, stack, depth: of the layer; inputs, outputs: numbers of an image that it reads and gives.
        largest: the largest singular value; error: a singular value lies within this of it.
        mean: root mean square of all, an estimate from some random directions.

    >>> LayerStretch("convolutions 2", "convolutions", 2, 512, 512, 1.2, 0.01, 0.4).mean
    0.4
    """

    name: str
    stack: str
    depth: int
    inputs: int
    outputs: int
    largest: float
    error: float
    mean: float


@dataclass(frozen=True)
class NormUse:
    r"""What one norm of a network measures on a batch.

    Attributes:
        name: of the layer; norm: of the module; kind: ``batch``, or ``group``, as layer and instance norm
            of maps are.
        groups: means and variances that it takes.
        mean, deviation: least and greatest of what comes in; gain: of :math:`|\gamma| / \sqrt{\sigma^2 + \epsilon}`,
            by which changes are multiplied.
        dead: share of groups whose variance is below :math:`\epsilon`, in which noise is blown up.
        shift, scale: of batch norm, how its running statistics lie to those of the batch, in the middle of the
            channels: the distance of the means in standard deviations, and the ratio of the variances. NaN for others.

    >>> NormUse("convolutions 1", "norm", "batch", 8, (0.0, 1.0), (0.5, 2.0), (0.5, 2.0), 0.0, 0.1, 1.0).scale
    1.0
    """

    name: str
    norm: str
    kind: str
    groups: int
    mean: tuple[float, float]
    deviation: tuple[float, float]
    gain: tuple[float, float]
    dead: float
    shift: float
    scale: float


def run_layers(model: ConvNet, images: Tensor) -> list[Tensor]:
    """What each of :func:`~thalweg.diagnostics.layer_names.map_layers` gives; the last are the logits, -E.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=()), classes=3, channels=1, size=(8, 8)).eval()
    >>> images = torch.randn(2, 1, 8, 8)
    >>> outputs = run_layers(net, images)
    >>> [tuple(each.shape) for each in outputs], torch.equal(outputs[-1], -net(images))
    ([(2, 4, 4, 4), (2, 3)], True)
    """
    x, found = images.contiguous(memory_format=torch.channels_last), []
    for layer in map_layers(model):
        x = layer(x)
        found.append(x)
    return found


def channel_use(model: ConvNet, images: Tensor) -> tuple[ChannelUse, ...]:
    """Which channels of each layer, and units of each hidden layer, say nothing about the image.

    Args:
        model: in the mode it should be looked at.
        images: ``(B, C, H, W)``, at least 2.

    One pass forward.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=(), dropout=0), classes=2, channels=1, size=(8, 8))
    >>> with torch.no_grad():
    ...     _ = net.blocks[0].convolution.bias[:1].fill_(-100)
    >>> [(row.name, row.constant) for row in channel_use(net, torch.randn(8, 1, 8, 8))]
    [('convolutions 1', 0.25), ('classifier 1', 0.0)]
    """
    with torch.no_grad():
        outputs = run_layers(model, images)
    rows = []
    for layer, x in zip(map_layers(model), outputs, strict=True):
        x = x.double().flatten(2) if x.dim() > 2 else x.double().unsqueeze(2)
        deviation = x.var((0, 2), unbiased=False).sqrt()
        size = x.square().mean().sqrt()
        constant = float((deviation <= CONSTANT * size).double().mean())
        rows.append(ChannelUse(layer.name, layer.stack, layer.depth, x.shape[1], constant, _span(deviation)))
    return tuple(rows)


def layer_stretches(model: ConvNet, images: Tensor) -> tuple[LayerStretch, ...]:
    r"""Singular values of :math:`\partial x_l / \partial x_{l-1}` of every layer by itself, the median of the images.

    The largest by some steps of Lanczos, the root mean square from :math:`E\|J'u\|^2 = \|J\|_F^2` for random u.

    Args:
        model: in evaluation mode, for a batch norm that learns would mix the images.
        images: ``(B, C, H, W)``, a few.

    Layers that read or give more than 262,144 numbers an image, and values that are not finite, are left out. Some 50
    passes through each layer.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=()), classes=3, channels=1, size=(8, 8)).eval()
    >>> [(row.name, row.inputs, row.outputs) for row in layer_stretches(net, torch.randn(2, 1, 8, 8))]
    [('convolutions 1', 64, 64), ('classifier 1', 64, 3)]
    """
    with torch.no_grad():
        outputs = run_layers(model, images)
    rows = []
    for layer, x, y in zip(map_layers(model), [images, *outputs], outputs, strict=False):
        sizes = (x[0].numel(), y[0].numel())
        if max(sizes) > WIDEST or not bool(torch.isfinite(y).all()):
            continue

        def alone(flat: Tensor, layer: Any = layer, shape: torch.Size = x.shape) -> Tensor:
            return layer(flat.view(shape)).flatten(1)

        steps = min(STEPS, *sizes)
        found = jacobian_spectrum(alone, x.flatten(1), method="lanczos", max_steps=steps, tol=TOLERANCE)
        ends = (float(found.largest.median()), float(found.largest_error.median()))
        rows.append(LayerStretch(layer.name, layer.stack, layer.depth, *sizes, *ends, _mean_gain(alone, x.flatten(1))))
    return tuple(rows)


def _mean_gain(function: Callable[[Tensor], Tensor], point: Tensor) -> float:
    """Root mean square of the singular values, estimated; in the middle of the rows."""
    draw = torch.Generator().manual_seed(0)  # on the host, so that every device draws alike
    with torch.enable_grad():
        point = point.detach().clone().requires_grad_()
        value = function(point)
    if not value.requires_grad:
        return 0.0
    sums = torch.zeros(len(point), dtype=torch.float64, device=point.device)
    for _ in range(PROBES):
        u = torch.randn(value.shape, generator=draw).to(value)
        (back,) = torch.autograd.grad(value, point, u, retain_graph=True)
        sums += back.double().square().sum(1)
    return math.sqrt(float(sums.median()) / PROBES / min(point.shape[1], value.shape[1]))


def norm_use(model: nn.Module, call: Callable[[nn.Module], Any]) -> tuple[NormUse, ...]:
    """What every batch and group norm of a model measures on a batch.

    Args:
        model: in the mode it should be looked at; its running statistics change where it learns.
        call: runs the model it is given; what it returns is not used.

    >>> from thalweg.layers.convolution import image_norm
    >>> norm = image_norm("batch", 2).eval()
    >>> x = torch.tensor([[0.0, 1.0], [2.0, 1.0]])[:, :, None, None]
    >>> [(row.deviation, row.dead, round(row.shift, 3), row.scale) for row in norm_use(norm, lambda m: m(x))]
    [((0.0, 1.0), 0.5, 1.0, 1.0)]
    """
    rows: list[NormUse] = []
    naming = naming_of(model)

    def watch(name: str) -> Any:
        return lambda module, inputs: rows.append(_norm_row(naming(f"{name}.x"), name, module, inputs[0].detach()))

    handles = [
        part.register_forward_pre_hook(watch(name))
        for name, part in model.named_modules()
        if isinstance(part, (_BatchNorm, nn.GroupNorm))
    ]
    try:
        with torch.no_grad():
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(rows)


def _norm_row(layer: str, name: str, module: nn.Module, x: Tensor) -> NormUse:
    x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    B, C = x.shape[:2]
    batch = isinstance(module, _BatchNorm)
    assert isinstance(module, (_BatchNorm, nn.GroupNorm))
    x = x if batch else x.reshape(B, module.num_groups, -1)
    found = normalisation_statistics(x, "batch" if batch else "instance")
    gain = (found.variance + module.eps).rsqrt()
    if module.weight is not None:
        gain = (gain if batch else gain.repeat_interleave(C // module.num_groups, 1)) * module.weight.detach().abs()
    shift = scale = math.nan
    if batch and module.running_mean is not None and module.running_var is not None:
        deviation = (found.variance + module.eps).sqrt()
        shift = float(((module.running_mean - found.mean) / deviation).abs().median())
        scale = float(((module.running_var + module.eps) / (found.variance + module.eps)).median())
    return NormUse(
        name=layer,
        norm=".".join(word for word in name.split(".") if word not in ("inner", "blocks")),
        kind="batch" if batch else "group",
        groups=found.mean.numel(),
        mean=_span(found.mean),
        deviation=_span(found.variance.sqrt()),
        gain=_span(gain),
        dead=float((found.variance < module.eps).double().mean()),
        shift=shift,
        scale=scale,
    )


def _span(values: Tensor) -> tuple[float, float]:
    return float(values.amin()), float(values.amax())
