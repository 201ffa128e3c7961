"""Several models as one: the mean of their probabilities, symbol by symbol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from thalweg.inference import Ensemble
from thalweg.layers.padded import Padded
from thalweg.tasks.models import SequenceModel

__all__ = ["Committee"]


class Committee(Ensemble):
    """An :class:`Ensemble` of models that also says where the members looked, on average.

    >>> Committee.__mro__[1].__name__
    'Ensemble'
    """

    def __init__(self, members: Sequence[SequenceModel]) -> None:
        super().__init__(members)
        self.members = tuple(members)

    def attention_weights(self, source: Padded, target: Padded) -> Tensor | None:
        """``(B, T, S)`` mean over the members that have attention; None where none has."""
        found = [member.attention_weights(source, target) for member in self.members]
        weights = [each for each in found if each is not None]
        return torch.stack(weights).mean(dim=0) if weights else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of all members."""
        return itertools.chain.from_iterable(member.parameters() for member in self.members)
