"""Associative memories on a GPU in float32: the weights exist for a block of patterns at a time, in registers.

A program has a block of queries and makes all their steps in one launch, until they have come to rest. With many
patterns several programs share them out and meet after every pass to put their parts together and move the queries.
Where the products take longer than to write weights down and read them again, and these have room, the matrix library
multiplies (``memory_products``); queries at rest are then left out as soon as the host notices.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_passes as programs
from thalweg.kernels.gpu import memory_steps
from thalweg.kernels.gpu.launching import launch, on_device_of
from thalweg.kernels.gpu.memory_products import Course, Limits, by_products
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "nearest", "settle"]

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
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, factor: float, plan: _Plan, left: _Parts,
    status: Tensor | None, mix: bool, precision: str,
) -> None:  # fmt: skip
    """A pass over all patterns, part by part."""
    (rows, inner), (count, outer) = queries.shape, values.shape
    launch(
        *(programs.part, (-(-rows // plan.BQ), plan.parts)),
        *(queries, keys, values, keys if mask is None else mask, queries if status is None else status),
        *(left.tops, left.totals, left.mixes, rows, count, plan.length, inner, outer, factor),
        STATUS=status is not None,
        MASKED=mask is not None,
        SAME=keys is values,
        MIX=mix,
        BQ=plan.BQ,
        BN=plan.BN,
        DP=plan.DP,
        EP=plan.EP,
        PRECISION=precision,
        num_warps=_warps(plan),
        # Shared memory is what wide queries have less of.
        num_stages=2 if max(plan.DP, plan.EP) <= programs.HELD.value else 1,
    )


def _fits(*tensors: Tensor) -> bool:
    return all(x.shape[1] <= _MOST_FEATURES for x in tensors)


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` in two launches.

    >>> associate.__name__
    'associate'
    """
    if not _fits(keys, values):
        return reference.associate(queries, keys, values, beta, mask, block)
    same = keys is values
    queries, keys = queries.contiguous(), keys.contiguous()
    values = keys if same else values.contiguous()
    (rows, _), (count, outer) = queries.shape, values.shape
    plan, factor = (
        _plan(queries, count, outer),
        float(beta.detach() if isinstance(beta, Tensor) else beta) / math.log(2),
    )
    left = _Parts.empty(plan, rows, outer, queries)
    mixed, lse = queries.new_empty(rows, outer), queries.new_empty(rows)
    sizes = (rows, outer, plan.parts, factor)
    with on_device_of(queries):
        _look_through(queries, keys, values, _bytes(mask), factor, plan, left, None, True, _ONCE)
        launch(memory_steps.join, (rows,), mixed, lse, *left, *sizes, PC=plan.PC, EP=plan.EP, num_warps=4)
    return mixed, lse


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one launch, or by products of the matrix library.

    >>> settle.__name__
    'settle'
    """
    if not _fits(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, mask, block)
    with on_device_of(queries):
        patterns = patterns.contiguous()
        if _multiplied(queries, patterns, mask):
            return _in_stages(queries, patterns, Limits.of(len(patterns), beta, max_steps, tol))
        if mask is None:
            limits = Limits.of(len(patterns), beta, max_steps, tol)
            return _in_one(Course(queries, patterns, max_steps), patterns, None, limits)
        course = Course(queries, patterns[:0], max_steps)
        course.part("facts").copy_(2 * reference.offset(patterns, beta, mask))
        return _in_one(course, patterns, _bytes(mask), Limits.of(1, beta, max_steps, tol))


def _multiplied(queries: Tensor, patterns: Tensor, mask: Tensor | None) -> bool:
    """Whether the matrix library is faster, and what it writes has room."""
    (rows, inner), (count, _) = queries.shape, patterns.shape
    weights = rows * count
    large = rows >= _MANY and weights * inner >= _LARGE
    return mask is None and large and weights <= _ROOM


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
    if _multiplied(state, patterns, None):
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
    plan = _plan(course.state, len(patterns), inner)
    launch(
        *(programs.whole, (-(-rows // plan.BQ),)),
        *(course.state, patterns, patterns if mask is None else mask, course.part("facts")),
        *(course.energies, course.steps, course.converged.view(torch.uint8), course.part("status")),
        *(rows, len(patterns), inner, most, factor, tol, rest),
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
    blocks = -(-rows // plan.BQ)
    left = _Parts.empty(plan, rows, inner, course.state)
    launch(
        *(programs.joint, (blocks, plan.parts)),
        *(course.state, patterns, patterns if mask is None else mask, course.part("facts")),
        *(course.energies, course.steps, course.converged.view(torch.uint8), course.part("status")),
        *(*left, course.part("meetings")),
        *(rows, len(patterns), plan.length, inner, plan.parts, most, factor, tol, rest),
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
    """:func:`thalweg.kernels.memory.nearest` by the matrix library, in blocks that are worth a launch.

    >>> nearest.__name__
    'nearest'
    """
    return reference.nearest(queries, keys, k, mask, block or 1 << 16)
