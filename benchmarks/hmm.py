"""Fitting of hidden Markov models by EM beside hmmlearn: same data, same start, same machine, one run.

    python benchmarks/hmm.py --write                    results/hmm-cpu.json and .md
    python benchmarks/hmm.py --device cuda --write      ours on a GPU, hmmlearn on the CPU of the same machine: hmm-gpu
    python benchmarks/hmm.py --quick                    tiny sizes, to see that it runs

Needs hmmlearn in this Python's environment. Before anything is timed the log-likelihoods of every iteration must agree
to 1e-9 in float64 and to 1e-5 in float32; a difference ends the run. hmmlearn calculates in float64, by default in
logarithms (``log``); its other implementation (``scaling``) is timed as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Spread, WrongAnswerError, machine, write_results
from hmmlearn import hmm as peer

import thalweg
from thalweg.energies import HMM, CategoricalEmission, GaussianEmission

STEPS = 5
PEERS = ("log", "scaling")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
Case = tuple[str, int, int, int, int]  # kind, states, sequences, length, dimensions (or symbols)
CASES: list[Case] = [
    ("diag", 16, 200, 500, 8),
    ("full", 16, 200, 500, 8),
    ("categorical", 16, 200, 500, 50),
    ("diag", 4, 1, 20_000, 2),
]
TINY: list[Case] = [("diag", 3, 4, 20, 2), ("full", 3, 4, 20, 2), ("categorical", 3, 4, 20, 5)]


class Problem:
    """Data drawn from a model, and another to start from."""

    def __init__(self, case: Case):
        self.kind, self.C, self.B, self.T, self.D = case
        rng = np.random.default_rng(0)
        C, D = self.C, self.D
        self.initial, self.transition = rng.dirichlet(np.ones(C)), rng.dirichlet(np.ones(C), size=C)
        self.means = rng.normal(size=(C, D)) * 2
        self.table = rng.dirichlet(np.ones(D), size=C)
        spread = {"diag": np.ones((C, D)), "full": np.tile(np.eye(D), (C, 1, 1))}
        self.spread = spread.get(self.kind)
        truth = HMM(torch.tensor(self.initial), torch.tensor(self.transition), self.emission(torch.float64))
        drawn = truth.sample(self.T, self.B, generator=torch.Generator().manual_seed(0))[1]
        self.x = drawn.numpy()
        self.means = self.means + rng.normal(size=(C, D))  # the start lies elsewhere
        self.table = rng.dirichlet(np.ones(D), size=C)

    def emission(self, dtype: torch.dtype) -> CategoricalEmission | GaussianEmission:
        """What the states emit, with the present parameters."""
        if self.spread is None:
            return CategoricalEmission(torch.tensor(self.table, dtype=dtype))
        means, spread = (torch.tensor(v, dtype=dtype) for v in (self.means, self.spread))
        return GaussianEmission(means, spread, "full" if self.kind == "full" else "diag")

    def ours(self, dtype: torch.dtype, device: str) -> Callable[[], list[float]]:
        """A fit from the start, which gives the log-likelihood of each iteration."""
        start = [torch.tensor(v, dtype=dtype) for v in (self.initial, self.transition)]
        x = torch.tensor(self.x, device=device)
        x = x.to(dtype) if x.is_floating_point() else x

        def run() -> list[float]:
            model = HMM(*start, self.emission(dtype), max_iter=STEPS, tol=-float("inf"))
            return model.fit(x).history_

        return run

    def theirs(self, implementation: str) -> Callable[[], list[float]]:
        """The same by hmmlearn, without its priors."""
        x: Any = self.x.reshape(self.B * self.T, -1)
        settings: dict[str, Any] = {
            "n_iter": STEPS,
            "tol": -np.inf,
            "init_params": "",
            "implementation": implementation,
        }

        def run() -> list[float]:
            if self.spread is None:
                model = peer.CategoricalHMM(self.C, n_features=self.D, **settings)
                model.emissionprob_ = self.table
            else:
                model = peer.GaussianHMM(self.C, self.kind, covars_prior=0.0, **settings)
                model.means_, model.covars_ = self.means, self.spread
            model.startprob_, model.transmat_ = self.initial, self.transition
            model.fit(x, [self.T] * self.B)
            return list(model.monitor_.history)

        return run


def timed(run: Callable[[], object]) -> float:
    """Seconds; a history of numbers is on the host, so nothing is left to wait for."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Check, then time in turn, one kind of model at one size."""
    problem = Problem(case)
    runs = {str(dtype).removeprefix("torch."): problem.ours(dtype, args.device) for dtype in TOLERANCE}
    peers = {f"hmmlearn {name}": problem.theirs(name) for name in PEERS}
    expected = np.array(peers["hmmlearn scaling"]())
    apart = {}
    for (name, run), bound in zip(runs.items(), TOLERANCE.values(), strict=True):
        apart[name] = float(np.max(np.abs(np.array(run()) / expected - 1)))
        if not apart[name] <= bound:
            raise WrongAnswerError(f"{case}: log-likelihoods in {name} must agree to {bound:g}, got {apart[name]:g}")
    walls: dict[str, list[float]] = {name: [] for name in (*runs, *peers)}
    for round_ in range(args.rounds):
        for name, run in runs.items():
            walls[name].append(timed(run))
        if round_ < args.peer_rounds:
            for name, run in peers.items():
                walls[name].append(timed(run))
    spreads = {name: Spread.of(wall) for name, wall in walls.items()}
    cell = {
        "case": dict(zip(("kind", "states", "sequences", "length", "dimensions"), case, strict=True)),
        "seconds": {name: each.to_json() for name, each in spreads.items()},
        "ratio": {name: {other: spreads[other].over(spreads[name]) for other in peers} for name in runs},
        "difference": apart,
    }
    said = ", ".join(f"{name} {each.median:.4f} s" for name, each in spreads.items())
    print(f"  {case}: {said}", flush=True)
    return cell


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Every kind of model."""
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    versions = {name: importlib.metadata.version(name) for name in ("hmmlearn", "torch")}
    versions |= {"thalweg": thalweg.__version__, "python": platform.python_version()}
    return {
        "machine": here,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "peer_rounds": args.peer_rounds,
        "iterations": STEPS,
        "versions": versions,
        "cells": [compare(case, args) for case in (TINY if args.quick else CASES)],
    }


def markdown(facts: dict[str, Any]) -> str:
    """The table for people."""
    versions = facts["versions"]
    worst = max(cell["difference"]["float64"] for cell in facts["cells"])
    beside = f" (on {facts['machine']['cpu']})" if facts["device"] == "cuda" else ""
    lines = [
        f"# Fitting hidden Markov models on {facts['machine']['title']}",
        "",
        f"Seconds for {facts['iterations']} iterations of EM from the same start, median [quartiles] of "
        f"{facts['rounds']} rounds ({facts['peer_rounds']} of hmmlearn); Thalweg {versions['thalweg']} beside hmmlearn "
        f"{versions['hmmlearn']}{beside}, torch {versions['torch']}, {facts['threads']} threads. The log-likelihoods "
        f"of every iteration agree to {worst:.0e} in float64.",
        "",
        "| emissions | states | sequences | length | D, V | float32 | float64 | hmmlearn log | hmmlearn scaling "
        "| times faster than log: float32 | float64 | than scaling: float32 | float64 |",
        "|---|" + "--:|" * 12,
    ]
    for cell in facts["cells"]:
        times = [f"{s['median']:.4f} [{s['low']:.4f}, {s['high']:.4f}]" for s in cell["seconds"].values()]
        times = [times[1], times[0], *times[2:]]  # float32 first
        ratios = [
            f"{cell['ratio'][name][f'hmmlearn {other}']['median']:.1f}"
            for other in PEERS
            for name in ("float32", "float64")
        ]
        lines.append("| " + " | ".join([*(f"{v}" for v in cell["case"].values()), *times, *ratios]) + " |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which the sides take turns")
    parser.add_argument("--peer-rounds", type=int, default=3, help="those in which hmmlearn takes part")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--write", action="store_true", help="write results/hmm-cpu or -gpu, .json and .md")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds = args.peer_rounds = 2
    try:
        facts = gather(args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer: {error}")
    table = markdown(facts)
    print(table)
    if args.write and not args.quick:
        write_results(f"hmm-{'gpu' if args.device == 'cuda' else 'cpu'}", facts, table)


if __name__ == "__main__":
    main()
