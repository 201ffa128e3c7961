"""Recurrent stacks: LSTM, GRU and plain cells, run over whole sequences or one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from thalweg.errors import ShapeError
from thalweg.layers.blocks import Connection
from thalweg.layers.dropout import Dropout
from thalweg.layers.norms import Norm, normalise_weights
from thalweg.layers.plain_recurrence import Initialisation, PlainRecurrence, initialise
from thalweg.layers.recurrent_blocks import RecurrentBlocks
from thalweg.limits import check_choice

Cell = Literal["lstm", "gru", "gru-reset-before", "rnn-tanh", "rnn-relu", "rnn-tanh-pre", "rnn-relu-pre"]
"""Kinds of cell; ``gru`` applies the reset gate after the recurrent matrix (torch), ``gru-reset-before`` before it.

``rnn-...`` are plain recurrences, whose state is taken before the activation where the name ends in ``-pre``.
"""


class ResetBeforeGRU(nn.Module):
    r"""GRU layers whose reset gate acts before the recurrent matrix (Cho et al., 2014).

    .. math::
        i_f = \sigma(W_f x + U_f h), \quad i_o = \sigma(W_o x + U_o h), \quad
        \tilde h = \tanh(W x + U (i_f \odot h) + b), \quad h' = i_o \odot h + (1 - i_o) \odot \tilde h

    Torch's own GRU computes :math:`i_f \odot (U h)` instead, which one matrix product can serve; here the candidate
    waits for the gates, two products a step. The projections of all inputs are one product.

    >>> layer = ResetBeforeGRU(3, 4)
    >>> outputs, final = layer(torch.zeros(2, 5, 3))
    >>> outputs.shape, final.shape
    (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(self, inputs: int, hidden: int, *, layers: int = 1, bidirectional: bool = False, dropout: float = 0.0):
        super().__init__()
        self.hidden, self.layers, self.directions = hidden, layers, 2 if bidirectional else 1
        self.dropout = Dropout(dropout)
        bound = 1 / math.sqrt(hidden)
        for name, rows, columns in self._parameter_shapes(inputs):
            shape = (rows, columns) if columns else (rows,)
            self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def _parameter_shapes(self, inputs: int) -> list[tuple[str, int, int]]:
        H = self.hidden
        shapes = []
        for layer in range(self.layers):
            width = inputs if layer == 0 else H * self.directions
            for direction in range(self.directions):
                end = f"{layer}_{direction}"
                shapes += [(f"input_{end}", 3 * H, width), (f"gates_{end}", 2 * H, H)]
                shapes += [(f"candidate_{end}", H, H), (f"bias_{end}", 3 * H, 0)]
        return shapes

    def cell(self, projected: Tensor, hidden: Tensor, end: str) -> Tensor:
        """One step of layer and direction ``end``: ``projected (B, 3H)`` inputs, ``hidden (B, H)`` -> ``(B, H)``."""
        return self._advance(projected, hidden, *self._matrices(end))

    def _matrices(self, end: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"gates_{end}").t(), getattr(self, f"candidate_{end}").t()

    def _advance(self, projected: Tensor, hidden: Tensor, gating: Tensor, weighing: Tensor) -> Tensor:
        H = self.hidden
        gates = torch.sigmoid(projected[:, : 2 * H] + hidden @ gating)
        reset, keep = gates.chunk(2, dim=1)
        candidate = torch.tanh(projected[:, 2 * H :] + (reset * hidden) @ weighing)
        return candidate + keep * (hidden - candidate)

    def project(self, x: Tensor, end: str) -> Tensor:
        """``W x + b`` for gates and candidate, over any leading shape."""
        return nn.functional.linear(x, getattr(self, f"input_{end}"), getattr(self, f"bias_{end}"))

    def forward(self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x (B, T, D)``, ``state (L, B, H)``, ``mask (B, T)`` -> outputs ``(B, T, H * directions)``, final state.

        Where the mask is false the state stands still, so that the final state is that of the last real position
        (of the first one, for the backward direction).
        """
        finals = []
        for layer in range(self.layers):
            if layer:
                x = self.dropout(x)
            sides = []
            for direction in range(self.directions):
                end, index = f"{layer}_{direction}", layer * self.directions + direction
                projected, matrices = self.project(x, end), self._matrices(end)
                hidden = x.new_zeros(x.size(0), self.hidden) if state is None else state[index]
                outputs: list[Tensor] = []
                steps = range(x.size(1)) if direction == 0 else range(x.size(1) - 1, -1, -1)
                for t in steps:
                    new = self._advance(projected[:, t], hidden, *matrices)
                    hidden = new if mask is None else torch.where(mask[:, t, None], new, hidden)
                    outputs.append(hidden)
                sides.append(torch.stack(outputs if direction == 0 else outputs[::-1], dim=1))
                finals.append(hidden)
            x = torch.cat(sides, dim=2) if self.directions == 2 else sides[0]
        return x, torch.stack(finals)


class Recurrent(nn.Module):
    """A stack of recurrent layers of one kind of cell.

    Whole sequences go through torch's fused kernels, in one call where nothing stands between the layers;
    :meth:`step` advances one position with the same parameters, for decoding. The state is a tuple of
    ``(layers * directions, B, H)`` tensors: ``(h, c)`` for LSTM, ``(h,)`` for others.

    Args:
        cell: ``lstm``, ``gru``, ``gru-reset-before``, ``rnn-tanh``, ``rnn-relu``, ``rnn-tanh-pre`` or ``rnn-relu-pre``.
        inputs: width D of the inputs.
        hidden: width H of the state, per direction.
        layers: number of layers.
        bidirectional: also run from the end; outputs are then 2H wide.
        dropout: between layers.
        residual: ``residual`` or ``highway`` round every layer; a linear map takes the input to the first one's width.
        norm: ``batch``, ``layer``, ``instance`` or ``rms`` before every layer, and after the last one where something
            goes round them; ``weight`` normalises the layers' matrices. Only ``layer``, ``rms`` and ``weight`` can
            be stepped.
        initialisation: ``default`` or ``orthogonal``.

    >>> stack = Recurrent("lstm", 3, 4, layers=2)
    >>> outputs, state = stack(torch.zeros(2, 5, 3))
    >>> outputs.shape, len(state), state[0].shape
    (torch.Size([2, 5, 4]), 2, torch.Size([2, 2, 4]))
    >>> output, state = stack.step(torch.zeros(2, 3), state)
    >>> output.shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        cell: Cell,
        inputs: int,
        hidden: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        residual: Connection = "none",
        norm: Norm = "none",
        initialisation: Initialisation = "default",
    ):
        super().__init__()
        check_choice("cell", cell, get_args(Cell))
        self.cell, self.layers, self.bidirectional = cell, layers, bidirectional
        self.width = hidden * (2 if bidirectional else 1)
        between = dropout if layers > 1 else 0.0
        self.between = Dropout(between)
        # Torch's kernels give a stack's outputs after the last layer alone, and `-pre` needs those of each.
        if residual == "none" and norm in ("none", "weight") and not (cell.endswith("-pre") and layers > 1):
            self.core = _build_core(cell, inputs, hidden, layers, bidirectional, between)
            initialise(self.core, hidden, initialisation)
            if norm == "weight":
                normalise_weights(self.core)
            return
        inner: Norm = "weight" if norm == "weight" else "none"

        def make(width: int) -> Recurrent:
            return Recurrent(
                cell, width, hidden, bidirectional=bidirectional, norm=inner, initialisation=initialisation
            )

        self.core = RecurrentBlocks(make, inputs, layers=layers, residual=residual, norm=norm, dropout=between)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run over ``x (B, T, D)``; ``lengths (B,)`` and ``mask (B, T)`` say where the sequences end.

        Returns outputs ``(B, T, width)`` and the state after the last real position. Rows of one common length skip
        the packing that ragged ones need: length-bucketed batches mostly do.
        """
        T = x.size(1)
        if lengths is None and mask is not None:
            lengths = mask.sum(dim=1)
        ragged = lengths is not None and len(lengths) > 0 and int(lengths.min()) < T
        if isinstance(self.core, RecurrentBlocks):
            if ragged and mask is None:
                assert lengths is not None
                mask = torch.arange(T, device=x.device) < lengths.to(x.device)[:, None]
            return self.core(x, state, lengths=lengths if ragged else None, mask=mask if ragged else None)
        if isinstance(self.core, PlainRecurrence):
            start = None if state is None else state[0]
            outputs, final = self.core(x, start, lengths=lengths if ragged else None)
            return outputs, (final,)
        if self.cell == "gru-reset-before":
            if lengths is not None and ragged and mask is None:
                mask = torch.arange(T, device=x.device) < lengths.to(x.device)[:, None]
            outputs, final = self.core(x, None if state is None else state[0], mask if ragged else None)
            return outputs, (final,)
        start = state if state is None or self.cell == "lstm" else state[0]
        if not ragged:
            outputs, final = self.core(x, start)
        else:
            assert lengths is not None
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            outputs, final = self.core(packed, start)
            outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=T)
        return outputs, final if isinstance(final, tuple) else (final,)

    def project(self, x: Tensor) -> Tensor:
        """What the first layer's cell adds of an input ``(..., D)``: one row per symbol serves a whole decoding.

        Blocks need the input itself: it is given back.
        """
        if isinstance(self.core, RecurrentBlocks):
            return x
        if isinstance(self.core, ResetBeforeGRU):
            return self.core.project(x, "0_0")
        if isinstance(self.core, PlainRecurrence):
            return self.core.project(x)
        bias = self._weight("bias_ih", 0)
        if self.cell not in ("gru", "gru-reset-before"):
            bias = bias + self._weight("bias_hh", 0)
        return nn.functional.linear(x, self._weight("weight_ih", 0), bias)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...], *, projected: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Advance one position: ``x (R, D)`` and the state of R rows -> output ``(R, H)`` and the new state.

        ``projected`` says that ``x`` has been through :meth:`project` already.
        """
        if self.bidirectional:
            raise ShapeError(
                "`step` needs a unidirectional stack, got a bidirectional one; build the decoder without it"
            )
        if isinstance(self.core, RecurrentBlocks):
            return self.core.step(x, state)
        if isinstance(self.core, PlainRecurrence):
            advance = self.core.step_projected if projected else self.core.step
            output, new = advance(x, state[0][0])
            return output, (new.unsqueeze(0),)
        news: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            if layer:
                x = self.between(x)
            old = tuple(part[layer] for part in state)
            advance = self._step_projected if projected and layer == 0 else self._step_layer
            news.append(advance(x, old, layer))
            x = news[-1][0]
        if self.layers == 1:
            return x, tuple(part.unsqueeze(0) for part in news[0])
        return x, tuple(torch.stack(parts) for parts in zip(*news, strict=True))

    def _step_layer(self, x: Tensor, old: tuple[Tensor, ...], layer: int) -> tuple[Tensor, ...]:
        if isinstance(self.core, ResetBeforeGRU):
            end = f"{layer}_0"
            return (self.core.cell(self.core.project(x, end), old[0], end),)
        weights = [self._weight(name, layer) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        if self.cell == "lstm":
            return torch.lstm_cell(x, old, *weights)
        kernel = {"gru": torch.gru_cell, "rnn-tanh": torch.rnn_tanh_cell, "rnn-relu": torch.rnn_relu_cell}[self.cell]
        return (kernel(x, old[0], *weights),)

    def _step_projected(self, x: Tensor, old: tuple[Tensor, ...], layer: int) -> tuple[Tensor, ...]:
        hidden = old[0]
        if isinstance(self.core, ResetBeforeGRU):
            return (self.core.cell(x, hidden, f"{layer}_0"),)
        H = hidden.size(1)
        recurrent = self._weight("weight_hh", layer).t()
        if self.cell == "lstm":
            gates = torch.addmm(x, hidden, recurrent)
            enter, forget = gates[:, : 2 * H].sigmoid().chunk(2, dim=1)
            memory = torch.addcmul(forget * old[1], enter, gates[:, 2 * H : 3 * H].tanh())
            return gates[:, 3 * H :].sigmoid() * memory.tanh(), memory
        if self.cell != "gru":
            total = torch.addmm(x, hidden, recurrent)
            return (total.tanh() if self.cell == "rnn-tanh" else total.relu(),)
        gates = torch.addmm(self._weight("bias_hh", layer), hidden, recurrent)
        reset, keep = (x[:, : 2 * H] + gates[:, : 2 * H]).sigmoid().chunk(2, dim=1)
        candidate = torch.addcmul(x[:, 2 * H :], reset, gates[:, 2 * H :]).tanh()
        return (torch.lerp(candidate, hidden, keep),)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Torch's own, after a move to another type or device; its recurrent layers then list their matrices anew.

        Normalised matrices are computed, and a list that holds their graphs could not be copied.
        """
        super()._apply(fn, recurse)
        for part in self.modules():
            if isinstance(part, nn.RNNBase) and is_parametrized(part):
                part._flat_weights = [weight.detach() for weight in part._flat_weights if weight is not None]
        return self

    def _weight(self, name: str, layer: int) -> Tensor:
        return getattr(self.core, f"{name}_l{layer}")


def _build_core(cell: Cell, inputs: int, hidden: int, layers: int, bidirectional: bool, dropout: float) -> nn.Module:
    """Layers with nothing between them but dropout."""
    if cell == "gru-reset-before":
        return ResetBeforeGRU(inputs, hidden, layers=layers, bidirectional=bidirectional, dropout=dropout)
    if cell.endswith("-pre"):
        activation = cell.removeprefix("rnn-").removesuffix("-pre")
        return PlainRecurrence(inputs, hidden, activation=activation, place="pre", bidirectional=bidirectional)
    shape = {"batch_first": True, "bidirectional": bidirectional, "dropout": dropout}
    if cell.startswith("rnn-"):
        return nn.RNN(inputs, hidden, layers, nonlinearity=cell.removeprefix("rnn-"), **shape)
    return (nn.LSTM if cell == "lstm" else nn.GRU)(inputs, hidden, layers, **shape)
