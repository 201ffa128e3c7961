r"""Expectations under a distribution that is itself learned, each way with its gradient in the distribution.

.. math:: \nabla_\phi \, \mathbb{E}_{q_\phi}[f(z)]

f is a function of points ``(S, B, *event)``, which stand where samples would, to values ``(S, B)``.

| estimator | latent z | value | gradient in q |
|---|---|---|---|
| ``exact`` | few values, or the parts of a structure | exact | exact |
| ``quadrature`` | Gaussian of few dimensions | exact for polynomials of degree below 2 S | the same |
| ``pathwise`` | what has ``rsample`` | unbiased | unbiased |
| ``reinforce`` | anything | unbiased | unbiased, of larger variance |
| ``gumbel`` | categorical, binary, parts of a structure | of relaxed z | biased less at low temperature |
| ``straight_through`` | the same | unbiased for vectors | biased |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    RelaxedBernoulli,
    RelaxedOneHotCategorical,
)

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.base import Structure
from thalweg.limits import check_choice

_MOST = 10**6  # samples of one latent

# How an expectation is taken, and what its gradient is.
GradientEstimator: TypeAlias = Literal[
    "auto", "exact", "quadrature", "pathwise", "reinforce", "gumbel", "straight_through"
]

Function = Callable[[Tensor], Tensor]
Baseline = Callable[[Tensor], Tensor]

# Points that a sum goes through at most, for each item.
_MOST_POINTS = 2**16


def leave_one_out(values: Tensor) -> Tensor:
    """For each of S samples the mean of the others, ``(S, B)``; 0 where there is only one.

    Each is independent of the sample it is taken off, so the gradient stays unbiased. Kool, van Hoof and Welling
    (2019).

    >>> leave_one_out(torch.tensor([[1.0], [2.0], [6.0]])).squeeze(1)
    tensor([4.0000, 3.5000, 1.5000])
    """
    if len(values) == 1:
        return torch.zeros_like(values)
    return (values.sum(0) - values) / (len(values) - 1)


def expectation(
    function: Function | Structure,
    q: Distribution,
    *,
    estimator: GradientEstimator = "auto",
    samples: int = 1,
    temperature: float = 1.0,
    baseline: Baseline | None = leave_one_out,
) -> Tensor:
    r"""E_q[f(z)] of each item, differentiable in f and in q.

    - ``exact``: the sum over all values of z, up to 65,536 of them; where q and f are structures over the same set,
      sum_p P(p) s_p over their parts, for a score is linear in them.
    - ``quadrature``: Gauss-Hermite, S points a dimension, for Gaussian q.
    - ``pathwise``: z = g(noise; q), the gradient goes through g. Kingma and Welling (2014).
    - ``reinforce``: f' + (f - b) d log q(z), with a baseline b that does not depend on z. Williams (1992).
    - ``gumbel``: z relaxed to softmax((log q + Gumbel noise) / temperature). Jang et al. (2017), Maddison et al.
      (2017); for structures Corro and Titov (2019).
    - ``straight_through``: the values are those of the nearest vertex, the gradient that of ``gumbel``.
    - ``auto``: the first that can be of exact (structures), pathwise, exact (few values), reinforce.

    Args:
        function: ``(S, B, *event) -> (S, B)``; the relaxed ways give a categorical z as a vector, so that for
            them :class:`~torch.distributions.OneHotCategorical` saves a second function; a structure as its parts. A
            :class:`~thalweg.inference.Structure` stands for its score.
        q: with batch shape ``(B,)``; wrap independent dimensions in ``Independent(q, 1)``.
        samples: S; for ``quadrature`` in each dimension.
        temperature: of the relaxed ways, above 0.
        baseline: values ``(S, B)`` -> what ``reinforce`` takes off them; none where None.
    Returns:
        ``(B,)``. Samples come from torch's own generator.

    >>> q = OneHotCategorical(torch.tensor([[0.2, 0.8]]))
    >>> expectation(lambda z: (z * torch.tensor([1.0, 2.0])).sum(-1), q)
    tensor([1.8000])
    >>> expectation(lambda z: z**4, Normal(torch.zeros(1), 1.0), estimator="quadrature", samples=3)
    tensor([3.0000])
    """
    check_request(q, estimator, samples, temperature)
    if isinstance(function, Structure):
        return _of_scores(function, q, estimator)
    if estimator == "auto":
        estimator = _choose(q)
    if estimator in ("exact", "quadrature"):
        points, weights = _enumerated(q) if estimator == "exact" else _gauss_hermite(q, samples)
        values = values_at(function, points, q)
        # What has no probability counts for nothing, even where f is -inf there.
        return (weights * torch.where(weights > 0, values, 0.0)).sum(0)
    if estimator == "pathwise":
        if not q.has_rsample:
            raise ConfigError(f"`pathwise` needs a distribution with rsample, got {_name(q)}; use `reinforce`")
        return values_at(function, q.rsample((samples,)), q).mean(0)
    if estimator == "reinforce":
        with torch.no_grad():
            points = q.sample((samples,))
        values, log_q = values_at(function, points, q), q.log_prob(points)
        if not log_q.requires_grad:
            return values.mean(0)
        gain = values.detach() - (0.0 if baseline is None else baseline(values.detach()))
        return (values + gain * (log_q - log_q.detach())).mean(0)
    return values_at(function, _relaxed(q, samples, temperature, hard=estimator == "straight_through"), q).mean(0)


def support(q: Distribution) -> Tensor:
    """Every value that a discrete q can take, ``(Z, B, *event)``; those of independent dimensions in all combinations.

    >>> support(Independent(Bernoulli(torch.full((1, 2), 0.5)), 1)).squeeze(1)
    tensor([[0., 0.],
            [0., 1.],
            [1., 0.],
            [1., 1.]])
    """
    if not isinstance(q, Independent) or not q.reinterpreted_batch_ndims:
        return q.enumerate_support()
    singles = support(q.base_dist)  # (C, B, N, ...)
    if q.reinterpreted_batch_ndims > 1:
        raise ConfigError(f"`exact` takes one independent dimension, got {q.reinterpreted_batch_ndims}; flatten them")
    C, B, N = singles.shape[:3]
    if C**N > _MOST_POINTS:
        raise ConfigError(
            f"`exact` sums over at most {_MOST_POINTS:,} values, got {C}^{N}; use `reinforce` or `gumbel`"
        )
    every = torch.arange(C, device=singles.device)
    choices = torch.cartesian_prod(*[every] * N).view(-1, 1, N)
    items = torch.arange(B, device=singles.device).view(1, -1, 1)
    return singles[choices, items, torch.arange(N, device=singles.device)]


def _of_scores(p: Structure, q: Distribution, estimator: str) -> Tensor:
    if not isinstance(q, Structure):
        raise ConfigError(f"the score of a structure needs a structure as `q`, got {_name(q)}")
    if estimator in ("auto", "exact"):
        return p.log_partition - q.cross_entropy(p)
    raise ConfigError(f"between structures the expectation is `exact`, got `{estimator}`; give `score` as the function")


def _choose(q: Distribution) -> GradientEstimator:
    if q.has_rsample:
        return "pathwise"
    base = q.base_dist if isinstance(q, Independent) else q
    few = base.has_enumerate_support
    if few and isinstance(q, Independent):
        few = len(base.enumerate_support(expand=False)) ** q.event_shape.numel() <= _MOST_POINTS
    return "exact" if few else "reinforce"


def _enumerated(q: Distribution) -> tuple[Tensor, Tensor]:
    base = q.base_dist if isinstance(q, Independent) else q
    if not base.has_enumerate_support:
        remedy = "give a structure as the function, or use `reinforce`" if isinstance(q, Structure) else "see `auto`"
        raise ConfigError(f"`exact` needs a distribution over few values, got {_name(q)}; {remedy}")
    points = support(q)
    return points, q.log_prob(points).exp()


def _gauss_hermite(q: Distribution, count: int) -> tuple[Tensor, Tensor]:
    """Points (count^D, B, *event) and weights (count^D, 1)."""
    base: Any = q.base_dist if isinstance(q, Independent) else q
    if not isinstance(base, Normal | MultivariateNormal) or len(q.event_shape) > 1:
        raise ConfigError(f"`quadrature` needs a Gaussian over numbers or vectors, got {_name(q)}; use `pathwise`")
    D = q.event_shape.numel()
    if count**D > _MOST_POINTS:
        raise ConfigError(
            f"`quadrature` takes at most {_MOST_POINTS:,} points, got {count}^{D}; use fewer or `pathwise`"
        )
    places, weights = (
        torch.as_tensor(each, dtype=base.loc.dtype, device=base.loc.device)
        for each in np.polynomial.hermite_e.hermegauss(count)
    )
    grid = torch.cartesian_prod(*[places] * D).view(-1, 1, D)
    shares = torch.cartesian_prod(*[weights / weights.sum()] * D).view(-1, 1, D).prod(-1)
    if isinstance(base, MultivariateNormal):
        return base.loc + (base.scale_tril @ grid.unsqueeze(-1)).squeeze(-1), shares
    return base.loc + base.scale * grid.view(-1, 1, *q.event_shape), shares


def _relaxed(q: Distribution, samples: int, temperature: float, *, hard: bool) -> Tensor:
    """Relaxed samples as vectors, differentiable in q."""
    if isinstance(q, Structure):
        return q.relaxed_sample((samples,), temperature=temperature, hard=hard)
    base: Any = q.base_dist if isinstance(q, Independent) else q
    if isinstance(base, Bernoulli):
        soft = RelaxedBernoulli(base.logits.new_tensor(temperature), logits=base.logits).rsample((samples,))
        near = soft.detach().round()
    elif isinstance(base, Categorical | OneHotCategorical):
        soft = RelaxedOneHotCategorical(base.logits.new_tensor(temperature), logits=base.logits).rsample((samples,))
        near = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    else:
        raise ConfigError(
            f"a relaxation needs a Categorical, OneHotCategorical, Bernoulli or a structure, got {_name(q)}; "
            "use `reinforce`"
        )
    return near + (soft - soft.detach()) if hard else soft


def values_at(function: Function, points: Tensor, q: Distribution) -> Tensor:
    """f at the points, if it gives (S, B)."""
    values = function(points)
    if values.shape != (len(points), *q.batch_shape):
        expected = (len(points), *q.batch_shape)
        raise ShapeError(f"the function must give (S, B) = {expected}, got {tuple(values.shape)}")
    return values


def check_request(q: Distribution, estimator: str = "auto", samples: int = 1, temperature: float = 1.0) -> None:
    """Refuse what no expectation can be taken with."""
    check_choice("estimator", estimator, get_args(GradientEstimator))
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"`samples` must be an integer of at least 1, got {samples!r}")
    if samples > _MOST:
        raise ConfigError(f"`samples` must be at most {_MOST:,}, got {samples}; lower it")
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"`temperature` must be above 0 and finite, got {temperature}")
    if len(q.batch_shape) != 1:
        remedy = "wrap it in Independent(q, 1)" if len(q.batch_shape) > 1 else "give it a batch dimension"
        raise ShapeError(f"`q` must have the batch shape (B,), got {tuple(q.batch_shape)}; {remedy}")


def _name(q: Distribution) -> str:
    return f"Independent {_name(q.base_dist)}" if isinstance(q, Independent) else type(q).__name__
