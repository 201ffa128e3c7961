"""``thalweg train``: from pairs in a file, or images in folders, to a run directory with a model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thalweg.cli.options import DataRoot
from thalweg.cli.output import note, note_next, say
from thalweg.cli.progress import Display, metrics_line
from thalweg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from thalweg.learning.trainer import Watch
    from thalweg.tasks import TrainResult
    from thalweg.tasks.registry import Task


# Tasks with the models that each offers, the default first; read as data, so that a help page need not wait for them.
TASKS = json.loads((resources.files("thalweg") / "tasks" / "registry.json").read_text(encoding="utf-8"))


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|DATA|KEY=VALUE",
            help="A YAML config or data, and settings laid over them such as hidden=256 epochs=30.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=", ".join(f"{name} ({entry['about']})" for name, entry in TASKS.items()) + "; the first if not given.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Training pairs: TSV, .gz, - for stdin, or NAME:SPLIT; images: a folder, a zip or digits.",
        ),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Dev pairs; without, a tenth of the training is kept apart."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="; ".join(f"{name}: {', '.join(entry['models'])}" for name, entry in TASKS.items())
            + "; the first of its task if not given.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run directory; runs/DATA-MODEL if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of everything random.")] = None,
    ensemble: Annotated[
        int | None, typer.Option(metavar="N", help="Train N models, of seeds one after the other; they answer as one.")
    ] = None,
    watch: Annotated[
        str | None, typer.Option(metavar="gradients", help="Log a profile of gradients every --watch-every steps.")
    ] = None,
    watch_every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between two profiles.")] = 50,
    data_root: DataRoot = None,
) -> None:
    """Train a model on pairs of strings: source, tab, target, one pair a line; a third column holds tags.

    The symbols of both sides are guessed from the file and printed. Ctrl-C or a kill leaves a run which
    goes on with --resume, to the same result. Settings come from the config file, then from KEY=VALUE words.

    With --task classify it trains on images instead: a folder or zip of train/val/test/CLASS/* or of CLASS/* alone, or
    digits, which are there without a file.

    With --task density it learns where the rows of a CSV file or a .npy lie; predict then tells how unusual a row is.

    \b
    Example:
      thalweg train train.tsv
      thalweg train --data train.tsv --dev dev.tsv --out runs/names
      thalweg train --data train.tsv --model gru-attention hidden=256 epochs=30
      thalweg train --data train.tsv --model transformer batch_tokens=4000 epochs=100
      thalweg train --data inflection.tsv --model transformer
      thalweg train --data train.tsv --model pretrained checkpoint=byt5-small learning_rate=0.001
      thalweg train config.yaml learning_rate=0.001 --seed 2
      thalweg train --data train.tsv --dev dev.tsv --ensemble 5
      thalweg train --data train.tsv --watch gradients encoder_layers=8
      thalweg train --resume --out runs/names
      thalweg train --task classify digits
      thalweg train --task density measurements.csv --model mixture components=5
      thalweg train --task classify photos.zip --model convnet-residual epochs=60 mixup=0.2
    """
    asked, raw = _task(task, words or [], data, out, resume)
    words, data = _places(words or [], data, asked, named=task is not None or "task" in raw)
    path, overrides = split_words(words)
    options = {**asked.data_settings(data, dev), "training.device": device, "training.seed": seed}
    options["training.ensemble"] = ensemble
    raw, where = _settings(asked, path, raw, data, model, out, resume)
    raw = _lay_over(asked, raw, {key: value for key, value in options.items() if value is not None}, overrides)
    config = asked.configure(raw, where)
    given = asked.data_of(config)
    if not given:
        raise ConfigError(asked.missing)
    out = out or default_out(given, model or (path.stem if path else asked.default_model or asked.name))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: expected a run directory, got a file; choose another --out")
    watching = _watch(watch, watch_every)
    note(f"run     {out}")
    try:
        with Display() as display:
            result = asked.train(config, out, resume=resume, listener=display, root=data_root, watch=watching)
    except KeyboardInterrupt:
        _stopped(out, given, data_root)
    if not result.reason:
        _stopped(out, given, data_root)
    _finish(asked, result, display.names, data_root)


def _task(
    name: str | None, words: Sequence[str], data: str | None, out: Path | None, resume: bool
) -> tuple[Task, dict[str, Any]]:
    """The task that --task names, else the one of the config file or of the run that is resumed; and their settings."""
    from thalweg.tasks.config import read_config
    from thalweg.tasks.registry import task_named, task_of

    configs = [Path(word) for word in words if "=" not in word and _yaml(word)]
    if not configs and resume and data is None and out is not None and (out / "config.yaml").is_file():
        configs = [out / "config.yaml"]
    if not configs or not configs[0].is_file():
        return task_named(name) if name is not None else task_of({}), {}
    raw = read_config(configs[0])
    told = task_of(raw, str(configs[0]))
    # A file that names no task may be given one.
    if name is not None and name != told.name and "task" in raw:
        raise ConfigError(f"{configs[0]} is for the task {told.name}, got --task {name}; leave it out")
    return told if name is None else task_named(name), raw


def _places(words: Sequence[str], data: str | None, task: Task, *, named: bool) -> tuple[list[str], str | None]:
    """The words without the one that says where the data are, and where they are.

    Where nobody ``named`` the task, data that are plainly of another one are told of.
    """
    from thalweg.tasks.registry import list_tasks, task_named

    places = [word for word in words if "=" not in word and not _yaml(word)]
    for word in () if named else places:
        for other in map(task_named, list_tasks()):
            if other.recognises(word):
                raise ConfigError(f"expected {task.items}, got `{word}`; for {other.items} add --task {other.name}")
    found = [*places, *([] if data is None else [data])]
    if len(found) > 1:
        raise ConfigError(f"expected {task.items} in one place, got {', '.join(found)}; settings are `key=value`")
    return [word for word in words if word not in places], found[0] if found else None


def _watch(what: str | None, every: int) -> Watch | None:
    if what is None:
        return None
    if what != "gradients":
        raise ConfigError(f"--watch `{what}` is not known; {nearest(what, ['gradients'])}")
    from thalweg.diagnostics.gradient_watch import GradientWatch

    return GradientWatch(every)


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file among the words, if any, and the ``key=value`` words.

    >>> split_words(["config.yaml", "hidden=256"])
    (PosixPath('config.yaml'), ['hidden=256'])
    """
    configs = [word for word in words if "=" not in word and _yaml(word)]
    if len(configs) > 1:
        raise ConfigError(f"expected one config file, got {len(configs)}: {', '.join(configs)}")
    return Path(configs[0]) if configs else None, [word for word in words if word not in configs]


def _yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _settings(
    task: Task,
    path: Path | None,
    raw: dict[str, Any],
    data: str | None,
    model: str | None,
    out: Path | None,
    resume: bool,
) -> tuple[dict[str, Any], str]:
    """The settings under the options and words, and how to call their place in messages."""
    from thalweg.tasks.config import read_config, with_preset
    from thalweg.tasks.runs import as_begun

    own = resume and path is None and data is None  # the settings are those that the run has written itself
    if own:
        if out is None:
            raise ConfigError("--resume needs the run to go on with; give `--out RUN`")
        if model is not None:
            raise ConfigError("--model cannot change a run that is resumed; leave it out")
        path = out / "config.yaml"
        if not path.is_file():
            raise ConfigError(f"{out}: expected a run to resume, got no config.yaml in it; check --out")
    if model is not None and model not in task.presets:
        raise ConfigError(f"--model `{model}` is not known; {nearest(model, task.presets)}")
    raw = raw or (read_config(path) if path else {})
    raw = as_begun(raw, task.kind) if own else raw
    if model is not None:
        section = raw.get("model")
        named = {"preset": model, **section} if isinstance(section, Mapping) else model
        raw = dict(with_preset({**raw, "model": named}, task.presets))
    return raw, str(path) if path else "settings"


def _lay_over(task: Task, raw: dict[str, Any], options: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for key, value in options.items():
        section, _, leaf = key.partition(".")
        if isinstance(raw.get(section) or {}, Mapping):
            raw[section] = {**(raw.get(section) or {}), leaf: value}
    return task.overrides(raw, overrides)


def default_out(data: str, model: str) -> Path:
    """The run directory of a training without ``--out``.

    >>> default_out("names.tsv.gz", "lstm").as_posix(), default_out("-", "gru").as_posix()
    ('runs/names-lstm', 'runs/stdin-gru')
    """
    from thalweg.tasks.names import file_name

    name = Path(data).resolve().name if Path(data).exists() else re.sub(r"[:/\\]+", "-", data)
    stem = "stdin" if data == "-" else Path(name).name.removesuffix(".gz").removesuffix(".tsv").removesuffix(".zip")
    return Path("runs") / file_name(f"{stem}-{model}")


def _stopped(out: Path, data: str, root: Path | None) -> NoReturn:
    command = f"thalweg train --resume --out {shlex.quote(str(out))}"
    if root:
        command += f" --data-root {shlex.quote(str(root))}"
    if data == "-":
        command += "   (with the same data on standard input)"
    if (out / "config.yaml").exists():
        note(f"stopped; go on with:\n  {command}")
    else:
        note("stopped before anything was written")
    raise typer.Exit(130)


def _finish(task: Task, result: TrainResult, names: Mapping[str, str], root: Path | None) -> None:
    from thalweg.tasks.report import write_report

    if result.best_epoch:
        say(f"best    epoch {result.best_epoch}: {metrics_line(result.best, names)}", style="bold")
        say(f"model   {result.run / 'model.safetensors'}")
    task.after_training(result, root)
    say(f"report  {write_report(result.run)}")
    note_next(task.next_steps(shlex.quote(str(result.run))))
