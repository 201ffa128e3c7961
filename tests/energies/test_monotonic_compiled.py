"""Hard monotonic attention searched in one compiled call: the answers are those of the ordinary search."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.compiled_searches import assert_equal_searches, compiled, sources
from thalweg.energies import Monotonic, MonotonicConfig
from thalweg.errors import ThalwegError
from thalweg.inference import beam_search
from thalweg.inference.search import compiled as module
from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.graph_replay import Request
from thalweg.layers.padded import Padded
from thalweg.layers.spelling import spellings

kernels: Any = pytest.importorskip("thalweg._kernels")
SMALL = MonotonicConfig(hidden=20, embedding=12)
ORDERS = ("zeroth", "first", "edits")
SPELT = spellings(["", "", "", "", *"abcde", "á", "ab"]), spellings(["", "", "", "", *"abcd", "á"])


def model_of(config: MonotonicConfig, seed: int = 0, *, spelt: Any = None, size: int = 9) -> Monotonic:
    torch.manual_seed(seed)
    model = Monotonic(config, source_size=11, target_size=size, spelt=spelt).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("spelt", [None, SPELT], ids=["plain", "spelt"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("order", ORDERS)
def test_answers_are_those_of_the_ordinary_search(order: Any, cell: Any, layers: int, spelt: Any) -> None:
    model = model_of(replace(SMALL, order=order, cell=cell, decoder_layers=layers), spelt=spelt)
    for count, width in ((1, 1), (1, 5), (7, 12), (40, 3)):
        assert_equal_searches(model, sources(count), width)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "wish",
    [
        {"width": 3, "k": 2, "max_length": 6},
        {"width": 4, "max_length": 5, "min_length": 3, "length_penalty": 1.0},
        {"width": 5, "k": 5, "max_length": 1},
    ],
    ids=str,
)
def test_wishes(wish: dict[str, Any], order: Any) -> None:
    assert_equal_searches(model_of(replace(SMALL, order=order)), sources(33, 16), **wish)


@pytest.mark.parametrize("order", ORDERS)
def test_sharp_models(order: Any) -> None:
    """Probabilities from 1 down to where float32 has none, and jumps longer than any that is told apart."""
    model = model_of(replace(SMALL, order=order, jumps=2), seed=1)
    with torch.no_grad():
        for layer in (model.pull, model.jumps, model.output):
            for weight in layer.parameters() if layer is not None else ():
                weight.mul_(8)
    assert_equal_searches(model, sources(20, 15), 4)


@pytest.mark.parametrize("bias", [50.0, -math.inf], ids=["eos at once", "never eos"])
def test_extreme_ends(bias: float) -> None:
    model = model_of(SMALL)
    with torch.no_grad():
        model.output.bias[model.eos] = bias
    for count, width in ((1, 1), (7, 5)):
        assert_equal_searches(model, sources(count), width, max_length=5)


def test_batches_pieces_and_single_items_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = model_of(SMALL, seed=3), sources(11)
    whole = compiled(model, source, 3)
    for n in (0, 5):
        length = int(source.lengths[n])
        alone = Padded(source.tokens[n : n + 1, :length], source.lengths[n : n + 1], source.mask[n : n + 1, :length])
        one = compiled(model, alone, 3)
        assert torch.equal(one.tokens[0], whole.tokens[n, :, : one.tokens.size(2)])
        torch.testing.assert_close(one.scores[0], whole.scores[n])
    monkeypatch.setattr(module, "ROOM", 1 << 15)
    torch.testing.assert_close(compiled(model, source, 3).scores, whole.scores)


@pytest.mark.parametrize("spelt", [None, SPELT], ids=["plain", "spelt"])
def test_changed_weights_are_seen(spelt: Any) -> None:
    model, source = model_of(SMALL, spelt=spelt), sources(9)
    compiled(model, source, 3)
    with torch.no_grad():
        model.output.bias.add_(torch.randn(9))
    model.never[5] = -math.inf
    model.target_embedding.weight.data.mul_(0.5)  # which no counter of torch's tells
    assert_equal_searches(model, source, 3)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5
    assert_equal_searches(model, source, 3)


@pytest.mark.parametrize("weight", ["source_embedding", "target_embedding", "join_target", "pull", "jumps", "output"])
def test_not_a_number_is_told(weight: str) -> None:
    model = model_of(SMALL)
    with torch.no_grad():
        getattr(model, weight).weight.fill_(math.nan)
    with pytest.raises(ThalwegError, match="batch item 0 "):
        beam_search(model, sources(3), width=3, max_length=5)


class _Other(Monotonic):
    def step(self, tokens: Any, state: Any) -> Any:
        return super().step(tokens, state)


def test_what_it_does_not_serve() -> None:
    request, source = Request(2, 1, 5, 0, 0.0), sources(3)
    assert compiled_search(model_of(SMALL).double(), source, request) is None
    assert compiled_search(model_of(SMALL).train(), source, request) is None
    assert compiled_search(_Other(SMALL, source_size=11, target_size=9).eval(), source, request) is None
