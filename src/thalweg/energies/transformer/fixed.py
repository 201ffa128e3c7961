"""A Transformer's decoder in buffers of fixed shape: steps that a GPU can record once and repeat without the host.

Where :mod:`~thalweg.energies.transformer.cache` grows and drops rows, here the number of rows never changes and
everything is written in place, so that the launches of one step are those of every step.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from itertools import count
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.energies.transformer.halves import HalvedTransformer
from thalweg.inference.search.graph_replay import FixedPlan
from thalweg.kernels import dispatch
from thalweg.layers.padded import Padded, checked
from thalweg.layers.positions import rotary_table
from thalweg.layers.transformer import TransformerLayer

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer


class FixedTransformer:
    """Decoding of A sources of at most S symbols by A * W rows over at most T steps.

    Args:
        model: in evaluation mode; its weights are read where they are.
        items, width: A and W; places: S; capacity: T.

    :meth:`encode` and :meth:`step` allocate nothing that outlives them but what they give back, and never look at a
    value on the device. Time of a step as that of :meth:`Transformer.step`; memory O(L T A W D).

    >>> from thalweg.energies.transformer.model import Transformer
    >>> from thalweg.energies.transformer.config import TransformerConfig
    >>> config = TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1)
    >>> model = Transformer(config, source_size=10, target_size=12)
    >>> FixedTransformer.serves(model.eval()), FixedTransformer.serves(model.train())
    (True, False)
    """

    def __init__(self, model: Transformer, items: int, width: int, places: int, capacity: int):
        weight = model.target_embedding.weight
        config, rows = model.config, items * width
        self._model = weakref.ref(model)  # whoever keeps this object must not keep the model alive
        self.kernels: Any = dispatch.fixed_kernels(weight.device)

        def room(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weight.device)

        # Lengths that say nothing but how far positions may reach.
        reach = places if config.positions != "learned" else min(places, config.max_positions - model.counted_from)
        self.sources = Padded(
            room(items, places, dtype=torch.long),
            torch.tensor([0, reach]),
            room(items, places, dtype=torch.bool),
        )
        self.lengths = room(items, dtype=torch.long)
        self.memories = [room(items, places, 2, config.width) for _ in model.decoder.layers]
        self.caches = [room(capacity, rows, 2, config.width) for _ in model.decoder.layers]
        self.lineage = room(rows, capacity, dtype=torch.int32)
        self.streams = room(2, rows, config.width)
        self.queries, self.reading = room(2, rows, config.width)
        self.inner = room(rows, config.feedforward)
        self.logits, self.bias = room(rows, model.vocab_size, dtype=torch.float32), room(model.vocab_size)
        self.halved = HalvedTransformer(model, rows, items, places) if HalvedTransformer.serves(model, rows) else None
        self.positions = model.position_table(capacity)
        # A recorded encoder reads its tables where they were: they must stay.
        self.tables: tuple[Tensor | None, ...] = (model.position_table(reach + model.counted_from, source=True),)
        self.angles = None
        if config.positions == "rotary":
            size = config.width // config.heads
            self.tables = rotary_table(places + model.counted_from, size, dtype=weight.dtype, device=weight.device)
            turns = model.rotary_turns(capacity, torch.arange(capacity, device=weight.device))
            assert turns is not None
            self.angles = torch.stack(turns, dim=1).float().contiguous()

    @property
    def model(self) -> Transformer:
        """The model, which must still be there."""
        model = self._model()
        assert model is not None
        return model

    @staticmethod
    def serves(model: Transformer) -> bool:
        """Whether a model can be decoded so: a softmax encoder-decoder without a pointer or rules of its own.

        The decoder's norms must be LayerNorms, which the kernels know alone; the encoder runs as it is.
        """
        kind = model.target_embedding.weight.dtype
        plain = not (model.causal or model.pointer or model.training or getattr(model, "ruled", False))
        config = model.config
        known = config.has_softmax and config.norm_of_decoder == "layer" and config.attention_width == config.width
        known &= config.positions != "relative" and config.activation != "geglu" and not config.output_block
        return plain and known and kind in (torch.float32, torch.bfloat16)

    def load(self, source: Padded, count: Tensor) -> None:
        """Put sources where :meth:`encode` reads them, and how many they are to ``count`` (1,) int32.

        What is left of the buffers is a source of one symbol.
        """
        tokens, mask = (part.to(self.lengths.device, non_blocking=True) for part in (source.tokens, source.mask))
        self.kernels.place(tokens, mask, self.sources.tokens, self.sources.mask, self.model.pad, count)

    def encode(self) -> None:
        """Keys and values of the sources; the lineage is for whoever searches to begin."""
        model, halved = self.model, self.halved
        self.lengths.copy_(self.sources.mask.sum(dim=1))
        bias = model.never + model.unread
        self.bias.copy_(bias if model.output.bias is None else bias + model.output.bias)
        if halved is not None:
            halved.refresh(self.bias)
        if halved is not None and halved.encodes(model):
            halved.encode(model.embed_padded(self.sources)[0], self.lengths, model, self.memories)
        else:
            for memory, found in zip(self.memories, model.encode(self.sources).memories, strict=True):
                memory.copy_(found)

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Feed ``tokens (R,)`` at ``position (1,)``: logits ``(R, V)``, not normalised, in a buffer of this object."""
        model, ops = self.model, self.kernels
        scale = model.config.width**0.5 if model.config.embedding_scale else 1.0
        fed = ops.Fed(tokens, model.target_embedding.weight, scale, self.positions, position)
        if self.halved is not None:
            return self._halved_step(self.halved, fed)
        x, other = self.streams
        ops.embed(fed, x)
        # The norm that whoever reads the stream still has to apply, where norms come after the sums.
        pending = None if model.target_norm is None else _norm(ops, model.target_norm)
        if pending and model.config.norm == "pre":
            x.copy_(nn.functional.layer_norm(x, x.shape[1:], *pending))
            pending = None
        for layer, cache, memory in zip(model.decoder.each, self.caches, self.memories, strict=True):
            x, other = self._layer(layer, cache, memory, position, x, other, pending), x
            pending = None if layer.first else _norm(ops, layer.feedforward_norm)
        last = pending if model.decoder.norm is None else _norm(ops, model.decoder.norm)
        return ops.linear(x, model.output.weight, self.bias, self.logits, norm=last)

    def _halved_step(self, halved: HalvedTransformer, fed: Any) -> Tensor:
        model, rooms = self.model, halved.rooms
        halved.begin_step(fed, model.target_norm, model.config.norm == "pre")
        for layer, cache, memory in zip(model.decoder.each, self.caches, self.memories, strict=True):
            about = (self.lengths, self.lineage, fed.position, self.angles)
            halved.layer(layer, cache, memory, *about, first=cache is self.caches[0])
        halved.output(model.decoder.norm, model.output, self.logits)
        halved.rooms = rooms  # every step begins with the same buffers
        return self.logits

    def _layer(
        self,
        layer: TransformerLayer,
        cache: Tensor,
        memory: Tensor,
        position: Tensor,
        x: Tensor,
        other: Tensor,
        pending: Any,
    ) -> Tensor:
        """The stream after a layer, in ``other``; ``x`` is used up."""
        assert layer.cross is not None
        ops, pre = self.kernels, layer.first
        norm = _norm(ops, layer.attention_norm)
        self._project(layer, cache, position, x, norm if pre else pending)
        ops.attend_past(self.queries, cache, self.lineage, position, layer.attention.heads, self.reading)
        self._add(layer.attention.out, self.reading, x, other, pending)
        pending = None if pre else norm

        norm = _norm(ops, layer.cross_norm)
        query = layer.cross.query
        ops.linear(other, query.weight, query.bias, self.queries, norm=norm if pre else pending)
        ops.attend_source(self.queries, memory, self.lengths, layer.cross.heads, self.reading)
        self._add(layer.cross.out, self.reading, other, x, pending)
        pending = None if pre else norm

        norm, block = _norm(ops, layer.feedforward_norm), layer.feedforward
        gate = None if block.gate is None else (block.gate.weight, block.gate.bias)
        ops.linear(
            *(x, block.up.weight, block.up.bias, self.inner),
            norm=norm if pre else pending,
            activation=block.activation,
            gate=gate,
        )
        return self._add(block.down, self.inner, x, other, pending)

    def _project(self, layer: TransformerLayer, cache: Tensor, position: Tensor, x: Tensor, norm: Any) -> None:
        project, heads = layer.attention.project, layer.attention.heads
        self.kernels.project(x, project.weight, project.bias, self.queries, cache, position, norm)
        if self.angles is not None:
            self.kernels.rotate(self.queries, cache, self.angles, position, heads)

    def _add(self, layer: nn.Linear, x: Tensor, stream: Tensor, out: Tensor, pending: Any) -> Tensor:
        return self.kernels.linear(x, layer.weight, layer.bias, out, residual=stream, residual_norm=pending)


def _norm(ops: Any, norm: nn.Module) -> Any:
    assert isinstance(norm, nn.LayerNorm)
    return ops.Norm(norm.weight, norm.bias, norm.eps)


_numbers = count()


@dataclass
class _Outline:
    """Where a model's tensors are named, to see in a few microseconds that it is made of the same ones."""

    parts: list[dict[str, Any]]  # parameters, buffers and children of all modules
    sizes: list[int]
    holders: list[dict[str, Any]]  # of each tensor and child: the part it is in,
    names: list[str]
    things: list[Any]  # and what it was
    tensors: list[Tensor]
    addresses: tuple[int, ...] = ()
    number: int = -1  # of these addresses

    @classmethod
    def of(cls, model: nn.Module) -> _Outline:
        found = cls([], [], [], [], [], [])
        for module in model.modules():
            for part in (module._parameters, module._buffers, module._modules):
                found.parts.append(part)  # type: ignore[arg-type]
                found.sizes.append(len(part))
                for name, thing in part.items():
                    found.holders.append(part)  # type: ignore[arg-type]
                    found.names.append(name)
                    found.things.append(thing)
        found.tensors.extend(thing for thing in found.things if isinstance(thing, Tensor))
        return found

    def holds(self) -> bool:
        """Whether the model is still made of the same modules and tensors; no loop in Python, for it is long."""
        if list(map(len, self.parts)) != self.sizes:
            return False
        return all(map(is_, map(dict.get, self.holders, self.names), self.things))


_outlines: weakref.WeakKeyDictionary[nn.Module, _Outline] = weakref.WeakKeyDictionary()


def _place_of(model: nn.Module) -> int:
    """A number that stands for the addresses of all its parameters and buffers: another as soon as one is."""
    outline = _outlines.get(model)
    if outline is None or not outline.holds():
        outline = _outlines[model] = _Outline.of(model)
    addresses = tuple(map(Tensor.data_ptr, outline.tensors))
    if addresses != outline.addresses:
        outline.addresses, outline.number = addresses, next(_numbers)
    return outline.number


def fixed_plan(model: Transformer, source: Padded) -> FixedPlan | None:
    """How the model would be decoded in fixed shape, or None where it cannot be."""
    device, config = model.device, model.config
    if not FixedTransformer.serves(model) or dispatch.fixed_kernels(device) is None:
        return None
    # The search will wait for the device in any case; a symbol that is none would end all work on it.
    source = checked(source, model.source_embedding.num_embeddings, wait=True)
    most = math.inf if config.positions != "learned" else config.max_positions
    if not source.size or int(source.lengths.max()) + model.counted_from > most:
        return None  # the ordinary search says what is wrong
    places = -(-source.tokens.size(1) // 4) * 4
    # A graph reads the weights, and batch norm's statistics, where they were when it was recorded.
    where = _place_of(model)

    def make(items: int, width: int, capacity: int) -> FixedTransformer:
        return FixedTransformer(model, items, width, places, capacity)

    kind = model.target_embedding.weight.dtype
    return FixedPlan(source.size, (places, kind, where), device, make, source.part, most)
