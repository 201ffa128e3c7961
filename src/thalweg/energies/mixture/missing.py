r"""Points of which some values are missing: each pattern of missing values has its own Gaussians.

With o the observed and u the missing dimensions of a point, and K = S_uo S_oo^{-1}:

.. math:: x_o \sim N(m_o, S_{oo}), \qquad x_u \mid x_o \sim N\big(m_u + K (x_o - m_o),\; S_{uu} - K S_{ou}\big)

EM needs the mean of the missing values and, for second moments, their covariance too. Ghahramani and Jordan (1994).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.energies.mixture.covariances import Moments


class Pattern(NamedTuple):
    """Points with the same values missing.

    Attributes:
        rows: which points, ``(R,)``.
        observed: which dimensions, ``(O,)``.
        missing: the others, ``(U,)``.
    """

    rows: Tensor
    observed: Tensor
    missing: Tensor


def patterns(points: Tensor) -> Iterator[Pattern]:
    """The patterns of NaN in points ``(B, D)``, each once."""
    kinds, which = points.isnan().unique(dim=0, return_inverse=True)
    for kind, gone in enumerate(kinds):
        yield Pattern((which == kind).nonzero()[:, 0], (~gone).nonzero()[:, 0], gone.nonzero()[:, 0])


def observed_log_density(points: Tensor, means: Tensor, matrices: Tensor) -> Tensor:
    """log N(x_o; m_o, S_oo) of points ``(B, D)`` under N Gaussians, ``(B, N)``; 0 where nothing is observed."""
    found = points.new_zeros(len(points), len(means))
    for pattern in patterns(points):
        if len(pattern.observed):
            density, _, _ = _given_observed(points, pattern, means, matrices)
            found = found.index_copy(0, pattern.rows, density)
    return found


def expect_missing(
    points: Tensor, weight: Tensor | None, means: Tensor, matrices: Tensor, weights: Tensor, centre: Tensor
) -> tuple[Tensor, Moments]:
    """The sum of log p(x_o) and the expected moments, those of full covariances, of points ``(B, D)`` with NaN.

    Time O(N D^3) for each pattern beside what the points cost.
    """
    N, D = means.shape
    likelihood = centre.new_zeros(())
    mass, first, second = centre.new_zeros(N), centre.new_zeros(N, D), centre.new_zeros(N, D, D)
    for pattern in patterns(points):
        density, differences, gain = _given_observed(points, pattern, means, matrices)
        joint = density + weights.log()
        values = joint.logsumexp(dim=1)
        shares = (joint - values.unsqueeze(1)).exp()  # (R, N)
        if weight is not None:
            own = weight[pattern.rows]
            shares, values = shares * own.unsqueeze(1), values * own
        complete = (means - centre).unsqueeze(1).repeat(1, len(pattern.rows), 1)  # (N, R, D)
        complete[:, :, pattern.observed] += differences
        complete[:, :, pattern.missing] += differences @ gain.mT
        own_mass = shares.sum(dim=0)
        weighted = shares.mT.unsqueeze(2) * complete
        likelihood += values.sum()
        mass += own_mass
        first += weighted.sum(dim=1)
        second += weighted.mT @ complete
        uncertain = _part(matrices, pattern.missing, pattern.missing)
        uncertain = uncertain - gain @ _part(matrices, pattern.observed, pattern.missing)
        place = (slice(None), pattern.missing.unsqueeze(1), pattern.missing)
        second[place] += own_mass.view(-1, 1, 1) * uncertain
    return likelihood, Moments(mass, first, second, centre)


def _given_observed(points: Tensor, pattern: Pattern, means: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log N(x_o; m_o, S_oo) ``(R, N)``, x_o - m_o ``(N, R, O)`` and K ``(N, U, O)``."""
    rows, observed, missing = pattern
    differences = points[rows][:, observed] - means[:, observed].unsqueeze(1)
    lower = torch.linalg.cholesky(_part(matrices, observed, observed))
    gain = torch.cholesky_solve(_part(matrices, observed, missing), lower).mT
    white = torch.linalg.solve_triangular(lower, differences.mT, upper=False)  # (N, O, R)
    log_det = lower.diagonal(dim1=1, dim2=2).log().sum(dim=1, keepdim=True)
    density = -0.5 * (white.square().sum(dim=1) + len(observed) * math.log(2 * math.pi)) - log_det
    return density.mT, differences, gain


def _part(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return matrices[:, rows.unsqueeze(1), columns]
