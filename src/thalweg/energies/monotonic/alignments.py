"""Monotone alignments of a target with a source: the chain over source positions, filtered as symbols come."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NEVER = -1e30
"""The logarithm of nothing: exp of it is 0, and sums and differences of it stay finite, as do their gradients."""


def move_log_probs(pull: Tensor, jumps: Tensor | None, mask: Tensor) -> Tensor:
    r"""Where the reader goes: log p(a_t = j | a_{t-1} = i) for j >= i, from scores.

    .. math:: p(a_t = j \mid a_{t-1} = i) \propto [j \ge i] \exp(u_{tj} + w_{ti}(\min(j - i, J - 1)))

    Without ``jumps`` the model is of order zero: where it was bears on where it goes only in that it never goes back.

    Args:
        pull: ``(B, T, S)`` u, of each position.
        jumps: ``(B, T, S, J)`` w, of each length of a jump from each position; the last is of all longer ones too.
        mask: ``(B, S)`` true on real positions, of which the first is one.
    Returns:
        ``(B, T, S, S)``; about ``NEVER`` where nothing leads. Time and memory O(B T S^2). Wu and Cotterell (2019).

    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> move_log_probs(torch.zeros(1, 1, 2), None, mask).exp()
    tensor([[[[0.5000, 0.5000],
              [0.0000, 1.0000]]]])
    """
    B, T, S = pull.shape
    places = torch.arange(S, device=pull.device)
    length = places - places[:, None]  # (S, S) of the jump from i to j
    scores = pull.unsqueeze(2).expand(B, T, S, S)
    if jumps is not None:
        index = length.clamp(0, jumps.size(3) - 1).expand(B, T, S, S)
        scores = scores + jumps.gather(3, index)
    open_ = (length >= 0) & mask[:, None, None, :]
    return scores.masked_fill(~open_, NEVER).log_softmax(dim=3).masked_fill(~open_, NEVER)


def walk_log_probs(stay: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
    r"""Where a reader goes who walks: log p(a_t = j | a_{t-1} = i) for j >= i, from scores of two decisions.

    It stays where it gave the last symbol, or takes a step; each position that it comes to it skips, or stops there:

    .. math:: p(j \mid i) = [j = i]\, \sigma(u_{ti}) + [j > i]\, \sigma(-u_{ti})
              \Big(\prod_{k=i+1}^{j-1} \sigma(w_{tk})\Big)\, \sigma(-w_{tj})

    These are the edits of a string: a symbol given after staying is an insertion, one after a step a substitution, a
    position skipped a deletion. The last real position is neither left nor skipped.

    Args:
        stay, skip: ``(B, T, S)`` u and w; mask: ``(B, S)`` true on real positions, of which the first is one.
    Returns:
        ``(B, T, S, S)``; about ``NEVER`` where nothing leads. Time and memory O(B T S^2).

    >>> walk_log_probs(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.ones(1, 3, dtype=torch.bool)).exp()
    tensor([[[[0.5000, 0.2500, 0.2500],
              [0.0000, 0.5000, 0.5000],
              [0.0000, 0.0000, 1.0000]]]])
    """
    places = torch.arange(mask.size(1), device=mask.device)
    length = places - places[:, None]
    last = (places == mask.sum(1, keepdim=True) - 1).unsqueeze(1)
    stays, leaves = (functional.logsigmoid(sign * stay) for sign in (1, -1))
    skips, stops = (functional.logsigmoid(sign * skip) for sign in (1, -1))
    passed = skips.cumsum(2)
    reached = passed - skips + stops.masked_fill(last, 0.0)  # skipped all before, stopped here
    steps = (leaves - passed).unsqueeze(3) + reached.unsqueeze(2)
    scores = torch.where(length > 0, steps, stays.masked_fill(last, 0.0).unsqueeze(3))
    return scores.masked_fill(~((length >= 0) & mask[:, None, None, :]), NEVER)


def first_beliefs(B: int, S: int, like: Tensor) -> Tensor:
    """``(B, S)`` where the reader is before the first symbol: at the first position.

    >>> first_beliefs(1, 2, torch.ones(1)).exp()
    tensor([[1., 0.]])
    """
    return torch.cat((like.new_zeros(B, 1), like.new_full((B, S - 1), NEVER)), dim=1)


def moved(belief: Tensor, moves: Tensor) -> Tensor:
    """Beliefs ``(B, S)`` after a move ``(B, S, S)``: log sum_i b(i) p(j | i).

    >>> moved(torch.tensor([[0.0, NEVER]]), torch.tensor([[[0.25, 0.75], [0.0, 1.0]]]).log()).exp()
    tensor([[0.2500, 0.7500]])
    """
    return torch.logsumexp(belief.unsqueeze(2) + moves, dim=1)


def seen(belief: Tensor, emissions: Tensor) -> Tensor:
    """Beliefs ``(B, S)`` once a symbol is known that each position gives with log-probability ``emissions (B, S)``.

    >>> seen(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.1, 0.3]]).log()).exp()
    tensor([[0.2500, 0.7500]])
    """
    return (belief + emissions).log_softmax(dim=1)


def filtered(moves: Tensor, emissions: Tensor, mask: Tensor) -> Tensor:
    r"""Where the reader is at each step, given the symbols before it: log p(a_t = s | y_{<t}).

    .. math:: \pi_t(j) = \sum_i \beta_{t-1}(i)\, p(a_t = j \mid a_{t-1} = i), \qquad
              \beta_t(j) \propto \pi_t(j)\, p(y_t \mid a_t = j)

    so that :math:`p(y_t \mid y_{<t}) = \sum_s \pi_t(s) p(y_t \mid s)`, and the product over t is the likelihood summed
    over all monotone alignments, as by the forward recursion.

    Args:
        moves: ``(B, T, S, S)`` of :func:`move_log_probs`; emissions: ``(B, T, S)`` log p(y_t | a_t = s).
        mask: ``(B, T)``; a target's padding changes nothing.
    Returns:
        ``(B, T, S)``. Time O(B T S^2).

    >>> moves = move_log_probs(torch.zeros(1, 2, 2), None, torch.ones(1, 2, dtype=torch.bool))
    >>> filtered(moves, torch.tensor([[[0.5, 0.1], [0.2, 0.2]]]).log(), torch.ones(1, 2, dtype=torch.bool)).exp()
    tensor([[[0.5000, 0.5000],
             [0.4167, 0.5833]]])
    """
    B, _, S = emissions.shape
    belief, found = first_beliefs(B, S, emissions), []
    emissions = emissions.masked_fill(~mask.unsqueeze(2), 0.0)
    for move, emission in zip(moves.unbind(1), emissions.unbind(1), strict=True):
        found.append(moved(belief, move))
        belief = seen(found[-1], emission)
    return torch.stack(found, dim=1)
