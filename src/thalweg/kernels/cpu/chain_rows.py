"""Likelihood and gradient of chains of any number of labels at once, up to four items side by side.

The recursion is that of :mod:`~thalweg.kernels.cpu.chain_scaled`, for shared transitions of safe range only. Items go
in the order of their lengths, so that those of a group end at about the same time: while three or four of them last, a
step loads the matrix once for all; one or two are stepped each by itself. A group goes forward and back before the next
one begins: its forward weights stay in the cache, and the powers of its scores wait where its gradient will be.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from threading import local
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.chain_scaled import GROUP, SAFE_RANGE, first
from thalweg.kernels.cpu.chain_simd import (
    ITEMS,
    add_wide,
    back_row,
    count_up,
    least_row,
    mix_items,
    step_items,
    write_row,
)
from thalweg.kernels.cpu.simd import (
    add_outer,
    copy_row,
    dot,
    exp_row,
    fill_rows,
    max_row,
    multiply_row,
    padded,
    scale_row,
    sweep_sum,
)
from thalweg.kernels.cpu.threads import share
from thalweg.kernels.potentials import Chain

__all__ = ["at_once", "both"]

_COSTS = {ITEMS: 2.4, 2: 2.0, 1: 1.0}  # of so many items side by side, in that of one
_MOST_KEPT = 2**22  # bytes that a thread keeps for its next call
# The smallest safe ratio of two powers.
_LEAST = {torch.float32: math.exp(-SAFE_RANGE["f"]), torch.float64: math.exp(-SAFE_RANGE["d"])}
_NO_GOLD = torch.zeros(0, 0, dtype=torch.int64)
# Rows of a part's room after three matrices: end, factors, sums, after; then four of each of these.
_LAST, _FACTORS, _SUMS, _AFTER, _POWERS, _BETA, _WEIGHTS, _RIGHT = 0, 1, 2, 3, 4, 8, 12, 16
_ROWS = _RIGHT + GROUP
# Rows of a part's float64 numbers after two matrices: gradients of start and end, log scales, scales, sum of values.
_START, _END, _TOTALS, _SCALES, _VALUE = range(5)
_WIDE = 5


@kernel
def _raise_scores(transitions, end, least, room, rows):
    """Powers of transitions, their transpose and powers of end scores; the largest of each, or NaN for a wide range."""
    size, width = len(end), room.shape[1]
    top = room.dtype.type(-np.inf)
    for i in range(size):
        top = max(top, max_row(transitions[i], size))
    smallest = room.dtype.type(1)
    for i in range(size):
        exp_row(transitions[i], size, top, room[i])  # what is NaN here becomes 0
        smallest = min(smallest, least_row(room[i], size))
        for j in range(size):
            room[width + j, i] = room[i, j]
    most = max_row(end, size)
    exp_row(end, size, most, rows[_LAST])
    smallest = min(smallest, least_row(rows[_LAST], size))
    rows[_SUMS, 0] = top
    rows[_SUMS, 1] = most
    return smallest >= least


@kernel
def _step_forward(emissions, lengths, order, begin, live, t, power, rows, wide, trail, d_emissions):
    """Forward weights of position t of the first ``live`` items of a group, each over the sum of those before."""
    size = emissions.shape[2]
    factors, sums = rows[_FACTORS], rows[_SUMS]
    powers, after = rows[_POWERS : _POWERS + ITEMS], rows[_AFTER]
    one = rows.dtype.type(1)
    for n in range(live):
        b = order[begin + n]
        m = max_row(emissions[b, t], size)
        exp_row(emissions[b, t], size, m, powers[n])
        write_row(powers[n], size, d_emissions[b, t])
        scale = wide[_SCALES, n] * sums[n]
        wide[_TOTALS, n] += m
        if not 1e-200 < scale < 1e200:
            wide[_TOTALS, n] += math.log(scale)
            scale = 1.0
        wide[_SCALES, n] = scale
        factors[n] = one / sums[n]
    if live > 2:
        for n in range(live, ITEMS):
            factors[n] = 0
        step_items(trail[t - 1], power, size, powers, factors, trail[t], sums)
    else:
        for n in range(live):
            sweep_sum(trail[t - 1, n], power, size, after)
            sums[n] = multiply_row(powers[n], after, factors[n], trail[t, n])
        for n in range(live, trail.shape[1]):
            fill_rows(trail[t, n], rows.dtype.type(0))


@kernel
def _go_forward(emissions, start, lengths, order, begin, count, power, rows, wide, trail, d_emissions):
    """Forward weights of a group into ``trail`` (T, G, P), powers into ``d_emissions``; zeros past the lengths."""
    size = emissions.shape[2]
    powers = rows[_POWERS : _POWERS + ITEMS]
    for n in range(count):
        b = order[begin + n]
        wide[_TOTALS, n] = first(emissions, start, b, size, trail[0, n], powers[n])
        wide[_SCALES, n] = 1.0
        rows[_SUMS, n] = scale_row(powers[n], rows.dtype.type(1), trail[0, n])
        write_row(powers[n], size, d_emissions[b, 0])
    for n in range(count, trail.shape[1]):
        fill_rows(trail[0, n], rows.dtype.type(0))
    live = count
    for t in range(1, lengths[order[begin]]):
        while lengths[order[begin + live - 1]] <= t:
            live -= 1
        _step_forward(emissions, lengths, order, begin, live, t, power, rows, wide, trail, d_emissions)


@kernel
def _score(emissions, transitions, start, end, b, length, labels):
    """The score of one labelling in float64, NaN if a label is out of range."""
    size = len(end)
    total = 0.0
    for t in range(length):
        label = labels[t]
        if label < 0 or label >= size:
            return np.nan
        total += np.float64(emissions[b, t, label])
        if t > 0:
            total += transitions[labels[t - 1], label]
    return total + start[labels[0]] + end[labels[length - 1]]


@kernel
def _finish(
    emissions, transitions, start, end, lengths, order, begin, count, gold, top, most, rows, wide, trail, values
):
    """The values of a group; whether all of them are numbers."""
    sound = True
    for n in range(count):
        b = order[begin + n]
        length = lengths[b]
        s = dot(trail[length - 1, n], rows[_LAST])
        value = wide[_TOTALS, n] + math.log(wide[_SCALES, n]) + math.log(s) + most + (length - 1) * top
        if gold.shape[1] > 0:
            value = _score(emissions, transitions, start, end, b, length, gold[b]) - value
        values[b] = value
        wide[_VALUE, 0] += value
        sound = sound and s > 0 and not math.isnan(value)
    return sound


@kernel
def _step_back(emissions, order, begin, weight, moving, live, t, transposed, rows, trail, d_emissions):
    """Posteriors of position t; what its moves get beside the forward weights goes to ``rows[_RIGHT:]``."""
    size = emissions.shape[2]
    last, sums = rows[_LAST], rows[_SUMS]
    beta, weights = rows[_BETA : _BETA + ITEMS], rows[_WEIGHTS : _WEIGHTS + ITEMS]
    items = trail.shape[1]
    right = rows[_RIGHT + t % (GROUP // items) * items :]
    one = rows.dtype.type(1)
    if moving > 2:
        mix_items(weights, transposed, size, trail[t], beta, sums)
    else:
        for n in range(moving):
            sweep_sum(weights[n], transposed, size, beta[n])
            sums[n] = dot(trail[t, n], beta[n])
    for n in range(moving, live):  # items that end here
        copy_row(last, beta[n])
        fill_rows(weights[n], rows.dtype.type(0))
        sums[n] = dot(trail[t, n], beta[n])
    for n in range(live):
        b = order[begin + n]
        inverse = one / sums[n]
        back_row(trail[t, n], beta[n], inverse, inverse * weight[b], size, d_emissions[b, t], weights[n], right[n])
    for n in range(live, items):
        fill_rows(right[n], rows.dtype.type(0))


@kernel
def _go_back(emissions, lengths, order, begin, count, weight, transposed, rows, moves, trail, d_emissions):
    """The gradient in a group's emissions, and sums of its moves into ``moves``."""
    items = trail.shape[1]
    chunk = GROUP // items
    longest = lengths[order[begin]]
    live = 0
    for t in range(longest - 1, -1, -1):
        moving = live
        while live < count and lengths[order[begin + live]] > t:
            live += 1
        _step_back(emissions, order, begin, weight, moving, live, t, transposed, rows, trail, d_emissions)
        if t % chunk == 0:
            add_outer(trail[t], rows[_RIGHT:], min(chunk, longest - t) * items, moves)


@kernel
def _take_gold(lengths, order, begin, count, gold, weight, d_emissions, gold_moves, edges):
    """Take each weight off the gold labels of a group; zeros past the lengths; add up what start and end get."""
    size = d_emissions.shape[2]
    for n in range(count):
        b = order[begin + n]
        length = lengths[b]
        if gold.shape[1] > 0:
            for t in range(length):
                d_emissions[b, t, gold[b, t]] -= weight[b]
                if t > 0:
                    gold_moves[gold[b, t - 1], gold[b, t]] -= weight[b]
        for t in range(length, d_emissions.shape[1]):
            for c in range(size):
                d_emissions[b, t, c] = 0
        for c in range(size):
            edges[_START, c] += d_emissions[b, 0, c]
            edges[_END, c] += d_emissions[b, length - 1, c]


@kernel
def _groups(
    emissions, transitions, start, end, lengths, order, gold, weight, least, values, d_emissions, room, trail, sums,
    low, high,
):  # fmt: skip
    """Values and gradients of groups low..high of items; whether that is what they are."""
    width, items = room.shape[1], trail.shape[1]
    moves, rows, own = room[2 * width : 3 * width], room[3 * width :], sums[2 * width :]
    fill_rows(sums, 0.0)
    fill_rows(moves, room.dtype.type(0))
    if not _raise_scores(transitions, end, least, room, rows):
        return False
    top, most = np.float64(rows[_SUMS, 0]), np.float64(rows[_SUMS, 1])
    for g in range(low, high):
        begin = g * items
        count = min(items, len(order) - begin)
        _go_forward(emissions, start, lengths, order, begin, count, room, rows, own, trail, d_emissions)
        if not _finish(
            *(emissions, transitions, start, end, lengths, order, begin, count, gold, top, most),
            *(rows, own, trail, values),
        ):
            return False
        _go_back(emissions, lengths, order, begin, count, weight, room[width:], rows, moves, trail, d_emissions)
        add_wide(moves, sums[:width])
        _take_gold(lengths, order, begin, count, gold, weight, d_emissions, sums[width:], own)
    return True


@kernel
def _conclude(power, wide, d_transitions, d_start, d_end, total):
    """What all parts found, in order: the gradients of transitions, start and end, and the sum of all values."""
    size, width = len(d_start), power.shape[1]
    sums = wide[0]
    for part in range(1, len(wide)):
        add_wide(wide[part], sums)
    for i in range(size):
        for j in range(size):
            d_transitions[i, j] = sums[i, j] * power[i, j] + sums[width + i, j]
        d_start[i] = sums[2 * width + _START, i]
        d_end[i] = sums[2 * width + _END, i]
    total[0] = sums[2 * width + _VALUE, 0]


@kernel
def both(
    emissions, transitions, start, end, lengths, order, gold, weight, least, values, total,
    d_emissions, d_transitions, d_start, d_end, room, trail, wide, state, part, low, high,
):  # fmt: skip
    """Values and gradients of groups low..high of items; whoever ends last adds up what the parts found.

    Group g has items ``order[g G : g G + G]``, ``order`` being by falling length. ``least`` is the smallest safe ratio
    of two powers. ``room`` is (parts, 3 P + rows, P) of zeros, ``trail`` (parts, T, G, P), ``wide`` (parts, 2 P + 5, P)
    in float64, ``state`` two zeros: how many parts are done, and for how many another way must be taken. Time
    O(T C^2) an item.
    """
    sound = _groups(
        *(emissions, transitions, start, end, lengths, order, gold, weight, least, values, d_emissions),
        *(room[part], trail[part], wide[part], low, high),
    )
    if not sound:
        count_up(state, 1)
    if count_up(state, 0) == len(wide) - 1:
        if state[1] == 0:
            _conclude(room[0], wide, d_transitions, d_start, d_end, total)
        state[0] = 0


def _side_by_side(batch: int, threads: int) -> int:
    """How many items make a group, so that the threads are done soonest.

    >>> _side_by_side(32, 2), _side_by_side(4, 2), _side_by_side(1, 2)
    (4, 2, 1)
    """
    rounds = {items: -(-batch // (items * threads)) for items in _COSTS}
    return min(_COSTS, key=lambda items: rounds[items] * _COSTS[items])


class _Work(NamedTuple):
    """Scratch for chains of one shape, which nothing outlives."""

    shape: torch.Size
    dtype: torch.dtype
    most: int  # threads that there may be
    room: Tensor
    trail: Tensor
    wide: Tensor
    state: Tensor

    @classmethod
    def of(cls, emissions: Tensor) -> _Work:
        """For chains of the type and shape of these."""
        batch, steps, size = shape = emissions.shape
        work, width = batch * steps * size * size, padded(size)
        items = _side_by_side(batch, share(work, batch)[0])
        parts = share(work, -(-batch // items))[1]
        room = emissions.new_zeros(parts, 3 * width + _ROWS, width)
        trail = emissions.new_empty(parts, steps, items, width)
        wide = torch.empty(parts, 2 * width + _WIDE, width, dtype=torch.float64)
        return cls(shape, emissions.dtype, torch.get_num_threads(), room, trail, wide, torch.zeros(2).long())

    def serves(self, emissions: Tensor) -> bool:
        """Whether it is for chains like these, and as many threads as there are now."""
        alike = self.shape == emissions.shape and self.dtype == emissions.dtype
        return alike and self.most == torch.get_num_threads()

    @property
    def small(self) -> bool:
        """Whether it is worth keeping."""
        return sum(x.numel() * x.element_size() for x in (self.room, self.trail, self.wide)) <= _MOST_KEPT


class _Last(local):
    """What the last call of this thread worked with: most are followed by one of the same shape."""

    work: _Work | None = None


_last = _Last()


def _grouped(lengths: list[int], items: int, parts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Items by falling length; and groups of them as at most so many ranges of about equal length in all."""
    if min(lengths) == max(lengths):
        return _even(len(lengths), items, parts)
    places = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return torch.tensor(places), _ranges([lengths[place] for place in places[::items]], parts)


@lru_cache(maxsize=16)
def _even(batch: int, items: int, parts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    return torch.arange(batch), _ranges([1] * -(-batch // items), parts)


def _ranges(longest: list[int], parts: int) -> list[tuple[int, int]]:
    """Groups as ranges whose longest items are about equally long in all."""
    bounds, due, done, total = [0], 1, 0, sum(longest)
    for group, length in enumerate(longest):
        done += length
        if done * parts >= due * total:
            bounds.append(group + 1)
            due = done * parts // total + 1
    return list(pairwise(bounds))


@lru_cache(maxsize=16)
def _ones(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(batch, dtype=dtype)


def at_once(
    chain: Chain, gold: Tensor | None, total: bool, weights: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], bool] | None:
    """log Z, or score(gold) - log Z; the gradient of the sum of log Z - score(gold); whether all is known to be finite.

    The values are (B,), or their sum where that is asked for; ``weights`` (B,) are those of the gradient's sum, else 1.
    None for transitions that differ by item or step, for scores of too large a range, for wrong labels, and where
    weights vanish.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(3, 3, 2), torch.zeros(2, 2), none, none, torch.tensor([3, 1, 2]))
    >>> value, gradients, finite = at_once(chain, None, total=False)
    >>> value.exp(), gradients[2], finite
    (tensor([8., 2., 4.]), tensor([1.5000, 1.5000]), True)
    """
    emissions, moves, start, end, lengths = chain
    if not isinstance(moves, Tensor) or moves.dim() != 2:
        return None
    work, _last.work = _last.work, None  # lest something that interrupts this call has it too
    if work is None or not work.serves(emissions):
        work = _Work.of(emissions)
    order, ranges = _grouped(lengths.tolist(), work.trail.shape[2], len(work.wide))
    like, wide = torch.empty_like, work.wide
    gradients = like(emissions), like(moves), like(start), like(end)
    values, sum_of = emissions.new_empty(len(emissions)), emissions.new_empty(1)
    both.share(
        ranges,
        *(emissions, moves, start, end, lengths, order, _NO_GOLD if gold is None else gold),
        *(_ones(len(emissions), work.dtype) if weights is None else weights, _LEAST[work.dtype]),
        *(values, sum_of, *gradients, work.room, work.trail, wide if len(ranges) == len(wide) else wide[: len(ranges)]),
        work.state,
    )
    if work.state[1].item():
        return None
    if work.small:
        _last.work = work
    return sum_of.view(()) if total else values, gradients, math.isfinite(sum_of.item())
