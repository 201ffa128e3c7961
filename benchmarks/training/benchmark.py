"""Training and prediction beside yoyodyne: same architecture family, sizes, batch, data and threads, in one run.

    python -m benchmarks training --data-root DATA --peer-python peer/bin/python --write

Both models are a bidirectional LSTM encoder and an LSTM decoder with additive attention, one layer each, 128 wide.
Rounds alternate (peer, Thalweg, peer, ...). Answers are checked before anything is timed; a wrong one ends the run.
Without yoyodyne (pip install -c constraints.txt yoyodyne==0.5.27) Thalweg is measured alone and nothing is written.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run
from benchmarks.harness.device import resident
from benchmarks.harness.process import alone, version_in
from benchmarks.harness.timing import Spread, rates_in_turn
from benchmarks.training.checks import check_like_lengths, check_ours, check_parameters, check_peer
from benchmarks.training.report import report
from benchmarks.training.sides import BEAM, GREEDY, PEER, SIZES, Data, Ours, Peer, complete, prepare, settings
from thalweg.tasks import apply_overrides, build_config, load, train

MEMORY_STEPS = (1000, 2000, 3000)
QUICK_STEPS = (20, 40, 60)


def measure(run: Run, ours: Ours, peer: Peer | None) -> dict[str, Any]:
    """Time training, then check the models, then time prediction."""
    jobs: dict[str, Callable[[], float]] = {"training/peer": peer.train} if peer else {}
    values = rates_in_turn({**jobs, "training/ours": ours.train}, run.args.rounds)
    transducer = load(ours.run, device="cpu")
    checks: dict[str, Any] = {"ours": check_ours(ours, transducer)}
    greedy: dict[str, Callable[[], float]] = {}
    beam: dict[str, Callable[[], float]] = {}
    if peer:
        check_parameters(ours.parameters, peer.facts["parameters"])
        checks["peer"] = check_peer(peer)
        check_like_lengths(checks)
        predict, batch = peer.predict, checks["peer"]["beam_batch"]
        for size in (32, 256):
            greedy[f"greedy/peer batch {size}"] = lambda size=size: predict(batch=size, width=1)[0]
        beam[f"beam/peer batch {batch}"] = lambda: predict(batch=batch, width=5)[0]
    greedy["greedy/ours"] = lambda: ours.predict(transducer, GREEDY)[0]
    # The peer always gives all five answers; asked for the best alone, Thalweg may stop earlier.
    beam["beam/ours"] = lambda: ours.predict(transducer, BEAM, k=5)[0]
    beam["beam-best/ours"] = lambda: ours.predict(transducer, BEAM)[0]
    values |= rates_in_turn({**greedy, **beam}, run.args.rounds)
    spreads = {name: Spread.of(each) for name, each in values.items()}
    return {
        "parameters": {"ours": ours.parameters, "peer": peer.facts["parameters"] if peer else None},
        "checks": checks,
        "per_second": {name: spread.to_json() for name, spread in spreads.items()},
        "rounds_per_second": values,
        "ratios": ratios(spreads),
    }


def ratios(spreads: dict[str, Spread]) -> dict[str, dict[str, float]]:
    """Ours over the peer's, for each thing measured."""
    found = {}
    for name, spread in spreads.items():
        kind, _, who = name.partition("/")
        if who.startswith("peer"):
            for ours in (kind, f"{kind}-best"):
                if f"{ours}/ours" in spreads:
                    found[ours + who.removeprefix("peer")] = spreads[f"{ours}/ours"].over(spread)
    return found


def memory_growth(data: Data, run: Path, steps: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """MiB after so many training steps, now and at most so far."""
    seen: dict[str, dict[str, float]] = {}
    made = 0

    def listener(event: dict[str, Any]) -> None:
        nonlocal made
        made += event["event"] == "step"
        if event["event"] == "step" and made in steps:
            seen[str(made)] = {"now": resident("VmRSS") / 2**20, "peak": resident("VmHWM") / 2**20}

    epochs = math.ceil(steps[-1] / math.ceil(data.pairs / SIZES["batch_size"]))
    train(build_config(settings(data, epochs=epochs)), run, listener=listener)
    return seen


def measure_memory(run: Run, data: Data) -> Facts:
    """In a process that does nothing else."""
    steps = QUICK_STEPS if run.args.quick else MEMORY_STEPS
    place = run.folder / "memory"
    seen = alone(memory_growth, threads=run.args.threads, timeout=7200, data=data, run=place, steps=steps)
    told = (f"{row['now']:.1f} MiB (peak {row['peak']:.1f}) after {made} steps" for made, row in seen.items())
    print("memory of training: " + ", ".join(told))
    first, *_, last = seen.values()
    return {"mebibytes": seen, "growth": {key: last[key] / first[key] - 1 for key in first}}


def measure_accuracy(run: Run, data: Data, peer: Peer | None) -> Facts:
    """Train both from the start for the same number of epochs; test accuracy of the epoch best on the dev data."""
    epochs, seed, overrides = run.args.epochs, run.args.seed, run.args.ours
    results: Facts = {"epochs": epochs, "seed": seed, "overrides": overrides}
    if peer:
        facts = peer.worker.ask("full", epochs=epochs)
        found = {"greedy": peer.predict(batch=32, width=1)[1], "beam": peer.predict(batch=1, width=5)[1]}
        results["peer"] = facts | {how: data.accuracy(answers) for how, answers in found.items()}
        print(f"accuracy of {PEER}: {results['peer']}")
    ours = Ours(data, run.folder / "full", seed)
    done = complete(train(build_config(apply_overrides(settings(data, epochs=epochs, seed=seed), overrides)), ours.run))
    transducer = load(ours.run, device="cpu")
    if peer:
        check_parameters(sum(p.numel() for p in transducer.model.parameters()), peer.facts["parameters"])
    found = {"greedy": ours.predict(transducer, GREEDY)[1], "beam": ours.predict(transducer, BEAM)[1]}
    results["ours"] = {
        "seconds": done.seconds,
        "best_epoch": done.best_epoch,
        "dev_accuracy": done.best["accuracy"],
        **{how: data.accuracy(answers) for how, answers in found.items()},
    }
    print(f"accuracy of thalweg: {results['ours']}")
    return results


def find_peer(run: Run, data: Data) -> Peer | None:
    """Yoyodyne in its process, where it is there."""
    found = version_in(run.args.peer_python, PEER)
    if found is None:
        run.found({}, [f"{PEER}: left out, it is not importable there; give --peer-python"])
        return None
    peer = Peer(data, run.args.peer_python, run.folder, seed=run.args.seed, threads=run.args.threads)
    built = peer.facts["versions"]
    run.found({PEER: found}, [])
    run.facts["versions"]["peer"] = built
    if built["torch"] != torch.__version__:
        print(f"note: {PEER} runs on torch {built['torch']}, Thalweg on {torch.__version__}")
    return peer


def everything(run: Run) -> Facts:
    """Speed of training and of prediction, memory, and accuracy where it is asked for."""
    data = prepare(run)
    peer = find_peer(run, data)
    try:
        facts = measure(run, Ours(data, run.folder / "run", run.args.seed), peer)
        facts["memory"] = measure_memory(run, data)
        if run.args.accuracy:
            facts["accuracy"] = measure_accuracy(run, data, peer)
    finally:
        if peer:
            peer.worker.close()
    print("\nper second, median and quartiles")
    for name, found in facts["per_second"].items():
        print(f"  {name:<24} {found['median']:,.0f} [{found['low']:,.0f}, {found['high']:,.0f}]")
    if not peer:
        raise NothingToCompareError(f"without {PEER} there is no comparison to report or to write")
    return facts | {
        "settings": {**SIZES, "max_length": data.max_length, "optimiser": "Adam", "beam_width": BEAM.width},
        "data": data.facts,
    }


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--peer-python", default=sys.executable, help="Python that has yoyodyne; this one by default")
    add("--data-root", type=Path, help="folder that holds ar2en/; THALWEG_DATA by default")
    add("--pairs", type=int, default=0, help="use so many training pairs only")
    add("--words", type=int, default=0, help="use so many test words only")
    add("--accuracy", action="store_true", help="also train both for --epochs and compare test accuracy (slow)")
    add("--epochs", type=int, default=15, help="of --accuracy")
    add("--seed", type=int, default=0)
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="settings of Thalweg's --accuracy training")


def invalid(args: Namespace) -> str | None:
    return "--epochs must be at least 1" if args.epochs < 1 else None


BENCHMARK = Benchmark(
    parts={"everything": everything},
    report=report,
    options=options,
    invalid=invalid,
    devices=("cpu",),
    rounds=4,
    budget=None,
)
