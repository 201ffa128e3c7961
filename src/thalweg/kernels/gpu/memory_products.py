"""Steps of many queries by products of the matrix library, each for as long as any query is on its way.

Every round multiplies queries and patterns. Where many weights matter these are written down and multiplied with the
patterns in turn. Where few do, as soon as queries are near single patterns, one launch weighs, mixes those few and
moves the queries: a third of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu import memory_steps
from thalweg.kernels.gpu.launching import Layout, Room, here, repeated, resumed
from thalweg.kernels.gpu.mailbox import Letter, mailbox_of
from thalweg.kernels.reference.memory import Settled

__all__ = ["Course", "Limits", "by_products"]

_ROW = 8192  # weights of a query that a program holds
_SHARE = 16  # queries or patterns for which a program is worth its start
_RARE = 16  # one of so many queries may have many weights that matter while few are picked: that takes no longer
# Rounds after which the host looks how many queries are still on the way; the first only if steps may be short at once.
_LOOKS = frozenset((2, 4, 8, *range(12, 1 << 16, 12)))
_LOOKS_AT_FEW = frozenset((2, 3, 4, 6, 8, 12, *range(24, 1 << 16, 24)))


class Limits(NamedTuple):
    """Steps at most, beta in units of log 2, the shortest step, and what energies have beside squares.

    >>> Limits.of(1, 2.0, 5, 1e-3).rest
    0.0
    """

    most: int
    factor: float
    tol: float
    rest: float

    @classmethod
    def of(cls, count: int, beta: float, most: int, tol: float) -> Limits:
        """For so many patterns.

        >>> Limits.of(1, math.log(2), 5, 1).factor
        1.0
        """
        # Floats, whatever they came as: kernels known by sizes alone take nothing else.
        return cls(most, beta / math.log(2), float(tol), math.log(count) / beta)


# Parts of a course's own room, as the kernels call them. Counters come first: the host finds them without a view.
_PARTS = ("counters", "facts", "status", "meetings", "tops", "totals")


class _Kind(NamedTuple):
    """A kernel as it is launched for problems of one size: its arguments by name, and all that is fixed."""

    kernel: Any
    grid: tuple[int, int, int]
    pick: Callable[[dict[str, Any]], tuple[Any, ...]]
    options: dict[str, Any]
    key: Hashable

    @classmethod
    def of(cls, kernel: Any, programs: int, sizes: tuple[int, ...], **options: Any) -> _Kind:
        """Triton must find 1 and multiples of 16 at the same places whenever the sizes are the same."""
        names = [name for name in kernel.arg_names if not name.isupper()]
        return cls(kernel, (programs, 1, 1), itemgetter(*names), options, (*sizes, *options.values()))

    def start(self, course: Course) -> Callable[..., None]:
        """Launch it, without any views where it is known; gives what does it again."""
        again = None
        if course.raw is not None:
            again = resumed(self.kernel, self.grid, self.pick(course.raw), self.key, course.place)
        if again is None:
            again = repeated(self.kernel, self.grid, *self.pick(course.named()), key=self.key, **self.options)
        return again


@lru_cache(256)
def _layout(rows: int) -> Layout:
    """Of a course's own room."""
    whole, real = (torch.int32, (rows,)), (torch.float32, (rows,))
    return Layout.of((torch.int32, (4,)), (torch.float32, (memory_steps.SLOTS.value,)), whole, whole, real, real)


def _width(inner: int) -> int:
    return max(16, 1 << (inner - 1).bit_length())


@lru_cache(256)
def _beginning(rows: int, inner: int, count: int, stands: int, given: bool) -> _Kind:
    width, sizes, slots = _width(inner), (rows, inner, count), memory_steps.SLOTS.value
    programs = min(slots, 1 << (max(rows, count) // _SHARE).bit_length())
    cut = {"EACH": slots // programs, "BLOCK": max(1, 4096 // width), "DP": width, "num_warps": 4}
    return _Kind.of(memory_steps.begin, programs, sizes, GIVEN=given, STANDS=stands, **cut)


class Course:
    """Where queries are on their way: all of it is written in place.

    >>> sorted(Course.__init__.__annotations__)
    ['before', 'most', 'patterns', 'queries', 'return']
    """

    def __init__(self, queries: Tensor, patterns: Tensor, most: int, before: Tensor | None = None) -> None:
        """Before the first step, all on the way unless their status is given: one launch for all of it."""
        queries = queries.contiguous()
        (rows, inner), (count, _) = queries.shape, patterns.shape
        self.state = torch.empty_like(queries)  # (Q, D)
        self.energies = queries.new_empty(rows, most + 1)
        self.steps = queries.new_empty(rows, dtype=torch.int64)
        self.converged = queries.new_empty(rows, dtype=torch.bool)
        self.room = Room.like(queries, _layout(rows))
        stood = queries if before is None else before  # something must stand in its place
        self._given: dict[str, Any] = {"queries": queries, "patterns": patterns, "before": stood, "rows": rows}
        self._given |= {"inner": inner, "count": count, "most": most}
        on_gpu = queries.is_cuda
        self.place, self.raw = (here(), self._addresses()) if on_gpu else ((0, 0), None)
        _beginning(rows, inner, count, int(not most), before is not None).start(self)

    def _addresses(self) -> dict[str, Any] | None:
        """What kernels are given, tensors by their addresses; None unless all of these are multiples of 16 bytes."""
        raw, base = self._given.copy(), self.room.memory.data_ptr()
        bits = 0
        for name in ("queries", "patterns", "before"):
            raw[name] = address = raw[name].data_ptr()
            bits |= address
        if bits & 15:
            return None
        raw["state"], raw["energies"] = self.state.data_ptr(), self.energies.data_ptr()
        raw["steps"], raw["converged"] = self.steps.data_ptr(), self.converged.data_ptr()
        for name, first in zip(_PARTS, self.room.layout.firsts, strict=True):
            raw[name] = base + first
        return raw

    def give(self, tensors: dict[str, Tensor], **numbers: float) -> None:
        """What kernels are to be given from now on."""
        self._given.update(tensors, **numbers)
        if self.raw is not None:
            self.raw.update(numbers)
            for name, x in tensors.items():
                self.raw[name] = x.data_ptr()

    def named(self) -> dict[str, Any]:
        """What kernels are given, with a view of every part."""
        own = {"state": self.state, "energies": self.energies, "steps": self.steps}
        own["converged"] = self.converged.view(torch.uint8)
        return own | dict(zip(_PARTS, self.room.parts(), strict=True)) | self._given

    def part(self, name: str) -> Tensor:
        """One of the parts: counters (queries for which many weights mattered, in all rounds; queries that are done),
        facts (squares), status (0 on the way, 1 at rest without an energy, 2 done), meetings."""
        return self.room.part(_PARTS.index(name))

    def settled(self) -> Settled:
        """What it all came to."""
        return Settled(self.state, self.energies, self.steps, self.converged)


class _Counters:
    """The counters of a course as the host reads them: told by kernels in passing, waited for when they are needed."""

    def __init__(self, course: Course) -> None:
        self._course, self._box = course, mailbox_of(course.state.device)
        self._letter: Letter | None = None

    def ask(self) -> None:
        """Have the next kernel that reports do so here."""
        self._letter = self._box.letter()
        self._course.give({"box": self._letter.tensor})

    def read(self) -> tuple[int, int]:
        """What was asked for: queries for which many weights mattered, queries that are done."""
        assert self._letter is not None
        found = self._letter.read()
        return found >> 32, found & 0xFFFFFFFF


@lru_cache(256)
def _kinds(rows: int, inner: int, count: int, most: int, row: int) -> dict[str, _Kind]:
    """All kernels of rounds; ``row`` is how many weights of a query a program holds."""
    sizes, block, width = (rows, inner, count, most), min(row, 1 << (count - 1).bit_length()), _width(inner)
    # Where a program holds much beside a row of weights, more warps have registers for it.
    crowded = 16 if block > 2048 else 8
    # No two operations are made one: the largest weight is then exactly 1, and a query that has arrived does not move.
    kind = partial(_Kind.of, programs=rows, sizes=sizes, enable_fp_fusion=False)
    weigh = partial(kind, memory_steps.weigh, WHOLE=count <= row, BN=block)
    join = partial(kind, memory_steps.join_step, PC=1, DP=width, num_warps=4)
    pick = partial(kind, memory_steps.pick_step, BN=block, BLOCK=max(1, 4096 // width), DP=width, num_stages=1)
    return {
        "count": weigh(KEEP=True, COUNT=True, num_warps=crowded),
        "keep": weigh(KEEP=True, COUNT=False, num_warps=8),
        "total": weigh(KEEP=False, COUNT=False, num_warps=8),
        "move": join(MIX=True),
        "end": join(MIX=False),
        "all": pick(ALL=True, REPORT=False, num_warps=crowded),
        "wait": pick(ALL=False, REPORT=False, num_warps=8),
        "all, told": pick(ALL=True, REPORT=True, num_warps=crowded),
        "wait, told": pick(ALL=False, REPORT=True, num_warps=8),
        "tell": _Kind.of(memory_steps.tell, 1, (), num_warps=1),
    }


class _Rounds:
    """The two kinds of rounds, dense and of few weights; every kernel is looked up once and then started again."""

    def __init__(self, course: Course, patterns: Tensor, across: Tensor, limits: Limits, scores: Tensor) -> None:
        (rows, inner), (count, _) = course.state.shape, patterns.shape
        self._course, self._patterns, self._across, self._scores = course, patterns, across, scores
        self._mixed: Tensor | None = None
        # Until there are mixtures, and where nobody is told, something must stand in their place.
        stand = {"scores": scores, "mixes": scores, "box": course.steps}
        course.give(stand, factor=limits.factor, tol=limits.tol, rest=limits.rest, parts=1)
        self._kinds = _kinds(rows, inner, count, limits.most, _ROW)
        self._again: dict[str, Callable[..., None]] = {}

    def _start(self, name: str) -> None:
        again = self._again.get(name)
        if again is None:
            self._again[name] = self._kinds[name].start(self._course)
        else:
            again()

    def _report(self, name: str, counters: _Counters) -> None:
        """Start a kernel that tells the host: every time at another place."""
        counters.ask()
        self._kinds[name].start(self._course)

    def score(self) -> None:
        """Multiply queries and patterns; the first time this has been done already."""
        torch.mm(self._course.state, self._across, out=self._scores)

    def dense(self, told: _Counters | None = None) -> None:
        """All weights, which go to memory and from there into a product; the host is told how many matter."""
        if told is None:
            self._start("keep")
        else:
            self._report("count", told)
        if self._mixed is None:
            self._mixed = torch.mm(self._scores, self._patterns)
            self._course.give({"mixes": self._mixed})
        else:
            torch.mm(self._scores, self._patterns, out=self._mixed)
        self._start("move")

    def energies(self) -> None:
        """Of queries that have made their steps."""
        self._start("total")
        self._start("end")

    def few(self, wait: bool, told: _Counters | None = None) -> None:
        """The weights that matter; queries with many wait where they are, or take their time."""
        kind = "wait" if wait else "all"
        if told is None:
            self._start(kind)
        else:
            self._report(f"{kind}, told", told)

    def tell(self, told: _Counters) -> None:
        """What the counters are after all that was started."""
        self._report("tell", told)


def by_products(course: Course, patterns: Tensor, across: Tensor, limits: Limits, scores: Tensor) -> int:
    """Rounds of all queries until none is on the way, or only half of them.

    Args:
        course: begun.
        patterns: (N, D).
        across: their transpose, a view.
        limits: of the steps.
        scores: (Q, N), the first, written over.

    Returns:
        The number of steps that every query which is not done has made; more than ``limits.most`` if all are done.
    """
    rounds, (rows, count) = _Rounds(course, patterns, across, limits, scores), scores.shape
    if not limits.most:
        rounds.energies()
        return 1
    captured = scores.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph cannot wait for the host
    counters = _Counters(course) if limits.most > 1 and not captured else None
    if counters is None or count > _ROW:
        rounds.dense()
        return _dense(rounds, counters, limits, rows, 1, even=True)
    rounds.dense(counters)
    many, _ = counters.read()  # while the device multiplies
    if many * _RARE > rows:
        return _dense(rounds, counters, limits, rows, 1, even=True)
    return _few(rounds, counters, limits, rows, many)


def _dense(rounds: _Rounds, counters: _Counters | None, limits: Limits, rows: int, t: int, *, even: bool) -> int:
    """From step t on, which all queries not done are before; unless ``even``, some may be further."""
    for now in range(t, limits.most):
        if counters is not None and now in _LOOKS and (now > 2 or limits.tol > 0):
            rounds.tell(counters)
            left = rows - counters.read()[1]
            if not left:
                return limits.most + 1
            if even and 2 * left <= rows:
                return now
        rounds.score()
        rounds.dense()
    rounds.score()
    rounds.energies()
    return limits.most + 1


def _few(rounds: _Rounds, counters: _Counters, limits: Limits, rows: int, before: int) -> int:
    """From the second step on; so many queries had many weights at the first.

    Queries with many weights wait until the host has seen them, which may say that they are too many; if not, rounds
    are of the slower kind from then on.
    """
    t = made = 1  # steps of the query that is furthest behind, and rounds
    seen, wait = (t, made), True  # at the last look
    while t <= limits.most:
        made, t = made + 1, t + 1
        look = made in _LOOKS_AT_FEW if t <= limits.most else wait
        rounds.score()
        rounds.few(wait, counters if look else None)
        if not look:
            continue
        many, done = counters.read()
        if done == rows:
            break
        if wait and many > before:
            t, wait = seen[0], False
        if (many - before) * _RARE > rows * (made - seen[1]):
            return _dense(rounds, counters, limits, rows, t, even=t == made)
        before, seen = many, (t, made)
    return limits.most + 1
