"""Scores of strings against definitions in plain Python, at edge sizes, and with wrong input."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.metrics import all_scores, bootstrap, closest, corpus_bleu, levenshtein, random_draws
from thalweg.errors import ConfigError, DataError, ShapeError
from thalweg.metrics import METRICS, Score, closest_reference, edit_distance, metric_direction, score_strings
from thalweg.metrics import bootstrap as resampling

# Seeded and without a time limit, so that a busy machine changes nothing.
steady = settings(deadline=None, derandomize=True)

# Several characters in one symbol, white space, the empty string and NUL: each is one symbol like any other.
SYMBOLS = ("a", "b", "AE", "ʃ", " ", "\u00a0", "", "\0", "\t")
sequences = st.lists(st.sampled_from(SYMBOLS), max_size=7).map(tuple)
items = st.lists(
    st.tuples(st.lists(sequences, max_size=4), st.lists(sequences, min_size=1, max_size=3)),
    min_size=1,
    max_size=8,
)


def corpus(n, seed=0, symbols="ab c", references=3, k=4):
    """Items whose k-best lists are right now and then."""
    generator = random.Random(seed)

    def word():
        return tuple(generator.choice(symbols) for _ in range(generator.randint(0, 12)))

    gold = [[word() for _ in range(generator.randint(1, references))] for _ in range(n)]
    guesses = [
        [generator.choice(g) if generator.random() < 0.3 else word() for _ in range(generator.randint(0, k))]
        for g in gold
    ]
    return guesses, gold


def values(scores):
    return {key: score.value for key, score in scores.items()}


@steady
@given(sequences, sequences)
def test_edit_distance_is_the_dynamic_programme(a, b):
    assert edit_distance(a, b) == edit_distance(b, a) == levenshtein(a, b)


def test_edit_distance_edges():
    assert edit_distance((), ()) == 0
    assert edit_distance((), ("AE", "AE")) == 2
    assert edit_distance(["a"], ("a",)) == 0
    assert edit_distance(("ab",), ("a", "b")) == 2
    # rapidfuzz alone takes these two for equal, as the hash of "" is the code point of NUL
    assert edit_distance(("",), ("\0",)) == 1
    assert edit_distance(("x",) * 300, ("x",) * 100 + ("y",) * 200) == 200


@steady
@given(sequences, st.lists(sequences, min_size=1, max_size=4))
def test_closest_reference(hypothesis, references):
    index, edits = closest_reference(hypothesis, references)
    assert (edits, len(references[index])) == closest(hypothesis, references)


def test_closest_reference_ties():
    assert closest_reference(tuple("abc"), [tuple("abcdef"), tuple("abx"), tuple("ab")]) == (1, 1)
    # rate 1/2 either way: the fewer edits
    assert closest_reference(tuple("ab"), [tuple("axyb"), tuple("ax")]) == (1, 1)
    assert closest_reference(tuple("bc"), [(), ("a",)]) == (1, 2)
    assert closest_reference((), [("a",), ()]) == (1, 0)
    with pytest.raises(DataError, match="at least one reference"):
        closest_reference(("a",), [])


@steady
@given(items, st.sampled_from(["item", "space"]))
def test_scores_are_their_definitions(pairs, words):
    hypotheses, references = [h for h, _ in pairs], [r for _, r in pairs]
    found = score_strings(hypotheses, references, ks=(1, 2, 9), words=words, resamples=0)
    assert values(found) == pytest.approx(all_scores(hypotheses, references, (1, 2, 9), words), abs=1e-9)
    assert all(score.low == score.value == score.high for score in found.values())


@pytest.mark.parametrize("words", ["item", "space"])
@pytest.mark.parametrize("references", [1, 3])
def test_a_larger_corpus(words, references):
    hypotheses, gold = corpus(200, references=references)
    found = score_strings(hypotheses, gold, ks=(1, 3), words=words, resamples=0)
    assert list(found) == ["accuracy", "cer", "wer", "wer@1", "wer@3", "bleu"]
    assert values(found) == pytest.approx(all_scores(hypotheses, gold, (1, 3), words))
    assert 0 < found["bleu"].value < 100
    assert all(score.n == 200 for score in found.values())


def test_bleu_is_that_of_sacrebleu():
    import sacrebleu

    hypotheses, gold = corpus(100, symbols="abcd", k=1)
    texts = [" ".join(h[0]) if h else "" for h in hypotheses]
    streams = [[" ".join(g[i]) if i < len(g) else None for g in gold] for i in range(3)]
    expected = sacrebleu.corpus_bleu(texts, streams, tokenize="none", force=True).score
    assert score_strings(hypotheses, gold, resamples=0)["bleu"].value == pytest.approx(expected)
    assert corpus_bleu([h[0] if h else () for h in hypotheses], gold) == pytest.approx(expected)


def test_known_figures():
    # kitten / sitting is the textbook distance of 3
    scores = score_strings([[tuple("kitten")], [tuple("aba")]], [[tuple("sitting")], [tuple("aba")]], resamples=0)
    assert values(scores) | {"bleu": 0} == {"accuracy": 0.5, "cer": 0.3, "wer": 0.5, "bleu": 0}
    sentence = score_strings([[tuple("the cat  sat")]], [[tuple("the dog sat down")]], words="space", resamples=0)
    assert sentence["wer"].value == 0.5
    perfect = score_strings([[tuple("abcd")]], [[tuple("abcd")]], resamples=20)
    assert values(perfect) == pytest.approx({"accuracy": 1, "cer": 0, "wer": 0, "bleu": 100})
    assert score_strings([[tuple("abc")]], [[tuple("abc")]], resamples=0)["bleu"].value == 0  # no four tokens


def test_k_best():
    hypotheses = [[("a",), ("b",)], [("b",), ("a",)], [("b",)], []]
    scores = score_strings(hypotheses, [[("a",)]] * 4, ks=(1, 2, 50), resamples=0)
    assert [scores[f"wer@{k}"].value for k in (1, 2, 50)] == [0.75, 0.5, 0.5]
    assert scores["wer"].value == scores["wer@1"].value == 1 - scores["accuracy"].value


@pytest.mark.parametrize("words", ["item", "space"])
def test_empty_sequences(words):
    right = score_strings([[], [()]], [[()], [()]], ks=(1,), words=words, resamples=10)
    assert values(right) == {"accuracy": 1, "cer": 0, "wer": 0, "wer@1": 0, "bleu": 0}
    wrong = score_strings([[], [("a", "b")]], [[("a",)], [()]], words=words, resamples=10)
    assert wrong["accuracy"].value == 0
    assert wrong["cer"].value == 3
    assert all(math.isfinite(x) for s in wrong.values() for x in (s.value, s.low, s.high))


def test_order_of_references_and_of_items_is_irrelevant():
    hypotheses, gold = corpus(60)
    expected = values(score_strings(hypotheses, gold, ks=(2,), resamples=0))
    backwards = score_strings(hypotheses[::-1], [g[::-1] for g in gold[::-1]], ks=(2,), resamples=0)
    assert values(backwards) == pytest.approx(expected)


@pytest.mark.parametrize("words", ["item", "space"])
def test_intervals_on_the_same_draws(words):
    hypotheses, gold = corpus(25)
    draws = np.random.default_rng(5).integers(0, 25, size=(40, 25)).tolist()
    found = score_strings(hypotheses, gold, ks=(2,), words=words, resamples=40, seed=5, level=0.8)
    expected = bootstrap(lambda h, r: all_scores(h, r, (2,), words), hypotheses, gold, draws, level=0.8)
    for key, ends in expected.items():
        assert (found[key].low, found[key].high) == pytest.approx(ends), key


def test_intervals_by_another_generator():
    hypotheses, gold = corpus(30, symbols="abcd")
    found = score_strings(hypotheses, gold, resamples=4000)
    expected = bootstrap(all_scores, hypotheses, gold, random_draws(30, 600, seed=1))
    for key, (low, high) in expected.items():
        slack = 0.15 * (high - low)
        assert abs(found[key].low - low) < slack, key
        assert abs(found[key].high - high) < slack, key


def test_accuracy_interval_is_the_binomial_one():
    hypotheses = [[("a",)]] * 300 + [[("b",)]] * 700
    accuracy = score_strings(hypotheses, [[("a",)]] * 1000, resamples=2000)["accuracy"]
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert accuracy.value == 0.3
    assert accuracy.high - accuracy.low == pytest.approx(2 * half, rel=0.1)


def test_intervals_depend_on_seed_and_level_but_not_on_pieces(monkeypatch):
    hypotheses, gold = corpus(33)
    expected = score_strings(hypotheses, gold, resamples=50, seed=3)
    assert score_strings(hypotheses, gold, resamples=50, seed=3) == expected
    assert score_strings(hypotheses, gold, resamples=50, seed=4) != expected
    narrow = score_strings(hypotheses, gold, resamples=50, seed=3, level=0.5)["cer"]
    assert expected["cer"].low < narrow.low < narrow.high < expected["cer"].high
    for chunk in (1, 100, 33 * 7):
        monkeypatch.setattr(resampling, "_CHUNK", chunk)
        assert score_strings(hypotheses, gold, resamples=50, seed=3) == expected


def test_inputs_are_left_alone_and_lists_do():
    hypotheses, gold = [[["a", "b"]], []], [[("a", "b")], [["c"]]]
    scores = score_strings(hypotheses, gold, resamples=5)
    assert scores["accuracy"].value == 0.5
    assert hypotheses == [[["a", "b"]], []]
    assert gold == [[("a", "b")], [["c"]]]


def test_the_oracle_can_fail():
    """A twin that forgets substitutions and predictions said twice are told from the truth."""

    def no_substitutions(a, b):
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return no_substitutions(a[1:], b[1:])
        return 1 + min(no_substitutions(a[1:], b), no_substitutions(a, b[1:]))

    assert no_substitutions(tuple("cat"), tuple("cut")) != levenshtein(tuple("cat"), tuple("cut"))
    hypotheses, gold = corpus(40, k=1)
    broken = [[h[0] + h[0]] if h else [] for h in hypotheses]
    truth = all_scores(hypotheses, gold)
    for key, value in values(score_strings(broken, gold, resamples=0)).items():
        assert value != pytest.approx(truth[key]), key


@pytest.mark.parametrize(
    ("hypotheses", "references", "error", "message"),
    [
        ([], [], DataError, "at least one item"),
        ([[("a",)]], [], ShapeError, "got 1 and 0"),
        ([[("a",)]], [[]], DataError, "item 0 must have at least one reference"),
        (["ab"], [[("a", "b")]], ShapeError, r"`hypotheses\[0\]` must be .* got 'ab'; split"),
        ([["ab"]], [[("a", "b")]], ShapeError, r"`hypotheses\[0\]`"),
        ([[("a", "b")]], [("a", "b")], ShapeError, r"`references\[0\]`"),
        ([[], []], [[("a",)], ["a"]], ShapeError, r"`references\[1\]`"),
    ],
)
def test_wrong_items(hypotheses, references, error, message):
    with pytest.raises(error, match=message) as caught:
        score_strings(hypotheses, references)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ks": (0,)}, "`ks` must .* got 0"),
        ({"ks": (1.5,)}, "got 1.5"),
        ({"words": "spaces"}, "did you mean `space`"),
        ({"resamples": -1}, "`resamples` must be 0 or more, got -1"),
        ({"level": 95}, "`level` must lie between 0 and 1, got 95"),
        ({"level": 0}, "got 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        score_strings([[("a",)]], [[("a",)]], **options)


def test_score_prints_and_travels():
    score = Score("CER", 0.20717, 0.199, 0.21512, 10, higher_is_better=False)
    assert str(score) == "CER 0.2072 [0.1990, 0.2151]"
    assert str(dataclasses.replace(score, name="PER")) == "PER 0.2072 [0.1990, 0.2151]"
    assert str(dataclasses.replace(score, low=0.20717, high=0.20717)) == "CER 0.2072"
    assert str(Score("BLEU", 34.567, 33.1, 35.25, 10, True)) == "BLEU 34.57 [33.10, 35.25]"
    assert Score(**json.loads(json.dumps(score.to_json()))) == score


def test_names_and_directions():
    scores = score_strings([[tuple("abcd")]], [[tuple("abcd")]], ks=(5,), resamples=3)
    assert [s.name for s in scores.values()] == ["accuracy", "CER", "WER", "WER@5", "BLEU"]
    for key, score in scores.items():
        json.dumps(score.to_json())
        assert score.higher_is_better is metric_direction(key) is (key in ("accuracy", "bleu"))
    assert set(METRICS) == set(scores) - {"wer@5"}
    assert metric_direction("loss") is False
    for wrong in ("acuracy", "wer@0", "wer@", "wer@x", "WER@٣", ""):
        with pytest.raises(ConfigError, match=f"got `{wrong}`"):
            metric_direction(wrong)
    with pytest.raises(ConfigError, match="did you mean `accuracy`"):
        metric_direction("acuracy")
