"""Several batches as one step: the gradient of a large batch in the memory of a small one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch


class Parts(tuple[Any, ...]):
    """Batches that make one step.

    >>> Parts([torch.zeros(2)]).to("cpu")[0]
    tensor([0., 0.])
    """

    __slots__ = ()

    def to(self, device: torch.device | str) -> Parts:
        """The same on another device."""
        return Parts(part.to(device) for part in self)


class Accumulated:
    """Batches in groups of ``count``, in their order; the last group of an epoch may be smaller.

    >>> class Three:
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def iterate(self, n, start=0):
    ...         return iter(range(start, 3))
    >>> groups = Accumulated(Three(), 2)
    >>> len(groups), list(groups.iterate(0)), list(groups.iterate(0, start=1))
    (2, [(0, 1), (2,)], [(2,)])
    """

    def __init__(self, batches: Any, count: int):
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return -(-len(self.batches) // self.count)

    def iterate(self, n: int, start: int = 0) -> Iterator[Parts]:
        """Groups of epoch ``n`` from number ``start`` on."""
        waiting = self.batches.iterate(n, min(start * self.count, len(self.batches)))
        while group := Parts(islice(waiting, self.count)):
            yield group
