from __future__ import annotations

import itertools
import math

import pytest
import torch

from oracles import search as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Ensemble, TableModel, beam_search, greedy

VOCAB, EOS, DEPTH = 4, 3, 4


def members(count, *, seed=0, impossible=0.2):
    """Tables of ``count`` models for three items each."""
    return [
        [
            oracle.random_table(97 * seed + 10 * m + n, vocab=VOCAB, eos=EOS, depth=DEPTH, impossible=impossible)
            for n in range(3)
        ]
        for m in range(count)
    ]


def models(tables):
    return [TableModel(every, vocab_size=VOCAB, bos=0, eos=EOS) for every in tables]


def follows(table, prefix, symbol):
    """Probability of the symbol after the prefix; 0 after what the table holds impossible."""
    possible = all(symbol in table[prefix[:n]] for n, symbol in enumerate(prefix))
    return math.exp(table[prefix].get(symbol, -math.inf)) if possible else 0.0


def joint(tables, weights, mode, *, broken=False):
    """The table of the ensemble of tables, prefix by prefix."""
    result = {}
    prefixes = itertools.chain.from_iterable(
        itertools.product([v for v in range(VOCAB) if v != EOS], repeat=n) for n in range(DEPTH)
    )
    for prefix in prefixes:
        chances = [[follows(table, prefix, v) for v in range(VOCAB)] for table in tables]
        if mode == "mean":
            mixed = [sum(w * c[v] for w, c in zip(weights, chances, strict=True)) for v in range(VOCAB)]
        else:
            mixed = [math.prod(c[v] ** w for w, c in zip(weights, chances, strict=True)) for v in range(VOCAB)]
            mass = sum(mixed) if not broken else 1.0
            mixed = [m / mass if mass else 0.0 for m in mixed]
        result[prefix] = {v: math.log(m) for v, m in enumerate(mixed) if m > 0}
    return result


def same(found, expected, item):
    pairs = list(zip(found.sequences()[item], found.scores[item].tolist(), strict=False))
    return len(pairs) == len(expected) and all(
        tuple(tokens) == h[0] and math.isclose(score, h[1], abs_tol=1e-9)
        for (tokens, score), h in zip(pairs, expected, strict=True)
    )


@pytest.mark.parametrize("mode", ["mean", "product"])
@pytest.mark.parametrize("weights", [None, (1, 3), (0, 2), (0.2, 0.3, 0.5)])
def test_every_sequence_as_by_enumeration(mode, weights):
    tables = members(len(weights) if weights else 2)
    shares = [w / sum(weights) for w in weights] if weights else [0.5, 0.5]
    ensemble = Ensemble(models(tables), weights=weights, mode=mode)
    found = beam_search(ensemble, torch.arange(3), width=400, max_length=DEPTH)
    for item in range(3):
        # A model without weight has no say: its zeros do not forbid.
        used = [(t[item], s) for t, s in zip(tables, shares, strict=True) if s]
        table = joint([t for t, _ in used], [s for _, s in used], mode)
        assert same(found, oracle.all_sequences(table, eos=EOS, max_length=DEPTH), item)
        if mode == "product" and not weights:
            broken = joint([t[item] for t in tables], shares, mode, broken=True)
            assert not same(found, oracle.all_sequences(broken, eos=EOS, max_length=DEPTH), item)


def test_one_model_is_itself_and_batches_equal_one_by_one():
    tables = members(2)
    one = models(tables)[0]
    assert beam_search(Ensemble([one]), torch.arange(3), width=3, max_length=4).scores.equal(
        beam_search(one, torch.arange(3), width=3, max_length=4).scores
    )
    both = Ensemble(models(tables))
    for search in (greedy, lambda m, x, max_length: beam_search(m, x, width=3, max_length=max_length)):
        whole = search(both, torch.arange(3), max_length=4)
        for item in range(3):
            alone = search(both, torch.tensor([item]), max_length=4)
            assert alone.sequences()[0] == whole.sequences()[item]


def test_inputs_for_each_model():
    tables = members(2)
    each = Ensemble(models(tables), inputs="each")
    swapped = torch.tensor([2, 1, 0])
    found = beam_search(each, (torch.arange(3), swapped), width=400, max_length=DEPTH)
    for item in range(3):
        table = joint([tables[0][item], tables[1][2 - item]], [0.5, 0.5], "mean")
        assert same(found, oracle.all_sequences(table, eos=EOS, max_length=DEPTH), item)
    with pytest.raises(ShapeError, match="a tuple of 2, one for each model, got 3"):
        each.begin((swapped, swapped, swapped))
    with pytest.raises(ShapeError, match="got Tensor"):
        each.begin(swapped)
    with pytest.raises(ShapeError, match="same number of items"):
        each.begin((swapped, swapped[:2]))


def test_where_nothing_can_follow():
    first = TableModel({(): {1: 0.0}}, vocab_size=3, bos=0, eos=2)
    other = TableModel({(): {2: 0.0}}, vocab_size=3, bos=0, eos=2)
    found = beam_search(Ensemble([first, other], mode="product"), torch.tensor([0]), width=2, max_length=3)
    assert found.sequences() == [[]]
    found = beam_search(Ensemble([first, other]), torch.tensor([0]), width=2, max_length=3)
    assert found.sequences() == [[[2]]]


def test_low_precision_is_mixed_in_float32():
    low = TableModel.markov(torch.zeros(3, 3, dtype=torch.bfloat16), bos=0, eos=2)
    both = Ensemble([low, low])
    assert both.step(torch.tensor([0]), both.begin(torch.tensor([0])))[0].dtype == torch.float32


def test_wrong_ensembles():
    small, other = TableModel({}, vocab_size=3, bos=0, eos=2), TableModel({}, vocab_size=3, bos=0, eos=1)
    with pytest.raises(ConfigError, match=r"same `eos`, got \[2, 1\]"):
        Ensemble([small, other])
    with pytest.raises(ConfigError, match=r"same `vocab_size`, got \[3, 4\]"):
        Ensemble([small, TableModel({}, vocab_size=4, bos=0, eos=2)])
    for wrong, message in (
        ({"weights": [1.0, 2.0]}, "`weights` must be 1 numbers"),
        ({"weights": [0.0]}, "not all 0"),
        ({"weights": [-1.0]}, "at least 0"),
        ({"mode": "median"}, "`mode`"),
        ({"inputs": "none"}, "`inputs`"),
    ):
        with pytest.raises(ConfigError, match=message):
            Ensemble([small], **wrong)
    with pytest.raises(ConfigError, match="at least one model"):
        Ensemble([])


def test_a_list_of_inputs_is_no_tuple_of_them() -> None:
    model = TableModel.markov([[0.5, 0.5], [0.5, 0.5]], bos=0, logarithms=False)
    both = Ensemble([model, model], inputs="each")
    with pytest.raises(ShapeError, match="tuple of 2"):
        both.begin([torch.zeros(1, dtype=torch.long)] * 2)
