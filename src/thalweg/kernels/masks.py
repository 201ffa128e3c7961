"""What a mask over positions keeps of each row."""

from __future__ import annotations

from ctypes import string_at

import torch
from torch import Tensor

from thalweg.kernels.dispatch import mask_kernels, on_cpu


def keeps_all(mask: Tensor) -> bool:
    """Whether a bool mask is known to keep everything; elsewhere than on the CPU it is not asked, for looking is dear.

    >>> keeps_all(torch.tensor([[True, True]])), keeps_all(torch.tensor([[True, False]]))
    (True, False)
    """
    if not on_cpu(mask) or not mask.is_contiguous():
        return on_cpu(mask) and bool(mask.numpy().all())
    return 0 not in string_at(mask.data_ptr(), mask.numel())  # a search for a byte: half the time of any other test


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
