"""The divergence of chains that are close: digits that a difference of large numbers would lose."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from oracles.chains import markov_divergence
from thalweg.inference import LinearChain, SparseTransitions


def close(steps: int, apart: float, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Emissions (1, T, 3) and transitions of two chains."""
    seed = torch.Generator().manual_seed(steps)
    p = [torch.randn(1, steps, 3, generator=seed, dtype=dtype), torch.randn(3, 3, generator=seed, dtype=dtype)]
    return p, [x + apart * torch.randn(x.shape, generator=seed, dtype=dtype) for x in p]


def exactly(*chains: list[Tensor]) -> float:
    return markov_divergence(*((e[0].tolist(), a.tolist()) for e, a in chains))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("apart", [1e-5, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("steps", [1, 10, 300, 5000])
def test_divergence_of_close_chains(steps: int, apart: float, dtype: torch.dtype) -> None:
    p, q = close(steps, apart, dtype)
    want = exactly(p, q)
    found = kl_divergence(LinearChain(*p), LinearChain(*q))
    assert found.dtype == dtype
    assert found.item() == pytest.approx(want, rel=1e-4 if apart == 1e-5 else 1e-6)
    assert kl_divergence(LinearChain(*p), LinearChain(*p)).item() == 0.0


def test_the_oracle_agrees_with_enumeration_and_can_fail() -> None:
    p, q = close(4, 1.0, torch.float64)
    paths = torch.tensor(list(itertools.product(range(3), repeat=4))).unsqueeze(1)

    def logs(chain: list[Tensor]) -> list[float]:
        emissions, moves = chain[0][0].tolist(), chain[1].tolist()
        found = [
            math.fsum(emissions[t][y[t]] for t in range(4)) + math.fsum(moves[i][j] for i, j in itertools.pairwise(y))
            for y in paths[:, 0].tolist()
        ]
        total = math.log(math.fsum(map(math.exp, found)))
        return [x - total for x in found]

    want = math.fsum(math.exp(a) * (a - b) for a, b in zip(logs(p), logs(q), strict=True))
    assert exactly(p, q) == pytest.approx(want, rel=1e-12)
    assert exactly(p, [q[0], q[1].t()]) != pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("ours", ["shared", "item", "step", "sparse"])
@pytest.mark.parametrize("theirs", ["shared", "item", "step", "sparse"])
def test_every_pair_of_kinds(ours: str, theirs: str) -> None:
    p, q = close(10, 1e-3, torch.float32)
    kinds = {
        "shared": lambda a: a,
        "item": lambda a: a.unsqueeze(0),
        "step": lambda a: a.expand(1, 9, 3, 3),
        "sparse": SparseTransitions.of_dense,
    }
    found = kl_divergence(LinearChain(p[0], kinds[ours](p[1])), LinearChain(q[0], kinds[theirs](q[1])))
    assert found.item() == pytest.approx(exactly(p, q), rel=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_constraints(sparse: bool) -> None:
    p, q = close(6, 1e-2, torch.float64)
    p[1][0, 2] = q[1][0, 2] = -math.inf
    kind = SparseTransitions.of_dense if sparse else lambda a: a
    free, tight = LinearChain(q[0], torch.zeros(3, 3).double()), LinearChain(q[0], kind(q[1]))
    assert kl_divergence(LinearChain(p[0], kind(p[1])), tight).isfinite().all()
    assert kl_divergence(free, tight).item() == math.inf
    assert kl_divergence(tight, free).isfinite().all()


def test_gradient() -> None:
    p, q = close(5, 0.5, torch.float64)
    leaves = [x.requires_grad_() for x in (*p, *q)]
    assert torch.autograd.gradcheck(
        lambda a, b, c, d: kl_divergence(LinearChain(a, b), LinearChain(c, d)), leaves, raise_exception=True
    )
