"""Transduction: from pairs of strings to a trained model that turns one into the other."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import thalweg
from thalweg.data import (
    Alphabet,
    Batch,
    Batches,
    Example,
    PairFile,
    Symbols,
    guess_symbols,
    load_dataset,
    pad,
    read_pairs,
)
from thalweg.energies.seq2seq import Seq2Seq
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.inference import Hypotheses, beam_search, greedy, sample_sequences
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, write_atomically
from thalweg.learning.losses import sequence_nll
from thalweg.learning.trainer import Trainer, resolve_device
from thalweg.metrics import score_strings
from thalweg.tasks.config import SearchConfig, TransduceConfig, build_config, to_yaml
from thalweg.tasks.resuming import check_continues

__all__ = ["Answer", "Prediction", "Side", "TrainResult", "Transducer", "load", "open_pairs", "train"]

Listener = Callable[[dict[str, Any]], None]


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
    """One predicted text with its log-probability; ``finished`` is false for one cut at the length limit."""

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
    """The answers for one source, best first, and the source symbols the model has never seen."""

    source: str
    answers: tuple[Answer, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainResult:
    """What training gave: where the run is, why it ended ("" when interrupted), the best epoch and its metrics."""

    run: Path
    reason: str
    best_epoch: int
    best: dict[str, float]
    seconds: float


class Transducer:
    """A trained model with its alphabets: text in, the k best texts out.

    Made by :func:`load`.

    >>> Transducer.predict.__name__
    'predict'
    """

    def __init__(self, model: Seq2Seq, source: Side, target: Side, *, longest: int, meta: dict[str, Any]):
        self.model, self.source, self.target, self.longest, self.meta = (
            model.eval(),
            source,
            target,
            longest,
            meta,
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def search(self, sources: Sequence[Sequence[int]], *, k: int, how: SearchConfig) -> Hypotheses:
        """The k best id sequences for each source id sequence."""
        inputs = pad(sources).to(self.device)
        limit = how.max_length or 2 * self.longest + 10
        if how.search == "greedy":
            return greedy(self.model, inputs, max_length=limit)
        if how.search == "beam":
            width = max(how.width, k)
            return beam_search(
                self.model, inputs, width=width, k=k, max_length=limit, length_penalty=how.length_penalty
            )
        generator = torch.Generator(device=self.device).manual_seed(how.sampling_seed)
        return sample_sequences(
            self.model,
            inputs,
            n=k,
            max_length=limit,
            temperature=how.temperature,
            top_k=how.top_k or None,
            top_p=how.top_p,
            generator=generator,
        )

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
        how = how or SearchConfig(search="beam")
        stream = iter(texts)
        while chunk := list(itertools.islice(stream, batch_size)):
            yield from self._predict_chunk(chunk, k, how, attention, unknown)

    def _predict_chunk(
        self, texts: list[str], k: int, how: SearchConfig, attention: bool, unknown: str
    ) -> list[Prediction]:
        split = [self.source.symbols.split(text) for text in texts]
        strange = [self.source.alphabet.unknown(symbols) for symbols in split]
        pieces = [
            _cut(symbols, set(seen) if unknown == "copy" else set()) for symbols, seen in zip(split, strange)
        ]
        words = sorted(
            {piece for row in pieces for known, piece in row if known}, key=lambda word: (len(word), word)
        )
        answers: dict[tuple[str, ...], tuple[Answer, ...]] = {}
        # Neighbours of one length share a batch, which keeps padding out of the encoder.
        for start in range(0, len(words), 256):
            group = words[start : start + 256]
            answers.update(zip(group, self._answers(group, k, how, attention), strict=True))
        return [
            Prediction(text, _join(row, answers, self.target.symbols, k), seen)
            for text, row, seen in zip(texts, pieces, strange, strict=True)
        ]

    def _answers(
        self, words: list[tuple[str, ...]], k: int, how: SearchConfig, attention: bool
    ) -> list[tuple[Answer, ...]]:
        ids = [self.source.alphabet.encode(word) for word in words]
        found = self.search(ids, k=k, how=how)
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
        return self._with_attention(ids, found, rows) if attention else rows

    def _with_attention(
        self, ids: list[list[int]], found: Hypotheses, rows: list[tuple[Answer, ...]]
    ) -> list[tuple[Answer, ...]]:
        places = [(b, j) for b, row in enumerate(rows) for j in range(len(row))]
        if not places:
            return rows
        sources = pad([ids[b] for b, _ in places]).to(self.device)
        targets = pad([found.tokens[b, j, : found.lengths[b, j]].tolist() for b, j in places]).to(self.device)
        with torch.no_grad():
            weights = self.model.attention_weights(sources, targets)
        if weights is None:
            return rows
        result = [list(row) for row in rows]
        for n, (b, j) in enumerate(places):
            matrix = weights[n, : int(targets.lengths[n]), : len(ids[b])].tolist()
            result[b][j] = dataclasses.replace(result[b][j], attention=matrix)
        return [tuple(row) for row in result]


def _cut(symbols: tuple[str, ...], strange: set[str]) -> list[tuple[bool, tuple[str, ...]]]:
    """Runs of known symbols (True) and of unknown ones (False); nothing is unknown where ``strange`` is empty."""
    runs = itertools.groupby(symbols, key=lambda symbol: symbol not in strange)
    return [(known, tuple(run)) for known, run in runs]


def _join(
    row: list[tuple[bool, tuple[str, ...]]],
    answers: dict[tuple[str, ...], tuple[Answer, ...]],
    target: Symbols,
    k: int,
) -> tuple[Answer, ...]:
    """The k best joint answers of independent pieces: log-probabilities add."""
    if len(row) == 1 and row[0][0]:
        return answers[row[0][1]]
    best: list[Answer] = [Answer("", (), 0.0, True)] if row else []
    for known, piece in row:
        options = answers[piece] if known else (Answer("", piece, 0.0, True),)
        joined = (
            Answer("", a.symbols + b.symbols, a.log_prob + b.log_prob, a.finished and b.finished)
            for a in best
            for b in options
        )
        best = heapq.nlargest(k, joined, key=lambda answer: (answer.finished, answer.log_prob))
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
        model = _build_model(config, source, target)
        model.load_state_dict(checkpoint.tensors)
        longest = int(meta["longest"])
    except (KeyError, TypeError, RuntimeError, ConfigError, DataError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: expected a transduction model, got something else ({reason}); train it again"
        ) from None
    return Transducer(model.to(resolve_device(device)), source, target, longest=longest, meta=meta)


def _build_model(config: TransduceConfig, source: Side, target: Side) -> Seq2Seq:
    return Seq2Seq(config.model, source_size=len(source.alphabet), target_size=len(target.alphabet))


def train(
    config: TransduceConfig,
    out: str | Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    root: Path | None = None,
) -> TrainResult:
    """Train a model on pairs of strings; the run directory gets the model, the log and all that resuming needs.

    Args:
        config: data, model, training and dev search.
        out: the run directory; one that holds a run already is an error unless ``resume``.
        resume: go on from ``last.safetensors``; the result equals an uninterrupted run's.
        listener: called with every event; ``step`` events are not logged, all others are.
        root: folder of known data sets, for ``NAME:SPLIT``.
    """
    out = Path(out)
    if (out / "last.safetensors").exists() and not resume:
        raise ConfigError(f"{out} holds a run already; resume it with --resume or choose another --out")
    if resume and not (out / "last.safetensors").exists():
        # A kill before the first checkpoint leaves nothing to go on from: the same start is the same run.
        resume = False
    training, dev = _read_splits(config, root)
    source, target = _sides(config, training)
    torch.manual_seed(config.training.seed)
    model = _build_model(config, source, target)
    longest = 1 + max(len(target.symbols.split(text)) for text in training.targets())
    meta = {
        "task": "transduce",
        "version": thalweg.__version__,
        "config": dataclasses.asdict(config),
        "source": source.to_json(),
        "target": target.to_json(),
        "longest": longest,
    }
    log = _Log(out / "log.jsonl", listener)
    trainer = Trainer(
        model,
        config.training,
        loss=lambda m, batch, forcing: _loss(m, batch, forcing, config.training.label_smoothing),
        evaluate=_dev_evaluator(config, source, target, dev, longest, meta),
        directory=out,
        meta=meta,
        listener=log,
    )
    if resume:
        last = load_checkpoint(out / "last.safetensors")
        check_continues(out / "last.safetensors", last.meta, meta)
        log.cut(last)
    else:
        log.clear()
    write_atomically(out / "config.yaml", to_yaml(config).encode())
    log(_start_event(trainer, training, dev, source, target, resume))
    log.pairs = len(training)
    batches = Batches(
        _examples(training, source, target), size=config.training.batch_size, seed=config.training.seed
    )
    progress = trainer.fit(batches, resume=resume)
    return TrainResult(out, progress.finished, progress.best_epoch, progress.best_metrics, progress.seconds)


def _read_splits(config: TransduceConfig, root: Path | None) -> tuple[PairFile, PairFile]:
    if not config.data.train:
        raise ConfigError("no training data: give `--data train.tsv` or `data.train` in the config")
    training = open_pairs(config.data.train, root)
    if config.data.dev:
        return training, open_pairs(config.data.dev, root)
    # By a hash of the source: all targets of one source stay together, and the choice never moves between runs.
    share = config.data.held_out
    held = {s for s in set(training.sources()) if _unit_hash(s) < share}
    dev = [pair for pair in training.pairs if pair.source in held]
    rest = [pair for pair in training.pairs if pair.source not in held]
    if not dev or not rest:
        raise DataError(
            f"{training.path}: {len(training)} pairs are too few to keep {share:.0%} apart as dev data; give --dev FILE"
        )
    return PairFile(training.path, tuple(rest)), PairFile(f"{training.path} (held out)", tuple(dev))


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _sides(config: TransduceConfig, training: PairFile) -> tuple[Side, Side]:
    sides = []
    for name, texts in (("source", training.sources()), ("target", training.targets())):
        kind, form = getattr(config.data, f"{name}_symbols"), getattr(config.data, f"{name}_normalise")
        guess = guess_symbols(texts)
        symbols = Symbols(
            kind=guess.kind if kind == "auto" else kind, normalise=guess.normalise if form == "auto" else form
        )
        sides.append(Side(symbols, Alphabet.build(symbols.split(text) for text in texts)))
    return sides[0], sides[1]


def _examples(pairs: PairFile, source: Side, target: Side) -> list[Example]:
    return [Example(source.encode(pair.source), target.encode(pair.target)) for pair in pairs.pairs]


def _loss(model: nn.Module, batch: Batch, forcing: float, smoothing: float) -> tuple[Tensor, int]:
    logits = model(batch.source, batch.target, teacher_forcing=forcing)
    losses = sequence_nll(logits, batch.target.tokens, batch.target.mask, smoothing=smoothing)
    return losses.sum(), int(batch.target.lengths.sum())


def _dev_evaluator(
    config: TransduceConfig, source: Side, target: Side, dev: PairFile, longest: int, meta: dict[str, Any]
) -> Callable[[nn.Module], dict[str, float]]:
    examples = _examples(dev, source, target)
    batches = Batches(examples, size=256, shuffle=False)
    gold = [[target.symbols.split(pair.target)] for pair in dev.pairs]
    words = words_of(target, dev.targets())

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Seq2Seq)
        transducer = Transducer(model, source, target, longest=longest, meta=meta)
        answers: list[list[tuple[str, ...]]] = [[] for _ in examples]
        total, terms = 0.0, 0
        for batch in batches.iterate(0):
            loss, count = _loss(model, batch.to(transducer.device), 1.0, 0.0)
            total, terms = total + float(loss), terms + count
            found = transducer.search([examples[row].source for row in batch.rows], k=1, how=config.search)
            for row, ids in zip(batch.rows, found.tokens[:, 0].tolist(), strict=True):
                answers[row] = [target.alphabet.decode(ids)]
        scores = score_strings(answers, gold, words=words, resamples=0)
        return {"loss": total / max(1, terms)} | {name: score.value for name, score in scores.items()}

    return evaluate


def words_of(target: Side, texts: Sequence[str]) -> Literal["item", "space"]:
    """Whether each target is one word, or a text of words between spaces."""
    if target.symbols.kind == "spaced":
        return "item"
    return "space" if sum(" " in text.strip() for text in texts) * 2 > len(texts) else "item"


def _start_event(
    trainer: Trainer, training: PairFile, dev: PairFile, source: Side, target: Side, resumed: bool
) -> dict[str, Any]:
    return {
        "event": "start",
        "version": thalweg.__version__,
        "torch": torch.__version__,
        "device": str(trainer.device),
        "parameters": sum(p.numel() for p in trainer.raw.parameters() if p.requires_grad),
        "train": {"path": training.path, "pairs": len(training), "summary": training.summary()},
        "dev": {"path": dev.path, "pairs": len(dev), "summary": dev.summary()},
        "source": {"symbols": str(source.symbols), "size": len(source.alphabet)},
        "target": {"symbols": str(target.symbols), "size": len(target.alphabet)},
        "epochs": trainer.config.epochs,
        "resumed": resumed,
    }


class _Log:
    """Appends events to ``log.jsonl`` and passes them on."""

    def __init__(self, path: Path, listener: Listener | None):
        self.path, self.listener, self.pairs = path, listener, 0

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and self.pairs:
            event["pairs_per_second"] = self.pairs / max(event["train_seconds"], 1e-9)
        if event["event"] != "step":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener(event)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def cut(self, last: Checkpoint) -> None:
        """Drop what was logged after the checkpoint: those epochs are run again."""
        epoch = int(last.meta["progress"]["epoch"])
        kept = []
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a kill can leave half a line
            later = event.get("event") == "epoch" and event["epoch"] > epoch
            if event.get("event") not in ("end", "interrupted") and not later:
                kept.append(line)
        write_atomically(self.path, "".join(f"{line}\n" for line in kept).encode())
