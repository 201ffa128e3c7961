"""The experiment on score spaces, made small, and the intervals that it tells."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thalweg.data.images.digits import load_digit_images
from thalweg.errors import ConfigError
from thalweg.recipes import load_recipe, run_recipe
from thalweg.recipes.experiments.score_space import (
    METHODS,
    Scaled,
    ScoreSpaceSettings,
    Split,
    by_bayes,
    dark_pixels,
    fit_mixtures,
    intervals,
    scores_of,
)

SMALL = ["train=150", "dev=60", "alone=[2]", "components=[1, 2]", "prices=[3]", "resamples=50"]


def test_recipe_from_end_to_end(tmp_path):
    recipe, lines = load_recipe("score-space"), []
    result = run_recipe(recipe, tmp_path, seeds=1, overrides=SMALL, listener=lines.append)
    assert lines
    assert [path.name for path in result.pictures] == ["score-space-accuracies.png", "score-space-pulls.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in result.pictures)
    figures = json.loads((tmp_path / "results-score-space.json").read_text())["figures"]
    assert [row["classifier"] for row in result.table][1:] == [f"score space, {name}" for name in METHODS]
    assert figures["certificate"]["holds"]
    assert figures["certificate"]["pairs"] == 45
    for name in METHODS:
        middle, low, high = figures["methods"][name]["accuracy"]
        assert 0.5 < low <= middle <= high < 1
        gain = figures["methods"][name]["over"]["mixtures, Bayes' rule"]
        assert gain[0] == pytest.approx(middle - figures["methods"]["mixtures, Bayes' rule"]["accuracy"][0])


def test_digits_are_lists_of_points_of_different_lengths():
    images, labels = load_digit_images()
    sequences = dark_pixels(images, 4)
    lengths = [len(x) for x in sequences]
    assert (min(lengths), max(lengths)) == (16, 36)
    for image, x in zip(images[:20], sequences[:20], strict=True):
        rows, columns = (x + 3.5).astype(int).T
        assert (image.reshape(8, 8)[rows, columns] >= 4).all()
        assert len(x) == (image >= 4).sum()
    split = Split.drawn(len(labels), 600, 500, 3)
    assert sorted(np.concatenate(split)) == list(range(1797))

    train, some = split.train[:200], split.dev[:40]
    models = fit_mixtures([sequences[i] for i in train], labels[train], 2, 0.2)
    slow = [np.argmax([model.score_samples(sequences[i]).sum() for model in models]) for i in some]
    assert by_bayes(models, [sequences[i] for i in some]).tolist() == slow
    widths = {name: part.shape[1] for name, part in scores_of(models, sequences[:3]).items()}
    assert widths == {"means": 40, "variances": 40, "weights": 20, "second": 100}


def test_intervals_are_paired_and_cover_what_they_should():
    rng = np.random.default_rng(0)
    hits = (rng.random((2, 400)) < 0.7).astype(float)
    hits[1] = np.maximum(hits[1], hits[0])  # never worse than the first
    told = intervals(hits, np.ones(400), 500)
    for place in range(2):
        middle, low, high = told[place, 2]
        assert middle == hits[place].mean()
        spread = 1.96 * np.sqrt(middle * (1 - middle) / 400)
        assert (high - low) / 2 == pytest.approx(spread, rel=0.15)
    assert told[1, 0, 1] > 0  # the ends of the two overlap, those of the difference do not touch 0
    assert told[0, 2, 2] > told[1, 2, 1] or told[1, 0, 0] > 0.1
    np.testing.assert_allclose(told[0, 1], -told[1, 0][[0, 2, 1]])
    twice = intervals(2 * hits, np.full(400, 2.0), 500)
    np.testing.assert_allclose(twice, told)


def test_features_that_do_not_vary_are_left_out():
    features = np.c_[np.arange(4.0), np.full(4, 3.0)]
    scaled = Scaled.to(features)(features)
    assert scaled.shape == (4, 1)
    assert scaled.std() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 17}, "at most 16"),
        ({"train": 1400}, "leave some of the 1,797"),
        ({"components": ()}, "`components` must be more than 0"),
        ({"prices": (0.0,)}, "`prices` must be more than 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScoreSpaceSettings(**settings)
