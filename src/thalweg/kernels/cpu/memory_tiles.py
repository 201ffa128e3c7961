"""Inner loops of associative memories on the CPU: sixteen queries side by side in the lanes of vectors.

A panel of queries is a matrix (D, 16). Scores of patterns and mixtures of values are then outer products in which the
patterns give single numbers as they lie in memory and the panel gives vectors: nothing is packed, nothing is added up
across a vector, and what one update gives is what the next one takes. All numbers are float32 at plain addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic

__all__ = [
    "LEAST",
    "PANEL",
    "clear",
    "fetch",
    "mixed_tile",
    "move",
    "not_finite",
    "raise_top",
    "scores_tile",
    "weigh",
]

# Queries of a panel.
PANEL = 2 * LANES
# Powers of two below 2^LEAST are given as 0: next to a sum of at least 1 they are nothing.
LEAST = -100.0
# 2^r for |r| <= 1/2 to 2e-9, fitted by the exchange algorithm of Remez to the least relative error.
_POWER = (
    *(1.0000000005541667, 0.6931472057372683, 0.24022646890633373, 0.055503287769648045),
    *(0.009618488957164557, 0.0013399931219281133, 0.0001534581199229756),
)
_INT = ir.IntType(32)
_LINE = 64  # bytes that come from memory together


def _pointer(emitter: Emitter, address: Any) -> Any:
    return emitter.builder.inttoptr(address, emitter.element.as_pointer())


def _vectors(emitter: Emitter, pointer: Any, row: Any, halves: int) -> list[Any]:
    """The entries of one row of a panel."""
    b = emitter.builder
    first = b.mul(row, emitter.size(PANEL))
    return [emitter.load(emitter.at(pointer, b.add(first, emitter.size(h * LANES))), LANES) for h in range(halves)]


def _put(emitter: Emitter, pointer: Any, row: Any, values: list[Any]) -> None:
    b = emitter.builder
    first = b.mul(row, emitter.size(PANEL))
    for h, value in enumerate(values):
        emitter.store(value, emitter.at(pointer, b.add(first, emitter.size(h * LANES))))


def _power(emitter: Emitter, x: Any) -> Any:
    """2^x of numbers <= 0, 0 of those below ``LEAST``; NaN stays."""
    b, width = emitter.builder, x.type.count
    least = emitter.constant(LEAST, width)
    below = b.fcmp_ordered("<", x, least)
    x = b.select(below, least, x)
    n = emitter.call("rint", x)
    r = b.fsub(x, n)
    p = emitter.constant(_POWER[-1], width)
    for factor in _POWER[-2::-1]:
        p = emitter.call("fma", p, r, emitter.constant(factor, width))
    kind = ir.VectorType(_INT, width)
    bits = b.shl(b.fptosi(n, kind), ir.Constant(kind, [23] * width))  # added to the exponent of p, which is about 1
    return b.select(below, emitter.constant(0.0, width), b.bitcast(b.add(b.bitcast(p, kind), bits), x.type))


def _products(
    emitter: Emitter, rows: int, halves: int, count: Any, number: Callable[[Any, int], Any], panel: Any
) -> list[list[Any]]:
    """sum_i number(i, m) panel[i, :] for every row m, all sums in registers.

    Few sums are taken over even and odd i, so that one addition need not wait for the last.
    """
    b = emitter.builder
    chains = 2 if rows * halves <= 6 else 1
    zero = emitter.constant(0.0, LANES)
    sums = [[[emitter.variable(zero) for _ in range(halves)] for _ in range(rows)] for _ in range(chains)]

    def take(i: Any, own: list[list[Any]]) -> None:
        entries = _vectors(emitter, panel, i, halves)
        for m in range(rows):
            factor = emitter.splat(number(i, m), LANES)
            for h, entry in enumerate(entries):
                b.store(emitter.call("fma", factor, entry, b.load(own[m][h])), own[m][h])

    whole = b.and_(count, emitter.size(-chains))
    with emitter.loop(emitter.size(0), whole, chains) as i:
        for chain in range(chains):
            take(b.add(i, emitter.size(chain)), sums[chain])
    if chains > 1:
        with emitter.loop(whole, count, 1) as i:
            take(i, sums[0])
    values = [[[b.load(x) for x in row] for row in own] for own in sums]
    if chains == 1:
        return values[0]
    return [[b.fadd(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(*values, strict=True)]


def scores_tile(rows: int, halves: int) -> Any:
    """The kernel of ``rows`` patterns by a panel, or by half of one."""

    @intrinsic
    def tile(typing_context, x, stride, panel, inner, out):
        """``out[m, :] = sum_i x[m, i] panel[i, :]``; ``stride`` is the bytes of a row of x."""

        def codegen(context, builder, signature, arguments):
            emitter, b = Emitter(context, builder, types.float32), builder
            x, stride, panel, inner, out = arguments
            patterns = [_pointer(emitter, b.add(x, b.mul(stride, emitter.size(m)))) for m in range(rows)]
            panel, out = _pointer(emitter, panel), _pointer(emitter, out)
            totals = _products(emitter, rows, halves, inner, lambda i, m: emitter.scalar(patterns[m], i), panel)
            for m, total in enumerate(totals):
                _put(emitter, out, emitter.size(m), total)

        return types.void(*(types.int64,) * 5), codegen

    return tile


def mixed_tile(rows: int, halves: int) -> Any:
    """The kernel of ``rows`` columns of values by the weights of a panel, or of half of one."""

    @intrinsic
    def tile(typing_context, x, stride, weights, count, shrink, out):
        """``out[m, :] = out[m, :] shrink[:] + sum_n x[n, m] weights[n, :]``; ``stride`` is the bytes of a row of x."""

        def codegen(context, builder, signature, arguments):
            emitter, b = Emitter(context, builder, types.float32), builder
            x, stride, weights, count, shrink, out = arguments
            weights, shrink, out = (_pointer(emitter, address) for address in (weights, shrink, out))

            def number(n: Any, m: int) -> Any:
                return emitter.scalar(_pointer(emitter, b.add(x, b.mul(stride, n))), emitter.size(m))

            totals = _products(emitter, rows, halves, count, number, weights)
            factors = _vectors(emitter, shrink, emitter.size(0), halves)
            for m, total in enumerate(totals):
                before = _vectors(emitter, out, emitter.size(m), halves)
                new = [emitter.call("fma", *pair, t) for *pair, t in zip(before, factors, total, strict=True)]
                _put(emitter, out, emitter.size(m), new)

        return types.void(*(types.int64,) * 6), codegen

    return tile


@intrinsic
def fetch(typing_context, address, size):
    """Ask for ``size`` bytes that will be wanted soon; nothing is wrong if there are none."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        start = b.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [start.type, _INT, _INT, _INT])
        ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        read, near, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
        with emitter.loop(emitter.size(0), arguments[1], _LINE) as place:
            b.call(ask, [b.gep(start, [place], source_etype=ir.IntType(8)), read, near, data])

    return types.void(types.int64, types.int64), codegen


@intrinsic
def clear(typing_context, address, rows):
    """Rows of a panel become 0."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, types.float32)
        pointer, zero = _pointer(emitter, arguments[0]), emitter.constant(0.0, LANES)
        with emitter.loop(emitter.size(0), arguments[1], 1) as row:
            _put(emitter, pointer, row, [zero, zero])

    return types.void(types.int64, types.int64), codegen


@intrinsic
def not_finite(typing_context, x, stride, count, width):
    """Not 0 where a number of ``count`` rows of ``width`` numbers, ``stride`` bytes apart, is infinite or none."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        first, stride, count, width = arguments
        sums = {lanes: emitter.variable(emitter.constant(0.0, lanes)) for lanes in (4 * LANES, LANES, 1)}
        with emitter.loop(emitter.size(0), count, 1) as row:
            pointer = _pointer(emitter, b.add(first, b.mul(row, stride)))

            def body(place: Any, lanes: int, pointer: Any = pointer) -> None:
                entry = emitter.load(emitter.at(pointer, place), lanes)
                total = emitter.call("fma", entry, emitter.constant(0.0, lanes), b.load(sums[lanes]))
                b.store(total, sums[lanes])

            emitter.blocks(width, (4 * LANES, LANES, 1), body)
        wide, narrow, single = (emitter.reduce(b.load(place), b.fadd) for place in sums.values())
        total = b.fadd(wide, b.fadd(narrow, single))
        return b.zext(b.fcmp_unordered("uno", total, total), ir.IntType(64))

    return types.int64(*(types.int64,) * 4), codegen


@intrinsic
def raise_top(typing_context, scores, count, factor, gap, top, shrink):
    """``top = max(top, factor max_n scores[n])`` lane by lane and ``shrink = 2^(old top - new top)``.

    Returns 0 where all these scores lie more than ``gap`` below the top of their lane, so that they count for nothing;
    nothing has changed then. Scores that are infinite or no numbers count.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        scores, top, shrink = (_pointer(emitter, arguments[k]) for k in (0, 4, 5))
        factor, gap = (emitter.splat(arguments[k], LANES) for k in (2, 3))
        best = [emitter.variable(emitter.constant(float("-inf"), LANES)) for _ in range(2)]
        wrong = [emitter.variable(emitter.constant(0.0, LANES)) for _ in range(2)]  # NaN where a score is not finite
        nothing = emitter.constant(0.0, LANES)
        with emitter.loop(emitter.size(0), arguments[1], 1) as n:
            for place, flag, entry in zip(best, wrong, _vectors(emitter, scores, n, 2), strict=True):
                b.store(emitter.larger(entry, b.load(place)), place)
                b.store(emitter.call("fma", entry, nothing, b.load(flag)), flag)
        zero = emitter.size(0)
        old = _vectors(emitter, top, zero, 2)
        here = [b.fmul(b.load(x), factor) for x in best]
        near = [
            b.fcmp_unordered("uge", b.fadd(x, b.load(flag)), b.fsub(y, gap))
            for x, y, flag in zip(here, old, wrong, strict=True)
        ]
        new = [emitter.larger(x, y) for x, y in zip(here, old, strict=True)]
        _put(emitter, top, zero, new)
        _put(emitter, shrink, zero, [_power(emitter, b.fsub(x, y)) for x, y in zip(old, new, strict=True)])
        bits = b.bitcast(b.or_(*near), ir.IntType(LANES))
        return b.zext(bits, ir.IntType(64))

    kinds = (types.int64, types.int64, types.float32, types.float32, types.int64, types.int64)
    return types.int64(*kinds), codegen


@intrinsic
def weigh(typing_context, scores, count, factor, top, shrink, total):
    """``scores[n] = 2^(factor scores[n] - top)`` lane by lane and ``total = total shrink + sum_n`` of these."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        scores, top, shrink, total = (_pointer(emitter, arguments[k]) for k in (0, 3, 4, 5))
        factor, zero = emitter.splat(arguments[2], LANES), emitter.size(0)
        level = [b.fneg(x) for x in _vectors(emitter, top, zero, 2)]
        sums = [emitter.variable(emitter.constant(0.0, LANES)) for _ in range(2)]
        with emitter.loop(zero, arguments[1], 1) as n:
            entries = _vectors(emitter, scores, n, 2)
            # Rounded as the top was: the best weight is 1 however large its score.
            powers = [_power(emitter, b.fadd(b.fmul(x, factor), y)) for x, y in zip(entries, level, strict=True)]
            _put(emitter, scores, n, powers)
            for place, power in zip(sums, powers, strict=True):
                b.store(b.fadd(b.load(place), power), place)
        before = zip(_vectors(emitter, total, zero, 2), _vectors(emitter, shrink, zero, 2), sums, strict=True)
        _put(emitter, total, zero, [emitter.call("fma", x, y, b.load(s)) for x, y, s in before])

    kinds = (types.int64, types.int64, types.float32, types.int64, types.int64, types.int64)
    return types.void(*kinds), codegen


@intrinsic
def move(typing_context, queries, mixed, inner, total, out):
    """``queries`` become ``mixed / total``; the rows of ``out`` say lane by lane how that was.

    Row 0 has |new - old|^2, row 1 new . (new - old), row 2 |old|^2, row 3 |new|^2.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder
        queries, mixed, total, out = (_pointer(emitter, arguments[k]) for k in (0, 1, 3, 4))
        one, zero = emitter.constant(1.0, LANES), emitter.size(0)
        inverse = [b.fdiv(one, x) for x in _vectors(emitter, total, zero, 2)]
        sums = [[emitter.variable(emitter.constant(0.0, LANES)) for _ in range(2)] for _ in range(4)]
        with emitter.loop(zero, arguments[2], 1) as i:
            old = _vectors(emitter, queries, i, 2)
            new = [b.fmul(x, y) for x, y in zip(_vectors(emitter, mixed, i, 2), inverse, strict=True)]
            _put(emitter, queries, i, new)
            for h in range(2):
                step = b.fsub(new[h], old[h])
                for place, x, y in zip(sums, (step, new[h], old[h], new[h]), (step, step, old[h], new[h]), strict=True):
                    b.store(emitter.call("fma", x, y, b.load(place[h])), place[h])
        for row, places in enumerate(sums):
            _put(emitter, out, emitter.size(row), [b.load(x) for x in places])

    return types.void(*(types.int64,) * 5), codegen
