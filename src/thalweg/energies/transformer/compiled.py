"""A Transformer as a list of operations on buffers, for searches in one compiled call."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.inference.search.compiled import CompiledPlan
from thalweg.kernels import dispatch
from thalweg.kernels.fixed_beam import Beam, start
from thalweg.layers.low_precision import ReducedLinear
from thalweg.layers.norms import Normalisation
from thalweg.layers.padded import Padded, checked
from thalweg.layers.transformer import TransformerLayer

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer

__all__ = ["CompiledTransformer", "compiled_plan"]

MANY_ROWS = 32  # from here on it pays to lay weights out in panels for every search


class CompiledTransformer:
    """Search over A sources of S symbols by A * W rows; see :mod:`thalweg.kernels.cpu.search_program`.

    Args:
        model: in evaluation mode; its weights are read where they are.
        items, width: A and W; places: S; capacity: T; k: answers an item.
    """

    def __init__(self, model: Transformer, items: int, width: int, places: int, capacity: int, k: int):
        self._model = weakref.ref(model)  # whoever keeps this object must not keep the model alive
        config, kind = model.config, self.kind_of(model)
        assert kind is not None
        self.ops: Any = dispatch.search_kernels(torch.device("cpu"))
        self.D, self.F, self.heads = config.width, config.feedforward, config.heads
        self.A = config.attention_width
        self.rows, self.places = items * width, places
        self.beam = Beam.empty(items, width, k, capacity, torch.device("cpu"))
        self.lineage = torch.zeros(self.rows, capacity, dtype=torch.long)
        self.lengths = torch.ones(items, dtype=torch.long)
        self.sources = torch.arange(items).repeat_interleave(places)  # of every place
        self.items = torch.arange(items).repeat_interleave(width)  # of every row
        self.inputs = torch.zeros(items * places, self.D)
        self.positions = torch.zeros(items * places, dtype=torch.long)
        self.zeros = torch.zeros(max(self.rows, items * places), self.D)
        self.logits, self.bias = torch.zeros(self.rows, model.vocab_size), torch.zeros(model.vocab_size)
        self.memories = [torch.zeros(items * places, 2 * self.A) for _ in model.decoder.layers]
        self.caches = [torch.zeros(capacity, self.rows, 2 * self.A) for _ in model.decoder.layers]
        self.distances = None if model.target_bias is None else torch.zeros(self.heads, capacity)
        self.encodes = self.encoder_serves(model)
        self.angles = None
        if config.positions == "rotary":
            reach = max(capacity, places) + 1
            turns = model.rotary_turns(reach, torch.arange(reach))
            assert turns is not None
            self.angles = tuple(part.contiguous() for part in turns)
        self.packed: dict[Tensor, Tensor] = {}
        self.barred = torch.zeros(model.vocab_size)
        self.barred[list(getattr(model, "barred", ()))] = 1.0
        searched = (self.beam, self.logits, self.lineage, self.items, self.barred if self.barred.any() else None)
        before, each = self._encoder(model) if self.encodes else [], self._decoder(model, capacity)
        self.search = self.ops.Search(kind, before, items * places, each, self.rows, *searched)

    @staticmethod
    def kind_of(model: Transformer) -> torch.dtype | None:
        """The type of all linear weights, if it is one that is served; None for a model that is not served."""
        plain = not (model.causal or model.pointer or model.training) and getattr(model, "barred", ()) is not None
        config = model.config
        if not plain or not config.has_softmax or model.target_embedding.weight.dtype != torch.float32:
            return None
        if config.norm_of_decoder not in ("layer", "rms"):
            return None
        kinds = set()
        for part in model.modules():
            if isinstance(part, ReducedLinear):
                kinds.add(part.stored.dtype)
            elif isinstance(part, nn.Linear):
                kinds.add(part.weight.dtype)
        places = model.target_positions
        known = len(kinds) == 1 and kinds <= {torch.float32, torch.bfloat16, torch.int8}
        return kinds.pop() if known and (places is None or places.weight.dtype is torch.float32) else None

    @staticmethod
    def encoder_serves(model: Transformer) -> bool:
        """Whether the encoder too is in the compiled call; any other runs by itself before it."""
        config = model.config
        usual = config.encoder_norm == "layer" and config.attention_width == config.width
        return usual and config.positions != "relative"

    def load(self, source: Padded) -> None:
        """Put sources where they are read; what is left of the buffers is a source of one symbol."""
        model = self._model()
        assert model is not None
        B, S = source.tokens.shape
        if self.encodes:
            x, positions = model.embed_source(source.tokens)
            self.inputs.view(-1, self.places, self.D)[:B, :S] = x
            self.positions.view(-1, self.places)[:B, :S] = positions
        else:
            for memory, found in zip(self.memories, model.encode(source).memories, strict=True):
                memory.view(-1, self.places, 2 * self.A)[:B, :S] = found.flatten(2)
        if self.distances is not None and model.target_bias is not None:
            steps = torch.arange(self.distances.size(1)).unsqueeze(0)
            self.distances.copy_(model.target_bias(steps, steps[:, :1]).view_as(self.distances))
        self.lengths[:B] = source.lengths
        self.lengths[B:] = 1
        for weight, panels in self.packed.items():  # the weights may have changed
            self.ops.pack(weight.detach(), panels)
        bias = model.never + model.unread
        torch.add(bias, model.output.bias, out=self.bias) if model.output.bias is not None else self.bias.copy_(bias)

    def run(self, count: int, bos: int, **request: Any) -> None:
        """Search the first ``count`` items."""
        start(self.beam, torch.tensor([count], dtype=torch.int32), bos)
        self.search.run(count, **request)

    def _linear(self, layer: Any, x: Tensor, out: Tensor, *, relu: bool = False, bias: Tensor | None = None) -> tuple:
        reduced = isinstance(layer, ReducedLinear)
        weight, scale = (layer.stored, layer.scale) if reduced else (layer.weight, None)
        bias = layer.bias if bias is None else bias
        (outer, inner), kind = weight.shape, self.ops.LINEAR
        if not reduced and len(x) > MANY_ROWS and outer % self.ops.PANEL == 0:
            kind, own = self.ops.PANELS, weight
            weight = self.packed.setdefault(own, self.ops.pack(own.detach()))
        return (
            *(kind, out, out.stride(0) * 4, x, x.stride(0) * 4, weight.detach(), inner, outer),
            *(0 if scale is None else scale, 0 if bias is None else bias.detach(), int(relu)),
        )

    def _norm(self, norm: nn.Module, x: Tensor, residual: Tensor, out: Tensor, total: Tensor) -> tuple:
        if isinstance(norm, Normalisation):
            norm = norm.layer
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        bias = norm.bias.detach() if isinstance(norm, nn.LayerNorm) and norm.bias is not None else 0
        kind = self.ops.NORM if isinstance(norm, nn.LayerNorm) else self.ops.RMS
        return (kind, out, total, x, residual, norm.weight.detach(), bias, float(norm.eps), self.D)

    def _encoder(self, model: Transformer) -> list[tuple]:
        assert model.encoder is not None
        D, rows, ops = self.D, len(self.inputs), self.ops
        streams = _Streams(rows, D, D, self.F, self.zeros[:rows])
        layers, program = model.encoder.each, []
        h, residual = self._first(layers[0], self.inputs, streams, program)
        for n, layer in enumerate(layers):
            projected, read = streams.projected, streams.read
            program.append(self._linear(layer.attention.project, h, projected))
            if self.angles is not None:
                turned = (2 * self.heads, D // self.heads, *self.angles, self.positions)
                program.append((ops.ROTATE, projected, 3 * D * 4, *turned))
            factor = float((D // self.heads) ** -0.5)
            program.append((ops.SCALE, projected, 3 * D * 4, D, factor))
            keys = projected.data_ptr() + D * 4
            each = self.heads << 32 | D // self.heads
            keys_at = (keys, self.places * 3 * D, 3 * D)
            program.append(
                (ops.SOURCE, read, projected, 3 * D, *keys_at, self.lengths, self.sources, self.places, each)
            )
            following = layers[n + 1].attention_norm if n + 1 < len(layers) else model.encoder.norm
            program.append(self._linear(layer.attention.out, read, streams.change))
            norms = (
                (layer.feedforward_norm, following) if layer.first else (layer.attention_norm, layer.feedforward_norm)
            )
            h, residual = self._add(norms[0], streams, residual, layer.first, program)
            h, residual = self._feed(layer, h, residual, norms[1], streams, program)
        for layer, memory in zip(model.decoder.each, self.memories, strict=True):
            assert layer.cross is not None
            program.append(self._linear(layer.cross.memory, h, memory))
        self._kept = streams
        return program

    def _decoder(self, model: Transformer, capacity: int) -> list[tuple]:
        D, A, ops, config = self.D, self.A, self.ops, model.config
        streams = _Streams(self.rows, D, A, self.F, self.zeros[: self.rows])
        scale = float(config.width**0.5) if config.embedding_scale else 1.0
        table, vectors = model.target_embedding.weight.detach(), model.position_table(capacity)
        x = streams.inputs
        program: list[tuple] = [
            (ops.EMBED, x, self.beam.tokens, table, D, scale, 0 if vectors is None else vectors.detach())
        ]
        if model.target_norm is not None:
            program.append(self._norm(model.target_norm, x, streams.zeros, streams.other, streams.total))
            x = streams.other
        layers = model.decoder.each
        h, residual = self._first(layers[0], x, streams, program)
        factor = float((A // self.heads) ** -0.5)
        for n, layer in enumerate(layers):
            projected, read, cache = streams.projected, streams.read, self.caches[n]
            assert layer.cross is not None
            program.append(self._linear(layer.attention.project, h, projected))
            if self.angles is not None:
                program.append((ops.ROTATE, projected, 3 * A * 4, 2 * self.heads, A // self.heads, *self.angles, 0))
            program.append((ops.SCALE, projected, 3 * A * 4, A, factor))
            program.append((ops.STORE, projected.data_ptr() + A * 4, 3 * A * 4, cache, self.rows, 2 * A))
            each = (self.heads, A // self.heads, 0 if self.distances is None else self.distances)
            program.append((ops.PAST, read, projected, 3 * A, cache, self.rows, self.lineage, capacity, *each))
            program.append(self._linear(layer.attention.out, read, streams.change))
            following = layers[n + 1].attention_norm if n + 1 < len(layers) else model.decoder.norm
            norms = (layer.attention_norm, layer.cross_norm, layer.feedforward_norm, following)
            norms = norms[1:] if layer.first else norms[:3]
            h, residual = self._add(norms[0], streams, residual, layer.first, program)
            program.append(self._linear(layer.cross.query, h, streams.queries))
            program.append((ops.SCALE, streams.queries, A * 4, A, factor))
            keys_at = (self.memories[n], self.places * 2 * A, 2 * A)
            both = self.heads << 32 | A // self.heads
            program.append(
                (ops.SOURCE, read, streams.queries, A, *keys_at, self.lengths, self.items, self.places, both)
            )
            program.append(self._linear(layer.cross.out, read, streams.change))
            h, residual = self._add(norms[1], streams, residual, layer.first, program)
            h, residual = self._feed(layer, h, residual, norms[2], streams, program)
        if model.block is not None:
            program.append(self._linear(model.block[0], h, streams.change))
            program.append((ops.GELU, streams.change, D))
            program.append(self._norm(model.block[2], streams.change, streams.zeros, streams.h, streams.total))
            h = streams.h
        program.append(self._linear(model.output, h, self.logits, bias=self.bias))
        self._kept_too = streams, vectors
        return program

    def _first(self, layer: TransformerLayer, x: Tensor, streams: _Streams, program: list[tuple]) -> Any:
        """What the first block reads and adds to."""
        if not layer.first:
            return x, x
        program.append(self._norm(layer.attention_norm, x, streams.zeros, streams.h, streams.total))
        return streams.h, streams.total

    def _add(self, norm: Any, streams: _Streams, residual: Tensor, pre: bool, program: list[tuple]) -> Any:
        """h = norm(change + residual); the sum goes on where norms come first, h where they come after."""
        program.append(self._norm(norm, streams.change, residual, streams.h, streams.total))
        return streams.h, streams.total if pre else streams.h

    def _feed(
        self, layer: TransformerLayer, h: Tensor, residual: Tensor, norm: Any, streams: _Streams, program: list[tuple]
    ) -> Any:
        block, ops = layer.feedforward, self.ops
        program.append(self._linear(block.up, h, streams.inner, relu=block.activation == "relu"))
        if block.gate is not None:
            program.append(self._linear(block.gate, h, streams.gate))
            program.append(
                ({"swiglu": ops.SWIGLU, "geglu": ops.GEGLU}[block.activation], streams.gate, streams.inner, self.F)
            )
        elif block.activation != "relu":
            program.append(({"gelu": ops.GELU, "silu": ops.SILU}[block.activation], streams.inner, self.F))
        program.append(self._linear(block.down, streams.inner, streams.change))
        return self._add(norm, streams, residual, layer.first, program)


class _Streams:
    """What the blocks of one side read and write, for so many rows."""

    def __init__(self, rows: int, D: int, A: int, F: int, zeros: Tensor):
        self.zeros = zeros
        self.inputs, self.other, self.h, self.total, self.change = torch.zeros(5, rows, D)
        self.read, self.queries = torch.zeros(2, rows, A)
        self.projected, self.inner, self.gate = torch.zeros(rows, 3 * A), torch.zeros(rows, F), torch.zeros(rows, F)


def _readable(x: Tensor, kind: torch.dtype) -> bool:
    """Whether it is of a type that is read in its place; matrices alone may be of another type than float32."""
    return x.dtype is torch.float32 or (x.dtype is kind and x.dim() == 2) or not x.is_floating_point()


def compiled_plan(model: Transformer, source: Padded) -> CompiledPlan | None:
    """How the model would search the sources in one call, or None where it cannot."""
    if dispatch.search_kernels(model.device) is None:
        return None
    source = checked(source, model.source_embedding.num_embeddings)
    if not source.size or not source.tokens.is_cpu:
        return None
    kind, config = CompiledTransformer.kind_of(model), model.config
    most = math.inf if config.positions != "learned" else config.max_positions
    if kind is None or int(source.lengths.max()) + model.counted_from > most:
        return None  # the ordinary search says what is wrong
    places = -(-source.tokens.size(1) // 4) * 4
    # A program reads the weights where they were when it was made, as numbers of their types one after the other.
    tensors = (*model.parameters(), *model.buffers())
    if not all(x.is_contiguous() and _readable(x, kind) for x in tensors):
        return None
    where = tuple(tensor.data_ptr() for tensor in tensors)

    def make(items: int, width: int, capacity: int, k: int) -> CompiledTransformer:
        return CompiledTransformer(model, items, width, places, capacity, k)

    rules = getattr(model, "barred", ())
    shape, past = (
        (places, kind, where, rules, torch.get_num_threads()),
        8 * config.attention_width * config.decoder_layers,
    )
    return CompiledPlan(source.size, shape, most, past, make, source.part)
