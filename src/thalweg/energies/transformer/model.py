"""Transformers: the energy of a target sequence given a source sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.energies.sequences import SequenceEnergy
from thalweg.energies.transformer import cache as decoding
from thalweg.energies.transformer.cache import TransformerState
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.compiled import CompiledPlan
from thalweg.inference.search.graph_replay import FixedPlan
from thalweg.layers.attention import attention_map
from thalweg.layers.dropout import Dropout
from thalweg.layers.multihead import mean_weights
from thalweg.layers.padded import Padded, checked
from thalweg.layers.pointer import Pointer
from thalweg.layers.positions import RelativeBias, feature_positions, rotary_table, sinusoidal_table
from thalweg.layers.transformer import TransformerStack

# Decoder outputs and inputs, and the last attention's outputs, queries, keys and mask.
_Decoded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Encoded(NamedTuple):
    """Sources, ready to be read: what each decoder layer attends to, and what copying and positions need.

    Attributes:
        memories: ``(B, S, 2, D)`` a decoder layer: keys and values of the source.
        mask: ``(B, 1, 1, S)`` bool, true on real symbols; None where all have length S.
        starts: ``(B,)`` the position of bos in a causal model.
        copies: ``(B, S)`` the target symbol each position copies to, or -1; None without a pointer.
    """

    memories: tuple[Tensor, ...]
    mask: Tensor | None
    starts: Tensor | None
    copies: Tensor | None

    def rows(self, items: Tensor | None) -> Encoded:
        """Those of the given sources ``(N,)``, repeated or dropped as asked; None leaves them as they are."""
        if items is None:
            return self
        mask, starts, copies = (None if part is None else part[items] for part in self[1:])
        return Encoded(tuple(part[items] for part in self.memories), mask, starts, copies)


class Transformer(SequenceEnergy):
    r"""E(x, y) = -log p(y | x) of a Transformer (Vaswani et al., 2017).

    .. math:: \log p(y \mid x) = \sum_t \log \mathrm{softmax}(W h_t + b)_{y_t}, \quad
              h_t = \mathrm{decoder}(y_{<t}, \mathrm{encoder}(x))

    A causal model has no encoder: its decoder reads x_1 ... x_S bos y_1 ... y_T with one causal attention, bos being
    the separator. Source and target have separate tables there too, unless ``shared``; a segment vector would only
    shift all rows of a table, so there is none.

    Implements :class:`thalweg.inference.Autoregressive`; ``inputs`` of :meth:`begin` is a :class:`Padded` source.

    Args:
        config: the shape.
        source_size, target_size: numbers of symbols, special ones included.
        features: ids of source symbols that are feature tags. All stand at position 0 and carry a type vector; the
            other source symbols then count from 1, so that no tag moves them (Wu et al., 2021).
        copies: ``(source_size,)`` int64, needed with ``config.pointer``: the target symbol that each source symbol
            copies to, -1 for none. Symbols that are never produced are not copied either.
        special: ids ``unk``, ``pad``, ``bos`` and ``eos`` of both sides, and ``forbidden``, as :class:`SequenceEnergy`
            has them.

    Time of a known target O(L (S + T) D^2 + L (S + T)^2 D). :meth:`step` costs O(L D^2 + L (S + t) D) a row, with
    keys and values of the source computed once in :meth:`begin` and shared by all rows of a source.

    >>> config = TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1)
    >>> model = Transformer(config, source_size=10, target_size=12)
    >>> source = Padded(torch.tensor([[4, 5, 6]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> target = Padded(torch.tensor([[4, 3]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> model(source, target).shape, model.energy(source, target).shape
    (torch.Size([1, 2, 12]), torch.Size([1]))
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        source_size: int,
        target_size: int,
        features: Sequence[int] = (),
        copies: Tensor | None = None,
        **special: Any,
    ):
        super().__init__(target_size, **special)
        self.config = config
        self.causal = config.kind == "causal"
        self.attention_map = attention_map(config.attention_map)
        self._build_embeddings(source_size, target_size)
        shape = {
            "norm": config.norm,
            "activation": config.activation,
            "dropout": config.dropout,
            "attention_dropout": config.attention_dropout,
            "attention_map": config.attention_map,
            "attention_width": config.attention_width,
            "norm_eps": config.norm_eps,
        }
        size = (config.width, config.heads, config.feedforward)
        self.encoder = None
        if not self.causal:
            self.encoder = TransformerStack(config.encoder_layers, *size, norm_kind=config.encoder_norm, **shape)
        kind = config.norm_of_decoder
        self.decoder = TransformerStack(config.decoder_layers, *size, cross=not self.causal, norm_kind=kind, **shape)
        self.output = nn.Linear(config.width, target_size, bias=config.output_bias)
        if config.output_bias:
            nn.init.zeros_(self.output.bias)
        nn.init.normal_(self.output.weight, std=config.width**-0.5)
        if config.tied:
            self.output.weight = self.target_embedding.weight
        self.block = None
        if config.output_block:
            norm = nn.LayerNorm(config.width, eps=config.norm_eps)
            self.block = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), norm)
        self.pointer = Pointer(config.width) if config.pointer else None
        self.dropout = Dropout(config.dropout)
        self._build_features(source_size, features)
        self._build_copies(source_size, copies)

    def _build_embeddings(self, source_size: int, target_size: int) -> None:
        config, width, pad = self.config, self.config.width, self.pad
        if config.shared and source_size != target_size:
            raise ConfigError(
                f"model.shared needs one alphabet, got {source_size} source and {target_size} target symbols"
            )
        self.source_embedding = nn.Embedding(source_size, width, padding_idx=pad)
        self.target_embedding = nn.Embedding(target_size, width, padding_idx=pad)
        # Rows of unit expected norm: small first logits as an output matrix, unit entries once scaled.
        for table in (self.source_embedding, self.target_embedding):
            nn.init.normal_(table.weight, std=width**-0.5)
            with torch.no_grad():
                table.weight[pad].zero_()
        if config.shared:
            self.source_embedding.weight = self.target_embedding.weight
        self.source_positions = self.target_positions = None
        self.source_norm = self.target_norm = None
        if config.positions == "learned":
            self.target_positions = nn.Embedding(config.max_positions, width)
            # In a causal model source and target stand in one row: one table.
            if not self.causal:
                self.source_positions = nn.Embedding(config.max_positions, width)
            for table in (self.source_positions, self.target_positions):
                if table is not None:
                    nn.init.normal_(table.weight, std=width**-0.5)
        if config.embedding_norm:
            self.source_norm, self.target_norm = (nn.LayerNorm(width, eps=config.norm_eps) for _ in range(2))
        self.source_bias = self.target_bias = None
        if config.positions == "relative":
            size = {"buckets": config.relative_buckets, "reach": config.relative_reach}
            self.source_bias, self.target_bias = (
                RelativeBias(config.heads, **size, both=both) for both in (True, False)
            )

    def _build_features(self, source_size: int, features: Sequence[int]) -> None:
        self.features = tuple(features)
        self.counted_from = 1 if self.features else 0  # position of the first source symbol that is no tag
        self.is_feature: Tensor | None
        self.feature_type: nn.Parameter | None
        if not self.features:
            self.is_feature = self.feature_type = None
            return
        if not all(0 <= tag < source_size for tag in self.features):
            raise ConfigError(f"`features` must be source symbols 0 ... {source_size - 1}, got {self.features}")
        tags = torch.zeros(source_size, dtype=torch.bool)
        tags[list(self.features)] = True
        self.register_buffer("is_feature", tags, persistent=False)
        self.feature_type = nn.Parameter(torch.randn(self.config.width) * self.config.width**-0.5)

    def _build_copies(self, source_size: int, copies: Tensor | None) -> None:
        self.copies: Tensor | None = None
        if self.pointer is None:
            return
        if copies is None or copies.shape != (source_size,) or copies.is_floating_point():
            got = None if copies is None else f"{copies.dtype} of shape {tuple(copies.shape)}"
            raise ConfigError(
                f"model.pointer needs `copies`, int64 of shape ({source_size},): the target symbol of each source "
                f"symbol or -1, got {got}"
            )
        if copies.numel() and not -1 <= int(copies.min()) <= int(copies.max()) < self.vocab_size:
            raise ConfigError(f"`copies` must hold target symbols 0 ... {self.vocab_size - 1} or -1")
        barred = torch.isinf(self.never + self.unread)
        copies = torch.where((copies >= 0) & ~barred[copies.clamp(min=0)], copies, -1)
        del self.copies
        self.register_buffer("copies", copies, persistent=False)

    def position_table(self, length: int, *, source: bool = False) -> Tensor | None:
        """Vectors of positions 0 ... at least ``length`` - 1, ``(P, D)``; None where attention alone knows them."""
        weight = self.target_embedding.weight
        if self.config.positions == "learned":
            table = self.source_positions if source and not self.causal else self.target_positions
            assert table is not None
            if length > table.num_embeddings:
                raise ShapeError(
                    f"learned positions reach {table.num_embeddings} symbols (model.max_positions), got {length}; "
                    "shorten the input or max_length, or train with more positions"
                )
            return table.weight
        if self.config.positions in ("rotary", "relative"):
            return None
        return sinusoidal_table(length, self.config.width, dtype=weight.dtype, device=weight.device)

    def rotary_turns(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines ``(*positions, d/2)`` where positions are rotary, all below ``length``."""
        if self.config.positions != "rotary":
            return None
        weight, width = self.target_embedding.weight, self.config.attention_width // self.config.heads
        cos, sin = rotary_table(length, width, dtype=weight.dtype, device=weight.device)
        return cos[positions], sin[positions]

    def embed(self, tokens: Tensor, positions: Tensor, length: int, *, source: bool) -> Tensor:
        """Vectors ``(B, T, D)`` of ``tokens (B, T)`` at ``positions (B or 1, T)``, all below ``length``."""
        x = (self.source_embedding if source else self.target_embedding)(tokens)
        if source and self.is_feature is not None:
            assert self.feature_type is not None
            x = x + self.is_feature[tokens].unsqueeze(2) * self.feature_type
        if self.config.embedding_scale:
            x = x * self.config.width**0.5
        table = self.position_table(length, source=source)
        if table is not None:
            x = x + nn.functional.embedding(positions, table)
        norm = self.source_norm if source else self.target_norm
        return self.dropout(x if norm is None else norm(x))

    def _source_positions(self, tokens: Tensor) -> Tensor:
        if self.is_feature is not None:
            positions = feature_positions(self.is_feature[tokens])
        else:
            positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
        # Padding alone may stand beyond the last learned position.
        return positions.clamp(max=self.config.max_positions - 1) if self.config.positions == "learned" else positions

    def embed_source(self, source: Padded) -> tuple[Tensor, Tensor]:
        """Vectors ``(B, S, D)`` of source symbols and their positions ``(B or 1, S)``.

        Padding alone may reach further than positions do.
        """
        positions = self._source_positions(source.tokens)
        # Lengths live on the CPU: looking at them waits for no device.
        reach = int(source.lengths.max()) + self.counted_from
        return self.embed(source.tokens, positions, reach, source=True), positions

    def _starts(self, source: Padded) -> Tensor:
        """``(B,)`` the position of bos after each source, in a causal model."""
        if self.is_feature is not None:
            return (~self.is_feature[source.tokens] & source.mask).sum(dim=1) + 1
        return source.lengths.to(source.tokens.device, non_blocking=True)

    def _copied(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        return None if self.copies is None else self.copies[tokens].masked_fill(~mask, -1)

    def encode(self, source: Padded) -> Encoded:
        """Everything about the sources that no target symbol changes, computed once.

        An encoder's output passes through every decoder layer's key and value matrices here; in a causal model the
        decoder itself reads the source.
        """
        tokens, lengths, mask = source
        S = tokens.size(1)
        # Lengths live on the CPU: looking at them waits for no device.
        seen = None if int(lengths.min()) == S else mask[:, None, None, :]
        x, positions = self.embed_source(source)
        rotary = self.rotary_turns(S + self.counted_from, positions)
        copies = self._copied(tokens, mask)
        if self.encoder is None:
            memories = self.decoder(x, causal=True, rotary=rotary).memories
            return Encoded(memories, seen, self._starts(source), copies)
        bias = None if self.source_bias is None else self.source_bias(positions, positions)
        x = self.encoder(x, mask=seen, rotary=rotary, real=None if seen is None else mask, bias=bias).output
        return Encoded(self.memorise(x), seen, None, copies)

    def memorise(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """Keys and values ``(B, S, 2, D)`` of an encoder's output ``(B, S, D)`` for every decoder layer."""
        return tuple(layer.cross.memorise(encoded) for layer in self.decoder.each if layer.cross is not None)

    def forward(
        self, source: Padded, target: Padded, *, teacher_forcing: float = 1.0, items: Tensor | None = None
    ) -> Tensor:
        """Logits ``(B, T, V)``; log-probabilities where the model has a pointer.

        The guesses below ``teacher_forcing`` 1 come from a first pass over the true target without gradients
        (Mihaylova and Martins, 2019), so that training costs two passes and not T steps.
        """
        fed = self.fed(target)
        if teacher_forcing < 1:
            with torch.no_grad():
                guesses = self._forced(source, fed, items=items).argmax(dim=2)[:, :-1]
            coins = torch.rand(guesses.shape, device=fed.device) < teacher_forcing
            fed = torch.cat((fed[:, :1], torch.where(coins, fed[:, 1:], guesses)), dim=1)
        return self._forced(source, fed, items=items)

    def _forced(self, source: Padded, fed: Tensor, *, weigh: bool = False, items: Tensor | None = None) -> Tensor:
        """Logits of the symbols after each of ``fed (B, T)``; with ``weigh`` the attention weights in their place."""
        source = checked(source, self.source_embedding.num_embeddings)
        if self.encoder is not None:
            decoded = self._decode_beside(source, fed, items)
        else:
            decoded = self._decode_after(source, fed) if items is None else self._decode_onwards(source, fed, items)
        states, inputs, contexts, queries, keys, mask = decoded
        if self.pointer is None and not weigh:
            return self.logits(states)
        weights = mean_weights(queries, keys, self.config.heads, mask, self.attention_map)
        if weigh:
            return weights
        copies = self._copied(source.tokens, source.mask)
        assert copies is not None
        return self.mixture(states, contexts, inputs, weights, copies if items is None else copies[items])

    def _decode_beside(self, source: Padded, fed: Tensor, items: Tensor | None) -> _Decoded:
        encoded, T = self.encode(source).rows(items), fed.size(1)
        positions = torch.arange(T, device=fed.device).unsqueeze(0)
        x = self.embed(fed, positions, T, source=False)
        rotary = self.rotary_turns(T, positions)
        about = {"rotary": rotary, "bias": None if self.target_bias is None else self.target_bias(positions, positions)}
        out = self.decoder(x, memories=encoded.memories, memory_mask=encoded.mask, causal=True, **about)
        return out.output, x, out.read.output, out.read.queries, out.read.memory[:, :, 0], encoded.mask

    def _decode_onwards(self, source: Padded, fed: Tensor, items: Tensor) -> _Decoded:
        """Several targets after one source, which the decoder reads once: its keys and values are their past."""
        encoded, (N, T), S = self.encode(source).rows(items), fed.shape, source.tokens.size(1)
        assert encoded.starts is not None
        positions = encoded.starts.unsqueeze(1) + torch.arange(T, device=fed.device)
        reach = S + T + self.counted_from
        x = self.embed(fed, positions, reach, source=False)
        seen = source.mask[items][:, None, None, :]
        said = torch.ones(T, T, dtype=torch.bool, device=fed.device).tril()
        mask = torch.cat((seen.expand(N, 1, T, S), said.expand(N, 1, T, T)), dim=3)
        out = self.decoder(x, mask=mask, rotary=self.rotary_turns(reach, positions), pasts=encoded.memories)
        return out.output, x, out.own.output, out.own.queries, out.own.memory[:, :S, 0], seen

    def _decode_after(self, source: Padded, fed: Tensor) -> _Decoded:
        """One row of symbols: source and target moved together, so that padding stands at the end alone."""
        (tokens, lengths, mask), (B, T) = source, fed.shape
        S, device = tokens.size(1), fed.device
        reach = S + T + self.counted_from
        steps = torch.arange(T, device=device)
        here = self._source_positions(tokens).expand(B, S)
        there = self._starts(source).unsqueeze(1) + steps
        x = torch.cat(
            (
                self.embed(tokens, here, reach, source=True),
                self.embed(fed, there, reach, source=False),
            ),
            dim=1,
        )
        inputs = x[:, S:]
        ends = lengths.to(device, non_blocking=True).unsqueeze(1)
        places = torch.arange(S + T, device=device)
        order = torch.where(places < ends, places, (places + S - ends).clamp(max=S + T - 1))
        rows = torch.arange(B, device=device).unsqueeze(1)
        rotary = self.rotary_turns(reach, torch.cat((here, there), dim=1)[rows, order])
        out = self.decoder(x[rows, order], causal=True, rotary=rotary)
        back = ends + steps
        states, contexts, queries = (part[rows, back] for part in (out.output, out.own.output, out.own.queries))
        return states, inputs, contexts, queries, out.own.memory[:, :S, 0], mask[:, None, None, :]

    def logits(self, states: Tensor) -> Tensor:
        """``(..., V)`` of decoder outputs ``(..., D)``, -inf where no symbol may stand; float32 at least."""
        return widen(self.output(states if self.block is None else self.block(states))) + self.never

    def mixture(
        self, states: Tensor, contexts: Tensor, inputs: Tensor, weights: Tensor, copies: Tensor | None
    ) -> Tensor:
        """Log-probabilities ``(B, T, V)`` of generating or copying; see :class:`thalweg.layers.Pointer`."""
        assert self.pointer is not None
        assert copies is not None
        said = self.logits(states).log_softmax(dim=-1)
        return self.pointer(said, states, contexts, inputs, weights=weights, copies=copies) + self.never

    def attention_weights(self, source: Padded, target: Padded) -> Tensor:
        """``(B, T, S)`` where the last layer looked in the source, averaged over heads; each row sums to one.

        In a causal model they are the attention map over the source part alone: with the softmax, the weights there
        scaled to sum to one. Eval mode is the caller's.
        """
        return self._forced(source, self.fed(target), weigh=True)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.target_embedding.weight.device

    def fixed(self, inputs: Padded) -> FixedPlan | None:
        """How a GPU would decode this in buffers of fixed shape; None where it cannot, and on the CPU."""
        from thalweg.energies.transformer.fixed import fixed_plan

        return fixed_plan(self, inputs)

    def compiled(self, inputs: Padded) -> CompiledPlan | None:
        """How a CPU would search these in one compiled call; None where it cannot, and on a GPU."""
        from thalweg.energies.transformer.compiled import compiled_plan

        return compiled_plan(self, inputs)

    def begin(self, inputs: Padded) -> TransformerState:
        """Start B targets, one per source; see :mod:`thalweg.energies.transformer.cache`."""
        return decoding.begin(self, inputs)

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols and the new state.

        A state that began in evaluation mode without gradients takes the fast path over the cache; others are
        differentiable.
        """
        return decoding.step(self, tokens, state)

    def select(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """Reorder, repeat or drop rows: integers are gathered, keys and values stay where they are."""
        return decoding.select(state, rows)


def widen(x: Tensor) -> Tensor:
    """``x`` in float32 where its type is narrower: softmax over bfloat16 loses the small probabilities.

    >>> widen(torch.zeros(1, dtype=torch.bfloat16)).dtype, widen(torch.zeros(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
