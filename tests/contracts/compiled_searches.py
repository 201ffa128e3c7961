"""Whole searches in one compiled call beside the ordinary search, for every family of models that has them."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.inference import Hypotheses, beam_search
from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.graph_replay import Request
from thalweg.layers.padded import Padded


def sources(count: int, longest: int = 7, seed: int = 0) -> Padded:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw)
    lengths[0] = longest
    mask = torch.arange(longest) < lengths[:, None]
    return Padded(torch.randint(4, 11, mask.shape, generator=draw).where(mask, 1), lengths, mask)


def compiled(model: Any, source: Padded, width: int, **wish: Any) -> Hypotheses:
    request = Request(
        width,
        wish.get("k", width),
        wish.get("max_length", 8),
        wish.get("min_length", 0),
        wish.get("length_penalty", 0.0),
    )
    found = compiled_search(model, source, request)
    assert found is not None
    return found


def ordinary(model: Any, source: Padded, width: int, **wish: Any) -> Hypotheses:
    """A limit on the rows is a wish that only the ordinary search knows."""
    return beam_search(model, source, rows_at_once=9999, width=width, **{"max_length": 8, **wish})


def assert_same(got: Hypotheses, expected: Hypotheses) -> None:
    for name in ("tokens", "lengths", "finished", "optimal"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-5, rtol=1e-5)


def assert_equal_searches(model: Any, source: Padded, width: int, **wish: Any) -> None:
    assert_same(compiled(model, source, width, **wish), ordinary(model, source, width, **wish))
