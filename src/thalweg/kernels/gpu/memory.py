"""Associative memories on a GPU in float32: the matrix library multiplies, a launch weighs and one puts together.

One path for all sizes. Patterns are cut into parts, so that few queries are work for the whole device; weights are held
of so many queries at a time as there is room for. Products are as exact as ``torch.set_float32_matmul_precision`` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_passes as programs
from thalweg.kernels.gpu.launching import ceiling, launch, on_device_of
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["LEAST", "associate", "nearest", "settle"]

_ROOM = 1 << 24  # weights that are held, 64 MiB; those of one query at least
LEAST = 2048  # patterns from which PyTorch's attention takes longer
_MOST_FEATURES = 4096  # what a program holds of a query; more goes to plain PyTorch


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _fits(x: Tensor) -> bool:
    return x.shape[1] <= _MOST_FEATURES


def _clean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows one after another, zeros for what is absent: that may be anything."""
    return (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).contiguous()


class _Memory:
    """Patterns and their values as kernels are given them."""

    def __init__(self, keys: Tensor, values: Tensor, beta: float, mask: Tensor | None) -> None:
        self.keys = _clean(keys, mask)
        self.values = self.keys if values is keys else _clean(values, mask)
        self._factor, self._masked = beta / math.log(2), mask is not None
        self._mask = self._nothing = self.keys  # something must stand in their place
        if mask is not None:
            self._mask = mask.contiguous().view(torch.uint8)
            self._nothing = torch.where(mask.any(), torch.nan, 1.0).to(keys.dtype)

    def chunks(self, rows: int) -> Iterator[slice]:
        """So many queries that their weights have room."""
        size = max(1, _ROOM // len(self.keys))
        return (slice(low, min(low + size, rows)) for low in range(0, rows, size))

    def answer(
        self, kernel: Any, queries: Tensor, *given: Tensor, mix: bool = True, last: tuple[float, ...] = ()
    ) -> None:
        """Weights of some queries and, if wanted, what they mix; then ``kernel`` for each of them.

        It takes ``given``, what the parts leave, sizes, and ``last``.
        """
        (rows, inner), (count, outer) = queries.shape, self.values.shape
        parts = max(1, min(_processors(queries.device) // -(-rows // 64), count // 256))
        # All parts are equally long, as a batch of products wants them: they overlap, by less than their number.
        step = count // parts
        length = count - (parts - 1) * step
        block, width = ceiling(length), ceiling(outer)
        cut = programs.Cut(min(4096, max(16, block)), max(1, 8192 // width), max(16, width), self._masked, mix)
        scores, sums = queries.new_empty(parts, rows, length), queries.new_empty(parts, rows, 2)
        # With `out` no product is of half precision, whatever autocast says.
        keys = self.keys.as_strided((parts, inner, length), (step * inner, 1, inner))
        torch.bmm(queries.expand(parts, rows, inner), keys, out=scores)
        # No two operations are made one: the largest weight is then exactly 1, and a query that has arrived stays.
        options: dict[str, Any] = {"CUT": cut, "enable_fp_fusion": False}
        sizes = rows, length, step, self._factor
        warps = max(1, min(8, cut.BN // 256))
        launch(programs.weigh, (rows, parts), scores, self._mask, sums, *sizes, num_warps=warps, **options)
        mixes = sums
        if mix:
            mixes = queries.new_empty(parts, rows, outer)
            torch.bmm(scores, self.values.as_strided((parts, length, outer), (step * outer, outer, 1)), out=mixes)
        left = sums, mixes, self._nothing, rows, outer, parts, self._factor
        launch(kernel, (rows,), *given, *left, *last, num_warps=4, **options)


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate`; the host waits for nothing, but for a beta on the GPU."""
    if not (_fits(keys) and _fits(values)):
        return reference.associate(queries, keys, values, beta, mask, block)
    queries = queries.contiguous()
    mixed, lse = queries.new_empty(len(queries), values.shape[1]), queries.new_empty(len(queries))
    with on_device_of(queries):
        memory = _Memory(keys, values, float(beta.detach() if isinstance(beta, Tensor) else beta), mask)
        for some in memory.chunks(len(queries)):
            memory.answer(programs.join, queries[some], mixed[some], lse[some])
    return mixed, lse


def _looks(t: int) -> bool:
    """After how many steps the host asks which queries are still on their way."""
    return t in (2, 4) or (t > 0 and t % 8 == 0)


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in two products and two launches a step.

    The host waits for the device after 2, 4 and 8 steps and after every eighth from then on, and leaves out what is
    done; never for a negative tolerance, nor while a graph is captured.
    """
    if not _fits(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, mask, block)
    rows = len(queries)
    state = now = queries.clone(memory_format=torch.contiguous_format)
    energies, stands = state.new_empty(rows, max_steps + 1), state.new_zeros(rows, 3, dtype=torch.int32)
    if not max_steps:
        stands[:, 0] = programs.RESTS.value
    order = torch.arange(rows, device=state.device)
    with on_device_of(state):
        memory, offset = _Memory(patterns, patterns, beta, mask), reference.offset(patterns, beta, mask)
        asks = tol >= 0 and not (state.is_cuda and torch.cuda.is_current_stream_capturing())
        for t in range(max_steps + 1):
            if asks and _looks(t):
                order = (stands[:, 0] < programs.DONE.value).nonzero().flatten()
                now = state.index_select(0, order)
                if not len(order):
                    break
            for some in memory.chunks(len(order)):
                given = state, energies, stands, now[some], order[some], offset
                mix = t < max_steps  # at last only energies are wanted
                memory.answer(programs.move, now[some], *given, mix=mix, last=(max_steps, float(tol)))
    return Settled(state, energies, stands[:, 1].long(), stands[:, 2].bool())


def nearest(queries: Tensor, keys: Tensor, k: int, mask: Tensor | None, block: int | None) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.nearest` by the matrix library, in blocks that are worth a launch."""
    return reference.nearest(queries, keys, k, mask, block or 1 << 16)
