"""Kernels over arrays of NumPy and PyTorch, compiled in a tenth of Numba's time and without it.

What :mod:`~thalweg.kernels.cpu.plain` understands, and arrays beside it: C-contiguous ones of float32, float64, int64,
int32 and truth values. ``x[i, j]`` is a number, or the array of the axes that are left; ``x[i:j]`` rows of it;
``x.shape[k]``, ``len(x)`` and ``x.dtype.type(number)`` are what they are in NumPy. Nothing is checked: an index is in
range, -1 counts from the end where it stands there as a constant.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import math
import struct
from array import array
from collections.abc import Callable
from functools import cached_property, update_wrapper
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from thalweg.kernels.cpu.emitter import INDEX, ArrayKind, types
from thalweg.kernels.cpu.plain import Context, Frame, compile_emitted
from thalweg.kernels.cpu.threads import Entry, enter

__all__ = ["Kernel", "kernel"]

# By the letter of NumPy: the type in memory, and as intrinsics are told of it.
_ELEMENTS = {
    "f": (ir.FloatType(), types.float32),
    "d": (ir.DoubleType(), types.float64),
    "l": (INDEX, types.int64),
    "q": (INDEX, types.int64),
    "i": (ir.IntType(32), types.int32),
    "?": (ir.IntType(8), types.int8),
}
_LETTERS = {torch.float32: "f", torch.float64: "d", torch.int64: "l", torch.int32: "i", torch.bool: "?"}
_NEXT, _PARTS, _RESULT, _FIRST = range(4)  # words of a table: two for parts, what is returned, where arguments begin
_DOUBLE = ir.DoubleType()


class _Array:
    """An array of the code to be: where it begins, and its shape."""

    type = None  # it is no value of LLVM

    def __init__(self, letter: str, data: Any, shape: list[Any]):
        self.letter, self.data, self.shape = letter, data, shape
        self.element, self.kind = _ELEMENTS[letter]


class _Arrays(Context):
    """What intrinsics ask about arrays."""

    def make_array(self, kind: Any) -> Any:
        def read(context: Any, builder: Any, value: _Array) -> SimpleNamespace:
            shape = ir.Constant(ir.ArrayType(INDEX, len(value.shape)), ir.Undefined)
            for axis, length in enumerate(value.shape):
                shape = builder.insert_value(shape, length, axis)
            return SimpleNamespace(data=value.data, shape=shape)

        return read


class _Code(Frame):
    """A function over arrays."""

    context = _Arrays()

    def assign(self, name: str, value: Any) -> None:
        if not isinstance(value, _Array):
            return super().assign(name, value)
        words = [value.data, *value.shape]
        if name not in self.variables:
            places = [self.place(word.type) for word in words]
            self.variables[name] = _Array(value.letter, places[0], places[1:])
        own = self.variables[name]
        if (own.letter, len(own.shape)) != (value.letter, len(value.shape)):
            raise TypeError(f"`{name}` is an array of another type")
        for word, place in zip(words, (own.data, *own.shape), strict=True):
            self.builder.store(word, place)

    def get_name(self, node: ast.Name) -> Any:
        found = self.variables.get(node.id)
        if not isinstance(found, _Array):
            return super().get_name(node)
        words = [self.builder.load(place, typ=place.allocated_type) for place in (found.data, *found.shape)]
        return _Array(found.letter, words[0], words[1:])

    def kinds(self, definition: Callable[..., Any], arguments: list[Any]) -> list[Any]:
        return [self.kind(x) for x in arguments]

    def kind(self, x: Any) -> Any:
        return ArrayKind(x.kind, len(x.shape)) if isinstance(x, _Array) else super().kind(x)

    def written(
        self, definition: Callable[..., Any], signature: Any, write: Callable[..., Any], given: list[Any]
    ) -> Any:
        """The code of an intrinsic stands once for all calls with the same types: less code compiles sooner."""
        letters = [f"{x.letter}{len(x.shape)}" if isinstance(x, _Array) else str(x.type) for x in given]
        name, module = " ".join((definition.__name__, *letters)), self.builder.module
        own = module.globals.get(name) or _function(module, name, signature, write, given)
        found = self.builder.call(own, [word for x in given for word in _words(x)])
        if signature.return_type is types.pair:
            return tuple(self.builder.extract_value(found, k) for k in range(2))
        return found

    def _offset(self, index: ast.AST, length: Any) -> Any:
        """An index as a whole number; constants below 0 count from the end."""
        found = self.value(index)
        negative = isinstance(found, ir.Constant) and found.constant < 0
        return self.builder.add(length, found) if negative else found

    def _part(self, whole: _Array, indices: list[ast.expr]) -> _Array:
        """``whole[indices]``, without an axis for each index that is no slice."""
        b, offset, left = self.builder, ir.Constant(INDEX, 0), list(whole.shape)
        if isinstance(indices[0], ast.Slice):
            bounds = indices[0]
            low = self._offset(bounds.lower, left[0]) if bounds.lower else ir.Constant(INDEX, 0)
            high = self._offset(bounds.upper, left[0]) if bounds.upper else left[0]
            offset, left = low, [b.sub(high, low), *left[1:]]
            rest = left[1:]
        else:
            for index in indices:
                offset = b.add(b.mul(offset, left[0]), self._offset(index, left[0]))
                left = left[1:]
            rest = left
        for length in rest:
            offset = b.mul(offset, length)
        return _Array(whole.letter, b.gep(whole.data, [offset], source_etype=whole.element), left)

    def get_subscript(self, node: ast.Subscript) -> Any:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return self.value(node.value.value).shape[ast.literal_eval(node.slice)]
        found = self._part(self.value(node.value), _indices(node))
        if found.shape:
            return found
        b = self.builder
        value = b.load(found.data, typ=found.element)
        return b.sext(value, INDEX) if isinstance(found.element, ir.IntType) and found.element.width < 64 else value

    def put(self, target: ast.AST, value: Any) -> None:
        if not isinstance(target, ast.Subscript):
            return super().put(target, value)
        found = self._part(self.value(target.value), _indices(target))
        if found.shape:
            self.fail(target)
        self.builder.store(self.cast(value, found.element), found.data)

    def get_call(self, node: ast.Call) -> Any:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "type":  # x.dtype.type(number)
            assert isinstance(called.value, ast.Attribute)
            return self.cast(self.value(node.args[0]), self.value(called.value.value).element)
        found = self.known(called)
        if found is len:
            return self.value(node.args[0]).shape[0]
        if found is math.isnan:
            value = self.value(node.args[0])
            return self.builder.fcmp_unordered("uno", value, value)
        return super().get_call(node)


def _words(x: Any) -> list[Any]:
    """A value as LLVM has it: one word or, of an array, several."""
    return [x.data, *x.shape] if isinstance(x, _Array) else [x]


def _function(module: Any, name: str, signature: Any, write: Callable[..., Any], given: list[Any]) -> Any:
    """A function of its own with the code of an intrinsic."""
    kinds = {"void": ir.VoidType(), "float32": ir.FloatType(), "float64": _DOUBLE, "int64": INDEX}
    result = signature.return_type
    element = given[0].element if isinstance(given[0], _Array) else _DOUBLE
    kind = ir.LiteralStructType([element] * 2) if result is types.pair else kinds[result.name]
    own = ir.Function(module, ir.FunctionType(kind, [word.type for x in given for word in _words(x)]), name)
    own.linkage = "internal"
    own.attributes.add("noinline")
    start = own.append_basic_block("start")
    builder = ir.IRBuilder(own.append_basic_block("body"))
    ir.IRBuilder(start).branch(builder.block)
    words, arguments = iter(own.args), []
    for x in given:
        value = next(words)
        arguments.append(_Array(x.letter, value, [next(words) for _ in x.shape]) if isinstance(x, _Array) else value)
    found = write(_Code.context, builder, signature, arguments)
    if result is types.pair:
        both = ir.Constant(kind, ir.Undefined)
        for place, value in enumerate(found):
            both = builder.insert_value(both, value, place)
        found = both
    if found is None:
        builder.ret_void()
    else:
        builder.ret(found)
    return own


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


class Kernel:
    """A function over arrays and numbers as machine code, one for each combination of types that it is called with.

    ``kernel(*arguments)`` calls it; its result is a whole number or None. One whose last parameters are ``part, low,
    high`` goes by ranges of items: ``kernel.share(ranges, *arguments)`` calls it for every range, by this thread and
    those that come to help.
    """

    def __init__(self, function: Callable[..., Any]):
        self.py_func = function
        self._entries: dict[tuple[Any, ...], Entry] = {}
        update_wrapper(self, function)

    @cached_property
    def _numba_type_(self) -> Any:  # what Numba asks of a value that it does not know: its own kernels may call it
        from numba import njit

        self._of_numba: Any = njit(nogil=True, cache=True, error_model="numpy")(
            self.py_func
        )  # its type does not own it
        return self._of_numba._numba_type_

    def __call__(self, *arguments: Any) -> int:
        """Call it by this thread alone."""
        kinds, words = _described(arguments)
        table = _table([0, 0, 0, *words])
        self._entry(("whole", *kinds)).call(table)
        return table[_RESULT]

    def share(self, ranges: list[tuple[int, int]], *arguments: Any) -> None:
        """Call it for every range ``low..high`` of items, each with the number of its ``part``."""
        kinds, words = _described(arguments)
        count = len(ranges)
        for pair in ranges:
            words += pair
        workers = min(count, torch.get_num_threads()) if count > 1 else 1
        enter(self._entry(("parts", *kinds)), _table([0, count, 0, *words]), workers)

    def _entry(self, kinds: tuple[Any, ...]) -> Entry:
        found = self._entries.get(kinds)
        if found is None:
            name = f"{self.py_func.__module__}_{self.py_func.__qualname__}".replace(".", "_")
            code = hashlib.sha256(" ".join(map(str, kinds)).encode()).hexdigest()[:12]
            own = self.py_func.__module__.startswith(str(__package__))  # of others the disk cannot tell what changed
            address = compile_emitted(f"{name}_{code}", lambda _, *at: self._write(kinds, *at), keep=own, unroll=False)
            found = self._entries[kinds] = Entry(address, None)  # such code stays
        return found

    def _write(self, kinds: tuple[Any, ...], builder: Any, table: Any) -> None:
        base = builder.inttoptr(table, INDEX.as_pointer())

        def place(index: Any) -> Any:
            index = ir.Constant(INDEX, index) if isinstance(index, int) else index
            return builder.gep(base, [index], source_etype=INDEX)

        def word(index: Any) -> Any:
            return builder.load(place(index), typ=INDEX)

        given, at = [], _FIRST
        for kind in kinds[1:]:
            value, at = _argument(kind, word, at, builder)
            given.append(value)
        if kinds[0] == "whole":
            frame = _Code(builder, self.py_func, given)
            if frame.result is not None:
                builder.store(builder.load(frame.result, typ=frame.result.allocated_type), place(_RESULT))
            return
        look, go, end = (builder.append_basic_block(name) for name in ("look", "go", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        part = builder.atomic_rmw("add", place(_NEXT), ir.Constant(INDEX, 1), "seq_cst")
        builder.cbranch(builder.icmp_signed("<", part, word(_PARTS)), go, end)
        builder.position_at_end(go)
        first = builder.add(builder.mul(part, ir.Constant(INDEX, 2)), ir.Constant(INDEX, at))
        low, high = word(first), word(builder.add(first, ir.Constant(INDEX, 1)))
        _Code(builder, self.py_func, [*given, part, low, high])
        builder.branch(look)
        builder.position_at_end(end)


def _argument(kind: Any, word: Callable[[Any], Any], at: int, builder: Any) -> tuple[Any, int]:
    """An argument read from a table, and where the next one is."""
    if isinstance(kind, tuple):
        letter, count = kind
        data = builder.inttoptr(word(at), _ELEMENTS[letter][0].as_pointer())
        return _Array(letter, data, [word(at + 1 + axis) for axis in range(count)]), at + 1 + count
    value = word(at)
    if kind == "whole":
        return value, at + 1
    value = builder.bitcast(value, _DOUBLE)
    return builder.fptrunc(value, ir.FloatType()) if kind == "single" else value, at + 1


def _table(words: list[int]) -> Any:
    """Words as ctypes takes them; to fill its own arrays one by one takes it six times as long."""
    return (ctypes.c_int64 * len(words)).from_buffer(array("q", words))


def _described(arguments: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """The types of arguments, and the words of a table that say what they are."""
    kinds, words = [], []
    for x in arguments:
        if isinstance(x, Tensor):  # it tells its address in a twentieth of the time that NumPy takes
            sound = x.is_contiguous()
            kinds.append((_LETTERS[x.dtype], x.dim()))
            words.append(x.data_ptr())
            words += x.shape
        elif isinstance(x, np.ndarray):
            sound = x.flags.c_contiguous
            kinds.append((x.dtype.char, x.ndim))
            words.append(x.__array_interface__["data"][0])
            words += x.shape
        elif isinstance(x, (int, np.integer)):
            sound = True
            kinds.append("whole")
            words.append(int(x))
        else:
            sound = True
            kinds.append("single" if type(x) is np.float32 else "double")
            words.append(struct.unpack("q", struct.pack("d", x))[0])
        if not sound:
            raise ValueError("a kernel takes C-contiguous arrays; give a copy")
    return kinds, words


def kernel(function: Callable[..., Any]) -> Kernel:
    """A function as a :class:`Kernel`.

    >>> from thalweg.kernels.cpu.chain_decode import draw
    >>> draw(np.array([1.0, 3.0]), 2, 0.5)
    1
    """
    return Kernel(function)
