"""How the kernels of linear chains are launched: sizes, buffers and order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.kernels.gpu import chain_log, chain_paths, chain_posterior, chain_walks
from thalweg.kernels.gpu.launching import Launch, Layout, Room, ceiling, replayed
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = ["Plan", "Saved", "dense", "gradients", "labels", "messages", "plan_of"]

MOST_HELD = 128  # labels up to which a matrix of transitions fits in the registers of one block
PROGRAMS = 264  # two for each multiprocessor of a large device: partial sums that are added up at the end
WARPS = 1056  # eight for each multiprocessor: more chunks than that would wait for each other
WARM_UP = 128  # steps after which a chain has forgotten where it came from, if it forgets; a multiple of 4


class Plan(NamedTuple):
    """Sizes of the launches for chains of one shape.

    >>> plan = plan_of(Chain(torch.zeros(2, 9, 20), torch.zeros(20, 20), *torch.zeros(2, 20), torch.tensor([9, 4])))
    >>> plan.width, plan.scaled, plan.warps, plan.chunk
    (32, True, 1, 0)
    """

    B: int
    T: int
    C: int
    width: int  # CP: C rounded up to a power of two
    kind: int  # transitions: 0 shared, 1 per item, 2 per step
    real: torch.dtype
    scaled: bool  # held in registers and scaled, else in the log domain
    tile: int  # rows of a tile in the log domain
    warps: int  # of a walk
    chunk: int  # steps of a chunk where chunks pay, else 0
    warm_up: int
    every: int = 1  # messages are kept at each so manieth position

    @property
    def blocks(self) -> int:
        """Of positions, in `prepare`."""
        return -(-self.T // chain_walks.ROWS.value)

    @property
    def chunks(self) -> int:
        """How many there are of the longest item."""
        return max(1, -(-(self.T - 1) // self.chunk)) if self.chunk else 0


class Work(NamedTuple):
    """The buffers of a walk; parts that it does not use are empty."""

    messages: Tensor  # (B, 1 or 2, slots, C), see the kernels
    flags: Tensor  # (B,) int32: an item's messages are logarithms
    scales: Tensor  # (2, B, T)
    facts: Tensor
    mats: Tensor
    entries: Tensor
    work: Tensor


class Saved(NamedTuple):
    """What a walk keeps, in one room."""

    plan: Plan
    room: Room

    def logarithms(self) -> Tensor:
        """Messages (B, 1 or 2, slots, C) as logarithms, whichever way they were kept; anything past the length."""
        kept = self.room.part(0)
        if not self.plan.scaled:
            return kept
        return torch.where((self.room.part(1) != 0)[:, None, None, None], kept, kept.clamp(min=0).log())


class _Scores(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    start: Tensor
    end: Tensor
    lengths: Tensor
    gold: Tensor

    @classmethod
    def of(cls, chain: Chain, gold: Tensor | None) -> _Scores:
        emissions, _, start, end, lengths = chain
        return cls(emissions, dense(chain), start, end, lengths, lengths if gold is None else gold)


@lru_cache(maxsize=512)
def _plan(shape: tuple[int, ...], transitions: tuple[int, ...], real: torch.dtype, warm_up: int) -> Plan:
    B, T, C = shape
    width = max(16, ceiling(C))
    kind = len(transitions) - 2
    scaled = kind < 2 and width <= MOST_HELD
    tile = width if width <= MOST_HELD else max(4, 8192 // width)
    # One thread for each label, except where a column of float64 would not fit.
    warps = max(1, width // (16 if real == torch.float64 and width == 128 else 32))
    chunk = max(warm_up, -(-T // max(1, WARPS // (2 * max(1, B) * warps))))
    chunk += -chunk % 4
    chunk = chunk if scaled and 4 * (chunk + warm_up) <= T else 0
    return Plan(B, T, C, width, kind, real, scaled, tile, warps, chunk, warm_up)


def dense(chain: Chain) -> Tensor:
    """The transitions of a chain as a tensor, which is all that the kernels take.

    >>> dense(Chain(torch.zeros(1, 2, 3), torch.zeros(3, 3), *torch.zeros(2, 3), torch.tensor([2]))).shape
    torch.Size([3, 3])
    """
    if isinstance(chain.transitions, SparseTransitions):
        raise ConfigError('sparse transitions have no GPU kernel; use backend="reference"')
    return chain.transitions


def plan_of(chain: Chain, method: str = "auto") -> Plan:
    """The plan for a chain; ``method`` "sequential" or "chunked" overrules the choice that "auto" makes by size.

    >>> long = Chain(torch.zeros(1, 4096, 4), torch.zeros(4, 4), *torch.zeros(2, 4), torch.tensor([4096]))
    >>> plan_of(long).chunk, plan_of(long, "sequential").chunk
    (128, 0)
    """
    emissions = chain.emissions
    plan = _plan(emissions.shape, dense(chain).shape, emissions.dtype, WARM_UP)
    if method == "auto":
        return plan
    if method not in ("sequential", "chunked"):
        raise ConfigError(f'`method` must be "auto", "sequential" or "chunked", got "{method}"')
    return plan._replace(chunk=(plan.chunk or WARM_UP) if method == "chunked" and plan.scaled else 0)


class _How(NamedTuple):
    """What is wanted of chains of one shape; it decides every launch."""

    plan: Plan
    walks: bool = True  # else there are messages already
    slopes: bool = False  # gradients
    path: str = ""  # "best" labels or "drawn" ones
    ways: int = 2  # 1: no messages backwards
    labelled: bool = False
    sign: int = 1  # of the values

    @property
    def best(self) -> bool:
        """Whether maxima stand for sums."""
        return self.path == "best"


@lru_cache(maxsize=512)
def _layout(how: _How) -> Layout:
    """Of :class:`Work`, and of partial sums of gradients."""
    plan, ways, best = how.plan, how.ways, how.best
    B, T, C, width, none = plan.B, plan.T, plan.C, plan.width, (0,)
    own = [
        (plan.real, (B, ways, -(-T // plan.every), C)),
        (torch.int32, (B,)),
        (plan.real, none if best else (2, B, T)),
        (torch.float64, none if best else (chain_walks.SUMS.value + plan.blocks, B)),
        (plan.real, (B if plan.kind else 1, 2, C, C) if plan.scaled and not best else none),
        (plan.real, (B, ways, plan.chunks, 3, width)),
        (plan.real, (B, ways, 2, width) if plan.tile < width else none),
    ]
    partial = [(plan.real, (parts if plan.kind == 0 else 0, width, width)) for parts in _parts(plan)]
    return Layout.of(*(own if how.walks else []), *(partial if how.slopes else []))


def _blocks(plan: Plan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Positions and labels of a block in the two kernels of gradients, scaled and logarithms."""
    double = plan.real == torch.float64
    return (16 if double else 32, min(plan.width, 32 if double else 64)), (16, plan.tile)


def _parts(plan: Plan) -> list[int]:
    """How many programs share the sum over positions in either of them: items, or whatever fills the device."""
    if plan.kind == 1:
        return [plan.B, plan.B]
    found = []
    for positions, labels in _blocks(plan):
        most = max(8, (4 if plan.kind else 1) * PROGRAMS * labels // plan.width)
        found.append(min(plan.B * -(-plan.T // positions), most))
    return [found[0] if plan.scaled else 0, found[1]]


def _walk(start: Launch, how: _How, x: _Scores, w: Work) -> None:
    """The walk with the matrix in registers: from end to end, or in chunks and again only what those did not manage."""
    plan, ways = how.plan, how.ways
    matrices = x.transitions if how.best else w.mats
    given = (x.emissions, matrices, x.start, x.end, x.lengths, w.scales, w.facts, w.messages)
    sizes = (w.entries, plan.T, plan.C, plan.chunk, plan.every)
    constants = {"CP": plan.width, "KIND": plan.kind, "MAX": how.best, "WAYS": ways}
    flags = x.lengths  # none is 0: all items
    if plan.chunk:
        flags, grid = w.flags, (plan.B, ways, plan.chunks)
        start(chain_walks.walk, grid, *given, flags, *sizes, **constants, WARM_UP=plan.warm_up, num_warps=plan.warps)
        start(
            chain_walks.join, (plan.B,),
            x.lengths, w.scales, w.facts, flags, w.entries, plan.T, plan.chunk, plan.chunks,
            CP=plan.width, MAX=how.best, WAYS=ways,
        )  # fmt: skip
    grid = (plan.B, ways if how.best else 2 * ways)
    start(chain_walks.walk, grid, *given, flags, *sizes, **constants, WARM_UP=0, num_warps=plan.warps)


def _log_walk(start: Launch, how: _How, x: _Scores, w: Work, values: Tensor) -> None:
    """All items, or those that the scaled walk gave up."""
    plan = how.plan
    start(
        chain_log.log_walk, (plan.B, how.ways),
        *x[:5], w.scales, w.facts, w.flags, values, w.messages, w.work, plan.T, plan.C, plan.every,
        CP=plan.width, BR=plan.tile, KIND=plan.kind, MAX=how.best, SIGN=how.sign,
        num_warps=max(1, plan.width // 32) if plan.width <= 64 else 8,
    )  # fmt: skip


def _sum(start: Launch, how: _How, x: _Scores, w: Work, values: Tensor) -> None:
    """Values and messages, or Viterbi's scores: at most three launches, and two more for chunks."""
    plan = how.plan
    if not how.best:
        start(
            chain_walks.prepare, (plan.B, plan.blocks + plan.scaled), *x, w.scales, w.facts, w.mats, plan.T, plan.C,
            CP=plan.width, GOLD=how.labelled, KIND=plan.kind, num_warps=4 if plan.width <= MOST_HELD else 8,
        )  # fmt: skip
    if plan.scaled:
        _walk(start, how, x, w)
    if not (plan.scaled and how.best):
        _log_walk(start, how, x, w, values)


def _slopes(
    start: Launch, how: _How, x: _Scores, w: Work, weights: Tensor, slopes: Sequence[Tensor], partial: Sequence[Tensor]
) -> None:
    """Gradients from messages: at most three launches."""
    plan, shared = how.plan, how.plan.kind == 0
    d_emissions, d_transitions, d_start, d_end = slopes
    sums = partial if shared else (d_transitions, d_transitions)
    parts, width = _parts(plan), plan.width
    kept = (x.end, x.lengths, x.gold, weights, w.scales, w.messages, w.flags, d_emissions)
    sizes, constants = (plan.B, plan.T, plan.C), {"CP": width, "GOLD": how.labelled, "KIND": plan.kind}
    (BT, BI), (log_BT, log_BI) = _blocks(plan)
    if plan.scaled:
        start(
            chain_posterior.posterior, (parts[0], width // BI), x.emissions, w.mats, *kept, sums[0], *sizes,
            **constants, BI=BI, BT=BT, num_warps=max(2, min(8, width // 16)), num_stages=2,
        )  # fmt: skip
    start(
        chain_log.log_posterior, (parts[1], width // log_BI), x.emissions, x.transitions, *kept, sums[1], *sizes,
        **constants, BI=log_BI, BT=log_BT, num_warps=max(1, min(16, width * log_BI // 512)),
    )  # fmt: skip
    start(
        chain_posterior.finish, (width * width // 64 * shared + 2,),
        x.lengths, d_emissions, *sums, d_transitions, d_start, d_end, *sizes, *parts, CP=width, BK=64, BB=32,
    )  # fmt: skip


def _way_back(start: Launch, how: _How, x: _Scores, w: Work, scores: Tensor, labels: Tensor, draws: Tensor) -> None:
    plan, drawn = how.plan, how.path == "drawn"
    start(
        chain_paths.way_back, (plan.B, len(draws) if drawn else 1),
        *x[:5], w.messages, w.flags, draws, labels, scores, plan.T, plan.C,
        CP=max(32, plan.width), KIND=plan.kind, DRAW=drawn, LOGS=not plan.scaled, num_warps=1,
    )  # fmt: skip


def _run(how: _How, x: _Scores, values: Tensor, *rest: Tensor, saved: Room | None = None) -> Room:
    """The launches of ``how``, recorded once: ``values``, then weights and gradients, or labels and uniform numbers."""

    def body(
        start: Launch, given: tuple[Tensor, ...], parts: tuple[Tensor, ...], kept: tuple[Tensor, ...] = ()
    ) -> None:
        x, values, rest, w = _Scores(*given[:6]), given[6], given[7:], Work(*(kept or parts)[:7])
        if how.walks:
            _sum(start, how, x, w, values)
        if how.slopes:
            _slopes(start, how, x, w, rest[0], rest[1:], parts[-2:])
        if how.path:
            _way_back(start, how, x, w, values, *rest)

    key = ("chain", how, saved and saved.layout.size, (len(rest[1]), rest[1].dtype) if how.path else None)
    return replayed(key, (*x, values, *rest), _layout(how), body, saved)


def _empty(x: _Scores) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(part) for part in x[:4])


def messages(
    plan: Plan, chain: Chain, gold: Tensor | None, *, ways: int = 2, sign: int = 1, weights: Tensor | None = None
) -> tuple[Tensor, Saved, tuple[Tensor, ...]]:
    """log Z less the gold score (B,), times ``sign``, and the messages: both ways (2), or forwards alone (1).

    Also the gradient for such ``weights`` (B,), where they are given, in the same sequence of launches.
    """
    x, values = _Scores.of(chain, gold), chain.emissions.new_empty(plan.B)
    how = _How(plan, slopes=weights is not None, ways=ways, labelled=gold is not None, sign=sign)
    gradient = () if weights is None else (weights, *_empty(x))
    return values, Saved(plan, _run(how, x, values, *gradient)), gradient[1:]


def gradients(chain: Chain, saved: Saved, weights: Tensor, gold: Tensor | None) -> tuple[Tensor, ...]:
    """Of sum_b weights[b] (log Z - score(gold))[b] in emissions, transitions, start and end, in their shapes."""
    x = _Scores.of(chain, gold)
    slopes, how = _empty(x), _How(saved.plan, walks=False, slopes=True, labelled=gold is not None)
    _run(how, x, weights, weights, *slopes, saved=saved.room)
    return slopes


def labels(plan: Plan, chain: Chain, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best labels (B, T) and their scores (B,), or samples (S, B, T) by numbers of that shape and log Z (B,)."""
    how, values = _How(plan, path="best" if uniforms is None else "drawn", ways=1), chain.emissions.new_empty(plan.B)
    found = chain.lengths.new_empty((plan.B, plan.T) if uniforms is None else uniforms.shape)
    _run(how, _Scores.of(chain, None), values, found, values if uniforms is None else uniforms)
    return found, values
