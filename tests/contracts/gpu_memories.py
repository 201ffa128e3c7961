"""What tests of memories on a GPU share: problems, and answers beside all weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.triton_kernels import DEVICE, RUNS
from oracles import memory as oracle

if RUNS:
    from thalweg.kernels.gpu import memory as gpu


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


def check_associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float, mask: Tensor | None = None, bound: float = 5e-5
) -> None:
    held = keys.to(DEVICE)
    given = queries.to(DEVICE), held, held if values is keys else values.to(DEVICE)
    mixed, lse = gpu.associate(*given, beta, None if mask is None else mask.to(DEVICE), None)
    some = None if mask is None else mask.numpy()
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, keys, values)), beta, some)
    close(mixed, wanted[0], bound)
    close(lse, wanted[1])


def check_settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None = None
) -> None:
    present = None if mask is None else mask.to(DEVICE)
    given, kept = queries.to(DEVICE), patterns.to(DEVICE)
    found = gpu.settle(given, kept, beta, max_steps, tol, present, None)
    some = None if mask is None else mask.numpy()
    state, energies, steps, still = oracle.settle(
        queries.double().numpy(), patterns.double().numpy(), beta, max_steps, tol, some
    )
    assert found.steps.tolist() == steps
    assert found.converged.tolist() == still
    close(found.state, state, 1e-4)
    close(found.energies, energies, 1e-4)
    for after, before in ((given, queries), (kept, patterns)):
        torch.testing.assert_close(after.cpu(), before, atol=0, rtol=0, equal_nan=True)
