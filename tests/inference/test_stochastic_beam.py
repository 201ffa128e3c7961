from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from search_cases import BOS, answers, countdown, same, tables, which

from oracles import search as oracle
from oracles import sequences
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Drawn, TableModel, stochastic_beam_search

REPEATS = 20000


def draws(model, n, max_length, seed=0, **given) -> Drawn:
    """One item many times over."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.zeros(REPEATS, dtype=torch.long)
    return stochastic_beam_search(model, inputs, n=n, max_length=max_length, generator=generator, **given)


def in_order(found: Drawn) -> Counter:
    """How often each ordered draw came."""
    order = found.perturbed.argsort(dim=1, descending=True)
    tokens = found.tokens.gather(1, order.unsqueeze(2).expand_as(found.tokens)).tolist()
    lengths = found.lengths.gather(1, order).tolist()
    return Counter(
        tuple(tuple(y[:t]) for y, t in zip(row, size, strict=True) if t)
        for row, size in zip(tokens, lengths, strict=True)
    )


@pytest.mark.parametrize(("eos", "temperature"), [(2, 1.0), (None, 1.0), (2, 0.6), (2, 3.0)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_draws_are_without_replacement(eos, temperature, n):
    table = oracle.random_table(8, vocab=3, eos=eos, depth=2)
    model = TableModel(table, vocab_size=3, bos=BOS, eos=eos)
    counts = in_order(draws(model, n, 2, temperature=temperature))
    probabilities = sequences.distribution(table, eos=eos, max_length=2, temperature=temperature)
    assert oracle.chi_square_accepts(counts, sequences.ordered_draws(probabilities, n))
    inclusion = Counter()
    for draw, p in sequences.ordered_draws(probabilities, n).items():
        for y in draw:
            inclusion[y] += p
    for y, p in inclusion.items():
        seen = sum(count for draw, count in counts.items() if y in draw) / REPEATS
        assert abs(seen - p) < 5 * math.sqrt(p * (1 - p) / REPEATS) + 1e-9
    if n == 2:  # the twin that draws with replacement
        twin = {(a, b): p * q for a, p in probabilities.items() for b, q in probabilities.items()}
        assert not oracle.chi_square_accepts(counts, twin)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_estimates_are_unbiased(n, temperature):
    table = oracle.random_table(5, vocab=3, eos=2, depth=3)
    model = TableModel(table, vocab_size=3, bos=BOS, eos=2)
    found = draws(model, n, 3, seed=1, temperature=temperature)
    every = oracle.all_sequences(table, eos=2, max_length=3)
    mean = sum(math.exp(score) * len(y) ** 2 for y, score, _ in every)
    entropy = -sum(math.exp(score) * score for _, score, _ in every)
    values = found.lengths.double() ** 2
    for estimates, truth in (
        (found.estimate(values), mean),
        (found.entropy(), entropy),
        (found.estimate(torch.ones_like(found.scores)), 1.0),
    ):
        error = estimates.std().item() / math.sqrt(REPEATS)
        assert abs(estimates.mean().item() - truth) < 4 * error
        if n == 3:
            naive = (found.scores.exp() * values).sum(dim=1)  # without the weights it is far off
            assert abs(naive.mean().item() - mean) > 10 * error
    smooth = found.estimate(values, normalised=True)
    assert smooth.std() < found.estimate(values).std()
    torch.testing.assert_close(found.estimate(torch.ones_like(values), normalised=True), torch.ones(REPEATS).double())
    if n == 6:
        assert abs(smooth.mean().item() - mean) < 0.05 * mean


def test_a_sample_of_everything_is_exact():
    every, model = tables(vocab=3, eos=2, depth=4, impossible=0.2, count=5)
    found = stochastic_beam_search(model, torch.arange(5), n=60, max_length=3)
    for item, table in enumerate(every):
        assert same(answers(found, item), oracle.all_sequences(table, eos=2, max_length=3))
        truth = sum(math.exp(score) * len(y) for y, score, _ in oracle.all_sequences(table, eos=2, max_length=3))
        values = found.lengths[item : item + 1].double().expand(5, -1)
        assert math.isclose(found.estimate(values)[item].item(), truth, rel_tol=1e-9)
    assert (found.threshold == -math.inf).all()


def test_thresholds_and_order():
    _, model = tables(vocab=4, eos=3, depth=4, impossible=0.0, count=6)
    found = stochastic_beam_search(model, torch.arange(6), n=5, max_length=4, generator=torch.Generator())
    assert (found.perturbed > found.threshold.unsqueeze(1)).all()
    assert (found.log_weights >= found.scores).all()
    assert not found.optimal.any()
    for item in range(6):
        rows = answers(found, item)
        assert len({y for y, _, _ in rows}) == 5
        keys = [(not finished, -score) for _, score, finished in rows]
        assert keys == sorted(keys)
    moved = found.to("cpu")
    assert isinstance(moved, Drawn)
    assert moved.log_weights.equal(found.log_weights)


def test_batch_equals_one_by_one_with_the_same_generator(monkeypatch):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=8)
    together, apart, pieces = (torch.Generator().manual_seed(3) for _ in range(3))
    whole = stochastic_beam_search(model, torch.arange(8), n=5, max_length=5, generator=together)
    for item in range(8):
        alone = stochastic_beam_search(model, which(item), n=5, max_length=5, generator=apart)
        assert answers(whole, item) == answers(alone)
        assert whole.perturbed[item].equal(alone.perturbed[0])
        assert whole.threshold[item] == alone.threshold[0]
    monkeypatch.setattr("thalweg.inference.search.stochastic._ROOM", 3 * 6 * 4)
    cut = stochastic_beam_search(model, torch.arange(8), n=5, max_length=5, generator=pieces)
    assert isinstance(cut, Drawn)
    assert cut.log_weights.equal(whole.log_weights)
    assert all(answers(whole, item) == answers(cut, item) for item in range(8))
    assert together.get_state().equal(apart.get_state())


def test_dead_ends_are_missing_and_estimates_stay_unbiased():
    table = {(): {0: math.log(0.5), 1: math.log(0.3), 2: math.log(0.2)}, (0,): {}, (1,): {2: 0.0}}
    model = TableModel(table, vocab_size=3, bos=BOS, eos=2)
    found = draws(model, 2, 3)
    assert {tuple(y) for row in found.sequences() for y in row} == {(2,), (1, 2)}
    estimates = found.estimate(found.lengths.double())
    truth = 0.3 * 2 + 0.2 * 1
    assert abs(estimates.mean().item() - truth) < 4 * estimates.std().item() / math.sqrt(REPEATS)


def test_models_that_do_not_sum_to_one_are_sampled_as_if_they_did():
    table = {(): {0: -3.0, 1: -4.0, 2: -5.0}}
    model = TableModel(table, vocab_size=3, bos=BOS)
    probabilities = sequences.distribution(table, eos=None, max_length=1)
    found = draws(model, 2, 1)
    assert oracle.chi_square_accepts(in_order(found), sequences.ordered_draws(probabilities, 2))
    estimates = found.estimate(torch.ones_like(found.scores))
    truth = math.exp(-3) + math.exp(-4) + math.exp(-5)
    assert abs(estimates.mean().item() - truth) < 4 * estimates.std().item() / math.sqrt(REPEATS)


def test_extreme_probabilities_stay_finite():
    log_probs = torch.tensor([[0.0, -800.0, -1e5, -math.inf]]).double().expand(4, 4)
    model = TableModel.markov(log_probs, bos=BOS)
    found = stochastic_beam_search(model, torch.zeros(50, dtype=torch.long), n=4, max_length=6)
    assert found.scores.isfinite().all()
    assert found.perturbed.isfinite().all()
    assert not found.log_weights.isnan().any()
    assert (found.tokens[:, 0] == 0).all()
    certain = stochastic_beam_search(countdown(4), which(0), n=3, max_length=9)
    assert answers(certain) == [((1, 1, 1, 2), 0.0, True)]


def test_wrong_arguments():
    for wrong in ({"n": 0}, {"max_length": 0}, {"temperature": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            stochastic_beam_search(countdown(2), which(0), **{"n": 2, "max_length": 3, **wrong})
    found = stochastic_beam_search(countdown(2), which(0), n=2, max_length=3)
    with pytest.raises(ShapeError, match=r"\(B, n\) = \(1, 2\)"):
        found.estimate(torch.zeros(1, 3))
