"""Tables for the kernels of :mod:`~thalweg.kernels.cpu.chain_lanes`, and what their results mean."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.kernels.cpu import chain_lanes
from thalweg.kernels.cpu.chain_lanes import SLOTS, WIDTH, room_for
from thalweg.kernels.cpu.chain_scaled import SAFE_RANGE
from thalweg.kernels.cpu.threads import Entry, enter, share
from thalweg.kernels.potentials import Chain

__all__ = ["Grouped", "backward", "both", "fits", "forward"]

_KINDS = {torch.float32: (np.float32, 4, int(SAFE_RANGE["f"])), torch.float64: (np.float64, 8, int(SAFE_RANGE["d"]))}
_MOST_STEPS = 2**24  # float32 counts no further
_entries: dict[tuple[str, torch.dtype], Entry] = {}


class Grouped(NamedTuple):
    """What the forward pass leaves to the backward pass.

    Attributes:
        table: the forward pass's own, with the addresses of what is listed here.
        kept: what must stay alive.
        lost: for how many items the log domain must compute.
        wrong: the first gold label out of range, counted through the batch, or -1.
        threads: how many share the work.
    """

    table: Any
    kept: tuple[Tensor, Tensor]
    lost: int
    wrong: int
    threads: int

    @property
    def log_z(self) -> Tensor:
        """(B,) float64, NaN where the log domain must compute."""
        return self.kept[1][: self.table[chain_lanes.BATCH]]


def _compiled(name: str, dtype: torch.dtype) -> Entry:
    found = _entries.get((name, dtype))
    if found is None:
        code = chain_lanes.entry(name, _KINDS[dtype][0])
        found = _entries[name, dtype] = Entry(code.address, code)
    return found


def fits(chain: Chain) -> bool:
    """Whether there are items enough, few labels and one matrix for all.

    >>> fits(Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    False
    """
    batch, steps, size = chain.emissions.shape
    moves = chain.transitions
    few = size <= chain_lanes.MOST_LABELS and batch >= WIDTH and steps < _MOST_STEPS
    return few and isinstance(moves, Tensor) and moves.dim() == 2


class _Plan(NamedTuple):
    """A table for the forward pass, or for both, and what belongs to it."""

    table: Any
    values: Tensor  # (B,)
    doubles: Tensor  # log Z and scratch
    kept: Tensor
    threads: int

    def found(self) -> tuple[int, int]:
        """The first wrong label or -1, and how many items are lost."""
        wrong, lost = -1, 0
        for place in range(SLOTS + 2, len(self.table), 2):
            wrong, lost = self.table[place] if wrong < 0 else wrong, lost + self.table[place + 1]
        return wrong, lost


def _plan(chain: Chain, gold: Tensor | None, both: bool) -> _Plan | None:
    """The table of a call with everything prepared; None for scores of too large a range."""
    emissions, moves, start, end, lengths = chain
    assert isinstance(moves, Tensor)
    batch, steps, size = emissions.shape
    dtype = emissions.dtype
    _, item, limit = _KINDS[dtype]
    groups = -(-batch // WIDTH)
    threads, parts = share(batch * steps * size * size, groups)
    room, block = room_for(size, steps, both=both), 0 if both else groups * steps * size * WIDTH
    kept = torch.empty(2 * block + 2 * size * size + size + 8, dtype=dtype)
    doubles, values = torch.empty(batch + parts * room, dtype=torch.float64), torch.empty(batch, dtype=dtype)
    table = (ctypes.c_int64 * (SLOTS + 2 + 2 * parts))()
    own, first, log_z = ctypes.addressof(table), kept.data_ptr(), doubles.data_ptr()
    table[:SLOTS] = (
        0, 0, parts, item, limit, batch, steps, size,
        emissions.data_ptr(), moves.data_ptr(), start.data_ptr(), end.data_ptr(), lengths.data_ptr(),
        0 if gold is None else gold.data_ptr(),
        first + 2 * block * item, own + 8 * SLOTS, first, first + block * item,
        log_z, values.data_ptr(), log_z + 8 * batch, 8 * room, own + 8 * (SLOTS + 2), 0, 0, 0, 0, 0,
    )  # fmt: skip
    _compiled("prepare", dtype).call(table)
    return None if table[chain_lanes.RANGE] else _Plan(table, values, doubles, kept, threads)


def forward(chain: Chain, gold: Tensor | None) -> tuple[Tensor, Grouped] | None:
    """log Z less the score of the gold labels, (B,), as far as it is not lost; None for scores of too large a range.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 3, 2), torch.zeros(2, 2), none, none, torch.full((16,), 3))
    >>> forward(chain, None)[0][:2].exp()
    tensor([8., 8.])
    """
    plan = _plan(chain, gold, both=False)
    if plan is None:
        return None
    enter(_compiled("forward", chain.emissions.dtype), plan.table, plan.threads)
    wrong, lost = plan.found()
    return plan.values, Grouped(plan.table, (plan.kept, plan.doubles), lost, wrong, plan.threads)


@lru_cache(maxsize=16)
def _ones(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(batch, dtype=dtype)


def _gradients(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, size = chain.emissions.dtype, chain.size
    d_moves = torch.empty(size, size, dtype=dtype)
    return torch.empty_like(chain.emissions), d_moves, torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)


def both(chain: Chain, gold: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], int] | None:
    """log Z, or score(gold) - log Z; the gradient of the sum of log Z - score(gold); the first wrong label or -1.

    A group of items goes forward and back before the next one begins, so that what lies between stays in the cache.
    None for scores of too large a range, or where an item is lost.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 3, 2), torch.zeros(2, 2), none, none, torch.full((16,), 3))
    >>> both(chain, None)[1][2]
    tensor([8., 8.])
    """
    plan = _plan(chain, gold, both=True)
    if plan is None:
        return None
    gradients, weights = _gradients(chain), _ones(len(chain.emissions), chain.emissions.dtype)
    plan.table[chain_lanes.WEIGHT : SLOTS] = (weights.data_ptr(), *(x.data_ptr() for x in gradients))
    enter(_compiled("both", chain.emissions.dtype), plan.table, plan.threads)
    wrong, lost = plan.found()
    return None if lost else (plan.values, gradients, wrong)


def backward(
    chain: Chain, saved: Grouped, weights: Tensor, gold: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of sum_b weights[b] value[b] in emissions, transitions, start and end.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 1, 2), torch.zeros(2, 2), none, none, torch.full((16,), 1))
    >>> backward(chain, forward(chain, None)[1], torch.ones(16), None)[2]
    tensor([8., 8.])
    """
    table = type(saved.table).from_buffer_copy(saved.table)  # another thread may be at the same time
    parts, room = table[chain_lanes.PARTS], room_for(chain.size, chain.steps)
    scratch, gradients = torch.empty(parts * room, dtype=torch.float64), _gradients(chain)
    table[chain_lanes.NEXT] = 0
    table[chain_lanes.GOLD] = 0 if gold is None else gold.data_ptr()
    table[chain_lanes.ROOM] = scratch.data_ptr()
    table[chain_lanes.WEIGHT : SLOTS] = (weights.data_ptr(), *(x.data_ptr() for x in gradients))
    enter(_compiled("backward", chain.emissions.dtype), table, saved.threads)
    return gradients
