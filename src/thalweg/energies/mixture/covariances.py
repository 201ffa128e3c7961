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

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# |y|^2 of points (B, D) for each Gaussian, (B, N).
Distances: TypeAlias = Callable[[Tensor], Tensor]


class Moments(NamedTuple):
    """What a step of EM needs to know of all points x with responsibilities r, about a centre c, in float64.

    Attributes:
        mass: ``(N,)``, the sum of r.
        first: ``(N, D)``, the sum of r (x - c).
        second: of r (x - c)(x - c)', as much of it as the covariances need, as :meth:`Covariances.reduced` has it.
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

    def shared(self, matrix: Tensor, N: int) -> Tensor:
        """The covariance ``(D, D)`` in this shape, as that of all components."""
        return matrix.expand(N, *matrix.shape)

    def widened(self, covariances: Tensor, variance: float) -> Tensor:
        """With so much more variance in every direction."""
        unit = torch.eye(covariances.size(-1), dtype=covariances.dtype, device=covariances.device)
        return covariances + variance * unit

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        """y of points ``(..., D)`` for each Gaussian, ``(..., N, D)``."""
        centre = means.detach().mean(dim=0)
        flat = (points - centre).reshape(-1, points.size(-1))
        return _and_one(flat).matmul(_beside(means - centre, factors)).view(*points.shape[:-1], *means.shape)

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        """log |det F|, ``(N,)`` or ()."""
        return factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(dim=-1)

    def distances(self, means: Tensor, factors: Tensor) -> Distances:
        """|y|^2 as a function of many blocks of points; not to be differentiated."""
        centre = means.mean(dim=0)
        beside = _beside(means - centre, factors)
        return lambda points: (_and_one(points - centre) @ beside).view(-1, *means.shape).square_().sum(dim=2)

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
        # Half of the matrix is enough, its diagonals one after another; for all components it is one product.
        D, across = points.size(1), points.mT.contiguous()
        half = points.new_empty(D * (D + 1) // 2, len(points))
        for below, rows in enumerate(half.split(list(range(D, 0, -1)))):
            torch.mul(across[below:], across[: D - below], out=rows)
        return shares.mT @ half.mT  # (N, D (D + 1) / 2)

    def reduced(self, second: Tensor) -> Tensor:
        """Second moments as this shape needs them, from matrices ``(N, D, D)``."""
        one, other = _diagonals(second.size(2), second.device)
        return second[:, one, other]

    def update(self, moments: Moments, floor: float, tiny: Tensor) -> tuple[Tensor, Tensor]:
        """The covariances that maximise the likelihood of what was expected, no variance below the floor.

        Eigenvalues below the floor are raised to it, which is the maximum under that constraint, so EM still never
        decreases the likelihood. A mass below ``tiny`` counts as that much.

        Returns:
            The covariances, and in which components ``(N,)`` (or ``()``) the floor was needed.
        """
        mass = moments.mass.clamp(min=tiny)
        offset = moments.first / mass.unsqueeze(1)
        one, other = _diagonals(offset.size(1), offset.device)
        half = moments.second / mass.unsqueeze(1) - offset[:, one] * offset[:, other]
        whole = half.new_empty(*offset.shape, offset.size(1))
        whole[:, one, other] = half
        whole[:, other, one] = half
        return self.raised(whole, floor)

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

    def shared(self, matrix: Tensor, N: int) -> Tensor:
        return matrix

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return (points.unsqueeze(-2) - means) @ factors.triu()

    def distances(self, means: Tensor, factors: Tensor) -> Distances:
        centre, factors = means.mean(dim=0), factors.triu()
        means = (means - centre) @ factors
        return lambda points: _products((points - centre) @ factors, means)

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

    def shared(self, matrix: Tensor, N: int) -> Tensor:
        return matrix.diagonal().expand(N, -1)

    def widened(self, covariances: Tensor, variance: float) -> Tensor:
        return covariances + variance

    def whiten(self, points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
        return (points.unsqueeze(-2) - means) * self._wide(factors)

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        return factors.abs().log().sum(dim=-1)

    def distances(self, means: Tensor, factors: Tensor) -> Distances:
        centre, precisions = means.mean(dim=0), factors.square()
        means = means - centre
        constant = (means.square() * precisions).sum(dim=1)
        crossed = -2 * (means * precisions).mT

        def squared(points: Tensor) -> Tensor:
            points = points - centre
            found = torch.addmm(constant, points, crossed)
            return found.addmm_(points.square(), precisions.mT).clamp_(min=0)

        return squared

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

    def shared(self, matrix: Tensor, N: int) -> Tensor:
        return matrix.diagonal().mean().expand(N)

    def log_det(self, factors: Tensor, D: int) -> Tensor:
        return D * factors.abs().log()

    def distances(self, means: Tensor, factors: Tensor) -> Distances:
        centre = means.mean(dim=0)
        return lambda points: _products(points - centre, means - centre).mul_(factors.square())

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


def _beside(means: Tensor, factors: Tensor) -> Tensor:
    """All factors side by side, and below them the means' images with a minus, ``(D + 1, N D)``.

    One product with it whitens a point for all Gaussians; with means about a centre little is lost in the difference.
    """
    factors = factors.triu()
    origins = (means.unsqueeze(1) @ factors).flatten()
    return torch.cat([factors.permute(1, 0, 2).flatten(1), -origins.unsqueeze(0)])


def _and_one(points: Tensor) -> Tensor:
    return torch.nn.functional.pad(points, (0, 1), value=1.0)


@cache
def _diagonals(D: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower half of a matrix, one diagonal after another."""
    places = [(below + column, column) for below in range(D) for column in range(D - below)]
    rows, columns = zip(*places, strict=True)
    return torch.tensor(rows, device=device), torch.tensor(columns, device=device)


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
