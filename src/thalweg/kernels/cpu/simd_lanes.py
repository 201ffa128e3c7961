"""Vector code over lanes: row c of a block holds what L batch items have for label c, L a multiple of ``LANES``."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from thalweg.kernels.cpu.emitter import LANES, Emitter, intrinsic

__all__ = ["exp_lanes", "from_lanes", "larger_lanes", "mix_lanes", "multiply_lanes", "outer_lanes", "to_lanes"]


def _transpose(emitter: Emitter, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight, rows for columns: pairs, then pairs of pairs, then halves change places."""
    mask = ir.VectorType(ir.IntType(32), LANES)
    for step in (1, 2, 4):
        low = [k if k & step == 0 else k - step + LANES for k in range(LANES)]
        high = [k + step for k in low]
        swapped = list(rows)
        for k in range(LANES):
            if k & step == 0:
                for place, lanes in ((k, low), (k + step, high)):
                    constant = ir.Constant(mask, lanes)
                    swapped[place] = emitter.builder.shuffle_vector(rows[k], rows[k + step], constant)
        rows = swapped
    return rows


def _pointers(emitter: Emitter, kinds: Any, arguments: Any, which: tuple[int, ...]) -> list[Any]:
    return [emitter.data(kinds[k], arguments[k]) for k in which]


@intrinsic
def to_lanes(typing_context, source, b, t, c, block, lane):
    """``block[c + k, lane + r] = source[b + r, t, c + k]`` for the eight k and the eight r."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        _, b, t, c, _, lane = arguments
        steps, size = (builder.extract_value(array.shape, axis) for axis in (1, 2))
        out = emitter.data(signature.args[4], arguments[4])
        width = emitter.width_of(signature.args[4], arguments[4])
        item = builder.mul(steps, size)
        begin = builder.add(builder.add(builder.mul(b, item), builder.mul(t, size)), c)
        rows = [
            emitter.load(emitter.at(array.data, builder.add(begin, builder.mul(item, emitter.size(r)))), LANES)
            for r in range(LANES)
        ]
        for k, column in enumerate(_transpose(emitter, rows)):
            row = builder.mul(builder.add(c, emitter.size(k)), width)
            emitter.store(column, emitter.at(out, builder.add(row, lane)))

    return types.void(source, b, t, c, block, lane), codegen


@intrinsic
def from_lanes(typing_context, block, lane, c, out, b, t):
    """``out[b + r, t, c + k] = block[c + k, lane + r]`` for the eight k and the eight r."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        array = context.make_array(signature.args[3])(context, builder, arguments[3])
        _, lane, c, _, b, t = arguments
        steps, size = (builder.extract_value(array.shape, axis) for axis in (1, 2))
        source = emitter.data(signature.args[0], arguments[0])
        width = emitter.width_of(signature.args[0], arguments[0])
        columns = []
        for k in range(LANES):
            row = builder.mul(builder.add(c, emitter.size(k)), width)
            columns.append(emitter.load(emitter.at(source, builder.add(row, lane)), LANES))
        item = builder.mul(steps, size)
        begin = builder.add(builder.add(builder.mul(b, item), builder.mul(t, size)), c)
        for r, row in enumerate(_transpose(emitter, columns)):
            emitter.store(row, emitter.at(array.data, builder.add(begin, builder.mul(item, emitter.size(r)))))

    return types.void(block, lane, c, out, b, t), codegen


@intrinsic
def larger_lanes(typing_context, row, most):
    """``most = max(most, row)``; NaN is never larger."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        x, y = _pointers(emitter, signature.args, arguments, (0, 1))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[1], arguments[1]), LANES) as place:
            target = emitter.at(y, place)
            emitter.store(
                emitter.larger(emitter.load(emitter.at(x, place), LANES), emitter.load(target, LANES)), target
            )

    return types.void(row, most), codegen


@intrinsic
def exp_lanes(typing_context, row, shift, out):
    """``out = exp(row - shift)`` where row <= shift; 0 for NaN."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        x, y, out = _pointers(emitter, signature.args, arguments, (0, 1, 2))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[2], arguments[2]), LANES) as place:
            entries = emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES)
            emitter.store(emitter.exp(builder.fsub(*entries)), emitter.at(out, place))

    return types.void(row, shift, out), codegen


@intrinsic
def multiply_lanes(typing_context, first, second, third, out, total):
    """``out = first * second * third`` and ``total += out``."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y, z, out, total = _pointers(emitter, signature.args, arguments, (0, 1, 2, 3, 4))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[3], arguments[3]), LANES) as place:
            product = b.fmul(emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES))
            product = b.fmul(product, emitter.load(emitter.at(z, place), LANES))
            emitter.store(product, emitter.at(out, place))
            target = emitter.at(total, place)
            emitter.store(b.fadd(emitter.load(target, LANES), product), target)

    return types.void(first, second, third, out, total), codegen


@intrinsic
def mix_lanes(typing_context, matrix, block, count, out):
    """``out[j] = sum_i matrix[j, i] * block[i]`` for i, j < count; two rows at a time share what they load."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        m, x, out = _pointers(emitter, signature.args, arguments, (0, 1, 3))
        stride = emitter.width_of(signature.args[0], arguments[0])
        width, count = emitter.width_of(signature.args[1], arguments[1]), arguments[2]
        whole = b.and_(count, emitter.size(-2))

        def rows(first: Any, high: int, place: Any, wide: int) -> None:
            sums = [emitter.variable(emitter.constant(0.0, wide)) for _ in range(high)]
            with emitter.loop(emitter.size(0), count, 1) as i:
                entry = emitter.load(emitter.at(x, b.add(b.mul(i, width), place)), wide)
                for k, total in enumerate(sums):
                    at = b.add(b.mul(b.add(first, emitter.size(k)), stride), i)
                    weight = emitter.splat(emitter.scalar(m, at), wide)
                    b.store(emitter.call("fma", weight, entry, b.load(total)), total)
            for k, total in enumerate(sums):
                target = b.add(b.mul(b.add(first, emitter.size(k)), width), place)
                emitter.store(b.load(total), emitter.at(out, target))

        def body(place: Any, wide: int) -> None:
            with emitter.loop(emitter.size(0), whole, 2) as j:
                rows(j, 2, place, wide)
            with emitter.loop(whole, count, 1) as j:
                rows(j, 1, place, wide)

        emitter.blocks(width, (4 * LANES, 2 * LANES) if emitter.single else (2 * LANES,), body)

    return types.void(matrix, block, count, out), codegen


@intrinsic
def outer_lanes(typing_context, left, right, count, into):
    """``into[i, j, l] += sum of left[i] * right[j]`` over the lanes l, l + 8, ..; ``into`` is (C, C, LANES)."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y, into = _pointers(emitter, signature.args, arguments, (0, 1, 3))
        width, count = emitter.width_of(signature.args[0], arguments[0]), arguments[2]
        pieces = 2  # of LANES each: the rows of the left side stay in registers while those of the right go by

        def rows(first: Any, high: int, place: Any) -> None:
            def piece(pointer: Any, row: Any, k: int) -> Any:
                at = b.add(b.add(b.mul(row, width), place), emitter.size(k * LANES))
                return emitter.load(emitter.at(pointer, at), LANES)

            ours = [b.add(first, emitter.size(k)) for k in range(high)]
            held = [[piece(x, row, k) for k in range(pieces)] for row in ours]
            with emitter.loop(emitter.size(0), count, 1) as j:
                passing = [piece(y, j, k) for k in range(pieces)]
                for row, own in zip(ours, held, strict=True):
                    target = emitter.at(into, b.mul(b.add(b.mul(row, count), j), emitter.size(LANES)))
                    total = emitter.load(target, LANES)
                    for one, other in zip(own, passing, strict=True):
                        total = emitter.call("fma", one, other, total)
                    emitter.store(total, target)

        whole = b.and_(count, emitter.size(-4))
        with emitter.loop(emitter.size(0), width, pieces * LANES) as place:
            with emitter.loop(emitter.size(0), whole, 4) as i:
                rows(i, 4, place)
            with emitter.loop(whole, count, 1) as i:
                rows(i, 1, place)

    return types.void(left, right, count, into), codegen
