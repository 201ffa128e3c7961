"""Published experiments as configs, with the published figure beside ours.

A recipe is a YAML file in this folder: what to train, on which seeds, what to measure, and what was published. Some
name one of the ``experiments`` and its settings instead.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError
from thalweg.files import write_text
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.limits import check_choice
from thalweg.metrics import Score
from thalweg.recipes.experiments import Order, build_settings, perform
from thalweg.tasks.base import Task
from thalweg.tasks.config import read_config
from thalweg.tasks.registry import load, task_of
from thalweg.tasks.report import write_report
from thalweg.tasks.runs import as_begun

__all__ = ["Recipe", "RecipeResult", "list_recipes", "load_recipe", "run_recipe"]

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Recipe:
    """One experiment.

    Attributes:
        name, title, note: what it is and what to know about it.
        published: metric -> figure published elsewhere (may be empty).
        seeds: one run each.
        config: settings of a run of any task.
        evaluations: what is measured after training: ``data``, ``k``, ``name`` and options of the task.
            ``prefix`` comes before the names of its scores.
        model_of: another recipe whose trained runs are measured instead of training.
        examples: sources whose answers are shown at the end.
        experiment, settings: what is done instead of training; see ``thalweg.recipes.experiments``.

    >>> load_recipe("t1").published
    {'accuracy': 0.167}
    """

    name: str
    title: str
    text: str
    note: str = ""
    published: dict[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    config: dict[str, Any] = field(default_factory=dict)
    evaluations: tuple[dict[str, Any], ...] = ()
    model_of: str = ""
    examples: tuple[str, ...] = ()
    experiment: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeResult:
    """Where the runs are, the report of the first, a table of scores, and one of example answers.

    Experiments have one report for all seeds, and pictures.

    >>> RecipeResult(Path("runs/demo"), None, []).finished
    True
    """

    directory: Path
    report: Path | None
    table: list[dict[str, str]]
    examples: list[dict[str, str]] = field(default_factory=list)
    finished: bool = True
    pictures: tuple[Path, ...] = ()


def list_recipes() -> tuple[Recipe, ...]:
    """All recipes, by name.

    >>> "demo" in [recipe.name for recipe in list_recipes()]
    True
    """
    files = resources.files("thalweg.recipes").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return tuple(load_recipe(name) for name in names)


def load_recipe(name: str) -> Recipe:
    """The recipe of that name.

    >>> load_recipe("demos")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: recipe `demos` is not known; did you mean `demo`?
    """
    import yaml

    folder = resources.files("thalweg.recipes")
    known = [file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")]
    check_choice("recipe", name, known)
    text = folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    raw = {"note": "", **yaml.safe_load(text)}
    raw |= {key: tuple(raw[key]) for key in ("seeds", "evaluations", "examples") if key in raw}
    return Recipe(name=name, text=text, **raw | {"note": raw["note"].strip()})


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    root: Path | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    listener: Listener | None = None,
) -> RecipeResult:
    """Train and measure a recipe on each of its seeds; what is already done in ``out`` is not done again.

    Args:
        out: gets ``seed-N/`` run directories and ``results-NAME.json``; of an experiment a page and pictures.
        root: folder of known data sets.
        seeds: so many runs, seeds 0, 1, ...; the recipe's own seeds by default.
        overrides: ``key=value`` words over the recipe's settings.
        fresh: remove what ``out`` holds of this recipe first.

    >>> run_recipe(load_recipe("demo"), "runs/demo", overrides=["hiden=8"])
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: `hiden` is not a setting; did you mean `hidden`?
    """
    out = Path(out)
    chosen = tuple(range(seeds)) if seeds else recipe.seeds
    if recipe.experiment:
        return _run_experiment(recipe, out, chosen, seeds, overrides, fresh, listener, root)
    directories = [out / f"seed-{seed}" for seed in chosen]
    if fresh and not recipe.model_of:
        for directory in directories:
            _remove_run(directory)
    trained = load_recipe(recipe.model_of) if recipe.model_of else recipe
    task = task_of(trained.config, f"recipe {trained.name}")
    found: list[dict[str, Score]] = []
    for seed, directory in zip(chosen, directories, strict=True):
        settings = task.overrides(trained.config, [*overrides, f"training.seed={seed}"])
        config = task.configure(settings, f"recipe {trained.name}")
        _check_settings(directory, task, config)
        if not _complete(directory):
            resume = (directory / "last.safetensors").exists()
            result = task.train(config, directory, resume=resume, listener=listener, root=root)
            if not result.reason:
                return RecipeResult(out, None, [], finished=False)
        found.append(_measure(recipe, task, directory, root, listener))
    table = _table(recipe, found)
    report = write_report(directories[0])
    scores = [{key: score.value for key, score in run.items()} for run in found]
    record = {"recipe": recipe.name, "published": recipe.published, "seeds": list(chosen), "scores": scores}
    write_text(out / f"results-{recipe.name}.json", json.dumps(record, indent=2) + "\n")
    return RecipeResult(out, report, table, _examples(recipe, directories[0]))


def _run_experiment(
    recipe: Recipe,
    out: Path,
    chosen: tuple[int, ...],
    seeds: int | None,
    overrides: Sequence[str],
    fresh: bool,
    listener: Listener | None,
    root: Path | None,
) -> RecipeResult:
    settings = build_settings(recipe.experiment, recipe.settings, overrides, where=f"recipe {recipe.name}")
    order = Order(recipe.name, recipe.experiment, recipe.title, recipe.note, settings, chosen, tuple(overrides))

    def say(line: str) -> None:
        if listener is not None:
            listener({"event": "experiment", "message": line})

    page, tables, pictures = perform(order, out, seeds=seeds, fresh=fresh, say=say, root=root)
    return RecipeResult(out, page, tables[0].rows, pictures=tuple(pictures))


def _remove_run(directory: Path) -> None:
    """Delete a run directory, and only what is one."""
    if directory.exists() and not (directory / "config.yaml").exists():
        raise ConfigError(f"{directory} is not a run directory: it is not removed; choose another --out")
    shutil.rmtree(directory, ignore_errors=True)


def _check_settings(directory: Path, task: Task, config: Any) -> None:
    """A run that is already there must be the one that is asked for."""
    path = directory / "config.yaml"
    if not path.exists():
        return
    raw = read_config(path)
    if task_of(raw, str(path)).name != task.name:
        raise ConfigError(f"{directory} holds a run of another task; use --fresh to replace it or choose another --out")
    before = task.settings(task.configure(as_begun(raw, task.kind), str(path)))
    asked = task.settings(config)
    if isinstance(asked.get("model"), dict) and asked["model"].get("family") == "auto":
        asked = {name: settings for name, settings in asked.items() if name not in ("model", "training")}  # data chose
    for section, settings in asked.items():
        for key, value in settings.items() if isinstance(settings, dict) else ():
            # The family comes first, so that what only one family has is never compared.
            was, settled_later = before[section].get(key), key in ("epochs", "evaluate_every") and not value
            if was != value and not settled_later:
                raise ConfigError(
                    f"{directory} was run with {section}.{key}={was}, got {value}; "
                    "use --fresh to run it again or choose another --out"
                )


def _complete(directory: Path) -> bool:
    last = directory / "last.safetensors"
    return last.exists() and bool(load_checkpoint(last, values=False).meta["progress"]["finished"])


def _measure(
    recipe: Recipe, task: Task, directory: Path, root: Path | None, listener: Listener | None
) -> dict[str, Score]:
    scores: dict[str, Score] = {}
    for entry in recipe.evaluations:
        options = {key: value for key, value in entry.items() if key not in ("data", "prefix")}
        result = task.evaluate(directory, entry["data"], root=root, listener=listener, **options)
        prefix = entry.get("prefix", "")
        for key, score in result.scores.items():
            scores[prefix + key] = dataclasses.replace(score, name=prefix + score.name)
    return scores


def _table(recipe: Recipe, found: list[dict[str, Score]]) -> list[dict[str, str]]:
    """A row a metric: mean and spread over several runs, or the interval of a single one."""
    rows = []
    for key, first in found[0].items():
        values = [scores[key].value for scores in found]
        digits = first.digits
        row = {"metric": first.name}
        if recipe.published:
            row["published"] = f"{recipe.published[key]:.{digits}f}" if key in recipe.published else ""
        row["mean" if len(found) > 1 else "value"] = f"{statistics.fmean(values):.{digits}f}"
        if len(found) > 1:
            row |= {"spread": f"{statistics.stdev(values):.{digits}f}", "runs": str(len(found))}
        else:
            row["95 % interval"] = f"{first.low:.{digits}f} to {first.high:.{digits}f}"
        rows.append(row)
    return rows


def _examples(recipe: Recipe, directory: Path) -> list[dict[str, str]]:
    """What the first run's model answers to the recipe's examples."""
    if not recipe.examples:
        return []
    rows = []
    for prediction in load(directory).predict(recipe.examples, k=3):
        answers = [f"{answer.text} ({answer.probability:.2f})" for answer in prediction.answers]
        rows.append({"source": prediction.source, "answers": "  |  ".join(answers)})
    return rows
