"""Recurrent layers as parts of ONNX graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.onnx.graph import FLOAT, Graph, array
from thalweg.layers.recurrent import Recurrent, ResetBeforeGRU

# Torch's order of an LSTM's gates is input, forget, cell, output, ONNX's input, output, forget, cell; of a GRU's
# reset, update, candidate against update, reset, candidate.
_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "gru-reset-before": (1, 0, 2)}


def state_of(cell: str) -> tuple[str, ...]:
    """Names of the parts of a cell's state.

    >>> state_of("lstm"), state_of("gru")
    (('hidden', 'cell'), ('hidden',))
    """
    return ("hidden", "cell") if cell == "lstm" else ("hidden",)


def _weights(stack: Recurrent, layer: int, end: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input matrix, recurrent matrix and both biases of a layer's direction, in ONNX's order of gates."""
    core: Any = stack.core
    if isinstance(core, ResetBeforeGRU):
        place = f"{layer}_{int(bool(end))}"
        fed, bias = getattr(core, f"input_{place}"), getattr(core, f"bias_{place}")
        past = torch.cat((getattr(core, f"gates_{place}"), getattr(core, f"candidate_{place}")))
        biases = (bias, torch.zeros_like(bias))
    else:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        fed, past, *biases = (getattr(core, f"{name}_l{layer}{end}") for name in names)
    order = _ORDER[stack.cell]

    def reordered(part: Tensor) -> np.ndarray:
        gates = np.split(array(part), len(order))
        return np.concatenate([gates[n] for n in order])

    return reordered(fed), reordered(past), np.concatenate([reordered(bias) for bias in biases])


def _layer(
    graph: Graph, stack: Recurrent, layer: int, x: str, lengths: str = "", first: tuple[str, ...] = ()
) -> list[str]:
    """A layer over ``x (T, R, D)``: outputs ``(T, directions, R, H)`` and last states ``(directions, R, H)``."""
    both = ("", "_reverse") if stack.bidirectional else ("",)
    sides = [_weights(stack, layer, end) for end in both]
    weights = [graph.constant(np.stack(parts)) for parts in zip(*sides, strict=True)]
    how: dict[str, Any] = {"hidden_size": stack.width // len(both)}
    how |= {"direction": "bidirectional" if len(both) == 2 else "forward"}
    if stack.cell == "lstm":
        return graph.ops("LSTM", x, *weights, lengths, *first, outputs=3, **how)
    how |= {"linear_before_reset": int(stack.cell == "gru")}
    return graph.ops("GRU", x, *weights, lengths, *first, outputs=2, **how)


def read(graph: Graph, stack: Recurrent, x: str, lengths: str) -> tuple[str, list[list[str]]]:
    """A stack over ``x (S, B, D)`` with ``lengths (B,)``: outputs ``(S, B, H * directions)``, each layer's last states.

    >>> graph = Graph("read")
    >>> x, lengths = graph.input("x", FLOAT, ["S", "B", 3]), graph.input("lengths", "INT64", ["B"])
    >>> _, finals = read(graph, Recurrent("lstm", 3, 4, layers=2), x, lengths)
    >>> [len(parts) for parts in finals]
    [2, 2]
    """
    counts = graph.op("Cast", lengths, to=graph.onnx.TensorProto.INT32)
    finals: list[list[str]] = []
    for layer in range(stack.layers):
        outputs, *last = _layer(graph, stack, layer, x, counts)
        x = graph.shaped(graph.turned(outputs, 0, 2, 1, 3), 0, 0, -1)
        finals.append(last)
    return x, finals


def advance(graph: Graph, stack: Recurrent, x: str) -> str:
    """One step of a decoder fed ``x (R, D)``: its output ``(R, H)``. Its state is given, and given back as ``new.``.

    >>> graph = Graph("step")
    >>> y = advance(graph, Recurrent("gru", 3, 4), graph.input("x", FLOAT, ["R", 3]))
    >>> [output.name for output in graph.model().graph.output]
    ['new.hidden']
    """
    state, L, H = state_of(stack.cell), stack.layers, stack.width
    olds = [graph.turned(graph.input(name, FLOAT, ["R", L, H]), 1, 0, 2) for name in state]
    x = graph.unsqueezed(x, 0)
    news: list[list[str]] = []
    for layer in range(L):
        first = tuple(graph.cut(old, layer, layer + 1, 0) for old in olds)
        outputs, *last = _layer(graph, stack, layer, x, "", first)
        x = graph.squeezed(outputs, 1)
        news.append(last)
    for name, parts in zip(state, zip(*news, strict=True), strict=True):
        new = graph.turned(graph.op("Concat", *parts, axis=0), 1, 0, 2)
        graph.output(f"new.{name}", new, FLOAT, ["R", L, H])
    return graph.squeezed(x, 0)
