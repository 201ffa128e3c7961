"""Whether tensors are still what their copies say, bit by bit, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from torch import Tensor

from thalweg.kernels.cpu.decode_memory import index_at, put_index
from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic
from thalweg.kernels.cpu.plain import compile_plain

__all__ = ["unchanged"]

_BLOCK = 256 * LANES  # words between two looks at what was found


@intrinsic
def differ_at(typing_context, x, y, count):
    """The bits by which ``count`` words at two addresses differ, all of them together."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        found = {}
        for width in (4 * LANES, 1):
            kind = ir.VectorType(ir.IntType(32), width)
            found[width] = emitter.variable(ir.Constant(kind, [0] * width))

        def body(place: Any, width: int) -> None:
            kind = ir.VectorType(ir.IntType(32), width)
            pair = []
            for address in arguments[:2]:
                start = b.inttoptr(b.add(address, b.mul(place, emitter.size(4))), kind.as_pointer())
                pair.append(b.load(start, align=4, typ=kind))
            b.store(b.or_(b.load(found[width]), b.xor(*pair)), found[width])

        emitter.blocks(arguments[2], (4 * LANES, 1), body)
        wide, single = (emitter.reduce(b.load(place), b.or_) for place in found.values())
        return b.zext(b.or_(wide, single), INDEX)

    return types.int64(*(types.int64,) * 3), codegen


def compare(table):
    """Words: the answer, how many pairs, and for each two addresses and a number of words of 32 bits."""
    put_index(table, 0, 1)
    for n in range(index_at(table, 1)):
        x, y, count = index_at(table, 2 + 3 * n), index_at(table, 3 + 3 * n), index_at(table, 4 + 3 * n)
        for first in range(0, count, _BLOCK):
            if differ_at(x + first * 4, y + first * 4, min(_BLOCK, count - first)):
                put_index(table, 0, 0)
                return


@cache
def _compare() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compile_plain(compare))


def unchanged(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
    """Whether contiguous float32 tensors and their copies have the same bits.

    Time is that of reading both once; NaN equals itself.

    >>> import torch
    >>> unchanged([torch.ones(3)], [torch.ones(3)]), unchanged([torch.ones(3)], [torch.zeros(3)])
    (True, False)
    """
    if [x.shape for x in tensors] != [x.shape for x in copies] or not all(x.is_contiguous() for x in tensors):
        return False
    words = [0, len(tensors)]
    for x, y in zip(tensors, copies, strict=True):
        words += (x.data_ptr(), y.data_ptr(), x.numel())
    table = (ctypes.c_int64 * len(words))(*words)
    _compare()(table)
    return bool(table[0])
