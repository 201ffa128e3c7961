"""Where a search in buffers of fixed shape stands, whatever advances it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Beam"]


class Beam(NamedTuple):
    """Where the search stands, for A items of W rows each; all is changed in place.

    >>> beam = Beam.empty(2, 3, 1, 5, torch.device("cpu"))
    >>> beam.live.shape, beam.history.shape
    (torch.Size([2, 3]), torch.Size([5, 2, 3]))
    """

    tokens: Tensor  # (A W,) int64: what each row is fed next
    parents: Tensor  # (A W,) int64: the row it comes from
    live: Tensor  # (A, W) log-probabilities, -inf where there is no row
    rank: Tensor  # (A, k) of the finished, best first
    score: Tensor  # (A, k)
    code: Tensor  # (A, k) int64: step * W V + row * V + symbol of the last choice
    history: Tensor  # (T, A, W) int64: row * V + symbol
    dropped: Tensor  # (A,) the best score that was ever let go of
    done: Tensor  # (A,) int32: the number of the step after which nothing can change; 0 before
    position: Tensor  # (1,) int64: steps taken
    remaining: Tensor  # (1,) int32: items that are not done
    arrived: Tensor  # (1,) int32: programs of a launch that have come to their end; 0 between launches
    notes: Tensor  # (2,) int32: what programs tell the last of them; 0 between launches

    @classmethod
    def empty(cls, items: int, width: int, k: int, capacity: int, device: torch.device) -> Beam:
        """Room for a search of at most ``capacity`` steps."""

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        single = torch.float32
        return cls(
            *(room(items * width), room(items * width), room(items, width, dtype=single)),
            *(room(items, k, dtype=single), room(items, k, dtype=single), room(items, k)),
            *(room(capacity, items, width), room(items, dtype=single), room(items, dtype=torch.int32), room(1)),
            *(room(count, dtype=torch.int32) for count in (1, 1, 2)),
        )
