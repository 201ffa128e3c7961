"""What must not change between a run and its continuation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError

__all__ = ["check_continues"]

# The rest of `training` (epochs, patience, learning rate ...) may change: it only shapes what is to come.
FIXED = ("batch_size", "batch_tokens", "optimiser", "average", "seed", "precision")
# What a run was that was begun before it could be said; a setting that is not here may be anything in such a run.
UNSAID = {"model.family": "recurrent", "training.batch_tokens": 0}


def check_continues(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another model, other symbols or another order of the data.

    Args:
        path: the checkpoint, for the message.
        before, now: metadata (``config``, ``source``, ``target``) of the checkpoint and of the continuation.

    >>> old = {"config": {"model": {"hidden": 64}, "training": {}}, "progress": {"epoch": 3}}
    >>> new = {"config": {"model": {"hidden": 32}, "training": {}}}
    >>> check_continues(Path("last.safetensors"), old, new)
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: last.safetensors: expected model.hidden=64 as before, got 32; ...
    """
    try:
        int(before["progress"]["epoch"])
        old, new = before["config"], now["config"]
        settings = [("model", key, value) for key, value in new["model"].items()]
        settings += [("training", key, value) for key, value in new["training"].items() if key in FIXED]
        pairs = {
            (name := f"{section}.{key}"): (old[section].get(key, UNSAID.get(name, value)), value)
            for section, key, value in settings
        }
        sides = [side for side in ("source", "target") if before.get(side) != now.get(side)]
        other_data = before.get("data") != now.get("data")
    except (KeyError, AttributeError, TypeError, ValueError):
        raise CheckpointError(f"{path}: expected a transduction run, got another kind; name another run") from None
    for key, (was, value) in pairs.items():
        if was != value:
            raise CheckpointError(
                f"{path}: expected {key}={was} as before, got {value}; keep it or choose another --out"
            )
    if sides:
        raise CheckpointError(
            f"{path}: expected the {' and '.join(sides)} symbols it was trained on, got others; "
            "resume with the same data or choose another --out"
        )
    if other_data:
        raise CheckpointError(
            f"{path}: expected the training pairs it was begun with, got others; "
            "resume with the same data or choose another --out"
        )
