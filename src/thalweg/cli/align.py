"""``thalweg align``: pairs of strings chunk by chunk, learned from the pairs alone, and the audit of a lexicon."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thalweg.cli.options import DataRoot
from thalweg.cli.output import note, use_utf8
from thalweg.cli.progress import Display
from thalweg.limits import COUNT

if TYPE_CHECKING:
    from thalweg.data import Pair
    from thalweg.energies.aligner.model import AlignedPair


def align(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Pairs: TSV, .gz, - for stdin, or NAME:SPLIT.")],
    source: Annotated[int, typer.Option("--source", min=1, max=8, help="Source symbols of a chunk at most.")] = 2,
    target: Annotated[int, typer.Option("--target", min=1, max=8, help="Target symbols of a chunk at most.")] = 2,
    delete: Annotated[bool, typer.Option(help="A source symbol may stand for nothing.")] = True,
    insert: Annotated[bool, typer.Option(help="A target symbol may come from nothing.")] = True,
    both: Annotated[bool, typer.Option("--both", help="Chunks of several symbols may meet each other.")] = False,
    audit: Annotated[
        int | None,
        typer.Option("--audit", metavar="N", min=1, max=COUNT, help="Only the N least likely pairs, worst first."),
    ] = None,
    layout: Annotated[Literal["tsv", "jsonl"], typer.Option("--format", help="Of the output.")] = "tsv",
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write what was learned here.")] = None,
    aligner: Annotated[
        Path | None, typer.Option("--aligner", metavar="FILE", help="Learned before: nothing is learned now.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Align pairs of strings chunk by chunk, or find the entries of a lexicon that are to be checked by hand.

    The pairs themselves teach which chunks belong together, by EM. TSV has one line a pair: source, target, chunks as
    `source|target` (`_` for nothing, `+` between symbols) and log-probability. With --audit a line has surprise,
    line of the file, source, target and chunks, the highest surprise first: nats for each symbol, by what all other
    entries say. A pair that no alignment fits has no chunks, and a surprise of inf.

    \b
    Example:
      thalweg align lexicon.tsv
      thalweg align lexicon.tsv --audit 20
      thalweg align lexicon.tsv --target 1 --no-insert --format jsonl > alignments.jsonl
      thalweg align lexicon.tsv --save aligner.safetensors > /dev/null
    """
    from thalweg.data import guess_symbols
    from thalweg.data.text.named_pairs import open_pairs
    from thalweg.energies import ChunkAligner

    read = open_pairs(file, data_root)
    sides = [(texts, guess_symbols(texts)) for texts in (read.sources(), read.targets())]
    split = [[tuple(symbols.split(text)) for text in texts] for texts, symbols in sides]
    pairs = list(zip(*split, strict=True))
    if aligner is None:
        model = ChunkAligner(source=source, target=target, delete=delete, insert=insert, both=both)
        with Display() as display:
            model.fit(pairs, listener=display)
        first, last = (value / len(pairs) for value in (model.history[0], model.history[-1]))
        note(f"{read.summary()}; {len(model.history) - 1} passes, {first:.2f} to {last:.2f} nats a pair")
    else:
        model = ChunkAligner.load(aligner)
    if save is not None:
        model.save(save)
    use_utf8()
    order: list[tuple[int, float | None]] = [(n, None) for n in range(len(pairs))]
    if audit is not None:
        surprise = model.surprise(pairs)
        order = [(n, float(surprise[n])) for n in surprise.argsort(descending=True, stable=True)[:audit].tolist()]
    written = _record if layout == "jsonl" else _line
    for (n, worth), found in zip(order, model.align([pairs[n] for n, _ in order]), strict=True):
        sys.stdout.write(f"{written(read.pairs[n], found, worth)}\n")


def _record(pair: Pair, found: AlignedPair | None, worth: float | None) -> str:
    """A pair as JSON; ``worth`` is its surprise, in an audit."""
    record = {"line": pair.line, "source": pair.source, "target": pair.target}
    record["chunks"] = [[list(side) for side in each] for each in found.chunks] if found else None
    record["log_prob"] = found.log_prob if found else None
    record |= {} if worth is None else {"surprise": worth if worth < math.inf else None}
    return json.dumps(record, ensure_ascii=False)


def _line(pair: Pair, found: AlignedPair | None, worth: float | None) -> str:
    """A pair as TSV."""
    chunks, log_prob = (found.text(within="+"), found.log_prob) if found else ("", -math.inf)
    if worth is None:
        return f"{pair.source}\t{pair.target}\t{chunks}\t{log_prob:.4f}"
    return f"{worth:.4f}\t{pair.line}\t{pair.source}\t{pair.target}\t{chunks}"
