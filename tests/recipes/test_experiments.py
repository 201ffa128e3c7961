"""Experiments: their settings are checked, they run end to end on little, and what they measure is what they say."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch

from thalweg.errors import ConfigError, ThalwegError
from thalweg.recipes import list_recipes, load_recipe, run_recipe
from thalweg.recipes.experiments import EXPERIMENTS, build_settings
from thalweg.recipes.experiments.capacity import CapacitySettings, classical_rate, crossing, modern_rate, random_signs
from thalweg.recipes.experiments.digit_patterns import corrupted, stored_digits
from thalweg.recipes.experiments.digits import retrieval_rates
from thalweg.recipes.experiments.instances import InstancesSettings, area_under_curve, make_bags
from thalweg.recipes.experiments.landscape import LandscapeSettings, descent_paths
from thalweg.recipes.experiments.poolings import POOLINGS, BagClassifier, make_pooling

NAMES = [recipe.name for recipe in list_recipes() if recipe.name.startswith("hopfield-")]
SMALL = {
    "hopfield-digits": [
        "stored=20",
        "separations=[sparsemax]",
        "noise=[0.5, 1]",
        "hidden_rows=[4]",
        "betas=[8, 32]",
        "tuning_seeds=1",
    ],
    "hopfield-capacity": [
        "dimensions=[6, 8]",
        "queries=20",
        "most=100",
        "sizes=[30, 60]",
        "loads=[0.1, 0.3]",
        "asked=20",
        "sweeps=5",
    ],
    "hopfield-landscape": ["panels=[[softmax, 4], [sparsemax, 4]]", "grid=21", "starts=4"],
    "hopfield-instances": [
        "sizes=[[4, 6], [8, 9]]",
        "train_bags=16",
        "validation_bags=8",
        "test_bags=12",
        "epochs=2",
        "learning_rates=[0.003]",
        "poolings=[mean, attention, 'memory, sparsemax']",
    ],
}


def test_the_promised_experiments_are_there():
    assert set(NAMES) == set(SMALL)
    assert all(load_recipe(name).experiment in EXPERIMENTS for name in NAMES)


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes() if recipe.experiment])
def test_settings_in_the_files_are_the_defaults(name):
    """What a recipe shows is what the code does without it, so that neither can be changed alone."""
    recipe = load_recipe(name)
    kind = EXPERIMENTS[recipe.experiment].settings
    assert build_settings(recipe.experiment, recipe.settings, [], where=name) == kind()
    assert recipe.title
    assert recipe.note
    assert len(set(recipe.seeds)) == len(recipe.seeds) > 0


@pytest.mark.parametrize("name", NAMES)
def test_from_end_to_end_and_not_again(name, tmp_path):
    recipe, said = load_recipe(name), []
    options = {"seeds": 2, "overrides": SMALL[name], "listener": said.append}
    result = run_recipe(recipe, tmp_path, **options)
    assert result.finished
    assert result.table
    assert len({tuple(row) for row in result.table}) == 1, "all rows have the same heading"
    assert said
    assert all(event["message"] for event in said)
    assert result.pictures
    for picture in result.pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.report is not None
    page = result.report.read_text(encoding="utf-8")
    assert page.count("data:image/png") == len(result.pictures)
    assert "img-src data:" in page
    assert "http" not in page.replace("http-equiv", "")
    record = json.loads((tmp_path / f"results-{name}.json").read_text())
    assert record["seeds"] == [0, 1]
    assert record["settings"].keys() == {f.name for f in dataclasses.fields(EXPERIMENTS[recipe.experiment].settings)}
    assert record["tables"][0]["rows"] == result.table

    said.clear()
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    again = run_recipe(recipe, tmp_path, **options)
    assert (again.table, again.pictures, said) == (result.table, result.pictures, []), "nothing is done again"
    with pytest.raises(ConfigError, match=r"was run with seeds=.*use --fresh"):
        run_recipe(recipe, tmp_path, **{**options, "seeds": 1})
    if name in ("hopfield-landscape", "hopfield-instances"):
        result.pictures[0].unlink()
        run_recipe(recipe, tmp_path, **options)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before, "the same run gives the same files"


def test_fresh_runs_another_experiment_in_the_same_place(tmp_path):
    recipe = load_recipe("hopfield-landscape")
    run_recipe(recipe, tmp_path, overrides=SMALL[recipe.name])
    words = [*SMALL[recipe.name][:-1], "starts=3"]
    with pytest.raises(ConfigError, match="was run with starts=4, got 3"):
        run_recipe(recipe, tmp_path, overrides=words)
    run_recipe(recipe, tmp_path, overrides=words, fresh=True)
    path = tmp_path / "results-hopfield-landscape.json"
    assert json.loads(path.read_text())["settings"]["starts"] == 3
    path.write_text("{")
    with pytest.raises(ConfigError, match="is damaged; use --fresh"):
        run_recipe(recipe, tmp_path, overrides=words)


@pytest.mark.parametrize(
    ("experiment", "word", "message"),
    [
        ("digits", "storde=3", "`storde` is not a setting; did you mean `stored`"),
        ("digits", "stored", "expected `key=value`, got `stored`"),
        ("digits", "stored=many", "`stored`"),
        ("digits", "stored=0", "`stored` must be more than 0, got 0"),
        ("digits", "stored=2000", "1,797 digits"),
        ("digits", "noise=[]", "`noise` must be more than 0"),
        ("digits", "separations=[sparsmax]", "sparsemax"),
        ("digits", "stored=true", "expected a number"),
        ("capacity", "flipped=0.5", "`flipped` must be in"),
        ("capacity", "dimensions=[3]", "`dimensions` two or more"),
        ("landscape", "panels=[[softmax, 0]]", "beta of a panel"),
        ("landscape", "patterns=[[1, 2, 3]]", "patterns"),
        ("instances", "poolings=[meen]", "did you mean `mean`"),
        ("instances", "sizes=[[5, 3]]", "a least and a largest number"),
        ("instances", "digits=[3, 10]", "from 0 to 9"),
        ("gidits", "", "experiment `gidits` is not known; did you mean `digits`"),
    ],
)
def test_mistakes_in_settings_are_one_line(experiment, word, message):
    with pytest.raises(ThalwegError) as caught:
        build_settings(experiment, {}, [word], where="recipe x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digits_are_centred_and_of_norm_one():
    patterns = stored_digits(50, 3)
    torch.testing.assert_close(patterns.norm(dim=1), torch.ones(50))
    assert not torch.equal(patterns, stored_digits(50, 4))
    hidden = corrupted(patterns, "hidden", 3, 0)
    assert torch.equal(hidden[:, :40], patterns[:, :40])
    assert hidden[:, 40:].abs().sum() == 0
    noise = corrupted(patterns, "noise", 0.5, 0) - patterns
    assert abs(float(noise.norm(dim=1).mean()) - 0.5) < 0.05


def test_digits_are_retrieved_at_a_large_beta_and_mixed_at_a_small_one():
    from thalweg.energies.hopfield.memory import HopfieldMemory

    patterns = stored_digits(20, 0)
    sharp = retrieval_rates(HopfieldMemory(patterns, beta=64.0), corrupted(patterns, "noise", 0.25, 0), 0.01, 50)
    blunt = retrieval_rates(HopfieldMemory(patterns, beta=0.5), corrupted(patterns, "noise", 0.25, 0), 0.01, 50)
    assert sharp.exact == sharp.nearest == 1.0
    assert blunt.exact == 0.0
    assert blunt.support == 20


def hebb_by_hand(patterns, orders):
    """Sign updates in plain Python: which patterns remain as they are."""
    size = len(patterns[0])
    weights = [[sum(x[i] * x[j] for x in patterns) if i != j else 0 for j in range(size)] for i in range(size)]
    kept = []
    for pattern in patterns:
        state = list(pattern)
        for order in orders:
            for i in order:
                field = sum(w * s for w, s in zip(weights[i], state, strict=True))
                state[i] = int(math.copysign(1, field)) if field else state[i]
        kept.append(sum(a != b for a, b in zip(state, pattern, strict=True)) / size)
    return kept


@pytest.mark.parametrize(("size", "count"), [(12, 2), (12, 5), (20, 6)])
def test_classical_network_is_the_one_by_hand(size, count):
    settings = CapacitySettings(asked=count, sweeps=3, wrong=0.05)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        patterns = random_signs(count, size, generator).int().tolist()
        orders = [torch.randperm(size, generator=generator).tolist() for _ in range(3)]
        expected = sum(wrong <= 0.05 for wrong in hebb_by_hand(patterns, orders)) / count
        assert classical_rate(settings, size, count, seed) == pytest.approx(expected)


def test_classical_network_keeps_few_patterns_and_loses_many():
    settings = CapacitySettings(asked=20)
    assert classical_rate(settings, 120, 6, 0) == 1.0
    assert classical_rate(settings, 120, 60, 0) < 0.2


def test_modern_memory_holds_more_in_more_dimensions():
    settings = CapacitySettings(queries=50)
    rates = [modern_rate(settings, "softmax", size, 400, 0) for size in (8, 16, 24)]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 < rates[-1]


def test_crossing():
    assert crossing([0.0, 1.0], [1.0, 0.0]) == 0.5
    assert crossing([0.0, 1.0], [1.0, 0.9]) == 1.0
    assert crossing([0.0, 1.0], [0.2, 0.1]) == 0.0


def test_paths_descend():
    from thalweg.energies.hopfield.memory import HopfieldMemory

    patterns = torch.tensor(LandscapeSettings().patterns, dtype=torch.float64)
    for name, beta in itertools.product(("softmax", "sparsemax"), (0.5, 4.0)):
        memory = HopfieldMemory(patterns, beta=beta, separation=name)
        energies = memory.energy(descent_paths(memory, 2 * torch.randn(30, 2, dtype=torch.float64), 8))
        assert bool((energies.diff(dim=1) <= 1e-12).all())


def test_bags_are_what_their_labels_say():
    digits = torch.arange(200) % 10
    settings = InstancesSettings(digits=(4, 7))
    made = make_bags(torch.zeros(200, 64), digits, 40, (3, 9), settings, torch.Generator().manual_seed(0))
    sizes = (made.bags >= 0).sum(1)
    assert int(sizes.min()) >= 3
    assert int(sizes.max()) <= 9
    counts = torch.stack([((digits[made.bags] == d) & (made.bags >= 0)).sum(1) for d in (4, 7)], dim=1)
    assert bool((counts[made.labels == 1] == 1).all())
    assert {tuple(row) for row in counts[made.labels == 0].tolist()} == {(0, 2), (2, 0)}


def test_area_under_curve_against_pairs():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randint(0, 5, (30,), generator=generator).double(), torch.arange(30) % 3 == 0
    pairs = [(a, b) for a in scores[labels].tolist() for b in scores[~labels].tolist()]
    expected = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert area_under_curve(scores, labels.double()) == pytest.approx(expected)


@pytest.mark.parametrize("name", POOLINGS)
def test_padding_changes_no_pooling(name):
    torch.manual_seed(0)
    pooling = make_pooling(name, 8, 2, 0.5)
    instances = torch.randn(3, 5, 8)
    absent = torch.zeros(3, 5, dtype=torch.bool)
    longer = torch.cat([instances, 100 * torch.randn(3, 2, 8)], dim=1)
    padded = torch.cat([absent, torch.ones(3, 2, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(pooling(longer, padded), pooling(instances, absent))
    order = torch.randperm(5)
    torch.testing.assert_close(pooling(instances[:, order], absent), pooling(instances, absent))


def test_bags_share_their_images():
    torch.manual_seed(0)
    model = BagClassifier("memory, sparsemax", inputs=64, width=8, states=2, beta=0.5)
    images, bags = torch.randn(6, 64), torch.tensor([[0, 1, 2], [3, 3, -1]])
    alone = torch.stack([model(images, bag[bag >= 0].unsqueeze(0))[0] for bag in bags])
    torch.testing.assert_close(model(images, bags), alone)
