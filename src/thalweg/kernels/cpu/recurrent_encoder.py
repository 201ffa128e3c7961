"""Recurrent layers over whole sources, and what is made of them before the first step of a search.

A thread takes some of the sources in one direction through all their places, so that nobody waits for anybody. The
backward direction begins at each source's own end. Sources come longest first, so that those that have more symbols
stand together, and no row is multiplied for nothing. What a first symbol leaves behind, and what the next step adds of
it, depends on the symbol alone and is looked up: a source of S symbols takes S - 2 products.
"""

from __future__ import annotations

from typing import Any

from thalweg.kernels.cpu.decode_memory import call_at, index_at, put_index
from thalweg.kernels.cpu.decode_operations import ROOM, WORDS
from thalweg.kernels.cpu.emitter import intrinsic
from thalweg.kernels.cpu.panels import PANEL
from thalweg.kernels.cpu.recurrent_cells import REACH, gru_at, lstm_at, reach_at, row_code, twice_exp

__all__ = ["copy", "fold", "gru_layer", "lstm_layer", "powers"]


@intrinsic
def copy_at(typing_context, x, out, width):
    """``out`` = x."""
    return row_code(3, lambda e, load, store: store(load(0), 1))


@intrinsic
def tanh_at(typing_context, x, out, width):
    """``out`` = tanh(x)."""
    return row_code(3, lambda e, load, store: store(e.tanh(load(0)), 1))


@intrinsic
def add_at(typing_context, x, y, out, width):
    """``out`` = x + y."""

    def body(e: Any, load: Any, store: Any) -> None:
        store(e.builder.fadd(load(0), load(1)), 2)

    return row_code(4, body)


def _product(op, part, out, out_stride, x, weights, bias):
    """The words of a product, in the room of a part: the code of products is there already, and not copied here."""
    product = index_at(op, ROOM) + part * WORDS * 8
    put_index(product, 2, out)
    put_index(product, 3, out_stride)
    put_index(product, 4, x)
    put_index(product, 5, index_at(op, 11))
    put_index(product, 6, weights)
    put_index(product, 8, index_at(op, 9))
    put_index(product, 9, 0)
    put_index(product, 10, bias)
    put_index(product, 11, 0)
    return product


def _recur(op, rows, part, parts, lstm):
    """Some of the sources in one direction.

    Words: x (the directions side by side), its stride, tokens of all places to look it up by or 0, weights of a
    direction, the code of products with them, biases, room (directions, A, padded gates and more), padded gates, states
    h (the directions side by side), their stride, cells or 0, outputs, their stride from place to place, the first
    place and the length of each source, longest first, what is known after a first symbol or 0, H, gates, zeros, bytes
    of the room of a direction, directions.
    """
    width, padded, h_stride, slots = index_at(op, 17), index_at(op, 9), index_at(op, 11), index_at(op, 15)
    directions = index_at(op, 21)
    side, groups = part % directions, parts // directions
    low, high = rows * (part // directions) // groups, rows * (part // directions + 1) // groups
    weights, bias = index_at(op, 5) + side * padded * width * 4, index_at(op, 7) + side * padded * 4
    past, past_stride = index_at(op, 8) + side * index_at(op, 20), (padded + PANEL) * 4
    h = index_at(op, 10) + side * width * 4
    product = _product(op, part, past + low * past_stride, past_stride, h + low * h_stride, weights, bias)
    longest = index_at(slots, 2 * low + 1) if low < high else 0
    for s in range(longest):
        while index_at(slots, 2 * high - 1) <= s:  # sources that have ended are the last ones
            high -= 1
        if s > 1 or index_at(op, 16) == 0:
            put_index(product, 7, width if s > 0 else 0)  # before the first place there is nothing but the bias
            call_at(index_at(op, 6), product, high - low, 0, 0, 1)
        for r in range(low, high):
            _take_in(op, r, s, side, past + r * past_stride, lstm)


def _take_in(op, r, s, side, past, lstm):
    """A source's state after one symbol more, which is symbol s from its beginning or from its end."""
    start, length = index_at(index_at(op, 15), 2 * r), index_at(index_at(op, 15), 2 * r + 1)
    x, x_stride, tokens, known = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 16)
    width, gates = index_at(op, 17), index_at(op, 18)
    place = start + (s if side == 0 else length - 1 - s)
    fed = x + side * gates * 4 + (index_at(tokens, place) if tokens else place) * x_stride
    to = index_at(op, 13) + place * index_at(op, 14) + side * width * 4
    own = r * index_at(op, 11) + side * width * 4
    h, cell = index_at(op, 10) + own, index_at(op, 12) + own
    if known and s <= 1:
        each, symbol = ((2 if lstm else 1) * width + gates) * 4, index_at(tokens, start + (length - 1 if side else 0))
        known += (symbol * index_at(op, 21) + side) * each
        past = known + (2 if lstm else 1) * width * 4
    if known and s == 0:
        copy_at(known, h, width)
        copy_at(known, to, width)
        if lstm:
            copy_at(known + width * 4, cell, width)
    elif lstm:
        lstm_at(fed, past, cell if s > 0 else index_at(op, 19), cell, h, to, width)
    else:
        gru_at(fed, past, h if s > 0 else index_at(op, 19), h, to, width)


def lstm_layer(op, rows, t, part, parts):
    """A layer of LSTM cells."""
    _recur(op, rows, part, parts, True)


def gru_layer(op, rows, t, part, parts):
    """A layer of GRU cells that reset after the product."""
    _recur(op, rows, part, parts, False)


def copy(op, rows, t, part, parts):
    """out = x, or tanh(x). Words: x, its stride, out, its stride, numbers a row, whether tanh, the row of x of each."""
    x, x_stride, out, out_stride = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        read = x + index_at(index_at(op, 8), r) * x_stride
        if index_at(op, 7):
            tanh_at(read, out + r * out_stride, index_at(op, 6))
        else:
            copy_at(read, out + r * out_stride, index_at(op, 6))


def fold(op, rows, t, part, parts):
    """out = the sum of both halves of x. Words: x, out, numbers of a half."""
    x, out, width = index_at(op, 2), index_at(op, 3), index_at(op, 4)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        add_at(x + r * width * 8, x + r * width * 8 + width * 4, out + r * width * 4, width)


def powers(op, rows, t, part, parts):
    """exp(2 keys) of every source, and whether its keys are small enough for that.

    Words: keys, their stride from place to place, out (places, H), lengths, the first places of sources, H, and where
    the answers go.
    """
    keys, stride, out, lengths = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    starts, width = index_at(op, 6), index_at(op, 7)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        small, start = 1, index_at(starts, r)
        for s in range(start, start + index_at(lengths, r)):
            if reach_at(keys + s * stride, width) > REACH:
                small = 0
            twice_exp(keys + s * stride, out + s * width * 4, width)
        put_index(index_at(op, 8), r, small)
