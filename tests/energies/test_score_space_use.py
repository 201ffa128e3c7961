"""Score spaces in use: whitening, the Fisher kernel, Fisher vectors, pipelines, and what is wrong with an input."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils import get_tags
from torch.distributions import Poisson

from oracles.score_spaces import fisher_vector as fisher_vector_by_hand
from oracles.score_spaces import fisher_vector_from_moments
from thalweg.energies import HMM, GaussianEmission, GaussianMixture, ScoreSpace, fisher_vector
from thalweg.energies.kernel_machine.features import Fisher
from thalweg.errors import ConfigError, InfeasibleError, NotFittedError, ShapeError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def a_mixture(shape="diagonal"):
    variances = 0.5 + normal(3, 2, seed=1).square()
    covariances = variances if shape == "diagonal" else variances.diag_embed()
    weights = normal(3, seed=3).softmax(0)
    return GaussianMixture(covariance_type=shape, weights=weights, means=normal(3, 2, seed=2), covariances=covariances)


def a_chain():
    emission = GaussianEmission(normal(3, 2, seed=2))
    return HMM(normal(3, seed=3).softmax(0), normal(3, 3, seed=4).softmax(1), emission)


def a_chain_of_symbols():
    moves = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.6, 0.3], [0.0, 0.25, 0.75]], dtype=torch.float64)
    return HMM([0.6, 0.4, 0.0], moves, normal(3, 4, seed=5).softmax(1))


def ragged():
    return [2 * normal(length, 2, seed=10 + place) for place, length in enumerate((4, 1, 6))]


def close(one, other, tolerance=1e-10):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance)


def test_whitening_makes_the_information_one_and_the_kernel_is_its_inner_product():
    model = a_mixture("diagonal")
    sequences, others = [normal(3 + seed % 4, 2, seed=seed) for seed in range(80)], ragged()
    of = ("means", "weights")
    plain = ScoreSpace(model, of=of).fit_transform(sequences)
    diagonal = ScoreSpace(model, of=of, whiten="diagonal").fit(sequences)
    close(diagonal.transform(sequences).square().mean(0), torch.ones(9, dtype=torch.float64))
    close(diagonal.transform(others), ScoreSpace(model, of=of).fit_transform(others) * diagonal.whitening_)

    space = ScoreSpace(model, of=of, whiten="empirical")
    white = space.fit_transform(sequences)
    information = plain.mT @ plain / len(plain)
    # Logits of weights can be shifted together: one direction has no information.
    moments = white.mT @ white / len(white)
    close(torch.linalg.eigvalsh(moments), torch.tensor([0.0] + [1.0] * 8, dtype=torch.float64), 1e-8)
    kernel = Fisher(space)
    inverse = torch.linalg.pinv(information, hermitian=True, rtol=1e-12)
    close(kernel(others, sequences), space.transform(others) @ white.mT)
    close(kernel(sequences), plain @ inverse @ plain.mT, 1e-8)


def test_structural_zeros_stay_zero_when_whitened():
    model = a_chain_of_symbols()
    rolls = model.sample(6, 30, generator=seeded())[1]
    for whiten in ("diagonal", "empirical"):
        found = ScoreSpace(model, of="transitions", whiten=whiten).fit_transform(rolls)
        assert found.isfinite().all()
        assert found[:, 2].abs().max() < 1e-9


def test_fisher_vectors_are_those_of_scikit_image_but_for_a_sign():
    model = a_mixture()
    parameters = [each.detach().numpy() for each in (model.weights_, model.means_, model.covariances_)]
    theirs = np.stack([fisher_vector_from_moments(x.numpy(), *parameters) for x in ragged()])
    ours = fisher_vector(model, [x.numpy() for x in ragged()], improved=False)
    signs = np.r_[np.ones(9), -np.ones(6)]
    np.testing.assert_allclose(ours, signs * theirs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, rtol=1e-9, atol=1e-12)


def test_directions_without_information_stay_so_in_single_precision():
    """Logits of weights, and of a row of transitions, can be shifted together."""
    for model, of, width in ((a_mixture().float(), "weights", 3), (a_chain().float(), "transitions", 9)):
        x = [normal(3 + seed % 4, 2, seed=seed).float() for seed in range(60)]
        white = ScoreSpace(model, of=of, whiten="empirical").fit_transform(x)
        assert white.dtype == torch.float32
        assert white.view(60, -1, 3).sum(2).abs().max() < 1e-4
        assert torch.linalg.matrix_rank(white, rtol=1e-4) == width * 2 // 3


def test_an_array_of_sequences_is_a_list_of_them():
    space = ScoreSpace(a_mixture())
    held = np.empty(3, dtype=object)
    held[:] = [x.numpy() for x in ragged()]
    close(space.fit_transform(held), space.transform(ragged()))


@pytest.mark.parametrize("improved", [False, True])
def test_fisher_vectors_are_those_of_perronnin(improved):
    model = a_mixture("diagonal")
    parameters = [each.detach().numpy() for each in (model.weights_, model.means_, model.covariances_)]
    found = fisher_vector(model, ragged(), improved=improved)
    assert found.shape == (3, 3 + 2 * 6)
    for x, row in zip(ragged(), found, strict=True):
        np.testing.assert_allclose(row, fisher_vector_by_hand(x.numpy(), *parameters, improved), rtol=1e-9, atol=1e-12)


def test_a_pipeline_tells_sequences_of_different_lengths_apart():
    rng = np.random.default_rng(0)
    sequences, labels = [], np.arange(60) % 2
    for label in labels:
        stays, length = (0.9, 0.2)[label], rng.integers(8, 20)
        states = np.cumsum(rng.random(length) > stays) % 2
        sequences.append((4.0 * states + rng.normal(size=length))[:, None])
    lengths = [len(x) for x in sequences]
    model = HMM(n_states=2).fit(np.concatenate(sequences), lengths)
    space = ScoreSpace(model, of=("means", "transitions"), whiten="diagonal", average=True)
    pipeline = make_pipeline(space, StandardScaler(), SVC(kernel="linear"))
    assert pipeline.fit(sequences[:40], labels[:40]).score(sequences[40:], labels[40:]) >= 0.9
    assert cross_val_score(pipeline, sequences, labels, cv=3).mean() >= 0.9
    kernel = Fisher(ScoreSpace(model, of="transitions", whiten="empirical", average=True).fit(sequences[:40]))
    machine = SVC(kernel="precomputed").fit(kernel(sequences[:40]), labels[:40])
    assert machine.score(kernel(sequences[40:], sequences[:40]), labels[40:]) >= 0.9


def test_a_clone_shares_the_model_and_has_yet_to_be_fitted():
    space = ScoreSpace(a_mixture(), of=("weights",), whiten="diagonal").fit(ragged())
    other = clone(space)
    assert other.model is space.model
    assert other.get_params(deep=False) == space.get_params(deep=False)
    with pytest.raises(NotFittedError, match="call `fit` first"):
        other.transform(ragged())
    space.set_params(of=("means",))
    with pytest.raises(ShapeError, match="6 derivatives, whitened were 3; call `fit` again"):
        space.transform(ragged())


def test_bad_input_is_told_in_one_line():
    mixture, chain, x = a_mixture(), a_chain(), ragged()
    symbols = a_chain_of_symbols()
    odd = HMM([1.0], [[1.0]], Poisson(torch.tensor([1.0])))
    broken = [*x[:2], x[2].index_fill(0, torch.tensor([4]), torch.nan)]
    cases = [
        (ShapeError, "sequence 1 is empty, (0, 2); leave it out", lambda: [x[0], x[0][:0]], mixture, {}),
        (ShapeError, "X has 3 features, but the model is expecting 2", lambda: normal(1, 4, 3), mixture, {}),
        (ShapeError, "X has 3 features, but the model is expecting 2", lambda: normal(1, 4, 3), chain, {}),
        (ShapeError, "NaN or infinity at position 4 of sequence 2", lambda: broken, mixture, {}),
        (ShapeError, "NaN or infinity at position 4 of sequence 2", lambda: broken, chain, {}),
        (ShapeError, "must be symbols 0 ... 3, got 7 at position 1", lambda: [[0, 7]], symbols, {"of": "initial"}),
        (NotFittedError, "this GaussianMixture has no parameters yet", lambda: x, GaussianMixture(2), {}),
        (NotFittedError, "this HMM has no parameters yet", lambda: x, HMM(n_states=2), {}),
        (ConfigError, "must be a GaussianMixture or an HMM of thalweg, got SVC", lambda: x, SVC(), {}),
        (ConfigError, "mixture or categorical emissions, got DistributionEmission", lambda: [[1]], odd, {}),
        (
            ConfigError,
            "`of` names `meens`, no parameter of this Gauss.*; did you mean `means`?",
            lambda: x,
            mixture,
            {"of": ("meens",)},
        ),
        (ConfigError, "`of` names `means`, no parameter of this HMM", lambda: [[0]], symbols, {}),
        (ConfigError, "at least one parameter, each once", lambda: x, mixture, {"of": ()}),
        (ConfigError, "at least one parameter, each once", lambda: x, mixture, {"of": ("means", "means")}),
        (ConfigError, "`order` must be 1 or 2, got 3", lambda: x, mixture, {"order": 3}),
        (ConfigError, "must name them, got weights of Gauss", lambda: x, mixture, {"order": 2, "of": "weights"}),
        (ConfigError, "got emissions of HMM; use order 1", lambda: [[0]], symbols, {"order": 2, "of": "emissions"}),
        (ConfigError, "`exact` is of first derivatives", lambda: x, mixture, {"order": 2, "whiten": "exact"}),
        (ConfigError, "not for 3 components in 2 dimensions; use `whiten`", lambda: x, mixture, {"whiten": "exact"}),
        (ConfigError, "not for an HMM of 3 states with Gaussian", lambda: x, chain, {"whiten": "exact"}),
        (
            ConfigError,
            "tell its states, not for an HMM of 3 states with Cat",
            lambda: [[0]],
            symbols,
            {"whiten": "exact", "of": "initial"},
        ),
        (ConfigError, "`whiten` is unknown: 'diag'; did you mean `diagonal`", lambda: x, mixture, {"whiten": "diag"}),
    ]
    for kind, message, data, model, settings in cases:
        with pytest.raises(kind) as raised:
            ScoreSpace(model, **settings).fit(data())
        said = str(raised.value)
        parts = message.split(".*")
        assert all(part in said for part in parts), said
        assert "\n" not in said


def test_bad_lengths_and_impossible_sequences_are_told_of():
    space = ScoreSpace(a_mixture())
    for lengths, message in (([2, 0], "between 1 and T = 4, got 0 for sequence 1"), ([2, 5], "got 5"), ([2], "B = 2")):
        with pytest.raises(ShapeError, match=message):
            space.fit(normal(2, 4, 2), lengths=lengths)
    with pytest.raises(ShapeError, match="sum to the 4 observations"):
        space.fit(normal(4, 2), lengths=[3, 2])
    stuck = HMM([1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(InfeasibleError, match="item 1"):
        ScoreSpace(stuck, of="initial").fit([[0] * 9, [0, 1], [0]])
    with pytest.raises(ConfigError, match="`diagonal` covariances, got `full`"):
        fisher_vector(a_mixture("full"), ragged())
    with pytest.raises(ConfigError, match="need a GaussianMixture, got HMM"):
        fisher_vector(a_chain(), ragged())  # type: ignore[arg-type]


@pytest.mark.parametrize("improved", [False, True])
def test_fisher_vectors_are_those_that_scikit_image_computes(improved):
    feature = pytest.importorskip("skimage.feature", reason="scikit-image is not installed: pip install scikit-image")
    model = a_mixture()
    weights, means, variances = (each.detach().numpy() for each in (model.weights_, model.means_, model.covariances_))
    peer = SklearnMixture(3, covariance_type="diag")
    peer.weights_, peer.means_, peer.covariances_ = weights, means, variances
    peer.precisions_cholesky_ = 1 / np.sqrt(variances)
    theirs = np.stack([feature.fisher_vector(x.numpy(), peer, improved=improved) for x in ragged()])
    ours = fisher_vector(model, [x.numpy() for x in ragged()], improved=improved)
    np.testing.assert_allclose(ours * np.r_[np.ones(9), -np.ones(6)], theirs, rtol=1e-9, atol=1e-12)


def test_a_search_goes_through_orders_and_settings_of_a_pipeline():
    """Classes with the same mean and variances, but coordinates that move together or apart."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    sequences = []
    for label in labels:
        along = (0.8, 0.0, -0.8)[label]
        points = rng.normal(size=(rng.integers(15, 40), 2))
        sequences.append(np.c_[points[:, 0], along * points[:, 0] + np.sqrt(1 - along**2) * points[:, 1]])
    model = GaussianMixture(2, "diagonal", random_state=0).double().fit(np.concatenate(sequences[:40]))
    pipeline = Pipeline([("space", ScoreSpace(model)), ("scale", StandardScaler()), ("svm", SVC(kernel="linear"))])
    grid = {"space__order": [1, 2], "space__average": [False, True], "svm__C": [0.1, 1.0]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(sequences[:40], labels[:40])
    assert search.score(sequences[40:], labels[40:]) >= 0.9
    assert search.best_estimator_["space"].model is model
    assert set(search.cv_results_["param_space__order"]) == {1, 2}


def test_manners_of_a_transformer():
    """What `check_estimator` asks, of an estimator whose X are sequences."""
    space, x = ScoreSpace(a_mixture(), of=("means", "weights"), whiten="diagonal"), ragged()
    settings = space.get_params(deep=False)
    assert space.fit(x) is space
    assert space.get_params(deep=False) == settings
    assert [*inspect.signature(ScoreSpace.__init__).parameters][1:] == list(settings)
    assert space.n_features_in_ == 2
    before = [each.clone() for each in x]
    close(space.fit_transform(x), space.fit(x).transform(x))
    close(ScoreSpace(**settings).fit(x, y=[0, 1, 0]).transform(x), space.transform(x))  # y is not looked at
    assert all(map(torch.equal, before, x))
    close(space.transform(list(reversed(x))), space.transform(x).flip(0))
    again = pickle.loads(pickle.dumps(space))
    close(again.transform(x), space.transform(x))
    assert get_tags(space).transformer_tags is not None
    assert "whiten='diagonal'" in repr(space)
    with pytest.raises(ConfigError, match="`widen` is no setting of ScoreSpace; did you mean `whiten`"):
        space.set_params(widen="none")
