"""Recurrent layers over whole sources, and what is made of them before the first step of a search.

A thread takes some of the sources in one direction through all their places, so that nobody waits for anybody. The
backward direction begins at each source's own end.
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

    Words: x (the directions side by side), its stride, tokens (A, S) to look it up by or 0, weights of a direction,
    the code of products with them, biases, room (directions, A, padded gates and more), padded gates, states h (the
    directions side by side), their stride, cells or 0, outputs, their stride from place to place, lengths, S, H,
    gates, zeros, bytes of the room of a direction, directions.
    """
    x_stride, tokens, width = index_at(op, 3), index_at(op, 4), index_at(op, 17)
    padded, h_stride, out_stride = index_at(op, 9), index_at(op, 11), index_at(op, 14)
    lengths, places, directions = index_at(op, 15), index_at(op, 16), index_at(op, 21)
    side, groups = part % directions, parts // directions
    low, high = rows * (part // directions) // groups, rows * (part // directions + 1) // groups
    x = index_at(op, 2) + side * index_at(op, 18) * 4
    weights, bias = index_at(op, 5) + side * padded * width * 4, index_at(op, 7) + side * padded * 4
    past, past_stride = index_at(op, 8) + side * index_at(op, 20), (padded + PANEL) * 4
    h, cells, out = index_at(op, 10) + side * width * 4, index_at(op, 12) + side * width * 4, index_at(op, 13)
    out += side * width * 4
    product = _product(op, part, past + low * past_stride, past_stride, h + low * h_stride, weights, bias)
    longest = 0
    for r in range(low, high):
        longest = max(longest, index_at(lengths, r))
    for s in range(longest):
        put_index(product, 7, width if s > 0 else 0)  # before the first place there is nothing but the bias
        call_at(index_at(op, 6), product, high - low, 0, 0, 1)
        for r in range(low, high):
            length = index_at(lengths, r)
            if s < length:
                place = r * places + (s if side == 0 else length - 1 - s)
                fed = x + (index_at(tokens, place) if tokens else place) * x_stride
                state = (cells if lstm else h) + r * h_stride
                old, to = state if s > 0 else index_at(op, 19), out + place * out_stride
                if lstm:
                    lstm_at(fed, past + r * past_stride, old, state, h + r * h_stride, to, width)
                else:
                    gru_at(fed, past + r * past_stride, old, state, to, width)


def lstm_layer(op, rows, t, part, parts):
    """A layer of LSTM cells."""
    _recur(op, rows, part, parts, True)


def gru_layer(op, rows, t, part, parts):
    """A layer of GRU cells that reset after the product."""
    _recur(op, rows, part, parts, False)


def copy(op, rows, t, part, parts):
    """out = x, or tanh(x). Words: x, its stride, out, its stride, numbers a row, whether tanh."""
    x, x_stride, out, out_stride = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        if index_at(op, 7):
            tanh_at(x + r * x_stride, out + r * out_stride, index_at(op, 6))
        else:
            copy_at(x + r * x_stride, out + r * out_stride, index_at(op, 6))


def fold(op, rows, t, part, parts):
    """out = the sum of both halves of x. Words: x, out, numbers of a half."""
    x, out, width = index_at(op, 2), index_at(op, 3), index_at(op, 4)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        add_at(x + r * width * 8, x + r * width * 8 + width * 4, out + r * width * 4, width)


def powers(op, rows, t, part, parts):
    """exp(2 keys) of every source, and whether its keys are small enough for that.

    Words: keys, their stride from place to place, out (A, S, H), lengths, S, H, and where the answers go.
    """
    keys, stride, out, lengths = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    places, width = index_at(op, 6), index_at(op, 7)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        small = 1
        for s in range(index_at(lengths, r)):
            key = keys + (r * places + s) * stride
            if reach_at(key, width) > REACH:
                small = 0
            twice_exp(key, out + (r * places + s) * width * 4, width)
        put_index(index_at(op, 8), r, small)
