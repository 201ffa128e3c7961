"""A second structure, as small as one can be: the ways to cut a sequence into segments of at most K positions."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.inference import Structure
from thalweg.kernels.semirings import Semiring


class Segmentations(Structure):
    """Segments of B sequences; ``scores[b, t, k]`` (B, T, K) is that of the segment of k + 1 positions that ends at t.

    A structure is (B, T): at each position where a segment ends its number of positions, 0 elsewhere, -1 past the end.
    """

    def __init__(self, scores: Tensor, lengths: Tensor):
        super().__init__(scores.shape[:1], scores.shape[1:2])
        self.scores, self.lengths = scores, lengths.clone()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.scores,)

    @property
    def inside(self) -> Tensor:
        return (torch.arange(self.scores.shape[1]) < self.lengths.unsqueeze(-1)).unsqueeze(-1)

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> Segmentations:
        return Segmentations(*inputs, self.lengths)

    def fold(self, semiring: Semiring, *inputs: tuple[Tensor, ...]) -> Tensor:
        scores = [each[0] for each in inputs]
        before = [semiring.one(scores[0][..., 0, 0])]
        for t in range(scores[0].shape[-2]):
            ways = range(min(t + 1, scores[0].shape[-1]))
            terms = [semiring.act(before[t - k], *(each[..., t, k] for each in scores)) for k in ways]
            before.append(semiring.sum(torch.stack(terms, -1), -1))
        ends = self.lengths.expand(before[-1].shape).unsqueeze(-1)
        first = before[0].expand(before[-1].shape)
        return torch.stack((first, *before[1:]), -1).gather(-1, ends).squeeze(-1)

    def parts_of(self, value: Tensor) -> Tensor:
        own = value.unsqueeze(-1) == torch.arange(1, self.scores.shape[-1] + 1)
        return (own & self.inside).to(self.scores.dtype)

    def structure_of(self, parts: Tensor) -> Tensor:
        sizes = torch.where(parts.sum(-1) > 0, parts.argmax(-1) + 1, 0)
        return torch.where(self.inside.squeeze(-1) & (sizes.sum(-1, keepdim=True) > 0), sizes, -1)
