"""The least time a chain can take on this machine, by its own measured rates, and how far a measured time is from it.

For B chains of T positions and C labels, the floor is the largest of

- operations over rate: 3 B T C^2 multiply-adds for likelihood and gradient (one product with the transitions in the
  forward recursion, one in the backward, one for the expected transitions), B T C^2 additions and as many maxima for
  Viterbi. The rate is that of a float32 matrix product in the same run; a maximum and an addition count as one
  multiply-add each.
- bytes over bandwidth: inputs read, outputs written, and the forward messages (Viterbi: one byte a back-pointer up to
  256 labels, else two) written and read once. The bandwidth is that of a copy of as many bytes.
- sequential steps: T times the time of one reduction over C values that waits for the last one. The backward
  recursion does not wait for the forward one, so T steps, not 2 T, are the bound.

Exponentials, logarithms, launches and the interpreter are not in it: no program reaches the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from chain_sides import Size
from chain_timing import synchronise


def best_seconds(run: Callable[[], Any], device: str, *, calls: int = 7) -> float:
    """The fastest of several calls: a rate is what the machine can do, not what it does on average."""
    run()
    times = []
    for _ in range(calls):
        synchronise(device)
        began = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return min(times)


def multiply_adds(device: str) -> float:
    """Float32 multiply-adds a second of a large matrix product, without reduced-precision units."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return size**3 / best_seconds(lambda: a @ b, device)


def bandwidth(device: str, moved: int) -> float:
    """Bytes a second, read and written, of a copy that moves so many bytes in all."""
    # A small copy on a GPU would measure its launch.
    moved = max(moved, 2**16 if device == "cpu" else 2**30)
    source = torch.ones(moved // 8, device=device)
    target = torch.empty_like(source)
    repeats = max(1, min(1000, 2**26 // moved))

    def run() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return 2 * 4 * source.numel() * repeats / best_seconds(run, device)


@cache
def _walk_cpu() -> Callable[[Any, int], None]:
    import numba

    @numba.njit(fastmath=True)
    def walk(x: Any, steps: int) -> None:
        share = 0.5 / len(x)
        for _ in range(steps):
            total = x.dtype.type(0)
            for i in range(len(x)):
                total += x[i]
            for i in range(len(x)):
                x[i] = x[i] * 0.5 + total * share

    return walk


def step_seconds(device: str, labels: int, *, steps: int = 100_000) -> float:
    """Seconds of one dependent reduction over so many values."""
    if device == "cuda":
        from chain_step_gpu import walk

        x = torch.ones(1 << (labels - 1).bit_length(), device=device)
        steps //= 10
        return best_seconds(lambda: walk(x, steps), device) / steps
    values, walk = torch.ones(labels).numpy(), _walk_cpu()
    return best_seconds(lambda: walk(values, steps), device) / steps


@dataclass
class Rates:
    """What this machine was measured to do; bandwidth by bytes moved, steps by number of labels."""

    device: str
    multiply_adds: float
    copies: dict[int, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)

    @classmethod
    def measured(cls, device: str) -> Rates:
        """The rate of multiply-adds now; the others when first asked for."""
        return cls(device, multiply_adds(device))

    def copy(self, moved: int) -> float:
        """Bytes a second for so many bytes, which may fit a cache."""
        rounded = 1 << (moved - 1).bit_length()
        if rounded not in self.copies:
            self.copies[rounded] = bandwidth(self.device, min(rounded, 2**30))
        return self.copies[rounded]

    def step(self, labels: int) -> float:
        """Seconds of a sequential step."""
        if labels not in self.steps:
            self.steps[labels] = step_seconds(self.device, labels)
        return self.steps[labels]


def floor(size: Size, kind: str, rates: Rates) -> dict[str, Any]:
    """Operations, bytes, steps, the milliseconds that each takes at least, and which of them binds."""
    B, T, C = size
    scores = 4 * (B * T * C + C * C + 2 * C)
    if kind == "nll":
        operations, moved = 3 * B * T * C * C, 2 * scores + 2 * 4 * B * T * C + 8 * B * T
    else:
        operations, moved = 2 * B * T * C * C, scores + 2 * B * T * C * (1 if C <= 256 else 2) + 8 * B * T
    times = {
        "operations": 1e3 * operations / rates.multiply_adds,
        "bytes": 1e3 * moved / rates.copy(moved),
        "steps": 1e3 * T * rates.step(C),
    }
    binding = max(times, key=lambda name: times[name])
    return {
        "operations": operations,
        "bytes": moved,
        "steps": T,
        "ms": times,
        "floor_ms": times[binding],
        "bound_by": binding,
    }
