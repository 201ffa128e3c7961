"""States that emit vectors, normally distributed."""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.clusters import cluster
from thalweg.energies.hmm.emissions import UNSEEN, Emission, Limits, Trouble, hold
from thalweg.energies.hmm.probabilities import floats
from thalweg.errors import ConfigError, ShapeError, nearest

Covariance = Literal["spherical", "diagonal", "tied", "full"]
"""How the covariances of states are bound."""

_LOG_2PI = math.log(2 * math.pi)
_BLOCK = 2048  # rows of such a product
# Numbers of an intermediate result, (rows, P, D): on a CPU it should stay near the cache, a GPU wants few launches.
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}


class GaussianEmission(Emission):
    r"""Vectors of D numbers, normally distributed in each kind of state.

    .. math:: \log p(x | k) = -\tfrac12 (x - m_k)^\top S_k^{-1} (x - m_k) - \tfrac12 \log |2 \pi S_k|

    Computed in float64 whatever the type, around the mean of the data: with diagonal S as one matrix product of
    (x, x^2), O(M K D); otherwise as K triangular ones, O(M K D^2). Statistics are weighted moments; the M-step is the
    maximum under variances (eigenvalues, where S is a matrix) of at least a floor, so the likelihood cannot fall.

    Args:
        means: ``(K, D)``; None before the first fit.
        covariances: ``(K,)`` spherical, ``(K, D)`` diagonal, ``(D, D)`` tied, ``(K, D, D)`` full; the identity if None.
        covariance_type: ``spherical`` one variance a state, ``diagonal`` one a dimension, ``tied`` one matrix for all
            states, ``full`` one each.

    Some entries of a vector may be missing where S is diagonal: they count for nothing.

    >>> GaussianEmission([[0.0], [2.0]]).log_prob(torch.tensor([[0.0]])).exp().detach()
    tensor([[0.3989, 0.0540]])
    """

    event_dim = 1
    means: Tensor | None
    scales: Tensor | None
    centre: Tensor
    spread_of_data: Tensor

    def __init__(self, means: Any = None, covariances: Any = None, covariance_type: Covariance = "diagonal") -> None:
        super().__init__()
        if covariance_type not in get_args(Covariance):
            raise ConfigError(
                f"`covariance_type` is unknown: {covariance_type!r}; {nearest(covariance_type, get_args(Covariance))}"
            )
        self.covariance_type, self.groups = covariance_type, 1
        self.diagonal = covariance_type in ("spherical", "diagonal")
        self.register_parameter("means", None)
        self.register_parameter("scales", None)
        self.register_buffer("centre", None)
        self.register_buffer("spread_of_data", None)
        if means is not None:
            means = floats("means", means)
            if means.dim() != 2 or 0 in means.shape:
                raise ShapeError(f"`means` must be (K, D) with both at least 1, got {tuple(means.shape)}")
            hold(self, "means", means)
            hold(self, "scales", self._scales_of(self._checked(covariances, means)))

    def _checked(self, covariances: Any, means: Tensor) -> Tensor:
        """Covariances in the shape of their type, or a ShapeError."""
        K, D = means.shape
        shape = {"spherical": (K,), "diagonal": (K, D), "tied": (D, D), "full": (K, D, D)}[self.covariance_type]
        if covariances is None:
            whole = torch.ones(shape) if self.diagonal else torch.eye(D).expand(shape)
            covariances = whole.to(means)
        covariances = floats("covariances", covariances).to(device=means.device)
        if tuple(covariances.shape) != shape:
            raise ShapeError(
                f"`covariances` must be {shape} for {self.covariance_type} ones, got {tuple(covariances.shape)}"
            )
        if self.diagonal:
            wrong = not bool((covariances > 0).all() & covariances.isfinite().all())
        else:
            factors, info = torch.linalg.cholesky_ex(covariances)
            wrong = bool(info.any()) or not bool(factors.isfinite().all())
        if wrong:
            what = "variances above 0" if self.diagonal else "symmetric, positive definite matrices"
            raise ShapeError(f"`covariances` must be {what}; raise what is too small")
        return covariances.view(K, 1) if self.covariance_type == "spherical" else covariances

    def _scales_of(self, covariances: Tensor) -> Tensor:
        """The logarithms of standard deviations; of matrices the Cholesky factor with its diagonal in logarithms."""
        if self.diagonal:
            return 0.5 * covariances.log()
        factors = torch.linalg.cholesky_ex(covariances)[0]  # which does not wait for a GPU
        factors = factors if factors.dim() == 3 else factors.unsqueeze(0)
        logs = factors.diagonal(dim1=-2, dim2=-1).log()
        return factors.tril(-1) + torch.diag_embed(logs)

    @property
    def size(self) -> int | None:
        """K."""
        return None if self.means is None else len(self.means)

    @property
    def factors(self) -> Tensor:
        """The Cholesky factors of the covariances, ``(K, D, D)``; standard deviations ``(K, D)`` where diagonal."""
        means, scales = cast(Tensor, self.means), cast(Tensor, self.scales)
        if self.diagonal:
            return scales.exp().expand_as(means)
        logs = scales.diagonal(dim1=-2, dim2=-1)
        factors = scales.tril(-1) + torch.diag_embed(logs.exp())
        return factors.repeat_interleave(len(means) // len(factors), 0)

    @property
    def covariances(self) -> Tensor:
        """S in the shape of its type, as the constructor takes it; ``(G, D, D)`` where G groups are tied."""
        if self.diagonal:
            found = cast(Tensor, self.scales).mul(2).exp()
            return found.squeeze(1) if self.covariance_type == "spherical" else found
        factors = self.factors
        found = factors @ factors.mT
        if self.covariance_type == "full":
            return found
        return found[0] if self.groups == 1 else found[:: len(found) // self.groups]

    def check(self, shape: tuple[int, ...]) -> None:
        """Observations must have D numbers."""
        if self.means is not None and shape != tuple(self.means.shape[1:]):
            raise ShapeError(f"an observation must have shape ({self.means.size(1)},) as `means`, got {shape}")

    def prepare(self, values: Tensor, present: Tensor | None = None) -> tuple[Tensor, ...]:
        """Centred values and their squares, side by side where S is diagonal, and which are present."""
        if present is not None and not self.diagonal:
            raise ShapeError(
                f"`observed` must be (B, T): {self.covariance_type} covariances take no vector in part, got (B, T, D)"
            )
        centre = self.centre if self.centre is not None else cast(Tensor, self.means).detach().double().mean(0)
        centred = values.double() - centre
        if not self.diagonal:
            return (centred,)
        if present is not None:
            centred = centred.masked_fill(~present, 0)
        both = torch.cat([centred, centred.square()], 1)
        return (both,) if present is None else (both, present.double())

    def adopt(self, values: Tensor, present: Tensor | None) -> None:
        """Note the mean and the variance of the data that is fitted to."""
        wide = values.double()
        if present is None:
            spread, self.centre = torch.var_mean(wide, 0, correction=0)
        else:
            wide = wide.masked_fill(~present, torch.nan)
            self.centre = wide.nanmean(0).nan_to_num(0.0)
            spread = (wide - self.centre).square().nanmean(0).nan_to_num(0.0)
        self.spread_of_data = torch.where(spread > 0, spread, 1.0)

    def parts(self, prepared: tuple[Tensor, ...]) -> Tensor:
        """Log-densities, (M, P), in the type of the parameters."""
        means = cast(Tensor, self.means)
        centre = self.centre if self.centre is not None else means.detach().double().mean(0)
        m = means.double() - centre
        if not self.diagonal:
            return self._by_matrices(prepared[0], m).to(means.dtype)
        logs = cast(Tensor, self.scales).double().expand_as(means)
        precision = (-2 * logs).exp()
        weights = torch.cat([m * precision, -0.5 * precision], 1).t()
        constants = -0.5 * (m.square() * precision + 2 * logs + _LOG_2PI)  # (P, D)
        if len(prepared) == 1:
            return torch.addmm(constants.sum(1), prepared[0], weights).to(means.dtype)
        return torch.addmm(prepared[1] @ constants.t(), prepared[0], weights).to(means.dtype)

    def _by_matrices(self, centred: Tensor, m: Tensor) -> Tensor:
        P, D = m.shape
        factors = self.factors.double()
        whole = torch.eye(D, dtype=factors.dtype, device=factors.device).expand_as(factors)
        inverse = torch.linalg.solve_triangular(factors, whole, upper=False)  # (P, D, D)
        shift = (inverse @ m.unsqueeze(2)).flatten()
        constants = -factors.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * D * _LOG_2PI
        found = [
            constants - 0.5 * (rows @ inverse.flatten(0, 1).t() - shift).square().view(-1, P, D).sum(-1)
            for rows in centred.split(max(1, _at_once(centred) // (P * D)))
        ]
        return torch.cat(found)

    def guess(self, prepared: tuple[Tensor, ...], size: int, generator: torch.Generator) -> Tensor:
        """All of each observation to the nearest of K centres, by k-means."""
        points = prepared[0] if not self.diagonal else prepared[0][:, : prepared[0].size(1) // 2]
        labels = cluster(points / self.spread_of_data.sqrt(), size, generator)
        return self.spread(prepared, nn.functional.one_hot(labels, size).double(), generator)

    def statistics(self, prepared: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """Weights (P, 1) or (P, D), first moments (P, D), second moments (P, D) or (P, D, D)."""
        weights = weights.double()
        if self.diagonal:
            first, second = _summed(weights, prepared[0]).chunk(2, 1)
            counts = weights.sum(0).unsqueeze(1) if len(prepared) == 1 else _summed(weights, prepared[1])
            return counts, first, second
        centred = prepared[0]
        P, D = weights.size(1), centred.size(1)
        second = centred.new_zeros(P, D * D)
        step = max(_BLOCK, _at_once(centred) // (D * D) // _BLOCK * _BLOCK)
        for rows, shares in zip(centred.split(step), weights.split(step), strict=True):
            second += _summed(shares, (rows.unsqueeze(2) * rows.unsqueeze(1)).flatten(1))
        return weights.sum(0).unsqueeze(1), _summed(weights, centred), second.view(P, D, D)

    def maximise(self, statistics: tuple[Tensor, ...], limits: Limits) -> None:
        """Means and covariances of the weighted data; what was never visited stays."""
        counts, first, second = statistics
        seen = counts >= UNSEEN
        safe = torch.where(seen, counts, 1.0)
        m = first / safe
        floor = limits.floor * self.spread_of_data
        if self.diagonal:
            spread = second - m * first
            found = self._variances(spread, counts.expand_as(spread), floor)
        else:
            found = self._matrices(second - m.unsqueeze(2) * first.unsqueeze(1), counts, floor)
        fresh = self.means is None
        means = m + self.centre
        with torch.no_grad():
            scales = self._scales_of(found)
            if fresh:
                hold(self, "means", means)
                hold(self, "scales", scales)
                return
            here, kept = cast(Tensor, self.means), cast(Tensor, self.scales)
            here.copy_(torch.where(seen, means, here.double()))
            if self.covariance_type == "spherical":
                seen = seen.any(1, keepdim=True)
            elif not self.diagonal:
                seen = seen.view(len(scales), -1).any(1).view(-1, 1, 1)
            kept.copy_(torch.where(seen, scales, kept.double()))

    def _variances(self, spread: Tensor, counts: Tensor, floor: Tensor) -> Tensor:
        """(P, D), or (P, 1) spherical, where the floor is the mean of the dimensions'."""
        if self.covariance_type == "spherical":
            spread, counts, floor = spread.sum(1, keepdim=True), counts.sum(1, keepdim=True), floor.mean()
        # What was never visited, and has no parameters to keep, begins as wide as the data.
        begin = self.spread_of_data if floor.dim() else floor
        return torch.maximum(torch.where(counts >= UNSEEN, spread / counts, begin), floor)

    def _matrices(self, spread: Tensor, counts: Tensor, floor: Tensor) -> Tensor:
        """(P, D, D), or (G, D, D) for G groups that share one; eigenvalues no less than the floor, in units of it."""
        groups = len(spread) if self.covariance_type == "full" else self.groups
        spread = spread.view(groups, -1, *spread.shape[1:]).sum(1)
        counts = counts.view(groups, -1).sum(1).view(-1, 1, 1)
        units = self.spread_of_data.sqrt()
        found = spread / torch.where(counts >= UNSEEN, counts, 1.0) / torch.outer(units, units)
        least = floor / self.spread_of_data
        values, vectors = torch.linalg.eigh(0.5 * (found + found.mT))
        lifted = vectors * torch.maximum(values, least).unsqueeze(-2) @ vectors.mT
        # Where nothing is lifted the matrix itself has more digits than its parts put together again.
        found = torch.where((values < least).any(-1)[:, None, None], lifted, found)
        return 0.5 * (found + found.mT) * torch.outer(units, units)

    def troubles(self, statistics: tuple[Tensor, ...], limits: Limits) -> list[Trouble]:
        """Kinds without an observation, and those whose variance stands at the floor."""
        unseen = (statistics[0] < UNSEEN).all(1)
        spread = self.factors.double() / self.spread_of_data.sqrt().unsqueeze(-1 if not self.diagonal else 0)
        if self.covariance_type == "spherical":
            least = cast(Tensor, self.scales).double().mul(2).exp().amin(1) / self.spread_of_data.mean()
        else:
            least = (spread if self.diagonal else torch.linalg.svdvals(spread)).amin(1).square()
        collapsed = (least <= 1.01 * limits.floor) & ~unseen
        found = [Trouble(k, "unvisited") for k in unseen.nonzero().flatten().tolist()]
        return found + [Trouble(k, "collapsed") for k in collapsed.nonzero().flatten().tolist()]

    def draw(self, kinds: Tensor, generator: torch.Generator | None) -> Tensor:
        """Vectors, (N, D)."""
        means, factors = cast(Tensor, self.means).detach()[kinds], self.factors.detach()[kinds]
        noise = torch.randn(means.shape, generator=generator, dtype=means.dtype, device=means.device)
        return means + (factors * noise if self.diagonal else (factors @ noise.unsqueeze(2)).squeeze(2))

    @property
    def free_parameters(self) -> int:
        """Means, and variances or the triangles of covariances."""
        means, scales = cast(Tensor, self.means), cast(Tensor, self.scales)
        D = means.size(1)
        return means.numel() + (scales.numel() if self.diagonal else len(scales) * D * (D + 1) // 2)


def _at_once(like: Tensor) -> int:
    return _AT_ONCE.get(like.device.type, _AT_ONCE["cpu"])


def _summed(weights: Tensor, values: Tensor) -> Tensor:
    """weights' values of (M, P) and (M, D), in blocks: one product with so long an axis is left to one thread."""
    count = len(weights) // _BLOCK
    whole = count * _BLOCK
    left, right = (each[:whole].unflatten(0, (count, _BLOCK)) for each in (weights, values))
    return (left.mT @ right).sum(0) + weights[whole:].mT @ values[whole:]
