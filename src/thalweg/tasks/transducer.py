"""A trained transducer: text in, the k best texts with their probabilities out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from thalweg.data import EOS, Alphabet, PairFile, Symbols, load_dataset, pad, read_pairs
from thalweg.energies.seq2seq import Seq2Seq
from thalweg.errors import CheckpointError, ConfigError
from thalweg.inference import Hypotheses, beam_search, greedy, sample_sequences
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.learning.trainer import resolve_device
from thalweg.tasks.config import SearchConfig, TransduceConfig, build_config

__all__ = ["Answer", "Prediction", "Side", "Transducer", "build_model", "load", "open_pairs"]

Piece = tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One side of the pairs: how text is cut into symbols, and the symbols that are known.

    >>> side = Side(Symbols(), Alphabet.build(["abc"]))
    >>> side.encode("cab"), side.decode([6, 4, 5, 3])
    ((6, 4, 5), 'cab')
    """

    symbols: Symbols
    alphabet: Alphabet

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text's symbols."""
        return tuple(self.alphabet.encode(self.symbols.split(text)))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids up to the first end symbol."""
        return self.symbols.join(self.alphabet.decode(ids))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"symbols": self.symbols.to_json(), "alphabet": self.alphabet.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Side:
        """What :meth:`to_json` gave."""
        return cls(Symbols.from_json(data["symbols"]), Alphabet.from_json(data["alphabet"]))


@dataclass(frozen=True)
class Answer:
    """One predicted text with its log-probability; ``finished`` is false for one cut at the length limit.

    >>> Answer("k æ t", ("k", "æ", "t"), 0.0, True).probability
    1.0
    """

    text: str
    symbols: tuple[str, ...]
    log_prob: float
    finished: bool
    attention: list[list[float]] | None = None

    @property
    def probability(self) -> float:
        """exp(log_prob)."""
        return math.exp(self.log_prob)


@dataclass(frozen=True)
class Prediction:
    """The answers for one source, best first, and the source symbols the model has never seen.

    >>> Prediction("cat", ()).unknown
    ()
    """

    source: str
    answers: tuple[Answer, ...]
    unknown: tuple[str, ...] = ()


class Transducer:
    """A trained model with its alphabets: text in, the k best texts out.

    Made by :func:`load`.

    >>> Transducer.predict.__name__
    'predict'
    """

    def __init__(self, model: Seq2Seq, source: Side, target: Side, *, longest: int, meta: dict[str, Any]):
        self.model, self.source, self.target = model.eval(), source, target
        self.longest, self.meta = longest, meta

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def search(
        self,
        sources: Sequence[Sequence[int]],
        *,
        k: int,
        how: SearchConfig,
        generator: torch.Generator | None = None,
    ) -> Hypotheses:
        """The k best id sequences for each source id sequence; ``generator`` serves sampling."""
        inputs = pad(sources).to(self.device)
        limit = how.max_length or 2 * self.longest + 10
        if how.search == "greedy":
            return greedy(self.model, inputs, max_length=limit)
        if how.search == "beam":
            width = max(how.width, k)
            return beam_search(
                self.model, inputs, width=width, k=k, max_length=limit, length_penalty=how.length_penalty
            )
        return sample_sequences(
            self.model,
            inputs,
            n=k,
            max_length=limit,
            temperature=how.temperature,
            top_k=how.top_k or None,
            top_p=how.top_p,
            generator=generator or self.generator(how),
        )

    def generator(self, how: SearchConfig) -> torch.Generator:
        """The source of randomness of a sampling search."""
        return torch.Generator(device=self.device).manual_seed(how.sampling_seed)

    def predict(
        self,
        texts: Iterable[str],
        *,
        k: int = 1,
        how: SearchConfig | None = None,
        attention: bool = False,
        unknown: Literal["report", "copy"] = "report",
        batch_size: int = 256,
    ) -> Iterator[Prediction]:
        """Answers for each text, in order, streaming: ``batch_size`` texts are read ahead at most.

        Args:
            k: answers per text at most (1 with greedy search).
            how: the search; beam of width 5 by default.
            attention: also give where each answer symbol looked, ``[[weight per source symbol] per answer symbol]``.
            unknown: a source symbol outside the alphabet is read as the unknown symbol (``report``), or splits the
                text there and is copied through as it is (``copy``).
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1, got {k}")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        if unknown not in ("report", "copy"):
            raise ConfigError(f"unknown must be `report` or `copy`, got `{unknown}`")
        how = how or SearchConfig(search="beam")
        stream, generator = iter(texts), self.generator(how)
        while chunk := list(itertools.islice(stream, batch_size)):
            split = [self.source.symbols.split(text) for text in chunk]
            strange = [self.source.alphabet.unknown(symbols) for symbols in split]
            rows = [
                _cut(symbols, set(seen) if unknown == "copy" else set())
                for symbols, seen in zip(split, strange, strict=True)
            ]
            found = self._answer_pieces(rows, k, how, attention, generator)
            for text, row, answers, seen in zip(chunk, rows, found, strange, strict=True):
                whole = len(row) == 1 and row[0][0]
                yield Prediction(text, answers[0] if whole else _join(answers, self.target.symbols, k), seen)

    def _answer_pieces(
        self,
        rows: list[list[tuple[bool, Piece]]],
        k: int,
        how: SearchConfig,
        attention: bool,
        generator: torch.Generator,
    ) -> list[list[tuple[Answer, ...]]]:
        """Answers of each piece of each row; an unknown run answers itself.

        Equal pieces are searched once, except where each draw counts; neighbours of one length share a batch, which
        keeps padding out of the encoder.
        """
        numbers = itertools.count()
        draw = how.search == "nucleus"
        keys = [[(piece, next(numbers) if draw else 0, known) for known, piece in row] for row in rows]
        wanted = {(len(piece), piece, n) for row in keys for piece, n, known in row if known}
        order = [(piece, n) for _, piece, n in sorted(wanted)]
        answers: dict[tuple[Piece, int], tuple[Answer, ...]] = {}
        for start in range(0, len(order), 256):
            group = order[start : start + 256]
            found = self._answers([piece for piece, _ in group], k, how, attention, generator)
            answers.update(zip(group, found, strict=True))
        copied = [[(Answer("", piece, 0.0, True),) for piece, _, _ in row] for row in keys]
        return [
            [answers[piece, n] if known else copy for (piece, n, known), copy in zip(row, copies, strict=True)]
            for row, copies in zip(keys, copied, strict=True)
        ]

    def _answers(
        self, words: list[Piece], k: int, how: SearchConfig, attention: bool, generator: torch.Generator
    ) -> list[tuple[Answer, ...]]:
        ids = [self.source.alphabet.encode(word) for word in words]
        found = self.search(ids, k=k, how=how, generator=generator)
        tokens, lengths = found.tokens.tolist(), found.lengths.tolist()
        scores, finished = found.scores.tolist(), found.finished.tolist()
        rows = []
        for b in range(len(words)):
            row = []
            for j in range(len(lengths[b])):
                if lengths[b][j]:
                    symbols = self.target.alphabet.decode(tokens[b][j][: lengths[b][j]])
                    text = self.target.symbols.join(symbols)
                    row.append(Answer(text, symbols, scores[b][j], finished[b][j]))
            rows.append(tuple(row))
        if not attention:
            return rows
        looks = iter(self.attend([(word, answer) for word, row in zip(words, rows, strict=True) for answer in row]))
        return [tuple(dataclasses.replace(answer, attention=next(looks)) for answer in row) for row in rows]

    def attend(self, pairs: Sequence[tuple[Piece, Answer]]) -> list[list[list[float]] | None]:
        """Where each answer looked: weights per answer symbol (end included) and source symbol.

        None for a model without attention, and for an empty source.
        """
        real = [(source, answer) for source, answer in pairs if source]
        if not real:
            return [None] * len(pairs)
        sources = pad([self.source.alphabet.encode(source) for source, _ in real]).to(self.device)
        ends = [(EOS,) if answer.finished else () for _, answer in real]
        answers = [
            (*self.target.alphabet.encode(answer.symbols), *end) for (_, answer), end in zip(real, ends, strict=True)
        ]
        targets = pad(answers).to(self.device)
        with torch.no_grad():
            weights = self.model.attention_weights(sources, targets)
        if weights is None:
            return [None] * len(pairs)
        matrices = iter(
            weights[n, : len(answer), : len(source)].tolist()
            for n, ((source, _), answer) in enumerate(zip(real, answers, strict=True))
        )
        return [next(matrices) if source else None for source, _ in pairs]


def _cut(symbols: Piece, strange: set[str]) -> list[tuple[bool, Piece]]:
    """Runs of known symbols (True) and of unknown ones (False); all are known where ``strange`` is empty."""
    runs = itertools.groupby(symbols, key=lambda symbol: symbol not in strange)
    return [(known, tuple(run)) for known, run in runs]


def _join(row: list[tuple[Answer, ...]], target: Symbols, k: int) -> tuple[Answer, ...]:
    """The k best joint answers of independent pieces: log-probabilities add; equal texts count once, at their best."""
    best: list[Answer] = [Answer("", (), 0.0, True)] if row else []
    for options in row:
        joined = [
            Answer("", a.symbols + b.symbols, a.log_prob + b.log_prob, a.finished and b.finished)
            for a in best
            for b in options
        ]
        joined.sort(key=lambda answer: (answer.finished, answer.log_prob), reverse=True)
        first = {answer.symbols: answer for answer in reversed(joined)}
        best = [answer for answer in joined if first[answer.symbols] is answer][:k]
    return tuple(dataclasses.replace(answer, text=target.join(answer.symbols)) for answer in best)


def open_pairs(spec: str, root: Path | None = None) -> PairFile:
    """Pairs of a TSV file, or of a data set named ``NAME:SPLIT``.

    >>> len(open_pairs("cmudict:dev")) > 1000
    True
    """
    name, colon, split = spec.rpartition(":")
    if colon and not os.path.exists(spec) and os.sep not in split and "\\" not in split and len(name) > 1:
        return load_dataset(name, split, root=root)
    return read_pairs(spec)


def load(run: str | Path, *, device: str = "auto") -> Transducer:
    """The best model of a run directory (or the ``model.safetensors`` itself), ready to predict.

    >>> load("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    path = Path(run)
    path = path if path.is_file() else path / "model.safetensors"
    checkpoint = load_checkpoint(path)
    meta = checkpoint.meta
    try:
        config = build_config(meta["config"], where=str(path))
        source, target = Side.from_json(meta["source"]), Side.from_json(meta["target"])
        model = build_model(config, source, target)
        model.load_state_dict(checkpoint.tensors)
        longest = int(meta["longest"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: expected a transduction model, got something else ({reason}); train it again"
        ) from None
    return Transducer(model.to(resolve_device(device)), source, target, longest=longest, meta=meta)


def build_model(config: TransduceConfig, source: Side, target: Side) -> Seq2Seq:
    """A fresh model of the config's shape for the two alphabets.

    >>> side = Side(Symbols(), Alphabet.build(["abc"]))
    >>> build_model(build_config({"model": {"hidden": 8}}), side, side).vocab_size
    7
    """
    return Seq2Seq(config.model, source_size=len(source.alphabet), target_size=len(target.alphabet))
