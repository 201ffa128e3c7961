"""``thalweg train``: from pairs in a file to a run directory with a model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thalweg.cli.options import DataRoot
from thalweg.cli.output import note, say
from thalweg.cli.progress import Display, metrics_line
from thalweg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from thalweg.learning.trainer import Watch
    from thalweg.tasks import TrainResult

__all__ = ["default_out", "split_words", "train"]

DEFAULT_MODEL = "lstm-attention"
MODELS = (
    *("lstm-attention", "gru-attention", "lstm", "gru"),
    *("transformer", "transformer-rotary", "transformer-pointer", "causal"),
)
DATA_SUFFIXES = (".tsv", ".csv", ".txt", ".gz")


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="A YAML config, and settings laid over it such as hidden=256 epochs=30.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training pairs: TSV, .gz, - for stdin, or NAME:SPLIT.")
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Dev pairs; without, a tenth of the training is kept apart."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{', '.join(MODELS)}; {DEFAULT_MODEL} if not given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run directory; runs/DATA-MODEL if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of everything random.")] = None,
    watch: Annotated[
        str | None, typer.Option(metavar="gradients", help="Log a profile of gradients every --watch-every steps.")
    ] = None,
    watch_every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between two profiles.")] = 50,
    data_root: DataRoot = None,
) -> None:
    """Train a model on pairs of strings: source, tab, target, one pair a line; a third column holds tags.

    The symbols of both sides are guessed from the file and printed. Ctrl-C or a kill leaves a run which
    goes on with --resume, to the same result. Settings come from the config file, then from KEY=VALUE words.

    \b
    Example:
      thalweg train --data train.tsv --dev dev.tsv --out runs/names
      thalweg train --data train.tsv --model gru-attention hidden=256 epochs=30
      thalweg train --data train.tsv --model transformer batch_tokens=4000 epochs=100
      thalweg train --data inflection.tsv --model transformer
      thalweg train config.yaml learning_rate=0.001 --seed 2
      thalweg train --data train.tsv --watch gradients encoder_layers=8
      thalweg train --resume --out runs/names
    """
    from thalweg.tasks.config import build_config
    from thalweg.tasks.transduce import train as train_task

    path, overrides = split_words(words or [])
    options = {"data.train": data, "data.dev": dev, "training.device": device, "training.seed": seed}
    raw, where = _settings(path, data, model, out, resume)
    raw = _lay_over(raw, {key: value for key, value in options.items() if value is not None}, overrides)
    config = build_config(raw, where=where)
    if not config.data.train:
        raise ConfigError("no training data; give `--data train.tsv`, or a config file with `data: {train: ...}`")
    out = out or default_out(config.data.train, model or (path.stem if path else DEFAULT_MODEL))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: expected a run directory, got a file; choose another --out")
    watching = _watch(watch, watch_every)
    guessed = [side for side in ("source", "target") if getattr(config.data, f"{side}_symbols") == "auto"]
    note(f"run     {out}")
    try:
        with Display(guessed=guessed) as display:
            result = train_task(config, out, resume=resume, listener=display, root=data_root, watch=watching)
    except KeyboardInterrupt:
        _stopped(out, config.data.train, data_root)
    if not result.reason:
        _stopped(out, config.data.train, data_root)
    _finish(result, phones=display.phones)


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
    configs = [word for word in words if "=" not in word and (_yaml(word) or Path(word).is_file())]
    if len(configs) > 1:
        raise ConfigError(f"expected one config file, got {len(configs)}: {', '.join(configs)}")
    if configs and not _yaml(configs[0]) and configs[0].endswith(DATA_SUFFIXES):
        raise ConfigError(f"expected a YAML config, got `{configs[0]}`; for data write `--data {configs[0]}`")
    return Path(configs[0]) if configs else None, [word for word in words if word not in configs]


def _yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _settings(
    path: Path | None, data: str | None, model: str | None, out: Path | None, resume: bool
) -> tuple[dict[str, Any], str]:
    """The settings under the options and words, and how to call their place in messages."""
    from thalweg.tasks.config import read_config
    from thalweg.tasks.families import PRESETS
    from thalweg.tasks.resuming import as_begun

    own = resume and path is None and data is None  # the settings are those that the run has written itself
    if own:
        if out is None:
            raise ConfigError("--resume needs the run to go on with; give `--out RUN`")
        if model is not None:
            raise ConfigError("--model cannot change a run that is resumed; leave it out")
        path = out / "config.yaml"
        if not path.is_file():
            raise ConfigError(f"{out}: expected a run to resume, got no config.yaml in it; check --out")
    if model is not None and model not in PRESETS:
        raise ConfigError(f"--model `{model}` is not known; {nearest(model, PRESETS)}")
    raw = read_config(path) if path else {}
    raw = as_begun(raw) if own else raw
    preset = PRESETS[model or DEFAULT_MODEL] if model or not path else {}
    merged: dict[str, Any] = {section: dict(values) for section, values in preset.items()}
    for section, values in raw.items():
        both = isinstance(values, Mapping) and section in merged
        merged[section] = {**merged[section], **values} if both else values
    return merged, str(path) if path else "settings"


def _lay_over(raw: dict[str, Any], options: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    from thalweg.tasks.config import apply_overrides

    for key, value in options.items():
        section, _, leaf = key.partition(".")
        if isinstance(raw.get(section) or {}, Mapping):
            raw[section] = {**(raw.get(section) or {}), leaf: value}
    return apply_overrides(raw, overrides)


def default_out(data: str, model: str) -> Path:
    """The run directory of a training without ``--out``.

    >>> default_out("names.tsv.gz", "lstm").as_posix(), default_out("-", "gru").as_posix()
    ('runs/names-lstm', 'runs/stdin-gru')
    """
    name = Path(data).name if Path(data).exists() else re.sub(r"[:/\\]+", "-", data)
    stem = "stdin" if data == "-" else Path(name).name.removesuffix(".gz").removesuffix(".tsv")
    return Path("runs") / f"{stem}-{model}"


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


def _finish(result: TrainResult, *, phones: bool) -> None:
    from thalweg.tasks.report import write_report

    run = shlex.quote(str(result.run))
    if result.best_epoch:
        say(f"best    epoch {result.best_epoch}: {metrics_line(result.best, phones=phones)}", style="bold")
        say(f"model   {result.run / 'model.safetensors'}")
    say(f"report  {write_report(result.run)}")
    note(f"next:\n  thalweg evaluate {run} test.tsv\n  thalweg predict {run} --k 5 --text WORD")
