"""The two sides of a pair: how text becomes numbers, tags of a feature column included."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thalweg.data import Alphabet, Symbols
from thalweg.data.text.subwords import Subwords
from thalweg.data.text.tokenizer import TokenizerSymbols, Vocabulary, pack_tokenizer, unpack_tokenizer

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

    symbols: Symbols | Subwords | TokenizerSymbols
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

    @property
    def pieced(self) -> bool:
        """Whether symbols are pieces that a model reads and writes, and people count characters instead."""
        return not isinstance(self.symbols, Symbols)

    def units(self, text: str) -> Piece:
        """What errors in a text are counted in: its symbols, or its characters where the symbols are pieces.

        >>> Codec(Symbols(kind="spaced"), Alphabet.build([["AE", "K"]])).units("K AE")
        ('K', 'AE')
        """
        return tuple(unicodedata.normalize("NFC", text)) if self.pieced else self.symbols.split(text)

    def counted(self, symbols: Piece) -> Piece:
        """The :meth:`units` of an answer that is already cut."""
        return self.units(self.symbols.join(symbols)) if self.pieced else symbols

    def join_units(self, units: Iterable[str]) -> str:
        """The text of :meth:`units`."""
        return "".join(units) if self.pieced else self.symbols.join(units)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; of a tokenizer all but its files, see :func:`write_sides`."""
        if isinstance(self.symbols, TokenizerSymbols):
            return {"symbols": self.symbols.to_json(), "special": self.special}
        return {"symbols": self.symbols.to_json(), "alphabet": self.alphabet.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any], tokenizer: Any = None) -> Codec:
        """What :meth:`to_json` gave; ``tokenizer`` where it is of one."""
        kind = data["symbols"].get("kind")
        if kind == "tokenizer":
            told = {key: value for key, value in data["symbols"].items() if key != "kind"}
            return cls.of_tokenizer(tokenizer, **data["special"], **told)
        symbols = Subwords.from_json(data["symbols"]) if kind == "subwords" else Symbols.from_json(data["symbols"])
        return cls(symbols, Alphabet.from_json(data["alphabet"]))

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, *, unk: int, pad: int, bos: int, eos: int, **told: Any) -> Codec:
        """A side as a Hugging Face tokenizer has it; ``told`` as the attributes of ``TokenizerSymbols``."""
        pieces = tokenizer.get_vocab()
        listed = [""] * (1 + max(pieces.values()))
        for piece, number in pieces.items():
            listed[number] = piece
        special = set(tokenizer.all_special_ids) | {pad, bos, eos}
        vocabulary = Vocabulary(listed, unk=unk, pad=pad, bos=bos, eos=eos, special=special)
        return cls(TokenizerSymbols(tokenizer, **{"start": bos, "end": eos, **told}), vocabulary)


def write_sides(source: Codec, target: Codec) -> dict[str, Any]:
    """Both sides as plain JSON values, with the files of their tokenizers, once where they share one.

    >>> side = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> read_sides(write_sides(side, side)) == (side, side)
    True
    """
    result: dict[str, Any] = {"source": source.to_json(), "target": target.to_json()}
    kept: dict[int, str] = {}
    for name, side in (("source", source), ("target", target)):
        if isinstance(side.symbols, TokenizerSymbols):
            tokenizer = side.symbols.tokenizer
            same = kept.setdefault(id(tokenizer), name)
            result[name]["tokenizer"] = same if same != name else pack_tokenizer(tokenizer)
    return result


def read_sides(data: Mapping[str, Any]) -> tuple[Codec, Codec]:
    """The two sides that :func:`write_sides` gave."""
    tokenizers: dict[str, Any] = {}
    sides = []
    for name in ("source", "target"):
        files = data[name].get("tokenizer")
        if isinstance(files, Mapping):
            tokenizers[name] = unpack_tokenizer(files)
        used = tokenizers.get(files if isinstance(files, str) else name)
        sides.append(Codec.from_json(data[name], used))
    return sides[0], sides[1]
