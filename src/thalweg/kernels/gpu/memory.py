"""Associative memories on a GPU in float32: the weights exist for a block of patterns at a time, in registers.

A program has a block of queries and makes all their steps in one launch, until they have come to rest. With many
patterns several programs share them out and meet after every pass to put their parts together and move the queries.
Where the products take longer than to write weights down and read them again, and these have room, the matrix library
multiplies; queries at rest are then left out as soon as the host notices.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_passes as programs
from thalweg.kernels.gpu import memory_steps
from thalweg.kernels.gpu.launching import launch, on_device_of, repeated
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "nearest", "settle"]

_MOST_FEATURES = 512  # what a program holds of a query; more goes to plain PyTorch
_LARGE = 1 << 27  # multiply-adds of a pass from which the matrix library is faster
_ROOM = 1 << 24  # weights that may be written down, 64 MiB
_MANY = 128  # queries below which a pass is all reading of patterns
_ROW = 8192  # weights of a query that a program holds
# Steps before which the host looks how many queries are still on the way; the first only if steps may be short at once.
_LOOKS = frozenset((2, 4, 8, *range(12, 1 << 16, 12)))
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
        limits = _Limits.of(patterns, beta, mask, max_steps, tol)
        return _settle(queries, patterns.contiguous(), _bytes(mask), limits)


class _Limits(NamedTuple):
    """Steps at most, beta in units of log 2, the shortest step; energies have half the square of ``largest``, and
    ``rest``, beside the query."""

    most: int
    factor: float
    tol: float
    largest: Tensor
    rest: float

    @classmethod
    def of(cls, patterns: Tensor, beta: float, mask: Tensor | None, most: int, tol: float) -> _Limits:
        """In as few launches as it takes."""
        factor = beta / math.log(2)
        if mask is None:
            return cls(
                most, factor, tol, torch.linalg.vector_norm(patterns, dim=1).amax(), math.log(len(patterns)) / beta
            )
        return cls(most, factor, tol, (2 * reference.offset(patterns, beta, mask)).sqrt(), 0.0)


class _Course(NamedTuple):
    """Where queries are on their way: all of it is written in place."""

    state: Tensor  # (Q, D)
    energies: Tensor  # (Q, most + 1)
    steps: Tensor  # int64
    still: Tensor  # uint8
    status: Tensor  # int32: 0 on the way, 1 at rest without an energy, 2 done
    meetings: Tensor  # int32: a counter for every block of queries

    @classmethod
    def start(cls, queries: Tensor, most: int) -> _Course:
        """Before the first step; one launch clears what must be clear."""
        rows = len(queries)
        places = -(-rows // 16) * 16  # addresses that are multiples of 16 bytes need no kernels of their own
        clear = torch.zeros(17 * places, dtype=torch.uint8, device=queries.device)
        steps, status, meetings, still = clear.split((8 * places, 4 * places, 4 * places, places))
        status = status.view(torch.int32)[:rows]
        return cls(
            queries.clone(memory_format=torch.contiguous_format),
            queries.new_empty(rows, most + 1),
            steps.view(torch.int64)[:rows],
            still[:rows],
            status if most else status.fill_(1),
            meetings.view(torch.int32),
        )

    def settled(self) -> Settled:
        """What it all came to."""
        return Settled(self.state, self.energies, self.steps, self.still.view(torch.bool))


def _settle(queries: Tensor, patterns: Tensor, mask: Tensor | None, limits: _Limits) -> Settled:
    weights = len(queries) * len(patterns)
    many = len(queries) >= _MANY and weights * queries.shape[1] >= _LARGE
    if mask is None and many and weights <= _ROOM:
        return _in_stages(queries, patterns, limits)
    course = _Course.start(queries, limits.most)
    plan = _joint_plan(queries, len(patterns))
    if plan.parts == 1 and programs.HELD.value >= plan.DP:
        _alone(course, patterns, mask, limits)
    else:
        _jointly(course, patterns, mask, limits, plan)
    return course.settled()


def _alone(course: _Course, patterns: Tensor, mask: Tensor | None, limits: _Limits) -> None:
    """All steps of a block of queries by one program."""
    (rows, inner), (most, factor, tol, largest, rest) = course.state.shape, limits
    plan = _plan(course.state, len(patterns), inner)
    launch(
        *(programs.whole, (-(-rows // plan.BQ),)),
        *(course.state, patterns, patterns if mask is None else mask, largest),
        *(course.energies, course.steps, course.still, rows, len(patterns), inner, most, factor, tol, rest),
        MASKED=mask is not None,
        BQ=plan.BQ,
        BN=plan.BN,
        DP=plan.DP,
        PRECISION=_OFTEN,
        num_warps=_warps(plan),
        num_stages=2,
    )


def _jointly(course: _Course, patterns: Tensor, mask: Tensor | None, limits: _Limits, plan: _Plan) -> None:
    """All steps of a block of queries by several programs, which wait for one another."""
    (rows, inner), (most, factor, tol, largest, rest) = course.state.shape, limits
    blocks = -(-rows // plan.BQ)
    left = _Parts.empty(plan, rows, inner, course.state)
    launch(
        *(programs.joint, (blocks, plan.parts)),
        *(course.state, patterns, patterns if mask is None else mask, largest),
        *(course.energies, course.steps, course.still, course.status, *left, course.meetings),
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


def _in_stages(queries: Tensor, patterns: Tensor, limits: _Limits) -> Settled:
    """Steps of all queries until half of them are at rest, then whatever suits the others."""
    most = limits.most
    course = _Course.start(queries, most)
    t = _by_products(course, patterns, limits)
    found = course.settled()
    if t > most:
        return found
    resting, going = ((course.status == which).nonzero().flatten() for which in (1, 0))
    if len(resting):  # they want an energy of where they are, and no more
        after = _settle(found.state[resting], patterns, None, limits._replace(most=0))
        found.energies[resting, t:] = after.energies
    if len(going):
        after = _settle(found.state[going], patterns, None, limits._replace(most=most - t))
        found.energies[going, t:] = after.energies
        found.state[going], found.converged[going] = after.state, after.converged
        found.steps[going] += after.steps
    return found


def _by_products(course: _Course, patterns: Tensor, limits: _Limits) -> int:
    """Every step by two products of the matrix library and two launches; the step before which it left off."""
    (rows, inner), (most, factor, tol, largest, rest) = course.state.shape, limits
    scores, mixed = course.state.new_empty(rows, len(patterns)), torch.empty_like(course.state)
    tops, totals = course.state.new_empty(2, rows)
    across = patterns.mT
    weighing = (memory_steps.weigh, (rows,), scores, course.status, tops, totals, len(patterns), factor)
    held = {"WHOLE": len(patterns) <= _ROW, "BN": min(_ROW, 1 << (len(patterns) - 1).bit_length()), "num_warps": 8}
    moving = (memory_steps.join_step, (rows,), course.state, course.status, tops, totals, mixed, largest)
    moving += (course.energies, course.steps, course.still, rows, inner, 1)
    width = {"PC": 1, "DP": max(16, 1 << (inner - 1).bit_length()), "num_warps": 4}
    weigh = move = None
    for t in range(most):
        if t in _LOOKS and (t > 2 or tol > 0):
            left = int((course.status < 2).sum())
            if 2 * left <= rows:
                return t if left else most + 1
        torch.mm(course.state, across, out=scores)
        if weigh is None:
            weigh = repeated(*weighing, KEEP=True, **held)
        else:
            weigh()
        torch.mm(scores, patterns, out=mixed)
        if move is None:
            move = repeated(*moving, t, most, factor, tol, rest, MIX=True, **width)
        else:
            move(t=t)
    torch.mm(course.state, across, out=scores)
    launch(*weighing, KEEP=False, **held)
    launch(*moving, most, most, factor, tol, rest, MIX=False, **width)
    return most + 1


def nearest(queries: Tensor, keys: Tensor, k: int, mask: Tensor | None, block: int | None) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.nearest` by the matrix library, in blocks that are worth a launch.

    >>> nearest.__name__
    'nearest'
    """
    return reference.nearest(queries, keys, k, mask, block or 1 << 16)
