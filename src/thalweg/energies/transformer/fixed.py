"""A Transformer in buffers of fixed shape: steps that a GPU can record once and repeat without the host.

Where :mod:`~thalweg.energies.transformer.cache` grows and drops rows, here the number of rows never changes and what
outlives a step is written in place, so that the launches of one step are those of every step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.inference.search.graph_replay import FixedPlan
from thalweg.kernels import dispatch
from thalweg.layers.padded import Padded, checked
from thalweg.layers.positions import rotary_table, rotate
from thalweg.layers.transformer import FeedForward, TransformerLayer

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer


class _Plain:
    """What layers are made of, by the modules themselves: rows are read as they are."""

    block = 0

    def ready(self, x: Tensor, norm: nn.Module | None, *, keep: bool) -> tuple[Tensor, Any]:
        """The stream, normalised only if that is to be kept, and as the next product reads it."""
        read = x if norm is None else norm(x)
        return read if keep else x, read

    def multiply(self, read: Any, layer: nn.Linear, bias: Tensor | None = None) -> Tensor:
        """A product, with a bias in the place of the layer's own if given."""
        return nn.functional.linear(read, layer.weight, layer.bias if bias is None else bias)

    def add(self, read: Any, layer: nn.Linear, x: Tensor) -> Tensor:
        """The stream after a block whose last layer this is."""
        return x + layer(read)

    def feed(self, read: Any, block: FeedForward, x: Tensor) -> Tensor:
        """The stream after a feed-forward block."""
        return x + block(read)


class _Halved(_Plain):
    """The same by products of halves, in which every matrix and all that is multiplied with one is written down.

    Args:
        model: its weights are read anew at every :meth:`refresh`, where they were.
        kernels: of decoding; block: columns that share a scale.
    """

    def __init__(self, model: Transformer, kernels: Any, block: int) -> None:
        self._kernels, self.block = kernels, block
        self._layers = _linears(model)
        self._matrices = {
            id(layer): kernels.Halves.empty(*layer.weight.shape, block, model.device) for layer in self._layers
        }

    def refresh(self) -> None:
        """Read the weights as they are now."""
        for layer in self._layers:
            self._kernels.normalise(layer.weight.detach(), None, self._matrices[id(layer)])

    def ready(self, x: Tensor, norm: nn.Module | None, *, keep: bool) -> tuple[Tensor, Any]:
        assert norm is None or isinstance(norm, nn.LayerNorm)
        about = None if norm is None else (norm.weight, norm.bias, norm.eps)
        to = self._kernels.Halves.empty(*x.shape, self.block, x.device)
        return x, self._kernels.normalise(x, about, to, keep=keep and norm is not None)

    def multiply(self, read: Any, layer: nn.Linear, bias: Tensor | None = None, **how: Any) -> Any:
        return self._kernels.multiply(read, self._matrices[id(layer)], layer.bias if bias is None else bias, **how)

    def add(self, read: Any, layer: nn.Linear, x: Tensor) -> Tensor:
        return self.multiply(read, layer, residual=x)

    def feed(self, read: Any, block: FeedForward, x: Tensor) -> Tensor:
        gate = None if block.gate is None else (self._matrices[id(block.gate)], block.gate.bias)
        inner = self.multiply(read, block.up, activation=block.activation, gate=gate, halved=True)
        return self.add(inner, block.down, x)


def _linears(model: Transformer) -> list[nn.Linear]:
    """Every layer that multiplies, in the encoder too if it is one of these."""
    found: list[nn.Linear | None] = [model.output]
    encoder = model.encoder if _encodes(model) else None
    for layer in [*(encoder.each if encoder else ()), *model.decoder.each]:
        block, cross = layer.feedforward, layer.cross
        found += [layer.attention.project, layer.attention.out, block.up, block.gate, block.down]
        if cross is not None:
            found += [cross.query, cross.out, cross.memory if encoder else None]
    return [layer for layer in found if layer is not None]


def _encodes(model: Transformer) -> bool:
    """Whether the encoder is one whose layers are computed as the decoder's."""
    return model.encoder is not None and model.config.positions != "rotary" and model.config.encoder_norm == "layer"


def _products(model: Transformer, rows: int, kernels: Any) -> _Plain:
    """By halves with rows enough for matrix units in float32, and sizes that can be cut into blocks."""
    config, weight = model.config, model.target_embedding.weight
    size, inner = config.width // config.heads, config.feedforward
    block = min(64, size & -size, inner & -inner)
    exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if not (exact and block >= 16 and kernels.suits(rows)):
        return _Plain()
    return _Halved(model, kernels, block) if all(x.weight.is_contiguous() for x in _linears(model)) else _Plain()


_Read = Callable[[Tensor, int], Any]


class FixedTransformer:
    """Decoding of A sources of at most S symbols by A * W rows over at most T steps.

    Args:
        model: in evaluation mode; its weights are read where they are.
        items, width: A and W; places: S; capacity: T.

    :meth:`encode` and :meth:`step` never look at a value on the device, and what outlives them lies in buffers of this
    object. Time of a step as that of :meth:`Transformer.step`; memory O(L T A W D).

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
        self.bias = room(model.vocab_size)
        self.products = _products(model, rows, self.kernels)
        self.positions = model.position_table(capacity)
        # A recorded encoder reads its tables where they were: they must stay.
        self.tables: tuple[Tensor | None, ...] = (model.position_table(reach + model.counted_from, source=True),)
        self.angles = None
        if config.positions == "rotary":
            size = config.width // config.heads
            self.tables = rotary_table(places + model.counted_from, size, dtype=weight.dtype, device=weight.device)
            turns = model.rotary_turns(capacity, torch.arange(capacity, device=weight.device))
            assert turns is not None
            self.angles = torch.stack(turns, dim=1)  # (T, 2, d / 2)

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
        (items, size), (tokens, _, mask) = source.tokens.shape, self.sources
        count.fill_(items)
        tokens.fill_(self.model.pad)
        mask.zero_()
        mask[:, 0] = True
        tokens[:items, :size].copy_(source.tokens, non_blocking=True)
        mask[:items, :size].copy_(source.mask, non_blocking=True)

    def encode(self) -> None:
        """Keys and values of the sources; the lineage is for whoever searches to begin."""
        model, products = self.model, self.products
        self.lengths.copy_(self.sources.mask.sum(dim=1))
        bias = model.never + model.unread
        self.bias.copy_(bias if model.output.bias is None else bias + model.output.bias)
        if isinstance(products, _Halved):
            products.refresh()
        if isinstance(products, _Halved) and _encodes(model):
            found = self._encoded(products)
        else:
            found = model.encode(self.sources).memories
        for memory, new in zip(self.memories, found, strict=True):
            memory.copy_(new.view_as(memory))

    def _encoded(self, products: _Halved) -> list[Tensor]:
        """Keys and values by layers computed as those of the decoder."""
        model, places = self.model, self.sources.tokens.shape[1]
        assert model.encoder is not None
        x, _ = model.embed_source(self.sources)
        x, read = products.ready(x.flatten(0, 1).contiguous(), None, keep=False)
        for layer in model.encoder.each:

            def own(projected: Tensor, heads: int) -> Any:
                return self.kernels.attend_places(projected, self.lengths, places, heads, products.block)

            x, read = self._layer(layer, x, read, own)
        if model.encoder.norm is not None:
            x, read = products.ready(x, model.encoder.norm, keep=False)
        return [products.multiply(read, layer.cross.memory) for layer in model.decoder.each if layer.cross is not None]

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Feed ``tokens (R,)`` at ``position (1,)``: logits ``(R, V)``, not normalised."""
        model, products, kernels = self.model, self.products, self.kernels
        x, read = products.ready(self._embedded(tokens, position), model.target_norm, keep=True)
        for layer, cache, memory in zip(model.decoder.each, self.caches, self.memories, strict=True):

            def own(projected: Tensor, heads: int, cache: Tensor = cache) -> Any:
                self._turn(projected, heads, position)
                return kernels.attend_past(projected, cache, self.lineage, position, heads, products.block)

            def cross(queries: Tensor, heads: int, memory: Tensor = memory) -> Any:
                return kernels.attend_source(queries, memory, self.lengths, heads, products.block)

            x, read = self._layer(layer, x, read, own, cross)
        if model.decoder.norm is not None:
            x, read = products.ready(x, model.decoder.norm, keep=False)
        return products.multiply(read, model.output, self.bias)

    def _embedded(self, tokens: Tensor, position: Tensor) -> Tensor:
        model = self.model
        x = nn.functional.embedding(tokens, model.target_embedding.weight)
        scale = model.config.width**0.5 if model.config.embedding_scale else 1.0
        if self.positions is None:
            return x * scale
        return torch.add(self.positions.index_select(0, position), x, alpha=scale)

    def _turn(self, projected: Tensor, heads: int, position: Tensor) -> None:
        """Rotary positions, in place, of the queries and keys in ``projected`` (R, 3 D)."""
        if self.angles is not None:
            cosines, sines = self.angles.index_select(0, position).unbind(1)
            both = projected[:, : projected.shape[1] // 3 * 2]
            both.copy_(rotate(both.unflatten(1, (2 * heads, -1)), cosines, sines).flatten(1))

    def _layer(
        self, layer: TransformerLayer, x: Tensor, read: Any, own: _Read, cross: _Read | None = None
    ) -> tuple[Tensor, Any]:
        """The stream after a layer, and as what follows reads it where norms come after the sums."""
        products, attention, other = self.products, layer.attention, layer.cross

        def block(x: Tensor, read: Any, norm: nn.Module, work: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, Any]:
            if layer.first:
                x, read = products.ready(x, norm, keep=False)
                return work(read, x), read
            return products.ready(work(read, x), norm, keep=True)

        def attended(read: Any, x: Tensor) -> Tensor:
            return products.add(own(products.multiply(read, attention.project), attention.heads), attention.out, x)

        def crossed(read: Any, x: Tensor) -> Tensor:
            assert other is not None
            assert cross is not None
            return products.add(cross(products.multiply(read, other.query), other.heads), other.out, x)

        x, read = block(x, read, layer.attention_norm, attended)
        if other is not None:
            x, read = block(x, read, layer.cross_norm, crossed)
        return block(x, read, layer.feedforward_norm, lambda read, x: products.feed(read, layer.feedforward, x))


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
    where = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))

    def make(items: int, width: int, capacity: int) -> FixedTransformer:
        return FixedTransformer(model, items, width, places, capacity)

    kind = model.target_embedding.weight.dtype
    return FixedPlan(source.size, (places, kind, where), device, make, source.part, most)
