"""EM for mixtures of Gaussians beside scikit-learn: same points, same start, same number of steps, one run.

    python -m benchmarks mixture --write                  on this CPU
    python -m benchmarks mixture --device cuda --write    ours on a GPU, scikit-learn on the CPU beside it

Both sides begin with the same weights, means and covariances in float64 and take the same number of steps. Their means,
covariances and log-likelihoods must agree to 1e-6 before anything is timed; a difference ends the run.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.energies import GaussianMixture

SHAPES = {"full": "full", "diagonal": "diag"}
"""Ours by the peer's names."""
SIZE, TINY = (100_000, 32, 64), (2_000, 4, 3)  # points, dimensions, components
STEPS = 5
TOLERANCE = 1e-6
OURS, PEER = "Thalweg", "scikit-learn"


def draw(B: int, D: int, N: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Points of N Gaussians with correlated features, and a start: even weights, means near the true ones."""
    rng = np.random.default_rng(0)
    centres, mixing = 3 * rng.normal(size=(N, D)), rng.normal(size=(N, D, D)) / np.sqrt(D)
    which, points = rng.integers(N, size=B), rng.normal(size=(B, D))
    for k in range(N):
        noise = points[which == k]
        points[which == k] = centres[k] + noise @ mixing[k] + 0.3 * noise
    return points, {"weights": np.full(N, 1 / N), "means": centres + rng.normal(size=(N, D))}


def ours(points: Any, start: dict[str, np.ndarray], spread: np.ndarray, shape: str) -> GaussianMixture:
    """The model after the steps; the last one's likelihood is read, so a GPU has done its work."""
    settings: dict[str, Any] = {"max_iter": STEPS, "tol": 0.0, "floor": 1e-12}
    return GaussianMixture(len(spread), shape, **start, covariances=spread, **settings).fit(points)


def theirs(peer: Any, points: np.ndarray, start: dict[str, np.ndarray], spread: np.ndarray, shape: str) -> Any:
    """The same by scikit-learn; the spread is that of unit variances, which are their own inverse."""
    given = {f"{name}_init": value for name, value in start.items()} | {"precisions_init": spread}
    settings = {"covariance_type": SHAPES[shape], "reg_covar": 0.0, "max_iter": STEPS, "tol": 0.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*did not converge")  # so few steps are meant
        return peer.GaussianMixture(len(spread), **given, **settings).fit(points)


def measure(shape: str, run: Run) -> Facts:
    """One shape of covariances: both sides in turn."""
    size = B, D, N = TINY if run.args.quick else SIZE
    points, start = draw(B, D, N)
    spread = np.tile(np.eye(D), (N, 1, 1)) if shape == "full" else np.ones((N, D))
    given = torch.from_numpy(points).to(run.args.device)

    def check(answers: dict[str, Any]) -> float:
        mine, other, some = answers[OURS], answers[PEER], points[:1000]
        pairs = {
            "means": (mine.means_.detach().cpu().numpy(), other.means_),
            "covariances": (mine.covariances_.detach().cpu().numpy(), other.covariances_),
            "log-likelihoods": (mine.score_samples(some), other.score_samples(some)),
        }
        apart = {what: float((np.abs(a - b) / (1 + np.abs(b))).max()) for what, (a, b) in pairs.items()}
        for what, worst in apart.items():
            demand(f"{shape}, {what} beside scikit-learn", worst, TOLERANCE)
        return max(apart.values())

    both = start, spread, shape
    jobs = [Job(OURS, lambda: ours(given, *both)), Job(PEER, lambda: theirs(run.shared, points, *both))]
    compared = run.compare(jobs, check=check, over=lambda name: (PEER, OURS) if name == OURS else None)
    return {shape: {"shape": shape, "size": list(size), "difference": compared.checked, **compared.to_json()}}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    cells = [facts[shape] for shape in SHAPES if shape in facts]
    where = f", scikit-learn on {facts['machine']['cpu']}" if facts["place"] == "gpu" else ""
    return [
        *heading(facts, f", float64{where}; every result is compared with scikit-learn's first"),
        f"## {STEPS} steps of EM for mixtures of Gaussians, ms",
        "",
        "Median and quartiles; in bold how many times faster than scikit-learn, whose `fit` ends with one more E-step, "
        f"for labels. Means, covariances and log-likelihoods agree to {max(cell['difference'] for cell in cells):.0e}.",
        "",
        *comparison(
            cells,
            ["covariances", "points", "dimensions", "components"],
            lambda cell: [cell["shape"], *(f"{count:,}" for count in cell["size"])],
        ),
    ]


PARTS = {shape: partial(measure, shape) for shape in SHAPES}
BENCHMARK = Benchmark(
    parts=PARTS,
    begin=lambda run: run.only_peer("sklearn.mixture", "scikit-learn"),
    report=report,
    budget=40.0,
    packages=("scikit-learn",),
)
