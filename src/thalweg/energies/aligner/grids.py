"""Pairs of sequences as grids of numbers of chunk pairs: what the aligner's scores are looked up by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thalweg.errors import ConfigError, DataError
from thalweg.limits import enough_memory

__all__ = ["Grid", "Side", "code_grids", "sides_of"]

Symbols = Sequence[str]
_AT_ONCE = 2**20  # moves into cells of one batch
_COPIES = 6  # of its numbers: codes, places, scores, posteriors and what is between


class Side(NamedTuple):
    """The alphabet of one side and how many symbols a chunk may have; a chunk is a number with a digit a symbol.

    >>> Side(("a", "b"), 2).chunk(5)
    ('a', 'b')
    """

    symbols: tuple[str, ...]
    longest: int

    @property
    def chunks(self) -> int:
        """One more than the highest number of a chunk; 0 is the empty chunk."""
        return (len(self.symbols) + 1) ** self.longest

    def numbers(self, texts: Sequence[Symbols], width: int) -> np.ndarray:
        """(N, width): digits 1.. of symbols, 0 past the end; unknown symbols have one digit too many."""
        known = {symbol: n for n, symbol in enumerate(self.symbols, 1)}
        found = np.zeros((len(texts), width), np.int64)
        for row, text in zip(found, texts, strict=True):
            row[: len(text)] = [known.get(symbol, -1) for symbol in text]
        return found

    def ending(self, digits: np.ndarray, size: int) -> np.ndarray:
        """(N, width + 1): the chunk of ``size`` symbols that ends before each place; -1 where there is none."""
        rows, width = digits.shape
        codes = np.zeros((rows, width + 1), np.int64)
        wrong = np.zeros((rows, width + 1), bool)
        wrong[:, :size] = True
        for back in range(size, 0, -1):
            part = np.zeros((rows, width + 1), np.int64)
            part[:, back:] = digits[:, : width + 1 - back]
            wrong |= part <= 0
            codes = codes * (len(self.symbols) + 1) + part
        codes[wrong] = -1
        return codes

    def chunk(self, code: int) -> tuple[str, ...]:
        """The symbols of a chunk."""
        found: list[str] = []
        while code:
            code, digit = divmod(code, len(self.symbols) + 1)
            found.append(self.symbols[digit - 1])
        return tuple(reversed(found))


class Grid(NamedTuple):
    """Pairs of about the same lengths."""

    items: np.ndarray  # (B,) their numbers
    rows: np.ndarray  # (B,) symbols of the sources, and `columns` of the targets
    columns: np.ndarray
    codes: np.ndarray  # (B, I + 1, J + 1, M): the pair of chunks that a move aligns, -1 where there is none


def _checked(pair: tuple[Symbols, Symbols]) -> tuple[Symbols, Symbols]:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(side, Sequence) for side in pair):
        raise DataError(f"a pair must be a source and a target, strings or sequences of symbols, got {repr(pair)[:60]}")
    return pair


def sides_of(pairs: Sequence[tuple[Symbols, Symbols]], longest: tuple[int, int]) -> tuple[Side, Side]:
    """The alphabets of both sides, sorted.

    >>> sides_of([("ba", "x")], (2, 1))[0]
    Side(symbols=('a', 'b'), longest=2)
    """
    found = [{symbol for pair in pairs for symbol in _checked(pair)[n]} for n in (0, 1)]
    if not all(isinstance(symbol, str) for symbols in found for symbol in symbols):
        raise DataError("the symbols of pairs must be strings; write numbers as text")
    source, target = (Side(tuple(sorted(symbols)), most) for symbols, most in zip(found, longest, strict=True))
    if source.chunks * target.chunks >= 2**62:
        raise ConfigError(
            f"chunks of {longest[0]} of {len(source.symbols)} symbols with {longest[1]} of {len(target.symbols)} "
            "must be fewer than 2^62; lower the longest chunk"
        )
    return source, target


def code_grids(
    pairs: Sequence[tuple[Symbols, Symbols]],
    sides: tuple[Side, Side],
    moves: Sequence[tuple[int, int]],
    *,
    at_once: int = _AT_ONCE,
) -> list[Grid]:
    """All pairs in grids, those of like lengths together: a move's code is its source chunk times T plus its target's.

    >>> grid = code_grids([("a", "x")], sides_of([("a", "x")], (1, 1)), [(1, 1), (1, 0)])[0]
    >>> grid.codes[0, 1].tolist()
    [[-1, 2], [3, 2]]
    """
    source, target = sides
    sizes = [(len(x), len(y)) for x, y in map(_checked, pairs)]
    order = sorted(range(len(pairs)), key=lambda n: (max(sizes[n]), sizes[n]))
    grids, begin = [], 0
    while begin < len(order):
        end, height, width = begin, 0, 0
        while end < len(order):
            high, wide = max(height, sizes[order[end]][0] + 1), max(width, sizes[order[end]][1] + 1)
            if end > begin and (end - begin + 1) * high * wide * len(moves) > at_once:
                break
            end, height, width = end + 1, high, wide
        cells = (end - begin) * height * width * len(moves)
        with enough_memory(_COPIES * cells, pairs=end - begin, source_symbols=height - 1, target_symbols=width - 1):
            pass
        items = np.array(order[begin:end], np.int64)
        first = source.numbers([pairs[n][0] for n in items], height - 1)
        second = target.numbers([pairs[n][1] for n in items], width - 1)
        starts = {a: source.ending(first, a) for a in {a for a, _ in moves}}
        stops = {b: target.ending(second, b) for b in {b for _, b in moves}}
        codes = np.empty((len(items), height, width, len(moves)), np.int64)
        for m, (a, b) in enumerate(moves):
            x, y = starts[a][:, :, None], stops[b][:, None, :]
            codes[..., m] = np.where((x >= 0) & (y >= 0), x * target.chunks + y, -1)
        rows, columns = (np.array([sizes[n][side] for n in items], np.int64) for side in (0, 1))
        grids.append(Grid(items, rows, columns, codes))
        begin = end
    return grids
