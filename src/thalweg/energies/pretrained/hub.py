"""Checkpoints by folder or hub name: found or said how to get, in one line."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from thalweg.energies.transformer.checkpoints.files import read_json
from thalweg.errors import CheckpointError, MissingDependencyError, ThalwegError
from thalweg.limits import within_memory

EXTRA = "pip install 'thalweg[pretrained]'"
WEIGHTS = "model.safetensors"

SAFELY: dict[str, Any] = {"trust_remote_code": False}
"""What every reading by transformers is told: code that comes with a checkpoint is not run, and nobody is asked."""


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
        found.logging.disable_progress_bar()
        for talker in (found.logging, import_module("huggingface_hub.utils.logging")):
            talker.set_verbosity_error()
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


def located(name: str) -> str:
    """What transformers is told to read: the name, or its folder in the local cache where no hub answers.

    By the name the hub's own client would try for most of a minute.

    >>> located("./byt5")
    './byt5'
    """
    if is_folder(name) or _answers(_minute()):
        return name
    return _cached(name) or name


def check_place(name: str, *, pickled: bool = False, tokenizer: bool = False) -> None:
    """Refuse a folder that holds no checkpoint, or none but pickled weights, and a hub name while no hub answers.

    Args:
        pickled: whether pickled weights were asked for.
        tokenizer: whether a tokenizer is looked for rather than a model.

    >>> check_place("./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    if not is_folder(name):
        with reading(name):
            _check_reached(name)
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
    read_json(config)
    if any(folder.glob("model*.safetensors")):
        return
    if not any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(f"{name}: expected model.safetensors, got no weights; download it beside config.json")
    if not pickled:
        raise CheckpointError(
            f"{name}: expected model.safetensors, got pytorch_model.bin alone, a pickle, which can run code; if you "
            "trust its author set model.weights=pickle"
        )


def _check_reached(name: str) -> None:
    """Refuse a name that is not in the local cache where no hub answers, or that no repository can have."""
    if not _cached(name) and not _answers(_minute()):
        raise OSError("no answer")


def _cached(name: str) -> str:
    """The folder of a checkpoint in the local cache; empty where it is not there."""
    try:
        found = package("huggingface_hub").try_to_load_from_cache(name, "config.json")
    except ValueError as error:  # a name that no repository can have
        raise OSError(str(error)) from None
    return str(Path(found).parent) if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _answers(minute: int) -> bool:
    """Whether the hub answers, asked once a minute."""
    package()  # quiet, with what is below it
    hub, told = package("huggingface_hub"), package("huggingface_hub.constants")
    if told.HF_HUB_OFFLINE:
        return False
    try:
        hub.get_session().head(told.ENDPOINT, timeout=told.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of whatever client is there
        return False
    return True


def _minute() -> int:
    return int(time.monotonic() // 60)


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
        with quietly(), within_memory("take a smaller checkpoint"):
            yield
    except ThalwegError:
        raise
    except ImportError as error:
        raise MissingDependencyError(f"{name}: {_shortly(error)}; run: {EXTRA}") from None
    except Exception as error:  # a file of others may break anything in a package of others
        if "custom code" in str(error):
            raise CheckpointError(
                f"{name}: expected a model that transformers knows, got one with code of its own, which is not run; "
                "take another"
            ) from None
        if is_folder(name) or not isinstance(error, OSError):
            raise CheckpointError(
                f"{name}: expected {what} that transformers reads, got an error ({_shortly(error)}); download it anew"
            ) from None
        if what == WEIGHTS and _cached(name):
            raise CheckpointError(
                f"{name}: expected model.safetensors, got none from the hub or its local cache; if it has "
                "pytorch_model.bin alone, a pickle, which can run code, and you trust its author set "
                "model.weights=pickle"
            ) from None
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        short = name.rpartition("/")[2]
        raise CheckpointError(
            f"{name}: expected a folder, or a name that the hub or its local cache has {what} of, got neither{offline};"
            f" where there is a network run `hf download {name} --local-dir {short}`, bring that folder here and set "
            f"model.checkpoint={short}"
        ) from None


def _shortly(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
