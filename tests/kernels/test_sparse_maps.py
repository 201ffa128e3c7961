"""Sparse maps on the CPU: the compiled kernels against plain PyTorch, and both against bisection."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from oracles import sparse_maps as oracle
from thalweg.errors import ShapeError
from thalweg.kernels import sparse
from thalweg.kernels.dispatch import sparse_map_kernels
from thalweg.kernels.reference import sparse_maps as reference

INF = math.inf
ALPHAS = [1.0, 1 + 1e-9, 1.001, 1.3, 1.5, 2.0, 2.5, 4.0]
kernels = pytest.importorskip("thalweg.kernels.cpu.sparse_maps")


def rows(size: int, scale: float, dtype: torch.dtype) -> Tensor:
    scores = scale * torch.randn(6, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    if size > 2:
        scores[1, 1:3], scores[2], scores[3, -2:] = -INF, -INF, scores[3].max()
    return scores.to(dtype)


def plain(scores: Tensor, alpha: float | Tensor) -> Tensor:
    return reference.entmax(scores, torch.as_tensor(alpha, dtype=torch.float64))


def test_the_kernels_are_chosen() -> None:
    assert sparse_map_kernels(torch.zeros(1, 1)) is kernels
    assert sparse_map_kernels(torch.zeros(1, 1).half()) is None
    assert sparse_map_kernels(torch.zeros(1, 1, device="meta")) is None


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("size", [1, 2, 8, 65, 700])
def test_kernels_equal_the_reference(size: int, alpha: float) -> None:
    for dtype, tol in ((torch.float64, 2e-13), (torch.float32, 2e-8)):
        for scale in (0.0, 0.1, 1.0, 6.0, 1e4):
            scores = rows(size, scale, dtype)
            before, wanted = scores.clone(), plain(scores, alpha)
            near = tol if alpha <= 2 else 1e3 * tol  # the slope at 0 is infinite beyond 2
            found = kernels.entmax(scores, alpha)
            torch.testing.assert_close(found, wanted, atol=near, rtol=1e-6 if tol > 1e-9 else 0)
            assert torch.equal(scores, before)
            grad = torch.randn_like(scores)
            grad[wanted == 0] = math.nan  # what has no weight has no say
            torch.testing.assert_close(
                kernels.entmax_vjp(wanted, grad, alpha),
                reference.entmax_vjp(wanted.double(), grad.double(), alpha).to(dtype),
                atol=1e2 * tol,
                rtol=1e-9 if dtype == torch.float64 else 1e-5,
            )


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_values_equal_the_reference(alpha: float) -> None:
    scores, gold = rows(20, 1.0, torch.float64), torch.tensor([0, 1, 2, 0, 3, 19])
    value, gradient = kernels.entmax_value(scores, alpha, gold)
    conjugate, weights = kernels.entmax_value(scores, alpha)
    torch.testing.assert_close(weights, kernels.entmax(scores, alpha))
    own = scores.gather(1, gold[:, None]).squeeze(1)
    omega = torch.tensor([oracle.tsallis(p, alpha) if sum(p) else 0.0 for p in weights.tolist()], dtype=torch.float64)
    wanted = torch.where(weights > 0, weights * scores, 0.0).sum(1) - omega
    wanted[2] = -INF
    torch.testing.assert_close(conjugate, wanted)
    assert (value[1:3] == INF).all()
    keep = [0, 3, 4, 5]
    torch.testing.assert_close(value[keep], (wanted - own)[keep])
    hot = torch.nn.functional.one_hot(gold, 20).double()
    torch.testing.assert_close(gradient[keep], (weights - hot)[keep])
    torch.testing.assert_close(gradient[1:3], weights[1:3])


def test_an_alpha_for_each_row() -> None:
    scores = rows(30, 1.0, torch.float64)
    alphas = torch.tensor(ALPHAS[:6], dtype=torch.float64)[:, None]
    found = kernels.entmax(scores, alphas)
    back = kernels.entmax_vjp(found, scores.nan_to_num(neginf=0.0), alphas)
    for r, alpha in enumerate(alphas.flatten().tolist()):
        torch.testing.assert_close(found[r : r + 1], plain(scores[r : r + 1], alpha))
        wanted = reference.entmax_vjp(found[r : r + 1], scores[r : r + 1].nan_to_num(neginf=0.0), alpha)
        torch.testing.assert_close(back[r : r + 1], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_level_of_instructions(level: str, dtype: torch.dtype) -> None:
    for size in (1, 3, 8, 17, 700):
        scores = rows(size, 2.0, dtype)
        for alpha in (1.2, 1.5, 2.0, 3.0):
            wanted = plain(scores, alpha)
            torch.testing.assert_close(kernels.entmax(scores, alpha), wanted, atol=1e-7, rtol=1e-6)
            back = reference.entmax_vjp(wanted.double(), scores.nan_to_num(0, 0, 0).double(), alpha).to(dtype)
            found = kernels.entmax_vjp(wanted, scores.nan_to_num(0, 0, 0), alpha)
            torch.testing.assert_close(found, back, atol=1e-5, rtol=1e-5)


def test_threads_share_rows_and_change_nothing(two_threads: None) -> None:
    scores, alphas = torch.randn(50, 40), (1.3, 1.5, 2.0)

    def answers(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        weights = [kernels.entmax(scores, alpha) for alpha in alphas]
        return weights + [kernels.entmax_vjp(p, scores, alpha) for p, alpha in zip(weights, alphas, strict=True)]

    assert all(torch.equal(one, other) for one, other in zip(answers(1), answers(3), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    extension = pytest.importorskip("thalweg._kernels")
    right = {
        "scores": np.zeros((2, 3)),
        "alphas": np.array([1.5, 2.0]),
        "gold": np.zeros(2, np.int64),
        "weights": np.zeros((2, 3)),
        "values": np.zeros(2),
    }
    extension.entmax(*right.values(), 1)
    extension.entmax(*{**right, "gold": None, "values": None}.values(), 1)
    shapes = {"scores": (3, 3), "alphas": (3,), "gold": (3,), "weights": (2, 4), "values": (1,)}
    for name, shape in shapes.items():
        with pytest.raises(ShapeError, match="must be"):
            extension.entmax(*{**right, name: np.zeros(shape, right[name].dtype)}.values(), 1)
        with pytest.raises(TypeError):
            extension.entmax(*{**right, name: np.zeros(right[name].shape, np.float16)}.values(), 1)
    for gold in ([0, 3], [-1, 0]):
        with pytest.raises(ShapeError, match=r"`gold` must lie in 0\.\.2"):
            extension.entmax(*{**right, "gold": np.array(gold)}.values(), 1)
    x = np.zeros((2, 3))
    for arguments in ((x, x[:1], right["alphas"], x), (x, x, np.ones(3), x), (x, x, right["alphas"], x[:, :2].copy())):
        with pytest.raises(ShapeError, match="must be"):
            extension.entmax_vjp(*arguments, 1)


def test_support_is_exact_where_the_answer_is_known() -> None:
    """k equal entries above the margin: 1 / k each, and exactly 0 below."""
    for alpha, margin in ((2.0, 1.0), (1.5, 2.0), (3.0, 0.5)):
        for k in (1, 3, 40):
            scores = torch.full((1, 1000), -margin, dtype=torch.float64)
            scores[0, :k] = 0.0
            found = kernels.entmax(scores, alpha)
            torch.testing.assert_close(found[0, :k], torch.full((k,), 1 / k, dtype=torch.float64))
            assert (found[0, k:] == 0).all()


def test_not_a_number() -> None:
    scores = torch.tensor([[0.0, math.nan], [INF, 0.0], [1.0, 0.0], [-math.nan, -INF]])
    for alpha in (1.3, 1.5, 2.0):
        found = kernels.entmax(scores, alpha)
        assert found[[0, 1, 3]].isnan().all()
        assert found[2].isfinite().all()
        assert kernels.entmax_value(scores, alpha)[0].isnan().tolist() == [True, True, False, True]


def test_rules_without_kernels_agree_with_their_omega() -> None:
    """<p, s> - Omega(p) is larger at the map's weights than at others of its polytope."""
    scores = torch.randn(5, 6, dtype=torch.float64)
    for rule, parameter in ((sparse.ENTMAX, 1.4), (sparse.NORMMAX, 2.0), (sparse.K_SUBSETS, 2)):
        p = sparse.weights_of_rows(scores, parameter, rule)
        others = sparse.weights_of_rows(torch.randn(5, 6, dtype=torch.float64), parameter, rule)
        for weight in (0.01, 0.5, 1.0):
            mixed = (1 - weight) * p + weight * others
            value = (mixed * scores).sum(-1) - rule.omega(mixed, parameter)
            assert (value <= sparse.conjugate_of_rows(scores, parameter, rule) + 1e-12).all()
