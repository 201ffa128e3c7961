"""The same words give the same config on the command line, in YAML and in Python; every family learns by itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from thalweg.data import load_dataset
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError, ThalwegError
from thalweg.learning.settings import TrainingConfig
from thalweg.tasks.base import Task
from thalweg.tasks.config import to_yaml
from thalweg.tasks.registry import apply_overrides, build_config, list_tasks, task_named, train
from thalweg.tasks.runs import as_begun
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.presets import FAMILIES, FAMILY_TRAINING, PRESETS

ALL = [(task, name) for task in list_tasks() for name in task_named(task).presets]
REAL = Path(os.environ.get("THALWEG_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data") / "g2p" / "low"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The config that a command would train, which is not trained."""
    from thalweg.cli.main import app

    seen: list[Any] = []

    def keep(self: Task, config: Any, out: Path, **options: Any) -> None:
        seen.append(config)
        raise ThalwegError("seen")

    for task in map(task_named, list_tasks()):
        monkeypatch.setattr(type(task), "train", keep)

    def ask(*words: object) -> Any:
        done = CliRunner().invoke(app, ["train", *(str(word) for word in words)])
        assert "seen" in done.stderr, done.stderr
        return seen.pop()

    return ask


@pytest.mark.parametrize(("task", "name"), ALL)
def test_a_preset_is_the_same_wherever_it_is_named(tmp_path, told, task, name):
    chosen = task_named(task)
    section, key = chosen.data.split(".")
    plain = {"task": task, section: {key: "digits"}, "training": {"epochs": 3}}
    option = "--data" if task == "transduce" else "digits"
    data = ["--data", "digits"] if option == "--data" else [option]
    by_words = told("--task", task, *data, "--model", name, "epochs=3", "--out", tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**plain, "model": name}))
    by_yaml = told(tmp_path / "config.yaml", "--out", tmp_path / "run")
    by_python = chosen.configure({**plain, "model": name})
    within = chosen.configure({**plain, "model": {"preset": name}})
    assert by_words == by_yaml == by_python == within
    for key in ("model", "model.preset"):
        assert told("--task", task, *data, f"{key}={name}", "epochs=3", "--out", tmp_path / "run") == by_words
    assert chosen.configure(chosen.settings(by_python)) == by_python, "complete settings need no preset"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_wherever_it_is_named(tmp_path, told, family):
    settings = {"data": {"train": "x.tsv"}, "model": {"family": family}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    by_python = build_config(settings)
    assert told(tmp_path / "config.yaml", "--out", tmp_path / "run") == by_python
    assert build_config(apply_overrides({"data": settings["data"]}, [f"family={family}"])) == by_python
    assert TransduceConfig(data=by_python.data, model=FAMILIES[family]()) == by_python
    preset = "lstm-attention" if family == "recurrent" else family
    assert build_config(apply_overrides(PRESETS[preset], ["train=x.tsv"])) == by_python
    for key, value in FAMILY_TRAINING[family].items():
        assert getattr(by_python.training, key) == value


@pytest.mark.parametrize("key", FAMILY_TRAINING["transformer"])
def test_what_is_said_wins_over_the_family(key):
    usual = getattr(TrainingConfig(), key)
    for model in ({"family": "transformer"}, "transformer", {"preset": "causal"}):
        given = build_config({"model": model, "training": {key: usual}}).training
        family = TrainingConfig(**{**FAMILY_TRAINING["transformer"], key: usual})
        assert given == family


def test_a_batch_size_that_is_said_is_meant():
    config = build_config({"model": {"family": "transformer"}, "training": {"batch_size": 16}})
    assert (config.training.batch_size, config.training.batch_tokens) == (16, 0)
    assert config.training.learning_rate == FAMILY_TRAINING["transformer"]["learning_rate"]
    both = build_config({"model": "transformer", "training": {"batch_size": 16, "batch_tokens": 99}})
    assert both.training.batch_tokens == 99


def test_the_words_over_a_preset_know_its_settings():
    config = build_config(apply_overrides({"model": "transformer-rotary"}, ["heads=8", "model.width=64"]))
    assert config.model == TransformerConfig(heads=8, width=64, positions="rotary")
    for words in (["model=causal", "heads=2"], ["heads=2", "model.preset=causal"]):
        said = build_config({"model": {"preset": "causal", "heads": 2}})
        for under in ({}, {"model": "gru"}):
            assert build_config(apply_overrides(under, words)) == said
        model = apply_overrides({"model": {"preset": "transformer", "kind": "encoder-decoder", "width": 64}}, words)[
            "model"
        ]
        assert (model["kind"], model["heads"], model["width"]) == ("causal", 2, 64), "a word goes before a file"
    with pytest.raises(ConfigError, match="model `casual` is not known; did you mean `causal`"):
        apply_overrides({}, ["model=casual"])
    with pytest.raises(ConfigError, match="`hidden` is not a setting of transformer models"):
        apply_overrides({"model": "transformer-rotary"}, ["hidden=8"])


@pytest.mark.parametrize("name", ["transfomer", "", {"preset": 3}, {"preset": ["lstm"]}, {"preset": {}}])
def test_a_preset_that_is_not_there(name):
    with pytest.raises(ConfigError, match=r"config: model `.*` is not known; "):
        build_config({"model": name})


def test_presets_are_left_as_they_are():
    before = yaml.safe_dump(PRESETS)
    build_config({"model": {"preset": "causal", "heads": 2}, "training": {"epochs": 3}})
    assert yaml.safe_dump(PRESETS) == before


def test_a_run_of_before_keeps_its_training():
    """A run's own config is complete but for what came later, whatever its family brings today."""
    whole = yaml.safe_load(to_yaml(dataclasses.replace(build_config({"model": "causal"}), training=TrainingConfig())))
    for key in FAMILY_TRAINING["transformer"]:
        whole["training"].pop(key)
    assert build_config(as_begun(whole, TransduceConfig)).training == TrainingConfig()


# Settings of shape alone, for speed: what is learnt with is the family's.
SMALL: dict[str, dict[str, Any]] = {
    "auto": {},  # it brings its own
    "recurrent": {"hidden": 64, "embedding": 32},
    "monotonic": {"hidden": 64, "embedding": 32},
    # Two decoder layers: with one, a causal model cannot both find the end of the source and look back from there.
    "transformer": {"width": 64, "heads": 4, "feedforward": 128, "encoder_layers": 1, "decoder_layers": 2},
    "pretrained": {"shape": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}},
}
FROM_CHECKPOINT = ("pretrained", "lora")
FROM_SCRATCH = [name for name in PRESETS if name not in FROM_CHECKPOINT]


class LearntError(Exception):
    """Enough was learnt to stop."""


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a Transformer's slow start takes minutes, and a busy machine several times as long
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_preset_of_strings_learns_with_what_it_brings(tmp_path, name):
    """800 words with their transcriptions, or 5,000 of CMUdict; an answer that learnt nothing has a CER near 1."""
    data = {split: str(REAL / f"gre_{split}.tsv") for split in ("train", "dev")}
    for split in () if REAL.exists() else data:
        pairs = load_dataset("cmudict", split).pairs[::25]  # of all letters: they lie in order
        data[split] = str(tmp_path / f"{split}.tsv")
        Path(data[split]).write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in pairs), encoding="utf-8")
    shape = SMALL[PRESETS[name]["model"]["family"]]
    settings = {"data": data, "model": {"preset": name, **shape}, "training": {"device": "cpu"}}

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and event["dev"].get("cer", 1.0) < 0.4:
            raise LearntError

    with pytest.raises(LearntError):
        train(settings, tmp_path / "run", listener=look)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not REAL.exists(), reason="the words of SIGMORPHON 2021 are not here; docs/data.md says where they are"
)
def test_a_preset_of_checkpoints_takes_one_further(tmp_path):
    """A small T5 that has begun to learn, by the preset for that: both fine-tunings leave it better than it was."""
    data = {split: str(REAL / f"gre_{split}.tsv") for split in ("train", "dev")}
    model = {"preset": "t5", **SMALL["pretrained"]}
    first = train({"data": data, "model": model, "training": {"device": "cpu", "epochs": 150}}, tmp_path / "first")
    assert 0.2 < first.best["cer"] < 0.5
    for name in FROM_CHECKPOINT:
        model = {"preset": name, "checkpoint": str(first.run / "pretrained")}
        found = train({"data": data, "model": model, "training": {"device": "cpu"}}, tmp_path / name)
        assert found.best["cer"] < 0.9 * first.best["cer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", task_named("classify").presets)
def test_a_preset_of_images_learns(tmp_path, name):
    settings = {"task": "classify", "data": {"path": "digits"}, "model": name, "training": {"epochs": 12}}
    assert train(settings, tmp_path / "run").best["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", task_named("density").presets)
def test_a_preset_of_densities_learns(tmp_path, name):
    """Irises in sequences of ten; one Gaussian with independent columns has an NLL of 4.94 on all of them."""
    from sklearn.datasets import load_iris

    rows = [f"{n // 10}," + ",".join(map(str, row)) for n, row in enumerate(load_iris().data.tolist())]
    (tmp_path / "irises.csv").write_text("\n".join(["plant,a,b,c,d", *rows]) + "\n")
    data = {"path": str(tmp_path / "irises.csv"), "sequence": "plant"}
    if name != "hmm":
        (tmp_path / "irises.csv").write_text("\n".join(["a,b,c,d", *(row.partition(",")[2] for row in rows)]) + "\n")
        del data["sequence"]
    settings = {"task": "density", "data": data, "model": name, "training": {"device": "cpu"}}
    assert train(settings, tmp_path / "run").best["nll"] < 4.4
