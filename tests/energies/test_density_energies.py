"""Energies of points against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from contracts.gaussian_energy import GaussianEnergy
from oracles import densities as oracle
from thalweg.energies.densities import (
    POINTS,
    MLPEnergy,
    draw_points,
    grid_log_partition,
    grid_points,
)
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError, ShapeError

MEANS, SCALES, WEIGHTS = [[-1.0, 0.5], [1.0, 0.0], [0.0, -2.0]], [0.5, 0.8, 0.3], [0.2, 0.5, 0.3]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def mixture():
    means, scales, weights = (torch.tensor(each, dtype=torch.float64) for each in (MEANS, SCALES, WEIGHTS))
    return GaussianMixture(covariance_type="spherical", weights=weights, means=means, covariances=scales**2)


def test_mixture_density_and_score():
    points = torch.randn(7, 2, dtype=torch.float64, generator=seeded()).requires_grad_()
    energies = mixture()(points)
    (slope,) = torch.autograd.grad(energies.sum(), points)
    arguments = (np.array(MEANS), SCALES, WEIGHTS)
    for point, energy, pull in zip(points.detach().numpy(), energies, slope, strict=True):
        assert math.isclose(energy.item(), -math.log(oracle.mixture_density(point, *arguments)), rel_tol=1e-12)
        assert np.allclose(-pull.numpy(), oracle.mixture_score(point, *arguments))
    shares = mixture().posterior(points.detach())
    assert torch.allclose(shares.sum(1), torch.ones(7, dtype=torch.float64))
    broken = oracle.mixture_density(points[0].detach().numpy(), np.array(MEANS), SCALES, [0.5, 0.2, 0.3])
    assert not math.isclose(energies[0].item(), -math.log(broken), rel_tol=1e-3)


def test_mixture_moments_and_samples():
    energy = mixture()
    points = energy.sample(40_000, generator=seeded())
    assert torch.allclose(points.mean(0), energy.mean(), atol=0.03)
    assert torch.allclose(points.T.cov(), energy.covariance(), atol=0.04)
    assert energy.sample(0).shape == (0, 2)
    assert torch.equal(points, energy.sample(40_000, generator=seeded()))


def test_smoothed_is_the_density_after_noise():
    energy = mixture()
    noisy = energy.sample(40_000, generator=seeded()) + 0.7 * torch.randn(40_000, 2, generator=seeded(1))
    smoothed = energy.smoothed(0.7)
    assert torch.allclose(noisy.T.cov(), smoothed.covariance(), atol=0.05)
    assert torch.allclose(smoothed.covariances_, torch.tensor([0.74, 1.13, 0.58], dtype=torch.float64))
    assert torch.equal(energy.mean(), smoothed.mean())


def test_mixture_is_normalised():
    assert abs(grid_log_partition(mixture(), -7.0, 7.0, 300, dtype=torch.float64).item()) < 1e-6
    single = GaussianMixture(covariance_type="spherical", means=torch.zeros(1, 1), covariances=4.0)
    assert math.isclose(single(torch.zeros(1, 1)).item(), math.log(2.0 * math.sqrt(2 * math.pi)), rel_tol=1e-6)


def test_gaussian_energy():
    precision = np.array([[2.0, 0.5], [0.5, 1.0]])
    energy = GaussianEnergy(torch.tensor([1.0, -1.0], dtype=torch.float64), torch.from_numpy(precision))
    points = torch.randn(4, 2, dtype=torch.float64, generator=seeded())
    expected = [oracle.gaussian_energy(point, np.array([1.0, -1.0]), precision) for point in points.numpy()]
    assert torch.allclose(energy(points), torch.tensor(expected, dtype=torch.float64))
    assert np.allclose(energy.precision.detach().numpy(), precision)
    exact = math.log(2 * math.pi) - 0.5 * math.log(np.linalg.det(precision))
    assert math.isclose(energy.log_partition().item(), exact)
    assert math.isclose(grid_log_partition(energy, -12, 12, 300, dtype=torch.float64).item(), exact, rel_tol=1e-6)


def test_mlp_energy():
    torch.manual_seed(0)
    for size, hidden in ((1, ()), (2, (8,)), (3, (6, 4))):
        energy = MLPEnergy(size, hidden, bowl=0.5).double()
        assert energy(torch.zeros(0, size, dtype=torch.float64)).shape == (0,)
        points = torch.randn(3, size, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, energy=energy: energy(x).sum(), points)
        # However far out, the bowl wins, so that the density can be normalised.
        far = 1e6 * torch.nn.functional.normalize(torch.randn(20, size, dtype=torch.float64))
        assert bool((energy(far) > energy(far / 2)).all())


@pytest.mark.parametrize("name", POINTS)
def test_points(name):
    points = draw_points(name, 5000, generator=seeded())
    assert points.shape == (5000, 2)
    assert points.dtype == torch.float32
    assert torch.equal(points, draw_points(name, 5000, generator=seeded()))
    assert float(points.abs().max()) < 3.2
    assert float(points.mean(0).norm()) < 0.1
    assert draw_points(name, 0).shape == (0, 2)
    assert draw_points(name, 1).shape == (1, 2)


def test_points_are_what_is_said():
    board = draw_points("checkerboard", 5000, generator=seeded())
    cells = ((board + 3) / 1.5).floor().long()
    assert bool(((cells[:, 0] + cells[:, 1]) % 2 == 0).all())
    counts = torch.bincount(4 * cells[:, 1] + cells[:, 0], minlength=16)
    assert sorted(counts.tolist())[:8] == [0] * 8
    assert min(sorted(counts.tolist())[8:]) > 500
    radii = draw_points("rings", 5000, generator=seeded()).norm(dim=1)
    inner = radii < 1.7
    assert abs(float(inner.float().mean()) - 1 / 3.4) < 0.04
    assert abs(float(radii[inner].mean()) - 1) < 0.02
    assert abs(float(radii[~inner].mean()) - 2.4) < 0.02


def test_grid():
    line = grid_points(-1.0, 1.0, 4, 1)
    assert line.flatten().tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert grid_points(0.0, 1.0, 3, 3).shape == (27, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: draw_points("moon", 3), ConfigError, "did you mean `moons`"),
        (lambda: MLPEnergy(0), ConfigError, "`size`"),
        (lambda: MLPEnergy(2)(torch.zeros(3, 4)), ShapeError, r"D = 2, got \(3, 4\)"),
        (lambda: grid_points(1.0, 0.0, 3), ConfigError, "low < high"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
