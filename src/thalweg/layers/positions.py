"""Where symbols stand: sinusoidal tables, rotary turns, learnt biases, positions that do not count feature tags."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError

_BASE = 10000.0
_SHORTEST = 256


def sinusoidal_table(length: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    r"""Vectors of positions 0 ... at least ``length`` - 1 (Vaswani et al., 2017), ``(P, D)``.

    .. math:: e_{p,i} = \sin(p \, 10000^{-2i/D}), \qquad e_{p, D/2+i} = \cos(p \, 10000^{-2i/D}), \quad i < D/2

    Sines first, then cosines, as Marian's models have it. Computed in float64 and cut to ``dtype``. All models share
    one table for similar lengths: nobody may change it.

    >>> sinusoidal_table(2, 4, dtype=torch.float32, device="cpu")[:2]
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    if width % 2:
        raise ConfigError(f"sinusoidal positions need an even width, got {width}; choose learned positions")
    return _sinusoids(_rounded(length), width, dtype, str(device))


def rotary_table(length: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    r"""Cosines and sines of p 10000^{-2i/d} for positions p and i < d/2: two tensors ``(P, d/2)``.

    At least ``length`` positions. ``width`` is d, that of one head. Shared as :func:`sinusoidal_table` is.

    >>> cos, sin = rotary_table(10, 8, dtype=torch.float32, device="cpu")
    >>> cos.shape[1], sin[0].tolist()
    (4, [0.0, 0.0, 0.0, 0.0])
    """
    if width % 2:
        raise ConfigError(f"rotary positions need heads of an even width, got {width}; change width or heads")
    return _angles(_rounded(length), width // 2, dtype, str(device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r"""Turn each plane (i, i + d/2) of ``x (..., d)`` by its position's angle (Su et al., 2021).

    .. math:: x'_i = x_i \cos - x_{i+d/2} \sin, \qquad x'_{i+d/2} = x_{i+d/2} \cos + x_i \sin

    ``cos`` and ``sin`` are ``(..., d/2)``. Products of a turned query and a turned key depend on the distance of
    their positions alone.

    >>> rotate(torch.tensor([1.0, 0.0]), torch.tensor([0.0]), torch.tensor([1.0]))
    tensor([0., 1.])
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RelativeBias(nn.Module):
    r"""What distance adds to attention scores, learnt for each head and bucket of distances (Raffel et al., 2020).

    A key n positions before its query has bucket n while n < N/2, then

    .. math:: N/2 + \lfloor N/2 \cdot \log(2n/N) / \log(2M/N) \rfloor

    and N - 1 from distance M on. With ``both`` the first half of the buckets is for keys that are not after their query
    and the second for those after it, each with half of N; else keys after the query, unseen, have bucket 0.

    Args:
        heads: H; buckets: N, even, with ``both`` a multiple of 4; reach: M, more than N/2.
        both: whether keys after the query are told from those before it.

    >>> bias = RelativeBias(2, buckets=4, reach=6, both=False)
    >>> bias(torch.arange(3).unsqueeze(0), torch.arange(5).unsqueeze(0)).shape
    torch.Size([1, 2, 3, 5])
    >>> bias.bucket(torch.tensor([0, -1, -2, -3, -4, -99, 7])).tolist()
    [0, 1, 2, 2, 3, 3, 0]
    """

    def __init__(self, heads: int, *, buckets: int, reach: int, both: bool):
        super().__init__()
        half = buckets // 2 if both else buckets
        if buckets < 2 or half % 2 or reach <= half // 2:
            raise ConfigError(
                f"relative positions need an even number of buckets (a multiple of 4 in an encoder) below twice their "
                f"reach, got {buckets} and {reach}; 32 and 128 are usual"
            )
        self.reach, self.both = reach, both
        self.weight = nn.Parameter(torch.randn(buckets, heads) * 0.02)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each int64 ``distance``, position of the key less that of the query."""
        count = self.weight.size(0) // (2 if self.both else 1)
        offset = (distance > 0) * count if self.both else 0
        distance = distance.abs() if self.both else -distance.clamp(max=0)
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.reach / exact)
        far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return torch.where(distance < exact, distance, far) + offset

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """``(B or 1, H, T, S)`` for positions of queries ``(B or 1, T)`` and keys ``(B or 1, S)``."""
        distance = keys.unsqueeze(1) - queries.unsqueeze(2)
        return nn.functional.embedding(self.bucket(distance), self.weight).permute(0, 3, 1, 2)


def feature_positions(is_feature: Tensor) -> Tensor:
    """Feature-invariant positions (Wu et al., 2021): 0 for every feature tag, 1, 2, ... for the other symbols.

    ``is_feature`` is ``(B, S)`` bool. Tags form a set: their order, and their number, move no other symbol.

    >>> feature_positions(torch.tensor([[True, False, True, False]]))
    tensor([[0, 1, 0, 2]])
    """
    counted = ~is_feature
    return counted.cumsum(dim=1) * counted


def _rounded(length: int) -> int:
    """The next power of two, so that growing lengths make few tables."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


@lru_cache(maxsize=32)
def _angles(length: int, half: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    # A table made in inference mode could not be used by a later training step.
    with torch.inference_mode(False), torch.no_grad():
        frequencies = _BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@lru_cache(maxsize=32)
def _sinusoids(length: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = _angles(length, width // 2, dtype, device)
        return torch.cat((sin, cos), dim=1)
