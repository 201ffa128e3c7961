"""How time grows with the batch and with the length, and what the other quantities and sparse transitions cost.

python benchmarks/chain_growth.py benchmarks/results/chain-gpu.json     draws the figure of an earlier run
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from chain_sides import Job, Ours, Problem, Size, chain_of
from chain_timing import Cell, alternate, first_call, quick_spread, release
from common import WrongAnswerError

from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
TITLES = {"nll": "likelihood and gradient", "viterbi": "Viterbi"}
# Slate and teal, as the pages of the documentation.
COLOURS = {"nll": "#00796b", "viterbi": "#455a64"}
BAND = 3
SPARSE_TOLERANCE = 1e-4
NEAR = 0.15
"""A slope further than this from 1 is pointed out."""


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


def growth(device: str, *, rounds: int, quick: bool) -> dict[str, Any]:
    """Against B with T fixed and against T with B fixed, at 32 labels."""
    if quick:
        batches, lengths, fixed = [2, 4], [8, 16], (2, 8)
    elif device == "cuda":
        batches, lengths, fixed = [2**n for n in range(5, 15)], [2**n for n in range(6, 15)], (64, 128)
    else:
        batches, lengths, fixed = [2**n for n in range(1, 11)], [2**n for n in range(5, 14)], (16, 128)
    labels = 32
    return {
        "B": grow({B: (B, fixed[1], labels) for B in batches}, device=device, rounds=rounds),
        "T": grow({T: (fixed[0], T, labels) for T in lengths}, device=device, rounds=rounds),
    }


def draw(facts: dict[str, Any], path: Path, *, title: str) -> bool:
    """The two log-log charts as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", dpi=150)
    for axes, grown in zip(figure.subplots(1, 2, sharey=True), ("B", "T"), strict=True):
        part = facts[grown]
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
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return True


def quantities(size: Size, *, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of each quantity from a fresh distribution, and their ratio to log Z with its gradient."""
    problem = Problem.random(size, device=device)
    leaves = problem.leaves()

    def log_z_and_gradient() -> Any:
        emissions, transitions, start, end = leaves
        total = LinearChain(emissions, transitions, start=start, end=end).log_partition.sum()
        return torch.autograd.grad(total, leaves)

    wanted: dict[str, Callable[[], Any]] = {
        "log_partition and gradient": log_z_and_gradient,
        "log_partition alone": lambda: chain_of(problem).log_partition,
        "marginals": lambda: chain_of(problem).marginals,
        "edge_marginals": lambda: chain_of(problem).edge_marginals,
        "mode": lambda: chain_of(problem).mode,
        "top_k(5)": lambda: chain_of(problem).top_k(5),
        "sample((10,))": lambda: chain_of(problem).sample(torch.Size([10])),
        "entropy()": lambda: chain_of(problem).entropy(),
    }
    jobs = [Job(name, run, lambda raw: raw, compiles=True) for name, run in wanted.items()]
    cells: dict[str, Cell] = {job.name: first_call(job, device)[0] for job in jobs}
    alternate(jobs, cells, device=device, rounds=rounds, budget=30.0)
    base = cells["log_partition and gradient"].wall
    assert base
    rows: dict[str, Any] = {}
    for name, cell in cells.items():
        rows[name] = cell.to_json() | ({"relative": cell.wall.median / base.median} if cell.wall else {})
    return {"size": list(size), "rows": rows}


def sparse(size: Size, *, device: str, rounds: int) -> dict[str, Any]:
    """A band of three diagonals beside the same transitions as a dense matrix, checked equal first."""
    B, T, C = size
    problem = Problem.random(size, device=device)
    random = torch.Generator().manual_seed(1)
    diagonals = torch.randn(C, BAND, generator=random).to(device)
    band = SparseTransitions.banded(diagonals, lower=BAND // 2)
    emissions = problem.emissions.clone().requires_grad_()
    scores, matrix = band.scores.clone().requires_grad_(), band.dense().requires_grad_()
    # A gold path inside the band: it stays where it is.
    gold = problem.gold[:, :1].expand(B, T).contiguous()

    def nll(moves: Any, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = -LinearChain(emissions, moves).log_prob(gold).sum()
        return loss, *torch.autograd.grad(loss, [emissions, leaf])

    def mode(moves: Any) -> torch.Tensor:
        return LinearChain(problem.emissions, moves).mode

    moves = band._replace(scores=scores)
    runs: dict[str, Callable[[], Any]] = {
        "nll/sparse": lambda: nll(moves, scores),
        "nll/dense": lambda: nll(matrix, matrix),
        "viterbi/sparse": lambda: mode(band),
        "viterbi/dense": lambda: mode(matrix.detach()),
    }
    jobs = [Job(name, run, lambda raw: raw, compiles=True) for name, run in runs.items()]
    firsts = {job.name: first_call(job, device) for job in jobs}
    cells = {name: cell for name, (cell, _) in firsts.items()}
    answers = {name: answer for name, (_, answer) in firsts.items()}
    if not any(cell.note for cell in cells.values()):
        zeros = torch.zeros(C, device=device)
        same = replace(problem, transitions=matrix.detach(), start=zeros, end=zeros)
        check_sparse(answers, band, same)
    alternate(jobs, cells, device=device, rounds=rounds, budget=30.0)
    rows = {name: cell.to_json() for name, cell in cells.items()}
    walls = {kind: (cells[f"{kind}/dense"].wall, cells[f"{kind}/sparse"].wall) for kind in TITLES}
    ratios = {kind: dense.over(thin) for kind, (dense, thin) in walls.items() if dense and thin}
    return {"size": list(size), "band": BAND, "rows": rows, "ratios": ratios}


def check_sparse(answers: dict[str, Any], band: SparseTransitions, problem: Problem) -> None:
    """The same likelihood and gradients, and labels of the same score, from both."""
    thin, dense = answers["nll/sparse"], answers["nll/dense"]
    pairs = [
        ("negative log-likelihood", thin[0] / dense[0], torch.ones_like(thin[0])),
        ("gradient of the emissions", thin[1], dense[1]),
        ("gradient of the transitions", thin[2], dense[2][band.sources, band.targets]),
    ]
    for name, a, b in pairs:
        a, b = a.detach(), b.detach()
        worst = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
        if not worst <= SPARSE_TOLERANCE:
            raise WrongAnswerError(f"sparse transitions, {name}: expected that of the dense, got {worst:.2g} beside it")
    # Labels may differ where two paths are equal up to rounding, their scores may not.
    found, expected = (problem.path_scores(answers[f"viterbi/{name}"]) for name in ("sparse", "dense"))
    if bool(((found - expected).abs() > SPARSE_TOLERANCE * expected.abs()).any()):
        raise WrongAnswerError("sparse transitions: expected best labels that score as those of the dense, got others")


def main() -> None:
    source = Path(sys.argv[1])
    facts = json.loads(source.read_text(encoding="utf-8"))
    path = IMAGES / f"chain-growth-{facts['place']}.png"
    if not draw(facts["growth"], path, title=facts["machine"]["title"]):
        sys.exit("the figure needs matplotlib: pip install matplotlib")
    print(path)


if __name__ == "__main__":
    main()
