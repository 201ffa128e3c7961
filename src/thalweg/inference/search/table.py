"""A model of sequences that is a lookup table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError

Table: TypeAlias = Mapping[tuple[int, ...], Mapping[int, float]]


class TableModel:
    """Log-probabilities written down prefix by prefix; the smallest useful :class:`Autoregressive`.

    ``tables`` maps a prefix (a tuple of symbols, without bos) to the log-probabilities of the symbols that
    may follow; symbols not listed, and everything after a prefix not listed, have ``-inf``. Several tables
    make a model with an input: ``inputs`` (B,) int64 says which table each item uses. Inside, prefixes are
    the nodes of an automaton, so a step is two lookups: O(R V) time, O(prefixes x V) memory.

    Args:
        tables: one table, or a sequence of them.
        vocab_size: V; symbols are 0 ... V - 1, bos and eos among them.
        bos: symbol fed first.
        eos: symbol that ends, or None.
        dtype: of the log-probabilities.

    >>> words = ["<s>", "the", "a", "cat", "owl"]
    >>> tree = {(): {1: -0.7, 2: -0.9}, (1,): {3: -1.0, 4: -1.2}, (2,): {4: -0.1}}
    >>> model = TableModel(tree, vocab_size=len(words), bos=0)
    >>> from thalweg.inference import beam_search, greedy
    >>> which = torch.zeros(1, dtype=torch.long)
    >>> [words[i] for i in greedy(model, which, max_length=2).sequences()[0][0]]
    ['the', 'cat']
    >>> [words[i] for i in beam_search(model, which, width=2, max_length=2).sequences()[0][0]]
    ['a', 'owl']
    """

    def __init__(
        self,
        tables: Table | Sequence[Table],
        *,
        vocab_size: int,
        bos: int,
        eos: int | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        every = [tables] if isinstance(tables, Mapping) else list(tables)
        if not every:
            raise ConfigError("`tables` must be a mapping or a sequence of at least one, got none")
        numbers = {(n, prefix): 0 for n, table in enumerate(every) for prefix in ((), *table)}
        # Node 0 can be followed by nothing: it stands for every prefix that no table lists.
        for number, key in enumerate(numbers, start=1):
            numbers[key] = number
        log_probs = torch.full((len(numbers) + 1, vocab_size), -math.inf, dtype=dtype)
        following = torch.zeros((len(numbers) + 1, vocab_size), dtype=torch.long)
        for (n, prefix), node in numbers.items():
            for symbol, value in every[n].get(prefix, {}).items():
                if not 0 <= symbol < vocab_size:
                    raise ConfigError(f"symbols must be 0 ... {vocab_size - 1}, got {symbol} after prefix {prefix}")
                log_probs[node, symbol] = value
                following[node, symbol] = numbers.get((n, (*prefix, symbol)), 0)
        roots = torch.tensor([numbers[n, ()] for n in range(len(every))])
        self._set(log_probs, following, roots, bos, eos)

    @classmethod
    def markov(
        cls,
        transitions: Tensor | Sequence[Sequence[float]],
        *,
        bos: int,
        eos: int | None = None,
        logarithms: bool = True,
    ) -> TableModel:
        """A dense table ``(V, V)``: symbol j follows i with ``transitions[i, j]``, whatever came before.

        Log-probabilities, or probabilities with ``logarithms=False``. The first symbol follows ``bos``.

        >>> from thalweg.inference import greedy
        >>> matrix = [[0.4, 0.6, 0], [0.3, 0.2, 0.5], [0, 0, 1]]
        >>> model = TableModel.markov(matrix, bos=0, eos=2, logarithms=False)
        >>> greedy(model, torch.zeros(1, dtype=torch.long), max_length=9).sequences()
        [[[1, 2]]]
        """
        matrix = torch.as_tensor(transitions)
        if matrix.dim() != 2 or matrix.size(0) != matrix.size(1) or matrix.size(0) == 0:
            raise ShapeError(f"`transitions` must be (V, V), got {tuple(matrix.shape)}")
        matrix = matrix if matrix.is_floating_point() else matrix.double()
        model = cls.__new__(cls)
        following = torch.arange(matrix.size(0), device=matrix.device).repeat(matrix.size(0), 1)
        roots = torch.tensor([bos], device=matrix.device)
        model._set(matrix if logarithms else matrix.log(), following, roots, bos, eos)
        return model

    def _set(self, log_probs: Tensor, following: Tensor, roots: Tensor, bos: int, eos: int | None) -> None:
        self.vocab_size = log_probs.size(1)
        self.bos, self.eos, self.device = bos, eos, log_probs.device
        for name, symbol in (("bos", bos), ("eos", eos)):
            if symbol is not None and not 0 <= symbol < self.vocab_size:
                raise ConfigError(f"`{name}` must be 0 ... {self.vocab_size - 1} (vocab_size - 1), got {symbol}")
        # A start node for each table, from which any symbol (bos is what comes) leads to the table's root.
        starts = roots.unsqueeze(1).expand(-1, self.vocab_size)
        self._first = log_probs.size(0)
        self._following = torch.cat([following, starts])
        self._log_probs = torch.cat([log_probs, log_probs.new_full(starts.shape, -math.inf)])

    def begin(self, inputs: Tensor) -> Tensor:
        """Start nodes ``(B,)`` of the tables that ``inputs`` (B,) int64 names."""
        tables = self._following.size(0) - self._first
        if not isinstance(inputs, Tensor) or inputs.dim() != 1 or inputs.is_floating_point():
            got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ShapeError(f"`inputs` must be (B,) int64, one table number each, got {got}")
        if inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) < tables:
            raise ShapeError(f"`inputs` must be table numbers 0 ... {tables - 1}, got {inputs.tolist()}")
        return inputs.to(self.device) + self._first

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Follow one edge from each node."""
        node = self._following[state, tokens]
        return self._log_probs[node], node

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """Nodes of the chosen rows."""
        return state[rows]
