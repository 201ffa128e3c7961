"""EM for mixtures of Gaussians against scikit-learn, repetition and enumeration."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as Theirs
from sklearn.utils.estimator_checks import check_estimator

from oracles import mixtures as oracle
from thalweg.energies import DegenerateComponentWarning, GaussianMixture, choose_size
from thalweg.energies.mixture import em
from thalweg.energies.mixture.start import k_means_plus_plus
from thalweg.errors import ConfigError, ShapeError

SHAPES = {"full": "full", "tied": "tied", "diagonal": "diag", "spherical": "spherical"}

# Checks of scikit-learn that cannot hold, each with the reason.
EXPECTED_TO_FAIL = {
    "check_no_attributes_set_in_init": "`training` is a public attribute of every torch module",
    "check_do_not_raise_errors_in_init_or_set_params": "given means and covariances are a model at once, so wrong ones "
    "are refused at once",
}


def clusters(count=300, D=3, N=3, seed=0, apart=2.0):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(count // N, D)) @ rng.normal(size=(D, D)) + apart * rng.normal(size=D) for _ in range(N)]
    return np.concatenate(parts)


def start(X, shape, N=3):
    D, variance = X.shape[1], 4.0
    covariances = {"full": variance * np.stack([np.eye(D)] * N), "tied": variance * np.eye(D),
                   "diagonal": np.full((N, D), variance), "spherical": np.full(N, variance)}[shape]  # fmt: skip
    return {"weights": np.full(N, 1 / N), "means": X[:: len(X) // N][:N].copy(), "covariances": covariances}


def as_matrices(model):
    N, D = model.means_.shape
    found = model.covariances_.detach().numpy()
    if model.covariance_type in ("full", "tied"):
        return np.broadcast_to(found, (N, D, D))
    return np.stack([np.diag(np.broadcast_to(each, D)) for each in found])


def numbers(model):
    return model.weights_.detach().numpy(), model.means_.detach().numpy(), as_matrices(model)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 2000])
def test_from_the_same_start_the_same_end_as_scikit_learn(shape, steps):
    X = clusters()
    given = start(X, shape)
    inverse = np.linalg.inv if shape in ("full", "tied") else np.reciprocal
    theirs = Theirs(
        3, covariance_type=SHAPES[shape], reg_covar=0.0, tol=1e-12, max_iter=steps, weights_init=given["weights"],
        means_init=given["means"], precisions_init=inverse(given["covariances"]),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs.fit(X)
    ours = GaussianMixture(3, shape, **given, tol=1e-12, max_iter=steps).fit(X)
    assert ours.converged_ == theirs.converged_
    assert np.allclose(ours.means_.detach(), theirs.means_, rtol=0, atol=1e-6)
    assert np.allclose(ours.covariances_.detach(), theirs.covariances_, rtol=0, atol=1e-6)
    assert np.allclose(ours.weights_.detach(), theirs.weights_, rtol=0, atol=1e-6)
    assert np.allclose(ours.score_samples(X), theirs.score_samples(X), rtol=0, atol=1e-6)
    assert np.allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=0, atol=1e-6)
    assert np.array_equal(ours.predict(X), theirs.predict(X))
    assert math.isclose(ours.bic(X), theirs.bic(X), abs_tol=1e-5)
    assert math.isclose(ours.aic(X), theirs.aic(X), abs_tol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_v2_em_never_decreases_the_likelihood(shape, dtype):
    X = clusters(apart=0.7, seed=1).astype(dtype)
    model = GaussianMixture(6, shape, random_state=0, tol=0.0, max_iter=60, floor=1e-3).fit(X)
    gains = np.diff(model.history_)
    assert len(gains) > 10
    assert gains.min() > (-1e-12 if dtype is np.float64 else -1e-5)
    assert gains.sum() > 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_v2_holds_where_the_floor_binds(shape):
    """Raising variances to the floor is the maximum under that bound; adding to them would not be."""
    X = clusters(90, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateComponentWarning)
        model = GaussianMixture(4, shape, random_state=0, floor=1.5, tol=0.0, max_iter=40).fit(X)
    assert np.diff(model.history_).min() > -1e-12
    assert model.degenerate_
    assert np.linalg.eigvalsh(as_matrices(model)).min() > 1.5 - 1e-9


def test_a_fall_is_an_error_that_names_the_step(monkeypatch):
    X = clusters()
    right = em.maximise

    def wrong(state, moments, **how):
        found = right(state, moments, **how)
        return found._replace(means=found.means + 3.0)

    monkeypatch.setattr(em, "maximise", wrong)
    with pytest.raises(em.LikelihoodFellError, match="step 1 of EM lowered the mean log-likelihood from"):
        GaussianMixture(3, **start(X, "full")).fit(X)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_repetitions(shape):
    X = clusters(90)
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 4, len(X))
    how = {**start(X, shape), "max_iter": 6, "tol": 0.0}
    weighted = GaussianMixture(3, shape, **how).fit(X, sample_weight=weight)
    repeated = GaussianMixture(3, shape, **how).fit(X.repeat(weight, axis=0))
    for one, other in zip(numbers(weighted), numbers(repeated), strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-9)
    scaled = GaussianMixture(3, shape, **how).fit(X, sample_weight=weight / 7)
    assert np.allclose(scaled.history_, weighted.history_)
    plain = GaussianMixture(3, shape, **how).fit(X)
    assert not np.allclose(plain.means_.detach(), weighted.means_.detach(), atol=1e-3)


def with_gaps(X, share=0.25, seed=0):
    rng = np.random.default_rng(seed)
    X = X.copy()
    X[rng.random(X.shape) < share] = np.nan
    X[0] = np.nan  # nothing is observed of it
    return X


def test_missing_values_step_by_step():
    """Each step against one that fills in point by point; each likelihood against that of what is observed."""
    X = with_gaps(clusters(60))
    given = start(np.nan_to_num(X), "full")
    state = (given["weights"], given["means"], given["covariances"])
    model = GaussianMixture(3, **given, missing=True, tol=0.0, max_iter=4).fit(X)
    for likelihood in model.history_:
        assert math.isclose(likelihood, oracle.log_likelihood(X, *state) / len(X), rel_tol=1e-10)
        state = oracle.step(X, *state)
    for one, other in zip(numbers(model), state, strict=True):
        assert np.allclose(one, other, atol=1e-9)
    expected = [oracle.log_density(point, *state) for point in X]
    assert np.allclose(model.score_samples(X), expected)
    points = torch.from_numpy(X)
    assert np.allclose(model(points).detach(), -np.array(expected))
    assert np.allclose(model.posterior(points)[0].detach(), state[0])  # of nothing observed: the weights
    without = GaussianMixture(3, **given, missing=True, tol=0.0, max_iter=4).fit(np.nan_to_num(X))
    assert not np.allclose(without.means_.detach(), model.means_.detach(), atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_missing_values_end_at_a_maximum_of_the_observed_likelihood(shape):
    """No step in any parameter raises the likelihood of what is observed, computed point by point."""
    X = with_gaps(clusters(60, D=2, N=2, apart=4.0))
    settings = {"missing": True, "random_state": 0, "tol": 1e-13, "max_iter": 3000, "floor": 1e-9}
    model = GaussianMixture(2, shape, **settings).fit(X)
    assert model.converged_
    assert np.diff(model.history_).min() > -1e-12
    best = oracle.log_likelihood(X, *numbers(model))
    assert math.isclose(best / len(X), model.score(X), rel_tol=1e-10)
    parameters = [model.means_, model.factors_, model.logits_]
    for values in parameters:
        for place in np.ndindex(*values.shape):
            if shape in ("full", "tied") and values is model.factors_ and place[-2] > place[-1]:
                continue
            ends = []
            for way in (-1e-4, 1e-4):
                with torch.no_grad():
                    values[place] += way
                    ends.append(oracle.log_likelihood(X, *numbers(model)))
                    values[place] -= way
            assert max(ends) < best + 1e-8
            assert abs(ends[1] - ends[0]) / 2e-4 < 1e-3  # the slope


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_missing_is_the_same_either_way(shape):
    X = clusters(90)
    how = {**start(X, shape), "max_iter": 6, "tol": 0.0}
    one, other = (GaussianMixture(3, shape, missing=missing, **how).fit(X) for missing in (False, True))
    assert np.allclose(one.history_, other.history_)
    for a, b in zip(numbers(one), numbers(other), strict=True):
        assert np.allclose(a, b, atol=1e-9)


def test_missing_values_and_gradients():
    X = torch.from_numpy(with_gaps(clusters(30, D=2)))
    model = GaussianMixture(3, **start(np.nan_to_num(X.numpy()), "full"), missing=True)
    model(X).sum().backward()
    assert all(bool(value.grad.isfinite().all()) for value in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_mapped_blocks_add_up(shape, tmp_path, monkeypatch):
    X = clusters()
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    how = {**start(X, shape), "max_iter": 6, "tol": 0.0}
    whole = GaussianMixture(3, shape, **how).fit(X)
    monkeypatch.setattr(em, "_BLOCK", {"cpu": 1})  # blocks of 64 points
    streamed = GaussianMixture(3, shape, **how).fit(mapped)
    assert np.allclose(streamed.history_, whole.history_, rtol=1e-12)
    for one, other in zip(numbers(streamed), numbers(whole), strict=True):
        assert np.allclose(one, other, atol=1e-10)
    assert isinstance(streamed.predict(mapped), np.ndarray)


def test_far_from_the_origin():
    """Moments are taken about a centre: an offset of 1e6 costs no digits that float64 still has."""
    X = clusters()
    for shape in SHAPES:
        near = GaussianMixture(3, shape, **start(X, shape), tol=0.0, max_iter=5).fit(X)
        far = GaussianMixture(3, shape, **start(X + 1e6, shape), tol=0.0, max_iter=5).fit(X + 1e6)
        assert np.allclose(far.history_, near.history_, atol=1e-7)
        assert np.allclose(as_matrices(far), as_matrices(near), atol=1e-5)


def test_starts_are_drawn_and_the_best_is_kept():
    X = clusters(600, N=6, seed=4, apart=6.0)
    ends = [GaussianMixture(6, random_state=seed, max_iter=50).fit(X).history_[-1] for seed in range(4)]
    again = GaussianMixture(6, random_state=0, max_iter=50).fit(X)
    assert again.history_[-1] == ends[0]
    many = GaussianMixture(6, random_state=0, n_restarts=5, max_iter=50).fit(X)
    assert many.history_[-1] >= max(ends[0], min(ends))
    torch.manual_seed(0)
    assert GaussianMixture(6).fit(X).converged_


def test_k_means_plus_plus_follows_squared_distances():
    points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.stack([k_means_plus_plus(points, weight, 2, generator=generator) for _ in range(4000)]).squeeze(2)
    first = torch.stack([(pairs[:, 0] == x).double().mean() for x in (0, 1, 3)])
    assert torch.allclose(first, weight / 4, atol=0.04)
    after = pairs[pairs[:, 0] == 0][:, 1]
    assert abs(float((after == 3).double().mean()) - 9 / 11) < 0.05  # 3^2 against 2 * 1^2
    assert torch.equal(k_means_plus_plus(points[:1].repeat(3, 1), weight, 2), torch.zeros(2, 1, dtype=torch.float64))


def test_more_points_than_the_start_looks_at(monkeypatch):
    monkeypatch.setattr("thalweg.energies.mixture.start._LOOKED_AT", 50)
    X = clusters(900, apart=6.0)
    weight = np.ones(len(X))
    for missing in (False, True):
        model = GaussianMixture(3, random_state=0, missing=missing).fit(X, sample_weight=weight)
        assert model.converged_
        assert abs(model.score(X) - GaussianMixture(3, random_state=1, n_restarts=3).fit(X).score(X)) < 0.5


def test_online_steps_approach_the_maximum():
    X = clusters(3000, apart=4.0)
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        best = GaussianMixture(3, shape, random_state=0).fit(X)
        online = GaussianMixture(3, shape, random_state=0)
        for _ in range(60):
            online.partial_fit(X[rng.integers(len(X), size=300)])
        assert online.n_batches_seen_ == 60
        assert abs(online.score(X) - best.score(X)) < 0.05
        before = best.score(X)
        best.partial_fit(X)  # from what is fitted, with all points: stays there
        assert abs(best.score(X) - before) < 1e-3


def test_online_steps_over_a_memory_mapped_file(tmp_path):
    X = clusters(3000, apart=6.0).astype(np.float32)
    np.random.default_rng(0).shuffle(X)
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    there, here = (GaussianMixture(3, random_state=0) for _ in range(2))
    for first in [*range(0, 3000, 500)] * 10:
        there.partial_fit(mapped[first : first + 500])
        here.partial_fit(torch.from_numpy(X[first : first + 500]))
    assert torch.equal(there.means_, here.means_)
    best = GaussianMixture(3, random_state=0, n_restarts=3).fit(mapped)
    assert there.score(mapped) > best.score(mapped) - 0.01


def test_degenerate_components_are_reported():
    X = np.concatenate([np.random.default_rng(0).normal(size=(50, 2)), np.full((10, 2), 7.0)])
    with pytest.warns(DegenerateComponentWarning, match="1 of 2 components are degenerate.*variance floor 1e-06"):
        model = GaussianMixture(2, random_state=0).fit(X)
    assert list(model.degenerate_.values()) == ["at the variance floor 1e-06"]
    far = np.array([[0.0, 0.0], [1e4, 1e4]])
    given = {"means": far, "covariances": np.stack([np.eye(2)] * 2), "weights": [0.5, 0.5]}
    with pytest.warns(DegenerateComponentWarning, match="no point belongs to it"):
        model = GaussianMixture(2, **given).fit(X[:50])
    assert model.degenerate_ == {1: "no point belongs to it"}
    assert np.allclose(model.means_[1].detach(), 1e4)
    assert np.isfinite(model.score_samples(X)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GaussianMixture(1).fit(X).degenerate_ == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_finds_the_same(shape):
    X = clusters()
    how = {**start(X, shape), "max_iter": 6, "tol": 0.0}
    here = GaussianMixture(3, shape, **how).fit(X)
    there = GaussianMixture(3, shape, **how).fit(torch.from_numpy(X).cuda())
    assert there.means_.is_cuda
    assert there.predict(torch.from_numpy(X).cuda()).is_cuda
    assert isinstance(there.predict(X), np.ndarray)
    assert there.sample(3).is_cuda
    assert np.allclose(there.history_, here.history_, rtol=1e-9)
    for one, other in zip(numbers(there.cpu()), numbers(here), strict=True):
        assert np.allclose(one, other, atol=1e-8)
    gaps = torch.from_numpy(with_gaps(X)).cuda()
    assert GaussianMixture(3, shape, **how, missing=True).fit(gaps).means_.is_cuda
    assert GaussianMixture(3, shape, random_state=0).fit(gaps.nan_to_num().float()).converged_


def test_the_number_of_components_is_found():
    X = clusters(600, D=2, seed=4, apart=8.0)
    chosen = choose_size(GaussianMixture(random_state=0, n_restarts=3), X, range(1, 6))
    assert chosen.model.n_components == 3
    assert chosen.best == 3
    assert math.isclose(chosen.criteria[3], chosen.model.bic(X))
    other = choose_size(GaussianMixture(random_state=0), X, [2], "aic")
    assert math.isclose(other.criteria[2], other.model.aic(X))
    for wrong in ({"counts": []}, {"counts": [1], "criterion": "mdl"}):
        with pytest.raises(ConfigError, match=r"counts|criterion"):
            choose_size(GaussianMixture(), X, **wrong)


def test_one_component_is_the_mean_and_the_covariance():
    X = clusters(50)
    for shape in SHAPES:
        model = GaussianMixture(1, shape).fit(X)
        covariance = np.cov(X.T, bias=True)
        expected = {"full": covariance[None], "tied": covariance, "diagonal": covariance.diagonal()[None],
                    "spherical": covariance.diagonal().mean(keepdims=True)}[shape]  # fmt: skip
        assert np.allclose(model.means_.detach(), X.mean(0, keepdims=True))
        assert np.allclose(model.covariances_.detach(), expected)


GOOD = clusters(30)
HOLE = GOOD.copy()
HOLE[3, 1] = np.nan


@pytest.mark.parametrize(
    ("settings", "X", "error", "message"),
    [
        ({}, HOLE, ShapeError, "contains NaN at row 3, column 1; with `missing=True`"),
        ({"missing": True}, np.where(np.isnan(HOLE), np.inf, HOLE), ShapeError, "infinity"),
        ({"missing": True}, GOOD * [[1, np.nan, 1]], ShapeError, "column 1 of X has no observed value"),
        ({}, np.ones((5, 2)), ShapeError, r"one distinct point in 5 sample\(s\)"),
        ({}, 1e200 * GOOD, ShapeError, r"squares that float64 holds, got numbers up to .*e\+200; scale X"),
        ({"n_components": 31}, GOOD, ShapeError, r"31 components need at least as many points, got 30"),
        ({"means": np.zeros((2, 2))}, GOOD, ShapeError, "D = 3 as in X"),
        ({"n_components": 3, "means": np.zeros((2, 3))}, GOOD, ShapeError, "N = 3 as in `n_components`"),
        ({}, GOOD[0], ShapeError, "Reshape your data"),
        ({}, np.array([[{}], [1]], dtype=object), TypeError, "must hold numbers"),
        ({"n_components": 0}, GOOD, ConfigError, "n_components must be at least 1"),
        ({"n_components": 2.5}, GOOD, ConfigError, "whole number"),
        ({"covariance_type": "round"}, GOOD, ConfigError, "`covariance_type`"),
        ({"floor": 0.0}, GOOD, ConfigError, "floor must be above 0"),
        ({"tol": -1.0}, GOOD, ConfigError, "tol must be 0 or more"),
        ({"max_iter": 0}, GOOD, ConfigError, "max_iter must be at least 1"),
        ({"n_restarts": "many"}, GOOD, ConfigError, "n_restarts must be a whole number"),
        ({"random_state": -1}, GOOD, ConfigError, "random_state"),
        ({"n_components": 2, "weights": [1.0, -1.0]}, GOOD, ConfigError, "`weights`.* above 0"),
        ({"n_components": 2, "weights": [1.0]}, GOOD, ShapeError, r"`weights` must be \(N,\) with N = 2"),
        ({"n_components": 2, "covariances": np.ones(3)}, GOOD, ShapeError, r"`covariances` must be \(N, D, D\)"),
    ],
)
def test_what_is_refused(settings, X, error, message):
    with pytest.raises(error, match=message) as caught:
        GaussianMixture(**settings).fit(X)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [-1, 2.5, True, "many"])
def test_samples_that_are_refused(count):
    with pytest.raises(ConfigError, match="`count` must be an integer of at least 0, got"):
        GaussianMixture().fit(GOOD).sample(count)


def test_weights_of_rows_that_are_refused():
    for weight, message in (([1.0], "B = 30"), (-np.ones(30), "0 or more"), (np.zeros(30), "zero everywhere")):
        with pytest.raises(ShapeError, match=message):
            GaussianMixture().fit(GOOD, sample_weight=weight)
    only = np.zeros(30)
    only[4] = 1.0
    with pytest.raises(ShapeError, match="one distinct point"):
        GaussianMixture().fit(GOOD, sample_weight=only)


@pytest.mark.filterwarnings("ignore::thalweg.energies.DegenerateComponentWarning")
@pytest.mark.filterwarnings("ignore:Estimator GaussianMixture does not inherit:UserWarning")
@pytest.mark.filterwarnings("ignore:.*occurred during set_params:UserWarning")
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"missing": True, "covariance_type": "diagonal"}])
def test_scikit_learn_takes_it_as_an_estimator(settings):
    results = check_estimator(
        GaussianMixture(**settings), expected_failed_checks=EXPECTED_TO_FAIL, on_skip=None, on_fail="raise"
    )
    status = {each["check_name"]: each["status"] for each in results}
    assert {name for name, what in status.items() if what == "xfail"} == EXPECTED_TO_FAIL.keys()
    assert sum(what == "passed" for what in status.values()) > 35
