"""Batches of examples: the only place that makes padding and masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thalweg.data.text.alphabet import Alphabet
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.padded import Padded


@dataclass(frozen=True, slots=True)
class Example:
    """One pair as numbers; the target has neither begin nor end, :class:`Batches` adds the end.

    >>> Example((4, 5), (4,)).source
    (4, 5)
    """

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """B pairs, padded.

    Attributes:
        source: ``(B, S)``.
        target: ``(B, T)``; each ends with the end symbol before its padding, and none begins with that of begin.
        rows: for each pair its index in the data set.

    >>> batch = next(Batches([Example((4, 5), (4,))], size=8).iterate(0))
    >>> batch.target.tokens, batch.rows, batch.size
    (tensor([[4, 3]]), (0,), 1)
    """

    source: Padded
    target: Padded
    rows: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of pairs B."""
        return len(self.rows)

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        return Batch(self.source.to(device), self.target.to(device), self.rows)


def pad(sequences: Sequence[Sequence[int]], *, pad: int = Alphabet.pad, end: int | None = None) -> Padded:
    """B sequences as one ``(B, T)`` tensor, T the longest length.

    Args:
        sequences: at least one; none may be empty unless ``end`` is given.
        pad: what stands past the end of a sequence.
        end: appended to every sequence, and counted in its length.

    Time and memory O(B T).

    >>> padded = pad([[5, 6], [7]], end=3)
    >>> padded.tokens
    tensor([[5, 6, 3],
            [7, 3, 1]])
    >>> padded.lengths
    tensor([3, 2])
    """
    if not len(sequences):
        raise ShapeError("expected at least one sequence to pad, got none")
    content = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    lengths = content if end is None else content + 1
    if not lengths.all():
        raise ShapeError(f"sequence {int(lengths.argmin())} is empty; expected at least one symbol in each")
    positions = np.arange(lengths.max())
    tokens = np.full((len(sequences), len(positions)), pad, dtype=np.int64)
    # A boolean index walks row by row, which is the order of the flat symbols.
    tokens[positions < content[:, None]] = np.fromiter(
        itertools.chain.from_iterable(sequences), dtype=np.int64, count=int(content.sum())
    )
    if end is not None:
        tokens[np.arange(len(sequences)), content] = end
    mask = positions < lengths[:, None]
    return Padded(torch.from_numpy(tokens), torch.from_numpy(lengths), torch.from_numpy(mask))


class Batches:
    """The batches of every epoch: pairs of like length together, in an order that seed and epoch fix.

    The rows of an epoch are permuted, cut into pools of ``bucket * size`` rows, sorted within each pool by
    (source length, target length), cut into batches, and the batches are permuted. So little is padded, and
    what comes together still varies from epoch to epoch. Every row comes exactly once.

    With ``tokens``, batches hold as many pairs as fit: all rows are sorted by length, ties in an order of the epoch,
    and each batch takes rows while (number of rows) x (longest source + longest target with its end) stays within
    ``tokens``. Where a batch ends depends on the lengths alone, so every epoch has the same number of batches, of the
    same shapes; which rows of one length meet, and the order of the batches, vary.

    Args:
        examples: the data set; no source may be empty.
        size: pairs in a batch; the shortest batch of an epoch may have fewer. Not looked at with ``tokens``.
        tokens: symbols in a batch at most, sources and targets, ends and padding counted; 0 goes by ``size``.
        seed: from 0; with the number of the epoch it alone decides the order.
        shuffle: ``False`` sorts all rows by length instead, the same in every epoch: for prediction.
        bucket: batches in a pool; 1 is plain shuffling.
        pad, end: numbers of the alphabets for what fills a row up, and for what ends a target.

    >>> batches = Batches([Example((4,) * n, (5,)) for n in (3, 1, 3, 1)], size=2)
    >>> len(batches), sorted(map(sorted, batches.epoch(0)))
    (2, [[0, 2], [1, 3]])
    >>> Batches([Example((4,) * n, (5,)) for n in (3, 1, 3, 1)], tokens=6, shuffle=False).epoch(0)
    [(1, 3), (0,), (2,)]
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        size: int = 32,
        tokens: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        bucket: int = 50,
        pad: int = Alphabet.pad,
        end: int = Alphabet.eos,
    ) -> None:
        for name, value, least in (("size", size, 1), ("tokens", tokens, 0), ("bucket", bucket, 1), ("seed", seed, 0)):
            if value < least:
                raise ConfigError(f"`{name}` of batches must be at least {least}, got {value}")
        if not len(examples):
            raise ShapeError("expected at least one example to batch, got none")
        self.examples = examples
        self.size, self.tokens, self.seed, self.shuffle, self.bucket = size, tokens, seed, shuffle, bucket
        self.pad, self.end = pad, end
        self._source = np.array([len(example.source) for example in examples])
        self._target = np.array([len(example.target) for example in examples])
        if not self._source.all():
            raise ShapeError(f"example {int(self._source.argmin())} has an empty source; expected one symbol or more")
        self._cuts = self._token_cuts() if tokens else [*range(0, len(examples), size), len(examples)]

    def _token_cuts(self) -> list[int]:
        """Where batches begin and end among the rows sorted by length; O(N log N)."""
        order = np.lexsort((self._target, self._source))
        source, target = self._source[order], self._target[order] + 1  # the end is a symbol too
        longest = int((source + target).max())
        if longest > self.tokens:
            row = int(order[(source + target).argmax()])
            raise ConfigError(
                f"batches of {self.tokens} tokens cannot hold example {row}, which has {longest} with its end; "
                f"raise `batch_tokens` to {longest} or more"
            )
        cuts, first, widest = [0], 0, 0
        for n, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            widest = max(widest, t)  # sources rise, so the newest is the longest
            if (n + 1 - first) * (s + widest) > self.tokens:
                cuts.append(n)
                first, widest = n, t
        return [*cuts, len(order)]

    def __len__(self) -> int:
        """Batches in an epoch, the same in each: examples over ``size`` rounded up, or as ``tokens`` allows."""
        return len(self._cuts) - 1

    def epoch(self, n: int) -> list[tuple[int, ...]]:
        """The rows of each batch of epoch ``n`` (from 0). Time O(N log N), nothing is padded yet.

        >>> Batches([Example((4,) * n, ()) for n in (3, 1, 2)], size=2, shuffle=False).epoch(7)
        [(1, 2), (0,)]
        """
        if n < 0:
            raise ConfigError(f"epochs count from 0, got {n}")
        rng = np.random.default_rng((self.seed, n)) if self.shuffle else None
        rows = np.arange(len(self.examples)) if rng is None else rng.permutation(len(self.examples))
        whole = rng is None or self.tokens
        pool = np.zeros_like(rows) if whole else np.arange(len(rows)) // (self.bucket * self.size)
        # The sort is stable, so rows of equal length keep their shuffled order.
        rows = rows[np.lexsort((self._target[rows], self._source[rows], pool))]
        flat = rows.tolist()
        batches = [tuple(flat[first:last]) for first, last in itertools.pairwise(self._cuts)]
        return batches if rng is None else [batches[index] for index in rng.permutation(len(batches))]

    def iterate(self, n: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch ``n`` from number ``start`` on; those before are not built.

        >>> batches = Batches([Example((4,), ())] * 3, size=1, shuffle=False)
        >>> [batch.rows for batch in batches.iterate(0, start=1)]
        [(1,), (2,)]
        """
        if not 0 <= start <= len(self):
            raise ConfigError(f"`start` must be in 0..{len(self)}, the batches of an epoch, got {start}")
        return (self._build(rows) for rows in self.epoch(n)[start:])

    def _build(self, rows: tuple[int, ...]) -> Batch:
        chosen = [self.examples[row] for row in rows]
        source = pad([example.source for example in chosen], pad=self.pad)
        return Batch(source, pad([example.target for example in chosen], pad=self.pad, end=self.end), rows)
