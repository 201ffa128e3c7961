"""Search over Transformers and recurrent models beside transformers, CTranslate2 and yoyodyne: same weights, one run.

    python -m benchmarks decoding --write                            on this CPU
    python -m benchmarks decoding --device cuda --write              on a GPU
    python -m benchmarks decoding --parts words --run RUN --words-file test.tsv --write    measures one part again
    python -m benchmarks decoding --parts recurrent --peer-python peer/bin/python --first ../first/src --write

``search``: one BART checkpoint in transformers' ``generate``, CTranslate2 (float32 and int8) and Thalweg through
``from_huggingface`` (pip install -c constraints.txt transformers==5.22.0 ctranslate2==4.8.4). ``words``: a trained run
on a list of words. ``recurrent``: LSTM and GRU beside yoyodyne's beam and an earlier version of Thalweg. Answers are
checked before anything is timed; a wrong one ends the run. What cannot be imported, or has no code for the device, is
left out and named.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding.floor import floor, starts
from benchmarks.decoding.recurrent import recurrent
from benchmarks.decoding.report import method, report
from benchmarks.decoding.sides import OURS, PEER, TINY, UNK, Answers, Ours, Shape, Side, find_sides, write_checkpoint
from benchmarks.decoding.words import words
from benchmarks.harness.declaration import Benchmark, Facts, Run, WrongAnswerError, demand
from benchmarks.harness.rates import Rates

TOLERANCE = 1e-4
NEAR_TIES = 0.01
"""Share of the items of a large batch that may have another hypothesis than a peer."""


def compare(ours: Answers, theirs: Answers, name: str) -> tuple[float, int]:
    """Largest difference of scores over the items with equal hypotheses, and the number of other items.

    Sums in another order differ in the last digits, and a beam may then keep another of two rows that are as good.
    """
    if ours.tokens.shape != theirs.tokens.shape:
        raise WrongAnswerError(
            f"{name}: expected hypotheses {tuple(ours.tokens.shape)}, got {tuple(theirs.tokens.shape)}"
        )
    scale = theirs.scores.abs().clamp(min=1)
    off = (ours.scores - theirs.scores).abs() / scale
    # Equal scores in another order are the same answers; the order of the K is not compared beyond the tolerance.
    same = (ours.tokens[:, 0] == theirs.tokens[:, 0]).all(dim=1) & (off < TOLERANCE).all(dim=1)
    differing = int((~same).sum())
    if differing > NEAR_TIES * len(same):
        raise WrongAnswerError(
            f"{name}: expected our hypotheses and scores, got others for {differing} of {len(same)} items "
            f"(largest relative difference {off.max():.2g})"
        )
    return (off[same].max().item() if bool(same.any()) else 0.0), differing


def check(ours: Ours, sides: Sequence[Side], source: Tensor, width: int) -> dict[str, Any]:
    """Scores against one pass over the target, then all sides against ours; agreement of those that are inexact."""
    found = ours.answers(source, width)
    some = slice(0, 64)
    direct = ours.log_probs(source[some], found.tokens[some])
    own = ((found.scores[some] - direct).abs() / direct.abs().clamp(min=1)).max().item()
    demand("scores of the search beside the model's log-probabilities", own, TOLERANCE)
    facts: dict[str, Any] = {"own": own, "worst": None, "differing": {}, "agreement": {}}
    for side in sides:
        if side.name == OURS:
            continue
        theirs = side.answers(source, width)
        if side.exact:
            worst, facts["differing"][side.name] = compare(found, theirs, side.name)
            facts["worst"] = max(worst, facts["worst"] or 0.0)
        else:
            same = (found.tokens[:, 0] == theirs.tokens[:, 0]).all(dim=1)
            facts["agreement"][side.name] = same.float().mean().item()
    return facts


def search(run: Run) -> Facts:
    """Every batch size and width on one checkpoint."""
    args, shape = run.args, TINY if run.args.quick else Shape()
    folder = write_checkpoint(run.folder / "checkpoint", shape)
    ours, sides, missing = find_sides(folder, args.device, shape, args.threads)
    run.found({side.name: side.version for side in sides if side.name != OURS}, missing)
    rates, cells = Rates.measured(args.device), []
    for width in args.widths:
        for batch in [1, 3] if args.quick else args.batches:
            print(f" {method(width)}, B = {batch}", flush=True)
            draw = torch.Generator().manual_seed(batch)
            source = torch.randint(UNK + 1, shape.vocabulary, (batch, shape.source), generator=draw)
            checks = check(ours, sides, source, width)
            jobs = [side.job(source, width) for side in sides]
            compared = run.compare(jobs, over=lambda name: (name, OURS) if name != OURS else None)
            counted = {job.name: starts(job.run, args.device) for job in jobs if job.name in (OURS, PEER)}
            cells.append(
                {"batch": batch, "width": width, "checks": checks, **compared.to_json()}
                | {"floor": floor(shape, batch, width, rates)}
                | {"starts_per_step": {name: count / shape.steps for name, count in counted.items() if count}}
            )
    return {"shape": asdict(shape), "search": cells, "rates": rates.to_json()}


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 64, 512], help="of `search`")
    add("--widths", type=int, nargs="+", default=[1, 5], help="of `search`; 1 is greedy")
    add("--run", type=Path, nargs="+", default=[], help="run directories of `words`")
    add("--words-file", type=Path, help="words of `words`, one a line or the first column of a TSV file")
    add("--words", type=int, default=0, help="so many words only: all in `words`, 400 in `recurrent`")
    add("--peer-python", default=sys.executable, help="Python that has yoyodyne; this one by default")
    add("--first", type=Path, help="src folder of an earlier version of Thalweg, for `recurrent`")
    add("--data-root", type=Path, help="folder that holds ar2en/; THALWEG_DATA by default")
    add("--pairs", type=int, default=0, help="training pairs of `recurrent`, all by default")
    add("--epochs", type=int, default=2, help="of `recurrent`: enough for words to end; accuracy is not measured")


def invalid(args: Namespace) -> str | None:
    if min(args.epochs, *args.batches, *args.widths) < 1:
        return "--epochs, --batches and --widths must be at least 1"
    if "words" in args.parts and not (args.run and args.words_file):
        return "--parts words needs --run RUN and --words-file FILE"
    if args.device == "cuda" and "recurrent" in args.parts:
        return "--parts recurrent runs on the CPU, where yoyodyne's driver is; leave --device out"
    return None


BENCHMARK = Benchmark(
    parts={"search": search, "words": words, "recurrent": recurrent},
    default=("search",),
    report=report,
    options=options,
    invalid=invalid,
    rounds=7,
    budget=40.0,
)
