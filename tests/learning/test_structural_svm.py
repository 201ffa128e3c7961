"""Structural SVMs against a quadratic programme over all structures, on chains and on another structure."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from contracts.segmentations import Segmentations
from oracles import structural_svm as oracle
from thalweg.energies import LinearTagger
from thalweg.errors import ConfigError, DataError, NotFittedError, ShapeError
from thalweg.learning import StructuralSVM

LABELS, FEATURES = 3, 2
HAMMING = 1 - np.eye(LABELS)
UNEVEN = np.array([[0.0, 2.0, 1.0], [0.5, 0.0, 3.0], [1.0, 1.0, 0.0]])


def problem(count=6, seed=0):
    """Sequences of 1 to 4 positions: features (T, D) and labels that features do not quite tell."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 5, size=count)
    x = [draw.normal(size=(length, FEATURES)) for length in lengths]
    return x, [draw.integers(LABELS, size=length) for length in lengths]


def padded(x, y, filler=0.0):
    """A batch: features (B, T, D) and lengths, gold (B, T)."""
    lengths = torch.tensor([len(each) for each in x])
    features = torch.full((len(x), int(lengths.max()), FEATURES), filler, dtype=torch.float64)
    gold = torch.full(features.shape[:2], -1)
    for row, (each, labels) in enumerate(zip(x, y, strict=True)):
        features[row, : len(each)], gold[row, : len(each)] = torch.from_numpy(each), torch.from_numpy(labels)
    return (features, lengths), gold


def batches(x, y, size, filler=0.0):
    return [padded(x[at : at + size], y[at : at + size], filler) for at in range(0, len(x), size)]


def flat(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).numpy()


@pytest.fixture(scope="module", params=["hamming", "uneven"])
def solved(request):
    """A problem with its optimum by enumeration."""
    cost, scale = (HAMMING, 0.05) if request.param == "hamming" else (UNEVEN, 0.2)
    x, y = problem()
    examples = [oracle.all_labellings(a, b, LABELS, cost) for a, b in zip(x, y, strict=True)]
    return x, y, cost, scale, examples, oracle.optimum(examples, scale)


@pytest.mark.parametrize(("size", "corrections"), [(1, 0), (1, 2), (2, 3), (6, 3), (6, 0)])
def test_every_certificate_encloses_the_optimum_by_enumeration(solved, size, corrections):
    x, y, cost, scale, examples, (low, high, _) = solved
    tagger = LinearTagger(FEATURES, LABELS)
    settings = {"regularisation": scale, "gap_every": 1, "passes": 100 if corrections else 20, "tol": 5e-3}
    settings["corrections"] = corrections
    seen = []
    svm = StructuralSVM(tagger, cost=torch.from_numpy(cost), **settings)
    svm.fit(batches(x, y, size), watch=lambda point: seen.append((point, oracle.primal(flat(tagger), examples, scale))))
    assert svm.gap_curve == [point for point, _ in seen]
    for point, enumerated in seen:
        assert point.primal == pytest.approx(enumerated, abs=1e-9)
        assert point.dual <= high + 1e-9
        assert point.primal >= low - 1e-9
        assert point.gap >= 0
        assert point.last >= point.primal
    for before, after in itertools.pairwise(svm.gap_curve):
        assert after.dual >= before.dual - 1e-10
    if corrections and size > 1:
        assert svm.converged_
        assert svm.gap_curve[-1].primal == pytest.approx(low, rel=5e-3)
    assert svm.objective(batches(x, y, 2)) == pytest.approx(svm.gap_curve[-1].primal, abs=1e-9)


def test_the_optimum_by_enumeration_is_one(solved):
    """The oracle can fail: its bounds meet at its own weights, and others have more."""
    *_, scale, examples, (low, high, w) = solved
    assert low <= high <= low * (1 + 1e-4)
    assert oracle.primal(w + 0.05, examples, scale) > high + 1e-3


class SegmentScorer(nn.Module):
    """Segments of at most K positions, scored by the features of their last."""

    def __init__(self, longest):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, longest, dtype=torch.float64))

    def forward(self, batch):
        features, lengths = batch
        return Segmentations(features @ self.weight, lengths)


def test_another_structure_needs_nothing_but_its_module():
    longest, scale = 2, 0.1
    x, _ = problem(seed=3)
    draw = np.random.default_rng(5)
    examples, rows = [], []
    for each in x:
        every = oracle.all_segmentations(len(each), longest)
        right = every[draw.integers(len(every))]
        psi = [oracle.segment_features(each, right, longest) - oracle.segment_features(each, y, longest) for y in every]
        ends = {tuple(np.cumsum(y)): set(zip(np.cumsum(y), y, strict=True)) for y in every}
        gold_parts = ends[tuple(np.cumsum(right))]
        examples.append((np.array(psi), np.array([float(len(parts - gold_parts)) for parts in ends.values()])))
        row = np.zeros(len(each), dtype=int)
        row[np.cumsum(right) - 1] = right
        rows.append(row)
    model = SegmentScorer(longest)
    svm = StructuralSVM(model, regularisation=scale, tol=2e-3, passes=200, corrections=4)
    svm.fit(batches(x, rows, 3))
    best, *_ = oracle.optimum(examples, scale)
    assert svm.converged_
    assert svm.gap_curve[-1].primal == pytest.approx(best, rel=3e-3)
    assert svm.predict(batches(x, rows, 3)[0][0]).shape == batches(x, rows, 3)[0][1].shape


def test_chains_of_one_position_are_the_multi_class_svm_of_scikit_learn():
    from sklearn.svm import LinearSVC

    draw = np.random.default_rng(1)
    y = draw.integers(LABELS, size=60)
    x = draw.normal(size=(60, 4)) + np.eye(LABELS, 4)[y]
    theirs = LinearSVC(multi_class="crammer_singer", C=0.5, fit_intercept=False, tol=1e-7, max_iter=100_000).fit(x, y)
    scores = x @ theirs.coef_.T
    lead = (scores + 1 - np.eye(LABELS)[y]).max(axis=1) - scores[np.arange(60), y]
    objective = 0.5 * (theirs.coef_**2).sum() + 0.5 * lead.sum()
    tagger = LinearTagger(4, LABELS, transitions=False)
    data = [
        ((torch.from_numpy(x[at : at + 20, None]), torch.ones(20).long()), torch.from_numpy(y[at : at + 20, None]))
        for at in range(0, 60, 20)
    ]
    svm = StructuralSVM(tagger, regularisation=1 / (0.5 * 60), tol=1e-3, passes=300).fit(data)
    assert svm.gap_curve[-1].primal * 0.5 * 60 == pytest.approx(objective, rel=1e-3)
    np.testing.assert_allclose(tagger.weight.detach().numpy().T, theirs.coef_, atol=0.05)


def test_learning_goes_on_where_it_ended():
    x, y = problem(8)
    data = batches(x, y, 2)
    settings = {"regularisation": 0.05, "tol": 0.0, "gap_every": 3}
    whole = StructuralSVM(LinearTagger(FEATURES, LABELS), passes=12, **settings).fit(data)
    half = StructuralSVM(LinearTagger(FEATURES, LABELS), passes=6, **settings).fit(data)
    state = half.dual_
    rest = StructuralSVM(LinearTagger(FEATURES, LABELS), passes=6, **settings).fit(start=state)
    for ours, theirs in zip(half.gap_curve + rest.gap_curve, whole.gap_curve, strict=True):
        assert (ours.passes, ours.primal, ours.dual) == pytest.approx((theirs.passes, theirs.primal, theirs.dual))
    assert state.passes == 6, "the state that was given stays as it was"
    again = StructuralSVM(LinearTagger(FEATURES, LABELS), passes=6, **settings).fit(start=state)
    assert again.gap_curve[-1].dual == rest.gap_curve[-1].dual


def test_a_start_serves_another_regularisation():
    x, y = problem(8)
    data = batches(x, y, 4)
    first = StructuralSVM(LinearTagger(FEATURES, LABELS), regularisation=0.1, tol=1e-3, passes=300).fit(data)
    settings = {"regularisation": 0.08, "passes": 1, "gap_every": 1}
    warm = StructuralSVM(LinearTagger(FEATURES, LABELS), **settings).fit(start=first.dual_)
    cold = StructuralSVM(LinearTagger(FEATURES, LABELS), **settings).fit(data)
    assert warm.gap_curve[0].gap < cold.gap_curve[0].gap / 2


def test_seeds_order_the_blocks():
    x, y = problem(8)
    runs = [
        StructuralSVM(LinearTagger(FEATURES, LABELS), passes=2, seed=seed).fit(batches(x, y, 2)).gap_curve[-1]
        for seed in (0, 0, 1)
    ]
    assert runs[0][2:] == runs[1][2:]
    assert runs[0][2:] != runs[2][2:]


def test_padding_is_inert():
    x, y = problem(6)
    clean, dirty = batches(x, y, 6), batches(x, y, 6, filler=float("nan"))
    (features, lengths), gold = dirty[0]
    inside = torch.arange(gold.shape[1]) < lengths.unsqueeze(1)
    dirty = [((features, lengths), torch.where(inside, gold, 99))]
    ours, theirs = (StructuralSVM(LinearTagger(FEATURES, LABELS), passes=5).fit(data) for data in (clean, dirty))
    assert ours.gap_curve[-1][2:] == theirs.gap_curve[-1][2:]


def test_indicators_are_the_same_as_their_dense_features():
    draw = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(5, generator=draw)[:3] for _ in range(12)]).view(3, 4, 3)
    chosen[0, 0, 1:] = -1
    dense = torch.zeros(3, 4, 6).scatter_(2, torch.where(chosen < 0, 5, chosen), 1.0)[..., :5]
    lengths, gold = torch.tensor([4, 2, 3]), torch.randint(3, (3, 4), generator=draw)
    runs = [
        StructuralSVM(LinearTagger(5, 3), passes=3).fit([((each, lengths), gold)]) for each in (chosen, dense.double())
    ]
    assert runs[0].gap_curve[-1].dual == pytest.approx(runs[1].gap_curve[-1].dual)
    with pytest.raises(ShapeError, match=r"indicators must lie in 0..4 or be -1, got 5"):
        LinearTagger(5, 3)((chosen + (chosen == 4), lengths))


def test_structures_that_carry_weight_are_few_and_sum_to_one():
    x, y = problem(8)
    svm = StructuralSVM(LinearTagger(FEATURES, LABELS), regularisation=0.05, passes=40, tol=1e-4).fit(batches(x, y, 4))
    for block in svm.dual_.blocks:
        torch.testing.assert_close(block.mixed.sum(dim=0), torch.ones(block.size, dtype=torch.float64))
        assert (block.mixed >= 0).all()
        assert len(block.found) <= 20
        for item in range(block.size):
            held = [tuple(row.tolist()) for row in block.found[block.mixed[:, item] > 0, item]]
            assert len(held) == len(set(held))


class Bent(LinearTagger):
    def emissions(self, features, lengths):
        return super().emissions(features, lengths).tanh()


def test_bad_input_is_one_line():
    x, y = problem()
    data = batches(x, y, 3)
    tagger = LinearTagger(FEATURES, LABELS)
    for name, value, told in [
        ("regularisation", 0.0, "above 0, got 0.0"),
        ("regularisation", -1.0, "above 0, got -1.0"),
        ("tol", float("nan"), "0 or more, got nan"),
        ("passes", 0, "at least 1, got 0"),
        ("cost", -1.0, "0 or more, got -1.0"),
    ]:
        with pytest.raises(ConfigError, match=f"svm.{name} must be {told}"):
            StructuralSVM(tagger, **{name: value})
    svm = StructuralSVM(tagger, passes=2)
    with pytest.raises(NotFittedError, match="call `fit` first"):
        svm.predict(data[0][0])
    with pytest.raises(DataError, match="got none"):
        svm.fit([])
    with pytest.raises(DataError, match="batch 0 must be a pair"):
        svm.fit([1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"labels must lie in 0..2, got 3 at position 0 of batch item 1"):
        svm.fit(batches(x, [y[0], np.full_like(y[1], 3), *y[2:]], 3))
    broken = [x[0], np.full_like(x[1], np.nan), *x[2:]]
    with pytest.raises(DataError, match="item 1 of batch 0 must have a finite score"):
        svm.fit(batches(broken, y, 3))
    with pytest.raises(DataError, match="item 1 of batch 1 must have a finite score"):
        svm.fit(batches([*x[:4], np.full_like(x[4], np.nan), x[5]], y, 3))
    with pytest.raises(ConfigError, match="must be linear in the parameters"):
        StructuralSVM(Bent(FEATURES, LABELS)).fit(data)
    with pytest.raises(ShapeError, match=r"`cost` must be \(C, C\) with C = 3 labels, got \(2, 2\)"):
        StructuralSVM(tagger, cost=torch.zeros(2, 2)).fit(data)
    with pytest.raises(ShapeError, match=r"gold must have 3 items as the inputs, got \(2, "):
        svm.fit([(data[0][0], data[0][1][:2])])
    with pytest.raises(ShapeError, match="the model must give a Structure, got Tensor"):
        StructuralSVM(nn.Linear(2, 2)).fit([(torch.zeros(1, 2), torch.zeros(1, 1).long())])
