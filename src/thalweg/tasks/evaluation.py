"""Measure a trained transducer on a file: scores with intervals, predictions, worst errors, confusions."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import thalweg
from thalweg.data import PairFile
from thalweg.errors import ConfigError
from thalweg.learning.checkpoint import write_atomically
from thalweg.metrics import Score, closest_reference, confusions, score_strings, worst
from thalweg.tasks.config import SearchConfig
from thalweg.tasks.transduce import words_of
from thalweg.tasks.transducer import Prediction, Transducer, load, open_pairs

__all__ = ["Evaluation", "evaluate"]

GAP = "∅"
PICTURES = 12


@dataclass(frozen=True)
class Evaluation:
    """Scores of one run on one file and the directory that holds the details.

    >>> Evaluation(Path("runs/x/evaluation/test"), {}, 100, 2000.0).items
    100
    """

    directory: Path
    scores: dict[str, Score]
    items: int
    words_per_second: float


@dataclass(frozen=True)
class _Item:
    source: str
    references: tuple[str, ...]


def evaluate(
    run: str | Path,
    spec: str,
    *,
    k: int = 5,
    how: SearchConfig | None = None,
    references: Literal["each", "any"] = "each",
    name: str | None = None,
    device: str = "auto",
    root: Path | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
) -> Evaluation:
    """Predict every source of a file, compare with its targets, write ``RUN/evaluation/NAME/``.

    Args:
        run: run directory.
        spec: TSV file or ``NAME:SPLIT``.
        k: answers per source; WER@k is given for 1 < k' <= k among 3, 5, 10 and k itself.
        how: the search; beam of width 5 by default.
        references: ``each`` counts every line; ``any`` counts each source once and accepts any of its targets.
        name: of the evaluation; the file's stem by default.
        listener: called with ``{"event": "predicted", "done": n, "of": m}``.

    >>> evaluate("absent", "cmudict:dev")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    if references not in ("each", "any"):
        raise ConfigError(f"references must be `each` or `any`, got `{references}`")
    how = how or SearchConfig(search="beam")
    k = 1 if how.search == "greedy" else k
    transducer = load(run, device=device)
    pairs = open_pairs(spec, root)
    items = _items(pairs, references)
    began = time.perf_counter()
    predictions = list(_predict(transducer, items, k, how, listener))
    speed = len(items) / (time.perf_counter() - began)

    split = transducer.target.symbols.split
    answers = [[answer.symbols for answer in p.answers] for p in predictions]
    gold = [[split(text) for text in item.references] for item in items]
    ks = sorted({n for n in (3, 5, 10, k) if 1 < n <= k})
    scores = score_strings(answers, gold, ks=ks, words=words_of(transducer.target, pairs.targets()))
    if transducer.target.symbols.kind == "spaced":
        scores["cer"] = dataclasses.replace(scores["cer"], name="PER")

    home = Path(run).parent if Path(run).is_file() else Path(run)
    directory = home / "evaluation" / (name or _stem(spec))
    facts = {
        "file": spec,
        "pairs": len(pairs),
        "items": len(items),
        "search": {**dataclasses.asdict(how), "name": how.search, "k": k},
        "references": references,
        "scores": {key: score.to_json() for key, score in scores.items()},
        "words_per_second": speed,
        "version": thalweg.__version__,
    }
    _write(directory / "metrics.json", json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    _write_predictions(directory, items, predictions, answers, gold)
    _write_tables(directory, items, answers, gold, transducer)
    _write_attention(directory, transducer, items, predictions, answers, gold)
    return Evaluation(directory, scores, len(items), speed)


def _stem(spec: str) -> str:
    name, colon, split = spec.rpartition(":")
    if colon and not Path(spec).exists():
        return f"{name.replace('/', '-')}-{split}"
    return Path(spec).name.removesuffix(".gz").removesuffix(".tsv") if spec != "-" else "stdin"


def _items(pairs: PairFile, references: str) -> list[_Item]:
    if references == "any":
        return [_Item(source, targets) for source, targets in pairs.references().items()]
    return [_Item(pair.source, (pair.target,)) for pair in pairs.pairs]


def _predict(
    transducer: Transducer,
    items: list[_Item],
    k: int,
    how: SearchConfig,
    listener: Callable[[dict[str, Any]], None] | None,
) -> Iterator[Prediction]:
    # Whole-file chunks let words of one length share a batch.
    stream = transducer.predict((item.source for item in items), k=k, how=how, batch_size=4096)
    for done, prediction in enumerate(stream, start=1):
        if listener and (done % 256 == 0 or done == len(items)):
            listener({"event": "predicted", "done": done, "of": len(items)})
        yield prediction


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def _write_predictions(
    directory: Path,
    items: list[_Item],
    predictions: list[Prediction],
    answers: list[list[tuple[str, ...]]],
    gold: list[list[tuple[str, ...]]],
) -> None:
    lines = []
    for item, prediction, best, references in zip(items, predictions, answers, gold, strict=True):
        _, edits = closest_reference(best[0] if best else (), references)
        record = {
            "source": item.source,
            "references": list(item.references),
            "answers": [
                {"text": a.text, "log_prob": a.log_prob, "probability": a.probability, "finished": a.finished}
                for a in prediction.answers
            ],
            "correct": edits == 0,
            "edits": edits,
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    _write(directory / "predictions.jsonl", "".join(lines))


def _write_tables(
    directory: Path,
    items: list[_Item],
    answers: list[list[tuple[str, ...]]],
    gold: list[list[tuple[str, ...]]],
    transducer: Transducer,
) -> None:
    join = transducer.target.symbols.join
    rows = ["source\treferences\tprediction\tedits\n"]
    for mistake in worst(answers, gold, limit=200):
        item = items[mistake.item]
        rows.append(f"{item.source}\t{' | '.join(item.references)}\t{join(mistake.hypothesis)}\t{mistake.edits}\n")
    _write(directory / "worst.tsv", "".join(rows))
    rows = ["gold\tpredicted\tcount\n"]
    for confusion in confusions(answers, gold):
        rows.append(f"{confusion.gold or GAP}\t{confusion.predicted or GAP}\t{confusion.count}\n")
    _write(directory / "confusions.tsv", "".join(rows))


def _write_attention(
    directory: Path,
    transducer: Transducer,
    items: list[_Item],
    predictions: list[Prediction],
    answers: list[list[tuple[str, ...]]],
    gold: list[list[tuple[str, ...]]],
) -> None:
    """Where the model looked, for a few right and a few wrong answers spread over the file."""
    path = directory / "attention.json"
    path.unlink(missing_ok=True)
    right = [n for n, (best, refs) in enumerate(zip(answers, gold, strict=True)) if best and best[0] in refs]
    chosen_right = set(right)
    wrong = [n for n in range(len(items)) if n not in chosen_right and predictions[n].answers]
    chosen = _spread(right, PICTURES // 2) + _spread(wrong, PICTURES // 2)
    split = transducer.source.symbols.split
    shown = [(split(items[n].source), predictions[n].answers[0]) for n in chosen]
    pictures = []
    for n, (source, answer), weights in zip(chosen, shown, transducer.attend(shown), strict=True):
        if weights is None:
            continue
        ending = ("</s>",) if answer.finished else ()
        pictures.append(
            {
                "source": list(source),
                "prediction": [*answer.symbols, *ending],
                "reference": items[n].references[0],
                "weights": [[round(w, 4) for w in row] for row in weights],
            }
        )
    if pictures:
        _write(path, json.dumps(pictures, ensure_ascii=False) + "\n")


def _spread(rows: list[int], count: int) -> list[int]:
    if len(rows) <= count:
        return rows
    return [rows[(2 * n + 1) * len(rows) // (2 * count)] for n in range(count)]
