r"""Paths through grids on a GPU: log Z and its gradient, a program for each item.

A program walks over the sweeps of its item, lanes side by side, and keeps the sums over paths of every cell in global
memory, in float64: numbers of long paths are large, and a sweep waits for memory rather than for arithmetic. Backward
each cell asks the cells it leads to for their share, so that no two lanes write to one place:

    share(cell) = sum_m share(next) exp(sum(cell) + score(next, m) - sum(next))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import finite_or_zero, log_or_minus_inf
from thalweg.kernels.gpu.launching import ceiling, on_device_of
from thalweg.kernels.reference.lattice import Lattice

__all__ = ["gradient_of", "log_partition"]

_LANES = 1024  # of one step; wider grids take several


@triton.jit
def _log_add(a, b):
    top = finite_or_zero(tl.maximum(a, b))
    return log_or_minus_inf(tl.exp(a - top) + tl.exp(b - top)) + top


@triton.jit
def _inside(i, lane, rows, columns, band):
    """Which cells are the item's, and in its band where that is not negative."""
    there = (lane >= 0) & (lane <= columns) & (i >= 0) & (i <= rows)
    ahead = lane.to(tl.int64) * rows - i.to(tl.int64) * columns
    return there & ((band < 0) | (tl.abs(ahead) <= tl.maximum(rows, columns).to(tl.int64) * band))


@triton.jit
def _into(
    scores, labels, i, lane, b, there, width, size, m, EMITTED: tl.constexpr, KINDS: tl.constexpr
):  # fmt: skip
    """Scores of move m into cells, -inf where there is none."""
    if EMITTED:
        label = tl.load(labels + lane, mask=there, other=0)
        before = tl.load(labels + lane - 2, mask=there & (lane >= 2), other=-1)
        there = there & ((b != 2) | ((lane >= 2) & (label != before)))
        found = tl.load(scores + (i - 1).to(tl.int64) * size + label, mask=there, other=-float("inf"))
    else:
        place = (i.to(tl.int64) * width + lane) * KINDS + m
        found = tl.load(scores + place, mask=there, other=-float("inf"))
    return found.to(tl.float64)


@triton.jit
def _forward(
    scores, moves, all_rows, all_columns, labels, sums, values, width, size, stride, room, band, ends,
    EMITTED: tl.constexpr, SKEW: tl.constexpr, LOCAL: tl.constexpr, KINDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(all_rows + item).to(tl.int32), tl.load(all_columns + item).to(tl.int32)
    scores += item * stride
    labels += item * width
    sums += item * room
    found_top = tl.full([LANES], -float("inf"), tl.float64)
    found_sum = tl.zeros([LANES], tl.float64)
    row = sums  # of the sweep
    for d in range(rows + SKEW * columns + 1):
        for begin in range(0, columns + 1, LANES):
            lane = begin + tl.arange(0, LANES)
            i = d - SKEW * lane
            there = _inside(i, lane, rows, columns, band)
            top = tl.full([LANES], -float("inf"), tl.float64)
            total = tl.zeros([LANES], tl.float64)
            for m in range(KINDS):
                a, b = tl.load(moves + 2 * m).to(tl.int32), tl.load(moves + 2 * m + 1).to(tl.int32)
                comes = there & (i >= a) & (lane >= b)
                before = tl.load(row - (a + SKEW * b) * width + lane - b, mask=comes, other=-float("inf"))
                comes = comes & (before > -float("inf"))
                x = before + _into(scores, labels, i, lane, b, comes, width, size, m, EMITTED, KINDS)
                x = tl.where(comes, x, -float("inf"))
                higher = tl.maximum(top, x)
                base = finite_or_zero(higher)
                total = total * tl.exp(finite_or_zero(top) - base) + tl.exp(x - base)
                top = higher
            here = log_or_minus_inf(total) + finite_or_zero(top)
            if LOCAL:
                higher = tl.maximum(found_top, here)
                base = finite_or_zero(higher)
                found_sum = found_sum * tl.exp(finite_or_zero(found_top) - base) + tl.exp(here - base)
                found_top = higher
                here = tl.where(there, _log_add(here, tl.zeros_like(here)), -float("inf"))
            else:
                here = tl.where((i == 0) & (lane == 0), 0.0, here)
            tl.store(row + lane, here, mask=(lane <= columns) & (i >= 0) & (i <= rows))
        row += width
        tl.debug_barrier()  # the next sweep reads what other threads wrote
    if LOCAL:
        peak = finite_or_zero(tl.max(found_top, axis=0))
        z = log_or_minus_inf(tl.sum(found_sum * tl.exp(finite_or_zero(found_top) - peak), axis=0)) + peak
    else:
        z = tl.full([], -float("inf"), tl.float64)
        for e in range(ends):
            place = (rows + SKEW * (columns - e)).to(tl.int64) * width + columns - e
            z = _log_add(z, tl.load(sums + place, mask=columns >= e, other=-float("inf")))
    tl.store(values + item, z)


@triton.jit
def _backward(
    scores, moves, all_rows, all_columns, labels, sums, values, shares, gradient, width, size, stride, room, band, ends,
    EMITTED: tl.constexpr, SKEW: tl.constexpr, LOCAL: tl.constexpr, KINDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(all_rows + item).to(tl.int32), tl.load(all_columns + item).to(tl.int32)
    scores += item * stride
    gradient += item * stride
    labels += item * width
    sums += item * room
    shares += item * room
    z = tl.load(values + item)
    last = rows + SKEW * columns
    row, own_row = sums + last.to(tl.int64) * width, shares + last.to(tl.int64) * width
    for back in range(tl.where(z > -float("inf"), last + 1, 0)):  # without a path there is nothing to share
        d = last - back
        for begin in range(0, columns + 1, LANES):
            lane = begin + tl.arange(0, LANES)
            i = d - SKEW * lane
            there = _inside(i, lane, rows, columns, band)
            here = tl.load(row + lane, mask=there, other=-float("inf"))
            there = there & (here > -float("inf"))
            share = tl.where(there & (i == rows) & (lane > columns - ends), tl.exp(here - z), 0.0)
            for m in range(KINDS):
                a, b = tl.load(moves + 2 * m).to(tl.int32), tl.load(moves + 2 * m + 1).to(tl.int32)
                goes = there & _inside(i + a, lane + b, rows, columns, band)
                place = (a + SKEW * b) * width + lane + b
                after = tl.load(row + place, mask=goes, other=-float("inf"))
                own = tl.load(own_row + place, mask=goes, other=0.0)
                x = here + _into(scores, labels, i + a, lane + b, b, goes, width, size, m, EMITTED, KINDS)
                goes = goes & (x > -float("inf"))
                part = tl.where(goes, own * tl.exp(x - finite_or_zero(after)), 0.0)
                if LOCAL:
                    part += tl.where(goes, tl.exp(x - z), 0.0)
                share += part
                if not EMITTED:
                    into = ((i + a).to(tl.int64) * width + lane + b) * KINDS + m
                    tl.store(gradient + into, part.to(gradient.dtype.element_ty), mask=goes)
            tl.store(own_row + lane, share, mask=(lane <= columns) & (i >= 0) & (i <= rows))
        row -= width
        own_row -= width
        tl.debug_barrier()


def log_partition(lattice: Lattice, *, gradient: bool) -> tuple[Tensor, Tensor]:
    """log Z (B,) and, where a gradient is going to be asked for, what :func:`gradient_of` makes it of.

    Memory O(B D L) numbers of float64 for D sweeps of L lanes, twice that with a gradient.
    """
    scores, labels = lattice.scores, lattice.labels
    batch, device = len(lattice.rows), scores.device
    moves = torch.tensor(lattice.moves, device=device)
    sums = torch.empty(batch, lattice.sweeps, lattice.width, dtype=torch.float64, device=device)
    values = torch.empty(batch, dtype=torch.float64, device=device)
    lanes = min(_LANES, ceiling(lattice.width))
    numbers = (lattice.width, scores.shape[-1], scores[0].numel(), sums[0].numel())
    numbers = (*numbers, -1 if lattice.band is None else lattice.band, lattice.ends)
    options = {
        "EMITTED": labels is not None,
        "SKEW": lattice.skew,
        "LOCAL": lattice.ends == 0,
        "KINDS": len(lattice.moves),
        "LANES": lanes,
        "num_warps": max(1, min(8, lanes // 64)),
    }
    given = (scores, moves, lattice.rows, lattice.columns, lattice.rows if labels is None else labels, sums, values)
    out = torch.zeros_like(scores) if gradient else scores.new_empty(0)
    with on_device_of(scores):
        _forward[(batch,)](*given, *numbers, **options)
        if gradient:
            shares = torch.zeros_like(sums)
            _backward[(batch,)](*given, shares, out, *numbers, **options)
            out = out if labels is None else shares[:, 1:]
    return values.to(scores.dtype), out


def gradient_of(lattice: Lattice, shares: Tensor, weights: Tensor) -> Tensor:
    """The gradient of sum_b weights[b] log Z[b] in the scores."""
    if lattice.labels is None:
        return shares * weights.view(-1, 1, 1, 1)
    # A product adds up equal labels in an order that is always the same.
    emits = torch.nn.functional.one_hot(lattice.labels, lattice.scores.shape[-1]).to(shares.dtype)
    return ((shares * weights.view(-1, 1, 1)) @ emits).to(lattice.scores.dtype)
