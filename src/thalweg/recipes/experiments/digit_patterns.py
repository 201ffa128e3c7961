"""Digits as patterns to store, and spoilt ones to ask for them with."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.data.images.digits import load_digit_images


def stored_digits(count: int, seed: int) -> Tensor:
    """So many digits, drawn without replacement: their mean taken off, each of norm 1, ``(count, 64)`` float32.

    >>> stored_digits(5, 0).norm(dim=1)
    tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
    """
    centred = _chosen(count, seed)
    centred = centred - centred.mean(0) if count > 1 else centred
    return centred / centred.norm(dim=1, keepdim=True)


def as_pixels(states: Tensor, count: int, seed: int, place: int) -> Tensor:
    """States ``(S, 64)`` of the memory of :func:`stored_digits` as images from 0 to 16, in the scale of one pattern.

    >>> as_pixels(stored_digits(5, 0), 5, 0, 2)[2].amax()
    tensor(16.)
    """
    chosen = _chosen(count, seed)
    mean = chosen.mean(0) if count > 1 else torch.zeros(64)
    return mean + states * (chosen[place] - mean).norm()


def _chosen(count: int, seed: int) -> Tensor:
    images = torch.from_numpy(load_digit_images()[0]).float()
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]]


def corrupted(patterns: Tensor, kind: str, level: float, seed: int) -> Tensor:
    """Queries ``(N, 64)``: Gaussian noise of that norm over the pattern's, or so many rows hidden (0) from below.

    >>> corrupted(torch.ones(1, 64), "hidden", 6, 0).sum()
    tensor(16.)
    """
    if kind == "hidden":
        kept = 64 - 8 * int(level)
        return torch.cat([patterns[:, :kept], torch.zeros_like(patterns[:, kept:])], dim=1)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(patterns.shape, generator=generator) / patterns.size(1) ** 0.5
    return patterns + level * patterns.norm(dim=1, keepdim=True) * noise
