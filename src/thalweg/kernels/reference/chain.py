r"""Linear chains in plain PyTorch: the definition of truth.

Every quantity is one algebra (:mod:`thalweg.kernels.semirings`) over one recursion, :func:`fold`:

.. math:: a_1(j) = s_j \otimes e_{1j}, \qquad a_{t+1}(j) = \bigoplus_i a_t(i) \otimes A_t(i, j) \otimes e_{t+1,j},
          \qquad \text{result} = \bigoplus_j a_L(j) \otimes f_j

Padding is replaced before anything is computed, so that it reaches neither values nor gradients. Derivatives of any
order are taken by autograd through the recursion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.errors import ConfigError, nearest
from thalweg.kernels.dispatch import on_cpu
from thalweg.kernels.potentials import Chain
from thalweg.kernels.reference.recursion import Moves, fold, inside, prefixes, tidied, trace
from thalweg.kernels.reference.scan import scan
from thalweg.kernels.semirings import Entropy, Expectation, KMax, Log, Max, Sample

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


def log_partition(chain: Chain, *, method: str = "auto") -> Tensor:
    r""":math:`\log Z = \log \sum_y \exp(\text{score}(y))`, (B,); -inf, with gradient 0, where no path has weight.

    Its gradient in ``emissions`` is the probability of each label at each position. ``method`` is "loop"
    (:func:`fold`), "scan" (:func:`scan.scan`) or "auto", whichever is faster.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> log_partition(chain).exp()
    tensor([4.])
    """
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

    >>> from thalweg.kernels.reference.recursion import DenseMoves
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
