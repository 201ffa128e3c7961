"""Models in the box: which names stand for a run that comes with the package, and where its files are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from thalweg.errors import ConfigError
from thalweg.files import write_atomically
from thalweg.learning.checkpoint import MODEL

FILES = (MODEL, "config.yaml", "log.jsonl")
"""What a run in the box holds, beside its licence and its figures."""

_BOX = Path(str(resources.files(__package__ or "")))


@dataclass(frozen=True)
class Boxed:
    """A model in the box.

    Attributes:
        name: the word that stands for it; about: what it does, in a line.
        examples: what to try it with.
        task: ``module:attribute`` of the task that answers with it; folder: its run directory, which is only read.

    >>> boxed("english").about.split()[0]
    'English'
    """

    name: str
    about: str
    examples: list[str]
    task: str
    folder: Path


@cache
def list_boxed() -> dict[str, Boxed]:
    """All models in the box, by name.

    >>> list(list_boxed())
    ['english']
    """
    listed = json.loads((_BOX / "registry.json").read_text(encoding="utf-8"))
    return {name: Boxed(name=name, folder=_BOX / name, **entry) for name, entry in listed.items()}


def boxed(run: str | Path) -> Boxed | None:
    """The model in the box that a word stands for; None for any other word.

    A run of that name in the working directory wins: a folder with a ``model.safetensors`` or a ``config.yaml``, or a
    file. Any other folder does not, so that one with texts in it takes nothing away.

    >>> boxed("english").name, boxed("runs/english")
    ('english', None)
    """
    path = Path(run)
    found = list_boxed().get(str(path))
    if found is None or path.is_file() or any((path / name).is_file() for name in FILES[:2]):
        return None
    return found


def folder_of(run: str | Path) -> Path:
    """Where the files of a run are: in the package for a model in the box, at its own place for any other.

    >>> folder_of("runs/names") == Path("runs/names"), folder_of("english").name
    (True, 'english')
    """
    found = boxed(run)
    return Path(run) if found is None else found.folder


def copied(run: str | Path) -> Path:
    """A place to write to: ``runs/NAME-boxed`` with a copy of a model in the box; any other run is its own.

    Nothing is ever written into the package, which may belong to another user, or to all.

    >>> copied("runs/names") == Path("runs/names")
    True
    """
    found = boxed(run)
    if found is None:
        return Path(run)
    copy = Path("runs") / f"{found.name}-boxed"
    for name in FILES:
        data, place = (found.folder / name).read_bytes(), copy / name
        if place.is_file() and place.read_bytes() == data:
            continue
        if place.exists():
            raise ConfigError(
                f"{place}: expected a copy of the model `{found.name}` of this version, got another file; "
                f"move {copy} away or remove it"
            )
        write_atomically(place, data)
    return copy
