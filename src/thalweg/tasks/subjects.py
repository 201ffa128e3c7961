"""What a diagnosis looks at: a run's best model, or a model as it starts, with data to run it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from thalweg.data import Batches, Example
from thalweg.errors import ConfigError, DataError
from thalweg.learning.trainer import resolve_device
from thalweg.tasks.config import TransduceConfig, build_config, read_config
from thalweg.tasks.models import build_model
from thalweg.tasks.registry import task_of
from thalweg.tasks.report.run import read_log
from thalweg.tasks.resuming import as_begun
from thalweg.tasks.sides import Side
from thalweg.tasks.transduce import prepare
from thalweg.tasks.transducer import load, open_pairs

__all__ = ["PairSubject", "Subject", "Words", "open_subject", "planned_steps"]


@dataclass(frozen=True)
class Words:
    """How a diagnosis speaks of a task.

    Attributes:
        items: what the data are; given: what the model reads; other: what it is given in its place to see whether it
            reads; per: of what a loss is the mean.
        reads: what a model does with it; frequencies: all that is known without.
        sizes: names of the three sizes of a batch; shape: the last two in words.

    >>> PairSubject.words.items
    'pairs'
    """

    items: str
    given: str
    other: str
    per: str
    reads: str
    frequencies: str
    sizes: tuple[str, str, str]
    shape: str


@dataclass(frozen=True)
class Subject:
    """What is looked at: a model, how it is trained, and what to run it on; each task has its own kind.

    Attributes:
        name: of the run or config; trained: whether the weights are a run's best ones.
        config: of the task.
        steps: that the whole training has; 0 where that is not known.
        data: where the data come from.

    >>> Subject.__name__
    'Subject'
    """

    words: ClassVar[Words]

    name: str
    trained: bool
    model: nn.Module
    config: Any
    steps: int
    data: str


@dataclass(frozen=True)
class PairSubject(Subject):
    """A transducer with pairs to run it on.

    >>> PairSubject.words.per
    'a symbol'
    """

    words: ClassVar[Words] = Words(
        items="pairs",
        given="source",
        other="another pair's source",
        per="a symbol",
        reads="read its source",
        frequencies="symbol frequencies",
        sizes=("rows", "source", "target"),
        shape="sources of up to {}, targets of up to {} symbols",
    )

    config: TransduceConfig
    examples: tuple[Example, ...]


def open_subject(
    source: str | Path | TransduceConfig | Any,
    *,
    data: str | None = None,
    fresh: bool = False,
    root: Path | None = None,
    device: str = "auto",
    name: str = "",
) -> Subject:
    """A run's best model, or a model as it starts, of whichever task.

    Args:
        source: a run directory, a YAML config, or a config.
        data: what to look at it on; without, the run's dev data, else its training data.
        fresh: of a run, the model as it started instead.
        root: folder of known data sets.
        name: what to call it.

    >>> open_subject("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent: expected a run directory or a YAML config, got nothing there; ...
    """
    path = Path(source) if isinstance(source, (str, Path)) else None
    if path is not None and not path.exists():
        raise ConfigError(
            f"{path}: expected a run directory or a YAML config, got nothing there; "
            "give what `thalweg train --out` wrote"
        )
    if path is not None and path.is_dir() and not fresh and not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: expected a run, got a folder without config.yaml; give what `train --out` wrote")
    name = name or (path.resolve().name if path is not None else "config")
    place = resolve_device(device)
    options: dict[str, Any] = {"data": data, "root": root, "device": place, "name": name}
    if path is None:
        images = not isinstance(source, TransduceConfig)
        return _image_opener()(source, None, **options) if images else _pairs(source, None, **options)
    where = path / "config.yaml" if path.is_dir() else path
    settings = read_config(where)
    task = task_of(settings, str(where))
    opener = {"transduce": lambda: _pairs, "classify": _image_opener}[task.name]()
    if path.is_dir() and (path / "model.safetensors").is_file() and not fresh:
        return opener(None, path, **options)
    return opener(task.build(as_begun(settings) if path.is_dir() else settings, str(where)), None, **options)


def _image_opener() -> Callable[..., Subject]:
    from thalweg.tasks.image_subjects import open_image_subject

    return open_image_subject


def _pairs(
    config: TransduceConfig | None,
    trained: Path | None,
    *,
    data: str | None,
    root: Path | None,
    device: str,
    name: str,
) -> PairSubject:
    """Of a run, or of a config where there is no run."""
    if trained is not None:
        run = load(trained, device=device)
        config = build_config(as_begun(run.meta["config"]), where=str(trained))
        spec = data or config.data.dev or config.data.train
        examples = _examples(spec, root, run.source, run.target)
        return PairSubject(name, True, cast(nn.Module, run.model), config, planned_steps(trained), spec, examples)
    assert config is not None
    ready = prepare(config, root)
    torch.manual_seed(config.training.seed)
    model = build_model(config, ready.source, ready.target).to(device)
    batches = Batches(ready.examples, size=config.training.batch_size, tokens=config.training.batch_tokens)
    steps = config.training.planned(len(batches)).epochs * len(batches)
    spec = data or config.data.train
    examples = _examples(data, root, ready.source, ready.target) if data else tuple(ready.examples)
    return PairSubject(name, False, model, config, steps, spec, examples)


def planned_steps(run: Path) -> int:
    """Steps of the whole training of a run, as far as its log tells; else 0.

    >>> planned_steps(Path("absent"))
    0
    """
    log = read_log(run / "log.jsonl")
    if log is None or not log.epochs:
        return 0
    last = log.epochs[-1]
    return round(int(last.get("step", 0)) / max(1, last["epoch"]) * int(log.start.get("epochs", last["epoch"])))


def _examples(spec: str, root: Path | None, source: Side, target: Side) -> tuple[Example, ...]:
    try:
        pairs = open_pairs(spec, root, features=bool(source.features))
    except DataError as error:
        raise DataError(f"{error}; give the pairs to look at with --data FILE") from None
    return tuple(Example(source.encode(pair.source, pair.features), target.encode(pair.target)) for pair in pairs.pairs)
