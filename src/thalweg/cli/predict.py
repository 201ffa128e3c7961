"""``thalweg predict``: answers for every line of a file, of standard input or of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import (
    Device,
    LengthPenalty,
    MaxLength,
    Run,
    SamplingSeed,
    Search,
    Temperature,
    TopK,
    TopP,
    Unknown,
    Width,
)
from thalweg.cli.output import note, use_utf8
from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from thalweg.tasks import Prediction

__all__ = ["Format", "predict"]


class Format(StrEnum):
    """What is written for an answer."""

    tsv = "tsv"
    jsonl = "jsonl"


def predict(
    run: Run,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="One source a line; - or nothing is stdin.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="WORD", help="A source, instead of a file; may be repeated."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Answers per source at most.")] = 1,
    search: Annotated[Search, typer.Option(help="How answers are searched.")] = Search.beam,
    width: Width = 5,
    layout: Annotated[Format, typer.Option("--format", help="Of the output.")] = Format.tsv,
    unknown: Annotated[
        Unknown, typer.Option(help="Unseen source symbols: report them, or also copy them through.")
    ] = Unknown.report,
    attention: Annotated[
        bool, typer.Option("--attention", help="Also give where each answer symbol looked; only in jsonl.")
    ] = False,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: SamplingSeed = 0,
    max_length: MaxLength = 0,
    length_penalty: LengthPenalty = 0.0,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Lines read ahead; 1 answers every line at once."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Answer every line of a file or of standard input, with log-probabilities, as they come.

    TSV has one line per answer, best first: source, answer, log-probability, probability. JSON lines have
    one object per source: source, answers (text, log_prob, probability, finished, attention), unknown. An
    empty line gives an empty answer. Only the first column of the input is read.

    \b
    Example:
      thalweg predict runs/names --text Hannah --k 5
      cut -f1 test.tsv | thalweg predict runs/names --format jsonl > answers.jsonl
      thalweg predict runs/names words.txt --search nucleus --k 3 --temperature 0.8 --seed 1
    """
    from thalweg.tasks.config import SearchConfig
    from thalweg.tasks.transducer import load

    if attention and layout is not Format.jsonl:
        raise ConfigError("--attention needs --format jsonl; TSV has no place for it")
    sources, size = _sources(file, text)
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
    transducer = load(run, device=device)
    if k > 1 and search is Search.greedy:
        note("note: greedy search gives one answer; --search beam gives more")
    size = batch_size or size
    stream = transducer.predict(sources, k=k, how=how, attention=attention, unknown=unknown.value, batch_size=size)
    _write(stream, _lines(layout), size, copied=unknown is Unknown.copy)


def _sources(file: str | None, texts: list[str] | None) -> tuple[Iterator[str], int]:
    """The sources as they arrive, and how many to read before answering."""
    from thalweg.data import read_sources

    if texts:
        if file is not None:
            raise ConfigError(f"give a file or --text, got both (`{file}` and `{texts[0]}`)")
        return iter([_one_line(text) for text in texts]), len(texts)
    path = file or "-"
    keyboard = path == "-" and sys.stdin.isatty()
    if keyboard:
        note("one source a line; Ctrl-D ends")
    # Long stretches of a file let sources of one length share a batch; who pipes waits for less.
    size = 1 if keyboard else 256 if path == "-" else 4096
    return (source for _, source in read_sources(path)), size


def _one_line(text: str) -> str:
    if any(mark in text for mark in "\t\n\r"):
        raise ConfigError(f"--text must be one line without tabs, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--text must be UTF-8, got {text!r}") from None
    return text.strip()


def _write(
    stream: Iterator[Prediction], lines: Callable[[Prediction], Iterator[str]], size: int, *, copied: bool
) -> None:
    use_utf8()
    reported: set[str] = set()
    for count, prediction in enumerate(stream, start=1):
        for symbol in prediction.unknown:
            if symbol not in reported:
                reported.add(symbol)
                _report(symbol, prediction.source, copied=copied)
        for line in lines(prediction):
            sys.stdout.write(line + "\n")
        if count % size == 0:
            sys.stdout.flush()
    sys.stdout.flush()


def _report(symbol: str, source: str, *, copied: bool) -> None:
    points = " ".join(f"U+{ord(character):04X}" for character in symbol)
    fate = "copied" if copied else "read as unknown; --unknown copy copies such symbols"
    note(f"note: symbol `{symbol}` ({points}) was not in the training data, first in `{source}`: {fate}")


def _lines(layout: Format) -> Callable[[Prediction], Iterator[str]]:
    return _tsv if layout is Format.tsv else _jsonl


def _tsv(prediction: Prediction) -> Iterator[str]:
    if not prediction.answers:
        yield f"{prediction.source}\t\t\t"
    for answer in prediction.answers:
        yield f"{prediction.source}\t{answer.text}\t{answer.log_prob:.6f}\t{answer.probability:.6g}"


def _jsonl(prediction: Prediction) -> Iterator[str]:
    answers: list[dict[str, Any]] = []
    for answer in prediction.answers:
        fields = {
            "text": answer.text,
            "log_prob": answer.log_prob,
            "probability": answer.probability,
            "finished": answer.finished,
        }
        if answer.attention is not None:
            fields["attention"] = answer.attention
        answers.append(fields)
    record = {"source": prediction.source, "answers": answers, "unknown": list(prediction.unknown)}
    yield json.dumps(record, ensure_ascii=False)
