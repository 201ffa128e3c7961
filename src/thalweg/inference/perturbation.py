"""Noise that turns a mode into a sample, and the mode's mean under noise into a differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PerturbedMode", "gumbel"]


def gumbel(shape: Sequence[int], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise, density exp(-z - exp(-z)), with the type and device of ``like``.

    >>> gumbel((2, 3), torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    noise = torch.empty(tuple(shape), dtype=like.dtype, device=like.device).exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()


class PerturbedMode(torch.autograd.Function):
    r"""The mean one-hot mode of emissions + scale * noise, with the estimator of Berthet et al. (2020) as gradient.

    .. math:: \partial_\theta \mathbb{E}[y^*(\theta + \sigma z)] = \mathbb{E}[(y^* - y_0)\, (1 - e^{-z})^\top] / \sigma

    for Gumbel noise z; :math:`y_0`, the mode without noise, lowers the variance and costs no bias.

    >>> from thalweg.inference import LinearChain
    >>> chain = LinearChain(torch.zeros(1, 1, 2), torch.zeros(2, 2))
    >>> PerturbedMode.apply(chain.potentials.emissions, chain, torch.tensor([[[[0.0, 1.0]]]]), 1.0)
    tensor([[[0., 1.]]])
    """

    @staticmethod
    def forward(ctx: Any, emissions: Tensor, chain: Any, noise: Tensor, scale: float) -> Tensor:
        """The mean over the noise, (B, T, C); ``noise`` is (n, B, T, C)."""
        modes = chain._noisy(noise, scale).mode.view(noise.shape[:-1])
        onehot = torch.zeros_like(noise).scatter_(-1, modes.clamp(min=0).unsqueeze(-1), 1.0)
        onehot = onehot.mul_((modes >= 0).unsqueeze(-1))
        ctx.save_for_backward(noise, onehot, chain.mode)
        ctx.scale = scale
        return onehot.mean(0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor):
        """One weight for each noise: how much its mode moves along the cotangent."""
        noise, onehot, mode = ctx.saved_tensors
        plain = torch.zeros_like(onehot[0]).scatter_(-1, mode.clamp(min=0).unsqueeze(-1), 1.0)
        plain = plain * (mode >= 0).unsqueeze(-1)
        along = ((onehot - plain) * cotangents[0]).sum((-2, -1), keepdim=True)  # (n, B, 1, 1)
        inside = (mode >= 0).unsqueeze(-1)
        gradient = (along * (1 - torch.exp(-noise))).mean(0) / ctx.scale
        return gradient * inside, None, None, None
