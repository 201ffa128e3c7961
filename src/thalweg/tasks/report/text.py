"""Small pieces of HTML: escaping, numbers, symbols that must be seen, differences between two answers.

Every string from a run goes through :func:`escape` here, so that data can never become markup.
"""

from __future__ import annotations

import difflib
import html
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# HTML allows no C0 and C1 controls but tab and newline; lone surrogates cannot be written as UTF-8.
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def as_number(value: object) -> float | None:
    """`value` as a float where it is a finite number, else None (booleans are not numbers).

    >>> as_number(3), as_number("3"), as_number(float("nan")), as_number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON integers have no limit
        return None
    return number if math.isfinite(number) else None


def as_list(value: object) -> list[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def escape(value: object) -> str:
    """`value` as HTML text, safe in attributes too; characters that HTML forbids become U+FFFD.

    >>> escape("<script>'x' & y")
    '&lt;script&gt;&#x27;x&#x27; &amp; y'
    """
    return html.escape(FORBIDDEN.sub("\ufffd", str(value)))


def foreign(value: object) -> str:
    """Text of any script, kept from disturbing the direction of the text around it.

    >>> foreign("سلام")
    '<bdi>سلام</bdi>'
    """
    return f"<bdi>{escape(value)}</bdi>"


def note(text: str) -> str:
    """A line that says that something is absent; `text` is plain text.

    >>> note("No log.")
    '<p class="note">No log.</p>'
    """
    return f'<p class="note">{escape(text)}</p>'


def figure(value: object, digits: int = 4) -> str:
    """A number for reading: whole numbers grouped, others with `digits` decimals or three significant digits.

    >>> figure(1234567), figure(0.20718), figure(0.0000125), figure(None)
    ('1,234,567', '0.2072', '1.25e-05', '–')
    """
    number = as_number(value)
    if number is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{number:.3g}" if 0 < abs(number) < 10.0**-digits else f"{number:,.{digits}f}"


def probability(value: object) -> str:
    """A probability with three decimals, never rounded to 0 or 1 when it is neither.

    >>> probability(0.62), probability(0.00001), probability(0.99999), probability("?")
    ('0.620', '<0.001', '>0.999', '–')
    """
    number = as_number(value)
    if number is None:
        return "–"
    if 0 < number < 0.001:
        return "<0.001"
    return ">0.999" if 0.9995 <= number < 1 else f"{number:.3f}"


def duration(seconds: object) -> str:
    """A time in the units a person would use.

    >>> duration(6.14), duration(90), duration(7260)
    ('6.1 s', '1 min 30 s', '2 h 1 min')
    """
    number = as_number(seconds)
    if number is None:
        return "–"
    if number < 60:
        return f"{number:.1f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def describe(value: object) -> str:
    """A setting or a group of settings in one line; what is off, unset or empty is left out.

    >>> describe({"cell": "lstm", "hidden_size": 256, "tied": True, "dropout": None, "shape": {}})
    'cell lstm · hidden size 256 · tied'
    """
    if isinstance(value, dict):
        parts = []
        for key, setting in value.items():
            name = str(key).replace("_", " ")
            if setting is None or setting is False or setting in ("", [], (), {}):
                continue
            if setting is True:
                parts.append(name)
            elif isinstance(setting, dict):
                parts.append(f"{name} ({describe(setting)})")
            else:
                parts.append(f"{name} {describe(setting)}")
        return " · ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(describe(each) for each in value)
    return str(value)


def closest(text: str, references: Sequence[str]) -> str | None:
    """The reference that is most like a text; None where there is none.

    >>> closest("k ʌ t", ["d ɒ ɡ", "k æ t"])
    'k æ t'
    """

    def likeness(reference: str) -> float:
        return difflib.SequenceMatcher(None, text, reference, autojunk=False).ratio()

    return max(references, key=likeness, default=None)


def symbol(text: str) -> str:
    """One symbol so that it can be seen: spaces, lone combining marks, invisible characters get a stand-in.

    >>> symbol("a"), symbol(" "), symbol("\u0301"), symbol("\u200d")
    ('<bdi>a</bdi>', '<bdi>␣</bdi>', '<bdi>◌́</bdi>', '<bdi>U+200D</bdi>')
    """
    if text and all(unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp") for each in text):
        return foreign(" ".join(f"U+{ord(each):04X}" for each in text))
    if text and text.isspace():
        return foreign("␣" * len(text))
    if text and unicodedata.category(text[0]).startswith("M"):
        return foreign("◌" + text)
    return foreign(text or "∅")


def difference(text: str, other: str) -> str:
    """`text` with what differs from `other` in `<mark>`: by phones where there are spaces, else by character.

    >>> difference("k æ t", "k ʌ t")
    '<bdi>k <mark>æ</mark> t</bdi>'

    Quadratic in the length, as an alignment is.
    """
    spaced = " " in text or " " in other
    ours, theirs = (line.split(" ") if spaced else _clusters(line) for line in (text, other))
    parts: list[str] = []
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    glue = " " if spaced else ""
    for kind, begin, end, _, _ in matcher.get_opcodes():
        if begin < end:
            piece = escape(glue.join(ours[begin:end]))
            parts.append(piece if kind == "equal" else f"<mark>{piece}</mark>")
    return f"<bdi>{glue.join(parts)}</bdi>"


def _clusters(text: str) -> Sequence[str]:
    """Characters with their combining marks, so that no mark is torn from its letter."""
    clusters: list[str] = []
    for each in text:
        if clusters and unicodedata.category(each) in ("Mn", "Mc", "Me", "Cf"):
            clusters[-1] += each
        else:
            clusters.append(each)
    return clusters
