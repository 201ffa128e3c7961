"""Sweeps over the settings of any task: which setting trains best, found by trying."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import CheckpointError, ConfigError
from thalweg.files import write_text
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.sweeps.local import LocalEngine
from thalweg.sweeps.loop import Sweep, run_key
from thalweg.sweeps.ray import RayEngine
from thalweg.sweeps.settings import SweepConfig
from thalweg.sweeps.store import Store, Trial, holding
from thalweg.sweeps.work import Engine, InlineEngine, StopRun, Tell
from thalweg.tasks.base import Task
from thalweg.tasks.config import as_settings, config_from, read_config
from thalweg.tasks.registry import place_of, register, task_of
from thalweg.tasks.report.run import read_log
from thalweg.tasks.sweep_files import Book, written
from thalweg.tasks.yaml_text import parse_word

# What may change when a sweep is gone on with; everything else would make its trials incomparable.
OPEN = ("trials", "hours", "retries")
# Keys that a sweep sets itself.
OWN = {"seed": "sweep.seeds", "metric": "sweep.metric", "task": "another sweep"}


@dataclass(frozen=True, kw_only=True)
class _Section:
    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that is ready to run: what all trials share, and what they differ in.

    Attributes:
        task: which trains.
        base: plain settings that the values of a trial are laid over.
        config: the sweep's own settings.
        metric: the dev metric by which trials are compared; ``higher``: whether a higher value wins.

    >>> plan_sweep({"sweep": {"space": {"hidden": [8, 16]}, "method": "grid"}}).metric
    'cer'
    """

    task: Task
    base: dict[str, Any]
    config: SweepConfig
    metric: str
    higher: bool

    def settings(self, values: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Complete settings of a trial and a seed, as ``thalweg train`` takes them."""
        words = [*(f"{key}={written(value)}" for key, value in values.items()), f"training.seed={seed}"]
        return self.task.settings(self.task.configure(self.task.overrides(self.base, words), where="settings"))


@dataclass(frozen=True)
class SweepResult:
    """What a sweep gave: where it is, why it ended, all trials, and the best (None where none was completed).

    >>> SweepResult(Path("sweeps/lr"), "finished", [], None, "cer").best is None
    True
    """

    directory: Path
    reason: str
    trials: list[Trial]
    best: Trial | None
    metric: str


def plan_sweep(settings: Mapping[str, Any], words: Iterable[str] = (), *, where: str = "config") -> SweepPlan:
    """A checked plan from a config with a section ``sweep`` and ``key=value`` words.

    Words that begin with ``sweep.`` are for that section (``sweep.trials=30``, ``sweep.space.hidden=[64, 128]``); all
    others for the settings that every trial shares, and ``task=NAME`` names the task.

    >>> plan = plan_sweep({}, ["sweep.space.learning_rate=[0.1, 0.01]", "sweep.method=grid", "epochs=3"])
    >>> plan.config.settings, plan.base
    (2, {'training': {'epochs': 3}})
    >>> plan_sweep({"sweep": {"space": {"hiden": [8, 16]}}})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: sweep.space.hiden: `hiden` is not a setting; did you mean `hidden`?
    """
    words = list(words)
    named = [word.partition("=")[2].strip() for word in words if word.startswith("task=")]
    base = {key: value for key, value in settings.items() if key != "sweep"}
    base |= {"task": named[-1]} if named else {}
    words = [word for word in words if not word.startswith("task=")]
    task = task_of(base, where)
    base = task.overrides(base, [word for word in words if not word.startswith("sweep.")])
    section = _lay_over(settings.get("sweep") or {}, [word for word in words if word.startswith("sweep.")], where)
    config = config_from({"sweep": section}, _Section, where=where).sweep
    if config.metric:
        base = task.overrides(base, [f"training.metric={config.metric}"])
    built = task.configure(base, where=where)
    _check_space(task, base, task.settings(built), config)
    metric = str(built.training.metric)
    return SweepPlan(task, base, config, metric, config.higher(metric))


def _lay_over(section: Any, words: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}: expected settings under `sweep`, got {type(section).__name__}")
    result = {**section}
    for word in words:
        name, equals, text = word.partition("=")
        key = name.strip().removeprefix("sweep.")
        if not equals:
            raise ConfigError(f"expected `key=value`, got `{word}`; for example `sweep.trials=30`")
        value = parse_word(text)
        if key == "seeds":
            # `3` is a list of one seed and `0,1,2`, which YAML takes for text, one of three.
            parts = text.strip().strip("[]").split(",")
            value = [int(part) for part in parts if part.strip().isdecimal()] or value
        if key.startswith("space."):
            result["space"] = {**(result.get("space") or {}), key.removeprefix("space."): value}
        else:
            result[key] = value
    return result


def _check_space(task: Task, base: dict[str, Any], complete: dict[str, Any], config: SweepConfig) -> None:
    """Every key must be one that the task has, before anything is trained."""
    known = {f"{section}.{key}" for section, keys in complete.items() if isinstance(keys, dict) for key in keys}
    leaves = {name.partition(".")[2] for name in known}
    seen: set[str] = set()
    for parameter in config.parameters:
        key, leaf = parameter.key, parameter.key.rpartition(".")[2]
        if leaf in OWN and key in (leaf, f"training.{leaf}"):
            raise ConfigError(f"sweep.space.{key}: a sweep sets this itself; use {OWN[leaf]}")
        whole = key if key != leaf else next((name for name in known if name.endswith(f".{leaf}")), key)
        if whole in seen:
            raise ConfigError(f"sweep.space.{key}: expected every key once, got `{whole}` twice; leave one out")
        seen.add(whole)
        first = parameter.choices[0] if parameter.choices else parameter.low
        try:
            laid = task.overrides(base, [f"{key}={written(first)}"])
            if key not in known and not (key == leaf and leaf in leaves):
                task.configure(laid, where="config")  # of another family of models, perhaps
        except ConfigError as error:
            raise ConfigError(f"sweep.space.{key}: {error}") from None


def saved_sweep(directory: Path) -> dict[str, Any]:
    """The settings of a sweep that was begun, for going on with it.

    >>> saved_sweep(Path("absent"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent: expected a sweep to resume, got no sweep.yaml in it; check --out
    """
    path = directory / "sweep.yaml"
    if not path.is_file():
        raise ConfigError(f"{directory}: expected a sweep to resume, got no sweep.yaml in it; check --out")
    settings = read_config(path)
    if isinstance(section := settings.get("sweep"), dict) and section.get("storage") == "journal":
        del section["storage"]  # what there was to choose once
    return settings


def run_sweep(
    plan: SweepPlan,
    out: str | Path,
    *,
    workers: int | None = None,
    engine: str = "local",
    gpus_per_trial: float = 0.0,
    resume: bool = False,
    root: Path | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
) -> SweepResult:
    """Train all settings of a plan, and write down which is best.

    The directory gets ``sweep.yaml``, the record of all trials, a run for every trial and seed under ``trials``,
    ``best.yaml`` (which ``thalweg train`` takes), ``trials.tsv``, ``sweep.json`` and ``report.html``.

    Args:
        plan: see :func:`plan_sweep`.
        out: the sweep's directory; one that holds a sweep already is an error unless ``resume``.
        workers: runs at a time; None is one for each GPU (or share of it), or one; 0 trains in this very process.
        engine: ``local`` (processes on this machine) or ``ray`` (tasks on a cluster).
        gpus_per_trial: share of a GPU for each run, which is also the share of its memory.
        resume: go on: finished trials are kept, begun runs go on from their last checkpoint.
        root: folder of known data sets.
        listener: called with the events of :class:`~thalweg.sweeps.loop.Sweep`, and ``sweep`` before them.

    >>> plan = plan_sweep({"data": {"train": "absent.tsv"}, "sweep": {"space": {"hidden": [8]}, "method": "grid"}})
    >>> import tempfile
    >>> result = run_sweep(plan, Path(tempfile.mkdtemp()) / "sweep", workers=0)
    >>> result.reason, result.best, result.trials[0].state
    ('finished', None, 'failed')
    """
    from thalweg.tasks.report.sweep import write_sweep_report

    out = Path(out)
    _check_data(plan)
    with holding(out / ".lock"):
        _check_begun(plan, out, resume)
        store = Store(out, plan.config, higher=plan.higher)
        threads = int(plan.task.settings(plan.task.configure(plan.base))["training"].get("threads", 0)) or 1
        staff = _engine(engine, out, workers, gpus_per_trial, threads)
        _write_plan(plan, out)
        book = Book(plan, store, out, listener)
        book.pass_on({"event": "sweep", "plan": plan, "trials": list(store.trials), "directory": out})

        def job(trial: Trial, seed: int) -> dict[str, Any]:
            return {
                "task": [plan.task.name, place_of(plan.task.name)],
                "settings": plan.settings(trial.values, seed),
                "run": str((out / "trials" / run_key(trial, seed)).resolve()),
                "metric": plan.metric,
                "root": None if root is None else str(Path(root).resolve()),
                "folder": os.getcwd(),
                "share": gpus_per_trial,
            }

        reason = Sweep(store, staff, job, book).run()
        book.write()
        write_sweep_report(out, plan, store)
    return SweepResult(out, reason, store.trials, store.best(), plan.metric)


def _engine(name: str, out: Path, workers: int | None, share: float, cpus: int) -> Engine:
    work = "thalweg.tasks.sweeping:run_job"
    if name == "ray":
        return RayEngine(work, workers=workers or 0, share=share, cpus=cpus)
    if name != "local":
        raise ConfigError(f"--engine `{name}` is not known; choose one of: local, ray")
    return InlineEngine(run_job) if workers == 0 else LocalEngine(work, out, workers=workers or 0, share=share)


def _check_data(plan: SweepPlan) -> None:
    """What would fail every trial in the same way is said before the first."""
    section, _, key = plan.task.data.partition(".")
    given = plan.task.settings(plan.task.configure(plan.base))[section][key]
    if {key, plan.task.data} & {parameter.key for parameter in plan.config.parameters}:
        return
    if not given:
        raise ConfigError(f"no training data: give `{plan.task.data}` in the config or as a word")
    if given == "-":
        raise ConfigError(f"{plan.task.data}: a sweep reads its data once for every run, got `-`; give a file")


def _check_begun(plan: SweepPlan, out: Path, resume: bool) -> None:
    """See that a sweep which is there is the one that is asked for."""
    path = out / "sweep.yaml"
    if not path.exists():
        return
    if not resume:
        raise ConfigError(f"{out} holds a sweep already; resume it with --resume or choose another --out")
    old = plan_sweep(saved_sweep(out), where=str(path))
    for key, value in dataclasses.asdict(old.config).items():
        if key not in OPEN and value != getattr(plan.config, key):
            raise CheckpointError(
                f"{out}: expected sweep.{key}={value} as before, got {getattr(plan.config, key)}; "
                "keep it or choose another --out"
            )
    if old.task.settings(old.task.configure(old.base)) != plan.task.settings(plan.task.configure(plan.base)):
        raise CheckpointError(f"{out}: expected the settings it was begun with, got others; choose another --out")


def _write_plan(plan: SweepPlan, out: Path) -> None:
    import yaml

    text = yaml.safe_dump({**plan.base, "sweep": as_settings(plan.config)}, sort_keys=False, allow_unicode=True)
    write_text(out / "sweep.yaml", text)


def run_job(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """One run of a sweep: train, or go on from the last checkpoint, telling the metric after every epoch.

    Args:
        job: ``task`` (its name and place), ``settings`` (complete), ``run`` (its directory), ``metric``, ``root``,
            ``folder`` (that relative paths start from) and ``share`` (of a GPU).
        tell: hears ``start`` and ``epoch`` events; where it answers False, the run stops.

    >>> import tempfile
    >>> job = {"task": ["transduce", place_of("transduce")], "settings": {}, "run": tempfile.mkdtemp(), "root": None}
    >>> run_job(job | {"metric": "cer", "folder": ".", "share": 0.0}, lambda event: True)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no training data: give `--data train.tsv` or `data.train` in the config
    """
    os.chdir(job["folder"])
    if 0 < job["share"] < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(job["share"])
    register(*job["task"])
    task = task_of(job["settings"])
    config = task.configure(job["settings"], where="settings")
    run, metric = Path(job["run"]), job["metric"]
    epochs = [0]

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            epochs[0] = int(event.get("epochs", 0))
            _told(tell, {"event": "start", "epochs": epochs[0], "parameters": event.get("parameters", 0)})
        elif event["event"] == "epoch":
            _told(tell, {"event": "epoch", **_epoch({**event, "epochs": epochs[0]}, metric)})

    # A run whose sweep was killed may still be ending.
    with holding(run / ".lock", wait=True):
        for event in _done_before(run):
            _told(tell, {"event": "epoch", **_epoch(event, metric)})
        root = None if job["root"] is None else Path(job["root"])
        result = task.train(config, run, resume=True, listener=listener, root=root)
    if not result.reason:
        return {"event": "interrupted"}
    if metric not in result.best:
        raise ConfigError(f"no epoch had a `{metric}` that is a number; lower `learning_rate`")
    return {
        "event": "end",
        "value": float(result.best[metric]),
        "best_epoch": result.best_epoch,
        "epochs": _last_epoch(run),
        "seconds": result.seconds,
        "metrics": {key: float(value) for key, value in result.best.items()},
    }


def _told(tell: Tell, event: dict[str, Any]) -> None:
    if not tell(event):
        raise StopRun


def _epoch(event: Mapping[str, Any], metric: str) -> dict[str, Any]:
    value = (event.get("dev") or {}).get(metric)
    return {
        "epoch": int(event["epoch"]),
        "epochs": int(event["epochs"]),
        "value": math.nan if value is None else float(value),
        "loss": float(event.get("loss", math.nan)),
        "seconds": float(event.get("seconds", 0.0)),
    }


def _last_epoch(run: Path) -> int:
    return int(load_checkpoint(run / "last.safetensors", values=False).meta["progress"]["epoch"])


def _done_before(run: Path) -> Sequence[Mapping[str, Any]]:
    """Epochs that an earlier process finished: a kill may have kept the sweep from hearing of them."""
    if not (run / "last.safetensors").exists():
        return []
    log, last = read_log(run / "log.jsonl"), _last_epoch(run)
    if log is None:
        return []
    return [{**event, "epochs": log.start.get("epochs", 0)} for event in log.epochs if event["epoch"] <= last]
