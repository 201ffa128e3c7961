"""``thalweg evaluate``: how well a run does on data, with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import Chosen, DataRoot, References, takes_search
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.cli.progress import Display
from thalweg.limits import ANSWERS

if TYPE_CHECKING:
    from thalweg.tasks.base import Evaluation
    from thalweg.tasks.comparison import Comparison


@takes_search
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...] [TEST]",
            help="Run directories that `thalweg train` wrote; then what to measure on. Pairs: TSV, .gz, - for stdin, "
            "or NAME:SPLIT. Images: a split of the run's own data (test, val, train; test if not given), a folder, a "
            "zip, or DATA:SPLIT.",
            show_default=False,
        ),
    ],
    chosen: Chosen,
    k: Annotated[int | None, typer.Option("--k", min=1, max=ANSWERS, help="Answers per source; 5 as a rule.")] = None,
    references: Annotated[
        References,
        typer.Option(help="each: every line counts; any: every source once, any of its targets is right."),
    ] = "each",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the evaluation; the file's by default.")] = None,
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Measure a model: accuracy, CER (PER for phones), WER, WER@k, BLEU with 95 % bootstrap intervals.

    Of sentences also BLEU by the 13a tokens of WMT and chrF; BLEU and chrF come with sacrebleu's signature.

    Writes scores, k-best predictions, the worst errors and a confusion table to RUN/evaluation/NAME and
    renews RUN/report.html. A run trained with features reads its tags from the third column. With --search exact it
    also says how often a beam finds the most probable answer, and how often that is the empty one.

    Of a run that classifies images: accuracy, macro F1, NLL, Brier score and calibration (ECE) with intervals,
    precision and recall of each class, what is taken for what, the most confident mistakes, and a temperature fitted
    on val.

    Several runs are measured on the same data and compared with the first: every score side by side, and the
    differences with a 95 % interval and a p-value by paired bootstrap; TEST, where it is given, stands last.

    \b
    Example:
      thalweg evaluate runs/names test.tsv
      thalweg evaluate runs/names test.tsv --k 10 --references any --json
      thalweg evaluate runs/names test.tsv --search exact --name test-exact
      thalweg evaluate runs/names test.tsv --ensemble runs/two --vote
      thalweg evaluate runs/names runs/names-transformer test.tsv
      thalweg evaluate runs/digits-convnet-norm
    """
    from thalweg.tasks.comparison import Comparison, compare
    from thalweg.tasks.registry import task_of_run
    from thalweg.tasks.report import write_report

    runs, test = _runs_and_data(words)
    task = task_of_run(runs[0])
    given = chosen.given | ({} if references == "each" else {"references": references})
    task.check_options(given)
    given |= {} if k is None else {"k": k}
    options: dict[str, Any] = {"name": name, "device": chosen.device, "root": data_root, **given}
    with Display() as display:
        if len(runs) > 1:
            result = compare(runs, test, listener=display, **options)
        else:
            result = task.evaluate(runs[0], test, listener=display, **options)
    measured = result.evaluations if isinstance(result, Comparison) else [result]
    reports = [write_report(each.directory.parents[1]) for each in measured]
    if as_json:
        use_utf8()
        report = result.page if isinstance(result, Comparison) else reports[0]
        facts = {"directory": str(result.directory), "report": str(report), **result.to_json()}
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    _show(result, reports)


def _show(result: Evaluation | Comparison, reports: Sequence[Path]) -> None:
    note(result.said())
    for table in result.tables():
        show_table(table.rows, right=table.right)
        say()
    remarks = result.remarks()
    for line in [*remarks, ""] if remarks else []:
        say(line)
    for file, about in result.files().items():
        say(f"{about:<29} {file}")
    for report in reports:
        say(f"{'report':<29} {report}")


def _runs_and_data(words: list[str]) -> tuple[list[str], str | None]:
    """Runs, and the data, which come last: one word is a run, and so is a last one that is a run's folder or model."""
    from thalweg.tasks.comparison import is_run

    if len(words) == 1 or is_run(words[-1]):
        return words, None
    return words[:-1], words[-1]
