"""A trained run on real words, which end where they end: words a second, and how long one word takes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.declaration import Facts, Run, WrongAnswerError
from benchmarks.harness.device import synchronise
from benchmarks.harness.timing import Spread
from benchmarks.training.checks import agreement, check_scores
from thalweg.errors import DataError
from thalweg.tasks import SearchConfig, Transducer, load

SEARCHES = {"greedy": SearchConfig(search="greedy"), "beam 5": SearchConfig(search="beam", width=5)}
PROBES, SINGLES = 50, 200
"""Words whose scores are checked, and words that are asked for one by one."""


def read_words(path: Path, limit: int) -> list[str]:
    """Distinct first columns of a file, a random sample where there are more than ``limit`` of them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: expected a file of words, got {error.strerror}; give --words-file FILE") from None
    words = list(dict.fromkeys(line.partition("\t")[0] for line in lines if line.strip()))
    if not words:
        raise DataError(f"{path}: expected words, one a line, got none; give another file")
    return random.Random(0).sample(words, limit) if 0 < limit < len(words) else words


def _predict(transducer: Transducer, words: Sequence[str], how: SearchConfig, device: str) -> tuple[float, dict]:
    """Seconds, and the best answer to each word."""
    synchronise(device)
    began = time.perf_counter()
    found = list(transducer.predict(words, how=how))
    synchronise(device)
    seconds = time.perf_counter() - began
    return seconds, {p.source: p.answers[0].text if p.answers else "" for p in found}


def measure_run(run: Path, words: Sequence[str], *, device: str, rounds: int) -> dict[str, Any]:
    """Words a second in batches and milliseconds of one word alone, after a check of scores and of both ways."""
    transducer = load(run, device=device)
    worst = check_scores(transducer, words[:PROBES]) if device == "cpu" else None
    alone = list(words[:SINGLES])
    facts: dict[str, Any] = {
        "run": run.name,
        "parameters": sum(p.numel() for p in transducer.model.parameters()),
        "model": type(transducer.model).__name__,
        "score_difference": worst,
        "searches": {},
    }
    speeds: dict[str, list[float]] = {name: [] for name in SEARCHES}
    waits: dict[str, list[float]] = {name: [] for name in SEARCHES}
    lengths: dict[str, float] = {}
    for number in range(rounds + 1):  # the first warms up, and is checked
        for name, how in SEARCHES.items():
            seconds, together = _predict(transducer, words, how, device)
            singles = [_predict(transducer, [word], how, device) for word in alone]
            if number == 0:
                if agreement(together, {word: text for _, one in singles for word, text in one.items()}) < 0.98:
                    raise WrongAnswerError(f"{run}: {name} expected the same answers alone and in batches, got others")
                sizes = [len(transducer.target.symbols.split(text)) for text in together.values()]
                lengths[name] = sum(sizes) / len(sizes)
                continue
            speeds[name].append(len(words) / seconds)
            waits[name] += [1e3 * taken for taken, _ in singles]
    for name in SEARCHES:
        grid = torch.tensor(waits[name], dtype=torch.float64)
        speed = Spread.of(speeds[name])
        found = facts["searches"][name] = {
            "words_per_second": speed.to_json(),
            "p50_ms": grid.quantile(0.5).item(),
            "p95_ms": grid.quantile(0.95).item(),
            "mean_length": lengths[name],
        }
        print(f"  {run.name} {name}: {speed} words/s, one word {found['p50_ms']:.2f} ms")
    return facts


def words(run: Run) -> Facts:
    """Every trained model on the same words."""
    args = run.args
    listed = read_words(args.words_file, args.words or (20 if args.quick else 0))
    measured = [measure_run(path, listed, device=args.device, rounds=args.rounds) for path in args.run]
    singles = min(SINGLES, len(listed))
    return {"words": {"file": args.words_file.name, "words": len(listed), "singles": singles, "runs": measured}}
