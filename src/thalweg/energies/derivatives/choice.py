"""What differentiates the likelihoods of which model."""

from __future__ import annotations

from typing import Any

from thalweg.energies.derivatives.chains import ChainDerivatives
from thalweg.energies.derivatives.mixtures import MixtureDerivatives
from thalweg.energies.hmm.model import HMM
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError

__all__ = ["derivatives_of"]


def derivatives_of(model: Any) -> MixtureDerivatives | ChainDerivatives:
    """What differentiates the likelihoods of a model; a ConfigError for one without, a NotFittedError before a fit.

    >>> derivatives_of(HMM([1.0], [[1.0]], [[0.5, 0.5]])).offered
    ('emissions', 'initial', 'transitions')
    """
    if not isinstance(model, GaussianMixture | HMM):
        raise ConfigError(f"`model` must be a GaussianMixture or an HMM of thalweg, got {type(model).__name__}")
    model._check_fitted()
    return MixtureDerivatives(model) if isinstance(model, GaussianMixture) else ChainDerivatives(model)
