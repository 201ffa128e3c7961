"""The lists of operations that :mod:`~thalweg.kernels.cpu.decode_search` carries out, made of tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor

from thalweg.kernels.cpu import decode_search as kernels
from thalweg.kernels.cpu.panels import PANEL as OUTPUTS
from thalweg.kernels.cpu.panels import pack
from thalweg.kernels.cpu.threads import Entry, enter
from thalweg.kernels.fixed_beam import Beam

__all__ = ["Search", "pack"]

# The kinds of operations; what each works on is told there.
LINEAR, NORM, PAST, SOURCE = kernels.LINEAR, kernels.NORM, kernels.PAST, kernels.SOURCE
SCALE, GELU, SILU, SWIGLU = kernels.SCALE, kernels.GELU, kernels.SILU, kernels.SWIGLU
STORE, EMBED, ROTATE, PANELS = kernels.STORE, kernels.EMBED, kernels.ROTATE, kernels.PANELS
# Outputs of a panel of packed weights.
PANEL = OUTPUTS
_PARTS, _LEAST = 2, 30_000  # parts of a product for each thread, unless they had fewer weights than that

_FIVE = types.void(*(types.int64,) * 5)


_PRODUCTS = {torch.float32: kernels.linear_single, torch.bfloat16: kernels.linear_half, torch.int8: kernels.linear_byte}


@cache
def _performer(function: Any) -> Any:
    """A C function that performs operations; it is called by its address, so that searches need not hold its code."""
    return cfunc(_FIVE, cache=True)(function)


@cache
def _entry() -> Entry:
    compiled: Any = cfunc(types.void(types.int64), cache=True)(kernels.search)
    return Entry(compiled.address, compiled)


def _words(*values: float | Tensor) -> list[int]:
    """Addresses of tensors, bits of floats, whole numbers as they are."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.data_ptr())
        else:
            found.append(int(np.float32(value).view(np.int32)) if isinstance(value, float) else value)
    return found


class Search:
    """A search that is run as often as wanted on buffers that stay where they are.

    Args:
        kind: type of the weights: float32, bfloat16 or int8.
        before, each: operations before the first step and of each step: a kind and what it works on (tensors, whole
            numbers, floats), in the order listed above.
        rows_before, rows: how many rows each list works on.
        beam: where the search stands; its ``done`` and ``remaining`` are not used.
        logits: (R, V), what the last operation of a step gives; lineage: (R, T) int64; sources: (R,) int64, the item
            of every row. Items that are done give up their rows, so that both change.

    >>> Search.__name__
    'Search'
    """

    def __init__(
        self,
        kind: torch.dtype,
        before: list[tuple[Any, ...]],
        rows_before: int,
        each: list[tuple[Any, ...]],
        rows: int,
        beam: Beam,
        logits: Tensor,
        lineage: Tensor,
        sources: Tensor,
    ):
        self.beam, self.lineage, self.sources, self.rows = beam, lineage, sources, rows
        self.rows_before = rows_before
        self.lists = [self._coded(before, rows_before), self._coded(each, rows)]
        self.ended = torch.zeros(len(beam.live), dtype=torch.int64)
        items, width = beam.live.shape
        self.order, self.room = torch.arange(items), torch.zeros_like(lineage)
        self.table = (ctypes.c_int64 * 40)()
        kinds = {op[0] for op in (*before, *each)}  # what is not there is not compiled
        fixed = {
            kernels.BEFORE: self.lists[0].ctypes.data,
            kernels.BEFORE_COUNT: len(before),
            kernels.BEFORE_ROWS: rows_before,
            kernels.EACH: self.lists[1].ctypes.data,
            kernels.EACH_COUNT: len(each),
            kernels.EACH_ROWS: rows,
            kernels.ITEMS: items,
            kernels.WIDTH: width,
            kernels.KEPT: beam.rank.shape[1],
            kernels.SYMBOLS: logits.shape[1],
            kernels.CAPACITY: lineage.shape[1],
            kernels.LOGITS: logits,
            kernels.TOKENS: beam.tokens,
            kernels.LIVE: beam.live,
            kernels.RANK: beam.rank,
            kernels.SCORE: beam.score,
            kernels.CODE: beam.code,
            kernels.HISTORY: beam.history,
            kernels.DROPPED: beam.dropped,
            kernels.ENDED: self.ended,
            kernels.LINEAGE: lineage,
            kernels.ROOM: self.room,
            kernels.ORDER: self.order,
            kernels.SOURCES: sources,
            kernels.SHARES: self._parts(items * 8192),
            kernels.LINEARLY: _performer(_PRODUCTS[kind]).address if LINEAR in kinds else 0,
            kernels.PANELLED: _performer(kernels.panels).address if PANELS in kinds else 0,
            kernels.OTHERWISE: _performer(kernels.perform).address,
        }
        for slot, value in fixed.items():
            self.table[slot] = _words(value)[0]
        self.kept = logits, lineage, before, each  # what the addresses belong to

    @staticmethod
    def _coded(ops: list[tuple[Any, ...]], rows: int) -> np.ndarray:
        coded = np.zeros((len(ops), kernels.WORDS), np.int64)
        for row, (kind, *values) in zip(coded, ops, strict=True):
            row[0], row[1] = kind, 1
            row[2 : 2 + len(values)] = _words(*values)
            work = values[5] * values[6] * (1 + rows // 16) if kind in (LINEAR, PANELS) else rows * 2048
            row[1] = Search._parts(work)
        return coded

    @staticmethod
    def _parts(work: int) -> int:
        """How many parts to make of so much work."""
        return max(1, min(_PARTS * torch.get_num_threads(), work // _LEAST))

    def run(self, count: int, *, eos: int | None, max_length: int, min_length: int, penalty: float) -> None:
        """Search the first ``count`` items to their ends."""
        table = self.table
        table[kernels.NEXT], table[kernels.DONE], table[kernels.LEFT] = 0, 0, count
        table[kernels.EACH_ROWS] = count * (self.rows // len(self.order))
        table[kernels.BEFORE_ROWS] = count * (self.rows_before // len(self.order))
        torch.arange(len(self.order), out=self.order)
        torch.arange(self.rows, out=self.lineage[:, 0])
        torch.div(self.lineage[:, 0], self.rows // len(self.order), rounding_mode="floor", out=self.sources)
        table[kernels.EOS], table[kernels.MOST], table[kernels.LEAST] = (
            -1 if eos is None else eos,
            max_length,
            min_length,
        )
        table[kernels.PENALTY] = _words(float(penalty))[0]
        self.ended.zero_()
        enter(_entry(), table, torch.get_num_threads())
        self.beam.done.copy_(self.ended)
