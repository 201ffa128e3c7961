r"""Sums over the paths of linear chains in plain PyTorch, in any algebra of :mod:`thalweg.kernels.semirings`.

.. math:: a_1(j) = s_j \otimes e_{1j}, \qquad a_{t+1}(j) = \bigoplus_i a_t(i) \otimes A_t(i, j) \otimes e_{t+1,j},
          \qquad \text{result} = \bigoplus_j a_L(j) \otimes f_j

:func:`fold` goes from position to position, :func:`trace` goes back for the structures behind a result, and
:func:`scan` is a second algorithm, independent of both. Padding is replaced before anything is computed, so that it
reaches neither values nor gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.semirings import Axis, KMax, Max, Sample, Segments, Semiring


class DenseMoves:
    """Moves by matrices, one for each chain: (C, C) shared, (B, C, C) per item or (B, T-1, C, C) per step.

    Position t in 1..T-1 is the one that a move goes to. Memory at work O(B C^2).
    """

    into: Axis | Segments = Axis(-2)  # what a sum over the moves to each label runs over
    out_of: Axis | Segments = Axis(-1)  # and over the moves from it
    axes = 2  # of a list of moves

    def __init__(self, *scores: Tensor) -> None:
        self.scores = scores
        # Unbound once: a slice for each step would each fill a gradient as large as the whole.
        self._steps = [each.unbind(1) if each.dim() == self.axes + 2 else None for each in scores]

    def at(self, t: int) -> list[Tensor]:
        """The scores of the moves to position t, with or without a batch axis; views, nothing is copied."""
        return [whole if own is None else own[t - 1] for whole, own in zip(self.scores, self._steps, strict=True)]

    def leave(self, x: Tensor) -> Tensor:
        """What labels have, (.., C), at each move from them."""
        return x.unsqueeze(-1)

    def enter(self, x: Tensor) -> Tensor:
        """What labels have, (.., C), at each move to them."""
        return x.unsqueeze(-2)

    def arrivals(self, semiring: Semiring, x: Tensor, labels: Tensor, t: int) -> Tensor:
        """The terms of the sum over moves to given labels (R, B): ``(.., R, B, N)``, here with N = C."""
        items = torch.arange(labels.shape[-1], device=labels.device)
        columns = [each.mT[labels] if each.dim() == 2 else each.mT[items, labels] for each in self.at(t)]
        return semiring.act(x.unsqueeze(-3), *columns)

    def origins(self, index: Tensor) -> Tensor:
        """The previous label that a term belongs to."""
        return index

    def along(self, labels: Tensor) -> Tensor:
        """The scores of the moves of given paths, (.., B, T) to (.., B, T-1)."""
        items = torch.arange(labels.shape[-2], device=labels.device).unsqueeze(-1)
        steps = torch.arange(labels.shape[-1] - 1, device=labels.device)
        places = {2: (), 3: (items,), 4: (items, steps)}[self.scores[0].dim()]
        return self.scores[0][*places, labels[..., :-1], labels[..., 1:]]


class SparseMoves(DenseMoves):
    """Moves along edges: ``scores`` are (E,), (B, E) per item or (B, T-1, E) per step. Memory at work O(B E)."""

    axes = 1

    def __init__(self, edges: SparseTransitions, *scores: Tensor) -> None:
        super().__init__(*scores)
        self.edges = edges
        self.into, self.out_of = Segments(edges.targets, edges.size), Segments(edges.sources, edges.size)

    def leave(self, x: Tensor) -> Tensor:
        """(.., C) to (.., E)."""
        return x.index_select(-1, self.edges.sources)

    def enter(self, x: Tensor) -> Tensor:
        """(.., C) to (.., E)."""
        return x.index_select(-1, self.edges.targets)

    def arrivals(self, semiring: Semiring, x: Tensor, labels: Tensor, t: int) -> Tensor:
        """With N = E, all edges to other labels -inf."""
        here = self.edges.targets == labels.unsqueeze(-1)  # (R, B, E)
        scores = [torch.where(here, each, -math.inf) for each in self.at(t)]
        return semiring.act(self.leave(x).unsqueeze(-3), *scores)

    def origins(self, index: Tensor) -> Tensor:
        """The source of an edge."""
        return self.edges.sources[index]

    def along(self, labels: Tensor) -> Tensor:
        """-inf for a move that is no edge."""
        return looked_up(self.edges, labels[..., :-1], labels[..., 1:])


def looked_up(edges: SparseTransitions, sources: Tensor, targets: Tensor) -> Tensor:
    """The scores of moves, -inf for those that are no edge; any shape. Time O(log E) each, by the order of edges.

    >>> edges = SparseTransitions.of_edges([0, 1], [1, 1], torch.tensor([3.0, 4.0]), size=2)
    >>> looked_up(edges, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))
    tensor([3., -inf, 4.])
    """
    keys = edges.targets * edges.size + edges.sources
    wanted = targets * edges.size + sources
    # One edge more than there are, for what lies behind the last: no case of its own for an empty list.
    keys = torch.cat((keys, keys.new_full((1,), edges.size**2)))
    scores = torch.cat((edges.scores, edges.scores.new_full((1,), -math.inf)))
    place = torch.searchsorted(keys, wanted.contiguous())
    return torch.where(keys[place] == wanted, scores[place], -math.inf)


def inside(lengths: Tensor, steps: int) -> Tensor:
    """Which positions belong to an item, (B, T)."""
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(-1)


def _clean(chain: Chain, lengths: Tensor) -> Chain:
    """The chain with 0 for padding, as new tensors; the gradient in padding is exactly 0."""
    valid = inside(lengths, chain.steps)
    emissions = torch.where(valid.unsqueeze(-1), chain.emissions, 0.0)
    transitions = chain.transitions
    if chain.steps == 1:  # nobody moves: adding nothing gives transitions a gradient of 0 rather than none
        emissions = emissions + chain.moves.flatten()[:0].sum()
    elif isinstance(transitions, Tensor) and transitions.dim() == 4:
        transitions = torch.where(valid[:, 1:, None, None], transitions, 0.0)
    return chain._replace(emissions=emissions, transitions=transitions, lengths=lengths)


def tidied(*chains: Chain) -> tuple[DenseMoves, tuple[Chain, ...]]:
    """Moves of the first chain's kind and clean chains, all with its lengths; others count along its edges alone."""
    tidy = tuple(_clean(each, chains[0].lengths) for each in chains)
    edges = chains[0].transitions
    if isinstance(edges, Tensor):
        given = [each.transitions for each in tidy]
        return DenseMoves(*(x if isinstance(x, Tensor) else x.dense() for x in given)), tidy
    if len(edges.scores) == 0:  # one impossible edge stands in, for sums over nothing have no place to point at
        first = chains[0].lengths.new_zeros(1)
        edges = SparseTransitions(first, first, edges.scores.new_full((1,), -math.inf), edges.size)
    pairs = edges.sources, edges.targets
    given = [each.transitions for each in tidy[1:]]
    others = [x[..., *pairs] if isinstance(x, Tensor) else looked_up(x, *pairs) for x in given]
    return SparseMoves(edges, edges.scores, *others), tidy


Step = tuple[Tensor, tuple[Tensor, ...]]  # a vector (.., B, C), and the scores (B,) taken off to keep it near 0


def prefixes(semiring: Semiring, moves: DenseMoves, chains: tuple[Chain, ...]) -> Iterator[Step]:
    """The vectors a_t of the recursion, (.., B, C), and what :meth:`Semiring.split` took off there, each (B,).

    Past its length an item keeps its last vector. ``chains`` are clean.
    """
    columns = zip(*(each.emissions.unbind(-2) for each in chains), strict=True)
    firsts = zip(chains, next(columns), strict=True)
    x, taken = semiring.split(semiring.lift(*(each.start + scores for each, scores in firsts)))
    yield x, taken
    for t, scores in enumerate(columns, 1):
        moved = semiring.sum(semiring.act(moves.leave(x), *moves.at(t)), moves.into)
        step, taken = semiring.split(semiring.act(moved, *scores))
        valid = t < chains[0].lengths
        x = torch.where(valid.unsqueeze(-1), step, x)
        yield x, tuple(torch.where(valid, each, 0.0) for each in taken)


def _close(semiring: Semiring, x: Tensor, taken: list[tuple[Tensor, ...]], chains: tuple[Chain, ...]) -> Tensor:
    """The result of a recursion from its last vector and all that was taken off on the way."""
    total = semiring.sum(semiring.act(x, *(each.end for each in chains)), -1)
    # One sum over many numbers, not a running one: its rounding does not grow with T.
    return semiring.act(total, *(torch.stack(each, -1).sum(-1) for each in zip(*taken, strict=True)))


def fold(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    """The sum over all paths in an algebra, position by position.

    ``others`` are further scores of the same paths for algebras that take several (:class:`Expectation`). Returns
    elements ``(B,)`` (after the algebra's own components). Depth O(T), work O(B T C^2) or O(B T E); without gradients
    one vector is held at a time.

    >>> from thalweg.kernels.semirings import Log
    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> fold(Log(), chain).exp(), scan(Log(), chain).exp()
    (tensor([8.]), tensor([8.]))
    """
    moves, chains = tidied(chain, *others)
    x, taken = chain.emissions, []
    for x, each in prefixes(semiring, moves, chains):  # noqa: B007
        taken.append(each)
    return _close(semiring, x, taken, chains)


def trace(
    semiring: Max | KMax | Sample, chain: Chain, ranks: Tensor, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result and R structures picked from it, (R, B, T): backwards, at each sum the term that ``choose`` names.

    ``ranks`` (R, B); ``uniforms`` (R, B, T) where the algebra draws. Structures without weight are -1 throughout.
    """
    moves, chains = tidied(chain)
    vectors, taken = map(list, zip(*prefixes(semiring, moves, chains), strict=True))
    result = _close(semiring, vectors[-1], taken, chains)
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


def scan(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    r"""The sum over all paths of dense chains, as :func:`fold`, by a tree of matrix products.

    The result is :math:`a_1 \, M_2 M_3 \cdots M_L \, f` with :math:`M_t(i, j) = A_t(i, j) \otimes e_{tj}`, and products
    may be bracketed in any way. Depth O(log T), work and memory O(B T C^3): for long chains of few labels.
    """
    moves, chains = tidied(chain, *others)
    x = semiring.lift(*(each.start + each.emissions[:, 0] for each in chains))  # (.., B, C)
    if chain.steps > 1:
        matrices = semiring.lift(
            *(
                (A if A.dim() == 4 else A.unsqueeze(-3)) + each.emissions[:, 1:].unsqueeze(-2)
                for A, each in zip(moves.scores, chains, strict=True)
            )
        )  # (.., B, T-1, C, C)
        eye = torch.eye(chain.size, dtype=torch.bool, device=x.device)
        identity = semiring.lift(torch.where(eye, 0.0, -math.inf).to(x.dtype)[None, None])
        matrices = torch.where(inside(chain.lengths, chain.steps)[:, 1:, None, None], matrices, identity)
        while (n := matrices.shape[-3]) > 1:
            even = n - n % 2
            pairs = semiring.matmul(matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :])
            matrices = torch.cat((pairs, matrices[..., even:, :, :]), -3) if n % 2 else pairs
        x = semiring.matmul(x.unsqueeze(-2), matrices.squeeze(-3)).squeeze(-2)
    return semiring.sum(semiring.act(x, *(each.end for each in chains)), -1)
