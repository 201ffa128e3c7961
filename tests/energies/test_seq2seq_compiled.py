"""Recurrent models searched in one compiled call: the answers are those of the ordinary search."""

from __future__ import annotations

import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.compiled_searches import assert_equal_searches, assert_same, compiled, ordinary, sources
from thalweg.energies import Seq2Seq, Seq2SeqConfig
from thalweg.errors import ThalwegError
from thalweg.inference import beam_search, greedy
from thalweg.inference.search import compiled as module
from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.graph_replay import Request
from thalweg.layers.padded import Padded

kernels: Any = pytest.importorskip("thalweg._kernels")
SMALL = Seq2SeqConfig(hidden=20, embedding=12)
CELLS, SCORES = ("lstm", "gru", "gru-reset-before"), ("additive", "dot", "general", "none")


def model_of(config: Seq2SeqConfig, seed: int = 0, size: int = 9) -> Seq2Seq:
    torch.manual_seed(seed)
    model = Seq2Seq(config, source_size=11, target_size=size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("attention", SCORES)
@pytest.mark.parametrize("cell", CELLS)
def test_answers_are_those_of_the_ordinary_search(cell: Any, attention: Any, layers: int) -> None:
    model = model_of(replace(SMALL, cell=cell, attention=attention, decoder_layers=layers))
    for count, width in ((1, 1), (1, 5), (7, 12), (40, 3)):
        assert_equal_searches(model, sources(count), width)


@pytest.mark.parametrize("bias", [50.0, -math.inf], ids=["eos at once", "never eos"])
@pytest.mark.parametrize("cell", CELLS)
def test_extreme_ends(cell: Any, bias: float) -> None:
    model = model_of(replace(SMALL, cell=cell))
    with torch.no_grad():
        model.output.bias[model.eos] = bias
    for count, width in ((1, 1), (7, 5), (30, 3)):
        assert_equal_searches(model, sources(count), width, max_length=5)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    "more",
    [
        {"bidirectional": False, "attention": "dot"},
        {"bidirectional": False, "attention": "none", "encoder_layers": 2, "decoder_layers": 2},
        {"encoder_layers": 3, "decoder_layers": 2},
        {"reverse_source": True, "attention": "general"},
        {"reverse_source": True, "bidirectional": False, "attention": "none", "tied": True},
        {"tied": True},
        {"hidden": 32, "embedding": 16},
        {"hidden": 1, "embedding": 1},
    ],
    ids=str,
)
def test_shapes_of_models(cell: Any, more: dict[str, Any]) -> None:
    model = model_of(replace(SMALL, cell=cell, **more))
    for count, width in ((1, 3), (40, 2)):
        assert_equal_searches(model, sources(count), width)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "wish",
    [
        {"width": 3, "k": 2, "max_length": 6},
        {"width": 4, "max_length": 5, "length_penalty": 1.0, "min_length": 3},
        {"width": 5, "k": 3, "max_length": 7, "length_penalty": -0.5},
        {"width": 5, "k": 5, "max_length": 1},
    ],
    ids=str,
)
def test_wishes(wish: dict[str, Any]) -> None:
    assert_equal_searches(model_of(SMALL), sources(5), **wish)


@pytest.mark.usefixtures("two_threads")
def test_many_rows_that_end_at_all_times() -> None:
    model, source = model_of(replace(SMALL, hidden=32), seed=2, size=30), sources(70, longest=11)
    with torch.no_grad():
        model.output.bias[model.eos] += 1.5
    found = compiled(model, source, 3, max_length=12)
    assert len(set(found.lengths[:, 0].tolist())) > 2
    assert_same(found, ordinary(model, source, 3, max_length=12))


@pytest.mark.parametrize("more", [{}, {"bidirectional": False, "attention": "dot"}, {"encoder_layers": 2}], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_short_and_long_sources_in_any_order(cell: Any, more: dict[str, Any]) -> None:
    """Sources end at all times."""
    model = model_of(replace(SMALL, cell=cell, **more))
    for count, longest in ((1, 1), (1, 2), (9, 1), (9, 2), (40, 3), (33, 16)):
        assert_equal_searches(model, sources(count, longest, seed=longest), 2)
    source = sources(33, 16)
    for order in (source.lengths.argsort(), source.lengths.argsort(descending=True)):
        assert_equal_searches(model, Padded(*(part[order] for part in source)), 1)


def test_large_queries_and_keys() -> None:
    """exp(2 q + 2 k) would overflow."""
    model, source = model_of(SMALL), sources(9)
    with torch.no_grad():
        model.attention.key.weight.mul_(60)
        model.attention.query.weight.mul_(3)
        memory = model.encode(source)[0]
    assert memory is not None
    reach = memory.keys.abs().amax(dim=(1, 2))
    assert float(reach.max()) > 45
    assert_equal_searches(model, source, 4)
    with torch.no_grad():
        model.attention.key.weight.mul_(20 / float(reach.median()))
    assert_equal_searches(model, source, 4)


def test_batch_equals_one_by_one() -> None:
    model, source = model_of(SMALL, seed=3), sources(5)
    whole = compiled(model, source, 3)
    for n in range(source.size):
        length = int(source.lengths[n])
        alone = Padded(source.tokens[n : n + 1, :length], source.lengths[n : n + 1], source.mask[n : n + 1, :length])
        one = compiled(model, alone, 3)
        assert torch.equal(one.tokens[0], whole.tokens[n, :, : one.tokens.size(2)])
        torch.testing.assert_close(one.scores[0], whole.scores[n])


def test_greedy_and_the_public_beam_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = model_of(SMALL, seed=5), sources(3)
    partial: list[Any] = []
    assert_same(greedy(model, source, max_length=8), greedy(model, source, max_length=8, on_step=partial.append))
    monkeypatch.setattr(model, "begin", None)  # the ordinary search would need it
    beam_search(model, source, width=2, max_length=4)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = model_of(SMALL), sources(11)
    whole = compiled(model, source, 3)
    monkeypatch.setattr(module, "ROOM", 1 << 15)
    assert_same(compiled(model, source, 3), whole)


def test_weights_changed_in_place_are_seen_and_moved_ones_too() -> None:
    model, source = model_of(SMALL), sources(40)
    for width in (1, 3):
        compiled(model, source, width)
    with torch.no_grad():
        model.output.bias.add_(torch.randn(9))
    assert_equal_searches(model, source, 3)
    model.source_embedding.weight.data.mul_(0.5)  # which no counter of torch's tells
    assert_equal_searches(model, source, 3)
    model.load_state_dict(model_of(SMALL, seed=9).state_dict())
    assert_equal_searches(model, source, 1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5
    assert_equal_searches(model, source, 3)


@pytest.mark.usefixtures("two_threads")
def test_several_threads_at_once() -> None:
    model = model_of(SMALL)
    batches = [sources(2, seed=n) for n in range(8)]
    expected = [ordinary(model, source, 3) for source in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda source: compiled(model, source, 3), batches * 3))
    for got, right in zip(found, expected * 3, strict=True):
        assert_same(got, right)


def test_not_a_number_is_told_with_its_item() -> None:
    model, source = model_of(SMALL), sources(3)
    tokens = source.tokens.clamp(max=9)
    tokens[1, 0] = 10
    with torch.no_grad():
        model.source_embedding.weight[10] = math.nan
    with pytest.raises(ThalwegError, match="batch item 1 "):
        beam_search(model, Padded(tokens, source.lengths, source.mask), width=3, max_length=5)


def test_nothing_keeps_the_model_alive() -> None:
    model = model_of(SMALL)
    compiled(model, sources(2), 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_inference_mode_and_gradients_do_not_cling() -> None:
    model, source = model_of(SMALL), sources(2)
    with torch.inference_mode():
        first = compiled(model, source, 3)
    second = compiled(model, source, 3)
    assert torch.equal(first.scores, second.scores)
    assert not second.scores.requires_grad


class _Other(Seq2Seq):
    def step(self, tokens: Any, state: Any) -> Any:
        return super().step(tokens, state)


def test_what_it_does_not_serve() -> None:
    request, source = Request(2, 1, 5, 0, 0.0), sources(3)
    assert compiled_search(model_of(SMALL).double(), source, request) is None
    assert compiled_search(model_of(SMALL).train(), source, request) is None
    others: list[dict[str, Any]] = [{"attention_map": "sparsemax"}, {"residual": "residual"}, {"norm": "layer"}]
    for other in [*others, {"cell": "rnn-tanh"}]:
        assert compiled_search(model_of(replace(SMALL, **other)), source, request) is None
    half_awake = model_of(SMALL)
    half_awake.dropout.train()
    assert compiled_search(half_awake, source, request) is None
    assert compiled_search(_Other(SMALL, source_size=11, target_size=9).eval(), source, request) is None
    assert compiled_search(model_of(SMALL), source, request) is not None


def test_a_wrong_answer_is_told_from_a_right_one() -> None:
    """The comparison of these tests can fail: another model gives other answers."""
    source = sources(7)
    with pytest.raises(AssertionError):
        assert_same(compiled(model_of(SMALL), source, 3), ordinary(model_of(SMALL, seed=1), source, 3))
