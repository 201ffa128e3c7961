"""Attention of a decoding step over memories that stay where they are; readings as they are or in halves."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import finite_or_zero, pending
from thalweg.kernels.gpu.decode_products import Halves, write
from thalweg.kernels.gpu.launching import ceiling, overlapped

__all__ = ["attend_past", "attend_places", "attend_source"]

_BLOCK = 16  # places at a time
_SEVERAL = 128  # rows from which a program that reads sources has more than one
_MANY = 1024  # rows from which programs wait for memory anyway, and look at fewer places at a time


@triton.jit
def _attend(
    queries, memory, lineage, lengths, out,
    rows, group, places, width, size, query_step, memory_step, scale,
    PAST: tl.constexpr, SP: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Some rows, one head. What several of them read is fetched from afar once."""
    pending(WAIT)
    row = tl.program_id(0) * RP + tl.arange(0, RP)
    column = tl.arange(0, DP)
    ours, known = row < rows, column < size
    own = ours[:, None] & known[None, :]
    long = row.to(tl.int64)
    first = tl.program_id(1) * size
    at = queries + long[:, None] * query_step + first + column[None, :]
    query = tl.load(at, mask=own, other=0.0).to(tl.float32) * scale
    memory += first
    if PAST:  # keys and values of this step lie beside the queries, and go to where later steps look for them
        now = tl.load(lengths)
        key, value = tl.load(at + width, mask=own, other=0.0), tl.load(at + 2 * width, mask=own, other=0.0)
        to = memory + (now * rows + long)[:, None] * memory_step + column[None, :]
        tl.store(to, key, mask=own)
        tl.store(to + width, value, mask=own)
        count = tl.where(ours, now.to(tl.int32), 0)
        most = tl.sum(query * key.to(tl.float32), axis=1)
        total = tl.full((RP,), 1.0, tl.float32)
        reading = value.to(tl.float32)
    else:
        count = tl.load(lengths + row // group, mask=ours, other=0).to(tl.int32)
        most = tl.full((RP,), -float("inf"), tl.float32)
        total = tl.zeros((RP,), tl.float32)
        reading = tl.zeros((RP, DP), tl.float32)
    for begin in range(0, tl.max(count, axis=0), SP):
        s = begin + tl.arange(0, SP)
        there = s[None, :] < count[:, None]
        if PAST:
            ancestor = tl.load(lineage + long[:, None] * places + s[None, :], mask=there, other=0)
            line = s.to(tl.int64)[None, :] * rows + ancestor
        else:
            line = (long // group * places)[:, None] + s[None, :]
        entry = memory + (line * memory_step)[:, :, None] + column[None, None, :]
        mask = there[:, :, None] & known[None, None, :]
        keys = tl.load(entry, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(entry + width, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(there, tl.sum(keys * query[:, None, :], axis=2), -float("inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        level = finite_or_zero(higher)
        weights, decay = tl.exp(scores - level[:, None]), tl.exp(most - level)
        reading = reading * decay[:, None] + tl.sum(values * weights[:, :, None], axis=1)
        total = total * decay + tl.sum(weights, axis=1)
        most = higher
    reading = reading / tl.where(total > 0, total, 1.0)[:, None]  # nothing to read gives zeros
    write(out, reading, own, row, first, first + size, width, GP)


def attend_past(projected: Tensor, cache: Tensor, lineage: Tensor, position: Tensor, heads: int, block: int = 0) -> Any:
    """Softmax over s <= position of q k / sqrt(D / heads) with (k, v) = cache[s, lineage[r, s]], weighting v; (R, D).

    ``projected`` (R, 3 D): queries, and keys and values of this step, which are written to ``cache`` (T, R, 2, D);
    ``lineage`` (R, T) of the steps before; ``position`` (1,). In :class:`Halves` of a ``block`` unless that is 0.
    """
    rows, width = len(projected), cache.shape[3]
    few = 4 if rows > _MANY else _BLOCK
    steps = (1, lineage.shape[1], 3 * width, 2 * width)
    return _start(projected, cache, lineage, position, heads, block, (rows, width), steps, (few, 2, 1))


def attend_source(queries: Tensor, memory: Tensor, lengths: Tensor, heads: int, block: int = 0) -> Any:
    """The same over ``memory`` (A, S, 2, D) of each row's source, s < lengths[a]; R / A rows in a row share one."""
    rows, width = queries.shape
    steps = (rows // len(memory), memory.shape[1], width, 2 * width)
    return _start(queries, memory, None, lengths, heads, block, (rows, width), steps, _cut(rows))


def attend_places(projected: Tensor, lengths: Tensor, places: int, heads: int, block: int = 0) -> Any:
    """The same of an encoder: each of S = ``places`` rows of a source asks all of its first lengths[a]; (A S, D).

    ``projected`` (A S, 3 D) has queries, keys and values.
    """
    rows, width = len(projected), projected.shape[1] // 3
    steps = (places, places, 3 * width, 3 * width)
    return _start(projected, projected[:, width:], None, lengths, heads, block, (rows, width), steps, _cut(rows))


def _cut(rows: int) -> tuple[int, int, int]:
    """Places and rows that a program looks at together, and its warps."""
    return (4 if rows > _MANY else 8, 4, 2) if rows > _SEVERAL else (_BLOCK, 1, 1)


def _start(
    queries: Tensor, memory: Tensor, lineage: Tensor | None, lengths: Tensor, heads: int, block: int,
    shape: tuple[int, int], steps: tuple[int, int, int, int], cut: tuple[int, int, int],
) -> Any:  # fmt: skip
    """``steps``: rows and places of an item, and how far apart rows of the queries and of the memory begin."""
    (rows, width), (SP, RP, warps) = shape, cut
    size, launched = width // heads, overlapped(queries)
    kernel: Any = _attend
    plain = queries.new_empty(0 if block else rows, width)
    out = Halves.empty(rows, width, block, queries.device) if block else Halves(plain, plain, plain)
    group, places, query_step, memory_step = steps
    kernel[-(-rows // RP), heads](
        queries, memory, lengths if lineage is None else lineage, lengths, out,
        rows, group, places, width, size, query_step, memory_step, size**-0.5,
        PAST=lineage is not None, SP=SP, RP=RP, DP=ceiling(size), GP=block, WAIT=bool(launched),
        num_warps=warps, **launched,
    )  # fmt: skip
    return out if block else plain
