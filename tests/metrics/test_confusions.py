"""Alignments are shortest, confusions add up to the edits, and the worst items come first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.metrics import closest, levenshtein
from thalweg.errors import ConfigError, DataError, ShapeError
from thalweg.metrics import Confusion, Mistake, align, confusions, score_strings, worst

# Seeded and without a time limit, so that a busy machine changes nothing.
steady = settings(deadline=None, derandomize=True)

sequences = st.lists(st.sampled_from(("a", "b", "AE", " ", "", "\0")), max_size=7).map(tuple)
items = st.lists(
    st.tuples(st.lists(sequences, max_size=2), st.lists(sequences, min_size=1, max_size=3)),
    min_size=1,
    max_size=8,
)


def is_shortest(pairs, hypothesis, reference):
    """Both sides are spelt in order, no pair is empty, and the cost is the edit distance."""
    gold = tuple(g for g, _ in pairs if g is not None)
    predicted = tuple(p for _, p in pairs if p is not None)
    cost = sum(g != p for g, p in pairs)
    whole = (gold, predicted) == (tuple(reference), tuple(hypothesis)) and (None, None) not in pairs
    return whole and cost == levenshtein(hypothesis, reference)


@steady
@given(sequences, sequences)
def test_alignment_is_shortest(hypothesis, reference):
    pairs = align(hypothesis, reference)
    assert is_shortest(pairs, hypothesis, reference)
    assert align(hypothesis, reference) == pairs


def test_alignment_edges():
    assert align((), ()) == []
    assert align((), ("a",)) == [("a", None)]
    assert align(("a",), ()) == [(None, "a")]
    assert align(("\0",), ("",)) == [("", "\0")]
    assert align(tuple("kot"), tuple("kat")) == [("k", "k"), ("a", "o"), ("t", "t")]


def test_the_oracle_can_fail():
    """A twin that pairs by position is told from a shortest alignment."""
    hypothesis, reference = tuple("bcda"), tuple("abcd")
    by_position = list(zip(reference, hypothesis, strict=True))
    assert not is_shortest(by_position, hypothesis, reference)
    assert not is_shortest([("a", "a")], ("a",), ("b",))
    assert is_shortest(align(hypothesis, reference), hypothesis, reference)


@steady
@given(items)
def test_confusions_add_up(pairs):
    hypotheses, references = [h for h, _ in pairs], [r for _, r in pairs]
    found = confusions(hypotheses, references, examples=2)
    edits = [closest(h[0] if h else (), r)[0] for h, r in pairs]
    assert sum(c.count for c in found) == sum(edits)
    assert all(c.gold != c.predicted and c.count > 0 for c in found)
    assert len({(c.gold, c.predicted) for c in found}) == len(found)
    assert [c.count for c in found] == sorted((c.count for c in found), reverse=True)
    assert all(1 <= len(c.examples) <= 2 and all(edits[i] for i in c.examples) for c in found)
    mistakes = worst(hypotheses, references)
    assert Counter({m.item: m.edits for m in mistakes}) == Counter({i: e for i, e in enumerate(edits) if e})
    assert [m.edits for m in mistakes] == sorted(filter(None, edits), reverse=True)


def test_confusions_by_hand():
    hypotheses = [
        [tuple("kot")],
        [tuple("kots")],
        [tuple("xat")],
        [tuple("ka")],
        [tuple("kat")],
        [],
        [tuple("kotko")],
    ]
    references = [[tuple("kat")]] * 5 + [[("k",)], [tuple("katka"), tuple("z")]]
    assert confusions(hypotheses, references, examples=2) == [
        Confusion("a", "o", 4, (0, 1)),
        Confusion("k", "x", 1, (2,)),
        Confusion("k", None, 1, (5,)),
        Confusion("t", None, 1, (3,)),
        Confusion(None, "s", 1, (1,)),
    ]
    edits = sum(c.count for c in confusions(hypotheses, references))
    assert score_strings(hypotheses, references, resamples=0)["cer"].value == pytest.approx(edits / 21)


def test_nothing_wrong():
    assert confusions([[("a",)]], [[("b",), ("a",)]]) == []
    assert worst([[("a",)]], [[("b",), ("a",)]]) == []
    assert confusions([[("a",)]], [[("b",)]], examples=0) == [Confusion("b", "a", 1, ())]


def test_worst_by_hand():
    hypotheses = [[("a",)], [("b",)], [tuple("xy"), tuple("ab")], [], [["b"]]]
    references = [[("a",)], [("a", "b")], [tuple("ab")], [("c",)], [["c"]]]
    ranked = worst(hypotheses, references)
    assert ranked[0] == Mistake(2, 2, ("x", "y"), ("a", "b"))
    assert ranked[1] == Mistake(3, 1, (), ("c",))
    assert [m.item for m in ranked] == [2, 3, 4, 1]
    assert worst(hypotheses, references, limit=2) == ranked[:2]
    assert worst(hypotheses, references, limit=0) == []


@pytest.mark.parametrize("function", [confusions, worst])
def test_wrong_items(function):
    with pytest.raises(DataError, match="at least one item"):
        function([], [])
    with pytest.raises(ShapeError, match="got 2 and 1"):
        function([[], []], [[("a",)]])
    with pytest.raises(DataError, match="item 1 must have"):
        function([[], []], [[("a",)], []])
    with pytest.raises(ShapeError, match="split it first"):
        function([["ab"]], [[("a", "b")]])


def test_wrong_options():
    with pytest.raises(ConfigError, match="`examples` must be 0 or more, got -1"):
        confusions([[]], [[("a",)]], examples=-1)
    with pytest.raises(ConfigError, match="`limit` must be 0 or more, got -1"):
        worst([[]], [[("a",)]], limit=-1)
