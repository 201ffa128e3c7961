r"""Linear chains in plain PyTorch: the definition of truth.

Every quantity is one algebra (:mod:`thalweg.kernels.semirings`) over one recursion, :func:`fold`:

.. math:: a_1(j) = s_j \otimes e_{1j}, \qquad a_{t+1}(j) = \bigoplus_i a_t(i) \otimes A_t(i, j) \otimes e_{t+1,j},
          \qquad \text{result} = \bigoplus_j a_L(j) \otimes f_j

Padding is replaced before anything is computed, so that it reaches neither values nor gradients. Derivatives of any
order are taken by autograd through the recursion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thalweg.errors import ConfigError, nearest
from thalweg.kernels.dispatch import on_cpu
from thalweg.kernels.potentials import Chain
from thalweg.kernels.semirings import Entropy, Expectation, KMax, Log, Max, Sample, Semiring

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


METHODS = ("auto", "loop", "scan")  # of log_partition


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

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> [(x.tolist(), taken[0].exp().tolist()) for x, taken in prefixes(Log(), *tidied(chain))]
    [([[0.0, 0.0]], [1.0]), ([[0.0, 0.0]], [2.0]), ([[0.0, 0.0]], [1.0])]
    """
    columns = zip(*(each.emissions.unbind(1) for each in chains), strict=True)
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

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> close(Log(), torch.zeros(1, 2), [(torch.ones(1),), (torch.ones(1),)], (chain,)) - math.log(2)
    tensor([2.])
    """
    total = semiring.sum(semiring.act(x, *(each.end for each in chains)), -1)
    # One sum over many numbers, not a running one: its rounding does not grow with T.
    return semiring.act(total, *(torch.stack(each, -1).sum(-1) for each in zip(*taken, strict=True)))


def run(semiring: Semiring, moves: Moves, chains: tuple[Chain, ...]) -> Tensor:
    """The recursion from end to end over clean chains; without gradients it holds one vector at a time.

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

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> fold(Log(), chain).exp()
    tensor([8.])
    """
    return run(semiring, *tidied(chain, *others))


def log_partition(chain: Chain, *, method: str = "auto") -> Tensor:
    r""":math:`\log Z = \log \sum_y \exp(\text{score}(y))`, (B,); -inf, with gradient 0, where no path has weight.

    Its gradient in ``emissions`` is the probability of each label at each position. ``method`` is "loop"
    (:func:`fold`), "scan" (:func:`scan.scan`) or "auto", whichever is faster.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> log_partition(chain).exp()
    tensor([4.])
    """
    from thalweg.kernels.reference.scan import scan  # which builds on this module

    if method not in METHODS:
        raise ConfigError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}; {nearest(method, METHODS)}")
    by_scan = method == "scan" or (method == "auto" and scan_is_faster(chain))
    return (scan if by_scan else fold)(Log(), chain)


def scan_is_faster(chain: Chain) -> bool:
    """Whether a tree of matrix products beats the loop: a step's C^3 must cost less than the overhead of a step.

    >>> long = Chain(torch.zeros(1, 999, 4), torch.zeros(4, 4), torch.zeros(4), torch.zeros(4), torch.tensor([999]))
    >>> scan_is_faster(long), scan_is_faster(long._replace(emissions=torch.zeros(64, 999, 16)))
    (True, False)
    """
    B, T, C = chain.emissions.shape
    # Measured on a CPU: even at B C^3 = 2^14 to 2^15, with gradients and without. Where kernels are launched a step
    # costs about as much and arithmetic far less; that bound is an estimate. The last keeps memory below about 1 GB.
    step, most = B * C**3, 2**14 if on_cpu(chain.emissions) else 2**20
    return T >= 8 and step <= most and T * step <= 2**26


def max_score(chain: Chain) -> Tensor:
    """The greatest score of a path, (B,); its gradient marks the parts of that path.

    >>> max_score(Chain(torch.eye(2)[None], torch.eye(2), torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    tensor([2.])
    """
    return fold(Max(), chain)


def entropy(chain: Chain) -> Tensor:
    """The entropy of the distribution over paths in nats, (B,); 0 where no path has weight.

    >>> entropy(Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))).exp()
    tensor([8.])
    """
    return fold(Entropy(), chain)[1]


def expectation(chain: Chain, other: Chain) -> Tensor:
    """The mean of another chain's score under this chain's distribution, (B,); differentiable in both.

    Paths of weight 0 add 0 even where ``other`` is -inf; a path of positive weight with score -inf makes it -inf.
    The lengths are those of ``chain``.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> expectation(chain, chain._replace(emissions=torch.eye(3, 2)[None]))
    tensor([1.])
    """
    return fold(Expectation(), chain, other)[1]


def score(chain: Chain, labels: Tensor) -> Tensor:
    """The score of given paths: labels (.., B, T) int64 to (.., B); anything past the length.

    >>> chain = Chain(torch.eye(2)[None], torch.eye(2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> score(chain, torch.tensor([[0, 0]]))
    tensor([2.])
    """
    _, (chain,) = tidied(chain)
    return emitted(chain, labels) + moved(chain, labels)


def emitted(chain: Chain, labels: Tensor) -> Tensor:
    """Start, emissions and end of given paths through a clean chain: labels (.., B, T) to (.., B).

    >>> chain = Chain(torch.eye(2)[None], torch.eye(2), torch.zeros(2), torch.ones(2), torch.tensor([2]))
    >>> emitted(chain, torch.tensor([[0, 0]]))
    tensor([2.])
    """
    valid = inside(chain.lengths, chain.steps)
    labels = torch.where(valid, labels, 0)
    scores = chain.emissions.expand(*labels.shape, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    last = labels.gather(-1, (chain.lengths - 1).expand(labels.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return torch.where(valid, scores, 0.0).sum(-1) + chain.start[labels[..., 0]] + chain.end[last]


def moved(chain: Chain, labels: Tensor) -> Tensor:
    """Transitions of given paths through a clean chain: labels (.., B, T) to (.., B).

    >>> chain = Chain(torch.eye(2)[None], torch.eye(2), torch.zeros(2), torch.ones(2), torch.tensor([2]))
    >>> moved(chain, torch.tensor([[0, 0]]))
    tensor([1.])
    """
    assert isinstance(chain.transitions, Tensor)
    valid = inside(chain.lengths, chain.steps)
    labels = torch.where(valid, labels, 0)
    sources, targets = labels[..., :-1], labels[..., 1:]
    items = torch.arange(labels.shape[-2], device=labels.device).unsqueeze(-1)
    steps = torch.arange(chain.steps - 1, device=labels.device)
    places = {2: (), 3: (items,), 4: (items, steps)}[chain.transitions.dim()]
    scores = chain.transitions[*places, sources, targets]
    return torch.where(valid[:, 1:], scores, 0.0).sum(-1)


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The best path: scores (B,), labels (B, T) with -1 past the length; all -1 where no path has weight.

    Of equal paths the one with the lowest last label, then the lowest label before it, and so on backwards.

    >>> viterbi(Chain(torch.eye(2)[None], -torch.eye(2), torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    (tensor([2.]), tensor([[0, 1]]))
    """
    moves, (chain,) = tidied(chain)
    scores, labels = trace(Max(), moves, chain, chain.lengths.new_zeros(1, len(chain.lengths)))
    return scores, labels[0]


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths, distinct and falling: scores (B, k), labels (B, k, T).

    Missing ones (fewer than k have weight) have score -inf and labels -1, as labels past the length.

    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> top_k(chain, 3)
    (tensor([[1., 0., -inf]]), tensor([[[ 0, -1],
             [ 1, -1],
             [-1, -1]]]))
    """
    moves, (chain,) = tidied(chain)
    return best(moves, chain, k)


def best(moves: Moves, chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths through a clean chain, as :func:`top_k`.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> best(DenseMoves(torch.eye(2)), chain, 3)[0]
    tensor([[1., 1., 0.]])
    """
    ranks = torch.arange(k, device=chain.lengths.device).unsqueeze(-1).expand(-1, len(chain.lengths))
    scores, labels = trace(KMax(k), moves, chain, ranks)
    return scores.mT, labels.transpose(0, 1)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples by numbers in [0, 1): uniforms (S, B, T) to labels (S, B, T) with -1 past the length.

    Backwards from the last position; position t takes the first label whose cumulative probability (over rising
    labels, given the label after it) is above ``uniforms[s, b, t]``.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> sample(chain, torch.tensor([[[0.2, 0.7]]]))
    tensor([[[0, 1]]])
    """
    moves, (chain,) = tidied(chain)
    with torch.no_grad():
        return trace(Sample(), moves, chain, chain.lengths.new_zeros(uniforms.shape[:2]), uniforms)[1]


def edge_marginals(chain: Chain) -> Tensor:
    """The probability of each pair of labels at each step, (B, T-1, C, C); 0 past the length. Forward-backward.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> edge_marginals(chain)[0, 0]
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]])
    """
    moves, (chain,) = tidied(chain)
    algebra, steps = Log(), []
    before = [x for x, _ in prefixes(algebra, moves, (chain,))]
    after = chain.end.expand(before[0].shape)
    columns = chain.emissions.unbind(1)
    for t in range(chain.steps - 1, 0, -1):
        (matrix,), valid = moves.at(t), (t < chain.lengths).unsqueeze(-1)
        onward = columns[t] + after
        terms = matrix + onward.unsqueeze(-2)  # (B, C, C)
        # Each step's probabilities sum to 1: normalised on the spot, nothing taken off on the way matters.
        joint = (before[t - 1].unsqueeze(-1) + terms).flatten(-2)
        chances = normalised(joint).unflatten(-1, terms.shape[-2:])
        steps.append(torch.where(valid.unsqueeze(-1), chances, 0.0))
        after = torch.where(valid, algebra.split(algebra.sum(terms, -1))[0], after)
    return torch.stack(steps[::-1], 1) if steps else chain.emissions.new_zeros(len(chain.lengths), 0, *[chain.size] * 2)


def normalised(x: Tensor) -> Tensor:
    """Softmax over the last axis with all 0 where everything is -inf; derivatives of every order are finite.

    >>> normalised(torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    total = Log().sum(x, -1).unsqueeze(-1)
    return (x - torch.where(total == -math.inf, 0.0, total)).exp()
