"""Plain recurrences, with the activation before or after the matrix, and how recurrent matrices start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from thalweg.errors import ShapeError
from thalweg.limits import check_choice

ActivationPlace = Literal["post", "pre"]
"""Where the activation stands: ``post`` on the sum, so that states are activated; ``pre`` on the last state."""

Initialisation = Literal["default", "orthogonal"]
"""How recurrent layers start: as torch's do, uniform in 1/sqrt(H), or with orthogonal matrices and no biases."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "identity": lambda x: x,
}
"""The activations s of plain recurrences by name; torch has kernels for the first two."""


def initialise(module: nn.Module, hidden: int, name: Initialisation = "default") -> None:
    """Set the start of a recurrent layer's parameters; ``default`` leaves them as they are.

    ``orthogonal``: each gate's H x H recurrent matrix, and each gate's H x D input matrix, has orthonormal rows or
    columns, and biases are 0: a linear recurrence then neither shrinks nor stretches what it carries (Saxe et al.,
    2014).

    Args:
        module: its matrices have a multiple of H rows, H for each gate.
        hidden: H.

    >>> layer = nn.GRU(2, 2)
    >>> initialise(layer, 2, "orthogonal")
    >>> U = layer.weight_hh_l0[:2]
    >>> torch.allclose(U @ U.T, torch.eye(2), atol=1e-6)
    True
    """
    check_choice("initialisation", name, get_args(Initialisation))
    if name == "default":
        return
    for parameter in module.parameters():
        if parameter.dim() < 2:
            nn.init.zeros_(parameter)
            continue
        with torch.no_grad():
            for gate in parameter.split(hidden):
                nn.init.orthogonal_(gate)


class PlainRecurrence(nn.Module):
    r"""One layer of a recurrence without gates (Elman, 1990).

    .. math:: \text{post:}\; g_t = s(W g_{t-1} + U x_t + b), \qquad
              \text{pre:}\; h_t = W s(h_{t-1}) + U x_t + b

    They are one network: from h_0 and g_0 = s(h_0), g_t = s(h_t) for all t. Outputs are g_t either way, so that layers
    can be stacked; the state is g_t with ``post`` and h_t with ``pre``, whose range no activation bounds.

    With tanh and relu, torch's kernels run the sequence, for ``pre`` too: h_t = W g_{t-1} + U x_t + b is one more
    product at the end. Other activations take T steps. O(T H (H + D)) either way; b is the sum of torch's two biases.

    Args:
        inputs: D; hidden: H, of each direction.
        activation: s, a name in :data:`ACTIVATIONS`.
        place: ``post`` or ``pre``.
        bidirectional: also from the end; outputs are then 2H wide.
        initialisation: ``default`` or ``orthogonal``.

    >>> layer = PlainRecurrence(3, 4, activation="relu", place="pre", initialisation="orthogonal")
    >>> outputs, state = layer(torch.zeros(2, 5, 3))
    >>> outputs.shape, state.shape
    (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        activation: str = "tanh",
        place: ActivationPlace = "post",
        bidirectional: bool = False,
        initialisation: Initialisation = "default",
    ):
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("place", place, get_args(ActivationPlace))
        self.activation, self.place, self.hidden = activation, place, hidden
        self.directions = 2 if bidirectional else 1
        self.fused = activation in ("tanh", "relu")
        kernel = activation if self.fused else "tanh"
        self.core = nn.RNN(inputs, hidden, nonlinearity=kernel, batch_first=True, bidirectional=bidirectional)
        initialise(self.core, hidden, initialisation)

    def activate(self, states: Tensor) -> Tensor:
        """Outputs g of states: s(h) with ``pre``, the states themselves with ``post``."""
        return ACTIVATIONS[self.activation](states) if self.place == "pre" else states

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x (B, T, D)``, ``state (directions, B, H)`` -> outputs ``(B, T, H * directions)``, state at the end.

        ``lengths (B,)`` or ``mask (B, T)``, where sequences end; the backward direction starts at its row's last real
        position. Past the end outputs mean nothing.
        """
        if lengths is None and mask is not None:
            lengths = mask.sum(dim=1)
        if state is None:
            state = x.new_zeros(self.directions, x.size(0), self.hidden)
        if lengths is not None:
            # Padding may hold anything; 0 keeps it out of the gradients.
            real = torch.arange(x.size(1), device=x.device) < lengths.to(x.device)[:, None]
            x = torch.where(real[:, :, None], x, 0)
        start = self.activate(state)
        if self.fused:
            outputs, final = self._run_kernel(x, start, lengths)
        else:
            outputs, final = self._run_steps(x, start, lengths)
        if self.place == "post":
            return outputs, final
        states = self._states(x, outputs, start, lengths)
        B, T, H = x.size(0), x.size(1), self.hidden
        ends = torch.full((B,), T, device=x.device) if lengths is None else lengths.to(x.device)
        finals = [states[torch.arange(B, device=x.device), ends - 1, :H]]
        if self.directions == 2:
            finals.append(states[:, 0, H:])
        return outputs, torch.stack(finals)

    def states(self, x: Tensor, state: Tensor | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """``(B, T, H * directions)``: every h_t with ``pre``, every g_t with ``post``."""
        if state is None:
            state = x.new_zeros(self.directions, x.size(0), self.hidden)
        outputs, _ = self(x, state, lengths=lengths)
        return outputs if self.place == "post" else self._states(x, outputs, self.activate(state), lengths)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``x (R, D)``, ``state (R, H)`` of a layer with one direction -> output ``(R, H)`` and new state."""
        return self.step_projected(self.project(x, ""), state)

    def step_projected(self, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`step` from ``projected (R, H)``, U x + b."""
        if self.directions == 2:
            raise ShapeError("`step` needs a layer of one direction, got two; build it without `bidirectional`")
        total = torch.addmm(projected, self.activate(state), self._recurrent("").t())
        activated = ACTIVATIONS[self.activation](total)
        return activated, total if self.place == "pre" else activated

    def project(self, x: Tensor, end: str = "") -> Tensor:
        """U x + b over any leading shape; ``end`` is ``_reverse`` for the backward direction."""
        weight, bias, more = (getattr(self.core, f"{name}_l0{end}") for name in ("weight_ih", "bias_ih", "bias_hh"))
        return nn.functional.linear(x, weight, bias + more)

    def _recurrent(self, end: str) -> Tensor:
        return getattr(self.core, f"weight_hh_l0{end}")

    def _ends(self) -> tuple[str, ...]:
        return ("", "_reverse")[: self.directions]

    def _run_kernel(self, x: Tensor, start: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        if lengths is None or not len(lengths) or int(lengths.min()) == x.size(1):
            return self.core(x, start)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, final = self.core(packed, start)
        return pad_packed_sequence(outputs, batch_first=True, total_length=x.size(1))[0], final

    def _run_steps(self, x: Tensor, start: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """The recursion g_t = s(W g_{t-1} + U x_t + b) itself; past a row's end its state stands still."""
        T, sides, finals = x.size(1), [], []
        mask = None if lengths is None else torch.arange(T, device=x.device) < lengths.to(x.device)[:, None]
        for end, last in zip(self._ends(), start, strict=True):
            projected, recurrent = self.project(x, end), self._recurrent(end).t()
            outputs: list[Tensor] = []
            for t in range(T - 1, -1, -1) if end else range(T):
                new = ACTIVATIONS[self.activation](torch.addmm(projected[:, t], last, recurrent))
                last = new if mask is None else torch.where(mask[:, t, None], new, last)
                outputs.append(last)
            sides.append(torch.stack(outputs[::-1] if end else outputs, dim=1))
            finals.append(last)
        return torch.cat(sides, dim=2), torch.stack(finals)

    def _states(self, x: Tensor, outputs: Tensor, start: Tensor, lengths: Tensor | None) -> Tensor:
        """h_t = W g_{t-1} + U x_t + b of all positions at once, from the outputs g."""
        H, T, sides = self.hidden, x.size(1), []
        for n, end in enumerate(self._ends()):
            own = outputs[:, :, n * H : (n + 1) * H]
            if not end:
                before = torch.cat((start[n].unsqueeze(1), own[:, :-1]), dim=1)
            else:
                before = torch.cat((own[:, 1:], start[n].unsqueeze(1)), dim=1)
                if lengths is not None:
                    ends = torch.arange(T, device=x.device) == lengths.to(x.device)[:, None] - 1
                    before = torch.where(ends[:, :, None], start[n].unsqueeze(1), before)
            sides.append(self.project(x, end) + nn.functional.linear(before, self._recurrent(end)))
        return torch.cat(sides, dim=2)
