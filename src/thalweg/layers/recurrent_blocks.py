"""Recurrent layers of any depth, each with a normalisation before it and a path round it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError
from thalweg.layers.blocks import Connection, connected
from thalweg.layers.dropout import Dropout
from thalweg.layers.norms import Norm, normalisation

if TYPE_CHECKING:
    from thalweg.layers.recurrent import Recurrent


# Normalisations that know all they need at each position alone, and so serve a decoder. Statistics over positions
# would let a position see those after it while training, and are not there yet while decoding.
STEPWISE = frozenset({"none", "layer", "rms", "weight"})

State = tuple[Tensor, ...]


class RecurrentBlock(nn.Module):
    r"""One recurrent layer f: y = x + f(norm(x)), (1 - i) x + i f(norm(x)), or f(norm(x)).

    The norm stands on f's side, so that nothing stands in the way of what goes round.

    Args:
        layer: f, of one layer; inputs: width D of x.
        residual: what goes round; mapped linearly where D is not the layer's width.
        norm: of the input to f.
        dropout: probability, on f's output.

    >>> from thalweg.layers.recurrent import Recurrent
    >>> block = RecurrentBlock(Recurrent("gru", 4, 4), 4, residual="highway", norm="layer")
    >>> block(torch.zeros(2, 5, 4))[0].shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        layer: Recurrent,
        inputs: int,
        *,
        residual: Connection = "none",
        norm: Norm = "none",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.norm = normalisation(norm, inputs)
        self.block = connected(residual, layer, inputs, layer.width)
        self.dropout = Dropout(dropout)

    @property
    def layer(self) -> Recurrent:
        """f without its norm."""
        return self.block.inner  # pyright: ignore[reportReturnType]

    def forward(
        self, x: Tensor, state: State | None = None, *, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """``x (B, T, D)``, ``state (directions, B, H)`` each -> ``(B, T, width)`` and the layer's state at the end."""
        change, final = self.layer(self.norm(x, mask), state, lengths=lengths, mask=mask)
        return self.block.join(x, self.dropout(change)), final

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One position: ``x (R, D)``, ``state (1, R, H)`` each -> ``(R, H)`` and the new state."""
        change, new = self.layer.step(self.norm(x), state)
        return self.block.join(x, self.dropout(change)), new


class RecurrentBlocks(nn.Module):
    """A stack of :class:`RecurrentBlock`; with a path round the layers, a last norm bounds what they have added up.

    Args:
        make: an unwrapped layer from its input width.
        inputs: width of what the first layer reads; layers: number of layers.
        residual, norm: of every block.
        dropout: on what each layer but the last gives.

    >>> from thalweg.layers.recurrent import Recurrent
    >>> stack = RecurrentBlocks(lambda inputs: Recurrent("gru", inputs, 4), 3, layers=8, residual="residual")
    >>> outputs, state = stack(torch.zeros(2, 5, 3))
    >>> outputs.shape, state[0].shape
    (torch.Size([2, 5, 4]), torch.Size([8, 2, 4]))
    """

    def __init__(
        self,
        make: Callable[[int], Recurrent],
        inputs: int,
        *,
        layers: int,
        residual: Connection = "none",
        norm: Norm = "none",
        dropout: float = 0.0,
    ):
        super().__init__()
        blocks: list[RecurrentBlock] = []
        width = inputs
        for n in range(layers):
            drops = dropout if n + 1 < layers else 0.0
            blocks.append(RecurrentBlock(make(width), width, residual=residual, norm=norm, dropout=drops))
            width = blocks[-1].layer.width
        self.blocks = nn.ModuleList(blocks)
        self.name: Norm = norm
        self.last = normalisation(norm if residual != "none" else "none", width)

    def forward(
        self, x: Tensor, state: State | None = None, *, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """``x (B, T, D)``, ``state (layers * directions, B, H)`` each -> outputs ``(B, T, width)`` and last state."""
        if mask is not None:
            # What goes round layers would bring padding through; as 0 it stays 0.
            x = torch.where(mask[:, :, None], x, 0)
        finals: list[State] = []
        for n, block in enumerate(self.blocks):
            assert isinstance(block, RecurrentBlock)
            D = 2 if block.layer.bidirectional else 1
            own = None if state is None else tuple(part[n * D : (n + 1) * D] for part in state)
            x, final = block(x, own, lengths=lengths, mask=mask)
            finals.append(final)
        return self.last(x, mask), tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One position: ``x (R, D)``, ``state (layers, R, H)`` each -> output ``(R, H)`` and the new state."""
        if self.name not in STEPWISE:
            raise ConfigError(
                f"{self.name} norm needs whole sequences, got one step of a decoder; choose layer, rms or weight norm"
            )
        news: list[State] = []
        for n, block in enumerate(self.blocks):
            assert isinstance(block, RecurrentBlock)
            x, new = block.step(x, tuple(part[n : n + 1] for part in state))
            news.append(new)
        return self.last(x), tuple(torch.cat(parts) for parts in zip(*news, strict=True))
