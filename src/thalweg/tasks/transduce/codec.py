"""The two sides of a pair: how text becomes numbers, tags of a feature column included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thalweg.data import Alphabet, Symbols

__all__ = ["Codec", "Piece", "is_tag", "tag_symbol"]

Piece = tuple[str, ...]
"""Symbols of a text or of a part of it, tags first."""


def tag_symbol(tag: str) -> str:
    """The source symbol of a tag.

    The space behind it keeps it apart from all that a text can be cut into: no character and no grapheme is so
    written, and a spaced symbol has no space in it.

    >>> tag_symbol("V")
    '<V> '
    """
    return f"<{tag}> "


def is_tag(symbol: str) -> bool:
    """Whether a source symbol is a tag.

    >>> is_tag("<V> "), is_tag("<V>"), is_tag(" ")
    (True, False, False)
    """
    return symbol.startswith("<") and symbol.endswith("> ")


@dataclass(frozen=True)
class Codec:
    """One side of the pairs: how text is cut into symbols, and the symbols that are known.

    >>> side = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> side.encode("cab"), side.decode([6, 4, 5, 3])
    ((6, 4, 5), 'cab')
    >>> side = Codec(Symbols(), Alphabet.build([("a", "b"), (tag_symbol("PL"),)]))
    >>> side.encode("ab", ["PL"]), side.features
    ((4, 5, 6), (4,))
    """

    symbols: Symbols
    alphabet: Alphabet

    @property
    def special(self) -> dict[str, int]:
        """Numbers of ``unk``, ``pad``, ``bos`` and ``eos``, as models take them."""
        return {name: getattr(self.alphabet, name) for name in ("unk", "pad", "bos", "eos")}

    @cached_property
    def features(self) -> tuple[int, ...]:
        """Ids of the tags; none where the pairs have no feature column."""
        tags = [symbol for symbol in self.alphabet.symbols if is_tag(symbol)]
        return tuple(self.alphabet.encode(tags))

    def tags(self, features: Iterable[str]) -> Piece:
        """Symbols of the tags that are known, in order: they stand before a text's own."""
        if not features:
            return ()
        return tuple(symbol for symbol in map(tag_symbol, features) if symbol in self.alphabet)

    def encode(self, text: str, features: Iterable[str] = ()) -> tuple[int, ...]:
        """Ids of a text's symbols, after those of its tags; a tag that is not known is left out."""
        return tuple(self.alphabet.encode((*self.tags(features), *self.symbols.split(text))))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids up to the first end symbol."""
        return self.symbols.join(self.alphabet.decode(ids))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"symbols": self.symbols.to_json(), "alphabet": self.alphabet.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Codec:
        """What :meth:`to_json` gave."""
        return cls(Symbols.from_json(data["symbols"]), Alphabet.from_json(data["alphabet"]))
