"""Sparse maps and their losses beside entmax 1.3: same scores, same machine, one run, forward and backward.

    python -m benchmarks sparse_maps --write                  on this CPU
    python -m benchmarks sparse_maps --device cuda --write    on a GPU

Needs entmax==1.3 in this Python's environment. Values and gradients of both sides must agree to 1e-6 before anything is
timed; a difference ends the run. In float64 the two must agree at every size, and the float32 results that are timed
must lie as near to Thalweg's in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run, demand
from benchmarks.harness.timing import Job
from thalweg.layers import sparse

SIZES = [(32, 10), (256, 100), (4096, 50), (64, 1000), (512, 10_000), (1, 100_000)]
TINY = [(4, 5), (2, 700)]
TOLERANCE = 1e-6
OURS, PEER = "Thalweg", "entmax"

Function = Callable[[Tensor, Tensor], Tensor]  # of scores and gold; maps look at scores alone


def pairs(run: Run) -> dict[str, tuple[Function, Function]]:
    """Ours and the peer's by name."""
    try:
        import entmax as peer
    except ImportError:
        raise NothingToCompareError(
            "entmax is not installed, nothing is measured; run: pip install entmax==1.3"
        ) from None
    plain: dict[str, Any] = {"reduction": "none"}
    losses = peer.SparsemaxLoss(**plain), peer.Entmax15Loss(k=None, **plain)
    return {
        "sparsemax": (lambda s, _: sparse.sparsemax(s), lambda s, _: peer.sparsemax(s, dim=-1)),
        "entmax15": (lambda s, _: sparse.entmax15(s), lambda s, _: peer.entmax15(s, dim=-1)),
        "entmax 1.3": (lambda s, _: sparse.entmax(s, 1.3), lambda s, _: peer.entmax_bisect(s, alpha=1.3, dim=-1)),
        "sparsemax_loss": (sparse.sparsemax_loss, losses[0]),
        "entmax15_loss": (sparse.entmax15_loss, losses[1]),
    }


def step(f: Function, scores: Tensor, gold: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """A value and its gradient in the scores, weighted by ``grad``."""
    value = f(scores, gold)
    return value.detach(), torch.autograd.grad(value, scores, torch.ones_like(value) if grad is None else grad)[0]


def compare(run: Run, name: str, size: tuple[int, int]) -> Facts:
    """One map at one size: both sides in float64, ours in float32 beside that, then in turn."""
    print(f" {name} (B, N) = {size}", flush=True)
    draw = torch.Generator().manual_seed(sum(size))
    scores = torch.randn(size, generator=draw).to(run.args.device).requires_grad_()
    gold = torch.randint(size[1], size[:1], generator=draw).to(run.args.device)
    grad = None if name.endswith("loss") else torch.randn(size, generator=draw).to(run.args.device)
    ours, theirs = run.shared[name]

    def check(answers: dict[str, tuple[Tensor, Tensor]]) -> float:
        wide, weight = scores.detach().double().requires_grad_(), None if grad is None else grad.double()
        exact, peer = (step(f, wide, gold, weight) for f in (ours, theirs))
        worst = 0.0
        for what, a, b, c in zip(("value", "gradient"), exact, peer, answers[OURS], strict=True):
            apart, rounded = (a - b).abs().max().item(), ((c - a).abs() / (1 + a.abs())).max().item()
            demand(f"{name} {size}, {what} beside entmax in float64", apart, TOLERANCE)
            demand(f"{name} {size}, {what} in float32", rounded, TOLERANCE)
            worst = max(worst, apart, rounded)
        return worst

    sides = {OURS: ours, PEER: theirs}
    jobs = [Job(side, lambda f=f: step(f, scores, gold, grad), compiles=True) for side, f in sides.items()]
    compared = run.compare(jobs, check=check, over=lambda side: (PEER, OURS) if side == PEER else None)
    return {
        "map": name,
        "size": list(size),
        "ms": compared.ms[OURS],
        "entmax_ms": compared.ms[PEER],
        "ratio": compared.ratios[PEER],
        "difference": compared.checked,
    }


def cells(run: Run) -> Facts:
    """Every map at every size."""
    sizes = TINY if run.args.quick else SIZES
    return {"cells": [compare(run, name, size) for size in sizes for name in run.shared]}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    versions, worst = facts["versions"], max(cell["difference"] for cell in facts["cells"])
    lines = [
        f"# Sparse maps on {facts['machine']['title']}",
        "",
        f"Forward and backward in float32, milliseconds a call, median [quartiles] of {facts['rounds']} rounds; "
        f"Thalweg {versions['thalweg']} beside entmax {versions['entmax']}, torch {versions['torch']}, "
        f"{facts['threads']} threads. Values and gradients agree to {worst:.0e}.",
        "",
        "| map | B | N | Thalweg | entmax | times faster |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for cell in facts["cells"]:
        B, N = cell["size"]
        ours, theirs = (f"{s['median']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in (cell["ms"], cell["entmax_ms"]))
        lines.append(f"| {cell['map']} | {B:,} | {N:,} | {ours} | {theirs} | {cell['ratio']['median']:.1f} |")
    return lines


BENCHMARK = Benchmark(parts={"cells": cells}, begin=pairs, report=report, packages=("entmax",))
