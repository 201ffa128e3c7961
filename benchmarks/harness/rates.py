"""What the machine can do, by measurement: multiply-adds, copies and dependent steps; floors are made of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.device import synchronise


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


def step_seconds(device: str, labels: int, *, steps: int = 100_000) -> float:
    """Seconds of one dependent reduction over so many values."""
    if device == "cuda":
        from benchmarks.harness.step_gpu import walk

        x = torch.ones(1 << (labels - 1).bit_length(), device=device)
        steps //= 10
        return best_seconds(lambda: walk(x, steps), device) / steps
    from benchmarks.harness.step_cpu import walk

    values = torch.ones(labels).numpy()
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

    def to_json(self) -> dict[str, Any]:
        """All that was measured so far."""
        return {"multiply_adds": self.multiply_adds, "copies": self.copies, "steps": self.steps}


def bound(ms: dict[str, float]) -> dict[str, Any]:
    """The least milliseconds of each kind of work, the largest of them, and which that is."""
    binding = max(ms, key=lambda name: ms[name])
    return {"ms": ms, "floor_ms": ms[binding], "bound_by": binding}
