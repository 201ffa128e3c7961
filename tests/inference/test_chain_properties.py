"""Chains of any small size, kind, type and wildness: each backend against enumeration and against the reference."""

from __future__ import annotations

import math
import random
import re
from typing import NamedTuple

import pytest
import torch
from chain_cases import (
    BACKENDS,
    INF,
    dense,
    entropy_rounding,
    every_backend,
    labels_of,
    leaves_of,
    rounding,
    same,
    seeded,
    weighted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import chains as oracle
from thalweg.errors import InfeasibleError
from thalweg.inference import LinearChain, SparseTransitions

KINDS = ("shared", "per item", "per step", "sparse")
WILD = {"tame": [], "constrained": [-INF], "huge": [1e4, -1e4], "all": [1e4, -1e4, -INF]}


def steady(examples: int) -> settings:
    return settings(deadline=None, derandomize=True, max_examples=examples)


class Drawn(NamedTuple):
    scores: dict[str, Tensor]  # dense transitions
    lengths: list[int]
    edges: list[tuple[int, int]] | None  # the moves to list where transitions are to be sparse

    def chain(self, backend: str, **scores: Tensor) -> LinearChain:
        """The chain under test, its padding full of NaN."""
        scores = {**self.scores, **scores}
        outside = torch.arange(scores["emissions"].shape[1]) >= torch.tensor(self.lengths).unsqueeze(1)
        scores["emissions"] = scores["emissions"].masked_fill(outside.unsqueeze(-1), math.nan)
        if scores["transitions"].dim() == 4:
            scores["transitions"] = scores["transitions"].masked_fill(outside[:, 1:, None, None], math.nan)
        if backend == "gpu":
            scores = {name: tensor.cuda() for name, tensor in scores.items()}
        transitions = scores.pop("transitions")
        if self.edges is not None and backend != "gpu":
            sources, targets = [i for i, _ in self.edges], [j for _, j in self.edges]
            values = transitions[sources, targets] if self.edges else transitions.flatten()[:0]
            transitions = SparseTransitions.of_edges(sources, targets, values, size=transitions.shape[-1])
        return LinearChain(transitions=transitions, **scores, lengths=self.lengths, backend=backend)


@st.composite
def chains(draw, batch, steps, size, dtypes=(torch.float64, torch.float32), wild=tuple(WILD), feasible=False) -> Drawn:
    """The sizes are drawn, so that they shrink; the scores come from a seed, for there are many.

    Where `feasible`, and in half of the other cases, label 0 alone is a way through every item.
    """
    B, T, C = (draw(st.integers(1, most)) for most in (batch, steps, size))
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(dtypes))
    extremes = WILD[draw(st.sampled_from(wild))]
    rng = random.Random(draw(st.integers(0, 10**6)))
    feasible = feasible or draw(st.booleans())

    def score() -> float:
        return rng.choice(extremes) if extremes and rng.random() < 0.3 else rng.gauss(0, 3)

    def tensor(*shape: int) -> Tensor:
        return torch.tensor([score() for _ in range(math.prod(shape))], dtype=dtype).view(shape)

    leading = {"shared": (), "per item": (B,), "per step": (B, T - 1), "sparse": ()}[kind]
    scores = {"emissions": tensor(B, T, C), "transitions": tensor(*leading, C, C), "start": tensor(C), "end": tensor(C)}
    if feasible:
        for name, tensor_of in scores.items():
            corner = tensor_of[..., 0, 0] if name == "transitions" else tensor_of[..., 0]
            corner.masked_fill_(torch.isneginf(corner), 0.5)
    edges = None
    if kind == "sparse":
        edges = [(i, j) for i in range(C) for j in range(C) if rng.random() < 0.7 or (feasible and i == j == 0)]
        rng.shuffle(edges)
        listed = torch.tensor([[(i, j) in edges for j in range(C)] for i in range(C)])
        scores["transitions"] = scores["transitions"].masked_fill(~listed, -INF)
    return Drawn(scores, [draw(st.integers(1, T)) for _ in range(B)], edges)


def named(error: pytest.ExceptionInfo) -> list[int]:
    """The items that an error names."""
    found = re.search(r"batch items? ([\d, and]+)", str(error.value))
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


@every_backend
@steady(50)
@given(drawn=chains(3, 4, 3))
def test_each_backend_equals_enumeration(backend, drawn):
    every, slack = weighted(drawn.scores, drawn.lengths), rounding(drawn.scores)
    empty = [item for item, w in enumerate(every) if not w]
    p = drawn.chain(backend)
    if empty:
        for quantity in (lambda: p.log_partition, lambda: p.mode, lambda: p.marginals, lambda: p.sample()):
            with pytest.raises(InfeasibleError) as error:
                quantity()
            assert named(error) == empty
        return
    B, T, C = drawn.scores["emissions"].shape
    same(p.log_partition, [oracle.log_partition(w) for w in every], rtol=0, atol=slack)
    same(p.entropy(), [oracle.entropy(w) for w in every], rtol=0, atol=entropy_rounding(drawn.scores))
    same(p.marginals, dense(every, T, C), rtol=0, atol=slack)
    same(p.max_score, [max(s for _, s in w) for w in every], rtol=0, atol=slack)
    if drawn.edges is None:
        same(p.edge_marginals, dense(every, T - 1, C, C, parts=oracle.moves_at), rtol=0, atol=slack)
    (scores, labels), samples = p.top_k(4), p.sample((10,), generator=seeded(0, backend))
    for item, w in enumerate(every):
        known, best = dict(w), oracle.top_k(w, 4)
        assert labels_of(p.mode[item]) in oracle.modes(w, slack)
        same(scores[item], [s for _, s in best] + [-INF] * (4 - len(best)), rtol=0, atol=slack)
        found = [labels_of(row) for row in labels[item, : len(best)]]
        assert len(set(found)) == len(best)
        same(scores[item, : len(best)], [known[y] for y in found], rtol=0, atol=slack)
        assert {labels_of(row) for row in samples[:, item]} <= known.keys()
    assert samples.shape == (10, B, T)


@every_backend
@steady(40)
@given(drawn=chains(3, 4, 3, feasible=True))
def test_gradients_are_finite_and_right(backend, drawn):
    every, slack = weighted(drawn.scores, drawn.lengths), rounding(drawn.scores)
    leaves = leaves_of(drawn.scores)
    p = drawn.chain(backend, **leaves)
    T, C = drawn.scores["emissions"].shape[1:]

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        # Without a single move the transitions are no part of the graph.
        return torch.autograd.grad(value.sum(), [*leaves.values()], retain_graph=True, materialize_grads=True)

    gold = [max(w, key=lambda pair: pair[1])[0] for w in every]
    y = torch.tensor([[*labels, *[-1] * (T - len(labels))] for labels in gold])
    onehot = (y.unsqueeze(-1) == torch.arange(C)).double()
    found = gradients(-p.log_prob(y.to(p.lengths.device)))
    same(found[0], dense(every, T, C) - onehot, rtol=0, atol=slack)
    same(gradients(p.max_score)[0].sum(-1), onehot.sum(-1))
    for each in (found, gradients(p.entropy()), gradients(p.marginals**2)):
        for gradient, scores in zip(each, drawn.scores.values(), strict=True):
            assert gradient.isfinite().all()
            assert (gradient[torch.isneginf(scores)] == 0).all()


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
@steady(20)
@given(drawn=chains(20, 12, 33, dtypes=(torch.float64,), wild=("tame", "constrained"), feasible=True))
def test_each_backend_equals_the_reference(backend, drawn):
    p, q = drawn.chain(backend), drawn.chain("reference")
    same(p.log_partition, q.log_partition)
    same(p.marginals, q.marginals)
    same(p.entropy(), q.entropy())
    same(p.max_score, q.max_score)
    assert p.mode.cpu().equal(q.mode)
    assert p.top_k(5)[1].cpu().equal(q.top_k(5)[1])
    if backend != "gpu":  # whose generator draws other numbers
        assert p.sample((5,), generator=seeded(1)).equal(q.sample((5,), generator=seeded(1)))
        assert p.perturbed_mode(3, generator=seeded(2)).equal(q.perturbed_mode(3, generator=seeded(2)))


@steady(30)
@given(drawn=chains(3, 6, 4, feasible=True), other=st.integers(0, 10**6), temperature=st.floats(0.2, 5.0))
def test_information_has_its_bounds(drawn, other, temperature):
    p = drawn.chain("reference")
    slack, loose = rounding(drawn.scores), entropy_rounding(drawn.scores)
    most = torch.tensor(drawn.lengths).double() * math.log(drawn.scores["emissions"].shape[-1])
    assert (p.entropy() >= -loose).all()
    assert (p.entropy() <= most + loose).all()
    noise = torch.randn(drawn.scores["emissions"].shape, generator=seeded(other), dtype=torch.float64)
    q = drawn.chain("reference", emissions=(drawn.scores["emissions"] + noise).to(noise.dtype)).tempered(temperature)
    assert (torch.distributions.kl_divergence(p, q) >= -loose * max(1.0, 1 / temperature)).all()
    assert (p.max_score <= p.log_partition + slack).all()
    assert (p.log_partition <= p.max_score + most + slack).all()
