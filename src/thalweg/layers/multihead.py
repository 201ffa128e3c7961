"""Multi-head attention: of a sequence to itself, and to the memory of another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError
from thalweg.layers.attention import attention_map
from thalweg.layers.hopfield.separation_maps import Separation, Softmax
from thalweg.layers.positions import rotate


class Attended(NamedTuple):
    """What an attention gives: its output ``(B, T, D)``, and what it used to get it.

    Attributes:
        output: ``(B, T, D)``.
        queries: ``(B, T, D)``, not scaled, rotated where positions are rotary.
        memory: ``(B, S, 2, D)`` keys and values.

    >>> x = torch.randn(2, 3, 8)
    >>> SelfAttention(8, 2)(x).memory.shape
    torch.Size([2, 3, 2, 8])
    """

    output: Tensor
    queries: Tensor
    memory: Tensor


class _MultiHead(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, map: str | float, inner: int | None):
        super().__init__()
        inner = width if inner is None else inner
        if heads < 1 or inner % heads:
            raise ConfigError(f"width must be a multiple of heads, got {inner} and {heads}")
        self.width, self.heads, self.dropout = inner, heads, dropout
        self.map = attention_map(map)
        self.out = nn.Linear(inner, width)

    def attend(
        self, queries: Tensor, memory: Tensor, mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        """``queries (B, T, D)`` over ``memory (B, S, 2, D)`` -> ``(B, T, D)``; ``bias (B or 1, H, T, S)`` on scores."""
        q, k, v = (_split(part, self.heads) for part in (queries, memory[:, :, 0], memory[:, :, 1]))
        dropout = self.dropout if self.training else 0.0
        if causal and (bias is not None or not isinstance(self.map, Softmax)):
            causal, mask = False, torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        if not isinstance(self.map, Softmax):
            weights = head_weights(q * q.size(3) ** -0.5, k, mask, self.map, bias)
            read = (nn.functional.dropout(weights, dropout) if dropout else weights).to(v.dtype) @ v
            return self.out(read.transpose(1, 2).flatten(2))
        if bias is not None:
            mask = (bias if mask is None else torch.where(mask, bias, -torch.inf)).to(q.dtype)
        read = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.out(read.transpose(1, 2).flatten(2))


class SelfAttention(_MultiHead):
    r"""H heads of softmax(q_t k_s / sqrt(D/H)) v_s over the same sequence (Vaswani et al., 2017).

    Queries, keys and values come from one matrix (``project``, in that order).

    Args:
        width: D; heads: H, a divisor of D; dropout: probability that a weight is dropped while training.
        map: in place of the softmax, as in :func:`~thalweg.layers.attention.attention_map`.
        inner: width of all heads together, D unless given; then ``memory`` and queries have it in D's place.

    >>> x = torch.randn(2, 5, 8)
    >>> SelfAttention(8, heads=2)(x, causal=True).output.shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, map: str | float = "softmax", inner: int | None = None
    ):
        super().__init__(width, heads, dropout, map, inner)
        self.project = nn.Linear(width, 3 * self.width)

    def forward(
        self,
        x: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Attended:
        """Attend within ``x (B, T, D)``.

        Args:
            x: the sequence.
            causal: position t sees s <= t alone.
            mask: bool, broadcast to ``(B, H, T, S)``, true where a position may be seen.
            rotary: cosines and sines ``(B or 1, T, d/2)`` of the positions.
            past: ``(B, t, 2, D)`` keys and values that come before those of ``x``.
            bias: ``(B or 1, H, T, S)`` added to the scores; see :class:`~thalweg.layers.positions.RelativeBias`.

        Time O(T S D); no T x S matrix is kept where torch has a fused kernel, which it has for the softmax.
        """
        projected = self.project(x)
        queries = projected[..., : self.width]
        memory = projected[..., self.width :].unflatten(2, (2, self.width))
        if rotary is not None:
            cos, sin = (part.unsqueeze(2) for part in rotary)
            turned = rotate(projected[..., : 2 * self.width].unflatten(2, (2 * self.heads, -1)), cos, sin)
            queries, keys = turned.flatten(2).chunk(2, dim=2)
            memory = torch.stack((keys, memory[:, :, 1]), dim=2)
        if past is not None:
            memory = torch.cat((past, memory), dim=1)
        return Attended(self.attend(queries, memory, mask, causal, bias), queries, memory)


class CrossAttention(_MultiHead):
    """H heads over the memory of another sequence, whose keys and values are computed once (:meth:`memorise`).

    Args:
        width: D; heads: H, a divisor of D; dropout: probability that a weight is dropped while training.
        map: in place of the softmax, as in :func:`~thalweg.layers.attention.attention_map`.
        inner: width of all heads together, D unless given; then ``memory`` and queries have it in D's place.

    >>> attention = CrossAttention(8, heads=2)
    >>> memory = attention.memorise(torch.randn(2, 7, 8))
    >>> attention(torch.randn(2, 3, 8), memory).output.shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, map: str | float = "softmax", inner: int | None = None
    ):
        super().__init__(width, heads, dropout, map, inner)
        self.query = nn.Linear(width, self.width)
        self.memory = nn.Linear(width, 2 * self.width)

    def memorise(self, encoded: Tensor) -> Tensor:
        """Keys and values ``(B, S, 2, D)`` of ``encoded (B, S, D)``."""
        return self.memory(encoded).unflatten(2, (2, self.width))

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Attended:
        """Read ``memory (B, S, 2, D)`` for ``x (B, T, D)``; ``mask`` as in :class:`SelfAttention`."""
        queries = self.query(x)
        return Attended(self.attend(queries, memory, mask, False), queries, memory)


def mean_weights(
    queries: Tensor, keys: Tensor, heads: int, mask: Tensor | None = None, map: Separation | None = None
) -> Tensor:
    r"""Attention weights averaged over heads, ``(B, T, S)``: (1/H) \sum_h softmax_s(q_h k_h / sqrt(D/H)).

    ``queries (B, T, D)`` and ``keys (B, S, D)``; ``mask`` broadcasts to ``(B, H, T, S)``, and where it is false the
    weight is exactly 0. Computed in float32 at least; ``map`` in place of the softmax.

    >>> mean_weights(torch.zeros(1, 1, 4), torch.zeros(1, 2, 4), heads=2)
    tensor([[[0.5000, 0.5000]]])
    """
    q, k = _split(queries, heads), _split(keys, heads)
    return head_weights(q * q.size(3) ** -0.5, k, mask, map).mean(dim=1)


def head_weights(
    queries: Tensor, keys: Tensor, mask: Tensor | None, map: Separation | None = None, bias: Tensor | None = None
) -> Tensor:
    """Weights ``(B, H, T, S)`` of ``queries (B, H, T, d)``, scaled already, on ``keys (B, H, S, d)``.

    ``mask`` broadcasts to the result, and where it is false the weight is exactly 0; ``map`` in place of the softmax;
    ``bias`` is added to the scores. Computed in float32 at least.

    >>> head_weights(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.tensor([True, False]))
    tensor([[[[1., 0.]]]])
    """
    scores = queries @ keys.transpose(2, 3)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=3) if map is None or isinstance(map, Softmax) else map.weights(scores)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
