"""Associative memories on the CPU in float32: one compiled call for a whole retrieval, weights never held."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.cpu import memory_panels as panels
from thalweg.kernels.cpu.memory_panels import SLOTS, room_for
from thalweg.kernels.cpu.memory_tiles import PANEL
from thalweg.kernels.cpu.plain import compile_plain
from thalweg.kernels.cpu.threads import LEAST_SHARE, Entry, enter
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "attend", "nearest", "settle"]

_BLOCK = 48  # patterns of a block: whole tiles, few enough that both products find them in a near cache
_KEPT = 1 << 15  # numbers of the memory that every thread keeps
_LEAST_WORK = 8 * LEAST_SHARE  # multiply-adds a thread; vectors do eight at a time
_LOG_2 = math.log(2)
_LARGEST = torch.finfo(torch.float32).max
_PARTS = 2  # of a pass for every thread: what a late one leaves, another does
# A table with the numbers that it points at behind it, written in one go.
_Table, _WRITTEN = ctypes.c_int64 * (SLOTS + 3), struct.Struct(f"{SLOTS}q5f")
nearest = reference.nearest


@cache
def _entry(name: str) -> Entry:
    function = getattr(panels, name)
    return Entry(compile_plain(function), function)


def _present(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows that are present, each a run of numbers."""
    rows = rows if mask is None else rows[mask]
    return rows if rows.stride()[-1] == 1 or not rows.numel() else rows.contiguous()


def _threads(work: int, most: int) -> int:
    """How many threads pay for so many multiply-adds, at most so many."""
    return max(1, min(most, work // _LEAST_WORK))


class _Cut(NamedTuple):
    """How a call is cut: threads, panels and parts of the patterns (several: they are shared out), memory."""

    threads: int
    panels: int
    parts: int
    size: int  # bytes of one room
    floats: int  # of all rooms, wherever the first begins


@lru_cache(256)
def _cut(count: int, patterns: int, inner: int, outer: int, most: int) -> _Cut:
    """For sizes and as many threads as there may be."""
    needed, size = -(-count // PANEL), room_for(inner, outer, _BLOCK)
    threads = _threads(count * patterns * (inner + outer), most)
    parts = _PARTS * threads // needed if needed < threads else 1
    rooms = needed if needed < threads else min(threads, needed)
    return _Cut(threads, rooms, parts, size, rooms * parts * size // 4 + 16)


class _Scratch(threading.local):
    """Memory that a thread keeps from call to call, as long as it is little: to ask for it takes its time too."""

    def __init__(self) -> None:
        self.room = self._made(_KEPT)

    def of(self, floats: int) -> tuple[int, Tensor]:
        """An address at a line of the cache, for so many numbers; the tensor must live as long as it is used."""
        return self.room if floats <= _KEPT else self._made(floats)

    def _made(self, floats: int) -> tuple[int, Tensor]:
        held = torch.empty(floats, dtype=torch.float32, device="cpu")
        return -(-held.data_ptr() // 64) * 64, held


_scratch = _Scratch()


def _largest_square(patterns: Tensor) -> float:
    """The largest squared norm, without PyTorch: where cores are busy, its threads wait for one another."""
    count, inner = patterns.shape
    threads = _threads(count * inner, torch.get_num_threads())
    found, table = (ctypes.c_float * threads)(), _Table()
    table[panels.PATTERNS], table[panels.INNER], table[panels.PARTS] = count, inner, threads
    table[panels.KEYS], table[panels.KEY_STRIDE] = patterns.data_ptr(), patterns.stride()[0] * 4
    table[panels.LSE] = ctypes.addressof(found)
    enter(_entry("squares"), table, threads)
    return max(found)


def _call(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    beta: float,
    most: int,
    numbers: tuple[float, float],
    out: tuple[int, int, int, int, int],
) -> None:
    """Carry a table out by as many threads as pay: panels of queries for each, or parts of the patterns.

    Shapes are (..., Q, D), (..., N, D) and (..., N, E) with nothing but ones before; ``out`` has the addresses of
    state, energies, steps, converged and lse, 0 for what is not wanted.
    """
    asked, read = queries.shape, values.shape
    count, inner, patterns, outer = asked[-2], asked[-1], read[-2], read[-1]
    cut = _cut(count, patterns, inner, outer, torch.get_num_threads())
    room, table = _scratch.of(cut.floats), _Table()
    whole = (
        0, 0, count, patterns, inner, outer, _BLOCK, most, cut.panels, cut.parts,
        queries.data_ptr(), queries.stride()[-2] * 4, keys.data_ptr(), keys.stride()[-2] * 4,
        values.data_ptr(), values.stride()[-2] * 4, ctypes.addressof(table) + 8 * SLOTS,
        room[0], cut.size, *out, count,
    )  # fmt: skip
    # What is so far below the top adds less than one part in 2^24 even if all patterns lie there.
    real = beta / _LOG_2, beta, 25.0 + math.log2(patterns), *numbers
    try:
        _WRITTEN.pack_into(table, 0, *whole, *real)
    except OverflowError:  # beyond float32
        _WRITTEN.pack_into(table, 0, *whole, *(max(-_LARGEST, min(x, _LARGEST)) for x in real))
    if cut.parts == 1:
        enter(_entry("work"), table, cut.threads)
        return
    _entry("begin").call(table)
    while table[panels.BUSY]:
        enter(_entry("pass_part"), table, cut.threads)
        _entry("join").call(table)


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` in one call.

    >>> associate(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]), 1.0, None, None)
    (tensor([[2.]]), tensor([0.6931]))
    """
    same = keys is values
    keys, queries = _present(keys, mask), _present(queries, None)
    values = keys if same else _present(values, mask)
    count = queries.shape[0]
    mixed, lse = queries.new_empty(count, values.shape[1]), queries.new_empty(count)
    if not keys.shape[0]:
        return mixed.zero_(), lse.fill_(-torch.inf)
    number = float(beta.detach() if isinstance(beta, Tensor) else beta)
    _call(queries, keys, values, number, -1, (0.0, 0.0), (mixed.data_ptr(), 0, 0, 0, lse.data_ptr()))
    return mixed, lse


def attend(queries: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """:func:`thalweg.kernels.memory.attend` in one call.

    >>> attend(torch.zeros(1, 1), torch.tensor([[1.0], [3.0]]), 1.0)
    tensor([[2.]])
    """
    queries = queries if queries.is_contiguous() else queries.contiguous()
    patterns = patterns if patterns.is_contiguous() else _present(patterns, None)
    mixed = torch.empty_like(queries)
    _call(queries, patterns, patterns, beta, -1, (0.0, 0.0), (mixed.data_ptr(), 0, 0, 0, 0))
    return mixed


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one call.

    >>> settle(torch.tensor([[0.9]]), torch.tensor([[1.0], [-1.0]]), 100.0, 5, 1e-6, None, None).steps
    tensor([2])
    """
    patterns, queries = _present(patterns, mask), _present(queries, None)
    count, size = queries.shape[0], patterns.shape[0]
    if not size:
        return reference.settle(queries, patterns, beta, max_steps, tol, None, block)
    offset = math.log(size) / beta + _largest_square(patterns) / 2
    state = queries.clone(memory_format=torch.contiguous_format)
    energies = queries.new_empty((count, max_steps + 1))
    steps, still = (queries.new_zeros(count, dtype=torch.int64) for _ in range(2))
    out = state.data_ptr(), energies.data_ptr(), steps.data_ptr(), still.data_ptr(), 0
    _call(queries, patterns, patterns, beta, max_steps, (tol, offset), out)
    return Settled(state, energies, steps, still.bool())
