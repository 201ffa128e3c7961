"""Energies with latent variables: one input, several answers (E3)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from oracles import densities as oracle
from thalweg.energies.latent import BranchEnergy, LatentEnergy, free_energy
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.langevin import langevin
from thalweg.learning.losses import nll, square_square
from thalweg.learning.losses.contrasts import from_sampler

INF = math.inf
ROWS = [[0.5, -1.0, 2.0], [0.0, 0.0, INF], [INF, INF, INF], [INF, 3.0, INF], [1000.0, 1001.0, 1002.0]]


@pytest.mark.parametrize("over", ["sum", "minimum"])
@pytest.mark.parametrize("beta", [0.3, 1.0, 20.0])
def test_free_energy_and_its_gradient(over, beta):
    energies = torch.tensor(ROWS, dtype=torch.float64, requires_grad=True)
    found = free_energy(energies, beta, over=over)
    assert torch.allclose(found, torch.tensor([oracle.free_energy(row, beta, over) for row in ROWS]).double())
    finite = [place for place, row in enumerate(ROWS) if min(row) < INF]
    (gradient,) = torch.autograd.grad(found[finite].sum(), energies)
    for place in finite:
        expected = oracle.free_energy_gradient(ROWS[place], beta, over)
        assert torch.allclose(gradient[place], torch.tensor(expected, dtype=torch.float64))
    assert torch.isfinite(torch.autograd.grad(free_energy(energies, beta, over=over).sum(), energies)[0]).all()
    # The broken twin: the temperature left out.
    if over == "sum" and beta != 1.0:
        assert not math.isclose(found[0].item(), oracle.free_energy(ROWS[0], 1.0, over), rel_tol=1e-3)


def test_sum_lies_below_the_minimum_and_reaches_it():
    energies = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    least = free_energy(energies, over="minimum")
    assert torch.equal(least, energies.min(1).values)
    for beta in (0.1, 1.0, 10.0, 1000.0):
        gap = least - free_energy(energies, beta)
        assert bool((gap >= 0).all())
        assert bool((gap <= math.log(7) / beta + 1e-12).all())
    assert torch.allclose(free_energy(energies.T, dim=0), free_energy(energies))
    assert torch.equal(free_energy(energies[:, :1]), energies[:, 0])
    assert free_energy(torch.zeros(0, 3)).shape == (0,)


def two_branches(over, scale=0.1, height=0.0):
    """y = x and y = -x, the second higher by ``height``; no network."""

    class Two(LatentEnergy):
        def proposals(self, inputs):
            return torch.stack([inputs, -inputs], dim=1)

        def joint(self, inputs, answers):
            places = torch.stack([inputs, -inputs], dim=-2)
            distances = (answers.unsqueeze(-2) - places).square().sum(-1) / (2 * scale**2)
            return distances + torch.tensor([0.0, height])

    return Two(over=over)


def test_e3_inference_minimises_energy_over_answers():
    """Every answer found is a minimum of F over a fine grid near it, and the best is the grid's least."""
    energy = two_branches("sum", scale=0.3, height=0.5)
    inputs = torch.tensor([[1.0], [0.7], [0.05]])
    grid = torch.linspace(-2, 2, 4001).unsqueeze(1)
    surface = energy.on_grid(inputs, grid)
    found = energy.infer(inputs)
    for item in range(3):
        best = float(found.answers[item, 0, 0])
        assert abs(best - float(grid[surface[item].argmin()])) < 2e-3
        for answer, value in zip(found.answers[item, :, 0], found.energies[item], strict=True):
            if math.isfinite(float(value)):
                nearby = (grid[:, 0] - answer).abs() < 0.05
                assert float(surface[item][nearby].min()) >= float(value) - 1e-4
    # Two answers where the branches are apart, one where they have become a single valley.
    assert torch.isfinite(found.energies).sum(1).tolist() == [2, 2, 1]


@pytest.mark.parametrize("over", ["sum", "minimum"])
def test_e3_latent_variables_give_one_to_many_answers(over):
    energy = two_branches(over, height=0.3)
    found = energy.infer(torch.tensor([[1.0], [-0.5], [0.0]]))
    assert torch.allclose(found.answers[0, :, 0], torch.tensor([1.0, -1.0]), atol=1e-4)
    assert torch.allclose(found.answers[1, :, 0], torch.tensor([-0.5, 0.5]), atol=1e-4)
    assert float(found.energies[0, 1] - found.energies[0, 0]) == pytest.approx(0.3, abs=1e-4)
    assert math.isinf(float(found.energies[2, 1])), "at 0 both branches are one answer"
    z = energy.posterior(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.9], [-0.9]]))
    assert torch.allclose(z, torch.eye(2), atol=1e-4)


class CircleEnergy(LatentEnergy):
    """Answers on a circle of radius x around 0, z one of several angles."""

    def __init__(self, angles, *, scale=1.0, over="sum"):
        super().__init__(over=over)
        turns = torch.arange(angles) * (2 * math.pi / angles)
        self.directions, self.scale = torch.stack([turns.cos(), turns.sin()], dim=1), scale

    def joint(self, inputs, answers):
        return (answers.unsqueeze(-2) - self.proposals(inputs)).square().sum(dim=-1) / (2 * self.scale**2)

    def proposals(self, inputs):
        return inputs.unsqueeze(-2) * self.directions


def test_e3_a_circle_of_answers():
    """All points at distance x are answers; without the latent angle the middle would be the only one."""
    inputs = torch.tensor([[2.0]])
    circle = CircleEnergy(90, scale=0.3)
    found = circle.infer(inputs, apart=0.0)
    assert torch.allclose(found.answers.norm(dim=2), found.answers.norm(dim=2).mean(), atol=1e-3)
    assert abs(float(found.answers.norm(dim=2).mean()) - 2.0) < 0.05
    assert int(torch.isfinite(circle.infer(inputs, apart=1.0).energies).sum()) >= 9
    off = torch.tensor([[0.0, 0.0]])
    assert float(circle(inputs, off)) > float(circle(inputs, found.answers[0, :1])) + 10
    # Rotating an answer costs nothing.
    around = CircleEnergy(4, over="minimum", scale=0.3)(inputs.expand(4, 1), 2 * CircleEnergy(4).directions)
    assert torch.allclose(around, torch.zeros(4))
    # A circle that is small beside the bowls has one answer when summed over, and four when not.
    small = torch.tensor([[0.5]])
    assert int(torch.isfinite(CircleEnergy(4).infer(small).energies).sum()) == 1
    assert int(torch.isfinite(CircleEnergy(4, over="minimum").infer(small).energies).sum()) == 4


@pytest.mark.parametrize("over", ["sum", "minimum"])
def test_no_step_of_inference_raises_the_free_energy(over):
    torch.manual_seed(0)
    energy = BranchEnergy(2, 2, branches=5, hidden=(8,), scale=0.3, over=over).double()
    inputs = torch.randn(20, 2, dtype=torch.float64)
    values = []
    for steps in range(8):
        found = energy.infer(inputs, steps=steps, apart=0.0)
        values.append(found.energies)
    for before, after in itertools.pairwise(values):
        assert bool((after <= before + 1e-12).all())
    assert bool((values[0].diff(dim=1) >= 0).all())


def test_branches_are_a_mixture_of_gaussians():
    """With b = 1, F and its integral over y are those of a mixture density network."""
    torch.manual_seed(1)
    energy = BranchEnergy(1, 1, branches=3, hidden=(8,), scale=0.2).double()
    x = torch.tensor([[0.3]], dtype=torch.float64)
    grid = torch.linspace(-8, 8, 16_001, dtype=torch.float64).unsqueeze(1)
    total = (-energy.on_grid(x, grid)).logsumexp(1) + math.log(16 / 16_000)
    features = energy.body(x)
    exact = (-energy.heights(features)).logsumexp(1) + math.log(0.2 * math.sqrt(2 * math.pi))
    assert torch.allclose(total, exact, atol=1e-6)
    # The short cut over the grid is the long way round.
    assert torch.allclose(energy.on_grid(x, grid[:50]), LatentEnergy.on_grid(energy, x, grid[:50]))


def test_gradients():
    torch.manual_seed(2)
    for over in ("sum", "minimum"):
        energy = BranchEnergy(2, 2, branches=3, hidden=(4,), scale=0.7, over=over).double()
        points = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        assert torch.autograd.gradcheck(energy, points)


def branches_of_data(count, seed=0):
    """y = sqrt(x) or -sqrt(x), evenly, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 + 0.8 * torch.rand(count, 1, generator=generator)
    signs = torch.randint(0, 2, (count, 1), generator=generator) * 2 - 1
    return x, signs * x.sqrt() + 0.05 * torch.randn(count, 1, generator=generator)


@pytest.mark.parametrize("how", ["nll, sum", "nll, minimum", "contrast, sum", "contrast, minimum"])
def test_e3_learning_minimises_a_loss_over_weights(how):
    """Learned from pairs alone, both roots are answers: by likelihood on a grid, by contrast with Langevin walks."""
    loss, over = how.split(", ")
    torch.manual_seed(3)
    energy = BranchEnergy(1, 1, branches=2, hidden=(16,), scale=0.3, over=over)
    x, y = branches_of_data(128)
    grid = torch.linspace(-1.6, 1.6, 33).unsqueeze(1)
    gold = (y - grid.T).abs().argmin(1)
    optimiser = torch.optim.Adam(energy.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(4)
    for _ in range(120):
        if loss == "nll":
            values = nll(energy.on_grid(x, grid), gold)
        else:
            walk = lambda e, start: langevin(e, start, steps=4, step_size=0.02, generator=generator).state  # noqa: E731
            anywhere = 3.2 * torch.rand(y.shape, generator=generator) - 1.6
            wrong = from_sampler(lambda at: energy(x, at), anywhere, walk).energies
            values = square_square(energy(x, y) + 1.0, wrong, margin=1.0)
        optimiser.zero_grad()
        values.mean().backward()
        optimiser.step()
    asked = torch.tensor([[0.3], [0.6], [0.9]])
    found = energy.infer(asked, apart=0.2)
    assert bool(torch.isfinite(found.energies).all()), "two answers each"
    ordered = found.answers[:, :, 0].sort(dim=1).values
    roots = asked.sqrt() @ torch.tensor([[-1.0, 1.0]])
    assert float((ordered - roots).abs().max()) < 0.12


def test_one_branch_answers_with_the_middle():
    """What the latent variable is for: a single bowl lands between the two right answers."""
    torch.manual_seed(5)
    energy = BranchEnergy(1, 1, branches=1, hidden=(16,), scale=0.3)
    x, y = branches_of_data(256)
    grid = torch.linspace(-1.6, 1.6, 65).unsqueeze(1)
    gold = (y - grid.T).abs().argmin(1)
    optimiser = torch.optim.Adam(energy.parameters(), lr=0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nll(energy.on_grid(x, grid), gold).mean().backward()
        optimiser.step()
    assert float(energy.infer(torch.tensor([[0.9]])).answers.abs().max()) < 0.4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: free_energy(torch.zeros(2, 0)), ShapeError, "at least one z"),
        (lambda: free_energy(torch.zeros(2, 2), 0.0), ConfigError, "`beta`"),
        (lambda: free_energy(torch.zeros(2, 2), over="max"), ConfigError, "`sum` or `minimum`"),
        (lambda: BranchEnergy(1, 1, branches=0), ConfigError, "`branches`"),
        (lambda: CircleEnergy(3).infer(torch.zeros(1, 1), apart=-1.0), ConfigError, "`apart`"),
        (lambda: LatentEnergy()(torch.zeros(1, 1), torch.zeros(1, 1)), NotImplementedError, "must define `joint`"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
