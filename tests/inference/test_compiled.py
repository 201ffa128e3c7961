"""Searches with few rows in one compiled call: the answers are those of the ordinary searches."""

from __future__ import annotations

import gc
import math
import multiprocessing
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from thalweg.energies import Transformer, TransformerConfig
from thalweg.errors import ThalwegError
from thalweg.inference import Hypotheses, beam_search, greedy
from thalweg.inference.search import compiled as module
from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.graph_replay import Request
from thalweg.layers.low_precision import reduce_precision
from thalweg.layers.padded import Padded

kernels: Any = pytest.importorskip("thalweg._kernels")
SMALL = TransformerConfig(width=24, heads=3, feedforward=40, encoder_layers=2, decoder_layers=2)
WISHES = [
    {"width": 1, "max_length": 6},
    {"width": 3, "k": 2, "max_length": 6},
    {"width": 4, "max_length": 5, "length_penalty": 1.0, "min_length": 3},
    {"width": 5, "k": 3, "max_length": 7, "length_penalty": -0.5},
    {"width": 5, "k": 5, "max_length": 1},
]


@pytest.fixture
def shared_out() -> Iterator[None]:
    """Two threads, and every piece of work is shared between them, however small."""
    before, least = torch.get_num_threads(), kernels.set_least_operations(1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    kernels.set_least_operations(least)


def model_of(config: TransformerConfig, seed: int = 0, **options: Any) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(config, source_size=11, target_size=9, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def sources(*lengths: int, seed: int = 0) -> Padded:
    draw = torch.Generator().manual_seed(seed)
    count, longest = torch.tensor(lengths), max(lengths)
    mask = torch.arange(longest) < count[:, None]
    return Padded(torch.randint(4, 11, mask.shape, generator=draw).where(mask, 1), count, mask)


def assert_same(got: Hypotheses, expected: Hypotheses) -> None:
    for name in ("tokens", "lengths", "finished", "optimal"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-5, rtol=1e-5)


def compiled(model: Transformer, source: Padded, wish: dict[str, Any]) -> Hypotheses:
    width = wish["width"]
    request = Request(
        *(width, wish.get("k", width), wish["max_length"], wish.get("min_length", 0), wish.get("length_penalty", 0.0))
    )
    found = compiled_search(model, source, request)
    assert found is not None
    return found


def ordinary(model: Transformer, source: Padded, wish: dict[str, Any]) -> Hypotheses:
    """A limit on the rows is a wish that only the ordinary search knows."""
    return beam_search(model, source, rows_at_once=999, **wish)


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    ("positions", "activation", "embedding_norm"),
    [
        ("sinusoidal", "relu", False),
        ("learned", "gelu", True),
        ("rotary", "swiglu", False),
        ("sinusoidal", "silu", True),
    ],
)
def test_answers_are_those_of_the_ordinary_search(
    norm: Any, positions: Any, activation: Any, embedding_norm: bool
) -> None:
    config = replace(SMALL, norm=norm, positions=positions, activation=activation, embedding_norm=embedding_norm)
    model, source = model_of(config), sources(3, 2, 7)
    for wish in WISHES:
        assert_same(compiled(model, source, wish), ordinary(model, source, wish))


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_reduced_precision(kind: Any) -> None:
    model, source = reduce_precision(model_of(SMALL), kind), sources(3, 2, 7)
    assert isinstance(model, Transformer)
    for wish in WISHES:
        assert_same(compiled(model, source, wish), ordinary(model, source, wish))


def test_batch_equals_one_by_one() -> None:
    model, source = model_of(SMALL, seed=3), sources(3, 2, 7)
    whole = compiled(model, source, WISHES[1])
    for n in range(source.size):
        length = int(source.lengths[n])
        alone = Padded(source.tokens[n : n + 1, :length], source.lengths[n : n + 1], source.mask[n : n + 1, :length])
        one = compiled(model, alone, WISHES[1])
        steps = one.tokens.size(2)
        assert torch.equal(one.tokens[0], whole.tokens[n, :, :steps])
        torch.testing.assert_close(one.scores[0], whole.scores[n])


@pytest.mark.parametrize("bias", [50.0, -math.inf], ids=["eos at once", "never eos"])
def test_extreme_ends(bias: float) -> None:
    model, source = model_of(SMALL), sources(2, 5)
    with torch.no_grad():
        model.output.bias[model.eos] = bias
    for wish in WISHES:
        assert_same(compiled(model, source, wish), ordinary(model, source, wish))


def test_features_and_other_sizes() -> None:
    model = model_of(replace(SMALL, width=10, heads=5, feedforward=7, tied=False), features=(4, 5))
    assert_same(compiled(model, sources(4, 1), WISHES[1]), ordinary(model, sources(4, 1), WISHES[1]))


def test_the_public_searches_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.inference.search import greedy as search
    from thalweg.inference.search.beam import search as beam

    asked: list[bool] = []

    def spy(*arguments: Any) -> Hypotheses | None:
        found = compiled_search(*arguments)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(beam, "compiled_search", spy)
    monkeypatch.setattr(search, "compiled_search", spy)
    model = model_of(SMALL)
    beam_search(model, sources(3), width=5, max_length=4)
    greedy(model, sources(3, 4), max_length=4)
    beam_search(model, sources(3), width=5, max_length=4, return_tree=True)  # a wish that only the ordinary one knows
    assert asked == [True, True]


@pytest.mark.usefixtures("shared_out")
def test_many_rows_that_end_at_all_times() -> None:
    """Panels of weights, rows given up by items that are done, and items past the batch up to a power of two."""
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 9, (70,), generator=draw).tolist()
    config = replace(SMALL, width=32, heads=4, feedforward=48, tied=False)
    model, source = model_of(config, seed=3), sources(*lengths)
    with torch.no_grad():
        model.target_embedding.weight.mul_(2)  # so that what was said changes what comes
    for wish in ({"width": 1, "max_length": 9}, {"width": 3, "k": 2, "max_length": 9}):
        found = compiled(model, source, wish)
        assert len(set(found.lengths[:, 0].tolist())) > 2
        assert_same(found, ordinary(model, source, wish))


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = model_of(SMALL), sources(3, 2, 7, 1, 5)
    whole = compiled(model, source, WISHES[1])
    monkeypatch.setattr(module, "ROOM", 2 * 3 * 6 * 8 * 24 * 2)  # two items
    assert_same(compiled(model, source, WISHES[1]), whole)


def test_greedy_equals_the_ordinary_one() -> None:
    model, source = model_of(SMALL, seed=5), sources(3, 2, 7)
    partial: list[Any] = []
    assert_same(greedy(model, source, max_length=8), greedy(model, source, max_length=8, on_step=partial.append))


def test_not_a_number_is_told_with_its_item() -> None:
    model, source = model_of(SMALL), sources(3, 2)
    with torch.no_grad():
        model.source_embedding.weight[int(source.tokens[1, 0])] = math.nan
    first = Padded(torch.full_like(source.tokens, 10), source.lengths, source.mask)
    first.tokens[1] = source.tokens[1]
    if int(source.tokens[1, 0]) == 10:
        pytest.skip("the symbol of the sound item is the broken one")
    with pytest.raises(ThalwegError, match="batch item 1 "):
        beam_search(model, first, width=3, max_length=5)


def test_weights_changed_in_place_are_seen_and_moved_ones_too() -> None:
    model, source = model_of(SMALL), sources(3, 2)
    before = compiled(model, source, WISHES[1])
    with torch.no_grad():
        model.output.bias.add_(torch.randn(9))
    assert_same(compiled(model, source, WISHES[1]), ordinary(model, source, WISHES[1]))
    model.load_state_dict(model_of(SMALL, seed=9).state_dict())
    after = compiled(model, source, WISHES[1])
    assert_same(after, ordinary(model, source, WISHES[1]))
    assert not torch.equal(before.scores, after.scores)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5
    assert_same(compiled(model, source, WISHES[1]), ordinary(model, source, WISHES[1]))


@pytest.mark.usefixtures("shared_out")
def test_several_threads_at_once() -> None:
    model = model_of(SMALL)
    batches = [sources(3, 2, seed=n) for n in range(12)]
    expected = [ordinary(model, source, WISHES[1]) for source in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda source: compiled(model, source, WISHES[1]), batches * 3))
    for got, right in zip(found, expected * 3, strict=True):
        assert_same(got, right)


def _in_child(model: Transformer, source: Padded, pipe: Any) -> None:
    torch.set_num_threads(2)
    pipe.send(compiled(model, source, WISHES[1]).scores.tolist())


def test_after_a_fork() -> None:
    model, source = model_of(SMALL), sources(3, 2)
    torch.set_num_threads(2)
    try:
        expected = compiled(model, source, WISHES[1]).scores
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_in_child, args=(model, source, there))
        child.start()
        assert here.poll(60)
        torch.testing.assert_close(torch.tensor(here.recv()), expected)
        child.join()
    finally:
        torch.set_num_threads(1)


def test_nothing_keeps_the_model_alive() -> None:
    model = model_of(SMALL)
    compiled(model, sources(3), WISHES[1])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_inference_mode_and_gradients_do_not_cling() -> None:
    model, source = model_of(SMALL), sources(3, 2)
    with torch.inference_mode():
        first = compiled(model, source, WISHES[1])
    second: Tensor = compiled(model, source, WISHES[1]).scores
    assert torch.equal(first.scores, second)
    assert not second.requires_grad


def test_what_it_does_not_serve() -> None:
    request = Request(2, 1, 5, 0, 0.0)
    assert compiled_search(model_of(replace(SMALL, kind="causal")), sources(3), request) is None
    assert compiled_search(model_of(SMALL).double(), sources(3), request) is None
    assert compiled_search(model_of(SMALL).train(), sources(3), request) is None
    short = model_of(replace(SMALL, positions="learned", max_positions=4))
    assert compiled_search(short, sources(3), request) is None


def test_sources_reach_the_last_learned_position() -> None:
    model, source = model_of(replace(SMALL, positions="learned", max_positions=7)), sources(3, 7)
    assert_same(compiled(model, source, WISHES[3]), ordinary(model, source, WISHES[3]))


def test_a_wrong_answer_is_told_from_a_right_one() -> None:
    """The comparison of these tests can fail: another model gives other answers."""
    source = sources(3, 2, 7)
    with pytest.raises(AssertionError):
        assert_same(compiled(model_of(SMALL), source, WISHES[1]), ordinary(model_of(SMALL, seed=1), source, WISHES[1]))


def test_an_end_far_down_the_last_ranks_is_not_forgotten_by_the_proof() -> None:
    """For one of these sources eos stands too low at the last step to be looked at, and might still end the best."""
    model, source = model_of(replace(SMALL, tied=False), seed=37), sources(*[3, 5, 2, 7] * 16)
    with torch.no_grad():
        model.output.weight.mul_(0.5)
    wish = {"width": 2, "k": 1, "max_length": 2}
    assert_same(compiled(model, source, wish), ordinary(model, source, wish))
