"""Sequences of several lengths in one tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Padded"]


class Padded(NamedTuple):
    """B sequences, padded at the end to a common length T.

    Attributes:
        tokens: ``(B, T)`` int64; past ``lengths[b]`` the padding symbol.
        lengths: ``(B,)`` int64, each at least 1; always on the CPU, where packing needs them.
        mask: ``(B, T)`` bool, true where a real symbol stands.

    Models take this; :func:`thalweg.data.pad` is the one place that makes it.

    >>> Padded(torch.tensor([[5, 6], [7, 1]]), torch.tensor([2, 1]), torch.tensor([[True, True], [True, False]])).size
    2
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor

    @property
    def size(self) -> int:
        """Number of sequences B."""
        return self.tokens.size(0)

    def to(self, device: torch.device | str) -> Padded:
        """The same with tokens and mask on another device."""
        tokens, mask = (part.to(device, non_blocking=True) for part in (self.tokens, self.mask))
        return Padded(tokens, self.lengths, mask)
