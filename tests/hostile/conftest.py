"""What the tests with hostile inputs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hostile.forks import Nursery


@pytest.fixture(scope="module")
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """The process that forks for each case of the module that a test module calls ``cases``."""
    made = Nursery(request.module.cases.__name__)
    yield made
    made.close()
