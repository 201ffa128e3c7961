"""The certificate of a large margin, of our machines and of scikit-learn's."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_iris, make_moons
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.svm import SVC, SVR, LinearSVC, NuSVC

from oracles import kernel_machines as oracle
from thalweg.diagnostics import kkt_report
from thalweg.energies import RBF, KernelSVC, KernelSVR, KKTReport, certify, certify_regression
from thalweg.errors import ConfigError, NotFittedError, ShapeError

IRIS, KINDS = load_iris(return_X_y=True)
MOONS, SIDES = make_moons(50, noise=0.25, random_state=1)
T = np.where(SIDES == 1, 1.0, -1.0)


@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
def test_any_svc_of_scikit_learn(kernel):
    for X, y in ((MOONS, SIDES), (IRIS, KINDS)):
        machine = SVC(kernel=kernel, C=2.0, tol=1e-4, gamma=0.1, class_weight="balanced").fit(X, y)
        report = kkt_report(machine, X, y)
        classes = len(machine.classes_)
        assert len(report.pairs) == classes * (classes - 1) // 2
        if kernel != "sigmoid":  # which is no inner product: there is no optimum to be at
            assert report.holds, str(report)
            assert 0 <= report.gap < 0.01
        assert sorted({place for pair in report.pairs for place in pair.support}) == sorted(machine.support_)


def test_ours_and_theirs_agree():
    for X, y in ((MOONS, SIDES), (IRIS, KINDS)):
        ours = KernelSVC("rbf").fit(X, y)
        theirs = SVC().fit(X, y)
        one, other = kkt_report(ours), kkt_report(theirs, X, y)
        for a, b in zip(one.pairs, other.pairs, strict=True):
            assert a.classes == b.classes
            assert np.array_equal(a.support, b.support)
            assert (a.margin, a.primal, a.dual) == pytest.approx((b.margin, b.primal, b.dual), rel=1e-5)
            assert [each.name for each in a.conditions] == [each.name for each in b.conditions]


def test_objectives_are_those_of_the_definition():
    machine = KernelSVC(RBF(0.5), C=3.0, tolerance=1e-6).fit(MOONS, SIDES)
    pair = machine.kkt_report().only
    alpha, objective = oracle.dual(rbf_kernel(MOONS, gamma=0.5), T, np.full(50, 3.0))
    assert pair.dual == pytest.approx(objective, rel=1e-6)
    f = machine.decision_function(MOONS)
    signed = np.zeros(50)
    signed[machine.support_] = machine.dual_coef_[0]
    squared = signed @ rbf_kernel(MOONS, gamma=0.5) @ signed
    assert pair.primal == pytest.approx(squared / 2 + 3.0 * np.maximum(0, 1 - T * f).sum())
    assert pair.margin == pytest.approx(2 / math.sqrt(squared))
    assert pair.gap == pytest.approx(0.0, abs=1e-3)
    assert alpha.sum() == pytest.approx(np.abs(signed).sum(), rel=1e-3)


def test_weights_gram_matrices_and_sparse_tables():
    weights = np.random.default_rng(0).uniform(0, 2, size=50)
    machine = SVC(gamma=0.5).fit(MOONS, SIDES, sample_weight=weights)
    assert kkt_report(machine, MOONS, SIDES, sample_weight=weights).holds
    assert not kkt_report(machine, MOONS, SIDES).holds  # bounds of all points the same
    weights[::3] = 0.0
    machine = SVC(gamma=0.5).fit(MOONS, SIDES, sample_weight=weights)
    report = kkt_report(machine, MOONS, SIDES, sample_weight=weights)
    assert report.holds
    assert not any(place % 3 == 0 for place in report.only.support)
    G = rbf_kernel(MOONS, gamma=0.5)
    assert kkt_report(SVC(kernel="precomputed").fit(G, SIDES), G, SIDES).holds
    sparse = scipy.sparse.csr_matrix(IRIS)
    assert kkt_report(SVC(kernel="linear").fit(sparse, KINDS), sparse, KINDS).holds


def test_each_condition_can_fail():
    """At an optimum every condition holds; a change of one number is seen by the conditions that it breaks."""
    machine = KernelSVC(RBF(0.5), C=1.0, tolerance=1e-6).fit(MOONS, SIDES)
    f, alpha = machine.decision_function(MOONS), np.zeros(50)
    alpha[machine.support_] = np.abs(machine.dual_coef_[0])
    b, C = float(machine.intercept_[0]), np.ones(50)

    def missed(alpha=alpha, f=f, C=C, **more):
        report = certify(T, alpha, C, f, b, tolerance=1e-4, **more)
        return {each.name for each in report.conditions if not each.holds}

    assert missed() == set()
    at_bound, free = int(np.argmax(alpha)), int(np.argmax((alpha > 0.01) & (alpha < 0.99)))
    idle = int(np.argmax(np.where(alpha == 0, T * f, -np.inf)))
    changed = alpha.copy()
    changed[idle] = -0.1
    assert "a >= 0" in missed(changed)
    changed[idle] = 0.1
    assert {"a (t f(x) - 1 + slack) = 0", "sum a t = 0"} <= missed(changed)
    changed = alpha.copy()
    changed[at_bound] = 1.1
    assert "a <= C" in missed(changed)
    moved = f.copy()
    moved[free] -= 0.1 * T[free]
    assert {"t f(x) >= 1 where a < C", "(C - a) slack = 0"} <= missed(f=moved)
    w = np.array([1.0, 2.0])
    assert missed(weights=(w, w + 0.1)) == {"w = sum a t x"}
    wrong = f.copy()
    wrong[0] = np.nan
    assert not certify(T, alpha, C, wrong, b).holds


def test_a_machine_that_was_stopped_is_not_at_its_optimum():
    with pytest.warns(UserWarning, match="terminated early"):
        machine = SVC(gamma=0.5, C=10.0, max_iter=5).fit(MOONS, SIDES)
    report = kkt_report(machine, MOONS, SIDES)
    assert not report.holds
    assert report.gap > 0.1
    assert report.worst.residual > report.worst.allowed
    assert "NO" in str(report)


def test_the_table():
    report = kkt_report(KernelSVC("linear").fit(IRIS, KINDS))
    lines = str(report).splitlines()
    assert len(lines) == 3 * (2 + 7)
    assert lines[0].startswith("1 | 0: margin ")
    assert len({line.index("allowed") for line in lines if "allowed" in line}) == 1
    rows = report.rows()
    assert {tuple(row) for row in rows} == {("classes", "condition", "residual", "allowed", "at", "holds")}
    with pytest.raises(ValueError, match="3 pairs"):
        _ = report.only
    assert isinstance(report, KKTReport)


@pytest.mark.parametrize(
    ("machine", "X", "y", "error", "message"),
    [
        (LinearSVC().fit(MOONS, SIDES), MOONS, SIDES, ConfigError, "got LinearSVC"),
        (NuSVC().fit(MOONS, SIDES), MOONS, SIDES, ConfigError, "got NuSVC"),
        (SVC(), MOONS, SIDES, NotFittedError, "call `fit` first"),
        (SVC().fit(MOONS, SIDES), None, None, ShapeError, "do not remember their training set: pass X and y"),
        (SVC().fit(MOONS, SIDES), MOONS[:-1], SIDES[:-1], ShapeError, "must be the training set in its order"),
        (SVC().fit(MOONS, SIDES), MOONS, 1 - SIDES, ShapeError, "must be the training set in its order"),
        (SVC().fit(MOONS, SIDES), MOONS, SIDES[:-1], ShapeError, "N = 50 as in X, got 49"),
        (SVC().fit(MOONS, SIDES), MOONS, SIDES + 5, ShapeError, "must be the training set in its order"),
    ],
)
def test_wrong_input(machine, X, y, error, message):
    with pytest.raises(error, match=message):
        kkt_report(machine, X, y)


LINE = np.linspace(-2, 2, 30)[:, None]
CURVE = np.sin(2 * LINE[:, 0]) + np.random.default_rng(0).normal(0, 0.2, size=30)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_regression(kernel):
    weights = np.random.default_rng(1).integers(0, 3, size=30)
    for given in (None, weights):
        ours = KernelSVR(kernel, C=2.0).fit(LINE, CURVE, sample_weight=given)
        theirs = SVR(kernel=kernel, C=2.0).fit(LINE, CURVE, sample_weight=given)
        one, other = kkt_report(ours), kkt_report(theirs, LINE, CURVE, sample_weight=given)
        assert one.holds, str(one)
        assert other.holds, str(other)
        assert (one.only.primal, one.only.dual) == pytest.approx((other.only.primal, other.only.dual), rel=1e-5)
        assert one.only.support.tolist() == sorted(ours.support_)
        assert 0 <= one.gap < 0.05
    exact = KernelSVR(RBF(1.0), C=2.0, tolerance=1e-6).fit(LINE, CURVE).kkt_report().only
    assert exact.dual == pytest.approx(oracle.regression_dual(rbf_kernel(LINE, gamma=1.0), CURVE, 2.0, 0.1), rel=1e-5)


def test_each_condition_of_regression_can_fail():
    machine = KernelSVR(RBF(1.0), C=1.0, tolerance=1e-6).fit(LINE, CURVE)
    f, c = machine.predict(LINE), np.zeros(30)
    c[machine.support_] = machine.dual_coef_[0]

    def missed(c=c, f=f, **more):
        report = certify_regression(CURVE, c, np.ones(30), f, float(machine.intercept_[0]), epsilon=0.1, **more)
        return {each.name for each in report.conditions if not each.holds}

    assert missed() == set()
    changed = c.copy()
    changed[np.argmax(c)] = 1.5
    assert {"|c| <= C", "sum c = 0"} <= missed(changed)
    idle = int(np.flatnonzero(c == 0)[0])
    changed = c.copy()
    changed[idle] = 0.2
    assert "c (|y - f| - eps. - slack) = 0" in missed(changed)
    moved = f.copy()
    moved[idle] = CURVE[idle] + 0.5
    assert {"|y - f| <= eps. where |c| < C", "(C - |c|) slack = 0"} <= missed(f=moved)
    assert missed(weights=(np.ones(2), np.zeros(2))) == {"w = sum c x"}
    with pytest.raises(ShapeError, match="the training set in its order"):
        machine.kkt_report(LINE, CURVE[::-1])
    with pytest.raises(NotFittedError, match="copied without its training set"):
        copy.deepcopy(machine).kkt_report()
    assert copy.deepcopy(machine).kkt_report(LINE, CURVE).holds
    with pytest.raises(ShapeError, match="the training set in its order"):
        kkt_report(SVR().fit(LINE, CURVE), LINE[1:], CURVE[1:])
