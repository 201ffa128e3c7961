"""Small models and readings of hypotheses that the tests of the searches share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracles import search as oracle
from thalweg.inference import Hypotheses, TableModel

BOS = 0


def which(*tables: int) -> Tensor:
    return torch.tensor(tables)


def answers(found: Hypotheses, item: int = 0) -> list[tuple[tuple[int, ...], float, bool]]:
    """What exists for one item, after checking that the rest is missing as it should be."""
    result = []
    for tokens, length, score, finished in zip(
        found.tokens[item].tolist(),
        found.lengths[item].tolist(),
        found.scores[item].tolist(),
        found.finished[item].tolist(),
        strict=True,
    ):
        assert all(token >= 0 for token in tokens[:length])
        assert all(token == -1 for token in tokens[length:])
        if length:
            result.append((tuple(tokens[:length]), score, finished))
        else:
            assert score == -math.inf
            assert not finished
    return result


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(
        a[0] == b[0] and a[2] == b[2] and math.isclose(a[1], b[1], rel_tol=1e-9, abs_tol=1e-9)
        for a, b in zip(found, expected, strict=True)
    )


def rising(words: tuple[int, ...], symbol: int) -> bool:
    """Whether a symbol may follow in a sequence that never falls."""
    return symbol >= (words[-1] if words else 0)


def rising_mask(tokens: Tensor, items: Tensor) -> Tensor:
    """The same of four symbols, as searches ask it."""
    last = tokens[:, -1:] if tokens.size(1) else torch.zeros((tokens.size(0), 1), dtype=torch.long)
    return torch.arange(4) >= last


class Watched:
    """Counts the rows of each step; for trees, insists that no impossible prefix is ever asked about."""

    def __init__(self, model: TableModel, *, tree: bool = True) -> None:
        self.model, self.tree, self.rows = model, tree, []
        self.bos, self.eos, self.vocab_size = model.bos, model.eos, model.vocab_size

    def begin(self, inputs):
        return self.model.begin(inputs)

    def step(self, tokens, state):
        log_probs, state = self.model.step(tokens, state)
        assert not self.tree or bool((state != 0).all()), "asked about a prefix that cannot be"
        self.rows.append(tokens.size(0))
        return log_probs, state

    def select(self, state, rows):
        assert rows.dtype == torch.long
        return self.model.select(state, rows)


class Tree:
    """Worked example D3."""

    model = TableModel(oracle.tree_language_model(), vocab_size=len(oracle.WORDS), bos=BOS)

    @classmethod
    def read(cls, found: Hypotheses) -> list[tuple[str, float]]:
        assert found.finished.all()
        return [(" ".join(oracle.WORDS[i] for i in tokens), round(score, 6)) for tokens, score, _ in answers(found)]


def tables(*, vocab: int, eos: int | None, depth: int, impossible: float, count: int = 6, seed: int = 0):
    every = [
        oracle.random_table(100 * seed + n, vocab=vocab, eos=eos, depth=depth, impossible=impossible)
        for n in range(count)
    ]
    return every, TableModel(every, vocab_size=vocab, bos=BOS, eos=eos)


SHAPES = [
    # vocab, eos, depth, impossible
    (4, 3, 4, 0.0),
    (4, 3, 4, 0.4),
    (3, 1, 5, 0.2),
    (5, None, 3, 0.0),
    (4, None, 3, 0.5),
    (2, 1, 6, 0.0),
    (1, None, 2, 0.0),
    (1, 0, 2, 0.0),
    (6, 2, 1, 0.3),
]


def countdown(*lengths: int) -> TableModel:
    """Table n says 1 ... 1 eos, n symbols in all, with certainty."""
    every = [{(1,) * t: {2 if t == n - 1 else 1: 0.0} for t in range(n)} for n in lengths]
    return TableModel(every, vocab_size=3, bos=BOS, eos=2)
