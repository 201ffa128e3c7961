from __future__ import annotations

import math

import pytest
import torch
from search_cases import BOS, answers, same
from torch import Tensor

from oracles import search as oracle
from oracles.beams import Book
from thalweg.errors import ConfigError, ThalwegError
from thalweg.inference import Hypotheses, Partial, TableModel, beam_search, stream

SHAPES = [  # vocab, eos, depth, impossible
    (4, 3, 4, 0.0),
    (4, 3, 4, 0.4),
    (3, 1, 5, 0.2),
    (5, None, 3, 0.0),
    (4, None, 3, 0.5),
    (2, 1, 6, 0.0),
    (1, 0, 2, 0.0),
    (6, 2, 1, 0.3),
]
shapes = pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)


def tables(*, vocab, eos, depth, impossible, count=6, seed=0):
    every = [
        oracle.random_table(1000 + 100 * seed + n, vocab=vocab, eos=eos, depth=depth, impossible=impossible)
        for n in range(count)
    ]
    return every, TableModel(every, vocab_size=vocab, bos=BOS, eos=eos)


@shapes
@pytest.mark.parametrize(
    "options",
    [
        {"width": 2},
        {"width": 3, "k": 1},
        {"width": 9, "min_length": 2},
        {"width": 2, "min_length": 3},
        {"width": 3, "min_length": 2, "length_penalty": 0.8},
        {"width": 3, "min_length": 3, "length_penalty": -0.7},
        {"width": 4, "groups": 2, "diversity": 0.7},
        {"width": 6, "groups": 3, "diversity": 0.4, "min_length": 2, "k": 4},
        {"width": 3, "groups": 3, "diversity": 2.0, "length_penalty": 0.6},
        {"width": 4, "groups": 2, "diversity": 0.0},
        {"width": 20, "groups": 2, "diversity": 0.5},
    ],
    ids=str,
)
def test_beam_is_the_textbook_algorithm_and_proves_what_it_can(vocab, eos, depth, impossible, options):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible)
    for max_length in sorted({1, depth // 2 + 1, depth}):
        settings = {**options, "min_length": min(options.get("min_length", 0), max_length)}
        found = beam_search(model, torch.arange(len(every)), max_length=max_length, **settings)
        book_settings = {"k": settings["width"], **settings, "penalty": settings.get("length_penalty", 0.0)}
        book_settings.pop("length_penalty", None)
        for item, table in enumerate(every):
            book = Book(table, eos=eos, max_length=max_length, **book_settings)
            assert same(answers(found, item), book.hypotheses)
            assert bool(found.optimal[item]) == book.proved
            if book.proved:
                least = settings["min_length"] if eos is not None else 0
                best = [
                    h
                    for h in oracle.all_sequences(table, eos=eos, max_length=max_length)
                    if h[2] and len(h[0]) >= least
                ]
                assert math.isclose(best[0][1], found.scores[item, 0].item(), abs_tol=1e-9)


def test_the_book_can_fail():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.0)
    options = {"width": 4, "groups": 2, "diversity": 0.7}
    found = beam_search(model, torch.arange(len(every)), max_length=4, **options)
    broken = [Book(table, eos=3, k=4, max_length=4, **options, broken=True).hypotheses for table in every]
    assert not all(same(answers(found, item), twin) for item, twin in enumerate(broken))


def test_some_are_proved_and_some_are_not():
    _, model = tables(vocab=5, eos=4, depth=4, impossible=0.0, count=40)
    narrow, wide = (beam_search(model, torch.arange(40), width=w, max_length=4).optimal for w in (1, 400))
    assert narrow.any()
    assert not narrow.all()
    assert wide.all()
    assert not beam_search(model, torch.arange(40), width=5, max_length=4, length_penalty=1.0).optimal.any()


def test_a_proof_is_over_what_is_permitted():
    table = {(): {1: math.log(0.1), 2: math.log(0.9)}, (1,): {2: 0.0}}
    model = TableModel(table, vocab_size=3, bos=BOS, eos=2)
    assert beam_search(model, torch.tensor([0]), width=1, max_length=3).sequences() == [[[2]]]
    longer = beam_search(model, torch.tensor([0]), width=1, max_length=3, min_length=2)
    assert longer.sequences() == [[[1, 2]]]
    assert longer.optimal.all()
    # No finished hypothesis: nothing is proved.
    assert not beam_search(countdown(5), torch.tensor([0]), width=2, max_length=2).optimal.any()


def countdown(*lengths: int) -> TableModel:
    every = [{(1,) * t: {2 if t == n - 1 else 1: 0.0} for t in range(n)} for n in lengths]
    return TableModel(every, vocab_size=3, bos=BOS, eos=2)


OPTIONS = [
    {"width": 3},
    {"width": 3, "min_length": 3, "k": 2},
    {"width": 6, "groups": 3, "diversity": 0.6},
    {"width": 4, "groups": 2, "diversity": 0.6, "min_length": 2, "length_penalty": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batch_equals_one_by_one_and_pieces(options):
    _, model = tables(vocab=4, eos=3, depth=5, impossible=0.2, count=12)
    whole = beam_search(model, torch.arange(12), max_length=5, return_tree=True, **options)
    for rows in (1, 7, 13, 10_000):
        pieces = beam_search(model, torch.arange(12), max_length=5, rows_at_once=rows, return_tree=True, **options)
        for name in ("tokens", "lengths", "scores", "finished", "optimal"):
            assert getattr(pieces, name).equal(getattr(whole, name))
        assert all(pieces.tree.nodes(item) == whole.tree.nodes(item) for item in range(12))
    for item in range(12):
        alone = beam_search(model, torch.tensor([item]), max_length=5, return_tree=True, **options)
        assert answers(alone) == answers(whole, item)
        assert bool(alone.optimal) == bool(whole.optimal[item])
        assert alone.tree.nodes(0) == whole.tree.nodes(item)


def test_pieces_keep_prefix_allowed_and_item_numbers():
    every, model = tables(vocab=4, eos=3, depth=5, impossible=0.0, count=10)
    prefix = torch.tensor([[n % 3] if n % 2 else [-1] for n in range(10)])
    seen: list[int] = []

    def not_own(tokens: Tensor, items: Tensor) -> Tensor:
        seen.extend(items.tolist())
        return (torch.arange(4) != (items % 3).unsqueeze(1)) | (tokens.size(1) == 0)

    options = {"width": 3, "max_length": 5, "prefix": prefix, "allowed": not_own}
    whole = beam_search(model, torch.arange(10), **options)
    pieces = beam_search(model, torch.arange(10), rows_at_once=9, **options)
    assert pieces.tokens.equal(whole.tokens)
    assert pieces.scores.equal(whole.scores)
    assert set(seen) == set(range(10))
    wrong = TableModel([*every[:7], {(): {1: math.nan}}], vocab_size=4, bos=BOS, eos=3)
    with pytest.raises(ThalwegError, match="batch item 7 by step"):
        beam_search(wrong, torch.arange(8), width=3, max_length=4, rows_at_once=6)
    with pytest.raises(ThalwegError, match="batch item 7 by step"):
        beam_search(wrong, torch.arange(8), width=4, groups=2, diversity=1.0, max_length=4)


class Counted:
    """Remembers the most rows of a step, and that ``begin`` comes once."""

    def __init__(self, model: TableModel) -> None:
        self.model, self.most, self.begun = model, 0, 0
        self.bos, self.eos, self.vocab_size = model.bos, model.eos, model.vocab_size

    def begin(self, inputs):
        self.begun += 1
        return self.model.begin(inputs)

    def step(self, tokens, state):
        self.most = max(self.most, tokens.size(0))
        return self.model.step(tokens, state)

    def select(self, state, rows):
        return self.model.select(state, rows)


def test_ten_thousand_inputs_in_bounded_rows():
    _, table = tables(vocab=5, eos=4, depth=4, impossible=0.1, count=7)
    model, inputs = Counted(table), torch.arange(10_000) % 7
    found = beam_search(model, inputs, width=5, max_length=4)
    assert model.begun == 1
    assert model.most <= 2**13
    few = beam_search(table, torch.arange(7), width=5, max_length=4)
    assert found.tokens.equal(few.tokens[inputs])
    assert found.scores.equal(few.scores[inputs])
    assert found.optimal.equal(few.optimal[inputs])
    beam_search(model, inputs[:50], width=5, max_length=4, rows_at_once=3)
    model.most = 0
    beam_search(model, inputs[:50], width=5, max_length=4, rows_at_once=23)
    assert model.most == 20


@pytest.mark.parametrize("options", [*OPTIONS, {"width": 2, "rows_at_once": 4}], ids=str)
@pytest.mark.parametrize("eos", [3, None])
def test_partials_are_those_of_the_textbook(options, eos):
    every, model = tables(vocab=4, eos=eos, depth=4, impossible=0.2)
    partials: list[Partial] = []
    watched = beam_search(model, torch.arange(6), max_length=4, on_step=partials.append, **options)
    silent = beam_search(model, torch.arange(6), max_length=4, **options)
    assert watched.tokens.equal(silent.tokens)
    names = {"length_penalty": "penalty"}
    settings = {names.get(name, name): value for name, value in options.items() if name != "rows_at_once"}
    settings = {"k": options["width"], **settings}
    books = [Book(table, eos=eos, max_length=4, **settings) for table in every]
    seen = set()
    for partial in partials:
        assert partial.tokens.shape == (partial.items.size(0), partial.step)
        rows: dict[int, list] = {}
        for item, *row in zip(*(part.tolist() for part in partial[1:]), strict=True):
            rows.setdefault(item, []).append((tuple(row[0]), row[1], row[2]))
        for item, own in rows.items():
            assert same(sorted(own), sorted(books[item].partials[partial.step]))
            seen.add((item, partial.step))
    assert all((item, 1) in seen for item in range(6) if books[item].partials[1])


def test_stream():
    _, model = tables(vocab=4, eos=3, depth=4, impossible=0.2)
    partials: list[Partial] = []
    direct = beam_search(model, torch.arange(6), width=3, max_length=4, on_step=partials.append)
    *streamed, last = stream(beam_search, model, torch.arange(6), width=3, max_length=4)
    assert isinstance(last, Hypotheses)
    assert last.tokens.equal(direct.tokens)
    assert len(streamed) == len(partials)
    for one, other in zip(streamed, partials, strict=True):
        assert isinstance(one, Partial)
        assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def test_a_stream_runs_no_further_than_it_is_read():
    model = Counted(countdown(50))
    steps = 0

    def step(tokens, state):
        nonlocal steps
        steps += 1
        return model.model.step(tokens, state)

    model.step = step
    reading = stream(beam_search, model, torch.tensor([0]), width=2, max_length=60)
    for _ in range(3):
        next(reading)
    assert steps == 3
    reading.close()
    assert steps == 3
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        modes = []

        def on_autocast(tokens, state):
            modes.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
            return model.model.step(tokens, state)

        model.step = on_autocast
        next(stream(beam_search, model, torch.tensor([0]), width=2, max_length=60))
    assert modes == [(True, True)]


def test_errors_come_through_a_stream():
    wrong = TableModel({(): {1: -1.0}, (1,): {1: math.nan}}, vocab_size=3, bos=BOS, eos=2)
    reading = stream(beam_search, wrong, torch.tensor([0]), width=2, max_length=4)
    assert isinstance(next(reading), Partial)
    with pytest.raises(ThalwegError, match="batch item 0 by step"):
        list(reading)
    with pytest.raises(ConfigError, match="`width`"):
        next(stream(beam_search, wrong, torch.tensor([0]), width=0, max_length=4))


def test_groups_differ_more_and_repeat_nothing():
    torch.manual_seed(0)
    model = TableModel.markov((2 * torch.randn(8, 8, dtype=torch.float64)).log_softmax(1), bos=BOS)
    plain = beam_search(model, torch.tensor([0]), width=6, max_length=5)
    diverse = beam_search(model, torch.tensor([0]), width=6, groups=6, diversity=5.0, max_length=5)
    first = [{tokens[0] for tokens in found.sequences()[0]} for found in (plain, diverse)]
    assert len(first[1]) == 6 > len(first[0])
    assert answers(diverse)[0] == answers(beam_search(model, torch.tensor([0]), width=1, max_length=5))[0]
    equal = beam_search(model, torch.tensor([0]), width=6, groups=3, diversity=0.0, max_length=5)
    assert answers(equal) == answers(beam_search(model, torch.tensor([0]), width=2, max_length=5))
    assert equal.tokens.shape == (1, 6, 5)


def test_edges():
    model = TableModel({(): {0: -1.0, 1: -2.0}}, vocab_size=2, bos=BOS, eos=1)
    one = torch.tensor([0])
    for options in ({}, {"groups": 3, "diversity": 1.0}):
        found = beam_search(model, one, width=9, max_length=1, **options)
        assert answers(found) == [((1,), -2.0, True), ((0,), -1.0, False)]
        nothing = beam_search(TableModel({}, vocab_size=3, bos=BOS, eos=2), one, width=3, max_length=4, **options)
        assert answers(nothing) == []
        empty = beam_search(model, one[:0], width=3, max_length=4, return_tree=True, **options)
        assert empty.tokens.shape == (0, 3, 0)
    never = TableModel({(): {1: -1.0}, (1,): {1: -1.0}}, vocab_size=3, bos=BOS, eos=2)
    found = beam_search(never, one, width=4, groups=2, diversity=1.0, max_length=2, min_length=2)
    assert answers(found) == [((1, 1), -2.0, False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 4}, "`min_length` must be an integer of 0 ... `max_length` = 3, got 4"),
        ({"min_length": -1}, "`min_length`"),
        ({"groups": 3}, "`groups` must divide `width` = 4"),
        ({"groups": 0}, "`groups`"),
        ({"diversity": 1.0}, "`diversity` needs `groups`"),
        ({"groups": 2, "diversity": -1.0}, "`diversity` must be at least 0"),
        ({"groups": 2, "diversity": math.nan}, "`diversity` must be at least 0"),
        ({"rows_at_once": 0}, "`rows_at_once`"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        beam_search(countdown(2), torch.tensor([0]), width=4, max_length=3, **options)


def test_a_search_whose_answers_do_not_grow_is_not_streamed() -> None:
    from thalweg.inference import exact_search, stream

    with pytest.raises(ConfigError, match="exact_search, whose answers do not grow"):
        next(stream(exact_search, None, None))  # type: ignore[arg-type]
