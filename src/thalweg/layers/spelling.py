"""Symbols that are written with the same characters share part of their vectors: a, á and aː, t and t͡s."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def spellings(symbols: Sequence[str]) -> Tensor:
    """``(V, U)`` how often each of the U characters of all symbols stands in each, case and composition taken apart.

    >>> spellings(["", "a", "Á", "aː"])  # a, the acute accent, the length mark
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [1., 0., 1.],
            [1., 1., 0.]])
    """
    written = [unicodedata.normalize("NFD", symbol).lower() for symbol in symbols]
    characters = {character: u for u, character in enumerate(sorted(set().union(*written)))}
    places = [(v, characters[character]) for v, word in enumerate(written) for character in word]
    counts = torch.zeros(len(symbols), len(characters))
    if places:
        counts.index_put_(tuple(torch.tensor(places).T), torch.ones(()), accumulate=True)
    return counts


class SpeltEmbedding(nn.Embedding):
    r"""Vectors of symbols, each its own and those of its characters: :math:`e_v = w_v + \sum_u n_{vu} c_u`.

    What a common symbol learns of a character is known of a rare one that is written with it.

    Args:
        counts: ``(V, U)`` n, of :func:`spellings`.
        width: D; padding: a symbol without a vector of its own.

    >>> SpeltEmbedding(spellings(["", "a", "á"]), 8, padding=0)(torch.tensor([1, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(self, counts: Tensor, width: int, *, padding: int):
        super().__init__(len(counts), width, padding_idx=padding)
        self.counts: Tensor
        self.register_buffer("counts", counts, persistent=False)
        self.characters = nn.Parameter(torch.randn(counts.size(1), width) / 2**0.5)
        with torch.no_grad():
            self.weight.div_(2**0.5)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., D)`` of symbols ``(...)``."""
        return super().forward(input) + self.counts[input] @ self.characters

    def whole(self) -> Tensor:
        """``(V, D)`` the vectors of all symbols."""
        return self.weight + self.counts @ self.characters


class SpeltLinear(nn.Linear):
    r"""A score for each symbol, by weights of its own and of its characters: :math:`(w_v + \sum_u n_{vu} c_u) z + b_v`.

    Args:
        width: of the input z; counts: ``(V, U)`` n, of :func:`spellings`.

    >>> SpeltLinear(8, spellings(["", "a", "á"]))(torch.zeros(2, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(self, width: int, counts: Tensor):
        super().__init__(width, len(counts))
        self.counts: Tensor
        self.register_buffer("counts", counts, persistent=False)
        self.characters = nn.Parameter(torch.empty(counts.size(1), width).uniform_(-1, 1) / width**0.5)
        with torch.no_grad():
            self.weight.div_(2**0.5)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., V)`` of ``(..., width)``."""
        return nn.functional.linear(input, self.whole(), self.bias)

    def whole(self) -> Tensor:
        """``(V, width)`` the weights of all symbols."""
        return self.weight + self.counts @ self.characters
