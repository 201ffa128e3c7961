"""Steps of four chains at a time as vectors: every entry of the matrix that is loaded serves all of them.

A product of one row with a matrix loads an entry for each multiply-add; of four rows, one for four of them, and the
sums of one chain fill the time in which those of another wait. Rows are padded as in :mod:`~thalweg.kernels.cpu.simd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic, types

__all__ = ["ITEMS", "add_wide", "back_row", "count_up", "least_row", "mix_items", "step_items", "write_row"]

ITEMS = 4  # chains that go side by side


def _products(emitter: Emitter, rows: Any, matrix: Any, count: Any, width: Any, use: Callable[..., None]) -> None:
    """``use(place, sums)`` of every block of columns: for each item its ``sum_{k < count} rows[item, k] matrix[k]``."""
    b = emitter.builder
    widest = 64 // emitter.bytes  # two registers of 32 bytes for each item

    def body(place: Any, block: int) -> None:
        sums = [emitter.variable(emitter.constant(0.0, block)) for _ in range(ITEMS)]
        begins = [b.mul(width, emitter.size(item)) for item in range(ITEMS)]
        with emitter.loop(emitter.size(0), count, 1) as k:
            entry = emitter.load(emitter.at(matrix, b.add(b.mul(k, width), place)), block)
            for begin, total in zip(begins, sums, strict=True):
                weight = emitter.splat(emitter.scalar(rows, b.add(begin, k)), block)
                b.store(emitter.call("fma", weight, entry, b.load(total)), total)
        use(place, block, [(b.add(begin, place), b.load(total)) for begin, total in zip(begins, sums, strict=True)])

    emitter.blocks(width, (widest, LANES) if widest > LANES else (LANES,), body)


class _Sums:
    """What is added up over the columns of each item, in registers of LANES entries."""

    def __init__(self, emitter: Emitter):
        self.emitter = emitter
        self.places = [emitter.variable(emitter.constant(0.0, LANES)) for _ in range(ITEMS)]

    def add(self, item: int, value: Any) -> None:
        b = self.emitter.builder
        number = ir.IntType(32)
        for first in range(0, value.type.count, LANES):
            mask = ir.Constant(ir.VectorType(number, LANES), list(range(first, first + LANES)))
            part = b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)
            b.store(b.fadd(b.load(self.places[item]), part), self.places[item])

    def store(self, out: Any) -> None:
        e, b = self.emitter, self.emitter.builder
        for item, place in enumerate(self.places):
            b.store(e.reduce(b.load(place), b.fadd), e.at(out, e.size(item)))


@intrinsic
def step_items(typing_context, before, matrix, count, powers, factors, after, sums):
    """``after[n] = (before[n] @ matrix) * powers[n] * factors[n]`` for four rows n, and ``sums[n]`` of its entries."""

    def codegen(context, builder, signature, arguments):
        emitter, b, kinds = Emitter(context, builder, signature.args[0].dtype), builder, signature.args
        rows, table, weights, scales, out, totals = (emitter.data(kinds[k], arguments[k]) for k in (0, 1, 3, 4, 5, 6))
        width, found = emitter.width_of(kinds[1], arguments[1]), _Sums(emitter)
        factors = [emitter.scalar(scales, emitter.size(item)) for item in range(ITEMS)]

        def use(place: Any, block: int, values: list[Any]) -> None:
            for item, (at, value) in enumerate(values):
                weight = b.fmul(emitter.load(emitter.at(weights, at), block), emitter.splat(factors[item], block))
                product = b.fmul(value, weight)
                emitter.store(product, emitter.at(out, at))
                found.add(item, product)

        _products(emitter, rows, table, arguments[2], width, use)
        found.store(totals)

    return types.void(before, matrix, count, powers, factors, after, sums), codegen


@intrinsic
def mix_items(typing_context, before, matrix, count, others, after, sums):
    """``after[n] = before[n] @ matrix`` for four rows n, and ``sums[n]``, the product of that row and ``others[n]``."""

    def codegen(context, builder, signature, arguments):
        emitter, b, kinds = Emitter(context, builder, signature.args[0].dtype), builder, signature.args
        rows, table, beside, out, totals = (emitter.data(kinds[k], arguments[k]) for k in (0, 1, 3, 4, 5))
        width, found = emitter.width_of(kinds[1], arguments[1]), _Sums(emitter)

        def use(place: Any, block: int, values: list[Any]) -> None:
            for item, (at, value) in enumerate(values):
                emitter.store(value, emitter.at(out, at))
                found.add(item, b.fmul(value, emitter.load(emitter.at(beside, at), block)))

        _products(emitter, rows, table, arguments[2], width, use)
        found.store(totals)

    return types.void(before, matrix, count, others, after, sums), codegen


@intrinsic
def back_row(typing_context, alpha, beta, inverse, share, count, row, weights, right):
    """One item's step back, where ``row`` (unpadded) holds its powers and then its posteriors.

    ``right = weights * share``, ``weights = row * beta * inverse``, ``row = alpha * beta * share``, all from what
    was there before.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b, kinds = Emitter(context, builder, signature.args[0].dtype), builder, signature.args
        x, y, own, ahead, out = (emitter.data(kinds[k], arguments[k]) for k in (0, 1, 5, 6, 7))
        inverse, share = (emitter.splat(arguments[k], LANES) for k in (2, 3))
        count, zero = arguments[4], emitter.constant(0.0, LANES)
        whole = b.and_(count, emitter.size(-LANES))

        def step(place: Any, powers: Any) -> Any:
            ours, theirs = emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES)
            before = emitter.at(ahead, place)
            emitter.store(b.fmul(emitter.load(before, LANES), share), emitter.at(out, place))
            emitter.store(b.fmul(b.fmul(powers, theirs), inverse), before)
            return b.fmul(b.fmul(ours, theirs), share)

        with emitter.loop(emitter.size(0), whole, LANES) as place:
            target = emitter.at(own, place)
            emitter.store(step(place, emitter.load(target, LANES)), target)
        with emitter.loop(whole, count, LANES) as place:  # once, or not at all
            powers = emitter.load_masked(emitter.at(own, place), emitter.mask(place, count), zero)
            _store_some(emitter, step(place, powers), own, place, count)

    return types.void(alpha, beta, alpha.dtype, alpha.dtype, count, row, weights, right), codegen


def _store_some(emitter: Emitter, value: Any, out: Any, place: Any, count: Any) -> None:
    """The lanes of a vector that lie before ``count``, one by one: masked stores are slow on many processors."""
    b = emitter.builder
    with emitter.loop(place, count, 1) as entry:
        lane = b.trunc(b.sub(entry, place), ir.IntType(32))
        b.store(b.extract_element(value, lane), emitter.at(out, entry))


@intrinsic
def write_row(typing_context, row, count, out):
    """``out[c] = row[c]`` for c < count, into an unpadded row."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 2))
        whole = b.and_(arguments[1], emitter.size(-LANES))
        with emitter.loop(emitter.size(0), whole, LANES) as place:
            emitter.store(emitter.load(emitter.at(x, place), LANES), emitter.at(out, place))
        with emitter.loop(whole, arguments[1], 1) as place:
            b.store(emitter.scalar(x, place), emitter.at(out, place))

    return types.void(row, count, out), codegen


@intrinsic
def add_wide(typing_context, rows, into):
    """``into += rows`` in float64 over padded rows of one shape; ``rows`` becomes 0."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        wide = Emitter(context, builder, types.float64)
        x, out = (emitter.data(signature.args[k], arguments[k]) for k in range(2))
        shape = context.make_array(signature.args[0])(context, builder, arguments[0]).shape
        count = b.mul(b.extract_value(shape, 0), b.extract_value(shape, 1))
        with emitter.loop(emitter.size(0), count, LANES) as place:
            source, target = emitter.at(x, place), wide.at(out, place)
            value = emitter.load(source, LANES)
            value = b.fpext(value, wide.vector(LANES)) if emitter.single else value
            wide.store(b.fadd(wide.load(target, LANES), value), target)
            emitter.store(emitter.constant(0.0, LANES), source)

    return types.void(rows, into), codegen


@intrinsic
def least_row(typing_context, row, count):
    """The smallest of the first ``count`` entries of a row; inf for none."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        least = emitter.variable(emitter.constant(float("inf"), LANES))

        def smaller(x: Any, y: Any) -> Any:
            return b.select(b.fcmp_ordered("<", x, y), x, y)

        def take(place: Any, entries: Any) -> None:
            b.store(smaller(entries, b.load(least)), least)

        pointer = emitter.data(signature.args[0], arguments[0])
        emitter.entries(pointer, arguments[1], emitter.constant(float("inf"), LANES), take)
        return emitter.reduce(b.load(least), smaller)

    return row.dtype(row, count), codegen


@intrinsic
def count_up(typing_context, counters, place):
    """Add 1 to a whole number, at once for all threads; what it was before."""

    def codegen(context, builder, signature, arguments):
        numbers = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        target = builder.gep(numbers, [arguments[1]], source_etype=INDEX)
        return builder.atomic_rmw("add", target, ir.Constant(INDEX, 1), "seq_cst")

    return types.int64(counters, place), codegen
