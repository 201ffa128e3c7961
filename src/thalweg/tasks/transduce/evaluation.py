"""Measure a trained transducer on a file: scores with intervals, predictions, worst errors, confusions."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

import thalweg
from thalweg.data import PairFile
from thalweg.data.text.named_pairs import open_pairs
from thalweg.errors import ConfigError
from thalweg.files import write_text
from thalweg.inference import Hypotheses, OptimalityReport
from thalweg.metrics import closest_reference, confusions, scored, worst
from thalweg.metrics.strings import StringTally, Words
from thalweg.tasks.base import Evaluation, Measured
from thalweg.tasks.names import evaluation_folder
from thalweg.tasks.transduce.answers import Answer, Prediction, Source
from thalweg.tasks.transduce.codec import Codec, Piece, is_tag
from thalweg.tasks.transduce.ensembles import open_runs
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.training import words_of
from thalweg.tasks.transduce.transducer import Transducer

GAP = "∅"
PICTURES = 12


@dataclass(frozen=True)
class PairEvaluation(Evaluation):
    """Scores of one run on one file; ``exact`` with exact search alone, ``path`` of a pretrained model how it steps.

    >>> PairEvaluation(Path("runs/x/evaluation/test"), "test.tsv", {}, 100, 2000.0, "beam").said()
    'test.tsv: 100 items, 2,000 a second with beam search'
    """

    FILES = {  # noqa: RUF012
        "metrics.json": "scores and settings",
        "predictions.jsonl": "k best answers of every item",
        "worst.tsv": "worst errors first",
        "confusions.tsv": "symbols taken for others",
        "attention.json": "where the model looked",
    }

    search: str = "beam"
    exact: OptimalityReport | None = None
    path: str = ""

    def said(self) -> str:
        """What was done, in a line."""
        return f"{super().said()} with {self.search} search" + (f", {self.path}" if self.path else "")

    def remarks(self) -> list[str]:
        """What exact search found out."""
        said = super().remarks()
        if self.exact is None:
            return said
        shares = _shares(self.exact)
        found = f"{shares['beam_optimal']:8.2%}, a better answer {shares['beam_beaten']:.2%}"
        return [
            *said,
            f"proved the most probable      {shares['proved']:8.2%} of items",
            f"beam {self.exact.width} finds it already      {found}",
            f"it is the empty answer        {shares['empty']:8.2%}",
        ]

    def to_json(self) -> dict[str, Any]:
        """All figures as ``json`` can write them."""
        scores = {key: score.to_json() for key, score in self.scores.items()}
        exact = {"exact": _shares(self.exact)} if self.exact else {}
        path = {"path": self.path} if self.path else {}
        return {"items": self.items, "words_per_second": self.speed, "scores": scores, **exact, **path}


def _shares(report: OptimalityReport) -> dict[str, Any]:
    """What exact search found out, of all items."""
    counts = {name: getattr(report, name) for name in ("proved", "beam_optimal", "beam_beaten", "empty")}
    return {"width": report.width} | {name: count / max(1, report.items) for name, count in counts.items()}


@dataclass(frozen=True)
class _Item:
    source: str
    references: tuple[str, ...]
    features: tuple[str, ...] = ()
    where: str = ""


def evaluate(
    run: str | Path,
    spec: str,
    *,
    k: int | None = None,
    how: SearchConfig | Mapping[str, Any] = MappingProxyType({}),
    references: Literal["each", "any"] = "each",
    name: str | None = None,
    device: str = "auto",
    precision: str = "float32",
    ensemble: Sequence[str | Path] = (),
    vote: bool = False,
    root: Path | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
) -> PairEvaluation:
    """Predict every source of a file, compare with its targets, write ``RUN/evaluation/NAME/``.

    Args:
        spec: TSV file or ``NAME:SPLIT``.
        k: answers per source, by default 5 or as many as a checkpoint's own beam is wide; WER@k is given for
            1 < k' <= k among 3, 5, 10 and k itself.
        how: the search, or some settings of it; others are as the run's own, a beam of width 5 as a rule.
        references: ``each`` counts every line; ``any`` counts each source once and accepts any of its targets.
        precision: ``float32``; on the CPU also ``bf16`` or ``int8``.
        ensemble: runs that answer with this one; vote: by a vote instead of the mean of their probabilities.

    Others as those of :meth:`~thalweg.tasks.base.Task.evaluate`.

    >>> evaluate("absent", "cmudict:dev")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    if references not in ("each", "any"):
        raise ConfigError(f"references must be `each` or `any`, got `{references}`")
    directory = evaluation_folder(run, name, _stem(spec))
    transducer = open_runs([run, *ensemble], vote=vote, precision=precision, device=device)
    how = transducer.settled(how)
    k = min(5, transducer.usual.width) if k is None else k
    k = 1 if how.search in ("greedy", "exact") else k
    pairs = open_pairs(spec, root, features=transducer.featured)
    items = _items(pairs, references)
    began = time.perf_counter()
    predictions = list(_predict(transducer, items, k, how, listener))
    speed = len(items) / (time.perf_counter() - began)
    exact = None
    if how.search == "exact" and not vote:
        beam = _predict(transducer, items, 1, dataclasses.replace(how, search="beam"), None)
        exact = OptimalityReport.compare(_first(predictions), _first(beam), width=how.width)
    found = _Answered.of(transducer, items, predictions)
    ks = sorted({n for n in (3, 5, 10, k) if 1 < n <= k})
    measured = found.measured(ks, words_of(transducer.target, pairs.targets()))
    scores = scored(measured.tally)
    path = str(getattr(transducer.model, "path", ""))
    result = PairEvaluation(directory, spec, scores, len(items), speed, how.search, exact, path, measured=measured)
    facts = {
        "file": spec,
        "pairs": len(pairs),
        "search": {**dataclasses.asdict(how), "name": how.search, "k": k},
        "references": references,
        **result.to_json(),
        "version": thalweg.__version__,
    }
    if ensemble:
        facts["ensemble"] = {"runs": [str(run) for run in ensemble], "vote": vote}
    if precision != "float32":
        facts["precision"] = precision
    write_text(directory / "metrics.json", json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    found.write(directory)
    return result


def tally_of(
    side: Codec, answers: list[list[Piece]], gold: list[list[Piece]], ks: Sequence[int], words: Words
) -> StringTally:
    """What is counted; of sentences, and of what a model of pieces writes, also the text itself.

    Args:
        side: of the targets; answers: cut into units, the best first; gold: the references of each item, likewise.
        ks: ranks of WER@k; words: what counts as a word.

    >>> from thalweg.data import Alphabet, Symbols
    >>> side = Codec(Symbols(), Alphabet.build(["ab"]))
    >>> len(tally_of(side, [[("a",)]], [[("b",)]], (), "item"))
    1
    """
    written = words == "space" or side.pieced
    unit = "characters, NFC" if side.pieced else str(side.symbols)
    tally = StringTally(answers, gold, ks=ks, words=words, text=side.join_units if written else None, unit=unit)
    if side.symbols.kind == "spaced":
        tally.measures = {**tally.measures, "cer": tally.measures["cer"]._replace(name="PER")}
    return tally


def _named(item: _Item) -> str:
    return f"{item.source} ({';'.join(item.features)})" if item.features else item.source


def _stem(spec: str) -> str:
    name, colon, split = spec.rpartition(":")
    if colon and not Path(spec).exists():
        return f"{name.replace('/', '-')}-{split}"
    return Path(spec).name.removesuffix(".gz").removesuffix(".tsv") if spec != "-" else "stdin"


def _items(pairs: PairFile, references: str) -> list[_Item]:
    if references == "any":
        return [_Item(source, targets, tags, pairs.path) for (source, tags), targets in pairs.questions().items()]
    return [_Item(pair.source, (pair.target,), pair.features, f"{pairs.path}:{pair.line}") for pair in pairs.pairs]


def _first(predictions: Iterable[Prediction]) -> Hypotheses:
    """The first answer of each prediction, as a search gives it; of its symbols only the number is there."""
    none = Answer("", (), -math.inf, False)
    best = [prediction.answers[0] if prediction.answers else none for prediction in predictions]
    return Hypotheses(
        tokens=torch.zeros(len(best), 1, 0, dtype=torch.long),
        lengths=torch.tensor([[len(answer.symbols) + answer.finished] for answer in best]),
        scores=torch.tensor([[answer.log_prob] for answer in best], dtype=torch.float64),
        finished=torch.tensor([[answer.finished] for answer in best]),
        optimal=torch.tensor([answer.optimal is True for answer in best]),
    )


def _predict(
    transducer: Transducer,
    items: list[_Item],
    k: int,
    how: SearchConfig,
    listener: Callable[[dict[str, Any]], None] | None,
) -> Iterator[Prediction]:
    # Whole-file chunks let words of one length share a batch.
    sources = (Source(item.source, item.features, item.where) for item in items)
    stream = transducer.predict(sources, k=k, how=how, batch_size=4096)
    for done, prediction in enumerate(stream, start=1):
        if listener and (done % 256 == 0 or done == len(items)):
            listener({"event": "predicted", "done": done, "of": len(items)})
        yield prediction


@dataclass(frozen=True)
class _Answered:
    """What a transducer said of each item; answers, and what is right (``gold``), cut into units."""

    transducer: Transducer
    items: list[_Item]
    predictions: list[Prediction]
    answers: list[list[Piece]]
    gold: list[list[Piece]]

    @classmethod
    def of(cls, transducer: Transducer, items: list[_Item], predictions: list[Prediction]) -> _Answered:
        side = transducer.target
        answers = [[side.counted(answer.symbols) for answer in p.answers] for p in predictions]
        gold = [[side.units(text) for text in item.references] for item in items]
        return cls(transducer, items, predictions, answers, gold)

    def measured(self, ks: Sequence[int], words: Words) -> Measured:
        side = self.transducer.target
        return Measured(
            sources=tuple(_named(item) for item in self.items),
            references=tuple(item.references for item in self.items),
            answers=tuple(side.join_units(best[0]) if best else "" for best in self.answers),
            tally=tally_of(side, self.answers, self.gold, ks, words),
        )

    def write(self, directory: Path) -> None:
        """All files but that of the figures."""
        write_text(directory / "predictions.jsonl", "".join(self._records()))
        write_text(directory / "worst.tsv", "".join(self._mistakes()))
        found = confusions(self.answers, self.gold)
        rows = (f"{each.gold or GAP}\t{each.predicted or GAP}\t{each.count}\n" for each in found)
        write_text(directory / "confusions.tsv", "".join(["gold\tpredicted\tcount\n", *rows]))
        path = directory / "attention.json"
        path.unlink(missing_ok=True)
        if pictures := self._pictures():
            write_text(path, json.dumps(pictures, ensure_ascii=False) + "\n")

    def _records(self) -> Iterator[str]:
        for item, prediction, best, gold in zip(self.items, self.predictions, self.answers, self.gold, strict=True):
            _, edits = closest_reference(best[0] if best else (), gold)
            record = {
                "source": item.source,
                **({"features": list(item.features)} if item.features else {}),
                "references": list(item.references),
                "answers": [answer.to_json() for answer in prediction.answers],
                "correct": edits == 0,
                "edits": edits,
            }
            yield json.dumps(record, ensure_ascii=False) + "\n"

    def _mistakes(self) -> Iterator[str]:
        yield "source\treferences\tprediction\tedits\n"
        join = self.transducer.target.join_units
        for mistake in worst(self.answers, self.gold, limit=200):
            item = self.items[mistake.item]
            yield f"{_named(item)}\t{' | '.join(item.references)}\t{join(mistake.hypothesis)}\t{mistake.edits}\n"

    def _pictures(self) -> list[dict[str, Any]]:
        """Where the model looked, for a few right and a few wrong answers spread over the file."""
        both = enumerate(zip(self.answers, self.gold, strict=True))
        right = [n for n, (best, gold) in both if best and best[0] in gold]
        wrong = sorted({n for n, prediction in enumerate(self.predictions) if prediction.answers} - set(right))
        rows = _spread(right, PICTURES // 2) + _spread(wrong, PICTURES // 2)
        chosen, side = [self.items[n] for n in rows], self.transducer.source
        symbols = [(*side.tags(item.features), *side.symbols.split(item.source)) for item in chosen]
        shown = [(source, self.predictions[n].answers[0]) for source, n in zip(symbols, rows, strict=True)]
        pictures = []
        for item, (source, answer), weights in zip(chosen, shown, self.transducer.attend(shown), strict=True):
            if weights is None:
                continue
            ending = ("</s>",) if answer.finished else ()
            pictures.append(
                {
                    "source": [symbol.strip() if is_tag(symbol) else symbol for symbol in source],
                    "prediction": [*answer.symbols, *ending],
                    "reference": item.references[0],
                    "weights": [[round(w, 4) for w in row] for row in weights],
                }
            )
        return pictures


def _spread(rows: list[int], count: int) -> list[int]:
    if len(rows) <= count:
        return rows
    return [rows[(2 * n + 1) * len(rows) // (2 * count)] for n in range(count)]
