"""Hostile inputs to searches: the answer of plain PyTorch or a ``ThalwegError``, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hostile import search_cases_hostile as cases
from hostile.forks import Nursery

pytest.importorskip("thalweg._kernels")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery("hostile.search_cases_hostile")
    yield made
    made.close()


@pytest.mark.parametrize("name", cases.FIXED)
def test_a_search_answers_as_the_reference_or_says_why_not(nursery: Nursery, name: str) -> None:
    found = nursery.run(name)
    assert found.kind == "ok", found.text


def test_a_case_can_fail() -> None:
    with pytest.raises(AssertionError, match="taken without a word"):
        cases.refused(lambda: torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 40))
def test_random_sources_weights_and_searches(nursery: Nursery, first: int) -> None:
    for seed in range(first, first + 40):
        found = nursery.run(f"random {seed}")
        assert found.kind == "ok", (seed, found.text)
