"""Where symbols stand: sinusoidal tables, rotary turns, and positions that do not count feature tags."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from thalweg.errors import ConfigError

__all__ = [
    "feature_positions",
    "kept_rotary_table",
    "kept_sinusoidal_table",
    "rotary_table",
    "rotate",
    "sinusoidal_table",
]

_BASE = 10000.0
_SHORTEST = 256


def sinusoidal_table(length: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    r"""Vectors of positions 0 ... at least ``length`` - 1 (Vaswani et al., 2017), ``(P, D)``.

    .. math:: e_{p,i} = \sin(p \, 10000^{-2i/D}), \qquad e_{p, D/2+i} = \cos(p \, 10000^{-2i/D}), \quad i < D/2

    Sines first, then cosines, as Marian's models have it. Computed in float64 and cut to ``dtype``. The caller's own:
    models share one that is kept.

    >>> sinusoidal_table(2, 4, dtype=torch.float32, device="cpu")[:2]
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    kept = kept_sinusoidal_table(length, width, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return kept.clone()


def kept_sinusoidal_table(length: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """:func:`sinusoidal_table` as all models share it: the same tensor for similar lengths, which nobody may change.

    >>> table = kept_sinusoidal_table(2, 4, dtype=torch.float32, device="cpu")
    >>> table is kept_sinusoidal_table(3, 4, dtype=torch.float32, device="cpu")
    True
    """
    if width % 2:
        raise ConfigError(f"sinusoidal positions need an even width, got {width}; choose learned positions")
    return _sinusoids(_rounded(length), width, dtype, str(device))


def rotary_table(length: int, width: int, *, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    r"""Cosines and sines of p 10000^{-2i/d} for positions p and i < d/2: two tensors ``(P, d/2)``.

    At least ``length`` positions. ``width`` is d, that of one head.

    >>> cos, sin = rotary_table(10, 8, dtype=torch.float32, device="cpu")
    >>> cos.shape[1], sin[0].tolist()
    (4, [0.0, 0.0, 0.0, 0.0])
    """
    cos, sin = kept_rotary_table(length, width, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return cos.clone(), sin.clone()


def kept_rotary_table(
    length: int, width: int, *, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """:func:`rotary_table` as all models share it; see :func:`kept_sinusoidal_table`.

    >>> kept_rotary_table(10, 8, dtype=torch.float32, device="cpu")[0].shape[1]
    4
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
