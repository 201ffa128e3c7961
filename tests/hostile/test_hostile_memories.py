"""Hostile inputs to memories and sparse maps: the answer of plain PyTorch or a ``ThalwegError``, each in a fork."""

from __future__ import annotations

import pytest
import torch

from hostile import memory_cases_hostile as cases
from hostile.forks import Nursery, refused


@pytest.mark.parametrize("name", cases.CASES)
def test_a_memory_answers_as_the_reference_or_says_why_not(nursery: Nursery, name: str) -> None:
    found = nursery.run(name)
    assert found.kind == "ok", found.text


def test_a_case_can_fail() -> None:
    with pytest.raises(AssertionError, match="taken without a word"):
        refused(lambda: torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_random_memories(nursery: Nursery, first: int) -> None:
    for seed in range(first, first + 30):
        found = nursery.run(f"at_random({seed})")
        assert found.kind == "ok", (seed, found.text)
