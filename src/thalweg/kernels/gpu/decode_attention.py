"""Attention of a decoding step over caches that stay where they are; readings in float32 or in two halves."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import finite_or_zero, pending
from thalweg.kernels.gpu.halves import Halves, halve, scale_of
from thalweg.kernels.gpu.launching import overlapped

__all__ = ["attend_past", "attend_places", "attend_source", "rotate"]

_BLOCK = 16  # places at a time
_ROWS = 4  # of an item from which it pays to look at many places of it together
_SHORT = 64  # places up to which their rows read them one by one all the same
_SEVERAL = 128  # rows from which a program that reads sources has more than one
_MANY = 1024  # rows from which programs wait for memory anyway, and look at fewer places at a time


@triton.jit
def _write(out, out_low, out_scales, row, reading, mask, head, width, size, GP: tl.constexpr, DP: tl.constexpr):
    """Readings (RP, DP) of one head: in float32, or in halves with a scale for every GP of their columns."""
    column = tl.arange(0, DP)
    at = row.to(tl.int64)[:, None] * width + head * size + column[None, :]
    if GP == 0:
        tl.store(out + at, reading.to(out.dtype.element_ty), mask=mask)
    else:
        reading = tl.where(mask, reading, 0.0)
        scale, inverse = scale_of(tl.max(tl.abs(reading), axis=1))  # pyright: ignore[reportGeneralTypeIssues]
        upper, lower = halve(reading, inverse[:, None])  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(out + at, upper, mask=mask)
        tl.store(out_low + at, lower, mask=mask)
        block = head * (size // GP) + tl.arange(0, DP // GP)
        to = row[:, None] * (width // GP) + block[None, :]
        own = (tl.sum(mask.to(tl.int32), axis=1) > 0)[:, None] & (block < (head + 1) * (size // GP))[None, :]
        tl.store(out_scales + to, scale[:, None] + tl.zeros((scale.shape[0], DP // GP), tl.float32), mask=own)


@triton.jit
def _weigh(scores, most):
    """Weights of scores (RP, SP), what those of earlier ones shrink by, and the highest score so far.

    A row with nothing to read has -inf for all its scores, and weights of 0.
    """
    higher = tl.maximum(most, tl.max(scores, axis=1))
    level = finite_or_zero(higher)
    return tl.exp(scores - level[:, None]), tl.exp(most - level), higher


@triton.jit
def _past(
    queries,
    cache,
    lineage,
    position,
    out,
    out_low,
    out_scales,
    capacity,
    width,
    size,
    scale,
    ROWS: tl.constexpr,
    SP: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Some rows, one head: what several of them come from is fetched from afar once."""
    head = tl.program_id(1)
    row = tl.program_id(0) * RP + tl.arange(0, RP)
    ours = row < ROWS
    column = tl.arange(0, DP)
    known = column < size
    s = tl.arange(0, SP)
    there = ours[:, None] & (s < capacity)[None, :]  # whatever the position is
    ancestor = tl.load(lineage + row[:, None] * capacity + s[None, :], mask=there, other=0)
    count = tl.load(position).to(tl.int32)
    slab = cache + head * size + column[None, None, :]
    # What earlier steps left was there before the kernel before this one began: it is not waited for.
    at = slab + ((s.to(tl.int64)[None, :] * ROWS + ancestor) * 2 * width)[:, :, None]
    mask = (ours[:, None] & (s < count)[None, :])[:, :, None] & known[None, None, :]
    keys = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    pending(WAIT)
    own = ours[:, None] & known[None, :]
    long = row.to(tl.int64)[:, None]
    query = tl.load(queries + long * width + head * size + column[None, :], mask=own, other=0.0).to(tl.float32) * scale
    last = cache + (count.to(tl.int64) * ROWS + long) * 2 * width + head * size + column[None, :]
    most = tl.sum(tl.load(last, mask=own, other=0.0).to(tl.float32) * query, axis=1)
    total = tl.full((RP,), 1.0, tl.float32)
    reading = tl.load(last + width, mask=own, other=0.0).to(tl.float32)
    for _ in range(0, count, SP):
        scores = tl.where((s < count)[None, :], tl.sum(keys * query[:, None, :], axis=2), -float("inf"))
        weights, decay, most = _weigh(scores, most)  # pyright: ignore[reportGeneralTypeIssues]
        reading = reading * decay[:, None] + tl.sum(values * weights[:, :, None], axis=1)
        total = total * decay + tl.sum(weights, axis=1)
        s += SP
        there = ours[:, None] & (s < count)[None, :]
        ancestor = tl.load(lineage + row[:, None] * capacity + s[None, :], mask=there, other=0)
        at = slab + ((s.to(tl.int64)[None, :] * ROWS + ancestor) * 2 * width)[:, :, None]
        mask = there[:, :, None] & known[None, None, :]
        keys = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    _write(out, out_low, out_scales, row, reading / total[:, None], own, head, width, size, GP, DP)


def attend_past(
    queries: Tensor,
    cache: Tensor,
    lineage: Tensor,
    position: Tensor,
    heads: int,
    out: Tensor | Halves,
) -> Tensor | Halves:
    """Softmax over s <= position of q k / sqrt(D / heads) with (k, v) = cache[s, lineage[r, s]], weighting v; (R, D).

    ``queries`` (R, D); ``cache`` (T, R, 2, D); ``lineage`` (R, T) of the steps before, of which the kernel before this
    one must have written nothing, as of the cache; ``position`` a tensor with one number.
    """
    rows, width = queries.shape
    size = width // heads
    launched = overlapped(queries)
    kernel: Any = _past
    kernel[-(-rows // 2), heads](
        *(queries, cache, lineage, position, *_parts(out), lineage.shape[1], width, size, size**-0.5),
        ROWS=cache.shape[1],
        SP=4 if rows > _MANY else _BLOCK,
        RP=2,
        DP=triton.next_power_of_2(size),
        GP=_columns(out),
        WAIT=bool(launched),
        num_warps=1,
        **launched,
    )
    return out


def _parts(out: Tensor | Halves) -> tuple[Tensor, Tensor, Tensor]:
    return out if isinstance(out, Halves) else (out, out, out)


def _columns(out: Tensor | Halves) -> int:
    return out.block if isinstance(out, Halves) else 0


@triton.jit
def _places(
    queries,
    memory,
    lengths,
    out,
    out_low,
    out_scales,
    group,
    places,
    width,
    size,
    query_step,
    memory_step,
    scale,
    SP: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    EARLY: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Some rows of an item, one head: they read the same places, by matrix units where heads are wide enough."""
    if EARLY == 0:
        pending(WAIT)
    item, head = tl.program_id(0), tl.program_id(1)
    mine = tl.program_id(2) * RP + tl.arange(0, RP)
    row = item * group + mine
    column = tl.arange(0, DP)
    known = column < size
    own = (mine < group)[:, None] & known[None, :]
    base = memory + item.to(tl.int64) * places * memory_step + head * size
    s = tl.arange(0, SP)
    there = base + s.to(tl.int64)[:, None] * memory_step + column[None, :]
    mask = (s < places)[:, None] & known[None, :]  # more than there may be to read, but known at once
    keys = tl.load(there, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(there + width, mask=mask, other=0.0).to(tl.float32)
    count = tl.load(lengths + item).to(tl.int32)
    if EARLY:  # places were written long before the queries
        pending(WAIT)
    at = row.to(tl.int64)[:, None] * query_step + head * size + column[None, :]
    query = tl.load(queries + at, mask=own, other=0.0).to(tl.float32) * scale
    most = tl.full((RP,), -float("inf"), tl.float32)
    total = tl.zeros((RP,), tl.float32)
    reading = tl.zeros((RP, DP), tl.float32)
    for _ in range(0, count, SP):
        inside = s < count
        values = tl.where(inside[:, None], values, 0.0)
        if RP >= 16 and DP >= 16:
            scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        else:
            scores = tl.sum(query[:, None, :] * keys[None, :, :], axis=2)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        weights, decay, most = _weigh(scores, most)  # pyright: ignore[reportGeneralTypeIssues]
        if RP >= 16 and DP >= 16:
            mixed = tl.dot(weights, values, input_precision="tf32x3")
        else:
            mixed = tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
        reading = reading * decay[:, None] + mixed
        total = total * decay + tl.sum(weights, axis=1)
        s += SP
        there += SP * memory_step
        mask = (s < count)[:, None] & known[None, :]
        keys = tl.load(there, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(there + width, mask=mask, other=0.0).to(tl.float32)
    reading = reading / tl.where(count > 0, total, 1.0)[:, None]  # nothing to read gives zeros
    _write(out, out_low, out_scales, row, reading, own, head, width, size, GP, DP)


@triton.jit
def _rows(
    queries,
    memory,
    lengths,
    out,
    out_low,
    out_scales,
    rows,
    group,
    places,
    width,
    size,
    query_step,
    memory_step,
    scale,
    SP: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    EARLY: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Some rows, one head: each reads for itself what the nearest cache holds for all rows of its item."""
    if EARLY == 0:
        pending(WAIT)
    head = tl.program_id(1)
    row = tl.program_id(0) * RP + tl.arange(0, RP)
    ours, item = row < rows, row // group
    column = tl.arange(0, DP)
    known = column < size
    s = tl.arange(0, SP)
    count = tl.load(lengths + item, mask=ours, other=0).to(tl.int32)
    base = memory + (item.to(tl.int64) * places * memory_step)[:, None, None] + head * size + column[None, None, :]
    there = base + (s.to(tl.int64) * memory_step)[None, :, None]
    mask = (s[None, :] < count[:, None])[:, :, None] & known[None, None, :]
    keys = tl.load(there, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(there + width, mask=mask, other=0.0).to(tl.float32)
    if EARLY:  # places were written long before the queries
        pending(WAIT)
    own = ours[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * query_step + head * size + column[None, :]
    query = tl.load(queries + at, mask=own, other=0.0).to(tl.float32) * scale
    most = tl.full((RP,), -float("inf"), tl.float32)
    total = tl.zeros((RP,), tl.float32)
    reading = tl.zeros((RP, DP), tl.float32)
    for _ in range(0, tl.max(count, axis=0), SP):
        scores = tl.where(s[None, :] < count[:, None], tl.sum(keys * query[:, None, :], axis=2), -float("inf"))
        weights, decay, most = _weigh(scores, most)  # pyright: ignore[reportGeneralTypeIssues]
        reading = reading * decay[:, None] + tl.sum(values * weights[:, :, None], axis=1)
        total = total * decay + tl.sum(weights, axis=1)
        s += SP
        there += SP * memory_step
        mask = (s[None, :] < count[:, None])[:, :, None] & known[None, None, :]
        keys = tl.load(there, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(there + width, mask=mask, other=0.0).to(tl.float32)
    reading = reading / tl.where(count > 0, total, 1.0)[:, None]
    _write(out, out_low, out_scales, row, reading, own, head, width, size, GP, DP)


def attend_source(
    queries: Tensor, memory: Tensor, lengths: Tensor, heads: int, out: Tensor | Halves
) -> Tensor | Halves:
    """The same over ``memory`` (A, S, 2, D) of each row's source, s < lengths[a]; R / A rows in a row share one."""
    rows, width = queries.shape
    steps = (rows // len(memory), memory.shape[1], width, 2 * width)
    return _attend(queries, memory, lengths, heads, out, steps, early=True)


def attend_places(projected: Tensor, lengths: Tensor, places: int, heads: int, out: Tensor | Halves) -> Tensor | Halves:
    """The same of an encoder: each of S = ``places`` rows of a source asks all of its first lengths[a]; (A S, D).

    ``projected`` (A S, 3 D) has queries, keys and values.
    """
    width = projected.shape[1] // 3
    steps = (places, places, 3 * width, 3 * width)
    return _attend(projected, projected[:, width:], lengths, heads, out, steps, early=False)


def _attend(
    queries: Tensor,
    memory: Tensor,
    lengths: Tensor,
    heads: int,
    out: Tensor | Halves,
    steps: tuple[int, int, int, int],
    *,
    early: bool,
) -> Tensor | Halves:
    """``steps``: rows and places of an item, and how far apart those of the queries and of the memory begin.

    ``early``: the memory was not written by the kernel before this one.
    """
    group, places, query_step, memory_step = steps
    width, rows = _parts(out)[0].shape[1], len(lengths) * group
    size, launched = width // heads, overlapped(queries)
    about = (group, places, width, size, query_step, memory_step, size**-0.5)
    fixed = {"DP": triton.next_power_of_2(size), "GP": _columns(out), "EARLY": early, "WAIT": bool(launched)}
    kernel: Any = _places if group >= _ROWS and places > _SHORT else _rows
    if kernel is _places:
        grid = (len(lengths), heads, -(-group // 16))
        kernel[grid](
            *(queries, memory, lengths, *_parts(out), *about), SP=_BLOCK, RP=16, num_warps=1, **fixed, **launched
        )
    else:
        some = rows > _SEVERAL
        kernel[-(-rows // (4 if some else 1)), heads](
            *(queries, memory, lengths, *_parts(out), rows, *about),
            SP=(4 if rows > _MANY else 8) if some else _BLOCK,
            RP=4 if some else 1,
            num_warps=2 if some else 1,
            **fixed,
            **launched,
        )
    return out


@triton.jit
def _rotate(x, table, position, slab, stride, size, HP: tl.constexpr, WAIT: tl.constexpr):
    """Turn pairs (i, i + size / 2) of a head by the angles of the position, in place."""
    pending(WAIT)
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
    """
    rows, width = queries.shape
    size, launched = width // heads, overlapped(queries)
    kernel: Any = _rotate
    for x, slab, stride in ((queries, 0, width), (cache, 2 * width * cache.shape[1], 2 * width)):
        kernel[rows, heads](
            *(x, table, position, slab, stride, size),
            HP=triton.next_power_of_2(size // 2),
            WAIT=bool(launched),
            num_warps=1,
            **launched,
        )
