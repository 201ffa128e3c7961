"""The experiments on latent variables, made small: autoencoders of digits, EM of mixtures."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch.distributions import Categorical

from thalweg.errors import ConfigError
from thalweg.inference import elbo
from thalweg.recipes import load_recipe, run_recipe
from thalweg.recipes.experiments import build_settings
from thalweg.recipes.experiments.autoencoder import AutoencoderSettings, binary_digits, fit_digits
from thalweg.recipes.experiments.mixtures import (
    MixturesSettings,
    climb_from,
    long_gaussians,
    random_start,
    scikit_learn_score,
)

SMALL = {
    "digits-vae": ["latents=[2, 3]", "hidden=[8]", "epochs=2", "importance=3", "held_out=100"],
    "mixtures": ["points=60", "components=3", "starts=2", "counts=[1, 2]", "max_iter=40", "shown=[0, 2]", "tol=1e-4"],
}
PICTURES = {"digits-vae": ["curves", "reconstructions", "samples", "map"], "mixtures": ["steps", "climb", "bic"]}


@pytest.mark.parametrize("name", SMALL)
def test_recipe_from_end_to_end(name, tmp_path):
    recipe, lines = load_recipe(name), []
    result = run_recipe(recipe, tmp_path, seeds=2, overrides=SMALL[name], listener=lines.append)
    assert result.report is not None
    assert result.report.is_file()
    assert lines
    assert len({tuple(row) for row in result.table}) == 1, "all rows have the same heading"
    assert [path.name for path in result.pictures] == [f"{name}-{picture}.png" for picture in PICTURES[name]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in result.pictures)
    record = json.loads((tmp_path / f"results-{name}.json").read_text())
    assert record["seeds"] == [0, 1]
    assert run_recipe(recipe, tmp_path, seeds=2, overrides=SMALL[name]).table == result.table


def test_digits_are_binary_and_apart():
    train, test, train_labels, test_labels = binary_digits(300, 1)
    assert train.shape == (1497, 8, 8)
    assert set(train.unique().tolist()) == {0.0, 1.0}
    assert len(train_labels) + len(test_labels) == len(train) + len(test) == 1797
    assert not torch.equal(binary_digits(300, 0)[1], test)


def test_the_bounds_rise_and_the_tighter_one_lies_above():
    settings = AutoencoderSettings(epochs=10, importance=16, held_out=200)
    threads = torch.get_num_threads()
    model, curve = fit_digits(settings, 2, 0)
    assert torch.get_num_threads() == threads
    assert [row["epoch"] for row in curve] == [1, 5, 10]
    assert curve[-1]["test iwae"] > curve[0]["test iwae"] + 3
    for part in ("train", "test"):
        assert curve[-1][f"{part} iwae"] > curve[-1][f"{part} elbo"]
    again, _ = fit_digits(settings, 2, 0)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_v2_climbs_never_fall_and_end_where_those_of_scikit_learn_do():
    points = long_gaussians().sample(400, generator=torch.Generator().manual_seed(0))
    settings = MixturesSettings(points=400, tol=1e-8)
    for seed in (0, 1):
        start = random_start(points, 4, seed)
        model = climb_from(points, start, max_iter=settings.max_iter, tol=settings.tol)
        climb = [*model.history_, model.score(points)]
        assert all(after >= before - 1e-12 for before, after in itertools.pairwise(climb))
        assert climb[0] == pytest.approx(climb_from(points, start, max_iter=0, tol=0.0).score(points), abs=1e-10)
        # scikit-learn adds 1e-6 to every variance.
        assert climb[-1] == pytest.approx(scikit_learn_score(points, start, settings), abs=1e-4)


def test_v1_the_bound_of_a_mixture_touches_its_likelihood():
    """The energies of the mixture under `elbo`: equal at its posterior, elsewhere less by the divergence."""
    model = long_gaussians()
    points = model.sample(50, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        likelihood, posterior = -model.free_energy(points), Categorical(model.posterior(points))
        q = Categorical(logits=torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))

        def log_joint(z):
            return -model.energy(points.expand(len(z), -1, -1), z)

        torch.testing.assert_close(elbo(log_joint, posterior), likelihood, rtol=0, atol=1e-8)
        gap = (q.probs * (q.logits + model.joint(points) + likelihood.unsqueeze(1))).sum(1)
        torch.testing.assert_close(likelihood - elbo(log_joint, q), gap, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoencoderSettings(latents=(0,)), "`latents` must be more than 0"),
        (lambda: AutoencoderSettings(held_out=1797), "must leave some"),
        (lambda: AutoencoderSettings(epochs=0), r"training\.epochs"),
        (lambda: MixturesSettings(points=30), "at least ten for each component"),
        (lambda: MixturesSettings(counts=()), "`counts` must be more than 0"),
        (lambda: build_settings("autoencoder", {}, ["network=densr"], where="x"), "network"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
