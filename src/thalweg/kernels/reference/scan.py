r"""The sum over all paths by products of matrices: a second algorithm, independent of :func:`chain.fold`.

The result of a chain is :math:`a_1 \, M_2 M_3 \cdots M_L \, f` with :math:`M_t(i, j) = A_t(i, j) \otimes e_{tj}`, and
products of matrices may be bracketed in any way: here as a balanced tree, log2(T) levels deep instead of T steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.kernels.potentials import Chain
from thalweg.kernels.reference.recursion import inside, tidied
from thalweg.kernels.semirings import Semiring

__all__ = ["product", "scan"]


def scan(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    """The sum over all paths in an algebra, as :func:`chain.fold`, by a tree of matrix products.

    Depth O(log T), work O(B T C^3), memory O(B T C^3) for the first level of the tree: for long chains of few labels.

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> scan(Log(), chain).exp()
    tensor([8.])
    """
    moves, chains = tidied(chain, *others)
    x = semiring.lift(*(each.start + each.emissions[:, 0] for each in chains))  # (.., B, C)
    if chain.steps > 1:
        matrices = semiring.lift(
            *(
                (A if A.dim() == 4 else A.unsqueeze(-3)) + each.emissions[:, 1:].unsqueeze(-2)
                for A, each in zip(moves.transitions, chains, strict=True)
            )
        )  # (.., B, T-1, C, C)
        valid = inside(chain.lengths, chain.steps)[:, 1:, None, None]
        matrices = torch.where(valid, matrices, _identity(semiring, chain.emissions))
        x = semiring.matmul(x.unsqueeze(-2), product(semiring, matrices)).squeeze(-2)
    return semiring.sum(semiring.act(x, *(each.end for each in chains)), -1)


def _identity(semiring: Semiring, like: Tensor) -> Tensor:
    """The identity matrix of an algebra, (.., 1, 1, C, C)."""
    eye = torch.eye(like.shape[-1], dtype=torch.bool, device=like.device)
    return semiring.lift(torch.where(eye, 0.0, -math.inf).to(like.dtype)[None, None])


def product(semiring: Semiring, matrices: Tensor) -> Tensor:
    """The product of n >= 1 matrices in their order, (.., n, C, C) to (.., C, C), by pairs.

    >>> from thalweg.kernels.semirings import Log
    >>> product(Log(), torch.zeros(3, 2, 2)).exp()
    tensor([[4., 4.],
            [4., 4.]])
    """
    while (n := matrices.shape[-3]) > 1:
        even = n - n % 2
        pairs = semiring.matmul(matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :])
        matrices = torch.cat((pairs, matrices[..., even:, :, :]), -3) if n % 2 else pairs
    return matrices.squeeze(-3)
