r"""Lower bounds on log p(x) where its sum over the latent z is out of reach.

For every distribution q over z

.. math:: \log p(x) = \mathcal{L}(q) + KL(q \,\|\, p(z \mid x)), \qquad
          \mathcal{L}(q) = \mathbb{E}_q[\log p(x, z)] + H(q)

so that L lies below log p(x), and reaches it where q is the posterior. With the energy E(x, z) = -log p(x, z) it is
minus the variational free energy <E>_q - H(q), of which -log p(x) is the least. EM raises it in q and in the
parameters by turns (Neal and Hinton, 1998), a VAE in both at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.base import Structure
from thalweg.inference.variational.expectations import (
    Baseline,
    Function,
    GradientEstimator,
    check_request,
    expectation,
    leave_one_out,
    values_at,
)


def elbo(
    log_joint: Function | Structure,
    q: Distribution,
    *,
    estimator: GradientEstimator = "auto",
    samples: int = 1,
    temperature: float = 1.0,
    baseline: Baseline | None = leave_one_out,
) -> Tensor:
    r"""The evidence lower bound of each item, differentiable in q and in the model.

    .. math:: \mathcal{L} = \mathbb{E}_q[\log p(x, z)] + H(q) = \log p(x) - KL(q \,\|\, p(z \mid x))

    The entropy is exact where q knows its own, and otherwise joins what is sampled. For an energy give
    ``lambda z: -energy(x, z)``: log p(x) is then -F(x) = log sum_z exp(-E(x, z)).

    Args:
        log_joint: log p(x, z), ``(S, B, *event) -> (S, B)``; or a structure over the same set as q, whose score it
            is: then the bound is log Z_p - KL(q || p), exactly.
        q: over z given x, batch shape ``(B,)``.
        estimator, samples, temperature, baseline: as in :func:`expectation`.
    Returns:
        ``(B,)``. Kingma and Welling (2014).

    >>> from torch.distributions import Categorical
    >>> joint = torch.tensor([[0.1, 0.3]]).log()  # p(x, z) of one x, so p(x) = 0.4
    >>> uniform, posterior = Categorical(torch.ones(1, 2)), Categorical(logits=joint)
    >>> elbo(lambda z: joint[0, z], uniform).exp(), elbo(lambda z: joint[0, z], posterior).exp()
    (tensor([0.3464]), tensor([0.4000]))
    """
    if isinstance(log_joint, Structure) and isinstance(q, Structure) and estimator in ("auto", "exact"):
        return log_joint.log_partition - q.kl_divergence(log_joint)
    how = {"estimator": estimator, "samples": samples, "temperature": temperature, "baseline": baseline}
    try:
        entropy = q.entropy()
    except NotImplementedError:
        if isinstance(log_joint, Structure):
            raise
        return expectation(lambda z: log_joint(z) - q.log_prob(z), q, **how)
    return expectation(log_joint, q, **how) + entropy


def importance_bound(log_joint: Function, q: Distribution, *, samples: int = 1, at_once: int | None = None) -> Tensor:
    r"""The importance-weighted bound with k samples (IWAE), from one draw of them.

    .. math:: \mathcal{L}_k = \mathbb{E}\Big[\log \frac1k \sum_{i=1}^k \frac{p(x, z_i)}{q(z_i)}\Big], \qquad
              \mathcal{L}_1 \le \mathcal{L}_2 \le \dots \to \log p(x)

    More samples tighten it, but a tighter bound is not a better teacher of q: the signal-to-noise ratio of the gradient
    in the parameters of the model grows like sqrt(k), that in q shrinks like 1 / sqrt(k). So measure with a large k,
    and train q with a small one (Rainforth et al., 2018). The gradient in a q without ``rsample`` is that of REINFORCE.

    Args:
        log_joint: log p(x, z), ``(S, B, *event) -> (S, B)``.
        q: over z given x, batch shape ``(B,)``.
        samples: k, at least 1.
        at_once: samples that are looked at together; all by default. Fewer save memory where there is no gradient.
    Returns:
        ``(B,)``. Burda, Grosse and Salakhutdinov (2016).

    >>> from torch.distributions import Normal
    >>> posterior = Normal(torch.tensor([0.5]), math.sqrt(0.5))  # of z ~ N(0, 1), x ~ N(z, 1) at x = 1
    >>> log_joint = lambda z: Normal(0.0, 1.0).log_prob(z) + Normal(z, 1.0).log_prob(torch.ones(()))
    >>> importance_bound(log_joint, posterior, samples=5)  # every weight is p(x)
    tensor([-1.5155])
    """
    check_request(q, samples=samples)
    check_request(q, samples=samples if at_once is None else at_once)
    parts, scores = [], []
    for first in range(0, samples, at_once or samples):
        count = (min(at_once or samples, samples - first),)
        points = q.rsample(count) if q.has_rsample else q.sample(count)
        log_q = q.log_prob(points)
        parts.append((values_at(log_joint, points, q) - log_q).logsumexp(0))
        scores.append(log_q.sum(0))
    bound, score = torch.stack(parts).logsumexp(0) - math.log(samples), torch.stack(scores).sum(0)
    if q.has_rsample or not score.requires_grad:
        return bound
    return bound + bound.detach() * (score - score.detach())


def free_bits(divergences: Tensor, floor: float) -> Tensor:
    r"""The divergence of each item, where a dimension whose mean over the batch is below a floor counts as the floor.

    .. math:: \frac1B \sum_b \ell_b = \sum_d \max\Big(\lambda, \frac1B \sum_b KL_{bd}\Big)

    Such a dimension gets no gradient from the divergence, so that it costs nothing to carry some nats: without this,
    dimensions often die early in training.

    Args:
        divergences: ``(B, D)``, KL of each latent dimension, or of each group of them.
        floor: lambda in nats, 0 or more.
    Returns:
        ``(B,)``. Kingma et al. (2016).

    >>> free_bits(torch.tensor([[0.1, 2.0], [0.3, 4.0]]), 0.5)
    tensor([2.5000, 4.5000])
    """
    if divergences.dim() != 2 or not divergences.is_floating_point():
        raise ShapeError(f"`divergences` must be floating point (B, D), got {tuple(divergences.shape)}")
    if not 0 <= floor < math.inf:
        raise ConfigError(f"`floor` must be 0 or more and finite, got {floor}")
    below = divergences.detach().mean(0, keepdim=True) < floor
    return torch.where(below, floor, divergences).sum(1)


def linear_anneal(step: int, steps: int) -> float:
    """The weight of the divergence at a step: from 0 to 1 over so many steps, then 1. Bowman et al. (2016).

    >>> [linear_anneal(step, 4) for step in (0, 2, 4, 9)], linear_anneal(0, 0)
    ([0.0, 0.5, 1.0, 1.0], 1.0)
    """
    if step < 0 or steps < 0:
        raise ConfigError(f"`step` and `steps` must be 0 or more, got {step} and {steps}")
    return min(1.0, step / steps) if steps else 1.0


def cyclic_anneal(step: int, period: int, rise: float = 0.5) -> float:
    """The weight of the divergence at a step: in every period it rises from 0 to 1, then stays. Fu et al. (2019).

    Args:
        step: from 0.
        period: steps of a cycle, at least 1.
        rise: the share of a cycle in which the weight rises, in (0, 1].

    >>> [cyclic_anneal(step, 8) for step in (0, 2, 4, 7, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.0, 0.5]
    """
    if step < 0 or period < 1 or not 0 < rise <= 1:
        raise ConfigError(
            f"`step` must be 0 or more, `period` at least 1 and `rise` in (0, 1], got {step}, {period} and {rise}"
        )
    return min(1.0, (step % period) / (rise * period))
