"""The experiments on energies, made small: losses, densities, several answers."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from contracts.gaussian_energy import GaussianEnergy
from oracles import losses as oracle
from thalweg.energies.latent import BranchEnergy
from thalweg.errors import ConfigError
from thalweg.recipes import load_recipe, run_recipe
from thalweg.recipes.experiments.branches import BRANCHES, fork_pairs, measure_branches, train_branches
from thalweg.recipes.experiments.densities import DensitiesSettings, learn_density, sample_energy
from thalweg.recipes.experiments.losses import (
    LOSSES,
    LossesSettings,
    SideBySide,
    TwoTowers,
    answer_grid,
    curve_pairs,
    half_interval,
    loss_of,
    train_digits,
    train_surfaces,
)


def test_losses_by_name():
    energies = torch.tensor([[0.5, -1.0, 2.0], [0.2, 0.1, 3.0]], dtype=torch.float64)
    gold = torch.tensor([0, 1])
    assert loss_of("energy", energies, gold).tolist() == [0.5, 0.1]
    assert torch.allclose(loss_of("hinge", energies, gold), torch.tensor([2.5, 0.9], dtype=torch.float64))
    expected = [oracle.nll(row, y) for row, y in zip(energies.tolist(), gold.tolist(), strict=True)]
    assert loss_of("nll", energies, gold).tolist() == pytest.approx(expected)
    near = torch.tensor([[False, True, False], [True, False, False]])
    assert torch.allclose(loss_of("hinge", energies, gold, near=near), torch.tensor([0.0, 0.0], dtype=torch.float64))
    for name in LOSSES:
        assert loss_of(name, energies, gold).shape == (2,)


def test_a_committee_trains_each_as_if_alone():
    make = lambda: TwoTowers(2, 3, hidden=(4, 0), code=3)  # noqa: E731
    x = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0))
    gold = torch.randint(0, 3, (2, 6), generator=torch.Generator().manual_seed(1))
    together = SideBySide(make, (3, 7), 0.05)
    for _ in range(5):
        together.step(loss_of("nll", together.energies(x, torch.eye(3)).flatten(0, 1), gold.flatten()))
    for place, seed in enumerate((3, 7)):
        alone = SideBySide(make, (seed,), 0.05)
        for _ in range(5):
            energies = alone.energies(x[place : place + 1], torch.eye(3)).flatten(0, 1)
            alone.step(loss_of("nll", energies, gold[place]))
        ours, others = alone.trained()[0], together.trained()[place]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), others.parameters(), strict=True))


def test_without_contrast_the_energy_collapses():
    """The energy loss makes every answer free; a contrast keeps a valley."""
    settings = LossesSettings(surface_steps=150)
    grid, x = answer_grid(settings), torch.linspace(-1, 1, 50).unsqueeze(1)

    def span(towers):
        with torch.no_grad():
            energies = towers(x, grid)
        return float((energies.max(dim=1).values - energies.min(dim=1).values).mean())

    before, after = train_surfaces(settings, "energy", (0,))
    assert span(after[0]) < 0.15 * span(before)
    _, contrasted = train_surfaces(settings, "nll", (0,))
    assert span(contrasted[0]) > span(before)
    with torch.no_grad():
        answers = grid[contrasted[0](x, grid).argmin(1)]
    assert float((answers - 0.8 * (3 * x).sin()).abs().mean()) < 0.2


def test_digits_are_learned():
    (found,) = train_digits(LossesSettings(epochs=4, hidden=16), "nll", 0.01, (0,))
    assert found["accuracy"] > 0.75
    assert len(found["before"]) == len(found["after"]) == 10
    assert 0 <= found["gold"] <= 9


def test_interval_by_students_t():
    values = [0.90, 0.92, 0.94, 0.91, 0.93]
    expected = 2.776 * statistics.stdev(values) / math.sqrt(5)
    assert half_interval(values) == pytest.approx(expected)
    assert half_interval([0.9]) == 0.0
    assert half_interval(values * 8) == pytest.approx(2.023 * statistics.stdev(values * 8) / math.sqrt(40), rel=2e-3)


@pytest.mark.parametrize("method", ["grid", "cd", "pcd", "score matching", "denoising"])
def test_every_method_learns_something(method):
    """From one Gaussian-like blob of points: better than the untrained energy."""
    settings = DensitiesSettings(steps=60, count=500, batch=64, hidden=16, rate=0.02, walk_size=0.05)
    learned = learn_density(settings, "blobs", method, 0)
    untrained = learn_density(DensitiesSettings(steps=1, count=500, hidden=16, rate=1e-9), "blobs", method, 0)
    if method != "cd":  # CD may dig holes where its walks never come: see the page
        assert learned.nll < untrained.nll
    short = DensitiesSettings(steps=2, count=50, hidden=4)
    first, again = (learn_density(short, "blobs", method, 0).nll for _ in range(2))
    assert first == again


def test_samples_of_a_known_energy():
    energy = GaussianEnergy(torch.tensor([1.0, -1.0]), torch.eye(2) * 4)
    points = sample_energy(energy, 2000, 0)  # pyright: ignore[reportArgumentType]
    assert torch.allclose(points.mean(0), torch.tensor([1.0, -1.0]), atol=0.07)
    assert torch.allclose(points.T.cov(), torch.eye(2) / 4, atol=0.05)


def test_a_right_fork_is_measured_as_right():
    class Fork(BranchEnergy):
        def proposals(self, inputs):
            roots = inputs.clamp(min=0).sqrt()
            return torch.stack([roots, -roots], dim=1)

        def joint(self, inputs, answers):
            roots = inputs.clamp(min=0).sqrt()
            places = torch.stack([roots, -roots], dim=-2)
            return (answers.unsqueeze(-2) - places).square().sum(-1) / 0.02

    found = measure_branches(Fork(1, 1, over="minimum"))
    assert found["answers at x = -0.5"] == 1
    assert found["answers at x = 0.7"] == 2
    assert found["missed"] < 0.01
    assert found["astray"] < 1e-6
    assert measure_branches(train_branches("one branch, nll", 60, 0))["missed"] > 0.2
    x, y = fork_pairs(2000, 0)
    assert float((y.abs() - x.clamp(min=0).sqrt())[x > 0.2].mean()) == pytest.approx(0, abs=0.01)
    assert set(BRANCHES) >= {"sum, nll", "minimum, nll", "sum, contrast", "minimum, contrast"}


SMALL = {
    "energy-losses": [
        "losses=[energy, nll, hinge]", "rates=[0.01]", "tuning_seeds=1", "epochs=1", "surface_steps=3", "answers=11",
    ],
    "energy-densities": [
        "points=[moons]", "methods=[grid, pcd, denoising]", "steps=2", "count=100", "hidden=8", "samples=20",
        "branch_steps=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_recipe_from_end_to_end(name, tmp_path):
    recipe = load_recipe(name)
    lines = []
    result = run_recipe(recipe, tmp_path, seeds=1, overrides=SMALL[name], listener=lines.append)
    assert result.report is not None
    assert result.report.is_file()
    assert result.table
    assert lines
    assert len(result.pictures) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in result.pictures)
    record = json.loads((tmp_path / f"results-{name}.json").read_text())
    assert record["seeds"] == [0]
    assert all(table["rows"] for table in record["tables"])
    again = run_recipe(recipe, tmp_path, seeds=1, overrides=SMALL[name])
    assert again.table == result.table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossesSettings(losses=("hing",)), "did you mean `hinge`"),
        (lambda: LossesSettings(epochs=0), "`epochs`"),
        (lambda: DensitiesSettings(points=("moon",)), "did you mean `moons`"),
        (lambda: DensitiesSettings(methods=("pdc",)), "did you mean"),
        (lambda: DensitiesSettings(noise=0.0), "`noise`"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_curve_is_the_one_said():
    x, y = curve_pairs(1000, 0)
    assert float((y - 0.8 * (3 * x).sin()).std()) == pytest.approx(0.05, rel=0.1)
