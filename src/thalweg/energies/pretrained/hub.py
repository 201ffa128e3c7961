"""Checkpoints by folder or hub name: found or said how to get, in one line."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError, MissingDependencyError, ThalwegError

EXTRA = "pip install 'thalweg[pretrained]'"


def package(name: str = "transformers") -> Any:
    """A package of the extra ``[pretrained]``, imported without its chatter.

    >>> package("json").loads("3")
    3
    >>> package("no_such_package")
    Traceback (most recent call last):
    ...
    thalweg.errors.MissingDependencyError: pretrained models need the package no_such_package; run: pip install ...
    """
    from importlib import import_module

    try:
        with quietly():
            found = import_module(name)
    except ImportError:
        raise MissingDependencyError(f"pretrained models need the package {name}; run: {EXTRA}") from None
    if name == "transformers":
        found.logging.set_verbosity_error()
        found.logging.disable_progress_bar()
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, warnings of others are not shown: they speak to people who wrote the call.

    >>> with quietly():
    ...     warnings.warn("look out")
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_folder(name: str) -> bool:
    """Whether a checkpoint's name is meant as a place on disk: it is there, or written as only paths are.

    >>> is_folder("google/byt5-small"), is_folder("./byt5"), is_folder("/models/byt5")
    (False, True, True)
    """
    return Path(name).exists() or name.startswith((".", "/", "~")) or name.endswith(("/", "\\")) or name.count("/") > 1


def check_place(name: str, *, pickled: bool = False, tokenizer: bool = False) -> None:
    """Refuse a folder that holds no checkpoint, or none but pickled weights; a hub name is not looked at.

    Args:
        pickled: whether pickled weights were asked for.
        tokenizer: whether a tokenizer is looked for rather than a model.

    >>> check_place("./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    if not is_folder(name):
        return
    folder = Path(name)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{name}: expected a checkpoint folder, got {got}; check the path")
    if tokenizer:
        return
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"{name}: expected a Hugging Face checkpoint, got a folder without config.json; give the folder that "
            "`save_pretrained` or `hf download` wrote"
        )
    try:
        if not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: expected a JSON object, got {error}; write or download it anew") from None
    if any(folder.glob("model*.safetensors")):
        return
    if not any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(f"{name}: expected model.safetensors, got no weights; download it beside config.json")
    if not pickled:
        raise CheckpointError(
            f"{name}: expected model.safetensors, got pytorch_model.bin alone, a pickle, which can run code; if you "
            "trust its author set model.weights=pickle"
        )


@contextmanager
def reading(name: str, what: str = "a checkpoint") -> Iterator[None]:
    """Inside, transformers reads a checkpoint: what it cannot find or read becomes one line with a remedy.

    >>> with reading("google/byt5-small"):
    ...     raise OSError("no connection")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: google/byt5-small: expected a folder, or a name that the hub or its local cache ...
    """
    try:
        with quietly():
            yield
    except ThalwegError:
        raise
    except (ImportError, OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ImportError):
            raise MissingDependencyError(f"{name}: {reason[:160]}; run: {EXTRA}") from None
        if is_folder(name) or not isinstance(error, OSError):
            raise CheckpointError(
                f"{name}: expected {what} that transformers reads, got an error ({reason[:200]}); download it anew"
            ) from None
        short = name.rpartition("/")[2]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise CheckpointError(
            f"{name}: expected a folder, or a name that the hub or its local cache knows, got neither{offline}; where "
            f"there is a network run `hf download {name} --local-dir {short}`, bring that folder here and set "
            f"model.checkpoint={short}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint folder; nothing where the file is absent or no object.

    >>> read_json(Path("absent.json"))
    {}
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
