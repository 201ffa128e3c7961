"""Blocks with a path round them: residual and highway."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import check_choice

Connection = Literal["none", "residual", "highway"]
"""What goes round a block: nothing, the input itself, or as much of the input as a gate lets by."""

# A highway's gate starts at sigma(-2) = 0.12: nearly all of the input is carried (Srivastava et al., 2015, section 2).
CARRY = -2.0


class Chained(nn.Module):
    """y = f(x): nothing goes round the block.

    Args:
        inner: f.

    >>> Chained(nn.ReLU())(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """``x (..., D)`` -> ``(..., D')``; anything further is for f."""
        return self.join(x, self.inner(x, *more, **named))

    def join(self, x: Tensor, change: Tensor) -> Tensor:
        """y of an input and f of it, for callers that have computed f themselves."""
        return change


class Residual(Chained):
    r"""y = x + f(x) (He et al., 2016).

    .. math:: \frac{\partial y}{\partial x} = I + f'(x)

    With f(x) = s(Wx) that is I + diag(s'(z)) W, z = Wx: where s saturates, s' = 0, it is I and not 0.

    Args:
        inner: f.
        shortcut: what the input goes through where f changes its width; without, x goes round as it is.

    >>> block = Residual(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()))
    >>> saturated = torch.full((2,), 1e4)
    >>> torch.autograd.functional.jacobian(block, saturated)
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(self, inner: nn.Module, *, shortcut: nn.Module | None = None):
        super().__init__(inner)
        self.shortcut = shortcut

    def carried(self, x: Tensor) -> Tensor:
        """What goes round: ``x (..., D)``, mapped to f's width where there is a map."""
        return x if self.shortcut is None else self.shortcut(x)

    def join(self, x: Tensor, change: Tensor) -> Tensor:
        """x + f(x)."""
        x = self.carried(x)
        if x.shape[-1] != change.shape[-1]:
            raise ShapeError(
                f"what goes round a block must be as wide as its output, {change.shape[-1]}, got {x.shape[-1]}; "
                "give a `shortcut` from one width to the other"
            )
        return x + change


class Highway(Residual):
    r"""y = (1 - i) x + i f(x), i = sigma(W_g x + b_g) (Srivastava et al., 2015).

    .. math:: \frac{\partial y}{\partial x} = \mathrm{diag}(1 - i) + \mathrm{diag}(i) f'(x)
              + \mathrm{diag}\big((f(x) - x) \odot i \odot (1 - i)\big) W_g

    Where i saturates at 1 the identity path is closed and f'(x) is all that is left; where it saturates at 0, y = x.

    Args:
        inner: f; a width D makes f(x) = tanh(W x + b).
        inputs, outputs: widths of x and f(x), for the gate; those of f where f is made here.
        shortcut: as in :class:`Residual`.
        bias: the start of b_g; below 0, the input is carried.

    >>> block = Highway(3)
    >>> block(torch.zeros(5, 3)).shape, block.gate.bias.tolist()
    (torch.Size([5, 3]), [-2.0, -2.0, -2.0])
    """

    def __init__(
        self,
        inner: nn.Module | int,
        *,
        inputs: int | None = None,
        outputs: int | None = None,
        shortcut: nn.Module | None = None,
        bias: float = CARRY,
    ):
        if isinstance(inner, int):
            inputs, outputs = inner, inner
            inner = nn.Sequential(nn.Linear(inner, inner), nn.Tanh())
        if inputs is None:
            raise ConfigError("a highway round a module needs the width of its gate, got none; give `inputs`")
        super().__init__(inner, shortcut=shortcut)
        self.gate = nn.Linear(inputs, inputs if outputs is None else outputs)
        nn.init.constant_(self.gate.bias, bias)

    def join(self, x: Tensor, change: Tensor) -> Tensor:
        """(1 - i) x + i f(x), as x + i (f(x) - x)."""
        carried = self.carried(x)
        # Not torch.lerp: it refuses the mixed types that autocast makes.
        return carried + torch.sigmoid(self.gate(x)) * (change - carried)


def connected(name: Connection, inner: nn.Module, inputs: int, outputs: int) -> Chained:
    """A block of that name round f from width D to D'; what goes round is mapped linearly where D' is not D.

    That map starts orthogonal: like the identity, it leaves lengths and gradients as they are, as far as D' allows.

    >>> connected("residual", nn.Linear(2, 3), 2, 3).shortcut
    Linear(in_features=2, out_features=3, bias=False)
    """
    check_choice("residual", name, get_args(Connection))
    if name == "none":
        return Chained(inner)
    # Without a bias, so that what is 0 in padding stays 0.
    shortcut = None if inputs == outputs else nn.Linear(inputs, outputs, bias=False)
    if shortcut is not None:
        nn.init.orthogonal_(shortcut.weight)
    if name == "residual":
        return Residual(inner, shortcut=shortcut)
    return Highway(inner, inputs=inputs, outputs=outputs, shortcut=shortcut)
