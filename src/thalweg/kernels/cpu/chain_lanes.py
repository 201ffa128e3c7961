"""Chains of few labels, many items at a time: one item a lane.

With nine labels a row fills its vectors badly and a step is all latency. Here a row holds one label of a group of
items; the recursion is that of :mod:`~thalweg.kernels.cpu.chain_scaled`, for shared transitions of safe range only.
Lanes past their item's length hold finite numbers that are multiplied by zero.

At such sizes a call takes less time than Python needs to look at its arguments. So each pass is one C function of one
argument, a table of sizes and addresses (the names below count its slots), which threads enter together: they take
parts of the batch until none is left, and the last to finish adds up what the parts found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from thalweg.kernels.cpu.emitter import LANES, intrinsic
from thalweg.kernels.cpu.simd_lanes import WIDTH, Lanes, Number

__all__ = ["MOST_LABELS", "SLOTS", "entry", "room_for"]

# Labels up to which lanes beat rows.
MOST_LABELS = 24

# Whole numbers in a table.
SLOTS = 28
# fmt: off
(
    NEXT, DONE, PARTS,  # counters of parts that were taken and finished, and how many there are
    ITEM, RANGE,  # bytes of a number; the largest safe range of scores, of which `prepare` makes 0, or 1 if exceeded
    BATCH, STEPS, SIZE,
    EMISSIONS, TRANSITIONS, START, END, LENGTHS, GOLD,  # as in `Chain`; gold is 0 where there is none
    SHARED,  # exp(A - top) (C, C), its transpose, exp(end - most) (C,); room for eight more
    TOPS,  # top and most, float64
    ALPHA, POWERS,  # (G, T, C, WIDTH): forward weights and exp(e_t - max e_t)
    LOG_Z, VALUES,  # (B,): float64, NaN where weights vanish; and less the score of the gold labels
    ROOM, ROOM_BYTES,  # scratch of the first part, and how far it is to that of the next
    FOUND,  # (parts, 2): the first label out of range, counted through the batch, or -1; how many NaN
    WEIGHT, D_EMISSIONS, D_TRANSITIONS, D_START, D_END,
) = range(SLOTS)
# fmt: on
_LEAST, _SHIFT = 2.0**-400, 400 * math.log(2)


def room_for(size: int, steps: int, *, both: bool = False) -> int:
    """Numbers of eight bytes that a part needs as scratch, in either pass or where one follows the other.

    >>> room_for(2, 1) % 8, room_for(2, 3, both=True) - room_for(2, 3) >= 2 * 3 * 2 * WIDTH
    (0, True)
    """
    rows = 4 * (-(-size // LANES) * LANES) + 8
    sums = (2 * LANES + 1) * size * size + 2 * size + 2 * LANES
    trail = 2 * steps * size * WIDTH + _ahead_room(size) if both else 0
    return -(-(rows * WIDTH + WIDTH + sums + steps * size + trail) // 8) * 8


def _ahead_room(size: Any) -> Any:
    """Numbers of eight bytes that the forward pass of a group needs, as many in float32."""
    return 5 * WIDTH + (size + LANES) * WIDTH


class _Trail:
    """What a group's forward pass leaves: (T, C, WIDTH) forward weights, and as many powers after them."""

    def __init__(self, alpha: Number, t: _Table, powers: Number | None = None):
        self.alpha = alpha
        self.powers = alpha + t.steps * t.stride if powers is None else powers
        self.after = self.powers + t.steps * t.stride


class _Table:
    """The slots of a table as numbers, all read where this is made, and the loops that the passes share."""

    def __init__(self, e: Lanes, address: Number):
        self.e, self.address = e, address
        slots = [e.whole(address, slot) for slot in range(SLOTS)]
        self.parts, self.item, self.range = slots[PARTS], slots[ITEM], slots[RANGE]
        self.batch, self.steps, self.size = slots[BATCH], slots[STEPS], slots[SIZE]
        self.emissions, self.transitions, self.start, self.end = slots[EMISSIONS : END + 1]
        self.lengths, self.gold = slots[LENGTHS], slots[GOLD]
        self.squares = self.size * self.size
        self.power = slots[SHARED]
        self.flipped, self.last = self.power + self.squares * self.item, self.power + 2 * self.squares * self.item
        self.tops, self.alpha, self.powers = slots[TOPS], slots[ALPHA], slots[POWERS]
        self.log_z, self.values = slots[LOG_Z], slots[VALUES]
        self.room, self.room_bytes, self.found = slots[ROOM], slots[ROOM_BYTES], slots[FOUND]
        self.weight, self.d_emissions, self.d_transitions, self.d_start, self.d_end = slots[WEIGHT:]
        self.stride = self.size * self.item * WIDTH  # bytes of a block

    def trail(self, group: Number) -> _Trail:
        """Where a group's trail is kept between the passes."""
        offset = group * self.steps * self.stride
        return _Trail(self.alpha + offset, self, self.powers + offset)

    @contextmanager
    def each_part(self) -> Iterator[Number]:
        """Parts that this thread gets to do."""
        with self.e.each(0, self.parts):
            part = self.e.take(self.address + 8 * NEXT)
            with self.e.when(part < self.parts):
                yield part

    @contextmanager
    def each_group(self, part: Number) -> Iterator[tuple[Number, Number]]:
        """Groups of a part, and the longest length of each: parts have about the same number of positions."""
        e = self.e
        total, before = e.cell(e.number(0)), e.cell(e.number(0))
        with e.each(0, self.batch) as b:
            total.now = total.now + e.whole(self.lengths, b)
        with e.each(0, (self.batch + (WIDTH - 1)) / WIDTH) as g:
            mine = (before.now * self.parts / total.now).equals(part)
            longest = e.cell(e.number(0))
            with self.each_item(g) as (b, _):
                length = e.whole(self.lengths, b)
                before.now = before.now + length
                longest.now = (length > longest.now).choose(length, longest.now)
            with e.when(mine):
                yield g, longest.now

    @contextmanager
    def each_item(self, group: Number) -> Iterator[tuple[Number, Number]]:
        """Items of a group and their lanes."""
        first = group * WIDTH
        with self.e.each(first, (first + WIDTH).at_most(self.batch)) as b:
            yield b, b - first


def _prepare(e: Lanes, table: Number) -> None:
    """Powers of transitions and end scores, or RANGE 1 where their range is too large."""
    t = _Table(e, table)
    sound = e.cell(e.number(0) < 1)
    limit = e.of_whole(t.range)
    for which, scores, count in ((0, t.transitions, t.squares), (1, t.end, t.size)):
        top, low = e.cell(e.get(scores, 0)), e.cell(e.get(scores, 0))
        with e.each(0, count) as k:
            x = e.get(scores, k)
            top.now = (x > top.now).choose(x, top.now)
            low.now = x.at_most(low.now)
            sound.now = sound.now & (x >= -math.inf)  # no NaN
        # Two infinities have no difference that compares as small.
        sound.now = sound.now & (top.now - low.now <= limit)
        e.double.put(t.tops, which, e.widen(top.now))
    e.put_whole(table, RANGE, sound.now.choose(0, e.number(1)))
    with e.when(sound.now):
        top, most = (e.narrow(e.double.get(t.tops, which)) for which in range(2))
        e.exp_span(t.transitions, t.squares, top, t.power)
        with e.each(0, t.size) as i, e.each(0, t.size) as j:
            e.put(t.flipped, j * t.size + i, e.get(t.power, i * t.size + j))
        e.exp_span(t.end, t.size, most, t.last)


def _score_gold(e: Lanes, t: _Table, b: Number, length: Number, part: Number) -> Number:
    """The score of the gold labels of an item in float64; notes the first label out of range."""
    total, before = e.cell(e.double.real(0.0)), e.cell(e.number(0))
    first = b * t.steps
    with e.each(0, length) as k:
        label = e.whole(t.gold, first + k)
        wrong = (label < 0) | (label >= t.size)
        with e.when(wrong & (e.whole(t.found, 2 * part) < 0)):
            e.put_whole(t.found, 2 * part, first + k)
        label = wrong.choose(0, label)  # what comes of it is not used
        move = e.widen(e.get(t.transitions, before.now * t.size + label))
        begin = e.widen(e.get(t.start, label))
        own = e.widen(e.get(t.emissions, (first + k) * t.size + label))
        total.now = total.now + own + (k > 0).choose(move, begin)
        before.now = label
    return total.now + e.widen(e.get(t.end, before.now))


def _finish(e: Lanes, t: _Table, g: Number, alpha: Number, doubles: Number, part: Number, negate: bool) -> None:
    """log Z of the items of a group from the sums and scales of its lanes; ``negate`` turns values that have gold."""
    with t.each_item(g) as (b, lane):
        length = e.whole(t.lengths, b)
        last = (length - 1) * t.size * WIDTH + lane
        s, own = e.cell(e.double.real(0.0)), e.cell(e.double.real(0.0))
        with e.each(0, t.size) as c:
            weight = e.widen(e.get(alpha, last + c * WIDTH))
            s.now = s.now + weight * e.widen(e.get(t.last, c))
            own.now = own.now + weight  # their sum is in the scale already
        scale = e.double.get(doubles, lane + WIDTH)
        value = e.double.get(doubles, lane) + e.log(scale * (s.now / own.now))
        sound = (s.now > 0.0) & (value > -math.inf)
        value = e.cell(sound.choose(value, e.double.real(math.nan)))
        e.put_whole(t.found, 2 * part + 1, e.whole(t.found, 2 * part + 1) + sound.choose(0, e.number(1)))
        e.double.put(t.log_z, b, value.now)
        with e.when(t.gold > 0):
            gold = _score_gold(e, t, b, length, part)
            value.now = gold - value.now if negate else value.now - gold
        e.put(t.values, b, value.now)


def _rescale(e: Lanes, doubles: Number) -> None:
    """Keep the products of scales, each at least exp(-SAFE_RANGE), well above the smallest number."""
    with e.each(0, WIDTH) as lane, e.each(0, 2):
        scale = e.double.get(doubles, lane + WIDTH)
        with e.when((scale > 0.0) & (scale < _LEAST)):
            e.double.put(doubles, lane + WIDTH, scale / _LEAST)
            e.double.put(doubles, lane, e.double.get(doubles, lane) - _SHIFT)


def _step_forward(e: Lanes, t: _Table, k: Number, block: Number, now: Number, powers: Number, rows: Number) -> None:
    """``powers = exp(block - most)`` and ``now = powers * mixed * factor``, where mixed comes from the step before.

    ``rows`` holds the factor and until (the lengths), and then as float64 log Z and scale: where k < until, most is
    added to log Z and scale multiplied by the sum of ``now``, and the next factor is 1 over that sum, elsewhere 0.
    """
    b, doubles = e.builder, e.double.pointer(rows + 2 * WIDTH * t.item)
    scores, weights, out, state = (e.pointer(each) for each in (block, powers, now, rows))
    best = e.variable(e.constant(-math.inf, WIDTH))
    with e.loop(e.size(0), t.size.value, 1) as c:
        b.store(e.larger(e.load_row(scores, c), b.load(best)), best)
    most, factor, until = b.load(best), e.load_row(state, e.size(0)), e.load_row(state, e.size(1))
    total = e.variable(e.constant(0.0, WIDTH))

    def use(c: Any, mixed: Any) -> None:
        power = e.exp(b.fsub(e.load_row(scores, c), most))
        e.store_row(power, weights, c)
        product = b.fmul(b.fmul(power, mixed), factor)
        e.store_row(product, out, c)
        b.store(b.fadd(b.load(total), product), total)

    first = k < 1
    inner, initial = first.choose(0, t.size), first.choose(1.0, e.real(0.0))
    e.mix(e.pointer(t.flipped), e.pointer(now - t.stride), inner.value, initial.value, t.size.value, use)
    inside = b.fcmp_ordered("<", e.splat(e.of_whole(k).value, WIDTH), until)
    e.store_row(e.inverse(b.load(total), inside), state, e.size(0))
    wide = e.double.vector(WIDTH)
    most, sums = (b.fpext(x, wide) if e.single else x for x in (most, b.load(total)))
    most = b.select(inside, most, e.double.constant(0.0, WIDTH))
    sums = b.select(inside, sums, e.double.constant(1.0, WIDTH))
    e.double.store_row(b.fadd(e.double.load_row(doubles, e.size(0)), most), doubles, e.size(0))
    e.double.store_row(b.fmul(e.double.load_row(doubles, e.size(1)), sums), doubles, e.size(1))


def _go_forward(
    e: Lanes,
    t: _Table,
    part: Number,
    g: Number,
    longest: Number,
    room: Number,
    trail: _Trail,
    *,
    negate: bool = False,
) -> None:
    """log Z of the items of a group, less the score of their gold labels, and the trail to go back."""
    every = 16 if e.single else 2
    places = room
    rows = places + WIDTH * 8
    doubles = rows + 2 * WIDTH * t.item
    block = doubles + 2 * WIDTH * 8
    top, most = e.double.get(t.tops, 0), e.double.get(t.tops, 1)
    with e.each(0, WIDTH) as lane:
        b = (g * WIDTH + lane).at_most(t.batch - 1)
        length = e.whole(t.lengths, b)
        e.put_whole(places, lane, t.emissions + b * t.steps * t.size * t.item)
        e.put(rows, lane, e.real(1.0))
        e.put(rows, lane + WIDTH, e.of_whole(length))
        e.double.put(doubles, lane, e.widen(length - 1) * top + most)
        e.double.put(doubles, lane + WIDTH, e.double.real(1.0))
    with e.each(0, longest) as k:
        e.to_lanes(places, k * t.size, t.size, block)
        with e.when(k < 1), e.each(0, t.size) as c, e.each(0, WIDTH) as lane:
            at = c * WIDTH + lane
            e.put(block, at, e.get(block, at) + e.get(t.start, c))
        _step_forward(e, t, k, block, trail.alpha + k * t.stride, trail.powers + k * t.stride, rows)
        with e.when(((k + 1) % every).equals(0) | (k + 1).equals(longest)):
            _rescale(e, doubles)
    _finish(e, t, g, trail.alpha, doubles, part, negate)


def _clear_found(e: Lanes, t: _Table, part: Number) -> None:
    e.put_whole(t.found, 2 * part, e.number(-1))
    e.put_whole(t.found, 2 * part + 1, e.number(0))


def _forward(e: Lanes, table: Number) -> None:
    """log Z of all items, less the score of their gold labels, and what the backward pass needs."""
    t = _Table(e, table)
    with t.each_part() as part:
        _clear_found(e, t, part)
        with t.each_group(part) as (g, longest):
            _go_forward(e, t, part, g, longest, t.room + part * t.room_bytes, t.trail(g))


def _step_back(e: Lanes, t: _Table, k: Number, now: Number, powers: Number, rows: Number, block: Number) -> None:
    """Posteriors of labels times the item's weight into ``block``, and what moves need into the block after next.

    ``rows`` holds until (the lengths) and the weights of the items. The block after the first goes from step to step:
    the backward weights of a step times its ``powers``, scaled.
    """
    b, size = e.builder, t.size.value
    alpha, weights, state, end = (e.pointer(each) for each in (now, powers, rows, t.last))
    here, ahead, share, beta = (e.pointer(block + which * t.stride) for which in range(4))
    step = e.splat(e.of_whole(k).value, WIDTH)
    until, weight = e.load_row(state, e.size(0)), e.load_row(state, e.size(1))
    last = b.fcmp_ordered("==", b.fadd(step, e.constant(1.0, WIDTH)), until)
    total = e.variable(e.constant(0.0, WIDTH))

    def use(c: Any, mixed: Any) -> None:
        own = b.select(last, e.splat(e.scalar(end, c), WIDTH), mixed)
        e.store_row(own, beta, c)
        product = b.fmul(e.load_row(alpha, c), own)
        e.store_row(product, here, c)
        b.store(b.fadd(b.load(total), product), total)

    e.mix(e.pointer(t.power), ahead, size, ir.Constant(e.element, 0.0), size, use)
    inverse = e.inverse(b.load(total), b.fcmp_ordered("<", step, until))
    factor = b.fmul(inverse, weight)
    with e.loop(e.size(0), size, 1) as c:
        e.store_row(b.fmul(e.load_row(here, c), factor), here, c)
        e.store_row(b.fmul(e.load_row(ahead, c), factor), share, c)
        e.store_row(b.fmul(b.fmul(e.load_row(weights, c), e.load_row(beta, c)), inverse), ahead, c)


def _take_gold(e: Lanes, t: _Table, g: Number, moves: Number, edges: Number) -> None:
    """Take each weight of a group off its gold labels; add up what start and end get."""
    with t.each_item(g) as (b, _):
        length, first = e.whole(t.lengths, b), b * t.steps
        with e.when(t.gold > 0):
            weight, before = e.get(t.weight, b), e.cell(e.number(0))
            with e.each(0, length) as k:
                label = e.whole(t.gold, first + k)
                place = (first + k) * t.size + label
                e.put(t.d_emissions, place, e.get(t.d_emissions, place) - weight)
                with e.when(k > 0):
                    place = before.now * t.size + label
                    e.double.put(moves, place, e.double.get(moves, place) - e.widen(weight))
                before.now = label
        with e.each(0, t.size) as c:
            for place, position in ((c, first), (c + t.size, first + length - 1)):
                own = e.widen(e.get(t.d_emissions, position * t.size + c))
                e.double.put(edges, place, e.double.get(edges, place) + own)


def _settle(e: Lanes, t: _Table) -> None:
    """Sums over the parts, in order, into the gradients of transitions, start and end."""
    with e.each(0, t.squares) as k:
        moves, gold = e.cell(e.double.real(0.0)), e.cell(e.double.real(0.0))
        with e.each(0, t.parts) as part:
            sums = t.room + part * t.room_bytes
            with e.each(0, LANES) as lane:
                moves.now = moves.now + e.double.get(sums, k * LANES + lane)
            gold.now = gold.now + e.double.get(sums, t.squares * LANES + k)
        e.put(t.d_transitions, k, moves.now * e.widen(e.get(t.power, k)) + gold.now)
    begin = t.squares * (LANES + 1)
    with e.each(0, t.size) as c:
        for out, place in ((t.d_start, begin + c), (t.d_end, begin + t.size + c)):
            total = e.cell(e.double.real(0.0))
            with e.each(0, t.parts) as part:
                total.now = total.now + e.double.get(t.room + part * t.room_bytes, place)
            e.put(out, c, total.now)


def _write(e: Lanes, t: _Table, places: Number, k: Number, block: Number) -> None:
    """The first block to position k of the items."""
    with e.when(t.size >= LANES):
        e.from_lanes(block, t.size, places, k * t.size)
    with e.when(t.size < LANES), e.each(0, WIDTH) as lane, e.each(0, t.size) as c:
        e.put(e.whole(places, lane), k * t.size + c, e.get(block, c * WIDTH + lane))


class _Sums:
    """Scratch of a part that goes back: sums of moves by lane, gold moves, start and end, and a group's own."""

    def __init__(self, e: Lanes, t: _Table, room: Number):
        count = t.squares * (LANES + 1) + 2 * t.size
        self.doubles = room
        self.places = room + (count + LANES) * 8
        self.sums = self.places + WIDTH * 8
        self.rows = self.sums + t.squares * t.item * LANES
        self.block = self.rows + 2 * WIDTH * t.item  # the first of four
        self.spare = self.block + 4 * t.stride  # what lanes past the batch write
        e.double.fill(room, count)
        e.fill(self.sums, t.squares * LANES)


def _go_back(e: Lanes, t: _Table, g: Number, longest: Number, own: _Sums, trail: _Trail) -> None:
    """The gradient in a group's emissions, and what it adds to the sums of its part."""
    places, rows, block = own.places, own.rows, own.block
    with e.each(0, WIDTH) as lane:
        item = g * WIDTH + lane
        b, real = item.at_most(t.batch - 1), item < t.batch
        e.put_whole(places, lane, real.choose(t.d_emissions + b * t.steps * t.size * t.item, own.spare))
        e.put(rows, lane, e.of_whole(e.whole(t.lengths, b)))
        e.put(rows, lane + WIDTH, real.choose(e.get(t.weight, b), e.real(0.0)))
    e.fill(block + t.stride, t.size * WIDTH)
    with e.each(0, longest) as done:
        k = longest - 1 - done
        now = trail.alpha + k * t.stride
        _step_back(e, t, k, now, trail.powers + k * t.stride, rows, block)
        e.add_outer(now, block + 2 * t.stride, t.size, own.sums)
        _write(e, t, places, k, block)
    with t.each_item(g) as (b, _), e.each((b * t.steps + longest) * t.size, (b + 1) * t.steps * t.size) as k:
        e.put(t.d_emissions, k, e.real(0.0))
    e.add_to_double(own.sums, t.squares * LANES, own.doubles)
    gold = own.doubles + t.squares * (LANES * 8)
    _take_gold(e, t, g, gold, gold + t.squares * 8)


def _backward(e: Lanes, table: Number) -> None:
    """The gradient of the weighted sum of values in emissions, transitions, start and end."""
    t = _Table(e, table)
    with t.each_part() as part:
        own = _Sums(e, t, t.room + part * t.room_bytes)
        with t.each_group(part) as (g, longest):
            _go_back(e, t, g, longest, own, t.trail(g))
        with e.when(e.take(table + 8 * DONE).equals(t.parts - 1)):
            _settle(e, t)


def _both(e: Lanes, table: Number) -> None:
    """Forward and back, group by group: the trail of a group, in the scratch of its part, is all that is kept."""
    t = _Table(e, table)
    with t.each_part() as part:
        _clear_found(e, t, part)
        room = t.room + part * t.room_bytes
        own = _Sums(e, t, room)
        trail = _Trail(own.spare + t.steps * t.size * t.item, t)
        with t.each_group(part) as (g, longest):
            _go_forward(e, t, part, g, longest, trail.after, trail, negate=True)
            _go_back(e, t, g, longest, own, trail)
        with e.when(e.take(table + 8 * DONE).equals(t.parts - 1)):
            _settle(e, t)


def _emitted(emit: Callable[[Lanes, Number], None]) -> Any:
    """A pass as something that compiled code can call: with a number that tells the type of float, and the table."""

    def body(typing_context, one, table):
        def codegen(context, builder, signature, arguments):
            emitter = Lanes(context, builder, signature.args[0])
            emit(emitter, emitter.number(arguments[1]))

        return types.void(one, types.int64), codegen

    return intrinsic(body)


prepare, forward, backward, both = (_emitted(emit) for emit in (_prepare, _forward, _backward, _both))


@cache
def entry(name: str, kind: type) -> Any:
    """The C function prepare, forward, backward or both for ``np.float32`` or ``np.float64``, compiled or from disk.

    >>> import numpy as np
    >>> entry("prepare", np.float32).address > 0
    True
    """

    def prepare_of(table):
        prepare(kind(1), table)

    def forward_of(table):
        forward(kind(1), table)

    def backward_of(table):
        backward(kind(1), table)

    def both_of(table):
        both(kind(1), table)

    chosen = {"prepare": prepare_of, "forward": forward_of, "backward": backward_of, "both": both_of}[name]
    options: dict[str, Any] = {"nopython": True, "cache": True, "error_model": "numpy", "_nrt": False}
    return cfunc(types.void(types.int64), **options)(chosen)
