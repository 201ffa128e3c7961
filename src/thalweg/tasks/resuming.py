"""What must not change between a run and its continuation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError

__all__ = ["as_begun", "check_continues"]

# The rest of `training` (epochs, patience, learning rate ...) may change: it only shapes what is to come.
FIXED = ("batch_size", "batch_tokens", "optimiser", "decay", "average", "seed", "precision")
# What a run was that was begun before it could be said; a setting that is not here may be anything in such a run.
UNSAID = {
    "model.family": "recurrent",
    "model.attention_map": "softmax",
    "training.batch_tokens": 0,
    "training.decay": "all",
}
# Of these, what has another default now: a run's own `config.yaml` without it means what it then was.
_OTHER_NOW = ("training.decay",)


def as_begun(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run's own ``config.yaml``, with what it could not say when it was written.

    Such a file is complete but for settings that came later; one of those whose default has changed since is filled
    in as it was.

    >>> as_begun({"training": {"epochs": 3}})
    {'training': {'epochs': 3, 'decay': 'all'}}
    >>> as_begun({"training": {"decay": "matrices"}})
    {'training': {'decay': 'matrices'}}
    """
    result = dict(settings)
    for name in _OTHER_NOW:
        section, _, key = name.partition(".")
        if isinstance(result.get(section), Mapping):
            result[section] = {**result[section], key: result[section].get(key, UNSAID[name])}
    return result


def check_continues(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another task, another model, other symbols or classes, or another order of the data.

    Args:
        path: the checkpoint, for the message.
        before, now: metadata of the checkpoint and of the continuation: ``task``, ``config``, ``data``, and ``source``
            and ``target`` or ``classes``.

    >>> old = {"config": {"model": {"hidden": 64}, "training": {}}, "progress": {"epoch": 3}}
    >>> new = {"config": {"model": {"hidden": 32}, "training": {}}}
    >>> check_continues(Path("last.safetensors"), old, new)
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: last.safetensors: expected model.hidden=64 as before, got 32; ...
    """
    task = now.get("task", "transduce")
    items = "images" if task == "classify" else "pairs"
    kind = {"transduce": "a transduction", "classify": "a classification"}.get(task, f"a {task}")
    if before.get("task", task) != task:
        raise CheckpointError(f"{path}: expected {kind} run, got one of {before['task']}; name another run")
    try:
        int(before["progress"]["epoch"])
        old, new = before["config"], now["config"]
        settings = [("model", key, value) for key, value in new["model"].items()]
        settings += [("training", key, value) for key, value in new["training"].items() if key in FIXED]
        pairs = {
            (name := f"{section}.{key}"): (old[section].get(key, UNSAID.get(name, value)), value)
            for section, key, value in settings
        }
        sides = " and ".join(side for side in ("source", "target") if before.get(side) != now.get(side))
        other = f"{sides} symbols" if sides else "classes" if before.get("classes") != now.get("classes") else ""
        other_data = before.get("data") != now.get("data")
    except (KeyError, AttributeError, TypeError, ValueError):
        raise CheckpointError(f"{path}: expected {kind} run, got another kind; name another run") from None
    for key, (was, value) in pairs.items():
        if was != value:
            raise CheckpointError(
                f"{path}: expected {key}={was} as before, got {value}; keep it or choose another --out"
            )
    if other:
        raise CheckpointError(
            f"{path}: expected the {other} it was trained on, got others; "
            "resume with the same data or choose another --out"
        )
    if other_data:
        raise CheckpointError(
            f"{path}: expected the training {items} it was begun with, got others; "
            "resume with the same data or choose another --out"
        )
