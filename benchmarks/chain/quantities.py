"""What the other quantities of a chain cost, and sparse transitions beside dense ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain.problem import Problem, Size
from benchmarks.chain.sides import chain_of
from benchmarks.harness.declaration import Facts, Run, demand
from benchmarks.harness.timing import Job
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

BASE, BAND, TOLERANCE = "log_partition and gradient", 3, 1e-4


def quantities(run: Run, size: Size) -> Facts:
    """Milliseconds of each quantity from a fresh distribution, and their ratio to log Z with its gradient."""
    problem = Problem.random(size, device=run.args.device)
    leaves = problem.leaves()

    def log_z_and_gradient() -> Any:
        emissions, transitions, start, end = leaves
        total = LinearChain(emissions, transitions, start=start, end=end).log_partition.sum()
        return torch.autograd.grad(total, leaves)

    wanted: dict[str, Callable[[], Any]] = {
        BASE: log_z_and_gradient,
        "log_partition alone": lambda: chain_of(problem).log_partition,
        "marginals": lambda: chain_of(problem).marginals,
        "edge_marginals": lambda: chain_of(problem).edge_marginals,
        "mode": lambda: chain_of(problem).mode,
        "top_k(5)": lambda: chain_of(problem).top_k(5),
        "sample((10,))": lambda: chain_of(problem).sample(torch.Size([10])),
        "entropy()": lambda: chain_of(problem).entropy(),
    }
    compared = run.compare(
        [Job(name, call, compiles=True) for name, call in wanted.items()], over=lambda name: (name, BASE)
    )
    rows = compared.to_json()["jobs"]
    for name, ratio in compared.ratios.items():
        rows[name]["relative"] = ratio["median"]
    return {"quantities": {"size": list(size), "rows": rows}}


def sparse(run: Run, size: Size) -> Facts:
    """A band of three diagonals beside the same transitions as a dense matrix, checked equal first."""
    B, T, C = size
    device = run.args.device
    problem = Problem.random(size, device=device)
    diagonals = torch.randn(C, BAND, generator=torch.Generator().manual_seed(1)).to(device)
    band = SparseTransitions.banded(diagonals, lower=BAND // 2)
    emissions = problem.emissions.clone().requires_grad_()
    scores, matrix = band.scores.clone().requires_grad_(), band.dense().requires_grad_()
    # A gold path inside the band: it stays where it is.
    gold = problem.gold[:, :1].expand(B, T).contiguous()
    zeros = torch.zeros(C, device=device)
    dense = replace(problem, transitions=matrix.detach(), start=zeros, end=zeros)

    def nll(moves: Any, leaf: Tensor) -> tuple[Tensor, ...]:
        loss = -LinearChain(emissions, moves).log_prob(gold).sum()
        return loss, *torch.autograd.grad(loss, [emissions, leaf])

    jobs = [
        Job("nll/sparse", lambda: nll(band._replace(scores=scores), scores), compiles=True),
        Job("nll/dense", lambda: nll(matrix, matrix), compiles=True),
        Job("viterbi/sparse", lambda: LinearChain(problem.emissions, band).mode, compiles=True),
        Job("viterbi/dense", lambda: LinearChain(problem.emissions, dense.transitions).mode, compiles=True),
    ]
    compared = run.compare(
        jobs,
        check=lambda answers: check_sparse(answers, band, dense) if len(answers) == len(jobs) else None,
        over=lambda name: (name, name.replace("dense", "sparse")) if "dense" in name else None,
    )
    ratios = {name.removesuffix("/dense"): ratio for name, ratio in compared.ratios.items()}
    return {"sparse": {"size": list(size), "band": BAND, "rows": compared.to_json()["jobs"], "ratios": ratios}}


def check_sparse(answers: dict[str, Any], band: SparseTransitions, problem: Problem) -> None:
    """The same likelihood and gradients, and labels of the same score, from both."""
    thin, dense = answers["nll/sparse"], answers["nll/dense"]
    pairs = [
        ("negative log-likelihood", thin[0] / dense[0], torch.ones_like(thin[0])),
        ("gradient of the emissions", thin[1], dense[1]),
        ("gradient of the transitions", thin[2], dense[2][band.sources, band.targets]),
    ]
    for name, a, b in pairs:
        worst = float((a - b).detach().abs().max()) / max(1.0, float(b.detach().abs().max()))
        demand(f"sparse transitions, {name}", worst, TOLERANCE)
    # Labels may differ where two paths are equal up to rounding, their scores may not.
    found, expected = (problem.path_scores(answers[f"viterbi/{name}"]) for name in ("sparse", "dense"))
    demand("sparse transitions, score of the labels", float(((found - expected) / expected).abs().max()), TOLERANCE)
