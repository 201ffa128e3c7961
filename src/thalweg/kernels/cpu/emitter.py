"""Vector code in LLVM, written at the place where a kernel calls it.

Nothing here imports Numba: kernels that are compiled without it (:mod:`~thalweg.kernels.cpu.plain`) start in a fraction
of the time. Numba's take the same intrinsics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, update_wrapper
from typing import Any, NamedTuple

from llvmlite import ir

__all__ = ["INDEX", "LANES", "ArrayKind", "Emitter", "Kind", "Signature", "declared", "intrinsic", "types"]

LANES = 8  # entries that are loaded and stored together
INDEX = ir.IntType(64)  # the type of indices
_INT = ir.IntType(32)


class Signature(NamedTuple):
    """What a function gives and takes, as intrinsics say it."""

    return_type: Any
    args: tuple[Any, ...]


class Kind:
    """A type, as intrinsics are told of it; called with those of arguments it is a function's signature.

    With Numba's types it makes Numba's signature: intrinsics need not know who compiles them.

    >>> types.void(types.int64).args[0].name
    'int64'
    """

    def __init__(self, name: str, bitwidth: int = 0):
        self.name, self.bitwidth = name, bitwidth

    def __call__(self, *kinds: Any) -> Any:
        """The signature of a function that gives this and takes those."""
        if all(isinstance(kind, Kind) for kind in kinds):
            return Signature(self, kinds)
        from numba import types as of_numba

        return getattr(of_numba, self.name)(*kinds)


class ArrayKind(Kind):
    """The type of a C-contiguous array."""

    def __init__(self, dtype: Kind, ndim: int):
        super().__init__(f"array of {dtype.name}")
        self.dtype, self.ndim = dtype, ndim


class types:  # noqa: N801 - it stands where Numba's module of that name may
    """The types that there are."""

    void, float32, float64 = Kind("void"), Kind("float32", 32), Kind("float64", 64)
    int64, int32, int16, int8 = (Kind(f"int{bits}", bits) for bits in (64, 32, 16, 8))
    pair = Kind("pair")


class intrinsic:  # noqa: N801 - a decorator
    """A function whose code is written where it is called; its first parameter is for Numba and not given.

    ``definition(None, *kinds)`` gives the signature and ``codegen(context, builder, signature, arguments)``.
    """

    def __init__(self, definition: Callable[..., Any]):
        self._defn = definition
        update_wrapper(self, definition)

    def __call__(self, *arguments: Any) -> Any:
        """It cannot be called from Python."""
        raise NotImplementedError(f"{self._defn.__name__} is no Python function; call it in a kernel")

    @cached_property
    def _numba_type_(self) -> Any:  # what Numba asks of a value that it does not know
        from numba.core.types import Function
        from numba.core.typing.templates import make_intrinsic_template
        from numba.extending import intrinsic as of_numba

        own: Any = of_numba
        return Function(make_intrinsic_template(own(self._defn), self._defn, self._defn.__name__, kwargs={}))


def declared(module: Any, kind: ir.FunctionType, name: str) -> Any:
    """A function of another module under its name, such as an LLVM intrinsic."""
    return module.globals.get(name) or ir.Function(module, kind, name)


class Emitter:
    """Vector code for one element type at the builder's place."""

    def __init__(self, context: Any, builder: Any, element: Any):
        self.context, self.builder = context, builder
        self.single = element.bitwidth == 32
        self.element = ir.FloatType() if self.single else ir.DoubleType()
        self.bytes = 4 if self.single else 8

    def vector(self, width: int) -> ir.VectorType:
        """A vector type of the element."""
        return ir.VectorType(self.element, width)

    def constant(self, value: float, width: int) -> ir.Constant:
        """The same number in every lane."""
        return ir.Constant(self.vector(width), [value] * width)

    def splat(self, value: Any, width: int) -> Any:
        """One value in every lane."""
        kind = ir.VectorType(value.type, width)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
        mask = ir.Constant(ir.VectorType(_INT, width), [0] * width)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask)

    def size(self, value: int) -> ir.Constant:
        """An index constant."""
        return ir.Constant(INDEX, value)

    def data(self, kind: Any, value: Any) -> Any:
        """Where an array's entries begin."""
        return self.context.make_array(kind)(self.context, self.builder, value).data

    def width_of(self, kind: Any, value: Any) -> Any:
        """The last axis of an array."""
        array = self.context.make_array(kind)(self.context, self.builder, value)
        return self.builder.extract_value(array.shape, kind.ndim - 1)

    def load(self, pointer: Any, width: int) -> Any:
        """``width`` entries from a pointer on."""
        place = self.builder.bitcast(pointer, self.vector(width).as_pointer())
        return self.builder.load(place, align=self.bytes, typ=self.vector(width))

    def store(self, value: Any, pointer: Any) -> None:
        """The lanes of a vector, from a pointer on."""
        place = self.builder.bitcast(pointer, value.type.as_pointer())
        self.builder.store(value, place, align=self.bytes)

    def at(self, pointer: Any, index: Any) -> Any:
        """The pointer to an entry."""
        return self.builder.gep(pointer, [index], source_etype=self.element)

    def scalar(self, pointer: Any, index: Any) -> Any:
        """One entry."""
        return self.builder.load(self.at(pointer, index), align=self.bytes, typ=self.element)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """A loop over start, start + step, .. below stop; gives the index."""
        b, before = self.builder, self.builder.block
        look, body, end = (b.append_basic_block(name) for name in ("look", "body", "end"))
        b.branch(look)
        b.position_at_end(look)
        index = b.phi(INDEX)
        index.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, end)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, self.size(step)), b.block)
        b.branch(look)
        b.position_at_end(end)

    def variable(self, value: Any) -> Any:
        """A place on the stack, which the optimiser turns into a register."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(value.type)
        self.builder.store(value, place)
        return place

    def blocks(self, stop: Any, widths: tuple[int, ...], body: Callable[[Any, int], None]) -> None:
        """Cover 0..stop (a multiple of the last width) by blocks, widest first."""
        begin: Any = self.size(0)
        for width in widths:
            length = self.builder.sub(stop, begin)
            end = self.builder.add(begin, self.builder.and_(length, self.size(-width)))
            with self.loop(begin, end, width) as place:
                body(place, width)
            begin = end

    def mask(self, place: Any, stop: Any) -> Any:
        """Which of LANES entries from ``place`` on lie before ``stop``."""
        lanes = ir.Constant(ir.VectorType(INDEX, LANES), list(range(LANES)))
        left = self.builder.sub(stop, place)
        return self.builder.icmp_signed("<", lanes, self.splat(left, LANES))

    def load_masked(self, pointer: Any, mask: Any, other: Any) -> Any:
        """LANES entries, with ``other`` where the mask is off; nothing is read there."""
        name = f"llvm.masked.load.v{LANES}f{8 * self.bytes}.p0"
        kind = self.vector(LANES)
        pointers = pointer.type
        function = declared(self.builder.module, ir.FunctionType(kind, [pointers, _INT, mask.type, kind]), name)
        return self.builder.call(function, [pointer, ir.Constant(_INT, self.bytes), mask, other])

    def entries(self, pointer: Any, count: Any, other: Any, use: Callable[[Any, Any], None]) -> None:
        """``use(place, entries)`` of LANES at a time that cover 0..count, with ``other`` beyond; nothing is read there.

        Masks take longer than loads, so only the last ones have one.
        """
        whole = self.builder.and_(count, self.size(-LANES))
        with self.loop(self.size(0), whole, LANES) as place:
            use(place, self.load(self.at(pointer, place), LANES))
        with self.loop(whole, count, LANES) as place:
            use(place, self.load_masked(self.at(pointer, place), self.mask(place, count), other))

    def call(self, name: str, *arguments: Any) -> Any:
        """An LLVM intrinsic over vectors, such as ``fma``."""
        kind = arguments[0].type
        name = f"llvm.{name}.v{kind.count}f{8 * self.bytes}"
        function = declared(self.builder.module, ir.FunctionType(kind, [x.type for x in arguments]), name)
        return self.builder.call(function, arguments)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of each pair; ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes of a vector into one number, halves at a time."""
        width = value.type.count
        while width > 1:
            width //= 2
            low, high = (
                ir.Constant(ir.VectorType(_INT, width), list(range(first, first + width))) for first in (0, width)
            )
            none = ir.Constant(value.type, ir.Undefined)
            value = combine(
                self.builder.shuffle_vector(value, none, low), self.builder.shuffle_vector(value, none, high)
            )
        return self.builder.extract_element(value, ir.Constant(_INT, 0))

    def exp(self, x: Any) -> Any:
        """exp of numbers <= 0 to the last digit or so; what would underflow is 0.

        x = n log 2 + r with |r| <= log(2) / 2; exp(r) by its Taylor series, 2^n by its bit pattern.
        """
        b, width = self.builder, x.type.count
        least = -87.0 if self.single else -708.0
        inside = b.fcmp_ordered(">=", x, self.constant(least, width))
        x = b.select(inside, x, self.constant(least, width))
        n = self.call("rint", b.fmul(x, self.constant(1 / math.log(2), width)))
        high, low = (0.693359375, -2.12194440e-4) if self.single else (0.6931471803691238, 1.9082149292705877e-10)
        r = self.call("fma", n, self.constant(-high, width), x)
        r = self.call("fma", n, self.constant(-low, width), r)
        degree = 7 if self.single else 13
        p = self.constant(1 / math.factorial(degree), width)
        for power in range(degree - 1, -1, -1):
            p = self.call("fma", p, r, self.constant(1 / math.factorial(power), width))
        whole = b.fptosi(n, ir.VectorType(_INT, width))
        bits, bias, shift = (_INT, 127, 23) if self.single else (INDEX, 1023, 52)
        if not self.single:
            whole = b.sext(whole, ir.VectorType(INDEX, width))
        kind = ir.VectorType(bits, width)
        power = b.shl(b.add(whole, ir.Constant(kind, [bias] * width)), ir.Constant(kind, [shift] * width))
        return b.select(inside, b.fmul(p, b.bitcast(power, x.type)), self.constant(0.0, width))
