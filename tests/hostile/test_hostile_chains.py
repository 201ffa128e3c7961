"""Whatever is given to a chain or a CRF layer, the process lives and no number is wrong in silence."""

from __future__ import annotations

import pytest

from hostile import chain_cases_hostile as cases
from hostile.forks import Nursery


@pytest.mark.parametrize("name", cases.CASES)
def test_chain(name: str, nursery: Nursery) -> None:
    outcome = nursery.run(name, seconds=60)
    assert outcome.kind == "ok", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_chain_at_random(seed: int, nursery: Nursery) -> None:
    outcome = nursery.run(f"at_random({seed})", seconds=200)
    assert outcome.kind == "ok", outcome.text
