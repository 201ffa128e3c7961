"""``thalweg evaluate``: error rates of a run on a file, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.options import (
    DataRoot,
    Device,
    LengthPenalty,
    MaxLength,
    References,
    Run,
    SamplingSeed,
    Search,
    Temperature,
    TopK,
    TopP,
    Width,
)
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.cli.progress import Display

if TYPE_CHECKING:
    from thalweg.metrics import Score
    from thalweg.tasks import Evaluation

__all__ = ["evaluate"]

FILES = {
    "metrics.json": "scores and settings",
    "predictions.jsonl": "k best answers of every item",
    "worst.tsv": "worst errors first",
    "confusions.tsv": "symbols taken for others",
    "attention.json": "where the model looked",
}


def evaluate(
    run: Run,
    test: Annotated[str, typer.Argument(metavar="TEST", help="Pairs: TSV, .gz, - for stdin, or NAME:SPLIT.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Answers per source.")] = 5,
    search: Annotated[Search, typer.Option(help="How answers are searched.")] = Search.beam,
    width: Width = 5,
    length_penalty: LengthPenalty = 0.0,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: SamplingSeed = 0,
    max_length: MaxLength = 0,
    references: Annotated[
        References,
        typer.Option(help="each: every line counts; any: every source once, any of its targets is right."),
    ] = References.each,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the evaluation; the file's by default.")] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Measure a model: accuracy, CER (PER for phones), WER, WER@k, BLEU with 95 % bootstrap intervals.

    Writes scores, k-best predictions, the worst errors and a confusion table to RUN/evaluation/NAME and
    renews RUN/report.html.

    \b
    Example:
      thalweg evaluate runs/names test.tsv
      thalweg evaluate runs/names test.tsv --k 10 --width 10 --references any --json
    """
    from thalweg.tasks.config import SearchConfig
    from thalweg.tasks.evaluation import evaluate as evaluate_task
    from thalweg.tasks.report import write_report

    how = SearchConfig(
        search=search.value,
        width=width,
        length_penalty=length_penalty,
        max_length=max_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        sampling_seed=seed,
    )
    with Display() as display:
        result = evaluate_task(
            run,
            test,
            k=k,
            how=how,
            references=references.value,
            name=name,
            device=device,
            root=data_root,
            listener=display,
        )
    report = write_report(result.directory.parents[1])
    if as_json:
        _print_json(result, report)
        return
    note(f"{test}: {result.items:,} items, {result.words_per_second:,.0f} a second with {search.value} search")
    show_table([_row(score) for score in result.scores.values()], right=("value", "low", "high", "items"))
    say()
    for file, about in FILES.items():
        if (result.directory / file).exists():
            say(f"{about:<29} {result.directory / file}")
    say(f"{'report':<29} {report}")


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
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
