"""CTC and alignments beside torch's ctc_loss and torch-struct: same scores, same machine, one run, value and gradient.

    python -m benchmarks alignment --write                  on this CPU
    python -m benchmarks alignment --device cuda --write    on a GPU

torch-struct==0.5 and genbmm, which its alignments need, may lie in any folder of PYTHONPATH (genbmm compiled, for a
GPU); without them torch's loss is the only peer. Values and gradients must agree before anything is timed.
torch-struct is given items of full length: with `lengths` its sums are wrong, by how much is noted.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.machine import version_of
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.inference import CTC, Alignment

SHORT = [(1, 50, 10, 30), (1, 200, 40, 30), (8, 50, 10, 30)]
FRAMES = [*SHORT, (16, 150, 30, 40), (32, 500, 60, 80), (16, 800, 150, 500)]
GRIDS = [(8, 4, 4), (8, 5, 6), (64, 100, 100), (1, 2000, 2000)]
LARGEST = 30  # cells of a grid that torch-struct is asked for: it takes minutes beyond
TINY = {"frames": [(2, 12, 3, 5)], "grids": [(2, 4, 4)]}
OURS, TORCH, STRUCT = "Thalweg", "torch ctc_loss", "torch-struct"

Answer = tuple[Tensor, Tensor]


def peers(run: Run) -> Any:
    """torch-struct, if it is here."""
    needed = ["torch_struct", "genbmm", *["_genbmm"] * (run.args.device == "cuda")]  # compiled: else it has only Python
    try:
        torch_struct, *_ = map(import_module, needed)
    except ImportError as error:
        run.found({}, [f"torch-struct is left out: {error}; its alignments need torch-struct==0.5 and genbmm"])
        return None
    run.found({"torch-struct": version_of("torch-struct", torch_struct)}, [])
    return torch_struct


def gradient(value: Tensor, leaf: Tensor) -> Answer:
    """A sum and its gradient."""
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def spread(run: Run, size: tuple[int, int, int, int]) -> Facts:
    """CTC of one size: targets of half to all of U symbols in half to all of T frames."""
    B, T, U, C = size
    print(f" CTC (B, T, U, C) = {size}", flush=True)
    draw, device = torch.Generator().manual_seed(sum(size)), run.args.device
    logits = torch.randn(B, T, C, generator=draw)
    targets = torch.randint(1, C, (B, U), generator=draw)
    lengths = torch.randint(max(T // 2, min(T, 2 * U)), T + 1, (B,), generator=draw)
    counts = torch.randint((U + 1) // 2, U + 1, (B,), generator=draw)
    ours = logits.log_softmax(-1).to(device).requires_grad_()
    theirs = ours.detach().transpose(0, 1).contiguous().requires_grad_()
    there = targets.to(device)

    def of_ours(leaf: Tensor = ours) -> Answer:
        return gradient(-CTC(leaf, targets, lengths=lengths, target_lengths=counts).log_partition.sum(), leaf)

    def of_torch(leaf: Tensor = theirs) -> Answer:
        return gradient(ctc_loss(leaf, there, lengths, counts, reduction="sum"), leaf)

    def check(answers: dict[str, Answer]) -> float:
        """In float64, and behind a softmax, since torch gives the gradient that is right there alone."""
        wide = logits.double().to(device).requires_grad_()
        normal = wide.log_softmax(-1)
        one = gradient(-CTC(normal, targets, lengths=lengths, target_lengths=counts).log_partition.sum(), wide)
        normal = wide.log_softmax(-1).transpose(0, 1)
        two = gradient(ctc_loss(normal, there, lengths, counts, reduction="sum"), wide)
        apart = max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(one, two, strict=True))
        demand(f"CTC {size} in float64", apart, 1e-9)
        for name, (value, _) in answers.items():
            demand(f"CTC {size} of {name} in float32", ((value - one[0]).abs() / one[0].abs()).item(), 1e-5)
        return apart

    jobs = [Job(OURS, of_ours, compiles=True), Job(TORCH, of_torch)]
    compared = run.compare(jobs, check=check, over=lambda side: (TORCH, OURS) if side == TORCH else None)
    return {"size": list(size), "difference": compared.checked, **compared.to_json()}


def grid(run: Run, size: tuple[int, int, int]) -> Facts:
    """Edit lattices of one size, all items of full length."""
    B, rows, columns = size
    print(f" alignment (B, I, J) = {size}", flush=True)
    draw, device = torch.Generator().manual_seed(sum(size)), run.args.device
    scores = torch.randn(B, rows + 1, columns + 1, 3, generator=draw).to(device).requires_grad_()
    package = run.shared if rows * columns <= LARGEST else None

    def of_ours(leaf: Tensor = scores) -> Answer:
        return gradient(Alignment(leaf).log_partition.sum(), leaf)

    def of_struct(leaf: Tensor = scores) -> Answer:
        return gradient(struct_value(package, leaf).sum(), leaf)

    def check(answers: dict[str, Answer]) -> float:
        exact = of_ours(scores.detach().double().requires_grad_())
        worst = 0.0
        for name, answer in answers.items():
            for a, b in zip(answer, exact, strict=True):
                worst = max(worst, ((a - b).abs() / (1 + b.abs())).max().item())
            demand(f"alignment {size} of {name}", worst, 1e-4)
        return worst

    jobs = [Job(OURS, of_ours, compiles=True), *([Job(STRUCT, of_struct)] if package else [])]
    compared = run.compare(jobs, check=check, over=lambda side: (STRUCT, OURS) if side == STRUCT else None)
    return {"size": list(size), "difference": compared.checked, **compared.to_json()}


def struct_value(package: Any, scores: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Its grid has a cell for each of ours, moves into them in another order, and a first move into the first cell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turned = scores[..., [2, 0, 1]]
        return package.AlignmentCRF(turned, lengths=lengths).partition - turned[:, 0, 0, 1]


def wrong_lengths(package: Any) -> float:
    """How far torch-struct is from the exact sum where an item is shorter than the batch."""
    scores = torch.randn(2, 5, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    exact = Alignment(scores, lengths=[4, 2]).log_partition
    return (struct_value(package, scores, torch.tensor([5, 3])) - exact).abs().max().item()


def parts_ctc(run: Run) -> Facts:
    """Every size of CTC."""
    return {"ctc": [spread(run, size) for size in (TINY["frames"] if run.args.quick else FRAMES)]}


def parts_alignment(run: Run) -> Facts:
    """Every size of grid."""
    found: Facts = {"alignment": [grid(run, size) for size in (TINY["grids"] if run.args.quick else GRIDS)]}
    if run.shared:
        found["struct_with_lengths"] = wrong_lengths(run.shared)
    return found


def report(facts: Facts) -> list[str]:
    """The tables for people."""
    lines = [f"# CTC and alignments on {facts['machine']['title']}", "", *heading(facts)]
    lines += ["Value and gradient, float32, milliseconds a call: median [quartiles], and how often Thalweg's time.", ""]
    if "ctc" in facts:
        worst = max(cell["difference"] for cell in facts["ctc"])
        lines += ["## CTC: B items, T frames, U target symbols, C labels", ""]
        lines += comparison(facts["ctc"], ["B, T, U, C"], lambda cell: [", ".join(map(str, cell["size"]))])
        lines += [f"Values and gradients in float64 agree to {worst:.0e}.", ""]
    if "alignment" in facts:
        lines += ["## Edit lattices: B items, I by J symbols", ""]
        lines += comparison(facts["alignment"], ["B, I, J"], lambda cell: [", ".join(map(str, cell["size"]))])
    if "struct_with_lengths" in facts:
        slow = ": without a GPU, genbmm multiplies its matrices entry by entry in Python" * (facts["place"] == "cpu")
        lines += [
            "torch-struct agrees where every item has full length. With `lengths` its log Z is off by up to "
            f"{facts['struct_with_lengths']:.2g} on a batch of 4 x 4 and 2 x 4 symbols. Larger grids are not asked "
            f"of it{slow}.",
            "",
        ]
    return lines[:-1]


BENCHMARK = Benchmark(parts={"ctc": parts_ctc, "alignment": parts_alignment}, begin=peers, report=report, packages=())
