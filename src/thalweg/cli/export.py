"""``thalweg export``: a run's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from thalweg.cli.options import DataRoot, Run
from thalweg.cli.output import note, say
from thalweg.cli.progress import Display


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Gets the files.", show_default=False)],
    layout: Annotated[Literal["onnx"], typer.Option("--format", help="Of the files.")] = "onnx",
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Pairs to verify it on: TSV, .gz or NAME:SPLIT. Its dev data if not given."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="WORD", help="A source to verify it on, instead; may be repeated."),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Write a model for use without Thalweg, and verify that it gives the same answers.

    ONNX: an encoder and a decoder step as graphs, alphabets and search settings as JSON, and a runner, one file of
    Python, that does greedy and beam search with numpy and onnxruntime alone. Nothing is written unless both searches
    give the same symbols, and log-probabilities within 0.0001, on every source.

    \b
    Example:
      thalweg export runs/names --format onnx --out names-onnx
      thalweg export runs/names --format onnx --out names-onnx --data test.tsv
      python names-onnx/runner.py Hannah --k 5
    """
    from thalweg.tasks.registry import task_of_run

    with Display() as display:
        options = {"data": data, "text": text or (), "root": data_root, "listener": display}
        written = task_of_run(run).export(run, out, layout=layout, **options)
    note(written.said)
    for file, about in written.files.items():
        say(f"{about:<64} {file}")
