"""Segmentations beside torch-struct 0.5: same scores, same machine, one run; likelihood with gradient, and the mode.

    python -m benchmarks semi_markov --write                  on this CPU
    python -m benchmarks semi_markov --device cuda --write    on a GPU

Needs torch-struct==0.5 in this Python's environment. Both sides begin with content (B, T, C), durations (K, C) and
transitions (C, C); torch-struct has to expand them to (B, T, K, C, C) and works on matrices of (K C)^2, so the larger
sizes are ours alone. Values, gradients and the scores of modes must agree before anything is timed. Where lengths
differ torch-struct's log Z is compared too, and what it is wrong by is told, not timed. Memory is ours alone.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run, demand
from benchmarks.harness.device import peak_extra
from benchmarks.harness.process import alone
from benchmarks.harness.timing import Job
from thalweg.inference import SemiMarkov

# B, T, K, C
SIZES = [(1, 32, 4, 4), (8, 64, 4, 4), (8, 64, 8, 4), (2, 64, 8, 8)]
LONG = [(1, 10_000, 100, 10), (1, 100_000, 100, 10), (1, 100_000, 600, 20), (1, 1_000_000, 100, 10)]
ALONE = [(8, 1000, 50, 20), (64, 200, 100, 10), (1, 10_000, 200, 20), (1, 100_000, 100, 10)]
TINY, TINY_ALONE = [(2, 6, 3, 2)], [(1, 40, 5, 3)]
TOLERANCE = 2e-5
OURS, PEER = "Thalweg", "torch-struct"
FORBIDDEN = -1e5  # of first labels, of which torch-struct sums over a label that is none

Scores = tuple[Tensor, Tensor, Tensor]


def peer(run: Run) -> ModuleType:
    """torch-struct, if it is here."""
    try:
        import torch_struct
    except ImportError:
        said = "torch-struct is not installed, nothing is measured; run: pip install torch-struct==0.5"
        raise NothingToCompareError(said) from None
    warnings.filterwarnings("ignore", message=".*arg_constraints.*")
    return torch_struct


def scores_of(device: str, size: tuple[int, ...]) -> Scores:
    """Content, durations and transitions, as leaves."""
    batch, steps, most, labels = size
    draw = torch.Generator().manual_seed(sum(size))
    found = [torch.randn(shape, generator=draw) for shape in ((batch, steps, labels), (most, labels), (labels, labels))]
    return tuple(x.to(device).requires_grad_() for x in found)  # type: ignore[return-value]


def expanded(scores: Scores) -> Tensor:
    """Potentials (B, T, K + 1, C, C) of torch-struct: ``[b, t, d, c, i]``, d positions of c from t on, after i."""
    content, durations, moves = scores
    batch, steps, labels = content.shape
    most = len(durations)
    sums = torch.cat((content.new_zeros(batch, 1, labels), content.cumsum(1)), 1)
    past = torch.arange(steps, device=content.device)[:, None] + torch.arange(most + 1, device=content.device)
    own = sums[:, past.clamp(max=steps)] - sums[:, :-1, None]  # (B, T, K + 1, C)
    own = own + torch.cat((torch.zeros_like(durations[:1]), durations))
    own = own.masked_fill((past > steps)[:, :, None], FORBIDDEN)
    after = moves.t().expand(steps, labels, labels).clone()
    after[0] = FORBIDDEN
    after[0, :, 0] = 0.0
    return own.unsqueeze(-1) + after[:, None]


def likelihood(side: str, package: ModuleType, scores: Scores) -> tuple[Tensor, ...]:
    """log Z and its gradient in all scores."""
    p = SemiMarkov(*scores) if side == OURS else package.SemiMarkovCRF(expanded(scores))
    values = p.log_partition if side == OURS else p.partition
    return values.detach(), *torch.autograd.grad(values.sum(), scores)


def mode(side: str, package: ModuleType, scores: Scores) -> Tensor:
    """The highest score (B,) of the segmentation that was found."""
    fixed: Any = tuple(x.detach() for x in scores)
    if side == OURS:
        return SemiMarkov(*fixed).max_score
    potentials = expanded(fixed)
    marks = package.SemiMarkovCRF(potentials).argmax
    return (marks.detach() * potentials.detach()).flatten(1).sum(1)


QUESTIONS = {"likelihood and gradient": likelihood, "mode": mode}


def apart(one: Any, two: Any) -> float:
    """The largest difference, relative where numbers are large."""
    pairs = zip(one, two, strict=True) if isinstance(one, tuple) else [(one, two)]
    return max(float(((a - b).abs() / (1 + a.abs())).max()) for a, b in pairs)


def charts(size: tuple[int, ...]) -> float:
    """Gigabytes of the first chart of torch-struct, (B, T, K C, K C) in float32."""
    batch, steps, most, labels = size
    return 4e-9 * batch * 2 ** (steps - 1).bit_length() * (most * labels) ** 2


def compare(run: Run, question: str, size: tuple[int, ...], sides: tuple[str, ...]) -> Facts:
    """One question at one size; in float64 both sides must agree, and ours in float32 with that."""
    print(f" {question} (B, T, K, C) = {size}", flush=True)
    ask, scores = QUESTIONS[question], scores_of(run.args.device, size)

    def check(answers: dict[str, Any]) -> float:
        wide: Any = tuple(x.detach().double().requires_grad_() for x in scores)
        exact = ask(OURS, run.shared, wide)
        worst = apart(exact, answers[OURS])
        demand(f"{question} {size} in float32", worst, TOLERANCE)
        if PEER in sides:
            beside = apart(exact, ask(PEER, run.shared, wide))
            demand(f"{question} {size} beside torch-struct in float64", beside, TOLERANCE)
            worst = max(worst, beside)
        return worst

    jobs = [Job(side, lambda side=side: ask(side, run.shared, scores), compiles=True) for side in sides]
    compared = run.compare(jobs, check=check, over=lambda side: (PEER, OURS) if side == PEER else None)
    return {
        "question": question,
        "size": list(size),
        "ms": compared.ms,
        "ratio": compared.ratios.get(PEER),
        "difference": compared.checked,
        "chart_gb": charts(size),
    }


def cells(run: Run) -> Facts:
    """Every question at every size, and those that are ours alone."""
    beside, alone = (TINY, TINY_ALONE) if run.args.quick else (SIZES, ALONE)
    found = [compare(run, question, size, (OURS, PEER)) for size in beside for question in QUESTIONS]
    return {"cells": found + [compare(run, question, size, (OURS,)) for size in alone for question in QUESTIONS]}


def lengths(run: Run) -> Facts:
    """log Z of a batch of different lengths by torch-struct, beside each item by itself."""
    scores: Any = tuple(x.detach().double() for x in scores_of(run.args.device, (3, 8, 3, 2)))
    counts = torch.tensor([8, 5, 3], device=run.args.device)
    ours = SemiMarkov(*scores, lengths=counts).log_partition
    theirs = run.shared.SemiMarkovCRF(expanded(scores), lengths=counts + 1).partition.detach()
    single = [SemiMarkov(scores[0][b : b + 1, :n], *scores[1:]).log_partition for b, n in enumerate(counts.tolist())]
    demand("a batch of different lengths beside each item by itself", apart(ours, torch.cat(single)), 1e-9)
    return {"lengths": {"counts": counts.tolist(), "off": (theirs - ours).tolist()}}


def peaks(size: tuple[int, ...]) -> Facts:
    """Bytes at the highest point of each question, over the scores; in a process of its own."""
    for question in QUESTIONS.values():  # what loads at the first call
        question(OURS, torch, scores_of("cpu", TINY[0]))
    scores = scores_of("cpu", size)
    return {name: peak_extra(lambda ask=ask: ask(OURS, torch, scores), "cpu") for name, ask in QUESTIONS.items()}


def memory(run: Run) -> Facts:
    """What long sequences take, on the CPU alone."""
    if run.args.device != "cpu":
        return {}
    sizes = TINY_ALONE if run.args.quick else LONG
    found = [{"size": list(size), "bytes": alone(peaks, threads=run.args.threads, size=size)} for size in sizes]
    return {"memory": found}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    versions, cells = facts["versions"], facts.get("cells", [])
    worst = max((cell["difference"] for cell in cells), default=0.0)
    lines = [
        f"# Segmentations on {facts['machine']['title']}",
        "",
        f"Float32, milliseconds a call, median [quartiles] of {facts['rounds']} rounds; Thalweg {versions['thalweg']} "
        f"beside torch-struct {versions['torch-struct']}, torch {versions['torch']}, {facts['threads']} threads. Both "
        f"begin with content (B, T, C), durations (K, C) and transitions (C, C); answers agree to {worst:.0e}. "
        "The last column is the first table that torch-struct makes, (B, T, K C, K C); where it "
        "has no time it was not asked.",
        "",
    ]
    if off := facts.get("lengths"):
        lines += [
            f"Of a batch of lengths {', '.join(map(str, off['counts']))} torch-struct's log Z is off by "
            f"{', '.join(f'{x:+.2g}' for x in off['off'])}; Thalweg's is that of each sequence by itself.",
            "",
        ]
    lines += [
        "| question | B | T | K | C | Thalweg | torch-struct | times faster | its table |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        times = [
            f"{s['median']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" if s else "–"
            for s in (cell["ms"].get(side) for side in (OURS, PEER))
        ]
        ratio = f"{cell['ratio']['median']:.0f}" if cell["ratio"] else "–"
        size = " | ".join(f"{n:,}" for n in cell["size"])
        lines.append(f"| {cell['question']} | {size} | {' | '.join(times)} | {ratio} | {cell['chart_gb']:,.2g} GB |")
    if "memory" in facts:
        lines += ["", "Memory of one call at its highest, beside the scores given, in a process of its own:", ""]
        lines += [f"| B | T | K | C | {' | '.join(QUESTIONS)} | T K C numbers |", "|--:|--:|--:|--:|--:|--:|--:|"]
    for cell in facts.get("memory", ()):
        batch, steps, most, labels = cell["size"]
        note = cell["bytes"].get("note")
        taken = " | ".join(note or f"{cell['bytes'][name] / 2**20:,.0f} MiB" for name in QUESTIONS)
        size = " | ".join(f"{n:,}" for n in cell["size"])
        lines.append(f"| {size} | {taken} | {4 * batch * steps * most * labels / 2**20:,.0f} MiB |")
    return lines


BENCHMARK = Benchmark(
    parts={"cells": cells, "lengths": lengths, "memory": memory},
    begin=peer,
    report=report,
    packages=("torch-struct",),
)
