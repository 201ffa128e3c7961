"""Reads what a run directory holds for its report; anything absent or damaged becomes a note, never an error.

A report is most wanted when something went wrong, so a truncated log, a half-written evaluation or a file of
the wrong shape must not prevent it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError
from thalweg.tasks.registry import task_of
from thalweg.tasks.report.part import ReportPart
from thalweg.tasks.report.tables import FIRST
from thalweg.tasks.report.text import as_number

SAMPLES = 8
WORST = 20
CONFUSIONS = 25


@dataclass
class TrainingLog:
    """The epochs that led to the model as it is, with what the log says about start and end.

    >>> log = TrainingLog(epochs=[{"epoch": 1, "best": True}, {"epoch": 2}])
    >>> log.best_epoch
    1
    """

    start: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    resumed: list[int] = field(default_factory=list)
    """The first epoch after each resumption."""
    profiles: list[dict[str, Any]] = field(default_factory=list)
    """What was watched of gradients, by step."""
    unreadable: int = 0
    """Lines that are not JSON objects, such as the last one of a killed run."""

    @property
    def best_epoch(self) -> int | None:
        """The epoch of the kept model: from the end record, else the last epoch marked best."""
        best = as_number((self.end or {}).get("best_epoch"))
        if best is not None:
            return int(best)
        marked = [record["epoch"] for record in self.epochs if record.get("best") is True]
        return marked[-1] if marked else None

    def add(self, record: dict[str, Any]) -> None:
        """Takes in the next record; an epoch that comes again replaces the earlier one and all after it.

        >>> log = TrainingLog()
        >>> for epoch in (1, 2, 3, 2):
        ...     log.add({"event": "epoch", "epoch": epoch})
        >>> [record["epoch"] for record in log.epochs], log.resumed
        ([1, 2], [2])
        """
        event = record.get("event")
        if event in ("start", "resume"):
            self.start = {**self.start, **record}
            self.end = None
            self._restarted = bool(self.epochs)
        elif event == "end":
            self.end = record
        elif event == "gradients" and (step := as_number(record.get("step"))) is not None:
            self.profiles = [old for old in self.profiles if old["step"] < step]
            self.profiles.append({**record, "step": int(step)})
        elif event == "epoch" and (number := as_number(record.get("epoch"))) is not None:
            epoch = int(number)
            again = bool(self.epochs) and self.epochs[-1]["epoch"] >= epoch
            self.epochs = [old for old in self.epochs if old["epoch"] < epoch]
            self.resumed = [old for old in self.resumed if old < epoch]
            if self.epochs and (again or self._restarted):
                self.resumed.append(epoch)
            self._restarted = False
            self.epochs.append({**record, "epoch": epoch})

    _restarted: bool = field(default=False, repr=False)


@dataclass
class EvaluationRecord:
    """One folder of `evaluation/`; None stands for a file that is absent or cannot be read.

    >>> EvaluationRecord(name="test").metrics is None
    True
    """

    name: str
    metrics: dict[str, Any] | None = None
    items: int | None = None
    correct: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)
    right: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    worst: list[list[str]] | None = None
    confusions: list[tuple[str, str, int]] | None = None
    attention: list[dict[str, Any]] | None = None
    pictures: dict[str, Any] | None = None
    """What is shown of single items as pictures."""


@dataclass
class RunRecord:
    """All that a report shows. `config_text` is the file as written, `config` what could be parsed of it.

    >>> RunRecord(path=Path("runs/demo"), name="demo").evaluations
    []
    """

    path: Path
    name: str
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    log: TrainingLog | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list)

    @cached_property
    def part(self) -> ReportPart:
        """What the run's task draws; that of any task where it is not known."""
        try:
            return task_of(self.config).report()
        except ConfigError:
            return ReportPart()


def read_run(run: Path) -> RunRecord:
    """Reads config, log and evaluations under `run`; predictions are streamed, so memory stays small.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = read_run(Path(folder))
    >>> record.log, record.config_text, record.evaluations
    (None, None, [])
    """
    place = run.resolve()
    # The seeds of a recipe lie side by side: only with the folder's name does each say what it is.
    name = f"{place.parent.name}, {place.name}" if place.name.startswith("seed-") else place.name
    record = RunRecord(path=run, name=name)
    record.config_text = _text(run / "config.yaml")
    record.config = _parse_config(record.config_text)
    if isinstance(name := record.config.get("name"), str) and name.strip():
        record.name = name
    record.log = read_log(run / "log.jsonl")
    folder = run / "evaluation"
    if folder.is_dir():
        # the page opens with the first one: what was kept for testing counts most
        names = sorted(folder.iterdir(), key=lambda each: ("test" not in each.name, each.name))
        record.evaluations = [_evaluation(each) for each in names if each.is_dir()]
    return record


def read_log(path: Path) -> TrainingLog | None:
    """The training log, or None where there is none. Time and memory linear in its lines.

    >>> read_log(Path("absent.jsonl")) is None
    True
    """
    if not path.is_file():
        return None
    log = TrainingLog()
    for record in _json_lines(path):
        if record is None:
            log.unreadable += 1
        else:
            log.add(record)
    return log


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return None


def _parse_config(text: str | None) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(text or "")
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    # newline="\n": a data string may hold other line separators
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            if line.strip():
                record = _json(line)
                yield record if isinstance(record, dict) else None


def _evaluation(folder: Path) -> EvaluationRecord:
    record = EvaluationRecord(name=folder.name)
    metrics = _json(_text(folder / "metrics.json"))
    record.metrics = metrics if isinstance(metrics, dict) else None
    if (folder / "predictions.jsonl").is_file():
        _sample_predictions(folder / "predictions.jsonl", record)
    record.worst = _table(folder / "worst.tsv", columns=4, limit=WORST)
    confusions = _table(folder / "confusions.tsv", columns=3, limit=None)
    if confusions is not None:
        counted = [(gold, guess, int(count)) for gold, guess, count in confusions if count.isdecimal()]
        record.confusions = sorted(counted, key=lambda row: -row[2])[:CONFUSIONS]
    attention = _json(_text(folder / "attention.json"))
    if isinstance(attention, list):
        record.attention = [item for item in attention if isinstance(item, dict)]
    pictures = _json(_text(folder / "pictures.json"))
    record.pictures = pictures if isinstance(pictures, dict) else None
    return record


def _sample_predictions(path: Path, record: EvaluationRecord) -> None:
    """Fair samples of the right and the wrong items in one pass (reservoir sampling, fixed seed)."""
    chance = random.Random(0)
    record.items = 0
    for item in _json_lines(path):
        if item is None:
            continue
        record.items += 1
        if len(record.first) < FIRST:
            record.first.append(item)
        is_right = item.get("correct") is True
        record.correct += is_right
        kept, seen = (record.right, record.correct) if is_right else (record.wrong, record.items - record.correct)
        if len(kept) < SAMPLES:
            kept.append(item)
        elif (place := chance.randrange(seen)) < SAMPLES:
            kept[place] = item


def _table(path: Path, *, columns: int, limit: int | None) -> list[list[str]] | None:
    text = _text(path)
    if text is None:
        return None
    rows = (line.rstrip("\r").split("\t") for line in text.split("\n")[1:])
    return [row for row in rows if len(row) == columns][:limit]
