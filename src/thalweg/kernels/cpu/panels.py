"""Products of many rows on the CPU, with weights laid out in panels of sixteen outputs: six rows by a panel at a time.

Twelve sums stay in registers while two vectors of weights and six numbers go by, so that the processor multiplies at
every turn; nothing is added up across a vector.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from torch import Tensor

from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic

__all__ = ["PANEL", "pack", "rows_by_panels"]

# Outputs of a panel.
PANEL = 2 * LANES
_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights (outer, inner), outer a multiple of ``PANEL``, as panels (outer / PANEL, inner, PANEL).

    >>> import torch
    >>> pack(torch.arange(32.0).view(16, 2))[0, 1, :3]
    tensor([1., 3., 5.])
    """
    panels = weight.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return panels.contiguous() if out is None else out.copy_(panels)


def _tile(rows: int) -> Any:
    """The kernel of a tile: ``rows`` rows of input by one panel."""

    @intrinsic
    def tile(typing_context, x, x_stride, panel, inner, bias, relu, out, out_stride):
        """``out[m, n] = sum_i x[m, i] panel[i, n] + bias[n]``, the negative ones 0 if ``relu``; all addresses."""

        def codegen(context, builder, signature, arguments):
            emitter, b = Emitter(context, builder, types.float32), builder
            x, x_stride, panel, inner, bias, relu, out, out_stride = arguments
            pointer = emitter.element.as_pointer()
            inputs = [b.inttoptr(b.add(x, b.mul(x_stride, emitter.size(m))), pointer) for m in range(rows)]
            weights, shift = b.inttoptr(panel, pointer), b.inttoptr(bias, pointer)
            halves = [emitter.size(0), emitter.size(LANES)]
            sums = [[emitter.variable(emitter.constant(0.0, LANES)) for _ in halves] for _ in range(rows)]
            with b.if_then(b.icmp_signed("!=", bias, emitter.size(0))):
                for n, half in enumerate(halves):
                    start = emitter.load(emitter.at(shift, half), LANES)
                    for m in range(rows):
                        b.store(start, sums[m][n])
            with emitter.loop(emitter.size(0), inner, 1) as i:
                row = b.mul(i, emitter.size(PANEL))
                entries = [emitter.load(emitter.at(weights, b.add(row, half)), LANES) for half in halves]
                for m in range(rows):
                    number = emitter.splat(emitter.scalar(inputs[m], i), LANES)
                    for n, entry in enumerate(entries):
                        b.store(emitter.call("fma", number, entry, b.load(sums[m][n])), sums[m][n])
            zero = emitter.constant(0.0, LANES)
            cut = emitter.splat(b.icmp_signed("!=", relu, emitter.size(0)), LANES)
            for m in range(rows):
                target = b.inttoptr(b.add(out, b.mul(out_stride, emitter.size(m))), pointer)
                for n, half in enumerate(halves):
                    total = b.load(sums[m][n])
                    total = b.select(b.and_(b.fcmp_ordered("<", total, zero), cut), zero, total)
                    emitter.store(total, emitter.at(target, half))

        return types.void(*(types.int64,) * 8), codegen

    return tile


_tile_6, _tile_2, _tile_1 = _tile(6), _tile(2), _tile(1)


@njit(**_options)
def rows_by_panels(out, out_stride, x, x_stride, rows, panels, inner, count, bias, relu):
    """All rows by ``count`` panels; arrays are addresses, strides bytes; no bias at address 0."""
    for p in range(count):
        panel, shift, to = panels + p * inner * 64, bias + p * 64 if bias else 0, out + p * 64
        m = 0
        while m + 6 <= rows:
            _tile_6(x + m * x_stride, x_stride, panel, inner, shift, relu, to + m * out_stride, out_stride)
            m += 6
        while m + 2 <= rows:
            _tile_2(x + m * x_stride, x_stride, panel, inner, shift, relu, to + m * out_stride, out_stride)
            m += 2
        if m < rows:
            _tile_1(x + m * x_stride, x_stride, panel, inner, shift, relu, to + m * out_stride, out_stride)
