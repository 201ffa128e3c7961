"""Training a transducer end to end: it learns, holds out dev data, logs, resumes to the bit, refuses bad input."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from toy_task import toy_config, write_pairs

from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.learning import checkpoint
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.tasks import SearchConfig, build_config, evaluate, load, train
from thalweg.tasks.transduce.training import words_of


class Killed(Exception):  # noqa: N818
    """Stands for kill -9."""


def events_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = load_checkpoint(one).tensors, load_checkpoint(other).tensors
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_it_learns(learnt, toy_files, tmp_path):
    scores = evaluate(shutil.copytree(learnt, tmp_path / "run"), str(toy_files[1]), device="cpu").scores
    assert scores["accuracy"].value > 0.9
    assert scores["cer"].value < 0.05
    best = next(load(learnt, device="cpu").predict(["fad"])).answers[0]
    assert (best.text, best.symbols, best.finished) == ("DAF", ("D", "A", "F"), True)
    assert best.probability > 0.5


@pytest.mark.parametrize(
    "model",
    [
        {"cell": "gru", "attention": "dot"},
        {"cell": "gru-reset-before", "attention": "general", "bidirectional": False},
        {"cell": "lstm", "attention": "none", "reverse_source": True, "encoder_layers": 2},
        {"cell": "gru", "attention": "additive", "tied": True, "decoder_layers": 2},
    ],
)
def test_every_kind_of_model_trains(toy_files, tmp_path, model):
    losses = []
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=4, model=model, training={"teacher_forcing": 0.9})
    train(config, tmp_path / "run", listener=lambda e: losses.append(e["loss"]) if e["event"] == "epoch" else None)
    assert losses[-1] < 0.8 * losses[0]
    again = load(tmp_path / "run", device="cpu")
    assert dict(vars(again.model.config)) == dict(vars(config.model))


def share(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def test_dev_data_are_held_out_by_a_hash_of_the_source(tmp_path):
    # Each source has a letter of its own, which the model knows just where it was trained on; its targets go together.
    sources = [f"w{chr(0x4E00 + n)}" for n in range(60)]
    held = {source for source in sources if share(source) < 0.2}
    assert 4 < len(held) < 20
    pairs = [(source, target) for source in sources for target in ("one", "other")]
    config = toy_config(write_pairs(tmp_path / "x.tsv", pairs), epochs=1, data={"held_out": 0.2})
    train(config, tmp_path / "run")
    start = events_of(tmp_path / "run")[0]
    assert start["dev"]["pairs"] == 2 * len(held)
    assert start["train"]["pairs"] == 120 - 2 * len(held)
    known = load(tmp_path / "run", device="cpu").source.alphabet
    assert {source for source in sources if source[1] not in known} == held


def test_too_few_pairs_to_hold_out(tmp_path):
    path = write_pairs(tmp_path / "x.tsv", [("a", "b")])
    with pytest.raises(DataError, match="1 pairs are too few to keep 10% apart as dev data; give --dev FILE"):
        train(toy_config(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_log_and_the_config_tell_the_whole_story(halfway, toy_files):
    start, *epochs, end = events_of(halfway)
    assert (start["event"], end["event"], end["reason"]) == ("start", "end", "epochs")
    assert start["train"]["pairs"] == 160
    assert start["dev"]["pairs"] == 56
    assert start["source"] == {"symbols": "characters, NFC", "size": 10}
    model = load(halfway, device="cpu").model
    assert start["parameters"] == sum(p.numel() for p in model.parameters())
    assert [e["epoch"] for e in epochs] == [1, 2, 3]
    assert [e["step"] for e in epochs] == [10, 20, 30]
    assert all({"loss", "accuracy", "cer", "wer", "bleu"} <= e["dev"].keys() for e in epochs)
    assert all(e["pairs_per_second"] > 0 for e in epochs)
    assert end["best"] == epochs[end["best_epoch"] - 1]["dev"]
    # The model is chosen by accuracy; equals are settled by the loss.
    ranked = sorted(epochs, key=lambda e: (-e["dev"]["accuracy"], e["dev"]["loss"]))
    assert ranked[0]["epoch"] == end["best_epoch"]
    config = build_config(yaml.safe_load((halfway / "config.yaml").read_text(encoding="utf-8")))
    assert config == toy_config(toy_files[0], dev=toy_files[1], epochs=3, training={"learning_rate": 0.01})


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_dev_metrics_are_those_of_real_decoding(toy_files, tmp_path, search):
    how = {"search": search, "width": 3}
    result = train(toy_config(toy_files[0], dev=toy_files[1], epochs=3, search=how), tmp_path / "run")
    found = evaluate(tmp_path / "run", str(toy_files[1]), k=1, how=SearchConfig(**how), device="cpu").scores
    for name in ("accuracy", "cer", "wer", "bleu"):
        assert result.best[name] == pytest.approx(found[name].value, abs=1e-12)


def test_the_dev_search_does_not_touch_training(toy_files, tmp_path):
    for search in ("greedy", "nucleus"):
        settings = {"metric": "loss", "teacher_forcing": 0.5}
        config = toy_config(
            toy_files[0], epochs=2, model={"dropout": 0.3}, training=settings, search={"search": search}
        )
        train(config, tmp_path / search)
    assert_same_tensors(tmp_path / "greedy" / "last.safetensors", tmp_path / "nucleus" / "last.safetensors")


HARD = {"teacher_forcing": 0.5, "average": 0.9, "schedule": "plateau", "plateau_patience": 0, "label_smoothing": 0.1}
HARD |= {"checkpoint_every": 1, "batch_size": 40}


@pytest.mark.parametrize("step", [1, 5, *[pytest.param(step, marks=pytest.mark.slow) for step in (2, 4, 7)]])
def test_killed_and_resumed_equals_uninterrupted(toy_files, tmp_path, step):
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=2, model={"dropout": 0.3}, training=HARD)
    train(config, tmp_path / "whole")
    steps = []

    def kill(event):
        if event["event"] == "step":
            steps.append(event)
            if len(steps) == step:
                raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path / "cut", listener=kill)
    with (tmp_path / "cut" / "log.jsonl").open("a") as log:
        log.write('{"event": "epo')  # a kill can leave half a line
    (tmp_path / "cut" / ".last.safetensors.x1.tmp").write_bytes(b"half a file")
    torch.rand(3)
    train(config, tmp_path / "cut", resume=True)
    assert not list((tmp_path / "cut").glob(".*.tmp"))
    for name in ("model.safetensors", "last.safetensors"):
        assert_same_tensors(tmp_path / "whole" / name, tmp_path / "cut" / name)
    kept = [[e for e in events_of(tmp_path / name) if e["event"] == "epoch"] for name in ("whole", "cut")]
    for one, other in zip(*kept, strict=True):
        timed = {"seconds", "train_seconds", "data_seconds", "pairs_per_second", "memory"}
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


def test_two_runs_are_the_same_and_seeds_differ(toy_files, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        train(toy_config(toy_files[0], epochs=1, training={"seed": seed}), tmp_path / name)
    assert_same_tensors(tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_same_tensors(tmp_path / "one" / "model.safetensors", tmp_path / "three" / "model.safetensors")


def test_a_run_is_not_overwritten_and_not_continued_on_other_data(toy_files, tmp_path):
    run = tmp_path / "run"
    train(toy_config(toy_files[0], epochs=1), run)
    with pytest.raises(ConfigError, match="holds a run already; resume it with --resume or choose another --out"):
        train(toy_config(toy_files[0], epochs=1), run)
    lines = toy_files[0].read_text().splitlines(keepends=True)
    other = tmp_path / "other.tsv"
    other.write_text("".join(lines[1:] + lines[:1]))
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    for config in (
        toy_config(other, epochs=2),
        toy_config(toy_files[0], epochs=2, model={"hidden": 31}),
        toy_config(toy_files[0], epochs=2, data={"target_symbols": "graphemes"}),
    ):
        with pytest.raises(CheckpointError, match="choose another --out"):
            train(config, run, resume=True)
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
    assert train(toy_config(toy_files[0], epochs=2), run, resume=True).reason == "epochs"


def test_symbols_are_guessed_or_set(tmp_path):
    # 150 syllables of Hangul spelled with few letters: taken apart unless told otherwise.
    words = [chr(0xAC00 + 28 * n) + chr(0xAC00 + 28 * (n + 1)) for n in range(0, 300, 2)]
    path = write_pairs(tmp_path / "x.tsv", [(w, "k a " + "n g") for w in words])
    train(toy_config(path, epochs=1), tmp_path / "guessed")
    start = events_of(tmp_path / "guessed")[0]
    assert start["source"]["symbols"] == "characters, NFD"
    assert start["target"] == {"symbols": "spaced, NFC", "size": 8}
    assert start["source"]["size"] < 60
    set_by_hand = {"source_normalise": "nfc", "target_symbols": "characters"}
    train(toy_config(path, epochs=1, data=set_by_hand), tmp_path / "set")
    start = events_of(tmp_path / "set")[0]
    assert start["source"]["symbols"] == "characters, NFC"
    assert start["source"]["size"] > 200
    assert start["target"]["size"] == 4 + len(set("k a n g"))


def test_words_of_sentences():
    class Spaced:
        class symbols:  # noqa: N801
            kind = "spaced"

    class Characters:
        class symbols:  # noqa: N801
            kind = "characters"

    assert words_of(Spaced, ["a b", "c d"]) == "item"
    assert words_of(Characters, ["a b", "c d", "e"]) == "space"
    assert words_of(Characters, ["a b", "c", "d"]) == "item"


def test_no_data():
    with pytest.raises(ConfigError, match="no training data"):
        train(build_config({}), "unused")


def test_a_checkpoint_is_read_once(toy_files, tmp_path, monkeypatch):
    train(toy_config(toy_files[0], dev=toy_files[1], epochs=1), tmp_path / "run")
    read, plain = [], checkpoint.read_tensors

    def spy(path, form, *, values=True):
        read.extend([path.name] if values else [])
        return plain(path, form, values=values)

    monkeypatch.setattr(checkpoint, "read_tensors", spy)
    train(toy_config(toy_files[0], dev=toy_files[1], epochs=2), tmp_path / "run", resume=True)
    assert sorted(read) == ["last.safetensors", "model.safetensors"]
    read.clear()
    assert next(load(tmp_path / "run").predict(["abc"])).answers
    assert read == ["model.safetensors"]
