"""What a diagnosis looks at: a run's best model, or a model as it starts, with pairs to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from thalweg.data import Batches, Example
from thalweg.errors import ConfigError, DataError
from thalweg.learning.trainer import resolve_device
from thalweg.tasks.config import TransduceConfig, build_config, read_config
from thalweg.tasks.models import build_model
from thalweg.tasks.report.run import read_log
from thalweg.tasks.resuming import as_begun
from thalweg.tasks.sides import Side
from thalweg.tasks.transduce import prepare
from thalweg.tasks.transducer import load, open_pairs

__all__ = ["Subject", "open_subject"]


@dataclass(frozen=True)
class Subject:
    """What is looked at: a model, how it is trained, its alphabets, and pairs to run it on.

    Attributes:
        name: of the run or config; trained: whether the weights are a run's best ones.
        steps: that the whole training has; 0 where that is not known.
        data: where the pairs come from.

    >>> Subject.__name__
    'Subject'
    """

    name: str
    trained: bool
    model: nn.Module
    config: TransduceConfig
    examples: tuple[Example, ...]
    steps: int
    data: str


def open_subject(
    source: str | Path | TransduceConfig,
    *,
    data: str | None = None,
    fresh: bool = False,
    root: Path | None = None,
    device: str = "auto",
    name: str = "",
) -> Subject:
    """A run's best model, or a model as it starts.

    Args:
        source: a run directory, a YAML config, or a config.
        data: pairs to look at it on; without, the run's dev data, else its training data.
        fresh: of a run, the model as it started instead.
        root: folder of known data sets.
        name: what to call it.

    >>> open_subject("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent: expected a run directory or a YAML config, got nothing there; ...
    """
    path = None if isinstance(source, TransduceConfig) else Path(source)
    if path is not None and not path.exists():
        raise ConfigError(
            f"{path}: expected a run directory or a YAML config, got nothing there; "
            "give what `thalweg train --out` wrote"
        )
    if path is not None and path.is_dir() and not fresh and not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: expected a run, got a folder without config.yaml; give what `train --out` wrote")
    name = name or (path.resolve().name if path is not None else "config")
    place = resolve_device(device)
    if path is not None and path.is_dir() and (path / "model.safetensors").is_file() and not fresh:
        run = load(path, device=place)
        config = build_config(as_begun(run.meta["config"]), where=str(path))
        spec = data or config.data.dev or config.data.train
        examples = _examples(spec, root, run.source, run.target)
        return Subject(name, True, cast(nn.Module, run.model), config, examples, _planned(path), spec)
    if isinstance(source, TransduceConfig):
        config = source
    else:
        assert path is not None
        where = path / "config.yaml" if path.is_dir() else path
        settings = read_config(where)
        config = build_config(as_begun(settings) if path.is_dir() else settings, where=str(where))
    ready = prepare(config, root)
    torch.manual_seed(config.training.seed)
    model = build_model(config, ready.source, ready.target).to(place)
    batches = Batches(ready.examples, size=config.training.batch_size, tokens=config.training.batch_tokens)
    steps = config.training.planned(len(batches)).epochs * len(batches)
    spec = data or config.data.train
    examples = _examples(data, root, ready.source, ready.target) if data else tuple(ready.examples)
    return Subject(name, False, model, config, examples, steps, spec)


def _planned(run: Path) -> int:
    """Steps of the whole training of a run, as far as its log tells."""
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
