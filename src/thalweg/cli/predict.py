"""``thalweg predict``: answers for every line of a file, of standard input or of the command line; or for images."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.classes import predict_images, task_of_run
from thalweg.cli.options import Chosen, Run, Unknown, takes_search
from thalweg.cli.output import note, use_utf8
from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from thalweg.tasks.answers import Prediction, Source

__all__ = ["Format", "predict"]


class Format(StrEnum):
    """What is written for an answer."""

    tsv = "tsv"
    jsonl = "jsonl"


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
    k: Annotated[int, typer.Option("--k", min=1, help="Answers per source at most.")] = 1,
    layout: Annotated[Format, typer.Option("--format", help="Of the output.")] = Format.tsv,
    unknown: Annotated[
        Unknown, typer.Option(help="Unseen source symbols: report them, or also copy them through.")
    ] = Unknown.report,
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
        typer.Option("--batch-size", min=1, help="Lines read ahead; 1 answers every line at once."),
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
    if task_of_run(run) == "classify":
        chosen.only("device", "temperature")
        if text or features or attention or tree is not None:
            raise ConfigError("--text, --features, --attention and --tree are for strings; name images to classify")
        shape = (chosen.device, chosen.how.temperature)
        predict_images(run, files or [], k=k, device=shape[0], temperature=shape[1], jsonl=layout is Format.jsonl)
        return
    if files and len(files) > 1:
        raise ConfigError(f"expected one file of sources, got {len(files)}: {', '.join(files)}")
    file = files[0] if files else None
    if attention and layout is not Format.jsonl:
        raise ConfigError("--attention needs --format jsonl; TSV has no place for it")
    if features and not text:
        raise ConfigError("--features goes with --text; in a file the tags are the last column")
    if tree is not None and chosen.how.search not in ("beam", "diverse"):
        raise ConfigError(f"--tree draws a beam, got `{chosen.how.search}` search; use `--search beam`")
    if text and file is not None:
        raise ConfigError(f"give a file or --text, got both (`{file}` and `{text[0]}`)")
    texts = [_one_line(word) for word in text or []]
    transducer = chosen.open(run)
    if transducer.featured and texts and not features:
        raise ConfigError(
            'this run reads tags beside the text; add `--features "V;PST"`, one for each --text or for all'
        )
    sources, size = _sources(file, texts, features or [], featured=transducer.featured)
    if k > 1 and chosen.how.search in ("greedy", "exact"):
        note(f"note: {chosen.how.search} search gives one answer; --search beam gives more")
    size = batch_size or size
    if tree is not None:
        sources = _drawn(sources, lambda source: transducer.draw_tree(source, tree, how=chosen.how))
    stream = transducer.predict(
        sources, k=k, how=chosen.how, attention=attention, unknown=unknown.value, batch_size=size
    )
    lines = _jsonl if layout is Format.jsonl else _tsv
    _write(stream, lines, size, copied=unknown is Unknown.copy)


def _sources(
    file: str | None, texts: Sequence[str], features: Sequence[str], *, featured: bool
) -> tuple[Iterator[Source], int]:
    """The sources as they arrive, and how many to read before answering."""
    from thalweg.data.readers import read_sources, read_tagged_sources, split_tags
    from thalweg.tasks.answers import Source

    if texts:
        if len(features) not in (0, 1, len(texts)):
            raise ConfigError(
                f"give one --features for all or one for each of {len(texts)} --text, got {len(features)}"
            )
        tags = [split_tags(words) for words in features] or [()]
        if features and not all(tags):
            raise ConfigError("--features must hold tags such as `V;PST`, got none; leave it out or fill it in")
        return (Source(word, tag) for word, tag in zip(texts, itertools.cycle(tags), strict=False)), len(texts)
    path = file or "-"
    keyboard = path == "-" and sys.stdin.isatty()
    if keyboard:
        note("one source a line, tab, tags; Ctrl-D ends" if featured else "one source a line; Ctrl-D ends")
    # Long stretches of a file let sources of one length share a batch; who pipes waits for less.
    size = 1 if keyboard else 256 if path == "-" else 4096
    if featured:
        return (Source(source, tags) for _, source, tags in read_tagged_sources(path)), size
    return (Source(source) for _, source in read_sources(path)), size


def _drawn(sources: Iterator[Source], draw: Callable[[Source], None]) -> Iterator[Source]:
    """The same sources; the first that is not empty is drawn as it passes."""
    waiting = True
    for source in sources:
        if waiting and source.text:
            draw(source)
            waiting = False
        yield source


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
        for tag in prediction.unknown_features:
            if f"<{tag}>" not in reported:
                reported.add(f"<{tag}>")
                note(f"note: tag `{tag}` was not in the training data, first with `{prediction.source}`: left out")
        for line in lines(prediction):
            sys.stdout.write(line + "\n")
        if count % size == 0:
            sys.stdout.flush()
    sys.stdout.flush()


def _report(symbol: str, source: str, *, copied: bool) -> None:
    points = " ".join(f"U+{ord(character):04X}" for character in symbol)
    fate = "copied" if copied else "read as unknown; --unknown copy copies such symbols"
    note(f"note: symbol `{symbol}` ({points}) was not in the training data, first in `{source}`: {fate}")


def _tsv(prediction: Prediction) -> Iterator[str]:
    tags = f"\t{';'.join(prediction.features)}" if prediction.features else ""
    if not prediction.answers:
        yield f"{prediction.source}\t\t\t{tags}"
    for answer in prediction.answers:
        yield f"{prediction.source}\t{answer.text}\t{answer.log_prob:.6f}\t{answer.probability:.6g}{tags}"


def _jsonl(prediction: Prediction) -> Iterator[str]:
    answers = [answer.to_json() for answer in prediction.answers]
    record: dict[str, Any] = {"source": prediction.source}
    if prediction.features:
        record["features"] = list(prediction.features)
    record |= {"answers": answers, "unknown": list(prediction.unknown)}
    yield json.dumps(record, ensure_ascii=False)
