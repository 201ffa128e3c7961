"""What a mask over positions keeps of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.dispatch import mask_kernels

__all__ = ["kept_lengths"]


def kept_lengths(mask: Tensor) -> Tensor:
    """How many positions of each row of a bool mask (B, T) are kept, (B,) int64; negative where they are not the first.

    One launch on a GPU.

    >>> kept_lengths(torch.tensor([[True, True, False], [True, False, True], [False, False, False]]))
    tensor([ 2, -2,  0])
    """
    kernels = mask_kernels(mask)
    if kernels is not None:
        return kernels.kept_lengths(mask)
    lengths = mask.sum(1)
    gaps = (mask[:, 1:] > mask[:, :-1]).any(1)
    return torch.where(gaps, -lengths, lengths)
