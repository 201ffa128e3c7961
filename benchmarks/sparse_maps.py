"""Sparse maps and their losses beside entmax 1.3: same scores, same machine, one run, forward and backward.

    python benchmarks/sparse_maps.py --write                  results/sparse-maps-cpu.json and .md
    python benchmarks/sparse_maps.py --device cuda --write    the same for a GPU, sparse-maps-gpu
    python benchmarks/sparse_maps.py --quick                  tiny sizes, to see that it runs

Needs entmax==1.3 in this Python's environment. Values and gradients of both sides must agree to 1e-6 before anything is
timed; a difference ends the run. In float64 the two must agree at every size, and the float32 results that are timed
must lie as near to Thalweg's in float64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Spread, WrongAnswerError, machine, write_results
from torch import Tensor

import thalweg
from thalweg.layers import sparse

SIZES = [(32, 10), (256, 100), (4096, 50), (64, 1000), (512, 10_000), (1, 100_000)]
TINY = [(4, 5), (2, 700)]
TOLERANCE = 1e-6
ENOUGH_SECONDS = 0.05
"""A round repeats a fast call until about this much time has passed."""

Function = Callable[[Tensor, Tensor], Tensor]  # of scores and gold; maps look at scores alone


def jobs() -> dict[str, tuple[Function, Function]]:
    """Ours and the peer's by name."""
    import entmax as peer

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


def check(name: str, pair: tuple[Function, Function], scores: Tensor, gold: Tensor, grad: Tensor | None) -> float:
    """The largest difference between the sides in float64, and of ours in float32 from that; raises where too large."""
    wide = scores.detach().double().requires_grad_()
    weight = None if grad is None else grad.double()
    ours, theirs = step(pair[0], wide, gold, weight), step(pair[1], wide, gold, weight)
    single = step(pair[0], scores, gold, grad)
    worst = 0.0
    for what, a, b, c in zip(("value", "gradient"), ours, theirs, single, strict=True):
        apart, rounded = (a - b).abs().max().item(), ((c - a).abs() / (1 + a.abs())).max().item()
        if not apart <= TOLERANCE or not rounded <= TOLERANCE:
            raise WrongAnswerError(
                f"{name} {tuple(scores.shape)}: the {what}s must agree to {TOLERANCE:g}, got {apart:g} from entmax in "
                f"float64 and {rounded:g} in float32"
            )
        worst = max(worst, apart, rounded)
    return worst


def round_of(call: Callable[[], object], device: str, calls: int) -> float:
    """Milliseconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def compare(
    name: str, pair: tuple[Function, Function], size: tuple[int, int], args: argparse.Namespace
) -> dict[str, Any]:
    """Check, then time in turn, one map at one size."""
    generator = torch.Generator().manual_seed(sum(size))
    scores = torch.randn(size, generator=generator).to(args.device).requires_grad_()
    gold = torch.randint(size[1], size[:1], generator=generator).to(args.device)
    grad = None if name.endswith("loss") else torch.randn(size, generator=generator).to(args.device)
    difference = check(name, pair, scores, gold, grad)
    calls = [lambda f=f: step(f, scores, gold, grad) for f in pair]
    many, walls = [], ([], [])
    for call in calls:
        round_of(call, args.device, 1)
        once = round_of(call, args.device, 2)
        many.append(max(1, int(1e3 * ENOUGH_SECONDS / max(once, 1e-3))))
    for _ in range(args.rounds):
        for wall, call, count in zip(walls, calls, many, strict=True):
            wall.append(round_of(call, args.device, count))
    ours, theirs = (Spread.of(wall) for wall in walls)
    faster = theirs.over(ours)
    print(f"  {name:<16} {ours.median:10.3f} ms, entmax {theirs.median:10.3f} ms: {faster['median']:7.1f}x", flush=True)
    return {
        "map": name,
        "size": list(size),
        "ms": ours.to_json(),
        "entmax_ms": theirs.to_json(),
        "ratio": faster,
        "difference": difference,
    }


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Every map at every size."""
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    versions = {name: importlib.metadata.version(name) for name in ("entmax", "torch")}
    versions |= {"thalweg": thalweg.__version__, "python": platform.python_version()}
    cells = []
    for size in TINY if args.quick else SIZES:
        print(f"(B, N) = {size}", flush=True)
        cells += [compare(name, pair, size, args) for name, pair in jobs().items()]
    return {
        "machine": here,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "versions": versions,
        "cells": cells,
    }


def markdown(facts: dict[str, Any]) -> str:
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
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which the sides take turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--write", action="store_true", help="write results/sparse-maps-cpu or -gpu, .json and .md")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds = 2
    try:
        facts = gather(args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer: {error}")
    table = markdown(facts)
    print(table)
    if args.write and not args.quick:
        write_results(f"sparse-maps-{'gpu' if args.device == 'cuda' else 'cpu'}", facts, table)


if __name__ == "__main__":
    main()
