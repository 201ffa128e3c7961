"""How many components: fit each number, and keep the one with the lowest criterion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError

__all__ = ["Choice", "choose_components"]


class Choice(NamedTuple):
    """A number of components and what it was preferred to.

    Attributes:
        model: the fitted mixture with the lowest criterion.
        criteria: the criterion by number of components.

    >>> Choice(GaussianMixture(2), {1: 90.0, 2: 80.0}).criteria[2]
    80.0
    """

    model: GaussianMixture
    criteria: dict[int, float]


def choose_components(
    X: Any, counts: Iterable[int], criterion: str = "bic", *, sample_weight: Any = None, **settings: Any
) -> Choice:
    """Fit a mixture with each number of components and keep the one with the lowest criterion.

    Args:
        X: ``(B, D)``, as in :meth:`GaussianMixture.fit`.
        counts: the numbers of components to try; of equal criteria the first wins.
        criterion: ``bic`` or ``aic``.
        sample_weight: ``(B,)``; the criterion itself counts every point once.
        settings: the others of :class:`GaussianMixture`.

    >>> import torch
    >>> points = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> points[:150] += 6
    >>> chosen = choose_components(points, range(1, 4), random_state=0)
    >>> chosen.model, min(chosen.criteria, key=chosen.criteria.get)
    (GaussianMixture(n_components=2, random_state=0), 2)
    """
    if criterion not in ("bic", "aic"):
        raise ConfigError(f"`criterion` must be `bic` or `aic`, got {criterion!r}")
    best: GaussianMixture | None = None
    criteria: dict[int, float] = {}
    for count in counts:
        model = GaussianMixture(count, **settings).fit(X, sample_weight=sample_weight)
        criteria[count] = getattr(model, criterion)(X)
        if best is None or criteria[count] < min(value for other, value in criteria.items() if other != count):
            best = model
    if best is None:
        raise ConfigError("`counts` must name at least one number of components, got none")
    return Choice(best, criteria)
