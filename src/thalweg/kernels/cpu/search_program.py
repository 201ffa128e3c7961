"""The lists of operations that :mod:`~thalweg.kernels.cpu.decode_search` carries out, made of tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.kernels.cpu import decode_operations as operations
from thalweg.kernels.cpu import decode_search as kernels
from thalweg.kernels.cpu import recurrent_cells as cells
from thalweg.kernels.cpu import recurrent_encoder as encoders
from thalweg.kernels.cpu.emitter import LANES
from thalweg.kernels.cpu.panels import PANEL as OUTPUTS
from thalweg.kernels.cpu.panels import pack
from thalweg.kernels.cpu.plain import compile_plain
from thalweg.kernels.cpu.threads import Entry, enter
from thalweg.kernels.cpu.unchanged import unchanged
from thalweg.kernels.fixed_beam import Beam

__all__ = ["Search", "code", "pack", "unchanged"]

# The kinds of operations; what each works on is told there. Products are of the kind of their weights.
NORM, PAST, SOURCE, SCALE = operations.norm, operations.past, operations.source, operations.scale
GELU, SILU, SWIGLU, GEGLU, RMS = operations.gelu, operations.silu, operations.swiglu, operations.geglu, operations.rms
STORE, EMBED, ROTATE = operations.store, operations.embed, operations.rotate
LSTM, GRU, RESET, KEEP, ATTEND = cells.lstm, cells.gru, cells.reset, cells.keep, cells.attend
COPY, FOLD, POWERS = encoders.copy, encoders.fold, encoders.powers
# A recurrent layer over whole sources.
RECUR = {"lstm": encoders.lstm_layer, "gru": encoders.gru_layer}
LINEAR, PANELS = operations.linear_single, operations.panels
# Outputs of a panel of packed weights.
PANEL = OUTPUTS
_PARTS, _LEAST = 2, 30_000  # parts of a product for each thread, unless they had fewer weights than that
_PRODUCTS = {
    torch.float32: operations.linear_single,
    torch.bfloat16: operations.linear_half,
    torch.int8: operations.linear_byte,
}


@cache
def _entry() -> Entry:
    return Entry(compile_plain(kernels.search), kernels.search)


def _words(*values: float | Tensor) -> list[int]:
    """Addresses of tensors, bits of floats, whole numbers as they are."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.data_ptr())
        else:
            found.append(int(np.float32(value).view(np.int32)) if isinstance(value, float) else value)
    return found


def code(kind: Any) -> int:
    """The address of an operation's code, for operations that call others; products are with float32.

    >>> code(LINEAR) > 0
    True
    """
    return compile_plain(kind)


def _room(kind: Any, values: list[Any]) -> int:
    """Bytes that each part of an operation needs for itself."""
    if kind in RECUR.values():
        return 8 * operations.WORDS
    if kind is ATTEND:
        return 4 * (-(-values[17] // LANES) * LANES + values[15])
    if kind not in (PAST, SOURCE):
        return 0
    places, heads = (values[6], values[7]) if kind is PAST else (values[8], values[9] >> 32)
    return (4 * heads + 8) * (-(-places // LANES) * LANES)


class Search:
    """A search that is run as often as wanted on buffers that stay where they are.

    Args:
        kind: type of the weights: float32, bfloat16 or int8.
        before, each: operations before the first step and of each step: a kind and what it works on (tensors, whole
            numbers, floats) in the order told there; a whole number in front says how many rows each row stands for,
            0 that the rows are the places of all sources, of which :meth:`run` is told.
        rows_before, rows: how many rows each list works on.
        beam: where the search stands; its ``done`` and ``remaining`` are not used.
        logits: (R, V), what the last operation of a step gives, with rows of any stride; lineage: (R, T) int64;
        sources: (R,) int64, the item of every row. Items that are done give up their rows, so that both change; in the
            first step row n is the one row of item n.
        barred: (V,) numbers, not 0 at symbols that are never said; their probability goes to nobody.
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
        barred: Tensor | None = None,
    ):
        self.beam, self.lineage, self.sources = beam, lineage, sources
        self.rows_before, self.product = rows_before, _PRODUCTS[kind]
        self.rooms: list[Tensor] = []
        self.lists = [self._coded(before, rows_before), self._coded(each, rows)]
        self.ended = torch.zeros(len(beam.live), dtype=torch.int64)
        items, width = beam.live.shape
        self.order, self.room = torch.arange(items), torch.zeros_like(lineage)
        self.table = (ctypes.c_int64 * 40)()
        parts = self._parts(items * 8192)
        self.choices = torch.zeros(parts, 2 * width + 1, 2, dtype=torch.int64)
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
            kernels.STRIDE: logits.stride(0),
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
            kernels.SHARES: parts,
            kernels.CHOICES: self.choices,
            kernels.BARRED: 0 if barred is None else barred,
        }
        for slot, value in fixed.items():
            self.table[slot] = _words(value)[0]
        self.kept = logits, lineage, before, each, barred  # what the addresses belong to
        self._view(rows, items)

    def _view(self, rows: int, items: int) -> None:
        """What a search begins with, in NumPy: for one item a call of torch takes longer than what it does."""
        beam = self.beam
        state = (beam.tokens, beam.live, beam.rank, beam.score, beam.dropped, beam.done)
        self.tokens, self.live, self.rank, self.score, self.dropped, self.done = (x.numpy() for x in state)
        self.reset = [(x.numpy(), x.numpy().copy()) for x in (self.order, self.ended)]
        first = np.arange(rows)
        self.reset += [(self.lineage.numpy()[:, 0], first), (self.sources.numpy(), np.minimum(first, items - 1))]

    def _coded(self, ops: list[tuple[Any, ...]], rows: int) -> np.ndarray:
        coded = np.zeros((len(ops), operations.WORDS), np.int64)
        for row, op in zip(coded, ops, strict=True):
            times, kind, *values = op if isinstance(op[0], int) else (1, *op)
            row[0] = compile_plain(self.product if kind is LINEAR else kind)  # what is not there is not compiled
            row[1] = parts = self._shares(kind, values, rows * times if times else len(values[0]))
            row[2 : 2 + len(values)] = _words(*values)
            row[operations.TIMES] = times
            if (room := _room(kind, values)) > 0:
                self.rooms.append(torch.zeros(parts, room, dtype=torch.uint8))
                row[operations.ROOM] = self.rooms[-1].data_ptr()
        return coded

    @staticmethod
    def _shares(kind: Any, values: list[Any], rows: int) -> int:
        if kind in RECUR.values():  # each direction by itself
            directions = values[-1]
            return directions * max(1, min(rows // 4, _PARTS * torch.get_num_threads() // directions))
        product = kind in (LINEAR, PANELS)
        return Search._parts(values[5] * values[6] * (1 + rows // 16) if product else rows * 2048)

    @staticmethod
    def _parts(work: int) -> int:
        """How many parts to make of so much work."""
        return max(1, min(_PARTS * torch.get_num_threads(), work // _LEAST))

    def start(self, bos: int) -> None:
        """Begin anew, as :func:`thalweg.kernels.fixed_beam.start` does."""
        self.tokens.fill(bos)
        for x in (self.live, self.rank, self.score, self.dropped):
            x.fill(-np.inf)
        self.live[:, 0] = 0

    def run(
        self, count: int, *, eos: int | None, max_length: int, min_length: int, penalty: float, places: int = 0
    ) -> None:
        """Search the first ``count`` items to their ends; ``places`` is what their sources have in all."""
        table = self.table
        table[kernels.NEXT], table[kernels.DONE], table[kernels.LEFT] = 0, 0, count
        table[kernels.PLACES] = places
        table[kernels.EACH_ROWS] = count
        table[kernels.BEFORE_ROWS] = count * (self.rows_before // len(self.order))
        for array, begun in self.reset:
            array[:] = begun
        table[kernels.EOS], table[kernels.MOST], table[kernels.LEAST] = (
            -1 if eos is None else eos,
            max_length,
            min_length,
        )
        table[kernels.PENALTY] = _words(float(penalty))[0]
        enter(_entry(), table, torch.get_num_threads())
        self.done[:] = self.ended.numpy()
