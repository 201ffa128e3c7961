"""Loops at the end of answers, and n-grams and words that may not stand in one, beside plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from thalweg.errors import ConfigError
from thalweg.inference import (
    NoRepeat,
    TableModel,
    Without,
    beam_search,
    exact_search,
    greedy,
    loop_at_end,
)

V, EOS = 4, 3


def repeats(row: tuple[int, ...], n: int) -> bool:
    """Whether some n symbols stand in a row twice."""
    grams = [row[i : i + n] for i in range(len(row) - n + 1)]
    return len(set(grams)) < len(grams)


def holds(row: tuple[int, ...], words: list[list[int]]) -> bool:
    return any(list(row[i : i + len(word)]) == word for word in words for i in range(len(row)))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_blocked_ngrams_are_those_that_stand_there(n: int) -> None:
    for length in range(6):
        rows = torch.tensor(list(itertools.product(range(V), repeat=length)), dtype=torch.long).view(V**length, length)
        mask = NoRepeat(n, vocab_size=V)(rows, torch.zeros(len(rows), dtype=torch.long))
        for row, allowed in zip(rows.tolist(), mask.tolist(), strict=True):
            if not repeats(tuple(row), n):
                assert allowed == [not repeats((*row, v), n) for v in range(V)]


def test_barred_words_are_those_that_would_stand_there() -> None:
    words = [[0], [1, 2], [2, 2, 1]]
    for length in range(5):
        rows = torch.tensor(list(itertools.product(range(V), repeat=length)), dtype=torch.long).view(V**length, length)
        mask = Without(words, vocab_size=V)(rows, torch.zeros(len(rows), dtype=torch.long))
        for row, allowed in zip(rows.tolist(), mask.tolist(), strict=True):
            if not holds(tuple(row), words):
                assert allowed == [not holds((*row, v), words) for v in range(V)]


def test_searches_keep_to_them() -> None:
    draw = torch.Generator().manual_seed(0)
    model = TableModel.markov(torch.randn(V, V, generator=draw).log_softmax(dim=1), bos=0, eos=EOS)
    source, rule = torch.zeros(1, dtype=torch.long), NoRepeat(2, vocab_size=V)
    rows = [(*row, EOS) for T in range(6) for row in itertools.product(range(EOS), repeat=T)]
    scores = {
        row: sum(model.step(torch.tensor([a]), model.select(model.begin(source), torch.tensor([0])))[0][0, b].item()
                 for a, b in zip((0, *row), row, strict=False))
        for row in rows
        if not repeats(row, 2)
    }  # fmt: skip
    best = max(scores, key=lambda row: scores[row])
    found = beam_search(model, source, width=60, max_length=6, allowed=rule)
    assert found.sequences()[0][0] == list(best)
    assert not any(repeats(tuple(row), 2) for row in found.sequences()[0])
    one = greedy(model, source, max_length=6, min_length=6, allowed=rule)
    assert not any(repeats(tuple(row), 2) for row in one.sequences()[0])
    assert exact_search(model, source, max_length=6).size == 1


def slow_loop(row: tuple[int, ...], least: int) -> tuple[tuple[int, ...], int] | None:
    """By writing every cycle out again and again."""
    for period in range(1, len(row) + 1):
        cycle = row[-period:]
        times = max(n for n in range(len(row) // period + 1) if row[len(row) - n * period :] == cycle * n)
        if times >= least:
            return cycle, times
    return None


@pytest.mark.parametrize("least", [2, 3])
def test_loops_are_those_of_plain_python(least: int) -> None:
    for length in range(9):
        for row in itertools.product(range(2), repeat=length):
            assert loop_at_end(row, least=least) == slow_loop(row, least), row


def test_loops_of_hypotheses() -> None:
    """A model that says 1 2 1 2 ... until it is stopped, and one that ends."""
    inf = float("inf")
    table = [[-inf, 0.0, -inf, -inf], [-inf, -inf, 0.0, -inf], [-inf, 0.0, -inf, -inf], [0.0] * 4]
    model = TableModel.markov(table, bos=0, eos=EOS)
    found = greedy(model, torch.zeros(2, dtype=torch.long), max_length=11)
    assert [loop_at_end(rows[0]) for rows in found.sequences()] == [((2, 1), 5)] * 2
    stopped = greedy(model, torch.zeros(1, dtype=torch.long), max_length=11, allowed=NoRepeat(2, vocab_size=V))
    assert stopped.sequences() == [[]], "nothing can follow, so that there is no answer"


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_sizes_must_be_numbers(wrong: object) -> None:
    with pytest.raises(ConfigError, match="`size` must be an integer of at least 1"):
        NoRepeat(wrong, vocab_size=V)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`words` must be sequences of symbols"):
        Without([[V]], vocab_size=V)
    with pytest.raises(ConfigError, match="at least 1"):
        loop_at_end([1], least=1)
