"""``thalweg evaluate``: how well a run does on data, with intervals."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from thalweg.cli.options import Chosen, DataRoot, References, Run, takes_search
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.cli.progress import Display
from thalweg.limits import ANSWERS

__all__ = ["evaluate"]


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
    from thalweg.tasks.registry import task_of_run
    from thalweg.tasks.report import write_report

    task = task_of_run(run)
    given: dict[str, Any] = chosen.given | ({} if references == "each" else {"references": references})
    task.check_options(given)
    given |= {} if k is None else {"k": k}
    with Display() as display:
        result = task.evaluate(run, test, name=name, device=chosen.device, root=data_root, listener=display, **given)
    report = write_report(result.directory.parents[1])
    if as_json:
        use_utf8()
        facts = {"directory": str(result.directory), "report": str(report), **result.to_json()}
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    note(result.said())
    for table in result.tables():
        show_table(table.rows, right=table.right)
        say()
    remarks = result.remarks()
    for line in [*remarks, ""] if remarks else []:
        say(line)
    for file, about in result.files().items():
        say(f"{about:<29} {file}")
    say(f"{'report':<29} {report}")
