r"""The four shapes that covariances of N Gaussians in D dimensions may have.

Each keeps factors F of the precisions, P = FF', upper triangular where they are matrices: y = (x - m) F has unit
covariance, so that log N(x; m, P^{-1}) = log det F - |y|^2 / 2 - (D / 2) log 2 pi needs no solve.

| name | covariances | factors |
|---|---|---|
| ``full`` | ``(N, D, D)`` | ``(N, D, D)`` |
| ``tied`` | ``(D, D)``, one for all | ``(D, D)`` |
| ``diagonal`` | ``(N, D)`` | ``(N, D)`` |
| ``spherical`` | ``(N,)``, one variance each | ``(N,)`` |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SHAPES", "Covariances", "Moments"]


class Moments(NamedTuple):
    """What a step of EM needs to know of all points x with responsibilities r, about a centre c, in float64.

    Attributes:
        mass: ``(N,)``, the sum of r.
        first: ``(N, D)``, the sum of r (x - c).
        second: of r (x - c)(x - c)', as much of it as the covariances need, :meth:`Covariances.second`.
        centre: ``(D,)``.
    """

    mass: Tensor
    first: Tensor
    second: Tensor
    centre: Tensor

    def means(self, previous: Tensor, empty: Tensor) -> Tensor:
        """The new means ``(N, D)``; those of empty components are the previous ones."""
        means = self.centre + self.first / self.mass.clamp(min=1e-300).unsqueeze(1)
        return torch.where(empty.unsqueeze(1), previous, means)


class Covariances:
    """One of the shapes; :data:`SHAPES` has them by name. This is ``full``, of which the others change parts."""

    def shape(self, N: int, D: int) -> tuple[int, ...]:
        """Of covariances and factors."""
        return (N, D, D)

    def free(self, N: int, D: int) -> int:
        """How many numbers are free in them."""
        return N * D * (D + 1) // 2

    def factors(self, covariances: Tensor) -> Tensor:
        """F; not finite where a covariance is not positive definite."""
        lower, failed = torch.linalg.cholesky_ex(covariances)
        unit = torch.eye(lower.size(-1), dtype=lower.dtype, device=lower.device).expand_as(lower)
        factors = torch.linalg.solve_triangular(lower, unit, upper=False).mT
        return torch.where(failed.view(*failed.shape, 1, 1) > 0, torch.nan, factors)

    def covariances(self, factors: Tensor) -> Tensor:
        """The inverse of FF'."""
        unit = torch.eye(factors.size(-1), dtype=factors.dtype, device=factors.device).expand_as(factors)
        inverse = torch.linalg.solve_triangular(factors.triu(), unit, upper=True)
        return inverse.mT @ inverse

    def matrices(self, covariances: Tensor, N: int, D: int) -> Tensor:
        """Covariances of this shape as ``(N, D, D)``."""
        return covariances.expand(N, D, D)

    def widened(self, covariances: Tensor, variance: float) -> Tensor:
        """With so much more variance in every direction."""
        unit = torch.eye(covariances.size(-1), dtype=covariances.dtype, device=covariances.device)
        return covariances + variance * unit

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """y of points ``(..., D)`` for each Gaussian, ``(..., N, D)``."""
        factors, centre = factors.triu(), means.detach().mean(dim=0)
        # All factors side by side make one product; about a centre little is lost in the difference.
        beside = factors.permute(1, 0, 2).flatten(1)  # (D, N * D)
        origins = ((means - centre).unsqueeze(1) @ factors).flatten()  # (N * D,)
        flat = (points - centre).reshape(-1, points.size(-1))
        return torch.addmm(-origins, flat, beside).view(*points.shape[:-1], *means.shape)

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        """log |det F|, ``(N,)`` or ()."""
        return factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(dim=-1)

    def distances(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """|y|^2 of points ``(B, D)``, ``(B, N)``; not to be differentiated."""
        return self.whiten(points, means, factors).square_().sum(dim=-1)

    def coloured(self, noise: Tensor, factors: Tensor, component: int) -> Tensor:
        """Unit noise ``(B, D)`` with a component's covariance: y F^{-1}."""
        factor = self._of(factors, component)
        if factor.dim() < 2:
            return noise / factor
        return torch.linalg.solve_triangular(factor.triu(), noise, upper=True, left=False)

    def _of(self, factors: Tensor, component: int) -> Tensor:
        return factors[component]

    def second(self, points: Tensor, shares: Tensor) -> Tensor:
        """The second moments of points ``(B, D)``, already about the centre, with shares ``(B, N)``."""
        one, other = torch.tril_indices(points.size(1), points.size(1), device=points.device)
        # Half of the matrix is enough, and for all components it is one product.
        half = shares.mT @ (points[:, one] * points[:, other])  # (N, D (D + 1) / 2)
        whole = half.new_empty(len(half), points.size(1), points.size(1))
        whole[:, one, other] = half
        whole[:, other, one] = half
        return whole

    def reduced(self, second: Tensor) -> Tensor:
        """Second moments as this shape needs them, from those of ``full``."""
        return second

    def update(self, moments: Moments, floor: float, tiny: Tensor) -> tuple[Tensor, Tensor]:
        """The covariances that maximise the likelihood of what was expected, no variance below the floor.

        Eigenvalues below the floor are raised to it, which is the maximum under that constraint, so EM still never
        decreases the likelihood. A mass below ``tiny`` counts as that much.

        Returns:
            The covariances, and in which components ``(N,)`` (or ``()``) the floor was needed.
        """
        mass = moments.mass.clamp(min=tiny)
        offset = moments.first / mass.unsqueeze(1)
        around = offset.unsqueeze(2) * offset.unsqueeze(1)
        return self.raised(moments.second / mass.view(-1, 1, 1) - around, floor)

    def raised(self, covariances: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        """Covariances with no variance below the floor, and in which, ``(N,)`` or ``()``, there was one."""
        unit = torch.eye(covariances.size(-1), dtype=covariances.dtype, device=covariances.device)
        low = torch.linalg.cholesky_ex(covariances - floor * unit).info > 0
        if bool(low.any()):
            values, vectors = torch.linalg.eigh(covariances)
            raised = (vectors * values.clamp(min=floor).unsqueeze(-2)) @ vectors.mT
            covariances = torch.where(low[..., None, None], raised, covariances)
        return covariances, low


class _Tied(Covariances):
    def shape(self, N: int, D: int) -> tuple[int, ...]:
        return (D, D)

    def free(self, N: int, D: int) -> int:
        return D * (D + 1) // 2

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return (points.unsqueeze(-2) - means) @ factors.triu()

    def distances(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        centre = means.mean(dim=0)
        points, means = (points - centre) @ factors.triu(), (means - centre) @ factors.triu()
        return _products(points, means)

    def _of(self, factors: Tensor, component: int) -> Tensor:
        return factors

    def second(self, points: Tensor, shares: Tensor) -> Tensor:
        return (points * shares.sum(dim=1, keepdim=True)).mT @ points

    def reduced(self, second: Tensor) -> Tensor:
        return second.sum(dim=0)

    def update(self, moments: Moments, floor: float, tiny: Tensor) -> tuple[Tensor, Tensor]:
        offset = moments.first / moments.mass.clamp(min=tiny).unsqueeze(1)
        return self.raised((moments.second - offset.mT @ moments.first) / moments.mass.sum(), floor)


class _Diagonal(Covariances):
    def shape(self, N: int, D: int) -> tuple[int, ...]:
        return (N, D)

    def free(self, N: int, D: int) -> int:
        return N * D

    def factors(self, covariances: Tensor) -> Tensor:
        return torch.where(covariances > 0, covariances, torch.nan).rsqrt()

    def covariances(self, factors: Tensor) -> Tensor:
        return factors.square().reciprocal()

    def matrices(self, covariances: Tensor, N: int, D: int) -> Tensor:
        return self._wide(covariances).expand(N, D).diag_embed()

    def widened(self, covariances: Tensor, variance: float) -> Tensor:
        return covariances + variance

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return (points.unsqueeze(-2) - means) * self._wide(factors)

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        return factors.abs().log().sum(dim=-1)

    def distances(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        centre, precisions = means.mean(dim=0), factors.square()
        points, means = points - centre, means - centre
        constant = (means.square() * precisions).sum(dim=1)
        crossed = torch.addmm(constant, points, (means * precisions).mT, alpha=-2)
        return torch.addmm(crossed, points.square(), precisions.mT).clamp_(min=0)

    def _wide(self, each: Tensor) -> Tensor:
        return each  # (N, D)

    def second(self, points: Tensor, shares: Tensor) -> Tensor:
        return shares.mT @ points.square()

    def reduced(self, second: Tensor) -> Tensor:
        return second.diagonal(dim1=1, dim2=2)

    def update(self, moments: Moments, floor: float, tiny: Tensor) -> tuple[Tensor, Tensor]:
        mass = moments.mass.clamp(min=tiny).unsqueeze(1)
        return self.raised(moments.second / mass - (moments.first / mass).square(), floor)

    def raised(self, covariances: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        return covariances.clamp(min=floor), (covariances < floor).any(dim=1)


class _Spherical(_Diagonal):
    def shape(self, N: int, D: int) -> tuple[int, ...]:
        return (N,)

    def free(self, N: int, D: int) -> int:
        return N

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        return D * factors.abs().log()

    def distances(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        centre = means.mean(dim=0)
        return _products(points - centre, means - centre) * factors.square()

    def _wide(self, each: Tensor) -> Tensor:
        return each.unsqueeze(-1)  # (N, 1)

    def second(self, points: Tensor, shares: Tensor) -> Tensor:
        return shares.mT @ points.square().sum(dim=1)

    def reduced(self, second: Tensor) -> Tensor:
        return second.diagonal(dim1=1, dim2=2).sum(dim=1)

    def update(self, moments: Moments, floor: float, tiny: Tensor) -> tuple[Tensor, Tensor]:
        mass = moments.mass.clamp(min=tiny)
        offset = moments.first / mass.unsqueeze(1)
        return self.raised((moments.second / mass - offset.square().sum(dim=1)) / offset.size(1), floor)

    def raised(self, covariances: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        return covariances.clamp(min=floor), covariances < floor


def _products(points: Tensor, means: Tensor) -> Tensor:
    """|x - m|^2 of points ``(B, D)`` and means ``(N, D)`` by one product, ``(B, N)``."""
    lengths = points.square().sum(dim=1, keepdim=True) + means.square().sum(dim=1)
    return lengths.addmm_(points, means.mT, alpha=-2).clamp_(min=0)


SHAPES: dict[str, Covariances] = {
    "full": Covariances(),
    "tied": _Tied(),
    "diagonal": _Diagonal(),
    "spherical": _Spherical(),
}
"""By the names that :class:`~thalweg.energies.mixture.model.GaussianMixture` knows them by."""
