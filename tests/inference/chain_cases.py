"""Random chains as tensors and as lists for the oracle, shared by the tests of chains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracles import chains as oracle
from thalweg.inference import LinearChain

INF = math.inf
BACKENDS = ("reference", "scan", "cpu", *(["gpu"] if torch.cuda.is_available() else []))
KINDS = ("shared", "per item", "per step")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def scores_of(seed=0, *, batch=3, steps=4, size=3, kind="shared", dtype=torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moves = {"shared": (), "per item": (batch,), "per step": (batch, steps - 1)}[kind]
    shapes = {"emissions": (batch, steps, size), "transitions": (*moves, size, size), "start": (size,), "end": (size,)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def weighted(scores: dict[str, Tensor], lengths: list[int] | None = None):
    return [oracle.paths(i) for i in oracle.items(**{k: v.tolist() for k, v in scores.items()}, lengths=lengths)]


def build(scores: dict[str, Tensor], backend="reference", **options) -> LinearChain:
    if backend == "gpu":
        scores = {name: tensor.cuda() for name, tensor in scores.items()}
    return LinearChain(**scores, backend=backend, **options)


def same(actual: Tensor, expected, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Equality up to rounding with a tensor or with what the oracle says; NaN is never right."""
    if not isinstance(expected, Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    actual, expected = (tensor.detach().cpu().double() for tensor in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def dense(weighted_items, *shape: int, parts=oracle.labels_at) -> Tensor:
    """The oracle's probabilities of parts as a tensor (B, *shape)."""
    result = torch.zeros(len(weighted_items), *shape, dtype=torch.float64)
    for item, each in enumerate(weighted_items):
        for part, value in oracle.marginals(each, parts).items():
            result[(item, *part)] = value
    return result


def labels_of(row: Tensor) -> tuple[int, ...]:
    return tuple(label for label in row.tolist() if label >= 0)


def seeded(seed: int, backend="reference") -> torch.Generator:
    return torch.Generator(device="cuda" if backend == "gpu" else "cpu").manual_seed(seed)


def leaves_of(scores: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in scores.items()}


def largest_sum(scores: dict[str, Tensor]) -> float:
    """A bound of the absolute values of all finite partial sums of scores, at least 1."""
    finite = (tensor[tensor.isfinite()] for tensor in scores.values())
    return max(1.0, scores["emissions"].shape[1] * sum(float(each.abs().max()) for each in finite if each.numel()))


def rounding(scores: dict[str, Tensor]) -> float:
    """What rounding in sums of these scores may come to, and with them in probabilities."""
    return 16 * torch.finfo(scores["emissions"].dtype).eps * largest_sum(scores)


def entropy_rounding(scores: dict[str, Tensor]) -> float:
    """The same for an entropy, computed in float64 and then rounded: errors of probabilities multiply the scores."""
    single = torch.finfo(scores["emissions"].dtype).eps
    return torch.finfo(torch.float64).eps * largest_sum(scores) ** 2 + 64 * single
