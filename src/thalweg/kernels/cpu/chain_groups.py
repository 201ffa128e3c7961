"""Tables for the kernels of :mod:`~thalweg.kernels.cpu.chain_lanes`, and what their results mean."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.cpu import chain_lanes
from thalweg.kernels.cpu.chain_lanes import AHEAD, SLOTS, WIDTH
from thalweg.kernels.cpu.chain_scaled import SAFE_RANGE
from thalweg.kernels.cpu.emitter import LANES, types
from thalweg.kernels.cpu.threads import Entry, enter, share
from thalweg.kernels.potentials import Chain

__all__ = ["Gradients", "Grouped", "at_once", "backward", "fits", "forward", "times"]

_KINDS = {
    torch.float32: (types.float32, 4, int(SAFE_RANGE["f"])),
    torch.float64: (types.float64, 8, int(SAFE_RANGE["d"])),
}
_MOST_STEPS = 2**24  # float32 counts no further
_MOST_KEPT = 2**19  # numbers of eight bytes that a thread keeps for its next call
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
        address = chain_lanes.compiled(name, _KINDS[dtype][0])
        found = _entries[name, dtype] = Entry(address, None)  # such code stays
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


def _shared_by(size: int) -> int:
    """Numbers that all items share: powers of the transitions, twice, and of the end scores, in whole eights."""
    return 2 * size * size + size + LANES


def _room_for(size: int, steps: int, *, both: bool = False) -> int:
    """Numbers of eight bytes that a part needs as scratch, in either pass or where one follows the other."""
    rows = (2 + LANES) * size + 4
    sums = (2 * LANES + 1) * size * size + 2 * size + 2 * LANES
    trail = 2 * steps * size * WIDTH + AHEAD + 2 + _shared_by(size) if both else 0
    return -(-(rows * WIDTH + WIDTH + sums + steps * size + trail) // LANES) * LANES


def _found(table: Any) -> tuple[int, int]:
    """The first wrong label or -1, and how many items are lost."""
    wrong, lost = -1, 0
    for place in range(SLOTS + 2, len(table), 3):
        wrong, lost = table[place] if wrong < 0 else wrong, lost + table[place + 1]
    return wrong, lost


def _table(dtype: torch.dtype, shape: Sequence[int], parts: int) -> Any:
    """A table with all that does not differ from call to call, but for the addresses of other memory."""
    table = (ctypes.c_int64 * (SLOTS + 2 + 3 * parts))()
    own = ctypes.addressof(table)
    table[chain_lanes.PARTS : chain_lanes.SIZE + 1] = (parts, _KINDS[dtype][1], *shape)
    table[chain_lanes.TOPS], table[chain_lanes.FOUND] = own + 8 * SLOTS, own + 8 * (SLOTS + 2)
    return table


def _inputs(chain: Chain, gold: Tensor | None) -> tuple[int, ...]:
    """How a table begins: counters, the safe range, and addresses of what is given."""
    emissions, moves, start, end, lengths = chain
    return (
        0, 0, _KINDS[emissions.dtype][2],
        emissions.data_ptr(), moves.data_ptr(), start.data_ptr(), end.data_ptr(), lengths.data_ptr(),  # type: ignore[union-attr]
        0 if gold is None else gold.data_ptr(),
    )  # fmt: skip


def forward(chain: Chain, gold: Tensor | None) -> tuple[Tensor, Grouped] | None:
    """log Z less the score of the gold labels, (B,), as far as it is not lost; None for scores of too large a range.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 3, 2), torch.zeros(2, 2), none, none, torch.full((16,), 3))
    >>> forward(chain, None)[0][:2].exp()
    tensor([8., 8.])
    """
    batch, steps, size = shape = chain.emissions.shape
    dtype = chain.emissions.dtype
    groups = -(-batch // WIDTH)
    threads, parts = share(batch * steps * size * size, groups)
    room, block = _room_for(size, steps), groups * steps * size * WIDTH
    kept = torch.empty(2 * block + _shared_by(size), dtype=dtype)
    doubles, values = torch.empty(batch + parts * room, dtype=torch.float64), torch.empty(batch, dtype=dtype)
    table = _table(dtype, shape, parts)
    first, item, log_z = kept.data_ptr(), _KINDS[dtype][1], doubles.data_ptr()
    table[chain_lanes.SHARED] = first + 2 * block * item
    table[chain_lanes.ALPHA], table[chain_lanes.POWERS] = first, first + block * item
    table[chain_lanes.LOG_Z : chain_lanes.ROOM_BYTES + 1] = (log_z, log_z + 8 * batch, 8 * room)
    table[: chain_lanes.TOTAL] = (*_inputs(chain, gold), values.data_ptr())
    _compiled("prepare", dtype).call(table)
    if table[chain_lanes.RANGE]:
        return None
    enter(_compiled("forward", dtype), table, threads)
    wrong, lost = _found(table)
    return values, Grouped(table, (kept, doubles), lost, wrong, threads)


@lru_cache(maxsize=16)
def _ones(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(batch, dtype=dtype)


def _gradients(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    emissions, moves, start, end, _ = chain
    like = torch.empty_like
    return like(emissions), like(moves), like(start), like(end)  # type: ignore[arg-type]


class _Work(NamedTuple):
    """A table for both passes of chains of one shape, the memory it speaks of, which nothing outlives, and the code."""

    shape: torch.Size
    dtype: torch.dtype
    most: int  # threads that there may be
    table: Any
    kept: tuple[Tensor, Tensor]
    values: int  # the address of room for (B,)
    threads: int
    both: Entry

    @classmethod
    def of(cls, emissions: Tensor) -> _Work:
        """For chains of the type and shape of these."""
        batch, steps, size = shape = emissions.shape
        dtype = emissions.dtype
        threads, parts = share(batch * steps * size * size, -(-batch // WIDTH))
        room, ones, table = _room_for(size, steps, both=True), _ones(batch, dtype), _table(dtype, shape, parts)
        scratch = torch.empty(2 * batch + parts * room, dtype=torch.float64)
        log_z = scratch.data_ptr()
        values = log_z + 8 * batch
        table[chain_lanes.LOG_Z : chain_lanes.ROOM_BYTES + 1] = (log_z, values + 8 * batch, 8 * room)
        table[chain_lanes.WEIGHT] = ones.data_ptr()
        both = _compiled("both", dtype)
        return cls(shape, dtype, torch.get_num_threads(), table, (scratch, ones), values, threads, both)

    def serves(self, emissions: Tensor) -> bool:
        """Whether it is for chains like these, and as many threads as there are now."""
        alike = self.shape == emissions.shape and self.dtype == emissions.dtype
        return alike and self.most == torch.get_num_threads()


class _Last(local):
    """What the last call of this thread worked with: most are followed by one of the same shape."""

    work: _Work | None = None


_last = _Last()


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # in emissions, transitions, start and end


def at_once(chain: Chain, gold: Tensor | None, total: bool) -> tuple[Tensor, Gradients, bool] | None:
    """log Z, or score(gold) - log Z; the gradient of the sum of log Z - score(gold); whether all is known to be finite.

    The values are (B,), or their sum where that is asked for.

    A group of items goes forward and back before the next one begins, so that what lies between stays in the cache.
    None for chains that do not fit, for scores of too large a range, for wrong labels, and where an item is lost.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 3, 2), torch.zeros(2, 2), none, none, torch.full((16,), 3))
    >>> value, gradients, finite = at_once(chain, None, total=True)
    >>> (value / 16).exp(), gradients[2], finite
    (tensor(8.), tensor([8., 8.]), True)
    """
    emissions, moves, start, end, _ = chain
    work, _last.work = _last.work, None  # lest something that interrupts this call has it too
    if work is None or not work.serves(emissions) or moves.dim() != 2:  # type: ignore[union-attr]
        if not fits(chain):
            return None
        work = _Work.of(emissions)
    table, like = work.table, torch.empty_like
    d_emissions, d_moves, d_start, d_end = like(emissions), like(moves), like(start), like(end)  # type: ignore[arg-type]
    values = torch.empty(() if total else len(emissions), dtype=work.dtype)
    first, spare = values.data_ptr(), work.values
    table[: chain_lanes.STATE] = (
        *_inputs(chain, gold), spare if total else first, first if total else spare,
        d_emissions.data_ptr(), d_moves.data_ptr(), d_start.data_ptr(), d_end.data_ptr(),
    )  # fmt: skip
    enter(work.both, table, work.threads)
    state = table[chain_lanes.STATE]
    if work.kept[0].numel() <= _MOST_KEPT:
        _last.work = work
    return None if state > 1 else (values, (d_emissions, d_moves, d_start, d_end), not state)


def times(gradients: Gradients, weights: Tensor, gold: Tensor | None) -> Gradients | None:
    """The gradient of :func:`at_once` for weights (B,) of its values or one for all, in place; None where they differ.

    >>> times((torch.ones(1),) * 4, torch.full((3,), -1.0), torch.zeros(3, 1))[0], times((), torch.arange(2.0), None)
    (tensor([1.]), None)
    """
    if not weights.dim():
        factor = weights.item()
    else:
        factor = weights[0].item()
        if weights.stride(0) and not bool((weights == factor).all()):
            return None
    factor = factor if gold is None else -factor
    if factor != 1.0:  # the usual loss has 1
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    return gradients


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
    parts, room = table[chain_lanes.PARTS], _room_for(chain.size, chain.steps)
    scratch, gradients = torch.empty(parts * room, dtype=torch.float64), _gradients(chain)
    table[chain_lanes.NEXT] = 0
    table[chain_lanes.GOLD] = 0 if gold is None else gold.data_ptr()
    table[chain_lanes.ROOM] = scratch.data_ptr()
    table[chain_lanes.WEIGHT] = weights.data_ptr()
    table[chain_lanes.D_EMISSIONS : chain_lanes.D_END + 1] = [x.data_ptr() for x in gradients]
    enter(_compiled("backward", chain.emissions.dtype), table, saved.threads)
    return gradients
