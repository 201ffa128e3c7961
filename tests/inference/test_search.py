from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from search_cases import BOS, SHAPES, Tree, Watched, answers, countdown, rising, rising_mask, same, tables, which
from torch import Tensor, nn

from oracles import search as oracle
from oracles import sequences
from thalweg.errors import ConfigError, ShapeError, ThalwegError
from thalweg.inference import TableModel, beam_search, exact_search, greedy, sample_sequences, stochastic_beam_search
from thalweg.inference.search.protocol import batch_size

STRATEGIES = [
    lambda model, inputs, max_length: greedy(model, inputs, max_length=max_length),
    lambda model, inputs, max_length: beam_search(model, inputs, width=3, max_length=max_length),
    lambda model, inputs, max_length: sample_sequences(model, inputs, n=3, max_length=max_length),
    lambda model, inputs, max_length: exact_search(model, inputs, max_length=max_length),
    lambda model, inputs, max_length: stochastic_beam_search(model, inputs, n=3, max_length=max_length),
]
every_strategy = pytest.mark.parametrize("search", STRATEGIES, ids=["greedy", "beam", "sample", "exact", "stochastic"])


def test_tree_greedy():
    assert Tree.read(greedy(Tree.model, which(0), max_length=3)) == [("the red rectangle", -9.1)]


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
def test_greedy(vocab, eos, depth, impossible):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, seed=2)
    found = greedy(Watched(model), torch.arange(len(every)), max_length=depth)
    narrow = beam_search(model, torch.arange(len(every)), width=1, max_length=depth)
    for item, table in enumerate(every):
        assert same(answers(found, item), oracle.greedy(table, eos=eos, max_length=depth))
        assert same(answers(found, item), answers(narrow, item))


def test_batch_equals_one_by_one_and_permutes():
    every, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=12)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    searches = (
        lambda inputs: greedy(model, inputs, max_length=5),
        lambda inputs: beam_search(model, inputs, width=3, max_length=5, length_penalty=0.5),
        lambda inputs: exact_search(model, inputs, max_length=5, width=1, max_expansions=4),
    )
    for search in searches:
        whole, permuted = search(torch.arange(len(every))), search(order)
        for item in range(len(every)):
            alone = search(which(item))
            assert answers(whole, item) == answers(alone)
        for item, source in enumerate(order.tolist()):
            assert answers(permuted, item) == answers(whole, source)


def test_rows_are_dropped_as_they_finish():
    model = Watched(countdown(3, 1, 4, 1, 2))
    found = greedy(model, torch.arange(5), max_length=10)
    assert model.rows == [5, 3, 2, 1]
    assert found.tokens.tolist()[0] == [[1, 1, 2, -1]]
    assert found.lengths.squeeze(1).tolist() == [3, 1, 4, 1, 2]
    assert found.finished.all()
    model.rows.clear()
    sample_sequences(model, torch.arange(5), n=3, max_length=10)
    assert model.rows == [5, 9, 6, 3]  # the first step is taken once for all samples of an item
    model.rows.clear()
    found = beam_search(model, torch.arange(5), width=4, k=1, max_length=10)
    assert model.rows == [5, 3 * 3, 2 * 4, 1 * 4]
    assert found.lengths.squeeze(1).tolist() == [3, 1, 4, 1, 2]


@every_strategy
def test_eos_at_once_and_never(search):
    at_once = search(countdown(1), which(0, 0), 7)
    assert at_once.sequences()[1][0] == [2]
    never = search(TableModel({(): {1: -1.0}, (1,): {1: -1.0}}, vocab_size=3, bos=BOS, eos=2), which(0), 2)
    assert answers(never)[0] == ((1, 1), -2.0, False)
    short = search(countdown(5), which(0), 1)
    assert answers(short)[0] == ((1,), 0.0, False)


@every_strategy
def test_items_without_any_sequence_are_missing(search):
    # Nothing at once; nothing after the first symbol; an ordinary one.
    every = [{}, {(): {1: 0.0}, (1,): {}}, {(): {1: 0.0}, (1,): {2: 0.0}}]
    for eos in (2, None):
        model = TableModel(every, vocab_size=3, bos=BOS, eos=eos)
        found = search(Watched(model), which(0, 1, 2), 2)
        assert found.sequences()[-1][0] == [1, 2]
        assert found.finished[-1, 0]
        for item in range(found.size - 1):
            assert answers(found, item) == []
        assert found.tokens.dtype == found.lengths.dtype == torch.long
        assert found.scores.dtype == torch.float64
    assert search(TableModel({}, vocab_size=3, bos=BOS), which(0, 0), 4).tokens.shape[::2] == (2, 0)


@every_strategy
def test_empty_batch(search):
    found = search(countdown(1), which().long(), 4)
    assert found.tokens.shape[0] == found.size == 0
    assert found.scores.shape == found.finished.shape == found.lengths.shape == found.tokens.shape[:2]
    assert found.optimal.shape == (0,)
    assert found.sequences() == []


@every_strategy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("symbol", [1, 2])
def test_not_a_number_is_one_clear_line(search, bad, symbol):
    good = {(): {1: -0.1, 2: -2.0}, (1,): {1: -0.5, 2: -0.9}, (1, 1): {2: 0.0}}
    for prefix in ((), (1,)):
        wrong = {**good, prefix: {**good[prefix], symbol: bad}}
        model = TableModel([good, wrong], vocab_size=3, bos=BOS, eos=2)
        torch.manual_seed(0)
        with pytest.raises(ThalwegError, match="NaN or \\+inf for batch item 1 by step") as caught:
            search(model, which(0, 1), 6)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("min_length", "prefix", "allowed"),
    [(2, None, None), (5, None, None), (0, (1, 2), None), (0, None, rising), (4, (1,), rising)],
)
def test_greedy_under_rules(min_length, prefix, allowed):
    every, model = tables(vocab=4, eos=3, depth=5, impossible=0.1, count=8)
    padded = None if prefix is None else torch.tensor([[*prefix, -1]]).repeat(8, 1)
    mask = None if allowed is None else rising_mask
    rules = {"min_length": min_length, "prefix": padded, "allowed": mask, "max_length": 5}
    found = greedy(model, torch.arange(8), **rules)
    narrow = beam_search(model, torch.arange(8), width=1, **rules)
    best = exact_search(model, torch.arange(8), **rules)
    for item, table in enumerate(every):
        left = sequences.constrained(
            table, eos=3, max_length=5, min_length=min_length, prefix=prefix or (), allowed=allowed
        )
        assert same(answers(found, item), oracle.greedy(left, eos=3, max_length=5))
        assert same(answers(found, item), answers(narrow, item))
        finished = [h for h in oracle.all_sequences(left, eos=3, max_length=5) if h[2]]
        assert bool(best.optimal[item]) == bool(finished)
        if finished:
            assert same(answers(best, item), finished[:1])


def test_partial_hypotheses_of_greedy():
    seen = []
    found = greedy(countdown(3, 1), torch.arange(2), max_length=10, on_step=seen.append)
    assert [part.tokens.tolist() for part in seen] == [[[1], [2]], [[1, 1]], [[1, 1, 2]]]
    assert [part.items.tolist() for part in seen] == [[0, 1], [0], [0]]
    assert [part.finished.tolist() for part in seen] == [[False, True], [False], [True]]
    assert seen[-1].scores.equal(found.scores[0])
    dead = TableModel([{}, {(): {1: -1.0}, (1,): {}}], vocab_size=3, bos=BOS, eos=2)
    seen.clear()
    greedy(dead, torch.arange(2), max_length=3, on_step=seen.append)
    assert [part.tokens.tolist() for part in seen] == [[[1]], []]


def test_lengths_and_counts_must_be_sensible():
    for search in STRATEGIES:
        with pytest.raises(ConfigError, match="`max_length` must be an integer of at least 1, got 0"):
            search(countdown(2), which(0), 0)
    for search in (greedy, exact_search):
        with pytest.raises(ConfigError, match="min_length"):
            search(countdown(2), which(0), max_length=3, min_length=4)
        with pytest.raises(ShapeError, match="eos = 2"):
            search(countdown(2), which(0), max_length=3, prefix=torch.tensor([[2]]))


def test_greedy_in_pieces(monkeypatch):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=9)
    whole = greedy(model, torch.arange(9), max_length=5)
    monkeypatch.setattr("thalweg.inference.search.greedy._ROOM", 4 * 2)
    pieces = greedy(model, torch.arange(9), max_length=5)
    assert all(answers(whole, item) == answers(pieces, item) for item in range(9))


def test_wrong_shapes_from_model_and_mask():
    model = countdown(2)
    with pytest.raises(ShapeError, match=r"\(R, V\) = \(1, 3\)"):
        beam_search(model, which(0), width=2, max_length=3, allowed=lambda tokens, items: torch.ones(1, 3))
    model.vocab_size = 7
    for search in STRATEGIES:
        with pytest.raises(ShapeError, match=r"\(R, V\) = \(1, 7\), got \(1, 3\)"):
            search(model, which(0), 2)


def test_batch_size_of_what_models_take():
    class Pair(NamedTuple):
        tokens: Tensor
        lengths: Tensor

    ten = torch.zeros(10, 2)
    for inputs in (ten, (ten, None), Pair(ten, ten), {"a": ten}, [0] * 10, ("x",) * 10, ([0] * 10, "y")):
        assert batch_size(inputs) == 10
    for inputs in (torch.tensor(1), None):
        with pytest.raises(ShapeError):
            batch_size(inputs)


def test_wrong_tables():
    with pytest.raises(ConfigError, match="got 5 after prefix"):
        TableModel({(): {5: 0.0}}, vocab_size=3, bos=BOS)
    with pytest.raises(ConfigError, match="`eos` must be"):
        TableModel({}, vocab_size=3, bos=BOS, eos=3)
    with pytest.raises(ConfigError):
        TableModel([], vocab_size=3, bos=BOS)
    with pytest.raises(ShapeError):
        TableModel.markov([[0.0, 1.0]], bos=BOS)
    for inputs in (which(1), torch.zeros(1), torch.zeros(1, 1).long()):
        with pytest.raises(ShapeError):
            greedy(countdown(1), inputs, max_length=1)


class Recurrent(nn.Module):
    """A real network: GRU state, input features, float32."""

    bos, eos, vocab_size = 0, 1, 9

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.cell = nn.GRUCell(8, 16)
        self.out = nn.Linear(16, 9)
        self.dtype = dtype

    def begin(self, inputs):
        return inputs[0]

    def step(self, tokens, state):
        state = self.cell(self.embed(tokens), state)
        return (3 * self.out(state)).log_softmax(-1).to(self.dtype), state

    def select(self, state, rows):
        return state.index_select(0, rows)


def test_a_network_gives_the_same_in_a_batch_and_alone():
    torch.manual_seed(0)
    model, inputs = Recurrent(), 3 * torch.randn(7, 16)
    for search in (*STRATEGIES[:2], STRATEGIES[3]):
        whole = search(model, (inputs,), 12)
        assert not whole.scores.requires_grad
        for item in range(7):
            alone = search(model, (inputs[item : item + 1],), 12)
            assert alone.sequences()[0] == whole.sequences()[item]
            torch.testing.assert_close(alone.scores[0], whole.scores[item])
    moved = whole.to("cpu")
    assert moved.tokens.equal(whole.tokens)


@every_strategy
def test_low_precision_is_summed_in_float32(search):
    found = search(Recurrent(torch.bfloat16), (torch.randn(2, 16),), 5)
    assert found.scores.dtype == torch.float32


def test_ten_thousand_items():
    model = countdown(3, 1, 2)
    inputs = torch.arange(10000) % 3
    for search in STRATEGIES:
        assert search(model, inputs, 50).lengths[:, 0].equal(which(3, 1, 2)[inputs])
