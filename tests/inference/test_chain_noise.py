"""Relaxed samples of linear chains, and those that are perturbed modes."""

from __future__ import annotations

import math
from collections import Counter

import torch
from chain_cases import INF, build, every_backend, every_kind, labels_of, same, scores_of, seeded, weighted
from torch import Tensor
from torch.autograd import gradcheck

from oracles import chains as oracle


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
    same(cold, hard, atol=1e-6)
    assert not hard.equal(p.relaxed_sample((10,), hard=True, generator=seeded(8, backend)))


@every_kind
def test_hard_samples_are_feasible_labellings(kind):
    scores, lengths = scores_of(10, kind=kind), [4, 1, 3]
    scores["transitions"][..., 0, 1] = -INF
    p = build(scores, lengths=lengths)
    found = p.structure_of(p.relaxed_sample((30,), hard=True, generator=seeded(1)))
    for item, w in enumerate(weighted(scores, lengths)):
        assert {labels_of(row) for row in found[:, item]} <= dict(w).keys()
        assert (found[:, item, lengths[item] :] == -1).all()


@every_backend
def test_hard_samples_of_one_position_are_samples(backend):
    scores, n = scores_of(9, batch=2, steps=1, size=4), 20_000
    p = build(scores, backend)
    found = p.structure_of(p.relaxed_sample((n,), hard=True, generator=seeded(0, backend)))
    for item, w in enumerate(weighted(scores)):
        probable = {y: math.exp(v) for y, v in oracle.log_probabilities(w).items()}
        seen = Counter(labels_of(row) for row in found[:, item])
        assert oracle.total_variation(seen, probable) < oracle.variation_bound(n, 4)


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
