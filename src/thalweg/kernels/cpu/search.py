"""Whole searches on the CPU in one call: models as :mod:`thalweg._kernels` takes them, made of tensors.

Weights are read where they lie, so that changes in place are seen; the arrays keep their memory alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg import _kernels

Block, Cell, Monotonic, Recurrent, Request, Transformer = (
    getattr(_kernels, name) for name in ("Block", "Cell", "Monotonic", "Recurrent", "Request", "Transformer")
)


def array(x: Tensor | None) -> Any:
    """The numbers of a tensor as they lie in memory, bfloat16 as the 16 bits that it is.

    >>> array(torch.tensor([1.0], dtype=torch.bfloat16)).tolist()
    [16256]
    """
    if x is None:
        return None
    x = x.detach()
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()


def linear_of(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> _kernels.Linear:
    """The map x -> scale * (weight x) + bias with weights in float32, bfloat16 or int8."""
    return _kernels.Linear(array(weight), array(bias), array(scale))


def norm_of(weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool) -> _kernels.Norm:
    """A LayerNorm (``centred``), or a norm by the root mean square."""
    return _kernels.Norm(array(weight), array(bias), eps, centred)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """The map of :func:`linear_of` for rows ``(R, in)`` of float32, in one pass over the weights; ``(R, out)``."""
    out = torch.empty(len(x), len(weight))
    linear_of(weight, bias, scale)(array(x.contiguous()), out.numpy(), torch.get_num_threads())
    return out
