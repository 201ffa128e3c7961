"""Training on images beside the same network written plainly in PyTorch with a DataLoader over files, in one run.

    python benchmarks/images.py --data-root DATA --write                   results/images-cpu.json, .md
    python benchmarks/images.py --data-root DATA --device cuda --write     the same for a GPU, with its idle share
    python benchmarks/images.py --data-root DATA --quick                   a few images, to see that it runs

Both sides train the same network from the same weights. The losses of the first two steps are compared before
anything is timed; a difference ends the run. Rounds alternate.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import images_report
import torch
from common import Spread, WrongAnswerError, machine, write_results
from images_sides import NETWORKS, Ours, Pictures, Plain, Setting, check_same, prepare

import thalweg
from thalweg.errors import ThalwegError

TOLERANCES = {"images": 1e-5, "first_loss": 1e-9, "second_loss": 1e-9}
"""Differences that rounding in another order may give: of images in float32, of losses in float64."""


def settings(args: argparse.Namespace) -> list[Setting]:
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
        if not found[name] <= allowed:
            raise WrongAnswerError(
                f"{setting.network}: expected equal {name} on both sides, got {found[name]:.1e} apart"
            )
    if found["labels"]:
        raise WrongAnswerError(
            f"{setting.network}: expected equal labels on both sides, got {found['labels']:.0f} others"
        )
    return found


def sides_of(pictures: Pictures, setting: Setting, workers: list[int]) -> dict[str, Any]:
    """Everything that is timed, by its name in the table."""
    plain = {f"plain, {count} workers": Plain(pictures, setting, count) for count in workers}
    ours = {"Thalweg": Ours(pictures, setting)}
    if setting.device == "cuda":
        ours["Thalweg, images outside the GPU"] = Ours(pictures, setting, "pinned")
    return {**plain, **ours, "constant": Ours(pictures, setting, "constant")}


def measure(pictures: Pictures, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """One network: check, warm up, then every side in turn."""
    print(f"{setting.network}, batch {setting.batch}, {setting.precision}", flush=True)
    facts: dict[str, Any] = {"network": setting.network, "batch": setting.batch, "precision": setting.precision}
    facts["check"] = check(pictures, setting)
    sides = sides_of(pictures, setting, args.workers)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    waited: dict[str, list[float]] = {name: [] for name in sides}
    # On a GPU the first epoch of a training chooses algorithms; elsewhere a round that is not counted warms up.
    epochs = 2 if setting.device == "cuda" else 1
    for number in range(args.rounds + (epochs == 1)):
        for name, side in sides.items():
            seconds = side.seconds(epochs)
            if number or epochs > 1:
                taken[name].append(seconds)
                waited[name].append(getattr(side, "waited", 0.0) / seconds)
    for side in sides.values():
        if isinstance(side, Plain):
            side.close()
    count = len(pictures.split)
    rates = {name: Spread.of([count / value for value in values]) for name, values in taken.items()}
    walls = {name: Spread.of(values) for name, values in taken.items()}
    for name, rate in rates.items():
        print(f"  {name:<34} {rate} images per second", flush=True)
    best = max((name for name in rates if name.startswith("plain")), key=lambda name: rates[name].median)
    idle = {
        name: {"share": 1 - walls["constant"].median / walls[name].median, "waited": Spread.of(waited[name]).median}
        for name in rates
        if name.startswith("Thalweg")
    }
    steps = -(-count // setting.batch)
    return facts | {
        "per_second": {name: rate.to_json() for name, rate in rates.items()},
        "best_plain": best,
        "ratio": rates["Thalweg"].over(rates[best]),
        "constant_ms": 1e3 * walls["constant"].median / steps,
        "idle": idle,
    }


def gather(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    pictures = prepare(folder, args.data_root, args.images)
    versions = {"thalweg": thalweg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["pillow"] = importlib.metadata.version("pillow")
    cells = [measure(pictures, setting, args) for setting in settings(args)]
    return {
        "place": "gpu" if args.device == "cuda" else "cpu",
        "machine": here,
        "versions": versions,
        "threads": args.threads,
        "rounds": args.rounds,
        "images": len(pictures.split),
        "decoding": pictures.seconds,
        "sides": list(cells[0]["per_second"]),
        "cells": cells,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--data-root", type=Path, help="folder that holds intel/; THALWEG_DATA by default")
    add("--networks", nargs="+", choices=sorted(NETWORKS), default=sorted(NETWORKS))
    add("--batch", type=int, default=0, help="images in a batch; 64 on the CPU, 128 and 512 on a GPU by default")
    add("--images", type=int, default=0, help="use so many training images only; 4096 on the CPU by default")
    add("--workers", type=int, nargs="+", help="processes of the plain side's DataLoader; none, and one a core")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch threads of each side")
    add("--rounds", type=int, default=5, help="repeats of each measurement")
    add("--quick", action="store_true", help="256 images, one round")
    add("--write", action="store_true", help="write benchmarks/results/images-cpu.json and .md, or -gpu")
    args = parser.parse_args()
    args.workers = args.workers or sorted({0, os.cpu_count() or 1})
    args.images = args.images or (4096 if args.device == "cpu" else 0)
    if args.quick:
        args.images, args.rounds = 256, 1
    if args.rounds < 1 or args.threads < 1 or args.batch < 0 or args.images < 0 or min(args.workers) < 0:
        parser.error("--rounds and --threads must be at least 1, --batch, --images and --workers at least 0")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            facts = gather(args, Path(folder))
    except WrongAnswerError as error:
        sys.exit(f"wrong answer, nothing is reported: {error}")
    except ThalwegError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted, nothing is reported")
    text = images_report.markdown(facts)
    print("\n" + text)
    if args.write:
        write_results(f"images-{facts['place']}", facts, text)


if __name__ == "__main__":
    main()
