"""Training with losses over lists: they train, go on to the bit, begin when told, and bad settings are one line."""

from __future__ import annotations

import pytest
import torch
from test_transduce import Killed, assert_same_tensors, events_of
from toy_task import TINY, toy_config

from thalweg.errors import ConfigError
from thalweg.tasks import build_config, load, train
from thalweg.tasks.config import read_config
from thalweg.tasks.registry import apply_overrides

EPOCHS, AFTER = 7, 4
LEARNING = {"learning_rate": 0.01, "loss_after": AFTER, "loss_width": 4}


@pytest.fixture(scope="module")
def likelihood(toy_files, tmp_path_factory):
    """Epochs of a run by likelihood alone."""
    run = tmp_path_factory.mktemp("nll") / "run"
    train(toy_config(toy_files[0], dev=toy_files[1], epochs=EPOCHS, training=LEARNING), run)
    return [e for e in events_of(run) if e["event"] == "epoch"]


@pytest.mark.parametrize("loss", ["margin", "risk", "softmax_margin", "mce"])
def test_it_trains(toy_files, tmp_path, likelihood, loss):
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=EPOCHS, training={**LEARNING, "loss": loss})
    train(config, tmp_path / "run")
    epochs = [e for e in events_of(tmp_path / "run") if e["event"] == "epoch"]
    # The same to the bit until lists begin, then something else that falls and is no worse on other words.
    losses = [e["loss"] for e in epochs]
    assert losses[:AFTER] == [e["loss"] for e in likelihood[:AFTER]]
    assert losses[AFTER] != likelihood[AFTER]["loss"]
    assert losses[-1] < 0.9 * losses[AFTER]
    assert epochs[-1]["dev"]["accuracy"] >= likelihood[-1]["dev"]["accuracy"] - 0.02
    assert epochs[-1]["dev"]["accuracy"] > epochs[AFTER - 1]["dev"]["accuracy"]
    assert load(tmp_path / "run", device="cpu").meta["config"]["training"]["loss"] == loss


MODELS = {
    "recurrent": ({"dropout": 0.3}, {"teacher_forcing": 0.5, "batch_size": 40}),
    "transformer": ({**TINY, "dropout": 0.2, "hidden": None, "embedding": None}, {"batch_tokens": 400}),
}


def listed(toy_files, name, **training):
    model, settings = MODELS[name]
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=2, training={"average": 0.9, "checkpoint_every": 1})
    raw = {
        "data": {"train": config.data.train, "dev": config.data.dev},
        "model": {key: value for key, value in model.items() if value is not None},
        "training": {"batch_size": 16, "learning_rate": 0.01, "warmup": 0, "device": "cpu", "epochs": 2}
        | {"average": 0.9, "checkpoint_every": 1, "loss_width": 3, "loss": "risk", "loss_after": 1}
        | settings
        | training,
    }
    if name == "recurrent":
        raw["model"] |= {"hidden": 16, "embedding": 8}
    return build_config(raw)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("late", [False, True])
def test_killed_and_resumed_equals_uninterrupted(toy_files, tmp_path, name, late):
    config = listed(toy_files, name)
    train(config, tmp_path / "whole")
    batches = events_of(tmp_path / "whole")[-2]["step"] // 2
    steps = []

    def kill(event):
        if event["event"] == "step":
            steps.append(event)
            if len(steps) == batches + (2 if late else 0):  # among lists, or the last step before they begin
                raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path / "cut", listener=kill)
    torch.rand(3)
    train(config, tmp_path / "cut", resume=True)
    for file in ("model.safetensors", "last.safetensors"):
        assert_same_tensors(tmp_path / "whole" / file, tmp_path / "cut" / file)
    losses = [[e["loss"] for e in events_of(tmp_path / run) if e["event"] == "epoch"] for run in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_two_runs_are_the_same_and_losses_differ(toy_files, tmp_path):
    for run, loss in (("one", "margin"), ("two", "margin"), ("three", "risk")):
        train(listed(toy_files, "recurrent", loss=loss, loss_after=0, epochs=1), tmp_path / run)
    assert_same_tensors(tmp_path / "one" / "last.safetensors", tmp_path / "two" / "last.safetensors")
    with pytest.raises(AssertionError):
        assert_same_tensors(tmp_path / "one" / "last.safetensors", tmp_path / "three" / "last.safetensors")


def test_lists_may_begin_in_a_resumed_run(toy_files, tmp_path):
    """Likelihood first, then two more epochs by margin."""
    train(listed(toy_files, "recurrent", loss="nll"), tmp_path / "run")
    train(listed(toy_files, "recurrent", loss="margin", loss_after=2, epochs=4), tmp_path / "run", resume=True)
    assert [e["epoch"] for e in events_of(tmp_path / "run") if e["event"] == "epoch"] == [1, 2, 3, 4]
    saved = build_config(read_config(tmp_path / "run" / "config.yaml")).training
    assert (saved.loss, saved.loss_after) == ("margin", 2)


def test_half_of_the_epochs_come_first_by_default(toy_files, tmp_path):
    train(listed(toy_files, "recurrent", epochs=1, loss_after=-1), tmp_path / "run")
    assert build_config(read_config(tmp_path / "run" / "config.yaml")).training.loss_after == 0
    for epochs, after in ((1, 0), (2, 1), (15, 7), (20, 10)):
        assert build_config({"training": {"loss": "risk", "epochs": epochs}}).training.planned(9).loss_after == after
    assert build_config({"training": {"loss": "risk"}}).training.planned(400).loss_after == 10
    assert build_config({}).training.planned(400).loss_after == -1


def test_the_setting_is_a_word():
    raw = apply_overrides({}, ["loss=risk", "loss_after=3", "nll_weight=0.5", "loss_width=8", "epochs=9"])
    training = build_config(raw).training
    assert (training.loss, training.loss_after, training.nll_weight, training.loss_width) == ("risk", 3, 0.5, 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "rsk"}, r"`training.loss`: input should be 'nll', 'margin'"),
        ({"loss_width": 0}, "training.loss_width must be at least 1, got 0"),
        ({"loss_after": -2}, "training.loss_after must be 0 or more, or -1 for half, got -2"),
        ({"nll_weight": -0.1}, "training.nll_weight must be 0 or more and finite, got -0.1"),
        ({"nll_weight": float("nan")}, "training.nll_weight must be 0 or more and finite, got nan"),
        ({"loss_margin": float("inf")}, "training.loss_margin must be 0 or more and finite, got inf"),
        ({"loss_beta": 0}, "training.loss_beta must be above 0 and finite, got 0"),
        ({"loss": "risk", "epochs": 5, "loss_after": 5}, "training.loss_after must be below training.epochs = 5"),
        ({"los": "risk"}, "did you mean `loss`"),
    ],
)
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_config({"training": settings})
    assert "\n" not in str(caught.value)


def test_a_loss_that_never_begins(toy_files, tmp_path):
    with pytest.raises(
        ConfigError, match=r"training.loss_after must be below training.epochs = 200, or `risk` is never"
    ):
        train(listed(toy_files, "recurrent", epochs=0, batch_size=1000, loss_after=900), tmp_path / "run")
