"""Spans written as one tag for each position, and the tag sequences that such a writing permits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError, DataError, nearest


class _Scheme(NamedTuple):
    """The letters a scheme writes for the parts of a span; None where it has no letter for the part."""

    begin: str | None
    inside: str
    last: str | None  # the last position of a span of several
    single: str | None  # a span of one position

    @property
    def letters(self) -> list[str]:
        return [letter for letter in (self.begin, self.inside, self.last, self.single) if letter]

    def __str__(self) -> str:
        return ", ".join(["O", *(f"{letter}-TYPE" for letter in self.letters)])


_SCHEMES = {
    "BIO": _Scheme("B", "I", None, None),
    "BIOES": _Scheme("B", "I", "E", "S"),
    "BILOU": _Scheme("B", "I", "L", "U"),
    "IOB1": _Scheme("B", "I", None, None),
    "IO": _Scheme(None, "I", None, None),
}
# What begins a span whatever came before, and what ends one whatever follows.
_BEGINS, _ENDS = frozenset("BSU"), frozenset("ELSU")


class _Tag(NamedTuple):
    """A label taken apart; O has no letter and no type."""

    letter: str | None
    type: str | None


_OUTSIDE = _Tag(None, None)


class TagConstraints(NamedTuple):
    """What a tagging scheme permits, as scores to add to those of a chain: 0 permitted, -inf forbidden.

    Attributes:
        transitions: ``(C, C)``; ``transitions[i, j]`` says whether label j may follow label i.
        start: ``(C,)``; whether a sequence may begin with the label.
        end: ``(C,)``; whether it may end with it.

    >>> rules = tag_constraints(["O", "B-PER", "I-PER"])
    >>> rules.start
    tensor([0., 0., -inf])
    """

    transitions: Tensor
    start: Tensor
    end: Tensor

    def to(self, *args, **kwargs) -> TagConstraints:
        """The same on another device or of another type, as :meth:`torch.Tensor.to` takes them.

        >>> tag_constraints(["O", "I-X"], "IO").to(torch.float64).end.dtype
        torch.float64
        """
        return TagConstraints(*(part.to(*args, **kwargs) for part in self))


def tag_constraints(
    labels: Sequence[str],
    scheme: str = "BIO",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> TagConstraints:
    """The scores that let through exactly the tag sequences of a scheme.

    A sequence is permitted if it is the writing of some set of spans. For every scheme here that is a matter of
    neighbours, so start, transitions and end say it exactly:

    ======  ==================================================================================
    BIO     B-x begins a span, I-x goes on with one: it stands after B-x or I-x
    BIOES   B-x, I-x ..., E-x for several positions, S-x for one; every span begun is ended
    BILOU   the same with L for E and U for S
    IOB1    I-x begins and goes on; B-x only where a span of x touches the one before
    IO      I-x alone; every sequence is permitted (touching spans of a type are one)
    ======  ==================================================================================

    Args:
        labels: C names in the order of their numbers: ``O``, or a letter, ``-`` and a type. A bare letter is a
            span without a type. Any of them may be absent.
        scheme: ``BIO`` (also known as IOB2), ``BIOES``, ``BILOU``, ``IOB1`` or ``IO``.
        dtype: of the scores.
        device: of the scores.

    Time and memory O(C^2).

    >>> rules = tag_constraints(["O", "B-X", "I-X"], "BIO")
    >>> rules.transitions
    tensor([[0., 0., -inf],
            [0., 0., 0.],
            [0., 0., 0.]])
    """
    rules = _scheme(scheme)
    if isinstance(labels, str) or not labels:
        raise DataError(f"`labels` must be a list of at least one label name, got {labels!r}")
    tags = [_parse(label, f"label {place}", scheme, rules) for place, label in enumerate(labels)]
    seen: dict[_Tag, int] = {}
    for place, tag in enumerate(tags):
        if seen.setdefault(tag, place) != place:
            raise DataError(f"labels must be distinct, got `{labels[place]}` as labels {seen[tag]} and {place}")

    def scores(befores: Iterable[_Tag | None], afters: Iterable[_Tag | None]) -> Tensor:
        afters = list(afters)
        rows = [[0.0 if _may_follow(scheme, rules, i, j) else -math.inf for j in afters] for i in befores]
        return torch.tensor(rows, dtype=dtype, device=device)

    return TagConstraints(scores(tags, tags), scores([None], tags)[0], scores(tags, [None])[:, 0])


def tag_spans(tags: Sequence[str], scheme: str = "BIO") -> list[tuple[int, int, str]]:
    """The spans that a tag sequence writes, as (start, end, type), the end exclusive, in order.

    A tag that cannot stand where it stands, as I-x after O in BIO, begins a span of its own, so that what an
    unconstrained model says can be read and scored too.

    Args:
        tags: T names; positions count from 0.
        scheme: as in :func:`tag_constraints`.

    >>> tag_spans(["B-PER", "I-PER", "O", "B-LOC"])
    [(0, 2, 'PER'), (3, 4, 'LOC')]
    >>> tag_spans(["O", "I-PER", "E-PER"], "BIOES")
    [(1, 3, 'PER')]
    """
    rules = _scheme(scheme)
    spans: list[tuple[int, int, str]] = []
    open_type: str | None = None  # of the span that the next position may go on with
    for place, name in enumerate(tags):
        tag = _parse(name, f"position {place}", scheme, rules)
        if tag.letter is None or tag.type is None:
            open_type = None
            continue
        if tag.letter in _BEGINS or tag.type != open_type:
            spans.append((place, place + 1, tag.type))
        else:
            spans[-1] = (spans[-1][0], place + 1, tag.type)
        open_type = None if tag.letter in _ENDS else tag.type
    return spans


def _scheme(name: str) -> _Scheme:
    if name not in _SCHEMES:
        # "IOB2" is near to IOB1 in letters and means BIO.
        remedy = "IOB2 is called BIO here" if name.upper() == "IOB2" else nearest(name.upper(), _SCHEMES)
        raise ConfigError(f"`scheme` must be one of {', '.join(_SCHEMES)}, got {name!r}; {remedy}")
    return _SCHEMES[name]


def _parse(name: str, where: str, scheme: str, rules: _Scheme) -> _Tag:
    """The letter and type of a tag name."""
    if name == "O":
        return _OUTSIDE
    letter, dash, kind = name.partition("-")
    if letter in rules.letters and bool(dash) == bool(kind):
        return _Tag(letter, kind)
    raise DataError(f"{where} must be one of {rules} in the scheme {scheme}, got {name!r}; {_remedy(name, rules)}")


def _remedy(name: str, rules: _Scheme) -> str:
    """What to do about a tag name that does not fit: the likeliest slip first."""
    letter, _, kind = name.partition("-")
    if len(letter) == 1 and (fitting := _schemes_with(letter.upper())) and letter.upper() not in rules.letters:
        return f"the letter {letter.upper()} belongs to {' and '.join(fitting)}"
    if name.strip().upper() == "O":
        return "write `O`"
    if letter.upper() in rules.letters and kind:
        return f"write `{letter.upper()}-{kind}`"
    if len(name) > 2 and name[0] in rules.letters and not name[1].isalnum() and name[2:]:
        return f"write `{name[0]}-{name[2:]}`"
    front, _, back = name.rpartition("-")
    if front and back in rules.letters:
        return f"write `{back}-{front}`"
    if name.startswith(("<", "[")):
        return "leave it out: padding, start and end are no labels (see `lengths`, `start` and `end` of LinearChain)"
    return f"write `{rules.letters[0]}-{name}` where a span begins" if name else "give the label a name"


def _schemes_with(letter: str) -> list[str]:
    return [name for name, rules in _SCHEMES.items() if letter in rules.letters]


def _may_follow(scheme: str, rules: _Scheme, before: _Tag | None, after: _Tag | None) -> bool:
    """Whether ``after`` may stand right after ``before``; None is the edge of the sequence."""
    same = before is not None and after is not None and before.type == after.type
    if scheme == "IOB1":
        return after is None or after.letter != rules.begin or same
    if scheme == "IO":
        return True
    is_open = before is not None and before.letter in (rules.begin, rules.inside)
    goes_on = after is not None and after.letter is not None and after.letter in (rules.inside, rules.last)
    if goes_on:
        return is_open and same
    return not (is_open and rules.last)
