"""Associative memories on the CPU in float32: one compiled call for a whole retrieval, weights never held."""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from thalweg.kernels.cpu import memory_panels as panels
from thalweg.kernels.cpu.memory_panels import SLOTS, room_for
from thalweg.kernels.cpu.memory_tiles import PANEL
from thalweg.kernels.cpu.plain import compile_plain
from thalweg.kernels.cpu.threads import LEAST_SHARE, Entry, enter
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "nearest", "settle"]

_BLOCK = 48  # patterns of a block: whole tiles, few enough that both products find them in a near cache
_PARTS = 2  # of a pass for every thread: what a late one leaves, another does
nearest = reference.nearest


@cache
def _entry(name: str) -> Entry:
    function = getattr(panels, name)
    return Entry(compile_plain(function), function)


def _present(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows that are present, each a run of numbers."""
    rows = rows if mask is None else rows[mask]
    return rows if rows.stride(1) == 1 or not rows.numel() else rows.contiguous()


def _threads(work: int) -> int:
    """How many threads pay for so many multiply-adds, of which vectors do eight at a time."""
    return max(1, min(torch.get_num_threads(), work // (8 * LEAST_SHARE)))


def _largest_square(patterns: Tensor) -> float:
    """The largest squared norm, without PyTorch: where cores are busy, its threads wait for one another."""
    count, inner = patterns.shape
    threads = _threads(count * inner)
    found, table = torch.empty(threads), (ctypes.c_int64 * SLOTS)()
    table[panels.PATTERNS], table[panels.INNER], table[panels.PARTS] = count, inner, threads
    table[panels.KEYS], table[panels.KEY_STRIDE] = patterns.data_ptr(), patterns.stride(0) * 4
    table[panels.LSE] = found.data_ptr()
    enter(_entry("squares"), table, threads)
    return max(found.tolist())


def _call(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    beta: float,
    most: int,
    numbers: tuple[float, float],
    out: dict[int, Tensor],
) -> None:
    """Carry a table out by as many threads as pay: panels of queries for each, or parts of the patterns."""
    count, inner = queries.shape
    patterns, outer = values.shape
    # What is so far below the top adds less than one part in 2^24 even if all patterns lie there.
    facts = torch.tensor([beta / math.log(2), beta, 25.0 + math.log2(patterns), *numbers])
    needed, size = -(-count // PANEL), room_for(inner, outer, _BLOCK)
    threads = _threads(count * patterns * (inner + outer))
    split = needed < threads
    parts = _PARTS * threads // needed if split else 1
    rooms = needed * parts if split else min(threads, needed)
    held = torch.empty(rooms * size // 4 + 16)
    table = (ctypes.c_int64 * SLOTS)()
    table[:19] = (
        0, 0, count, patterns, inner, outer, _BLOCK, most, needed if split else rooms, parts,
        queries.data_ptr(), queries.stride(0) * 4, keys.data_ptr(), keys.stride(0) * 4,
        values.data_ptr(), values.stride(0) * 4, facts.data_ptr(), -(-held.data_ptr() // 64) * 64, size,
    )  # fmt: skip
    for slot, tensor in out.items():
        table[slot] = tensor.data_ptr()
    if not split:
        enter(_entry("work"), table, threads)
        return
    _entry("begin").call(table)
    table[panels.BUSY] = count
    while table[panels.BUSY]:
        enter(_entry("pass_part"), table, threads)
        _entry("join").call(table)


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` in one call.

    >>> associate(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]), 1.0, None, None)
    (tensor([[2.]]), tensor([0.6931]))
    """
    keys, values, queries = _present(keys, mask), _present(values, mask), _present(queries, None)
    mixed, lse = torch.empty(len(queries), values.shape[1]), torch.empty(len(queries))
    if not len(keys):
        return mixed.zero_(), lse.fill_(-torch.inf)
    out = {panels.STATE: mixed, panels.LSE: lse}
    _call(queries, keys, values, float(beta.detach() if isinstance(beta, Tensor) else beta), -1, (0.0, 0.0), out)
    return mixed, lse


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one call.

    >>> settle(torch.tensor([[0.9]]), torch.tensor([[1.0], [-1.0]]), 100.0, 5, 1e-6, None, None).steps
    tensor([2])
    """
    patterns, queries = _present(patterns, mask), _present(queries, None)
    if not len(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, None, block)
    count = len(queries)
    offset = math.log(len(patterns)) / beta + _largest_square(patterns) / 2
    state, energies = queries.clone(memory_format=torch.contiguous_format), torch.empty(count, max_steps + 1)
    steps, still = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    out = {panels.STATE: state, panels.ENERGIES: energies, panels.STEPS: steps, panels.CONVERGED: still}
    _call(queries, patterns, patterns, beta, max_steps, (tol, offset), out)
    return Settled(state, energies, steps, still.bool())
