"""k-means: where to begin when nothing is known."""

from __future__ import annotations

import torch
from torch import Tensor

_ENOUGH = 10  # rounds; EM does the rest


def cluster(points: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The nearest of ``size`` centres for each of ``(M, D)`` points, ``(M,)``: k-means++ and some rounds of Lloyd's.

    ``generator`` lies on the CPU, so that a seed means the same wherever the points are. Time O(M K D) a round.
    Arthur and Vassilvitskii (2007).

    >>> cluster(torch.tensor([[0.0], [0.1], [5.0]]), 2, torch.Generator().manual_seed(0)).diff().tolist()[0]
    0
    """
    centres = _seeds(points, size, generator)
    labels = torch.zeros(len(points), dtype=torch.long, device=points.device)
    for _ in range(_ENOUGH):
        labels = torch.cdist(points, centres).argmin(1)
        counts = torch.bincount(labels, minlength=size).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, labels, points)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return labels


def _seeds(points: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Points drawn in proportion to the squared distance from those drawn before."""
    draws = torch.rand(size, generator=generator, dtype=points.dtype).to(points.device)
    chosen = points[(draws[:1] * len(points)).long().clamp(max=len(points) - 1)]
    nearest = (points - chosen).square().sum(1)
    for draw in draws[1:]:
        reach = nearest.cumsum(0)
        place = torch.searchsorted(reach, draw * reach[-1], right=True).clamp(max=len(points) - 1)
        chosen = torch.cat([chosen, points[place].view(1, -1)])
        nearest = torch.minimum(nearest, (points - chosen[-1]).square().sum(1))
    return chosen
