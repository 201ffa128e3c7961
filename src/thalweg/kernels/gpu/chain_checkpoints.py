"""Forward and backward over a chain in O(B sqrt(T) C) memory: messages are kept at the joints of segments alone.

A segment of S steps is a chain of its own, S + 1 positions long and sharing its last with the next one's first: what
lies before it is one vector log alpha in place of its first emissions, what lies behind it a vector log beta added to
its last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.gpu.chain_launch import Saved, dense, gradients, messages, plan_of
from thalweg.kernels.potentials import Chain

__all__ = ["Checkpoints", "checkpointed_backward", "checkpointed_forward", "log_messages"]


class Checkpoints(NamedTuple):
    """log alpha (Q, B, C) at the first position of each of Q segments, its log-sum-exp 0."""

    alphas: Tensor
    steps: int


def log_messages(saved: Saved, *, scaled: bool) -> Tensor:
    """Messages as logarithms, whichever way they were kept; past the length they may be anything.

    >>> chain = Chain(torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> if torch.cuda.is_available():
    ...     chain = Chain(*(part.cuda() for part in chain))
    ...     kept = messages(plan_of(chain), chain, None, keep=True, both=False)[1]
    ...     assert log_messages(kept, scaled=True).exp().sum() > 0
    """
    kept = saved.messages
    return torch.where((saved.flags != 0)[:, None, None], kept, kept.clamp(min=0).log()) if scaled else kept


def _segment(chain: Chain, begin: int, steps: int, alpha: Tensor | None) -> Chain:
    """The segment from ``begin``, the start and end scores moved into its emissions; an item that ended is 1 long."""
    emissions, _, start, end, lengths = chain
    transitions = dense(chain)
    part = emissions[:, begin : begin + steps + 1].clone()
    part[:, 0] = part[:, 0] + start if alpha is None else alpha
    ending = (lengths - 1 - begin).clamp(0, part.shape[1] - 1)
    # The last position of an item belongs to the segment that comes to it by a step.
    is_last = (lengths - 1 == begin + ending) & ((ending > 0) | (begin == 0))
    rows = torch.arange(len(lengths), device=lengths.device)
    part[rows, ending] += torch.where(is_last[:, None], end, 0.0)
    if transitions.dim() == 4:
        transitions = transitions[:, begin : begin + part.shape[1] - 1].contiguous()
    nothing = torch.zeros_like(start)
    return Chain(part, transitions, nothing, nothing, ending + 1)


def _gold_score(chain: Chain, gold: Tensor, begin: int, steps: int) -> Tensor:
    """The part of the gold score that lies in one segment, (B,) float64."""
    emissions, _, start, end, lengths = chain
    transitions = dense(chain)
    positions = torch.arange(begin, min(begin + steps + 1, chain.steps), device=gold.device)
    inside = positions < lengths[:, None]
    labels = torch.where(inside, gold[:, positions], 0)
    scores = emissions[:, positions].gather(2, labels[:, :, None])[:, :, 0]
    scores = scores + torch.where(positions == 0, start[labels], 0.0)
    scores = scores + torch.where(positions == lengths[:, None] - 1, end[labels], 0.0)
    own = inside & ((positions > begin) | (begin == 0))
    total = torch.where(own, scores, 0.0).sum(1, dtype=torch.float64)
    rows = torch.arange(len(lengths), device=gold.device)[:, None]
    where = {2: (), 3: (rows,), 4: (rows, positions[:-1])}[transitions.dim()]
    moves = transitions[(*where, labels[:, :-1], labels[:, 1:])]
    return total + torch.where(inside[:, 1:], moves, 0.0).sum(1, dtype=torch.float64)


def checkpointed_forward(chain: Chain, gold: Tensor | None, *, keep: bool) -> tuple[Tensor, Checkpoints | None]:
    """log Z less the gold score (B,), and the checkpoints; O(B (S + T / S) C) memory with S about sqrt(T).

    >>> chain = Chain(torch.zeros(1, 9, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([9]))
    >>> if torch.cuda.is_available():
    ...     values, kept = checkpointed_forward(Chain(*(part.cuda() for part in chain)), None, keep=True)
    ...     assert abs(values.item() - 9 * math.log(2)) < 1e-5 and kept.alphas.shape == (3, 1, 2)
    """
    steps = max(1, math.isqrt(max(1, chain.steps - 1)))
    rows = torch.arange(len(chain.lengths), device=chain.lengths.device)
    value = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    found = torch.empty_like(value)
    alpha, alphas = None, []
    for begin in range(0, max(1, chain.steps - 1), steps):
        part = _segment(chain, begin, steps, alpha)
        alphas.append(alpha if alpha is not None else part.emissions[:, 0].clone())
        plan = plan_of(part)
        _, saved = messages(plan, part, None, keep=True, both=False, values=found)
        value = value + found
        if gold is not None:
            value = value - _gold_score(chain, gold, begin, steps)
        last = log_messages(saved, scaled=plan.scaled)[0][rows, part.lengths - 1]
        alpha = last - last.logsumexp(1, keepdim=True).nan_to_num(neginf=0.0)
    # Where nothing is feasible the gold labels are not either, and -inf less -inf is no number.
    value = torch.where(torch.isnan(value), -math.inf, value).to(chain.emissions.dtype)
    return value, Checkpoints(torch.stack(alphas), steps) if keep else None


def checkpointed_backward(
    chain: Chain, kept: Checkpoints, weights: Tensor, gold: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of sum_b weights[b] values[b], segment by segment from the last.

    >>> chain = Chain(torch.zeros(1, 9, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([9]))
    >>> if torch.cuda.is_available():
    ...     chain = Chain(*(part.cuda() for part in chain))
    ...     kept = checkpointed_forward(chain, None, keep=True)[1]
    ...     slopes = checkpointed_backward(chain, kept, torch.ones(1).cuda(), None)
    ...     assert abs(slopes[1].sum().item() - 8) < 1e-5
    """
    emissions, _, _, _, lengths = chain
    transitions = dense(chain)
    d_emissions = torch.zeros_like(emissions)
    per_step = transitions.dim() == 4
    d_transitions = torch.zeros_like(transitions, dtype=None if per_step else torch.float64)
    rows = torch.arange(len(lengths), device=lengths.device)
    beta = torch.zeros_like(kept.alphas[0])
    for segment in reversed(range(len(kept.alphas))):
        begin = segment * kept.steps
        part = _segment(chain, begin, kept.steps, kept.alphas[segment] if segment else None)
        goes_on = lengths - 1 > begin + part.steps - 1
        part.emissions[:, -1] += torch.where(goes_on[:, None], beta, 0.0)
        plan = plan_of(part)
        _, saved = messages(plan, part, None, keep=True, both=True)
        slope = torch.empty_like(dense(part))
        here = torch.where((lengths - 1 > begin) | (begin == 0), weights, 0.0)
        labels = None if gold is None else gold[:, begin : begin + part.steps].contiguous()
        d_part, _ = gradients(plan, part, saved, here, labels, slope)
        own = 0 if begin == 0 else 1
        d_emissions[:, begin + own : begin + part.steps] = d_part[:, own:]
        if per_step:
            d_transitions[:, begin : begin + part.steps - 1] = slope
        else:
            d_transitions += slope
        beta = log_messages(saved, scaled=plan.scaled)[1][:, 0]
    d_end = d_emissions[rows, lengths - 1].sum(0)
    return d_emissions, d_transitions.to(emissions.dtype), d_emissions[:, 0].sum(0), d_end
