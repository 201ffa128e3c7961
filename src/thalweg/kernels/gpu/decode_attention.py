"""Attention of a decoding step over caches that stay where they are: a program for each row and head."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["attend_past", "attend_source", "rotate"]


@triton.jit
def _attend(query, base, offsets, count, width, SP: tl.constexpr, DP: tl.constexpr, size, PER_STEP: tl.constexpr):
    """Softmax reading of ``count`` places: keys at ``base`` + the place's offset, values ``width`` entries further."""
    place = tl.arange(0, SP)
    column = tl.arange(0, DP)
    most = -float("inf")
    total = 0.0
    reading = tl.zeros((DP,), tl.float32)
    for begin in range(0, count, SP):
        s = begin + place
        inside = s < count
        if PER_STEP > 0:
            offset = (s.to(tl.int64) * PER_STEP + tl.load(offsets + s, mask=inside, other=0)) * 2 * width
        else:
            offset = s.to(tl.int64) * 2 * width
        mask = inside[:, None] & (column < size)[None, :]
        keys = tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(keys * query[None, :], axis=1), -float("inf"))
        higher = tl.maximum(most, tl.max(scores, axis=0))
        weights = tl.exp(scores - higher)
        decay = tl.exp(most - higher)
        values = tl.load(base + width + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        reading = reading * decay + tl.sum(values * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        most = higher
    return reading / tl.where(count > 0, total, 1.0)  # nothing to read gives zeros


@triton.jit
def _past(
    queries,
    cache,
    lineage,
    position,
    out,
    capacity,
    width,
    size,
    scale,
    ROWS: tl.constexpr,
    SP: tl.constexpr,
    DP: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, DP)
    start = row * width + head * size
    query = tl.load(queries + start + column, mask=column < size, other=0.0).to(tl.float32) * scale
    count = tl.load(position).to(tl.int32) + 1
    reading = _attend(query, cache + head * size, lineage + row * capacity, count, width, SP, DP, size, ROWS)
    tl.store(out + start + column, reading.to(out.dtype.element_ty), mask=column < size)


def attend_past(queries: Tensor, cache: Tensor, lineage: Tensor, position: Tensor, heads: int, out: Tensor) -> Tensor:
    """Softmax over s <= position of q k / sqrt(D / heads) with (k, v) = cache[s, lineage[r, s]], weighting v; (R, D).

    ``queries`` (R, D); ``cache`` (T, R, 2, D); ``lineage`` (R, T); ``position`` a tensor with one number.

    >>> attend_past.__name__
    'attend_past'
    """
    rows, width = queries.shape
    size = width // heads
    kernel: Any = _past
    kernel[rows, heads](
        *(queries, cache, lineage, position, out, lineage.shape[1], width, size, size**-0.5),
        ROWS=cache.shape[1],
        SP=16,
        DP=triton.next_power_of_2(size),
        num_warps=1,
    )
    return out


@triton.jit
def _source(
    queries, memory, lengths, out, places, width, size, scale, GROUP: tl.constexpr, SP: tl.constexpr, DP: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    item = row // GROUP
    column = tl.arange(0, DP)
    start = row * width + head * size
    query = tl.load(queries + start + column, mask=column < size, other=0.0).to(tl.float32) * scale
    count = tl.load(lengths + item).to(tl.int32)
    base = memory + item.to(tl.int64) * places * 2 * width + head * size
    reading = _attend(query, base, lengths, count, width, SP, DP, size, 0)
    tl.store(out + start + column, reading.to(out.dtype.element_ty), mask=column < size)


def attend_source(queries: Tensor, memory: Tensor, lengths: Tensor, heads: int, out: Tensor) -> Tensor:
    """The same over ``memory`` (A, S, 2, D) of each row's source, s < lengths[a]; R / A rows in a row share one.

    >>> attend_source.__name__
    'attend_source'
    """
    rows, width = queries.shape
    size = width // heads
    kernel: Any = _source
    kernel[rows, heads](
        *(queries, memory, lengths, out, memory.shape[1], width, size, size**-0.5),
        GROUP=rows // len(memory),
        SP=16,
        DP=triton.next_power_of_2(size),
        num_warps=1,
    )
    return out


@triton.jit
def _rotate(x, table, position, slab, stride, size, HP: tl.constexpr):
    """Turn pairs (i, i + size / 2) of a head by the angles of the position, in place."""
    row, head = tl.program_id(0), tl.program_id(1)
    half = size // 2
    column = tl.arange(0, HP)
    inside = column < half
    step = tl.load(position)
    cosine = tl.load(table + step * 2 * half + column, mask=inside, other=0.0)
    sine = tl.load(table + step * 2 * half + half + column, mask=inside, other=0.0)
    start = x + step * slab + row * stride + head * size
    low = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(start + half + column, mask=inside, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(start + column, (low * cosine - high * sine).to(kind), mask=inside)
    tl.store(start + half + column, (high * cosine + low * sine).to(kind), mask=inside)


def rotate(queries: Tensor, cache: Tensor, table: Tensor, position: Tensor, heads: int) -> None:
    """Rotary positions, in place: ``queries`` (R, D) and the keys in ``cache[position]`` (R, 2, D).

    ``table`` (T, 2, D / heads / 2) holds cosines and sines of the angles of every position.

    >>> rotate.__name__
    'rotate'
    """
    rows, width = queries.shape
    size = width // heads
    kernel: Any = _rotate
    for x, slab, stride in ((queries, 0, width), (cache, 2 * width * cache.shape[1], 2 * width)):
        kernel[rows, heads](
            *(x, table, position, slab, stride, size), HP=triton.next_power_of_2(size // 2), num_warps=1
        )
