"""The symbols that a model knows, and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thalweg.errors import DataError, ShapeError

UNK = 0
"""Number of every symbol that was not seen in training."""
PAD = 1
"""Number that fills a row past the end of its sequence."""
BOS = 2
"""Number that a decoder reads first (begin of sequence); never part of a target."""
EOS = 3
"""Number that ends a target (end of sequence)."""
SPECIALS = 4


class Alphabet:
    """A one-to-one map between symbols and the numbers 4, 5, ...

    The numbers 0 to 3 are the same in every alphabet and stand for no symbol: ``UNK`` (a symbol that was not
    seen in training), ``PAD``, ``BOS`` (begin) and ``EOS`` (end). ``len`` counts them.

    Args:
        symbols: distinct, non-empty strings; ``symbols[i]`` has the number ``i + 4``.

    >>> alphabet = Alphabet(["a", "b"])
    >>> alphabet.encode("abc"), alphabet.decode([4, 5, 0, 3, 1]), len(alphabet)
    ([4, 5, 0], ('a', 'b', '\ufffd'), 6)
    >>> alphabet.unk, alphabet.pad, alphabet.bos, alphabet.eos
    (0, 1, 2, 3)
    """

    # Who batches, models or searches asks these of the alphabet: another kind of it may number otherwise.
    unk, pad, bos, eos = UNK, PAD, BOS, EOS

    def __init__(self, symbols: Sequence[str]) -> None:
        if isinstance(symbols, str):
            raise DataError(f"an alphabet takes a list of symbols, got the text {symbols!r}; use Alphabet.build")
        self._symbols = tuple(symbols)
        for symbol in self._symbols:
            if not isinstance(symbol, str) or not symbol:
                raise DataError(f"an alphabet holds non-empty strings, got {symbol!r}")
        self._ids = {symbol: number for number, symbol in enumerate(self._symbols, SPECIALS)}
        self._by_number = ("",) * SPECIALS + self._symbols
        if len(self._ids) != len(self._symbols):
            seen: set[str] = set()
            twice = next(symbol for symbol in self._symbols if symbol in seen or seen.add(symbol))
            raise DataError(f"an alphabet holds each symbol once, got {twice!r} twice")

    @classmethod
    def build(cls, sequences: Iterable[Sequence[str]]) -> Alphabet:
        """The alphabet of all symbols in ``sequences``, in the order of their code points.

        The order depends on the set of symbols alone, so the same data in another order gives the same
        numbers. Time O(total length).

        >>> Alphabet.build([("b", "a"), ("a", "AE")]).symbols
        ('AE', 'a', 'b')
        """
        return cls(sorted({symbol for sequence in sequences for symbol in sequence}))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols, without the four special ones."""
        return self._symbols

    @property
    def names(self) -> tuple[str, ...]:
        """What is shown for each number, the special ones included.

        >>> Alphabet(["a", "b"]).names
        ('\ufffd', '<pad>', '<s>', '</s>', 'a', 'b')
        """
        return ("\ufffd", "<pad>", "<s>", "</s>", *self._symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """The number of each symbol, ``UNK`` for an unseen one; adds neither begin nor end.

        >>> Alphabet(["K", "AE", "T"]).encode(["T", "AE", "Z"])
        [6, 5, 0]
        """
        get = self._ids.get
        return [get(symbol, UNK) for symbol in symbols]

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """The symbols of ``ids`` up to the first ``EOS``; ``PAD``, ``BOS`` and -1 are passed over.

        ``UNK`` gives the replacement character U+FFFD. A number that is outside the alphabet is a
        ``ShapeError``.

        >>> Alphabet(["a", "b"]).decode([2, 4, 5, 3, -1, -1])
        ('a', 'b')
        """
        numbers = ids if type(ids) is list else list(map(int, ids))
        if numbers and numbers[-1] == EOS:  # as searches give them: nothing but symbols, and the end
            numbers = numbers[:-1]
        result, size = [], len(self)
        if numbers and min(numbers) >= SPECIALS and max(numbers) < size:
            return tuple(map(self._by_number.__getitem__, numbers))
        for number in map(int, numbers):
            if SPECIALS <= number < size:
                result.append(self._by_number[number])
            elif number == EOS:
                break
            elif number == UNK:
                result.append("\ufffd")
            elif number not in (PAD, BOS, -1):
                raise ShapeError(f"ids must be in 0..{size - 1}, the size of the alphabet, got {number}")
        return tuple(result)

    def unknown(self, symbols: Iterable[str]) -> tuple[str, ...]:
        """The distinct symbols that the alphabet lacks, in the order in which they first occur.

        >>> Alphabet(["a", "b"]).unknown("cabzc")
        ('c', 'z')
        """
        symbols = tuple(symbols)
        if self._ids.keys() >= set(symbols):
            return ()
        return tuple(dict.fromkeys(symbol for symbol in symbols if symbol not in self._ids))

    def to_json(self) -> list[str]:
        """The symbols as a JSON list, without the special ones."""
        return list(self._symbols)

    @classmethod
    def from_json(cls, data: object) -> Alphabet:
        """The alphabet that :meth:`to_json` wrote; anything else is a ``DataError``.

        >>> Alphabet.from_json(["a", "b"]) == Alphabet(["a", "b"])
        True
        """
        if not isinstance(data, list):
            raise DataError(f"an alphabet must be a JSON list of strings, got {type(data).__name__}")
        return cls(data)

    def __len__(self) -> int:
        return len(self._symbols) + SPECIALS

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._ids

    def __eq__(self, other: object) -> bool:
        return self._symbols == other._symbols if isinstance(other, Alphabet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._symbols)

    def __repr__(self) -> str:
        return f"Alphabet({len(self._symbols)} symbols + {SPECIALS} special)"
