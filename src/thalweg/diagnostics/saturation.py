"""Which gates and activations are at the ends of their range, where their derivative is nearly nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.gradient_flow import layer_of
from thalweg.diagnostics.unrolling import LayerTrace, unrolled
from thalweg.layers.blocks import Highway
from thalweg.layers.transformer import FeedForward

__all__ = ["EDGE", "Saturation", "SaturationReport", "saturation"]

# A sigmoid within this of 0 or 1, or a tanh within it of -1 or 1, counts as saturated: a slope below 0.05 (0.1).
EDGE = 0.05

_KINDS: dict[type[nn.Module], str] = {nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.ReLU: "relu"}
_FUNCTIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}


@dataclass(frozen=True)
class Saturation:
    """How one gate or activation of a layer is used on a batch.

    Attributes:
        name: of the layer; gate: what of it (``forget``, ``candidate``, ``activation`` ...); kind: ``sigmoid``,
            ``tanh`` or ``relu``.
        low: share of values below 0.05 (sigmoid), below -0.95 (tanh), or 0 (relu).
        high: share above 0.95; 0 for relu.
        stuck: share of units at an end of the range on the whole batch: for a relu, dead units, which learn nothing.
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
        return self.stuck if self.kind == "relu" else self.low + self.high


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
    blocks, the insides of Transformer layers, and modules ``nn.Sigmoid``, ``nn.Tanh`` and ``nn.ReLU``. Padding does not
    count. Where :math:`\sigma` lies within 0.05 of its ends its derivative is below 0.05, where it is tanh below 0.1.

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
    kept: list[tuple[str, str, str, Tensor]] = []
    handles = []
    for name, part in model.named_modules():
        watched = _watched(name, part)
        if watched is not None:
            module, gate, kind = watched
            handles.append(module.register_forward_hook(_keeper(kept, layer_of(f"{name}.x"), gate, kind, module)))
    try:
        with torch.no_grad(), unrolled(model) as traces:
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    rows = [_row(trace.name, gate, *values) for trace in traces for gate, values in _gates(trace)]
    merged: dict[tuple[str, str, str], list[Tensor]] = {}
    for name, gate, kind, values in kept:
        merged.setdefault((name, gate, kind), []).append(values.flatten(0, -2))
    rows += [_row(name, gate, kind, torch.cat(parts)) for (name, gate, kind), parts in merged.items()]
    return SaturationReport(tuple(rows))


def _watched(name: str, part: nn.Module) -> tuple[nn.Module, str, str] | None:
    """The module whose output to take, what it is called, and which function follows it."""
    if isinstance(part, Highway):
        return part.gate, "carry", "sigmoid"
    if isinstance(part, FeedForward) and part.activation == "relu":
        return part.up, "feedforward", "relu"
    # A combination of state and context is activated where it is used (Luong et al., 2015).
    if name.split(".")[-1] == "combine" and isinstance(part, nn.Linear):
        return part, "activation", "tanh"
    kind = _KINDS.get(type(part))
    return None if kind is None else (part, "activation", kind)


def _keeper(kept: list[tuple[str, str, str, Tensor]], name: str, gate: str, kind: str, module: nn.Module) -> Any:
    made = type(module) in _KINDS  # else its output has yet to go through the function

    def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
        values = output.detach()
        kept.append((name, gate, kind, values if made else _FUNCTIONS[kind](values)))

    return hook


def _gates(trace: LayerTrace) -> list[tuple[str, tuple[str, Tensor]]]:
    """Gates of a recurrent layer at real positions, ``(N, H)`` each."""
    found = []
    for gate, values in trace.gates.items():
        other = "relu" if trace.cell == "rnn-relu" else "tanh"
        kind = "sigmoid" if LayerTrace.is_sigmoid(gate) else other
        found.append((gate, (kind, values.flatten(0, 1) if trace.mask is None else values[trace.mask])))
    return found


def _row(name: str, gate: str, kind: str, values: Tensor) -> Saturation:
    """Of values ``(N, H)``."""
    if not values.numel():
        return Saturation(name, gate, kind, 0.0, 0.0, 0.0, 0.0)
    values = values.double()
    low = {"sigmoid": values < EDGE, "tanh": values < EDGE - 1, "relu": values <= 0}[kind]
    high = torch.zeros_like(low) if kind == "relu" else values > 1 - EDGE
    stuck = (low | high).all(0).double().mean()
    return Saturation(
        name, gate, kind, float(low.double().mean()), float(high.double().mean()), float(stuck), float(values.mean())
    )
