"""A recurrent encoder-decoder as ONNX graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.onnx.graph import BOOL, FLOAT, INT, Graph, array
from thalweg.energies.onnx.sequences import Graphs, finish
from thalweg.energies.seq2seq.model import Seq2Seq
from thalweg.errors import ConfigError
from thalweg.layers.recurrent import Recurrent, ResetBeforeGRU

# Torch's order of an LSTM's gates is input, forget, cell, output, ONNX's input, output, forget, cell; of a GRU's
# reset, update, candidate against update, reset, candidate.
_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "gru-reset-before": (1, 0, 2)}


def build(model: Seq2Seq) -> Graphs:
    """The graphs of a model of gated cells.

    >>> from thalweg.energies import Seq2SeqConfig
    >>> build(Seq2Seq(Seq2SeqConfig(hidden=4, embedding=4), source_size=7, target_size=7)).state
    ('hidden', 'cell')
    """
    config = model.config
    if not config.has_bare_gates:
        raise ConfigError(
            "ONNX export is of lstm, gru and gru-reset-before cells with nothing round them, got "
            f"cell={config.cell}, residual={config.residual}, norm={config.norm}; export another model"
        )
    if not config.has_softmax:
        raise ConfigError(f"ONNX export is of softmax attention, got model.attention_map={config.attention_map}")
    state = ("hidden", "cell") if config.cell == "lstm" else ("hidden",)
    memory = () if config.attention == "none" else ("keys", "values", "mask")
    return Graphs(_encoder(model, state).model(), _step(model, state).model(), memory, state, None)


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


def _run(
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


def _encoder(model: Seq2Seq, state: tuple[str, ...]) -> Graph:
    config, graph = model.config, Graph("encoder")
    tokens, lengths = graph.input("tokens", INT, ["B", "S"]), graph.input("lengths", INT, ["B"])
    read = tokens
    if config.reverse_source:
        read = graph.op("ReverseSequence", tokens, lengths, batch_axis=0, time_axis=1)
    x = graph.turned(graph.op("Gather", graph.constant(model.source_embedding.weight), read), 1, 0, 2)
    counts = graph.op("Cast", lengths, to=graph.onnx.TensorProto.INT32)
    finals: list[list[str]] = []
    for layer in range(config.encoder_layers):
        outputs, *last = _run(graph, model.encoder, layer, x, counts)
        x = graph.shaped(graph.turned(outputs, 0, 2, 1, 3), 0, 0, -1)
        finals.append(last)
    L, H = config.decoder_layers, config.hidden
    for n, (name, parts) in enumerate(zip(state, zip(*finals, strict=True), strict=True)):
        last = graph.turned(graph.op("Concat", *parts, axis=0), 1, 0, 2)
        if model.bridge is not None:
            bridge: Any = model.bridge[n]
            last = graph.layer(graph.shaped(last, 0, -1), bridge)
            last = graph.shaped(graph.op("Tanh", last) if n == 0 else last, 0, L, H)
        graph.output(name, last, FLOAT, ["B", L, H])
    if config.attention != "none":
        _memorise(graph, model, graph.turned(x, 1, 0, 2), graph.mask(tokens, lengths))
    return graph


def _memorise(graph: Graph, model: Seq2Seq, values: str, mask: str) -> None:
    H, width = model.config.hidden, model.encoder.width
    if model.folded:
        values, width = graph.op("Add", graph.cut(values, 0, H, 2), graph.cut(values, H, 2 * H, 2)), H
    keys = values if model.attention.score == "dot" else graph.layer(values, model.attention.key)
    graph.output("keys", keys, FLOAT, ["B", "S", H])
    graph.output("values", values, FLOAT, ["B", "S", width])
    graph.output("mask", mask, BOOL, ["B", "S"])


def _step(model: Seq2Seq, state: tuple[str, ...]) -> Graph:
    config, graph = model.config, Graph("step")
    L, H = config.decoder_layers, config.hidden
    tokens = graph.input("tokens", INT, ["R"])
    x = graph.unsqueezed(graph.op("Gather", graph.constant(model.target_embedding.weight), tokens), 0)
    olds = [graph.turned(graph.input(name, FLOAT, ["R", L, H]), 1, 0, 2) for name in state]
    news: list[list[str]] = []
    for layer in range(L):
        first = tuple(graph.cut(old, layer, layer + 1, 0) for old in olds)
        outputs, *last = _run(graph, model.decoder, layer, x, "", first)
        x = graph.squeezed(outputs, 1)
        news.append(last)
    for name, parts in zip(state, zip(*news, strict=True), strict=True):
        new = graph.turned(graph.op("Concat", *parts, axis=0), 1, 0, 2)
        graph.output(f"new.{name}", new, FLOAT, ["R", L, H])
    own = graph.squeezed(x, 0)
    if config.attention != "none":
        own = _attend(graph, model, own)
    elif model.combine is not None:
        own = graph.layer(own, model.combine)
    finish(graph, graph.layer(own, model.output), model.never, model.unread, model.vocab_size)
    return graph


def _attend(graph: Graph, model: Seq2Seq, own: str) -> str:
    """What decoder states ``(R, H)`` and what they read make for the output layer."""
    H, attention = model.config.hidden, model.attention
    width = H if model.folded else model.encoder.width
    keys = graph.input("keys", FLOAT, ["R", "S", H])
    values = graph.input("values", FLOAT, ["R", "S", width])
    mask = graph.input("mask", BOOL, ["R", "S"])
    if attention.score == "additive":
        met = graph.op("Tanh", graph.op("Add", graph.unsqueezed(graph.layer(own, attention.query), 1), keys))
        scores = graph.squeezed(graph.layer(met, attention.combine), 2)
    else:
        scores = graph.squeezed(graph.op("MatMul", keys, graph.unsqueezed(own, 2)), 2)
    weights = graph.op("Softmax", graph.masked(scores, mask), axis=-1)
    context = graph.squeezed(graph.op("MatMul", graph.unsqueezed(weights, 1), values), 1)
    assert model.combine is not None
    return graph.op("Tanh", graph.layer(graph.op("Concat", own, context, axis=1), model.combine))
