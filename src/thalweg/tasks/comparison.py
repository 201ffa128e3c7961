"""Several runs on the same data, side by side, and whether they differ by more than the choice of items explains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import thalweg
from thalweg.errors import ConfigError, DataError
from thalweg.files import write_text
from thalweg.learning.checkpoint import MODEL, load_checkpoint
from thalweg.metrics import Difference, compare_tallies
from thalweg.tasks.base import Evaluation, Measured, Table, Task, signatures
from thalweg.tasks.boxed.models import folder_of
from thalweg.tasks.registry import task_of_run

RESAMPLES = 1000
"""Draws of the paired bootstrap."""
LEVEL = 0.95
# Below so many items a bootstrap takes models to be surer than they are.
_FEW = 30


@dataclass(frozen=True)
class Comparison:
    """Evaluations of several runs on the same items, and how each differs from the first.

    Attributes:
        directory: where the files are, under the first run.
        runs: as they were given; names: short ones that tell them apart.
        evaluations: of each run; differences: of each run but the first, by the key of the score.
        left_out: scores that are not compared, and why.
        measured: every item with its answer, of each run.

    >>> shown = [Evaluation(Path(f"runs/{name}/evaluation/test"), "test.tsv", {}, 100) for name in "ab"]
    >>> Comparison(Path("comparison"), ("runs/a", "runs/b"), ("a", "b"), tuple(shown), ({},)).said()
    'test.tsv: 100 items, 2 runs, differences from a'
    """

    directory: Path
    runs: tuple[str, ...]
    names: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    differences: tuple[dict[str, Difference], ...]
    left_out: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = field(default=(), repr=False, compare=False)

    @property
    def data(self) -> str:
        """What was measured on."""
        return self.evaluations[0].data

    @property
    def items(self) -> int:
        """How many."""
        return self.evaluations[0].items

    @property
    def page(self) -> Path:
        """The report of the comparison."""
        return self.directory / "report.html"

    @property
    def corrected(self) -> bool:
        """Whether p-values are also given with Holm's correction: with two models there is nothing to correct."""
        return len(self.runs) > 2

    def said(self) -> str:
        """What was done, in a line."""
        return f"{self.data}: {self.items:,} items, {len(self.runs)} runs, differences from {self.names[0]}"

    def tables(self) -> list[Table]:
        """Every score of every run; beside it the difference from the first run's."""
        rows = [row for key in self._keys() for row in self._rows(key)]
        return [Table(rows, ("value", "95 % interval", "difference", "its interval", "p", "p (Holm)"))]

    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for each in self.evaluations for key in each.scores))

    def _rows(self, key: str) -> list[dict[str, str]]:
        rows = []
        for place, (name, evaluation) in enumerate(zip(self.names, self.evaluations, strict=True)):
            score = evaluation.scores.get(key)
            if score is None:
                continue
            found = self.differences[place - 1].get(key) if place else None
            low, high = (f"{end:.{score.digits}f}" for end in (score.low, score.high))
            row = {"metric": score.name, "run": name, "value": f"{score.value:.{score.digits}f}"}
            row |= {"95 % interval": f"{low} to {high}"}
            row |= {"difference": found.shown(found.value), "its interval": found.interval} if found else _NONE
            row["p"] = f"{found.p:.4f}" if found else ""
            if self.corrected:
                row["p (Holm)"] = f"{found.corrected:.4f}" if found else ""
            rows.append(row)
        return rows

    def remarks(self) -> list[str]:
        """How the differences were tested, and what could not be compared."""
        lines = [
            f"paired bootstrap: {RESAMPLES:,} draws of the same items for all runs, seed 0; p two-sided"
            + (", and corrected over the runs by Holm's method, score by score" if self.corrected else "")
        ]
        if self.items < _FEW:
            lines.append(f"{self.items} items are few: intervals and p-values of so few promise too much")
        return [*lines, *self.left_out, *signatures(self.evaluations[0].scores)]

    def files(self) -> dict[Path, str]:
        """What was written, and what each file holds."""
        return {
            self.directory / "comparison.json": "scores and differences",
            self.directory / "answers.tsv": "answers of all runs",
            self.page: "report of the comparison",
        }

    def to_json(self) -> dict[str, Any]:
        """All figures as ``json`` can write them."""
        models = []
        for place, (run, name, evaluation) in enumerate(zip(self.runs, self.names, self.evaluations, strict=True)):
            found = {key: each.to_json() for key, each in self.differences[place - 1].items()} if place else {}
            scores = {key: score.to_json() for key, score in evaluation.scores.items()}
            told = {"run": run, "name": name, "directory": str(evaluation.directory), "scores": scores}
            models.append({**told, "differences": found} if place else told)
        return {
            "file": self.data,
            "items": self.items,
            "test": {
                "method": "paired bootstrap",
                "against": self.runs[0],
                "resamples": RESAMPLES,
                "seed": 0,
                "level": LEVEL,
                "correction": "holm" if self.corrected else None,
            },
            "models": models,
            "not_compared": list(self.left_out),
            "version": thalweg.__version__,
        }


_NONE = {"difference": "", "its interval": ""}


def is_run(word: str | Path) -> bool:
    """Whether a word is a run directory, a model file or a model in the box, by what is there.

    >>> is_run("test.tsv")
    False
    """
    path = folder_of(word)
    return path.suffix == ".safetensors" or (path / MODEL).is_file() or (path / "config.yaml").is_file()


def compare(runs: Sequence[str | Path], data: str | None = None, **options: Any) -> Comparison:
    """Measure several runs of one task on the same data, and how each differs from the first.

    Every run gets its ``RUN/evaluation/NAME/`` as :func:`~thalweg.tasks.registry.evaluate` writes it; the comparison
    goes to ``evaluation/NAME/comparison/`` of the first.

    Args:
        data, options: as those of :meth:`~thalweg.tasks.base.Task.evaluate`, the same for all.

    >>> compare(["runs/a"], "test.tsv")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: a comparison needs two runs or more, got 1; ...
    """
    if isinstance(runs, (str, Path)):
        runs = [runs]
    tasks = _tasks_of(runs)
    if data == "-":
        raise ConfigError("standard input can be read once, and every run reads the data; write them to a file")
    evaluations = [task.evaluate(run, data, **options) for task, run in zip(tasks, runs, strict=True)]
    measured = _same_items(runs, evaluations, tasks[0].name)
    keys, left_out = _comparable(runs, measured)
    found = compare_tallies(
        measured[0].tally, [each.tally for each in measured[1:]], keys, resamples=RESAMPLES, level=LEVEL
    )
    result = Comparison(
        evaluations[0].directory / "comparison",
        tuple(str(run) for run in runs),
        _short_names(runs),
        tuple(evaluations),
        tuple(found),
        tuple(left_out),
        tuple(measured),
    )
    _write(result)
    return result


def _tasks_of(runs: Sequence[str | Path]) -> list[Task]:
    """The task of each run, which must be one; all that can be wrong before anything is measured."""
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs two runs or more, got {len(runs)}; name another: RUN RUN test.tsv")
    places: dict[Path, str | Path] = {}
    for run in runs:
        home = folder_of(run)
        model = home if home.is_file() else home / MODEL
        load_checkpoint(model, values=False)
        place = model.resolve().parent
        if place in places:
            raise ConfigError(f"{run}: expected each run once, got it twice ({places[place]}); leave one out")
        places[place] = run
    tasks = [task_of_run(run) for run in runs]
    for run, task in zip(runs, tasks, strict=True):
        if task.name != tasks[0].name:
            raise ConfigError(
                f"{run}: expected a run of the task {tasks[0].name} as {runs[0]} is, got one of {task.name}; "
                "compare runs of one task"
            )
    return tasks


def _same_items(runs: Sequence[str | Path], evaluations: Sequence[Evaluation], task: str) -> list[Measured]:
    """What was measured of each run, which must be the same items in the same order."""
    whole = [each.measured for each in evaluations if each.measured is not None]
    if len(whole) < len(runs):
        raise ConfigError(f"runs of the task {task} cannot be compared item by item; measure each alone")
    first = whole[0]
    for run, other in zip(runs[1:], whole[1:], strict=True):
        if len(other.sources) != len(first.sources):
            what = f"{len(first.sources)} of them for {runs[0]} and {len(other.sources)} for {run}"
        else:
            pairs = [list(zip(each.sources, map(tuple, each.references), strict=True)) for each in (first, other)]
            place = next((n for n, (a, b) in enumerate(zip(*pairs, strict=True)) if a != b), None)
            if place is None:
                continue
            shown = [" -> ".join([source, " | ".join(gold)]) for source, gold in (pairs[0][place], pairs[1][place])]
            what = f"as item {place + 1} `{shown[0]}` for {runs[0]} and `{shown[1]}` for {run}"
        raise DataError(f"runs must be compared on the same items, got {what}; name the data to measure on")
    return whole


def _comparable(runs: Sequence[str | Path], measured: Sequence[Measured]) -> tuple[list[str], list[str]]:
    """Keys of scores that say the same of every run, and a line on each of the others."""
    first = measured[0].tally.measures
    keys, left_out = [], []
    for key in dict.fromkeys(key for each in measured for key in each.tally.measures):
        told = [each.tally.measures.get(key) for each in measured]
        known = next(measure for measure in told if measure is not None)
        if all(measure == first.get(key) for measure in told):
            keys.append(key)
            continue
        units = [measure.unit if measure else "nothing" for measure in told]
        if len(set(units)) == 1:
            units = [f"{measure.name} {measure.signature}".strip() for measure in told if measure]
        counted = ", ".join(f"{unit} in {run}" for unit, run in zip(units, runs, strict=True))
        left_out.append(f"{known.name} is not compared, since it counts {counted}")
    return keys, left_out


def _short_names(runs: Sequence[str | Path]) -> tuple[str, ...]:
    """The last part of each path, or as many as tell all apart."""
    paths = [Path(run).parent if Path(run).is_file() else Path(run) for run in runs]
    parts = [path.resolve().parts for path in paths]
    count = 1
    while len({each[-count:] for each in parts}) < len(parts):
        count += 1
    return tuple("/".join(each[-count:]) for each in parts)


def _write(result: Comparison) -> None:
    from thalweg.tasks.report.comparison import comparison_page

    figures = json.dumps(result.to_json(), ensure_ascii=False, indent=2) + "\n"
    write_text(result.directory / "comparison.json", figures)
    first = result.measured[0]
    rows = zip(first.sources, first.references, *(each.answers for each in result.measured), strict=True)
    lines = ["\t".join(["source", "references", *result.names])]
    lines += ["\t".join(_cell(each) for each in (source, " | ".join(gold), *own)) for source, gold, *own in rows]
    write_text(result.directory / "answers.tsv", "\n".join(lines) + "\n")
    comparison_page(result.page, result)


def _cell(text: str) -> str:
    """As a column of a TSV file: a model of bytes may write anything."""
    return text.translate(dict.fromkeys(map(ord, "\t\r\n"), " "))
