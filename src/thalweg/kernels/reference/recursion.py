r"""The recursion of linear chains in plain PyTorch, over any algebra of :mod:`thalweg.kernels.semirings`.

.. math:: a_1(j) = s_j \otimes e_{1j}, \qquad a_{t+1}(j) = \bigoplus_i a_t(i) \otimes A_t(i, j) \otimes e_{t+1,j},
          \qquad \text{result} = \bigoplus_j a_L(j) \otimes f_j

Padding is replaced before anything is computed, so that it reaches neither values nor gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thalweg.kernels.potentials import Chain
from thalweg.kernels.semirings import KMax, Max, Sample, Semiring

__all__ = ["DenseMoves", "Moves", "clean", "close", "fold", "inside", "prefixes", "run", "tidied", "trace"]


class Moves(Protocol):
    """How a recursion gets from one position to the next; ``t`` is the position that a move goes to, 1..T-1."""

    def advance(self, semiring: Semiring, x: Tensor, t: int) -> Tensor:
        """The sum over previous labels: ``(.., B, C)`` to ``(.., B, C)``."""
        ...

    def arrivals(self, semiring: Semiring, x: Tensor, labels: Tensor, t: int) -> Tensor:
        """The terms of that sum for given labels (R, B): ``(.., R, B, N)``."""
        ...

    def origins(self, index: Tensor) -> Tensor:
        """The previous label that a term belongs to."""
        ...


class DenseMoves:
    """Moves by matrices: (C, C) shared, (B, C, C) per item or (B, T-1, C, C) per step, one for each chain.

    >>> from thalweg.kernels.semirings import Log
    >>> DenseMoves(torch.zeros(2, 2)).advance(Log(), torch.zeros(1, 2), 1).exp()
    tensor([[2., 2.]])
    """

    def __init__(self, *transitions: Tensor) -> None:
        self.transitions = transitions
        # Unbound once: a slice for each step would each fill a gradient as large as the whole.
        self._steps = [each.unbind(1) if each.dim() == 4 else None for each in transitions]

    def at(self, t: int) -> list[Tensor]:
        """The matrices of one step, (C, C) or (B, C, C); views, nothing is copied."""
        return [
            whole if steps is None else steps[t - 1] for whole, steps in zip(self.transitions, self._steps, strict=True)
        ]

    def advance(self, semiring: Semiring, x: Tensor, t: int) -> Tensor:
        """See :class:`Moves`. Memory O(B C^2)."""
        return semiring.sum(semiring.act(x.unsqueeze(-1), *self.at(t)), -2)

    def arrivals(self, semiring: Semiring, x: Tensor, labels: Tensor, t: int) -> Tensor:
        """See :class:`Moves`; N = C."""
        items = torch.arange(labels.shape[-1], device=labels.device)
        columns = [each.mT[labels] if each.dim() == 2 else each.mT[items, labels] for each in self.at(t)]
        return semiring.act(x.unsqueeze(-3), *columns)

    def origins(self, index: Tensor) -> Tensor:
        """See :class:`Moves`."""
        return index


def inside(lengths: Tensor, steps: int) -> Tensor:
    """Which positions belong to an item, (B, T).

    >>> inside(torch.tensor([1, 2]), 2).tolist()
    [[True, False], [True, True]]
    """
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(-1)


def clean(chain: Chain, lengths: Tensor | None = None) -> Chain:
    """The chain with 0 for padding, as new tensors; the gradient in padding is exactly 0.

    >>> scores = torch.tensor([[[1.0], [math.nan]]])
    >>> clean(Chain(scores, torch.zeros(1, 1), torch.zeros(1), torch.zeros(1), torch.tensor([1]))).emissions.tolist()
    [[[1.0], [0.0]]]
    """
    lengths = chain.lengths if lengths is None else lengths
    valid = inside(lengths, chain.steps)
    emissions = torch.where(valid.unsqueeze(-1), chain.emissions, 0.0)
    transitions = chain.transitions
    if chain.steps == 1:  # nobody moves: adding nothing gives transitions a gradient of 0 rather than none
        moves = transitions if isinstance(transitions, Tensor) else transitions.scores
        emissions = emissions + moves.flatten()[:0].sum()
    elif isinstance(transitions, Tensor) and transitions.dim() == 4:
        transitions = torch.where(valid[:, 1:, None, None], transitions, 0.0)
    return chain._replace(emissions=emissions, transitions=transitions, lengths=lengths)


Step = tuple[Tensor, tuple[Tensor, ...]]  # a vector (.., B, C), and the scores (B,) taken off to keep it near 0


def prefixes(semiring: Semiring, moves: Moves, chains: tuple[Chain, ...]) -> Iterator[Step]:
    """The vectors a_t of the recursion, (.., B, C), and what :meth:`Semiring.split` took off there, each (B,).

    Past its length an item keeps its last vector. ``chains`` are clean.

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> [(x.tolist(), taken[0].exp().tolist()) for x, taken in prefixes(Log(), *tidied(chain))]
    [([[0.0, 0.0]], [1.0]), ([[0.0, 0.0]], [2.0]), ([[0.0, 0.0]], [1.0])]
    """
    columns = zip(*(each.emissions.unbind(-2) for each in chains), strict=True)
    firsts = zip(chains, next(columns), strict=True)
    x, taken = semiring.split(semiring.lift(*(each.start + scores for each, scores in firsts)))
    yield x, taken
    for t, scores in enumerate(columns, 1):
        step, taken = semiring.split(semiring.act(moves.advance(semiring, x, t), *scores))
        valid = t < chains[0].lengths
        x = torch.where(valid.unsqueeze(-1), step, x)
        yield x, tuple(torch.where(valid, each, 0.0) for each in taken)


def close(semiring: Semiring, x: Tensor, taken: list[tuple[Tensor, ...]], chains: tuple[Chain, ...]) -> Tensor:
    """The result of a recursion from its last vector and all that was taken off on the way.

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> close(Log(), torch.zeros(1, 2), [(torch.ones(1),), (torch.ones(1),)], (chain,)) - math.log(2)
    tensor([2.])
    """
    total = semiring.sum(semiring.act(x, *(each.end for each in chains)), -1)
    # One sum over many numbers, not a running one: its rounding does not grow with T.
    return semiring.act(total, *(torch.stack(each, -1).sum(-1) for each in zip(*taken, strict=True)))


def run(semiring: Semiring, moves: Moves, chains: tuple[Chain, ...]) -> Tensor:
    """The recursion from end to end over clean chains; without gradients it holds one vector at a time.

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> run(Log(), *tidied(chain)).exp()
    tensor([4.])
    """
    steps = prefixes(semiring, moves, chains)
    x, first = next(steps)
    taken = [first]
    for x, each in steps:  # noqa: B007
        taken.append(each)
    return close(semiring, x, taken, chains)


def trace(
    semiring: Max | KMax | Sample, moves: Moves, chain: Chain, ranks: Tensor, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result and R structures picked from it, (R, B, T): backwards, at each sum the term that ``choose`` names.

    ``ranks`` (R, B); ``uniforms`` (R, B, T) where the algebra draws. Structures without weight are -1 throughout.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> trace(KMax(2), DenseMoves(torch.eye(2)), chain, torch.tensor([[0], [1]]))
    (tensor([[1.],
            [1.]]), tensor([[[ 0,  0, -1]],
            [[ 1,  1, -1]]]))
    """
    steps = list(prefixes(semiring, moves, (chain,)))
    vectors = [x for x, _ in steps]
    result = close(semiring, vectors[-1], [each for _, each in steps], (chain,))
    with torch.no_grad():
        ends = chain.lengths - 1
        last = None if uniforms is None else uniforms.gather(-1, ends.expand(ranks.shape).unsqueeze(-1)).squeeze(-1)
        label, rank = semiring.choose(semiring.act(vectors[-1].unsqueeze(-3), chain.end), ranks, last)
        found = [label]
        for t in range(chain.steps - 2, -1, -1):
            terms = moves.arrivals(semiring, vectors[t], label, t + 1)
            index, below = semiring.choose(terms, rank, None if uniforms is None else uniforms[..., t])
            label = torch.where(t < ends, moves.origins(index), label)
            rank = torch.where(t < ends, below, rank)
            found.append(label)
        labels = torch.stack(found[::-1], -1)
        exists = inside(chain.lengths, chain.steps) & (result > -math.inf).unsqueeze(-1)
        return result, torch.where(exists, labels, -1)


def tidied(*chains: Chain) -> tuple[DenseMoves, tuple[Chain, ...]]:
    """Matrices and clean chains, all with the lengths of the first.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> tidied(chain)[1][0].emissions.shape
    torch.Size([1, 3, 2])
    """
    tidy = tuple(clean(each, chains[0].lengths) for each in chains)
    matrices = (each.transitions if isinstance(each.transitions, Tensor) else each.transitions.dense() for each in tidy)
    return DenseMoves(*matrices), tidy


def fold(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    """The sum over all paths in an algebra, position by position.

    ``others`` are further scores of the same paths for algebras that take several (:class:`Expectation`). Returns
    elements ``(B,)`` (after the algebra's own components). Depth O(T), work O(B T C^2), memory at work O(B C^2).

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> fold(Log(), chain).exp()
    tensor([8.])
    """
    return run(semiring, *tidied(chain, *others))
