"""Mixtures of Gaussians as energies: densities, bounds, samples, gradients, what is refused."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone

from oracles import mixtures as oracle
from thalweg.energies import GaussianMixture
from thalweg.energies.densities import grid_log_partition
from thalweg.errors import ConfigError, NotFittedError, ShapeError
from thalweg.learning.losses.densities import (
    contrastive_divergence,
    denoising_score_matching,
    score_matching,
)

SHAPES = ("full", "tied", "diagonal", "spherical")
WEIGHTS = np.array([0.2, 0.5, 0.3])
MEANS = np.array([[-1.0, 0.5], [1.0, 0.0], [0.0, -2.0]])
MATRICES = np.array([[[0.5, 0.2], [0.2, 0.3]], [[1.0, -0.4], [-0.4, 0.8]], [[0.3, 0.0], [0.0, 0.6]]])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def covariances(shape):
    diagonals = MATRICES.diagonal(axis1=1, axis2=2)
    return {"full": MATRICES, "tied": MATRICES[0], "diagonal": diagonals, "spherical": diagonals[:, 0]}[shape]


def matrices(shape):
    """The same as three matrices."""
    given = covariances(shape)
    each = {"full": lambda k: given[k], "tied": lambda k: given, "diagonal": lambda k: np.diag(given[k]),
            "spherical": lambda k: given[k] * np.eye(2)}[shape]  # fmt: skip
    return np.array([each(k) for k in range(3)])


def mixture(shape="full", **settings):
    return GaussianMixture(
        covariance_type=shape, weights=WEIGHTS, means=MEANS, covariances=covariances(shape), **settings
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_density_posterior_and_joint(shape):
    model = mixture(shape)
    points = torch.randn(4, 2, 2, dtype=torch.float64, generator=seeded())
    expected = np.array([[oracle.joint(x, WEIGHTS, MEANS, matrices(shape)) for x in row] for row in points.numpy()])
    assert np.allclose(model.joint(points).detach(), -expected, atol=1e-12)
    total = np.log(np.exp(expected).sum(axis=-1))
    for found in (model(points), model.free_energy(points)):
        assert np.allclose(found.detach(), -total, atol=1e-12)
    assert np.allclose(model.posterior(points).detach(), np.exp(expected - total[..., None]), atol=1e-12)
    z = torch.randint(3, (4, 2), generator=seeded(1))
    picked = np.take_along_axis(expected, z.numpy()[..., None], axis=-1)[..., 0]
    assert np.allclose(model.energy(points, z).detach(), -picked, atol=1e-12)
    wrong = np.array(oracle.joint(points[0, 0].numpy(), WEIGHTS, MEANS + 0.01, matrices(shape)))
    assert not np.allclose(model.joint(points[0, 0]).detach(), -wrong, atol=1e-4)
    assert model(points[:0]).shape == (0, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_normalised_and_has_its_moments(shape):
    model = mixture(shape)
    assert abs(grid_log_partition(model, -9.0, 9.0, 300, dtype=torch.float64).item()) < 1e-6
    assert np.allclose(model.covariances_.detach(), covariances(shape))
    assert np.allclose(model.weights_.detach(), WEIGHTS)
    points = model.sample(40_000, generator=seeded())
    assert torch.allclose(points.mean(0), model.mean(), atol=0.03)
    assert torch.allclose(points.T.cov(), model.covariance(), atol=0.05)
    centred = MEANS - WEIGHTS @ MEANS
    exact = np.einsum("n,nij->ij", WEIGHTS, matrices(shape)) + (WEIGHTS * centred.T) @ centred
    assert np.allclose(model.covariance(), exact)
    smoothed = model.smoothed(0.7)
    assert torch.allclose(smoothed.covariance(), model.covariance() + 0.49 * torch.eye(2, dtype=torch.float64))
    assert torch.equal(model.sample(5, generator=seeded()), model.sample(5, generator=seeded()))
    assert model.sample(0).shape == (0, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_points_and_parameters(shape):
    model = mixture(shape)
    points = torch.randn(3, 2, dtype=torch.float64, generator=seeded(), requires_grad=True)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["logits_", "means_", "factors_"]

    def energies(points, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (points,))

    values = [each.detach().clone().requires_grad_() for each in model.parameters()]
    assert torch.autograd.gradcheck(energies, (points, *values))
    assert torch.autograd.gradgradcheck(lambda x: model(x), points)


def test_v1_the_bound_is_below_the_likelihood_and_off_by_the_divergence_from_the_posterior():
    """<log p(x, z) / q>_q <= log p(x), equal where q is the posterior; the gap is KL(q || p(z | x))."""
    for shape in SHAPES:
        model = mixture(shape)
        points = 2 * torch.randn(50, 2, dtype=torch.float64, generator=seeded())
        posterior, likelihood = model.posterior(points), -model.free_energy(points)
        q = torch.rand(50, 3, dtype=torch.float64, generator=seeded(1)).softmax(dim=1)
        bounds = {}
        for name, each in (("other", q), ("posterior", posterior)):
            energies = torch.stack([model.energy(points, torch.full((50,), z)) for z in range(3)], dim=1)
            bounds[name] = (each * (-energies - each.log())).sum(dim=1)
        divergence = (q * (q.log() - posterior.log())).sum(dim=1)
        assert bool((bounds["other"] < likelihood).all())
        assert float((bounds["posterior"] - likelihood).detach().abs().max()) < 1e-8
        assert float((likelihood - bounds["other"] - divergence).detach().abs().max()) < 1e-8


def test_gradient_descent_finds_what_em_finds():
    data = mixture().sample(400, generator=seeded(2))
    start = mixture("full").state_dict()
    fitted = mixture(tol=1e-10, max_iter=2000).fit(data)
    trained = mixture()
    assert all(torch.equal(start[name], value) for name, value in trained.state_dict().items())
    optimiser = torch.optim.LBFGS(trained.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = trained(data).mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert math.isclose(trained.score(data), fitted.score(data), abs_tol=1e-6)
    assert torch.allclose(trained.means_, fitted.means_, atol=1e-3)
    assert torch.allclose(trained.covariances_, fitted.covariances_, atol=1e-3)


@pytest.mark.parametrize("loss", [
    score_matching,
    lambda energy, data: denoising_score_matching(energy, data, noise=0.3, generator=seeded()),
    lambda energy, data: contrastive_divergence(energy, data, step_size=0.1, generator=seeded()),
    lambda energy, data: energy(data),
])  # fmt: skip
def test_losses_of_energies_take_it(loss):
    model = mixture()
    data = model.sample(30, generator=seeded(3))
    each = loss(model, data)
    assert each.shape == (30,)
    each.mean().backward()
    assert all(bool(value.grad.isfinite().all()) for value in model.parameters())


def test_score_matching_alone_trains_it():
    truth = GaussianMixture(covariance_type="spherical", means=[[-2.0], [2.0]], covariances=0.5)
    data = truth.sample(3000, generator=seeded(4))
    model = GaussianMixture(covariance_type="spherical", means=[[-1.0], [1.5]], covariances=1.0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        score_matching(model, data).mean().backward()
        optimiser.step()
    assert torch.allclose(model.means_.detach(), torch.tensor([[-2.0], [2.0]]), atol=0.1)
    assert torch.allclose(model.covariances_.detach(), torch.tensor([0.5, 0.5]), atol=0.1)


def test_in_place_where_it_fits():
    """An optimiser made before `fit` keeps its hold of the parameters."""
    model = mixture()
    before = list(model.parameters())
    model.fit(model.sample(100, generator=seeded()))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_given_is_the_model_and_survives_copies():
    model = mixture()
    points = np.array([[0.3, -0.2]])
    for other in (clone(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(other.score_samples(points), model.score_samples(points))
    assert repr(model) == "GaussianMixture(weights=<array 3>, means=<array 3x2>, covariances=<array 3x2x2>)"
    half = model.float()
    assert half(torch.zeros(1, 2)).dtype is torch.float32
    model.set_params(means=MEANS + 1)
    assert np.allclose(model.means_.detach(), MEANS + 1)
    loaded = mixture("full")
    loaded.load_state_dict(model.state_dict())
    assert np.allclose(loaded.means_.detach(), MEANS + 1)


def test_answers_come_as_the_question():
    model = mixture()
    points = np.random.default_rng(0).normal(size=(6, 2))
    for X in (points, points.astype(np.float32), points.tolist()):
        assert all(isinstance(ask(X), np.ndarray) for ask in (model.predict, model.predict_proba, model.score_samples))
    tensor = torch.from_numpy(points)
    assert torch.equal(model.predict(tensor), torch.from_numpy(model.predict(points)))
    assert np.array_equal(model.predict_proba(points).argmax(1), model.predict(points))
    assert not model.score_samples(tensor).requires_grad
    assert math.isclose(model.score(points), float(model.score_samples(points).mean()))


def test_criteria_count_free_numbers():
    points = np.random.default_rng(0).normal(size=(10, 2))
    for shape, free in zip(SHAPES, (17, 11, 14, 11), strict=True):
        model = mixture(shape)
        assert model.n_parameters() == free
        total = float(model.score_samples(points).sum())
        assert math.isclose(model.bic(points), -2 * total + free * math.log(10))
        assert math.isclose(model.aic(points), -2 * total + 2 * free)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"means": torch.zeros(2), "covariances": 1.0}, ShapeError, r"`means` must be \(N, D\), got \(2,\)"),
        ({"means": torch.zeros(2, 1), "covariances": 0.0}, ConfigError, "above 0"),
        ({"means": torch.zeros(2, 1), "covariances": 1.0, "weights": torch.ones(3)}, ShapeError, "N = 2, got"),
        ({"means": torch.zeros(2, 1), "covariances": 1.0, "weights": [-1.0, 2.0]}, ConfigError, "`weights`.* above 0"),
        ({"n_components": 3, "means": torch.zeros(2, 1), "covariances": 1.0}, ShapeError, "N = 3 as in `n_components`"),
        ({"means": torch.zeros(2, 1), "covariances": torch.ones(3)}, ShapeError, r"`covariances` must be \(N,\)"),
        ({"means": [[math.nan]], "covariances": 1.0}, ShapeError, "`means` must be finite"),
        ({"means": [["a"]], "covariances": 1.0}, ShapeError, "`means` must be numbers"),
        ({"means": torch.zeros(1, 1), "covariances": 1.0, "covariance_type": "diag"}, ConfigError, "`diagonal`"),
        (
            {"means": torch.zeros(1, 2), "covariances": [[[1.0, 2.0], [2.0, 1.0]]], "covariance_type": "full"},
            ConfigError,
            "positive definite",
        ),
        (
            {"means": torch.zeros(1, 2), "covariances": [[1.0, 0.5], [0.0, 1.0]], "covariance_type": "tied"},
            ConfigError,
            "symmetric",
        ),
    ],
)
def test_parameters_that_are_refused(settings, error, message):
    with pytest.raises(error, match=message) as caught:
        GaussianMixture(**{"covariance_type": "spherical"} | settings)
    assert "\n" not in str(caught.value)


def test_wrong_points_are_refused():
    with pytest.raises(ShapeError, match=r"D = 2, got \(3,\)"):
        mixture()(torch.zeros(3))
    with pytest.raises(ShapeError, match="int64"):
        mixture()(torch.zeros(1, 2, dtype=torch.int64))
    for ask in (lambda m: m(torch.zeros(1, 2)), lambda m: m.sample(3), lambda m: m.mean(), lambda m: m.predict([[1]])):
        with pytest.raises(NotFittedError, match="call `fit` first"):
            ask(GaussianMixture(2))
