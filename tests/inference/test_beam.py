from __future__ import annotations

import math

import pytest
import torch
from search_cases import BOS, SHAPES, Tree, Watched, answers, countdown, same, tables, which
from torch import Tensor

from oracles import search as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import TableModel, beam_search


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
                    best = oracle.all_sequences(table, eos=eos, max_length=max_length)[:1]
                    assert not found.optimal[item] or (penalty == 0 and same(answers(found, item)[:1], best))


@pytest.mark.parametrize(("vocab", "eos", "depth", "impossible"), SHAPES)
def test_a_beam_that_covers_everything_is_exact(vocab, eos, depth, impossible):
    every, model = tables(vocab=vocab, eos=eos, depth=depth, impossible=impossible, seed=1)
    width = vocab**depth + 1
    found = beam_search(model, torch.arange(len(every)), width=width, max_length=depth)
    for item, table in enumerate(every):
        assert same(answers(found, item), oracle.all_sequences(table, eos=eos, max_length=depth)[:width])


def test_the_oracle_can_fail():
    every, model = tables(vocab=4, eos=3, depth=4, impossible=0.0)
    found = beam_search(model, torch.arange(len(every)), width=3, max_length=4)
    settings = {"eos": 3, "width": 3, "k": 3, "max_length": 4}
    assert all(same(answers(found, i), oracle.beam(table, **settings)) for i, table in enumerate(every))
    broken = [same(answers(found, i), oracle.beam(t, broken=True, **settings)) for i, t in enumerate(every)]
    assert not any(broken)


def test_beam_stops_when_nothing_can_overtake():
    stay_or_go = torch.tensor([[0.0, 0.2, 0.8], [0.0, 0.2, 0.8], [0.0, 0.0, 1.0]], dtype=torch.float64)
    model = Watched(TableModel.markov(stay_or_go, bos=BOS, eos=2, logarithms=False), tree=False)
    beam_search(model, which(0), width=3, k=2, max_length=1000)
    assert len(model.rows) == 2
    model.rows.clear()
    beam_search(model, which(0), width=3, k=2, max_length=20, length_penalty=1.0)
    assert len(model.rows) > 2  # a longer one could still have the better mean


def test_width_larger_than_the_vocabulary():
    model = TableModel({(): {0: -1.0, 1: -2.0}}, vocab_size=2, bos=BOS, eos=1)
    found = beam_search(model, which(0), width=9, max_length=1)
    assert found.tokens.shape == (1, 9, 1)
    assert answers(found) == [((1,), -2.0, True), ((0,), -1.0, False)]


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


def test_an_end_far_down_the_last_ranks_is_not_forgotten_by_the_proof() -> None:
    """At the last step eos may stand behind more symbols than the beam looks at; what it ends may still be the best."""
    log = math.log
    table = {
        (): {1: log(0.8), 0: log(0.1), 2: log(0.05), 3: log(0.05)},
        (1,): {**{symbol: log(0.167) for symbol in range(1, 6)}, 0: log(0.165)},
        (2,): {0: log(0.001)},
        (3,): {0: log(0.001)},
    }
    model = TableModel(table, vocab_size=6, bos=5, eos=0)
    found = beam_search(model, torch.tensor([0]), width=2, max_length=2, k=1)
    assert found.sequences() == [[[0]]]
    assert not bool(found.optimal)
