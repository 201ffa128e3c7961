"""Paths through grids with gradients: compiled kernels where they exist, plain PyTorch otherwise and beyond.

The kernels give values, first derivatives, best paths and samples; further derivatives come from the reference. A path
is written as the moves it takes, (.., B, S) int64: (i (J + 1) + j) M + m for move m into cell (i, j), -1 past the last.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.dispatch import lattice_kernels, on_cpu, usual_defaults
from thalweg.kernels.reference.lattice import Lattice, fold, inside
from thalweg.kernels.semirings import Log
from thalweg.kernels.tracing import derived, traced

__all__ = ["Lattice", "fold", "inside", "longest", "plain", "trusted_kernels", "value", "value_and_marginals"]


def longest(lattice: Lattice) -> int:
    """S, the most moves that a path may have.

    >>> longest(Lattice(torch.zeros(2, 4, 3, 1), ((1, 1),), torch.tensor([3, 2]), torch.tensor([2, 2])))
    2
    """
    rows, columns = lattice.height - 1, lattice.width - 1
    if all(a for a, _ in lattice.moves):
        return rows if not all(b for _, b in lattice.moves) else min(rows, columns)
    return columns if all(b for _, b in lattice.moves) else rows + columns


def trusted_kernels(backend: str, lattice: Lattice) -> ModuleType | None:
    """The compiled kernels that may be given these grids; None where the reference has to answer.

    That is the backend's own choice; under the transforms of ``torch.func``; and, on the CPU, with unusual default
    types and for scores of NaN or +inf, which maxima of vectors pass over.

    >>> trusted_kernels("reference", Lattice(torch.zeros(1, 2, 2, 1), ((1, 1),), *[torch.tensor([1])] * 2)) is None
    True
    """
    kernels = None if traced() else lattice_kernels(backend, lattice.scores)
    if kernels is not None and on_cpu(lattice.scores) and not (usual_defaults() and _sound(lattice)):
        return None
    return kernels


def _sound(lattice: Lattice) -> bool:
    """Whether no score that counts is NaN or +inf; padding is told apart only where one was found."""
    scores = lattice.scores.detach()
    # False for NaN. By numpy, which is quicker for few numbers and wakes no threads for many.
    return bool(scores.numpy().max() < math.inf or _tidy(lattice, scores).numpy().max() < math.inf)


def _tidy(lattice: Lattice, scores: Tensor) -> Tensor:
    """Scores with 0 in what no path of an item can reach."""
    if lattice.labels is None:
        return torch.where(inside(lattice), scores, 0.0)
    kept = torch.arange(scores.shape[-2], device=scores.device) < lattice.rows.unsqueeze(-1)
    return torch.where(kept.unsqueeze(-1), scores, 0.0)


def plain(lattice: Lattice) -> Lattice:
    """Detached and contiguous, as kernels take it.

    >>> plain(Lattice(torch.zeros(1, 2, 2, 1).mT, ((1, 1),), *[torch.tensor([1])] * 2)).scores.is_contiguous()
    True
    """
    return lattice._replace(scores=lattice.scores.detach().contiguous())


class _Value(torch.autograd.Function):
    """log Z, (B,), by a kernel, which makes what the gradient needs on the way."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, lattice: Lattice, scores: Tensor) -> Tensor:
        values, shares = kernels.log_partition(plain(lattice), gradient=True)
        ctx.save_for_backward(scores)
        ctx.rest = kernels, lattice, shares
        return values

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        kernels, lattice, shares = ctx.rest
        (scores,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, kernels.gradient_of(plain(lattice), shares, weights[0])
        marginals: Tensor = _Marginals.apply(kernels, lattice, scores)[1]  # type: ignore[index]
        return None, None, marginals * weights[0].view(-1, *[1] * (marginals.dim() - 1))


class _Marginals(torch.autograd.Function):
    """log Z, (B,), and its gradient by a kernel; the derivative of both by the reference."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, lattice: Lattice, scores: Tensor):
        ctx.save_for_backward(scores)
        ctx.rest = lattice
        values, shares = kernels.log_partition(plain(lattice), gradient=True)
        return values, kernels.gradient_of(plain(lattice), shares, torch.ones_like(values))

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        def both(scores: Tensor) -> tuple[Tensor, Tensor]:
            total = fold(ctx.rest, Log(), _tidy(ctx.rest, scores))
            return total, torch.autograd.grad(total.sum(), scores, create_graph=True)[0]

        return derived(ctx, 2, both, weights)


def value(lattice: Lattice, kernels: ModuleType) -> Tensor:
    """log Z of each item, (B,), -inf where there is no path; differentiable to any order.

    >>> from thalweg.kernels.dispatch import lattice_kernels
    >>> grid = Lattice(torch.zeros(1, 3, 3, 3), ((1, 1), (1, 0), (0, 1)), torch.tensor([2]), torch.tensor([2]))
    >>> value(grid, lattice_kernels("auto", grid.scores)).exp()
    tensor([13.0000])
    """
    if torch.is_grad_enabled() and lattice.scores.requires_grad:
        return _Value.apply(kernels, lattice, lattice.scores)  # type: ignore[return-value]
    return kernels.log_partition(plain(lattice), gradient=False)[0]


def value_and_marginals(lattice: Lattice, kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """log Z (B,) and the probability of each move (of each label of a row), shaped as the scores; differentiable.

    >>> from thalweg.kernels.dispatch import lattice_kernels
    >>> grid = Lattice(torch.zeros(1, 2, 2, 1), ((1, 1),), torch.tensor([1]), torch.tensor([1]))
    >>> value_and_marginals(grid, lattice_kernels("auto", grid.scores))[1].flatten()
    tensor([0., 0., 0., 1.])
    """
    return _Marginals.apply(kernels, lattice, lattice.scores)  # type: ignore[return-value]
