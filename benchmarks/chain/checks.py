"""Nothing is timed that is wrong: every side against Thalweg, in float64 and then at full size.

1. In float64, on two chains of at most 128 positions and of different lengths: values within 1e-9 of each other
   (relative), gradients within 1e-9 (relative to the largest entry, or to 1), the same labels. A side that
   computes in float32 only must find labels that score the same up to the rounding of float32.
2. At full size in float32, against Thalweg in float64: values and the scores of labels within 1e-5 (relative);
   gradients within eight roundings of the largest log-partition. Sums of logarithms in float32 cannot promise more:
   at log Z = 80,000 a rounding is 0.008. The differences found are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain.peers import Peer
from benchmarks.chain.problem import Gradients, Problem, Size
from benchmarks.chain.sides import Ours, chain_of
from benchmarks.harness.declaration import demand
from benchmarks.harness.timing import Job, first_call

EXACT, VALUE, ROUNDINGS = 1e-9, 1e-5, 8
ROUNDING = torch.finfo(torch.float32).eps


def jobs_for(kind: str, problem: Problem, peers: Sequence[Peer]) -> list[Job]:
    """Thalweg's jobs first."""
    sides: list[Any] = [Ours(), *peers]
    return [job for side in sides for job in (side.nll(problem) if kind == "nll" else side.decode(problem))]


def deviation(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Of the value (relative) and of the gradients (relative to the largest entry of each, at least 1)."""
    value, *gradients = (
        float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in zip(found, expected, strict=True)
    )
    return {"value": value, "gradients": max(gradients)}


def check_exact(kind: str, size: Size, peers: Sequence[Peer], device: str) -> None:
    """The first check of the module's docstring."""
    _, T, C = size
    problem = Problem.random((2, min(T, 128), C), device=device, ragged=True).double()
    expected: Any = None
    for job in jobs_for(kind, problem, peers):
        cell, answer = first_call(job, device)
        if cell.note:
            continue  # too large even for two chains; the full size says so in the table
        expected = answer if expected is None else expected
        if kind == "nll":
            for what, worst in deviation(answer, expected).items():
                demand(f"{job.name}, {what} in float64", worst, EXACT)
        elif job.single:
            check_labels(job.name, problem, answer, problem.path_scores(expected))
        else:
            demand(f"{job.name}, labels in float64", float((answer != expected).sum()), 0.0)


def check_labels(name: str, problem: Problem, labels: Tensor, best: Tensor) -> float:
    """Labels inside the range that score as the best do; the largest shortfall, relative."""
    inside = problem.mask.cpu()
    outside = ((labels < 0) | (labels >= problem.size[2])) & inside
    demand(f"{name}, labels out of range", float(outside.sum()), 0.0)
    shortfall = float(((best - problem.path_scores(labels)).abs() / best.abs().clamp(min=1.0)).max())
    demand(f"{name}, score of the labels", shortfall, VALUE)
    return shortfall


def check_full(kind: str, problem: Problem, answers: dict[str, Any], device: str) -> dict[str, Any]:
    """The second check, of the answers by name; the differences by name."""
    double = problem.double()
    _, expected = first_call(jobs_for(kind, double, [])[0], device)
    largest = float(chain_of(double).log_partition.max())
    limits = {"value": VALUE, "gradients": ROUNDINGS * ROUNDING * max(1.0, abs(largest))}
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        if kind == "nll":
            found[name] = deviation(answer, expected)
            for what, worst in found[name].items():
                demand(f"{name}, {what} in float32", worst, limits[what])
        else:
            shortfall = check_labels(name, problem, answer, problem.path_scores(expected))
            found[name] = {"shortfall": shortfall, "same_labels": float((answer == expected).double().mean())}
    return found
