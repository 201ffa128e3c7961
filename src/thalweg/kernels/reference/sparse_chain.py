"""Linear chains over a list of edges: the same recursion and the same names as :mod:`.chain`, never made dense.

Every step gathers along the E edges and sums by target: work O(B T E), memory at work O(B E), nothing of size C^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.reference.chain import best, emitted, normalised
from thalweg.kernels.reference.recursion import clean, inside, prefixes, run, trace
from thalweg.kernels.semirings import Entropy, Expectation, Log, Max, Sample, Segments, Semiring

__all__ = [
    "edge_marginals",
    "entropy",
    "expectation",
    "fold",
    "log_partition",
    "max_score",
    "sample",
    "score",
    "top_k",
    "viterbi",
]


class SparseMoves:
    """Moves along edges; ``scores`` of each chain are (E,), (B, E) per item or (B, T-1, E) per step.

    >>> edges = SparseTransitions.of_edges([0, 1], [1, 1], torch.zeros(2), size=2)
    >>> SparseMoves(edges, edges.scores).advance(Log(), torch.zeros(1, 2), 1).exp()
    tensor([[0., 2.]])
    """

    def __init__(self, edges: SparseTransitions, *scores: Tensor) -> None:
        self.edges, self.scores = edges, scores
        self._steps = [each.unbind(1) if each.dim() == 3 else None for each in scores]
        self._by_target = Segments(edges.targets, edges.size)

    def at(self, t: int) -> list[Tensor]:
        """The scores of one step, (E,) or (B, E)."""
        return [whole if steps is None else steps[t - 1] for whole, steps in zip(self.scores, self._steps, strict=True)]

    def advance(self, semiring: Semiring, x: Tensor, t: int) -> Tensor:
        """The sum over previous labels, (.., B, C) to (.., B, C)."""
        return semiring.sum(semiring.act(x.index_select(-1, self.edges.sources), *self.at(t)), self._by_target)

    def arrivals(self, semiring: Semiring, x: Tensor, labels: Tensor, t: int) -> Tensor:
        """The terms of that sum for given labels (R, B), all edges to other labels -inf: (.., R, B, E)."""
        here = self.edges.targets == labels.unsqueeze(-1)  # (R, B, E)
        scores = [torch.where(here, each, -math.inf) for each in self.at(t)]
        return semiring.act(x.index_select(-1, self.edges.sources).unsqueeze(-3), *scores)

    def origins(self, index: Tensor) -> Tensor:
        """The source of an edge."""
        return self.edges.sources[index]


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


def _sparse(*chains: Chain) -> tuple[SparseMoves, tuple[Chain, ...]]:
    edges = chains[0].transitions
    if not isinstance(edges, SparseTransitions):
        raise ShapeError(f"expected SparseTransitions, got a tensor {tuple(edges.shape)}; use reference.chain for it")
    if len(edges.scores) == 0:  # one impossible edge stands in, for sums over nothing have no place to point at
        none = edges.scores.new_full((1,), -math.inf)
        edges = edges._replace(
            sources=chains[0].lengths.new_zeros(1), targets=chains[0].lengths.new_zeros(1), scores=none
        )
    tidy = tuple(clean(each, chains[0].lengths) for each in chains)
    scores = [edges.scores]
    for each in tidy[1:]:
        if isinstance(each.transitions, Tensor):
            scores.append(each.transitions[..., edges.sources, edges.targets])
        else:
            scores.append(looked_up(each.transitions, edges.sources, edges.targets))
    return SparseMoves(edges, *scores), tidy


def fold(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    """The sum over all paths in an algebra, elements ``(B,)``; work O(B T E), memory at work O(B E).

    ``others`` may have any kind of transitions; they are looked at along the edges of ``chain`` alone.

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))
    >>> fold(Log(), chain).exp()
    tensor([5.])
    """
    return run(semiring, *_sparse(chain, *others))


def log_partition(chain: Chain) -> Tensor:
    """Log Z, (B,); -inf, with gradient 0, where no path has weight. Differentiable to any order.

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))
    >>> log_partition(chain).exp()
    tensor([5.])
    """
    return fold(Log(), chain)


def max_score(chain: Chain) -> Tensor:
    """The greatest score of a path, (B,).

    >>> edges = SparseTransitions.banded(torch.eye(3, 2), lower=0)
    >>> max_score(Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2])))
    tensor([1.])
    """
    return fold(Max(), chain)


def entropy(chain: Chain) -> Tensor:
    """The entropy of the distribution over paths in nats, (B,).

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> entropy(Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))).exp()
    tensor([5.])
    """
    return fold(Entropy(), chain)[1]


def expectation(chain: Chain, other: Chain) -> Tensor:
    """The mean of another chain's score under this chain's distribution, (B,); differentiable in both.

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))
    >>> round(expectation(chain, chain._replace(end=torch.ones(3))).item(), 4)
    1.0
    """
    return fold(Expectation(), chain, other)[1]


def score(chain: Chain, labels: Tensor) -> Tensor:
    """The score of given paths: labels (.., B, T) int64 to (.., B); -inf for a move that is no edge.

    >>> edges = SparseTransitions.banded(torch.ones(3, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))
    >>> score(chain, torch.tensor([[[0, 1]], [[0, 2]]]))
    tensor([[1.],
            [-inf]])
    """
    moves, (chain,) = _sparse(chain)
    valid = inside(chain.lengths, chain.steps)
    tidy = torch.where(valid, labels, 0)
    moved = torch.where(valid[:, 1:], looked_up(moves.edges, tidy[..., :-1], tidy[..., 1:]), 0.0)
    return emitted(chain, tidy) + moved.sum(-1)


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The best path: scores (B,), labels (B, T) with -1 past the length; ties as in the dense form.

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> viterbi(Chain(torch.eye(3)[None, ::2], edges, torch.zeros(3), torch.zeros(3), torch.tensor([2])))
    (tensor([1.]), tensor([[0, 0]]))
    """
    moves, (chain,) = _sparse(chain)
    scores, labels = trace(Max(), moves, chain, chain.lengths.new_zeros(1, len(chain.lengths)))
    return scores, labels[0]


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths, distinct and falling: scores (B, k), labels (B, k, T); missing ones -inf and -1.

    >>> edges = SparseTransitions.banded(torch.zeros(2, 1), lower=0)
    >>> top_k(Chain(torch.eye(2)[None], edges, torch.zeros(2), torch.ones(2), torch.tensor([2])), 3)[0]
    tensor([[2., 2., -inf]])
    """
    moves, (chain,) = _sparse(chain)
    return best(moves, chain, k)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples by numbers in [0, 1): uniforms (S, B, T) to labels (S, B, T); as in the dense form.

    >>> edges = SparseTransitions.banded(torch.zeros(3, 2), lower=0)
    >>> chain = Chain(torch.zeros(1, 2, 3), edges, torch.zeros(3), torch.zeros(3), torch.tensor([2]))
    >>> sample(chain, torch.tensor([[[0.2, 0.7]]]))
    tensor([[[1, 2]]])
    """
    moves, (chain,) = _sparse(chain)
    with torch.no_grad():
        return trace(Sample(), moves, chain, chain.lengths.new_zeros(uniforms.shape[:2]), uniforms)[1]


def edge_marginals(chain: Chain) -> Tensor:
    """The probability of each edge at each step, (B, T-1, E); 0 past the length. Forward-backward.

    >>> edges = SparseTransitions.banded(torch.zeros(2, 1), lower=0)
    >>> edge_marginals(Chain(torch.zeros(1, 2, 2), edges, torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    tensor([[[0.5000, 0.5000]]])
    """
    moves, (chain,) = _sparse(chain)
    edges, algebra, steps = moves.edges, Log(), []
    by_source = Segments(edges.sources, edges.size)
    before = [x for x, _ in prefixes(algebra, moves, (chain,))]
    after = chain.end.expand(before[0].shape)
    columns = chain.emissions.unbind(1)
    for t in range(chain.steps - 1, 0, -1):
        valid = (t < chain.lengths).unsqueeze(-1)
        terms = edges.scores + (columns[t] + after).index_select(-1, edges.targets)  # (B, E)
        # Each step's probabilities sum to 1: normalised on the spot, nothing taken off on the way matters.
        chances = normalised(before[t - 1].index_select(-1, edges.sources) + terms)
        steps.append(torch.where(valid, chances, 0.0))
        after = torch.where(valid, algebra.split(algebra.sum(terms, by_source))[0], after)
    given = chain.transitions
    assert isinstance(given, SparseTransitions)
    nothing = chain.emissions.new_zeros(len(after), 0, len(given.scores))
    return torch.stack(steps[::-1], 1)[..., : len(given.scores)] if steps else nothing
