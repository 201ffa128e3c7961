"""What tests of compiled kernels share: every level of instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
