"""Which gates and activations are at the ends of their range, where their derivative is nearly nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.layer_names import naming_of
from thalweg.diagnostics.unrolling import LayerTrace, unrolled
from thalweg.energies.convnet.model import ConvNet
from thalweg.layers.blocks import Highway
from thalweg.layers.convolution import ConvHighway, SqueezeExcite
from thalweg.layers.transformer import FeedForward

# A sigmoid within this of 0 or 1, or a tanh within it of -1 or 1, counts as saturated: a slope below 0.05 (0.1).
EDGE = 0.05

# Those with two ends, at which values stay; a rectifier is meant to be flat on one side, of it dead units count.
TWO_SIDED = ("sigmoid", "tanh")

_KINDS: dict[type[nn.Module], str] = {
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.ELU: "elu",
}
_FUNCTIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}

# A layer, gate and kind; values and which of them are at the lower and at the upper end.
_Kept = tuple[tuple[str, str, str], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Saturation:
    """How one gate or activation of a layer is used on a batch.

    Attributes:
        name: of the layer; gate: what of it (``forget``, ``candidate``, ``activation`` ...); kind: ``sigmoid``,
            ``tanh`` or ``relu``; or a smooth rectifier, ``gelu``, ``silu``, ``mish`` or ``elu``.
        low: share of values below 0.05 (sigmoid), below -0.95 (tanh), or 0 (relu); of slopes within 0.05 of 0 (smooth).
        high: share above 0.95; 0 for rectifiers.
        stuck: share of units at an end of the range on the whole batch: of a rectifier, dead units, which learn
            nothing. A unit of maps is a channel, and its values are those of all positions.
        mean: of all values.

    >>> Saturation("encoder 1", "forget", "sigmoid", 0.1, 0.3, 0.02, 0.6).share
    0.4
    """

    name: str
    gate: str
    kind: str
    low: float
    high: float
    stuck: float
    mean: float

    @property
    def share(self) -> float:
        """Of values whose derivative is nearly nothing; a relu is meant to be 0 often, of it dead units count."""
        return self.low + self.high if self.kind in TWO_SIDED else self.stuck


@dataclass(frozen=True)
class SaturationReport:
    """Rows by layer and gate; ``str`` is a table.

    >>> lstm = nn.LSTM(2, 3, batch_first=True)
    >>> report = saturation(lstm, lambda m: m(torch.zeros(1, 4, 2)))
    >>> [(row.gate, row.share) for row in report.rows]
    [('input', 0.0), ('forget', 0.0), ('candidate', 0.0), ('output', 0.0)]
    """

    rows: tuple[Saturation, ...]

    def worst(self, count: int = 5) -> tuple[Saturation, ...]:
        """The rows with most values at an end."""
        return tuple(sorted(self.rows, key=lambda row: -row.share)[:count])

    def __str__(self) -> str:
        """A row a gate of a layer."""
        widest = max([len(row.name) for row in self.rows] + [5]) + 2
        head = f"{'layer':<{widest}}{'gate':<12}{'kind':<9}{'low':>8}{'high':>8}{'stuck':>8}{'mean':>8}"
        lines = [
            f"{row.name:<{widest}}{row.gate:<12}{row.kind:<9}{row.low:>8.1%}{row.high:>8.1%}{row.stuck:>8.1%}"
            f"{row.mean:>8.2f}"
            for row in self.rows
        ]
        return "\n".join([head, *lines])


def saturation(model: nn.Module, call: Callable[[nn.Module], Any]) -> SaturationReport:
    r"""Shares of saturated values in every gate and activation that a model uses on a batch.

    Looked at are the gates of recurrent layers (recomputed from their weights, step by step), the gates of highway
    blocks and of squeeze and excitation, the insides of Transformer layers, and modules ``nn.Sigmoid``, ``nn.Tanh``,
    ``nn.ReLU``, ``nn.GELU``, ``nn.SiLU``, ``nn.Mish`` and ``nn.ELU``; maps ``(B, C, H, W)`` have a unit a channel.
    Padding does not count. Where :math:`\sigma` lies within 0.05 of its ends its derivative is below 0.05, where it is
    tanh below 0.1.

    Args:
        model: in the mode it should be looked at.
        call: runs the model it is given on a batch; what it returns is not used.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.tensor([[1.0], [0.0]])), net[0].bias.copy_(torch.tensor([0.0, -1.0]))
    >>> print(saturation(net, lambda m: m(torch.tensor([[1.0], [-1.0]]))))
    layer    gate        kind          low    high   stuck    mean
    layer 2  activation  relu        75.0%    0.0%   50.0%    0.25
    """
    kept: list[_Kept] = []
    handles = []
    naming, maps = naming_of(model), isinstance(model, ConvNet)
    for name, part in model.named_modules():
        for module, gate, kind in _watched(name, part):
            own = _inside(name, gate) if maps else gate
            handles.append(module.register_forward_hook(_keeper(kept, (naming(f"{name}.x"), own, kind), module)))
    try:
        with torch.no_grad(), unrolled(model) as traces:
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    rows = [
        _row(trace.name, gate, kind, *_rows(values, kind)) for trace in traces for gate, kind, values in _gates(trace)
    ]
    merged: dict[tuple[str, str, str], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for key, found in kept:
        merged.setdefault(key, []).append(found)
    rows += [_row(*key, *(torch.cat(column) for column in zip(*parts, strict=True))) for key, parts in merged.items()]
    return SaturationReport(tuple(rows))


def _watched(name: str, part: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """The modules whose outputs to take, what each is called, and which function it is or is followed by."""
    if isinstance(part, (Highway, ConvHighway)):
        return [(part.gate, "carry", "sigmoid")]
    if isinstance(part, SqueezeExcite):
        return [(part.up, "gate", "sigmoid")]
    if isinstance(part, FeedForward) and part.activation == "relu":
        return [(part.up, "feedforward", "relu")]
    # A combination of state and context is activated where it is used (Luong et al., 2015).
    if name.split(".")[-1] == "combine" and isinstance(part, nn.Linear):
        return [(part, "activation", "tanh")]
    kind = _KINDS.get(type(part))
    return [] if kind is None else [(part, "activation", kind)]


def _inside(name: str, gate: str) -> str:
    """Which of the activations of an image network's layer it is: its path from the layer on."""
    words = [word for word in name.split(".") if word not in ("blocks", "inner", "classifier") and not word.isdigit()]
    return ".".join(words if gate == "activation" else [*words, gate])


def _keeper(kept: list[_Kept], key: tuple[str, str, str], module: nn.Module) -> Any:
    kind, made = key[2], type(module) in _KINDS  # else its output has yet to go through the function

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values = output.detach() if made else _FUNCTIONS[kind](output.detach())
        flat = None if kind in _FUNCTIONS else _slopes(module, inputs[0]).abs() < EDGE
        kept.append((key, _rows(values, kind, flat)))

    return hook


def _slopes(module: nn.Module, x: Tensor) -> Tensor:
    """Derivatives of an activation, number by number."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        # Not the module itself: that would call its hooks again.
        (found,) = torch.autograd.grad(module.forward(point).sum(), point)
    return found


def _rows(values: Tensor, kind: str, flat: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Values, and which are at the lower and at the upper end, ``(N, H)`` each; units of maps are channels."""
    low = {"sigmoid": values < EDGE, "tanh": values < EDGE - 1}.get(kind, values <= 0) if flat is None else flat
    high = values > 1 - EDGE if kind in TWO_SIDED else torch.zeros_like(low)
    parts = (part.movedim(1, -1) if part.dim() == 4 else part for part in (values, low, high))
    values, low, high = (part.flatten(0, -2) for part in parts)
    return values, low, high


def _gates(trace: LayerTrace) -> list[tuple[str, str, Tensor]]:
    """Gates of a recurrent layer at real positions with their kinds, ``(N, H)`` each."""
    found = []
    for gate, values in trace.gates.items():
        other = "relu" if trace.cell == "rnn-relu" else "tanh"
        kind = "sigmoid" if LayerTrace.is_sigmoid(gate) else other
        found.append((gate, kind, values.flatten(0, 1) if trace.mask is None else values[trace.mask]))
    return found


def _row(name: str, gate: str, kind: str, values: Tensor, low: Tensor, high: Tensor) -> Saturation:
    """Of values ``(N, H)``."""
    if not values.numel():
        return Saturation(name, gate, kind, 0.0, 0.0, 0.0, 0.0)
    stuck = (low | high).all(0).double().mean()
    shares = (float(low.double().mean()), float(high.double().mean()), float(stuck))
    return Saturation(name, gate, kind, *shares, float(values.double().mean()))
