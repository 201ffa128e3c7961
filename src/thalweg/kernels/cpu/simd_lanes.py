"""Vector code over lanes: row c of a block holds what the ``WIDTH`` items of a group have for label c.

Here, unlike in :mod:`~thalweg.kernels.cpu.simd`, the loops around the vectors are emitted too: as Numba code they would
take seconds to compile. :class:`Number` makes that readable. Blocks are named by their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, Kind, declared, types

__all__ = ["WIDTH", "Lanes", "Number"]

WIDTH = 2 * LANES  # items of a group: two registers of float32, enough for four rows of sums at a time


class Number:
    """A value of the code to be, with the operators that it will be computed by; whole numbers are signed.

    Comparisons give what :meth:`Lanes.when` takes.
    """

    def __init__(self, builder: Any, value: Any):
        self.builder, self.value = builder, value
        self.whole = isinstance(value.type, ir.IntType)

    def _apply(self, on_whole: str, on_float: str, other: Any, *, flip: bool = False) -> Number:
        other = other.value if isinstance(other, Number) else ir.Constant(self.value.type, other)
        pair = (other, self.value) if flip else (self.value, other)
        return Number(self.builder, getattr(self.builder, on_whole if self.whole else on_float)(*pair))

    def _compare(self, how: str, other: Any) -> Number:
        other = other.value if isinstance(other, Number) else ir.Constant(self.value.type, other)
        compare = self.builder.icmp_signed if self.whole else self.builder.fcmp_ordered
        return Number(self.builder, compare(how, self.value, other))

    def __add__(self, other: Any) -> Number:
        return self._apply("add", "fadd", other)

    def __sub__(self, other: Any) -> Number:
        return self._apply("sub", "fsub", other)

    def __rsub__(self, other: Any) -> Number:
        return self._apply("sub", "fsub", other, flip=True)

    def __mul__(self, other: Any) -> Number:
        return self._apply("mul", "fmul", other)

    def __truediv__(self, other: Any) -> Number:
        return self._apply("sdiv", "fdiv", other)

    def __mod__(self, other: Any) -> Number:
        return self._apply("srem", "frem", other)

    __radd__, __rmul__ = __add__, __mul__

    def __and__(self, other: Number) -> Number:
        return self._apply("and_", "and_", other)

    def __or__(self, other: Number) -> Number:
        return self._apply("or_", "or_", other)

    def __lt__(self, other: Any) -> Number:
        return self._compare("<", other)

    def __gt__(self, other: Any) -> Number:
        return self._compare(">", other)

    def __le__(self, other: Any) -> Number:
        return self._compare("<=", other)

    def __ge__(self, other: Any) -> Number:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Number:
        """Whether both are the same number."""
        return self._compare("==", other)

    def choose(self, yes: Any, no: Number) -> Number:
        """``yes`` where this condition holds, else ``no``."""
        yes = yes.value if isinstance(yes, Number) else ir.Constant(no.value.type, yes)
        return Number(self.builder, self.builder.select(self.value, yes, no.value))

    def at_most(self, other: Any) -> Number:
        """The smaller of the two."""
        return (self < other).choose(self, other if isinstance(other, Number) else self * 0 + other)


class Cell:
    """A number that changes: ``cell.now`` is read and assigned."""

    def __init__(self, builder: Any, place: Any):
        self.builder, self.place = builder, place

    @property
    def now(self) -> Number:
        """What it holds."""
        return Number(self.builder, self.builder.load(self.place))

    @now.setter
    def now(self, value: Number) -> None:
        self.builder.store(value.value, self.place)


class Lanes(Emitter):
    """Loops over addresses, and rows of ``WIDTH`` entries, for one type of float."""

    def __init__(self, context: Any, builder: Any, element: Kind):
        super().__init__(context, builder, element)
        self.double = self if not self.single else Lanes(context, builder, types.float64)

    def number(self, value: Any) -> Number:
        """A whole number, or the value of an instruction."""
        return Number(self.builder, self.size(value) if isinstance(value, int) else value)

    def real(self, value: float) -> Number:
        """A constant of this type of float."""
        return Number(self.builder, ir.Constant(self.element, value))

    def cell(self, value: Number) -> Cell:
        """A number that may change, and begins as this one."""
        return Cell(self.builder, self.variable(value.value))

    def each(self, start: Number | int, stop: Number | int, step: int = 1) -> Any:
        """A loop over start, start + step, .. below stop; gives the index."""
        return self._numbers(self.number(start) if isinstance(start, int) else start, stop, step)

    @contextmanager
    def _numbers(self, start: Number, stop: Number | int, step: int) -> Iterator[Number]:
        stop = self.number(stop) if isinstance(stop, int) else stop
        with self.loop(start.value, stop.value, step) as index:
            yield self.number(index)

    @contextmanager
    def when(self, condition: Number) -> Iterator[None]:
        """Code that runs only where the condition holds."""
        with self.builder.if_then(condition.value):
            yield

    def pointer(self, address: Number) -> Any:
        """An address as a pointer to entries."""
        return self.builder.inttoptr(address.value, self.element.as_pointer())

    def get(self, address: Number, index: Number | int) -> Number:
        """An entry of the numbers at an address."""
        index = self.number(index) if isinstance(index, int) else index
        return self.number(self.scalar(self.pointer(address), index.value))

    def put(self, address: Number, index: Number | int, value: Number) -> None:
        """An entry becomes a number of this type of float, or of float64."""
        index = self.number(index) if isinstance(index, int) else index
        self.builder.store(self.narrow(value).value, self.at(self.pointer(address), index.value))

    def narrow(self, value: Number) -> Number:
        """A float64 as this type of float."""
        if value.value.type == self.element:
            return value
        return self.number(self.builder.fptrunc(value.value, self.element))

    def widen(self, value: Number) -> Number:
        """The number in float64."""
        if value.whole:
            return self.number(self.builder.sitofp(value.value, ir.DoubleType()))
        return self.number(self.builder.fpext(value.value, ir.DoubleType())) if self.single else value

    def of_whole(self, value: Number) -> Number:
        """A whole number as this type of float."""
        return self.number(self.builder.sitofp(value.value, self.element))

    def whole(self, address: Number, index: Number | int) -> Number:
        """An entry of the int64 at an address."""
        return self.number(self.builder.load(self._whole_place(address, index), typ=INDEX))

    def put_whole(self, address: Number, index: Number | int, value: Number) -> None:
        """An int64 entry becomes a whole number."""
        self.builder.store(value.value, self._whole_place(address, index))

    def _whole_place(self, address: Number, index: Number | int) -> Any:
        index = self.number(index) if isinstance(index, int) else index
        table = self.builder.inttoptr(address.value, INDEX.as_pointer())
        return self.builder.gep(table, [index.value], source_etype=INDEX)

    def take(self, address: Number) -> Number:
        """Add 1 to the int64 at an address, at once for all threads; what it was before."""
        place = self._whole_place(address, 0)
        return self.number(self.builder.atomic_rmw("add", place, ir.Constant(INDEX, 1), "seq_cst"))

    def log(self, value: Number) -> Number:
        """The logarithm of a float64."""
        kind = ir.DoubleType()
        function = declared(self.builder.module, ir.FunctionType(kind, [kind]), "llvm.log.f64")
        return self.number(self.builder.call(function, [value.value]))

    def row(self, block: Any, c: Any, lane: int = 0) -> Any:
        """Where row c of a block begins, or what it has from a lane on."""
        return self.at(block, self.builder.add(self.builder.mul(c, self.size(WIDTH)), self.size(lane)))

    def load_row(self, block: Any, c: Any) -> Any:
        """Row c of a block."""
        return self.load(self.row(block, c), WIDTH)

    def store_row(self, value: Any, block: Any, c: Any) -> None:
        """Row c of a block becomes ``value``."""
        self.store(value, self.row(block, c))

    def inverse(self, value: Any, where: Any) -> Any:
        """1 / value where it is above 0 and ``where`` holds, else 0."""
        b, zero = self.builder, self.constant(0.0, WIDTH)
        where = b.and_(where, b.fcmp_ordered(">", value, zero))
        return b.select(where, b.fdiv(self.constant(1.0, WIDTH), value), zero)

    def exp_span(self, source: Number, count: Number, shift: Number, out: Number) -> None:
        """``out[k] = exp(source[k] - shift)`` for k < count, and anything in the seven entries beyond."""
        origin, target, top = self.pointer(source), self.pointer(out), self.splat(shift.value, LANES)
        with self.loop(self.size(0), count.value, LANES) as k:
            entries = self.load_masked(self.at(origin, k), self.mask(k, count.value), top)
            self.store(self.exp(self.builder.fsub(entries, top)), self.at(target, k))

    def fill(self, address: Number, count: Number) -> None:
        """``count`` zeros, in whole eights, so up to seven more."""
        target = self.pointer(address)
        with self.loop(self.size(0), count.value, LANES) as k:
            self.store(self.constant(0.0, LANES), self.at(target, k))

    def add_to_double(self, source: Number, count: Number, into: Number) -> None:
        """``into += source`` in float64 for ``count`` numbers, a multiple of eight; the source becomes 0."""
        b, origin, target = self.builder, self.pointer(source), self.double.pointer(into)
        with self.loop(self.size(0), count.value, LANES) as k:
            value = self.load(self.at(origin, k), LANES)
            self.store(self.constant(0.0, LANES), self.at(origin, k))
            value = b.fpext(value, self.double.vector(LANES)) if self.single else value
            place = self.double.at(target, k)
            self.double.store(b.fadd(self.double.load(place, LANES), value), place)

    def _transpose(self, rows: list[Any]) -> list[Any]:
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
                        swapped[place] = self.builder.shuffle_vector(rows[k], rows[k + step], constant)
            rows = swapped
        return rows

    def _items(self, places: Number, offset: Number, half: int) -> list[Any]:
        """Pointers to what eight items of the group have ``offset`` entries from their beginnings on."""
        begins = (self.whole(places, half * LANES + r) for r in range(LANES))
        return [self.at(self.pointer(begin), offset.value) for begin in begins]

    def _eights(self, count: Number) -> Any:
        """A loop over eights that cover 0..count, eight or more; the last may overlap the one before."""
        last = self.builder.sub(count.value, self.size(LANES))
        return self._clamped(count.value, last)

    @contextmanager
    def _clamped(self, count: Any, last: Any) -> Iterator[Any]:
        with self.loop(self.size(0), count, LANES) as k:
            yield self.builder.select(self.builder.icmp_signed("<", k, last), k, last)

    def to_lanes(self, places: Number, offset: Number, count: Number, block: Number) -> None:
        """``block[k, l]`` becomes entry ``offset + k`` of the item at ``places[l]``, for k < count."""
        target = self.pointer(block)
        with self.when(count >= LANES):
            for half in range(WIDTH // LANES):
                items = self._items(places, offset, half)
                with self._eights(count) as k:
                    rows = [self.load(self.at(item, k), LANES) for item in items]
                    for r, column in enumerate(self._transpose(rows)):
                        self.store(column, self.row(target, self.builder.add(k, self.size(r)), half * LANES))
        with self.when(count < LANES), self.each(0, WIDTH) as lane, self.each(0, count) as k:
            self.put(block, k * WIDTH + lane, self.get(self.whole(places, lane), offset + k))

    def from_lanes(self, block: Number, count: Number, places: Number, offset: Number) -> None:
        """The opposite of :meth:`to_lanes`."""
        b, origin = self.builder, self.pointer(block)
        with self.when(count >= LANES):
            for half in range(WIDTH // LANES):
                items = self._items(places, offset, half)
                with self._eights(count) as k:
                    places_of = (self.row(origin, b.add(k, self.size(r)), half * LANES) for r in range(LANES))
                    columns = [self.load(place, LANES) for place in places_of]
                    for item, row in zip(items, self._transpose(columns), strict=True):
                        self.store(row, self.at(item, k))
        with self.when(count < LANES), self.each(0, WIDTH) as lane, self.each(0, count) as k:
            self.put(self.whole(places, lane), offset + k, self.get(block, k * WIDTH + lane))

    def mix(
        self, matrix: Any, block: Any, inner: Any, initial: Any, count: Any, use: Callable[[Any, Any], None]
    ) -> None:
        """``use(j, initial + sum_{i < inner} matrix[j, i] * block[i])`` for j < count, several rows at a time."""
        b = self.builder

        def rows(first: Any, high: int) -> None:
            sums = [self.variable(self.splat(initial, WIDTH)) for _ in range(high)]
            places = [b.mul(b.add(first, self.size(k)), count) for k in range(high)]
            with self.loop(self.size(0), inner, 1) as i:
                entry = self.load_row(block, i)
                for place, total in zip(places, sums, strict=True):
                    weight = self.splat(self.scalar(matrix, b.add(place, i)), WIDTH)
                    b.store(self.call("fma", weight, entry, b.load(total)), total)
            values = [b.load(total) for total in sums]
            for k, value in enumerate(values):
                use(b.add(first, self.size(k)), value)

        self._by_rows(count, rows)

    def _by_rows(self, count: Any, rows: Callable[[Any, int], None]) -> None:
        """Cover 0..count by as many rows at a time as there are registers for, then by single ones."""
        high = 4 if self.single else 2
        whole = self.builder.and_(count, self.size(-high))
        with self.loop(self.size(0), whole, high) as j:
            rows(j, high)
        with self.loop(whole, count, 1) as j:
            rows(j, 1)

    def add_outer(self, left: Number, factor: Number, right: Number, count: Number, into: Number) -> None:
        """``into[i, j, l] += sum of left[i] * factor * right[j]`` over the lanes l, l + 8, ..; it is (C, C, LANES)."""
        b, size = self.builder, count.value
        x, y, out = (self.pointer(each) for each in (left, right, into))
        pieces = [k * LANES for k in range(WIDTH // LANES)]
        factors = [self.load(self.at(self.pointer(factor), self.size(k)), LANES) for k in pieces]

        def rows(first: Any, high: int) -> None:
            # The rows of the left side stay in registers while those of the right go by.
            ours = [b.add(first, self.size(k)) for k in range(high)]
            held = [
                [b.fmul(self.load(self.row(x, row, k), LANES), own) for k, own in zip(pieces, factors, strict=True)]
                for row in ours
            ]
            with self.loop(self.size(0), size, 1) as j:
                passing = [self.load(self.row(y, j, k), LANES) for k in pieces]
                for row, own in zip(ours, held, strict=True):
                    target = self.at(out, b.mul(b.add(b.mul(row, size), j), self.size(LANES)))
                    total = self.load(target, LANES)
                    for one, other in zip(own, passing, strict=True):
                        total = self.call("fma", one, other, total)
                    self.store(total, target)

        self._by_rows(size, rows)
