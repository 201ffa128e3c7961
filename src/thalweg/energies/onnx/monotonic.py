"""A transducer with hard monotonic attention as ONNX graphs."""

from __future__ import annotations

from torch import Tensor, nn

from thalweg.energies.monotonic.alignments import NEVER
from thalweg.energies.monotonic.model import Monotonic
from thalweg.energies.onnx.graph import BOOL, FLOAT, INT, Graph
from thalweg.energies.onnx.layers import advance, read, state_of
from thalweg.energies.onnx.sequences import Graphs, finish
from thalweg.layers.spelling import SpeltEmbedding, SpeltLinear


def build(model: Monotonic) -> Graphs:
    """The graphs of a model of any order.

    >>> from thalweg.energies import MonotonicConfig
    >>> build(Monotonic(MonotonicConfig(hidden=4, embedding=4), source_size=7, target_size=7)).state
    ('hidden', 'cell', 'arrivals')
    """
    state = (*state_of(model.config.cell), "arrivals")
    return Graphs(_encoder(model).model(), _step(model).model(), ("memory", "mask"), state, None)


def _matrix(layer: nn.Module) -> Tensor:
    """A row for each symbol, with what it shares with others."""
    matrix = layer.whole() if isinstance(layer, SpeltEmbedding | SpeltLinear) else layer.weight
    assert isinstance(matrix, Tensor)
    return matrix


def _encoder(model: Monotonic) -> Graph:
    config, graph = model.config, Graph("encoder")
    L, H, V = config.decoder_layers, config.hidden, model.vocab_size
    tokens, lengths = graph.input("tokens", INT, ["B", "S"]), graph.input("lengths", INT, ["B"])
    batch = graph.unsqueezed(graph.size(tokens, 0), 0)
    column = graph.op("Expand", graph.constant([[model.pad]]), graph.op("Concat", batch, graph.constant([1]), axis=0))
    tokens = graph.op("Concat", tokens, column, axis=1)
    places, ends = graph.unsqueezed(graph.numbers(graph.size(tokens, 1)), 0), graph.unsqueezed(lengths, 1)
    tokens = graph.op("Where", graph.op("Equal", places, ends), graph.constant(model.eos), tokens)
    mask = graph.op("LessOrEqual", places, ends)
    x = graph.op("Gather", graph.constant(_matrix(model.source_embedding)), tokens)
    outputs, _ = read(graph, model.encoder, graph.turned(x, 1, 0, 2), graph.op("Add", lengths, graph.constant(1)))
    memory = graph.op("Concat", graph.turned(outputs, 1, 0, 2), x, axis=2)
    memory = graph.op("Where", graph.unsqueezed(mask, 2), memory, graph.constant(0.0))
    graph.output("memory", graph.layer(memory, model.join_source), FLOAT, ["B", "S + 1", H])
    graph.output("mask", mask, BOOL, ["B", "S + 1"])
    nothing = graph.op("ConstantOfShape", graph.op("Concat", batch, graph.constant([L, H]), axis=0))
    for name in state_of(config.cell):
        graph.output(name, nothing, FLOAT, ["B", L, H])
    # As if every symbol had been given by the first position: whichever is fed first, the reader stands there.
    first = graph.op("Where", graph.op("Equal", places, graph.constant(0)), graph.constant(0.0), graph.constant(NEVER))
    shape = graph.op("Concat", graph.op("Shape", tokens), graph.constant([V]), axis=0)
    graph.output("arrivals", graph.op("Expand", graph.unsqueezed(first, 2), shape), FLOAT, ["B", "S + 1", V])
    return graph


def _step(model: Monotonic) -> Graph:
    H, V, graph = model.config.hidden, model.vocab_size, Graph("step")
    tokens = graph.input("tokens", INT, ["R"])
    memory, mask = graph.input("memory", FLOAT, ["R", "S + 1", H]), graph.input("mask", BOOL, ["R", "S + 1"])
    own = advance(graph, model.decoder, graph.op("Gather", graph.constant(_matrix(model.target_embedding)), tokens))
    arrivals = graph.input("arrivals", FLOAT, ["R", "S + 1", V])
    belief = graph.op("LogSoftmax", _at(graph, arrivals, tokens, mask), axis=1)  # (R, S)
    own = graph.unsqueezed(graph.layer(own, model.join_target), 1)
    z = graph.op("Tanh", graph.op("Add", own, memory))  # (R, S, H)
    moves = _walk(graph, model, z, mask) if model.config.order == "edits" else _moves(graph, model, z, mask)
    belief = graph.log_sum_exp(graph.op("Add", graph.unsqueezed(belief, 2), moves), 1)
    bias = model.output.bias.detach().float() + model.never.float().clamp(min=NEVER)
    emissions = graph.op("LogSoftmax", graph.linear(z, _matrix(model.output), bias), axis=-1)
    arrivals = graph.op("Add", graph.unsqueezed(belief, 2), emissions)
    graph.output("new.arrivals", arrivals, FLOAT, ["R", "S + 1", V])
    finish(graph, graph.log_sum_exp(arrivals, 1), model.never, model.unread, V)
    return graph


def _at(graph: Graph, arrivals: str, tokens: str, mask: str) -> str:
    """``(R, S)`` of ``arrivals (R, S, V)`` with each row's own symbol."""
    shape = graph.op("Concat", graph.op("Shape", mask), graph.constant([1]), axis=0)
    index = graph.op("Expand", graph.unsqueezed(tokens, 1, 2), shape)
    return graph.squeezed(graph.op("GatherElements", arrivals, index, axis=2), 2)


def _lengths(graph: Graph, mask: str) -> tuple[str, str]:
    """``(S, S)`` how far each position is from each before it, and ``(R, S, S)`` which of them a move may reach."""
    places = graph.numbers(graph.size(mask, 1))
    lengths = graph.op("Sub", places, graph.unsqueezed(places, 1))
    ahead = graph.op("GreaterOrEqual", lengths, graph.constant(0))
    return lengths, graph.op("And", ahead, graph.unsqueezed(mask, 1))


def _moves(graph: Graph, model: Monotonic, z: str, mask: str) -> str:
    """``(R, S, S)`` where the reader goes, as in :func:`thalweg.energies.monotonic.alignments.move_log_probs`."""
    never = graph.constant(NEVER)
    lengths, reached = _lengths(graph, mask)
    scores = graph.turned(graph.layer(z, model.pull), 0, 2, 1)  # (R, 1, S)
    if model.jumps is not None:
        kinds = graph.op("Clip", lengths, graph.constant(0), graph.constant(model.config.jumps - 1))
        index = graph.op("Expand", kinds, graph.op("Shape", reached))
        scores = graph.op("Add", scores, graph.op("GatherElements", graph.layer(z, model.jumps), index, axis=2))
    moves = graph.op("LogSoftmax", graph.op("Where", reached, scores, never), axis=-1)
    return graph.op("Where", reached, moves, never)


def _walk(graph: Graph, model: Monotonic, z: str, mask: str) -> str:
    """``(R, S, S)`` where the reader walks, as in :func:`thalweg.energies.monotonic.alignments.walk_log_probs`."""
    lengths, reached = _lengths(graph, mask)
    real = graph.op("Cast", mask, to=graph.onnx.TensorProto.INT64)
    count = graph.op("ReduceSum", real, graph.constant([1]), keepdims=1)
    # Padding counts as the last position too: no move leads there.
    last = graph.op("Equal", graph.op("CumSum", real, graph.constant(1)), count)
    pull = graph.layer(z, model.pull)
    stay, skip = (graph.squeezed(graph.cut(pull, n, n + 1, 2), 2) for n in range(2))
    stays, leaves = _log_sigmoids(graph, stay)
    skips, stops = _log_sigmoids(graph, skip)
    stays, stops = (graph.op("Where", last, graph.constant(0.0), part) for part in (stays, stops))
    passed = graph.op("CumSum", skips, graph.constant(1))
    before = graph.op("Sub", leaves, passed)
    until = graph.op("Add", graph.op("Sub", passed, skips), stops)
    steps = graph.op("Add", graph.unsqueezed(before, 2), graph.unsqueezed(until, 1))
    onward = graph.op("Greater", lengths, graph.constant(0))
    scores = graph.op("Where", onward, steps, graph.unsqueezed(stays, 2))
    return graph.op("Where", reached, scores, graph.constant(NEVER))


def _log_sigmoids(graph: Graph, x: str) -> tuple[str, str]:
    """The logarithms of the sigmoids of x and of -x."""
    yes = graph.op("Neg", graph.op("Softplus", graph.op("Neg", x)))
    return yes, graph.op("Neg", graph.op("Softplus", x))
