"""Sparse maps and their losses: against bisection in pure Python, against entmax, at every edge."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from oracles import sparse_maps as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.sparse import (
    entmax,
    entmax15,
    entmax15_loss,
    entmax_loss,
    k_subsets,
    k_subsets_loss,
    normmax,
    sparsemax,
    sparsemax_loss,
)

INF = math.inf
ALPHAS = [1.0, 1.001, 1.2, 1.5, 2.0, 3.0]
has_entmax = pytest.mark.skipif(importlib.util.find_spec("entmax") is None, reason="entmax is not installed")


def rows(size: int, scale: float = 1.0, *, batch: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random rows; with room for it one has masked entries, one is all masked, one has ties at the top."""
    scores = torch.randn(batch, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * scale
    if size > 2:
        scores[1, 1:3], scores[2], scores[3, :2] = -INF, -INF, scores[3].max()
    return scores.to(dtype)


def expected(scores: Tensor, f: Callable[[list[float]], list[float]]) -> Tensor:
    return torch.tensor([f(row) for row in scores.double().tolist()], dtype=torch.float64).reshape(scores.shape)


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 7, 70])
def test_maps_equal_bisection(size: int, scale: float) -> None:
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        scores = rows(size, scale, dtype=dtype)
        for alpha in ALPHAS:
            found = entmax(scores, alpha)
            assert found.dtype == dtype
            torch.testing.assert_close(
                found.double(), expected(scores, lambda s, a=alpha: oracle.entmax(s, a)), atol=tol, rtol=0
            )
        torch.testing.assert_close(sparsemax(scores), entmax(scores, 2.0))
        torch.testing.assert_close(entmax15(scores), entmax(scores, 1.5))
        for alpha in (1.2, 2.0, 5.0):
            torch.testing.assert_close(
                normmax(scores, alpha).double(),
                expected(scores, lambda s, a=alpha: oracle.normmax(s, a)),
                atol=max(tol, 1e-8 * scale * size),
                rtol=0,
            )
        for k in (1, 1.5, 2, 7):
            if k <= size:
                torch.testing.assert_close(
                    k_subsets(scores, k).double(),
                    expected(scores, lambda s, k=k: oracle.k_subsets(s, k)),
                    atol=tol * max(scale, 1),
                    rtol=0,
                )


def test_the_oracle_can_fail() -> None:
    scores = rows(7)
    wrong = expected(scores[:1], lambda s: oracle.forgetful_entmax(s, 1.5))
    assert (entmax15(scores[:1]) - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_long_rows_and_huge_scores(alpha: float) -> None:
    scores = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    weights = entmax(scores, alpha)
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-5, rtol=0)
    huge = torch.tensor([[1e30, -1e30, 1e30, 3.0], [1e4, 1e4 - 0.5, -1e4, -INF]])
    found = entmax(huge, alpha)
    torch.testing.assert_close(found[0], torch.tensor([0.5, 0.0, 0.5, 0.0]))
    torch.testing.assert_close(
        found[1].double(), torch.tensor(oracle.entmax(huge[1].double().tolist(), alpha)).double(), atol=1e-6, rtol=0
    )


def test_rows_that_are_masked_have_no_weight_and_no_gradient() -> None:
    for f in (
        sparsemax,
        entmax15,
        lambda s: entmax(s, 1.3),
        lambda s: entmax(s, 1.0),
        normmax,
        lambda s: k_subsets(s, 2),
    ):
        scores = rows(5).requires_grad_()
        weights = f(scores)
        assert (weights[2] == 0).all()
        assert (weights[1, 1:3] == 0).all()
        (weights * torch.randn_like(weights)).sum().backward()
        assert scores.grad is not None
        assert scores.grad.isfinite().all()
        assert (scores.grad[2] == 0).all()
        assert (scores.grad[1, 1:3] == 0).all()


def test_nan_and_infinity_give_nan() -> None:
    scores = torch.tensor([[0.0, math.nan, 1.0], [0.0, INF, 1.0], [0.0, 0.0, 0.0]])
    for f in (sparsemax, entmax15, lambda s: entmax(s, 1.3), normmax, lambda s: k_subsets(s, 1)):
        found = f(scores)
        assert found[:2].isnan().any(-1).all()
        assert found[2].isfinite().all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients(alpha: float) -> None:
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    gold = torch.tensor([0, 4, 2])
    assert gradcheck(lambda s: entmax(s, alpha), scores)
    assert gradgradcheck(lambda s: entmax(s, alpha), scores)
    assert gradcheck(lambda s: entmax_loss(s, gold, alpha), scores)
    assert gradgradcheck(lambda s: entmax_loss(s, gold, alpha), scores)


@pytest.mark.parametrize("alpha", [1.0005, 1.2, 1.7, 2.5])
def test_gradients_in_alpha(alpha: float) -> None:
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    alphas = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    gold = torch.tensor([0, 4, 2])
    assert gradcheck(entmax, (scores, alphas))
    assert gradgradcheck(entmax, (scores, alphas))
    assert gradcheck(lambda s, a: entmax_loss(s, gold, a), (scores, alphas))
    value = entmax_loss(scores, gold, alphas).sum()
    for once, again in zip(
        torch.autograd.grad(value, (scores, alphas), retain_graph=True),
        torch.autograd.grad(value, (scores, alphas), create_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(once, again)
    if alpha > 1.1:
        assert gradcheck(normmax, (scores, alphas))


def test_gradients_of_k_subsets() -> None:
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    for k in (1, 2, 2.5, 5):
        assert gradcheck(lambda s, k=k: k_subsets(s, k), scores)
    gold = torch.tensor([[0, 1], [2, 4], [3, 1]])
    assert gradcheck(lambda s: k_subsets_loss(s, gold, 2), scores)


def test_alpha_of_one_is_an_ordinary_point() -> None:
    """The derivative in alpha at 1 is the limit of differences, and values move smoothly through 1 ... 1.001."""
    scores = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    found = torch.autograd.functional.jacobian(lambda a: entmax(scores, a), one)
    assert isinstance(found, Tensor)
    h = 1e-4
    at = [entmax(scores, 1 + k * h) for k in range(4)]
    differences = (-11 / 6 * at[0] + 3 * at[1] - 1.5 * at[2] + at[3] / 3) / h
    torch.testing.assert_close(found, differences, atol=1e-8, rtol=0)
    for alpha in (1 + 1e-12, 1 + 1e-9, 1 + 1e-6, 1 + 1e-3):
        torch.testing.assert_close(
            entmax(scores, alpha), at[0] + (alpha - 1) * found, atol=10 * (alpha - 1) ** 2 + 1e-14, rtol=0
        )


def test_an_alpha_for_every_head() -> None:
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    alpha = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64).view(3, 1, 1)
    found = entmax(scores, alpha)
    for head, value in enumerate((1.0, 1.5, 2.0)):
        torch.testing.assert_close(found[:, head], entmax(scores[:, head], value))
    torch.testing.assert_close(entmax(scores.transpose(-1, -2), alpha, dim=-2).transpose(-1, -2), found)


def test_any_axis_shape_and_type() -> None:
    scores = torch.randn(2, 3, 4)
    for dim in (0, 1, 2, -2):
        torch.testing.assert_close(sparsemax(scores, dim), sparsemax(scores.movedim(dim, -1)).movedim(-1, dim))
    assert sparsemax(torch.zeros(0, 3)).shape == (0, 3)
    assert sparsemax(torch.tensor(2.0)).item() == 1.0
    half = entmax15(scores.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), entmax15(scores.bfloat16().float()), atol=4e-3, rtol=0)
    before = scores.clone()
    entmax(scores, 1.3)
    assert torch.equal(scores, before)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_losses_equal_the_formula(alpha: float) -> None:
    scores = rows(6, batch=7).requires_grad_()
    gold = torch.tensor([0, 1, 2, 0, 3, 4, 5])
    found = entmax_loss(scores, gold, alpha)
    assert found[1].item() == found[2].item() == INF  # the gold entry is masked
    for b in (0, 3, 4, 5, 6):
        assert math.isclose(found[b].item(), oracle.entmax_loss(scores[b].tolist(), int(gold[b]), alpha), abs_tol=1e-10)
    found.nan_to_num(posinf=0.0).sum().backward()
    hot = torch.nn.functional.one_hot(gold, 6)
    assert scores.grad is not None
    for b in (0, 3, 4, 5, 6):
        torch.testing.assert_close(scores.grad[b], entmax(scores.detach(), alpha)[b] - hot[b])


def test_losses_are_zero_past_the_margin() -> None:
    gold = torch.zeros(1, dtype=torch.long)
    for alpha, margin in ((2.0, 1.0), (1.5, 2.0), (1.25, 4.0)):
        assert entmax_loss(torch.tensor([[margin, 0.0, 0.0]]), gold, alpha).item() == pytest.approx(0.0, abs=1e-6)
        assert entmax_loss(torch.tensor([[margin - 0.3, 0.0, 0.0]]), gold, alpha).item() > 1e-6


def test_k_subsets_loss_takes_indices_and_multi_hot() -> None:
    scores = torch.randn(4, 5)
    gold = torch.tensor([[0, 1], [4, 2], [3, 1], [0, 4]])
    hot = torch.zeros(4, 5, dtype=torch.bool).scatter_(1, gold, True)
    found = k_subsets_loss(scores, gold, 2)
    assert (found >= 0).all()
    torch.testing.assert_close(found, k_subsets_loss(scores, hot, 2))
    torch.testing.assert_close(found, k_subsets_loss(scores, hot.long(), 2))
    torch.testing.assert_close(k_subsets_loss(scores, gold[:, :1], 1), sparsemax_loss(scores, gold[:, 0]))


@has_entmax
def test_values_and_gradients_equal_entmax() -> None:
    import entmax as peer

    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    gold, g = torch.randint(40, (5,)), torch.randn(5, 40, dtype=torch.float64)
    losses: dict[str, Any] = {"reduction": "none"}
    pairs: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (sparsemax, lambda s: peer.sparsemax(s, -1)),
        (entmax15, lambda s: peer.entmax15(s, -1)),
        (lambda s: entmax(s, 1.3), lambda s: peer.entmax_bisect(s, 1.3)),
        (lambda s: normmax(s, 2.5), lambda s: peer.normmax_bisect(s, 2.5)),
        (lambda s: k_subsets(s, 3), lambda s: peer.budget_bisect(s, 3)),
        (lambda s: sparsemax_loss(s, gold), lambda s: peer.SparsemaxLoss(**losses)(s, gold)),
        (lambda s: entmax15_loss(s, gold), lambda s: peer.Entmax15Loss(**losses)(s, gold)),
        (lambda s: entmax_loss(s, gold, 1.3), lambda s: peer.EntmaxBisectLoss(alpha=1.3, **losses)(s, gold)),
    ]
    for ours, theirs in pairs:
        found, wanted = ours(scores), theirs(scores)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
        weight = g if found.dim() == 2 else g[:, 0]
        (found,), (wanted,) = (torch.autograd.grad(y, scores, weight) for y in (found, wanted))
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_errors_name_the_remedy() -> None:
    scores = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="at least 1"):
        entmax(scores, 0.5)
    with pytest.raises(ConfigError, match="at least 1"):
        entmax(scores, torch.tensor(0.5))
    with pytest.raises(ConfigError, match="more than 1"):
        normmax(scores, 1.0)
    with pytest.raises(ConfigError, match="at most N = 3"):
        k_subsets(scores, 4)
    with pytest.raises(ShapeError, match="broadcast over the rows"):
        entmax(scores, torch.tensor([1.5, 1.5, 1.5]))
    with pytest.raises(ShapeError, match="floating point"):
        sparsemax(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"\(B,\) int64"):
        sparsemax_loss(scores, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"0\.\.2"):
        sparsemax_loss(scores, torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match="multi-hot"):
        k_subsets_loss(scores, torch.zeros(2, 4), 2)
