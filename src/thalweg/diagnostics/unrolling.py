"""Recurrent layers step by step, so that every state and gate can be looked at; same weights, same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from thalweg.layers.recurrent import ResetBeforeGRU

Gates = dict[str, Tensor]
# One step of a cell: projected input (B, G), hidden (B, H), memory (B, H; of LSTMs) -> both, new, and the gates.
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Gates]]

# Which nonlinearity makes each gate; the rest is tanh (relu in relu cells).
_SIGMOID = {"input", "forget", "output", "reset", "update"}


@dataclass
class LayerTrace:
    """One recurrent layer in one direction, as it ran over a batch.

    Attributes:
        name: of the layer, counted from 1, such as ``encoder 3`` or ``encoder 3 backward``.
        stack, depth, backward: what the name is made of.
        cell: ``lstm``, ``gru``, ``gru-reset-before``, ``rnn-tanh`` or ``rnn-relu``.
        hidden, memory: T tensors ``(B, H)`` in the graph, in the order of positions; memory of LSTMs alone.
        gates: by name ``(B, T, H)``, detached.
        mask: ``(B, T)`` bool, true where a row has a symbol; None where all have T.
        projected: ``(B, T, G)``, detached: what the cell reads of its input.
        start: the state before the first step, ``(B, H)`` each, detached.
        step: the cell, with the weights it had.
        recurrent: the recurrent matrices by gate, ``(H, H)`` each, detached.

    >>> lstm = nn.LSTM(2, 3, batch_first=True)
    >>> with unrolled(lstm) as traces:
    ...     _ = lstm(torch.zeros(1, 4, 2))
    >>> traces[0].name, len(traces[0].hidden), sorted(traces[0].gates)
    ('layer 1', 4, ['candidate', 'forget', 'input', 'output'])
    """

    name: str
    stack: str
    depth: int
    backward: bool
    cell: str
    hidden: list[Tensor]
    memory: list[Tensor]
    gates: Gates
    mask: Tensor | None
    projected: Tensor
    start: tuple[Tensor, Tensor]
    step: Step = field(repr=False)
    recurrent: Gates = field(repr=False)

    @property
    def size(self) -> int:
        """Numbers in a state: H, and 2H in an LSTM, whose state is h and c."""
        H = self.start[0].shape[1]
        return 2 * H if self.cell == "lstm" else H

    def states(self, rows: int | None = None) -> Tensor:
        """``(B, size)`` the state before the first step."""
        parts = self.start if self.cell == "lstm" else self.start[:1]
        return torch.cat([part[:rows] for part in parts], dim=1)

    def advance(self, projected: Tensor, state: Tensor) -> Tensor:
        """One step from ``state (B, size)`` to the next, for :func:`thalweg.diagnostics.jacobians.span_spectra`."""
        H = self.start[0].shape[1]
        if self.cell != "lstm":
            return self.step(projected, state, state)[0]
        hidden, memory, _ = self.step(projected, state[:, :H], state[:, H:])
        return torch.cat((hidden, memory), dim=1)

    @staticmethod
    def is_sigmoid(gate: str) -> bool:
        """Whether a gate lies between 0 and 1."""
        return gate in _SIGMOID


def layer_name(stack: str, depth: int, *, backward: bool = False) -> str:
    """What a layer is called: its stack and its number from 1.

    >>> layer_name("encoder", 2), layer_name("", 1, backward=True)
    ('encoder 2', 'layer 1 backward')
    """
    return f"{stack or 'layer'} {depth}" + (" backward" if backward else "")


@contextmanager
def unrolled(model: nn.Module) -> Iterator[list[LayerTrace]]:
    """Inside, the model's recurrent layers run step by step, and each call adds a trace for every layer.

    Torch's LSTM, GRU and RNN (without projections) and :class:`~thalweg.layers.recurrent.ResetBeforeGRU` are stood in
    for; all else, blocks round layers included, runs as it does. Values and gradients are the same up to rounding, in
    O(L T) small steps: for looking, not for training.

    >>> net = nn.GRU(2, 3, num_layers=2, bidirectional=True)
    >>> with unrolled(net) as traces:
    ...     outputs, _ = net(torch.zeros(4, 1, 2))
    >>> [trace.name for trace in traces]
    ['layer 1', 'layer 1 backward', 'layer 2', 'layer 2 backward']
    """
    traces: list[LayerTrace] = []
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    if isinstance(model, (nn.RNNBase, ResetBeforeGRU)):
        stand_in = _stand_in(model, "", traces)
        model.forward, before = stand_in.forward, model.forward  # type: ignore[method-assign]
        try:
            yield traces
        finally:
            model.forward = before  # type: ignore[method-assign]
            vars(model).pop("forward", None)
        return
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.RNNBase, ResetBeforeGRU)) and not getattr(child, "proj_size", 0):
                swapped.append((parent, name, child))
                parent._modules[name] = _stand_in(child, f"{path}.{name}".removeprefix("."), traces)
    try:
        yield traces
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child


def _place(path: str) -> tuple[str, int]:
    """The stack that a module's path names, and how many layers lie below it there."""
    words, below = [], 0
    for word in path.split("."):
        if word.isdigit():
            below = int(word)
        elif word not in ("core", "blocks", "block", "inner", "layers", "layer", ""):
            words.append(word)
    return ".".join(words), below


def _stand_in(core: nn.RNNBase | ResetBeforeGRU, path: str, traces: list[LayerTrace]) -> _Unrolled:
    kind = _UnrolledResetBefore if isinstance(core, ResetBeforeGRU) else _Unrolled
    return kind(core, path, traces)


class _Unrolled(nn.Module):
    """Stands in for torch's recurrent layers, and answers for their attributes."""

    def __init__(self, core: Any, path: str, traces: list[LayerTrace]):
        super().__init__()
        self.inner = core
        self._traces, (self._stack, self._below) = traces, _place(path)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        core, lengths = self.inner, None
        packed = isinstance(x, PackedSequence)
        if packed:
            x, lengths = pad_packed_sequence(x, batch_first=True)
        flat = not packed and x.dim() == 2
        if flat:
            x = x.unsqueeze(0)
            state = tuple(part.unsqueeze(1) for part in state) if isinstance(state, tuple) else state
            state = state.unsqueeze(1) if isinstance(state, Tensor) else state
        turned = not packed and not flat and not core.batch_first
        x = x.transpose(0, 1) if turned else x
        starts = state if isinstance(state, tuple) else (state,)
        mask = None if lengths is None else torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
        x, finals = self._run(x, starts, mask)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x = x.transpose(0, 1) if turned else x
        if flat:
            x, finals = x.squeeze(0), tuple(part.squeeze(1) for part in finals)
        return x, finals if core.mode == "LSTM" else finals[0]

    def _run(self, x: Tensor, starts: tuple[Any, ...], mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        layers, ends, size = self._shape()
        finals: list[tuple[Tensor, Tensor]] = []
        for layer in range(layers):
            x = self._between(x) if layer else x
            sides = []
            for end in range(ends):
                cell, step, projected, recurrent = self._cell(x, layer, end)
                zeros = x.new_zeros(len(x), size)
                begin = [zeros if part is None else part[layer * ends + end] for part in (*starts, None)[:2]]
                hidden, memory, final, gates = _roll(step, projected, begin[0], begin[1], mask, backward=end == 1)
                depth = self._below + layer + 1
                self._traces.append(
                    LayerTrace(
                        name=layer_name(self._stack, depth, backward=end == 1),
                        stack=self._stack,
                        depth=depth,
                        backward=end == 1,
                        cell=cell,
                        hidden=hidden,
                        memory=memory if cell == "lstm" else [],
                        gates={name: torch.stack([part[name] for part in gates], 1).detach() for name in gates[0]},
                        mask=mask,
                        projected=projected.detach(),
                        start=(begin[0].detach(), begin[1].detach()),
                        step=step,
                        recurrent={name: part.detach() for name, part in recurrent.items()},
                    )
                )
                sides.append(torch.stack(hidden, dim=1))
                finals.append(final)
            x = torch.cat(sides, dim=2) if ends == 2 else sides[0]
        return x, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _shape(self) -> tuple[int, int, int]:
        """Layers, directions and hidden units."""
        core = self.inner
        return core.num_layers, 2 if core.bidirectional else 1, core.hidden_size

    def _between(self, x: Tensor) -> Tensor:
        """What happens to the output of a layer before the next one reads it."""
        return nn.functional.dropout(x, self.inner.dropout, self.training) if self.inner.dropout else x

    def _cell(self, x: Tensor, layer: int, end: int) -> tuple[str, Step, Tensor, Gates]:
        """What kind of cell it is, the cell, what it reads of its input, its recurrent matrices."""
        core = self.inner
        step, matrix, bias, recurrent = _torch_cell(core, layer, end)
        kinds = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn-tanh", "RNN_RELU": "rnn-relu"}
        return kinds[core.mode], step, nn.functional.linear(x, matrix, bias), recurrent


class _UnrolledResetBefore(_Unrolled):
    """Stands in for :class:`ResetBeforeGRU`."""

    def forward(self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, finals = self._run(x, (state,), mask)
        return x, finals[0]

    def _shape(self) -> tuple[int, int, int]:
        return self.inner.layers, self.inner.directions, self.inner.hidden

    def _between(self, x: Tensor) -> Tensor:
        return self.inner.dropout(x)

    def _cell(self, x: Tensor, layer: int, end: int) -> tuple[str, Step, Tensor, Gates]:
        name = f"{layer}_{end}"
        gating, weighing = self.inner._matrices(name)
        reset, update = gating.t().chunk(2)
        recurrent = {"reset": reset, "update": update, "candidate": weighing.t()}
        return "gru-reset-before", _reset_before(gating, weighing), self.inner.project(x, name), recurrent


# Hidden and memory states by position, the state at the end, and the gates by position.
_Rolled = tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor], list[Gates]]


def _roll(
    step: Step, projected: Tensor, hidden: Tensor, memory: Tensor, mask: Tensor | None, *, backward: bool
) -> _Rolled:
    T = projected.shape[1]
    hiddens, memories, gates = [], [], []
    for t in range(T - 1, -1, -1) if backward else range(T):
        new, kept, gated = step(projected[:, t], hidden, memory)
        if mask is not None:  # where a row has ended its state stands still
            real = mask[:, t, None]
            new, kept = torch.where(real, new, hidden), torch.where(real, kept, memory)
        hidden, memory = new, kept
        hiddens.append(hidden)
        memories.append(memory)
        gates.append(gated)
    if backward:
        hiddens, memories, gates = hiddens[::-1], memories[::-1], gates[::-1]
    return hiddens, memories, (hidden, memory), gates


def _torch_cell(core: nn.RNNBase, layer: int, end: int) -> tuple[Step, Tensor, Tensor | None, Gates]:
    """The cell of a layer and direction, the matrix and bias that project its inputs, its recurrent matrices."""
    tail = f"_l{layer}" + ("_reverse" if end else "")
    matrix, recurrent = (getattr(core, f"weight_{name}{tail}") for name in ("ih", "hh"))
    bias, more = (getattr(core, f"bias_{name}{tail}") if core.bias else None for name in ("ih", "hh"))
    if core.mode == "GRU":
        names = ("reset", "update", "candidate")
        return _gru(recurrent, more), matrix, bias, dict(zip(names, recurrent.chunk(3), strict=True))
    both = None if bias is None or more is None else bias + more
    if core.mode == "LSTM":
        names = ("input", "forget", "candidate", "output")
        return _lstm(recurrent), matrix, both, dict(zip(names, recurrent.chunk(4), strict=True))
    activation = torch.tanh if core.mode == "RNN_TANH" else torch.relu
    return _plain(recurrent, activation), matrix, both, {"state": recurrent}


def _lstm(recurrent: Tensor) -> Step:
    def step(projected: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Gates]:
        enter, forget, candidate, leave = (projected + hidden @ recurrent.t()).chunk(4, dim=1)
        enter, forget, leave = enter.sigmoid(), forget.sigmoid(), leave.sigmoid()
        candidate = candidate.tanh()
        memory = forget * memory + enter * candidate
        gates = {"input": enter, "forget": forget, "candidate": candidate, "output": leave}
        return leave * memory.tanh(), memory, gates

    return step


def _gru(recurrent: Tensor, bias: Tensor | None) -> Step:
    def step(projected: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Gates]:
        own = nn.functional.linear(hidden, recurrent, bias)
        H = hidden.shape[1]
        reset, update = (projected[:, : 2 * H] + own[:, : 2 * H]).sigmoid().chunk(2, dim=1)
        candidate = (projected[:, 2 * H :] + reset * own[:, 2 * H :]).tanh()
        hidden = candidate + update * (hidden - candidate)
        return hidden, hidden, {"reset": reset, "update": update, "candidate": candidate}

    return step


def _reset_before(gating: Tensor, weighing: Tensor) -> Step:
    def step(projected: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Gates]:
        H = hidden.shape[1]
        reset, update = (projected[:, : 2 * H] + hidden @ gating).sigmoid().chunk(2, dim=1)
        candidate = (projected[:, 2 * H :] + (reset * hidden) @ weighing).tanh()
        hidden = candidate + update * (hidden - candidate)
        return hidden, hidden, {"reset": reset, "update": update, "candidate": candidate}

    return step


def _plain(recurrent: Tensor, activation: Callable[[Tensor], Tensor]) -> Step:
    def step(projected: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Gates]:
        hidden = activation(projected + hidden @ recurrent.t())
        return hidden, hidden, {"state": hidden}

    return step
