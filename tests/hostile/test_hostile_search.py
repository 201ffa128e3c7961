"""Hostile inputs to searches: the answer of plain PyTorch or a ``ThalwegError``, each in a process of its own."""

from __future__ import annotations

import pytest

from hostile import search_cases_hostile as cases
from hostile.forks import Nursery

pytest.importorskip("thalweg._kernels")


@pytest.mark.parametrize("name", cases.CASES)
def test_a_search_answers_as_the_reference_or_says_why_not(nursery: Nursery, name: str) -> None:
    found = nursery.run(name)
    assert found.kind == "ok", found.text


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 40))
def test_random_sources_weights_and_searches(nursery: Nursery, first: int) -> None:
    for seed in range(first, first + 40):
        found = nursery.run(f"at_random({seed})")
        assert found.kind == "ok", (seed, found.text)
