"""The two halves of an autoencoder: x to numbers about z, and z to numbers about x."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from thalweg.energies.variational.config import VAEConfig
from thalweg.layers.convolution import ACTIVATIONS


def build_encoder(config: VAEConfig) -> nn.Sequential:
    """``(B, *shape) -> (B, 2 latent)``.

    >>> import torch
    >>> build_encoder(VAEConfig(shape=(8, 8), network="convolution", hidden=(4, 8)))(torch.zeros(3, 8, 8)).shape
    torch.Size([3, 4])
    """
    if config.network == "dense":
        return nn.Sequential(nn.Flatten(), *_dense([config.size, *config.hidden, 2 * config.latent], config))
    channels, height, width = config.image
    layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, config.image)]
    for before, after in pairwise([channels, *config.hidden]):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), ACTIVATIONS[config.activation]()]
    height, width = _sides(height, width, len(config.hidden))[-1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(config.hidden[-1] * height * width, 2 * config.latent))


def build_decoder(config: VAEConfig) -> nn.Sequential:
    """``(N, latent) -> (N, *shape)``; sides are doubled by repeating pixels before each convolution.

    >>> import torch
    >>> build_decoder(VAEConfig(shape=(3, 7, 5), network="convolution", hidden=(4, 8)))(torch.zeros(6, 2)).shape
    torch.Size([6, 3, 7, 5])
    """
    shape = nn.Unflatten(1, config.shape)
    if config.network == "dense":
        return nn.Sequential(*_dense([config.latent, *reversed(config.hidden), config.size], config), shape)
    channels, height, width = config.image
    sides = _sides(height, width, len(config.hidden))
    first = (config.hidden[-1], *sides[-1])
    layers: list[nn.Module] = [nn.Linear(config.latent, math.prod(first)), nn.Unflatten(1, first)]
    widths = [*reversed(config.hidden), channels]
    for (before, after), side in zip(pairwise(widths), reversed(sides[:-1]), strict=True):
        layers += [ACTIVATIONS[config.activation](), nn.Upsample(size=side), nn.Conv2d(before, after, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), shape)


def _dense(widths: list[int], config: VAEConfig) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[config.activation]()]
    return layers[:-1]


def _sides(height: int, width: int, blocks: int) -> list[tuple[int, int]]:
    """Height and width before the first block and after each."""
    sides = [(height, width)]
    for _ in range(blocks):
        sides.append((-(-sides[-1][0] // 2), -(-sides[-1][1] // 2)))
    return sides
