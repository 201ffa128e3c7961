"""Calls among a million patterns: milliseconds, and memory above that of the patterns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.declaration import Facts, Run, WrongAnswerError
from benchmarks.harness.device import peak_extra, synchronise
from benchmarks.harness.process import alone
from benchmarks.harness.timing import Spread
from benchmarks.hopfield.sides import TOLERANCE, difference
from thalweg.kernels.memory import associate, nearest, settle

COUNT, WIDTH = 1_000_000, 64
ASKED = {"cpu": (1, 16, 256), "cuda": (1, 16, 1024)}


def calls_among(queries: torch.Tensor, patterns: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "associate": lambda: associate(queries, patterns, patterns, beta=1.0),
        "settle": lambda: settle(queries, patterns, beta=1.0, max_steps=20, tol=TOLERANCE),
        "nearest 10": lambda: nearest(queries, patterns, 10),
    }


def measure(count: int, asked: int, *, device: str, rounds: int) -> Facts:
    """One call of every kind."""
    torch.manual_seed(0)
    patterns = torch.randn(count, WIDTH, device=device)
    patterns *= (WIDTH**0.5 / torch.linalg.vector_norm(patterns, dim=1))[:, None]  # one length: none outshines others
    queries = patterns[:asked] + 0.5 * torch.randn(asked, WIDTH, device=device)
    # Kernels are compiled among few patterns on the CPU, so that the highest memory is that of the calls below.
    for call in calls_among(queries, patterns[:100] if device == "cpu" else patterns).values():
        call()
    facts: Facts = {"queries": asked, "patterns": count, "weights_bytes": 4 * asked * count}
    calls = calls_among(queries, patterns)
    for name, call in calls.items():
        walls: list[float] = []

        def timed(call: Callable[[], Any] = call, walls: list[float] = walls) -> None:
            for _ in range(max(3, rounds // 2)):
                began = time.perf_counter()
                call()
                synchronise(device)
                walls.append(1e3 * (time.perf_counter() - began))

        extra = peak_extra(timed, device)
        facts[name] = {"ms": Spread.of(walls).to_json(), "bytes": extra}
    if difference(calls["settle"]().state, patterns[:asked].cpu().double()) > 0.1:
        raise WrongAnswerError("a query did not come back to the pattern that it was made from")
    if calls["nearest 10"]()[1][:, 0].tolist() != list(range(asked)):
        raise WrongAnswerError("the nearest pattern is not the one that a query was made from")
    return facts


def million(run: Run) -> Facts:
    """On the CPU in a process for each number of queries, whose highest memory says what a call needed."""
    device, count = run.args.device, 5000 if run.args.quick else COUNT
    rows = []
    for asked in ASKED[device]:
        print(f" {count:,} patterns, {asked} queries", flush=True)
        given = {"count": count, "asked": asked, "device": device, "rounds": run.args.rounds}
        rows.append(measure(**given) if device == "cuda" else alone(measure, threads=run.args.threads, **given))
        for name in ("associate", "settle", "nearest 10"):
            found = rows[-1][name]
            print(f"  {name:<12} {found['ms']['median']:10.2f} ms, {found['bytes'] / 2**20:,.0f} MiB more", flush=True)
    return {"million": rows}
