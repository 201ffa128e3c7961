"""Which way to compute a thing on the device where it lies."""

from __future__ import annotations

from torch import Tensor

__all__ = ["on_cpu"]


def on_cpu(x: Tensor) -> bool:
    """Whether arithmetic is dear and looking at a value is free: true on the CPU, false where kernels are launched.

    >>> import torch
    >>> on_cpu(torch.zeros(1))
    True
    """
    return x.device.type == "cpu"
