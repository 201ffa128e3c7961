"""Training on images beside the same network written plainly in PyTorch with a DataLoader over files, in one run.

    python -m benchmarks images --data-root DATA --write                   on this CPU
    python -m benchmarks images --data-root DATA --device cuda --write     on a GPU, with its idle share

Both sides train the same network from the same weights. The losses of the first two steps are compared before
anything is timed; a difference ends the run. Rounds alternate.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.timing import Spread, rates_in_turn
from benchmarks.images.report import report
from benchmarks.images.sides import NETWORKS, Ours, Pictures, Plain, Setting, check_same, prepare

TOLERANCES = {"images": 1e-5, "labels": 0.0, "first_loss": 1e-9, "second_loss": 1e-9}
"""Differences that rounding in another order may give: of images in float32, of losses in float64."""


def settings(args: Namespace) -> list[Setting]:
    if args.device == "cpu":
        return [Setting(name, args.batch or 64, threads=args.threads) for name in args.networks]
    batches = [args.batch] if args.batch else [128, 512]
    return [
        Setting(name, batch, "cuda", precision, args.threads)
        for name in args.networks
        for batch in batches
        for precision in ("32-true", "bf16-mixed")
    ]


def check(pictures: Pictures, setting: Setting) -> dict[str, float]:
    found = check_same(pictures, setting.network, min(setting.batch, len(pictures.split)))
    for name, allowed in TOLERANCES.items():
        demand(f"{setting.network}, {name} of both sides", found[name], allowed)
    return found


def sides_of(pictures: Pictures, setting: Setting, workers: list[int]) -> dict[str, Any]:
    """Everything that is timed, by its name in the table."""
    plain = {f"plain, {count} workers": Plain(pictures, setting, count) for count in workers}
    ours = {"Thalweg": Ours(pictures, setting)}
    if setting.device == "cuda":
        ours["Thalweg, images outside the GPU"] = Ours(pictures, setting, "pinned")
    return {**plain, **ours, "constant": Ours(pictures, setting, "constant")}


def measure(pictures: Pictures, setting: Setting, args: Namespace) -> Facts:
    """One network: check, warm up, then every side in turn."""
    print(f" {setting.network}, batch {setting.batch}, {setting.precision}", flush=True)
    facts: Facts = {"network": setting.network, "batch": setting.batch, "precision": setting.precision}
    facts["check"] = check(pictures, setting)
    sides = sides_of(pictures, setting, args.workers or sorted({0, os.cpu_count() or 1}))
    # On a GPU the first epoch of a training chooses algorithms; elsewhere a round that is not counted warms up.
    warm = int(setting.device == "cpu")
    count, epochs = len(pictures.split), 2 - warm
    waited: dict[str, list[float]] = {name: [] for name in sides}

    def rate(name: str) -> float:
        seconds = sides[name].seconds(epochs)
        waited[name].append(getattr(sides[name], "waited", 0.0) / seconds)
        return count / seconds

    jobs = {name: lambda name=name: rate(name) for name in sides}
    values = rates_in_turn(jobs, warm + (1 if args.quick else args.rounds))
    for side in sides.values():
        if isinstance(side, Plain):
            side.close()
    rates = {name: Spread.of(each[warm:]) for name, each in values.items()}
    seconds = {name: Spread.of([count / value for value in each[warm:]]).median for name, each in values.items()}
    best = max((name for name in rates if name.startswith("plain")), key=lambda name: rates[name].median)
    idle = {
        name: {"share": 1 - seconds["constant"] / seconds[name], "waited": Spread.of(waited[name][warm:]).median}
        for name in rates
        if name.startswith("Thalweg")
    }
    return facts | {
        "per_second": {name: found.to_json() for name, found in rates.items()},
        "best_plain": best,
        "ratio": rates["Thalweg"].over(rates[best]),
        "constant_ms": 1e3 * seconds["constant"] / -(-count // setting.batch),
        "idle": idle,
    }


def cells(run: Run) -> Facts:
    """Every network."""
    args = run.args
    count = 256 if args.quick else args.images or (4096 if args.device == "cpu" else 0)
    pictures = prepare(run.folder, args.data_root, count)
    measured = [measure(pictures, setting, args) for setting in settings(args)]
    return {
        "images": len(pictures.split),
        "decoding": pictures.seconds,
        "sides": list(measured[0]["per_second"]),
        "cells": measured,
    }


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data-root", type=Path, help="folder that holds intel/; THALWEG_DATA by default")
    add("--networks", nargs="+", choices=sorted(NETWORKS), default=sorted(NETWORKS))
    add("--batch", type=int, default=0, help="images in a batch; 64 on the CPU, 128 and 512 on a GPU by default")
    add("--images", type=int, default=0, help="use so many training images only; 4096 on the CPU by default")
    add("--workers", type=int, nargs="+", default=[], help="processes of the plain DataLoader; none, and one a core")


def invalid(args: Namespace) -> str | None:
    wrong = min(args.batch, args.images, *args.workers, 0) < 0
    return "--batch, --images and --workers must be at least 0" if wrong else None


BENCHMARK = Benchmark(
    parts={"cells": cells},
    report=report,
    options=options,
    invalid=invalid,
    rounds=5,
    budget=None,
    packages=("pillow",),
)
