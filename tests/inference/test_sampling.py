from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from search_cases import BOS, answers, countdown, rising, rising_mask, same, tables, which

from oracles import search as oracle
from oracles import sequences
from thalweg.errors import ConfigError
from thalweg.inference import Hypotheses, TableModel, sample_sequences


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 2}, {"top_p": 0.7, "temperature": 0.8}, {"typical": 0.6}, {"min_p": 0.3, "min_length": 3}],
)
def test_sampling_a_batch_equals_sampling_one_by_one_with_the_same_generator(filters):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=8)
    together = torch.Generator().manual_seed(3)
    whole = sample_sequences(model, torch.arange(8), n=5, max_length=5, generator=together, **filters)
    apart = torch.Generator().manual_seed(3)
    for item in range(8):
        alone = sample_sequences(model, which(item), n=5, max_length=5, generator=apart, **filters)
        assert answers(whole, item) == answers(alone)


def counts(found: Hypotheses) -> Counter:
    return Counter(tuple(sequence) for sequence in found.sequences()[0])


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 99},
    {"top_p": 1e-9},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    {"typical": 1e-9},
    {"typical": 0.3},
    {"typical": 0.8, "temperature": 1.7},
    {"typical": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.4},
    {"min_p": 0.2, "temperature": 0.6},
    {"min_p": 1.0},
    {"top_k": 3, "top_p": 0.9, "typical": 0.7, "min_p": 0.5, "temperature": 1.3},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("eos", "seed"), [(3, 5), (None, 6)])
def test_samples_follow_the_distribution(filters, eos, seed):
    table = oracle.random_table(seed, vocab=4, eos=eos, depth=3, impossible=0.1)
    model = TableModel(table, vocab_size=4, bos=BOS, eos=eos)
    generator = torch.Generator().manual_seed(seed)
    found = sample_sequences(model, which(0), n=20000, max_length=3, generator=generator, **filters)
    expected = sequences.distribution(table, eos=eos, max_length=3, **filters)
    assert oracle.chi_square_accepts(counts(found), expected)
    wrong = {**filters, "temperature": filters.get("temperature", 1.0) * 1.5}
    twin = sequences.distribution(table, eos=eos, max_length=3, **wrong)
    apart = sum(abs(expected[y] - twin.get(y, 0.0)) for y in expected) / 2
    if not filters:
        assert apart > 0.03
    if apart > 0.03:  # the nucleus of a flat distribution hardly changes with the temperature
        assert not oracle.chi_square_accepts(counts(found), twin)


def test_scores_of_samples_are_those_of_the_model_and_sorted():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.2, count=4)
    found = sample_sequences(
        model, torch.arange(4), n=50, max_length=3, temperature=3.0, top_k=3, generator=torch.Generator()
    )
    for item, table in enumerate(every):
        known = {h[0]: h for h in oracle.all_sequences(table, eos=3, max_length=3)}
        sampled = answers(found, item)
        assert same(sampled, [known[tokens] for tokens, _, _ in sampled])
        keys = [(not finished, -score) for _, score, finished in sampled]
        assert keys == sorted(keys)
        assert {finished for _, _, finished in sampled} == {True, False}


def test_top_k_keeps_exactly_k_of_tied_symbols():
    model = TableModel.markov([[0.0] * 6] * 6, bos=BOS)
    found = sample_sequences(model, which(0), n=200, max_length=1, top_k=2, generator=torch.Generator())
    assert len(counts(found)) == 2


def test_seeds_repeat_and_differ():
    model = TableModel.markov([[0.0] * 6] * 6, bos=BOS)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return sample_sequences(model, which(0), n=4, max_length=5, generator=generator).tokens.tolist()

    assert draw(1) == draw(1) != draw(2)
    assert sample_sequences(model, which(0), n=2, max_length=5).tokens.shape == (1, 2, 5)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_k": 2}])
def test_the_two_oracles_agree(filters):
    table = oracle.random_table(5, vocab=4, eos=3, depth=3, impossible=0.1)
    one = oracle.distribution(table, eos=3, max_length=3, **filters)
    two = sequences.distribution(table, eos=3, max_length=3, **filters)
    assert one.keys() == two.keys()
    assert all(math.isclose(one[y], two[y]) for y in one)


def test_typical_leaves_out_the_most_probable_symbol_and_the_oracle_can_fail():
    # Surprisals 0.69 0.99 2.3 5.5 around the entropy 0.98: the second symbol is the most typical.
    row = {0: math.log(0.5), 1: math.log(0.37), 2: math.log(0.126), 3: math.log(0.004)}
    model = TableModel({(): row}, vocab_size=4, bos=BOS)
    found = sample_sequences(
        model, which(0), n=5000, max_length=1, typical=0.3, generator=torch.Generator().manual_seed(0)
    )
    assert set(counts(found)) == {(1,)} == set(sequences.distribution({(): row}, eos=None, max_length=1, typical=0.3))
    broken = sequences.distribution({(): row}, eos=None, max_length=1, typical=0.3, broken=True)
    assert not oracle.chi_square_accepts(counts(found), broken)


@pytest.mark.parametrize(
    "rules",
    [
        {"min_length": 2},
        {"min_length": 3},
        {"prefix": (1,)},
        {"prefix": (2, 0), "min_length": 3, "top_k": 2},
        {"allowed": rising},
        {"allowed": rising, "prefix": (1,), "min_length": 2, "top_p": 0.8, "temperature": 2.0},
    ],
)
def test_samples_follow_the_rules(rules):
    table = oracle.random_table(11, vocab=4, eos=3, depth=3)
    model = TableModel(table, vocab_size=4, bos=BOS, eos=3)
    given = dict(rules)
    if "prefix" in rules:
        given["prefix"] = torch.tensor([[*rules["prefix"], -1]])
    if "allowed" in rules:
        given["allowed"] = rising_mask
    found = sample_sequences(model, which(0), n=5000, max_length=3, generator=torch.Generator().manual_seed(1), **given)
    expected = sequences.distribution(table, eos=3, max_length=3, **rules)
    assert oracle.chi_square_accepts(counts(found), expected)
    known = {h[0]: h for h in oracle.all_sequences(table, eos=3, max_length=3)}
    assert same(answers(found), [known[tokens] for tokens, _, _ in answers(found)])


def test_a_large_batch_is_followed_in_pieces(monkeypatch):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=9)
    seeded = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    given = {"n": 3, "max_length": 5, "prefix": torch.tensor([[1]]).repeat(9, 1)}
    whole = sample_sequences(model, torch.arange(9), generator=seeded(), **given)
    monkeypatch.setattr("thalweg.inference.search.greedy._ROOM", 4 * 4 * 3)
    pieces = sample_sequences(model, torch.arange(9), generator=seeded(), **given)
    assert all(answers(whole, item) == answers(pieces, item) for item in range(9))


def test_partial_samples():
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=3)
    seen = []
    generator = torch.Generator().manual_seed(0)
    found = sample_sequences(model, torch.arange(3), n=4, max_length=5, generator=generator, on_step=seen.append)
    assert [part.step for part in seen] == list(range(1, len(seen) + 1))
    ended = [[] for _ in range(3)]
    for part in seen:
        assert part.tokens.shape == (len(part.items), part.step)
        rows = zip(part.items.tolist(), part.tokens.tolist(), part.scores.tolist(), part.finished.tolist(), strict=True)
        for item, tokens, score, finished in rows:
            if finished or part.step == 5:
                ended[item].append((tuple(tokens), score, finished))
    assert [sorted(rows) for rows in ended] == [sorted(answers(found, item)) for item in range(3)]


def test_wrong_arguments():
    for wrong in (
        {"n": 0},
        {"temperature": 0.0},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"typical": 0.0},
        {"typical": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"min_length": 4},
        {"min_length": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            sample_sequences(countdown(2), which(0), max_length=3, **{"n": 1, **wrong})
