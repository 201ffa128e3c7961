"""Greedy and beam search over a Transformer, from the encoder to the last symbol, in one compiled call.

With one word to answer, a step is some hundred microseconds of reading weights; calling the parts of a step one by one
takes longer than that. Here the model is a list of operations on addresses (the names below are their kinds), the
search is a loop, and threads enter together: they share out the larger operations and wait for each other after each.
A thread that comes late finds everything taken and catches up; one that never comes is not missed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from thalweg.kernels.cpu.decode_memory import (
    advance_to,
    call_at,
    float_at,
    float_of,
    gelu_at,
    index_at,
    put_float,
    put_index,
    silu_at,
    take,
)
from thalweg.kernels.cpu.decoding import attend_rows_past, attend_rows_source, norm_at
from thalweg.kernels.cpu.few_rows import rows_by_weights
from thalweg.kernels.cpu.panels import PANEL, rows_by_panels

__all__ = ["linear_byte", "linear_half", "linear_single", "panels", "perform", "search"]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}

# fmt: off
(
    LINEAR,  # out, its stride, x, its stride, weight, inner, outer, scale, bias, relu
    NORM,    # out, total, x, residual, weight, bias, eps, width: total = x + residual, out = LayerNorm(total)
    PAST,    # out, queries, their stride, cache of the layer, its rows, lineage, its stride, heads, size of one
    SOURCE,  # out, queries, their stride, memory, item stride, place stride, lengths, items, places, heads << 32 | size
    SCALE,   # x, its stride, numbers a row, factor
    GELU, SILU,  # x, numbers a row
    SWIGLU,  # gate, up, numbers a row: up = silu(gate) * up
    STORE,   # from, its stride, cache of the layer, its rows, numbers a row
    EMBED,   # out, tokens, table, width, scale, vectors of positions
    ROTATE,  # x, its stride, heads, size of one, cosines, sines, positions of the rows or 0 for that of the step
    PANELS,  # as LINEAR, the weights packed in panels
) = range(12)
# fmt: on
_BLOCK = 64  # rows
WORDS = 12  # of an operation: its kind, how many parts it has, and what it works on

# fmt: off
(
    NEXT, DONE,  # parts taken, parts finished, counted through the whole search
    BEFORE, BEFORE_COUNT, BEFORE_ROWS,  # operations of the encoder
    EACH, EACH_COUNT, EACH_ROWS,  # operations of a step
    ITEMS, WIDTH, KEPT, SYMBOLS, EOS, MOST, LEAST, PENALTY, CAPACITY,
    LOGITS, TOKENS, LIVE, RANK, SCORE, CODE, HISTORY, DROPPED, ENDED, LINEAGE, ROOM,
    LEFT, ORDER, SOURCES,  # how many items are not done, which they are, and the item of every row
    SHARES,  # parts of a step of the search
    LINEARLY, PANELLED, OTHERWISE,  # addresses of what performs products of either kind, and all else
) = range(35)
# fmt: on


@njit(**_options)
def _linear(op, rows, part, parts, example, size):
    """One part of a product: some of the columns of ``out``."""
    out, out_stride, x, x_stride = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    weight, inner, outer = index_at(op, 6), index_at(op, 7), index_at(op, 8)
    scale, bias, relu = index_at(op, 9), index_at(op, 10), index_at(op, 11)
    low, high = outer // 4 * part // parts * 4, outer // 4 * (part + 1) // parts * 4
    if part == parts - 1:
        high = outer
    scale, bias = scale + low * 4 if scale else 0, bias + low * 4 if bias else 0
    for first in range(0, rows, _BLOCK):  # rows that the nearest caches hold while the weights go by
        rows_by_weights(
            *(out + first * out_stride + low * 4, out_stride, x + first * x_stride, x_stride),
            *(min(_BLOCK, rows - first), weight + low * inner * size, inner, high - low),
            *(scale, bias, relu, example, size),
        )


def panels(op, rows, t, part, parts):
    """One part of a product with weights in panels."""
    out, out_stride, x, x_stride = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    weight, inner, outer = index_at(op, 6), index_at(op, 7), index_at(op, 8)
    bias, relu = index_at(op, 10), index_at(op, 11)
    low, high = outer // PANEL * part // parts, outer // PANEL * (part + 1) // parts
    if bias:
        bias += low * PANEL * 4
    for first in range(0, rows, _BLOCK):
        rows_by_panels(
            *(out + first * out_stride + low * PANEL * 4, out_stride, x + first * x_stride, x_stride),
            *(min(_BLOCK, rows - first), weight + low * PANEL * inner * 4, inner, high - low, bias, relu),
        )


def linear_single(op, rows, t, part, parts):
    """Products with weights in float32."""
    _linear(op, rows, part, parts, np.float32(0), 4)


def linear_half(op, rows, t, part, parts):
    """The same in bfloat16."""
    _linear(op, rows, part, parts, np.int16(0), 2)


def linear_byte(op, rows, t, part, parts):
    """The same in int8."""
    _linear(op, rows, part, parts, np.int8(0), 1)


def perform(op, rows, t, part, parts):
    """Any other operation."""
    kind = index_at(op, 0)
    a, b, c = index_at(op, 2), index_at(op, 3), index_at(op, 4)
    d, e, f = index_at(op, 5), index_at(op, 6), index_at(op, 7)
    g, h, i, j = index_at(op, 8), index_at(op, 9), index_at(op, 10), index_at(op, 11)
    low, high = rows * part // parts, rows * (part + 1) // parts
    if kind == NORM:
        for r in range(low, high):
            row = r * h * 4
            norm_at(c + row, d + row, e, f, float_of(g), h, b + row, a + row)
    elif kind == PAST:
        width = h * i
        attend_rows_past(a, b, c, d, e * 2 * width, 2 * width, width, f, g, t + 1, e, h, i, 0, low, high)
    elif kind == SOURCE:
        heads, each = j >> 32, j & 0xFFFFFFFF
        attend_rows_source(a, b, c, d, e, f, heads * each, g, h, i, 1 << 62, heads, each, 0, low, high)
    elif kind == SCALE:
        factor = float_of(d)
        for r in range(low, high):
            for n in range(c):
                put_float(a + r * b, n, float_at(a + r * b, n) * factor)
    elif kind == GELU:
        gelu_at(a + low * b * 4, (high - low) * b)
    elif kind == SILU:
        silu_at(a + low * b * 4, (high - low) * b)
    elif kind == SWIGLU:
        silu_at(a + low * c * 4, (high - low) * c)
        for n in range(low * c, high * c):
            put_float(b, n, float_at(b, n) * float_at(a, n))
    elif kind == STORE:
        for r in range(low, high):
            to = c + (t * d + r) * e * 4
            for n in range(e):
                put_float(to, n, float_at(a + r * b, n))
    elif kind == EMBED:
        factor = float_of(e)
        for r in range(low, high):
            vector = c + index_at(b, r) * d * 4
            for n in range(d):
                x = float_at(vector, n) * factor
                put_float(a, r * d + n, x + float_at(f, t * d + n) if f else x)
    elif kind == ROTATE:
        half = d // 2
        for r in range(low, high):
            angle = (index_at(g, r) if g else t) * half
            for n in range(c):
                head = a + r * b + n * d * 4
                for k in range(half):
                    low_part, high_part = float_at(head, k), float_at(head, half + k)
                    cosine, sine = float_at(e, angle + k), float_at(f, angle + k)
                    put_float(head, k, low_part * cosine - high_part * sine)
                    put_float(head, half + k, high_part * cosine + low_part * sine)


@njit(**_options)
def _together(table, ops, count, rows, t, base):
    """A list of operations by all threads that are here; returns how many parts there were."""
    for n in range(count):
        op = ops + n * WORDS * 8
        parts = index_at(op, 1)
        limit = base + parts
        own = take(table + NEXT * 8, limit)
        while own >= 0:
            kind = index_at(op, 0)
            work = LINEARLY if kind == LINEAR else PANELLED if kind == PANELS else OTHERWISE
            call_at(index_at(table, work), op, rows, t, own - base, parts)
            advance_to(table + DONE * 8, 1, 0)
            own = take(table + NEXT * 8, limit)
        advance_to(table + DONE * 8, 0, limit)
        base = limit
    return base


@njit(**_options)
def _normalise(row, V):
    """Log-probabilities in place of logits."""
    top = float_at(row, 0)
    for v in range(1, V):
        x = float_at(row, v)
        if x > top or x != x:
            top = x
    total = 0.0
    for v in range(V):
        total += math.exp(np.float64(float_at(row, v) - top))
    norm = np.float32(top + math.log(total))
    for v in range(V):
        put_float(row, v, float_at(row, v) - norm)


@njit(**_options)
def _choose(table, item, slot, step, values, codes, most):
    """The ``most`` best continuations of an item, best first, into ``values`` and ``codes``; how many there are."""
    W, V, eos = index_at(table, WIDTH), index_at(table, SYMBOLS), index_at(table, EOS)
    early = step < index_at(table, LEAST)
    logits, live = index_at(table, LOGITS), index_at(table, LIVE)
    count = 0
    for w in range(W):
        before = float_at(live, item * W + w)
        if before == -np.inf:
            continue
        row = logits + (slot * W + w) * V * 4
        _normalise(row, V)
        for v in range(V):
            x = before + float_at(row, v)
            if x == -np.inf or (early and v == eos):
                continue
            # NaN comes before all, so that it is seen.
            if count == most and x <= values[count - 1]:
                continue
            at = count if count < most else most - 1
            while at > 0 and (x > values[at - 1] or (x != x and values[at - 1] == values[at - 1])):
                values[at], codes[at] = values[at - 1], codes[at - 1]
                at -= 1
            values[at], codes[at] = x, w * V + v
            count = min(count + 1, most)
    return count


@njit(**_options)
def _finish(table, item, step, score, code):
    """A finished hypothesis into the item's k best, behind those that are as good."""
    K, penalty = index_at(table, KEPT), float_of(index_at(table, PENALTY))
    ranks, scores, codes = index_at(table, RANK), index_at(table, SCORE), index_at(table, CODE)
    rank = score if penalty == 0 else np.float32(score / step**penalty)
    at = item * K + K
    while at > item * K and (rank > float_at(ranks, at - 1) or rank != rank):
        at -= 1
        if at + 1 < item * K + K:
            put_float(ranks, at + 1, float_at(ranks, at))
            put_float(scores, at + 1, float_at(scores, at))
            put_index(codes, at + 1, index_at(codes, at))
    if at < item * K + K:
        put_float(ranks, at, rank)
        put_float(scores, at, score)
        put_index(codes, at, step * index_at(table, WIDTH) * index_at(table, SYMBOLS) + code)


@njit(**_options)
def _advance(table, item, slot, step, values, codes):
    """One step of an item's search; what it does is told in :mod:`thalweg.inference.beam`."""
    W, V, K, eos = (
        index_at(table, WIDTH),
        index_at(table, SYMBOLS),
        index_at(table, KEPT),
        index_at(table, EOS),
    )
    longest, live = index_at(table, MOST), index_at(table, LIVE)
    count = _choose(table, item, slot, step, values, codes, 2 * W + 1)
    lost = float_at(index_at(table, DROPPED), item)
    kept = 0
    final = eos >= 0 and step == longest
    if final:  # here eos alone makes a hypothesis, wherever it stands
        for w in range(W):
            before = float_at(live, item * W + w)
            ending = before + float_at(index_at(table, LOGITS), (slot * W + w) * V + eos)
            if before > -np.inf and ending > lost:
                lost = ending
    for n in range(count):
        value, code = values[n], codes[n]
        ends = code % V == eos or (eos < 0 and step == longest)
        if ends and n < W:
            _finish(table, item, step, value, code)
        elif not ends and kept < W and n < 2 * W:
            values[kept], codes[kept] = value, code
            kept += 1
        elif value > lost and not final:
            lost = value
    put_float(index_at(table, DROPPED), item, lost)
    history = index_at(table, HISTORY) + ((step - 1) * index_at(table, ITEMS) + item) * W * 8
    for w in range(W):
        put_float(live, item * W + w, values[w] if w < kept else np.float32(-np.inf))
        # A dead slot follows the best row, so that the model is never asked about an impossible sequence.
        code = codes[w if w < kept else 0] if kept else 0
        put_index(history, w, code)
        put_index(index_at(table, TOKENS), slot * W + w, code % V)
    _inherit(table, slot, step, history)
    last = float_at(index_at(table, RANK), item * K + K - 1)
    penalty = float_of(index_at(table, PENALTY))
    bound = values[0] if kept else np.float32(-np.inf)
    if penalty != 0 and kept:
        bound = np.float32(bound / (longest if penalty > 0 else step + 1) ** penalty)
    return not last < bound or step == longest


@njit(**_options)
def _inherit(table, slot, step, history):
    """Each row takes the lineage of the row it comes from."""
    W, V, capacity = index_at(table, WIDTH), index_at(table, SYMBOLS), index_at(table, CAPACITY)
    lineage, room = index_at(table, LINEAGE), index_at(table, ROOM) + slot * W * capacity * 8
    for w in range(W):
        source = (slot * W + index_at(history, w) // V) * capacity
        for s in range(step):
            put_index(room, w * capacity + s, index_at(lineage, source + s))
    for w in range(W):
        own = (slot * W + w) * capacity
        for s in range(step):
            put_index(lineage, own + s, index_at(room, w * capacity + s))


@njit(**_options)
def _advance_some(table, step, part, parts):
    """A step of the search for some of the items that are left."""
    most = 2 * index_at(table, WIDTH) + 1
    values, codes = np.empty(most, np.float32), np.empty(most, np.int64)
    left, order, ended = index_at(table, LEFT), index_at(table, ORDER), index_at(table, ENDED)
    for slot in range(left * part // parts, left * (part + 1) // parts):
        item = index_at(order, slot)
        if _advance(table, item, slot, step, values, codes):
            put_index(ended, item, step)


@njit(**_options)
def _close_ranks(table, step):
    """Items that are done give up their rows: those behind move forward, and every row gets a number for its cache."""
    W, capacity, lineage = index_at(table, WIDTH), index_at(table, CAPACITY), index_at(table, LINEAGE)
    order, ended, tokens = index_at(table, ORDER), index_at(table, ENDED), index_at(table, TOKENS)
    sources = index_at(table, SOURCES)
    count = 0
    for slot in range(index_at(table, LEFT)):
        item = index_at(order, slot)
        if index_at(ended, item) != 0:
            continue
        put_index(order, count, item)
        for w in range(W):
            own, old = count * W + w, slot * W + w
            if own != old:
                put_index(tokens, own, index_at(tokens, old))
                put_index(sources, own, item)
                for s in range(step):
                    put_index(lineage, own * capacity + s, index_at(lineage, old * capacity + s))
            if step < capacity:
                put_index(lineage, own * capacity + step, own)
        count += 1
    put_index(table, LEFT, count)
    put_index(table, EACH_ROWS, count * W)


def search(table):
    """All of it, by every thread that enters."""
    before, count, rows = index_at(table, BEFORE), index_at(table, BEFORE_COUNT), index_at(table, BEFORE_ROWS)
    base = _together(table, before, count, rows, 0, 0)
    parts = index_at(table, SHARES)
    for t in range(index_at(table, MOST)):
        each, count, rows = index_at(table, EACH), index_at(table, EACH_COUNT), index_at(table, EACH_ROWS)
        base = _together(table, each, count, rows, t, base)
        own = take(table + NEXT * 8, base + parts)
        while own >= 0:
            _advance_some(table, t + 1, own - base, parts)
            advance_to(table + DONE * 8, 1, 0)
            own = take(table + NEXT * 8, base + parts)
        base += parts
        advance_to(table + DONE * 8, 0, base)
        if take(table + NEXT * 8, base + 1) >= 0:
            _close_ranks(table, t + 1)
            advance_to(table + DONE * 8, 1, 0)
        base += 1
        advance_to(table + DONE * 8, 0, base)
        if index_at(table, LEFT) == 0:
            break
