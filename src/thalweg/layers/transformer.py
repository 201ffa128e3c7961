"""Transformer layers and stacks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError
from thalweg.layers.dropout import Dropout
from thalweg.layers.multihead import Attended, CrossAttention, SelfAttention
from thalweg.layers.norms import Norm, normalisation, normalise_weights
from thalweg.layers.recurrent_blocks import STEPWISE
from thalweg.limits import check_choice

Activation = Literal["relu", "gelu", "silu", "swiglu", "geglu"]
"""The feed-forward block's nonlinearity; ``swiglu`` and ``geglu`` have a second, gating matrix."""

NormPlace = Literal["pre", "post"]
"""A norm before each block, x + f(norm(x)), or after its sum, norm(x + f(x))."""

_FUNCTIONS = {"relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}


def gelu_tanh(x: Tensor) -> Tensor:
    r"""x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, near x Phi(x) (Hendrycks and Gimpel, 2016).

    >>> gelu_tanh(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588, 0.0000, 0.8412])
    """
    return nn.functional.gelu(x, approximate="tanh")


GATES = {"swiglu": nn.functional.silu, "geglu": gelu_tanh}
"""What the gate of a feed-forward block passes through."""


class FeedForward(nn.Module):
    r"""W_2 \phi(W_1 x), or with ``swiglu`` W_2 (silu(W_g x) * W_1 x) (Shazeer, 2020), with ``geglu`` gelu for silu.

    Args:
        width: D; inner: width of the inside; activation: relu, gelu (exact), silu, swiglu or geglu (gelu by tanh).

    >>> FeedForward(8, 16, "swiglu")(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, width: int, inner: int, activation: Activation = "relu"):
        super().__init__()
        check_choice("activation", activation, get_args(Activation))
        self.activation = activation
        self.up = nn.Linear(width, inner)
        self.gate = nn.Linear(width, inner) if activation in GATES else None
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., D)`` -> ``(..., D)``."""
        if self.gate is not None:
            return self.down(GATES[self.activation](self.gate(x)) * self.up(x))
        return self.down(_FUNCTIONS[self.activation](self.up(x)))


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention where ``cross``, and feed-forward, each with a residual and a norm.

    Args:
        width: D; heads: H; feedforward: inner width.
        cross: the layer also reads a memory (a decoder's layer).
        norm: ``pre`` or ``post``; activation: as in :class:`FeedForward`.
        norm_kind: ``layer``, ``rms``, ``batch``, ``instance``, ``weight`` or ``none``, as in
            :class:`~thalweg.layers.norms.Normalisation`. ``batch`` and ``instance`` take their statistics over
            positions, later ones included, and so are refused in a layer with ``cross`` and in causal attention.
            ``weight`` leaves the sums as they are and normalises the rows of all matrices in their place.
        dropout: probability on each block's output; attention_dropout: on attention weights.
        attention_map: from scores to attention weights, as in :func:`~thalweg.layers.attention.attention_map`.
        attention_width: of all heads together, D unless given; norm_eps: added to variances by ``layer`` and ``rms``.

    >>> layer = TransformerLayer(8, 2, 16, cross=True)
    >>> memory = layer.cross.memorise(torch.randn(1, 5, 8))
    >>> layer(torch.randn(1, 3, 8), memory=memory, causal=True)[0].shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        feedforward: int,
        *,
        cross: bool = False,
        norm: NormPlace = "pre",
        norm_kind: Norm = "layer",
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention_map: str | float = "softmax",
        attention_width: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_choice("norm", norm, get_args(NormPlace))
        self.first, self.stepwise = norm == "pre", norm_kind in STEPWISE
        how = (width, heads, attention_dropout, attention_map, attention_width)
        self.attention = SelfAttention(*how)
        self.attention_norm = _norm(norm_kind, width, norm_eps)
        if cross:
            self.cross: CrossAttention | None = CrossAttention(*how)
            self.cross_norm = _norm(norm_kind, width, norm_eps)
        else:
            self.cross = None
        self.feedforward = FeedForward(width, feedforward, activation)
        self.feedforward_norm = _norm(norm_kind, width, norm_eps)
        self.dropout = Dropout(dropout)
        if cross and not self.stepwise:
            raise _looks_ahead(norm_kind)
        if norm_kind == "weight":
            normalise_weights(self)

    def forward(
        self,
        x: Tensor,
        *,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past: Tensor | None = None,
        real: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Attended, Attended | None]:
        """``x (B, T, D)`` -> the same shape, what self-attention gave, and what cross-attention gave.

        ``real (B, T)`` is true on real positions, which alone count in statistics over positions; None: all are.
        ``bias`` is of self-attention alone.
        """
        if not self.stepwise and (causal or past is not None):
            raise _looks_ahead("batch or instance")
        norm = self.attention_norm
        inner = apply_norm(norm, x, real) if self.first else x
        own = self.attention(inner, causal=causal, mask=mask, rotary=rotary, past=past, bias=bias)
        x = self._add(x, own.output, norm, real)
        read = None
        if self.cross is not None:
            assert memory is not None
            inner = apply_norm(self.cross_norm, x, real) if self.first else x
            read = self.cross(inner, memory, mask=memory_mask)
            x = self._add(x, read.output, self.cross_norm, real)
        norm = self.feedforward_norm
        return self._add(x, self.feedforward(apply_norm(norm, x, real) if self.first else x), norm, real), own, read

    def _add(self, x: Tensor, change: Tensor, norm: nn.Module, real: Tensor | None) -> Tensor:
        x = x + self.dropout(change)
        return x if self.first else apply_norm(norm, x, real)


def apply_norm(norm: nn.Module, x: Tensor, real: Tensor | None = None) -> Tensor:
    """A norm of a :class:`TransformerLayer` on ``x (B, T, D)`` with real positions ``real (B, T)``; None: all.

    >>> apply_norm(nn.LayerNorm(2, eps=0.0), torch.tensor([[[1.0, 3.0]]])).tolist()
    [[[-1.0, 1.0]]]
    """
    # A LayerNorm looks at one position alone: what it makes of padding reaches nobody.
    return norm(x) if isinstance(norm, nn.LayerNorm) else norm(x, real)


def _norm(kind: Norm, width: int, eps: float) -> nn.Module:
    # Torch's own module, as it ever was: names in checkpoints stay.
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else normalisation(kind, width, eps=eps)


def _looks_ahead(kind: str) -> ConfigError:
    return ConfigError(
        f"{kind} norm looks at later positions too, got a layer of a decoder, which must not; "
        f"choose {', '.join(sorted(STEPWISE))}"
    )


class Stacked(NamedTuple):
    """What a stack gives: outputs ``(B, T, D)``, each layer's keys and values, and the last layer's attentions.

    >>> stack = TransformerStack(2, 8, 2, 16)
    >>> len(stack(torch.randn(1, 3, 8)).memories)
    2
    """

    output: Tensor
    memories: tuple[Tensor, ...]
    own: Attended
    read: Attended | None


class TransformerStack(nn.Module):
    """N layers, and a last norm where the norms come first.

    Weights start as Xavier's uniform ones, biases at 0; with ``norm="pre"`` what each block adds is scaled by
    (blocks)^(-1/2), so that the sum of all has the variance of one (as in GPT-2). They are the same for every kind of
    norm; with ``norm_kind="weight"`` lengths and directions of rows start as those of these matrices.

    Args:
        layers: N; the others as in :class:`TransformerLayer`.

    >>> stack = TransformerStack(2, 8, 2, 16, norm="pre")
    >>> stack(torch.randn(4, 5, 8)).output.shape
    torch.Size([4, 5, 8])
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        feedforward: int,
        *,
        cross: bool = False,
        norm: NormPlace = "pre",
        norm_kind: Norm = "layer",
        norm_eps: float = 1e-5,
        **shape: Any,
    ):
        super().__init__()
        shape |= {"cross": cross, "norm": norm, "norm_eps": norm_eps}
        shape["norm_kind"] = "none" if norm_kind == "weight" else norm_kind
        self.layers = nn.ModuleList(TransformerLayer(width, heads, feedforward, **shape) for _ in range(layers))
        self.norm = _norm(norm_kind, width, norm_eps) if norm == "pre" else None
        self._start((3 if cross else 2) * layers if norm == "pre" else 1)
        if norm_kind == "weight":  # last: the matrices start as those of every other kind
            normalise_weights(self)

    @property
    def each(self) -> list[TransformerLayer]:
        """The layers, with their type."""
        return cast("list[TransformerLayer]", list(self.layers))

    def _start(self, blocks: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith((".out", ".down"))
                nn.init.xavier_uniform_(module.weight, gain=blocks**-0.5 if last else 1.0)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Tensor,
        *,
        memories: Sequence[Tensor] | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        pasts: Sequence[Tensor] | None = None,
        real: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Stacked:
        """Run ``x (B, T, D)`` through the layers; ``memories`` and ``pasts`` have one entry a layer.

        ``real (B, T)`` and ``bias``, the same for all layers, as in :class:`TransformerLayer`.
        """
        kept: list[Tensor] = []
        own = read = None
        for n, layer in enumerate(self.layers):
            memory = None if memories is None else memories[n]
            past = None if pasts is None else pasts[n]
            about = {"memory": memory, "memory_mask": memory_mask, "past": past, "real": real, "bias": bias}
            x, own, read = layer(x, causal=causal, mask=mask, rotary=rotary, **about)
            kept.append(own.memory)
        assert own is not None
        return Stacked(x if self.norm is None else apply_norm(self.norm, x, real), tuple(kept), own, read)
