"""Beliefs that follow the observations one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.energies.hmm.probabilities import log_of
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

__all__ = ["advance", "log_filter"]


def log_filter(chain: LinearChain) -> Tensor:
    """log p(z_t | x_1..x_t), (B, T, C); past a length what the prior alone says.

    >>> log_filter(LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2))).exp()[0, 1]
    tensor([0.5000, 0.5000])
    """
    with torch.no_grad():
        _ = chain.log_partition  # what cannot be observed has no posterior: this raises and names the item
    evidence, transitions, start, _, _ = chain.potentials
    scores = (start + evidence[:, 0]).log_softmax(-1)
    every = [scores]
    for t in range(1, evidence.size(1)):
        scores = (advance(scores, transitions) + evidence[:, t]).log_softmax(-1)
        every.append(scores)
    return torch.stack(every, dim=1)


def advance(scores: Tensor, transitions: Tensor | SparseTransitions) -> Tensor:
    """log sum_i exp(scores[b, i] + transitions[i, j]), (B, C), with finite gradients where nothing leads to j.

    >>> advance(torch.zeros(1, 2), torch.tensor([[0.0, float("-inf")], [0.0, float("-inf")]])).exp()
    tensor([[2., 0.]])
    """
    if isinstance(transitions, SparseTransitions):
        moved = scores[:, transitions.sources] + transitions.scores  # (B, E)
        targets = transitions.targets.expand_as(moved)
        top = torch.full_like(scores, float("-inf")).scatter_reduce(1, targets, moved.detach(), "amax")
        top = torch.where(torch.isneginf(top), 0, top)
        total = torch.zeros_like(scores).scatter_add(1, targets, (moved - top.gather(1, targets)).exp())
    else:
        moved = scores.unsqueeze(2) + transitions  # (B, C, C)
        top = moved.detach().amax(1)
        top = torch.where(torch.isneginf(top), 0, top)
        total = (moved - top.unsqueeze(1)).exp().sum(1)
    return log_of(total) + top
