"""Searches by replayed graphs equal the ordinary ones: on a GPU, else in a process with Triton's interpreter.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from contracts.triton_kernels import DEVICE, here_only, needs_triton
from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.errors import ShapeError, ThalwegError
from thalweg.inference import Hypotheses, beam_search, greedy
from thalweg.inference.search import graph_replay as captured
from thalweg.inference.search.graph_replay import FixedPlan, Request, captured_search
from thalweg.kernels import dispatch
from thalweg.layers import Padded

pytestmark = needs_triton


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels serve the CPU too."""
    from thalweg.kernels.gpu import decoding

    monkeypatch.setattr(dispatch, "fixed_kernels", lambda device: decoding)


class Markov:
    """Logits (N, V, V) of the next symbol after each symbol, by table; inputs (B,) say which table an item has."""

    def __init__(self, logits: Tensor, eos: int | None = 3) -> None:
        self.logits, self.bos, self.eos, self.vocab_size = logits.to(DEVICE), 0, eos, logits.size(2)
        self.device = self.logits.device

    def begin(self, inputs: Tensor) -> Tensor:
        return inputs

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits[state, tokens].log_softmax(dim=1), state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]

    def fixed(self, inputs: Tensor) -> FixedPlan:
        def make(items: int, width: int, capacity: int) -> FixedMarkov:
            return FixedMarkov(self.logits, items, width)

        return FixedPlan(len(inputs), (), self.device, make, lambda first, last: inputs[first:last])


class FixedMarkov:
    lineage = None

    def __init__(self, logits: Tensor, items: int, width: int) -> None:
        self.logits, self.width = logits, width
        self.which = torch.zeros(items, dtype=torch.long, device=logits.device)
        self.rows = torch.zeros(items * width, dtype=torch.long, device=logits.device)

    def load(self, inputs: Tensor, count: Tensor) -> None:
        count.fill_(len(inputs))
        self.which.zero_()
        self.which[: len(inputs)].copy_(inputs)

    def encode(self) -> None:
        self.rows.view(-1, self.width).copy_(self.which.unsqueeze(1))

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        return self.logits[self.rows, tokens]


def markov(seed: int = 0, tables: int = 5, size: int = 5, eos: int | None = 3) -> Markov:
    draw = torch.Generator().manual_seed(seed)
    return Markov(2 * torch.randn(tables, size, size, generator=draw), eos)


def assert_same(found: Hypotheses | None, expected: Hypotheses) -> None:
    assert found is not None
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.finished, expected.finished)
    assert torch.equal(found.optimal, expected.optimal)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    assert not found.scores.requires_grad


def check(model, inputs, *, width: int, k: int, max_length: int, min_length: int = 0, penalty: float = 0.0) -> None:
    """Captured equals ordinary, and beam_search takes the former unless told how many rows to take at once."""
    options = {"width": width, "k": k, "max_length": max_length, "min_length": min_length}
    found = captured_search(model, inputs, Request(width, k, max_length, min_length, penalty))
    assert_same(found, beam_search(model, inputs, **options, length_penalty=penalty, rows_at_once=10**6))


def kept(model) -> int:
    return len(captured._kept.get(model, ()))


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("options", "eos"),
    [
        ({"width": 3, "k": 3, "max_length": 4}, 3),
        ({"width": 3, "k": 1, "max_length": 4, "penalty": 1.0}, 3),
        ({"width": 2, "k": 2, "max_length": 4, "penalty": -0.5, "min_length": 3}, 0),
        ({"width": 2, "k": 2, "max_length": 3}, None),
        ({"width": 1, "k": 1, "max_length": 1, "penalty": 1.0}, 3),
        ({"width": 6, "k": 6, "max_length": 2}, 4),
    ],
    ids=str,
)
def test_equals_the_ordinary_search(options: dict, eos: int | None) -> None:
    check(markov(eos=eos), torch.tensor([0, 2, 1], device=DEVICE), **options)


@here_only
@pytest.mark.usefixtures("kernels")
def test_beam_search_and_greedy_come_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = markov(), torch.tensor([3, 1, 4], device=DEVICE)
    found = beam_search(model, inputs, width=2, max_length=3)
    assert kept(model) == 1
    assert_same(found, beam_search(model, inputs, width=2, max_length=3, rows_at_once=100))
    alone = greedy(model, inputs, max_length=3, min_length=2)
    assert kept(model) == 2
    for other in ({"return_tree": True}, {"groups": 2}, {"prefix": inputs.unsqueeze(1) * 0 + 1}):
        beam_search(model, inputs, width=2, max_length=2, **other)
    greedy(model, inputs, max_length=2, prefix=inputs.unsqueeze(1) * 0 + 1)
    assert kept(model) == 2
    monkeypatch.setattr(dispatch, "fixed_kernels", lambda device: None)
    assert_same(alone, greedy(model, inputs, max_length=3, min_length=2))
    assert not alone.optimal.any()


@here_only
@pytest.mark.usefixtures("kernels")
def test_one_search_serves_other_inputs_of_its_shape() -> None:
    model = markov()
    for inputs in ([0, 1, 2, 3], [4, 3, 2], [1, 1, 0, 4]):
        check(model, torch.tensor(inputs, device=DEVICE), width=2, k=1, max_length=3)
    assert kept(model) == 1
    check(model, torch.tensor([2], device=DEVICE), width=2, k=1, max_length=3)
    check(model, torch.tensor([2], device=DEVICE), width=2, k=2, max_length=3)
    assert kept(model) == 3


@here_only
@pytest.mark.usefixtures("kernels")
def test_answers_stay_when_the_search_runs_again() -> None:
    model = markov()
    first = captured_search(model, torch.tensor([0, 1], device=DEVICE), Request(2, 2, 3, 0, 0.0))
    assert first is not None
    before = [part.clone() for part in (first.tokens, first.lengths, first.scores, first.finished, first.optimal)]
    captured_search(model, torch.tensor([3, 4], device=DEVICE), Request(2, 2, 3, 0, 0.0))
    after = (first.tokens, first.lengths, first.scores, first.finished, first.optimal)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@here_only
@pytest.mark.usefixtures("kernels")
def test_threads_get_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All search by one set of buffers, and each is held up between its steps so that another could come in."""
    model, step = markov(), FixedMarkov.step
    batches = [torch.tensor([n, 4 - n], device=DEVICE) for n in range(4)]
    alone = [captured_search(model, batch, Request(2, 2, 3, 0, 0.0)) for batch in batches]
    monkeypatch.setattr(FixedMarkov, "step", lambda *given: time.sleep(0.001) or step(*given))
    with ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(lambda batch: captured_search(model, batch, Request(2, 2, 3, 0, 0.0)), batches))
    for one, other in zip(found, alone, strict=True):
        assert other is not None
        assert_same(one, other)
    assert kept(model) == 1


@here_only
@pytest.mark.usefixtures("kernels")
def test_large_batches_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_ROWS", 5)  # two items of two rows
    model = markov()
    check(model, torch.tensor([0, 1, 2, 3, 4], device=DEVICE), width=2, k=2, max_length=3)
    assert kept(model) == 2  # two items, and one that is left
    check(model, torch.tensor([0, 1], device=DEVICE), width=8, k=1, max_length=1)


@here_only
@pytest.mark.usefixtures("kernels")
def test_few_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_SHAPES", 2)
    model, one = markov(), torch.tensor([0], device=DEVICE)
    for length in (1, 2, 1, 3):
        captured_search(model, one, Request(1, 1, length, 0, 0.0))
    assert [key[2].max_length for key in captured._kept[model]] == [1, 3]


@here_only
@pytest.mark.usefixtures("kernels")
def test_a_precision_of_products_has_graphs_of_its_own() -> None:
    model, one = markov(), torch.tensor([0], device=DEVICE)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            captured_search(model, one, Request(1, 1, 1, 0, 0.0))
    finally:
        torch.set_float32_matmul_precision(before)
    assert kept(model) == 2


@here_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("most", [8192, 4])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_a_number_is_named(wrong: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_ROWS", most)  # with 4, item 3 is the second of the second piece
    model = markov(eos=4)
    model.logits[1, 2] = wrong
    model.logits[1, 0] = torch.tensor([0.0, 0.0, 30.0, 0.0, 0.0])  # 2 comes first, so that step 2 is wrong
    inputs = torch.tensor([0, 2, 3, 1], device=DEVICE)
    said = []
    for rows in (None, 100):
        with pytest.raises(ThalwegError, match="got NaN or \\+inf for batch item 3 by step 2") as caught:
            beam_search(model, inputs, width=2, max_length=3, rows_at_once=rows)
        said.append(str(caught.value))
    assert said[0] == said[1]
    check(model, inputs[:3], width=2, k=2, max_length=3)  # and nothing of it is left


@here_only
@pytest.mark.usefixtures("kernels")
def test_where_there_is_no_answer_at_all() -> None:
    model = markov(eos=4)
    model.logits[:, :, :4] = -torch.inf  # eos alone may come, and must not yet
    check(model, torch.tensor([0, 2, 1], device=DEVICE), width=2, k=2, max_length=3, min_length=3)


def test_models_without_a_fixed_form() -> None:
    request = Request(2, 1, 3, 0, 0.0)

    class Unwilling:
        vocab_size = 5

        def fixed(self, inputs: Tensor) -> None:
            return None

    assert captured_search(object(), None, request) is None
    assert captured_search(Unwilling(), torch.zeros(1), request) is None
    if DEVICE == "cpu":  # no kernels here, unless a test says so
        assert captured_search(markov(), torch.tensor([0]), request) is None


@here_only
@pytest.mark.usefixtures("kernels")
def test_more_candidates_than_fit_or_more_steps_than_there_are() -> None:
    model = markov(tables=1)
    model.vocab_size = 10**6
    one = torch.tensor([0], device=DEVICE)
    assert captured_search(model, one, Request(2, 1, 3, 0, 0.0)) is None
    plan = markov().fixed(one)._replace(most_steps=2)
    model = markov()
    model.fixed = lambda inputs: plan  # type: ignore[method-assign]
    assert captured_search(model, one, Request(1, 1, 3, 0, 0.0)) is None
    assert captured_search(model, one, Request(1, 1, 2, 0, 0.0)) is not None
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert captured_search(model, one, Request(1, 1, 2, 0, 0.0)) is None


# The same with a Transformer.


def build(seed: int = 0, **settings) -> Transformer:
    torch.manual_seed(seed)
    small = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(TransformerConfig(**(small | settings)), source_size=10, target_size=7).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.output.bias[3] += 1
    return model


def sources(*rows: list[int]) -> Padded:
    tokens, lengths, mask = pad(list(rows))
    return Padded(tokens.to(DEVICE), lengths, mask.to(DEVICE))


THREE = ([4, 5, 6], [7, 8], [9, 4, 5, 6])


@here_only
@pytest.mark.usefixtures("kernels")
def test_a_transformer_whose_weights_change_in_place() -> None:
    model = build(norm="post", positions="learned", max_positions=4)
    options = {"width": 2, "k": 2, "max_length": 3}
    check(model, sources(*THREE), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    check(model, sources([6, 6], [5]), **options | {"max_length": 3})
    assert kept(model) == 2  # four items and two
    # Gradients and inference mode of a caller do not cling to what is kept.
    before = kept(model)
    with torch.inference_mode():
        inside = beam_search(model, sources([4]), width=2, max_length=2)
    assert_same(inside, beam_search(model, sources([4]), width=2, max_length=2))
    assert kept(model) == before + 1
    (search,) = list(captured._kept[model].values())[-1:]
    assert not any(part.requires_grad for part in (search.decoder.bias, *search.decoder.memories))


@here_only
@pytest.mark.usefixtures("kernels")
def test_a_greedy_transformer_that_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(3, positions="rotary", activation="swiglu")
    found = greedy(model, sources(*THREE), max_length=3)
    assert kept(model) == 1
    decoder = next(iter(captured._kept[model].values())).decoder
    with monkeypatch.context() as without:
        without.setattr(dispatch, "fixed_kernels", lambda device: None)
        assert_same(found, greedy(model, sources(*THREE), max_length=3))
    gc.collect()  # models of other tests
    count, gone = len(captured._kept), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(captured._kept) == count - 1
    with pytest.raises(AssertionError):
        _ = decoder.model


@here_only
@pytest.mark.usefixtures("kernels")
def test_no_items_and_sources_that_are_too_long() -> None:
    model = build(positions="learned", max_positions=4)
    none = Padded(torch.zeros(0, 3).long().to(DEVICE), torch.zeros(0).long(), torch.zeros(0, 3).bool().to(DEVICE))
    assert greedy(model, none, max_length=2).size == 0
    assert beam_search(model, none, width=2, max_length=2).size == 0
    with pytest.raises(ShapeError, match="learned positions reach 4"):
        beam_search(model, sources([4, 5, 6, 7, 8]), width=2, max_length=2)
    assert kept(model) == 0
    with torch.no_grad():
        model.output.bias[3] = 50.0  # ends long before the positions do
    assert beam_search(model, sources([4]), width=2, k=1, max_length=9).sequences() == [[[3]]]
    assert kept(model) == 0
