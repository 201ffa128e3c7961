"""Search over Transformers and recurrent models beside transformers, CTranslate2 and yoyodyne: same weights, one run.

    python benchmarks/decoding.py --write                            results/decoding-cpu.json and .md
    python benchmarks/decoding.py --device cuda --write              the same for a GPU
    python benchmarks/decoding.py --parts words --run RUN --words-file test.tsv --write    measures one part again
    python benchmarks/decoding.py --parts recurrent --peer-python peer/bin/python --first ../first/src --write
    python benchmarks/decoding.py --quick                            tiny sizes, to see that it runs

``search``: one BART checkpoint in transformers' ``generate``, CTranslate2 (float32 and int8) and Thalweg through
``from_huggingface`` (pip install -c constraints.txt transformers==5.22.0 ctranslate2==4.8.4). ``words``: a trained run
on a list of words. ``recurrent``: LSTM and GRU beside yoyodyne's beam and an earlier version of Thalweg. Answers are
checked before anything is timed; a wrong one ends the run. What cannot be imported, or has no code for the device, is
left out and named.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain_floor import Rates
from chain_timing import Cell, alternate, first_call, release
from common import RESULTS, WrongAnswerError, machine, write_results
from decoding_floor import floor, starts
from decoding_recurrent import recurrent_part
from decoding_report import markdown, method
from decoding_sides import OURS, PEER, TINY, UNK, Answers, Ours, Shape, Side, find_sides, write_checkpoint
from decoding_words import words_part
from torch import Tensor

import thalweg
from thalweg.errors import ThalwegError

PARTS = ("search", "words", "recurrent")
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
    if not own <= TOLERANCE:
        raise WrongAnswerError(f"expected the model's log-probabilities from the search, got {own:.2g} beside them")
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


def measure(
    ours: Ours, sides: Sequence[Side], shape: Shape, batch: int, width: int, rates: Rates, args: argparse.Namespace
) -> dict[str, Any]:
    """Check, then time in turn, one batch size and width."""
    print(f"{method(width)}, B = {batch}", flush=True)
    draw = torch.Generator().manual_seed(batch)
    source = torch.randint(UNK + 1, shape.vocabulary, (batch, shape.source), generator=draw)
    checks = check(ours, sides, source, width)
    jobs = [side.job(source, width) for side in sides]
    cells: dict[str, Cell] = {job.name: first_call(job, args.device)[0] for job in jobs}
    alternate(jobs, cells, device=args.device, rounds=args.rounds, budget=args.budget)
    mine = cells[OURS].wall
    ratios = {name: cell.wall.over(mine) for name, cell in cells.items() if name != OURS and cell.wall and mine}
    counted = {job.name: starts(job.run, args.device) for job in jobs if job.name in (OURS, PEER)}
    for name, cell in cells.items():
        times = f"{cell.wall.median:10.3f} ms" if cell.wall else " " * 13
        faster = f"{ratios[name]['median']:9.1f}x" if name in ratios else " " * 10
        print(f"  {name:<20} {times} {faster} {cell.note}", flush=True)
    release(args.device)
    return {
        "batch": batch,
        "width": width,
        "checks": checks,
        "jobs": {name: cell.to_json() for name, cell in cells.items()},
        "ratios": ratios,
        "floor": floor(shape, batch, width, rates),
        "starts_per_step": {name: count / shape.steps for name, count in counted.items() if count},
    }


def search_part(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """The comparison on one checkpoint."""
    shape = TINY if args.quick else Shape()
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(Path(name) / "checkpoint", shape)
        ours, sides, missing = find_sides(folder, args.device, shape, args.threads)
        for line in missing:
            print(line)
        facts["left_out"] += missing
        facts["versions"] |= {side.name: side.version for side in sides if side.name != OURS}
        rates = Rates.measured(args.device)
        facts["shape"] = asdict(shape)
        facts["search"] = [
            measure(ours, sides, shape, batch, width, rates, args)
            for width in args.widths
            for batch in ([1, 3] if args.quick else args.batches)
        ]
    facts["rates"] = {"multiply_adds": rates.multiply_adds, "copies": rates.copies}


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts that were asked for."""
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    facts: dict[str, Any] = {
        "place": "gpu" if args.device == "cuda" else "cpu",
        "machine": here,
        "versions": {
            "thalweg": thalweg.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "left_out": [],
        "threads": args.threads,
        "rounds": args.rounds,
        "budget_s": args.budget,
        "one_run": True,
    }
    if "search" in args.parts:
        search_part(args, facts)
    if "words" in args.parts:
        print("words", flush=True)
        facts["words"] = words_part(
            args.run, args.words_file, limit=args.words, device=args.device, rounds=args.rounds, singles=args.singles
        )
    if "recurrent" in args.parts:
        print("recurrent", flush=True)
        facts["recurrent"] = recurrent_part(args)
    return facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of every side")
    add("--rounds", type=int, default=7, help="alternating rounds of each comparison")
    add("--budget", type=float, default=40.0, help="seconds of calls after which a job sits out the remaining rounds")
    add("--parts", nargs="+", choices=PARTS, default=["search"], help="what to measure; `search` by default")
    add("--batches", type=int, nargs="+", default=[1, 64, 512], help="of `search`")
    add("--widths", type=int, nargs="+", default=[1, 5], help="of `search`; 1 is greedy")
    add("--run", type=Path, nargs="+", default=[], help="run directories of `words`")
    add("--words-file", type=Path, help="words of `words`, one a line or the first column of a TSV file")
    add("--singles", type=int, default=200, help="words that `words` asks for one by one")
    add("--words", type=int, default=0, help="so many words only: all in `words`, 400 in `recurrent`")
    add("--peer-python", default=sys.executable, help="Python that has yoyodyne; this one by default")
    add("--first", type=Path, help="src folder of an earlier version of Thalweg, for `recurrent`")
    add("--first-python", default=sys.executable, help="Python that runs --first; this one by default")
    add("--data-root", type=Path, help="folder that holds ar2en/; THALWEG_DATA by default")
    add("--pairs", type=int, default=0, help="training pairs of `recurrent`, all by default")
    add("--epochs", type=int, default=2, help="of `recurrent`: enough for words to end; accuracy is not measured")
    add("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add("--write", action="store_true", help="write benchmarks/results/decoding-cpu|gpu.json and .md")
    args = parser.parse_args()
    if min(args.rounds, args.threads, args.epochs, args.singles, *args.batches, *args.widths) < 1 or args.budget <= 0:
        parser.error(
            "--rounds, --threads, --epochs, --singles, --batches and --widths must be at least 1, --budget above 0"
        )
    if args.quick and args.write:
        parser.error("--quick is no measurement and is not written")
    if "words" in args.parts and not (args.run and args.words_file):
        parser.error("--parts words needs --run RUN and --words-file FILE")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device == "cuda" and "recurrent" in args.parts:
        parser.error("--parts recurrent runs on the CPU, where yoyodyne's driver is; leave --device out")
    return args


def merged(facts: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The parts that this run left out, from the file of an earlier one."""
    path = RESULTS / f"decoding-{facts['place']}.json"
    if set(parts) == set(PARTS) or not path.exists():
        return facts
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if "search" not in parts:
        facts["versions"] = {**earlier["versions"], **facts["versions"]}
        facts["left_out"] = earlier["left_out"]
    return {**earlier, **facts, "one_run": False}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    try:
        facts = gather(args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer, nothing is reported: {error}")
    except ThalwegError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted, nothing is reported")
    if args.write:
        facts = merged(facts, args.parts)
    text = markdown(facts)
    print("\n" + text)
    if args.write:
        write_results(f"decoding-{facts['place']}", facts, text)


if __name__ == "__main__":
    main()
