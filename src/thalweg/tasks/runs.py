"""What every task's training gives, logs and may not change between a run and its continuation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import thalweg
from thalweg.errors import CheckpointError, ConfigError
from thalweg.files import append, making_sense, write_atomically, write_text, writing
from thalweg.learning.checkpoint import LAST, MODEL, Checkpoint, load_checkpoint, save_checkpoint
from thalweg.learning.progress import Progress
from thalweg.learning.settings import TrainingConfig
from thalweg.learning.trainer import Trainer, Watch
from thalweg.limits import without_memory
from thalweg.tasks.config import as_settings, config_from, to_yaml

T = TypeVar("T")

# The rest of `training` (epochs, patience, learning rate ...) may change: it only shapes what is to come.
FIXED = ("batch_size", "batch_tokens", "accumulate", "optimiser", "decay", "average", "seed", "precision")
# What a run was that was begun before it could be said; a setting that is not here may be anything in such a run.
UNSAID = {
    "model.family": "recurrent",
    "model.attention_map": "softmax",
    "training.batch_tokens": 0,
    "training.accumulate": 1,
    "training.decay": "all",
}
# Of these, what has another default now: a run's own `config.yaml` without it means what it then was.
_OTHER_NOW = ("training.decay",)

# Called with every event of a training.
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What training gave: where the run is, why it ended ("" when interrupted), the best epoch and its metrics.

    >>> TrainResult(Path("runs/names"), "epochs", 12, {"wer": 0.2}, 90.0).best_epoch
    12
    """

    run: Path
    reason: str
    best_epoch: int
    best: dict[str, float]
    seconds: float


def goes_on(out: Path, resume: bool) -> bool:
    """Whether there is something to resume in ``out``; a run that is there and not to be resumed is an error.

    A kill before the first checkpoint leaves nothing to go on from: the same start is the same run. A model without its
    checkpoint is another matter: a new start would be written over it.

    >>> goes_on(Path("absent"), resume=True)
    False
    """
    with writing(out):
        model, last = ((out / name).exists() for name in (MODEL, LAST))
    if (model or last) and not resume:
        raise ConfigError(f"{out} holds a run already; resume it with --resume or choose another --out")
    if model and not last:
        raise CheckpointError(
            f"{out}: expected {LAST}, which the training goes on from, got {MODEL} without it; "
            "restore it from a copy, use the model as it is, or train anew with another --out"
        )
    return last


def meta_of(config: Any, **facts: Any) -> dict[str, Any]:
    """What a checkpoint says of its run: task, version and config, and then ``facts``.

    >>> from thalweg.tasks.density.config import DensityConfig
    >>> list(meta_of(DensityConfig(), columns=["x"]))
    ['task', 'version', 'config', 'columns']
    """
    return {"task": config.task, "version": thalweg.__version__, "config": as_settings(config), **facts}


class RunLog:
    """Appends events to ``log.jsonl`` and passes them on; ``step`` events are only passed on.

    Args:
        out: the run directory.
        listener: gets every event.
        resume: as that of :func:`goes_on`, whose answer is ``resume``.
        watch: looks at some steps.
        unit: what the training data are counted in; ``items``: how many there are, once that is known.
        noun: what such a run is.

    >>> RunLog("runs/x").resume
    False
    """

    def __init__(
        self,
        out: str | Path,
        listener: Listener | None = None,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        unit: str = "items",
        noun: str = "training",
    ):
        self.out, self.listener, self.watch, self.unit, self.noun = Path(out), listener, watch, unit, noun
        self.path, self.may_resume = self.out / "log.jsonl", resume
        self.resume, self.items = goes_on(self.out, resume), 0

    def beside(self, out: Path, listener: Listener | None) -> RunLog:
        """The log of another run of the same training, such as an ensemble's next model."""
        own = {"watch": self.watch, "unit": self.unit, "noun": self.noun}
        return RunLog(out, listener, resume=self.may_resume, **own)

    def train(
        self,
        model: nn.Module,
        batches: Any,
        config: Any,
        *,
        meta: dict[str, Any],
        facts: dict[str, Any],
        told: dict[str, Any],
        **parts: Any,
    ) -> TrainResult:
        """Tell the start of a training and train to the end.

        Args:
            config: written to the run directory.
            facts: of the data, logged with the start; ``facts["train"][unit]`` says how many there are.
            told: what the listener alone hears of it, such as ``lines``.
            meta, parts: of the :class:`~thalweg.learning.trainer.Trainer`: ``loss``, ``evaluate``.
        """
        out, resume, self.items = self.out, self.resume, facts["train"][self.unit]
        trainer = Trainer(model, config.training, directory=out, meta=meta, listener=self, watch=self.watch, **parts)
        trainer.last = self.open(to_yaml(config), meta, resume=resume)
        start = {
            "event": "start",
            "version": thalweg.__version__,
            "torch": torch.__version__,
            "device": str(trainer.device),
            **_sizes(trainer.raw),
            **facts,
            "epochs": trainer.config.epochs,
            "resumed": resume,
        }
        append(self.path, json.dumps(start, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener({**start, "items": self.items, "unit": self.unit, **told})
        progress = trainer.fit(batches, resume=resume)
        best = (progress.best_epoch, progress.best_metrics)
        return TrainResult(out, progress.finished, *best, progress.seconds)

    def adopt(
        self, model: nn.Module, config: Any, meta: dict[str, Any], facts: dict[str, Any], **told: Any
    ) -> TrainResult:
        """Make a model that has nothing to train a run, as it is."""
        out = self.out
        self.open(to_yaml(config), meta, resume=False)
        lines = [*told.pop("lines", ()), "frozen  nothing is trained: the model is used as it comes"]
        start = {"event": "start", "version": thalweg.__version__, "torch": torch.__version__, "device": "cpu"}
        start |= {**_sizes(model), **facts, "epochs": 0, "resumed": False}
        end = {"event": "end", "reason": "frozen", "best_epoch": 0, "best": {}, "seconds": 0.0}
        progress = vars(Progress(finished="frozen"))
        save_checkpoint(out / LAST, Checkpoint({}, {**meta, "progress": progress}))
        save_checkpoint(out / MODEL, Checkpoint(dict(model.state_dict()), {**meta, "epoch": 0, "metrics": {}}))
        append(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in (start, end)))
        if self.listener:
            self.listener({**start, "lines": lines, **told})
        return TrainResult(out, "frozen", 0, {}, 0.0)

    def __call__(self, event: dict[str, Any]) -> None:
        """Log one event."""
        if event["event"] == "epoch" and self.items:
            event[f"{self.unit}_per_second"] = self.items / max(event["train_seconds"], 1e-9)
        if event["event"] != "step":
            append(self.path, json.dumps(event, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener(event)

    def open(self, config: str, meta: dict[str, Any], *, resume: bool) -> Checkpoint | None:
        """Begin anew, or go on from the last checkpoint, which must be of such a training; the config is written."""
        out, last = self.out, None
        if resume:
            last = load_checkpoint(out / LAST)
            check_continues(out / LAST, last.meta, meta, noun=self.noun, items=self.unit)
            _check_best(out / MODEL, last)
            self._cut(last)
        with writing(out):
            if not resume:
                self.path.unlink(missing_ok=True)
            for stray in out.glob(".*.tmp"):
                stray.unlink()  # a kill in the middle of a write leaves one
        write_text(out / "config.yaml", config)
        return last

    def _cut(self, last: Checkpoint) -> None:
        """Drop what was logged after the checkpoint: those epochs are run again."""
        epoch, step = (int(last.meta["progress"][key]) for key in ("epoch", "step"))
        kept = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a kill can leave half a line
            if isinstance(event, dict) and not _undone(event, epoch, step):
                kept.append(line)
        write_atomically(self.path, b"".join(line + b"\n" for line in kept))


def _sizes(model: nn.Module) -> dict[str, int]:
    """How many parameters are trained, and where some are not, how many these are."""
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return {"parameters": counts[True]} | ({"frozen": counts[False]} if counts[False] else {})


def _undone(event: dict[str, Any], epoch: int, step: int) -> bool:
    """Whether an event tells what happened after this epoch or step, or of an end."""
    match event:
        case {"event": "epoch", "epoch": int(number)}:
            return number > epoch
        case {"event": "gradients", "step": int(number)}:
            return number >= step
    return event.get("event") in ("end", "interrupted")


def _check_best(path: Path, last: Checkpoint) -> None:
    """The best model so far must be there: epochs to come may not better it."""
    best = last.meta["progress"].get("best_epoch")
    if best and not path.exists():
        raise CheckpointError(
            f"{path}: expected the best model so far, of epoch {best}, got no such file; "
            "restore it from a copy or train anew with another --out"
        )
    if best:
        load_checkpoint(path)


def as_begun(settings: Mapping[str, Any], kind: type | None = None) -> dict[str, Any]:
    """The settings of a run's own ``config.yaml``, with what it could not say when it was written.

    Such a file is complete but for settings that came later; one of those whose default has changed since is filled
    in as it was. So is what the families of the config's ``kind`` have brought to their training since.

    >>> as_begun({"training": {"epochs": 3}})
    {'training': {'epochs': 3, 'decay': 'all'}}
    >>> as_begun({"training": {"decay": "matrices"}})
    {'training': {'decay': 'matrices'}}
    """
    result = dict(settings)
    model, training = result.get("model"), result.get("training")
    if isinstance(model, Mapping) and isinstance(training, Mapping):
        later = getattr(kind, "learns_with", {}).get(str(model.get("family")), {})
        result["training"] = {key: getattr(TrainingConfig, key) for key in later} | {**training}
    for name in _OTHER_NOW:
        section, _, key = name.partition(".")
        if isinstance(result.get(section), Mapping):
            result[section] = {**result[section], key: result[section].get(key, UNSAID[name])}
    return result


def check_continues(
    path: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, noun: str = "training", items: str = "data"
) -> None:
    """Refuse to go on with another task, another model, other symbols or classes, or another order of the data.

    Args:
        path: the checkpoint, for the message.
        before, now: metadata of the checkpoint and of the continuation: ``task``, ``config``, ``data``, and ``source``
            and ``target`` or ``classes``.
        noun, items: what such a run is, and what its data are counted in.

    >>> old = {"config": {"model": {"hidden": 64}, "training": {}}, "progress": {"epoch": 3, "step": 9}}
    >>> new = {"config": {"model": {"hidden": 32}, "training": {}}}
    >>> check_continues(Path("last.safetensors"), old, new)
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: last.safetensors: expected model.hidden=64 as before, got 32; ...
    """
    task = now.get("task")
    if task and before.get("task", task) != task:
        raise CheckpointError(f"{path}: expected a {noun} run, got one of {before['task']}; name another run")
    try:
        _ = int(before["progress"]["epoch"]), int(before["progress"]["step"])
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
    except (KeyError, AttributeError, OverflowError, TypeError, ValueError):
        raise CheckpointError(f"{path}: expected a {noun} run, got another kind; name another run") from None
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


def what_is_whole(path: Path | None) -> str:
    """What to add to the news that ``path`` could not be written: that the run it is part of has a whole checkpoint.

    Empty where there is none; the checkpoint is read to be sure.

    >>> what_is_whole(Path("absent/log.jsonl"))
    ''
    """
    try:
        for folder in path.absolute().parents if path is not None else ():
            if (folder / LAST).is_file():
                load_checkpoint(folder / LAST)
                return f"; the last checkpoint, {os.path.relpath(folder / LAST)}, is whole"
    except (OSError, CheckpointError):
        pass
    return ""


@contextmanager
def opened(run: str | Path, noun: str, kind: type[T]) -> Iterator[tuple[Checkpoint, T]]:
    """The best model of a run directory, or the file of one, and its config, to make sense of inside.

    What is not as it should be, in the file or in what is made of it, is a :class:`CheckpointError`.

    Args:
        noun: what such a run is; kind: of its config.

    >>> with opened("absent", "transduction", TrainingConfig):
    ...     pass
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    path = Path(run) if Path(run).is_file() else Path(run) / MODEL
    checkpoint = load_checkpoint(path)
    with making_sense(path, f"expected a {noun} model, got something else", "train it again"):
        yield checkpoint, config_from(checkpoint.meta["config"], kind, where=str(path))


def check_size(build: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> None:
    """Refuse a model, by a ``ValueError``, that would be larger than the weights there are for it.

    The settings in a file may describe a model of any size: this one is built without memory.

    >>> check_size(lambda: nn.Linear(10**9, 10**9), {"weight": Tensor(1, 1)})
    Traceback (most recent call last):
    ...
    ValueError: the settings describe a model of 1,000,000,001,000,000,000 numbers, there are 1
    """
    with without_memory():
        needed = sum(value.numel() for value in build().state_dict().values())
    held = sum(value.numel() for value in weights.values())
    if needed > held:
        raise ValueError(f"the settings describe a model of {needed:,} numbers, there are {held:,}")
