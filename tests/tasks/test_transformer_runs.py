"""Transformers end to end: they learn, load again, and a run that was killed ends as one that was not."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from toy_task import TINY, toy_config

from thalweg.energies.transformer.model import Transformer
from thalweg.errors import CheckpointError, ConfigError
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.tasks import apply_overrides, build_config, evaluate, load, train
from thalweg.tasks.config import as_settings
from thalweg.tasks.runs import check_continues

KINDS = [
    {},
    {"positions": "rotary", "norm": "post", "activation": "swiglu"},
    {"positions": "learned", "shared": True},
    {"kind": "causal"},
    {"pointer": True, "tied": False},
]


class Killed(Exception):  # noqa: N818
    """Stands for kill -9."""


def config_of(files, *, epochs=1, model=None, training=None, **sections):
    config = toy_config(files[0], dev=files[1], epochs=epochs, training=training or {}, **sections)
    shape = build_config({"model": TINY | (model or {})}).model
    return dataclasses.replace(config, model=shape)


@pytest.mark.parametrize("model", KINDS, ids=lambda model: "-".join(map(str, model)) or "plain")
def test_every_kind_trains_and_loads(toy_files, tmp_path, model):
    losses = []
    config = config_of(toy_files, epochs=4, model=model, training={"learning_rate": 0.01})
    train(config, tmp_path / "run", listener=lambda e: losses.append(e["loss"]) if e["event"] == "epoch" else None)
    assert losses[-1] < 0.9 * losses[0]
    again = load(tmp_path / "run", device="cpu")
    assert isinstance(again.model, Transformer)
    assert again.model.config == config.model
    together = [p.answers[0] for p in again.predict(["fad", "abc", "a"], attention=True)]
    alone = [next(again.predict([word])).answers[0] for word in ("fad", "abc", "a")]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.log_prob for a in together] == pytest.approx([a.log_prob for a in alone], abs=1e-4)


def test_it_learns(toy_files, tmp_path):
    training = {"learning_rate": 0.01, "batch_tokens": 200, "warmup": 20}
    train(config_of(toy_files, epochs=40, model={"width": 32}, training=training), tmp_path / "run")
    assert evaluate(tmp_path / "run", str(toy_files[1]), device="cpu").scores["accuracy"].value > 0.9


HARD = {"checkpoint_every": 3, "average": 0.9, "label_smoothing": 0.1}


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [0, 130])
def test_killed_and_resumed_equals_uninterrupted(toy_files, tmp_path, step, tokens):
    training = HARD | {"batch_tokens": tokens, "schedule": "inverse_sqrt", "warmup": 5}
    config = config_of(toy_files, epochs=2, model={"dropout": 0.3}, training=training)
    train(config, tmp_path / "whole")
    seen = []

    def kill(event):
        seen.extend([event] if event["event"] == "step" else [])
        if len(seen) == step:
            raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path / "cut", listener=kill)
    torch.rand(3)
    train(config, tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "last.safetensors"):
        one, other = (load_checkpoint(tmp_path / run / name).tensors for run in ("whole", "cut"))
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_batches_by_tokens_are_settled_for_a_run(toy_files, tmp_path):
    train(config_of(toy_files, training={"batch_tokens": 130}), tmp_path / "run")
    for training in ({"batch_tokens": 131}, {"batch_tokens": 0}):
        with pytest.raises(CheckpointError, match=r"expected training.batch_tokens=130 as before, got .*--out"):
            train(config_of(toy_files, epochs=2, training=training), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="raise `batch_tokens` to 7 or more"):
        train(config_of(toy_files, training={"batch_tokens": 5}), tmp_path / "other")


def test_what_a_run_said_nothing_about():
    """Runs from before a setting was there go on with what they had, and with nothing else."""
    named = {"model": {"family": "recurrent"}}
    new = {"config": as_settings(build_config(named)), "progress": {"epoch": 1, "step": 1}}
    old = copy.deepcopy(new)
    del old["config"]["model"]["family"], old["config"]["training"]["batch_tokens"], old["config"]["training"]["beta2"]
    check_continues(Path("last"), old, new)
    for words, said in (
        (["batch_tokens=9"], "training.batch_tokens=0"),
        (["family=transformer"], "model.family=recurrent"),
    ):
        new["config"] = as_settings(build_config(apply_overrides(named if "=9" in words[0] else {}, words)))
        with pytest.raises(CheckpointError, match=rf"expected {said} as before, got"):
            check_continues(Path("last"), old, new)


def test_a_run_does_not_change_its_family(toy_files, tmp_path):
    train(config_of(toy_files), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"expected model.family=transformer as before, got recurrent"):
        train(toy_config(toy_files[0], dev=toy_files[1], epochs=2), tmp_path / "run", resume=True)
