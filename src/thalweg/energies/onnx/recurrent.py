"""A recurrent encoder-decoder as ONNX graphs."""

from __future__ import annotations

from typing import Any

from thalweg.energies.onnx.graph import BOOL, FLOAT, INT, Graph
from thalweg.energies.onnx.layers import advance, read, state_of
from thalweg.energies.onnx.sequences import Graphs, finish
from thalweg.energies.seq2seq.model import Seq2Seq
from thalweg.errors import ConfigError


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
    state = state_of(config.cell)
    memory = () if config.attention == "none" else ("keys", "values", "mask")
    return Graphs(_encoder(model, state).model(), _step(model).model(), memory, state, None)


def _encoder(model: Seq2Seq, state: tuple[str, ...]) -> Graph:
    config, graph = model.config, Graph("encoder")
    tokens, lengths = graph.input("tokens", INT, ["B", "S"]), graph.input("lengths", INT, ["B"])
    inputs = tokens
    if config.reverse_source:
        inputs = graph.op("ReverseSequence", tokens, lengths, batch_axis=0, time_axis=1)
    x = graph.turned(graph.op("Gather", graph.constant(model.source_embedding.weight), inputs), 1, 0, 2)
    x, finals = read(graph, model.encoder, x, lengths)
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


def _step(model: Seq2Seq) -> Graph:
    config, graph = model.config, Graph("step")
    tokens = graph.input("tokens", INT, ["R"])
    own = advance(graph, model.decoder, graph.op("Gather", graph.constant(model.target_embedding.weight), tokens))
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
