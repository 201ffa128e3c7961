"""Differences of models on the same items: against plain NumPy on the same draws, and sacrebleu called by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from oracles.comparison import closed_holm, indices, paired
from oracles.metrics import error_rate, split_words
from thalweg.errors import ConfigError, ShapeError
from thalweg.metrics import Means, Measure, Score, compare_tallies, score_strings, scored
from thalweg.metrics.classification import ClassTally
from thalweg.metrics.comparison import holm
from thalweg.metrics.strings import StringTally

WORDS = ["the", "a", "cat", "dog", "sees,", "eats", "big", "red.", "never", "house", "(old)", "it's"]


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def spoilt(texts: list[str], rate: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) if rng.random() < rate else word for word in text.split()) for text in texts]


def tally(hypotheses: list[str], gold: list[list[str]], **options) -> StringTally:
    options = {"words": "space", "text": "".join, **options}
    return StringTally([[tuple(text)] for text in hypotheses], [[tuple(t) for t in each] for each in gold], **options)


def streams(gold: list[list[str]]) -> list[list[str | None]]:
    """References as sacrebleu takes them: one list for each place."""
    return [[each[place] if place < len(each) else None for each in gold] for place in range(max(map(len, gold)))]


def by_hand(metric, key: str):
    def score(items: list[tuple[str, list[str]]]) -> float:
        texts, gold = [text for text, _ in items], streams([each for _, each in items])
        return metric().corpus_score(texts, gold).score

    return key, score


def words_wrong(items):
    return error_rate([split_words(text) for text, _ in items], [[split_words(g) for g in each] for _, each in items])


ORACLES = dict(
    [
        by_hand(lambda: BLEU(tokenize="none"), "bleu"),
        by_hand(lambda: BLEU(tokenize="13a", force=True), "bleu-13a"),
        by_hand(CHRF, "chrf"),
        (
            "cer",
            lambda items: error_rate([tuple(t) for t, _ in items], [[tuple(g) for g in each] for _, each in items]),
        ),
        ("wer", words_wrong),
        ("accuracy", lambda items: sum(text in gold for text, gold in items) / len(items)),
    ]
)


def test_differences_on_the_same_draws():
    gold = [[text] for text in sentences(25)]
    first, other = (spoilt([g[0] for g in gold], rate, seed) for rate, seed in ((0.4, 1), (0.25, 2)))
    found = compare_tallies(tally(first, gold), [tally(other, gold)], ORACLES, resamples=40, seed=3)[0]
    rows = indices(25, 40, 3)
    for key, score in ORACLES.items():
        a, b = (list(zip(texts, gold, strict=True)) for texts in (first, other))
        expected = paired(score, a, b, rows)
        mine = found[key]
        assert (mine.value, mine.low, mine.high, mine.p) == pytest.approx(expected, abs=1e-9), key
        assert mine.corrected == mine.p
        assert mine.better is ((mine.value > 0) == (key not in ("cer", "wer")))
        broken = paired(score, a, a[1:] + a[:1], rows)
        assert broken != pytest.approx(expected, abs=1e-9), "other answers give other figures"


@pytest.mark.parametrize("several", [False, True])
def test_figures_and_signatures_are_sacrebleus(several):
    gold = [[text, *sentences(n % 3 if several else 0, seed=n)] for n, text in enumerate(sentences(30))]
    texts = spoilt([each[0] for each in gold], 0.3, 5)
    texts[4] = ""
    found = score_strings(
        [[tuple(text)] if text else [] for text in texts],
        [[tuple(g) for g in each] for each in gold],
        words="space",
        text="".join,
        resamples=20,
    )
    assert list(found) == ["accuracy", "cer", "wer", "bleu", "bleu-13a", "chrf"]
    kinds = {"bleu": BLEU(tokenize="none"), "bleu-13a": BLEU(tokenize="13a", force=True), "chrf": CHRF()}
    for key, metric in kinds.items():
        assert found[key].value == pytest.approx(metric.corpus_score(texts, streams(gold)).score)
        assert found[key].signature == metric.get_signature().format()
        assert ("nrefs:var" in found[key].signature) is several
        assert found[key].low <= found[key].value <= found[key].high
        assert Score(**found[key].to_json()) == found[key]
        assert found[key].digits == 2
    assert found["bleu"].value != pytest.approx(found["bleu-13a"].value), "commas and brackets are words of their own"
    assert "signature" not in found["cer"].to_json()


def test_single_words_have_chrf_but_no_bleu_of_words():
    found = score_strings([[tuple("thalweg")]], [[tuple("talweg")]], text="".join, resamples=0)
    assert list(found) == ["accuracy", "cer", "wer", "bleu", "chrf"]
    assert found["chrf"].value == pytest.approx(CHRF().corpus_score(["thalweg"], [["talweg"]]).score)


def test_known_differences():
    told = {"right": Measure("right", True)}
    rng = np.random.default_rng(0)
    base = rng.random(400) < 0.5
    same, noise = Means({"right": base}, told), Means({"right": rng.random(400) < 0.5}, told)
    better = Means({"right": base | (rng.random(400) < 0.2)}, told)
    equal, chance, clear = (each["right"] for each in compare_tallies(same, [same, noise, better], ["right"]))
    assert (equal.value, equal.low, equal.high, equal.p, equal.better) == (0, 0, 0, 1, None)
    assert chance.p > 0.05
    assert chance.low < 0 < chance.high
    assert clear.p == 1 / 1001, "never nought"
    assert 0 < clear.low < clear.value < clear.high
    assert clear.corrected == pytest.approx(3 / 1001)
    # A paired interval is that of the differences, far narrower than those of two models apart.
    apart = scored(better)["right"]
    assert clear.high - clear.low < 0.8 * (apart.high - apart.low)


def test_p_values_are_level_under_the_null():
    """Two models that are equally good: at the 10 % level about a tenth is called different."""
    rng, told = np.random.default_rng(1), {"x": Measure("x", True)}
    ps = []
    for _ in range(300):
        first, other = (Means({"x": rng.normal(size=60)}, told) for _ in range(2))
        ps.append(compare_tallies(first, [other], ["x"], resamples=200)[0]["x"].p)
    assert 0.05 < np.mean(np.array(ps) < 0.1) < 0.17
    assert np.mean(ps) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("ps", [[0.01], [0.01, 0.04, 0.03], [0.5, 0.5], [0.2, 0.001, 0.03, 0.03, 0.9], []])
def test_holm_is_the_closure_of_bonferroni(ps):
    assert holm(ps) == pytest.approx(closed_holm(ps))
    assert closed_holm([0.01, 0.04, 0.03]) != [0.03, 0.12, 0.09], "plain Bonferroni is another correction"


def test_classes_and_infinite_scores():
    labels = [0, 1] * 20
    logs = np.log(np.where(np.eye(2)[labels], 0.9, 0.1))
    wrong = logs.copy()
    wrong[:10] = wrong[:10, ::-1]
    first, other = ClassTally(wrong, labels), ClassTally(logs, labels)
    found = compare_tallies(first, [other], first.measures)[0]
    assert found["accuracy"].value == 0.25
    assert found["nll"].better
    assert found["accuracy"].p < 0.01
    with np.errstate(divide="ignore"):
        never = ClassTally(np.log(np.eye(2)[[1 - label for label in labels]]), labels)
    lost = compare_tallies(first, [never, other], ["nll"])
    assert lost[0]["nll"].value == math.inf
    assert math.isnan(lost[0]["nll"].p)
    assert lost[0]["nll"].to_json()["p"] is None
    assert lost[1]["nll"].corrected == lost[1]["nll"].p, "what cannot be tested is no test"


def test_infinite_items_of_means():
    values = [1.0, math.inf, 3.0]
    score = scored(Means({"nll": values}, {"nll": Measure("NLL", False)}))["nll"]
    assert score.value == score.high == math.inf
    assert not math.isnan(score.low)


def test_mistakes():
    told = {"x": Measure("x", True)}
    two, three = Means({"x": [1, 2]}, told), Means({"x": [1, 2, 3]}, told)
    with pytest.raises(ShapeError, match="the same items, got 2, 3 of them"):
        compare_tallies(two, [three], ["x"])
    with pytest.raises(ConfigError, match="`resamples` of at least 1"):
        compare_tallies(two, [two], ["x"], resamples=0)
    with pytest.raises(ConfigError, match="level"):
        compare_tallies(two, [two], ["x"], level=1.5)
