"""Thalweg's side, and the calls that modules with the interface of pytorch-crf share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain.problem import Gradients, Problem
from benchmarks.harness.timing import Job
from thalweg.inference.structures.chain import LinearChain
from thalweg.layers.crf import CRF

CHAIN, MODULE = "Thalweg LinearChain", "Thalweg layers.CRF"


def pad_lists(labels: list[list[int]], steps: int) -> Tensor:
    """Lists of labels as (B, T), -1 past the length."""
    return torch.tensor([[*row, *[-1] * (steps - len(row))] for row in labels])


def module_nll(name: str, module: torch.nn.Module, problem: Problem) -> Job:
    """``module(emissions, tags, mask)`` and its backward, for modules with the interface of pytorch-crf."""
    module = _with_scores(module, problem)
    emissions, mask = problem.emissions.clone().requires_grad_(), problem.mask
    parameters = [getattr(module, key) for key in ("transitions", "start_transitions", "end_transitions")]

    def run() -> list[Tensor | None]:
        for leaf in (emissions, *parameters):
            leaf.grad = None
        loss = -module(emissions, problem.gold, mask=mask)
        loss.backward()
        return [loss, emissions.grad, *(parameter.grad for parameter in parameters)]

    return Job(name, run, lambda raw: Gradients.of(*raw))


def module_decode(name: str, module: torch.nn.Module, problem: Problem) -> Job:
    """``module.decode(emissions, mask)``, a list of lists of labels."""
    module, mask = _with_scores(module, problem), problem.mask

    def run() -> list[list[int]]:
        with torch.no_grad():
            return module.decode(problem.emissions, mask=mask)  # pyright: ignore[reportCallIssue]

    return Job(name, run, lambda raw: pad_lists(raw, problem.size[1]))


def _with_scores(module: torch.nn.Module, problem: Problem) -> torch.nn.Module:
    module = module.to(problem.emissions)
    scores = {"transitions": problem.transitions, "start_transitions": problem.start, "end_transitions": problem.end}
    module.load_state_dict(scores)
    return module


class Ours:
    """Thalweg by both its doors: the distribution, and the module with the interface of pytorch-crf."""

    def nll(self, problem: Problem, *, low_memory: bool = False) -> list[Job]:
        """Negative log-likelihood of the gold labels with gradients in all four kinds of scores."""
        leaves = problem.leaves()

        def run() -> tuple[Tensor, ...]:
            emissions, transitions, start, end = leaves
            chain = LinearChain(
                emissions, transitions, start=start, end=end, lengths=problem.lengths, low_memory=low_memory
            )
            loss = -chain.log_prob(problem.gold).sum()
            return loss, *torch.autograd.grad(loss, leaves)

        direct = Job(CHAIN, run, lambda raw: Gradients.of(*raw), compiles=True)
        module = module_nll(MODULE, CRF(problem.size[2], batch_first=True), problem)
        return [direct, replace(module, compiles=True)]

    def decode(self, problem: Problem) -> list[Job]:
        """The best labels: as a tensor by the distribution, as lists by the module."""

        def run() -> Tensor:
            return chain_of(problem).mode

        direct = Job(CHAIN, run, lambda raw: raw.cpu(), compiles=True)
        module = module_decode(MODULE, CRF(problem.size[2], batch_first=True), problem)
        return [direct, replace(module, compiles=True)]


def chain_of(problem: Problem, **options: Any) -> LinearChain:
    """The problem as a distribution without gradients."""
    return LinearChain(
        problem.emissions, problem.transitions, start=problem.start, end=problem.end, lengths=problem.lengths, **options
    )
