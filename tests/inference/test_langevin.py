"""Langevin walks against densities whose moments are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from contracts.gaussian_energy import GaussianEnergy
from oracles import densities as oracle
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.langevin import DivergedError, langevin


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def bowl(precision):
    return lambda x: precision * x.square().flatten(1).sum(dim=1) / 2


def variance_bound(variance, count):
    """Five standard errors of a Gaussian's sample variance."""
    return 5 * variance * math.sqrt(2 / count)


@pytest.mark.parametrize("step", [0.02, 0.3])
@pytest.mark.parametrize("adjust", [False, True])
def test_variance_of_a_gaussian(step, adjust):
    precision, count = 2.0, 20_000
    start = torch.randn(count, 1, generator=seeded(9), dtype=torch.float64) / precision**0.5
    walk = langevin(bowl(precision), start, steps=int(3 / step), step_size=step, adjust=adjust, generator=seeded())
    expected = 1 / precision if adjust else oracle.langevin_variance(precision, step)
    bound = variance_bound(expected, count)
    assert abs(float(walk.state.mean())) < 5 * math.sqrt(expected / count)
    assert abs(float(walk.state.var()) - expected) < bound
    # The bias of the long unadjusted step is what the adjustment removes: it is seen, not lost in the error.
    if step == 0.3:
        other = oracle.langevin_variance(precision, step) if adjust else 1 / precision
        assert abs(float(walk.state.var()) - other) > bound
        assert bool((walk.accepted < 1).any()) == adjust


def test_a_walk_without_the_way_back_is_found_out():
    """The broken twin: Metropolis with the ratio of energies alone is not exact, and the bound above sees it."""
    precision, count, step, generator = 2.0, 20_000, 0.3, seeded()
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64) / precision**0.5
    energy = bowl(precision)
    for _ in range(30):
        proposal = x - step * precision * x + (2 * step) ** 0.5 * torch.randn(x.shape, generator=generator).double()
        moves = torch.rand(count, generator=generator).log() < energy(x) - energy(proposal)
        x = torch.where(moves.unsqueeze(1), proposal, x)
    assert abs(float(x.var()) - 1 / precision) > variance_bound(1 / precision, count)


@pytest.mark.parametrize("noise", [0.3, 0.8])
@pytest.mark.parametrize("adjust", [False, True])
def test_noise_sets_the_temperature(noise, adjust):
    count, step, precision = 20_000, 0.05, 3.0
    beta = 2 * step / noise**2
    walk = langevin(
        bowl(precision), torch.zeros(count, 1, dtype=torch.float64), steps=80, step_size=step, noise=noise,
        adjust=adjust, generator=seeded(1),
    )  # fmt: skip
    biased = noise**2 / (1 - (1 - step * precision) ** 2)
    expected = 1 / (beta * precision) if adjust else biased
    assert abs(float(walk.state.var()) - expected) < variance_bound(expected, count)


def test_correlated_gaussian():
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
    energy = GaussianEnergy(mean, covariance.inverse())
    walk = langevin(energy, mean.repeat(10_000, 1), steps=60, step_size=0.2, adjust=True, generator=seeded())
    assert torch.allclose(walk.state.mean(0), mean, atol=0.06)
    assert torch.allclose(walk.state.T.cov(), covariance, atol=0.08)
    assert 0.5 < float(walk.accepted.mean()) < 0.99


def test_mixture_keeps_its_weights_and_histogram():
    """An adjusted walk that begins in the density stays in it: cell by cell, within five standard errors."""
    of = ([[-1.0], [1.2]], [0.5, 0.3], [0.3, 0.7])
    means, scales, weights = (torch.tensor(each, dtype=torch.float64) for each in of)
    mixture = GaussianMixture(covariance_type="spherical", weights=weights, means=means, covariances=scales**2)
    start = mixture.sample(20_000, generator=seeded(3))
    fine = torch.linspace(-2.5, 2.5, 20 * 50 + 1, dtype=torch.float64)
    mass = (-mixture((fine[:-1] + fine[1:]).unsqueeze(1) / 2)).exp() * (fine[1] - fine[0])
    expected = mass.view(20, 50).sum(1).detach()
    oracle_mass = oracle.mixture_density(np.array([0.3]), *of)
    assert math.isclose((-mixture(torch.tensor([[0.3]], dtype=torch.float64))).exp().item(), oracle_mass)

    def errors(states):
        found = torch.histc(states, 20, -2.5, 2.5) / len(states)
        return ((found - expected) / (expected * (1 - expected) / len(states)).sqrt()).abs()

    options = {"steps": 40, "step_size": 0.15, "generator": seeded(4)}
    exact = langevin(mixture, start, adjust=True, **options)
    assert float(errors(exact.state).max()) < 5
    biased = langevin(mixture, start, adjust=False, **options)
    assert float(errors(biased.state).max()) > 5  # the check can fail


def test_without_noise_it_is_descent():
    walk = langevin(bowl(1.0), torch.tensor([[4.0], [-2.0]]), steps=3, step_size=0.5, noise=0.0, trace=1)
    assert walk.trace is not None
    assert walk.trace.squeeze(2).tolist() == [[4.0, -2.0], [2.0, -1.0], [1.0, -0.5], [0.5, -0.25]]
    assert walk.accepted.tolist() == [1.0, 1.0]


def test_one_unadjusted_step_by_hand():
    start = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    walk = langevin(bowl(3.0), start, steps=1, step_size=0.1, generator=seeded(5))
    shake = torch.randn(1, 2, generator=seeded(5), dtype=torch.float64)
    assert torch.allclose(walk.state, start - 0.1 * 3 * start + math.sqrt(0.2) * shake)


@pytest.mark.parametrize("adjust", [False, True])
def test_same_generator_same_walk_and_trace(adjust):
    start = torch.randn(5, 3, 2, generator=seeded(2))
    kept = start.clone()
    options = {"steps": 7, "step_size": 0.1, "adjust": adjust}
    first, again = (langevin(bowl(1.0), start, trace=3, generator=seeded(6), **options) for _ in range(2))
    assert torch.equal(first.state, again.state)
    assert first.trace is not None
    assert first.trace.shape == (3, 5, 3, 2)  # the start, steps 3 and 6
    assert torch.equal(first.trace[0], start)
    assert torch.equal(start, kept)
    short = langevin(bowl(1.0), start, generator=seeded(6), **{**options, "steps": 6})
    assert torch.equal(first.trace[2], short.state)
    assert short.trace is None
    other = langevin(bowl(1.0), start, generator=seeded(7), **options)
    assert not torch.equal(first.state, other.state)


def test_rows_do_not_meet():
    """A row's energy does not change what another row does."""
    start = torch.zeros(2, 1)
    scales = torch.tensor([1.0, 1.0])

    def run(s):
        energy = lambda x: s * x.square().sum(1)  # noqa: E731
        return langevin(energy, start, steps=10, step_size=0.1, adjust=True, generator=seeded()).state

    assert torch.equal(run(scales)[0], run(torch.tensor([1.0, 9.0]))[0])


def test_edges():
    for shape in ((0, 2), (1, 1), (3, 1)):
        for adjust in (False, True):
            walk = langevin(bowl(1.0), torch.zeros(shape), steps=2, step_size=0.1, adjust=adjust, trace=1)
            assert walk.state.shape == shape
            assert walk.trace is not None
            assert walk.trace.shape == (3, *shape)
    still = langevin(bowl(1.0), torch.ones(2, 1), steps=0, step_size=0.1, adjust=True, trace=1)
    assert still.state.tolist() == [[1.0], [1.0]]
    assert still.accepted.tolist() == [1.0, 1.0]


def test_parameters_and_modes_are_left_alone():
    energy = GaussianEnergy(torch.zeros(2))
    start = torch.ones(3, 2, requires_grad=True)
    with torch.no_grad():
        walk = langevin(energy, start, steps=3, step_size=0.1)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        langevin(energy, torch.ones(3, 2), steps=3, step_size=0.1, adjust=True)
    assert not walk.state.requires_grad
    assert start.grad is None
    assert all(parameter.grad is None for parameter in energy.parameters())


def test_flat_energy_is_a_random_walk():
    level = torch.tensor(1.0, requires_grad=True)
    walk = langevin(lambda x: level.expand(len(x)), torch.zeros(20_000, 1), steps=4, step_size=0.5, generator=seeded())
    assert abs(float(walk.state.var()) - 4.0) < variance_bound(4.0, 20_000)


def test_walls_are_not_crossed():
    """E = +inf left of 0: an adjusted walk samples the half Gaussian, whose mean is sqrt(2 / pi)."""
    wall = lambda x: (x.square() / 2).masked_fill(x < 0, torch.inf).sum(1)  # noqa: E731
    start = torch.randn(20_000, 1, generator=seeded(8)).abs()
    walk = langevin(wall, start, steps=60, step_size=0.2, adjust=True, generator=seeded())
    assert bool((walk.state >= 0).all())
    assert abs(float(walk.state.mean()) - math.sqrt(2 / math.pi)) < 5 * math.sqrt((1 - 2 / math.pi) / 20_000)


def test_half_precision_walks_in_float32():
    seen = []

    def energy(x):
        seen.append(x.dtype)
        return x.square().sum(1)

    walk = langevin(energy, torch.ones(4, 2, dtype=torch.bfloat16), steps=500, step_size=1e-4, noise=0.0)
    assert set(seen) == {torch.bfloat16}
    assert walk.state.dtype == torch.bfloat16
    # Each step is 2e-4, below what bfloat16 can take from 1: it would stand still.
    assert torch.allclose(walk.state.float(), torch.tensor(math.exp(-0.1)), atol=4e-3)


def test_clip_bounds_the_step():
    walk = langevin(bowl(100.0), torch.tensor([[30.0, 40.0], [0.01, 0.0]]), steps=1, step_size=1.0, noise=0.0, clip=5.0)
    assert torch.allclose(walk.state, torch.tensor([[27.0, 36.0], [0.01 - 1.0, 0.0]]))


def test_too_long_steps_are_named():
    with pytest.raises(DivergedError, match=r"walk 1 left the finite numbers.*step_size below 3"):
        langevin(bowl(1.0), torch.tensor([[0.0], [1.0]]), steps=300, step_size=3.0, noise=0.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"start": torch.zeros(3)}, ShapeError, r"give numbers as \(B, 1\)"),
        ({"start": torch.zeros(3, 1, dtype=torch.long)}, ShapeError, "floating point"),
        ({"energy": lambda x: x}, ShapeError, r"`energy` must give \(B,\) = \(3,\), got \(3, 1\)"),
        ({"steps": -1}, ConfigError, "`steps`"),
        ({"step_size": 0.0}, ConfigError, "`step_size`"),
        ({"noise": -1.0}, ConfigError, "`noise`"),
        ({"noise": 0.0, "adjust": True}, ConfigError, "`adjust` needs `noise`"),
        ({"clip": 1.0, "adjust": True}, ConfigError, "`clip`"),
        ({"clip": 0.0}, ConfigError, "`clip`"),
        ({"trace": True}, ConfigError, "`trace`"),
    ],
)
def test_what_is_refused(changes, error, message):
    options = {"energy": bowl(1.0), "start": torch.zeros(3, 1), "steps": 2, "step_size": 0.1, **changes}
    with pytest.raises(error, match=message) as caught:
        langevin(options.pop("energy"), options.pop("start"), **options)
    assert "\n" not in str(caught.value)
