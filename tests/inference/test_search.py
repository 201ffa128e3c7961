from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from oracles import search as oracle
from thalweg.errors import ConfigError, ShapeError, ThalwegError
from thalweg.inference import Hypotheses, TableModel, beam_search, greedy, sample_sequences
from thalweg.inference.hypotheses import batch_size

BOS = 0


def which(*tables: int) -> Tensor:
    return torch.tensor(tables)


def answers(found: Hypotheses, item: int = 0) -> list[tuple[tuple[int, ...], float, bool]]:
    """What exists for one item, after checking that the rest is missing as it should be."""
    result = []
    for tokens, length, score, finished in zip(
        found.tokens[item].tolist(),
        found.lengths[item].tolist(),
        found.scores[item].tolist(),
        found.finished[item].tolist(),
        strict=True,
    ):
        assert all(token >= 0 for token in tokens[:length])
        assert all(token == -1 for token in tokens[length:])
        if length:
            result.append((tuple(tokens[:length]), score, finished))
        else:
            assert score == -math.inf
            assert not finished
    return result


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(
        a[0] == b[0] and a[2] == b[2] and math.isclose(a[1], b[1], rel_tol=1e-9, abs_tol=1e-9)
        for a, b in zip(found, expected, strict=True)
    )


class Watched:
    """Counts the rows of each step; for trees, insists that no impossible prefix is ever asked about."""

    def __init__(self, model: TableModel, *, tree: bool = True) -> None:
        self.model, self.tree, self.rows = model, tree, []
        self.bos, self.eos, self.vocab_size = model.bos, model.eos, model.vocab_size

    def begin(self, inputs):
        return self.model.begin(inputs)

    def step(self, tokens, state):
        log_probs, state = self.model.step(tokens, state)
        assert not self.tree or bool((state != 0).all()), "asked about a prefix that cannot be"
        self.rows.append(tokens.size(0))
        return log_probs, state

    def select(self, state, rows):
        assert rows.dtype == torch.long
        return self.model.select(state, rows)


class Tree:
    """Worked example D3."""

    model = TableModel(oracle.tree_language_model(), vocab_size=len(oracle.WORDS), bos=BOS)

    @classmethod
    def read(cls, found: Hypotheses) -> list[tuple[str, float]]:
        assert found.finished.all()
        return [(" ".join(oracle.WORDS[i] for i in tokens), round(score, 6)) for tokens, score, _ in answers(found)]


def test_tree_greedy():
    assert Tree.read(greedy(Tree.model, which(0), max_length=3)) == [("the red rectangle", -9.1)]


def test_tree_beam_2():
    found = beam_search(Tree.model, which(0), width=2, max_length=3)
    assert Tree.read(found) == [("the red rectangle", -9.1), ("a blue square", -9.3)]


def test_tree_beam_3_still_misses_the_optimum():
    found = Tree.read(beam_search(Tree.model, which(0), width=3, max_length=3))
    assert found[:2] == [("the red rectangle", -9.1), ("a blue square", -9.3)]
    assert found[2] in [("the red circle", -9.4), ("a red circle", -9.4)]  # tied


def test_tree_beam_4_finds_the_optimum():
    found = Tree.read(beam_search(Tree.model, which(0), width=4, max_length=3))
    best = [("the green rectangle", -8.2), ("the green ellipse", -8.5)]
    assert found == [*best, ("the red rectangle", -9.1), ("a blue square", -9.3)]
    exact = oracle.all_sequences(oracle.tree_language_model(), eos=None, max_length=3)[0]
    assert " ".join(oracle.WORDS[i] for i in exact[0]) == "the green rectangle"
    assert Tree.read(beam_search(Tree.model, which(0), width=4, k=1, max_length=3)) == best[:1]


def tables(*, vocab: int, eos: int | None, depth: int, impossible: float, count: int = 6, seed: int = 0):
    every = [
        oracle.random_table(100 * seed + n, vocab=vocab, eos=eos, depth=depth, impossible=impossible)
        for n in range(count)
    ]
    return every, TableModel(every, vocab_size=vocab, bos=BOS, eos=eos)


SHAPES = [
    # vocab, eos, depth, impossible
    (4, 3, 4, 0.0),
    (4, 3, 4, 0.4),
    (3, 1, 5, 0.2),
    (5, None, 3, 0.0),
    (4, None, 3, 0.5),
    (2, 1, 6, 0.0),
    (1, None, 2, 0.0),
    (1, 0, 2, 0.0),
    (6, 2, 1, 0.3),
]


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_beam_is_the_textbook_algorithm(vocab, eos, depth, impossible, width):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible)
    for max_length in sorted({1, depth // 2 + 1, depth}):
        for penalty in (0.0, 0.6, 1.0, 2.5, -0.7):
            for k in {1, width}:
                found = beam_search(
                    Watched(model),
                    torch.arange(len(every)),
                    width=width,
                    k=k,
                    max_length=max_length,
                    length_penalty=penalty,
                )
                for item, table in enumerate(every):
                    expected = oracle.beam(table, eos=eos, width=width, k=k, max_length=max_length, penalty=penalty)
                    assert same(answers(found, item), expected)
                assert not found.optimal.any()


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
def test_a_beam_that_covers_everything_is_exact(vocab, eos, depth, impossible):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, seed=1)
    width = vocab**depth + 1
    found = beam_search(model, torch.arange(len(every)), width=width, max_length=depth)
    for item, table in enumerate(every):
        assert same(answers(found, item), oracle.all_sequences(table, eos=eos, max_length=depth)[:width])


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
def test_greedy(vocab, eos, depth, impossible):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, seed=2)
    found = greedy(Watched(model), torch.arange(len(every)), max_length=depth)
    narrow = beam_search(model, torch.arange(len(every)), width=1, max_length=depth)
    for item, table in enumerate(every):
        assert same(answers(found, item), oracle.greedy(table, eos=eos, max_length=depth))
        assert same(answers(found, item), answers(narrow, item))


def test_the_oracle_can_fail():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.0)
    found = beam_search(model, torch.arange(len(every)), width=3, max_length=4)
    settings = {"eos": 3, "width": 3, "k": 3, "max_length": 4}
    assert all(same(answers(found, i), oracle.beam(table, **settings)) for i, table in enumerate(every))
    broken = [same(answers(found, i), oracle.beam(t, broken=True, **settings)) for i, t in enumerate(every)]
    assert not any(broken)


def test_batch_equals_one_by_one_and_permutes():
    every, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=12)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    searches = (
        lambda inputs: greedy(model, inputs, max_length=5),
        lambda inputs: beam_search(model, inputs, width=3, max_length=5, length_penalty=0.5),
    )
    for search in searches:
        whole, permuted = search(torch.arange(len(every))), search(order)
        for item in range(len(every)):
            alone = search(which(item))
            assert answers(whole, item) == answers(alone)
        for item, source in enumerate(order.tolist()):
            assert answers(permuted, item) == answers(whole, source)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.7, "temperature": 0.8}])
def test_sampling_a_batch_equals_sampling_one_by_one_with_the_same_generator(filters):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=8)
    together = torch.Generator().manual_seed(3)
    whole = sample_sequences(model, torch.arange(8), n=5, max_length=5, generator=together, **filters)
    apart = torch.Generator().manual_seed(3)
    for item in range(8):
        alone = sample_sequences(model, which(item), n=5, max_length=5, generator=apart, **filters)
        assert answers(whole, item) == answers(alone)


def countdown(*lengths: int) -> TableModel:
    """Table n says 1 ... 1 eos, n symbols in all, with certainty."""
    every = [{(1,) * t: {2 if t == n - 1 else 1: 0.0} for t in range(n)} for n in lengths]
    return TableModel(every, vocab_size=3, bos=BOS, eos=2)


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


def test_beam_stops_when_nothing_can_overtake():
    stay_or_go = torch.tensor([[0.0, 0.2, 0.8], [0.0, 0.2, 0.8], [0.0, 0.0, 1.0]], dtype=torch.float64)
    model = Watched(TableModel.markov(stay_or_go, bos=BOS, eos=2, logarithms=False), tree=False)
    beam_search(model, which(0), width=3, k=2, max_length=1000)
    assert len(model.rows) == 2
    model.rows.clear()
    beam_search(model, which(0), width=3, k=2, max_length=20, length_penalty=1.0)
    assert len(model.rows) > 2  # a longer one could still have the better mean


def counts(found: Hypotheses) -> Counter:
    return Counter(tuple(sequence) for sequence in found.sequences()[0])


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 99},
    {"top_p": 1e-9},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("eos", "seed"), [(3, 5), (None, 6)])
def test_samples_follow_the_distribution(filters, eos, seed):
    table = oracle.random_table(seed, vocab=4, eos=eos, depth=3, impossible=0.1)
    model = TableModel(table, vocab_size=4, bos=BOS, eos=eos)
    generator = torch.Generator().manual_seed(seed)
    found = sample_sequences(model, which(0), n=20000, max_length=3, generator=generator, **filters)
    expected = oracle.distribution(table, eos=eos, max_length=3, **filters)
    assert oracle.chi_square_accepts(counts(found), expected)
    wrong = {**filters, "temperature": filters.get("temperature", 1.0) * 1.5}
    twin = oracle.distribution(table, eos=eos, max_length=3, **wrong)
    apart = sum(abs(expected[y] - twin.get(y, 0.0)) for y in expected) / 2
    if not filters:
        assert apart > 0.03
    if apart > 0.03:  # the nucleus of a flat distribution hardly changes with the temperature
        assert not oracle.chi_square_accepts(counts(found), twin)


def test_scores_of_samples_are_those_of_the_model_and_sorted():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.2, count=4)
    found = sample_sequences(
        model, torch.arange(4), n=50, max_length=3, temperature=3.0, top_k=3, generator=torch.Generator()
    )
    for item, table in enumerate(every):
        known = {h[0]: h for h in oracle.all_sequences(table, eos=3, max_length=3)}
        sampled = answers(found, item)
        assert same(sampled, [known[tokens] for tokens, _, _ in sampled])
        keys = [(not finished, -score) for _, score, finished in sampled]
        assert keys == sorted(keys)
        assert {finished for _, _, finished in sampled} == {True, False}


def test_top_k_keeps_exactly_k_of_tied_symbols():
    model = TableModel.markov([[0.0] * 6] * 6, bos=BOS)
    found = sample_sequences(model, which(0), n=200, max_length=1, top_k=2, generator=torch.Generator())
    assert len(counts(found)) == 2


def test_seeds_repeat_and_differ():
    model = TableModel.markov([[0.0] * 6] * 6, bos=BOS)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return sample_sequences(model, which(0), n=4, max_length=5, generator=generator).tokens.tolist()

    assert draw(1) == draw(1) != draw(2)
    assert sample_sequences(model, which(0), n=2, max_length=5).tokens.shape == (1, 2, 5)


STRATEGIES = [
    lambda model, inputs, max_length: greedy(model, inputs, max_length=max_length),
    lambda model, inputs, max_length: beam_search(model, inputs, width=3, max_length=max_length),
    lambda model, inputs, max_length: sample_sequences(model, inputs, n=3, max_length=max_length),
]
every_strategy = pytest.mark.parametrize("search", STRATEGIES, ids=["greedy", "beam", "sample"])


@every_strategy
def test_eos_at_once_and_never(search):
    at_once = search(countdown(1), which(0, 0), 7)
    assert at_once.sequences()[1][0] == [2]
    never = search(TableModel({(): {1: -1.0}, (1,): {1: -1.0}}, vocab_size=3, bos=BOS, eos=2), which(0), 2)
    assert answers(never)[0] == ((1, 1), -2.0, False)
    short = search(countdown(5), which(0), 1)
    assert answers(short)[0] == ((1,), 0.0, False)


def test_width_larger_than_the_vocabulary():
    model = TableModel({(): {0: -1.0, 1: -2.0}}, vocab_size=2, bos=BOS, eos=1)
    found = beam_search(model, which(0), width=9, max_length=1)
    assert found.tokens.shape == (1, 9, 1)
    assert answers(found) == [((1,), -2.0, True), ((0,), -1.0, False)]


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


def test_prefix_is_forced():
    every, model = tables(vocab=4, eos=3, depth=5, impossible=0.1, count=5)
    prefixes = [(), (2,), (1, 2), (0, 0, 1), (1, 1, 1, 1, 1)]
    padded = torch.tensor([[*p, *[-1] * (6 - len(p))] for p in prefixes])
    for width in (1, 3):
        found = beam_search(model, torch.arange(5), width=width, max_length=5, prefix=padded)
        for item, (table, prefix) in enumerate(zip(every, prefixes, strict=True)):
            expected = oracle.beam(table, eos=3, width=width, k=width, max_length=5, prefix=prefix)
            assert same(answers(found, item), expected)
    free = beam_search(model, torch.arange(5), width=3, max_length=5)
    nothing = beam_search(model, torch.arange(5), width=3, max_length=5, prefix=padded[:, :0])
    assert free.tokens.equal(nothing.tokens)


def test_allowed():
    every, model = tables(vocab=5, eos=4, depth=4, impossible=0.1, count=5)
    seen = []

    def rising(tokens: Tensor, items: Tensor) -> Tensor:
        """Symbols rise; item 2 may not end; item 3 may say nothing."""
        seen.append((tokens.size(1), sorted(set(items.tolist()))))
        last = tokens[:, -1:] if tokens.size(1) else torch.full((tokens.size(0), 1), -1)
        mask = torch.arange(5) > last
        mask[items == 2, 4] = False
        return mask & (items != 3).unsqueeze(1)

    for width in (1, 3):
        seen.clear()
        found = beam_search(model, torch.arange(5), width=width, max_length=4, allowed=rising)
        for item, table in enumerate(every):
            expected = oracle.beam(
                table,
                eos=4,
                width=width,
                k=width,
                max_length=4,
                allowed=lambda words, symbol, item=item: (
                    symbol > (words[-1] if words else -1) and (item != 2 or symbol != 4) and item != 3
                ),
            )
            assert same(answers(found, item), expected)
        assert seen[0] == (0, [0, 1, 2, 3, 4])
        assert [t for t, _ in seen] == list(range(len(seen)))
        assert all(3 not in items for _, items in seen[1:])


def test_wrong_arguments():
    model = countdown(2)
    one = which(0)
    for wrong in ({"width": 0}, {"width": 2, "k": 3}, {"width": 2, "k": 0}, {"width": True}, {"width": 1.5}):
        with pytest.raises(ConfigError):
            beam_search(model, one, max_length=3, **wrong)
    with pytest.raises(ConfigError, match="raise `width` to 3"):
        beam_search(model, one, width=2, k=3, max_length=3)
    with pytest.raises(ConfigError, match="length_penalty"):
        beam_search(model, one, width=2, max_length=3, length_penalty=math.nan)
    for search in STRATEGIES:
        with pytest.raises(ConfigError, match="`max_length` must be an integer of at least 1, got 0"):
            search(model, one, 0)
    for wrong in (
        {"n": 0},
        {"temperature": 0.0},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ):
        with pytest.raises(ConfigError):
            sample_sequences(model, one, max_length=3, **{"n": 1, **wrong})


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (torch.tensor([1]), "shape"),
        (torch.tensor([[1], [1]]), "B = 1"),
        (torch.tensor([[1.0]]), "float32"),
        (torch.tensor([[3]]), "0 ... 2"),
        (torch.tensor([[-2]]), "-1 past"),
        (torch.tensor([[-1, 1]]), "move -1 to the end"),
        (torch.tensor([[1, 2]]), "eos = 2"),
        (torch.tensor([[1, 1, 1, 1]]), "longest prefix, 4"),
    ],
)
def test_wrong_prefix(prefix, message):
    with pytest.raises((ShapeError, ConfigError), match=message):
        beam_search(countdown(2), which(0), width=2, max_length=3, prefix=prefix)


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
    for search in STRATEGIES[:2]:
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
