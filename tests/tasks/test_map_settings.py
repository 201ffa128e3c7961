"""Attention maps as settings: how they are spelt, what is refused, old runs, and training with them."""

from __future__ import annotations

import shutil

import pytest
import torch
import yaml
from toy_task import TINY, toy_config

from thalweg.errors import ConfigError
from thalweg.learning.checkpoint import load_checkpoint, save_checkpoint
from thalweg.tasks import apply_overrides, build_config, evaluate, load, train
from thalweg.tasks.config import to_yaml

KINDS = {"recurrent": {"attention": "additive"}, "transformer": TINY | {"width": 32}}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("key", ["attention.map", "model.attention_map", "attention_map", "model.attention.map"])
def test_spellings(key, family):
    for value, expected in (("entmax15", "entmax15"), ("1.3", 1.3), ("2", 2.0), ("softmax", "softmax")):
        raw = apply_overrides({"model": {"family": family}}, [f"{key}={value}"])
        config = build_config(raw)
        assert config.model.attention_map == expected
        assert build_config(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize("family", KINDS)
def test_unknown_maps_are_one_line(family):
    def refused(word):
        with pytest.raises(ConfigError) as error:
            build_config(apply_overrides({"model": {"family": family}}, [word]))
        assert "\n" not in str(error.value)
        return str(error.value)

    expected = "config: model.attention_map `entmx15` is no known map and no alpha; did you mean `entmax15`?"
    assert refused("attention.map=entmx15") == expected
    assert "or an alpha from 1 on, got 0.5" in refused("attention.map=0.5")
    assert "expected a number, got true" in refused("attention.map=true")
    assert "model.attention_map" in refused("attention.map=")


def test_a_map_without_attention_is_refused():
    with pytest.raises(ConfigError, match="needs attention"):
        build_config({"model": {"attention": "none", "attention_map": "sparsemax"}})


@pytest.mark.parametrize("family", KINDS)
def test_it_learns_with_entmax(toy_files, tmp_path, family):
    run = tmp_path / "run"
    settings = {"learning_rate": 0.01, "batch_tokens": 200, "warmup": 20} if family == "transformer" else {}
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=20, training=settings)
    shape = {} if family == "transformer" else {"hidden": 32, "embedding": 16, "dropout": 0.0}
    raw = yaml.safe_load(to_yaml(config)) | {"model": shape | KINDS[family] | {"attention_map": "entmax15"}}
    raw["training"]["epochs"] = 25 if family == "transformer" else 12
    train(build_config(raw), run)
    assert evaluate(run, str(toy_files[1]), device="cpu").scores["accuracy"].value > 0.7
    again = load(run, device="cpu")
    assert again.model.config.attention_map == "entmax15"
    answer = next(again.predict(["fad"], attention=True)).answers[0]
    assert answer.attention is not None
    weights = torch.tensor(answer.attention)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)), atol=1e-3, rtol=0)
    assert bool((weights == 0).any())


def test_runs_from_before_there_were_maps_load(learnt, tmp_path):
    run = tmp_path / "old"
    shutil.copytree(learnt, run)
    saved = load_checkpoint(run / "model.safetensors")
    assert saved.meta["config"]["model"].pop("attention_map") == "softmax"
    save_checkpoint(run / "model.safetensors", saved)
    old, new = load(run, device="cpu"), load(learnt, device="cpu")
    assert old.model.config.has_softmax
    assert next(old.predict(["fad"])).answers == next(new.predict(["fad"])).answers
