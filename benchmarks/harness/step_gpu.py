"""The shortest sequential step on a GPU: one reduction over C values that waits for the last one. Needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def walk_kernel(x_ptr, steps, C: tl.constexpr):
    at = tl.arange(0, C)
    x = tl.load(x_ptr + at)
    for _ in range(steps):
        x = x * 0.5 + tl.sum(x, 0) * (0.5 / C)
    tl.store(x_ptr + at, x)


def walk(x: torch.Tensor, steps: int) -> None:
    """Replace x (C,), C a power of two, by what ``steps`` dependent reductions make of it; its mean stays."""
    walk_kernel[(1,)](x, steps, C=x.numel(), num_warps=max(1, min(4, x.numel() // 32)))  # type: ignore[index]
