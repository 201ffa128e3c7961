"""``thalweg predict``: answers for every line of a file, of standard input or of the command line; or for images."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from thalweg.cli.options import Chosen, Run, Unknown, takes_search
from thalweg.cli.output import use_utf8
from thalweg.cli.progress import Display
from thalweg.errors import ConfigError
from thalweg.limits import ANSWERS, COUNT


@takes_search
def predict(
    run: Run,
    chosen: Chosen,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="One source a line; - or nothing is stdin. Images: files, folders, zips.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="WORD", help="A source, instead of a file; may be repeated."),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option("--features", metavar="TAGS", help="Tags of each --text, or of all: `V;PST`."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, max=ANSWERS, help="Answers per source at most.")] = 1,
    layout: Annotated[Literal["tsv", "jsonl"], typer.Option("--format", help="Of the output.")] = "tsv",
    unknown: Annotated[
        Unknown, typer.Option(help="Unseen source symbols: report them, or also copy them through.")
    ] = "report",
    attention: Annotated[
        bool, typer.Option("--attention", help="Also give where each answer symbol looked; only in jsonl.")
    ] = False,
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree", metavar="FILE", help="Draw the beam's tree of the first source: .png, .svg, .pdf, .dot."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, max=COUNT, help="Lines read ahead; 1 answers every line at once."),
    ] = None,
) -> None:
    """Answer every line of a file or of standard input, with log-probabilities, as they come.

    TSV has one line per answer, best first: source, answer, log-probability, probability (and the tags, for a run
    trained with features). JSON lines have one object per source: source, answers (text, log_prob, probability,
    share among the answers, finished, optimal where a search can prove it, attention), unknown. An empty line gives
    an empty answer. Only the first column of the input is read; a run trained with features reads the tags from the
    second column, or from the third of a file of pairs.

    A run that classifies images takes files, folders and zips of images, and writes file, class, log-probability and
    probability; --temperature flattens (above 1) or sharpens.

    \b
    Example:
      thalweg predict runs/names --text Hannah --k 5
      cut -f1 test.tsv | thalweg predict runs/names --format jsonl > answers.jsonl
      thalweg predict runs/names words.txt --search nucleus --k 3 --seed 1
      thalweg predict runs/names --text Hannah --search exact --format jsonl
      thalweg predict runs/names words.txt --lexicon known.txt --ensemble runs/two
      thalweg predict runs/verbs --text run --features "V;PST" --tree tree.png
      thalweg predict runs/photos-convnet-norm image.png folder/ --k 3
    """
    from thalweg.tasks.registry import task_of_run

    if attention and layout != "jsonl":
        raise ConfigError("--attention needs --format jsonl; TSV has no place for it")
    task = task_of_run(run)
    own = {"text": text, "features": features, "attention": attention, "tree": tree, "batch_size": batch_size}
    own |= {"unknown": None if unknown == "report" else unknown}
    given = chosen.given | {name: value for name, value in own.items() if value}
    task.check_options(given)
    use_utf8()
    with Display() as display:
        for record in task.predict(run, files or [], k=k, device=chosen.device, listener=display, **given):
            lines = [json.dumps(record.to_json(), ensure_ascii=False)] if layout == "jsonl" else record.tsv()
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()  # who types, or pipes, waits for it
