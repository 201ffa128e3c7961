"""Answers that go round in circles: the same few symbols again and again until something stops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from thalweg.inference.search.protocol import check_at_least_one

LEAST, LONGEST = 4, 16


class Loop(NamedTuple):
    """A cycle of symbols at the end of a sequence, and how many times in a row it stands there.

    The last time may be cut short, and is not counted then.

    >>> Loop((7, 8), 5).times
    5
    """

    cycle: tuple[Any, ...]
    times: int


def loop_at_end(symbols: Sequence[Any], *, least: int = LEAST, longest: int = LONGEST) -> Loop | None:
    """The shortest cycle that stands at least ``least`` times in a row at the end of a sequence; None where none does.

    Args:
        symbols: the sequence, without eos.
        least: at least 2; longest: most symbols of a cycle.

    A model that loops (Holtzman et al., 2020) rarely comes out by itself, so that only the end is looked at. A cycle of
    p symbols is there where y_t = y_{t-p} for the last (least - 1) p symbols or more. Time O(longest T) at worst.

    >>> loop_at_end("the cat cat cat cat cat".split())
    Loop(cycle=('cat',), times=5)
    >>> loop_at_end([1, 2, 3, 2, 3, 2, 3, 2, 3, 2])
    Loop(cycle=(3, 2), times=4)
    >>> loop_at_end([5, 5, 5]) is None
    True
    """
    check_at_least_one("longest", longest)
    check_at_least_one("least - 1", least - 1)
    T = len(symbols)
    for period in range(1, min(longest, T // least) + 1):
        same = 0
        while same < T - period and symbols[T - 1 - same] == symbols[T - 1 - same - period]:
            same += 1
        if same >= (least - 1) * period:
            return Loop(tuple(symbols[T - period :]), 1 + same // period)
    return None
