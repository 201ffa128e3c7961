"""What one decoding step must do at least: weight bytes, operations, and how often the device is started.

For R = B x width rows, L layers of width D with a feed-forward of F, a vocabulary of V, a source of S and step t of T:

- weights read: L (6 D^2 + 2 D F) + D V numbers (self-attention 4 D^2; cross-attention 2 D^2, as its keys and values
  are made once a source), whatever R is.
- cache read: 2 D t numbers a row and layer, and 2 D S a source and layer.
- multiply-adds: as many a row as there are weights, and 2 D (t + S) a row and layer for attention. The first step has
  B rows.

The encoder adds its weights once, B S rows. The floor of a call is the larger of operations over the rate of a float32
matrix product and bytes over the bandwidth of a copy of the weights' size, both measured in the same run; launches and
the interpreter are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decoding.sides import Shape
from benchmarks.harness.rates import Rates, bound
from benchmarks.harness.timing import profiled


def step_weights(shape: Shape) -> int:
    """Numbers of the weights that one decoding step reads."""
    D, F, L = shape.width, shape.feedforward, shape.layers
    return L * (6 * D * D + 2 * D * F) + D * shape.vocabulary


def work(shape: Shape, batch: int, width: int) -> dict[str, int]:
    """Multiply-adds and bytes of one call: the encoder, then all steps."""
    D, F, L, S, T = shape.width, shape.feedforward, shape.layers, shape.source, shape.steps
    encoder = L * (4 * D * D + 2 * D * F)
    memory = L * 2 * D * D  # keys and values of the source, for the decoder
    operations = batch * S * (encoder + memory + L * 2 * D * S)
    numbers = encoder + memory + 2 * L * batch * S * D
    for t in range(1, T + 1):
        rows = batch * (width if t > 1 else 1)
        operations += rows * (step_weights(shape) + L * 2 * D * (t + S))
        numbers += step_weights(shape) + L * 2 * D * (rows * t + batch * S)
    return {"multiply_adds": operations, "bytes": 4 * numbers}


def floor(shape: Shape, batch: int, width: int, rates: Rates) -> dict[str, Any]:
    """Work of a call, the milliseconds that each kind takes at least, and which binds."""
    found = work(shape, batch, width)
    weights = 4 * step_weights(shape)
    times = {
        "operations": 1e3 * found["multiply_adds"] / rates.multiply_adds,
        # A copy reads and writes; weights that fit a cache come at its rate.
        "bytes": 1e3 * found["bytes"] / rates.copy(2 * weights),
    }
    return {**found, "step_weight_bytes": weights, **bound(times)}


class _Count(TorchDispatchMode):
    """Counts calls of torch operators that compute; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += not getattr(func, "is_view", False)
        return out


def starts(run: Callable[[], Any], device: str) -> int | None:
    """Work handed to the device in one call: launches of kernels and graphs on a GPU, torch operators on a CPU.

    Thalweg's own compiled CPU kernels are no torch operators and are not counted. None without a profiler.
    """
    if device != "cuda":
        run()
        with _Count() as count:
            run()
        return count.calls
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.count for event in profiled(run) if event.key.startswith(launches)) or None
