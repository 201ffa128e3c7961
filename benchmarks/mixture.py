"""EM for mixtures of Gaussians beside scikit-learn: same points, same start, same number of steps, one run.

    python benchmarks/mixture.py --write                  results/mixture-cpu.json and .md
    python benchmarks/mixture.py --device cuda --write    ours on a GPU beside scikit-learn on the CPU, mixture-gpu
    python benchmarks/mixture.py --quick                  tiny sizes, to see that it runs

Both sides begin with the same weights, means and covariances in float64 and take the same number of steps. Their means,
covariances and likelihoods must agree to 1e-6 before a time counts; a difference ends the run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from common import Spread, WrongAnswerError, machine, write_results
from threadpoolctl import threadpool_limits

import thalweg
from thalweg.energies import GaussianMixture

SIZES = {"full": (100_000, 32, 64), "diagonal": (100_000, 32, 64)}
TINY = {"full": (2_000, 4, 3), "diagonal": (2_000, 4, 3)}
STEPS = 5
TOLERANCE = 1e-6


def points_of(B: int, D: int, N: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Points from N Gaussians with correlated features, and a start: even weights, means near the true ones."""
    rng = np.random.default_rng(0)
    centres, mixing = 3 * rng.normal(size=(N, D)), rng.normal(size=(N, D, D)) / np.sqrt(D)
    which = rng.integers(N, size=B)
    noise = rng.normal(size=(B, D))
    points = np.empty((B, D))
    for k in range(N):
        points[which == k] = centres[k] + noise[which == k] @ mixing[k] + 0.3 * noise[which == k]
    return points, {"weights": np.full(N, 1 / N), "means": centres + rng.normal(size=(N, D))}


def ours(points: np.ndarray | torch.Tensor, start: dict[str, np.ndarray], shape: str) -> tuple[float, GaussianMixture]:
    """Seconds of the steps, and the model."""
    N, D = start["means"].shape
    covariances = np.stack([np.eye(D)] * N) if shape == "full" else np.ones((N, D))
    settings: dict[str, Any] = {"max_iter": STEPS, "tol": 0.0, "floor": 1e-12}
    model = GaussianMixture(N, shape, **start, covariances=covariances, **settings)
    begun = time.perf_counter()
    model.fit(points)  # the last step's likelihood is read, so a GPU has done its work
    return time.perf_counter() - begun, model


def theirs(points: np.ndarray, start: dict[str, np.ndarray], shape: str) -> tuple[float, Any]:
    """The same by scikit-learn."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture as Peer

    N, D = start["means"].shape
    precisions = np.stack([np.eye(D)] * N) if shape == "full" else np.ones((N, D))
    model = Peer(
        N, covariance_type="full" if shape == "full" else "diag", reg_covar=0.0, max_iter=STEPS, tol=0.0,
        weights_init=start["weights"], means_init=start["means"], precisions_init=precisions,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        begun = time.perf_counter()
        model.fit(points)
        return time.perf_counter() - begun, model


def check(shape: str, points: np.ndarray, mine: GaussianMixture, other: Any) -> float:
    """The largest difference between the two models; raises where too large."""
    some = points[:1000]
    pairs = {
        "means": (mine.means_.detach().cpu().numpy(), other.means_),
        "covariances": (mine.covariances_.detach().cpu().numpy(), other.covariances_),
        "log-likelihoods": (mine.score_samples(some), other.score_samples(some)),
    }
    worst = 0.0
    for what, (one, two) in pairs.items():
        apart = float((np.abs(one - two) / (1 + np.abs(two))).max())
        if not apart <= TOLERANCE:
            raise WrongAnswerError(f"{shape}: the {what} must agree to {TOLERANCE:g}, got {apart:g}")
        worst = max(worst, apart)
    return worst


def compare(shape: str, size: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Check, then time in turn."""
    points, start = points_of(*size)
    given = torch.from_numpy(points).cuda() if args.device == "cuda" else points
    walls: tuple[list[float], list[float]] = ([], [])
    difference = 0.0
    ours(given, start, shape)  # libraries and kernels are loaded once
    for _ in range(args.rounds):
        (first, mine), (second, other) = ours(given, start, shape), theirs(points, start, shape)
        difference = max(difference, check(shape, points, mine, other))
        walls[0].append(first)
        walls[1].append(second)
    one, two = (Spread.of(wall) for wall in walls)
    faster = two.over(one)
    print(f"  {shape:<9} {one.median:8.3f} s, scikit-learn {two.median:8.3f} s: {faster['median']:6.1f}x", flush=True)
    return {
        "covariances": shape, "size": list(size), "s": one.to_json(), "scikit_learn_s": two.to_json(),
        "ratio": faster, "difference": difference,
    }  # fmt: skip


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Full and diagonal covariances."""
    here = machine()
    title = f"{here['cpu']} ({args.threads} threads)"
    here["title"] = f"{torch.cuda.get_device_name()}, scikit-learn on {title}" if args.device == "cuda" else title
    versions = {name: importlib.metadata.version(name) for name in ("scikit-learn", "torch", "numpy")}
    versions |= {"thalweg": thalweg.__version__, "python": platform.python_version()}
    with threadpool_limits(args.threads):
        cells = [compare(shape, size, args) for shape, size in (TINY if args.quick else SIZES).items()]
    return {"machine": here, "device": args.device, "threads": args.threads, "steps": STEPS, "rounds": args.rounds,
            "versions": versions, "cells": cells}  # fmt: skip


def markdown(facts: dict[str, Any]) -> str:
    """The table for people."""
    versions, worst = facts["versions"], max(cell["difference"] for cell in facts["cells"])
    lines = [
        f"# Mixtures of Gaussians on {facts['machine']['title']}",
        "",
        f"{facts['steps']} steps of EM from the same start in float64, seconds, median [quartiles] "
        f"of {facts['rounds']} rounds; Thalweg {versions['thalweg']} beside scikit-learn {versions['scikit-learn']}, "
        f"torch {versions['torch']}. Means, covariances and likelihoods agree to {worst:.0e}.",
        "",
        "| covariances | points | D | components | Thalweg | scikit-learn | times faster |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in facts["cells"]:
        B, D, N = cell["size"]
        one, two = (f"{s['median']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in (cell["s"], cell["scikit_learn_s"]))
        faster = cell["ratio"]["median"]
        lines.append(f"| {cell['covariances']} | {B:,} | {D} | {N} | {one} | {two} | {faster:.1f} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the sides take turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--write", action="store_true", help="write results/mixture-cpu or -gpu, .json and .md")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
    args = arguments()
    torch.set_num_threads(args.threads)
    try:
        facts = gather(args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer: {error}")
    table = markdown(facts)
    print(table)
    if args.write and not args.quick:
        write_results(f"mixture-{'gpu' if args.device == 'cuda' else 'cpu'}", facts, table)


if __name__ == "__main__":
    main()
