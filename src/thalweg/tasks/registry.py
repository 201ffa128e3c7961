"""The tasks there are, by name: how each one's settings are built, laid over and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError, nearest
from thalweg.learning.trainer import Watch
from thalweg.tasks.config import TransduceConfig, apply_overrides, as_settings, build_config
from thalweg.tasks.families import PRESETS
from thalweg.tasks.running import Listener, TrainResult

__all__ = ["DEFAULT_TASK", "Task", "list_tasks", "task_named", "task_of", "train_settings"]

# What settings without the key ``task`` are for.
DEFAULT_TASK = "transduce"


@dataclass(frozen=True)
class Task:
    """One kind of job: from plain settings to a trained run.

    Attributes:
        name: the value of the top-level key ``task``.
        about: what it does, in a line.
        kind: the frozen dataclass of its config.
        trainer: trains a config of that kind, as :meth:`train`.
        default_metric: the dev metric that chooses the best epoch where the config does not say.
        data: the setting that holds the training data, ``section.key``.
        presets: settings by the name given to ``--model``.
        default_model: the preset of a training without config file and ``--model``.

    >>> task_named("transduce").kind.__name__
    'TransduceConfig'
    """

    name: str
    about: str
    kind: type
    trainer: Callable[..., TrainResult]
    default_metric: str
    data: str
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default_model: str = ""

    def build(self, settings: Mapping[str, Any], where: str = "config") -> Any:
        """A checked config; the settings may name the task or not.

        >>> task_named("transduce").build({"task": "transduce", "training": {"epochs": 3}}).training.epochs
        3
        """
        return build_config(settings, self.kind, where=where)

    def overrides(self, raw: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
        """Settings with ``key=value`` words laid over them.

        >>> task_named("transduce").overrides({}, ["hidden=8"])
        {'model': {'hidden': 8}}
        """
        return apply_overrides(raw, words, self.kind)

    def settings(self, config: Any) -> dict[str, Any]:
        """Plain settings of a config, with the task's name first; :meth:`build` takes them back.

        >>> next(iter(task_named("transduce").settings(TransduceConfig()).items()))
        ('task', 'transduce')
        """
        return {"task": self.name, **as_settings(config)}

    def train(
        self,
        config: Any,
        out: str | Path,
        *,
        resume: bool = False,
        listener: Listener | None = None,
        root: Path | None = None,
        watch: Watch | None = None,
    ) -> TrainResult:
        """Train; the run directory ``out`` gets the model, the log and what resuming needs.

        >>> Task.train.__name__
        'train'
        """
        return self.trainer(config, out, resume=resume, listener=listener, root=root, watch=watch)


def _transduce() -> Task:
    from thalweg.tasks.transduce import train

    return Task(
        name="transduce",
        about="strings to strings, from pairs",
        kind=TransduceConfig,
        trainer=train,
        default_metric=TransduceConfig().training.metric,
        data="data.train",
        presets=PRESETS,
        default_model="lstm-attention",
    )


def _classify() -> Task:
    from thalweg.tasks.classify import train
    from thalweg.tasks.classify_settings import DEFAULT_PRESET, IMAGE_PRESETS, ClassifyConfig

    return Task(
        name="classify",
        about="images to classes, from folders of images",
        kind=ClassifyConfig,
        trainer=train,
        default_metric=ClassifyConfig().training.metric,
        data="data.path",
        presets=IMAGE_PRESETS,
        default_model=DEFAULT_PRESET,
    )


# Each is imported when it is first asked for: a command pays for its own task alone.
_TASKS: dict[str, Callable[[], Task]] = {"transduce": _transduce, "classify": _classify}


def list_tasks() -> tuple[str, ...]:
    """The names of all tasks; the first is the default.

    >>> list_tasks()
    ('transduce', 'classify')
    """
    return tuple(_TASKS)


def task_named(name: str, where: str = "") -> Task:
    """The task of that name.

    >>> task_named("clasify")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: task `clasify` is not known; did you mean `classify`?
    """
    if name not in _TASKS:
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}task `{name}` is not known; {nearest(str(name), _TASKS)}")
    return _TASKS[name]()


def task_of(settings: Mapping[str, Any], where: str = "") -> Task:
    """The task that plain settings are for: what their key ``task`` says, else transduction.

    >>> task_of({"training": {"epochs": 3}}).name
    'transduce'
    """
    return task_named(settings.get("task", DEFAULT_TASK), where)


def train_settings(
    settings: Mapping[str, Any], out: str | Path, *, where: str = "config", **options: Any
) -> TrainResult:
    """Train what plain settings say; options as those of :meth:`Task.train`.

    >>> train_settings({"training": {"epocs": 3}}, "runs/x")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: `training.epocs` is not a setting; did you mean `epochs`?
    """
    task = task_of(settings, where)
    return task.train(task.build(settings, where), out, **options)
