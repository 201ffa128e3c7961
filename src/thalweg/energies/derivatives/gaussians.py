r"""Derivatives of a sequence's log-likelihood in the parameters of the model that made it, in closed form.

.. math:: \nabla_\theta \log p(x) = \mathbb{E}_{z | x} [\nabla_\theta \log p(x, z)]

so posteriors r of the latent variables are all that is needed, and sums of them over a sequence (Fisher's identity).
Probabilities are differentiated in their logits (w = softmax a), which leaves them probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def in_logits(counts: Tensor, probabilities: Tensor) -> Tensor:
    r"""Of \sum_v c_v \log w_v in the logits of w, for each row of expected counts ``(B, ..., V)``: c - w \sum_v c_v.

    >>> in_logits(torch.tensor([[3.0, 1.0]]), torch.tensor([0.5, 0.5]))
    tensor([[ 1., -1.]])
    """
    return counts - counts.sum(dim=-1, keepdim=True) * probabilities


class Gaussians(NamedTuple):
    r"""K Gaussians whose parameters are differentiated, with shares r of points ``(B, T, D)``, ``(B, T, K)``.

    .. math::
        \frac{\partial}{\partial m_k} = P_k \sum_t r_{tk} (x_t - m_k), \qquad
        \frac{\partial}{\partial S_k} = \tfrac12 \sum_t r_{tk} \big(P_k (x_t - m_k)(x_t - m_k)^\top P_k - P_k\big)

    Attributes:
        shape: ``full``, ``tied``, ``diagonal`` or ``spherical``.
        means: ``(K, D)``.
        precisions: P, the inverse of S: ``(K, D, D)``, or ``(K, D)`` where S is diagonal or spherical.
        groups: how many matrices there are where they are tied, each of as many Gaussians one after the other.

    >>> unit = Gaussians("diagonal", torch.zeros(1, 1), torch.ones(1, 1))
    >>> unit.in_means(torch.tensor([[[1.0], [2.0]]]), torch.ones(1, 2, 1))
    tensor([[[3.]]])
    """

    shape: str
    means: Tensor
    precisions: Tensor
    groups: int = 1

    @classmethod
    def of(cls, shape: str, means: Tensor, factors: Tensor) -> Gaussians:
        """From factors F of the precisions, P = FF', in the shape of the covariances; in float64."""
        means, factors = means.detach().double(), factors.detach().double()
        if shape in ("diagonal", "spherical"):
            precisions = factors.square() if shape == "diagonal" else factors.square().unsqueeze(1)
            return cls(shape, means, precisions.expand_as(means))
        factors = factors.triu()
        return cls(shape, means, (factors @ factors.mT).expand(*means.shape, means.size(1)))

    def pulls(self, points: Tensor) -> Tensor:
        """P (x - m) of each point ``(B, T, D)`` for each Gaussian, ``(B, T, K, D)``."""
        apart = points.unsqueeze(-2) - self.means
        if self.precisions.dim() == 2:
            return apart * self.precisions
        return torch.einsum("btkd,kde->btke", apart, self.precisions)

    def in_means(self, points: Tensor, shares: Tensor) -> Tensor:
        """``(B, K, D)``; time O(B T K D)."""
        # About a centre less is lost in the difference of the two sums.
        centre = self.means.mean(dim=0)
        first = shares.mT @ (points - centre) - shares.sum(dim=1).unsqueeze(2) * (self.means - centre)
        if self.precisions.dim() == 2:
            return first * self.precisions
        return torch.einsum("bkd,kde->bke", first, self.precisions)

    def in_variances(self, points: Tensor, shares: Tensor) -> Tensor:
        """``(B, K, D)`` diagonal, ``(B, K)`` spherical; of matrices their lower triangle row by row,
        ``(B, K, D (D + 1) / 2)`` full and ``(B, D (D + 1) / 2)`` tied, with groups ``(B, G, D (D + 1) / 2)``.

        Both halves of a symmetric matrix move together, so what is not on its diagonal counts twice.
        """
        centre = self.means.mean(dim=0)
        means, points, mass = self.means - centre, points - centre, shares.sum(dim=1).unsqueeze(2)
        first = shares.mT @ points
        if self.precisions.dim() == 2:
            spread = shares.mT @ points.square() - 2 * means * first + mass * means.square()
            found = 0.5 * (spread * self.precisions.square() - mass * self.precisions)
            return found.sum(dim=2) if self.shape == "spherical" else found
        D = points.size(2)
        second = (shares.mT @ (points.unsqueeze(3) * points.unsqueeze(2)).flatten(2)).unflatten(2, (D, D))
        across = means.unsqueeze(2) * first.unsqueeze(2)  # m first'
        spread = second - across - across.mT + mass.unsqueeze(3) * means.unsqueeze(2) * means.unsqueeze(1)
        found = 0.5 * (self.precisions @ spread @ self.precisions - mass.unsqueeze(3) * self.precisions)
        rows, columns = torch.tril_indices(D, D, device=found.device)
        halves = found[..., rows, columns] * torch.where(rows == columns, 1.0, 2.0).to(found)
        return halves.unflatten(1, (self.groups, -1)).sum(dim=2).squeeze(1) if self.shape == "tied" else halves

    def own_curvature(self, shares: Tensor, pulls: Tensor) -> Tensor:
        r"""\sum_t r_{tk} (g_{tk} g_{tk}' - P_k) as blocks on the diagonal of ``(B, K D, K D)``; g: `pulls`."""
        K, D = self.means.shape
        precisions = self.precisions.diag_embed() if self.precisions.dim() == 2 else self.precisions
        own = torch.einsum("btk,btkd,btke->bkde", shares, pulls, pulls)
        own = own - shares.sum(dim=1)[..., None, None] * precisions
        whole = own.new_zeros(len(own), K, D, K, D)
        each = torch.arange(K, device=own.device)
        whole[:, each, :, each] = own.transpose(0, 1)
        return whole.flatten(3).flatten(1, 2)

    @staticmethod
    def triangle(matrices: Tensor) -> Tensor:
        """The lower triangle row by row, of ``(B, M, M)``: ``(B, M (M + 1) / 2)``."""
        M = matrices.size(1)
        rows, columns = torch.tril_indices(M, M, device=matrices.device)
        return matrices[:, rows, columns]
