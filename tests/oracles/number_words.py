"""What English number words mean: read from left to right, nothing shared with what writes them."""

from __future__ import annotations

_SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_LARGE = "twenty thirty forty fifty sixty seventy eighty ninety"
_SCALES = "thousand million billion trillion"
_ORDINALS = """zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth
    fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth
    seventieth eightieth ninetieth hundredth thousandth millionth billionth trillionth"""
UNITS = {word: n for n, word in enumerate(_SMALL.split())} | {w: 10 * n for n, w in enumerate(_LARGE.split(), 2)}
SCALES = {word: 1000**n for n, word in enumerate(_SCALES.split(), 1)}
ENDINGS = dict(zip(_ORDINALS.split(), [*UNITS, "hundred", *SCALES], strict=True))


def value(words: tuple[str, ...]) -> int:
    """The number that cardinal words say; scales must fall, and what a scale counts must be under a thousand."""
    total, part, last = 0, 0, 10**15
    for word in words:
        if word in UNITS:
            assert part % 100 == 0 or (part % 10 == 0 and part % 100 >= 20 and 0 < UNITS[word] < 10), words
            part += UNITS[word]
        elif word == "hundred":
            assert 0 < part < 10, words
            part *= 100
        else:
            assert 0 < part < 1000, words
            assert SCALES[word] < last, words
            last = SCALES[word]
            total, part = total + part * last, 0
    return total + part


def ordinal(words: tuple[str, ...]) -> int:
    """The number that ordinal words say."""
    return value((*words[:-1], ENDINGS[words[-1]]))
