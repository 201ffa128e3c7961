"""Runs that train in a moment, and the log of one that trains still."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

ARABIC = dict(zip("ابتدرسكلمن", "abtdrsklmn", strict=True))


def start_log(run: Path) -> None:
    """A training of five epochs that has done one."""
    start = {"event": "start", "device": "cpu", "parameters": 1234, "epochs": 5, "resumed": False}
    (run / "log.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    log_epoch(run, 1)


def log_epoch(run: Path, epoch: int) -> None:
    """Another epoch of it."""
    dev = {"loss": 3.0 / epoch, "cer": 0.5 / epoch}
    line = {"event": "epoch", "epoch": epoch, "loss": 2.0 / epoch, "dev": dev, "seconds": 1.0 * epoch, "best": True}
    with open(run / "log.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def train_strings(folder: Path, name: str, letters: str, spell: Callable[[str], str]) -> None:
    """A transducer of random words and their spellings; the pairs are beside it."""
    import thalweg

    rng = random.Random(0)
    words = sorted({"".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(200)})
    pairs = folder / f"{name}.tsv"
    pairs.write_text("".join(f"{word}\t{spell(word)}\n" for word in words), encoding="utf-8")
    settings = {
        "data": {"train": str(pairs)},
        "model": {"hidden": 24, "embedding": 16, "attention": "additive", "bidirectional": True},
        "training": {"epochs": 5, "batch_size": 16, "learning_rate": 0.02, "device": "cpu"},
    }
    thalweg.train(settings, folder / name)


def train_digits(folder: Path) -> None:
    """A classifier of handwritten digits."""
    import thalweg

    model = {"preset": "convnet-norm", "channels": [8], "hidden": [], "dropout": 0}
    settings = {"task": "classify", "data": {"path": "digits"}, "model": model}
    thalweg.train({**settings, "training": {"epochs": 1, "warmup": 5, "device": "cpu"}}, folder / "digits")
