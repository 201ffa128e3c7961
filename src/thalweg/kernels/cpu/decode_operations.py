"""The operations that decoders are made of, as :mod:`~thalweg.kernels.cpu.plain` functions of addresses.

Each is given the address of its words, the number of rows, the number of the step, and which part of how many it is to
do: some of the columns of a product, some of the rows of anything else.
"""

from __future__ import annotations

import math

import numpy as np

from thalweg.kernels.cpu.decode_memory import (
    float_at,
    float_of,
    gelu_at,
    gelu_tanh_at,
    index_at,
    put_float,
    put_index,
    silu_at,
)
from thalweg.kernels.cpu.decoding import dot_at, exp_sum, mix_at, norm_at
from thalweg.kernels.cpu.emitter import LANES
from thalweg.kernels.cpu.few_rows import rows_by_weights
from thalweg.kernels.cpu.panels import PANEL, rows_by_panels

__all__ = [
    "ROOM",
    "TIMES",
    "WORDS",
    "embed",
    "geglu",
    "gelu",
    "linear_byte",
    "linear_half",
    "linear_single",
    "norm",
    "panels",
    "past",
    "rms",
    "rotate",
    "scale",
    "silu",
    "source",
    "store",
    "swiglu",
]

# Words of an operation: the address of its code, how many parts it has, what it works on.
WORDS = 24
# Its last words: room of its own, and how many of its rows each row of the list stands for, 0 for the places in all.
ROOM, TIMES = 22, 23
_BLOCK = 48  # rows, in whole tiles


def _linear(op, rows, part, parts, example, size):
    """One part of a product: some of the columns of ``out``.

    Words: out, its stride, x, its stride, weight, inner, outer, scale, bias, relu.
    """
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


def linear_single(op, rows, t, part, parts):
    """Products with weights in float32."""
    _linear(op, rows, part, parts, np.float32(0), 4)


def linear_half(op, rows, t, part, parts):
    """The same in bfloat16."""
    _linear(op, rows, part, parts, np.int16(0), 2)


def linear_byte(op, rows, t, part, parts):
    """The same in int8."""
    _linear(op, rows, part, parts, np.int8(0), 1)


def panels(op, rows, t, part, parts):
    """One part of a product with weights in panels; words as above."""
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


def norm(op, rows, t, part, parts):
    """total = x + residual, out = LayerNorm(total). Words: out, total, x, residual, weight, bias, eps, width."""
    out, total, x, residual = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    weight, bias, eps, width = index_at(op, 6), index_at(op, 7), float_of(index_at(op, 8)), index_at(op, 9)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        row = r * width * 4
        norm_at(x + row, residual + row, weight, bias, eps, width, total + row, out + row)


def rms(op, rows, t, part, parts):
    """total = x + residual, out = total / sqrt(mean of squares + eps) * weight. Words as those of ``norm``."""
    out, total, x, residual = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    weight, eps, width = index_at(op, 6), float_of(index_at(op, 8)), index_at(op, 9)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        row = r * width * 4
        for n in range(width):
            put_float(total + row, n, float_at(x + row, n) + float_at(residual + row, n))
        square = dot_at(total + row, total + row, width) / np.float32(width) + eps
        # A row whose squares overflow is NaN, not 0: what has diverged must show.
        factor = np.float32(1) / np.float32(math.sqrt(square)) + square * np.float32(0)
        for n in range(width):
            put_float(out + row, n, float_at(total + row, n) * factor * float_at(weight, n))


def _attend(query, addresses, count, values, heads, size, scores, room, out, bias, apart):
    """One row over ``count`` keys at ``addresses``, their values ``values`` bytes on; ``scores`` is (heads, room).

    ``bias`` is 0, or where (heads, apart) numbers stand that are added to scores by how far back a key is.
    """
    for s in range(count):
        for h in range(heads):
            key = index_at(addresses, s) + h * size * 4
            score = dot_at(query + h * size * 4, key, size)
            put_float(scores, h * room + s, score + float_at(bias, h * apart + count - 1 - s) if bias else score)
    for h in range(heads):
        offset, own = h * size * 4, scores + h * room * 4
        total = exp_sum(own, count)
        factor = np.float32(1) / total if count > 0 else np.float32(0)
        mix_at(own, addresses, values + offset, count, factor, size, out + offset)


def past(op, rows, t, part, parts):
    """Attention over a row's own past.

    Words: out, queries, their stride, cache of the layer, its rows, lineage, its stride, heads, size of one, what
    distances add (heads, stride of the lineage) or 0.
    """
    out, queries, query_stride, cache = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    held, lineage, capacity = index_at(op, 6), index_at(op, 7), index_at(op, 8)
    heads, size, bias = index_at(op, 9), index_at(op, 10), index_at(op, 11)
    room = (capacity + LANES - 1) // LANES * LANES
    addresses = index_at(op, ROOM) + part * (heads * room * 4 + room * 8)
    width = heads * size
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        for s in range(t + 1):
            source = index_at(lineage, r * capacity + s)
            put_index(addresses, s, cache + (s * held + source) * 2 * width * 4)
        _attend(
            *(queries + r * query_stride * 4, addresses, t + 1, width * 4, heads, size),
            *(addresses + room * 8, room, out + r * width * 4, bias, capacity),
        )


def source(op, rows, t, part, parts):
    """Attention over the memory of a row's source.

    Words: out, queries, their stride, memory, item stride, place stride, lengths, items, places, heads << 32 | size.
    """
    out, queries, query_stride, memory = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    item_stride, place_stride, lengths = index_at(op, 6), index_at(op, 7), index_at(op, 8)
    items, places, each = index_at(op, 9), index_at(op, 10), index_at(op, 11)
    heads, size = each >> 32, each & 0xFFFFFFFF
    room = (places + LANES - 1) // LANES * LANES
    addresses = index_at(op, ROOM) + part * (heads * room * 4 + room * 8)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        item = index_at(items, r)
        count = index_at(lengths, item)
        for s in range(count):
            put_index(addresses, s, memory + (item * item_stride + s * place_stride) * 4)
        _attend(
            *(queries + r * query_stride * 4, addresses, count, heads * size * 4, heads, size),
            *(addresses + room * 8, room, out + r * heads * size * 4, 0, 0),
        )


def scale(op, rows, t, part, parts):
    """x = factor * x. Words: x, its stride, numbers a row, factor."""
    x, stride, count, factor = index_at(op, 2), index_at(op, 3), index_at(op, 4), float_of(index_at(op, 5))
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        for n in range(count):
            put_float(x + r * stride, n, float_at(x + r * stride, n) * factor)


def gelu(op, rows, t, part, parts):
    """x = x Phi(x). Words: x, numbers a row."""
    x, count = index_at(op, 2), index_at(op, 3)
    low, high = rows * part // parts, rows * (part + 1) // parts
    gelu_at(x + low * count * 4, (high - low) * count)


def silu(op, rows, t, part, parts):
    """x = x / (1 + exp(-x)). Words: x, numbers a row."""
    x, count = index_at(op, 2), index_at(op, 3)
    low, high = rows * part // parts, rows * (part + 1) // parts
    silu_at(x + low * count * 4, (high - low) * count)


def swiglu(op, rows, t, part, parts):
    """up = silu(gate) * up. Words: gate, up, numbers a row."""
    gate, up, count = index_at(op, 2), index_at(op, 3), index_at(op, 4)
    low, high = rows * part // parts, rows * (part + 1) // parts
    silu_at(gate + low * count * 4, (high - low) * count)
    for n in range(low * count, high * count):
        put_float(up, n, float_at(up, n) * float_at(gate, n))


def geglu(op, rows, t, part, parts):
    """up = gelu(gate) * up. Words: gate, up, numbers a row."""
    gate, up, count = index_at(op, 2), index_at(op, 3), index_at(op, 4)
    low, high = rows * part // parts, rows * (part + 1) // parts
    gelu_tanh_at(gate + low * count * 4, (high - low) * count)
    for n in range(low * count, high * count):
        put_float(up, n, float_at(up, n) * float_at(gate, n))


def store(op, rows, t, part, parts):
    """Rows into the cache of this step. Words: from, its stride, cache of the layer, its rows, numbers a row."""
    start, stride, cache, held, count = (
        *(index_at(op, 2), index_at(op, 3), index_at(op, 4)),
        *(index_at(op, 5), index_at(op, 6)),
    )
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        to = cache + (t * held + r) * count * 4
        for n in range(count):
            put_float(to, n, float_at(start + r * stride, n))


def embed(op, rows, t, part, parts):
    """Vectors of symbols and of the step. Words: out, tokens, table, width, scale, vectors of positions or 0."""
    out, tokens, table, width = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    factor, positions = float_of(index_at(op, 6)), index_at(op, 7)
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        vector = table + index_at(tokens, r) * width * 4
        for n in range(width):
            x = float_at(vector, n) * factor
            put_float(out, r * width + n, x + float_at(positions, t * width + n) if positions else x)


def rotate(op, rows, t, part, parts):
    """Rotary positions.

    Words: x, its stride, heads, size of one, cosines, sines, positions of the rows or 0 for that of the step.
    """
    x, stride, heads, size = index_at(op, 2), index_at(op, 3), index_at(op, 4), index_at(op, 5)
    cosines, sines, positions = index_at(op, 6), index_at(op, 7), index_at(op, 8)
    half = size // 2
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        angle = (index_at(positions, r) if positions else t) * half
        for n in range(heads):
            head = x + r * stride + n * size * 4
            for k in range(half):
                low, high = float_at(head, k), float_at(head, half + k)
                cosine, sine = float_at(cosines, angle + k), float_at(sines, angle + k)
                put_float(head, k, low * cosine - high * sine)
                put_float(head, half + k, high * cosine + low * sine)
