"""Separations: Fenchel-Young laws for every one of them, the chains against enumeration of all choices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.hopfield.separation_maps import (
    ChainMarginals,
    ChainSparseMAP,
    Entmax,
    KSubsets,
    NormMax,
    Separation,
    Softmax,
    separation,
)
from thalweg.layers.sparse import entmax15, sparsemax

INF = math.inf
ALL = [
    Softmax(),
    Entmax(1.2),
    Entmax(1.5),
    Entmax(2.0),
    Entmax(torch.tensor(1.7, dtype=torch.float64)),
    NormMax(1.5),
    NormMax(2.0),
    KSubsets(2),
    ChainMarginals(1.0),
    ChainMarginals(torch.tensor([[0.3, -0.5], [0.1, 0.4]])),
    ChainSparseMAP(0.7),
    ChainSparseMAP(torch.tensor([[0.0, 0.5], [0.5, -0.4]])),
]


def some(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("how", ALL, ids=lambda how: f"{how}")
class TestLaws:
    def test_the_gradient_of_the_conjugate_is_the_weights(self, how: Separation) -> None:
        scores = some(2, 3, 5).requires_grad_()
        value = how.conjugate(scores)
        assert value.shape == (2, 3)
        (gradient,) = torch.autograd.grad(value.sum(), scores)
        torch.testing.assert_close(gradient, how.weights(scores).detach())

    def test_fenchel_young(self, how: Separation) -> None:
        scores, others = some(6, 5), some(6, 5, seed=1)
        p, q = how.weights(scores), how.weights(others)
        torch.testing.assert_close(how.regulariser(p) + how.conjugate(scores), (p * scores).sum(-1))
        gap = how.regulariser(q) + how.conjugate(scores) - (q * scores).sum(-1)
        assert (gap >= -1e-12).all()
        apart = (p - q).abs().amax(-1) > 0.05
        assert apart.any()
        assert (gap[apart] > 1e-4).all()

    def test_the_conjugate_is_convex(self, how: Separation) -> None:
        a, b = some(20, 4), some(20, 4, seed=1)
        middle = how.conjugate((a + b) / 2)
        assert (middle <= (how.conjugate(a) + how.conjugate(b)) / 2 + 1e-12).all()

    def test_everything_is_differentiable(self, how: Separation) -> None:
        scores = some(2, 4, seed=3).requires_grad_()
        assert gradcheck(how.weights, scores)
        assert gradcheck(how.conjugate, scores)
        inner = (0.1 + 0.8 * some(2, 4, seed=4).sigmoid()).requires_grad_()  # no two add up to 1, where there is a kink
        assert gradcheck(how.regulariser, inner)

    def test_masked_scores_have_no_weight(self, how: Separation) -> None:
        scores = some(3, 5)
        scores[0, 1], scores[2] = -INF, -INF
        scores.requires_grad_()
        weights = how.weights(scores)
        assert weights[0, 1] == 0
        assert (weights[2] == 0).all()
        (weights.square().sum() + how.conjugate(scores)[:2].sum()).backward()
        assert scores.grad is not None
        assert scores.grad.isfinite().all()
        assert (scores.grad[2] == 0).all()

    def test_one_pattern_one_row_and_none(self, how: Separation) -> None:
        size = 2 if isinstance(how, KSubsets) else 1
        scores = some(1, size)
        p = how.weights(scores)
        assert p.shape == (1, size)
        torch.testing.assert_close(how.regulariser(p) + how.conjugate(scores), (p * scores).sum(-1))
        assert how.weights(some(3, 4).float()).dtype == torch.float32


def enumerated(scores: list[float], transitions: list[list[float]]) -> tuple[float, list[float]]:
    """log Z and the probability that each is chosen, over all choices."""
    total, chosen = 0.0, [0.0] * len(scores)
    for y in itertools.product((0, 1), repeat=len(scores)):
        moves = sum(transitions[a][b] for a, b in itertools.pairwise(y))
        weight = math.exp(sum(s for s, on in zip(scores, y, strict=True) if on) + moves)
        total += weight
        chosen = [c + weight * on for c, on in zip(chosen, y, strict=True)]
    return math.log(total), [c / total for c in chosen]


def test_chain_marginals_equal_enumeration() -> None:
    transitions = torch.tensor([[0.2, -0.3], [0.4, 1.0]], dtype=torch.float64)
    how, scores = ChainMarginals(transitions), some(4, 6)
    for b, row in enumerate(scores.tolist()):
        value, weights = enumerated(row, transitions.tolist())
        assert math.isclose(how.conjugate(scores)[b].item(), value, rel_tol=1e-10)
        torch.testing.assert_close(how.weights(scores)[b], torch.tensor(weights, dtype=torch.float64))
    broken, _ = enumerated(scores[0].tolist(), [[0.2, 0.4], [-0.3, 0.0]])
    assert abs(how.conjugate(scores)[0].item() - broken) > 1e-3


def test_chains_draw_neighbours_along() -> None:
    scores = torch.tensor([[1.5, -0.2, -0.2, -4.0, -0.2]])
    for kind in (ChainMarginals, ChainSparseMAP):
        alone, together = kind(0.0).weights(scores), kind(2.0).weights(scores)
        assert (together[0, 1:3] > alone[0, 1:3] + 0.1).all()
    assert (ChainSparseMAP(0.5).weights(scores)[0, 3] == 0).all()


def test_learned_parameters_are_found_and_get_gradients() -> None:
    alpha = nn.Parameter(torch.tensor(1.5))
    how = Entmax(alpha)
    assert [p is alpha for p in how.parameters()] == [True]
    how.conjugate(torch.randn(2, 4)).sum().backward()
    assert alpha.grad is not None
    assert alpha.grad.abs() > 0
    chain = ChainMarginals(nn.Parameter(torch.zeros(2, 2)))
    chain.conjugate(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in chain.parameters())
    assert dict(Entmax(torch.tensor(1.5)).named_buffers()).keys() == {"alpha"}


def test_names() -> None:
    scores = torch.randn(3, 4)
    torch.testing.assert_close(separation("sparsemax").weights(scores), sparsemax(scores))
    torch.testing.assert_close(separation(1.5).weights(scores), entmax15(scores))
    torch.testing.assert_close(separation(1).weights(scores), scores.softmax(-1))
    names = ["softmax", "sparsemax", "entmax15", 1.3, "normmax"]
    assert [str(separation(name)) for name in names] == [
        "softmax",
        "sparsemax",
        "entmax15",
        "entmax(1.3)",
        "normmax(2)",
    ]
    assert str(separation("k-subsets", k=3)) == "3-subsets"
    own = KSubsets(2)
    assert separation(own) is own
    assert repr(Entmax(1.3)) == "Entmax(entmax(1.3))"


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ConfigError, match="did you mean `sparsemax`"):
        separation("sparsmax")
    with pytest.raises(ConfigError, match="needs k"):
        separation("k-subsets")
    with pytest.raises(ConfigError, match="more than 0"):
        KSubsets(0)
    with pytest.raises(ShapeError, match=r"\(2, 2\)"):
        ChainMarginals(torch.zeros(3, 3))
    with pytest.raises(ConfigError, match="at least 1"):
        Entmax(0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch.func itself
def test_second_derivatives_through_torch_func() -> None:
    scores = some(5)
    for how in ALL[:8]:
        found = torch.func.hessian(how.conjugate)(scores)
        wanted = torch.autograd.functional.hessian(how.conjugate, scores)
        torch.testing.assert_close(found, wanted)
        assert (torch.linalg.eigvalsh(found) >= -1e-10).all()
