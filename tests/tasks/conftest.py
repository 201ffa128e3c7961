"""Models trained on the toy task, shared by the folder; tests that change a run copy it first."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from toy_task import LETTERS, answer, toy_config, write_pairs

from thalweg.tasks import train


@pytest.fixture(scope="session")
def toy_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """160 words to train on, and 56 others."""
    folder = tmp_path_factory.mktemp("toy")
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    random.Random(0).shuffle(words)
    pairs = [(word, answer(word)) for word in words]
    return write_pairs(folder / "train.tsv", pairs[:160]), write_pairs(folder / "test.tsv", pairs[160:])


@pytest.fixture(scope="session")
def learnt(toy_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt the toy task, without a dev file."""
    run = tmp_path_factory.mktemp("learnt") / "run"
    train(toy_config(toy_files[0]), run)
    return run


@pytest.fixture(scope="session")
def halfway(toy_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped early: right now and then, and unsure of itself."""
    run = tmp_path_factory.mktemp("halfway") / "run"
    train(toy_config(toy_files[0], dev=toy_files[1], epochs=3, training={"learning_rate": 0.01}), run)
    return run
