"""What a mask over positions keeps of each row, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.launching import launch, on_device_of

__all__ = ["kept_lengths"]


@triton.jit
def _count(mask, counts, T, stride_row, stride_place, BT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count, end = 0, 0
    for first in range(0, T, BT):
        place = first + tl.arange(0, BT)
        kept = tl.load(mask + row * stride_row + place * stride_place, mask=place < T, other=0) != 0
        count += tl.sum(kept.to(tl.int32), axis=0)
        end = tl.maximum(end, tl.max(tl.where(kept, place + 1, 0), axis=0))
    tl.store(counts + row, tl.where(end == count, count, -count).to(tl.int64))


def kept_lengths(mask: Tensor) -> Tensor:
    """As :func:`thalweg.kernels.masks.kept_lengths`; a program for each row.

    >>> if torch.cuda.is_available():
    ...     assert kept_lengths(torch.ones(2, 3, dtype=torch.bool, device="cuda")).tolist() == [3, 3]
    """
    B, T = mask.shape
    counts = torch.empty(B, dtype=torch.long, device=mask.device)
    block = min(1024, triton.next_power_of_2(max(T, 16)))
    if B:
        with on_device_of(mask):
            launch(_count, (B,), mask.view(torch.uint8), counts, T, *mask.stride(), BT=block, num_warps=1)
    return counts
