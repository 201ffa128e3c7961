"""Noise that turns a mode into a sample, and the mode's mean under noise into a differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.tracing import traced


def gumbel(shape: Sequence[int], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise, density exp(-z - exp(-z)), with the type and device of ``like``.

    >>> gumbel((2, 3), torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    kind = {"dtype": like.dtype, "device": like.device}
    if traced():  # vmap draws nothing in place
        noise = -torch.log1p(-torch.rand(tuple(shape), generator=generator, **kind))
    else:
        noise = torch.empty(tuple(shape), **kind).exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()


class PerturbedMode(torch.autograd.Function):
    r"""The mean parts of the mode under scale * noise, with the estimator of Berthet et al. (2020) as gradient.

    .. math:: \partial_\theta \mathbb{E}[y^*(\theta + \sigma z)] = \mathbb{E}[(y^* - y_0)\, (1 - e^{-z})^\top] / \sigma

    for Gumbel noise z; :math:`y_0`, the mode without noise, lowers the variance and costs no bias.

    >>> from thalweg.inference import LinearChain
    >>> chain = LinearChain(torch.zeros(1, 1, 2), torch.zeros(2, 2))
    >>> PerturbedMode.apply(chain.inputs[0], chain, torch.tensor([[[[0.0, 1.0]]]]), 1.0)
    tensor([[[0., 1.]]])
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, structure: Any, noise: Tensor, scale: float) -> Tensor:
        """The mean over the noise, (B, \\*parts); ``noise`` is (n, B, \\*parts)."""
        structure._require_feasible()
        marks = structure.parts_of(structure._modes_under(scale * noise))
        ctx.save_for_backward(noise, marks, structure.parts_of(structure.mode), structure.inside)
        ctx.scale = scale
        return marks.mean(0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor):
        """One weight for each noise: how much its mode moves along the cotangent."""
        noise, marks, plain, inside = ctx.saved_tensors
        dims = tuple(range(2, noise.dim()))
        along = ((marks - plain) * cotangents[0]).sum(dims, keepdim=True)  # (n, B, 1, ...)
        gradient = (along * (1 - torch.exp(-noise))).mean(0) / ctx.scale
        return gradient * inside, None, None, None
