"""Hard monotonic attention: the energy of a target sequence, summed over its monotone alignments with the source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thalweg.energies.monotonic.alignments import NEVER, filtered, first_beliefs, move_log_probs, moved, walk_log_probs
from thalweg.energies.sequences import SequenceEnergy
from thalweg.inference.search.compiled import CompiledPlan
from thalweg.layers.dropout import Dropout
from thalweg.layers.padded import Padded, checked
from thalweg.layers.recurrent import Recurrent
from thalweg.layers.spelling import SpeltEmbedding, SpeltLinear
from thalweg.limits import DEPTH, WIDTH, check_choices, check_numbers, check_shares


@dataclass(frozen=True, kw_only=True)
class MonotonicConfig:
    """Shape of a transducer with hard monotonic attention.

    Attributes:
        order: ``zeroth``: each step looks at a position for its own sake, at or after the one before; ``first``: how
            far it is from there counts too; ``edits``: the reader walks, and stays, steps or skips at each position.
        jumps: lengths of jumps that ``first`` tells apart, 0 ... jumps - 1; all longer ones are as the last.
        cell: ``lstm`` or ``gru``.
        embedding: width of symbol vectors; hidden: of the decoder state, of each encoder direction and of the network
            that joins them.
        encoder_layers, decoder_layers: depth of each side.
        dropout: probability, on embeddings, encoder outputs, decoder states and before the output.
        spelling: symbols share part of their vectors with others that are written with the same characters.

    >>> MonotonicConfig().order
    'first'
    """

    order: Literal["zeroth", "first", "edits"] = "first"
    jumps: int = 4
    cell: Literal["lstm", "gru"] = "lstm"
    embedding: int = 128
    hidden: int = 128
    encoder_layers: int = 1
    decoder_layers: int = 1
    dropout: float = 0.5
    spelling: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "model", 1, WIDTH, "embedding", "hidden", "jumps")
        check_numbers(self, "model", 1, DEPTH, "encoder_layers", "decoder_layers")
        check_shares(self, "model", "[0, 1)", "dropout")
        check_choices(self, "model")


@dataclass(frozen=True)
class MonotonicState:
    """Where R partial targets stand.

    Attributes:
        hidden: of the decoder, ``(L, R, H)`` each.
        items: ``(R,)`` the source of each row.
        sources, seats: of all sources: what the joining network reads, ``(B, S, H)``, and which positions are real,
            ``(B, S)``; memory, mask: those of the rows.
        arrivals: ``(R, S, V)`` log p(a_t = s, y_t = v | y_{<t}) of the last step; None before the first.
    """

    hidden: tuple[Tensor, ...]
    items: Tensor
    sources: Tensor
    seats: Tensor
    memory: Tensor
    mask: Tensor
    arrivals: Tensor | None


class Monotonic(SequenceEnergy):
    r"""E(x, y) = -log p(y | x) with one source position a_t for each target symbol, never going back.

    .. math:: p(y \mid x) = \sum_{a_1 \le \dots \le a_T} \prod_t
              p(a_t \mid a_{t-1}, y_{<t}, x)\, p(y_t \mid a_t, y_{<t}, x)

    Both factors are read off :math:`z_{ts} = \tanh(V [h_t; m_s])`, where h_t is the decoder's state after
    :math:`y_{<t}` and m_s the encoder's output and the symbol's own vector at position s; the source ends with a
    position of its own, at which targets may end. With ``edits`` the moves are those of a string's edits: a symbol is
    inserted or stands for a source symbol, and source symbols are deleted. The state does not depend on the alignment,
    so the sum is exact, by dynamic programming in O(T S^2), and so is each step's distribution (Wu and Cotterell 2019):

    .. math:: p(y_t \mid y_{<t}, x) = \sum_s p(a_t = s \mid y_{<t}, x)\, p(y_t \mid a_t = s, y_{<t}, x)

    Implements :class:`thalweg.inference.Autoregressive`; ``inputs`` of :meth:`begin` is a :class:`Padded` source.
    Memory of a training step is O(B T S (H + V)).

    Args:
        config: the shape.
        source_size, target_size: numbers of symbols, special ones included.
        special: ids ``unk``, ``pad``, ``bos`` and ``eos`` of both sides, as :class:`SequenceEnergy` has them; only eos
            is ever produced.
        spelt: how often each character stands in each source and in each target symbol, see
            :func:`thalweg.layers.spelling.spellings`; None where symbols share nothing.

    >>> model = Monotonic(MonotonicConfig(hidden=8, embedding=8), source_size=10, target_size=12)
    >>> source = Padded(torch.tensor([[4, 5, 6]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> target = Padded(torch.tensor([[4, 3]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> model(source, target).shape, model.energy(source, target).shape
    (torch.Size([1, 2, 12]), torch.Size([1]))
    """

    def __init__(
        self,
        config: MonotonicConfig,
        *,
        source_size: int,
        target_size: int,
        spelt: tuple[Tensor, Tensor] | None = None,
        **special: Any,
    ):
        super().__init__(target_size, **special)
        self.config = config
        D, H = config.embedding, config.hidden
        if spelt is None:
            self.source_embedding = nn.Embedding(source_size, D, padding_idx=self.pad)
            self.target_embedding = nn.Embedding(target_size, D, padding_idx=self.pad)
        else:
            self.source_embedding, self.target_embedding = (SpeltEmbedding(n, D, padding=self.pad) for n in spelt)
        self.encoder = Recurrent(
            config.cell, D, hidden=H, layers=config.encoder_layers, bidirectional=True, dropout=config.dropout
        )
        self.decoder = Recurrent(config.cell, D, hidden=H, layers=config.decoder_layers, dropout=config.dropout)
        self.join_source = nn.Linear(self.encoder.width + D, H)
        self.join_target = nn.Linear(H, H, bias=False)
        self.pull = nn.Linear(H, 2) if config.order == "edits" else nn.Linear(H, 1, bias=False)
        self.jumps = nn.Linear(H, config.jumps) if config.order == "first" else None
        self.output = nn.Linear(H, target_size) if spelt is None else SpeltLinear(H, spelt[1])
        self.dropout = Dropout(config.dropout)

    def encode(self, source: Padded) -> tuple[Tensor, Tensor]:
        """What the joining network reads of each position and of the end, ``(B, S + 1, H)``, and which are real."""
        tokens, lengths, _ = checked(source, self.source_embedding.num_embeddings)
        ends = lengths.to(tokens.device).unsqueeze(1)
        tokens = nn.functional.pad(tokens, (0, 1), value=self.pad).scatter(1, ends, self.eos)
        mask = torch.arange(tokens.size(1), device=tokens.device) <= ends
        x = self.dropout(self.source_embedding(tokens))
        outputs, _ = self.encoder(x, lengths=lengths + 1, mask=mask)
        memory = torch.cat((self.dropout(outputs), x), dim=2).masked_fill(~mask.unsqueeze(2), 0.0)
        return self.join_source(memory), mask

    def _start(self, rows: int, like: Tensor) -> tuple[Tensor, ...]:
        """The decoder's first state: it knows nothing of the source."""
        parts = 2 if self.config.cell == "lstm" else 1
        return tuple(like.new_zeros(self.config.decoder_layers, rows, self.config.hidden) for _ in range(parts))

    def _joined(self, states: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Moves ``(B, T, S, S)`` and emissions ``(B, T, S, V)``, log-probabilities both, at states ``(B, T, H)``."""
        own = self.join_target(self.dropout(states))
        z = self.dropout(torch.tanh(own.unsqueeze(2) + memory.unsqueeze(1)))  # (B, T, S, H)
        wide = torch.promote_types(z.dtype, torch.float32)  # half precision has no number as low as NEVER
        pull = self.pull(z).to(wide)
        if self.config.order == "edits":
            moves = walk_log_probs(pull[..., 0], pull[..., 1], mask)
        else:
            moves = move_log_probs(pull.squeeze(3), None if self.jumps is None else self.jumps(z).to(wide), mask)
        return moves, (self.output(z).to(wide) + self.never.clamp(min=NEVER)).log_softmax(dim=3)

    def _mixed(self, beliefs: Tensor, emissions: Tensor) -> Tensor:
        """Logits of symbols, -inf where none may stand: beliefs ``(..., S)`` and emissions ``(..., S, V)``."""
        return torch.logsumexp(beliefs.unsqueeze(-1) + emissions, dim=-2) + self.never

    def forward(
        self, source: Padded, target: Padded, *, teacher_forcing: float = 1.0, items: Tensor | None = None
    ) -> Tensor:
        """``(B, T, V)`` log p(y_t | y_{<t}, x), alignments summed out; what is fed is also what these go by."""
        memory, mask = self.encode(source)
        if items is not None:
            memory, mask = memory[items], mask[items]
        if teacher_forcing < 1:
            return self._guessing(target, memory, mask, teacher_forcing)
        beliefs, _, emissions, _ = self._forced(target, memory, mask)
        return self._mixed(beliefs, emissions)

    def _forced(self, target: Padded, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Beliefs, moves, emissions of all symbols and those of the target's own ``(B, T, S)``."""
        x = self.dropout(self.target_embedding(self.fed(target)))
        states, _ = self.decoder(x, self._start(target.size, memory))
        moves, emissions = self._joined(states, memory, mask)
        index = target.tokens[:, :, None, None].expand(-1, -1, emissions.size(2), 1)
        own = emissions.gather(3, index).squeeze(3)
        return filtered(moves, own, target.mask), moves, emissions, own

    def _guessing(self, target: Padded, memory: Tensor, mask: Tensor, teacher_forcing: float) -> Tensor:
        B, T = target.tokens.shape
        coins = torch.rand(B, T, device=target.tokens.device) < teacher_forcing
        rows = torch.arange(B, device=target.tokens.device)
        state = MonotonicState(self._start(B, memory), rows, memory, mask, memory, mask, None)
        tokens, logits = target.tokens.new_full((B,), self.bos), []
        for t in range(T):
            found, state = self._advance(tokens, state)
            logits.append(found)
            tokens = torch.where(coins[:, t] & target.mask[:, t], target.tokens[:, t], found.detach().argmax(dim=1))
        return torch.stack(logits, dim=1)

    def attention_weights(self, source: Padded, target: Padded) -> Tensor:
        """``(B, T, S)`` p(a_t = s | x, y), the whole target known; what is missing to 1 looked at the end.

        The posterior of a part is the gradient of the log-likelihood in its score.
        """
        with torch.no_grad():
            _, moves, _, own = self._forced(target, *self.encode(source))
        with torch.enable_grad():
            scores = own.detach().requires_grad_()
            evidence = torch.logsumexp(filtered(moves, scores, target.mask) + scores, dim=2)
            total = evidence.masked_fill(~target.mask, 0.0).sum()
            (weights,) = torch.autograd.grad(total, scores)
        return (weights[:, :, :-1] * source.mask.unsqueeze(1)).detach()

    def compiled(self, inputs: Padded) -> CompiledPlan | None:
        """How a CPU would search these in one compiled call; None where it cannot, and on a GPU."""
        from thalweg.energies.monotonic.compiled import compiled_plan

        # A subclass may have steps of its own.
        steps = ("encode", "begin", "step", "select", "_advance", "_joined", "normalise")
        plain = all(getattr(type(self), name) is getattr(Monotonic, name) for name in steps)
        return compiled_plan(self, inputs) if plain else None

    def begin(self, inputs: Padded) -> MonotonicState:
        """Start B targets, one per source."""
        memory, mask = self.encode(inputs)
        items = torch.arange(inputs.size, device=memory.device)
        return MonotonicState(self._start(inputs.size, memory), items, memory, mask, memory, mask, None)

    def step(self, tokens: Tensor, state: MonotonicState) -> tuple[Tensor, MonotonicState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols and the new state."""
        logits, state = self._advance(tokens, state)
        return self.normalise(logits), state

    def _advance(self, tokens: Tensor, state: MonotonicState) -> tuple[Tensor, MonotonicState]:
        memory, mask = state.memory, state.mask
        if state.arrivals is None:
            belief = first_beliefs(mask.size(0), mask.size(1), memory)
        else:
            index = tokens[:, None, None].expand(-1, mask.size(1), 1)
            belief = state.arrivals.gather(2, index).squeeze(2).log_softmax(dim=1)
        output, hidden = self.decoder.step(self.dropout(self.target_embedding(tokens)), state.hidden)
        moves, emissions = self._joined(output.unsqueeze(1), memory, mask)
        arrivals = moved(belief, moves[:, 0]).unsqueeze(2) + emissions[:, 0]
        return torch.logsumexp(arrivals, dim=1) + self.never, replace(state, hidden=hidden, arrivals=arrivals)

    def select(self, state: MonotonicState, rows: Tensor) -> MonotonicState:
        """Reorder, repeat or drop rows. What is read of the sources is laid out anew only when rows change theirs."""
        items, memory, mask = state.items[rows], state.memory, state.mask
        if not torch.equal(items, state.items):
            memory, mask = state.sources[items], state.seats[items]
        return replace(
            state,
            hidden=tuple(part[:, rows] for part in state.hidden),
            items=items,
            memory=memory,
            mask=mask,
            arrivals=None if state.arrivals is None else state.arrivals[rows],
        )
