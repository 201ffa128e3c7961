"""Linear maps of a few rows on the CPU: every weight is read once, where a matrix product would wait for memory.

A matrix library packs blocks that pay from some dozens of rows on. Below that the time is that of reading the weights,
so these kernels walk along the rows of the weights as they lie, four rows of input at a time. Weights may be float32,
bfloat16 or int8 with a scale for every output; inputs, sums and outputs are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from torch import Tensor

from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic
from thalweg.kernels.reference import decoding as reference

__all__ = ["EXAMPLES", "linear", "linear_map", "rows_by_weights"]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def _weights(emitter: Emitter, address: Any, place: Any, width: int, size: int) -> Any:
    """``width`` weights of ``size`` bytes each as float32, from entry ``place`` of a row on."""
    b = emitter.builder
    if size == 4:
        return emitter.load(emitter.at(b.inttoptr(address, emitter.element.as_pointer()), place), width)
    stored, whole = ir.IntType(8 * size), ir.VectorType(ir.IntType(32), width)
    kind = ir.VectorType(stored, width)
    start = b.inttoptr(b.add(address, b.mul(place, emitter.size(size))), kind.as_pointer())
    entries = b.load(start, align=size, typ=kind)
    if size == 1:
        return b.sitofp(b.sext(entries, whole), emitter.vector(width))
    # bfloat16 is the upper half of a float32
    return b.bitcast(b.shl(b.zext(entries, whole), ir.Constant(whole, [16] * width)), emitter.vector(width))


def _tile(rows: int, outputs: int) -> Any:
    """The kernel of a tile: ``rows`` rows of input by ``outputs`` rows of weights, all sums in registers."""
    block = 2 * LANES if rows == 1 else LANES

    @intrinsic
    def tile(typing_context, x, x_stride, weight, inner, scale, bias, relu, out, out_stride, example):
        """``out[m, n] = scale[n] * sum_i x[m, i] weight[n, i] + bias[n]``; no scale or bias at address 0."""
        size = {types.int8: 1, types.int16: 2, types.float32: 4}[example]

        def codegen(context, builder, signature, arguments):
            emitter, b = Emitter(context, builder, types.float32), builder
            x, x_stride, weight, inner, scale, bias, relu, out, out_stride, _ = arguments
            pointer = emitter.element.as_pointer()
            inputs = [b.inttoptr(b.add(x, b.mul(x_stride, emitter.size(m))), pointer) for m in range(rows)]
            stride = b.mul(inner, emitter.size(size))
            matrix = [b.add(weight, b.mul(stride, emitter.size(n))) for n in range(outputs)]

            def body(place: Any, width: int) -> None:
                sums = kept[width]
                entries = [_weights(emitter, address, place, width, size) for address in matrix]
                for m in range(rows):
                    row = emitter.load(emitter.at(inputs[m], place), width)
                    for n in range(outputs):
                        b.store(emitter.call("fma", row, entries[n], b.load(sums[m][n])), sums[m][n])

            widths = (block, 1)
            kept = {
                w: [[emitter.variable(emitter.constant(0.0, w)) for _ in range(outputs)] for _ in range(rows)]
                for w in widths
            }
            emitter.blocks(inner, widths, body)
            zero = ir.Constant(emitter.element, 0.0)
            one = ir.Constant(emitter.element, 1.0)
            for n in range(outputs):
                factor, shift = (
                    _optional(emitter, address, emitter.size(n), other)
                    for address, other in ((scale, one), (bias, zero))
                )
                for m in range(rows):
                    total = b.fadd(*(emitter.reduce(b.load(kept[w][m][n]), b.fadd) for w in widths))
                    total = b.fadd(b.fmul(total, factor), shift)
                    negative = b.and_(b.fcmp_ordered("<", total, zero), b.icmp_signed("!=", relu, emitter.size(0)))
                    row = b.inttoptr(b.add(out, b.mul(out_stride, emitter.size(m))), pointer)
                    b.store(b.select(negative, zero, total), emitter.at(row, emitter.size(n)))

        kinds = (types.int64,) * 9
        return types.void(*kinds, example), codegen

    return tile


def _optional(emitter: Emitter, address: Any, index: Any, other: Any) -> Any:
    """Entry ``index`` of the numbers at ``address``; ``other`` where that is 0."""
    b = emitter.builder
    value = emitter.variable(other)
    with b.if_then(b.icmp_signed("!=", address, emitter.size(0))):
        b.store(emitter.scalar(b.inttoptr(address, emitter.element.as_pointer()), index), value)
    return b.load(value)


_tile_1x4, _tile_1x1, _tile_4x2 = _tile(1, 4), _tile(1, 1), _tile(4, 2)


@njit(**_options)
def rows_by_weights(out, out_stride, x, x_stride, rows, weight, inner, outer, scale, bias, relu, example, size):
    """All rows of input over every pair or four of rows of weights, which stay in the nearest cache meanwhile.

    Arrays are addresses, strides are bytes; no scale or bias at address 0; ``size`` is the bytes of a weight.
    """
    step, fours = 4 * inner * size, rows - rows % 4
    n = 0
    while n + 4 <= outer:
        for m in range(0, fours, 4):
            at, to = x + m * x_stride, out + m * out_stride + n * 4
            _tile_4x2(at, x_stride, weight, inner, scale, bias, relu, to, out_stride, example)
            low, high = scale + 8 if scale else 0, bias + 8 if bias else 0
            _tile_4x2(at, x_stride, weight + step // 2, inner, low, high, relu, to + 8, out_stride, example)
        for m in range(fours, rows):
            to = out + m * out_stride + n * 4
            _tile_1x4(x + m * x_stride, x_stride, weight, inner, scale, bias, relu, to, out_stride, example)
        n += 4
        weight += step
        scale += 16 if scale else 0
        bias += 16 if bias else 0
    while n < outer:
        for m in range(rows):
            to = out + m * out_stride + n * 4
            _tile_1x1(x + m * x_stride, x_stride, weight, inner, scale, bias, relu, to, out_stride, example)
        n += 1
        weight += step // 4
        scale += 4 if scale else 0
        bias += 4 if bias else 0


# An example of what lies in memory chooses the kernel; bfloat16 is read as the 16 bits that it is.
EXAMPLES = {
    torch.float32: (np.float32(0), 4, 16, 8),
    torch.bfloat16: (np.int16(0), 2, 16, 8),
    torch.int8: (np.int8(0), 1, 32, 16),
}


def _most_rows(alone: int, shared: int) -> int:
    """With one thread and with several: the matrix library shares its work out, a kernel does not."""
    return alone if torch.get_num_threads() == 1 else shared


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """As :func:`thalweg.kernels.decoding.linear`, for contiguous weights; many rows go to the matrix library.

    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [-3.0, 0.0]]), relu=True)
    tensor([[3., 0.]])
    """
    rows, inner = x.shape
    example, size, alone, shared = EXAMPLES[weight.dtype]
    if rows > _most_rows(alone, shared):
        return reference.linear(x, weight, bias, scale, relu=relu)
    outer = weight.shape[0]
    out = torch.empty(rows, outer)
    rows_by_weights(
        out.data_ptr(), outer * 4, x.data_ptr(), x.stride(0) * 4, rows, weight.data_ptr(), inner, outer,
        0 if scale is None else scale.data_ptr(), 0 if bias is None else bias.data_ptr(), int(relu), example, size,
    )  # fmt: skip
    return out


def linear_map(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, relu: bool
) -> Callable[[Tensor], Tensor | None]:
    """:func:`linear` with all but the rows looked up before; gives None for rows that it does not take.

    >>> linear_map(torch.tensor([[1.0, 2.0]]), None, None, False)(torch.ones(1, 2))
    tensor([[3.]])
    """
    # Aliases: the memory must outlive what its owners may be given instead.
    kept = tuple(None if x is None else x.detach() for x in (weight, bias, scale))
    matrix, shift, factor = (0 if x is None else x.data_ptr() for x in kept)
    example, size, alone, shared = EXAMPLES[weight.dtype]
    outer, inner = weight.shape
    last, new, kernel, single = (int(relu), example, size), torch.empty, rows_by_weights, torch.float32

    def apply(x: Tensor) -> Tensor | None:
        shape = x.shape
        if len(shape) != 2 or shape[1] != inner or x.dtype is not single or not x.is_cpu or not x.is_contiguous():
            return None
        rows = shape[0]
        if rows > _most_rows(alone, shared) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        out = new(rows, outer)
        kernel(out.data_ptr(), outer * 4, x.data_ptr(), inner * 4, rows, matrix, inner, outer, factor, shift, *last)
        return out

    apply.kept = kept  # type: ignore[attr-defined]
    return apply
