"""The recipes of images: exact sizes, published settings and figures, and one run from end to end."""

from __future__ import annotations

import dataclasses
import json

import pytest

from thalweg.errors import ConfigError, DataError
from thalweg.recipes import load_recipe, run_recipe
from thalweg.tasks.classify.classifier import build_classifier
from thalweg.tasks.registry import task_of

PUBLISHED = {
    "c1-lr0.1": (0.5783, 0.5763),
    "c1": (0.6937, 0.6860),
    "c1-lr0.001": (0.5848, 0.5790),
    "c2": (0.7557, 0.7443),
}


def config_of(name):
    recipe = load_recipe(name)
    return task_of(recipe.config).configure(recipe.config, name)


def size_of(name):
    model = build_classifier(config_of(name), 6, 3, (48, 48))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_settings_are_kept(name):
    recipe, config = load_recipe(name), config_of(name)
    assert (recipe.published["val accuracy"], recipe.published["accuracy"]) == PUBLISHED[name]
    assert recipe.seeds == (0, 1, 2)
    assert [entry["data"] for entry in recipe.evaluations] == ["val", "test"]
    assert config.training.optimiser == "sgd"
    assert config.training.learning_rate == (0.01 if name in ("c1", "c2") else float(name.removeprefix("c1-lr")))
    assert size_of(name) == (756_742 if name == "c2" else 5_340_742)
    assert not config.augment.settle((48, 48), "intel").active


def test_the_best_is_small():
    assert size_of("c-best") < 1_000_000
    assert f"{size_of('c-best'):,} parameters" in load_recipe("c-best").note


def test_absent_data_say_what_they_are(tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    with pytest.raises(DataError, match="--data-root or THALWEG_DATA"):
        run_recipe(load_recipe("c1"), tmp_path / "out", root=tmp_path)


def test_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "cache"))
    recipe = dataclasses.replace(load_recipe("c1"), seeds=(0, 1), evaluations=({"data": "val", "prefix": "val "},))
    words = ["path=digits", "channels=4,8", "hidden=8", "epochs=1", "batch_size=64", "device=cpu"]
    result = run_recipe(recipe, tmp_path / "out", overrides=words)
    assert result.finished
    rows = {row["metric"]: row for row in result.table}
    assert rows["val accuracy"]["published"] == "0.6937"
    assert rows["val accuracy"]["runs"] == "2"
    record = json.loads((tmp_path / "out" / "results-c1.json").read_text())
    assert len(record["scores"]) == 2
    events = []
    again = run_recipe(recipe, tmp_path / "out", overrides=words, listener=events.append)
    assert again.table == result.table
    assert not [event for event in events if event["event"] == "epoch"], "nothing is trained again"
    with pytest.raises(ConfigError, match="was run with"):
        run_recipe(recipe, tmp_path / "out", overrides=[*words, "dropout=0.5"])
    with pytest.raises(ConfigError, match="holds a run of another task"):
        run_recipe(load_recipe("demo"), tmp_path / "out", seeds=1)
