"""Recurrent cells and their attention, one row at a time: operations of compiled searches.

A row's state is read where the row it comes from left it. What a cell adds of its own past, W h, is computed for every
row right after h, together with all else that reads h; here only the sums meet, taken from the row of the parent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.polynomial import Chebyshev, Polynomial

from thalweg.kernels.cpu.decode_memory import index_at, put_float
from thalweg.kernels.cpu.decode_operations import ROOM
from thalweg.kernels.cpu.decoding import dot_at, exp_sum
from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic

__all__ = [
    "LIMIT",
    "REACH",
    "attend",
    "gru",
    "gru_at",
    "keep",
    "lstm",
    "lstm_at",
    "reach_at",
    "reset",
    "row_code",
    "twice_exp",
]

# |q| and |k| up to this: exp(2 q) exp(2 k) is far below the largest float32.
REACH = 20.0
# exp is not told apart further out: no sigmoid or tanh changes there by more than 5e-18.
LIMIT = 40.0
_WIDE = (2 * LANES, LANES, 1)  # of cells: while one vector waits for its exponentials, another goes on
_WHOLE = 1.5 * 2**23
_HALF = math.log(2) / 2
_FACTORS = Chebyshev.interpolate(np.exp, 6, domain=[-_HALF, _HALF]).convert(kind=Polynomial).coef


class _Cell(Emitter):
    """Vector code of activations."""

    def at_address(self, address: Any) -> Any:
        """The floats at an address."""
        return self.builder.inttoptr(address, self.element.as_pointer())

    def power(self, x: Any) -> Any:
        """exp(x), with x brought into [-40, 40]; NaN stays NaN.

        x = n log 2 + r with |r| <= log(2) / 2, n by adding a number whose last binary digit is 1; exp(r) by a
        polynomial that is off by 2e-9, 2^n by its bit pattern.
        """
        b, width = self.builder, x.type.count
        for bound, sign in ((-LIMIT, ">"), (LIMIT, "<")):
            edge = self.constant(bound, width)
            x = b.select(b.fcmp_ordered(sign, edge, x), edge, x)
        shifted = self.call("fma", x, self.constant(1 / math.log(2), width), self.constant(_WHOLE, width))
        n = b.fsub(shifted, self.constant(_WHOLE, width))
        r = self.call("fma", n, self.constant(-math.log(2), width), x)
        p, *rest = (self.constant(float(factor), width) for factor in reversed(_FACTORS))
        for factor in rest:
            p = self.call("fma", p, r, factor)
        kind = ir.VectorType(ir.IntType(32), width)
        bits = b.shl(b.bitcast(shifted, kind), ir.Constant(kind, [23] * width))
        return b.fmul(p, b.bitcast(b.add(bits, ir.Constant(kind, [127 << 23] * width)), x.type))

    def above_one(self, x: Any) -> Any:
        """1 + exp(-x), whose inverse is the sigmoid of x."""
        return self.builder.fadd(self.constant(1.0, x.type.count), self.power(self.builder.fneg(x)))

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x))."""
        return self.builder.fdiv(self.constant(1.0, x.type.count), self.above_one(x))

    def tanh_parts(self, x: Any) -> tuple[Any, Any]:
        """exp(2 x) - 1 and exp(2 x) + 1, whose quotient is tanh(x)."""
        b, one = self.builder, self.constant(1.0, x.type.count)
        e = self.power(b.fadd(x, x))
        return b.fsub(e, one), b.fadd(e, one)

    def tanh(self, x: Any) -> Any:
        """tanh(x) to 2e-7."""
        return self.builder.fdiv(*self.tanh_parts(x))

    def gated_tanh(self, gate: Any, x: Any) -> Any:
        """sigmoid(gate) tanh(x), in one division."""
        above, below = self.tanh_parts(x)
        return self.builder.fdiv(above, self.builder.fmul(below, self.above_one(gate)))


def row_code(count: int, body: Any, widths: tuple[int, ...] = (LANES, 1)) -> Any:
    """An intrinsic over a row of the width that is its last argument: ``body(emitter, load, store)`` for every block.

    ``load(n, k)`` is the block of argument n that lies k widths on, ``store(value, n)`` sets that of argument n.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        emitter = _Cell(context, builder, types.float32)
        pointers, width = [emitter.at_address(address) for address in arguments[:-1]], arguments[-1]

        def block(place: Any, lanes: int) -> None:
            def load(n: int, k: int = 0) -> Any:
                at = builder.add(place, builder.mul(width, emitter.size(k)))
                return emitter.load(emitter.at(pointers[n], at), lanes)

            body(emitter, load, lambda value, n: emitter.store(value, emitter.at(pointers[n], place)))

        emitter.blocks(width, widths, block)

    return types.void(*(types.int64,) * count), codegen


@intrinsic
def lstm_at(typing_context, x, past, old, new, out, copy, width):
    """``x`` and ``past`` add up to the gates i, f, g, o; ``old``, ``new`` are cells, ``out`` and ``copy`` outputs."""

    def body(e: _Cell, load: Any, store: Any) -> None:
        b = e.builder
        i, f, g, o = (b.fadd(load(0, k), load(1, k)) for k in range(4))
        cell = e.call("fma", e.sigmoid(f), load(2), e.gated_tanh(i, g))
        store(cell, 3)
        h = e.gated_tanh(o, cell)
        store(h, 4)
        store(h, 5)

    return row_code(7, body, _WIDE)


@intrinsic
def gru_at(typing_context, x, past, old, new, out, width):
    """``x`` and ``past`` hold r, z, n, of which ``past`` waits for r; both ``new`` and ``out`` are the new state."""

    def body(e: _Cell, load: Any, store: Any) -> None:
        b = e.builder
        r, z = (e.sigmoid(b.fadd(load(0, k), load(1, k))) for k in range(2))
        n = e.tanh(e.call("fma", r, load(1, 2), load(0, 2)))
        h = e.call("fma", z, b.fsub(load(2), n), n)
        store(h, 3)
        store(h, 4)

    return row_code(6, body, _WIDE)


@intrinsic
def reset_at(typing_context, x, past, old, kept, out, width):
    """``out`` = r * old and ``kept`` = z, of which ``x`` and ``past`` are the parts."""

    def body(e: _Cell, load: Any, store: Any) -> None:
        b = e.builder
        r, z = (e.sigmoid(b.fadd(load(0, k), load(1, k))) for k in range(2))
        store(b.fmul(r, load(2)), 4)
        store(z, 3)

    return row_code(6, body)


@intrinsic
def keep_at(typing_context, x, candidate, kept, old, new, out, width):
    """n = tanh(x_n + candidate); the new state n + z (old - n) to ``new`` and ``out``."""

    def body(e: _Cell, load: Any, store: Any) -> None:
        b = e.builder
        n = e.tanh(b.fadd(load(0, 2), load(1)))
        h = e.call("fma", load(2), b.fsub(load(3), n), n)
        store(h, 4)
        store(h, 5)

    return row_code(7, body)


@intrinsic
def twice_exp(typing_context, x, out, width):
    """``out`` = exp(2 x), for |x| <= 20."""

    def body(e: _Cell, load: Any, store: Any) -> None:
        x = load(0)
        store(e.power(e.builder.fadd(x, x)), 1)

    return row_code(3, body)


@intrinsic
def reach_at(typing_context, x, count):
    """The largest |x| of ``count`` numbers, NaN not counted."""

    def codegen(context, builder, signature, arguments):
        emitter, b = _Cell(context, builder, types.float32), builder
        pointer = emitter.at_address(arguments[0])
        best = {width: emitter.variable(emitter.constant(0.0, width)) for width in (LANES, 1)}

        def body(place: Any, width: int) -> None:
            entries = emitter.call("fabs", emitter.load(emitter.at(pointer, place), width))
            b.store(emitter.larger(entries, b.load(best[width])), best[width])

        emitter.blocks(arguments[1], (LANES, 1), body)
        wide, single = (emitter.reduce(b.load(place), emitter.larger) for place in best.values())
        return emitter.larger(wide, single)

    return types.float32(types.int64, types.int64), codegen


def _weighed(context: Any, builder: Any, arguments: Any, value: Any) -> Any:
    """sum_j v[j] value(x[j], y[j]) over rows x, y, v of so many numbers."""
    emitter = _Cell(context, builder, types.float32)
    x, y, v = (emitter.at_address(address) for address in arguments[:3])
    sums = {width: emitter.variable(emitter.constant(0.0, width)) for width in (2 * LANES, LANES, 1)}

    def body(place: Any, width: int) -> None:
        pair = (emitter.load(emitter.at(pointer, place), width) for pointer in (x, y))
        found = emitter.call(
            "fma", emitter.load(emitter.at(v, place), width), value(emitter, *pair), builder.load(sums[width])
        )
        builder.store(found, sums[width])

    emitter.blocks(arguments[3], tuple(sums), body)
    wide, narrow, single = (emitter.reduce(builder.load(total), builder.fadd) for total in sums.values())
    return builder.fadd(wide, builder.fadd(narrow, single))


@intrinsic
def sum_of_tanh(typing_context, query, key, weights, count):
    """``sum_j w_j tanh(q_j + k_j)``."""

    def codegen(context, builder, signature, arguments):
        return _weighed(context, builder, arguments, lambda e, q, k: e.tanh(builder.fadd(q, k)))

    return types.float32(*(types.int64,) * 4), codegen


@intrinsic
def sum_of_shares(typing_context, query, key, weights, count):
    """``sum_j w_j / (1 + x_j y_j)``: with x = exp(2 q) and y = exp(2 k), what tanh(q + k) is made of."""

    def codegen(context, builder, signature, arguments):
        def share(e: _Cell, x: Any, y: Any) -> Any:
            one = e.constant(1.0, x.type.count)
            return builder.fdiv(one, e.call("fma", x, y, one))

        return _weighed(context, builder, arguments, share)

    return types.float32(*(types.int64,) * 4), codegen


@intrinsic
def read_at(typing_context, weights, count, factor, values, stride, own, out, width):
    """``out[j] = tanh(own[j] + factor * sum_s weights[s] values[s, j])``; the stride of values is in numbers."""

    def codegen(context, builder, signature, arguments):
        emitter, b = _Cell(context, builder, types.float32), builder
        weights, values, own, out = (emitter.at_address(arguments[n]) for n in (0, 3, 5, 6))
        count, factor, stride, width = arguments[1], arguments[2], arguments[4], arguments[7]

        def body(place: Any, block: int) -> None:
            total = emitter.variable(emitter.constant(0.0, block))
            with emitter.loop(emitter.size(0), count, 1) as s:
                weight = emitter.splat(emitter.scalar(weights, s), block)
                entries = emitter.load(emitter.at(values, b.add(b.mul(s, stride), place)), block)
                b.store(emitter.call("fma", weight, entries, b.load(total)), total)
            entries = emitter.load(emitter.at(own, place), block)
            found = emitter.call("fma", b.load(total), emitter.splat(factor, block), entries)
            emitter.store(emitter.tanh(found), emitter.at(out, place))

        emitter.blocks(width, (4 * LANES, LANES, 1), body)

    kinds = (types.int64, types.int64, types.float32, *(types.int64,) * 5)
    return types.void(*kinds), codegen


def _parent(op, r, t):
    """The row where a row's state before this step stands; words 9 to 11 are lineage, its stride, items."""
    return index_at(index_at(op, 9), r * index_at(op, 10) + t - 1) if t > 0 else index_at(index_at(op, 11), r)


def _input(op, r):
    """What a row is fed; words 2 to 4 are x, its stride, and tokens to look it up by, or 0."""
    return index_at(op, 2) + (index_at(index_at(op, 4), r) if index_at(op, 4) else r) * index_at(op, 3)


def _state(op, parity):
    """The states after even or odd steps; words 7 and 8 are where they are and the bytes of each half."""
    return index_at(op, 7) + parity * index_at(op, 8)


def lstm(op, rows, t, part, parts):
    """A step of an LSTM.

    Words: x, its stride, tokens or 0, past, its stride, states (2, R, H), bytes of a half, lineage, its stride, items,
    out, H. The state that is carried is the cell.
    """
    width = index_at(op, 13)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        parent = _parent(op, r, t)
        old, new = _state(op, (t + 1) % 2) + parent * width * 4, _state(op, t % 2) + r * width * 4
        past = index_at(op, 5) + parent * index_at(op, 6)
        out = index_at(op, 12) + r * width * 4
        lstm_at(_input(op, r), past, old, new, out, out, width)


def gru(op, rows, t, part, parts):
    """A step of a GRU that resets after the product; words as above."""
    width = index_at(op, 13)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        parent = _parent(op, r, t)
        old, new = _state(op, (t + 1) % 2) + parent * width * 4, _state(op, t % 2) + r * width * 4
        past = index_at(op, 5) + parent * index_at(op, 6)
        gru_at(_input(op, r), past, old, new, index_at(op, 12) + r * width * 4, width)


def reset(op, rows, t, part, parts):
    """The first half of a step of a GRU that resets before the product; ``out`` is r h, and one word more is z."""
    width = index_at(op, 13)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        parent = _parent(op, r, t)
        old, past = _state(op, (t + 1) % 2) + parent * width * 4, index_at(op, 5) + parent * index_at(op, 6)
        kept, out = index_at(op, 14) + r * width * 4, index_at(op, 12) + r * width * 4
        reset_at(_input(op, r), past, old, kept, out, width)


def keep(op, rows, t, part, parts):
    """The second half; ``past`` is the candidate's product, and one word more is z."""
    width = index_at(op, 13)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        old, new = _state(op, (t + 1) % 2) + _parent(op, r, t) * width * 4, _state(op, t % 2) + r * width * 4
        candidate, kept = index_at(op, 5) + r * index_at(op, 6), index_at(op, 14) + r * width * 4
        keep_at(_input(op, r), candidate, kept, old, new, index_at(op, 12) + r * width * 4, width)


def attend(op, rows, t, part, parts):
    """out = tanh(own + sum_s a_s m_s), a = softmax of the scores of the query with the keys of the row's source.

    Words: out, M, query, its stride, own, its stride, keys, their stride from place to place, exp(2 keys) (A, S, H) or
    0 for dot products, the weights of the additive score, values, their stride, lengths, items, the first places of
    sources, H, for each item whether its keys are small, S.
    """
    out, wide, own, own_stride = index_at(op, 2), index_at(op, 3), index_at(op, 6), index_at(op, 7)
    keys, key_stride, powers, weights = index_at(op, 8), index_at(op, 9), index_at(op, 10), index_at(op, 11)
    values, value_stride, lengths, items = index_at(op, 12), index_at(op, 13), index_at(op, 14), index_at(op, 15)
    starts, width, most = index_at(op, 16), index_at(op, 17), index_at(op, 19)
    room = (most + LANES - 1) // LANES * LANES
    scores = index_at(op, ROOM) + part * (room + width) * 4
    raised = scores + room * 4
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        item, query = index_at(items, r), index_at(op, 4) + r * index_at(op, 5)
        count, start = index_at(lengths, item), index_at(starts, item)
        first, raised_first = start * key_stride, start * width * 4
        if powers == 0:
            for s in range(count):
                put_float(scores, s, dot_at(query, keys + first + s * key_stride, width))
        elif index_at(index_at(op, 18), item) and reach_at(query, width) <= REACH:
            twice_exp(query, raised, width)
            for s in range(count):  # what all of them have in common is left out
                share = sum_of_shares(raised, powers + raised_first + s * width * 4, weights, width)
                put_float(scores, s, np.float32(-2) * share)
        else:
            for s in range(count):
                put_float(scores, s, sum_of_tanh(query, keys + first + s * key_stride, weights, width))
        factor = np.float32(1) / exp_sum(scores, count)
        found = values + start * value_stride
        read_at(scores, count, factor, found, value_stride // 4, own + r * own_stride, out + r * wide * 4, wide)
