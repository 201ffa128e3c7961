"""Functions over addresses, whole numbers and floats, compiled in milliseconds.

Numba knows all of Python's types and takes seconds for a search of some hundred lines. What a search is made of needs
four: int64, float32, float64 and truth values. A function that keeps to them is read as a syntax tree and written down
as one LLVM function, with everything that it calls in its place: intrinsics of this package, other such functions, and
the Python functions behind Numba's.

What is understood: ``=`` (tuples too), ``+=`` and the like, ``if``, ``while``, ``for`` over ``range``, ``break``,
``continue``, ``return``, arithmetic (a truth value is 0 or 1), comparisons, ``and``, ``or``, ``not``,
``x if c else y``, ``min``, ``max``, calls with ``*(tuples)``, casts by ``np.float32`` and its kin,
``math.exp``, ``math.log``, ``math.sqrt``, powers, global constants. A name keeps the
type of the first value that it is given.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import os
import textwrap
from collections.abc import Callable
from functools import cache
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from thalweg.kernels.cpu.emitter import types
from thalweg.kernels.cpu.machine_code import data_layout, load_code

__all__ = ["Context", "Frame", "compile_emitted", "compile_plain"]

_LONG, _SINGLE, _DOUBLE, _BIT = ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.IntType(1)
_KINDS = {
    np.float32: _SINGLE,
    np.float64: _DOUBLE,
    np.int64: _LONG,
    np.int16: ir.IntType(16),
    np.int8: ir.IntType(8),
}
# What intrinsics are told of the types of their arguments.
_TYPES = {kind: getattr(types, name.__name__) for name, kind in _KINDS.items()}
_MATHS = {math.exp: "exp", math.log: "log", math.sqrt: "sqrt", pow: "pow"}
_WHOLE = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.LShift: "shl"}
_WHOLE |= {ast.RShift: "ashr"}
_REAL = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_emitted: dict[str, int] = {}
_lock = Lock()


def _forget() -> None:
    """Another thread may have been compiling when this process was forked off."""
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _is_float(value: Any) -> bool:
    return isinstance(value.type, (ir.FloatType, ir.DoubleType))


class _Context:
    """What intrinsics ask of Numba's context; an "array" is the address where it begins."""

    def make_array(self, kind: Any) -> Any:
        def read(context: Any, builder: Any, value: Any) -> SimpleNamespace:
            return SimpleNamespace(data=builder.inttoptr(value, _SINGLE.as_pointer()))

        return read


@cache
def _tree(function: Any) -> tuple[ast.FunctionDef, dict[str, Any]]:
    """A function's syntax tree and the names that it sees."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree, function.__globals__


class _Frame:
    """One function's code at the builder's place, inside whatever calls it."""

    context = _Context()

    def __init__(self, builder: Any, function: Any, arguments: list[Any]):
        self.builder = builder
        tree, self.names = _tree(function)
        self.variables: dict[str, Any] = {}
        self.loops: list[tuple[Any, Any]] = []  # where continue and break go
        self.result: Any = None
        self.end = builder.append_basic_block(f"{tree.name}.end")
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.fixed: dict[str, Any] = {}  # parameters that are constants here: a test of one is decided now
        for parameter, value in zip(tree.args.args, arguments, strict=True):
            if isinstance(value, ir.Constant) and parameter.arg not in stored:
                self.fixed[parameter.arg] = value
            else:
                self.assign(parameter.arg, value)
        self.body(tree.body)
        self.jump(self.end)
        builder.position_at_end(self.end)

    def fail(self, node: ast.AST) -> Any:
        raise NotImplementedError(f"a plain function cannot say `{ast.unparse(node)}`")

    # Statements

    def jump(self, block: Any) -> None:
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def place(self, kind: Any) -> Any:
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)

    def assign(self, name: str, value: Any) -> None:
        if name not in self.variables:
            self.variables[name] = self.place(value.type), value.type
        place, kind = self.variables[name]
        if kind != value.type:
            raise TypeError(f"`{name}` is {kind} and cannot become {value.type}")
        self.builder.store(value, place)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self.builder.block.is_terminated:
                return
            getattr(self, f"do_{type(statement).__name__.lower()}", self.fail)(statement)

    def do_expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.value(node.value)

    def do_pass(self, node: ast.Pass) -> None:
        pass

    def do_assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Tuple):
            given = node.value
            values = self.several(given.elts) if isinstance(given, ast.Tuple) else self.value(given)
            for target, value in zip(node.targets[0].elts, values, strict=True):
                self.put(target, value)
        else:
            value = self.value(node.value)
            for target in node.targets:
                self.put(target, value)

    def put(self, target: ast.AST, value: Any) -> None:
        """What stands left of ``=`` becomes a value."""
        self.assign(self.name(target), value)

    def name(self, node: ast.AST) -> str:
        return node.id if isinstance(node, ast.Name) else self.fail(node)

    def several(self, nodes: list[ast.expr]) -> list[Any]:
        """Values one by one; ``*(tuples)`` are taken apart."""
        found = []
        for node in nodes:
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple):
                found += self.several(node.value.elts)
            else:
                found.append(self.value(node))
        return found

    def do_augassign(self, node: ast.AugAssign) -> None:
        self.put(node.target, self.binary(node.op, self.value(node.target), self.value(node.value), node))

    def do_return(self, node: ast.Return) -> None:
        if node.value is not None:
            value = self.value(node.value)
            self.result = self.result or self.place(value.type)
            self.builder.store(value, self.result)
        self.jump(self.end)

    def do_continue(self, node: ast.Continue) -> None:
        self.jump(self.loops[-1][0])

    def do_break(self, node: ast.Break) -> None:
        self.jump(self.loops[-1][1])

    def do_if(self, node: ast.If) -> None:
        b = self.builder
        if isinstance(node.test, ast.Name) and node.test.id in self.fixed:
            return self.body(node.body if self.fixed[node.test.id].constant else node.orelse)
        yes, no, end = (b.append_basic_block(name) for name in ("yes", "no", "end"))
        b.cbranch(self.truth(node.test), yes, no)
        for block, statements in ((yes, node.body), (no, node.orelse)):
            b.position_at_end(block)
            self.body(statements)
            self.jump(end)
        b.position_at_end(end)

    def do_while(self, node: ast.While) -> None:
        b = self.builder
        look, go, end = (b.append_basic_block(name) for name in ("look", "go", "end"))
        b.branch(look)
        b.position_at_end(look)
        b.cbranch(self.truth(node.test), go, end)
        b.position_at_end(go)
        self.inside(node.body, look, end)

    def inside(self, statements: list[ast.stmt], again: Any, end: Any) -> None:
        self.loops.append((again, end))
        self.body(statements)
        self.loops.pop()
        self.jump(again)
        self.builder.position_at_end(end)

    def do_for(self, node: ast.For) -> None:
        b, call = self.builder, node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            self.fail(node)
        assert isinstance(call, ast.Call)
        bounds = [self.value(bound) for bound in call.args]
        zero, one = ir.Constant(_LONG, 0), ir.Constant(_LONG, 1)
        first, last, step = (zero, bounds[0], one) if len(bounds) == 1 else (*bounds, one)[:3]
        counter = self.place(_LONG)
        b.store(first, counter)
        look, go, on, end = (b.append_basic_block(name) for name in ("look", "go", "on", "end"))
        b.branch(look)
        b.position_at_end(look)
        down = isinstance(step, ir.Constant) and step.constant < 0
        b.cbranch(b.icmp_signed(">" if down else "<", b.load(counter, typ=_LONG), last), go, end)
        b.position_at_end(on)
        b.store(b.add(b.load(counter, typ=_LONG), step), counter)
        b.branch(look)
        b.position_at_end(go)
        self.assign(self.name(node.target), b.load(counter, typ=_LONG))
        self.inside(node.body, on, end)

    # Expressions

    def value(self, node: ast.AST) -> Any:
        return getattr(self, f"get_{type(node).__name__.lower()}", self.fail)(node)

    def truth(self, node: ast.AST) -> Any:
        value = self.value(node)
        return value if value.type == _BIT else self.builder.icmp_signed("!=", value, ir.Constant(value.type, 0))

    def known(self, node: ast.AST) -> Any:
        """The Python object that a name or ``module.name`` stands for."""
        if isinstance(node, ast.Attribute):
            return getattr(self.known(node.value), node.attr)
        name = self.name(node)
        return self.names[name] if name in self.names else getattr(builtins, name)

    def constant(self, value: Any, node: ast.AST) -> Any:
        if isinstance(value, (bool, np.bool_)):
            return ir.Constant(_BIT, int(value))
        if isinstance(value, (int, np.integer)):
            return ir.Constant(_LONG, int(value))
        return ir.Constant(_DOUBLE, float(value)) if isinstance(value, float) else self.fail(node)

    def get_constant(self, node: ast.Constant) -> Any:
        return self.constant(node.value, node)

    def get_attribute(self, node: ast.Attribute) -> Any:
        return self.constant(self.known(node), node)

    def get_name(self, node: ast.Name) -> Any:
        if node.id in self.fixed:
            return self.fixed[node.id]
        if node.id in self.variables:
            place, kind = self.variables[node.id]
            return self.builder.load(place, typ=kind)
        return self.constant(self.known(node), node)

    def get_unaryop(self, node: ast.UnaryOp) -> Any:
        b = self.builder
        if isinstance(node.op, ast.Not):
            return b.not_(self.truth(node.operand))
        value = self.value(node.operand)
        if not isinstance(node.op, ast.USub):
            return self.fail(node)
        if isinstance(value, ir.Constant):
            return ir.Constant(value.type, -value.constant)
        return b.fneg(value) if _is_float(value) else b.neg(value)

    def get_binop(self, node: ast.BinOp) -> Any:
        return self.binary(node.op, self.value(node.left), self.value(node.right), node)

    def binary(self, op: ast.operator, x: Any, y: Any, node: ast.AST) -> Any:
        b = self.builder
        if not (x.type == y.type == _BIT and isinstance(op, (ast.BitAnd, ast.BitOr))):  # else truth values are 0 and 1
            x, y = (self.cast(value, _LONG) if value.type == _BIT else value for value in (x, y))
        if isinstance(op, ast.Pow):
            return self.maths("pow", self.cast(x, _DOUBLE), self.cast(y, _DOUBLE))
        if isinstance(op, ast.Div) or _is_float(x) or _is_float(y):
            return getattr(b, _REAL[type(op)])(*self.alike(x, y)) if type(op) in _REAL else self.fail(node)
        if isinstance(op, (ast.FloorDiv, ast.Mod)):
            rest = b.srem(x, y)  # rounds to zero; Python rounds down
            zero = ir.Constant(_LONG, 0)
            off = b.and_(b.icmp_signed("!=", rest, zero), b.icmp_signed("<", b.xor(rest, y), zero))
            if isinstance(op, ast.Mod):
                return b.select(off, b.add(rest, y), rest)
            return b.sub(b.sdiv(x, y), b.zext(off, _LONG))
        return getattr(b, _WHOLE[type(op)])(x, y) if type(op) in _WHOLE else self.fail(node)

    def alike(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Both in one type, as NumPy would have it."""
        if x.type == y.type and _is_float(x):
            return x, y
        return self.cast(x, _DOUBLE), self.cast(y, _DOUBLE)

    def cast(self, x: Any, kind: Any) -> Any:
        b = self.builder
        if x.type == kind:
            return x
        if not _is_float(x):
            if isinstance(kind, ir.IntType):
                return b.trunc(x, kind) if kind.width < x.type.width else b.zext(x, kind)
            return (b.uitofp if x.type == _BIT else b.sitofp)(x, kind)
        if isinstance(kind, ir.IntType):
            return b.fptosi(x, kind)
        return b.fpext(x, kind) if kind == _DOUBLE else b.fptrunc(x, kind)

    def maths(self, name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(_DOUBLE, [_DOUBLE] * len(arguments))
        found = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        return self.builder.call(found, arguments)

    def get_compare(self, node: ast.Compare) -> Any:
        b, x, whole = self.builder, self.value(node.left), None
        for op, right in zip(node.ops, node.comparators, strict=True):
            y, sign = self.value(right), _SIGNS[type(op)]
            if _is_float(x) or _is_float(y):
                # As in Python, NaN is unequal to everything and otherwise compares false.
                compare = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
                found = compare(sign, *self.alike(x, y))
            else:
                found = b.icmp_signed(sign, x, y)
            whole, x = found if whole is None else b.and_(whole, found), y
        return whole

    def choice(self, test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """One of two values, of which only that one is computed."""
        b = self.builder
        blocks = [b.append_basic_block(name) for name in ("then", "else")]
        end = b.append_basic_block("either")
        b.cbranch(test, *blocks)
        found = []
        for block, make in zip(blocks, (yes, no), strict=True):
            b.position_at_end(block)
            value = make()
            found.append((value, b.block))
            b.branch(end)
        b.position_at_end(end)
        value = b.phi(found[0][0].type)
        for one, block in found:
            value.add_incoming(one, block)
        return value

    def get_boolop(self, node: ast.BoolOp) -> Any:
        found = self.truth(node.values[0])
        for part in node.values[1:]:
            more, stop = (lambda part=part: self.truth(part)), ir.Constant(_BIT, int(isinstance(node.op, ast.Or)))
            ways = (lambda stop=stop: stop, more) if isinstance(node.op, ast.Or) else (more, lambda stop=stop: stop)
            found = self.choice(found, *ways)
        return found

    def get_ifexp(self, node: ast.IfExp) -> Any:
        return self.choice(self.truth(node.test), lambda: self.value(node.body), lambda: self.value(node.orelse))

    def get_call(self, node: ast.Call) -> Any:
        called, arguments = self.known(node.func), self.several(node.args)
        if called in _KINDS:
            return self.cast(arguments[0], _KINDS[called])
        if called in _MATHS:
            return self.maths(_MATHS[called], *(self.cast(x, _DOUBLE) for x in arguments))
        if called is min or called is max:
            x, y = arguments if arguments[0].type == arguments[1].type else self.alike(*arguments)
            compare = self.builder.fcmp_ordered if _is_float(x) else self.builder.icmp_signed
            return self.builder.select(compare("<" if called is min else ">", x, y), x, y)
        if hasattr(called, "_defn"):
            return self.emit(called._defn, arguments)
        frame = type(self)(self.builder, getattr(called, "py_func", called), arguments)
        return None if frame.result is None else self.builder.load(frame.result, typ=frame.result.allocated_type)

    def kind(self, x: Any) -> Any:
        """The type of a value, as intrinsics are told of it."""
        return _TYPES[x.type]

    def kinds(self, definition: Callable[..., Any], arguments: list[Any]) -> list[Any]:
        own = definition.__globals__.get("types")
        if own is None:
            from numba import types as own
        # Intrinsics compare types with those that their module knows, Numba's perhaps.
        return [getattr(own, self.kind(x).name) for x in arguments]

    def emit(self, definition: Callable[..., Any], arguments: list[Any]) -> Any:
        """The code of an intrinsic."""
        arguments = [self.cast(x, _LONG) if x.type == _BIT else x for x in arguments]
        signature, write = definition(None, *self.kinds(definition, arguments))
        # Types go by their names: those of the signature may be Numba's, which rounds to what is asked for.
        wanted = [kind.name for kind in signature.args]
        reals = {"float32": _SINGLE, "float64": _DOUBLE}
        pairs = list(zip(arguments, wanted, strict=True))
        arguments = [self.cast(x, reals[name]) if name in reals and _is_float(x) else x for x, name in pairs]
        given = [self.kind(x).name for x in arguments]
        if wanted != given:
            raise TypeError(f"`{definition.__name__}` takes {wanted}, got {given}")
        return self.written(definition, signature, write, arguments)

    def written(
        self, definition: Callable[..., Any], signature: Any, write: Callable[..., Any], given: list[Any]
    ) -> Any:
        return write(self.context, self.builder, signature, given)


# For code that understands more: arrays in :mod:`~thalweg.kernels.cpu.chain_arrays`.
Context, Frame = _Context, _Frame


def _module(name: str, count: int, write: Callable[[Any, list[Any]], object]) -> str:
    """A module with one function ``void(int64, ...)`` of so many numbers, as text."""
    module = ir.Module(name)
    module.triple, module.data_layout = llvm.get_process_triple(), data_layout()
    whole = ir.Function(module, ir.FunctionType(ir.VoidType(), [_LONG] * count), name)
    start = whole.append_basic_block("start")
    builder = ir.IRBuilder(whole.append_basic_block("body"))
    ir.IRBuilder(start).branch(builder.block)
    write(builder, list(whole.args))
    builder.ret_void()
    return str(module)


def _written(function: Any, name: str) -> str:
    """A plain function as a module of its own."""
    return _module(name, len(_tree(function)[0].args.args), lambda builder, given: _Frame(builder, function, given))


@cache
def _compiled(function: Any) -> int:
    own = function.__module__.startswith(__package__)  # of others the disk cannot tell whether they have changed
    name = f"{function.__module__}_{function.__qualname__}".replace(".", "_")
    return load_code(name, lambda: _written(function, name), keep=own)


def compile_plain(function: Callable[..., None]) -> int:
    """The address of the C function ``void(int64, ...)`` that does what a plain function of whole numbers says.

    >>> from thalweg.kernels.cpu.unchanged import compare
    >>> compile_plain(compare) > 0
    True
    """
    with _lock:
        return _compiled(function)


def compile_emitted(name: str, emit: Callable[[Any, Any, Any], None], *, keep: bool = True, unroll: bool = True) -> int:
    """The address of the C function ``void(int64)`` whose body ``emit(context, builder, argument)`` writes.

    The name is the code's on the disk too: it must say all that is not in the sources of this folder.
    ``unroll`` is as in ``load_code``.

    >>> compile_emitted("doc_nothing", lambda context, builder, argument: None) > 0
    True
    """

    def write(builder: Any, given: list[Any]) -> None:
        emit(_Context(), builder, *given)

    with _lock:
        if keep and name in _emitted:  # another thread was faster
            return _emitted[name]
        _emitted[name] = load_code(name, lambda: _module(name, 1, write), keep=keep, unroll=unroll)
        return _emitted[name]
