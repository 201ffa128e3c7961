"""Exact inference over linear chains on the GPU: the backend functions, each a handful of launches and no waiting.

Shared and per-item transitions of up to 128 labels go through `chain_walks` and, for the items that underflow there,
`chain_log`; everything else through `chain_log` alone. Which items those are is decided on the device. Results are the
same, bit for bit, every time.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from thalweg.kernels.gpu import chain_launch
from thalweg.kernels.gpu.chain_launch import Saved, dense, plan_of
from thalweg.kernels.gpu.launching import on_device_of
from thalweg.kernels.potentials import Chain
from thalweg.kernels.reference.chain import top_k as top_k  # by tensors: a kernel would be no other

SMALL = 1 << 18  # numbers of a batch whose gradient takes less time to compute than to ask for

__all__ = ["at_once", "backward", "forward", "posteriors", "sample", "times", "top_k", "viterbi"]


def at_once(chain: Chain, gold: Tensor | None, total: bool) -> tuple[Tensor, Saved, tuple[Tensor, ...], None] | None:
    """log Z, or score(gold) - log Z; what :func:`backward` needs; the gradient of the sum of these values; no more.

    The values are (B,), or their sum where that is asked for. Whether they are finite only a wait would tell.
    None where the batch is so large that computing the gradient takes longer than asking for it.

    >>> chain = Chain(torch.zeros(64, 512, 64), torch.zeros(64, 64), *[torch.zeros(64)] * 2, torch.full((64,), 512))
    >>> at_once(chain, None, False) is None
    True
    """
    emissions = chain.emissions
    if emissions.numel() > SMALL or not len(emissions):
        return None
    sign = 1 if gold is None else -1
    weights = _units(len(emissions), emissions.dtype, emissions.device, sign)
    with on_device_of(emissions):
        values, saved, gradients = chain_launch.messages(
            plan_of(chain), chain, _plain(gold), sign=sign, weights=weights
        )
    return values.sum() if total else values, saved, gradients, None


@lru_cache(maxsize=64)
def _units(count: int, dtype: torch.dtype, device: torch.device, value: int) -> Tensor:
    return torch.full((count,), value, dtype=dtype, device=device)


def _plain(gold: Tensor | None) -> Tensor | None:
    return None if gold is None else gold.contiguous()


def times(gradients: tuple[Tensor, ...], weights: Tensor, gold: Tensor | None) -> tuple[Tensor, ...] | None:
    """The gradient of :func:`at_once` for weights (B,) of its values or one for all, in place; None if they may differ.

    >>> times((torch.ones(1),), torch.tensor(3.0).expand(2), None)
    (tensor([3.]),)
    """
    if weights.dim() and weights.stride(0):
        return None  # whether they are alike, only a wait for the device would tell
    for gradient in gradients:
        gradient.mul_(weights[0] if weights.dim() else weights)
    return gradients


def forward(
    chain: Chain,
    gold: Tensor | None = None,
    *,
    keep: bool = True,
    low_memory: bool = False,
    method: str = "auto",
    sign: int = 1,
) -> tuple[Tensor, Saved | None]:
    """log Z of each item, less score(gold) where gold (B, T) is given, times ``sign``; what :func:`backward` needs.

    -inf for an item with no structure, NaN for one with a label out of range. With ``low_memory`` messages are kept at
    every ~sqrt(T)-th position only. ``method`` "sequential" walks from end to end; "chunked" walks many chunks at once,
    each from a guess made some way before it, and again where the guesses do not fit; "auto" chooses by size.
    """
    plan = plan_of(chain, method)
    if plan.B == 0:
        return chain.emissions.new_empty(0), None
    every = max(1, math.isqrt(plan.T - 1)) if low_memory else 1
    plan = plan._replace(every=every if keep else plan.T)
    with on_device_of(chain.emissions):
        values, saved, _ = chain_launch.messages(plan, chain, _plain(gold), ways=1 + keep, sign=sign)
    return values, saved if keep else None


def backward(chain: Chain, saved: Saved | None, weights: Tensor, gold: Tensor | None = None) -> tuple[Tensor, ...]:
    """The gradient of sum_b weights[b] (log Z - score(gold))[b] in emissions, transitions, start and end.

    No step waits for another: every position is by itself, and the sum over positions is a matrix product of float32
    accuracy. Partial sums are added in a fixed order.
    """
    if saved is None:  # no items
        return tuple(torch.zeros_like(part) for part in (chain.emissions, dense(chain), chain.start, chain.end))
    weights, gold = weights.to(chain.emissions.dtype).contiguous(), _plain(gold)
    with on_device_of(chain.emissions):
        by_parts = saved.plan.every > 1
        return (_by_segments if by_parts else chain_launch.gradients)(chain, saved, weights, gold)


def _by_segments(chain: Chain, saved: Saved, weights: Tensor, gold: Tensor | None) -> tuple[Tensor, ...]:
    """:func:`backward` in O(B sqrt(T) C) memory beside the gradient.

    A segment, from one position with messages to the next, is a chain of its own: what lies before it is one vector
    log alpha in place of its first emissions, what lies behind it a vector log beta added to its last.
    """
    emissions, lengths, transitions = chain.emissions, chain.lengths, dense(chain)
    per_step, rows, final = transitions.dim() == 4, torch.arange(len(lengths), device=lengths.device), lengths - 1
    kept, nothing = saved.logarithms(), torch.zeros_like(chain.start)
    d_emissions = torch.zeros_like(emissions)
    d_transitions = torch.zeros_like(transitions, dtype=None if per_step else torch.float64)
    for slot, begin in enumerate(range(0, chain.steps - 1, saved.plan.every)):
        stop = min(begin + saved.plan.every, chain.steps - 1)
        part = emissions[:, begin : stop + 1].clone()
        part[:, 0] = torch.where((final >= begin)[:, None], kept[:, 0, slot], 0.0)
        ending = (final - begin).clamp(0, stop - begin)
        # An alpha at the last position of an item has its end score already.
        beta = kept[:, 1, min(slot + 1, kept.shape[2] - 1)]
        behind = torch.where((final > stop)[:, None], beta, chain.end)
        part[rows, ending] += torch.where((ending > 0)[:, None], behind, 0.0)
        moves = transitions[:, begin:stop].contiguous() if per_step else transitions
        segment = Chain(part, moves, nothing, nothing, ending + 1)
        labels = None if gold is None else gold[:, begin : stop + 1].contiguous()
        # The last position of an item belongs to the segment that comes to it by a step.
        own = torch.where((final > begin) | (begin == 0), weights, 0.0)
        plan = plan_of(segment)
        slopes = chain_launch.gradients(segment, chain_launch.messages(plan, segment, None)[1], own, labels)
        skipped = min(begin, 1)
        d_emissions[:, begin + skipped : stop + 1] = slopes[0][:, skipped:]
        if per_step:
            d_transitions[:, begin:stop] = slopes[1]
        else:
            d_transitions += slopes[1]
    d_end = d_emissions[rows, final].sum(0)
    return d_emissions, d_transitions.to(emissions.dtype), d_emissions[:, 0].sum(0), d_end


def viterbi(chain: Chain, method: str = "auto") -> tuple[Tensor, Tensor]:
    """The highest score (B,) and its labelling (B, T), -1 past the length; ``method`` as of :func:`forward`.

    Among equals the lowest label wins, going backwards from the last position. The score is summed in float64.
    """
    plan = plan_of(chain, method)
    if plan.B == 0:
        return chain.emissions.new_empty(0), chain.lengths.new_empty((0, plan.T))
    with on_device_of(chain.emissions):
        labels, scores = chain_launch.labels(plan, chain)
    return scores, labels


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples (S, B, T), -1 past the length, by inverting cumulative distributions backwards from the last label.

    ``uniforms`` (S, B, T) lie in [0, 1); one walk serves all S.
    """
    if not uniforms.numel():
        return chain.lengths.new_empty(uniforms.shape)
    with on_device_of(chain.emissions):
        return chain_launch.labels(plan_of(chain), chain, uniforms.contiguous())[0]


def posteriors(chain: Chain, *, by_step: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of labels (B, T, C) and of moves, (B, T-1, C, C) or, added up over the steps, (B, 1, C, C).

    They are the gradients of transitions of every step, or of every item.
    """
    moves, (B, T, C) = dense(chain), chain.emissions.shape
    moves = moves.unsqueeze(1) if moves.dim() == 3 and by_step else moves
    wide = chain._replace(transitions=moves.expand(B, *[T - 1] * by_step, C, C).contiguous())
    labels, edges, *_ = backward(wide, forward(wide)[1], torch.ones_like(chain.emissions[:, 0, 0]))
    return labels, edges if by_step else edges.unsqueeze(1)
