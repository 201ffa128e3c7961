"""One decoding step on the CPU in float32: one call for all rows and heads, caches read where they lie.

Arrays come as plain addresses: at one row a call must cost microseconds, and describing eight arrays costs more than
the arithmetic. The public functions of ``kernels.decoding`` check shapes, layouts and types before they come here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic
from thalweg.kernels.cpu.few_rows import linear, linear_map
from thalweg.kernels.cpu.threads import run

__all__ = [
    "add_norm",
    "attend_past",
    "attend_rows_past",
    "attend_rows_source",
    "attend_source",
    "linear",
    "linear_map",
    "norm_at",
]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_LEAST_WORK = 400_000  # multiply-adds a thread; with fewer, waking another costs more than it saves
_FLOAT = 4  # bytes


def _pointer(emitter: Emitter, address: Any) -> Any:
    return emitter.builder.inttoptr(address, emitter.element.as_pointer())


def _split(emitter: Emitter, stop: Any, widths: tuple[int, ...], body: Callable[[Any, int], None]) -> None:
    """Cover 0..stop by blocks, widest first, down to single entries."""
    emitter.blocks(stop, (*widths, 1), body)


@intrinsic
def load_index(typing_context, address, index):
    """Entry ``index`` of the array of int64 at ``address``."""

    def codegen(context, builder, signature, arguments):
        first = builder.inttoptr(arguments[0], INDEX.as_pointer())
        return builder.load(builder.gep(first, [arguments[1]], source_etype=INDEX), typ=INDEX)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def dot_at(typing_context, first, second, count):
    """The sum of products of ``count`` numbers at two addresses."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        x, y = (_pointer(emitter, address) for address in arguments[:2])
        sums = {width: emitter.variable(emitter.constant(0.0, width)) for width in (4 * LANES, LANES, 1)}

        def body(place: Any, width: int) -> None:
            pair = (emitter.load(emitter.at(pointer, place), width) for pointer in (x, y))
            b.store(emitter.call("fma", *pair, b.load(sums[width])), sums[width])

        _split(emitter, arguments[2], (4 * LANES, LANES), body)
        wide, narrow, single = (emitter.reduce(b.load(total), b.fadd) for total in sums.values())
        return b.fadd(wide, b.fadd(narrow, single))

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def exp_sum(typing_context, row, count):
    """``row[s] = exp(row[s] - max row)`` in place for s < count, 0 up to a whole block; returns the sum.

    NaN gives NaN, and so does a row without a finite maximum, as softmax does.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        row, count = emitter.data(signature.args[0], arguments[0]), arguments[1]
        least = emitter.constant(float("-inf"), LANES)
        best = emitter.variable(least)

        def entries(place: Any) -> tuple[Any, Any]:
            mask, loaded = emitter.mask(place, count), emitter.load(emitter.at(row, place), LANES)
            return mask, b.select(mask, loaded, least)

        with emitter.loop(emitter.size(0), count, LANES) as place:
            b.store(emitter.larger(entries(place)[1], b.load(best)), best)
        top = emitter.splat(emitter.reduce(b.load(best), emitter.larger), LANES)
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), count, LANES) as place:
            mask, values = entries(place)
            difference = b.fsub(values, top)
            power = emitter.exp(difference)
            power = b.select(b.fcmp_unordered("uno", difference, difference), difference, power)
            power = b.select(mask, power, emitter.constant(0.0, LANES))
            emitter.store(power, emitter.at(row, place))
            b.store(b.fadd(b.load(total), power), total)
        return emitter.reduce(b.load(total), b.fadd)

    return types.float32(row, types.int64), codegen


@intrinsic
def mix_at(typing_context, weights, addresses, offset, count, factor, width, out):
    """``out[j] = factor * sum_{s < count} weights[s] * (number j at addresses[s] + offset)`` for j < width."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        offset, count, factor, width, out = arguments[2:]
        weights, addresses = (emitter.data(signature.args[k], arguments[k]) for k in range(2))
        out = _pointer(emitter, out)

        def body(place: Any, block: int) -> None:
            total = emitter.variable(emitter.constant(0.0, block))
            with emitter.loop(emitter.size(0), count, 1) as s:
                weight = emitter.splat(emitter.scalar(weights, s), block)
                address = b.load(b.gep(addresses, [s], source_etype=INDEX), typ=INDEX)
                row = _pointer(emitter, b.add(address, offset))
                entries = emitter.load(emitter.at(row, place), block)
                b.store(emitter.call("fma", weight, entries, b.load(total)), total)
            scaled = b.fmul(b.load(total), emitter.splat(factor, block))
            emitter.store(scaled, emitter.at(out, place))

        _split(emitter, width, (8 * LANES, 4 * LANES, LANES), body)

    kinds = (types.int64, types.int64, types.float32, types.int64, types.int64)
    return types.void(weights, addresses, *kinds), codegen


@njit(**_options)
def _attend_row(query, addresses, count, values, size, scores, out):
    """One row over ``count`` keys at ``addresses``, their values ``values`` bytes on; ``scores`` is (heads, room)."""
    heads = len(scores)
    for s in range(count):
        for h in range(heads):
            offset = h * size * _FLOAT
            scores[h, s] = dot_at(query + offset, addresses[s] + offset, size)
    for h in range(heads):
        offset = h * size * _FLOAT
        total = exp_sum(scores[h], count)
        factor = np.float32(1) / total if count > 0 else np.float32(0)
        mix_at(scores[h], addresses, values + offset, count, factor, size, out + offset)


@njit(**_options)
def attend_rows_past(
    out, queries, query_stride, cache, step_stride, row_stride, value_stride, lineage, lineage_stride,
    steps, rows, heads, size, part, low, high,
):  # fmt: skip
    """Rows low..high of ``attend_past``; returns the first row whose lineage leaves the cache's rows, or -1."""
    room = -(-steps // LANES) * LANES
    scores, addresses = np.empty((heads, room), np.float32), np.empty(steps, np.int64)
    for r in range(low, high):
        own = lineage + r * lineage_stride * 8
        for s in range(steps):
            source = load_index(own, s)
            if source < 0 or source >= rows:
                return r
            addresses[s] = cache + (s * step_stride + source * row_stride) * _FLOAT
        _attend_row(
            *(queries + r * query_stride * _FLOAT, addresses, steps, value_stride * _FLOAT, size, scores),
            out + r * heads * size * _FLOAT,
        )
    return -1


@njit(**_options)
def attend_rows_source(
    out, queries, query_stride, memory, item_stride, place_stride, value_stride, lengths, items,
    places, batch, heads, size, part, low, high,
):  # fmt: skip
    """Rows low..high of ``attend_source``; returns the first row whose item or length is out of range, or -1."""
    room = -(-places // LANES) * LANES
    scores, addresses = np.empty((heads, room), np.float32), np.empty(places, np.int64)
    for r in range(low, high):
        item = load_index(items, r)
        if item < 0 or item >= batch:
            return r
        count = load_index(lengths, item)
        if count < 0 or count > places:
            return r
        for s in range(count):
            addresses[s] = memory + (item * item_stride + s * place_stride) * _FLOAT
        _attend_row(
            *(queries + r * query_stride * _FLOAT, addresses, count, value_stride * _FLOAT, size, scores),
            out + r * heads * size * _FLOAT,
        )
    return -1


@intrinsic
def norm_at(typing_context, x, residual, weight, bias, eps, width, total, out):
    """``total = x + residual`` and ``out = (total - mean) / sqrt(variance + eps) * weight + bias``, all addresses.

    Two passes for the variance, as one alone cancels where the mean is large. A ``bias`` at address 0 counts as zeros.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        x, y, weight, bias = (_pointer(emitter, address) for address in arguments[:4])
        eps, width, total, out = arguments[4], arguments[5], *(_pointer(emitter, a) for a in arguments[6:])
        count = b.sitofp(width, emitter.element)

        def mean(value: Callable[[Any, int], Any]) -> Any:
            sums = {block: emitter.variable(emitter.constant(0.0, block)) for block in (4 * LANES, LANES, 1)}

            def body(place: Any, block: int) -> None:
                b.store(b.fadd(b.load(sums[block]), value(place, block)), sums[block])

            _split(emitter, width, (4 * LANES, LANES), body)
            wide, narrow, single = (emitter.reduce(b.load(s), b.fadd) for s in sums.values())
            return b.fdiv(b.fadd(wide, b.fadd(narrow, single)), count)

        def add(place: Any, block: int) -> Any:
            entries = b.fadd(emitter.load(emitter.at(x, place), block), emitter.load(emitter.at(y, place), block))
            emitter.store(entries, emitter.at(total, place))
            return entries

        def centred(place: Any, block: int) -> Any:
            return b.fsub(emitter.load(emitter.at(total, place), block), emitter.splat(middle, block))

        def square(place: Any, block: int) -> Any:
            entries = centred(place, block)
            return b.fmul(entries, entries)

        middle = mean(add)
        variance = b.fadd(mean(square), eps)
        root = b.extract_element(emitter.call("sqrt", emitter.splat(variance, 1)), emitter.size(0))
        # A row whose squares overflow is NaN, not 0: what has diverged must show.
        factor = b.fadd(
            b.fdiv(ir.Constant(emitter.element, 1.0), root), b.fmul(variance, ir.Constant(emitter.element, 0.0))
        )
        biased = b.icmp_signed("!=", arguments[3], emitter.size(0))

        def write(place: Any, block: int) -> None:
            entries = b.fmul(centred(place, block), emitter.splat(factor, block))
            entries = b.fmul(entries, emitter.load(emitter.at(weight, place), block))
            emitter.store(entries, emitter.at(out, place))
            with b.if_then(biased):
                shifted = b.fadd(entries, emitter.load(emitter.at(bias, place), block))
                emitter.store(shifted, emitter.at(out, place))

        _split(emitter, width, (4 * LANES, LANES), write)

    kinds = (types.int64,) * 4 + (types.float32,) + (types.int64,) * 3
    return types.void(*kinds), codegen


@njit(**_options)
def _add_norm(out, total, x, x_stride, residual, residual_stride, weight, bias, eps, width, part, low, high):
    """Rows low..high of ``add_norm``."""
    for r in range(low, high):
        row = r * width * _FLOAT
        norm_at(
            *(x + r * x_stride * _FLOAT, residual + r * residual_stride * _FLOAT, weight, bias),
            *(np.float32(eps), width, total + row, out + row),
        )
    return -1


def _share(kernel: Callable[..., int], rows: int, work: int, arguments: tuple[float, ...]) -> int:
    """The kernel over all rows, in as many threads as pay; the least of what its parts return that is not -1."""
    if work < 2 * _LEAST_WORK or rows < 2 or (count := torch.get_num_threads()) < 2:
        return kernel(*arguments, 0, 0, rows)
    count = min(count, work // _LEAST_WORK, rows)
    cuts = [rows * k // count for k in range(count + 1)]
    wrong: list[int] = []
    run(lambda *call: wrong.append(kernel(*arguments, *call)), list(pairwise(cuts)))
    return min((row for row in wrong if row >= 0), default=-1)


def attend_past(queries: Tensor, cache: Tensor, lineage: Tensor, heads: int) -> Tensor:
    """As :func:`thalweg.kernels.decoding.attend_past`, for float32 with contiguous last axes.

    >>> attend_past(torch.ones(1, 8), torch.ones(1, 1, 2, 8), torch.tensor([[0]]), 2)
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """
    rows, width = queries.shape
    steps = lineage.shape[1]
    out = torch.empty(rows, width)
    step_stride, row_stride, value_stride, _ = cache.stride()
    arguments = (
        out.data_ptr(), queries.data_ptr(), queries.stride(0), cache.data_ptr(), step_stride, row_stride, value_stride,
        lineage.data_ptr(), lineage.stride(0), steps, cache.shape[1], heads, width // heads,
    )  # fmt: skip
    wrong = _share(attend_rows_past, rows, rows * steps * width * 2, arguments)
    if wrong >= 0:
        raise ShapeError(
            f"`lineage` must lie in 0..{cache.shape[1] - 1} (the cache's rows), got {lineage[wrong].tolist()} "
            f"for row {wrong}"
        )
    return out


def attend_source(queries: Tensor, memory: Tensor, lengths: Tensor, items: Tensor, heads: int) -> Tensor:
    """As :func:`thalweg.kernels.decoding.attend_source`, for float32 with contiguous last axes.

    >>> attend_source(torch.ones(1, 8), torch.ones(1, 3, 2, 8), torch.tensor([3]), torch.tensor([0]), 2)
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """
    rows, width = queries.shape
    batch, places = memory.shape[:2]
    out = torch.empty(rows, width)
    item_stride, place_stride, value_stride, _ = memory.stride()
    arguments = (
        out.data_ptr(), queries.data_ptr(), queries.stride(0), memory.data_ptr(), item_stride, place_stride,
        value_stride, lengths.data_ptr(), items.data_ptr(), places, batch, heads, width // heads,
    )  # fmt: skip
    wrong = _share(attend_rows_source, rows, rows * places * width * 2, arguments)
    if wrong >= 0:
        raise ShapeError(
            f"`items` must lie in 0..{batch - 1} and `lengths` in 0..{places}, got item {int(items[wrong])} "
            f"for row {wrong}"
        )
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`thalweg.kernels.decoding.add_norm`, for float32 with contiguous last axes.

    >>> add_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(2), torch.zeros(2), 0.0)
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    rows, width = x.shape
    out, total = torch.empty(rows, width), torch.empty(rows, width)
    arguments = (
        out.data_ptr(), total.data_ptr(), x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0),
        weight.data_ptr(), 0 if bias is None else bias.data_ptr(), eps, width,
    )  # fmt: skip
    _share(_add_norm, rows, rows * width * 4, arguments)
    return out, total
