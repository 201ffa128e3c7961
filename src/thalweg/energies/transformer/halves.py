"""A Transformer in fixed buffers whose matrices are in two halves each: encoder, decoder layers and output.

float32 products take most of the time of a search with many rows. Here every matrix that is read by a product was
written in half precision by whoever made it (:mod:`thalweg.kernels.gpu.halves`), so that a product does nothing but
multiply.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.kernels import dispatch
from thalweg.layers.transformer import FeedForward, TransformerLayer

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer


class _Rooms(NamedTuple):
    """Buffers of a stream of R rows: itself twice, what is read of it, and what its blocks leave.

    After a feed-forward block the stream is the sum of its P parts until it is normalised, else the first of them.
    """

    x: Tensor  # (P, R, D)
    other: Tensor  # (P, R, D)
    read: Any  # Halves (R, D): the stream as the next matrix reads it
    reading: Any  # Halves (R, D): of attention
    inner: Any  # Halves (R, F)


class HalvedTransformer:
    """The layers of a :class:`~thalweg.energies.transformer.model.Transformer`; see :meth:`serves` for which.

    Args:
        model: in evaluation mode; its weights are read anew at every :meth:`refresh`.
        rows: of a decoding step; items, places: sources A and the most symbols S of one.

    >>> HalvedTransformer.block(64, 128, 4), HalvedTransformer.block(12, 20, 2)
    (16, 0)
    """

    def __init__(self, model: Transformer, rows: int, items: int, places: int):
        config, device = model.config, model.device
        self.kernels: Any = dispatch.fixed_kernels(device)
        self.block_size = self.block(config.width, config.feedforward, config.heads)
        self.places = places
        self.rooms = self._rooms(rows, config.width, config.feedforward, device)
        self.queries = torch.zeros(rows, config.width, device=device)
        self.encoder_rooms: _Rooms | None = None
        if self.encodes(model):
            self.encoder_rooms = self._rooms(items * places, config.width, config.feedforward, device)
            self.projected = torch.zeros(items * places, 3 * config.width, device=device)
        layers = [*_linears(model, self.encoder_rooms is not None)]
        self.bias = torch.zeros(model.vocab_size, device=device)
        found = [(layer.weight, self.bias if layer is model.output else layer.bias) for layer in layers]
        self.matrices: Any = self.kernels.Matrices([(weight.detach(), bias.detach()) for weight, bias in found])
        number = count()
        self._place = {id(layer): next(number) for layer in layers}

    def _rooms(self, rows: int, width: int, inner: int, device: torch.device) -> _Rooms:
        empty, parts = self.kernels.Halves.empty, self.kernels.parts_of(rows, inner)
        x, other = torch.zeros(2, parts, rows, width, device=device)
        sizes = (width, width, inner)
        return _Rooms(x, other, *(empty(rows, size, self.block_size, device) for size in sizes))

    @staticmethod
    def block(width: int, feedforward: int, heads: int) -> int:
        """Columns that share a scale: a power of two that divides heads and inner units, 0 where it is too small."""
        size = width // heads
        block = min(64, size & -size, feedforward & -feedforward)
        return block if block >= 16 else 0

    @classmethod
    def serves(cls, model: Transformer, rows: int) -> bool:
        """Whether this is the way to decode: float32, rows enough for matrix units, sizes that can be cut up."""
        config, weight = model.config, model.target_embedding.weight
        exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        kernels: Any = dispatch.fixed_kernels(model.device)
        if not (exact and kernels.suits(rows) and cls.block(config.width, config.feedforward, config.heads)):
            return False
        return all(layer.weight.is_contiguous() for layer in _linears(model, cls.encodes(model)))

    @staticmethod
    def encodes(model: Transformer) -> bool:
        """Whether the encoder, too, is one of these."""
        return model.encoder is not None and model.config.positions != "rotary" and model.config.encoder_norm == "layer"

    def refresh(self, bias: Tensor) -> None:
        """Read the weights; ``bias`` (V,) is the output's."""
        self.bias.copy_(bias)
        self.matrices.refresh()

    def encode(self, embedded: Tensor, lengths: Tensor, model: Transformer, memories: list[Tensor]) -> None:
        """Keys and values of ``embedded`` (A, S, D), of which ``lengths`` (A,) are real, into ``memories``."""
        ops, rooms = self.kernels, self.encoder_rooms
        assert rooms is not None
        assert model.encoder is not None
        x, other = rooms.x, rooms.other
        x[0].copy_(embedded.view_as(x[0]))
        for n, layer in enumerate(model.encoder.each):
            if layer.first or n == 0:
                norm = _norm(ops, layer.attention_norm) if layer.first else None
                ops.normalise(x if n else x[0], norm, rooms.read)
            ops.multiply(rooms.read, self._matrix(layer.attention.project), self.projected)
            ops.attend_places(self.projected, lengths, self.places, layer.attention.heads, rooms.reading)
            self._add(layer, layer.attention.out, rooms, layer.attention_norm, layer.feedforward_norm, x, other)
            self._feed(layer.feedforward, rooms, other, x)
            if not layer.first:
                ops.normalise(x, _norm(ops, layer.feedforward_norm), rooms.read, keep=True)
        if model.encoder.norm is not None:
            ops.normalise(x, _norm(ops, model.encoder.norm), rooms.read)
        for layer, memory in zip(model.decoder.each, memories, strict=True):
            assert layer.cross is not None
            ops.multiply(rooms.read, self._matrix(layer.cross.memory), memory.view(x.shape[1], -1))

    def begin_step(self, fed: Any, norm: nn.Module | None, pre: bool) -> None:
        """Embeddings of what is fed go to ``rooms.x[0]``, ready for the first layer."""
        if norm is None and pre:
            self.kernels.embed(fed, self.rooms.x[0])
        else:
            norm = None if norm is None else _norm(self.kernels, norm)
            self.kernels.normalise(self.rooms.x[0], norm, self.rooms.read, keep=True, fed=fed)

    def layer(
        self,
        layer: TransformerLayer,
        cache: Tensor,
        memory: Tensor,
        lengths: Tensor,
        lineage: Tensor,
        position: Tensor,
        angles: Tensor | None,
        *,
        first: bool,
    ) -> None:
        """A decoder layer, the first or a later one: the stream is in ``rooms.x`` before and after."""
        ops, rooms, own, cross = self.kernels, self.rooms, layer.attention, layer.cross
        assert cross is not None
        x, other = rooms.x, rooms.other
        if layer.first:
            ops.normalise(x[0] if first else x, _norm(ops, layer.attention_norm), rooms.read)
        ops.multiply(rooms.read, self._matrix(own.project), self.queries, cache=cache, position=position)
        if angles is not None:
            ops.rotate(self.queries, cache, angles, position, own.heads)
        ops.attend_past(self.queries, cache, lineage, position, own.heads, rooms.reading)
        self._add(layer, own.out, rooms, layer.attention_norm, layer.cross_norm, x, other)
        ops.multiply(rooms.read, self._matrix(cross.query), self.queries)
        ops.attend_source(self.queries, memory, lengths, cross.heads, rooms.reading)
        self._add(layer, cross.out, rooms, layer.cross_norm, layer.feedforward_norm, other, x)
        self._feed(layer.feedforward, rooms, x, other)
        if not layer.first:
            ops.normalise(other, _norm(ops, layer.feedforward_norm), rooms.read, keep=True)
        self.rooms = rooms._replace(x=other, other=x)

    def output(self, norm: nn.Module | None, layer: nn.Linear, logits: Tensor) -> Tensor:
        """Logits of the stream, after a last norm where norms come first."""
        ops, rooms = self.kernels, self.rooms
        if norm is not None:
            ops.normalise(rooms.x, _norm(ops, norm), rooms.read)
        ops.multiply(rooms.read, self._matrix(layer), logits)
        return logits

    def _matrix(self, layer: nn.Linear) -> Any:
        return self.matrices[self._place[id(layer)]]

    def _add(
        self,
        layer: TransformerLayer,
        out: nn.Linear,
        rooms: _Rooms,
        after: nn.Module,
        before: nn.Module,
        x: Tensor,
        to: Tensor,
    ) -> None:
        """The reading to the stream, and the stream ready for the next block: norm ``before`` it or ``after`` this."""
        ops = self.kernels
        ops.multiply(rooms.reading, self._matrix(out), to[0], residual=x[0])
        ops.normalise(to[0], _norm(ops, before if layer.first else after), rooms.read, keep=not layer.first)

    def _feed(self, block: FeedForward, rooms: _Rooms, x: Tensor, to: Tensor) -> None:
        ops = self.kernels
        gate = None if block.gate is None else self._matrix(block.gate)
        ops.multiply(rooms.read, self._matrix(block.up), rooms.inner, activation=block.activation, gate=gate)
        ops.multiply(rooms.inner, self._matrix(block.down), to, residual=x[0])


def _linears(model: Transformer, encoder: bool) -> list[nn.Linear]:
    """Every layer that multiplies."""
    found: list[nn.Linear | None] = []
    for layer in [*(model.encoder.each if encoder and model.encoder is not None else ()), *model.decoder.each]:
        block = layer.feedforward
        found += [layer.attention.project, layer.attention.out, block.up, block.gate, block.down]
        if layer.cross is not None:
            found += [layer.cross.query, layer.cross.out, *([layer.cross.memory] if encoder else [])]
    return [layer for layer in found if layer is not None] + [model.output]


def _norm(ops: Any, norm: nn.Module) -> Any:
    assert isinstance(norm, nn.LayerNorm)
    return ops.Norm(norm.weight, norm.bias, norm.eps)
