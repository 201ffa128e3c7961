"""Perturb-and-MAP, expected modes and relaxed samples of linear chains."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from chain_cases import INF, build, every_backend, every_kind, labels_of, same, scores_of, seeded, weighted
from torch import Tensor
from torch.autograd import gradcheck

from oracles import chains as oracle
from thalweg.inference import LinearChain


@every_backend
def test_perturbed_modes_of_one_position_are_samples(backend):
    scores, n, scale = scores_of(9, batch=2, steps=1, size=4), 20_000, 0.7
    p = build(scores, backend)
    found = p.perturbed_mode(n, scale=scale, generator=seeded(0, backend))
    assert found.shape == (n, 2, 1)
    for item, w in enumerate(weighted(scores)):
        # Scale times Gumbel noise on the scores draws from the scores divided by the scale.
        probable = {y: math.exp(v) for y, v in oracle.log_probabilities(oracle.tempered(w, scale)).items()}
        seen = Counter(labels_of(row) for row in found[:, item])
        assert oracle.total_variation(seen, probable) < oracle.variation_bound(n, 4)
        plain = {y: math.exp(v) for y, v in oracle.log_probabilities(w).items()}
        assert oracle.total_variation(seen, plain) > oracle.variation_bound(n, 4)  # a lost scale would be seen


@every_kind
def test_perturbed_modes_along_a_chain(kind):
    scores, lengths = scores_of(10, kind=kind), [4, 1, 3]
    scores["transitions"][..., 0, 1] = -INF
    p = build(scores, lengths=lengths)
    found = p.perturbed_mode(30, generator=seeded(1))
    assert found.equal(p.perturbed_mode(30, generator=seeded(1)))
    assert not found.equal(p.perturbed_mode(30, generator=seeded(2)))
    assert p.perturbed_mode().shape == (1, 3, 4)
    assert p.perturbed_mode(5, scale=1e-9).eq(p.mode).all()
    for item, w in enumerate(weighted(scores, lengths)):
        assert {labels_of(row) for row in found[:, item]} <= dict(w).keys()
        assert (found[:, item, lengths[item] :] == -1).all()


def test_expected_mode_is_the_mean_of_perturbed_modes():
    scores, lengths = scores_of(11), [4, 1, 3]
    scores["emissions"].requires_grad_()
    p = build(scores, lengths=lengths)
    found = p.expected_mode(40, scale=0.5, generator=seeded(3))
    modes = p.perturbed_mode(40, scale=0.5, generator=seeded(3))
    same(found, (modes.unsqueeze(-1) == torch.arange(3)).double().mean(0))
    (gradient,) = torch.autograd.grad((found * torch.randn(3, 4, 3, generator=seeded(0))).sum(), scores["emissions"])
    assert gradient.isfinite().all()
    assert gradient[0].any()
    assert not gradient[1, 1:].any()
    assert not gradient[2, 3:].any()


def expected_pair(emissions: Tensor, transitions: Tensor, scale: float) -> Tensor:
    """The exact mean of the perturbed modes of a chain of two positions and two labels, (2, 2).

    The difference of two Gumbel variables is logistic. Given that of one position, the other takes label 1 where its
    own difference exceeds a known number: one integral is left, by the midpoint rule over quantiles.
    """
    quantiles = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    differences = emissions[:, 1] - emissions[:, 0]
    ones = []
    for own, other, moves in ((0, 1, transitions), (1, 0, transitions.t())):  # moves[own label, other label]
        lead = differences[other] + scale * quantiles.logit()
        gain = torch.maximum(moves[1, 0], moves[1, 1] + lead) - torch.maximum(moves[0, 0], moves[0, 1] + lead)
        ones.append(torch.sigmoid((differences[own] + gain) / scale).mean())
    return torch.stack([torch.stack([1 - one, one]) for one in ones])


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_expected_mode_and_its_gradient_against_the_integral(scale):
    n, scores = 40_000, scores_of(12, batch=1, steps=2, size=2)
    emissions, transitions = scores["emissions"].requires_grad_(), scores["transitions"]
    found = LinearChain(emissions, transitions).expected_mode(n, scale=scale, generator=seeded(4))
    exact = expected_pair(emissions[0], transitions, scale)
    assert (found[0] - exact).abs().max() < oracle.frequency_bound(n, 4)
    bound = 6 / (scale * math.sqrt(n))  # each term has |.| <= 1 times 1 - Exp(1), whose variance is 1
    largest = 0.0
    for t, c in itertools.product(range(2), range(2)):
        estimate, truth = (
            torch.autograd.grad(value[t, c], emissions, retain_graph=True)[0] for value in (found[0], exact)
        )
        assert (estimate - truth).abs().max() < bound
        largest = max(largest, float(truth.abs().max()))
    assert largest > 2 * bound  # no gradient at all would be seen


def test_expected_mode_of_one_position_has_the_gradient_of_softmax():
    n, scale = 40_000, 0.8
    emissions = scores_of(13, batch=1, steps=1, size=3)["emissions"].requires_grad_()
    weight = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    found = LinearChain(emissions, torch.zeros(3, 3).double()).expected_mode(n, scale=scale, generator=seeded(5))
    truth = torch.softmax(emissions / scale, -1)
    assert (found - truth).abs().max() < oracle.frequency_bound(n, 3)
    (estimate,), (exact,) = (torch.autograd.grad((value * weight).sum(), emissions) for value in (found, truth))
    assert (estimate - exact).abs().max() < 6 * 2 / (scale * math.sqrt(n))


@every_backend
@every_kind
def test_relaxed_samples(kind, backend):
    scores, lengths = scores_of(14, kind=kind), [4, 1, 3]
    p = build(scores, backend, lengths=lengths)
    soft = p.relaxed_sample((5, 2), temperature=0.7, generator=seeded(6, backend))
    assert soft.shape == (5, 2, 3, 4, 3)
    assert p.relaxed_sample().shape == (3, 4, 3)
    inside = (torch.arange(4) < torch.tensor(lengths).unsqueeze(1)).double()
    same(soft.sum(-1), inside.expand(5, 2, 3, 4))
    assert (soft >= 0).all()
    cold = p.relaxed_sample((10,), temperature=1e-4, generator=seeded(7, backend))
    hard = p.relaxed_sample((10,), hard=True, generator=seeded(7, backend))
    modes = p.perturbed_mode(10, generator=seeded(7, backend))
    onehot = (modes.unsqueeze(-1) == torch.arange(3, device=modes.device)).double()
    same(cold, onehot, atol=1e-6)
    same(hard, onehot, atol=0, rtol=0)


@every_backend
def test_gradients_of_relaxed_samples(backend):
    scores, lengths = scores_of(15, batch=2, steps=3), [3, 2]
    leaves = tuple(tensor.requires_grad_() for tensor in scores.values())

    def draw(*tensors: Tensor, hard=False) -> Tensor:
        p = build(dict(zip(scores, tensors, strict=True)), backend, lengths=lengths)
        return p.relaxed_sample((2,), temperature=0.7, hard=hard, generator=seeded(8, backend))

    assert gradcheck(draw, leaves, fast_mode=True)
    weight = torch.randn(2, 2, 3, 3, generator=seeded(0), dtype=torch.float64).to(draw(*leaves).device)
    soft, hard = (torch.autograd.grad((draw(*leaves, hard=h) * weight).sum(), leaves) for h in (False, True))
    for one, two in zip(soft, hard, strict=True):
        same(one, two)
    assert soft[0].any()


def test_a_relaxed_sample_of_one_position_points_where_a_sample_would():
    n, scores = 20_000, scores_of(16, batch=1, steps=1, size=4)
    found = build(scores).relaxed_sample((n,), generator=seeded(9)).argmax(-1)
    probable = {y: math.exp(v) for y, v in oracle.log_probabilities(weighted(scores)[0]).items()}
    assert oracle.total_variation(Counter(labels_of(row) for row in found[:, 0]), probable) < oracle.variation_bound(
        n, 4
    )
