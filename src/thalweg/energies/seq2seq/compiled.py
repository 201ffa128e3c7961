"""A recurrent encoder-decoder as lists of operations on buffers, for searches in one compiled call."""

from __future__ import annotations

import math
import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.seq2seq.weights import PANEL, Stack, Weights, padded
from thalweg.inference.search.compiled import CompiledPlan
from thalweg.kernels import dispatch
from thalweg.kernels.fixed_beam import Beam
from thalweg.layers.low_precision import ReducedLinear
from thalweg.layers.padded import Padded, checked

if TYPE_CHECKING:
    from thalweg.energies.seq2seq.model import Seq2Seq

__all__ = ["CompiledSeq2Seq", "compiled_plan"]

MANY_ROWS = 32  # from here on products read weights in panels
MOST_KNOWN = 1 << 22  # numbers of the table of first symbols
_weights: WeakKeyDictionary[Seq2Seq, Weights] = WeakKeyDictionary()
_known: WeakKeyDictionary[Seq2Seq, _Known] = WeakKeyDictionary()
_lock = Lock()  # of the weights, which all searches of a model share


def _rows(*shape: int) -> Tensor:
    """Zeros with some room after each row: rows a power of two apart would share few places of a cache."""
    return torch.zeros(*shape[:-1], shape[-1] + PANEL)[..., : shape[-1]]


class _Known:
    """What the first layer of an encoder knows after one symbol, for every symbol and direction.

    A row is the state, an LSTM's cell state, and what the next step adds of it: all that comes before the second
    product. Nothing where that would be a table of more than ``MOST_KNOWN`` numbers.
    """

    def __init__(self, model: Seq2Seq, weights: Weights):
        self.weights, self.seen, self.H, self.lstm = weights, [], model.config.hidden, model.config.cell == "lstm"
        symbols, gates = model.source_embedding.num_embeddings, (4 if self.lstm else 3) * self.H
        each = (2 if self.lstm else 1) * self.H + gates
        fits = weights.sources is not None and symbols * weights.directions * each <= MOST_KNOWN
        self.table = torch.zeros(symbols, weights.directions, each) if fits else None
        self.read()

    @torch.no_grad()
    def read(self) -> None:
        """Follow the weights."""
        if self.table is None or self.seen is self.weights.copies:
            return
        sources, past, H, states = self.weights.sources, self.weights.past[0], self.H, 2 if self.lstm else 1
        assert sources is not None
        gates = self.table.size(2) - states * H
        for side in range(self.weights.directions):
            rows = slice(side * padded(gates), side * padded(gates) + gates)
            weight, bias, x = past.weight[rows], past.bias[rows], sources[:, side * gates : (side + 1) * gates]
            first = self._after(x, bias)
            mapped = torch.addmm(bias, first[0], weight.T)
            torch.cat([*first, mapped], dim=1, out=self.table[:, side])
        self.seen = self.weights.copies

    def _after(self, x: Tensor, bias: Tensor) -> list[Tensor]:
        """The states after a first step that is fed ``x``."""
        if self.lstm:
            i, _, g, o = (x + bias).chunk(4, dim=1)
            cell = i.sigmoid() * g.tanh()
            return [o.sigmoid() * cell.tanh(), cell]
        (r, z, n), (r_bias, z_bias, n_bias) = x.chunk(3, dim=1), bias.chunk(3)
        n = (n + (r + r_bias).sigmoid() * n_bias).tanh()
        return [n - (z + z_bias).sigmoid() * n]


class _Encoder:
    """The encoder's outputs and last states for A sources of S symbols.

    All places of all sources lie one after the other, without padding. ``slots`` are the sources, longest first: where
    each begins and how long it is; ``slot`` is which of them an item is.
    """

    def __init__(self, model: Seq2Seq, weights: Weights, ops: Any, items: int, places: int):
        config = model.config
        self.ops, self.weights, self.H, self.places, self.items = ops, weights, config.hidden, places, items
        self.lstm = config.cell == "lstm"
        wide = self.H * weights.directions
        self.total = 0  # places that are there
        self.tokens = torch.full((items * places,), model.pad, dtype=torch.long)
        self.lengths, self.starts, self.slot = torch.zeros(3, items, dtype=torch.long)
        self.slots = torch.zeros(items, 2, dtype=torch.long)
        # In NumPy: for one source a call of torch takes longer than what it does.
        self.arrays = [x.numpy() for x in (self.tokens, self.lengths, self.starts, self.slot, self.slots)]
        self.outputs = [torch.zeros(items * places, wide) for _ in range(config.encoder_layers)]
        states = 2 if self.lstm else 1
        self.finals = torch.zeros(states, items, wide * config.encoder_layers)
        self.zeros = torch.zeros(self.H)
        if model not in _known:
            _known[model] = _Known(model, weights)
        self.known = _known[model]

    def load(self, model: Seq2Seq, source: Padded) -> None:
        """Sources where they are read; what has no compiled form is encoded here."""
        tokens, lengths, mask = source
        B, S = tokens.shape
        count, (symbols, own, starts, slot, slots) = lengths.numpy(), self.arrays
        own[:B] = count
        np.cumsum(count[:-1], out=starts[1:B])
        self.total = int(starts[B - 1] + count[-1])
        if model.config.reverse_source:
            turned = lengths[:, None] - 1 - torch.arange(S)
            tokens = tokens.gather(1, torch.where(turned >= 0, turned, turned + S))
        if self.weights.sources is not None:
            self.known.read()
            order = np.argsort(-count, kind="stable")
            slot[order] = np.arange(B)
            slots[:B, 0], slots[:B, 1] = starts[order], count[order]
            symbols[: self.total] = tokens.numpy()[mask.numpy()]
            return
        outputs, finals = model.encoder(model.source_embedding(tokens), lengths=lengths, mask=mask)
        slot[:B] = np.arange(B)
        self.outputs[-1][: self.total] = outputs[mask]
        for final, part in zip(self.finals, finals, strict=True):
            final[:B] = part.transpose(0, 1).flatten(1)

    def program(self) -> list[tuple]:
        """All layers, each in both directions at once."""
        if self.weights.sources is None:
            return []
        program: list[tuple] = []
        gates, D, H = (4 if self.lstm else 3) * self.H, self.weights.directions, self.H
        many, x = self.items > 8, (self.weights.sources, self.weights.sources.stride(0) * 4, self.tokens)
        code = self.ops.code(self.ops.PANELS if many else self.ops.LINEAR)
        self.kept: list[Tensor] = []
        known = 0 if self.known.table is None else self.known.table
        for n, (past, out) in enumerate(zip(self.weights.past, self.outputs, strict=True)):
            if n:
                fed = self.weights.fed[n - 1]
                mapped = torch.zeros(self.items * self.places, fed.outer)
                program.append((0, *fed.op(self.outputs[n - 1], mapped, many=len(mapped) > MANY_ROWS)))
                x, known = (mapped, mapped.stride(0) * 4, 0), 0
                self.kept.append(mapped)
            room = _rows(D, self.items, padded(gates))
            self.kept.append(room)
            states = [final[:, n * D * H :] for final in self.finals]
            weights = (past.laid_out(many), code, past.bias, room, padded(gates))
            state = (states[0], states[0].stride(0) * 4, states[1] if self.lstm else 0)
            sizes = (self.slots, known, H, gates, self.zeros, room.stride(0) * 4, D)
            kind = self.ops.RECUR["lstm" if self.lstm else "gru"]
            program.append((kind, *x, *weights, *state, out, out.stride(0) * 4, *sizes))
        return program


class _Layer:
    """A layer of the decoder: its new states, what is carried to the next step, what is read off a new state."""

    def __init__(self, ops: Any, cell: str, stack: Stack, candidate: Stack, past: int, items: int, rows: int):
        self.ops, self.cell, self.stack, self.candidate, self.past = ops, cell, stack, candidate, past
        self.H, self.many, self.few = stack.inner, rows > MANY_ROWS, items <= MANY_ROWS
        self.h, self.first = torch.zeros(rows, self.H), torch.zeros(items, self.H)
        self.states = torch.zeros(2, rows, self.H)  # after even steps and after odd ones
        self.out = _rows(rows, stack.outer)
        if cell == "gru-reset-before":
            self.weighed, self.kept = torch.zeros(2, rows, self.H)
            self.mapped = torch.zeros(rows, candidate.outer)

    @property
    def above(self) -> Tensor:
        """What is for the layer above, or for attention and output."""
        return self.out[:, self.past :]

    def begin(self, hidden: Tensor, cell: Tensor | None, slot: Tensor, tanh: bool) -> list[tuple]:
        """The states before the first step, put as if a step had left them; ``slot`` is where each item's are."""

        def copied(x: Tensor, out: Tensor, tanh: bool) -> tuple:
            return (self.ops.COPY, x, x.stride(0) * 4, out, self.H * 4, self.H, int(tanh), slot)

        # A row of its item's number: the first step looks for its parent there.
        carried = copied(hidden, self.states[1], tanh) if cell is None else copied(cell, self.states[1], False)
        own = self.stack.op(self.first, self.out, many=not self.few, first=self.past)
        return [copied(hidden, self.first, tanh), carried, own]

    def step(self, x: tuple[Any, ...], rows: tuple[Any, ...]) -> list[tuple]:
        """The operations of a step that is fed ``x``: where it is, its stride, and tokens to look it up by."""
        ops, own = self.ops, self.stack.op(self.h, self.out, many=self.many)
        past, carried = (self.out, self.out.stride(0) * 4), (self.states, self.states.stride(0) * 4)
        if self.cell != "gru-reset-before":
            kind = ops.LSTM if self.cell == "lstm" else ops.GRU
            return [(kind, *x, *past, *carried, *rows, self.h, self.H), own]
        mapped = (self.mapped, self.mapped.stride(0) * 4)
        return [
            (ops.RESET, *x, *past, *carried, *rows, self.weighed, self.H, self.kept),
            self.candidate.op(self.weighed, self.mapped, many=self.many),
            (ops.KEEP, *x, *mapped, *carried, *rows, self.h, self.H, self.kept),
            own,
        ]


class _Memory:
    """What attention reads, made of the encoder's outputs."""

    def __init__(self, model: Seq2Seq, stack: Stack, encoder: _Encoder, rows: int):
        assert model.combine is not None
        self.ops, self.stack, self.encoder, self.score = encoder.ops, stack, encoder, model.attention.score
        self.folded, self.H, self.M = model.folded, model.config.hidden, model.combine.out_features
        items, places = encoder.items, encoder.places
        self.weights = model.attention.combine.weight.detach() if self.score == "additive" else 0
        self.mapped, self.out = torch.zeros(items * places, stack.outer), torch.zeros(rows, self.M)
        self.read = torch.zeros(items * places, stack.inner) if self.folded else encoder.outputs[-1]
        self.powers = torch.zeros(items * places, self.H) if self.score == "additive" else 0
        self.calm = torch.zeros(items, dtype=torch.long)  # 1 where keys are small
        dot = self.score == "dot"
        self.keys, self.values = (self.read, self.mapped) if dot else (self.mapped, self.mapped[:, self.H :])

    def begin(self) -> list[tuple]:
        """Keys and mapped values of every place."""
        ops, program = self.ops, []
        if self.folded:
            program.append((0, ops.FOLD, self.encoder.outputs[-1], self.read, self.H))
        program.append((0, *self.stack.op(self.read, self.mapped, many=len(self.mapped) > MANY_ROWS)))
        if self.score == "additive":
            sizes = (self.encoder.lengths, self.encoder.starts, self.H, self.calm)
            program.append((ops.POWERS, self.keys, self.keys.stride(0) * 4, self.powers, *sizes))
        return program

    def op(self, top: _Layer, items: Tensor) -> tuple:
        """What the new states and the memory make for the output layer."""
        additive = self.score == "additive"
        query, own = (top.above, top.above[:, self.H :]) if additive else (top.h, top.above)
        fed = (query, query.stride(0) * 4, own, own.stride(0) * 4)
        keys = (self.keys, self.keys.stride(0) * 4, self.powers, self.weights, self.values, self.values.stride(0) * 4)
        sizes = (self.encoder.lengths, items, self.encoder.starts, self.H, self.calm, self.encoder.places)
        return (self.ops.ATTEND, self.out, self.M, *fed, *keys, *sizes)


class CompiledSeq2Seq:
    """Search over A sources of S symbols by A * W rows; see :mod:`thalweg.kernels.cpu.recurrent_cells`.

    All that reads a layer's new state h is one product: what its next step will add of h, and what the layer above, or
    attention and output, make of it.

    Args:
        model: in evaluation mode.
        items, width: A and W; places: S; capacity: T; k: answers an item.
    """

    def __init__(self, model: Seq2Seq, items: int, width: int, places: int, capacity: int, k: int):
        self._model = weakref.ref(model)  # whoever keeps this object must not keep the model alive
        ops: Any = dispatch.search_kernels(torch.device("cpu"))
        config, rows = model.config, items * width
        self.weights = weights = _weights[model]
        self.beam = Beam.empty(items, width, k, capacity, torch.device("cpu"))
        self.lineage = torch.zeros(rows, capacity, dtype=torch.long)
        self.items = torch.arange(items).repeat_interleave(width)  # of every row
        self.encoder = _Encoder(model, weights, ops, items, places)
        past = config.hidden * {"lstm": 4, "gru": 3}.get(config.cell, 2)
        self.layers = [
            _Layer(ops, config.cell, stack, candidate, past, items, rows)
            for stack, candidate in zip(weights.layers, weights.candidates, strict=True)
        ]
        self.memory = None if weights.memory is None else _Memory(model, weights.memory, self.encoder, rows)
        self.logits = torch.zeros(rows, weights.output.outer)
        before, each = [*self.encoder.program(), *self._begin()], self._program(model)
        searched = (self.beam, self.logits[:, : model.vocab_size], self.lineage, self.items)
        self.search = ops.Search(torch.float32, before, items, each, rows, *searched)

    def _begin(self) -> list[tuple]:
        """From the encoder to the first step."""
        program, states, H, weights = [], list(self.encoder.finals), self.encoder.H, self.weights
        for n, bridge in enumerate(weights.bridge):
            mapped = torch.zeros(len(states[n]), bridge.outer)
            program.append(bridge.op(states[n], mapped, many=len(mapped) > MANY_ROWS))
            states[n] = mapped
        self.starts = states
        for n, layer in enumerate(self.layers):
            parts = [state[:, n * H :] for state in states]
            # A cell state is unbounded, a hidden state lives in (-1, 1).
            program += layer.begin(
                parts[0], parts[1] if len(parts) > 1 else None, self.encoder.slot, bool(weights.bridge)
            )
        return program if self.memory is None else [*program, *self.memory.begin()]

    def _program(self, model: Seq2Seq) -> list[tuple]:
        """A step."""
        rows = (self.lineage, self.lineage.stride(0), self.items)
        table, program = self.weights.table, []
        x: tuple[Any, ...] = (table, table.stride(0) * 4, self.beam.tokens)
        for layer in self.layers:
            program += layer.step(x, rows)
            x = (layer.above, layer.out.stride(0) * 4, 0)
        top = self.layers[-1]
        read = top.h if model.combine is None else top.above
        if self.memory is not None:
            program.append(self.memory.op(top, self.items))
            read = self.memory.out
        return [*program, self.weights.output.op(read, self.logits, many=len(self.items) > MANY_ROWS)]

    @staticmethod
    def serves(model: Seq2Seq) -> bool:
        """Whether the model is one that is searched so: float32 in evaluation mode, softmax, gated cells alone.

        What has changed of its weights is taken over: they are looked at in any case.
        """
        if not (model.config.has_softmax and model.config.has_bare_gates):
            return False
        if model.training or any(part.training for part in model.children()):
            return False
        if any(isinstance(part, ReducedLinear) for part in model.modules()):  # its products are of another kind
            return False
        parameters = list(model.parameters())
        if not all(x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() for x in parameters):
            return False
        with _lock:
            if model not in _weights:
                _weights[model] = Weights(model)
            _weights[model].read(model, parameters)
            return _weights[model].tame

    def load(self, source: Padded) -> None:
        """Put sources where they are read."""
        model = self._model()
        assert model is not None
        self.encoder.load(model, source)

    def run(self, count: int, bos: int, **request: Any) -> None:
        """Search the first ``count`` items."""
        self.search.start(bos)
        self.search.run(count, places=self.encoder.total, **request)


def compiled_plan(model: Seq2Seq, source: Padded) -> CompiledPlan | None:
    """How the model would search the sources in one call, or None where it cannot."""
    if dispatch.search_kernels(model.output.weight.device) is None or not CompiledSeq2Seq.serves(model):
        return None
    source = checked(source, model.source_embedding.num_embeddings)
    if not source.size or not source.tokens.is_cpu:
        return None
    config = model.config
    places = -(-source.tokens.size(1) // 4) * 4
    # The weights of the additive score are read where they were when the search was made.
    where = model.attention.combine.weight.data_ptr() if config.attention == "additive" else 0

    def make(items: int, width: int, capacity: int, k: int) -> CompiledSeq2Seq:
        return CompiledSeq2Seq(model, items, width, places, capacity, k)

    # A row keeps its states and what is read off them however many steps there are; few searches take less than 16.
    row = 4 * (config.decoder_layers * 9 * config.hidden + model.vocab_size)
    return CompiledPlan(
        source.size, (places, where, torch.get_num_threads()), math.inf, 16 + row // 16, make, source.part
    )
