"""Associative memories on a GPU in float32: the weights exist for a block of patterns at a time, in registers.

A program has a block of queries and makes all their steps in one launch, until they have come to rest. With many
patterns several programs share them out and meet after every pass to put their parts together and move the queries.
Where the products take longer than to write weights down and read them again, and these have room, the matrix library
multiplies (``memory_products``); queries at rest are then left out as soon as the host notices.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_passes as programs
from thalweg.kernels.gpu import memory_steps
from thalweg.kernels.gpu.launching import here, on_device_of, repeated, resumed
from thalweg.kernels.gpu.memory_products import Course, Limits, by_products
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "attend", "nearest", "settle"]

_SMALL = 1 << 14  # scores of a problem whose launches take longer than what they compute
_SHORT = 512  # patterns of a small problem that one program looks through in no more time than a launch takes
_LONG = 2048  # patterns of a set from which PyTorch's attention takes longer than a layer around two launches
_MOST_FEATURES = 512  # what a program holds of a query; more goes to plain PyTorch
_LARGE = 1 << 27  # multiply-adds of a pass from which the matrix library is faster
_ROOM = 1 << 24  # weights that may be written down, 64 MiB
_MANY = 128  # queries below which a pass is all reading of patterns
# Three TF32 products lose two bits of float32; steps that follow one another would blow that up where patterns mix.
_ONCE, _OFTEN = "tf32x3", "ieee"


class _Plan(NamedTuple):
    """How the work is cut: widths in powers of two, rows and patterns of a block, parts and their length."""

    DP: int
    EP: int
    BQ: int
    BN: int
    PC: int
    parts: int
    length: int


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _plan(queries: Tensor, patterns: int, outer: int) -> _Plan:
    """For one pass of programs that do not wait for one another: two of them on every processor."""
    rows, inner = queries.shape
    inside, outside = (max(16, 1 << (x - 1).bit_length()) for x in (inner, outer))
    widest = max(inside, outside)
    block_rows = 32 if rows >= 512 and widest <= 128 else 16
    return _cut(rows, patterns, (inside, outside), block_rows, 2 * _processors(queries.device))


def _joint_plan(queries: Tensor, patterns: int) -> _Plan:
    """For programs that meet: no more than can run at once."""
    rows, inner = queries.shape
    width = max(16, 1 << (inner - 1).bit_length())
    # Few queries are shared out over many programs, two of which fit on a processor if they are narrow.
    each = 2 if rows <= 64 and width <= programs.HELD.value else 1
    at_once = each * _processors(queries.device) if queries.is_cuda else 1  # the interpreter runs them in turn
    return _cut(rows, patterns, (width, width), 16, at_once)


def _cut(rows: int, patterns: int, widths: tuple[int, int], block_rows: int, most: int) -> _Plan:
    widest = max(widths)
    block = 64 if widest <= 128 else 32 if widest == 256 else 16
    parts = max(1, min(most // -(-rows // block_rows), -(-patterns // (2 * block))))
    length = -(-patterns // parts)
    length = -(-length // block) * block
    return _Plan(*widths, block_rows, block, max(1, 8192 // widths[1]), -(-patterns // length), length)


def _warps(plan: _Plan) -> int:
    return 8 if max(plan.DP, plan.EP) > 128 or plan.BQ > 16 else 4


class _Parts(NamedTuple):
    """What the parts of a pass leave: tops and totals (parts, Q), mixtures (parts, Q, E)."""

    tops: Tensor
    totals: Tensor
    mixes: Tensor

    @classmethod
    def empty(cls, plan: _Plan, rows: int, outer: int, like: Tensor) -> _Parts:
        """Room for a pass."""
        shapes = (plan.parts, rows), (plan.parts, rows), (plan.parts, rows, outer)
        return cls(*(like.new_empty(shape) for shape in shapes))


def _look_through(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, factor: float, plan: _Plan, left: _Parts
) -> None:
    """A pass over all patterns, part by part."""
    (rows, inner), (count, outer) = queries.shape, values.shape
    masked, same = mask is not None, keys is values
    repeated(
        *(programs.part, (-(-rows // plan.BQ), plan.parts)),
        *(queries, keys, values, keys if mask is None else mask),
        *(left.tops, left.totals, left.mixes, rows, count, plan.length, inner, outer, factor),
        key=(rows, count, inner, outer, masked, same, plan),
        MASKED=masked,
        SAME=same,
        BQ=plan.BQ,
        BN=plan.BN,
        DP=plan.DP,
        EP=plan.EP,
        PRECISION=_ONCE,
        num_warps=_warps(plan),
        # Shared memory is what wide queries have less of.
        num_stages=2 if max(plan.DP, plan.EP) <= programs.HELD.value else 1,
    )


def _fits(x: Tensor) -> bool:
    return x.shape[1] <= _MOST_FEATURES


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` in two launches."""
    if not (_fits(keys) and _fits(values)):
        return reference.associate(queries, keys, values, beta, mask, block)
    same = keys is values
    queries, keys = queries.contiguous(), keys.contiguous()
    values = keys if same else values.contiguous()
    (rows, _), (count, outer) = queries.shape, values.shape
    plan, number = _plan(queries, count, outer), float(beta.detach() if isinstance(beta, Tensor) else beta)
    left, factor = _Parts.empty(plan, rows, outer, queries), number / math.log(2)
    mixed, lse = queries.new_empty(rows, outer), queries.new_empty(rows)
    sizes, options = (rows, outer, plan.parts), {"PC": plan.PC, "EP": plan.EP, "num_warps": 4}
    with on_device_of(queries):
        _look_through(queries, keys, values, _bytes(mask), factor, plan, left)
        repeated(memory_steps.join, (rows,), mixed, lse, *left, *sizes, factor, key=(*sizes, plan.PC), **options)
    return mixed, lse


def attend(queries: Tensor, patterns: Tensor, beta: float) -> Tensor | None:
    """:func:`thalweg.kernels.memory.attend` in one launch or two; None where PyTorch's attention is faster."""
    shape, count = queries.shape, patterns.shape[-2]
    if shape[-2] * count <= _SMALL:
        short = count <= _SHORT and shape[-1] <= programs.HELD.value
        return _at_once(queries.contiguous(), patterns.contiguous(), beta) if short else None
    if len(shape) == 2:
        return associate(queries, patterns, patterns, beta, None, None)[0]
    if count < _LONG:
        return None
    queries, patterns = queries.squeeze(0), patterns.squeeze(0)
    return associate(queries, patterns, patterns, beta, None, None)[0].unsqueeze(0)


class _Once(NamedTuple):
    """The launch of a small association: grid, options, and the key under which it is known."""

    grid: tuple[int, int, int]
    options: dict[str, Any]
    key: tuple[int, ...]


@lru_cache(256)
def _once(rows: int, count: int, inner: int) -> _Once:
    width = max(16, 1 << (inner - 1).bit_length())
    options = {"BQ": 16, "BN": 64, "DP": width, "PRECISION": _OFTEN, "num_warps": 4, "num_stages": 2}
    return _Once((-(-rows // 16), 1, 1), options, (rows, count, inner))


def _at_once(queries: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """One launch that is started from addresses: what surrounds a small problem takes longer than it does."""
    asked, count = queries.shape, patterns.shape[-2]
    sizes = asked[-2], count, asked[-1], beta / math.log(2)
    grid, options, key = _once(*sizes[:3])
    out = torch.empty_like(queries)
    with on_device_of(queries):
        if queries.is_cuda:
            first, second = queries.data_ptr(), patterns.data_ptr()
            given = (first, second, out.data_ptr(), *sizes)
            if not (first | second) & 15 and resumed(programs.once, grid, given, key, here()) is not None:
                return out
        repeated(programs.once, grid, queries, patterns, out, *sizes, key=key, **options)
    return out


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one launch, or by products of the matrix library."""
    if not _fits(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, mask, block)
    with on_device_of(queries):
        patterns = patterns.contiguous()
        if mask is None:
            limits = Limits.of(patterns.shape[0], beta, max_steps, tol)
            if _multiplied(queries, patterns):
                return _in_stages(queries, patterns, limits)
            return _in_one(Course(queries, patterns, max_steps), patterns, None, limits)
        course = Course(queries, patterns[:0], max_steps)
        course.part("facts").copy_(2 * reference.offset(patterns, beta, mask))
        return _in_one(course, patterns, _bytes(mask), Limits.of(1, beta, max_steps, tol))


def _multiplied(queries: Tensor, patterns: Tensor) -> bool:
    """Whether the matrix library is faster, and what it writes has room."""
    (rows, inner), (count, _) = queries.shape, patterns.shape
    weights = rows * count
    return rows >= _MANY and weights * inner >= _LARGE and weights <= _ROOM


def _in_one(course: Course, patterns: Tensor, mask: Tensor | None, limits: Limits) -> Settled:
    """All steps in one launch."""
    plan = _joint_plan(course.state, len(patterns))
    if plan.parts == 1 and programs.HELD.value >= plan.DP:
        _alone(course, patterns, mask, limits)
    else:
        _jointly(course, patterns, mask, limits, plan)
    return course.settled()


def _in_stages(queries: Tensor, patterns: Tensor, limits: Limits, before: Tensor | None = None) -> Settled:
    """Steps of all queries until half of them are at rest; then what suits the rest."""
    across = patterns.mT
    scores = torch.mm(queries, across)  # before all else: the device has this to do while the host prepares
    course = Course(queries, patterns, limits.most, before)
    t = by_products(course, patterns, across, limits, scores)
    found = course.settled()
    if t > limits.most:
        return found
    status = course.part("status")
    left = (status < 2).nonzero().flatten()
    state, limits = found.state.index_select(0, left), limits._replace(most=limits.most - t)
    status = status.index_select(0, left)
    if _multiplied(state, patterns):
        after = _in_stages(state, patterns, limits, status)
    else:
        after = _in_one(Course(state, patterns, limits.most, status), patterns, None, limits)
    found.energies[:, t:].index_copy_(0, left, after.energies)
    found.state.index_copy_(0, left, after.state)
    found.steps.index_add_(0, left, after.steps)
    # Those that had come to rest before, and those that did after.
    found.converged.view(torch.uint8).index_add_(0, left, after.converged.view(torch.uint8))
    return found


def _alone(course: Course, patterns: Tensor, mask: Tensor | None, limits: Limits) -> None:
    """All steps of a block of queries by one program."""
    (rows, inner), (most, factor, tol, rest) = course.state.shape, limits
    count = patterns.shape[0]
    plan = _plan(course.state, count, inner)
    repeated(
        *(programs.whole, (-(-rows // plan.BQ),)),
        *(course.state, patterns, patterns if mask is None else mask, course.part("facts")),
        *(course.energies, course.steps, course.converged.view(torch.uint8), course.part("status")),
        *(rows, count, inner, most, factor, tol, rest),
        key=(rows, count, inner, most, mask is None),
        MASKED=mask is not None,
        BQ=plan.BQ,
        BN=plan.BN,
        DP=plan.DP,
        PRECISION=_OFTEN,
        num_warps=_warps(plan),
        num_stages=2,
    )


def _jointly(course: Course, patterns: Tensor, mask: Tensor | None, limits: Limits, plan: _Plan) -> None:
    """All steps of a block of queries by several programs, which wait for one another."""
    (rows, inner), (most, factor, tol, rest) = course.state.shape, limits
    count, blocks = patterns.shape[0], -(-rows // plan.BQ)
    left = _Parts.empty(plan, rows, inner, course.state)
    repeated(
        *(programs.joint, (blocks, plan.parts)),
        *(course.state, patterns, patterns if mask is None else mask, course.part("facts")),
        *(course.energies, course.steps, course.converged.view(torch.uint8), course.part("status")),
        *(*left, course.part("meetings")),
        *(rows, count, plan.length, inner, plan.parts, most, factor, tol, rest),
        key=(rows, count, inner, most, mask is None, plan),
        MASKED=mask is not None,
        BQ=plan.BQ,
        BN=plan.BN,
        DP=plan.DP,
        PC=plan.PC,
        PRECISION=_OFTEN,
        num_warps=_warps(plan),
        num_stages=2 if programs.HELD.value >= plan.DP else 1,
        launch_cooperative_grid=True,
    )


def nearest(queries: Tensor, keys: Tensor, k: int, mask: Tensor | None, block: int | None) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.nearest` by the matrix library, in blocks that are worth a launch."""
    return reference.nearest(queries, keys, k, mask, block or 1 << 16)
