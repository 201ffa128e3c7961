from __future__ import annotations

import math

import pytest
import torch
from search_cases import BOS, SHAPES, Tree, Watched, answers, countdown, same, tables, which

from oracles import search as oracle
from thalweg.errors import ConfigError
from thalweg.inference import TableModel, beam_search, exact_search, optimality_report
from thalweg.inference.search import agenda as agenda_module
from thalweg.inference.search import exact as exact_module


def best_of(table, *, eos, max_length):
    return [h for h in oracle.all_sequences(table, eos=eos, max_length=max_length) if h[2]][:1]


def test_tree_is_proved():
    for width in (1, 2, 3, 4, 9):
        found = exact_search(Tree.model, which(0), max_length=3, width=width)
        assert Tree.read(found) == [("the green rectangle", -8.2)]
        assert found.optimal.tolist() == [True]
        assert found.gap is not None
        assert found.gap.tolist() == [0.0]


def test_tree_with_too_few_expansions_has_a_proven_gap():
    found = exact_search(Tree.model, which(0), max_length=3, width=2, max_expansions=2)
    assert Tree.read(found) == [("the red rectangle", -9.1)]  # the beam's; "the" is open no more, "a" at -1.8 is
    assert not found.optimal.any()
    assert found.gap is not None
    assert math.isclose(found.gap.item(), 9.1 - 1.8)
    enough = exact_search(Tree.model, which(0), max_length=3, width=2, max_expansions=7)
    assert enough.optimal.all()


def test_tree_report():
    for width, right in ((1, 0), (2, 0), (3, 0), (4, 2)):
        report = optimality_report(Tree.model, which(0, 0), max_length=3, width=width)
        assert (report.items, report.width, report.proved) == (2, width, 2)
        assert (report.beam_optimal, report.beam_beaten, report.empty) == (right, 2 - right, 0)
        assert report.mean_gap == 0


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
@pytest.mark.parametrize("width", [1, 3])
def test_the_optimum_is_that_of_enumeration(vocab, eos, depth, impossible, width):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, count=20, seed=3)
    for max_length in sorted({1, depth // 2 + 1, depth}):
        found = exact_search(Watched(model), torch.arange(20), max_length=max_length, width=width)
        beam = beam_search(model, torch.arange(20), width=width, max_length=max_length)
        assert found.gap is not None
        for item, table in enumerate(every):
            expected = best_of(table, eos=eos, max_length=max_length)
            if expected:
                assert same(answers(found, item), expected)
                assert found.optimal[item]
                assert found.gap[item] == 0
            else:
                assert same(answers(found, item), answers(beam, item)[:1])
                assert not found.optimal[item]
                assert found.gap[item] == math.inf


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
@pytest.mark.parametrize("budget", [1, 2, 5, 17])
def test_the_gap_holds_what_is_missing(vocab, eos, depth, impossible, budget):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, count=20, seed=4)
    watched = Watched(model)
    found = exact_search(watched, torch.arange(20), max_length=depth, width=1, max_expansions=budget)
    assert sum(watched.rows) <= 20 * (budget + depth)
    assert found.gap is not None
    for item, table in enumerate(every):
        expected = best_of(table, eos=eos, max_length=depth)
        if not expected or not found.finished[item, 0]:
            assert not found.optimal[item]
            assert found.gap[item] == math.inf
            continue
        lacks = expected[0][1] - found.scores[item, 0].item()
        assert -1e-9 <= lacks <= found.gap[item].item() + 1e-9
        assert bool(found.optimal[item]) == (found.gap[item].item() == 0)
        if found.optimal[item]:
            assert abs(lacks) < 1e-9


def test_the_oracle_can_fail():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.0, count=20)
    found = exact_search(model, torch.arange(20), max_length=4)
    second = [oracle.all_sequences(table, eos=3, max_length=4)[1:2] for table in every]
    assert not any(same(answers(found, item), second[item]) for item in range(20))


@pytest.mark.parametrize("budget", [None, 3, 40])
def test_a_batch_is_searched_as_its_items_are(budget, monkeypatch):
    _, model = tables(vocab=5, eos=4, depth=5, impossible=0.1, count=30)
    whole = exact_search(model, torch.arange(30), max_length=5, width=1, max_expansions=budget)
    monkeypatch.setattr(exact_module, "_ITEMS", 7)
    pieces = exact_search(model, torch.arange(30), max_length=5, width=1, max_expansions=budget)
    assert whole.gap is not None
    assert pieces.gap is not None
    for item in range(30):
        alone = exact_search(model, which(item), max_length=5, width=1, max_expansions=budget)
        assert alone.gap is not None
        assert answers(whole, item) == answers(alone) == answers(pieces, item)
        assert whole.gap[item] == alone.gap[0] == pieces.gap[item]
        assert whole.optimal[item] == alone.optimal[0] == pieces.optimal[item]


def test_small_blocks_and_a_crowded_agenda_change_nothing_but_the_order(monkeypatch):
    every, model = tables(vocab=5, eos=4, depth=5, impossible=0.0, count=10, seed=6)
    monkeypatch.setattr(exact_module, "_TOGETHER", 2)
    monkeypatch.setattr(agenda_module, "_CROWDED", 3)
    found = exact_search(Watched(model), torch.arange(10), max_length=5, width=1)
    assert found.optimal.all()
    for item, table in enumerate(every):
        assert same(answers(found, item), best_of(table, eos=4, max_length=5))
        alone = exact_search(model, which(item), max_length=5, width=1, max_expansions=9)
        whole = exact_search(model, torch.arange(10), max_length=5, width=1, max_expansions=9)
        assert alone.gap is not None
        assert whole.gap is not None
        assert alone.gap[0] == whole.gap[item]


def test_one_step_serves_many_items():
    model = Watched(countdown(*[6] * 50))
    found = exact_search(model, torch.arange(50), max_length=9)
    assert found.optimal.all()
    beam_steps = 6
    assert len(model.rows) == beam_steps  # certain sequences are optimal before anything is expanded
    flat = torch.full((4, 4), 0.25).log()
    watched = Watched(TableModel.markov(flat, bos=BOS, eos=3), tree=False)
    found = exact_search(watched, torch.zeros(20, dtype=torch.long), max_length=9)
    assert found.lengths.eq(1).all()
    assert found.optimal.all()
    assert watched.rows[-1] == 20


def test_the_empty_sequence_can_be_the_optimum():
    # Ten symbols at 0.099 and eos at 0.01, then certain eos: a beam of 2 never ranks eos among its first two.
    first = {**{v: math.log(0.099) for v in range(10)}, 10: math.log(0.01)}
    table = {(): first, **{(v,): {10: math.log(0.05), **{u: math.log(0.095) for u in range(10)}} for v in range(10)}}
    model = TableModel(table, vocab_size=11, bos=BOS, eos=10)
    report = optimality_report(model, which(0, 0, 0), max_length=3, width=2)
    assert report.empty == report.proved == report.beam_beaten == 3
    found = exact_search(model, which(0), max_length=3, width=2)
    assert answers(found) == [((10,), math.log(0.01), True)]
    unknown = optimality_report(model, which(0, 0, 0), max_length=3, width=2, max_expansions=1)
    assert unknown.items == 3


def test_report_counts_what_is_unproved():
    every, model = tables(vocab=5, eos=4, depth=5, impossible=0.0, count=20, seed=7)
    report = optimality_report(model, torch.arange(20), max_length=5, width=1, max_expansions=2)
    best = exact_search(model, torch.arange(20), max_length=5, width=1, max_expansions=2)
    assert best.gap is not None
    assert report.items - report.proved == int((~best.optimal).sum()) > 0
    assert math.isclose(report.mean_gap, float(best.gap[~best.optimal].mean()))
    assert report.beam_optimal <= report.proved < len(every)


def test_a_flat_network_is_not_searched_for_ever():
    torch.manual_seed(0)
    logits = torch.randn(30, 30) * 0.1
    logits[:, 29] -= 6
    model = TableModel.markov(logits.log_softmax(1), bos=BOS, eos=29)
    found = exact_search(model, torch.zeros(3, dtype=torch.long), max_length=40, max_expansions=500)
    assert found.gap is not None
    assert found.finished.all()
    assert bool(found.optimal.all()) == bool((found.gap == 0).all())
    never = TableModel.markov(torch.full((5, 5), 0.2).log().index_fill(1, which(4), -math.inf), bos=BOS, eos=4)
    cut = exact_search(never, which(0), max_length=30, max_expansions=100)
    assert cut.gap is not None
    assert cut.lengths.tolist() == [[30]]
    assert not cut.finished.any()
    assert not cut.optimal.any()
    assert cut.gap.tolist() == [math.inf]


def test_wrong_arguments():
    for wrong in ({"max_length": 0}, {"width": 0}, {"max_expansions": 0}, {"min_length": 9}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            exact_search(countdown(2), which(0), **{"max_length": 3, **wrong})
    with pytest.raises(ConfigError, match="max_expansions"):
        optimality_report(countdown(2), which(0), max_length=3, max_expansions=0)
