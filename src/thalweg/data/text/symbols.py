"""How a text is cut into the symbols that a model reads and writes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.errors import ConfigError, MissingDependencyError, nearest

Kind = Literal["characters", "graphemes", "spaced"]
"""What one symbol is; see :class:`Symbols`."""
Normalise = Literal["nfc", "nfd", "none"]
"""The Unicode normal form of a text before it is cut; see :class:`Symbols`."""

KINDS: tuple[Kind, ...] = ("characters", "graphemes", "spaced")
NORMALISE: tuple[Normalise, ...] = ("nfc", "nfd", "none")

# A guess needs a fair sample of the file, not all of it: cutting clusters of a million lines takes a minute.
SAMPLE = 20_000


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """The rule that cuts a text into symbols and puts symbols together again.

    Args:
        kind: ``characters`` are Unicode code points; ``graphemes`` are extended grapheme clusters (what a
            reader sees as one letter); ``spaced`` are the pieces between runs of white space (phones).
        normalise: ``nfc`` composes letter and mark where Unicode has the pair as one code point; ``nfd``
            takes such pairs apart (a Hangul syllable into its letters); ``none`` leaves the text as it is.

    For every text, ``split(join(split(text))) == split(text)``. Time O(length).

    >>> Symbols().split("né")
    ('n', 'é')
    >>> Symbols(normalise="nfd").split("né")
    ('n', 'e', '\u0301')
    >>> Symbols(kind="spaced").split("K AE  T")
    ('K', 'AE', 'T')
    >>> print(Symbols(kind="spaced"))
    spaced, NFC
    """

    kind: Kind = "characters"
    normalise: Normalise = "nfc"

    def __post_init__(self) -> None:
        _choice("kind", self.kind, KINDS)
        _choice("normalise", self.normalise, NORMALISE)

    def split(self, text: str) -> tuple[str, ...]:
        """The symbols of ``text``, in order; a text of nothing but spaces has no ``spaced`` symbol.

        >>> Symbols(kind="graphemes").split("ɑ̃m")
        ('ɑ̃', 'm')
        """
        if self.normalise != "none":
            text = unicodedata.normalize(self.normalise.upper(), text)  # pyright: ignore[reportArgumentType]
        if self.kind == "spaced":
            return tuple(text.split())
        return _clusters(text) if self.kind == "graphemes" else tuple(text)

    def join(self, symbols: Iterable[str]) -> str:
        """The text that ``symbols`` spell: with one space between ``spaced`` symbols, else with nothing.

        The text is NFC both for ``nfc`` and for ``nfd``: symbols that were taken apart for the model's sake
        are composed again for people and for comparison with ordinary text.

        >>> Symbols(kind="spaced").join(["K", "AE", "T"])
        'K AE T'
        >>> Symbols(normalise="nfd").join(["n", "e", "\u0301"])
        'né'
        """
        text = (" " if self.kind == "spaced" else "").join(symbols)
        return text if self.normalise == "none" else unicodedata.normalize("NFC", text)

    def to_json(self) -> dict[str, str]:
        """The rule as a JSON object.

        >>> Symbols().to_json()
        {'kind': 'characters', 'normalise': 'nfc'}
        """
        return {"kind": self.kind, "normalise": self.normalise}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Symbols:
        """The rule that :meth:`to_json` wrote; an unknown key or value is a ``ConfigError``.

        >>> Symbols.from_json({"kind": "graphemes"})
        Symbols(kind='graphemes', normalise='nfc')
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"symbols must be an object with `kind` and `normalise`, got {data!r}")
        for key in data:
            if key not in ("kind", "normalise"):
                raise ConfigError(f"symbols have no setting `{key}`; {nearest(str(key), ['kind', 'normalise'])}")
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.kind}, {'as is' if self.normalise == 'none' else self.normalise.upper()}"


def guess_symbols(texts: Sequence[str]) -> Symbols:
    """The rule that suits one column of a file; a person may overrule it.

    * ``spaced`` if nine texts in ten (single short pieces aside) hold a space and nine pieces in ten
      have at most two letters, marks and digits not counted: phone strings. Ordinary words are longer, so
      sentences stay ``characters``.
    * ``characters, NFD`` if taking composed letters apart shrinks an alphabet of more than 100 to a third or
      less: Hangul, whose 11,172 syllables are spelled with 67 letters.
    * ``graphemes`` if marks or joiners are left in one text in twenty and clusters make the alphabet at most
      a half larger: accents that have no composed form. Not for scripts with vowel signs (Khmer, Devanagari):
      their clusters are whole syllables (432 against 66 characters on the Khmer of SIGMORPHON 2021) and many
      of those in new words would be unknown.
    * ``characters, NFC`` otherwise.

    Looks at 20,000 texts at most, spread evenly. Time O(total length).

    >>> print(guess_symbols(["K AE T", "D AO G"]))
    spaced, NFC
    >>> print(guess_symbols(["two men run", "a dog"]))
    characters, NFC
    """
    if not texts:
        return Symbols()
    step = -(-len(texts) // SAMPLE)
    sample = [unicodedata.normalize("NFC", text) for text in texts[::step]]
    if _looks_spaced(sample):
        return Symbols(kind="spaced")
    composed = set().union(*sample)
    decomposed = set(unicodedata.normalize("NFD", "".join(composed)))
    if len(composed) > 100 and len(composed) >= 3 * len(decomposed):
        return Symbols(normalise="nfd")
    marked = sum(any(map(_is_mark, text)) for text in sample)
    if 20 * marked >= len(sample) and not any(map(_is_vowel_sign, composed)):
        clusters = {cluster for text in sample for cluster in _clusters(text)}
        if 2 * len(clusters) <= 3 * len(composed):
            return Symbols(kind="graphemes")
    return Symbols()


def _looks_spaced(texts: Sequence[str]) -> bool:
    # A single short piece may be one phone or a short word: it tells nothing.
    telling = [pieces for text in texts if len(pieces := text.split()) > 1 or _letters(text) > 2]
    if not telling or 10 * sum(len(pieces) > 1 for pieces in telling) < 9 * len(telling):
        return False
    sizes: dict[str, int] = {}
    short = total = 0
    for pieces in telling:
        for piece in pieces:
            size = sizes.get(piece)
            if size is None:
                size = sizes[piece] = _letters(piece)
            short += size <= 2
            total += 1
    return 10 * short >= 9 * total


def _letters(text: str) -> int:
    # Modifier letters (Lm: length, aspiration) are no letters of their own in phonetic writing.
    return sum(unicodedata.category(symbol) in ("Ll", "Lu", "Lt", "Lo") for symbol in text)


def _is_mark(symbol: str) -> bool:
    return symbol == "\u200d" or unicodedata.category(symbol).startswith("M")


def _is_vowel_sign(symbol: str) -> bool:
    # Accents have a combining class; vowel signs of Indic scripts, Khmer, ... have none (viramas: 9). A
    # variation selector (of an emoji) has none either, but makes no syllable.
    mark = unicodedata.category(symbol).startswith("M") and not "\ufe00" <= symbol <= "\ufe0f"
    return mark and unicodedata.combining(symbol) in (0, 9)


def _clusters(text: str) -> tuple[str, ...]:
    if text.isascii() and "\r" not in text:  # each ASCII character is its own cluster, but for CR LF
        return tuple(text)
    try:
        import regex
    except ImportError as error:
        raise MissingDependencyError("graphemes need the package `regex`; run: pip install regex") from error
    return tuple(regex.findall(r"\X", text))


def _choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"`{name}` of symbols is {value!r}; {nearest(str(value), choices)}")
