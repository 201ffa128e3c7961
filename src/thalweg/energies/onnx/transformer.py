"""A Transformer as ONNX graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thalweg.energies.onnx.graph import BOOL, FLOAT, INT, Graph
from thalweg.energies.onnx.sequences import Graphs, finish
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError
from thalweg.layers.multihead import CrossAttention, SelfAttention
from thalweg.layers.positions import RelativeBias
from thalweg.layers.transformer import FeedForward, TransformerLayer, TransformerStack

REACH = 512
"""Positions that a graph holds vectors of: symbols of a source, or of a target; together in a causal model."""


def build(model: Transformer) -> Graphs:
    """The graphs of an encoder-decoder, or of a causal model that reads its source once.

    >>> from thalweg.energies import TransformerConfig
    >>> shape = TransformerConfig(width=4, heads=2, feedforward=4, encoder_layers=1, decoder_layers=1)
    >>> build(Transformer(shape, source_size=7, target_size=7)).memory
    ('memory', 'mask')
    """
    config = model.config
    if config.pointer:
        raise ConfigError("ONNX export is of models that write from their own alphabet, got model.pointer")
    if not config.has_softmax:
        raise ConfigError(f"ONNX export is of softmax attention, got model.attention_map={config.attention_map}")
    reach = min(REACH, config.max_positions) if config.positions == "learned" else REACH
    memory = ("memory", "mask", "start") if model.causal else ("memory", "mask")
    made = _Maker(model, reach)
    return Graphs(made.encoder().model(), made.step().model(), memory, ("past",), reach)


class _Maker:
    """Both graphs of one model; ``(R, L, S, 2D)`` are keys and values of L layers."""

    def __init__(self, model: Transformer, reach: int):
        self.model, self.config, self.reach = model, model.config, reach
        self.heads, self.inner = model.config.heads, model.config.attention_width
        self.layers = len(model.decoder.each)

    def encoder(self) -> Graph:
        model, graph = self.model, Graph("encoder")
        tokens, lengths = graph.input("tokens", INT, ["B", "S"]), graph.input("lengths", INT, ["B"])
        mask = graph.mask(tokens, lengths)
        places, start = self._places(graph, tokens, mask, lengths)
        x = self._embedded(graph, tokens, places, source=True)
        if model.encoder is not None:
            seen = graph.unsqueezed(mask, 1, 2)
            x, _ = self._stack(graph, model.encoder, x, places, seen, model.source_bias)
            memories = [graph.layer(x, self._cross(layer).memory) for layer in model.decoder.each]
        else:
            steps = graph.numbers(graph.size(tokens, 1))
            said = graph.op("LessOrEqual", graph.unsqueezed(steps, 0), graph.unsqueezed(steps, 1))
            _, memories = self._stack(graph, model.decoder, x, places, graph.unsqueezed(said, 0, 1), None)
            graph.output("start", start, INT, ["B"])
        sizes = ["B", self.layers, "S", 2 * self.inner]
        graph.output("memory", self._together(graph, memories), FLOAT, sizes)
        graph.output("mask", mask, BOOL, ["B", "S"])
        batch = graph.unsqueezed(graph.size(tokens, 0), 0)
        shape = graph.op("Concat", batch, graph.constant([self.layers, 0, 2 * self.inner]), axis=0)
        graph.output("past", graph.op("ConstantOfShape", shape), FLOAT, ["B", self.layers, "T", 2 * self.inner])
        return graph

    def step(self) -> Graph:
        model, graph, L, width = self.model, Graph("step"), self.layers, 2 * self.inner
        tokens = graph.input("tokens", INT, ["R"])
        memory = graph.input("memory", FLOAT, ["R", L, "S", width])
        mask = graph.input("mask", BOOL, ["R", "S"])
        past = graph.input("past", FLOAT, ["R", L, "T", width])
        done = graph.unsqueezed(graph.size(past, 2), 0)
        place = graph.unsqueezed(done, 0)  # (1, 1)
        if model.causal:
            place = graph.op("Add", graph.unsqueezed(graph.input("start", INT, ["R"]), 1), place)
        x = self._embedded(graph, graph.unsqueezed(tokens, 1), place, source=False)
        bias = None
        if model.target_bias is not None:
            keys = graph.unsqueezed(graph.numbers(graph.squeezed(graph.op("Add", done, graph.constant([1])), 0)), 0)
            bias = self._bias(graph, model.target_bias, place, keys)
        seen = graph.unsqueezed(mask, 1, 2)
        if model.causal:
            own = graph.op(
                "Concat", graph.unsqueezed(graph.size(tokens, 0), 0), graph.op("Add", done, graph.constant([1])), axis=0
            )
            said = graph.op("Cast", graph.op("ConstantOfShape", own), to=graph.onnx.TensorProto.BOOL)
            said = graph.op("Concat", mask, graph.op("Not", said), axis=1)
            seen = graph.unsqueezed(said, 1, 2)
        kept = []
        for n, layer in enumerate(model.decoder.each):
            before, read = (graph.squeezed(graph.cut(part, n, n + 1, 1), 1) for part in (past, memory))
            x, own = self._decoder_layer(graph, layer, x, place, before, read, seen, bias)
            kept.append(own)
        graph.output("new.past", self._together(graph, kept), FLOAT, ["R", L, "T + 1", width])
        x = x if model.decoder.norm is None else graph.norm(x, model.decoder.norm)
        x = graph.squeezed(x, 1)
        if model.block is not None:
            first, _, norm = model.block
            assert isinstance(first, nn.Linear)
            x = graph.norm(self._gelu(graph, graph.layer(x, first)), norm)
        finish(graph, graph.layer(x, model.output), model.never, model.unread, model.vocab_size)
        return graph

    def _decoder_layer(
        self,
        graph: Graph,
        layer: TransformerLayer,
        x: str,
        place: str,
        past: str,
        memory: str,
        seen: str,
        bias: str | None,
    ) -> tuple[str, str]:
        """One position ``(R, 1, D)`` through a layer, and its keys and values after those before it."""
        inner = graph.norm(x, layer.attention_norm) if layer.first else x
        queries, new = self._projected(graph, layer.attention, inner, place)
        own = graph.op("Concat", past, new, axis=1)
        if layer.cross is None:
            both = graph.op("Concat", memory, own, axis=1)
            change = self._attended(graph, layer.attention, queries, both, seen, bias)
        else:
            change = self._attended(graph, layer.attention, queries, own, None, bias)
        x = self._add(graph, layer, x, change, layer.attention_norm)
        if layer.cross is not None:
            inner = graph.norm(x, layer.cross_norm) if layer.first else x
            read = self._attended(graph, layer.cross, graph.layer(inner, layer.cross.query), memory, seen, None)
            x = self._add(graph, layer, x, read, layer.cross_norm)
        return self._fed_forward(graph, layer, x), own

    def _stack(
        self, graph: Graph, stack: TransformerStack, x: str, places: str, seen: str, relative: RelativeBias | None
    ) -> tuple[str, list[str]]:
        """Whole sequences ``(B, S, D)`` through layers without cross-attention, and each one's keys and values."""
        bias = None if relative is None else self._bias(graph, relative, places, places)
        kept = []
        for layer in stack.each:
            inner = graph.norm(x, layer.attention_norm) if layer.first else x
            queries, memory = self._projected(graph, layer.attention, inner, places)
            change = self._attended(graph, layer.attention, queries, memory, seen, bias)
            x = self._fed_forward(graph, layer, self._add(graph, layer, x, change, layer.attention_norm))
            kept.append(memory)
        return (x if stack.norm is None else graph.norm(x, stack.norm)), kept

    def _fed_forward(self, graph: Graph, layer: TransformerLayer, x: str) -> str:
        block: FeedForward = layer.feedforward
        inner = graph.norm(x, layer.feedforward_norm) if layer.first else x
        up = graph.layer(inner, block.up)
        if block.gate is not None:
            gate = graph.layer(inner, block.gate)
            up = graph.op(
                "Mul", self._silu(graph, gate) if block.activation == "swiglu" else self._gelu_tanh(graph, gate), up
            )
        else:
            made = {"relu": lambda g, y: g.op("Relu", y), "gelu": self._gelu, "silu": self._silu}
            up = made[block.activation](graph, up)
        return self._add(graph, layer, x, graph.layer(up, block.down), layer.feedforward_norm)

    def _add(self, graph: Graph, layer: TransformerLayer, x: str, change: str, norm: nn.Module) -> str:
        x = graph.op("Add", x, change)
        return x if layer.first else graph.norm(x, norm)

    @staticmethod
    def _silu(graph: Graph, x: str) -> str:
        return graph.op("Mul", x, graph.op("Sigmoid", x))

    @staticmethod
    def _gelu(graph: Graph, x: str) -> str:
        share = graph.op("Add", graph.op("Erf", graph.op("Mul", x, graph.constant(0.5**0.5))), graph.constant(1.0))
        return graph.op("Mul", graph.op("Mul", x, graph.constant(0.5)), share)

    @staticmethod
    def _gelu_tanh(graph: Graph, x: str) -> str:
        cube = graph.op("Mul", graph.op("Mul", x, x), graph.op("Mul", x, graph.constant(0.044715)))
        inside = graph.op("Mul", graph.op("Add", x, cube), graph.constant((2 / torch.pi) ** 0.5))
        share = graph.op("Add", graph.op("Tanh", inside), graph.constant(1.0))
        return graph.op("Mul", graph.op("Mul", x, graph.constant(0.5)), share)

    @staticmethod
    def _cross(layer: TransformerLayer) -> CrossAttention:
        assert layer.cross is not None
        return layer.cross

    @staticmethod
    def _together(graph: Graph, memories: list[str]) -> str:
        return graph.op("Concat", *(graph.unsqueezed(memory, 1) for memory in memories), axis=1)

    def _places(self, graph: Graph, tokens: str, mask: str, lengths: str) -> tuple[str, str]:
        """Positions ``(B or 1, S)`` of source symbols, and ``(B,)`` that of bos after each, in a causal model."""
        if self.model.is_feature is None:
            return graph.unsqueezed(graph.numbers(graph.size(tokens, 1)), 0), lengths
        tags = graph.op("Gather", graph.constant(self.model.is_feature.cpu().numpy()), tokens)
        counted = graph.op("Cast", graph.op("Not", tags), to=graph.onnx.TensorProto.INT64)
        places = graph.op("Mul", graph.op("CumSum", counted, graph.constant(1)), counted)
        real = graph.op("Mul", counted, graph.op("Cast", mask, to=graph.onnx.TensorProto.INT64))
        own = graph.op("ReduceSum", real, graph.constant([1]), keepdims=0)
        return places, graph.op("Add", own, graph.constant([1]))

    def _embedded(self, graph: Graph, tokens: str, places: str, *, source: bool) -> str:
        model, config = self.model, self.config
        table = (model.source_embedding if source else model.target_embedding).weight.detach()
        if source and model.is_feature is not None:
            assert model.feature_type is not None
            table = table + model.is_feature.unsqueeze(1) * model.feature_type.detach()
        if config.embedding_scale:
            table = table * config.width**0.5
        x = graph.op("Gather", graph.constant(table), tokens)
        # Padding alone stands beyond the reach.
        within = graph.op("Min", places, graph.constant(self.reach - 1))
        vectors = model.position_table(self.reach, source=source)
        if vectors is not None:
            x = graph.op("Add", x, graph.op("Gather", graph.constant(vectors[: self.reach]), within))
        norm = model.source_norm if source else model.target_norm
        return x if norm is None else graph.norm(x, norm)

    def _projected(self, graph: Graph, attention: SelfAttention, x: str, places: str) -> tuple[str, str]:
        """Queries ``(B, T, D)``, and keys and values ``(B, T, 2D)``."""
        D, projected = self.inner, graph.layer(x, attention.project)
        queries, memory = graph.cut(projected, 0, D, 2), graph.cut(projected, D, 3 * D, 2)
        turns = self.model.rotary_turns(self.reach, torch.arange(self.reach, device=self.model.device))
        if turns is None:
            return queries, memory
        within = graph.op("Min", places, graph.constant(self.reach - 1))
        cos, sin = (graph.unsqueezed(graph.op("Gather", graph.constant(part), within), 2) for part in turns)
        keys, values = graph.cut(memory, 0, D, 2), graph.cut(memory, D, 2 * D, 2)
        queries, keys = (self._rotated(graph, part, cos, sin) for part in (queries, keys))
        return queries, graph.op("Concat", keys, values, axis=2)

    def _rotated(self, graph: Graph, x: str, cos: str, sin: str) -> str:
        half = self.inner // self.heads // 2
        x = graph.shaped(x, 0, 0, self.heads, -1)
        first, second = graph.cut(x, 0, half, 3), graph.cut(x, half, 2 * half, 3)
        one = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
        two = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
        return graph.shaped(graph.op("Concat", one, two, axis=3), 0, 0, -1)

    def _attended(
        self, graph: Graph, attention: Any, queries: str, memory: str, seen: str | None, bias: str | None
    ) -> str:
        D = self.inner
        keys, values = graph.cut(memory, 0, D, 2), graph.cut(memory, D, 2 * D, 2)
        q, k, v = (graph.shaped(part, 0, 0, self.heads, -1) for part in (queries, keys, values))
        scaled = graph.op("Mul", graph.turned(q, 0, 2, 1, 3), graph.constant((D // self.heads) ** -0.5))
        scores = graph.op("MatMul", scaled, graph.turned(k, 0, 2, 3, 1))
        scores = scores if bias is None else graph.op("Add", scores, bias)
        scores = scores if seen is None else graph.masked(scores, seen)
        read = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.turned(v, 0, 2, 1, 3))
        return graph.layer(graph.shaped(graph.turned(read, 0, 2, 1, 3), 0, 0, -1), attention.out)

    def _bias(self, graph: Graph, relative: RelativeBias, queries: str, keys: str) -> str:
        """``(B or 1, H, T, S)`` of positions of queries and keys; a table of all distances within reach."""
        far = self.reach - 1
        distances = torch.arange(-far, far + 1, device=relative.weight.device)
        table: Tensor = relative.weight.detach()[relative.bucket(distances)]
        apart = graph.op("Sub", graph.unsqueezed(keys, 1), graph.unsqueezed(queries, 2))
        apart = graph.op("Clip", apart, graph.constant(-far), graph.constant(far))
        index = graph.op("Add", apart, graph.constant(far))
        return graph.turned(graph.op("Gather", graph.constant(table), index), 0, 3, 1, 2)
