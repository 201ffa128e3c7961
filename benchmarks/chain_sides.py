"""Chains to measure on, what a side offers to time, and Thalweg's side of ``chain.py``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.inference.structures.chain import LinearChain
from thalweg.layers.crf import CRF

Size = tuple[int, int, int]
"""Batch B, positions T, labels C."""

CHAIN, MODULE = "Thalweg LinearChain", "Thalweg layers.CRF"


@dataclass(frozen=True)
class Problem:
    """Scores of B chains, gold labels (B, T) and lengths (B,), None where every chain has T positions.

    score(y) = start[y_1] + sum_t emissions[t, y_t] + sum_t transitions[y_t, y_t+1] + end[y_L].
    """

    emissions: Tensor  # (B, T, C)
    transitions: Tensor  # (C, C)
    start: Tensor  # (C,)
    end: Tensor  # (C,)
    gold: Tensor  # (B, T)
    lengths: Tensor | None = None  # (B,)

    @classmethod
    def random(cls, size: Size, *, device: str = "cpu", ragged: bool = False, seed: int = 0) -> Problem:
        """Normal scores in float32, the same on every device; ``ragged`` halves the length of every other chain."""
        B, T, C = size
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        gold = torch.randint(C, (B, T), generator=draw).to(device)
        lengths = torch.tensor([T if b % 2 == 0 else T // 2 + 1 for b in range(B)], device=device) if ragged else None
        return cls(normal(B, T, C), normal(C, C), normal(C), normal(C), gold, lengths)

    @property
    def size(self) -> Size:
        """(B, T, C)."""
        B, T, C = self.emissions.shape
        return B, T, C

    @property
    def all_lengths(self) -> Tensor:
        """(B,), also where every chain has T positions."""
        B, T, _ = self.size
        return self.gold.new_full((B,), T) if self.lengths is None else self.lengths

    @property
    def mask(self) -> Tensor:
        """(B, T), true inside the lengths."""
        return torch.arange(self.size[1], device=self.gold.device) < self.all_lengths.unsqueeze(1)

    def double(self) -> Problem:
        """The same scores in float64."""
        names = ("emissions", "transitions", "start", "end")
        return replace(self, **{name: getattr(self, name).double() for name in names})

    def leaves(self) -> list[Tensor]:
        """Copies of the four kinds of scores that ask for gradients."""
        return [x.clone().requires_grad_() for x in (self.emissions, self.transitions, self.start, self.end)]

    def path_scores(self, labels: Tensor) -> Tensor:
        """(B,) scores of labels (B, T) in float64; whatever lies past the length is ignored."""
        double, mask, lengths = self.double(), self.mask, self.all_lengths
        y = labels.to(self.gold.device).where(mask, 0)
        each = double.emissions.gather(2, y.unsqueeze(2)).squeeze(2)
        moves = double.transitions[y[:, :-1], y[:, 1:]]
        last = y.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
        inside = each.where(mask, 0.0).sum(1) + moves.where(mask[:, 1:], 0.0).sum(1)
        return (inside + double.start[y[:, 0]] + double.end[last]).cpu()


class Gradients(NamedTuple):
    """Negative log-likelihood summed over the batch, and its gradients; float64 on the CPU."""

    value: Tensor  # ()
    emissions: Tensor  # (B, T, C)
    transitions: Tensor  # (C, C)
    start: Tensor  # (C,)
    end: Tensor  # (C,)

    @classmethod
    def of(cls, value: Any, *gradients: Any) -> Gradients:
        """From tensors of any device or from arrays."""
        return cls(*(torch.as_tensor(x).detach().cpu().double() for x in (value, *gradients)))


@dataclass(frozen=True)
class Job:
    """What is timed, and how its result is read afterwards: as :class:`Gradients`, or as labels (B, T)."""

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Any]
    single: bool = False
    """Computes in float32 whatever it is given."""
    needs: int = 0
    """Bytes below which it cannot run, where that is known."""
    compiles: bool = False
    """The first call may compile, and says nothing about the others."""


def version_of(package: str, module: Any = None) -> str:
    """The version by the package's metadata or its module; `unknown` where neither tells."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", getattr(module, "version", "unknown")))


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
