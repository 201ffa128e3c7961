"""What the commands do with runs that classify images."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.cli.progress import Display, metrics_line
from thalweg.errors import ConfigError, ThalwegError

if TYPE_CHECKING:
    from thalweg.metrics import Score
    from thalweg.tasks import TrainResult
    from thalweg.tasks.class_evaluation import ClassEvaluation

__all__ = ["evaluate_images", "finish_images", "predict_images", "task_of_run"]


def task_of_run(run: Path) -> str:
    """The task of a run directory or of a model file; what is neither counts as transduction, whose errors say more.

    >>> task_of_run(Path("absent"))
    'transduce'
    """
    from thalweg.learning.checkpoint import load_checkpoint
    from thalweg.tasks.config import read_config

    try:
        if (run / "config.yaml").is_file():
            return str(read_config(run / "config.yaml").get("task", "transduce"))
        path = run if run.is_file() else run / "model.safetensors"
        return str(load_checkpoint(path).meta.get("task", "transduce"))
    except ThalwegError:
        return "transduce"


def evaluate_images(
    run: Path, test: str | None, *, k: int, name: str | None, device: str, root: Path | None, as_json: bool
) -> None:
    """Measure a classifier and print what was found.

    >>> evaluate_images.__name__
    'evaluate_images'
    """
    from thalweg.tasks.class_evaluation import evaluate
    from thalweg.tasks.report import write_report

    with Display() as display:
        result = evaluate(run, test or "test", k=k, name=name, device=device, root=root, listener=display)
    report = write_report(result.directory.parents[1])
    if as_json:
        _print_json(result, report)
        return
    note(f"{result.data}: {result.items:,} images, {result.images_per_second:,.0f} a second")
    show_table([_row(score) for score in result.scores.values()], right=("value", "low", "high", "items"))
    say()
    classes = [
        {"class": each.name, "precision": f"{each.precision:.4f}", "recall": f"{each.recall:.4f}"}
        | {"F1": f"{each.f1:.4f}", "images": f"{each.support:,}", "predicted": f"{each.predicted:,}"}
        for each in result.classes
    ]
    show_table(classes, right=("precision", "recall", "F1", "images", "predicted"))
    say()
    if result.temperature is not None:
        before, after = result.scores["ece"].value, result.calibrated["ece"]
        say(f"temperature {result.temperature:.3f}, fitted on val: ECE {before:.4f} -> {after:.4f}")
        say()
    for file, about in result.files().items():
        say(f"{about:<29} {file}")
    say(f"{'report':<29} {report}")


def _row(score: Score) -> dict[str, str]:
    return {
        "metric": score.name,
        "value": f"{score.value:.4f}",
        "low": f"{score.low:.4f}",
        "high": f"{score.high:.4f}",
        "items": f"{score.n:,}",
        "better": "higher" if score.higher_is_better else "lower",
    }


def _print_json(result: ClassEvaluation, report: Path) -> None:
    use_utf8()
    facts = {"directory": str(result.directory), "report": str(report), **result.to_json()}
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))


def predict_images(run: Path, paths: list[str], *, k: int, device: str, temperature: float, jsonl: bool) -> None:
    """Write the k most probable classes of every image.

    >>> predict_images.__name__
    'predict_images'
    """
    from thalweg.data.images import read_unlabelled
    from thalweg.tasks.classifier import load_classifier

    if not paths:
        raise ConfigError("no images; name files, folders or zips: `thalweg predict RUN image.png`")
    paths = [path.rstrip("/") or path for path in paths]
    classifier = load_classifier(run, device=device)
    with Display() as display:
        images, skipped = read_unlabelled(
            paths,
            size=classifier.size,
            colour=classifier.colour,
            on_bad="skip" if any(Path(path).is_dir() or path.endswith(".zip") for path in paths) else "fail",
            progress=lambda done, total: display({"event": "decoded", "done": done, "of": total}),
        )
    for file, reason in skipped:
        note(f"skipped {file}: {reason}")
    use_utf8()
    for prediction in classifier.predict(images, k=k, temperature=temperature):
        if jsonl:
            sys.stdout.write(json.dumps(prediction.to_json(), ensure_ascii=False) + "\n")
            continue
        for answer in prediction.answers:
            line = f"{prediction.source}\t{answer.text}\t{answer.log_prob:.6f}\t{answer.probability:.6g}"
            sys.stdout.write(line + "\n")
    sys.stdout.flush()


def finish_images(result: TrainResult, root: Path | None) -> None:
    """The last words of a training: the validation images are looked at closely, for the report.

    >>> finish_images.__name__
    'finish_images'
    """
    from thalweg.tasks.class_evaluation import evaluate
    from thalweg.tasks.report import write_report

    run = shlex.quote(str(result.run))
    if result.best_epoch:
        say(f"best    epoch {result.best_epoch}: {metrics_line(result.best)}", style="bold")
        say(f"model   {result.run / 'model.safetensors'}")
        evaluate(result.run, "val", root=root)
    say(f"report  {write_report(result.run)}")
    note(f"next:\n  thalweg evaluate {run}\n  thalweg predict {run} --k 3 IMAGE.png")
