"""Learning continuous answers: values and gradients by formula, and minima where they are known to be."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from contracts.gaussian_energy import GaussianEnergy
from oracles import densities as oracle
from thalweg.energies.densities import MLPEnergy
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.langevin import langevin
from thalweg.inference.structures.chain import LinearChain
from thalweg.learning.losses import gibbs
from thalweg.learning.losses.densities import (
    PersistentWalks,
    contrastive_divergence,
    denoising_score_matching,
    persistent_contrastive_divergence,
    score_matching,
)

MEAN = np.array([0.5, -1.0, 0.0])
PRECISION = np.array([[2.0, 0.4, 0.0], [0.4, 1.0, -0.3], [0.0, -0.3, 0.7]])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian():
    return GaussianEnergy(torch.from_numpy(MEAN), torch.from_numpy(PRECISION))


def rows(count=6, size=3, seed=0):
    return torch.randn(count, size, dtype=torch.float64, generator=seeded(seed))


def gradients(energy, loss):
    return [g.clone() for g in torch.autograd.grad(loss.mean(), list(energy.parameters()))]


class Bump(torch.nn.Module):
    """A curved energy whose every derivative is easily had."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([0.7, -1.1], dtype=torch.float64))

    def forward(self, x):
        return (self.weights * x).sum(1).sin() + (x[:, 0] * x[:, -1]).square() / 4 + x.square().sum(1) / 2


def plain_bump(x, weights=(0.7, -1.1)):
    return math.sin(weights[0] * x[0] + weights[1] * x[1]) + (x[0] * x[1]) ** 2 / 4 + (x[0] ** 2 + x[1] ** 2) / 2


def test_score_matching_of_a_gaussian():
    data = rows()
    expected = [oracle.gaussian_score_matching(x, MEAN, PRECISION) for x in data.numpy()]
    found = score_matching(gaussian(), data)
    assert found.shape == (6,)
    assert np.allclose(found.detach().numpy(), expected)
    # The broken twin: the trace left out.
    assert not np.allclose(found.detach().numpy(), [e + np.trace(PRECISION) for e in expected])


def test_score_matching_of_a_curved_energy():
    data = rows(size=2)
    expected = [oracle.score_matching_by_differences(plain_bump, x) for x in data.numpy()]
    assert np.allclose(score_matching(Bump(), data).detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("loss", [score_matching, denoising_score_matching])
def test_gradients_in_the_parameters(loss):
    """gradcheck through the second derivatives; randomness is the same in every call."""
    data = rows(3, 2)
    energy = Bump()
    options = {} if loss is score_matching else {"generator": None}
    if loss is denoising_score_matching:
        options["noise"] = 0.3

    def of(weights):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return loss(lambda x: torch.func.functional_call(energy, {"weights": weights}, x), data, **options)

    assert torch.autograd.gradcheck(of, energy.weights)


def test_score_matching_recovers_the_precision():
    """Its minimum over Gaussians is the data's mean and inverse covariance: there the gradient is zero, and
    L-BFGS from elsewhere arrives there."""
    data = rows(30, 2, seed=1) @ torch.tensor([[1.0, 0.3], [0.0, 0.6]], dtype=torch.float64) + 2
    covariance = data.T.cov(correction=0)
    there = GaussianEnergy(data.mean(0), covariance.inverse())
    assert all(float(g.abs().max()) < 1e-10 for g in gradients(there, score_matching(there, data)))
    energy = GaussianEnergy(torch.zeros(2, dtype=torch.float64))
    descend = torch.optim.LBFGS(energy.parameters(), max_iter=60, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        descend.zero_grad()
        loss = score_matching(energy, data).mean()
        loss.backward()
        return loss

    descend.step(closure)
    assert torch.allclose(energy.precision, covariance.inverse(), atol=1e-5)
    assert torch.allclose(energy.mean, data.mean(0), atol=1e-5)


@pytest.mark.parametrize("levels", [0.4, torch.tensor([0.1, 0.4, 1.0, 2.0])])
def test_denoising_is_the_formula(levels):
    data = rows(4)
    found = denoising_score_matching(gaussian(), data, noise=levels, generator=seeded(4)).detach().numpy()
    shakes = torch.randn(4, 3, dtype=torch.float64, generator=seeded(4)).numpy()
    each = [levels] * 4 if isinstance(levels, float) else levels.double().tolist()
    expected = [
        oracle.gaussian_denoising(x, MEAN, PRECISION, sigma, shake)
        for x, sigma, shake in zip(data.numpy(), each, shakes, strict=True)
    ]
    assert np.allclose(found, expected)


def test_denoising_finds_the_smoothed_density():
    """Gaussian: the gradient vanishes at (covariance + sigma^2 I)^-1 and not at the inverse covariance. Noise comes in
    all sign patterns of a design with exact second moments, so nothing is left to chance."""
    data = rows(40, 2, seed=5)
    covariance, sigma = data.T.cov(correction=0), 0.8
    smoothed = (covariance + sigma**2 * torch.eye(2, dtype=torch.float64)).inverse()
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)

    def gradient(precision):
        energy = GaussianEnergy(data.mean(0), precision)
        loss = torch.stack([fixed_denoising(energy, data, sigma, shake) for shake in signs])
        return max(float(g.abs().max()) for g in gradients(energy, loss))

    assert gradient(smoothed) < 1e-10
    assert gradient(covariance.inverse()) > 0.1


def fixed_denoising(energy, data, sigma, shake):
    """The loss with noise that is given: torch.randn is replaced, so the code under test is the library's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda shape, **options: shake.expand(shape))
        return denoising_score_matching(energy, data, noise=sigma)


def test_denoising_of_a_mixture_is_least_at_the_smoothed_mixture():
    mixture = GaussianMixture(
        covariance_type="spherical", means=torch.tensor([[-1.0], [1.0]], dtype=torch.float64), covariances=0.09
    )
    data = mixture.sample(20_000, generator=seeded(6))
    losses = {
        name: denoising_score_matching(energy, data, noise=0.5, generator=seeded(7)).detach()
        for name, energy in {
            "smoothed": mixture.smoothed(0.5), "itself": mixture, "smoother": mixture.smoothed(0.9),
        }.items()
    }  # fmt: skip
    for other in ("itself", "smoother"):
        difference = losses[other] - losses["smoothed"]
        assert float(difference.mean()) > 5 * float(difference.std()) / math.sqrt(len(data))


def test_contrastive_divergence_pushes_data_down_and_walks_up():
    data = rows()
    energy = gaussian()
    loss = contrastive_divergence(energy, data, steps=3, step_size=0.1, generator=seeded(8))
    walked = langevin(energy, data, steps=3, step_size=0.1, generator=seeded(8)).state
    assert torch.allclose(loss, energy(data) - energy(walked))
    expected = gradients(energy, energy(data) - energy(walked.clone()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(energy, loss), expected, strict=True))
    held = contrastive_divergence(energy, data, steps=3, step_size=0.1, magnitude=0.2, generator=seeded(8))
    assert torch.allclose(held, loss + 0.2 * (energy(data).square() + energy(walked).square()))


@pytest.mark.parametrize("steps", [1, 4])
def test_contrastive_divergence_has_its_known_fixed_point(steps):
    """Unadjusted walks: the expected gradient vanishes at a (1 - eta a / 2) = 1 / variance, for every k."""
    variance, step, count = 4.0, 0.5, 40_000
    data = math.sqrt(variance) * torch.randn(count, 1, dtype=torch.float64, generator=seeded(9))

    def slope(precision):
        energy = GaussianEnergy(torch.zeros(1, dtype=torch.float64), torch.tensor([[precision]], dtype=torch.float64))
        walked = langevin(energy, data, steps=steps, step_size=step, generator=seeded(10)).state
        each = (data.square() - walked.square()) / 2  # the gradient in the precision, item by item
        loss = contrastive_divergence(energy, data, steps=steps, step_size=step, generator=seeded(10))
        (found,) = torch.autograd.grad(loss.mean(), energy.factor)
        assert math.isclose(float(found), 2 * math.sqrt(precision) * float(each.mean()), rel_tol=1e-9, abs_tol=1e-12)
        return float(each.mean()) / (float(each.std()) / math.sqrt(count))

    there = oracle.langevin_precision(variance, step)
    assert math.isclose(oracle.langevin_variance(there, step), variance)
    assert abs(slope(there)) < 5
    assert slope(there * 1.2) > 5  # too steep: the data are pushed down, so the bowl widens
    assert slope(there * 0.8) < -5


def test_adjusted_contrastive_divergence_is_right_at_the_truth():
    data = 2 * torch.randn(40_000, 1, dtype=torch.float64, generator=seeded(11))
    energy = GaussianEnergy(torch.zeros(1, dtype=torch.float64), torch.tensor([[0.25]], dtype=torch.float64))
    walked = langevin(energy, data, steps=2, step_size=2.0, adjust=True, generator=seeded(12)).state
    each = (data.square() - walked.square()) / 2
    assert abs(float(each.mean())) < 5 * float(each.std()) / math.sqrt(len(each))


def test_persistent_walks_reach_what_walks_from_the_data_do_not():
    """A false valley far from the data: CD never sees it, persistent walks that restart anywhere do."""
    energy = GaussianMixture(covariance_type="spherical", means=torch.tensor([[0.0], [6.0]]), covariances=0.25)
    data = 0.5 * torch.randn(200, 1, generator=seeded())
    near = langevin(energy, data, steps=20, step_size=0.05, generator=seeded(1)).state
    assert float(near.max()) < 3
    fresh = lambda n, g: 16 * torch.rand(n, 1, generator=g) - 8  # noqa: E731
    walks = PersistentWalks(fresh, size=500, restart=0.1, generator=seeded(2))
    for _ in range(20):
        loss = persistent_contrastive_divergence(energy, data, walks, steps=20, step_size=0.05, generator=seeded(3))
    assert loss.shape == (200,)
    assert float((walks.states > 3).float().mean()) > 0.2


def test_persistent_walks_go_on():
    energy = gaussian()
    walks = PersistentWalks(
        lambda n, g: torch.zeros(n, 3, dtype=torch.float64), size=6, restart=0.0, generator=seeded()
    )
    data = rows()
    before = walks.states.clone()
    loss = persistent_contrastive_divergence(energy, data, walks, steps=2, step_size=0.1, generator=seeded(1))
    assert torch.allclose(loss.sum(), energy(data).sum() - energy(walks.states).sum())
    assert not bool((walks.states == before).any())
    saved = walks.state_dict()
    persistent_contrastive_divergence(energy, data, walks, steps=2, step_size=0.1, generator=seeded(2))
    moved = walks.states.clone()
    assert not torch.equal(moved, saved["states"])
    walks.load_state_dict(saved)
    assert torch.equal(walks.states, saved["states"])


def test_restarts_and_rows():
    fresh = lambda n, g: torch.full((n, 1), 7.0)  # noqa: E731
    walks = PersistentWalks(fresh, size=1000, restart=0.3, generator=seeded())
    walks.states.zero_()
    rows, states = walks.take(1000)
    assert sorted(rows.tolist()) == list(range(1000))
    assert abs(float((states == 7).float().mean()) - 0.3) < 5 * math.sqrt(0.21 / 1000)
    assert walks.take(2500)[1].shape == (2500, 1)
    assert walks.take(0)[1].shape == (0, 1)
    assert PersistentWalks(fresh, size=3, restart=1.0).take(3)[1].tolist() == [[7.0]] * 3


def test_edges():
    for shape in ((0, 2), (1, 1), (2, 2, 3)):
        data = torch.randn(shape)
        energy = lambda x: x.square().flatten(1).sum(1)  # noqa: E731
        for loss in (
            score_matching(energy, data),
            denoising_score_matching(energy, data, noise=0.1),
            contrastive_divergence(energy, data, step_size=0.1),
        ):
            assert loss.shape == shape[:1]
    slope = torch.tensor([2.0, 1.0], requires_grad=True)
    linear = score_matching(lambda x: x @ slope, torch.zeros(3, 2))
    assert torch.allclose(linear, torch.tensor(2.5))  # no curvature at all
    assert torch.autograd.grad(linear.sum(), slope)[0].tolist() == [6.0, 3.0]
    level = torch.tensor(1.0, requires_grad=True)
    assert score_matching(lambda x: level.expand(len(x)), torch.zeros(3, 2)).tolist() == [0.0] * 3


def test_without_gradients_there_is_no_graph():
    data = torch.randn(3, 2)
    with torch.no_grad():
        assert not score_matching(MLPEnergy(2, (4,)), data).requires_grad
        assert not denoising_score_matching(MLPEnergy(2, (4,)), data, noise=0.1).requires_grad
    assert data.grad is None


def test_batch_is_a_loop():
    torch.manual_seed(0)
    energy, data = MLPEnergy(3, (8,)).double(), rows()
    whole = score_matching(energy, data)
    single = torch.cat([score_matching(energy, data[b : b + 1]) for b in range(len(data))])
    assert torch.allclose(whole, single)
    assert torch.allclose(score_matching(energy, data.flip(0)).flip(0), whole)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: score_matching(lambda x: x.sum(1), torch.zeros(3)), ShapeError, r"give numbers as \(B, 1\)"),
        (lambda: score_matching(lambda x: x, torch.zeros(3, 1)), ShapeError, r"got \(3, 1\)"),
        (lambda: denoising_score_matching(lambda x: x.sum(1), torch.zeros(3, 1), noise=0.0), ConfigError, "`noise`"),
        (
            lambda: denoising_score_matching(lambda x: x.sum(1), torch.zeros(3, 1), noise=torch.ones(2)),
            ShapeError,
            r"\(B,\) = \(3,\), got \(2,\)",
        ),
        (
            lambda: contrastive_divergence(lambda x: x.sum(1), torch.zeros(3, 1), steps=0, step_size=0.1),
            ConfigError,
            "teaches nothing",
        ),
        (
            lambda: contrastive_divergence(lambda x: x.sum(1), torch.zeros(3, 1), step_size=0.1, magnitude=-1.0),
            ConfigError,
            "`magnitude`",
        ),
        (lambda: PersistentWalks(lambda n, g: torch.zeros(n, 1), restart=2.0), ConfigError, "`restart`"),
        (lambda: PersistentWalks(lambda n, g: torch.zeros(1, 1), size=2), ShapeError, "`fresh`"),
        (
            lambda: persistent_contrastive_divergence(
                lambda x: x.sum(1), torch.zeros(3, 2), PersistentWalks(lambda n, g: torch.zeros(n, 1)), step_size=0.1
            ),
            ShapeError,
            "`walks` must hold",
        ),
        (
            lambda: PersistentWalks(lambda n, g: torch.zeros(n, 1), size=2).load_state_dict(
                {"states": torch.zeros(3, 1)}
            ),
            ShapeError,
            "`states`",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_e4_sampling_gives_the_gradient_of_the_intractable_sum():
    """d log Z = -<dE>: adjusted Langevin samples estimate what the Gaussian's log Z says exactly."""
    energy = GaussianEnergy(torch.zeros(1, dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64))
    (exact,) = torch.autograd.grad(energy.log_partition(), energy.factor)
    start = torch.randn(20_000, 1, dtype=torch.float64, generator=seeded(13)) / math.sqrt(2)
    samples = langevin(energy, start, steps=10, step_size=0.3, adjust=True, generator=seeded(14)).state
    slopes = -samples.square() * energy.factor.detach()  # -dE / d factor, of each sample
    error = float(slopes.std()) / math.sqrt(len(slopes))
    assert abs(float(slopes.mean()) - float(exact)) < 5 * error


def test_e4_structure_computes_the_intractable_sum():
    """The sum over all label paths of a chain, by dynamic programming and by listing them."""
    emissions = rows(4, 3, seed=15)
    transitions = rows(3, 3, seed=16)
    chain = LinearChain(emissions.unsqueeze(0), transitions)
    scores = [
        sum(float(emissions[t, y]) for t, y in enumerate(path))
        + sum(float(transitions[i, j]) for i, j in itertools.pairwise(path))
        for path in itertools.product(range(3), repeat=4)
    ]
    assert math.isclose(float(chain.log_partition), math.log(math.fsum(map(math.exp, scores))), rel_tol=1e-9)


def test_e4_variational_bounds_lie_below_the_intractable_sum():
    """<-E>_q + H(q) <= log sum exp(-E) for every q, with equality at the Gibbs distribution."""
    energies = rows(5, 7, seed=17)
    exact = (-energies).logsumexp(dim=1)

    def bound(q):
        return -(q * energies).sum(dim=1) + torch.special.entr(q).sum(dim=1)

    for seed in range(20):
        q = rows(5, 7, seed=100 + seed).mul(3).softmax(dim=1)
        assert bool((bound(q) < exact).all())
        gap = (q * (q.log() - (-energies).log_softmax(dim=1))).sum(dim=1)
        assert torch.allclose(exact - bound(q), gap)  # the gap is KL(q || P)
    assert torch.allclose(bound(gibbs(energies)), exact)
