"""Numbers as English words."""

from __future__ import annotations

import re

_ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = ("", "thousand", "million", "billion", "trillion")
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
LARGEST = 1000 ** len(_SCALES) - 1
"""Numbers above are read digit by digit."""

_NUMBER = re.compile(r"(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<part>\d+)|(?P<end>st|nd|rd|th))?", re.ASCII)


def spelt(text: str) -> tuple[str, ...] | None:
    """The words of a number: cardinal, decimal or ordinal; None where the text is none.

    A comma parts thousands. Numbers of several digits that begin with a zero, and those above :data:`LARGEST`, are
    read digit by digit; a year is read as any other number. An ordinal must have its own ending: ``2th`` is none.

    >>> spelt("1,234"), spelt("3.05"), spelt("21st"), spelt("007")
    (('one', 'thousand', 'two', 'hundred', 'thirty', 'four'), ('three', 'point', 'zero', 'five'), \
('twenty', 'first'), ('zero', 'zero', 'seven'))
    >>> spelt("2th"), spelt("1,23")
    (None, None)
    """
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    digits = found["whole"].replace(",", "")
    single = (len(digits) > 1 and digits[0] == "0") or int(digits[:20]) > LARGEST
    words = [_ONES[int(digit)] for digit in digits] if single else _cardinal(int(digits))
    if found["part"]:
        return (*words, "point", *(_ONES[int(digit)] for digit in found["part"]))
    if found["end"]:
        if single or found["end"] != _ending(int(digits)):
            return None
        return (*words[:-1], _ordinal(words[-1]))
    return tuple(words)


def _cardinal(n: int) -> list[str]:
    if n == 0:
        return [_ONES[0]]
    words: list[str] = []
    for scale in _SCALES:
        n, below = divmod(n, 1000)
        if below:
            words = [*_below_thousand(below), *([scale] if scale else []), *words]
    return words


def _below_thousand(n: int) -> list[str]:
    hundreds, rest = divmod(n, 100)
    words = [_ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        return [*words, _TENS[tens - 2], *([_ONES[ones]] if ones else [])]
    return [*words, _ONES[rest]] if rest else words


def _ordinal(word: str) -> str:
    if word in _ORDINALS:
        return _ORDINALS[word]
    return f"{word[:-1]}ieth" if word.endswith("y") else f"{word}th"


def _ending(n: int) -> str:
    """Of the ordinal in digits."""
    return "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
