"""What a word of the command line names: a run, a model in the box, a YAML config, or a recipe."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError
from thalweg.learning.checkpoint import MODEL, load_checkpoint
from thalweg.learning.trainer import resolve_device
from thalweg.recipes import list_recipes
from thalweg.tasks.base import Task
from thalweg.tasks.boxed.models import boxed
from thalweg.tasks.config import read_config
from thalweg.tasks.diagnosis.subject import Subject
from thalweg.tasks.registry import task_of
from thalweg.tasks.runs import as_begun

YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Resolved:
    """What was named.

    Attributes:
        name: what to call it.
        task: which trains it; config: its settings, checked.
        run: what holds a trained model, None where there is none: a run directory or a model file.
        command: that would train it again.

    >>> resolve("demo", ["hidden=8"]).config.model.hidden
    8
    """

    name: str
    task: Task
    config: Any
    run: Path | None
    command: str

    def subject(self, *, data: str | None = None, root: Path | None = None, device: str = "auto") -> Subject:
        """What a diagnosis looks at; ``data`` are others than its own, ``root`` the folder of known data sets."""
        options = {"data": data, "root": root, "device": resolve_device(device), "name": self.name}
        return self.task.subject(self.config, self.run, **options)


def named_settings(word: str) -> tuple[Mapping[str, Any], str]:
    """Plain settings of a YAML file or a recipe, and what to call them.

    >>> named_settings("demo")[1]
    'demo'
    """
    path = Path(word)
    if path.suffix in YAML:
        return read_config(path), path.stem
    if path.exists():
        raise ConfigError(f"{word}: expected a run directory or a YAML config, got another file")
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if word not in recipes:
        raise ConfigError(
            f"{word}: expected a run directory, a YAML config or a recipe, got none of them; "
            "see `thalweg recipe list`, or give what `thalweg train --out` wrote"
        )
    if not recipes[word].config:
        raise ConfigError(f"recipe `{word}` is an experiment without a config; name one that trains")
    return recipes[word].config, word


def resolve(word: Any, overrides: Sequence[str] = (), *, fresh: bool = False) -> Resolved:
    """What a word names, with ``key=value`` words laid over a config; ``fresh``: of a run, as it started.

    A model in the box comes before the recipe of the same name that it was trained by, unless words are to be laid
    over that. A config in the place of a word is itself.

    >>> resolve("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent: expected a run directory, a YAML config or a recipe, got none of them; ...
    """
    if not isinstance(word, (str, Path)):
        return Resolved("config", task_of(word), word, None, "")
    word, path = str(word), Path(word)
    if not overrides and (found := boxed(word)) is not None:
        again = f"thalweg recipe run {found.name} --out runs/{found.name}-mended"
        return dataclasses.replace(_run(found.folder, fresh), command=again)
    if path.is_dir() or path.suffix == ".safetensors":
        if overrides:
            raise ConfigError("KEY=VALUE words change configs, not runs; give the run's config.yaml instead")
        return _run(path, fresh)
    settings, name = named_settings(word)
    task = task_of(settings, word)
    config = task.configure(task.overrides(settings, overrides), word)
    words = shlex.join([word, *overrides])
    if path.suffix in YAML:
        return Resolved(name, task, config, None, f"thalweg train {words}")
    command = f"thalweg recipe run {words} --out {shlex.quote(f'runs/{word}-mended')}"
    return Resolved(name, task, config, None, command)


def _run(path: Path, fresh: bool) -> Resolved:
    name = path.resolve().parent.name if path.is_file() else path.resolve().name
    file = path if path.is_file() else path / MODEL
    again = f"thalweg train {shlex.quote(str(path / 'config.yaml'))} --out {shlex.quote(f'{path}-mended')}"
    if path.is_dir() and (fresh or not file.is_file()):
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path}: expected a run, got a folder without config.yaml; give what `train --out` wrote"
            )
        where, run, settings = str(path / "config.yaml"), None, read_config(path / "config.yaml")
    else:
        where, run, settings = str(path), path, load_checkpoint(file, values=False).meta.get("config")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{file}: expected a model with its settings, got another checkpoint; name another run")
    task = task_of(settings, where)
    return Resolved(name, task, task.configure(as_begun(settings, task.kind), where), run, again)
