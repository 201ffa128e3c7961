"""``thalweg evaluate``: error rates of a run on a file, with intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.classes import evaluate_images, task_of_run
from thalweg.cli.options import Chosen, DataRoot, References, Run, takes_search
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.cli.progress import Display
from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from thalweg.metrics import Score
    from thalweg.tasks.evaluation import Evaluation, ExactReport

__all__ = ["evaluate"]

FILES = {
    "metrics.json": "scores and settings",
    "predictions.jsonl": "k best answers of every item",
    "worst.tsv": "worst errors first",
    "confusions.tsv": "symbols taken for others",
    "attention.json": "where the model looked",
}


@takes_search
def evaluate(
    run: Run,
    chosen: Chosen,
    test: Annotated[
        str | None,
        typer.Argument(
            metavar="TEST",
            help="Pairs: TSV, .gz, - for stdin, or NAME:SPLIT. Images: a split of the run's own data (test, val, "
            "train; test if not given), a folder, a zip, or DATA:SPLIT.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Answers per source.")] = 5,
    references: Annotated[
        References,
        typer.Option(help="each: every line counts; any: every source once, any of its targets is right."),
    ] = References.each,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the evaluation; the file's by default.")] = None,
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Measure a model: accuracy, CER (PER for phones), WER, WER@k, BLEU with 95 % bootstrap intervals.

    Writes scores, k-best predictions, the worst errors and a confusion table to RUN/evaluation/NAME and
    renews RUN/report.html. A run trained with features reads its tags from the third column. With --search exact it
    also says how often a beam finds the most probable answer, and how often that is the empty one.

    Of a run that classifies images: accuracy, macro F1, NLL, Brier score and calibration (ECE) with intervals,
    precision and recall of each class, what is taken for what, the most confident mistakes, and a temperature fitted
    on val.

    \b
    Example:
      thalweg evaluate runs/names test.tsv
      thalweg evaluate runs/names test.tsv --k 10 --references any --json
      thalweg evaluate runs/names test.tsv --search exact --name test-exact
      thalweg evaluate runs/names test.tsv --ensemble runs/two --vote
      thalweg evaluate runs/digits-convnet-norm
    """
    if task_of_run(run) == "classify":
        chosen.only("device")
        evaluate_images(run, test, k=k, name=name, device=chosen.device, root=data_root, as_json=as_json)
        return
    if test is None:
        raise ConfigError("no test pairs; give a file: `thalweg evaluate RUN test.tsv`")
    from thalweg.tasks.evaluation import evaluate as evaluate_task
    from thalweg.tasks.report import write_report

    with Display() as display:
        result = evaluate_task(
            run,
            test,
            k=k,
            how=chosen.how,
            references=references.value,
            name=name,
            device=chosen.device,
            precision=chosen.precision,
            ensemble=chosen.ensemble,
            vote=chosen.vote,
            root=data_root,
            listener=display,
        )
    report = write_report(result.directory.parents[1])
    if as_json:
        _print_json(result, report)
        return
    note(f"{test}: {result.items:,} items, {result.words_per_second:,.0f} a second with {chosen.how.search} search")
    show_table([_row(score) for score in result.scores.values()], right=("value", "low", "high", "items"))
    if result.exact:
        say()
        _say_exact(result.exact)
    say()
    for file, about in FILES.items():
        if (result.directory / file).exists():
            say(f"{about:<29} {result.directory / file}")
    say(f"{'report':<29} {report}")


def _say_exact(exact: ExactReport) -> None:
    say(f"proved the most probable      {exact.proved:8.2%} of items")
    say(f"beam {exact.width} finds it already      {exact.beam_optimal:8.2%}, a better answer {exact.beam_beaten:.2%}")
    say(f"it is the empty answer        {exact.empty:8.2%}")


def _row(score: Score) -> dict[str, str]:
    digits = 2 if score.name.lower() == "bleu" else 4
    return {
        "metric": score.name,
        "value": f"{score.value:.{digits}f}",
        "low": f"{score.low:.{digits}f}",
        "high": f"{score.high:.{digits}f}",
        "items": f"{score.n:,}",
        "better": "higher" if score.higher_is_better else "lower",
    }


def _print_json(result: Evaluation, report: Path) -> None:
    use_utf8()
    facts = {
        "directory": str(result.directory),
        "report": str(report),
        "items": result.items,
        "words_per_second": result.words_per_second,
        "scores": {key: score.to_json() for key, score in result.scores.items()},
    }
    if result.exact:
        facts["exact"] = dataclasses.asdict(result.exact)
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
