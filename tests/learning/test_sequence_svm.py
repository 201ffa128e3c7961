"""The estimator of sequences: numbers or names of features in, labels out; what is wrong with data is one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.data import Indicators, word_indicators
from thalweg.errors import ConfigError, DataError, NotFittedError
from thalweg.learning import SequenceSVM


def sequences(count=20, seed=0):
    draw = np.random.default_rng(seed)
    y = [draw.integers(3, size=length) for length in draw.integers(1, 7, size=count)]
    return [np.eye(3)[row] + 0.3 * draw.normal(size=(len(row), 3)) for row in y], [
        [f"label {k}" for k in row] for row in y
    ]


def test_it_learns_and_answers_in_labels_of_every_length():
    x, y = sequences()
    svm = SequenceSVM(regularisation=0.01, batch=6).fit(x, y)
    assert svm.classes_ == ["label 0", "label 1", "label 2"]
    assert [len(row) for row in svm.predict(x)] == [len(row) for row in y]
    assert svm.score(*sequences(50, 1)) > 0.9
    assert svm.gap_curve_[-1].gap <= 0.01 * svm.gap_curve_[-1].primal
    assert svm.predict([torch.from_numpy(x[0])]) == [svm.predict(x)[0]]


def test_names_of_features_are_indicators():
    words = [["a", "b", "a"], ["b", "c"]]
    names = [word_indicators(row) for row in words]
    svm = SequenceSVM(regularisation=0.01).fit(names, words)
    assert svm.predict(names) == words
    assert svm.n_features_in_ == len(Indicators.build(names))
    with pytest.raises(DataError, match="must be lists of feature names as in `fit`, got numbers"):
        svm.predict([np.zeros((2, 3))])


def test_a_cost_of_one_is_its_matrix_and_others_are_not():
    x, y = sequences()
    settings = {"regularisation": 0.01, "passes": 3, "tol": 0.0}
    costs = [1.0, 1 - np.eye(3), (1 - np.eye(3)) * [1, 2, 3]]
    ours, same, other = (SequenceSVM(cost=cost, **settings).fit(x, y).gap_curve_[-1].dual for cost in costs)
    assert ours == pytest.approx(same)
    assert abs(ours - other) > 1e-3


def test_a_warm_start_goes_on():
    x, y = sequences()
    settings = {"regularisation": 0.01, "tol": 0.0, "batch": 5}
    svm = SequenceSVM(passes=4, warm_start=True, **settings).fit(x, y)
    first = svm.gap_curve_[-1]
    svm.fit(x, y)
    whole = SequenceSVM(passes=8, **settings).fit(x, y)
    assert svm.gap_curve_[-1].passes == 8
    assert svm.gap_curve_[-1].dual > first.dual
    assert svm.gap_curve_[-1].dual == pytest.approx(whole.gap_curve_[-1].dual)
    with pytest.raises(DataError, match="`warm_start` goes on with the same sequences, got others"):
        svm.fit(x[:10], y[:10])


def test_it_clones_as_scikit_learn_does():
    from sklearn.base import clone

    svm = SequenceSVM(regularisation=0.5, passes=7)
    copy: SequenceSVM = clone(svm)  # pyright: ignore[reportAssignmentType]
    assert copy.get_params() == svm.get_params()
    assert repr(svm) == "SequenceSVM(regularisation=0.5, passes=7)"


def test_bad_input_is_one_line():
    x, y = sequences(4)
    with pytest.raises(NotFittedError, match="call `fit` first"):
        SequenceSVM().predict(x)
    hole = x[2].copy()
    hole[-1, 0] = np.nan
    cases = [
        ([], [], "at least one, got 0 and 0"),
        (x, y[:2], "as many sequences, at least one, got 4 and 2"),
        (x, [*y[:3], [*y[3], "label 0"]], "sequence 3 must have as many positions as labels"),
        (x, [["same"] * len(row) for row in y], "labels must be of two kinds at least, got 'same' alone"),
        (x, [[0] * len(y[0]), *y[1:]], "labels must be alike"),
        ([x[0], x[1], hole, x[3]], y, f"sequence 2 must be finite, got NaN or inf at position {len(hole) - 1}"),
        ([x[0], x[1][:, :2], *x[2:]], y, r"sequence 1 must be \(T, 3\) as in `fit`, got"),
        ([x[0], x[1][:, 0], *x[2:]], y, r"sequence 1 must be \(T, D\)"),
        ([x[0], ["a"] * len(x[1]), *x[2:]], y, "sequence 1 must be numbers"),
    ]
    for xs, ys, told in cases:
        with pytest.raises(DataError, match=told):
            SequenceSVM().fit(xs, ys)
    with pytest.raises(ConfigError, match=r"svm.regularisation must be above 0"):
        SequenceSVM(regularisation=0.0).fit(x, y)
    with pytest.raises(ConfigError, match=r"svm.batch must be at least 1"):
        SequenceSVM(batch=0).fit(x, y)


def test_indicators_are_numbered_once():
    known = Indicators.build([word_indicators(["a", "b"]), word_indicators(["a"])], least=2)
    assert set(known.names) >= {"bias", "word=a", "before="}
    assert "word=b" not in known.names
    tokens, lengths = known.batch([word_indicators(["a", "b"]), word_indicators(["b"])])
    assert lengths.tolist() == [2, 1]
    assert (tokens[1, 1] == -1).all()
    with pytest.raises(DataError, match="at least 9 times, got none"):
        Indicators.build([word_indicators(["a"])], least=9)
    with pytest.raises(DataError, match="distinct names"):
        Indicators(["a", "a"])
    with pytest.raises(DataError, match="at least one position"):
        known.batch([[]])
