"""Rows of numbers as explicit vectors: the few inner loops that everything on the CPU is made of.

In Numba loops the compiler must assume that arrays overlap, which costs speed and seconds of compilation; these are
emitted as LLVM vector code instead. Rows are contiguous; a *padded* row has P entries, a multiple of ``LANES``. A block
of several registers keeps enough independent sums in flight to hide the latency of a multiply-add.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic, types

__all__ = [
    "add_outer",
    "add_row",
    "copy_row",
    "dot",
    "exp_row",
    "fill_rows",
    "log_sum_row",
    "max_row",
    "multiply_row",
    "padded",
    "raise_row",
    "scale_row",
    "sweep_max",
    "sweep_sum",
    "top_place",
    "write_product",
]


def padded(size: int) -> int:
    """The length of a padded row that holds ``size`` entries.

    >>> padded(9)
    16
    """
    return max(LANES, -(-size // LANES) * LANES)


def _sweep(emitter: Emitter, arguments: tuple[Any, ...], kinds: tuple[Any, ...], *, largest: bool) -> None:
    """out[j] = sum_i vector[i] matrix[i, j], or max_i vector[i] + matrix[i, j]: sums stay in registers over all i."""
    vector, matrix, rows, out = arguments
    b = emitter.builder
    width = emitter.width_of(kinds[1], matrix)
    rows = b.sext(rows, INDEX) if rows.type.width < 64 else rows
    vector, matrix, out = (
        emitter.data(kind, x) for kind, x in ((kinds[0], vector), (kinds[1], matrix), (kinds[3], out))
    )
    full = 256 // emitter.bytes  # eight registers of 32 bytes
    widths = tuple(w for w in (full, full // 2, full // 4, full // 8) if w >= LANES)

    def body(place: Any, block: int) -> None:
        chains = max(1, full // block)  # narrow blocks take several rows at once, each with its own sum
        start = emitter.constant(float("-inf") if largest else 0.0, block)
        sums = [emitter.variable(start) for _ in range(chains)]

        def take(row: Any, which: int) -> None:
            weight = emitter.splat(emitter.scalar(vector, row), block)
            entry = emitter.load(emitter.at(matrix, b.add(b.mul(row, width), place)), block)
            so_far = b.load(sums[which])
            new = (
                emitter.larger(b.fadd(weight, entry), so_far) if largest else emitter.call("fma", weight, entry, so_far)
            )
            b.store(new, sums[which])

        whole = b.and_(rows, emitter.size(-chains))
        with emitter.loop(emitter.size(0), whole, chains) as row:
            for which in range(chains):
                take(b.add(row, emitter.size(which)), which)
        if chains > 1:
            with emitter.loop(whole, rows, 1) as row:
                take(row, 0)
        values = [b.load(s) for s in sums]
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [emitter.larger(x, y) if largest else b.fadd(x, y) for x, y in pairs]
        emitter.store(values[0], emitter.at(out, place))

    emitter.blocks(width, widths, body)


@intrinsic
def sweep_sum(typing_context, vector, matrix, rows, out):
    """``out[j] = sum_{i < rows} vector[i] * matrix[i, j]`` over padded rows."""

    def codegen(context, builder, signature, arguments):
        _sweep(Emitter(context, builder, signature.args[0].dtype), arguments, signature.args, largest=False)

    return types.void(vector, matrix, rows, out), codegen


@intrinsic
def sweep_max(typing_context, vector, matrix, rows, out):
    """``out[j] = max_{i < rows} vector[i] + matrix[i, j]`` over padded rows."""

    def codegen(context, builder, signature, arguments):
        _sweep(Emitter(context, builder, signature.args[0].dtype), arguments, signature.args, largest=True)

    return types.void(vector, matrix, rows, out), codegen


@intrinsic
def add_outer(typing_context, left, right, count, into):
    """``into[i, j] += sum_{k < count} left[k, i] * right[k, j]`` over padded rows, in tiles that stay in registers."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        kinds = signature.args
        width = emitter.width_of(kinds[3], arguments[3])
        a, w, into = (emitter.data(kinds[k], arguments[k]) for k in (0, 1, 3))
        high = 4  # rows of a tile; its columns are two registers wide

        def body(place: Any, block: int) -> None:
            with emitter.loop(emitter.size(0), width, high) as row:
                targets = [
                    emitter.at(into, b.add(b.mul(b.add(row, emitter.size(k)), width), place)) for k in range(high)
                ]
                sums = [emitter.variable(emitter.load(target, block)) for target in targets]
                with emitter.loop(emitter.size(0), arguments[2], 1) as term:
                    begin = b.mul(term, width)
                    columns = emitter.load(emitter.at(w, b.add(begin, place)), block)
                    for k, total in enumerate(sums):
                        entry = emitter.scalar(a, b.add(begin, b.add(row, emitter.size(k))))
                        b.store(emitter.call("fma", emitter.splat(entry, block), columns, b.load(total)), total)
                for total, target in zip(sums, targets, strict=True):
                    emitter.store(b.load(total), target)

        emitter.blocks(width, (64 // emitter.bytes, LANES) if emitter.single else (LANES,), body)

    return types.void(left, right, count, into), codegen


@intrinsic
def max_row(typing_context, row, count):
    """The largest of the first ``count`` entries of a row; -inf for none."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        pointer, count = emitter.data(signature.args[0], arguments[0]), arguments[1]
        least = emitter.constant(float("-inf"), LANES)
        best = emitter.variable(least)

        def take(place: Any, entries: Any) -> None:
            builder.store(emitter.larger(entries, builder.load(best)), best)

        emitter.entries(pointer, count, least, take)
        return emitter.reduce(builder.load(best), emitter.larger)

    return row.dtype(row, count), codegen


@intrinsic
def exp_row(typing_context, row, count, shift, out):
    """``out[c] = exp(row[c] - shift)`` for c < count and 0 beyond; ``shift`` is finite and no entry exceeds it."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        pointer, count, shift = emitter.data(signature.args[0], arguments[0]), arguments[1], arguments[2]
        out = emitter.data(signature.args[3], arguments[3])
        shift = emitter.splat(shift, LANES)
        least = emitter.constant(float("-inf"), LANES)

        def write(place: Any, entries: Any) -> None:
            emitter.store(emitter.exp(builder.fsub(entries, shift)), emitter.at(out, place))

        emitter.entries(pointer, count, least, write)

    return types.void(row, count, row.dtype, out), codegen


@intrinsic
def log_sum_row(typing_context, first, second, count, out):
    """(m, s) with ``log sum_c exp(first[c] + second[c]) = m + log s`` over c < count; (-inf, 0) if all are -inf.

    ``out[c] = exp(first[c] + second[c] - m)`` is kept in a padded row.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y = (emitter.data(signature.args[k], arguments[k]) for k in range(2))
        count, kept = arguments[2], emitter.data(signature.args[3], arguments[3])
        least = emitter.constant(float("-inf"), LANES)

        def entries(place: Any) -> Any:
            mask = emitter.mask(place, count)
            zero = emitter.constant(0.0, LANES)
            return b.fadd(
                emitter.load_masked(emitter.at(x, place), mask, least),
                emitter.load_masked(emitter.at(y, place), mask, zero),
            )

        best = emitter.variable(least)
        with emitter.loop(emitter.size(0), count, LANES) as place:
            b.store(emitter.larger(entries(place), b.load(best)), best)
        top = emitter.reduce(b.load(best), emitter.larger)
        finite = b.fcmp_ordered(">", top, ir.Constant(emitter.element, float("-inf")))
        shift = emitter.splat(b.select(finite, top, ir.Constant(emitter.element, 0.0)), LANES)
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), count, LANES) as place:
            power = emitter.exp(b.fsub(entries(place), shift))
            emitter.store(power, emitter.at(kept, place))
            b.store(b.fadd(b.load(total), power), total)
        return top, emitter.reduce(b.load(total), b.fadd)

    return types.pair(first, second, count, out), codegen


@intrinsic
def multiply_row(typing_context, first, second, factor, out):
    """``out = first * second * factor`` over padded rows; returns the sum of ``out``."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 1, 3))
        factor = emitter.splat(arguments[2], LANES)
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[3], arguments[3]), LANES) as place:
            product = b.fmul(emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES))
            product = b.fmul(product, factor)
            emitter.store(product, emitter.at(out, place))
            b.store(b.fadd(b.load(total), product), total)
        return emitter.reduce(b.load(total), b.fadd)

    return first.dtype(first, second, first.dtype, out), codegen


@intrinsic
def write_product(typing_context, first, second, factor, count, out):
    """``out[c] = first[c] * second[c] * factor`` for c < count, into an unpadded row."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 1, 4))
        factor, count = arguments[2], arguments[3]
        whole = b.and_(count, emitter.size(-LANES))
        with emitter.loop(emitter.size(0), whole, LANES) as place:
            product = b.fmul(emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES))
            emitter.store(b.fmul(product, emitter.splat(factor, LANES)), emitter.at(out, place))
        # Entry by entry: masked stores are slow on many processors.
        with emitter.loop(whole, count, 1) as place:
            product = b.fmul(b.fmul(emitter.scalar(x, place), emitter.scalar(y, place)), factor)
            b.store(product, emitter.at(out, place))

    return types.void(first, second, first.dtype, count, out), codegen


@intrinsic
def raise_row(typing_context, row, least):
    """``row = max(row, least)`` over a padded row; returns its sum."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        pointer = emitter.data(signature.args[0], arguments[0])
        least = emitter.splat(arguments[1], LANES)
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[0], arguments[0]), LANES) as place:
            target = emitter.at(pointer, place)
            value = emitter.larger(emitter.load(target, LANES), least)
            emitter.store(value, target)
            b.store(b.fadd(b.load(total), value), total)
        return emitter.reduce(b.load(total), b.fadd)

    return row.dtype(row, row.dtype), codegen


@intrinsic
def copy_row(typing_context, row, out):
    """``out = row`` over padded rows."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        x, out = (emitter.data(kind, value) for kind, value in zip(signature.args, arguments, strict=True))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[1], arguments[1]), LANES) as place:
            emitter.store(emitter.load(emitter.at(x, place), LANES), emitter.at(out, place))

    return types.void(row, out), codegen


@intrinsic
def fill_rows(typing_context, rows, value):
    """Every entry of contiguous padded rows becomes ``value``."""

    def codegen(context, builder, signature, arguments):
        emitter = Emitter(context, builder, signature.args[0].dtype)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        stop = emitter.size(1)
        for axis in range(signature.args[0].ndim):
            stop = builder.mul(stop, builder.extract_value(array.shape, axis))
        value = emitter.splat(arguments[1], LANES)
        with emitter.loop(emitter.size(0), stop, LANES) as place:
            emitter.store(value, emitter.at(array.data, place))

    return types.void(rows, rows.dtype), codegen


@intrinsic
def add_row(typing_context, first, second, shift, count, out):
    """``out[c] = first[c] + second[c] + shift`` for c < count and -inf beyond; ``first`` and ``out`` are padded."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 1, 4))
        shift, count = emitter.splat(arguments[2], LANES), arguments[3]
        least = emitter.constant(float("-inf"), LANES)
        with emitter.loop(emitter.size(0), count, LANES) as place:
            entries = emitter.load_masked(emitter.at(y, place), emitter.mask(place, count), least)
            total = b.fadd(b.fadd(emitter.load(emitter.at(x, place), LANES), shift), entries)
            emitter.store(total, emitter.at(out, place))

    return types.void(first, second, first.dtype, count, out), codegen


@intrinsic
def dot(typing_context, first, second):
    """The sum of products of two padded rows."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y = (emitter.data(kind, value) for kind, value in zip(signature.args, arguments, strict=True))
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[0], arguments[0]), LANES) as place:
            pair = emitter.load(emitter.at(x, place), LANES), emitter.load(emitter.at(y, place), LANES)
            b.store(emitter.call("fma", *pair, b.load(total)), total)
        return emitter.reduce(b.load(total), b.fadd)

    return first.dtype(first, second), codegen


@intrinsic
def scale_row(typing_context, row, factor, out):
    """``out = row * factor`` over padded rows; returns the sum of ``out``."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 2))
        factor = emitter.splat(arguments[1], LANES)
        total = emitter.variable(emitter.constant(0.0, LANES))
        with emitter.loop(emitter.size(0), emitter.width_of(signature.args[2], arguments[2]), LANES) as place:
            product = b.fmul(emitter.load(emitter.at(x, place), LANES), factor)
            emitter.store(product, emitter.at(out, place))
            b.store(b.fadd(b.load(total), product), total)
        return emitter.reduce(b.load(total), b.fadd)

    return row.dtype(row, row.dtype, out), codegen


@intrinsic
def top_place(typing_context, first, second, count):
    """The first c < count at which ``first[c] + second[c]`` is largest; nothing is read beyond."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, signature.args[0].dtype), builder
        x, y = (emitter.data(signature.args[k], arguments[k]) for k in range(2))
        count, numbers = arguments[2], ir.VectorType(INDEX, LANES)
        least = emitter.constant(float("-inf"), LANES)
        lanes = ir.Constant(numbers, list(range(LANES)))
        best, place_of = emitter.variable(least), emitter.variable(lanes)
        with emitter.loop(emitter.size(0), count, LANES) as place:
            mask = emitter.mask(place, count)
            pair = (emitter.load_masked(emitter.at(row, place), mask, least) for row in (x, y))
            total, so_far = b.fadd(*pair), b.load(best)
            above = b.fcmp_ordered(">", total, so_far)
            b.store(b.select(above, total, so_far), best)
            b.store(b.select(above, b.add(lanes, emitter.splat(place, LANES)), b.load(place_of)), place_of)
        top = emitter.splat(emitter.reduce(b.load(best), emitter.larger), LANES)
        # Of the lanes that have the largest, the one with the lowest place.
        equal = b.fcmp_ordered("==", b.load(best), top)
        places = b.select(equal, b.load(place_of), ir.Constant(numbers, [2**62] * LANES))
        return emitter.reduce(places, lambda p, q: b.select(b.icmp_signed("<", p, q), p, q))

    return types.int64(first, second, count), codegen
