r"""Segmentations on a GPU: a program for each item goes through its positions, in float64 and in the log domain.

The recursion is that of ``csrc/segments_kernels.cpp``: sums S of content, entries v_t = E_t - S_t, and A_t, the sum
over segmentations that end at t. Labels lie along the lanes; durations and previous labels are gone through in tiles,
whose sums are a maximum and a total relative to it. What lies between positions is in memory, O(T C) an item. The
gradient sends the mass of segments that end at t back to where they begin, in the proportions of the terms of A_t.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.launching import ceiling, on_device_of

__all__ = ["likelihood", "viterbi"]

Scores = tuple[Tensor, ...]  # parts (B, T, 2, C), durations (K, C) or (B, K, C), moves (C, C) or (B, C, C)
_TILE = 2048  # terms at a time


@triton.jit
def _more(most, total, x, MAX: tl.constexpr):
    """The greatest of terms x (ROWS, BC) and those before, and the total of all relative to it."""
    top = tl.maximum(most, tl.max(x, axis=0))
    if not MAX:
        shift = tl.where(top == -float("inf"), 0.0, top)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift[None, :]), axis=0)
    return top, total


@triton.jit
def _sum_of(most, total, MAX: tl.constexpr):
    if MAX:
        return most
    return tl.where(total > 0.0, tl.where(total > 0.0, most, 0.0) + tl.log(tl.where(total > 0.0, total, 1.0)), most)


@triton.jit
def _lasting(entries, durations, past, first, low, longest, size, c, BR: tl.constexpr):
    """The terms (BR, BC) of A - S at ``past`` for low + 1 .. low + BR positions, -inf where there is none."""
    d = low + 1 + tl.arange(0, BR)
    row = past - d
    there = (d <= longest)[:, None] & (row[:, None] >= first[None, :]) & (c < size)[None, :]
    x = tl.load(entries + row[:, None] * size + c[None, :], mask=there, other=-float("inf"))
    return x + tl.load(durations + (d - 1)[:, None] * size + c[None, :], mask=there, other=-float("inf")), row, d, there


@triton.jit
def _moving(ends, moves, low, size, c, BR: tl.constexpr):
    """The terms (BR, BC) of what comes before segments of c: labels low .. low + BR - 1."""
    i = low + tl.arange(0, BR)
    there = (i < size)[:, None] & (c < size)[None, :]
    before = tl.load(ends + i, mask=i < size, other=-float("inf"))
    return before[:, None] + tl.load(moves + i[:, None] * size + c[None, :], mask=there, other=-float("inf")), i, there


@triton.jit
def _forward(
    parts, durations, moves, entries, ends, sums, firsts, length, longest, size, c,
    MAX: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Everything at every position; gives A at the last."""
    on = c < size
    total_content = tl.zeros([BC], tl.float64)
    first = tl.zeros([BC], tl.int64)
    end = tl.full([BC], -float("inf"), tl.float64)
    for t in range(length):
        entry = tl.load(parts + (2 * t + 1) * size + c, mask=on, other=-float("inf"))
        if t > 0:
            most = tl.full([BC], -float("inf"), tl.float64)
            total = tl.zeros([BC], tl.float64)
            for left in range(0, size, BR):
                x, _, _ = _moving(ends + t * size, moves, left, size, c, BR)
                most, total = _more(most, total, x, MAX)
            entry += _sum_of(most, total, MAX)
        tl.store(entries + t * size + c, entry - total_content, mask=on)
        given = tl.load(parts + 2 * t * size + c, mask=on, other=0.0)
        forbidden = given == -float("inf")
        total_content += tl.where(forbidden, 0.0, given)
        past = t + 1
        first = tl.where(forbidden, past, first)
        tl.debug_barrier()
        most = tl.full([BC], -float("inf"), tl.float64)
        total = tl.zeros([BC], tl.float64)
        for low in range(0, tl.minimum(longest, past), BR):
            x, _, _, _ = _lasting(entries, durations, past, first, low, longest, size, c, BR)
            most, total = _more(most, total, x, MAX)
        end = _sum_of(most, total, MAX) + total_content
        tl.store(ends + past * size + c, end, mask=on)
        tl.store(sums + past * size + c, total_content, mask=on)
        tl.store(firsts + past * size + c, first, mask=on)
        tl.debug_barrier()
    return end


@triton.jit
def _likelihood(
    parts, durations, moves, lengths, entries, ends, sums, firsts, values, begun, mass_of, d_parts, d_durations,
    d_moves, steps, longest, size, by_item, moves_by_item, GRADIENT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    on = c < size
    parts += item * steps * 2 * size
    durations += item * by_item
    moves += item * moves_by_item
    apart = item * (steps + 1) * size
    entries, ends, sums, firsts = entries + apart, ends + apart, sums + apart, firsts + apart
    length = tl.load(lengths + item)
    end = _forward(parts, durations, moves, entries, ends, sums, firsts, length, longest, size, c, False, BR, BC)
    top = tl.max(end, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    whole = tl.sum(tl.exp(end - shift), axis=0)
    tl.store(values + item, tl.where(whole > 0.0, shift + tl.log(tl.where(whole > 0.0, whole, 1.0)), top))
    if GRADIENT:
        begun += item * steps * size
        mass_of += item * size
        d_parts += item * steps * 2 * size
        d_durations += item * longest * size
        d_moves += item * size * size
        mass = tl.where(whole > 0.0, tl.exp(end - shift) / tl.where(whole > 0.0, whole, 1.0), 0.0)
        inside = tl.zeros([BC], tl.float64)
        for step in range(length):
            past = length - step
            t = past - 1
            first = tl.load(firsts + past * size + c, mask=on, other=0)
            held = mass > 0.0
            change = tl.load(sums + past * size + c, mask=held, other=0.0)
            change -= tl.load(ends + past * size + c, mask=held, other=0.0)
            for low in range(0, tl.minimum(longest, past), BR):
                x, row, d, there = _lasting(entries, durations, past, first, low, longest, size, c, BR)
                there = there & held[None, :]
                share = tl.where(there, tl.exp(x + change[None, :]), 0.0) * mass[None, :]
                at = begun + row[:, None] * size + c[None, :]
                tl.store(at, tl.load(at, mask=there, other=0.0) + share, mask=there)
                at = d_durations + (d - 1)[:, None] * size + c[None, :]
                tl.store(at, tl.load(at, mask=there, other=0.0) + share, mask=there)
            tl.debug_barrier()
            begin = tl.load(begun + t * size + c, mask=on, other=0.0)
            given = tl.load(parts + 2 * t * size + c, mask=on, other=0.0)
            inside = tl.where(given == -float("inf"), 0.0, inside + mass)
            tl.store(d_parts + 2 * t * size + c, tl.maximum(inside, 0.0), mask=on)
            tl.store(d_parts + (2 * t + 1) * size + c, begin, mask=on)
            inside -= begin
            if t > 0:
                held = begin > 0.0
                change = tl.load(parts + (2 * t + 1) * size + c, mask=held, other=0.0)
                change -= tl.load(entries + t * size + c, mask=held, other=0.0)
                change -= tl.load(sums + t * size + c, mask=held, other=0.0)
                for left in range(0, size, BR):
                    x, i, there = _moving(ends + t * size, moves, left, size, c, BR)
                    there = there & held[None, :]
                    share = tl.where(there, tl.exp(x + change[None, :]), 0.0) * begin[None, :]
                    at = d_moves + i[:, None] * size + c[None, :]
                    tl.store(at, tl.load(at, mask=there, other=0.0) + share, mask=there)
                    tl.store(mass_of + i, tl.sum(share, axis=1), mask=i < size)
                tl.debug_barrier()
                mass = tl.load(mass_of + c, mask=on, other=0.0)


@triton.jit
def _viterbi(
    parts, durations, moves, lengths, entries, ends, sums, firsts, labels, steps, longest, size, by_item,
    moves_by_item, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    parts += item * steps * 2 * size
    durations += item * by_item
    moves += item * moves_by_item
    apart = item * (steps + 1) * size
    entries, ends, sums, firsts = entries + apart, ends + apart, sums + apart, firsts + apart
    labels += item * steps
    length = tl.load(lengths + item)
    end = _forward(parts, durations, moves, entries, ends, sums, firsts, length, longest, size, c, True, BR, BC)
    label = tl.argmax(end, axis=0).to(tl.int64)
    past = tl.where(tl.max(end, axis=0) > -float("inf"), length, 0)
    while past > 0:
        first = tl.load(firsts + past * size + label)
        most = tl.max(tl.full([BR], -float("inf"), tl.float64), axis=0)
        best = past * 0 + 1
        for low in range(0, tl.minimum(longest, past), BR):
            d = low + 1 + tl.arange(0, BR)
            there = (d <= longest) & (past - d >= first)
            x = tl.load(entries + (past - d) * size + label, mask=there, other=-float("inf"))
            x += tl.load(durations + (d - 1) * size + label, mask=there, other=-float("inf"))
            top = tl.max(x, axis=0)
            best = tl.where(top > most, (low + 1 + tl.argmax(x, axis=0)).to(tl.int64), best)
            most = tl.maximum(top, most)
        begin = past - best
        for low in range(begin, past, BR):
            at = low + tl.arange(0, BR)
            tl.store(labels + at, tl.where(at == begin, label, size + label), mask=at < past)
        if begin > 0:
            x = tl.load(ends + begin * size + c, mask=c < size, other=-float("inf"))
            x += tl.load(moves + c * size + label, mask=c < size, other=-float("inf"))
            label = tl.argmax(x, axis=0).to(tl.int64)
        past = begin


def _given(scores: Scores, lengths: Tensor) -> tuple[list[Tensor], tuple[int, ...], dict[str, Any]]:
    """Tensors that both kernels begin with, sizes, and how they are cut into tiles."""
    parts, durations, moves = (x.detach().double().contiguous() for x in scores)
    batch, steps, _, size = parts.shape
    longest = durations.shape[-2]
    room = list(parts.new_empty(3, batch, steps + 1, size).unbind(0))
    firsts = torch.empty(batch, steps + 1, size, dtype=torch.long, device=parts.device)
    apart = longest * size if durations.dim() == 3 else 0, size * size if moves.dim() == 3 else 0
    columns = ceiling(max(size, 2))
    rows = max(2, min(_TILE // columns, ceiling(max(longest, size, 2))))
    tensors = [parts, durations, moves, lengths.contiguous(), *room, firsts]
    return tensors, (steps, longest, size, *apart), {"BR": rows, "BC": columns, "num_warps": 4}


def likelihood(scores: Scores, lengths: Tensor, *, gradient: bool) -> tuple[Tensor, Scores]:
    """As :func:`thalweg.kernels.cpu.segments.likelihood`; a program for each item."""
    tensors, sizes, options = _given(scores, lengths)
    parts, (steps, longest, size) = tensors[0], sizes[:3]
    batch = len(parts)
    values = parts.new_empty(batch)
    shapes = ((batch, steps, size), (batch, size), (batch, steps, 2, size), (batch, longest, size), (batch, size, size))
    found = [parts.new_zeros(shape if gradient else (1,)) for shape in shapes]
    with on_device_of(parts):
        _likelihood[(batch,)](*tensors, values, *found, *sizes, GRADIENT=gradient, **options)  # type: ignore[arg-type]
    return values, tuple(found[2:]) if gradient else ()


def viterbi(scores: Scores, lengths: Tensor) -> Tensor:
    """As :func:`thalweg.kernels.cpu.segments.viterbi`; a program for each item."""
    tensors, sizes, options = _given(scores, lengths)
    labels = torch.full(tensors[0].shape[:2], -1, dtype=torch.long, device=lengths.device)
    with on_device_of(labels):
        _viterbi[(len(labels),)](*tensors, labels, *sizes, **options)  # type: ignore[arg-type]
    return labels
