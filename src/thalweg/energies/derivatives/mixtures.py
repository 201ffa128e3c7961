"""Derivatives for sequences whose points are independent draws from a mixture of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thalweg.energies.derivatives.blocks import in_blocks, inside_of
from thalweg.energies.derivatives.gaussians import Gaussians, in_logits
from thalweg.energies.mixture.covariances import SHAPES
from thalweg.energies.mixture.model import GaussianMixture

_LOG_2PI = math.log(2 * math.pi)


class MixtureDerivatives:
    """Of sequences whose points are independent draws from a mixture of Gaussians.

    >>> model = GaussianMixture(means=[[0.0]], covariances=[[[2.0]]])
    >>> MixtureDerivatives(model)(torch.tensor([[[1.0], [2.0]]]), None, ["means"])
    tensor([[1.5000]], dtype=torch.float64)
    """

    offered = ("means", "variances", "weights")
    event_dim = 1

    def __init__(self, model: GaussianMixture):
        self.weights = model.logits_.detach().double().softmax(dim=0)
        self.gaussians = Gaussians.of(model._shape, model.means_, model.factors_)
        self.width = self.gaussians.means.size(1)
        shape, factors = SHAPES[model._shape], model.factors_.detach().double()
        self._distances = shape.distances(self.gaussians.means, factors)
        self._constant = self.weights.log() + shape.log_det(factors, self.width) - self.width / 2 * _LOG_2PI

    def log_joint(self, points: Tensor) -> Tensor:
        """log p(x, z) of points ``(..., D)`` for every component, ``(..., N)`` float64."""
        squares = self._distances(points.reshape(-1, self.width)).view(*points.shape[:-1], -1)
        return torch.add(self._constant, squares, alpha=-0.5)

    @torch.no_grad()
    def __call__(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int = 1) -> Tensor:
        """Of padded points ``(B, T, D)``: those parameters one after the other, then second ones; (B, F) float64."""
        N, D = self.gaussians.means.shape

        def numbers(T: int) -> int:
            return max(T * D * max(N, D), (N * D) ** 2 if order == 2 else 1)

        return in_blocks(lambda points, counts: self._some(points, counts, of, order), values, lengths, numbers)

    def _some(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int) -> Tensor:
        points, inside = inside_of(values.double(), lengths)
        shares = self.log_joint(points).softmax(dim=-1) * inside.unsqueeze(2)
        ways: dict[str, Callable[[], Tensor]] = {
            "means": lambda: self.gaussians.in_means(points, shares),
            "variances": lambda: self.gaussians.in_variances(points, shares),
            "weights": lambda: in_logits(shares.sum(dim=1), self.weights),
        }
        found = [ways[name]().flatten(1) for name in of]
        if order == 2:
            found.append(self._twice(points, shares))
        return torch.cat(found, dim=1)

    def _twice(self, points: Tensor, shares: Tensor) -> Tensor:
        r"""Second derivatives in all means, the lower triangle of N D rows.

        .. math::
            \frac{\partial^2}{\partial m_i \partial m_j} = -\sum_t r_{ti} r_{tj}\, g_{ti} g_{tj}^\top
            + [i = j] \sum_t r_{ti} (g_{ti} g_{ti}^\top - P_i), \qquad g_{ti} = P_i (x_t - m_i)
        """
        pulls = self.gaussians.pulls(points)
        shared = (shares.unsqueeze(3) * pulls).flatten(2)
        return self.gaussians.triangle(self.gaussians.own_curvature(shares, pulls) - shared.mT @ shared)
