"""An energy of which everything is known: that of a Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class GaussianEnergy(nn.Module):
    """E(x) = (x - m)' P (x - m) / 2, its mean and the factor L of P = LL' to be learned."""

    def __init__(self, mean: Tensor, precision: Tensor | None = None):
        super().__init__()
        precision = torch.eye(len(mean), dtype=mean.dtype) if precision is None else precision
        self.mean, self.factor = nn.Parameter(mean.clone()), nn.Parameter(torch.linalg.cholesky(precision).contiguous())

    @property
    def precision(self) -> Tensor:
        return self.factor.tril() @ self.factor.tril().mT

    def log_partition(self) -> Tensor:
        return len(self.mean) / 2 * math.log(2 * math.pi) - self.factor.diagonal().abs().log().sum()

    def forward(self, points: Tensor) -> Tensor:
        return ((points - self.mean) @ self.factor.tril()).square().sum(dim=-1) / 2
