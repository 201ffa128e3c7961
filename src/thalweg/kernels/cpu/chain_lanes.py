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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from thalweg.kernels.cpu.emitter import LANES, Kind
from thalweg.kernels.cpu.plain import compile_emitted
from thalweg.kernels.cpu.simd_lanes import WIDTH, Lanes, Number

__all__ = ["AHEAD", "MOST_LABELS", "SLOTS", "compiled"]

# Labels up to which lanes beat rows.
MOST_LABELS = 24

# Whole numbers in a table.
SLOTS = 30
# fmt: off
(
    # What differs from call to call:
    NEXT, DONE,  # counters of parts that were taken and finished
    RANGE,  # the largest safe range of scores, of which `prepare` makes 0, or 1 if exceeded (`both` does it by itself)
    EMISSIONS, TRANSITIONS, START, END, LENGTHS, GOLD,  # as in `Chain`; gold is 0 where there is none
    VALUES, TOTAL,  # (B,): log Z less the score of the gold labels; and the sum of all, which only `both` gives
    D_EMISSIONS, D_TRANSITIONS, D_START, D_END,
    # What does not:
    STATE,  # `both` makes it 0; 1 where the total is not finite; 2 where range or a label is wrong or weights vanish
    PARTS, ITEM,  # how many parts there are; bytes of a number
    BATCH, STEPS, SIZE,
    SHARED,  # exp(A - top) (C, C), its transpose, exp(end - most) (C,); room for eight more
    TOPS,  # top and most, float64
    ALPHA, POWERS,  # (G, T, C, WIDTH): forward weights and exp(e_t - max e_t)
    LOG_Z,  # (B,) float64, NaN where weights vanish
    ROOM, ROOM_BYTES,  # scratch of the first part, and how far it is to that of the next
    FOUND,  # (parts, 3): the first label out of range, counted through the batch, or -1; how many NaN; sum as float64
    WEIGHT,
) = range(SLOTS)
# fmt: on
# Numbers of eight bytes that a group needs to go forward.
AHEAD = 5 * WIDTH
_LEAST, _SHIFT = 2.0**-400, 400 * math.log(2)


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
        self.tops, self.alpha, self.powers = slots[TOPS], slots[ALPHA], slots[POWERS]
        self.share(slots[SHARED])
        self.log_z, self.values, self.total = slots[LOG_Z], slots[VALUES], slots[TOTAL]
        self.room, self.room_bytes, self.found = slots[ROOM], slots[ROOM_BYTES], slots[FOUND]
        self.weight = slots[WEIGHT]
        self.d_emissions, self.d_transitions, self.d_start, self.d_end = slots[D_EMISSIONS : D_END + 1]
        self.stride = self.size * self.item * WIDTH  # bytes of a block

    def share(self, address: Number) -> None:
        """Where the powers of transitions and end scores are."""
        self.power = address
        self.flipped, self.last = address + self.squares * self.item, address + 2 * self.squares * self.item

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


def _raise_scores(e: Lanes, t: _Table) -> Number:
    """Powers of transitions and end scores; whether their range is small enough for that."""
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
    with e.when(sound.now):
        top, most = (e.narrow(e.double.get(t.tops, which)) for which in range(2))
        e.exp_span(t.transitions, t.squares, top, t.power)
        with e.each(0, t.size) as i, e.each(0, t.size) as j:
            e.put(t.flipped, j * t.size + i, e.get(t.power, i * t.size + j))
        e.exp_span(t.end, t.size, most, t.last)
    return sound.now


def _prepare(e: Lanes, table: Number) -> None:
    """Powers of transitions and end scores, or RANGE 1 where their range is too large."""
    t = _Table(e, table)
    e.put_whole(table, RANGE, _raise_scores(e, t).choose(0, e.number(1)))


def _gold_label(e: Lanes, t: _Table, place: Number) -> tuple[Number, Number]:
    """A gold label, counted through the batch, and whether it is out of range: then it is 0, and nothing is used."""
    label = e.whole(t.gold, place)
    wrong = (label < 0) | (label >= t.size)
    return wrong.choose(0, label), wrong


def _score_gold(e: Lanes, t: _Table, b: Number, length: Number, part: Number) -> Number:
    """The score of the gold labels of an item in float64; notes the first label out of range."""
    first = b * t.steps

    def read(place: Number) -> tuple[Number, Number]:
        label, wrong = _gold_label(e, t, place)
        with e.when(wrong), e.when(e.whole(t.found, 3 * part) < 0):
            e.put_whole(t.found, 3 * part, place)
        return label, e.widen(e.get(t.emissions, place * t.size + label))

    label, own = read(first)
    total, before = e.cell(e.widen(e.get(t.start, label)) + own), e.cell(label)
    with e.each(1, length) as k:
        label, own = read(first + k)
        move = e.widen(e.get(t.transitions, before.now * t.size + label))
        total.now = total.now + (own + move)  # one addition a step that waits for the one before
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
        e.put_whole(t.found, 3 * part + 1, e.whole(t.found, 3 * part + 1) + sound.choose(0, e.number(1)))
        e.double.put(t.log_z, b, value.now)
        with e.when(t.gold > 0):
            gold = _score_gold(e, t, b, length, part)
            value.now = gold - value.now if negate else value.now - gold
        e.put(t.values, b, value.now)
        e.double.put(t.found, 3 * part + 2, e.double.get(t.found, 3 * part + 2) + value.now)


def _rescale(e: Lanes, doubles: Number) -> None:
    """Keep the products of scales, each at least exp(-SAFE_RANGE), well above the smallest number."""
    with e.each(0, WIDTH) as lane, e.each(0, 2):
        scale = e.double.get(doubles, lane + WIDTH)
        with e.when((scale > 0.0) & (scale < _LEAST)):
            e.double.put(doubles, lane + WIDTH, scale / _LEAST)
            e.double.put(doubles, lane, e.double.get(doubles, lane) - _SHIFT)


def _powers(e: Lanes, t: _Table, k: Number, block: Number) -> Any:
    """The scores of a step become exp(score - most), where most is the largest of each lane; gives most."""
    b, scores = e.builder, e.pointer(block)
    with e.when(k < 1), e.loop(e.size(0), t.size.value, 1) as c:
        begin = e.splat(e.scalar(e.pointer(t.start), c), WIDTH)
        e.store_row(b.fadd(e.load_row(scores, c), begin), scores, c)
    best = e.variable(e.constant(-math.inf, WIDTH))
    with e.loop(e.size(0), t.size.value, 1) as c:
        b.store(e.larger(e.load_row(scores, c), b.load(best)), best)
    most = b.load(best)
    with e.loop(e.size(0), t.size.value, 1) as c:
        e.store_row(e.exp(b.fsub(e.load_row(scores, c), most)), scores, c)
    return most


def _step_forward(e: Lanes, t: _Table, k: Number, now: Number, powers: Number, rows: Number) -> None:
    """Scores become powers = exp(score - most), and ``now = powers * mixed * factor``, mixed being of the step before.

    ``rows`` holds the factor and until (the lengths), and then as float64 log Z and scale: where k < until, most is
    added to log Z and scale multiplied by the sum of ``now``, and the next factor is 1 over that sum, elsewhere 0.
    """
    b, doubles = e.builder, e.double.pointer(rows + 2 * WIDTH * t.item)
    weights, out, state = (e.pointer(each) for each in (powers, now, rows))
    most = _powers(e, t, k, powers)
    factor, until = e.load_row(state, e.size(0)), e.load_row(state, e.size(1))
    total = e.variable(e.constant(0.0, WIDTH))

    def use(c: Any, mixed: Any) -> None:
        product = b.fmul(b.fmul(e.load_row(weights, c), mixed), factor)
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
        powers = trail.powers + k * t.stride
        with e.when((k % LANES).equals(0)):  # steps by eights: so many entries are whole registers of any item
            e.to_lanes(places, k * t.size, (longest - k).at_most(LANES) * t.size, powers)
        _step_forward(e, t, k, trail.alpha + k * t.stride, powers, rows)
        with e.when(((k + 1) % every).equals(0) | (k + 1).equals(longest)):
            _rescale(e, doubles)
    _finish(e, t, g, trail.alpha, doubles, part, negate)


def _clear_found(e: Lanes, t: _Table, part: Number) -> None:
    e.put_whole(t.found, 3 * part, e.number(-1))
    e.put_whole(t.found, 3 * part + 1, e.number(0))
    e.double.put(t.found, 3 * part + 2, e.double.real(0.0))


def _forward(e: Lanes, table: Number) -> None:
    """log Z of all items, less the score of their gold labels, and what the backward pass needs."""
    t = _Table(e, table)
    with t.each_part() as part:
        _clear_found(e, t, part)
        with t.each_group(part) as (g, longest):
            _go_forward(e, t, part, g, longest, t.room + part * t.room_bytes, t.trail(g))


def _step_back(
    e: Lanes, t: _Table, k: Number, trail: _Trail, rows: Number, block: Number, here: Number, sums: Number
) -> None:
    """Posteriors of labels times the item's weight into ``here``, and those of moves into ``sums``.

    ``rows`` holds until (the lengths), the weights of the items and room for one more. The first block goes from step
    to step: the backward weights of a step times its powers, scaled. The second is scratch.
    """
    b, size = e.builder, t.size.value
    now = trail.alpha + k * t.stride
    alpha, weights, state, end = (e.pointer(each) for each in (now, trail.powers + k * t.stride, rows, t.last))
    ahead, beta, out = (e.pointer(each) for each in (block, block + t.stride, here))
    step = e.splat(e.of_whole(k).value, WIDTH)
    until, weight = e.load_row(state, e.size(0)), e.load_row(state, e.size(1))
    last = b.fcmp_ordered("==", b.fadd(step, e.constant(1.0, WIDTH)), until)
    total = e.variable(e.constant(0.0, WIDTH))

    def use(c: Any, mixed: Any) -> None:
        own = b.select(last, e.splat(e.scalar(end, c), WIDTH), mixed)
        e.store_row(own, beta, c)
        b.store(e.call("fma", e.load_row(alpha, c), own, b.load(total)), total)

    e.mix(e.pointer(t.power), ahead, size, ir.Constant(e.element, 0.0), size, use)
    inverse = e.inverse(b.load(total), b.fcmp_ordered("<", step, until))
    factor = b.fmul(inverse, weight)
    e.store_row(factor, state, e.size(2))
    e.add_outer(now, rows + 2 * WIDTH * t.item, block, t.size, sums)
    with e.loop(e.size(0), size, 1) as c:
        own = e.load_row(beta, c)
        e.store_row(b.fmul(b.fmul(e.load_row(alpha, c), own), factor), out, c)
        e.store_row(b.fmul(b.fmul(e.load_row(weights, c), own), inverse), ahead, c)


def _take_gold(e: Lanes, t: _Table, g: Number, moves: Number, edges: Number) -> None:
    """Take each weight of a group off its gold labels; add up what start and end get."""
    with t.each_item(g) as (b, _):
        length, first = e.whole(t.lengths, b), b * t.steps
        with e.when(t.gold > 0):
            weight = e.get(t.weight, b)

            def take(place: Number, weight: Number = weight) -> Number:
                label, _ = _gold_label(e, t, place)
                at = place * t.size + label
                e.put(t.d_emissions, at, e.get(t.d_emissions, at) - weight)
                return label

            before = e.cell(take(first))
            with e.each(1, length) as k:
                label = take(first + k)
                at = before.now * t.size + label
                e.double.put(moves, at, e.double.get(moves, at) - e.widen(weight))
                before.now = label
        with e.each(0, t.size) as c:
            for at, position in ((c, first), (c + t.size, first + length - 1)):
                own = e.widen(e.get(t.d_emissions, position * t.size + c))
                e.double.put(edges, at, e.double.get(edges, at) + own)


def _settle(e: Lanes, t: _Table) -> None:
    """Sums over the parts, in order, into the gradients of transitions, start and end."""
    b = e.builder
    with e.each(0, t.squares) as k:
        lanes, gold = e.variable(e.double.constant(0.0, LANES)), e.cell(e.double.real(0.0))
        with e.each(0, t.parts) as part:
            sums = t.room + part * t.room_bytes
            more = e.double.load(e.double.at(e.double.pointer(sums), (k * LANES).value), LANES)
            b.store(b.fadd(b.load(lanes), more), lanes)
            gold.now = gold.now + e.double.get(sums, t.squares * LANES + k)
        moves = e.number(e.reduce(b.load(lanes), b.fadd))
        e.put(t.d_transitions, k, moves * e.widen(e.get(t.power, k)) + gold.now)
    begin = t.squares * (LANES + 1)
    with e.each(0, t.size) as c:
        for out, place in ((t.d_start, begin + c), (t.d_end, begin + t.size + c)):
            total = e.cell(e.double.real(0.0))
            with e.each(0, t.parts) as part:
                total.now = total.now + e.double.get(t.room + part * t.room_bytes, place)
            e.put(out, c, total.now)


def _conclude(e: Lanes, t: _Table) -> None:
    """The sum of all values, and what became of them as a whole."""
    total, lost = e.cell(e.double.real(0.0)), e.cell(e.number(0))
    with e.each(0, t.parts) as part:
        wrong = e.whole(t.found, 3 * part) >= 0
        lost.now = lost.now + e.whole(t.found, 3 * part + 1) + wrong.choose(1, e.number(0))
        total.now = total.now + e.double.get(t.found, 3 * part + 2)
    e.put(t.total, 0, total.now)
    finite = (total.now > -math.inf) & (total.now < math.inf)
    e.put_whole(t.address, STATE, (lost.now > 0).choose(2, finite.choose(0, e.number(1))))


class _Sums:
    """Scratch of a part that goes back: sums of moves by lane, gold moves, start and end, and a group's own."""

    def __init__(self, e: Lanes, t: _Table, room: Number):
        count = t.squares * (LANES + 1) + 2 * t.size
        self.doubles = room
        self.places = room + (count + LANES) * 8
        self.sums = self.places + WIDTH * 8
        self.rows = self.sums + t.squares * t.item * LANES
        self.block = self.rows + 3 * WIDTH * t.item  # the first of two
        self.out = self.block + 2 * t.stride  # the gradients of eight steps
        self.spare = self.out + LANES * t.stride  # what lanes past the batch write
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
    e.fill(block, t.size * WIDTH)
    with e.each(0, longest) as done:
        k = longest - 1 - done
        at = k % LANES
        _step_back(e, t, k, trail, rows, block, own.out + at * t.stride, own.sums)
        with e.when(at.equals(0)):
            e.from_lanes(own.out, (longest - k).at_most(LANES) * t.size, places, k * t.size)
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
    """Forward and back, group by group: the trail of a group, in the scratch of its part, is all that is kept.

    Each part prepares for itself: that takes less time than a call from Python.
    """
    t = _Table(e, table)
    with t.each_part() as part:
        _clear_found(e, t, part)
        room = t.room + part * t.room_bytes
        own = _Sums(e, t, room)
        trail = _Trail(own.spare + t.steps * t.size * t.item, t)
        t.tops = trail.after + AHEAD * 8
        t.share(t.tops + 2 * 8)
        sound = _raise_scores(e, t)
        e.put_whole(t.found, 3 * part + 1, sound.choose(0, e.number(1)))
        with e.when(sound), t.each_group(part) as (g, longest):
            _go_forward(e, t, part, g, longest, trail.after, trail, negate=True)
            _go_back(e, t, g, longest, own, trail)
        with e.when(e.take(table + 8 * DONE).equals(t.parts - 1)):
            _settle(e, t)
            _conclude(e, t)


_PASSES = {"prepare": _prepare, "forward": _forward, "backward": _backward, "both": _both}


def compiled(name: str, kind: Kind) -> int:
    """The address of the pass prepare, forward, backward or both over float32 or float64: ``void(int64 table)``.

    >>> from thalweg.kernels.cpu.emitter import types
    >>> compiled("prepare", types.float32) > 0
    True
    """

    def emit(context: Any, builder: Any, table: Any) -> None:
        emitter = Lanes(context, builder, kind)
        _PASSES[name](emitter, emitter.number(table))

    return compile_emitted(f"chain_{name}_{kind.name}", emit, unroll=False)
