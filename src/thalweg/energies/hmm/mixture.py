"""States that emit vectors from mixtures of Gaussians."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.clusters import cluster
from thalweg.energies.hmm.emissions import Limits, Trouble, hold
from thalweg.energies.hmm.gaussian import Covariance, GaussianEmission
from thalweg.energies.hmm.probabilities import floats, from_counts, row_logarithms
from thalweg.errors import ConfigError, ShapeError


class MixtureEmission(GaussianEmission):
    r"""Vectors from one of J Gaussians in each kind of state: p(x | k) = sum_j w_kj N(x; m_kj, S_kj).

    Args:
        weights: ``(K, J)``, rows that sum to one; None before the first fit.
        means: ``(K, J, D)``.
        covariances: ``(K, J)`` spherical, ``(K, J, D)`` diagonal, ``(K, D, D)`` tied (within a state), ``(K, J, D, D)``
            full; the identity if None.
        covariance_type: as in :class:`GaussianEmission`; ``tied`` is one matrix for all parts of a state.
        n_mix: J, where no weights are given.

    >>> two = MixtureEmission([[0.5, 0.5]], [[[0.0], [2.0]]])
    >>> two.log_prob(torch.tensor([[0.0]])).exp().detach()
    tensor([[0.2265]])
    """

    logits: Tensor | None

    def __init__(
        self,
        weights: Any = None,
        means: Any = None,
        covariances: Any = None,
        covariance_type: Covariance = "diagonal",
        *,
        n_mix: int = 2,
    ) -> None:
        super().__init__(None, None, covariance_type)
        if isinstance(n_mix, bool) or not isinstance(n_mix, int) or n_mix < 1:
            raise ConfigError(f"`n_mix` must be an integer of at least 1, got {n_mix!r}")
        self.n_mix = n_mix
        self.register_parameter("logits", None)
        if (weights is None) != (means is None):
            raise ConfigError("`weights` and `means` must be given together, got one of them")
        if weights is None:
            return
        weights, means = floats("weights", weights), floats("means", means)
        if weights.dim() != 2 or 0 in weights.shape or means.dim() != 3 or means.shape[:2] != weights.shape:
            shapes = f"{tuple(weights.shape)} and {tuple(means.shape)}"
            raise ShapeError(f"`weights` and `means` must be (K, J) and (K, J, D), got {shapes}")
        self.groups, self.n_mix = weights.shape
        means = means.to(torch.promote_types(weights.dtype, means.dtype))
        hold(self, "logits", row_logarithms("weights", weights.to(means.dtype), False))
        hold(self, "means", means.flatten(0, 1))
        hold(self, "scales", self._scales_of(self._checked(covariances, means)))

    def _checked(self, covariances: Any, means: Tensor) -> Tensor:
        K, J, D = means.shape
        shape = {"spherical": (K, J), "diagonal": (K, J, D), "tied": (K, D, D), "full": (K, J, D, D)}[
            self.covariance_type
        ]
        if covariances is None:
            whole = torch.ones(shape) if self.diagonal else torch.eye(D).expand(shape)
            covariances = whole.to(means)
        covariances = floats("covariances", covariances)
        if tuple(covariances.shape) != shape:
            raise ShapeError(
                f"`covariances` must be {shape} for {self.covariance_type} ones, got {tuple(covariances.shape)}"
            )
        if self.covariance_type == "tied":  # K matrices, checked as those of K full ones
            GaussianEmission(means[:, 0].detach(), covariances.detach(), "full")
            return covariances
        flat = covariances.flatten(0, 1)
        return super()._checked(flat, means.flatten(0, 1))

    @property
    def size(self) -> int | None:
        """K."""
        return None if self.logits is None else len(self.logits)

    @property
    def log_weights(self) -> Tensor:
        """log w, ``(K, J)``."""
        logits = cast(Tensor, self.logits)
        return logits.log_softmax(-1) if isinstance(logits, nn.Parameter) else logits

    def parts(self, prepared: tuple[Tensor, ...]) -> Tensor:
        """log w + log N, (M, K J)."""
        return super().parts(prepared) + self.log_weights.flatten()

    def combine(self, parts: Tensor) -> Tensor:
        """The sum over the parts of each state."""
        return parts.unflatten(1, (-1, self.n_mix)).logsumexp(-1)

    def spread(self, prepared: tuple[Tensor, ...], kinds: Tensor, generator: torch.Generator) -> Tensor:
        """Each state's observations are clustered again, into its parts."""
        points = prepared[0] if not self.diagonal else prepared[0][:, : prepared[0].size(1) // 2]
        points = points / self.spread_of_data.sqrt()
        labels, best = torch.zeros_like(kinds[:, 0], dtype=torch.long), kinds.argmax(1)
        for k in range(kinds.size(1)):
            own = (best == k).nonzero().flatten()
            if len(own):
                labels[own] = cluster(points[own], self.n_mix, generator)
        shares = nn.functional.one_hot(labels, self.n_mix).double()
        return (kinds.unsqueeze(2) * shares.unsqueeze(1)).flatten(1)

    def maximise(self, statistics: tuple[Tensor, ...], limits: Limits) -> None:
        """Weights as well."""
        totals = statistics[3].view(-1, self.n_mix)
        if self.logits is None:
            self.groups = len(totals)
            hold(self, "logits", torch.zeros_like(totals).log_softmax(-1))
        super().maximise(statistics[:3], limits)
        logits = cast(Tensor, self.logits)
        with torch.no_grad():
            logits.copy_(from_counts(totals, logits, limits.pseudo_count))

    def statistics(self, prepared: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """The moments, and the weight of each part."""
        return *super().statistics(prepared, weights), weights.sum(0, dtype=torch.float64)

    def troubles(self, statistics: tuple[Tensor, ...], limits: Limits) -> list[Trouble]:
        """Of the states any of whose parts are in trouble."""
        found = super().troubles(statistics[:3], limits)
        return sorted({Trouble(each.state // self.n_mix, each.why) for each in found})

    def log_prior(self, limits: Limits) -> Tensor:
        """The Dirichlet prior's part."""
        logs = self.log_weights.detach().double()
        return limits.pseudo_count * torch.where(torch.isneginf(logs), 0.0, logs).sum()

    def draw(self, kinds: Tensor, generator: torch.Generator | None) -> Tensor:
        """Vectors, (N, D)."""
        part = self.log_weights.detach().exp()[kinds].multinomial(1, generator=generator).squeeze(1)
        return super().draw(kinds * self.n_mix + part, generator)

    @property
    def free_parameters(self) -> int:
        """Weights as well."""
        logs = self.log_weights
        return super().free_parameters + int((~torch.isneginf(logs)).sum()) - len(logs)
