from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracles import hopfield as oracle
from thalweg.energies.hopfield.analysis import (
    analyse_memory,
    exact_retrieval,
    margin,
    pattern_separation,
)
from thalweg.energies.hopfield.fixed_points import classify_states, fixed_points
from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.hopfield.separation_maps import Entmax, KSubsets, NormMax, Separation, Softmax

SPARSE: list[tuple[Separation, float]] = [
    (Entmax(2.0), 1.0),
    (Entmax(1.5), 2.0),
    (Entmax(1.25), 4.0),
    (Entmax(4.0), 1 / 3),
    (NormMax(2.0), 1.0),
    (NormMax(5.0), 1.0),
]
NAMES = [str(separation) for separation, _ in SPARSE]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def directions(count: int, features: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(draw(count, features, seed=seed))


# Separation


def test_separation_matches_every_pair():
    X = draw(9, 4)
    assert pattern_separation(X).tolist() == pytest.approx(oracle.separation(X.numpy()), abs=1e-12)
    twins = torch.cat([X, X[:1]])
    assert pattern_separation(twins)[[0, -1]].abs().max() < 1e-12  # a twin is not told apart
    assert pattern_separation(X[:1]).tolist() == [math.inf]


def test_separation_oracle_can_fail():
    X = draw(9, 4)
    wrong = [float(x @ x) - max(float(x @ y) for y in X) for x in X]  # forgets to leave the pattern itself out
    assert pattern_separation(X).tolist() != pytest.approx(wrong, abs=1e-6)


def test_separation_leaves_absent_patterns_out():
    X = draw(6, 4)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    found = pattern_separation(X.masked_fill(~mask.unsqueeze(1), math.nan), mask)
    torch.testing.assert_close(found[mask], pattern_separation(X[mask]))
    assert found[~mask].isnan().all()


# The retrieval-error bound of the softmax


@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0])
def test_error_bound_holds(beta):
    tight = 0
    for seed in range(20):
        X = draw(7, 12, seed=seed, scale=1.5)
        memory = HopfieldMemory(X, beta)
        error = (memory.update(X) - X).norm(dim=1)
        bound, M = analyse_memory(memory).error_bound, float(X.norm(dim=1).max())
        assert bound is not None
        assert (error <= bound + 1e-12).all()
        delta = oracle.separation(X.numpy())
        assert bound.tolist() == pytest.approx([min(2 * M, 2 * 6 * math.exp(-beta * d) * M) for d in delta])
        tight += int((bound < M).sum())
    assert tight > 0 or beta < 1  # it says something


def test_well_separated_patterns_hold_a_fixed_point_alone():
    X = directions(8, 60) * 6.0
    memory = HopfieldMemory(X, 1.0)
    report = analyse_memory(memory)
    assert report.well_separated is not None
    assert report.well_separated.all()
    assert report.ball == pytest.approx(1 / (8 * 6.0))
    assert report.required == pytest.approx(2 / 8 + math.log(2 * 7 * 8 * 36.0))
    # Queries from all over the ball around a pattern stay in it and come to one point.
    around = X.unsqueeze(1) + directions(8 * 5, 60, seed=3).view(8, 5, 60) * report.ball
    moved = memory.update(around)
    assert ((moved - X.unsqueeze(1)).norm(dim=2) <= report.ball).all()
    rest = memory.retrieve(around, 100, 1e-12).state
    assert (rest - rest[:, :1]).abs().max() < 1e-9
    assert ((rest - X.unsqueeze(1)).norm(dim=2) <= report.ball).all()


def test_crowded_patterns_are_not_well_separated():
    report = analyse_memory(HopfieldMemory(draw(30, 3), 1.0))
    assert report.well_separated is not None
    assert not report.well_separated.any()


# The margin and exact retrieval in one step (H4)


@pytest.mark.parametrize(("separation", "expected"), SPARSE, ids=NAMES)
def test_margin_is_where_weights_become_exact(separation, expected):
    assert margin(separation) == pytest.approx(expected)
    for lead, exact in ((expected * (1 + 1e-6), True), (expected * (1 - 1e-2), False)):
        scores = torch.tensor([0.0, lead, -0.5, -1.0], dtype=torch.float64)
        weights = separation.weights(scores)
        assert (weights[1] == 1.0) == exact
        assert bool(weights[0] > 0) != exact


def test_margins_of_others():
    assert margin(Softmax()) == math.inf
    assert margin(Entmax(1.0)) == math.inf
    assert margin(KSubsets(3)) == 1.0
    with pytest.raises(ConfigError, match="no margin"):
        margin(Separation())


@pytest.mark.parametrize(("separation", "m"), SPARSE, ids=NAMES)
def test_h4_margin_condition_gives_exact_retrieval_in_one_step(separation, m):
    X = directions(6, 24) * 4.0
    memory = HopfieldMemory(X, 1.0, separation)
    report = analyse_memory(memory)
    assert report.stationary.all()
    delta, M = pattern_separation(X), 4.0
    torch.testing.assert_close(report.exact_within, (delta - m) / (2 * M))
    # Queries on the very edge of what the condition allows, in many directions.
    noise = directions(6 * 20, 24, seed=5).view(20, 6, 24) * (report.exact_within * (1 - 1e-9)).unsqueeze(1)
    q = X + noise
    found = memory.update(q)
    torch.testing.assert_close(found, X.expand_as(found), atol=1e-12, rtol=0)
    assert exact_retrieval(memory, q.flatten(0, 1)).exact.all()


@pytest.mark.parametrize(("separation", "m"), SPARSE, ids=NAMES)
def test_h4_without_the_margin_retrieval_is_not_exact(separation, m):
    # Two patterns at right angles, Delta = 1, and a temperature too high: b Delta < m.
    X = torch.eye(3, dtype=torch.float64)[:2]
    cold, warm = HopfieldMemory(X, m * 1.001, separation), HopfieldMemory(X, m * 0.7, separation)
    torch.testing.assert_close(cold.update(X), X, atol=1e-12, rtol=0)
    assert ((warm.update(X) - X).norm(dim=1) > 1e-4).all()
    assert analyse_memory(cold).stationary.all()
    assert not analyse_memory(warm).stationary.any()
    assert analyse_memory(warm).exact_within.isnan().all()
    # And a query a little further than the condition allows, towards the other pattern.
    beta = 4.0 * m
    memory = HopfieldMemory(X, beta, separation)
    room = 1 - 1 / 4  # q'(x_0 - x_1) may fall from 1 to m / beta = 1/4 along x_1 - x_0
    towards = (X[1] - X[0]) / 2
    inside, outside = X[0] + room * 0.999 * towards, X[0] + room * 1.3 * towards
    said = exact_retrieval(memory, torch.stack([inside, outside]))
    assert said.exact.tolist() == [True, False]
    assert said.indices.tolist() == [[0], [0]]
    torch.testing.assert_close(memory.update(inside), X[0], atol=1e-12, rtol=0)
    assert (memory.update(outside) - X[0]).norm() > 1e-5


@pytest.mark.parametrize(("separation", "m"), SPARSE, ids=NAMES)
def test_exact_retrieval_is_sufficient_and_necessary(separation, m):
    memory = HopfieldMemory(draw(6, 4), 1.5, separation)
    q = draw(200, 4, seed=1, scale=2.0)
    said, weights = exact_retrieval(memory, q), memory.weights(q)
    assert 0 < int(said.exact.sum()) < 200
    clear = (1.5 * said.gap - m).abs() > 1e-3 * m
    assert torch.equal(said.exact[clear], ((weights - 1).abs() < 1e-9).any(1)[clear])
    assert torch.equal(said.indices[:, 0], weights.argmax(1))


def test_exact_retrieval_of_subsets():
    memory = HopfieldMemory(draw(6, 4), 2.0, KSubsets(2))
    q = draw(100, 4, seed=1, scale=2.0)
    said, weights = exact_retrieval(memory, q), memory.weights(q)
    assert said.indices.shape == (100, 2)
    assert 0 < int(said.exact.sum()) < 100
    whole = ((weights - 1).abs() < 1e-9).sum(1) == 2
    clear = (2.0 * said.gap - 1).abs() > 1e-3
    assert torch.equal(said.exact[clear], whole[clear])
    assert analyse_memory(memory).margin == math.inf


def test_softmax_is_never_exact():
    memory = HopfieldMemory(3.0 * torch.eye(3), 1.0)
    assert not exact_retrieval(memory, 9.0 * torch.eye(3)).exact.any()
    assert exact_retrieval(HopfieldMemory(torch.eye(2)[:1], 1.0, "sparsemax"), torch.eye(2)).exact.all()


# Fixed points


def test_states_are_classified():
    # Two patterns that are nearly one, and one far away; all at once where it is hot.
    X = torch.tensor([[5.0, 0.0, 0.3], [5.0, 0.0, -0.3], [0.0, 5.0, 0.0]], dtype=torch.float64)
    cold = fixed_points(HopfieldMemory(X, 1.0, names=["a", "b", "far"]))
    assert cold.kinds.count("single") == 1
    assert cold.kinds.count("metastable") == 1
    metastable = cold.kinds.index("metastable")
    assert sorted(cold.members[metastable]) == [0, 1]
    assert cold.shares[metastable] == pytest.approx([0.5, 0.5], abs=1e-3)
    assert cold.members[cold.kinds.index("single")] == [2]
    assert (cold.residuals < 1e-4).all()
    assert int(cold.found_from.sum()) == 4
    hot = fixed_points(HopfieldMemory(X, 1e-3))
    assert hot.kinds == ["global"]
    torch.testing.assert_close(hot.state[0], X.mean(0), atol=0.1, rtol=0)
    coldest = fixed_points(HopfieldMemory(X, 60.0))
    assert coldest.kinds.count("single") == 3
    assert (coldest.energies.diff() >= 0).all()


def test_classification_prints():
    X = torch.eye(3, dtype=torch.float64) * 4
    lines = str(fixed_points(HopfieldMemory(X, 1.0, names=["a", "b", "c"]))).splitlines()
    assert lines[0].startswith("3 states: 3 single") or "single" in lines[0]
    assert any("a (1.00)" in line for line in lines)
    many = classify_states(HopfieldMemory(draw(20, 3), 0.01), draw(20, 3, seed=1))
    assert "... 8 more" in str(many)
    assert "12 more" in str(many)
    assert len(many) == 20
    assert str(classify_states(HopfieldMemory(X), X[:0])) == "0 states: 0 single, 0 metastable, 0 global"


def test_thresholds_are_what_is_said():
    X = torch.eye(4, dtype=torch.float64)
    memory = HopfieldMemory(X, 1.0, mask=torch.tensor([True, True, True, False]))
    q = torch.tensor([[0.7, 0.2, 0.1, 0.0]], dtype=torch.float64).clamp(min=1e-30).log()  # weights 0.7, 0.2, 0.1
    assert classify_states(memory, q).members == [[0, 1]]
    assert classify_states(memory, q).kinds == ["metastable"]
    assert classify_states(memory, q, mass=0.65).kinds == ["single"]
    assert classify_states(memory, q, mass=0.95).members == [[0, 1, 2]]
    # 0.7, 0.2, 0.1 is (0.7 - 1/3) = 0.3667 from equal weights in total variation.
    assert classify_states(memory, q, spread=0.36).kinds == ["metastable"]
    assert classify_states(memory, q, spread=0.37).kinds == ["global"]


def test_sparse_and_subset_states():
    X = torch.eye(4, dtype=torch.float64) * 3
    assert fixed_points(HopfieldMemory(X, 1.0, "sparsemax"), X).members == [[0], [1], [2], [3]]
    pairs = fixed_points(HopfieldMemory(X, 1.0, KSubsets(2)), X[:1] + X[1:2])
    assert sorted(pairs.members[0]) == [0, 1]
    assert pairs.kinds == ["metastable"]


def test_blocks_change_nothing(monkeypatch):
    memory, state = HopfieldMemory(draw(6, 3), 2.0), draw(9, 3, seed=1)
    whole = classify_states(memory, state)
    monkeypatch.setattr("thalweg.energies.hopfield.fixed_points._HELD", 12)
    parts = classify_states(memory, state)
    assert parts.members == whole.members
    assert parts.kinds == whole.kinds


# Reports


def test_report_prints_and_respects_masks():
    X = directions(6, 40) * 5
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    report = analyse_memory(HopfieldMemory(X.masked_fill(~mask.unsqueeze(1), math.nan), 1.0, mask=mask))
    alone = analyse_memory(HopfieldMemory(X[mask], 1.0))
    assert str(report) == str(alone)
    assert report.count == 5
    assert report.well_separated is not None
    assert not report.well_separated[2]
    assert not report.stationary[2]
    assert "well separated" in str(report)
    assert "exact" not in str(report)
    sparse = str(analyse_memory(HopfieldMemory(X, 1.0, "entmax15")))
    assert "exact in one step (separation at least 2): 6 of 6 patterns" in sparse


def test_smallest_memories():
    one = analyse_memory(HopfieldMemory(torch.ones(1, 1), 1.0))
    assert one.well_separated is not None
    assert one.well_separated.all()
    assert one.error_bound is not None
    assert one.error_bound.tolist() == [0.0]
    assert str(one)
    zero = analyse_memory(HopfieldMemory(torch.zeros(2, 3), 1.0, "sparsemax"))
    assert not zero.stationary.any()
    assert str(zero)
    assert fixed_points(HopfieldMemory(torch.ones(1, 1))).kinds == ["single"]


def test_learned_temperatures_are_numbers_here():
    memory = HopfieldMemory(torch.eye(3) * 4, torch.tensor(1.0, requires_grad=True))
    learned = HopfieldMemory(torch.eye(3) * 4, 1.0, learn_beta=True)
    for each in (memory, learned):
        assert analyse_memory(each).beta == pytest.approx(1.0)
        assert len(fixed_points(each)) >= 3


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: analyse_memory(HopfieldMemory(torch.ones(2, 3, 4))), ConfigError, "one by one"),
        (lambda: classify_states(HopfieldMemory(torch.eye(2)), torch.ones(2)), ShapeError, "(F, D)"),
    ],
)
def test_mistakes_are_one_line(make, error, says):
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
