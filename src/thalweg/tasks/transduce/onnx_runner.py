"""Greedy and beam search over the two graphs that ``thalweg export RUN --format onnx`` writes.

This file needs numpy and onnxruntime alone (and ``regex`` where symbols are graphemes): a copy of it stands beside the
graphs, so that a model can be used where neither Thalweg nor PyTorch is::

    python FOLDER/runner.py Hannah Otto --k 5
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

UNK, PAD, BOS, EOS = range(4)
BATCH = 64


class Found(NamedTuple):
    """One sequence that a search found: its symbols' numbers, end included, and log-probability.

    >>> Found((4, 3), -0.5, True).tokens
    (4, 3)
    """

    tokens: tuple[int, ...]
    log_prob: float
    finished: bool


class Answer(NamedTuple):
    """One answer: its text and log-probability; ``finished`` is false for one cut at the length limit.

    >>> Answer("HH AE N AH", -0.1, True).text
    'HH AE N AH'
    """

    text: str
    log_prob: float
    finished: bool


class Runner:
    """An exported model: text in, the k best texts out.

    Args:
        folder: with ``encoder.onnx``, ``step.onnx`` and ``model.json``.
        threads: of onnxruntime; 0 is its own choice.

    >>> Runner("absent")
    Traceback (most recent call last):
    ...
    FileNotFoundError: [Errno 2] No such file or directory: 'absent/model.json'
    """

    def __init__(self, folder: str | Path, *, threads: int = 0):
        folder = Path(folder)
        self.settings = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        graphs = [str(folder / name) for name in ("encoder.onnx", "step.onnx")]
        self.encoder, self.step = (
            onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"]) for graph in graphs
        )
        self.numbers = {symbol: n for n, symbol in enumerate(self.settings["source"]["alphabet"], EOS + 1)}
        self.symbols = ["", "", "", "", *self.settings["target"]["alphabet"]]

    def encode(self, text: str, tags: Sequence[str] = ()) -> list[int]:
        """Numbers of a text's symbols, after those of its tags; a tag that is not known is left out."""
        side = self.settings["source"]["symbols"]
        if side["normalise"] != "none":
            text = unicodedata.normalize(side["normalise"].upper(), text)
        if side["kind"] == "graphemes":
            import regex

            symbols = regex.findall(r"\X", text)
        else:
            symbols = text.split() if side["kind"] == "spaced" else list(text)
        known = [self.numbers[f"<{tag}> "] for tag in tags if f"<{tag}> " in self.numbers]
        return known + [self.numbers.get(symbol, UNK) for symbol in symbols]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of numbers, end left out."""
        side = self.settings["target"]["symbols"]
        between = " " if side["kind"] == "spaced" else ""
        text = between.join(self.symbols[n] for n in tokens if n > EOS)
        return text if side["normalise"] == "none" else unicodedata.normalize("NFC", text)

    def predict(
        self, texts: Sequence[str], *, k: int = 1, width: int | None = None, tags: Sequence[Sequence[str]] = ()
    ) -> list[list[Answer]]:
        """The k best answers to each text, best first; none to an empty one.

        Args:
            width: of the beam, at least k is used; 1 is greedy search. The model's own by default.
            tags: of each text, for a model that was trained with them.
        """
        rows = [self.encode(text, own) for text, own in zip(texts, tags or [()] * len(texts), strict=True)]
        found = self.search([row for row in rows if row], k=k, width=width)
        answers = iter(
            [[Answer(self.decode(one.tokens), one.log_prob, one.finished) for one in each] for each in found]
        )
        return [next(answers) if row else [] for row in rows]

    def search(
        self, rows: Sequence[Sequence[int]], *, k: int = 1, width: int | None = None, max_length: int | None = None
    ) -> list[list[Found]]:
        """The k best sequences for each row of numbers, none of which may be empty."""
        width = max(k, self.settings["search"]["width"] if width is None else width)
        limit = self.settings["max_length"] if max_length is None else max_length
        reach = self.settings["reach"]
        longest = max(map(len, rows), default=0)
        room = longest + limit if self.settings["in_a_row"] else max(longest + 1, limit)
        if reach is not None and room > reach:
            raise ValueError(f"expected a source within the {reach} positions of the model, got {longest} symbols")
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        found: list[list[Found]] = [[] for _ in rows]
        for first in range(0, len(order), BATCH):
            group = order[first : first + BATCH]
            for n, each in zip(group, self._beam([rows[n] for n in group], width, k, limit), strict=True):
                found[n] = each
        return found

    def _begin(self, rows: list[Sequence[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What no step changes, and the first state, of each source."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.full((len(rows), lengths.max()), PAD, dtype=np.int64)
        for row, own in zip(tokens, rows, strict=True):
            row[: len(own)] = own
        names = [output.name for output in self.encoder.get_outputs()]
        given = dict(zip(names, self.encoder.run(None, {"tokens": tokens, "lengths": lengths}), strict=True))
        memory, state = self.settings["memory"], self.settings["state"]
        return {name: given[name] for name in memory}, {name: given[name] for name in state}

    def _next(self, tokens: Any, memory: dict[str, Any], state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Log-probabilities ``(R, V)`` after each row's last symbol, and the new state."""
        names = ["log_probs", *(f"new.{name}" for name in state)]
        log_probs, *new = self.step.run(names, {"tokens": tokens, **memory, **state})
        return np.asarray(log_probs, dtype=np.float64), dict(zip(state, new, strict=True))

    def _beam(self, rows: list[Sequence[int]], width: int, k: int, limit: int) -> list[list[Found]]:
        """All continuations of an item's live rows are ranked at each step.

        Those that end, and stand among the first ``width``, are finished; the best ``width`` of the others live on. An
        item is done when none of them can still overtake its k-th finished one: log-probabilities only fall.
        """
        begun = self._begin(rows)
        memory, state = ({name: np.repeat(part, width, axis=0) for name, part in group.items()} for group in begun)
        finished: list[list[Found]] = [[] for _ in rows]
        items, past = list(range(len(rows))), np.zeros((len(rows), width, 0), dtype=np.int64)
        tokens, scores = np.full(len(rows) * width, BOS, dtype=np.int64), np.full((len(rows), width), -np.inf)
        scores[:, 0] = 0.0  # of the copies of a first row one counts
        for _ in range(limit):
            log_probs, state = self._next(tokens, memory, state)
            total = (scores[:, :, None] + log_probs.reshape(len(items), width, -1)).reshape(len(items), -1)
            # A row has one end, so the first 2 * width hold width others.
            best = np.argsort(-total, axis=1, kind="stable")[:, : 2 * width]
            ranked, (parents, symbols) = np.take_along_axis(total, best, axis=1), np.divmod(best, log_probs.shape[1])
            for place, item in enumerate(items):
                ended = np.flatnonzero((symbols[place, :width] == EOS) & (ranked[place, :width] > -np.inf))
                for n in ended:
                    said = (*past[place, parents[place, n]].tolist(), EOS)
                    finished[item].append(Found(said, float(ranked[place, n]), True))
                finished[item].sort(key=lambda one: -one.log_prob)
            kept = np.argsort(symbols == EOS, axis=1, kind="stable")[:, :width]
            scores, parents, symbols = (np.take_along_axis(part, kept, axis=1) for part in (ranked, parents, symbols))
            past = np.concatenate([np.take_along_axis(past, parents[:, :, None], axis=1), symbols[:, :, None]], axis=2)
            ends = [finished[item][k - 1].log_prob if len(finished[item]) >= k else -np.inf for item in items]
            going = np.flatnonzero(scores[:, 0] > ends)
            index = (going[:, None] * width + parents[going]).reshape(-1)
            state = {name: part[index] for name, part in state.items()}
            if len(going) < len(items):
                memory = {name: part[index] for name, part in memory.items()}
            items, past, scores = [items[place] for place in going], past[going], scores[going]
            tokens = symbols[going].reshape(-1)
            if not items:
                break
        for place, item in enumerate(items):  # cut at the limit
            ways = zip(past[place].tolist(), scores[place].tolist(), strict=True)
            finished[item] += [Found(tuple(way), score, False) for way, score in ways if score > -np.inf]
        return [found[:k] for found in finished]


def _lines(runner: Runner, words: Sequence[str], k: int, width: int | None) -> Iterator[str]:
    for word, answers in zip(words, runner.predict(words, k=k, width=width), strict=True):
        yield from (f"{word}\t{answer.text}\t{answer.log_prob:.6f}" for answer in answers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers of the model in this folder.")
    parser.add_argument("words", nargs="+", help="sources")
    parser.add_argument("--k", type=int, default=1, help="answers each")
    parser.add_argument("--width", type=int, default=None, help="of the beam; 1 is greedy")
    given = parser.parse_args()
    print("\n".join(_lines(Runner(Path(__file__).parent), given.words, given.k, given.width)))
