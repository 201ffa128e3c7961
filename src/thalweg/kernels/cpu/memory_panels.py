"""Whole retrievals on the CPU: panels of sixteen queries that take new ones in as soon as others have come to rest.

A thread has a panel. In every pass over the patterns each of its lanes makes one step of its own query; a query at
rest leaves its lane to the next one that waits, so that no pass carries along what is done. Where there are fewer
panels than threads, the patterns of a pass are shared out instead and the parts put together (:func:`join`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from thalweg.kernels.cpu.decode_memory import float_at, index_at, put_float, put_index, take
from thalweg.kernels.cpu.decoding import dot_at
from thalweg.kernels.cpu.memory_tiles import (
    PANEL,
    clear,
    fetch,
    mixed_tile,
    move,
    not_finite,
    raise_top,
    scores_tile,
    weigh,
)

__all__ = ["SLOTS", "begin", "join", "pass_part", "room_for", "squares", "work"]

# A table of int64 says what is to be done. First the counters that threads share, then sizes, then addresses.
(NEXT, THREAD, QUERIES, PATTERNS, INNER, OUTER, BLOCK, MOST_STEPS, PANELS, PARTS) = range(10)
(FROM, FROM_STRIDE, KEYS, KEY_STRIDE, VALUES, VALUE_STRIDE, NUMBERS, ROOM, ROOM_SIZE) = range(10, 19)
(STATE, ENERGIES, STEPS, CONVERGED, LSE, BUSY) = range(19, 25)
# How many entries a table has.
SLOTS = 25
# The float32 at NUMBERS: beta log2 e, beta, the gap below which scores are nothing, the tolerance, the energy's offset.
_FACTOR, _BETA, _GAP, _TOLERANCE, _OFFSET = range(5)
# The rows of a room, which begins with twice sixteen int64 for the query of every lane and its steps.
_ROW = 4 * PANEL
_TOP, _TOTAL, _SHRINK, _MOVED, _FLAGS, _HEADS = 4, 5, 6, 7, 11, 12
_REST = 1 << 40  # added to the steps of a lane whose query is at rest and only wants its energy
_LOG_2 = math.log(2.0)
_NAN = math.nan
# The weight of the best pattern is 1. Where all scores are -inf they are all 0, where one is +inf or no number NaN.
_LEAST_TOTAL = 0.5
_LOWEST = -float(np.finfo(np.float32).max)  # from which -inf is still below

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_scores_6, _scores_4, _scores_1 = scores_tile(6, 2), scores_tile(4, 2), scores_tile(1, 2)
_mixed_6, _mixed_4, _mixed_1 = mixed_tile(6, 2), mixed_tile(4, 2), mixed_tile(1, 2)
_few_scores_6, _few_scores_1 = scores_tile(6, 1), scores_tile(1, 1)
_few_mixed_12, _few_mixed_4, _few_mixed_1 = mixed_tile(12, 1), mixed_tile(4, 1), mixed_tile(1, 1)


def room_for(inner: int, outer: int, block: int) -> int:
    """The bytes of a panel's room: its heads, the queries (D, 16), the mixture (E, 16) and the scores of a block.

    >>> room_for(1, 1, 1) // 64
    15
    """
    return (_HEADS + inner + outer + block) * _ROW


@njit(**_options)
def _sixes(rows):
    """How many tiles of six leave a number of rows that tiles of four can take, as far as that is possible."""
    left = rows % 6
    return rows // 6 - 1 if left == 2 and rows > 6 else rows // 6


@njit(**_options)
def _score(x, stride, panel, inner, count, out, few, ahead):
    """The scores of ``count`` patterns; few queries wait for memory, so that what is ``ahead`` is asked for then."""
    m = 0
    if few:
        while m + 6 <= count:
            fetch(x + m * stride + ahead, 6 * stride)
            _few_scores_6(x + m * stride, stride, panel, inner, out + m * _ROW)
            m += 6
        while m < count:
            _few_scores_1(x + m * stride, stride, panel, inner, out + m * _ROW)
            m += 1
        return
    for _ in range(_sixes(count)):
        _scores_6(x + m * stride, stride, panel, inner, out + m * _ROW)
        m += 6
    while m + 4 <= count:
        _scores_4(x + m * stride, stride, panel, inner, out + m * _ROW)
        m += 4
    while m < count:
        _scores_1(x + m * stride, stride, panel, inner, out + m * _ROW)
        m += 1


@njit(**_options)
def _mix(x, stride, weights, count, shrink, outer, out, few):
    m = 0
    if few:
        while m + 12 <= outer:
            _few_mixed_12(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
            m += 12
        while m + 4 <= outer:
            _few_mixed_4(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
            m += 4
        while m < outer:
            _few_mixed_1(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
            m += 1
        return
    for _ in range(_sixes(outer)):
        _mixed_6(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
        m += 6
    while m + 4 <= outer:
        _mixed_4(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
        m += 4
    while m < outer:
        _mixed_1(x + 4 * m, stride, weights, count, shrink, out + m * _ROW)
        m += 1


@njit(**_options)
def _sweep(table, head, room, low, high):
    """One pass of the panel at ``head`` over the patterns low..high: tops, totals and mixtures in ``room``."""
    few, mixing = index_at(head + _FLAGS * _ROW, 1), index_at(head + _FLAGS * _ROW, 2)
    panel = head + _HEADS * _ROW
    inner, outer, block = index_at(table, INNER), index_at(table, OUTER), index_at(table, BLOCK)
    keys, key_stride = index_at(table, KEYS), index_at(table, KEY_STRIDE)
    values, value_stride = index_at(table, VALUES), index_at(table, VALUE_STRIDE)
    numbers = index_at(table, NUMBERS)
    factor, gap = float_at(numbers, _FACTOR), float_at(numbers, _GAP)
    top, total, shrink = room + _TOP * _ROW, room + _TOTAL * _ROW, room + _SHRINK * _ROW
    mixed = room + (_HEADS + inner) * _ROW
    scores = mixed + outer * _ROW
    for lane in range(PANEL):
        empty = index_at(head, lane) < 0  # no score comes near the top of an empty lane
        put_float(top, lane, 1e30 if empty else _LOWEST)
    clear(total, 1)
    clear(mixed, outer)
    while low < high:
        count = min(block, high - low)
        _score(keys + low * key_stride, key_stride, panel, inner, count, scores, few, block * key_stride)
        near = raise_top(scores, count, factor, gap, top, shrink)
        if not near and mixing and values != keys:  # what counts for nothing spoils the mixture all the same
            near = not_finite(values + low * value_stride, value_stride, count, outer)
        if near:
            weigh(scores, count, factor, top, shrink, total)
            if mixing:
                _mix(values + low * value_stride, value_stride, scores, count, shrink, outer, mixed, few)
        low += count


@njit(**_options)
def _fill(table, room):
    """Lanes without a query take the next that wait; returns how many lanes have one."""
    inner, queries, stride = index_at(table, INNER), index_at(table, FROM), index_at(table, FROM_STRIDE)
    panel, start = room + _HEADS * _ROW, 0 if index_at(table, MOST_STEPS) else _REST
    busy, waiting = 0, True
    for lane in range(PANEL):
        if waiting and index_at(room, lane) < 0:
            query = take(table + 8 * NEXT, index_at(table, QUERIES))
            waiting = query >= 0
            if waiting:
                put_index(room, lane, query)
                put_index(room, PANEL + lane, start)
                for i in range(inner):
                    put_float(panel, i * PANEL + lane, float_at(queries + query * stride, i))
        busy += index_at(room, lane) >= 0
    return busy


@njit(**_options)
def _gather(table, room):
    """Bring the last few queries into the first half of the panel."""
    inner, panel, free = index_at(table, INNER), room + _HEADS * _ROW, 0
    for lane in range(PANEL // 2, PANEL):
        if index_at(room, lane) >= 0:
            while index_at(room, free) >= 0:
                free += 1
            put_index(room, free, index_at(room, lane))
            put_index(room, PANEL + free, index_at(room, PANEL + lane))
            put_index(room, lane, -1)
            for i in range(inner):
                put_float(panel, i * PANEL + free, float_at(panel, i * PANEL + lane))


@njit(**_options)
def _ready(table, room):
    """Fill the panel and note whether half a panel is enough and whether any lane makes a step; returns its queries."""
    busy = _fill(table, room)
    few = busy <= PANEL // 2
    if few:
        _gather(table, room)
    mixing = False
    for lane in range(PANEL):
        if index_at(room, lane) >= 0 and index_at(room, PANEL + lane) < _REST:
            mixing = True
    flags = room + _FLAGS * _ROW
    put_index(flags, 0, busy)
    put_index(flags, 1, few)
    put_index(flags, 2, mixing)
    return busy


@njit(**_options)
def _rest(energies, step, most, energy):
    """The energy of a query at rest, from its last step on."""
    for later in range(step, most + 1):
        put_float(energies, later, energy)


@njit(**_options)
def _spoil(table, query, inner, most, energies, step):
    """A query that is no number, or was led to what is none, will be none at all steps."""
    put_index(index_at(table, STEPS), query, most)
    put_index(index_at(table, CONVERGED), query, 0)
    for i in range(inner):
        put_float(index_at(table, STATE) + query * inner * 4, i, _NAN)
    _rest(energies, step - 1, most, _NAN)


@njit(**_options)
def _step(table, room):
    """Every lane's query moves to its mixture; those that have come to rest are written out and leave."""
    inner, numbers = index_at(table, INNER), index_at(table, NUMBERS)
    most = index_at(table, MOST_STEPS)
    beta, tolerance, offset = float_at(numbers, _BETA), float_at(numbers, _TOLERANCE), float_at(numbers, _OFFSET)
    panel, top, total = room + _HEADS * _ROW, room + _TOP * _ROW, room + _TOTAL * _ROW
    moved, mixed = room + _MOVED * _ROW, room + (_HEADS + inner) * _ROW
    move(panel, mixed, inner, total, moved)
    for lane in range(PANEL):
        query, step = index_at(room, lane), index_at(room, PANEL + lane)
        if query < 0:
            continue
        resting = step >= _REST
        step -= _REST if resting else 0
        energies = index_at(table, ENERGIES) + query * (most + 1) * 4
        weight = float_at(total, lane)
        lse = (float_at(top, lane) * _LOG_2 + math.log(weight)) / beta if weight > _LEAST_TOTAL else _NAN
        energy = offset + float_at(moved, 2 * PANEL + lane) / 2 - lse
        put_float(energies, step, energy)
        if resting:
            _rest(energies, step, most, energy)
            put_index(room, lane, -1)
            if most == 0:
                put_index(index_at(table, STEPS), query, 0)
            continue
        step += 1
        way = float_at(moved, lane)
        if way != way or not weight > _LEAST_TOTAL:
            _spoil(table, query, inner, most, energies, step)
            put_index(room, lane, -1)
            continue
        still = math.sqrt(way) <= tolerance
        put_index(room, PANEL + lane, step)
        if not still and step < most:
            continue
        put_index(index_at(table, STEPS), query, step)
        put_index(index_at(table, CONVERGED), query, 1 if still else 0)
        state = index_at(table, STATE) + query * inner * 4
        for i in range(inner):
            put_float(state, i, float_at(panel, i * PANEL + lane))
        if still and beta * way < 2e-7:
            # lse is convex with a curvature of at most beta M^2, so that this is off by less than 1e-7 M^2.
            lse += float_at(moved, PANEL + lane)
            _rest(energies, step, most, offset + float_at(moved, 3 * PANEL + lane) / 2 - lse)
            put_index(room, lane, -1)
        else:
            put_index(room, PANEL + lane, step + _REST)


@njit(**_options)
def _deliver(table, room):
    """Every lane's mixture, and its log-sum-exp where that is wanted, are written out; all lanes are free."""
    inner, outer, beta = index_at(table, INNER), index_at(table, OUTER), float_at(index_at(table, NUMBERS), _BETA)
    wanted = index_at(table, LSE)
    top, total, mixed = room + _TOP * _ROW, room + _TOTAL * _ROW, room + (_HEADS + inner) * _ROW
    for lane in range(PANEL):
        query = index_at(room, lane)
        if query >= 0:
            weight = float_at(total, lane)
            state, inverse = index_at(table, STATE) + query * outer * 4, 1.0 / weight if weight > _LEAST_TOTAL else _NAN
            for i in range(outer):
                put_float(state, i, float_at(mixed, i * PANEL + lane) * inverse)
            if wanted != 0:
                lse = (float_at(top, lane) * _LOG_2 + math.log(weight)) / beta
                put_float(wanted, query, lse if weight > _LEAST_TOTAL else _NAN)
            put_index(room, lane, -1)


@njit(**_options)
def _finish(table, room):
    if index_at(table, MOST_STEPS) < 0:
        _deliver(table, room)
    else:
        _step(table, room)


@njit(**_options)
def _room(table, which, part):
    return index_at(table, ROOM) + (which * index_at(table, PARTS) + part) * index_at(table, ROOM_SIZE)


@njit(**_options)
def _empty(room):
    for lane in range(PANEL):
        put_index(room, lane, -1)


def squares(table: Any) -> None:
    """Take parts of the patterns one by one and leave the largest squared norm of each at ``LSE``."""
    parts, patterns, inner = index_at(table, PARTS), index_at(table, PATTERNS), index_at(table, INNER)
    keys, stride = index_at(table, KEYS), index_at(table, KEY_STRIDE)
    while True:
        part = take(table + 8 * THREAD, parts)
        if part < 0:
            return
        largest = np.float32(0.0)
        for n in range(patterns * part // parts, patterns * (part + 1) // parts):
            square = dot_at(keys + n * stride, keys + n * stride, inner)
            largest = square if not square <= largest else largest
        put_float(index_at(table, LSE), part, largest)


def work(table: Any) -> None:
    """Retrieve queries until none waits: what every thread does where there are panels enough."""
    which = take(table + 8 * THREAD, index_at(table, PANELS))
    if which < 0:
        return
    room = _room(table, which, 0)
    _empty(room)
    while _ready(table, room):
        _sweep(table, room, room, 0, index_at(table, PATTERNS))
        _finish(table, room)


def begin(table: Any) -> None:
    """Fill the panels whose passes are shared out."""
    for which in range(index_at(table, PANELS)):
        _empty(_room(table, which, 0))
        _ready(table, _room(table, which, 0))


def pass_part(table: Any) -> None:
    """Take parts of a pass one by one: a range of the patterns for one of the panels."""
    parts, patterns = index_at(table, PARTS), index_at(table, PATTERNS)
    while True:
        job = take(table + 8 * THREAD, index_at(table, PANELS) * parts)
        if job < 0:
            return
        which, part = job // parts, job % parts
        head = _room(table, which, 0)
        if index_at(head + _FLAGS * _ROW, 0):
            _sweep(table, head, _room(table, which, part), patterns * part // parts, patterns * (part + 1) // parts)


@njit(**_options)
def _merge(table, head, other):
    """Add the pass over some patterns to the pass over others, lane by lane."""
    inner, outer = index_at(table, INNER), index_at(table, OUTER)
    mixed = (_HEADS + inner) * _ROW
    for lane in range(PANEL):
        if index_at(head, lane) < 0:
            continue
        first, second = float_at(head + _TOP * _ROW, lane), float_at(other + _TOP * _ROW, lane)
        top = max(first, second)
        mine, theirs = 2.0 ** (first - top), 2.0 ** (second - top)
        put_float(head + _TOP * _ROW, lane, top)
        total = float_at(head + _TOTAL * _ROW, lane) * mine + float_at(other + _TOTAL * _ROW, lane) * theirs
        put_float(head + _TOTAL * _ROW, lane, total)
        for i in range(outer):
            place = i * PANEL + lane
            put_float(
                head + mixed, place, float_at(head + mixed, place) * mine + float_at(other + mixed, place) * theirs
            )


def join(table: Any) -> None:
    """Put the parts of a pass together and make the step; ``BUSY`` says how many queries go on."""
    busy = 0
    for which in range(index_at(table, PANELS)):
        head = _room(table, which, 0)
        if index_at(head + _FLAGS * _ROW, 0):
            for part in range(1, index_at(table, PARTS)):
                _merge(table, head, _room(table, which, part))
            _finish(table, head)
            busy += _ready(table, head)
    put_index(table, BUSY, busy)
    put_index(table, THREAD, 0)
