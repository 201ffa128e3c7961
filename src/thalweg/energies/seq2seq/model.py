"""Recurrent encoder-decoders: the energy of a target sequence given a source sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thalweg.energies.sequences import SequenceEnergy
from thalweg.errors import ConfigError
from thalweg.inference.search.compiled import CompiledPlan
from thalweg.layers.attention import Attention, Memory, attention_map
from thalweg.layers.blocks import Connection
from thalweg.layers.dropout import Dropout
from thalweg.layers.norms import Norm
from thalweg.layers.padded import Padded, checked
from thalweg.layers.plain_recurrence import Initialisation
from thalweg.layers.recurrent import Cell, Recurrent
from thalweg.layers.recurrent_blocks import STEPWISE
from thalweg.limits import DEPTH, WIDTH, check_choices, check_numbers, check_shares


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Shape of a recurrent encoder-decoder.

    Attributes:
        cell: ``lstm``, ``gru`` (reset after the matrix), ``gru-reset-before``, or a plain ``rnn-tanh``, ``rnn-relu``,
            ``rnn-tanh-pre`` or ``rnn-relu-pre`` (state before the activation).
        embedding: width of symbol vectors.
        hidden: width of the decoder state and of each encoder direction.
        encoder_layers, decoder_layers: depth of each side.
        bidirectional: encoder reads from both ends.
        attention: ``none``, ``dot``, ``general`` or ``additive``.
        attention_map: from scores to weights: ``softmax``, ``sparsemax``, ``entmax15``, or an alpha of entmax.
        dropout: probability, on embeddings, between layers, and before the output.
        reverse_source: read the source last symbol first.
        tied: the output matrix is the target embedding matrix.
        residual: round every layer of both sides: ``none``, ``residual`` or ``highway``.
        norm: of every layer of both sides: ``none``, ``batch``, ``layer``, ``instance``, ``rms`` or ``weight``.
        decoder_norm: that of the decoder where it differs; ``batch`` and ``instance`` look at several positions, which
            a decoder does not have.
        initialisation: how the layers' matrices start: ``default`` or ``orthogonal``.

    >>> Seq2SeqConfig(hidden=64).attention
    'additive'
    """

    cell: Cell = "lstm"
    embedding: int = 128
    hidden: int = 128
    encoder_layers: int = 1
    decoder_layers: int = 1
    bidirectional: bool = True
    attention: Literal["none", "dot", "general", "additive"] = "additive"
    dropout: float = 0.3
    reverse_source: bool = False
    tied: bool = False
    attention_map: str | float = "softmax"
    residual: Connection = "none"
    norm: Norm = "none"
    decoder_norm: Literal["same", "none", "layer", "rms", "weight"] = "same"
    initialisation: Initialisation = "default"

    def __post_init__(self) -> None:
        check_numbers(self, "model", 1, WIDTH, "embedding", "hidden")
        check_numbers(self, "model", 1, DEPTH, "encoder_layers", "decoder_layers")
        check_shares(self, "model", "[0, 1)", "dropout")
        check_choices(self, "model")
        if self.decoder_norm == "same" and self.norm not in STEPWISE:
            raise ConfigError(
                f"model.norm = {self.norm} looks at several positions, got a decoder, which has one at a time; "
                "set model.decoder_norm to none, layer, rms or weight, or choose layer for both"
            )
        attention_map(self.attention_map, setting="model.attention_map")
        if self.attention == "none" and not self.has_softmax:
            raise ConfigError(
                f"model.attention_map = {self.attention_map} needs attention, got model.attention = none; "
                "choose dot, general or additive"
            )

    @property
    def has_softmax(self) -> bool:
        """Whether attention weights are the softmax's, which searches in one compiled call know alone.

        >>> Seq2SeqConfig(attention_map="sparsemax").has_softmax
        False
        """
        return self.attention_map in ("softmax", 1)

    @property
    def has_bare_gates(self) -> bool:
        """Whether layers are gated cells with nothing round them, which searches in one compiled call know alone.

        >>> Seq2SeqConfig().has_bare_gates, Seq2SeqConfig(residual="highway").has_bare_gates
        (True, False)
        """
        bare = (self.residual, self.norm, self.decoder_norm) in (("none", "none", "same"), ("none", "none", "none"))
        return bare and self.cell in ("lstm", "gru", "gru-reset-before")


@dataclass(frozen=True)
class Seq2SeqState:
    """Where R partial targets stand.

    Attributes:
        hidden: recurrent state, ``(L, R, H)`` each.
        items: ``(R,)`` the source of each row.
        sources: memory of all sources; memory: that of A sources, each read by R / A rows in a row.
        table: ``(V, G)`` the decoder's projection of every symbol, in evaluation mode.
    """

    hidden: tuple[Tensor, ...]
    items: Tensor
    sources: Memory | None
    memory: Memory | None
    table: Tensor | None


class Seq2Seq(SequenceEnergy):
    r"""E(x, y) = -log p(y | x) of a recurrent encoder-decoder (Sutskever et al., 2014; Luong et al., 2015).

    .. math:: \log p(y \mid x) = \sum_t \log \mathrm{softmax}(W o_t)_{y_t}, \quad
              o_t = \tanh(V [h_t; c_t]), \quad h_t = f(y_{t-1}, h_{t-1})

    ``c_t`` is the attention's reading of the encoder outputs at ``h_t``; without attention ``o_t = h_t``. Attention
    does not feed back into the recurrence, so that a known target needs one recurrent call. The decoder starts from
    the encoder's final state, mapped by a linear layer where the shapes differ.

    Implements :class:`thalweg.inference.Autoregressive`; ``inputs`` of :meth:`begin` is a :class:`Padded` source.

    Args:
        config: the shape.
        source_size, target_size: numbers of symbols, special ones included.
        special: ids ``unk``, ``pad``, ``bos`` and ``eos`` of both sides, as :class:`SequenceEnergy` has them; only eos
            is ever produced.

    >>> model = Seq2Seq(Seq2SeqConfig(hidden=8, embedding=8), source_size=10, target_size=12)
    >>> source = Padded(torch.tensor([[4, 5, 6]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> target = Padded(torch.tensor([[4, 3]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> model(source, target).shape, model.energy(source, target).shape
    (torch.Size([1, 2, 12]), torch.Size([1]))
    """

    def __init__(self, config: Seq2SeqConfig, *, source_size: int, target_size: int, **special: Any):
        super().__init__(target_size, **special)
        self.config = config
        self.source_embedding = nn.Embedding(source_size, config.embedding, padding_idx=self.pad)
        self.target_embedding = nn.Embedding(target_size, config.embedding, padding_idx=self.pad)
        self.encoder, self.decoder = self._build_stacks(config)
        self.bridge = self._build_bridge(config)
        width = config.hidden
        if config.attention != "none":
            # The dot product needs one width: both directions are added, as Luong-style decoders commonly do.
            self.folded = config.attention == "dot" and config.bidirectional
            memory = config.hidden if self.folded else self.encoder.width
            self.attention = Attention(config.attention, queries=config.hidden, memory=memory, map=config.attention_map)
            width = config.embedding if config.tied else config.hidden
            self.combine: nn.Linear | None = nn.Linear(config.hidden + memory, width)
        else:
            needs_map = config.tied and config.embedding != config.hidden
            self.combine = nn.Linear(config.hidden, config.embedding) if needs_map else None
            width = config.embedding if needs_map else width
        self.output = nn.Linear(width, target_size)
        if config.tied:
            # Rows of unit expected norm keep the first logits small when the matrix serves as output too.
            nn.init.normal_(self.target_embedding.weight, std=config.embedding**-0.5)
            with torch.no_grad():
                self.target_embedding.weight[self.pad].zero_()
            self.output.weight = self.target_embedding.weight
        self.dropout = Dropout(config.dropout)

    @staticmethod
    def _build_stacks(config: Seq2SeqConfig) -> tuple[Recurrent, Recurrent]:
        shape: dict[str, Any] = {"hidden": config.hidden, "dropout": config.dropout}
        shape |= {"residual": config.residual, "initialisation": config.initialisation}
        ends = {"layers": config.encoder_layers, "bidirectional": config.bidirectional, "norm": config.norm}
        encoder = Recurrent(config.cell, config.embedding, **ends, **shape)
        norm = config.norm if config.decoder_norm == "same" else config.decoder_norm
        return encoder, Recurrent(config.cell, config.embedding, layers=config.decoder_layers, norm=norm, **shape)

    @staticmethod
    def _build_bridge(config: Seq2SeqConfig) -> nn.ModuleList | None:
        directions = 2 if config.bidirectional else 1
        if directions == 1 and config.encoder_layers == config.decoder_layers:
            return None
        parts = 2 if config.cell == "lstm" else 1
        inputs = config.encoder_layers * directions * config.hidden
        return nn.ModuleList(nn.Linear(inputs, config.decoder_layers * config.hidden) for _ in range(parts))

    def encode(self, source: Padded) -> tuple[Memory | None, tuple[Tensor, ...]]:
        """Memory of the sources (none without attention) and the decoder's first state ``(L, B, H)`` each."""
        tokens, lengths, mask = checked(source, self.source_embedding.num_embeddings)
        if self.config.reverse_source:
            # Each row is turned within its own length; padding stays at the end.
            turned = lengths.to(tokens.device)[:, None] - 1 - torch.arange(tokens.size(1), device=tokens.device)
            tokens = tokens.gather(1, torch.where(turned >= 0, turned, turned + tokens.size(1)))
        x = self.dropout(self.source_embedding(tokens))
        outputs, final = self.encoder(x, lengths=lengths, mask=mask)
        if self.bridge is not None:
            L, H = self.config.decoder_layers, self.config.hidden
            flat = [part.transpose(0, 1).flatten(1) for part in final]
            mapped = [bridge(part) for bridge, part in zip(self.bridge, flat, strict=True)]
            mapped[0] = self._bounded(mapped[0])
            final = tuple(part.view(-1, L, H).transpose(0, 1).contiguous() for part in mapped)
        if self.config.attention == "none":
            return None, final
        values = self.dropout(outputs)
        if self.folded:
            values = values[..., : self.config.hidden] + values[..., self.config.hidden :]
        return self.attention.memorise(values, mask), final

    def _bounded(self, hidden: Tensor) -> Tensor:
        # A cell state is unbounded, a hidden state lives in (-1, 1), unless nothing that is bounded has made it.
        if self.config.cell.endswith("-pre"):
            return hidden
        return torch.relu(hidden) if self.config.cell == "rnn-relu" else torch.tanh(hidden)

    def _logits(self, states: Tensor, memory: Memory | None, *, mapped: bool = False) -> tuple[Tensor, Tensor | None]:
        """Decoder states ``(..., H)`` -> logits ``(..., V)``, -inf where no symbol may stand, and weights.

        With a memory the states are ``(B, T, H)``; ``mapped`` says that its values are combined already.
        """
        weights = None
        if memory is not None:
            assert self.combine is not None
            context, weights = self.attention(states, memory)
            if mapped:
                own = self.combine.weight[:, : self.config.hidden]
                states = torch.tanh(nn.functional.linear(states, own, self.combine.bias) + context)
            else:
                states = torch.tanh(self.combine(torch.cat((states, context), dim=2)))
        elif self.combine is not None:
            states = self.combine(states)
        return self.output(self.dropout(states)) + self.never, weights

    def forward(
        self, source: Padded, target: Padded, *, teacher_forcing: float = 1.0, items: Tensor | None = None
    ) -> Tensor:
        """Logits ``(B, T, V)``; with ``teacher_forcing`` 1 the target is one recurrent call, below it T steps."""
        memory, state = self.encode(source)
        if items is not None:
            memory = None if memory is None else memory.rows(items)
            state = tuple(part[:, items] for part in state)
        if teacher_forcing >= 1:
            return self._forced(target, memory, state)[0]
        B, T = target.tokens.shape
        coins = torch.rand(B, T, device=target.tokens.device) < teacher_forcing
        tokens = target.tokens.new_full((B,), self.bos)
        logits: list[Tensor] = []
        for t in range(T):
            x = self.dropout(self.target_embedding(tokens))
            hidden, state = self.decoder.step(x, state)
            logits.append(self._logits(hidden.unsqueeze(1), memory)[0].squeeze(1))
            tokens = torch.where(coins[:, t], target.tokens[:, t], logits[-1].detach().argmax(dim=1))
        return torch.stack(logits, dim=1)

    def _forced(self, target: Padded, memory: Memory | None, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        x = self.dropout(self.target_embedding(self.fed(target)))
        states, _ = self.decoder(x, state)
        return self._logits(states, memory)

    def attention_weights(self, source: Padded, target: Padded) -> Tensor | None:
        """``(B, T, S)`` where each target position looked, or None without attention; eval mode is the caller's."""
        memory, state = self.encode(source)
        weights = self._forced(target, memory, state)[1]
        if weights is None or not self.config.reverse_source:
            return weights
        turned = source.lengths.to(weights.device)[:, None] - 1 - torch.arange(weights.size(2), device=weights.device)
        index = torch.where(turned >= 0, turned, turned + weights.size(2))
        return weights.gather(2, index.unsqueeze(1).expand_as(weights))

    def compiled(self, inputs: Padded) -> CompiledPlan | None:
        """How a CPU would search these in one compiled call; None where it cannot, and on a GPU."""
        from thalweg.energies.seq2seq.compiled import compiled_plan

        # A subclass may have steps of its own.
        steps = ("encode", "begin", "step", "select", "_logits", "normalise")
        plain = all(getattr(type(self), name) is getattr(Seq2Seq, name) for name in steps)
        return compiled_plan(self, inputs) if plain and self.config.has_softmax else None

    def begin(self, inputs: Padded) -> Seq2SeqState:
        """Start B targets, one per source.

        What does not depend on the steps is done here once: the projection of every symbol, and the half of the
        combination that reads the memory, sum_s a_s (V_c m_s) in place of V_c (sum_s a_s m_s).
        """
        memory, hidden = self.encode(inputs)
        items = torch.arange(inputs.size, device=inputs.tokens.device)
        if self.training:
            return Seq2SeqState(hidden, items, memory, memory, None)
        if memory is not None:
            assert self.combine is not None
            reading = self.combine.weight[:, self.config.hidden :]
            memory = memory._replace(values=nn.functional.linear(memory.values, reading))
        table = self.decoder.project(self.target_embedding.weight)
        return Seq2SeqState(hidden, items, memory, memory, table)

    def step(self, tokens: Tensor, state: Seq2SeqState) -> tuple[Tensor, Seq2SeqState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols and the new state."""
        if state.table is None:
            output, hidden = self.decoder.step(self.dropout(self.target_embedding(tokens)), state.hidden)
        else:
            output, hidden = self.decoder.step(state.table[tokens], state.hidden, projected=True)
        if state.memory is not None:
            output = output.view(state.memory.mask.size(0), -1, output.size(1))
        logits = self._logits(output, state.memory, mapped=state.table is not None)[0]
        return self.normalise(logits.view(tokens.size(0), -1)), replace(state, hidden=hidden)

    def select(self, state: Seq2SeqState, rows: Tensor) -> Seq2SeqState:
        """Reorder, repeat or drop rows. The memory is laid out anew only when rows change their source.

        Rows of one source that stand together share its memory, as in a beam: it is never repeated for them.
        """
        hidden = tuple(part[:, rows] for part in state.hidden)
        items = state.items[rows]
        memory = state.memory
        if state.sources is not None and not torch.equal(items, state.items):
            runs, counts = torch.unique_consecutive(items, return_counts=True)
            even = counts.numel() == 0 or bool((counts == counts[0]).all())
            memory = state.sources.rows(runs if even else items)
        return replace(state, hidden=hidden, items=items, memory=memory)
