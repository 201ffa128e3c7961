"""Linear chains in plain PyTorch, dense and sparse: the definition of truth.

Every quantity is one algebra (:mod:`thalweg.kernels.semirings`) over one recursion (:mod:`.recursion`). Derivatives of
any order are taken by autograd through it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.errors import ConfigError, nearest
from thalweg.kernels.dispatch import on_cpu
from thalweg.kernels.potentials import Chain
from thalweg.kernels.reference.recursion import fold, inside, prefixes, scan, tidied, trace
from thalweg.kernels.semirings import Expectation, KMax, Log, Max, Sample

METHODS = ("auto", "loop", "scan")  # of log_partition


def log_partition(chain: Chain, *, method: str = "auto") -> Tensor:
    r""":math:`\log Z = \log \sum_y \exp(\text{score}(y))`, (B,); -inf, with gradient 0, where no path has weight.

    Its gradient in ``emissions`` is the probability of each label at each position. ``method`` is "loop"
    (:func:`.fold`), "scan" (:func:`.scan`, of dense chains alone) or "auto", whichever is faster.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> log_partition(chain).exp()
    tensor([4.])
    """
    if method not in METHODS:
        raise ConfigError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}; {nearest(method, METHODS)}")
    by_scan = method == "scan" or (method == "auto" and scan_is_faster(chain))
    return (scan if by_scan and isinstance(chain.transitions, Tensor) else fold)(Log(), chain)


def scan_is_faster(chain: Chain) -> bool:
    """Whether a tree of matrix products beats the loop: a step's C^3 must cost less than the overhead of a step."""
    B, T, C = chain.emissions.shape
    # Measured on a CPU: even at B C^3 = 2^14 to 2^15, with gradients and without. Where kernels are launched a step
    # costs about as much and arithmetic far less; that bound is an estimate. The last keeps memory below about 1 GB.
    step, most = B * C**3, 2**14 if on_cpu(chain.emissions) else 2**20
    return T >= 8 and step <= most and T * step <= 2**26


def expectation(chain: Chain, other: Chain) -> Tensor:
    """The mean of another chain's score under this chain's distribution, (B,); differentiable in both.

    Paths of weight 0 add 0 even where ``other`` is -inf; a path of positive weight with score -inf makes it -inf.
    The lengths are those of ``chain``; the kinds of transitions may differ.
    """
    return fold(Expectation(), chain, other)[1]


def score(chain: Chain, labels: Tensor) -> Tensor:
    """The score of given paths: labels (.., B, T) int64 to (.., B); anything past the length."""
    moves, (chain,) = tidied(chain)
    valid = inside(chain.lengths, chain.steps)
    labels = torch.where(valid, labels, 0)
    scores = chain.emissions.expand(*labels.shape, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    last = labels.gather(-1, (chain.lengths - 1).expand(labels.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    emitted = torch.where(valid, scores, 0.0).sum(-1) + chain.start[labels[..., 0]] + chain.end[last]
    return emitted + torch.where(valid[:, 1:], moves.along(labels), 0.0).sum(-1)


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The best path: scores (B,), labels (B, T) with -1 past the length; all -1 where no path has weight.

    Of equal paths the one with the lowest last label, then the lowest label before it, and so on backwards.
    """
    scores, labels = trace(Max(), chain, chain.lengths.new_zeros(1, len(chain.lengths)))
    return scores, labels[0]


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths, distinct and falling: scores (B, k), labels (B, k, T).

    Missing ones (fewer than k have weight) have score -inf and labels -1, as labels past the length.
    """
    ranks = torch.arange(k, device=chain.lengths.device).unsqueeze(-1).expand(-1, len(chain.lengths))
    scores, labels = trace(KMax(k), chain, ranks)
    return scores.mT, labels.transpose(0, 1)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples by numbers in [0, 1): uniforms (S, B, T) to labels (S, B, T) with -1 past the length.

    Backwards from the last position; position t takes the first label whose cumulative probability (over rising
    labels, given the label after it) is above ``uniforms[s, b, t]``.
    """
    with torch.no_grad():
        return trace(Sample(), chain, chain.lengths.new_zeros(uniforms.shape[:2]), uniforms)[1]


def edge_marginals(chain: Chain) -> Tensor:
    """The probability of each move at each step, (B, T-1, C, C) or (B, T-1, E); 0 past the length. Forward-backward."""
    moves, (chain,) = tidied(chain)
    algebra, steps = Log(), []
    before = [x for x, _ in prefixes(algebra, moves, (chain,))]
    after = chain.end.expand(before[0].shape)
    columns = chain.emissions.unbind(1)
    for t in range(chain.steps - 1, 0, -1):
        valid = t < chain.lengths
        terms = moves.at(t)[0] + moves.enter(columns[t] + after)  # (B, C, C) or (B, E)
        # Each step's probabilities sum to 1: normalised on the spot, nothing taken off on the way matters.
        chances = _normalised((moves.leave(before[t - 1]) + terms).flatten(1)).view(terms.shape)
        steps.append(torch.where(valid.view(-1, *[1] * moves.axes), chances, 0.0))
        after = torch.where(valid.unsqueeze(-1), algebra.split(algebra.sum(terms, moves.out_of))[0], after)
    shape = chain.moves.shape[-moves.axes :]
    found = torch.stack(steps[::-1], 1) if steps else chain.emissions.new_zeros(len(chain.lengths), 0, *shape)
    return found[..., : shape[-1]]  # without the edge that stands in where there is none


def _normalised(x: Tensor) -> Tensor:
    """Softmax over the last axis with all 0 where everything is -inf; derivatives of every order are finite."""
    total = Log().sum(x, -1).unsqueeze(-1)
    return (x - torch.where(total == -math.inf, 0.0, total)).exp()
