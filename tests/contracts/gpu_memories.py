"""What tests of memories on a GPU share: problems, and retrieval beside all weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.triton_kernels import DEVICE
from oracles import memory as oracle


def random_memory(size: tuple[int, int, int], *, seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Queries near patterns, and the patterns."""
    Q, N, D = size
    generator = torch.Generator().manual_seed(1000 * seed + Q + N + D)
    patterns = torch.randn(N, D, generator=generator)
    queries = patterns[torch.randint(N, (Q,), generator=generator)] + spread * torch.randn(Q, D, generator=generator)
    return queries, patterns


def close(found: Tensor, wanted: object, bound: float = 5e-5) -> None:
    expected = torch.as_tensor(wanted)
    assert found.shape == expected.shape
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max()) if len(finite) else 0.0)
    torch.testing.assert_close(found.cpu().double(), expected, atol=bound * scale, rtol=0.0)


def check_settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None = None
) -> None:
    from thalweg.kernels.gpu import memory as gpu

    present = None if mask is None else mask.to(DEVICE)
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), beta, max_steps, tol, present, None)
    some = None if mask is None else mask.numpy()
    state, energies, steps, still = oracle.settle(
        queries.double().numpy(), patterns.double().numpy(), beta, max_steps, tol, some
    )
    assert found.steps.tolist() == steps
    assert found.converged.tolist() == still
    close(found.state, state, 1e-4)
    close(found.energies, energies, 1e-4)
