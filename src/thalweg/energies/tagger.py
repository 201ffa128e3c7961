"""A tagger whose score is linear in its weights: features of each position, and pairs of neighbouring labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.errors import ShapeError
from thalweg.inference.structures.chain import LinearChain


class LinearTagger(nn.Module):
    r"""Chains of labels with emissions that are linear in the features of a position,

    .. math:: s(x, y) = start(y_1) + \sum_t x_t^\top W_{\cdot y_t} + \sum_{t<L} A(y_t, y_{t+1}) + end(y_L)

    All weights begin at 0. What trains structures trains it: the losses of
    :mod:`thalweg.learning.structured_losses` by gradients, :class:`~thalweg.learning.StructuralSVM` by its dual.

    Args:
        features: F, the size of x_t.
        labels: C.
        transitions: score pairs of neighbours, and the labels that begin and end; off, each position is by itself.
        dtype: of the weights.

    >>> tagger = LinearTagger(features=3, labels=2)
    >>> tagger((torch.tensor([[[0, 2], [1, -1]]]), torch.tensor([2])))  # features 0 and 2, then 1 alone
    LinearChain(B=1, T=2, C=2, backend='auto')
    """

    def __init__(self, features: int, labels: int, *, transitions: bool = True, dtype: torch.dtype = torch.float64):
        super().__init__()
        for name, given in (("features", features), ("labels", labels)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ShapeError(f"`{name}` must be a whole number of at least 1, got {given!r}")
        self.weight = nn.Parameter(torch.zeros(features, labels, dtype=dtype))
        self.transitions = nn.Parameter(torch.zeros(labels, labels, dtype=dtype)) if transitions else None
        self.start = nn.Parameter(torch.zeros(labels, dtype=dtype)) if transitions else None
        self.end = nn.Parameter(torch.zeros(labels, dtype=dtype)) if transitions else None

    def forward(self, batch: tuple[Tensor, Tensor]) -> LinearChain:
        """The chains of a batch.

        Args:
            batch: features and lengths ``(B,)``. Features are numbers ``(B, T, F)``, or for indicators, which are 0 or
                1 and mostly 0, the integers ``(B, T, J)`` that say which are 1, -1 standing for none. What lies past a
                length counts for nothing.

        Time O(B T F C) or O(B T J C), before what the chain costs.
        """
        features, lengths = batch
        moves = self.transitions
        if moves is None:
            moves = self.weight.new_zeros(self.weight.shape[1], self.weight.shape[1])
        return LinearChain(self.emissions(features, lengths), moves, start=self.start, end=self.end, lengths=lengths)

    def emissions(self, features: Tensor, lengths: Tensor) -> Tensor:
        """The scores of labels at each position by its features, ``(B, T, C)``; 0 past each length.

        >>> LinearTagger(3, 2).emissions(torch.ones(1, 4, 3), torch.tensor([4])).shape
        torch.Size([1, 4, 2])
        """
        size = len(self.weight)
        if features.dim() != 3 or (features.is_floating_point() and features.shape[2] != size):
            raise ShapeError(
                f"features must be numbers (B, T, F) with F = {size} or integers (B, T, J), "
                f"got {tuple(features.shape)} {features.dtype}"
            )
        inside = (torch.arange(features.shape[1], device=features.device) < lengths.unsqueeze(-1)).unsqueeze(-1)
        if features.is_floating_point():
            return torch.where(inside, features, 0.0).to(self.weight.dtype) @ self.weight
        there = inside & (features >= 0)
        chosen = torch.where(there, features, 0)
        if features.numel() and int(chosen.max()) >= size:
            raise ShapeError(f"indicators must lie in 0..{size - 1} or be -1, got {int(chosen.max())}")
        rows = nn.functional.embedding(chosen, self.weight)  # (B, T, J, C)
        return (rows * there.unsqueeze(-1)).sum(dim=2)
