"""Kernels of strings, or of other sequences of symbols: how many pieces two of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.errors import ShapeError
from thalweg.limits import LENGTH, check_numbers

# Entries of the tables of pairs that are filled together: 32 MB of float64.
_TOGETHER = 2**22


@dataclass(frozen=True)
class Spectrum(Kernel):
    """The n-gram kernel: how many pairs of equal pieces of n adjoining symbols two strings have.

    k(s, t) = sum over all u of length n of (how often s has u) (how often t has u). O(|s| + |t|) entries a pair, found
    by sorting. Leslie, Eskin and Noble (2002).

    Items are strings, or sequences of strings or of whole numbers, each a symbol.

    >>> Spectrum(2)(["banana", "bandana"])
    array([[9., 7.],
           [7., 8.]])
    """

    n: int = 3
    positive = True

    def __post_init__(self) -> None:
        check_numbers(self, "Spectrum", 1, LENGTH, "n")

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        return read_symbols(X, self.n, device)

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        count, M = len(rows), len(columns)
        item, piece, times = self._pieces(*map(_joined, zip(rows.tensors, columns.tensors, strict=True)))
        first = item < count
        width = int(piece.max()) + 1 if piece.numel() else 0
        places = torch.stack([item[first], piece[first]])
        one = torch.sparse_coo_tensor(places, times[first], (count, width), check_invariants=False)
        found = times.new_empty(count, M)
        # As many columns at a time as have tables that are not large.
        together = max(1, _TOGETHER // max(1, width))
        for start in range(0, M, together):
            some = (item >= count + start) & (item < count + start + together)
            other = times.new_zeros(width, min(together, M - start))
            other[piece[some], item[some] - count - start] = times[some]
            found[:, start : start + together] = one @ other
        return found

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        item, _, times = self._pieces(*items.tensors)
        return times.new_zeros(len(items)).index_add_(0, item, times.square())

    def _pieces(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which item has which piece how often, ``(E,)`` each; pieces are numbered from 0."""
        B, W = len(codes), codes.size(1) - self.n + 1
        symbols = codes.unique(return_inverse=True)[1]
        pieces = symbols[:, :W]
        # Longer and longer pieces are numbered anew, so that numbers stay small and no two pieces share one.
        for place in range(1, self.n):
            pairs = pieces * (symbols.max() + 1) + symbols[:, place : place + W]
            pieces = pairs.unique(return_inverse=True)[1]
        inside = torch.arange(W, device=codes.device) < (lengths - self.n + 1).unsqueeze(1)
        item = torch.arange(B, device=codes.device).unsqueeze(1).expand(B, W)[inside]
        width = pieces.max() + 1 if pieces.numel() else 1
        found, times = (item * width + pieces[inside]).unique(return_counts=True)
        return found // width, found % width, times.double()


@dataclass(frozen=True)
class Subsequence(Kernel):
    r"""The gapped subsequence kernel: shared subsequences of n symbols, each discounted by the stretch it takes up.

    .. math:: k(s, t) = \sum_{u \in \Sigma^n} \sum_{i: s[i] = u} \sum_{j: t[j] = u} \lambda^{l(i) + l(j)}

    where i and j run over rising places and l is the stretch from the first to the last of them, both included. With
    P(a, b) the sum over pairs that end at places a and b, and L the discount
    :math:`\lambda^{a - a'}` from an earlier place,

    .. math:: P_1 = \lambda^2 [s_a = t_b], \qquad P_{m+1}(a, b) = \lambda^2 [s_a = t_b] (L P_m L')(a - 1, b - 1)

    and k is the sum of :math:`P_n`. All pairs of a block are filled together, L is applied as a matrix:
    O(n |s| |t| (|s| + |t|)) a pair. Lodhi et al. (2002). Values shrink as decay^(2 n): use it ``Normalised``.

    Items are strings, or sequences of strings or of whole numbers, each a symbol.

    Args:
        n: symbols of a subsequence.
        decay: above 0, at most 1; at 1 gaps cost nothing.

    >>> Subsequence(2, 0.5)(["cat", "car"])
    array([[0.140625, 0.0625  ],
           [0.0625  , 0.140625]])
    """

    n: int = 3
    decay: float = 0.5
    positive = True

    def __post_init__(self) -> None:
        check_numbers(self, "Subsequence", 1, LENGTH, "n")
        check_numbers(self, "Subsequence", 0, 1, "decay", whole=False, strict=True)

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        return read_symbols(X, self.n, device)

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        one, other = torch.meshgrid(
            *(torch.arange(len(each), device=each.device) for each in (rows, columns)), indexing="ij"
        )
        return self._pairs(rows, columns, one.flatten(), other.flatten()).view(len(rows), len(columns))

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        every = torch.arange(len(items), device=items.device)
        return self._pairs(items, items, every, every)

    def _pairs(self, rows: Prepared, columns: Prepared, one: Tensor, other: Tensor) -> Tensor:
        """The kernel of rows ``one`` with columns ``other``, ``(P,)``."""
        S, T = (_longest(each) for each in (rows, columns))
        together = max(1, _TOGETHER // max(1, S * T))
        found = [
            self._filled(rows[some], columns[beside], S, T)
            for some, beside in zip(one.split(together), other.split(together), strict=True)
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float64, device=rows.device)

    def _filled(self, rows: Prepared, columns: Prepared, S: int, T: int) -> Tensor:
        (codes, lengths), (others, other_lengths) = rows.tensors, columns.tensors
        same = codes[:, :S, None] == others[:, None, :T]
        places = torch.arange(max(S, T), device=codes.device)
        same &= (places[:S] < lengths[:, None])[:, :, None] & (places[:T] < other_lengths[:, None])[:, None, :]
        match = self.decay**2 * same.double()  # (P, S, T)
        earlier = (places[:, None] - places).clamp(min=0).double()
        discount = (self.decay**earlier).tril()
        ending = match
        for _ in range(1, self.n):
            reached = discount[: S - 1, : S - 1] @ ending[:, : S - 1, : T - 1] @ discount[: T - 1, : T - 1].mT
            ending = torch.nn.functional.pad(reached, (1, 0, 1, 0)) * match
        return ending.sum(dim=(1, 2))


def read_symbols(X: Any, least: int, device: torch.device | str | None = None) -> Prepared:
    """Strings, or sequences of symbols, as ``codes (N, T)`` padded with 0 and ``lengths (N,)``.

    Args:
        X: list, tuple or array of strings, or of sequences of strings or of whole numbers; a tensor ``(N, T)`` of
            whole numbers.
        least: how many symbols each must have.

    >>> codes, lengths = read_symbols(["ab", "c"], 1).tensors
    >>> codes, lengths
    (tensor([[97, 98],
            [99,  0]]), tensor([2, 1]))
    """
    if isinstance(X, str | bytes) or not isinstance(X, Sequence | np.ndarray | Tensor):
        raise ShapeError(f"X must be a list of strings or of sequences of symbols, got {type(X).__name__}")
    if not len(X):
        raise ShapeError("X is empty: 0 sample(s) while a minimum of 1 is required.")
    rows, kinds = [], {}
    for place, item in enumerate(X.tolist() if isinstance(X, Tensor) else X):
        codes, kind = _coded(item, place)
        kinds.setdefault(kind, place)
        if len(codes) < least:
            raise ShapeError(
                f"sequence {place} has {len(codes)} symbol{'s' * (len(codes) != 1)}, fewer than the n = {least} of the "
                "kernel; lower n or leave it out"
            )
        rows.append(torch.tensor(codes, dtype=torch.int64))
    if len(kinds) > 1:
        (one, first), (other, second) = kinds.items()
        raise ShapeError(f"sequences must be alike, got {one} in sequence {first} and {other} in sequence {second}")
    place = device if device is not None else X.device if isinstance(X, Tensor) else None
    tensors = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    return Prepared(
        tuple(each.to(place) for each in tensors), (), f"sequences of {next(iter(kinds))}", not isinstance(X, Tensor)
    )


def _coded(item: Any, place: int) -> tuple[list[int], str]:
    """Symbols as whole numbers, equal where symbols are, and what they are."""
    if isinstance(item, str):
        return list(map(ord, item)), "characters or words"
    if isinstance(item, np.ndarray | Tensor):
        item = item.tolist()
    if not isinstance(item, Iterable):
        raise ShapeError(
            f"sequence {place} must be a string or a sequence of symbols, got {type(item).__name__}: {item!r:.40}"
        )
    symbols = list(item)
    if all(isinstance(symbol, str) for symbol in symbols):
        return [_code(symbol) for symbol in symbols], "characters or words"
    wrong = [symbol for symbol in symbols if not isinstance(symbol, Integral) or isinstance(symbol, bool)]
    if wrong:
        raise ShapeError(
            f"sequence {place} must have strings or whole numbers as symbols, one or the other, "
            f"got {type(wrong[0]).__name__}: {wrong[0]!r:.40}"
        )
    return [int(symbol) for symbol in symbols], "whole numbers"


def _code(symbol: str) -> int:
    """A character by its code point; a word by 62 bits of its digest, which no other one has in practice."""
    if len(symbol) == 1:
        return ord(symbol)
    digest = hashlib.blake2b(symbol.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 | 1 << 62


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Two padded batches, or their lengths, one below the other."""
    if pair[0].dim() == 1:
        return torch.cat(pair)
    width = max(each.size(1) for each in pair)
    return torch.cat([torch.nn.functional.pad(each, (0, width - each.size(1))) for each in pair])


def _longest(items: Prepared) -> int:
    return int(items.tensors[1].max()) if len(items) else 0
