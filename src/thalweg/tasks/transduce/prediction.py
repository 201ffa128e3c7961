"""Answers for lines of a file, of standard input or of a command line, as they come."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from thalweg.data.text.readers import read_sources, read_tagged_sources, split_tags
from thalweg.errors import ConfigError
from thalweg.tasks.runs import Listener
from thalweg.tasks.transduce.answers import Prediction, Source
from thalweg.tasks.transduce.ensembles import open_runs
from thalweg.tasks.transduce.search_settings import SearchConfig


def predict_lines(
    run: str | Path,
    files: Sequence[str] = (),
    *,
    k: int = 1,
    how: SearchConfig | Mapping[str, Any],
    device: str = "auto",
    precision: str = "float32",
    ensemble: Sequence[str | Path] = (),
    vote: bool = False,
    text: Sequence[str] = (),
    features: Sequence[str] = (),
    unknown: Literal["report", "copy"] = "report",
    attention: bool = False,
    tree: Path | None = None,
    batch_size: int | None = None,
    listener: Listener | None = None,
) -> Iterator[Prediction]:
    """Predictions of every line; what a person should know, such as symbols never seen, is told to the listener.

    Args:
        files: one at most, with a source a line; ``-`` or none is standard input.
        how: the search, or some settings of it; others are as the run's own.
        text: sources instead of a file; features: tags of each, or of all.
        tree: where the beam of the first source is drawn.
        batch_size: lines read ahead; by default what suits the place that they come from.

    Other arguments as for :meth:`~thalweg.tasks.transduce.transducer.Transducer.predict` and
    :func:`~thalweg.tasks.transduce.ensembles.open_runs`.

    >>> next(predict_lines("absent", text=["a"], how={}, features=["V"], files=["x.txt"]))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: give a file or --text, got both (`x.txt` and `a`)
    """

    def tell(message: str) -> None:
        if listener is not None:
            listener({"event": "note", "message": message})

    if len(files) > 1:
        raise ConfigError(f"expected one file of sources, got {len(files)}: {', '.join(files)}")
    if features and not text:
        raise ConfigError("--features goes with --text; in a file the tags are the last column")
    if text and files:
        raise ConfigError(f"give a file or --text, got both (`{files[0]}` and `{text[0]}`)")
    texts = [_one_line(word) for word in text]
    transducer = open_runs([run, *ensemble], vote=vote, precision=precision, device=device)
    how = transducer.settled(how)
    if tree is not None and how.search not in ("beam", "diverse"):
        raise ConfigError(f"--tree draws a beam, got `{how.search}` search; use `--search beam`")
    if transducer.featured and texts and not features:
        raise ConfigError(
            'this run reads tags beside the text; add `--features "V;PST"`, one for each --text or for all'
        )
    if texts:
        sources, size = _tagged(texts, features), len(texts)
    else:
        sources, size = _lines(files[0] if files else "-", transducer.featured, tell)
    if k > 1 and how.search in ("greedy", "exact"):
        tell(f"note: {how.search} search gives one answer; --search beam gives more")
    if tree is not None:
        sources = _drawn(sources, lambda source: transducer.draw_tree(source, tree, how=how))
    stream = transducer.predict(
        sources, k=k, how=how, attention=attention, unknown=unknown, batch_size=batch_size or size
    )
    yield from _reported(stream, tell, fate="copied" if unknown == "copy" else transducer.fate)


def _tagged(texts: Sequence[str], features: Sequence[str]) -> Iterator[Source]:
    if len(features) not in (0, 1, len(texts)):
        raise ConfigError(f"give one --features for all or one for each of {len(texts)} --text, got {len(features)}")
    tags = [split_tags(words) for words in features] or [()]
    if features and not all(tags):
        raise ConfigError("--features must hold tags such as `V;PST`, got none; leave it out or fill it in")
    return (Source(word, tag) for word, tag in zip(texts, itertools.cycle(tags), strict=False))


def _lines(path: str, featured: bool, tell: Callable[[str], None]) -> tuple[Iterator[Source], int]:
    """The sources as they arrive, and how many to read before answering."""
    keyboard = path == "-" and sys.stdin is not None and sys.stdin.isatty()
    if keyboard:
        tell("one source a line, tab, tags; Ctrl-D ends" if featured else "one source a line; Ctrl-D ends")
    # Long stretches of a file let sources of one length share a batch; who pipes waits for less.
    size = 1 if keyboard else 256 if path == "-" else 4096
    if featured:
        return (Source(source, tags, f"{path}:{n}") for n, source, tags in read_tagged_sources(path)), size
    return (Source(source, where=f"{path}:{n}") for n, source in read_sources(path)), size


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


def _reported(stream: Iterable[Prediction], tell: Callable[[str], None], *, fate: str) -> Iterator[Prediction]:
    """The same predictions; symbols and tags that the model has never seen are told of once."""
    reported: set[str] = set()
    for prediction in stream:
        for symbol in prediction.unknown:
            if symbol not in reported:
                reported.add(symbol)
                points = " ".join(f"U+{ord(character):04X}" for character in symbol)
                source = prediction.source
                tell(f"note: symbol `{symbol}` ({points}) was not in the training data, first in `{source}`: {fate}")
        for tag in prediction.unknown_features:
            if f"<{tag}>" not in reported:
                reported.add(f"<{tag}>")
                tell(f"note: tag `{tag}` was not in the training data, first with `{prediction.source}`: left out")
        yield prediction
