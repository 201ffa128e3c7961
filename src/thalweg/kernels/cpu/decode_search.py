"""Greedy and beam search over a decoder, from the encoder to the last symbol, in one compiled call.

With one word to answer, a step is some hundred microseconds of reading weights; calling the parts of a step one by one
takes longer than that. Here the model is a list of operations on addresses
(:mod:`~thalweg.kernels.cpu.decode_operations`, :mod:`~thalweg.kernels.cpu.recurrent_cells`), the search is a loop, and
threads enter together: they share out the larger operations and wait for each other after each. A thread that comes
late finds everything taken and catches up; one that never comes is not missed. The first step is of one row an item,
for a beam has nothing else to continue; later ones are of W. All functions are :mod:`~thalweg.kernels.cpu.plain`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from thalweg.kernels.cpu.decode_memory import (
    advance_to,
    call_at,
    float_at,
    float_of,
    index_at,
    put_float,
    put_index,
    take,
)
from thalweg.kernels.cpu.decode_operations import TIMES, WORDS
from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic

__all__ = ["search"]

# fmt: off
(
    NEXT, DONE,  # parts taken, parts finished, counted through the whole search
    BEFORE, BEFORE_COUNT, BEFORE_ROWS,  # operations of the encoder
    EACH, EACH_COUNT, EACH_ROWS,  # operations of a step
    ITEMS, WIDTH, KEPT, SYMBOLS, EOS, MOST, LEAST, PENALTY, CAPACITY,
    LOGITS, TOKENS, LIVE, RANK, SCORE, CODE, HISTORY, DROPPED, ENDED, LINEAGE, ROOM,
    LEFT, ORDER, SOURCES,  # how many items are not done, which they are, and the item of every row
    SHARES,  # parts of a step of the search
    CHOICES,  # room for the candidates of every part: 2 W + 1 scores and codes
    STRIDE,  # numbers from one row of the logits to the next
    PLACES,  # rows of the operations that stand for all places of all sources
    BARRED,  # 0, or where a number a symbol stands that is not 0 for symbols that are never said
) = range(36)
# fmt: on


def _together(table, ops, count, rows, t, base):
    """A list of operations by all threads that are here; returns how many parts there were."""
    for n in range(count):
        op = ops + n * WORDS * 8
        parts, times = index_at(op, 1), index_at(op, TIMES)
        own_rows = rows * times if times > 0 else index_at(table, PLACES)
        limit = base + parts
        own = take(table + NEXT * 8, limit)
        while own >= 0:
            call_at(index_at(op, 0), op, own_rows, t, own - base, parts)
            advance_to(table + DONE * 8, 1, 0)
            own = take(table + NEXT * 8, limit)
        advance_to(table + DONE * 8, 0, limit)
        base = limit
    return base


@intrinsic
def normalise_at(typing_context, row, count):
    """Log-probabilities in place of logits; a row with NaN, or without a finite maximum, becomes NaN."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        row, count = b.inttoptr(arguments[0], emitter.element.as_pointer()), arguments[1]
        best = {width: emitter.variable(emitter.constant(float("-inf"), width)) for width in (LANES, 1)}

        def look(place: Any, width: int) -> None:
            b.store(emitter.larger(emitter.load(emitter.at(row, place), width), b.load(best[width])), best[width])

        emitter.blocks(count, (LANES, 1), look)
        top = emitter.larger(*(emitter.reduce(b.load(place), emitter.larger) for place in best.values()))
        double = ir.DoubleType()
        sums = {w: emitter.variable(ir.Constant(ir.VectorType(double, w), [0.0] * w)) for w in (LANES, 1)}

        def add(place: Any, width: int) -> None:
            x = b.fsub(emitter.load(emitter.at(row, place), width), emitter.splat(top, width))
            power = b.select(b.fcmp_unordered("uno", x, x), x, emitter.exp(x))
            b.store(b.fadd(b.load(sums[width]), b.fpext(power, ir.VectorType(double, width))), sums[width])

        emitter.blocks(count, (LANES, 1), add)
        total = b.fadd(*(emitter.reduce(b.load(place), b.fadd) for place in sums.values()))
        kind = ir.FunctionType(double, [double])
        logarithm = b.call(b.module.globals.get("log") or ir.Function(b.module, kind, "log"), [total])
        norm = b.fptrunc(b.fadd(b.fpext(top, double), logarithm), emitter.element)

        def write(place: Any, width: int) -> None:
            at = emitter.at(row, place)
            emitter.store(b.fsub(emitter.load(at, width), emitter.splat(norm, width)), at)

        emitter.blocks(count, (LANES, 1), write)

    return types.void(types.int64, types.int64), codegen


def _row(table, slot, w, step):
    """Where the model's answer for row w of an item stands: in the first step an item has one row."""
    return slot if step == 1 else slot * index_at(table, WIDTH) + w


def _before(x, y):
    return x > y or (x != x and y == y)


def _choose(table, item, slot, step, values, codes, most):
    """The ``most`` best continuations of an item, best first, into ``values`` and ``codes``; how many there are."""
    W, V, eos = index_at(table, WIDTH), index_at(table, SYMBOLS), index_at(table, EOS)
    early = step < index_at(table, LEAST)
    logits, live, barred = index_at(table, LOGITS), index_at(table, LIVE), index_at(table, BARRED)
    count = 0
    for w in range(W):
        before = float_at(live, item * W + w)
        if before == -np.inf:
            continue
        row = logits + _row(table, slot, w, step) * index_at(table, STRIDE) * 4
        normalise_at(row, V)
        for v in range(V):
            x = before + float_at(row, v)
            if x == -np.inf or (early and v == eos) or (barred and float_at(barred, v) != 0):
                continue
            # NaN comes before all, so that it is seen.
            if count == most and x <= float_at(values, count - 1):
                continue
            at = count if count < most else most - 1
            while at > 0 and _before(x, float_at(values, at - 1)):
                put_float(values, at, float_at(values, at - 1))
                put_index(codes, at, index_at(codes, at - 1))
                at -= 1
            put_float(values, at, x)
            put_index(codes, at, w * V + v)
            count = min(count + 1, most)
    return count


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


def _advance(table, item, slot, step, values, codes):
    """One step of an item's search; what it does is told in :mod:`thalweg.inference.search.beam`."""
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
            place = _row(table, slot, w, step) * index_at(table, STRIDE) + eos
            ending = before + float_at(index_at(table, LOGITS), place)
            if before > -np.inf and ending > lost:
                lost = ending
    for n in range(count):
        value, code = float_at(values, n), index_at(codes, n)
        ends = code % V == eos or (eos < 0 and step == longest)
        if ends and n < W:
            _finish(table, item, step, value, code)
        elif not ends and kept < W and n < 2 * W:
            put_float(values, kept, value)
            put_index(codes, kept, code)
            kept += 1
        elif value > lost and not final:
            lost = value
    put_float(index_at(table, DROPPED), item, lost)
    history = index_at(table, HISTORY) + ((step - 1) * index_at(table, ITEMS) + item) * W * 8
    for w in range(W):
        put_float(live, item * W + w, float_at(values, w) if w < kept else np.float32(-np.inf))
        # A dead slot follows the best row, so that the model is never asked about an impossible sequence.
        code = index_at(codes, w if w < kept else 0) if kept else 0
        put_index(history, w, code)
        put_index(index_at(table, TOKENS), slot * W + w, code % V)
    _inherit(table, slot, step, history)
    last = float_at(index_at(table, RANK), item * K + K - 1)
    penalty = float_of(index_at(table, PENALTY))
    bound = float_at(values, 0) if kept else np.float32(-np.inf)
    if penalty != 0 and kept:
        bound = np.float32(bound / (longest if penalty > 0 else step + 1) ** penalty)
    return not last < bound or step == longest


def _inherit(table, slot, step, history):
    """Each row takes the lineage of the row it comes from."""
    W, V, capacity = index_at(table, WIDTH), index_at(table, SYMBOLS), index_at(table, CAPACITY)
    lineage, room = index_at(table, LINEAGE), index_at(table, ROOM) + slot * W * capacity * 8
    if step == 1:  # the one row that there was; others are writing where its lineage stands
        for w in range(W):
            put_index(lineage, (slot * W + w) * capacity, slot)
        return
    for w in range(W):
        source = (slot * W + index_at(history, w) // V) * capacity
        for s in range(step):
            put_index(room, w * capacity + s, index_at(lineage, source + s))
    for w in range(W):
        own = (slot * W + w) * capacity
        for s in range(step):
            put_index(lineage, own + s, index_at(room, w * capacity + s))


def _advance_some(table, step, part, parts):
    """A step of the search for some of the items that are left."""
    most = 2 * index_at(table, WIDTH) + 1
    codes = index_at(table, CHOICES) + part * most * 16
    values = codes + most * 8
    left, order, ended = index_at(table, LEFT), index_at(table, ORDER), index_at(table, ENDED)
    for slot in range(left * part // parts, left * (part + 1) // parts):
        item = index_at(order, slot)
        if _advance(table, item, slot, step, values, codes):
            put_index(ended, item, step)


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
            if own != old or step == 1:
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
