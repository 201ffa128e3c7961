from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from oracles import search as oracle
from oracles.beams import edit_distance
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Hypotheses, TableModel, beam_search, minimum_bayes_risk, sample_sequences


def pools(count=5):
    every = [oracle.random_table(n, vocab=4, eos=3, depth=4, impossible=0.1) for n in range(count)]
    model = TableModel(every, vocab_size=4, bos=0, eos=3)
    beam = beam_search(model, torch.arange(count), width=8, max_length=4)
    drawn = sample_sequences(model, torch.arange(count), n=30, max_length=4, generator=torch.Generator().manual_seed(0))
    return beam, drawn


def brute(item: Hypotheses, number: int, candidates: Hypotheses, utility, weights):
    """Every candidate against every member of the pool, repetitions and all."""
    pool = [tuple(s) for s in item.sequences()[number]]
    chances = [math.exp(s) for s in item.scores[number].tolist()]
    once = dict(zip(pool, chances, strict=False))
    mass = Counter(pool) if weights == "uniform" else once
    total = sum(mass.values())
    expected = {}
    for c in (tuple(s) for s in candidates.sequences()[number]):
        expected[c] = sum(m * utility(c, y) for y, m in mass.items()) / total
    return expected


def negative_distance(a, b):
    return -edit_distance(a, b)


def overlap(a, b):
    """Not symmetric."""
    return len(set(a) & set(b)) / len(set(a))


@pytest.mark.parametrize("weights", ["probability", "uniform"])
@pytest.mark.parametrize("utility", [None, negative_distance, overlap])
@pytest.mark.parametrize("source", ["beam", "samples", "both"])
def test_against_brute_force(weights, utility, source):
    beam, drawn = pools()
    pool, candidates = {"beam": (beam, None), "samples": (drawn, None), "both": (drawn, beam)}[source]
    found = minimum_bayes_risk(pool, utility, weights=weights, candidates=candidates)
    for item, choice in enumerate(found):
        expected = brute(pool, item, candidates or pool, utility or negative_distance, weights)
        assert set(choice.sequences) == set(expected)
        assert len(choice.sequences) == len(expected)
        for sequence, value in zip(*choice, strict=True):
            assert math.isclose(value, expected[sequence], abs_tol=1e-9)
        assert choice.utilities == sorted(choice.utilities, reverse=True)


def test_the_brute_force_can_fail():
    _, drawn = pools()
    right = minimum_bayes_risk(drawn, weights="uniform")
    wrong = [brute(drawn, item, drawn, negative_distance, "probability") for item in range(5)]
    assert not all(
        math.isclose(c.utilities[0], w[c.sequences[0]], abs_tol=1e-6) for c, w in zip(right, wrong, strict=True)
    )


def test_equal_sequences_are_compared_once():
    _, drawn = pools()
    calls = Counter()

    def counted(a, b):
        calls[a, b] += 1
        return 0.0

    for item in range(5):
        calls.clear()
        row = Hypotheses(
            *(
                part[item : item + 1]
                for part in (drawn.tokens, drawn.lengths, drawn.scores, drawn.finished, drawn.optimal)
            )
        )
        choice = minimum_bayes_risk(row, counted)[0]
        assert set(calls.values()) == {1}
        assert len(calls) == len(choice.sequences) ** 2
        # All the same: the pool's own order stays.
        assert choice.sequences == list(dict.fromkeys(tuple(s) for s in row.sequences()[0]))
        assert choice == minimum_bayes_risk(drawn, lambda a, b: 0.0)[item]


def test_missing_items_and_wrong_arguments():
    beam, _ = pools()
    assert minimum_bayes_risk(Hypotheses.none(2, 3, torch.device("cpu"))) == [([], []), ([], [])]
    with pytest.raises(ConfigError, match="`weights`"):
        minimum_bayes_risk(beam, weights="equal")
    with pytest.raises(ConfigError, match="got NaN"):
        minimum_bayes_risk(beam, lambda a, b: math.nan)
    with pytest.raises(ShapeError, match="`candidates`"):
        minimum_bayes_risk(beam, candidates=Hypotheses.none(2, 3, torch.device("cpu")))


def test_edit_distances_are_the_usual_ones():
    beam, drawn = pools()
    for pool in (beam, drawn):
        assert minimum_bayes_risk(pool) == minimum_bayes_risk(pool, lambda a, b: -edit_distance(a, b))
