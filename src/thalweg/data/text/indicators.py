"""Indicator features of words: names of what is true of a word and its neighbours, and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thalweg.errors import DataError


def word_indicators(words: Sequence[str]) -> list[list[str]]:
    """What taggers look at: of each word its form, prefixes and suffixes, and the forms and pairs of its neighbours.

    >>> word_indicators(["show", "flights"])[1][:7]
    ['bias', 'word=flights', 'before=show', 'after=', 'before2=', 'after2=', 'pair=show flights']
    """
    around = ["", "", *words, "", ""]
    found = []
    for at, word in enumerate(words, start=2):
        before2, before, _, after, after2 = around[at - 2 : at + 3]
        own = ["bias", f"word={word}", f"before={before}", f"after={after}", f"before2={before2}", f"after2={after2}"]
        own += [f"pair={before} {word}", f"next pair={word} {after}"]
        own += [f"prefix={word[:size]}" for size in (1, 2) if size < len(word)]
        own += [f"suffix={word[-size:]}" for size in (1, 2, 3) if size < len(word)]
        own += [
            name for name, there in (("digit", any(map(str.isdigit, word))), ("capital", word != word.lower())) if there
        ]
        found.append(own)
    return found


class Indicators:
    """The numbers 0, 1, ... of feature names, in the order in which they are first seen; other names are left out.

    Args:
        names: distinct.

    >>> known = Indicators.build([[["a", "b"], ["b"]]], least=2)
    >>> known.names, known.batch([[["b", "a"], ["z"]], [["b"]]])
    (('b',), (tensor([[[ 0],
             [-1]],
    <BLANKLINE>
            [[ 0],
             [-1]]]), tensor([2, 1])))
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        if len(self._numbers) != len(self.names):
            raise DataError(f"features must have distinct names, got {len(self.names) - len(self._numbers)} twice")

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def build(cls, sequences: Iterable[Sequence[Sequence[str]]], least: int = 1) -> Indicators:
        """Those that positions of the sequences have ``least`` times or more in all."""
        counts = Counter(name for sequence in sequences for names in sequence for name in names)
        kept = [name for name, count in counts.items() if count >= least]
        if not kept:
            raise DataError(f"expected features that occur at least {least} times, got none; lower `least`")
        return cls(kept)

    def batch(self, sequences: Sequence[Sequence[Sequence[str]]]) -> tuple[Tensor, Tensor]:
        """The names of each position of sequences as numbers ``(B, T, J)``, -1 for none, and lengths ``(B,)``."""
        numbers = self._numbers
        rows = [
            [[numbers[name] for name in dict.fromkeys(names) if name in numbers] for names in sequence]
            for sequence in sequences
        ]
        lengths = [len(row) for row in rows]
        if not lengths or not min(lengths):
            raise DataError("sequences must have at least one position each, got an empty one or none at all")
        width = max(1, max(len(each) for row in rows for each in row))
        steps = max(lengths)
        filled = [
            [each + [-1] * (width - len(each)) for each in row] + [[-1] * width] * (steps - len(row)) for row in rows
        ]
        return torch.tensor(filled), torch.tensor(lengths)
