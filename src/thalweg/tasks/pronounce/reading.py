"""Texts as words to be pronounced: numbers in words, marks left out, what cannot be read named."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container
from dataclasses import dataclass

from thalweg.tasks.pronounce.numbers import spelt

SIGNS = {"&": "and", "%": "percent", "+": "plus", "=": "equals", "@": "at"}
# Marks that say nothing by themselves, beside those that Unicode calls punctuation.
SILENT = "`´~^|<>"
_PIECE = re.compile(
    r"(?P<number>(?:(?<!\w)[-−])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:(?:st|nd|rd|th)\b|\.[0-9]+)?)"
    r"|(?P<word>'?[a-z]+(?:[.'-][a-z]+)*(?:'(?![a-z])|\.(?![a-z]))?)|(?P<sign>.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Reading:
    """What a text says: its words in order, and characters that are neither read nor punctuation.

    >>> Reading(("a", "dog")).unread
    ()
    """

    words: tuple[str, ...]
    unread: tuple[str, ...] = ()


def plain(text: str) -> str:
    """Lower case letters without accents, straight apostrophes.

    >>> plain("Café’s")
    "cafe's"
    """
    text = unicodedata.normalize("NFD", text).replace("’", "'").replace("‘", "'").lower()
    return "".join(character for character in text if not unicodedata.combining(character))


def read(text: str, known: Container[str]) -> Reading:
    """The words of a text.

    Numbers are said in words (:func:`~thalweg.tasks.pronounce.numbers.spelt`), ``& % + = @`` too, and a sign before a
    number is *minus*. A word with a full stop, a hyphen or an apostrophe at an end stays whole where the dictionary
    has it (*dr.*, *able-bodied*, *dogs'*); otherwise hyphens part words, letters between full stops are read one by
    one (*u.s.a.*), and stops and apostrophes at the ends are punctuation. Accents are taken off. Other punctuation is
    silent. Any other character is left out and named.

    Args:
        known: the words of a dictionary.

    >>> read("It's 3.5%, Dr. O’Neil!", {"it's", "dr."}).words
    ("it's", 'three', 'point', 'five', 'percent', 'dr.', "o'neil")
    >>> read("5 €", ())
    Reading(words=('five',), unread=('€',))
    """
    words: list[str] = []
    unread: dict[str, None] = {}
    for found in _PIECE.finditer(plain(text)):
        piece = found[0]
        if found["number"]:
            words += _number(piece)
        elif found["word"]:
            words += _word(piece, known)
        elif piece in SIGNS:
            words.append(SIGNS[piece])
        elif not piece.isspace() and piece not in SILENT and not unicodedata.category(piece).startswith("P"):
            unread[piece] = None
    return Reading(tuple(words), tuple(unread))


def _number(piece: str) -> list[str]:
    """In words; what is no number as a whole, such as ``2th``, is read part by part."""
    sign = ["minus"] if piece[0] in "-−" else []
    body = piece.lstrip("-−")
    whole = spelt(body)
    if whole is not None:
        return [*sign, *whole]
    return [*sign, *(word for part in re.findall(r"[0-9]+|[a-z]+", body) for word in spelt(part) or (part,))]


def _word(piece: str, known: Container[str]) -> list[str]:
    if piece in known:
        return [piece]
    bare = piece.strip("'.")
    if bare in known or not re.search(r"[.-]", bare):
        return [bare]
    if re.fullmatch(r"[a-z](?:\.[a-z])+", bare):
        return [f"{letter}." if f"{letter}." in known else letter for letter in bare.split(".")]
    return [word for part in re.split(r"[.-]", bare) if part for word in _word(part, known)]
