"""What every exact structure offers: a distribution over a combinatorial set, p(y) = exp(score(y)) / Z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, register_kl

from thalweg.errors import InfeasibleError

__all__ = ["Structure"]


class Structure(Distribution):
    """A distribution over structures y with energy E(y) = -score(y): p(y) = exp(score(y)) / Z.

    A subclass gives ``log_partition``, ``marginals``, ``mode``, ``max_score``, ``top_k``, ``sample``, ``score`` and
    ``cross_entropy``; the rest follows. Items of a batch without any feasible structure raise
    :class:`~thalweg.errors.InfeasibleError` wherever log Z or the mode is needed.

    >>> from thalweg.inference import LinearChain
    >>> isinstance(LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2)), Structure)
    True
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # pyright: ignore[reportIncompatibleMethodOverride]
    has_enumerate_support = False

    def __init__(self, batch_shape: torch.Size, event_shape: torch.Size, *, validate_args: bool | None = None):
        super().__init__(batch_shape, event_shape, validate_args=False)
        # Not torch's own default: torch.compile turns that off for the whole process.
        self.checked = validate_args is None or validate_args

    @property
    def log_partition(self) -> Tensor:
        """log Z of each item, (B,)."""
        raise NotImplementedError

    @property
    def marginals(self) -> Tensor:
        """The probability of each part; the gradient of log Z in the scores of the parts."""
        raise NotImplementedError

    @property
    def mean(self) -> Tensor:
        """The expected parts: the marginals."""
        return self.marginals

    @property
    def max_score(self) -> Tensor:
        """The highest score, (B,), differentiable: its gradient are the parts of the mode."""
        raise NotImplementedError

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), falling, and their structures (B, k, ...)."""
        raise NotImplementedError

    def score(self, value: Tensor) -> Tensor:
        """The score of structures with any leading sample dimensions."""
        raise NotImplementedError

    def cross_entropy(self, other: Structure) -> Tensor:
        """-E_p[log q(y)] with p this and q the other, (B,)."""
        raise NotImplementedError

    def energy(self, value: Tensor) -> Tensor:
        """E(y) = -score(y): lower is better."""
        return -self.score(value)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y) = score(y) - log Z."""
        return self.score(value) - self.log_partition

    def entropy(self) -> Tensor:
        """-E_p[log p(y)] of each item in nats, (B,)."""
        return self.cross_entropy(self)

    def _feasible(self, values: Tensor) -> Tensor:
        """The values, if none is -inf; one copy to the host, whatever the device."""
        if self.checked and float("-inf") in (host := values.tolist()):
            items = [item for item, value in enumerate(host) if value == float("-inf")]
            named = ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
            raise InfeasibleError(
                f"every structure of batch item {named} has score -inf (items count from 0); relax its constraints"
            )
        return values


@register_kl(Structure, Structure)
def _kl_structures(p: Structure, q: Structure) -> Tensor:
    return p.cross_entropy(q) - p.entropy()
