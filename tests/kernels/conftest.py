"""What tests of compiled kernels share: every level of instructions, and work that is shared out however small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

LEVELS = ("baseline", "avx2", "avx512")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one level after the other, as far as this processor has them."""
    kernels = pytest.importorskip("thalweg._kernels")
    if LEVELS.index(request.param) > LEVELS.index(kernels.best_level()):
        pytest.skip(f"this processor has no {request.param}")
    kernels.set_level(request.param)
    assert kernels.level() == request.param
    yield request.param
    kernels.set_level(kernels.best_level())


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Every call is shared out between two threads, however small."""
    kernels = pytest.importorskip("thalweg._kernels")
    before, least = torch.get_num_threads(), kernels.set_least_operations(1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    kernels.set_least_operations(least)
