"""Recipes: each builds a valid config and says where its data are from; one is run end to end on a tiny file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics

import pytest
import yaml

from thalweg.data import list_datasets
from thalweg.errors import ConfigError, DataError, ThalwegError
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.recipes import list_recipes, load_recipe, run_recipe
from thalweg.tasks.config import config_from
from thalweg.tasks.registry import apply_overrides, build_config
from thalweg.tasks.transduce.search_settings import SearchConfig

RECIPES = {recipe.name: recipe for recipe in list_recipes()}
IMAGES = [name for name, recipe in RECIPES.items() if recipe.config.get("task") == "classify"]
TRAINED = [name for name, recipe in RECIPES.items() if not recipe.experiment and name not in IMAGES]  # of transducers
TINY = ["hidden=8", "embedding=8", "epochs=2", "batch_size=16", "device=cpu"]


def test_the_promised_recipes_are_there():
    assert {"demo", "t1", "t2", "t3", "t6", "t7", "t8"} <= RECIPES.keys()
    assert list(RECIPES) == sorted(RECIPES)
    published = {name: RECIPES[name].published.get("accuracy") for name in ("t1", "t2", "t3")}
    assert published == {"t1": 0.1670, "t2": 0.1754, "t3": 0.1935}
    for name in ("t1", "t2", "t3"):
        assert len(RECIPES[name].seeds) == 3


@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_is_valid(name):
    recipe = RECIPES[name]
    trained = RECIPES[recipe.model_of] if recipe.model_of else recipe
    config = build_config(trained.config, where=name)
    assert config.data.train
    known = {info.name: info.splits for info in list_datasets()}
    specs = [config.data.train, *filter(None, [config.data.dev]), *(entry["data"] for entry in recipe.evaluations)]
    for spec in specs:
        dataset, _, split = spec.rpartition(":")
        assert split in known[dataset], spec
    assert recipe.title
    assert recipe.evaluations
    assert recipe.seeds
    assert len(set(recipe.seeds)) == len(recipe.seeds)
    for entry in recipe.evaluations:
        rest = {key: value for key, value in entry.items() if key not in ("data", "prefix", "k", "references", "name")}
        config_from({"search": "beam", **rest}, SearchConfig, where=name)
    # A test set is never what the model is chosen by.
    assert config.data.dev not in [entry["data"] for entry in recipe.evaluations]
    assert yaml.safe_load(recipe.text)["title"] == recipe.title


def test_the_published_settings_are_kept():
    for name, changes in (("t1", {}), ("t2", {"reverse_source": True}), ("t3", {"attention": "additive"})):
        config = build_config(RECIPES[name].config)
        expected = {"cell": "lstm", "attention": "none", "reverse_source": False, "bidirectional": False}
        expected |= {"hidden": 128, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.15} | changes
        assert {key: getattr(config.model, key) for key in expected} == expected
        training = {"epochs": 15, "batch_size": 32, "learning_rate": 3e-3, "weight_decay": 1.5e-4}
        training |= {"optimiser": "adam_l2", "teacher_forcing": 0.5, "schedule": "constant", "warmup": 0}
        training |= {"label_smoothing": 0.0, "average": 0.0, "metric": "accuracy"}
        assert {key: getattr(config.training, key) for key in training} == training
        assert config.training.clip > 0


def test_unknown_recipe():
    with pytest.raises(ConfigError, match="recipe `demos` is not known; did you mean `demo`"):
        load_recipe("demos")


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in ("demo", "english")])  # theirs are embedded
def test_absent_data_say_what_they_are(name, tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    for root in (None, tmp_path):
        with pytest.raises(DataError) as caught:
            run_recipe(RECIPES[name], tmp_path / "out", root=root)
        message = str(caught.value)
        assert "\n" not in message
        assert "it is part of" in message
        assert "github.com/" in message
        assert "--data-root or THALWEG_DATA" in message
        assert any(licence in message for licence in ("Apache-2.0", "CC BY-SA", "none stated"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
    path.write_text("".join(f"{word}\t{' '.join(word.upper())}\n" for word in words))
    return path


def tiny(pairs, **changes):
    """The demo with another file in place of CMUdict: recipe and words."""
    evaluations = ({"data": str(pairs), "search": "beam", "width": 3, "k": 3, "references": "any"},)
    recipe = dataclasses.replace(RECIPES["demo"], evaluations=evaluations, **changes)
    return recipe, [*TINY, f"data.train={pairs}", f"data.dev={pairs}"]


def test_from_end_to_end_and_not_again(pairs, tmp_path):
    recipe, words = tiny(pairs, published={"cer": 0.25, "wer": 0.5}, seeds=(0, 3))
    events = []
    result = run_recipe(recipe, tmp_path / "out", overrides=words, listener=events.append)
    assert result.finished
    assert result.directory == tmp_path / "out"
    assert result.report == tmp_path / "out" / "seed-0" / "report.html"
    assert result.report.is_file()
    assert sum(event["event"] == "epoch" for event in events) == 4

    scores = []
    for seed in (0, 3):
        run = tmp_path / "out" / f"seed-{seed}"
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["training"]["seed"], config["model"]["hidden"]) == (seed, 8)
        (folder,) = (run / "evaluation").iterdir()
        found = json.loads((folder / "metrics.json").read_text())["scores"]
        scores.append({name: score["value"] for name, score in found.items()})
    table = {row["metric"].lower().replace("per", "cer"): row for row in result.table}
    assert table.keys() == scores[0].keys() >= {"accuracy", "cer", "wer", "wer@3", "bleu"}
    for metric, row in table.items():
        values = [each[metric] for each in scores]
        digits = 2 if metric == "bleu" else 4
        assert row["mean"] == f"{statistics.fmean(values):.{digits}f}"
        assert row["spread"] == f"{statistics.stdev(values):.{digits}f}"
        assert row["runs"] == "2"
        assert row["published"] == {"cer": "0.2500", "wer": "0.5000"}.get(metric, "")
    record = json.loads((tmp_path / "out" / "results-demo.json").read_text())
    assert record["scores"] == scores
    assert record["seeds"] == [0, 3]

    kept = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*.safetensors")}
    logs = {file: file.read_text() for file in (tmp_path / "out").rglob("log.jsonl")}
    events.clear()
    again = run_recipe(recipe, tmp_path / "out", overrides=words, listener=events.append)
    assert again.table == result.table
    assert {event["event"] for event in events} <= {"predicted"}, "nothing is trained again"
    assert {file: file.read_bytes() for file in kept} == kept
    assert {file: file.read_text() for file in logs} == logs

    events.clear()
    fresh = run_recipe(recipe, tmp_path / "out", overrides=words, fresh=True, listener=events.append)
    assert sum(event["event"] == "epoch" for event in events) == 4
    assert fresh.table == result.table


def test_one_run_has_no_spread(pairs, tmp_path):
    recipe, words = tiny(pairs)
    result = run_recipe(recipe, tmp_path / "out", overrides=words, seeds=1)
    scores = json.loads(next((tmp_path / "out").rglob("metrics.json")).read_text())["scores"]
    for row, score in zip(result.table, scores.values(), strict=True):
        digits = 2 if score["name"] == "BLEU" else 4
        assert row["metric"] == score["name"]
        assert row["value"] == f"{score['value']:.{digits}f}"
        assert row["95 % interval"] == f"{score['low']:.{digits}f} to {score['high']:.{digits}f}"
        assert "spread" not in row


def test_examples_are_answered_by_the_first_run(pairs, tmp_path):
    recipe, words = tiny(pairs)
    recipe = dataclasses.replace(recipe, examples=("abc", "cab"))
    result = run_recipe(recipe, tmp_path / "out", overrides=words, seeds=1)
    assert [row["source"] for row in result.examples] == ["abc", "cab"]
    assert all(row["answers"].count("|") <= 2 and row["answers"].endswith(")") for row in result.examples)


def test_other_settings_do_not_pass_for_the_finished_run(pairs, tmp_path):
    recipe, words = tiny(pairs)
    run_recipe(recipe, tmp_path / "out", overrides=words)
    with pytest.raises(ThalwegError, match="hidden"):
        run_recipe(recipe, tmp_path / "out", overrides=[*words, "hidden=12"])
    other = dataclasses.replace(recipe, config=recipe.config | {"model": {"family": "transformer", "width": 8}})
    words = [word for word in words if not word.startswith(("hidden", "embedding"))]
    with pytest.raises(ThalwegError, match=r"was run with model.family=recurrent, got transformer; use --fresh"):
        run_recipe(other, tmp_path / "out", overrides=words)


def test_an_interrupted_recipe_goes_on(pairs, tmp_path):
    recipe, words = tiny(pairs)
    words = [*words, "checkpoint_every=1"]
    run_recipe(recipe, tmp_path / "whole", overrides=words)

    class Killed(Exception):  # noqa: N818
        pass

    def kill(event):
        if event["event"] == "step" and event["batch"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run_recipe(recipe, tmp_path / "cut", overrides=words, listener=kill)
    events = []
    run_recipe(recipe, tmp_path / "cut", overrides=words, listener=events.append)
    assert next(event for event in events if event["event"] == "start")["resumed"]
    whole, cut = (load_checkpoint(tmp_path / n / "seed-0" / "model.safetensors") for n in ("whole", "cut"))
    assert all((whole.tensors[name] == cut.tensors[name]).all() for name in whole.tensors)


def test_measuring_the_model_of_another_recipe(pairs, tmp_path, monkeypatch):
    recipe, words = tiny(pairs)
    run_recipe(recipe, tmp_path / "out", overrides=words)
    entries = (
        {"data": str(pairs), "search": "nucleus", "k": 3, "name": "three"},
        {"data": str(pairs), "search": "nucleus", "k": 1, "name": "one"},
    )
    other = dataclasses.replace(recipe, name="other", evaluations=entries, config={}, model_of="demo")
    events = []
    # `fresh` must not throw away what belongs to another recipe.
    result = run_recipe(other, tmp_path / "out", overrides=words, fresh=True, listener=events.append)
    assert {event["event"] for event in events} <= {"predicted"}
    folder = tmp_path / "out" / "seed-0" / "evaluation"
    assert {"three", "one"} <= {path.name for path in folder.iterdir()}
    three, one = (json.loads((folder / n / "metrics.json").read_text())["scores"] for n in ("three", "one"))
    table = {row["metric"]: row["value"] for row in result.table}
    assert table["WER@3"] == f"{three['wer@3']['value']:.4f}"
    assert table["WER"] == f"{one['wer']['value']:.4f}"


def test_fresh_removes_nothing_but_runs(pairs, tmp_path):
    recipe, words = tiny(pairs)
    (tmp_path / "out" / "seed-0").mkdir(parents=True)
    (tmp_path / "out" / "seed-0" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(ConfigError, match="is not a run directory: it is not removed"):
        run_recipe(recipe, tmp_path / "out", overrides=words, fresh=True)
    assert (tmp_path / "out" / "seed-0" / "thesis.txt").exists()


def test_bad_words_are_refused_before_anything_is_done(pairs, tmp_path):
    recipe, words = tiny(pairs)
    with pytest.raises(ConfigError, match="did you mean `hidden`"):
        run_recipe(recipe, tmp_path / "out", overrides=[*words, "hiden=3"])
    with pytest.raises(ConfigError, match=r"model\.dropout must be in"):
        run_recipe(recipe, tmp_path / "out", overrides=[*words, "dropout=2"])
    assert not (tmp_path / "out").exists()


def test_overrides_leave_the_recipe_alone():
    before = json.dumps(RECIPES["demo"].config)
    apply_overrides(RECIPES["demo"].config, ["hidden=8"])
    assert json.dumps(RECIPES["demo"].config) == before
