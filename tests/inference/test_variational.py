"""Bounds on the likelihood against models whose likelihood and posterior are known (V1), in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
)

from oracles import linear_gaussian
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import (
    LinearChain,
    cyclic_anneal,
    elbo,
    expectation,
    free_bits,
    importance_bound,
    leave_one_out,
    linear_anneal,
)
from thalweg.inference.variational.expectations import support

CLOSE = {"rtol": 0, "atol": 1e-8}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Factors:
    """Factor analysis with random parameters, some data, and its log-joint in torch."""

    def __init__(self, N: int = 6, D: int = 5, K: int = 2, seed: int = 0):
        draw = np.random.default_rng(seed)
        self.W, self.mean = draw.normal(size=(D, K)), draw.normal(size=D)
        self.noise, self.X = draw.uniform(0.3, 1.5, D), draw.normal(size=(N, D)) * 1.5
        self.log_likelihood = torch.tensor(linear_gaussian.log_likelihood(self.W, self.mean, self.noise, self.X))
        means, covariance = linear_gaussian.posterior(self.W, self.mean, self.noise, self.X)
        self.means, self.covariance = torch.tensor(means), torch.tensor(covariance)

    def log_joint(self, z: Tensor) -> Tensor:
        W, mean, noise, X = (torch.tensor(each) for each in (self.W, self.mean, self.noise, self.X))
        fit = Normal(z @ W.T + mean, noise.sqrt()).log_prob(X).sum(-1)
        return fit + Normal(0.0, 1.0).log_prob(z).sum(-1)

    @property
    def posterior(self) -> MultivariateNormal:
        return MultivariateNormal(self.means, self.covariance)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_v1_linear_gaussian_gap_is_the_divergence(K: int) -> None:
    model = Factors(K=K)
    mean, scale = torch.randn(6, K, dtype=torch.float64), torch.rand(6, K, dtype=torch.float64) + 0.2
    q = Independent(Normal(mean, scale), 1)
    bound = elbo(model.log_joint, q, estimator="quadrature", samples=3)
    gaps = [
        linear_gaussian.gaussian_kl(m, np.diag(s**2), p, model.covariance.numpy())
        for m, s, p in zip(mean.numpy(), scale.numpy(), model.means.numpy(), strict=True)
    ]
    assert bool((bound < model.log_likelihood).all())
    torch.testing.assert_close(model.log_likelihood - bound, torch.tensor(gaps), **CLOSE)


def test_v1_linear_gaussian_equal_at_the_posterior() -> None:
    model = Factors()
    exact = elbo(model.log_joint, model.posterior, estimator="quadrature", samples=2)
    torch.testing.assert_close(exact, model.log_likelihood, **CLOSE)
    # Where q is the posterior every weight is p(x): no sample deviates.
    q = model.posterior
    drawn = expectation(lambda z: model.log_joint(z) - q.log_prob(z), q)
    torch.testing.assert_close(drawn, model.log_likelihood, **CLOSE)
    torch.testing.assert_close(importance_bound(model.log_joint, q, samples=3), model.log_likelihood, **CLOSE)


def test_v1_linear_gaussian_pathwise_is_unbiased() -> None:
    """Value and gradient of sampled bounds against those of the closed form."""
    model = Factors()
    mean = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    raw = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
    exact = elbo(model.log_joint, Independent(Normal(mean, raw.exp()), 1), estimator="quadrature", samples=2)
    oracle = linear_gaussian.bound(
        model.W, model.mean, model.noise, model.X, mean.detach().numpy(), np.stack([np.eye(2)] * 6)
    )
    torch.testing.assert_close(exact.detach(), torch.tensor(oracle), **CLOSE)
    wanted = torch.autograd.grad(exact.sum(), (mean, raw))
    runs = []
    for _ in range(200):
        sampled = elbo(model.log_joint, Independent(Normal(mean, raw.exp()), 1), samples=20)
        runs.append(torch.cat([sampled, *(g.flatten() for g in torch.autograd.grad(sampled.sum(), (mean, raw)))]))
    assert_unbiased(torch.stack(runs).detach(), torch.cat([exact, *(g.flatten() for g in wanted)]).detach())


def assert_unbiased(runs: Tensor, wanted: Tensor, errors: float = 4.5) -> None:
    """The mean of the runs (R, n) is within some standard errors of what is wanted, entry by entry."""
    error = runs.std(0) / math.sqrt(len(runs))
    away = (runs.mean(0) - wanted).abs() / error.clamp(min=1e-12)
    assert bool((away < errors).all()), f"{float(away.max()):.1f} standard errors"


def test_unbiasedness_check_can_fail() -> None:
    runs = torch.randn(400, 3)
    assert_unbiased(runs, torch.zeros(3))
    with pytest.raises(AssertionError):
        assert_unbiased(runs, torch.full((3,), 0.5))


class Mixture:
    """A mixture of three Gaussians in the plane: its joint log p(x, z), (B, 3)."""

    def __init__(self, B: int = 5):
        draw = torch.Generator().manual_seed(3)
        X, means = (torch.randn(n, 2, dtype=torch.float64, generator=draw) for n in (B, 3))
        weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        self.joint = weights.log() + Normal(means, 0.7).log_prob(X.unsqueeze(1)).sum(-1)

    def log_joint(self, z: Tensor) -> Tensor:
        return (z * self.joint).sum(-1)

    def by_number(self, z: Tensor) -> Tensor:
        return self.joint.expand(len(z), -1, -1).gather(-1, z.unsqueeze(-1)).squeeze(-1)


def test_v1_mixture_gap_is_the_divergence() -> None:
    model = Mixture()
    likelihood = model.joint.exp().sum(1).log()
    q = torch.randn(5, 3, dtype=torch.float64).softmax(-1)
    posterior = (model.joint.T - likelihood).T.exp()
    gap = (q * (q / posterior).log()).sum(1)
    for bound in (elbo(model.log_joint, OneHotCategorical(q)), elbo(model.by_number, Categorical(q))):
        assert bool((bound < likelihood).all())
        torch.testing.assert_close(likelihood - bound, gap, **CLOSE)
    torch.testing.assert_close(elbo(model.by_number, Categorical(posterior)), likelihood, **CLOSE)


def test_v1_importance_bounds_rise_to_the_likelihood() -> None:
    """L_1 <= L_2 <= ... in expectation, and the last is near log p(x)."""
    model = Factors()
    q = Independent(Normal(model.means, model.covariance.diagonal().sqrt() * 1.3), 1)
    many = 4000
    points = q.sample((many * 16,))
    log_weights = model.log_joint(points) - q.log_prob(points)
    means, before = [], None
    for k in (1, 2, 4, 16):
        each = log_weights.view(-1, k, 6).logsumexp(1) - math.log(k)
        mean, error = each.mean(0), each.std(0) / math.sqrt(len(each))
        assert bool((mean < model.log_likelihood + 4 * error).all())
        if before is not None:
            assert bool((mean > before - 4 * error).all())
        before = mean
        means.append(float(mean.mean()))
    assert means == sorted(means)
    bounds = torch.stack([importance_bound(model.log_joint, q, samples=16) for _ in range(many // 4)])
    assert_unbiased(bounds, before if before is not None else bounds)
    gap = float((model.log_likelihood - importance_bound(model.log_joint, q, samples=20_000)).abs().max())
    assert gap < 0.02 < float(model.log_likelihood.mean()) - means[0]


def test_importance_bound_may_go_by_parts() -> None:
    model = Factors()
    whole = importance_bound(model.log_joint, model.posterior, samples=7, at_once=3)
    torch.testing.assert_close(whole, model.log_likelihood, **CLOSE)


def test_importance_bound_of_a_discrete_q_has_an_unbiased_gradient() -> None:
    """Against the gradient of the exact expectation of log((w_1 + w_2) / 2) over all nine pairs."""
    model = Mixture(B=2)
    logits = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    log_q = logits.log_softmax(-1)
    log_w = model.joint - log_q
    exact: Tensor = log_q.new_zeros(2)
    for i, j in itertools.product(range(3), repeat=2):
        pair = torch.stack([log_w[:, i], log_w[:, j]]).logsumexp(0) - math.log(2)
        exact = exact + (log_q[:, i] + log_q[:, j]).exp() * pair
    (wanted,) = torch.autograd.grad(exact.sum(), logits)
    runs = []
    for _ in range(1500):
        bound = importance_bound(model.by_number, Categorical(logits=logits), samples=2)
        runs.append(torch.autograd.grad(bound.sum(), logits)[0].flatten())
    assert_unbiased(torch.stack(runs), wanted.flatten())


def gradients(model: Mixture, logits: Tensor, runs: int, **how) -> Tensor:
    """Gradients of sampled bounds, (runs, B * 3): each item stands many times in one batch."""
    each = logits.expand(runs, *logits.shape).flatten(0, 1).detach().requires_grad_()
    copies = model.joint.repeat(runs, 1)
    bound = elbo(lambda z: (z * copies).sum(-1), OneHotCategorical(logits=each), **how)
    (found,) = torch.autograd.grad(bound.sum(), each)
    return found.view(runs, -1)


def exact_gradient(model: Mixture, logits: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(elbo(model.log_joint, OneHotCategorical(logits=leaf)).sum(), leaf)[0].flatten()


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("baseline", [None, leave_one_out])
def test_reinforce_is_unbiased(samples: int, baseline) -> None:
    model, logits = Mixture(), torch.randn(5, 3, dtype=torch.float64)
    found = gradients(model, logits, 20_000, estimator="reinforce", samples=samples, baseline=baseline)
    assert_unbiased(found, exact_gradient(model, logits))


def test_a_baseline_lowers_the_variance() -> None:
    model, logits = Mixture(), torch.randn(5, 3, dtype=torch.float64)
    plain, better = (
        float(gradients(model, logits, 5000, estimator="reinforce", samples=4, baseline=baseline).var(0).sum())
        for baseline in (None, leave_one_out)
    )
    assert better < 0.6 * plain


def test_reinforce_baseline_that_looks_at_its_own_sample_is_caught() -> None:
    """The mean over all samples is no baseline: it shrinks the gradient, and the check sees it."""
    model, logits = Mixture(), torch.randn(5, 3, dtype=torch.float64)
    found = gradients(
        model, logits, 20_000, estimator="reinforce", samples=2, baseline=lambda values: values.mean(0, keepdim=True)
    )
    with pytest.raises(AssertionError):
        assert_unbiased(found, exact_gradient(model, logits))


def curved(z: Tensor) -> Tensor:
    """Not linear in z, so that a relaxation is biased."""
    return (z * torch.tensor([1.0, -2.0, 0.5], dtype=z.dtype)).sum(-1) ** 2


def test_gumbel_bias_shrinks_with_temperature() -> None:
    logits = torch.tensor([[0.4, -0.3, 0.1]], dtype=torch.float64, requires_grad=True)
    exact = expectation(curved, OneHotCategorical(logits=logits))
    (wanted,) = torch.autograd.grad(exact.sum(), logits)
    biases, values = [], []
    for temperature in (2.0, 1.0, 0.5, 0.25, 0.1):
        torch.manual_seed(1)
        q = OneHotCategorical(logits=logits)
        found = expectation(curved, q, estimator="gumbel", samples=200_000, temperature=temperature)
        values.append(float((found - exact).detach().abs()))
        biases.append(float((torch.autograd.grad(found.sum(), logits)[0] - wanted).norm()))
    assert biases == sorted(biases, reverse=True)
    assert values == sorted(values, reverse=True)
    assert biases[-1] < 0.2 * biases[0]


def test_straight_through_values_are_those_of_the_vertices() -> None:
    logits = torch.tensor([[0.4, -0.3, 0.1]], dtype=torch.float64, requires_grad=True)
    q = OneHotCategorical(logits=logits)
    seen = []

    def function(z: Tensor) -> Tensor:
        seen.append(z.detach())
        return curved(z)

    found = expectation(function, q, estimator="straight_through", samples=100_000, temperature=0.5)
    assert set(seen[0].unique().tolist()) == {0.0, 1.0}
    assert abs(float((found - expectation(curved, q)).detach())) < 0.02
    assert bool(torch.autograd.grad(found.sum(), logits)[0].abs().gt(0).all())


@pytest.mark.parametrize("estimator", ["exact", "reinforce", "gumbel"])
def test_independent_bits(estimator) -> None:
    """Sixteen combinations of four bits: exact against plain enumeration, the others near it."""
    probs = torch.tensor([[0.2, 0.5, 0.7, 0.9], [0.5, 0.1, 0.4, 0.6]], dtype=torch.float64)
    q = Independent(Bernoulli(probs), 1)

    def function(z: Tensor) -> Tensor:
        return (z * torch.arange(1.0, 5, dtype=z.dtype)).sum(-1).square()

    wanted = torch.zeros(2, dtype=torch.float64)
    for bits in itertools.product((0.0, 1.0), repeat=4):
        z = torch.tensor(bits, dtype=torch.float64)
        wanted += (probs * z + (1 - probs) * (1 - z)).prod(1) * function(z)
    found = expectation(function, q, estimator=estimator, samples=20_000, temperature=0.1)
    torch.testing.assert_close(
        found, wanted, **({"rtol": 1e-12, "atol": 0} if estimator == "exact" else {"rtol": 0.05, "atol": 0})
    )


def chains(B: int = 3, T: int = 4, C: int = 3) -> tuple[LinearChain, LinearChain]:
    lengths = torch.tensor([4, 3, 1])[:B]
    p, q = (
        LinearChain(
            torch.randn(B, T, C, dtype=torch.float64),
            torch.randn(C, C, dtype=torch.float64),
            start=torch.randn(C, dtype=torch.float64),
            lengths=lengths,
        )
        for _ in range(2)
    )
    return p, q


def paths(chain: LinearChain, item: int) -> Tensor:
    """Every labelling of an item, (P, T) with zeros past its length."""
    T, C = chain.potentials.emissions.shape[1:]
    length = int(chain.lengths[item])
    return torch.tensor([(*y, *[0] * (T - length)) for y in itertools.product(range(C), repeat=length)])


def by_hand(chain: LinearChain, item: int, y: list[int]) -> float:
    """The score of one labelling, term by term."""
    emissions, moves, start, _, _ = chain.potentials
    assert isinstance(moves, Tensor)
    labels = y[: int(chain.lengths[item])]
    total = float(start[labels[0]]) + sum(float(emissions[item, t, c]) for t, c in enumerate(labels))
    return total + sum(float(moves[a, b]) for a, b in itertools.pairwise(labels))


def test_v1_chain_gap_is_the_divergence() -> None:
    """p(x, z) and q(z) both chains: bound, likelihood and divergence by enumeration of every labelling."""
    p, q = chains()
    bound, expected = elbo(p, q), expectation(p, q)
    for item in range(3):
        every = paths(p, item).tolist()
        joint = np.array([by_hand(p, item, y) for y in every])
        scores = np.array([by_hand(q, item, y) for y in every])
        probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        likelihood = np.log(np.exp(joint).sum())
        posterior = np.exp(joint - likelihood)
        divergence = (probabilities * np.log(probabilities / posterior)).sum()
        assert float(expected[item]) == pytest.approx((probabilities * joint).sum(), abs=1e-8)
        assert float(bound[item]) == pytest.approx(likelihood - divergence, abs=1e-8)
        assert float(bound[item]) < likelihood
    torch.testing.assert_close(elbo(p, p), p.log_partition, **CLOSE)


def test_v1_chain_bound_climbs_to_the_likelihood() -> None:
    """Gradient ascent in q alone: the bound never falls by more than rounding and reaches log Z."""
    p, _ = chains()
    moves, start = (torch.zeros_like(x).requires_grad_() for x in p.inputs[1:3])
    emissions = torch.zeros_like(p.inputs[0]).requires_grad_()
    parameters = [emissions, moves, start]
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def bound() -> Tensor:
        return elbo(p, LinearChain(emissions, moves, start=start, lengths=p.lengths))

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -bound().sum()
        loss.backward()
        return loss

    first = bound().detach()
    optimiser.step(closure)
    assert bool((bound() > first).all())
    torch.testing.assert_close(bound().detach(), p.log_partition, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["reinforce", "gumbel", "straight_through"])
def test_chain_bounds_by_samples(estimator) -> None:
    """A function of the labels instead of a structure: values near the exact ones; REINFORCE unbiased."""
    p, q = chains()
    emissions, moves, start, _, _ = p.potentials
    assert isinstance(moves, Tensor)
    inside = p.inside.to(emissions.dtype)

    def of_parts(z: Tensor) -> Tensor:  # (S, B, T, C): bilinear, so that it takes relaxed parts too
        z = z * inside
        pairs = torch.einsum("sbti,ij,sbtj->sb", z[:, :, :-1], moves, z[:, :, 1:])
        return (z * emissions).sum((-1, -2)) + (z[:, :, 0] * start).sum(-1) + pairs

    function = p.score if estimator == "reinforce" else of_parts
    found = elbo(function, q, estimator=estimator, samples=4000, temperature=0.2)
    # The relaxed samples perturb parts, not whole labellings: near, and no more.
    torch.testing.assert_close(found, elbo(p, q), rtol=0, atol=0.1 if estimator == "reinforce" else 1.0)


def test_chain_reinforce_gradient_is_unbiased() -> None:
    p, q = chains()
    leaf = q.inputs[0].detach().requires_grad_()

    def chain() -> LinearChain:
        return LinearChain(leaf, q.inputs[1], start=q.inputs[2], lengths=q.lengths)

    (wanted,) = torch.autograd.grad(elbo(p, chain()).sum(), leaf)
    runs = []
    for _ in range(120):
        bound = elbo(p.score, chain(), estimator="reinforce", samples=50)
        runs.append(torch.autograd.grad(bound.sum(), leaf)[0].flatten())
    assert_unbiased(torch.stack(runs), wanted.flatten())


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_v1_v2_variational_em_reaches_probabilistic_pca(family: str) -> None:
    """V1 and V2: q and the parameters by turns; the bound never falls and ends at the closed-form maximum.

    A diagonal q ends there too, for W may be rotated until the posterior has no correlations.
    """
    draw = np.random.default_rng(1)
    X = draw.normal(size=(60, 2)) @ draw.normal(size=(2, 5)) * 1.5 + draw.normal(size=(60, 5)) * 0.6 + 2
    best, best_noise = linear_gaussian.ppca_maximum(X, 2)
    W, mean, noise = draw.normal(size=(5, 2)), X.mean(0), 1.0
    data = torch.tensor(X)

    def bound(q) -> float:
        weight, centre = torch.tensor(W), torch.tensor(mean)

        def log_joint(z: Tensor) -> Tensor:
            fit = Normal(z @ weight.T + centre, math.sqrt(noise)).log_prob(data).sum(-1)
            return fit + Normal(0.0, 1.0).log_prob(z).sum(-1)

        return float(elbo(log_joint, q, estimator="quadrature", samples=2).mean())

    before = -math.inf
    for _ in range(400):
        precision = np.eye(2) + W.T @ W / noise
        means = np.linalg.solve(precision, W.T @ (X - mean).T / noise).T
        # The best diagonal q has the same mean, and the inverse of the precision's diagonal.
        S = np.linalg.inv(precision) if family == "full" else np.diag(1 / np.diag(precision))
        q = MultivariateNormal(torch.tensor(means), torch.tensor(S))
        after_q = bound(q)
        second = means.T @ means + len(X) * S
        W = (X - mean).T @ means @ np.linalg.inv(second)
        apart = X - mean - means @ W.T
        noise = ((apart**2).sum() + len(X) * np.trace(W @ S @ W.T)) / X.size
        after_parameters = bound(q)
        assert before - 1e-10 <= after_q <= after_parameters + 1e-10
        assert after_parameters <= best + 1e-10
        before = after_parameters
    assert before == pytest.approx(best, abs=1e-6)
    assert noise == pytest.approx(best_noise, rel=1e-3)
    exact = linear_gaussian.log_likelihood(W, mean, np.full(5, noise), X).mean()
    assert exact == pytest.approx(best, abs=1e-6)


def test_quadrature_is_exact_for_polynomials() -> None:
    q = Normal(torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64))
    found = expectation(lambda z: z**4 - z, q, estimator="quadrature", samples=3)
    m, s = q.loc, q.scale
    torch.testing.assert_close(found, m**4 + 6 * m**2 * s**2 + 3 * s**4 - m, **CLOSE)


def test_what_has_no_probability_counts_for_nothing() -> None:
    q = Categorical(logits=torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64))
    joint = torch.tensor([0.25, 0.25, 0.0], dtype=torch.float64).log()
    torch.testing.assert_close(elbo(lambda z: joint[z], q), torch.tensor([0.5], dtype=torch.float64).log(), **CLOSE)


def test_free_bits_and_its_gradient() -> None:
    divergences = torch.tensor([[0.1, 2.0], [0.3, 4.0]], requires_grad=True)
    kept = free_bits(divergences, 0.5)
    assert float(kept.detach().mean()) == pytest.approx(0.5 + 3.0)
    kept.mean().backward()
    assert divergences.grad is not None
    assert divergences.grad.tolist() == [[0.0, 0.5], [0.0, 0.5]]
    assert torch.equal(free_bits(divergences, 0.0), divergences.sum(1))


def test_annealing() -> None:
    weights = [cyclic_anneal(step, 10, rise=0.4) for step in range(20)]
    assert weights[:10] == weights[10:] == [0.0, 0.25, 0.5, 0.75, *[1.0] * 6]
    assert [linear_anneal(step, 5) for step in range(7)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1])


NORMAL = Independent(Normal(torch.zeros(2, 3), 1.0), 1)
CHAIN = LinearChain(torch.zeros(2, 3, 2), torch.zeros(2, 2))
BITS = Independent(Bernoulli(torch.full((1, 20), 0.5)), 1)


def total(z: Tensor) -> Tensor:
    return z.sum(-1)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: elbo(total, NORMAL, estimator="reinforced"), "did you mean `reinforce`?"),
        (lambda: elbo(total, NORMAL, samples=0), "`samples` must be an integer of at least 1, got 0"),
        (lambda: importance_bound(total, NORMAL, samples=0), "`samples` must be an integer of at least 1, got 0"),
        (lambda: importance_bound(total, NORMAL, samples=2, at_once=0), "at least 1, got 0"),
        (lambda: elbo(total, CHAIN, estimator="gumbel", temperature=0.0), "`temperature` must be above 0"),
        (lambda: elbo(total, Normal(torch.zeros(2, 3), 1.0)), "wrap it in Independent(q, 1)"),
        (lambda: elbo(lambda z: z, NORMAL), "must give (S, B) = (1, 2), got (1, 2, 3)"),
        (lambda: elbo(total, NORMAL, estimator="exact"), "`exact` needs a distribution over few values"),
        (lambda: elbo(total, CHAIN, estimator="exact"), "got LinearChain; give a structure"),
        (lambda: elbo(total, NORMAL, estimator="gumbel"), "a relaxation needs a Categorical"),
        (lambda: elbo(total, BITS, estimator="pathwise"), "needs a distribution with rsample"),
        (lambda: elbo(total, BITS, estimator="quadrature"), "`quadrature` needs a Gaussian"),
        (lambda: elbo(total, BITS, estimator="exact"), "at most 65,536 values, got 2^20"),
        (lambda: elbo(total, NORMAL, estimator="quadrature", samples=100), "at most 65,536 points, got 100^3"),
        (lambda: elbo(CHAIN, NORMAL), "needs a structure as `q`"),
        (lambda: elbo(CHAIN, CHAIN, estimator="gumbel"), "is `exact`, got `gumbel`"),
        (lambda: free_bits(torch.zeros(3), 0.5), "must be floating point (B, D)"),
        (lambda: free_bits(torch.zeros(3, 1), -0.5), "`floor` must be 0 or more"),
        (lambda: linear_anneal(-1, 5), "must be 0 or more"),
        (lambda: cyclic_anneal(1, 0), "`period` at least 1"),
    ],
)
def test_errors_are_one_line(call, line: str) -> None:
    with pytest.raises((ConfigError, ShapeError)) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_falls_back_where_values_are_many() -> None:
    assert elbo(total, BITS, samples=3).shape == (1,)
    assert support(Categorical(torch.ones(2, 3))).shape == (3, 2)
