"""The runs that a service was started with: their names, their models, and how they are loaded anew."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError, ThalwegError
from thalweg.learning.checkpoint import MODEL
from thalweg.serve.batching import Batcher, Size
from thalweg.tasks.boxed.models import boxed
from thalweg.tasks.registry import task_of_run
from thalweg.tasks.serving import Servant

logger = logging.getLogger("thalweg.serve")

_SEED = re.compile(r"seed-\d+")  # a run of a recipe: its folder is named after the seed


def set_aside() -> None:
    """Let the garbage collector pass over all that there is now, and look through it once before.

    To go through the objects of torch, of the app and of the models stops every caller for as long as hundreds of words
    take, and load brings that about again and again.

    >>> set_aside()
    >>> gc.get_freeze_count() > 0
    True
    """
    gc.unfreeze()  # what was set aside before may have become garbage: a model that another has replaced
    gc.collect()
    gc.freeze()


def runs_in(run: str) -> list[str]:
    """A run itself; for the folder of a recipe, which holds a run for each seed, those runs.

    >>> runs_in("runs/names")
    ['runs/names']
    """
    folder = Path(run)
    if boxed(run) is not None or any((folder / name).exists() for name in (MODEL, "config.yaml", "log.jsonl")):
        return [run]
    seeds = [each for each in folder.glob("seed-*") if each.is_dir() and _SEED.fullmatch(each.name)]
    return [str(each) for each in sorted(seeds, key=lambda each: int(each.name[5:]))] or [run]


def names_of(runs: Sequence[str]) -> dict[str, str]:
    """Names under which runs are served: the last part of each path that is no seed, numbered where two are the same.

    >>> names_of(["runs/demo/seed-0", "english", "old/demo"])
    {'demo': 'runs/demo/seed-0', 'english': 'english', 'demo-2': 'old/demo'}
    """
    found: dict[str, str] = {}
    for run in (each for given in runs for each in runs_in(given)):
        path = Path(os.path.abspath(run))
        path = path.parent if path.is_file() else path
        stem = (path.parent if _SEED.fullmatch(path.name) else path).name or "run"
        name, number = stem, 1
        while name in found:
            number += 1
            name = f"{stem}-{number}"
        found[name] = run
    return found


@dataclass(eq=False)
class Shelf:
    """One run: what answers for it, once it has a model, and its queue."""

    name: str
    run: str
    batcher: Batcher
    servant: Servant | None = None
    task: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """Where its training is logged; none of a model that comes without."""
        path = Path(self.run)
        return path if path.is_dir() and boxed(self.run) is None else None

    @property
    def shown(self) -> str:
        """What to give ``thalweg.load``: the run as it was named, unless that tells where on the disk it is."""
        return self.name if Path(self.run).is_absolute() else self.run

    def open(self, device: str) -> None:
        """Load the model and put it in the place of the one before, which answers what it has accepted."""
        folder = self.folder
        if folder is not None and not (folder / MODEL).exists():
            return  # it trains still
        task = task_of_run(self.run)
        servant = task.serving(self.run, device=device)
        facts = {"name": self.name, "run": self.shown, "task": task.name, "about": task.about, "view": servant.view}
        facts |= {"takes": sorted(servant.takes), **servant.describe()}
        self.servant, self.task, self.facts = servant, task.name, facts


class Library:
    """All runs of a service.

    Args:
        runs: run directories, model files, or names of models that come with the package.
        device: where models are put.
        size: of each model's queue.
        observe: told of each batch: the model's name, questions in it, seconds that it took.

    >>> Library(["absent"]).open()
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """

    def __init__(
        self,
        runs: Sequence[str],
        *,
        device: str = "auto",
        size: Size = Size(),  # noqa: B008 (it cannot be changed)
        observe: Callable[[str, int, float], None] = lambda name, count, seconds: None,
    ):
        if not runs:
            raise ConfigError("no runs to serve; name one: `thalweg serve RUN`")
        self.device = device

        def told(name: str) -> Callable[[int, float], None]:
            return lambda count, seconds: observe(name, count, seconds)

        self.shelves = {
            name: Shelf(name, run, Batcher(size, told(name))) for name, run in names_of([str(r) for r in runs]).items()
        }

    def open(self) -> None:
        """Load all models."""
        for shelf in self.shelves.values():
            shelf.open(self.device)

    def reload(self) -> None:
        """Load all models anew, and log it; one that cannot be loaded stays as it was."""
        for shelf in self.shelves.values():
            try:
                shelf.open(self.device)
                logger.info("loaded %s" if shelf.servant else "%s has no model yet", shelf.name)
            except (ThalwegError, OSError) as error:
                logger.warning("kept %s as it was: %s", shelf.name, error)
        set_aside()

    @property
    def ready(self) -> dict[str, Shelf]:
        """Runs with a model."""
        return {name: shelf for name, shelf in self.shelves.items() if shelf.servant is not None}

    def close(self) -> None:
        """End the queues once they are empty."""
        for shelf in self.shelves.values():
            shelf.batcher.close()
