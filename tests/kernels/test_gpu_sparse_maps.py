"""The Triton kernels of sparse maps: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from contracts.triton_kernels import (
    DEVICE,
    INTERPRETED,
    RUNS,
    compile_instead,
    for_hopper,
    here_only,
    needs_triton,
)
from thalweg.kernels.reference import sparse_maps as reference

INF = math.inf

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import sparse_maps as gpu


@pytest.fixture(params=["rows in registers", "rows in pieces"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A row that fits, several to a program, and one that is read in pieces."""
    if request.param == "rows in pieces":
        monkeypatch.setattr(gpu, "_ONE", 8)
    monkeypatch.setattr(gpu, "_TILE", 32)
    return 13


def rows(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    scores = 2 * torch.randn(5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if size > 2:
        scores[1, 1:3], scores[2], scores[3, -2:] = -INF, -INF, scores[3].max()
    return scores.to(DEVICE, dtype)


def plain(scores: Tensor, alpha: float | Tensor) -> Tensor:
    return reference.entmax(scores, torch.as_tensor(alpha, dtype=torch.float64, device=scores.device))


@here_only
@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.3, 1.5, 2.0, 2.5])
def test_weights_and_gradients(alpha: float, size: int) -> None:
    for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        if dtype == torch.float64 and alpha != 1.3 and INTERPRETED:
            continue  # slow
        scores = rows(size, dtype)
        weights = plain(scores, alpha)
        torch.testing.assert_close(gpu.entmax(scores, alpha), weights, atol=tol, rtol=0)
        grad = torch.randn(5, size, generator=torch.Generator().manual_seed(1)).to(scores)
        wanted = reference.entmax_vjp(weights, grad, alpha)
        torch.testing.assert_close(gpu.entmax_vjp(weights, grad, alpha), wanted, atol=2 * tol, rtol=20 * tol)


@here_only
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_values_and_their_gradient(alpha: float, size: int) -> None:
    from thalweg.kernels.sparse import ENTMAX, _value

    scores, gold = rows(size), torch.tensor([0, 1, 2, 0, size - 1], device=DEVICE)
    weights = plain(scores, alpha)
    value, gradient = gpu.entmax_value(scores, alpha, gold)
    conjugate, same = gpu.entmax_value(scores, alpha)
    torch.testing.assert_close(same, weights, atol=1e-6, rtol=0)
    wanted = _value(scores, weights, alpha, ENTMAX, scores.new_zeros(1))
    torch.testing.assert_close(conjugate, wanted, atol=2e-6, rtol=1e-6)
    assert (value[1:3] == INF).all()
    keep = [0, 3, 4]
    torch.testing.assert_close(
        value[keep], (wanted - scores.gather(1, gold[:, None])[:, 0])[keep], atol=2e-6, rtol=1e-6
    )
    hot = torch.nn.functional.one_hot(gold, size).to(weights)
    torch.testing.assert_close(gradient[keep], (weights - hot)[keep], atol=1e-6, rtol=0)


@here_only
def test_an_alpha_for_each_row(size: int) -> None:
    scores = rows(size)
    alphas = torch.tensor([[1.0], [1.2], [1.5], [1.8], [2.0]], device=DEVICE)
    weights = plain(scores, alphas)
    torch.testing.assert_close(gpu.entmax(scores, alphas), weights, atol=1e-6, rtol=0)
    grad = torch.randn_like(scores)
    wanted = reference.entmax_vjp(weights, grad, alphas)
    torch.testing.assert_close(gpu.entmax_vjp(weights, grad, alphas), wanted, atol=2e-6, rtol=1e-5)


@here_only
def test_one_entry_huge_scores_and_ties() -> None:
    one = torch.tensor([[3.0], [-INF]], device=DEVICE)
    huge = torch.tensor([[1e30, -1e30, 1e30], [1e4, 1e4, 0.0]], device=DEVICE)
    halves = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], device=DEVICE)
    for alpha in (1.0, 1.3, 1.5, 2.0):
        assert gpu.entmax(one, alpha).flatten().tolist() == [1.0, 0.0]
        torch.testing.assert_close(gpu.entmax(huge, alpha), halves)


@here_only
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_not_a_number() -> None:
    scores = torch.tensor([[0.0, math.nan], [INF, 0.0], [1.0, 0.0]], device=DEVICE)
    for alpha in (1.3, 2.0):
        found = gpu.entmax(scores, alpha)
        assert found[:2].isnan().all()
        assert found[2].isfinite().all()


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (1, 1000), (1, 100_000)])
def test_kernels_compile_for_hopper(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thalweg.kernels.gpu import sparse_maps

    done = compile_instead(monkeypatch)
    scores = torch.zeros(shape, dtype=dtype)
    for alpha in (2.0, 1.5, 1.3, torch.full((shape[0], 1), 1.3, dtype=dtype)):
        sparse_maps.entmax(scores, alpha)
        sparse_maps.entmax_vjp(scores, scores, alpha)
        sparse_maps.entmax_value(scores, alpha, torch.zeros(shape[0], dtype=torch.int64))
    assert done == {"_entmax_rows", "_vjp_rows"}
