"""How the kernels of linear chains are launched: sizes, buffers and order.

Hardly ever does an item need the log domain. A caller who is going to look at the values anyway is therefore served on
the guess that none does: two launches fewer, and a kernel that tells the host in passing whether the guess was right.
If it was not, the rest is launched into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.kernels.gpu import chain_log, chain_posterior, chain_scaled
from thalweg.kernels.gpu.launching import NOTHING, Launch, Layout, Room, numbered, on_device_of, replayed
from thalweg.kernels.gpu.mailbox import Letter, mailbox_of
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = ["Guess", "Plan", "Saved", "dense", "gradients", "guessed", "messages", "plan_of", "values_and_gradients"]

MOST_HELD = 128  # labels up to which a matrix of transitions fits in the registers of one block
PROGRAMS = 264  # two for each multiprocessor of a large device: partial sums that are added up at the end
WARPS = 1056  # eight for each multiprocessor: more chunks than that would wait for each other
SEEN = 128  # items that a program looks at in one go
WARM_UP = 128  # steps after which a chain has forgotten where it came from, if it forgets


class Plan(NamedTuple):
    """Sizes of the launches for chains of one shape.

    >>> plan = plan_of(Chain(torch.zeros(2, 9, 20), torch.zeros(20, 20), *torch.zeros(2, 20), torch.tensor([9, 4])))
    >>> plan.width, plan.scaled, plan.walk_warps, plan.chunk
    (32, True, 1, 0)
    """

    B: int
    T: int
    C: int
    width: int  # CP: C rounded up to a power of two
    kind: int  # transitions: 0 shared, 1 per item, 2 per step
    double: bool
    scaled: bool  # held in registers and scaled, else in the log domain
    stride_item: int
    stride_step: int
    rows: int  # positions of a block in `prepare`
    blocks: int
    groups: int  # powers of two kept for each item
    matrices: int  # prepared: 1 or B, 0 outside the scaled domain
    tile: int  # rows of a tile in the log domain
    walk_warps: int
    chunk: int  # steps of a chunk where chunks pay, else 0


class Saved(NamedTuple):
    """What a walk keeps, in one room: messages (2, B, T, C), how they are scaled, which items are logarithms.

    >>> Saved(Room.like(torch.zeros(1), _room_of(_plan((1, 2, 3), (3, 3), False), True, True))).messages.shape
    torch.Size([2, 1, 2, 3])
    """

    room: Room

    @property
    def messages(self) -> Tensor:
        """(2, B, T, C), or (1, B, T, C) forwards alone."""
        return self.room.part(_KEPT)

    @property
    def flags(self) -> Tensor:
        """(B,) int32, not 0 where an item's messages are logarithms."""
        return self.room.part(_FLAGS)


_SHIFT, _SCALES, _MATS, _KEPT, _SUMS, _STATS, _TOTALS, _FLAGS, _NORMS, _WORK, _REDO, _ENTRIES, _JOINTS = range(13)
_PARTS = 13  # that walks have, before the partial sums
_Slopes = tuple[Tensor, Tensor, Tensor, Tensor]  # gradients in emissions, transitions, start and end


@lru_cache(maxsize=512)
def _plan(shape: tuple[int, ...], transitions: tuple[int, ...], double: bool) -> Plan:
    B, T, C = shape
    width = max(16, 1 << (C - 1).bit_length())
    kind = len(transitions) - 2
    scaled = kind < 2 and width <= MOST_HELD
    rows = max(1, min(128, 4096 // width))
    # One thread for each label, except where a column of float64 would not fit.
    warps = max(1, width // (16 if double and width == 128 else 32))
    chunk = max(WARM_UP, -(-T // max(1, WARPS // (2 * max(1, B) * warps))))
    chunk += -chunk % 4
    return Plan(
        *(B, T, C, width, kind, double, scaled),
        stride_item=(0, C * C, (T - 1) * C * C)[kind],
        stride_step=(0, 0, C * C)[kind],
        rows=rows,
        blocks=-(-T // rows),
        groups=max(1, -(-(T - 1) // 4)),
        matrices=(1, B)[kind] if scaled else 0,
        tile=width if width <= MOST_HELD else max(4, 8192 // width),
        walk_warps=warps,
        chunk=chunk if scaled and 4 * (chunk + WARM_UP) <= T else 0,
    )


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
    plan = _plan(emissions.shape, dense(chain).shape, emissions.dtype == torch.float64)
    if method == "auto":
        return plan
    if method not in ("sequential", "chunked"):
        raise ConfigError(f'`method` must be "auto", "sequential" or "chunked", got "{method}"')
    chunked = method == "chunked" and plan.scaled
    return plan._replace(chunk=(plan.chunk or WARM_UP) if chunked else 0)


def messages(
    plan: Plan,
    chain: Chain,
    gold: Tensor | None,
    *,
    keep: bool,
    both: bool,
    values: Tensor | None = None,
    sign: int = 1,
) -> tuple[Tensor, Saved]:
    """log Z less the gold score (B,), times ``sign``, and, with ``keep``, the messages: both ways, or forwards alone.

    Launches: `prepare`; the scaled walk, in chunks first where the plan says so; the log-domain walk, which returns at
    once from items that need none.
    """
    emissions, _, start, end, lengths = chain
    values = emissions.new_empty(plan.B) if values is None else values
    inputs = (emissions, dense(chain), start, end, lengths, lengths if gold is None else gold, values)

    def body(launch: Launch, given: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
        _messages(launch, plan, given, parts, gold is not None, keep=keep, both=both, sign=sign)

    key = ("messages", plan, WARM_UP, keep, both, sign, gold is None, values.dtype)
    return values, Saved(replayed(key, inputs, _room_of(plan, keep, both), body))


def _messages(
    launch: Launch,
    plan: Plan,
    given: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    gold: bool,
    *,
    keep: bool,
    both: bool,
    sign: int,
) -> None:
    _prepare(launch, plan, given, parts, gold)
    if plan.scaled:
        _walk(launch, plan, given, parts, keep=keep, both=both, sign=sign)
    _walk_logarithms(launch, plan, given, parts, keep=keep, both=both, sign=sign)


@lru_cache(maxsize=512)
def _room_of(plan: Plan, keep: bool, both: bool) -> Layout:
    """What a walk works with; parts that it does not use are empty."""
    B, T, C, width = plan.B, plan.T, plan.C, plan.width
    real, double, none = torch.float64 if plan.double else torch.float32, torch.float64, (0,)
    chunks = _chunks(plan)
    chunked = bool(plan.chunk and plan.scaled)
    streamed = plan.tile < width
    return Layout.of(
        (real, (B, T)),
        (real, (B, plan.groups) if keep and both else none),
        (real, (plan.matrices, 2, width, width) if plan.scaled else none),
        (real, (2 if both else 1, B, T, C) if keep else none),
        (double, (B * plan.blocks,)),
        (double, (max(1, plan.matrices), 2)),
        (double, (B, 4)),
        (torch.int32, (B,)),
        (real, (B, T) if keep and both and streamed else none),
        (real, (B, 2, 2, width) if streamed else none),
        (torch.int32, (B,)),
        (real, (B, 2, chunks, 2, width) if chunked else none),
        (double, (B, 2, chunks, 3) if chunked else none),
    )


def _chunks(plan: Plan) -> int:
    return max(1, -(-(plan.T - 1) // plan.chunk)) if plan.chunk else 1


def _prepare(launch: Launch, plan: Plan, given: tuple[Tensor, ...], parts: tuple[Tensor, ...], gold: bool) -> None:
    emissions, transitions, start, end, lengths, labels, _ = given
    launch(
        chain_scaled.prepare, (plan.B * plan.blocks + plan.matrices,),
        emissions, transitions, start, end, lengths, labels, parts[_SHIFT], parts[_SUMS], parts[_STATS], parts[_MATS],
        plan.B, plan.T, plan.C, plan.blocks, plan.stride_item, plan.stride_step,
        CP=plan.width, BT=plan.rows, BR=min(plan.width, plan.rows), GOLD=gold,
    )  # fmt: skip


def _walk_logarithms(
    launch: Launch,
    plan: Plan,
    given: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    *,
    keep: bool,
    both: bool,
    sign: int,
) -> None:
    """The walk in the log domain: for all items, or for those that the scaled walk gave up."""
    emissions, transitions, start, end, lengths, _, values = given
    shift, _, _, kept, sums, stats, totals, flags, norms, work, *_ = parts
    width = plan.width
    launch(
        chain_log.log_recurse, (plan.B, 2 if both else 1),
        emissions, transitions, start, end, lengths, shift, sums, stats, totals, flags, values, kept, norms, work,
        plan.B, plan.T, plan.C, plan.blocks, plan.kind, plan.stride_item, plan.stride_step,
        CP=width, BR=plan.tile, KEEP=keep, BOTH=both, ALWAYS=not plan.scaled, PER_STEP=plan.kind == 2, SIGN=sign,
        num_warps=max(1, width // 32) if width <= 64 else 8,
    )  # fmt: skip


def _walk(
    launch: Launch,
    plan: Plan,
    given: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    *,
    keep: bool,
    both: bool,
    sign: int,
) -> None:
    """The scaled walk: from end to end, or in chunks and from end to end only where those do not fit together."""
    emissions, _, start, end, lengths, _, values = given
    shift, scales, mats, kept, sums, stats, totals, flags, _, _, redo, entries, joints = parts
    buffers = (shift, sums, stats, mats, totals, values, kept, scales)
    B, T, C, width, chunk = plan.B, plan.T, plan.C, plan.width, plan.chunk
    sizes = (B, T, C, plan.blocks, plan.groups, width, plan.kind, chunk, WARM_UP)
    chunks = _chunks(plan)
    redo = redo if chunk else flags
    if chunk:
        launch(
            chain_scaled.recurse, (B, 2 if both else 1, chunks),
            emissions, start, end, lengths, *buffers, redo, entries, joints, *sizes, chunks,
            CP=width, KEEP=keep, BOTH=both, MODE=2, SIGN=sign, num_warps=plan.walk_warps,
        )  # fmt: skip
        launch(
            chain_scaled.join, (B,),
            lengths, sums, stats, totals, values, scales, redo, entries, joints,
            plan.blocks, plan.groups, plan.kind, chunk, chunks, CP=width, BK=16, KEEP=keep, BOTH=both, SIGN=sign,
        )  # fmt: skip
    launch(
        chain_scaled.recurse, (B, 4 if both else 2),
        emissions, start, end, lengths, *buffers, redo, entries, joints, *sizes, chunks,
        CP=width, KEEP=keep, BOTH=both, MODE=1 if chunk else 0, SIGN=sign, num_warps=plan.walk_warps,
    )  # fmt: skip


def gradients(
    plan: Plan,
    chain: Chain,
    saved: Saved,
    weights: Tensor,
    gold: Tensor | None,
    d_transitions: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """d_emissions (B, T, C); d_start and d_end (C,). ``d_transitions`` is written in place.

    ``d_transitions`` has the shape of the transitions, or (B, C, C) for shared ones: then each item's own sum.
    """
    emissions, _, start, end, lengths = chain
    d_emissions, d_start, d_end = torch.empty_like(emissions), torch.empty_like(start), torch.empty_like(end)
    labels = lengths if gold is None else gold
    inputs = (emissions, dense(chain), end, lengths, labels, weights, d_emissions, d_transitions, d_start, d_end)
    sums = _sums_of(plan, d_transitions.dim() - 2)

    def body(launch: Launch, given: tuple[Tensor, ...], parts: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
        _posteriors(launch, plan, sums, given, parts, kept, gold is not None)

    replayed(("gradients", plan, sums, saved.room.layout.size, gold is None), inputs, sums.layout, body, saved.room)
    return d_emissions, (d_start, d_end)


class _Sums(NamedTuple):
    """How the sum over positions is cut into partial sums, in the scaled domain and in that of logarithms."""

    kind: int  # of the sums: 0 shared, 1 per item, 2 per step
    BT: int
    BI: int
    log_rows: int
    log_labels: int
    parts: int
    log_parts: int
    layout: Layout


@lru_cache(maxsize=512)
def _sums_of(plan: Plan, kind: int) -> _Sums:
    B, T, width = plan.B, plan.T, plan.width
    BT, BI = (16, min(width, 32)) if plan.double else (32, min(width, 64))
    log_rows, log_labels = 16, width if width <= MOST_HELD else max(4, 8192 // width)
    parts = log_parts = B
    if kind != 1:
        parts = min(B * -(-T // BT), max(8, PROGRAMS * BI // width)) if plan.scaled else 0
        log_parts = min(B * -(-T // log_rows), max(8, (4 if kind == 2 else 1) * PROGRAMS * log_labels // width))
    real = torch.float64 if plan.double else torch.float32
    shared = kind == 0
    layout = Layout.of(
        (real, (parts + log_parts, width, width) if shared else (0,)), (torch.int32, (log_parts if shared else 0,))
    )
    return _Sums(kind, BT, BI, log_rows, log_labels, parts, log_parts, layout)


def _posteriors(
    launch: Launch,
    plan: Plan,
    sums: _Sums,
    given: tuple[Tensor, ...],
    partials: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    gold: bool,
    told: tuple[Tensor, Tensor, Tensor] | None = None,
    total: bool = False,
) -> None:
    """Gradients from messages. With ``told`` (values, their sum if that is asked for, a letter) no item is flagged yet:
    all are taken for well, and the host is told whether they are.
    """
    emissions, transitions, end, lengths, labels, weights, d_emissions, d_transitions, d_start, d_end = given
    shift, scales, mats, kept, _, stats, totals, flags, norms, *_ = saved
    kind, BT, BI, log_rows, log_labels, parts, log_parts, _ = sums
    B, T, C, width = plan.B, plan.T, plan.C, plan.width
    partial, used = partials if kind == 0 else (d_transitions, flags)
    looks = told is not None
    if plan.scaled:
        launch(
            chain_posterior.posterior, (parts + looks, width // BI),
            emissions, end, lengths, labels, weights, shift, scales, mats, kept, flags, d_emissions, partial,
            stats, totals, *(told or (weights, weights, lengths)),  # something must stand in their place
            B, T, C, -(-T // BT), plan.groups, parts, 2 * width * width * plan.kind, plan.kind,
            CP=width, BI=BI, BT=BT, GOLD=gold, PER_ITEM=kind == 1,
            PRECISION="ieee" if plan.double else "tf32x3", LOOK=looks + total, BB=SEEN,
            num_warps=max(2, min(8, width // 16)), num_stages=2,
        )  # fmt: skip
    if not looks:
        launch(
            chain_log.log_posterior, (log_parts, width // log_labels),
            emissions, transitions, end, lengths, labels, weights, shift, kept, norms, flags, used, d_emissions,
            partial, B, T, C, -(-T // log_rows), log_parts, parts, plan.stride_item, plan.stride_step,
            CP=width, BI=log_labels, BT=log_rows, GOLD=gold, ALWAYS=not plan.scaled, KIND=kind,
            num_warps=max(1, min(16, width * log_labels // 512)),
        )  # fmt: skip
    tiles = width * width // 64 if kind == 0 else 0
    launch(
        chain_posterior.finish, (tiles + 2,),
        lengths, d_emissions, partial, used, d_transitions, d_start, d_end,
        B, T, C, parts, 0 if looks else log_parts, tiles, CP=width, BK=64, BB=32,
    )  # fmt: skip


class _Course(NamedTuple):
    """A sequence of launches for chains of one shape, as :func:`replayed` takes it."""

    key: int
    layout: Layout
    body: Callable[..., None]


@lru_cache(maxsize=512)
def _course(plan: Plan, labelled: bool, guess: bool, total: bool, warm_up: int) -> _Course:
    """Values and gradients; on the guess that no item needs the log domain a letter, the sum before it, come last."""
    sums, sign = _sums_of(plan, plan.kind), -1 if labelled else 1
    rooms = (_room_of(plan, True, True), sums.layout)
    layout = Layout.of(*((dtype, shape) for room in rooms for _, dtype, shape in room.places))

    def body(launch: Launch, given: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
        walked, saved, partial = given[:7], parts[:_PARTS], parts[_PARTS:]
        told = (walked[6], given[-2], given[-1]) if guess else None
        _prepare(launch, plan, walked, saved, labelled)
        if plan.scaled:
            _walk(launch, plan, walked, saved, keep=True, both=True, sign=sign)
        if not guess:
            _walk_logarithms(launch, plan, walked, saved, keep=True, both=True, sign=sign)
        _posteriors(launch, plan, sums, _posterior_inputs(given), partial, saved, labelled, told, total)

    return _Course(numbered(("at once", plan, labelled, guess, total, warm_up)), layout, body)


def _tensors(chain: Chain, gold: Tensor | None, weights: Tensor) -> tuple[Tensor, ...]:
    """Those that kernels are given: the chain and labels, values, weights, gradients."""
    emissions, _, start, end, lengths = chain
    moves = dense(chain)
    return (
        *(emissions, moves, start, end, lengths, lengths if gold is None else gold, torch.empty_like(weights), weights),
        *(torch.empty_like(emissions), torch.empty_like(moves), torch.empty_like(start), torch.empty_like(end)),
    )


def _posterior_inputs(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    emissions, moves, _, end, lengths, labels, _, *rest = given[:12]
    return emissions, moves, end, lengths, labels, *rest


def values_and_gradients(
    plan: Plan, chain: Chain, gold: Tensor | None, weights: Tensor
) -> tuple[Tensor, Saved, _Slopes]:
    """:func:`messages`, all of them kept, and the gradients for such weights (B,).

    Without gold labels the values are log Z, else score(gold) - log Z.
    """
    inputs, course = _tensors(chain, gold, weights), _course(plan, gold is not None, False, False, WARM_UP)
    room = replayed(course.key, inputs, course.layout, course.body)
    return inputs[6], Saved(room), inputs[8:]  # type: ignore[return-value]


class Guess:
    """That all values are finite and no item needs the log domain: the device says whether that is so."""

    __slots__ = ("_found", "_inputs", "_labelled", "_letter", "_plan", "_room")

    def __init__(
        self,
        letter: Letter,
        plan: Plan,
        inputs: tuple[Tensor, ...],
        room: Room,
        labelled: bool,
        found: Tensor,
    ) -> None:
        self._letter, self._plan, self._inputs, self._room = letter, plan, inputs, room
        self._labelled, self._found = labelled, found

    def settled(self) -> bool:
        """Whether it was right. If it was not, all is as it should be from now on, but some values may not be finite.

        To be asked in the stream of the launches, and before anyone looks at values or gradients.
        """
        if self._letter.read() == 1:
            return True
        with on_device_of(self._inputs[0]):
            self._launch_the_rest()
        return False

    def _launch_the_rest(self) -> None:
        plan, labelled = self._plan, self._labelled
        sums, sign = _sums_of(plan, plan.kind), -1 if labelled else 1

        def body(launch: Launch, given: tuple[Tensor, ...], _: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
            saved, partial = kept[:_PARTS], kept[_PARTS:]
            _walk_logarithms(launch, plan, given[:7], saved, keep=True, both=True, sign=sign)
            _posteriors(launch, plan, sums, _posterior_inputs(given), partial, saved, labelled)

        replayed(("the rest", plan, labelled), self._inputs, NOTHING, body, self._room)
        if not self._found.dim():  # the sum
            self._found.detach().copy_(self._inputs[6].sum(dtype=torch.float64))


def guessed(
    plan: Plan, chain: Chain, gold: Tensor | None, weights: Tensor, *, total: bool
) -> tuple[Tensor, Saved, _Slopes, Guess]:
    """:func:`values_and_gradients` in four launches, of a scaled plan; the sum of the values alone with ``total``."""
    labelled, inputs = gold is not None, _tensors(chain, gold, weights)
    values = inputs[6]
    found = values.new_empty(()) if total else values
    key, layout, body = _course(plan, labelled, True, total, WARM_UP)
    letter = mailbox_of(values.device).letter()
    room = replayed(key, (*inputs, found, letter.tensor), layout, body)
    guess = Guess(letter, plan, inputs, room, labelled, found)
    return found, Saved(room), inputs[8:], guess  # type: ignore[return-value]
