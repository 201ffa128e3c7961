"""Scores of classes against definitions in plain Python, calibration, intervals, edge sizes, wrong input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from oracles import classification as plain
from thalweg.errors import ConfigError, DataError, ShapeError
from thalweg.metrics.classification import (
    TEMPERATURES,
    ClassScore,
    class_scores,
    confusion_matrix,
    reliability,
    score_classes,
    temperature_scale,
)
from thalweg.metrics.strings import Score, metric_direction


def case(n, classes, seed=0, sharp=2.0):
    """Log-probabilities that know the class about half of the time."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, n)
    scores = sharp * generator.normal(size=(n, classes))
    scores[np.arange(n), labels] += sharp
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return logs, labels


@pytest.mark.parametrize(("n", "classes"), [(1, 1), (1, 3), (7, 2), (60, 6), (40, 30)])
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_scores_are_their_definitions(n, classes, bins):
    logs, labels = case(n, classes)
    scores = score_classes(torch.from_numpy(logs), torch.from_numpy(labels), ks=(1, 2, 50), bins=bins, resamples=0)
    rows = logs.tolist()
    expected = {
        "accuracy": plain.accuracy(rows, labels),
        "accuracy@1": plain.accuracy(rows, labels),
        "accuracy@2": plain.accuracy_at(rows, labels, 2),
        "accuracy@50": 1.0,
        "f1": plain.macro_f1(rows, labels.tolist()),
        "nll": plain.nll(rows, labels),
        "brier": plain.brier(rows, labels),
        "ece": plain.ece(rows, labels, bins),
    }
    assert {key: score.value for key, score in scores.items()} == pytest.approx(expected, abs=1e-12)
    assert all(score.n == n and score.low == score.high == score.value for score in scores.values())
    assert reliability(logs, labels, bins=bins).ece == pytest.approx(expected["ece"], abs=1e-12)


def test_the_oracle_can_fail():
    logs, labels = case(60, 6)
    shifted = np.roll(labels, 1)
    scores = score_classes(logs, shifted, resamples=0)
    for key, oracle in (("accuracy", plain.accuracy), ("nll", plain.nll), ("brier", plain.brier)):
        assert scores[key].value != pytest.approx(oracle(logs.tolist(), labels), abs=1e-3)


def test_ties_go_to_the_lower_class():
    logs = np.log([[0.4, 0.4, 0.2]])
    assert score_classes(logs, [0], resamples=0)["accuracy"].value == 1
    assert score_classes(logs, [1], ks=(2,), resamples=0)["accuracy"].value == 0
    assert score_classes(logs, [1], ks=(2,), resamples=0)["accuracy@2"].value == 1


def test_intervals_are_those_of_scores_of_resampled_items():
    """Every resample is scored again from its own rows by the oracle."""
    n, resamples, seed = 25, 60, 3
    logs, labels = case(n, 4)
    scores = score_classes(logs, labels, ks=(2,), bins=5, resamples=resamples, seed=seed, level=0.8)
    draws = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    oracles = {
        "accuracy": plain.accuracy,
        "accuracy@2": lambda r, y: plain.accuracy_at(r, y, 2),
        "f1": plain.macro_f1,
        "nll": plain.nll,
        "brier": plain.brier,
        "ece": lambda r, y: plain.ece(r, y, 5),
    }
    for key, oracle in oracles.items():
        values = [oracle(logs[rows].tolist(), labels[rows].tolist()) for rows in draws]
        assert (scores[key].low, scores[key].high) == pytest.approx(tuple(np.quantile(values, (0.1, 0.9))), abs=1e-9)
        assert scores[key].low < scores[key].high


def test_intervals_are_reproducible_and_in_pieces(monkeypatch):
    from thalweg.metrics import bootstrap as module

    logs, labels = case(30, 3)
    once = score_classes(logs, labels, resamples=40, seed=1)
    assert once == score_classes(logs, labels, resamples=40, seed=1)
    assert once != score_classes(logs, labels, resamples=40, seed=2)
    monkeypatch.setattr(module, "_CHUNK", 100)
    pieces = score_classes(logs, labels, resamples=40, seed=1)
    for key, score in once.items():
        assert (pieces[key].low, pieces[key].high) == pytest.approx((score.low, score.high))


def test_impossible_right_classes():
    logs = np.array([[0.0, -math.inf], [0.0, -math.inf], [math.log(0.5), math.log(0.5)]])
    scores = score_classes(logs, [0, 1, 0], resamples=50)
    assert scores["nll"].value == math.inf
    assert scores["nll"].low < math.inf == scores["nll"].high
    assert scores["brier"].value == pytest.approx((0 + 2 + 0.5) / 3)
    with pytest.raises(DataError, match="probability above 0"):
        temperature_scale(logs, [0, 1, 0])
    assert temperature_scale(np.array([[0.0, -math.inf], [-0.5, math.log(1 - math.exp(-0.5))]]), [0, 1]) > 0


def test_scores_are_scores():
    logs, labels = case(20, 3)
    scores = score_classes(logs, labels, ks=(2,), resamples=20)
    assert list(scores) == ["accuracy", "accuracy@2", "f1", "nll", "brier", "ece"]
    assert json.loads(json.dumps(scores["nll"].to_json())) == scores["nll"].to_json()
    for key, score in scores.items():
        assert isinstance(score, Score)
        assert score.higher_is_better is metric_direction(key) is (key[0] in "af")
    for wrong in ("accuracy@0", "top", "nll@2"):
        with pytest.raises(ConfigError, match="must be one that is measured"):
            metric_direction(wrong)


def test_confusions_and_class_scores():
    matrix = confusion_matrix(torch.tensor([0, 1, 1, 2]), [0, 0, 1, 1], classes=4)
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    table = class_scores(matrix, ["a", "b", "c", "d"])
    assert table[0] == ClassScore("a", 1.0, 0.5, pytest.approx(2 / 3), 2, 1)
    assert table[1] == ClassScore("b", 0.5, 0.5, 0.5, 2, 2)
    assert table[2] == ClassScore("c", 0.0, 0.0, 0.0, 0, 1)
    assert table[3] == ClassScore("d", 0.0, 0.0, 0.0, 0, 0)
    assert ClassScore(**table[0].to_json()) == table[0]
    assert [row.name for row in class_scores(matrix)] == ["0", "1", "2", "3"]
    logs, labels = case(60, 5)
    matrix = confusion_matrix(logs.argmax(1), labels, 5)
    present = [row.f1 for row in class_scores(matrix) if row.support or row.predicted]
    assert np.mean(present) == pytest.approx(score_classes(logs, labels, resamples=0)["f1"].value)
    assert confusion_matrix([], [], 2).tolist() == [[0, 0], [0, 0]]


def test_reliability_puts_edges_below():
    table = reliability(np.log([[0.5, 0.5], [1.0 - 1e-16, 1e-16], [0.75, 0.25]]), [0, 0, 1], bins=4)
    assert table.counts.tolist() == [0, 1, 1, 1]
    assert table.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert table.gaps.tolist() == pytest.approx([0, 0.5, 0.75, 0])
    assert table.largest == pytest.approx(0.75)
    assert json.dumps(table.to_json())
    assert table.to_json()["confidence"][0] is None


@pytest.mark.parametrize(("seed", "sharp", "classes"), [(0, 0.5, 2), (1, 1.0, 6), (2, 4.0, 6), (3, 2.0, 20)])
def test_temperature_is_the_best_one(seed, sharp, classes):
    logs, labels = case(50, classes, seed, sharp)
    found = temperature_scale(logs, labels)
    assert found == pytest.approx(plain.best_temperature(logs.tolist(), labels.tolist()), rel=1e-4)
    here = plain.tempered_nll(logs.tolist(), labels, found)
    for near in (0.999, 1.001):
        assert here <= plain.tempered_nll(logs.tolist(), labels, found * near)


def test_temperature_undoes_a_temperature():
    logs, labels = case(80, 4)
    scaled = 3 * logs - np.log(np.exp(3 * logs).sum(1, keepdims=True))
    assert temperature_scale(scaled, labels) == pytest.approx(3 * temperature_scale(logs, labels), rel=1e-9)


def test_temperature_at_the_ends():
    sure = np.log([[0.9, 0.1], [0.2, 0.8]])
    assert temperature_scale(sure, [0, 1]) == TEMPERATURES[0]
    assert temperature_scale(sure, [1, 0]) == TEMPERATURES[1]
    assert temperature_scale(np.log([[0.5, 0.5]]), [0]) in TEMPERATURES
    assert temperature_scale(np.zeros((2, 1)), [0, 0]) in TEMPERATURES


@pytest.mark.parametrize(
    ("logs", "labels", "error", "words"),
    [
        (np.zeros(3), [0], ShapeError, r"must be \(N, C\)"),
        (np.log([[0.5, 0.5]]), [2], ShapeError, "from 0 to 1, got 2"),
        (np.log([[0.5, 0.5]]), [-1], ShapeError, "got -1"),
        (np.log([[0.5, 0.5]]), [0, 1], ShapeError, r"must be \(1,\)"),
        (np.log([[0.5, 0.5]]), [0.0], ShapeError, "whole numbers"),
        (np.zeros((0, 3)), np.zeros(0, dtype=int), DataError, "at least one item"),
        ([[1.0, 2.0]], [0], ShapeError, "log_softmax"),
        ([[math.nan, 0.0]], [0], ShapeError, "got NaN"),
    ],
)
def test_wrong_input(logs, labels, error, words):
    for function in (score_classes, reliability, temperature_scale):
        with pytest.raises(error, match=words):
            function(logs, labels)


def test_wrong_options():
    logs, labels = case(4, 2)
    for changes, words in (
        ({"ks": (0,)}, "ks"),
        ({"bins": 0}, "bins"),
        ({"resamples": -1}, "resamples"),
        ({"level": 1.0}, "level"),
    ):
        with pytest.raises(ConfigError, match=words):
            score_classes(logs, labels, **changes)
    with pytest.raises(ShapeError, match="each of 2 classes"):
        class_scores(np.zeros((2, 2)), ["a"])
    with pytest.raises(ShapeError, match=r"must be \(C, C\)"):
        class_scores(np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="one class for each of 2 labels"):
        confusion_matrix([0], [0, 1], 2)


def test_many_classes_cost_no_more_memory_than_the_rows():
    logs = np.full((200, 1000), -math.log(1000))
    scores = score_classes(logs, np.arange(200), resamples=200)
    assert scores["nll"].value == pytest.approx(math.log(1000))
    assert scores["ece"].value == pytest.approx(abs(1 / 200 - 1 / 1000))
