"""Segmentations with gradients: compiled kernels where they exist, plain PyTorch otherwise and beyond.

The kernels give values and first derivatives; derivatives of those come from the reference by autograd. ``scores`` are
parts (B, T, 2, C), durations (K, C), (B, K, C) or (B, T, K, C), and moves (C, C) or (B, C, C); all sums are in float64.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from thalweg.kernels.dispatch import segment_kernels
from thalweg.kernels.reference import segments as reference
from thalweg.kernels.reference.recursion import inside
from thalweg.kernels.semirings import Log
from thalweg.kernels.tracing import derived, traced

__all__ = ["log_partition", "marginals", "tidy", "trusted_kernels"]

Scores = tuple[Tensor, ...]


def tidy(scores: Scores, lengths: Tensor) -> Scores:
    """The same with 0 for the parts past a length.

    >>> tidy((torch.full((1, 2, 2, 1), math.nan), torch.zeros(1, 1)), torch.tensor([1]))[0][0, 1].flatten()
    tensor([0., 0.])
    """
    there = inside(lengths, scores[0].shape[-3])[:, :, None, None]
    return torch.where(there, scores[0], 0.0), *scores[1:]


def trusted_kernels(backend: str, scores: Scores, lengths: Tensor) -> ModuleType | None:
    """The compiled kernels that may be given these scores; None where the reference has to answer.

    That is the backend's own choice; under ``torch.func``; where each segment has a score of its own; and for NaN and
    +inf, which maxima of vectors pass over.

    >>> nan = torch.full((1, 1, 2, 1), math.nan), torch.zeros(1, 1), torch.zeros(1, 1)
    >>> trusted_kernels("auto", nan, torch.tensor([1])) is None
    True
    """
    kernels = None if traced() or scores[1].dim() == 4 else segment_kernels(backend, scores[0])
    if kernels is None or _below_infinity(scores) or _below_infinity(tidy(scores, lengths)):
        return kernels
    return None


def _below_infinity(scores: Scores) -> bool:
    return all(bool(x.detach().amax() < math.inf) for x in scores)  # a maximum is NaN if any number is


def _scaled(units: Scores, weights: Tensor, scores: Scores) -> Scores:
    """Gradients of each item times its weight, added up where items share scores, in the type of the scores."""
    found = []
    for unit, own in zip(units, scores, strict=True):
        each = unit * weights.view(-1, *[1] * (unit.dim() - 1))
        found.append((each if own.dim() == unit.dim() else each.sum(0)).to(own.dtype))
    return tuple(found)


class _Value(Function):
    """log Z (B,) by a kernel, which makes the gradient at once: there is no cheaper moment."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, lengths: Tensor, *scores: Tensor) -> Tensor:
        values, units = kernels.likelihood(scores, lengths, gradient=True in ctx.needs_input_grad)
        ctx.save_for_backward(*scores, *units)
        ctx.lengths = lengths
        return values

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        scores, units = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        if torch.is_grad_enabled():
            found = _Gradient.apply(ctx.lengths, units, weights[0], *scores)
        else:
            found = _scaled(units, weights[0], scores)
        return None, None, *found  # type: ignore[misc]


class _Gradient(Function):
    """The gradient of weights (B,) times log Z, by what a kernel gave; its own gradient by the reference."""

    @staticmethod
    def forward(ctx: Any, lengths: Tensor, units: Scores, weights: Tensor, *scores: Tensor):
        ctx.save_for_backward(weights, *scores)
        ctx.lengths = lengths
        return _scaled(units, weights, scores)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor):
        def gradient(weights: Tensor, *scores: Tensor) -> Scores:
            values = reference.fold(Log(), ctx.lengths, tidy(scores, ctx.lengths))
            return torch.autograd.grad(values, scores, weights, create_graph=True)

        return derived(ctx, 2, gradient, outer)


def log_partition(scores: Scores, lengths: Tensor, *, backend: str = "auto") -> Tensor:
    """log Z of each item in float64, (B,), -inf for one without a feasible segmentation; differentiable to any order.

    >>> two = torch.zeros(1, 3, 2, 2), torch.zeros(3, 2), torch.zeros(2, 2)
    >>> log_partition(two, torch.tensor([3])).exp().round()
    tensor([18.], dtype=torch.float64)
    """
    kernels = trusted_kernels(backend, scores, lengths)
    if kernels is None:
        return reference.fold(Log(), lengths, tidy(scores, lengths))
    return _Value.apply(kernels, lengths, *scores)  # type: ignore[return-value]


def marginals(kernels: ModuleType, scores: Scores, lengths: Tensor) -> Tensor:
    """The probability of each part, (B, T, 2, C), by a kernel; differentiable.

    >>> from thalweg.kernels.dispatch import segment_kernels
    >>> one = torch.zeros(1, 2, 2, 1), torch.zeros(2, 1), torch.zeros(1, 1)
    >>> kernels = segment_kernels("auto", one[0])
    >>> torch.ones(1, 2) if kernels is None else marginals(kernels, one, torch.tensor([2]))[0, :, 0].T
    tensor([[1., 1.]])
    """
    units = kernels.likelihood(scores, lengths, gradient=True)[1]
    ones = units[0].new_ones(len(lengths))
    return _Gradient.apply(lengths, units, ones, *scores)[0]  # type: ignore[index]
