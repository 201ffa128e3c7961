"""The toy task of this folder's tests: three letters, written backwards and in capitals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thalweg.tasks import TransduceConfig, build_config

LETTERS = "abcdef"
SMALL = {"hidden": 32, "embedding": 16, "dropout": 0.0}
QUICK = {"batch_size": 16, "learning_rate": 0.02, "weight_decay": 0.0, "warmup": 0, "device": "cpu"}
QUICK |= {"average": 0.0, "label_smoothing": 0.0, "metric": "accuracy"}

QUICK |= {"evaluate_every": 1, "checkpoint_seconds": 0.0}
TINY = {"family": "transformer", "width": 16, "heads": 2, "feedforward": 32, "encoder_layers": 1, "decoder_layers": 1}
TINY |= {"dropout": 0.0}


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
