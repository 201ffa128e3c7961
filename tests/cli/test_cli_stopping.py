"""Kills, Ctrl-C and closed pipes, on processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

PATIENCE = 120.0


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll until something has happened; a process that ends first is a failure."""
    until = time.monotonic() + PATIENCE
    while not ready():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def steps_done(run: Path) -> int:
    """The step of the last checkpoint, 0 without one; a checkpoint is replaced atomically, so it is whole."""
    from thalweg.learning.checkpoint import load_checkpoint

    last = run / "last.safetensors"
    return int(load_checkpoint(last).meta["progress"]["step"]) if last.exists() else 0


def epochs_in_log(run: Path) -> list[int]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [event["epoch"] for event in events if event["event"] == "epoch"]


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "last.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        different = [key for key in first if not torch.equal(first[key], second[key])]
        assert not different, f"{name}: {different}"


def test_killed_and_resumed_equals_uninterrupted(
    cli: Any, start: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    # A checkpoint after every step lets a kill fall into the middle of an epoch; dropout and teacher forcing
    # below 1 draw random numbers, so that the random state matters too.
    words = [*tiny, "epochs=12", "batch_size=8", "dropout=0.3"]
    words += ["teacher_forcing=0.5", "average=0.9", "metric=loss"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = cli("train", "--data", pairs, "--out", whole, *words)
    assert done.exit_code == 0, done.output

    process = start("train", "--data", pairs, "--out", cut, *words, "checkpoint_every=1", stdout=subprocess.PIPE)
    wait_for(lambda: steps_done(cut) >= 3, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    at = steps_done(cut)
    assert at < steps_done(whole), "killed before its end"

    resumed = cli("train", "--resume", "--out", cut, "checkpoint_every=1000")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed" in resumed.stderr
    assert epochs_in_log(cut) == epochs_in_log(whole) == list(range(1, 13))
    assert_same_weights(whole, cut)


def test_comparison_of_weights_can_fail(cli: Any, trained: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    data = trained.parent / "pairs.tsv"
    assert cli("train", "--data", data, "--out", tmp_path / "other", "--seed", 1, *tiny).exit_code == 0
    with pytest.raises(AssertionError, match=r"model\.safetensors: "):
        assert_same_weights(trained, tmp_path / "other")


def test_ctrl_c_leaves_a_resumable_run(
    cli: Any, start: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("train", "--data", pairs, "--out", run, *tiny, "epochs=1000000", stdout=subprocess.PIPE)
    wait_for(lambda: steps_done(run) > 0 and (run / "model.safetensors").is_file(), process)
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, notes
    assert f"thalweg train --resume --out {run}" in notes
    assert "Traceback" not in notes
    before = epochs_in_log(run)
    assert before == list(range(1, len(before) + 1))

    resumed = cli("train", "--resume", "--out", run, f"epochs={len(before) + 2}")
    assert resumed.exit_code == 0, resumed.output
    assert epochs_in_log(run) == list(range(1, len(before) + 3))


def test_closed_pipe_is_quiet(start: Any, trained: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("abc\ndef\n" * 20_000)  # far more than a pipe holds
    process = start("predict", trained, words, "--batch-size", 64, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith("abc\t")
    process.stdout.close()
    notes = process.stderr.read()
    assert process.wait(timeout=PATIENCE) == 128 + signal.SIGPIPE
    assert notes == ""


def test_lines_are_answered_as_they_come(start: Any, trained: Path) -> None:
    process = start("predict", trained, "--batch-size", 1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)
    for word in ("abc", "fed"):
        process.stdin.write(word + "\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith(word + "\t")
    process.stdin.close()
    assert process.wait(timeout=PATIENCE) == 0
