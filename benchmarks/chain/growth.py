"""How time grows with the batch and with the length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.chain.problem import Problem, Size
from benchmarks.chain.sides import Ours
from benchmarks.harness.declaration import Facts, Run
from benchmarks.harness.device import release
from benchmarks.harness.process import ROOT
from benchmarks.harness.timing import quick_spread

TITLES = {"nll": "likelihood and gradient", "viterbi": "Viterbi"}
# Slate and teal, as the pages of the documentation.
COLOURS = {"nll": "#00796b", "viterbi": "#455a64"}
NEAR = 0.15
"""A slope further than this from 1 is pointed out."""
LABELS = 32


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of a straight line through the logarithms by least squares: 1 where time is in proportion."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def grow(sizes: dict[int, Size], *, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds by what grows; the slope is that of the larger half, where fixed costs no longer hide it."""
    points: dict[str, list[tuple[int, float]]] = {kind: [] for kind in TITLES}
    for grown, size in sizes.items():
        problem, ours = Problem.random(size, device=device), Ours()
        for kind, job in (("nll", ours.nll(problem)[0]), ("viterbi", ours.decode(problem)[0])):
            points[kind].append((grown, quick_spread(job.run, device, rounds=rounds).median))
        print(f"  {size}: " + ", ".join(f"{kind} {points[kind][-1][1]:.3g} ms" for kind in TITLES), flush=True)
        release(device)
    slopes = {kind: slope(row[len(row) // 2 - (len(row) == 2) :]) for kind, row in points.items()}
    for kind, found in slopes.items():
        near = "" if abs(found - 1) <= NEAR else f", expected 1 up to {NEAR}"
        print(f"  slope of {TITLES[kind]} over the larger half: {found:.2f}{near}", flush=True)
    return {"ms": points, "slope_of_larger_half": slopes, "sizes": [list(size) for size in sizes.values()]}


def growth(run: Run) -> Facts:
    """Against B with T fixed and against T with B fixed, at 32 labels."""
    device, rounds = run.args.device, min(run.args.rounds, 5)
    if run.args.quick:
        batches, lengths, fixed = [2, 4], [8, 16], (2, 8)
    elif device == "cuda":
        batches, lengths, fixed = [2**n for n in range(5, 15)], [2**n for n in range(6, 15)], (64, 128)
    else:
        batches, lengths, fixed = [2**n for n in range(1, 11)], [2**n for n in range(5, 14)], (16, 128)
    by_batch = grow({B: (B, fixed[1], LABELS) for B in batches}, device=device, rounds=rounds)
    by_length = grow({T: (fixed[0], T, LABELS) for T in lengths}, device=device, rounds=rounds)
    return {"growth": {"B": by_batch, "T": by_length}}


def draw(facts: Facts) -> None:
    """The two log-log charts as ``docs/images/chain-growth-PLACE.png``."""
    if "growth" not in facts:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib here; draw the figure where it is: python -m benchmarks chain --render")
        return
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", dpi=150)
    for axes, grown in zip(figure.subplots(1, 2, sharey=True), ("B", "T"), strict=True):
        part = facts["growth"][grown]
        for kind, points in part["ms"].items():
            label = f"{TITLES[kind]}, slope {part['slope_of_larger_half'][kind]:.2f}"
            axes.loglog(*zip(*points, strict=True), "o-", color=COLOURS[kind], label=label, markersize=4)
        xs = [x for x, _ in part["ms"]["nll"]]
        last = part["ms"]["nll"][-1][1]
        axes.loglog(xs, [2.5 * last * x / xs[-1] for x in xs], ":", color="#9e9e9e", label="in proportion (slope 1)")
        B, T, C = part["sizes"][-1]
        fixed = f"T = {T}" if grown == "B" else f"B = {B}"
        axes.set_xlabel(f"{grown}   ({fixed}, C = {C})")
        axes.grid(color="#e0e0e0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("milliseconds")
    figure.suptitle(facts["machine"]["title"], fontsize=10)
    images = ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    figure.savefig(images / f"chain-growth-{facts['place']}.png", metadata={"Software": None})
