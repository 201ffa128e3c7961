"""Associative memories on a GPU in float32: the weights exist for a block of patterns at a time, in registers.

A program has a block of queries. With few patterns it makes all steps in one launch, until its queries have come to
rest; with many, the patterns of a step are shared out over programs, and a second, small launch puts the parts together
and moves the queries. The host waits for nothing in between: programs whose queries are at rest end at once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_passes as programs
from thalweg.kernels.gpu.launching import launch, on_device_of
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

__all__ = ["associate", "nearest", "settle"]

_MOST_FEATURES = 512  # what a program holds of a query; more goes to plain PyTorch
_ONE_LAUNCH = 1024  # patterns that one program goes through alone, step after step
# Steps before which the host looks whether all queries are at rest: soon, when most come to rest, and then seldom.
_LOOKS = frozenset((3, 5, 8, 12, 18, 26, *range(40, 1 << 16, 32)))
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
    rows, inner = queries.shape
    inside, outside = (max(16, 1 << (x - 1).bit_length()) for x in (inner, outer))
    widest = max(inside, outside)
    block_rows = 32 if rows >= 512 and widest <= 128 else 16
    block = 64 if widest <= 128 else 32 if widest == 256 else 16
    wanted = -(-2 * _processors(queries.device) // -(-rows // block_rows))  # programs for two on every processor
    parts = max(1, min(wanted, -(-patterns // (2 * block))))
    length = -(-patterns // parts)
    length = -(-length // block) * block
    return _Plan(inside, outside, block_rows, block, max(1, 8192 // outside), -(-patterns // length), length)


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
        launch(programs.join, (rows,), mixed, lse, *left, *sizes, PC=plan.PC, EP=plan.EP, num_warps=4)
    return mixed, lse


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one launch, or in two for every step.

    >>> settle.__name__
    'settle'
    """
    if not _fits(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, mask, block)
    with on_device_of(queries):
        return _settle(queries, patterns, beta, max_steps, tol, mask)


def _settle(queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None) -> Settled:
    rows, inner = queries.shape
    patterns, facts = patterns.contiguous(), reference.offset(patterns, beta, mask)
    state, energies = queries.clone(memory_format=torch.contiguous_format), queries.new_empty(rows, max_steps + 1)
    steps = torch.zeros(rows, dtype=torch.int64, device=queries.device)
    still = torch.zeros(rows, dtype=torch.int32, device=queries.device)
    plan, factor, present = _plan(queries, len(patterns), inner), beta / math.log(2), _bytes(mask)
    held = programs.HELD.value
    if held >= plan.DP and (len(patterns) <= _ONE_LAUNCH or plan.parts == 1):
        launch(
            *(programs.whole, (-(-rows // plan.BQ),)),
            *(state, patterns, patterns if present is None else present, facts, energies, steps, still),
            *(rows, len(patterns), inner, max_steps, factor, tol),
            MASKED=mask is not None,
            BQ=plan.BQ,
            BN=plan.BN,
            DP=plan.DP,
            PRECISION=_OFTEN,
            num_warps=_warps(plan),
            num_stages=2,
        )
        return Settled(state, energies, steps, still.bool())
    out = (energies, steps, still)
    _in_steps(state, patterns, present, facts, out, (max_steps, factor, tol), plan)
    return Settled(state, energies, steps, still.bool())


def _in_steps(
    state: Tensor,
    patterns: Tensor,
    mask: Tensor | None,
    facts: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    limits: tuple[int, float, float],
    plan: _Plan,
) -> None:
    """Two launches for every step; now and then a look whether any query is still on the way."""
    (rows, inner), (most, factor, tol) = state.shape, limits
    status = torch.full((rows,), 0 if most else 1, dtype=torch.int32, device=state.device)
    left = _Parts.empty(plan, rows, inner, state)
    for t in range(most + 1):
        if t in _LOOKS and bool((status == 2).all()):
            return
        _look_through(state, patterns, patterns, mask, factor, plan, left, status, t < most, _OFTEN)
        launch(
            *(programs.join_step, (rows,)),
            *(state, status, *left, facts, *out, rows, inner, plan.parts, t, most, factor, tol),
            MIX=t < most,
            PC=plan.PC,
            DP=plan.DP,
            num_warps=4,
        )


def nearest(queries: Tensor, keys: Tensor, k: int, mask: Tensor | None, block: int | None) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.nearest` by the matrix library, in blocks that are worth a launch.

    >>> nearest.__name__
    'nearest'
    """
    return reference.nearest(queries, keys, k, mask, block or 1 << 16)
