"""Chains to measure on, and what a likelihood with its gradients is read as."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Size = tuple[int, int, int]
"""Batch B, positions T, labels C."""


@dataclass(frozen=True)
class Problem:
    """Scores of B chains, gold labels (B, T) and lengths (B,), None where every chain has T positions.

    score(y) = start[y_1] + sum_t emissions[t, y_t] + sum_t transitions[y_t, y_t+1] + end[y_L].
    """

    emissions: Tensor  # (B, T, C)
    transitions: Tensor  # (C, C)
    start: Tensor  # (C,)
    end: Tensor  # (C,)
    gold: Tensor  # (B, T)
    lengths: Tensor | None = None  # (B,)

    @classmethod
    def random(cls, size: Size, *, device: str = "cpu", ragged: bool = False, seed: int = 0) -> Problem:
        """Normal scores in float32, the same on every device; ``ragged`` halves the length of every other chain."""
        B, T, C = size
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        gold = torch.randint(C, (B, T), generator=draw).to(device)
        lengths = torch.tensor([T if b % 2 == 0 else T // 2 + 1 for b in range(B)], device=device) if ragged else None
        return cls(normal(B, T, C), normal(C, C), normal(C), normal(C), gold, lengths)

    @property
    def size(self) -> Size:
        """(B, T, C)."""
        B, T, C = self.emissions.shape
        return B, T, C

    @property
    def all_lengths(self) -> Tensor:
        """(B,), also where every chain has T positions."""
        B, T, _ = self.size
        return self.gold.new_full((B,), T) if self.lengths is None else self.lengths

    @property
    def mask(self) -> Tensor:
        """(B, T), true inside the lengths."""
        return torch.arange(self.size[1], device=self.gold.device) < self.all_lengths.unsqueeze(1)

    def double(self) -> Problem:
        """The same scores in float64."""
        names = ("emissions", "transitions", "start", "end")
        return replace(self, **{name: getattr(self, name).double() for name in names})

    def leaves(self) -> list[Tensor]:
        """Copies of the four kinds of scores that ask for gradients."""
        return [x.clone().requires_grad_() for x in (self.emissions, self.transitions, self.start, self.end)]

    def path_scores(self, labels: Tensor) -> Tensor:
        """(B,) scores of labels (B, T) in float64; whatever lies past the length is ignored."""
        double, mask, lengths = self.double(), self.mask, self.all_lengths
        y = labels.to(self.gold.device).where(mask, 0)
        each = double.emissions.gather(2, y.unsqueeze(2)).squeeze(2)
        moves = double.transitions[y[:, :-1], y[:, 1:]]
        last = y.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
        inside = each.where(mask, 0.0).sum(1) + moves.where(mask[:, 1:], 0.0).sum(1)
        return (inside + double.start[y[:, 0]] + double.end[last]).cpu()


class Gradients(NamedTuple):
    """Negative log-likelihood summed over the batch, and its gradients; float64 on the CPU."""

    value: Tensor  # ()
    emissions: Tensor  # (B, T, C)
    transitions: Tensor  # (C, C)
    start: Tensor  # (C,)
    end: Tensor  # (C,)

    @classmethod
    def of(cls, value: Any, *gradients: Any) -> Gradients:
        """From tensors of any device or from arrays."""
        return cls(*(torch.as_tensor(x).detach().cpu().double() for x in (value, *gradients)))
