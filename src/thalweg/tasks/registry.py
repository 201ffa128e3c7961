"""The tasks there are, by name, and which one settings, configs and runs are of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError, ThalwegError, nearest
from thalweg.learning.checkpoint import MODEL, load_checkpoint
from thalweg.tasks.base import Evaluation, Task
from thalweg.tasks.boxed.models import boxed
from thalweg.tasks.config import read_config
from thalweg.tasks.runs import TrainResult

# Where each is; imported when it is first asked for, so that a command pays for its own task alone. The first is what
# settings without the key ``task`` are for. ``registry.json`` also says what a help page tells of each.
_LISTED = json.loads((resources.files(__package__ or "") / "registry.json").read_text(encoding="utf-8"))
_TASKS: dict[str, str] = {name: entry["task"] for name, entry in _LISTED.items()}


def register(name: str, place: str) -> None:
    """Make a task known; ``place`` is ``module:attribute`` of the :class:`~thalweg.tasks.base.Task`.

    >>> register("strings", "thalweg.tasks.transduce.task:TASK")
    >>> task_named("strings").name
    'transduce'
    >>> del _TASKS["strings"]
    """
    _TASKS[name] = place


def place_of(name: str) -> str:
    """What a task was registered as, so that another process can register it too.

    >>> place_of("classify")
    'thalweg.tasks.classify.task:TASK'
    """
    return _TASKS[name]


def list_tasks() -> tuple[str, ...]:
    """The names of all tasks; the first is the default.

    >>> list_tasks()
    ('transduce', 'classify', 'density')
    """
    return tuple(_TASKS)


def task_named(name: str, where: str = "") -> Task:
    """The task of that name.

    >>> task_named("clasify")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: task `clasify` is not known; did you mean `classify`?
    """
    if not isinstance(name, str) or name not in _TASKS:
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}task `{name}` is not known; {nearest(str(name), _TASKS)}")
    return _imported(_TASKS[name])


def _imported(place: str) -> Task:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def task_of(settings: Any, where: str = "") -> Task:
    """The task that plain settings, or a config, are for; without a word about it, the first.

    >>> task_of({"training": {"epochs": 3}}).name, task_of({"task": "classify"}).name
    ('transduce', 'classify')
    """
    if isinstance(settings, Mapping):
        return task_named(settings.get("task", list_tasks()[0]), where)
    if not hasattr(settings, "task"):
        raise ConfigError(f"expected a config, settings by name or a YAML file, got {type(settings).__name__}")
    return task_named(settings.task, where)


def task_of_run(run: str | Path) -> Task:
    """The task of a run directory, of a model file or of a model in the box.

    The first task where that cannot be told: its errors say more.

    >>> task_of_run("absent").name
    'transduce'
    """
    if (found := boxed(run)) is not None:
        return _imported(found.task)
    run = Path(run)
    for read in (
        lambda: load_checkpoint(run if run.is_file() else run / MODEL, values=False).meta,
        lambda: read_config(run / "config.yaml"),
    ):
        with suppress(ThalwegError):
            return task_of(read(), str(run))
    return task_of({})


def build_config(settings: Mapping[str, Any], *, where: str = "config") -> Any:
    """A checked config of the task that plain settings are for; presets may be named.

    >>> build_config({"training": {"epochs": 3}}).training.epochs
    3
    >>> build_config({"training": {"epocs": 3}})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: `training.epocs` is not a setting; did you mean `epochs`?
    """
    return task_of(settings, where).configure(settings, where)


def apply_overrides(settings: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Plain settings with the ``key=value`` words of a command line laid over them.

    >>> apply_overrides({"model": {"hidden": 64}}, ["hidden=128", "training.epochs=3"])
    {'model': {'hidden': 128}, 'training': {'epochs': 3}}
    """
    return task_of(settings).overrides(settings, words)


def train(config: Any, out: str | Path, *, where: str = "config", **options: Any) -> TrainResult:
    """Train what a config, plain settings or a YAML file say; options as those of :meth:`Task.train`.

    >>> train({"training": {"epocs": 3}}, "runs/x")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: `training.epocs` is not a setting; did you mean `epochs`?
    """
    if isinstance(config, (str, Path)):
        config, where = read_config(Path(config)), str(config)
    task = task_of(config, where)
    return task.train(task.configure(config, where) if isinstance(config, Mapping) else config, out, **options)


def load(run: str | Path, *, device: str = "auto", **options: Any) -> Any:
    """The best model of a run directory (or the ``model.safetensors`` itself) of any task, ready to ``predict``.

    Args:
        run: the directory, the file, or the name of a model in the box such as ``english``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        options: of the task: ``precision``, ``bf16`` or ``int8`` on the CPU, for strings.

    >>> load("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    return task_of_run(run).load(run, device=device, **options)


def evaluate(run: str | Path, data: str | None = None, **options: Any) -> Evaluation:
    """Measure a run of any task on data and write ``RUN/evaluation/NAME/``; options as those of its task.

    >>> evaluate("absent", "cmudict:dev")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    return task_of_run(run).evaluate(run, data, **options)
