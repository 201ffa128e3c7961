"""A toy task (three letters, backwards and in capitals) and models trained on it, shared by the folder."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from thalweg.tasks import TransduceConfig, build_config, train

LETTERS = "abcdef"
SMALL = {"hidden": 32, "embedding": 16, "dropout": 0.0}
QUICK = {"batch_size": 16, "learning_rate": 0.02, "weight_decay": 0.0, "warmup": 0, "device": "cpu"}
QUICK |= {"average": 0.0, "label_smoothing": 0.0, "metric": "accuracy"}


def answer(word: str) -> str:
    return word[::-1].upper()


def write_pairs(path: Path, pairs: Any) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def toy_config(
    train: Path, *, dev: Path | None = None, epochs: int = 20, **sections: dict[str, Any]
) -> TransduceConfig:
    raw = {
        "data": {"train": str(train), "dev": str(dev or "")} | sections.get("data", {}),
        "model": SMALL | sections.get("model", {}),
        "training": QUICK | {"epochs": epochs} | sections.get("training", {}),
        "search": sections.get("search", {}),
    }
    return build_config(raw)


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
