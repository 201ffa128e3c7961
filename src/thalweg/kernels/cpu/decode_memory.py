"""Numbers at plain addresses, counters that threads share, activations in place: small parts of compiled searches."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic

__all__ = [
    "advance_to",
    "call_at",
    "float_at",
    "float_of",
    "gelu_at",
    "gelu_tanh_at",
    "index_at",
    "put_float",
    "put_index",
    "silu_at",
    "take",
]

_SINGLE = ir.FloatType()


def _place(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index], source_etype=kind)


@intrinsic
def index_at(typing_context, address, index):
    """Entry ``index`` of the int64 at ``address``."""

    def codegen(context, builder, signature, arguments):
        return builder.load(_place(builder, arguments[0], arguments[1], INDEX), typ=INDEX)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def put_index(typing_context, address, index, value):
    """Set it."""

    def codegen(context, builder, signature, arguments):
        builder.store(arguments[2], _place(builder, arguments[0], arguments[1], INDEX))

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def float_at(typing_context, address, index):
    """Entry ``index`` of the float32 at ``address``."""

    def codegen(context, builder, signature, arguments):
        return builder.load(_place(builder, arguments[0], arguments[1], _SINGLE), typ=_SINGLE)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def put_float(typing_context, address, index, value):
    """Set it."""

    def codegen(context, builder, signature, arguments):
        builder.store(arguments[2], _place(builder, arguments[0], arguments[1], _SINGLE))

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def float_of(typing_context, bits):
    """The float32 whose bits are the lower half of a whole number."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), _SINGLE)

    return types.float32(types.int64), codegen


@intrinsic
def call_at(typing_context, address, op, rows, t, part, parts):
    """The compiled function ``void(int64, ...)`` at an address: what is called so is not compiled into the caller."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [INDEX] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def take(typing_context, address, limit):
    """The counter at ``address``, raised by one for the next who asks; -1 once it has come to ``limit``."""

    def codegen(context, builder, signature, arguments):
        b = builder
        place = b.inttoptr(arguments[0], INDEX.as_pointer())
        again, tried, end = (b.append_basic_block(name) for name in ("take", "try", "taken"))
        b.branch(again)
        b.position_at_end(again)
        now = b.load_atomic(place, "seq_cst", 8, typ=INDEX)
        b.cbranch(b.icmp_signed("<", now, arguments[1]), tried, end)
        b.position_at_end(tried)
        pair = b.cmpxchg(place, now, b.add(now, ir.Constant(INDEX, 1)), "seq_cst", "seq_cst")
        b.cbranch(b.extract_value(pair, 1), end, again)
        b.position_at_end(end)
        reached = b.phi(INDEX)
        reached.add_incoming(ir.Constant(INDEX, -1), again)
        reached.add_incoming(now, tried)
        return reached

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def advance_to(typing_context, address, add, least):
    """Raise the counter at ``address`` by ``add`` and wait until it has come to ``least``."""

    def codegen(context, builder, signature, arguments):
        b = builder
        place = b.inttoptr(arguments[0], INDEX.as_pointer())
        b.atomic_rmw("add", place, arguments[1], "seq_cst")
        look, wait, end = (b.append_basic_block(name) for name in ("look", "wait", "come"))
        b.branch(look)
        b.position_at_end(look)
        now = b.load_atomic(place, "seq_cst", 8, typ=INDEX)
        b.cbranch(b.icmp_signed("<", now, arguments[2]), wait, end)
        b.position_at_end(wait)
        b.branch(look)
        b.position_at_end(end)

    return types.void(types.int64, types.int64, types.int64), codegen


def _in_place(emitter: Emitter, address: Any, count: Any, change: Any) -> None:
    pointer = emitter.builder.inttoptr(address, emitter.element.as_pointer())

    def body(place: Any, width: int) -> None:
        target = emitter.at(pointer, place)
        emitter.store(change(emitter.load(target, width)), target)

    emitter.blocks(count, (LANES, 1), body)


def _decay(emitter: Emitter, x: Any) -> Any:
    """exp(x) of numbers <= 0; NaN stays NaN."""
    return emitter.builder.select(emitter.builder.fcmp_unordered("uno", x, x), x, emitter.exp(x))


@intrinsic
def gelu_at(typing_context, address, count):
    """x Phi(x) of ``count`` numbers, in place; erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder

        def change(x: Any) -> Any:
            width = x.type.count

            def number(value: float) -> Any:
                return emitter.constant(value, width)

            z = emitter.call("fabs", b.fmul(x, number(math.sqrt(0.5))))
            t = b.fdiv(number(1.0), emitter.call("fma", z, number(0.3275911), number(1.0)))
            p = number(1.061405429)
            for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
                p = emitter.call("fma", p, t, number(factor))
            tail = b.fmul(b.fmul(p, t), _decay(emitter, b.fneg(b.fmul(z, z))))  # 1 - erf |z|
            tail = b.fmul(tail, number(0.5))
            below = b.fcmp_ordered("<", x, number(0.0))
            return b.fmul(x, b.select(below, tail, b.fsub(number(1.0), tail)))

        _in_place(emitter, arguments[0], arguments[1], change)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def gelu_tanh_at(typing_context, address, count):
    """x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), of ``count`` numbers, in place."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder

        def change(x: Any) -> Any:
            width = x.type.count

            def number(value: float) -> Any:
                return emitter.constant(value, width)

            cubic = emitter.call("fma", b.fmul(x, x), number(0.044715), number(1.0))
            twice = b.fmul(b.fmul(x, cubic), number(2 * math.sqrt(2 / math.pi)))
            e = _decay(emitter, b.fneg(emitter.call("fabs", twice)))
            top = b.select(b.fcmp_ordered("<", x, number(0.0)), e, number(1.0))
            return b.fdiv(b.fmul(x, top), b.fadd(e, number(1.0)))

        _in_place(emitter, arguments[0], arguments[1], change)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def silu_at(typing_context, address, count):
    """x / (1 + exp(-x)) of ``count`` numbers, in place."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float32), builder

        def change(x: Any) -> Any:
            width = x.type.count
            e = _decay(emitter, b.fneg(emitter.call("fabs", x)))
            below = b.fcmp_ordered("<", x, emitter.constant(0.0, width))
            top = b.select(below, e, emitter.constant(1.0, width))
            return b.fdiv(b.fmul(x, top), b.fadd(e, emitter.constant(1.0, width)))

        _in_place(emitter, arguments[0], arguments[1], change)

    return types.void(types.int64, types.int64), codegen
