"""Attention of single steps over caches that are never copied: what the compiled kernels must give."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_norm", "attend_past", "attend_source", "linear"]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of (R, D) over (R, t, D); mask (R, t) says which places count. A row without any gives 0."""
    rows, steps, width = keys.shape
    split = (rows, steps, heads, width // heads)
    scores = torch.einsum("rhd,rshd->rhs", queries.reshape(rows, heads, width // heads), keys.reshape(split))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    weights = scores.softmax(-1)
    values = values.reshape(split)
    if mask is not None:  # what lies past the length may be anything, NaN included
        weights = weights.masked_fill(~mask[:, None], 0.0)
        values = values.masked_fill(~mask[:, :, None, None], 0.0)
    return torch.einsum("rhs,rshd->rhd", weights, values).reshape(rows, width)


def attend_past(queries: Tensor, cache: Tensor, lineage: Tensor, heads: int) -> Tensor:
    """:func:`thalweg.kernels.decoding.attend_past` by gathering the past of every row; (R, D).

    >>> cache = torch.tensor([[[[0.0], [1.0]], [[0.0], [2.0]]], [[[0.0], [3.0]], [[0.0], [5.0]]]])
    >>> attend_past(torch.ones(2, 1), cache, torch.tensor([[1, 0], [1, 1]]), 1)
    tensor([[2.5000],
            [3.5000]])
    """
    steps = torch.arange(lineage.shape[1], device=lineage.device)
    past = cache[steps, lineage]  # (R, t, 2, D)
    return _attend(queries, past[:, :, 0], past[:, :, 1], heads)


def attend_source(queries: Tensor, memory: Tensor, lengths: Tensor, items: Tensor, heads: int) -> Tensor:
    """:func:`thalweg.kernels.decoding.attend_source` by gathering the memory of every row; (R, D).

    >>> memory = torch.tensor([[[[0.0], [1.0]], [[0.0], [3.0]]]])
    >>> attend_source(torch.ones(2, 1), memory, torch.tensor([2]), torch.tensor([0, 0]), 1)
    tensor([[2.],
            [2.]])
    """
    places = torch.arange(memory.shape[1], device=memory.device)
    mask = places < lengths[items, None]
    own = memory[items]  # (R, S, 2, D)
    return _attend(queries, own[:, :, 0], own[:, :, 1], heads, mask)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.decoding.add_norm` by PyTorch's own LayerNorm.

    >>> add_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(2), torch.zeros(2), 0.0)
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    total = x + residual
    return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """:func:`thalweg.kernels.decoding.linear` by PyTorch's matrix product, after restoring the weights.

    >>> linear(torch.ones(1, 2), torch.tensor([[1, 2]], dtype=torch.int8), scale=torch.tensor([0.5]))
    tensor([[1.5000]])
    """
    weight = weight.to(x.dtype)
    if scale is not None:
        weight = weight * scale[:, None]
    y = torch.nn.functional.linear(x, weight, bias)
    return torch.relu(y) if relu else y
