"""Is a support vector machine at its optimum? The certificate of ours, and of any that scikit-learn has fitted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np

from thalweg.energies.kernel_machine.certificate import KKTReport, PairReport, certify, certify_regression
from thalweg.energies.kernel_machine.classification import KernelSVC
from thalweg.energies.kernel_machine.machine import read_targets
from thalweg.energies.kernel_machine.regression import KernelSVR
from thalweg.energies.rows import read_weights
from thalweg.errors import ConfigError, NotFittedError, ShapeError


def kkt_report(
    machine: Any, X: Any = None, y: Any = None, *, sample_weight: Any = None, tolerance: float | None = None
) -> KKTReport:
    """The residual of every condition of the optimum of a fitted machine, its margin and its duality gap.

    Args:
        machine: a :class:`~thalweg.energies.KernelSVC` or :class:`~thalweg.energies.KernelSVR`, or scikit-learn's
            ``SVC`` or ``SVR`` with any kernel.
        X, y: the training set in its order, the Gram matrix for ``precomputed``. Ours remembers it.
        sample_weight: what scikit-learn's machine was fitted with; ours remembers it.
        tolerance: what counts as holding, see :func:`~thalweg.energies.certify`; by default twice the machine's
            own, but no less than 1e-4: libsvm keeps kernel values in float32.

    >>> from sklearn.svm import SVC
    >>> points, labels = [[1, 1], [2, 2], [2, 0], [0, 0], [1, 0], [0, 1]], [1, 1, 1, -1, -1, -1]
    >>> report = kkt_report(SVC(kernel="linear", C=1000.0).fit(points, labels), points, labels)
    >>> report.holds, round(report.only.margin, 4), report.only.on_margin
    (True, 0.7071, array([0, 2, 4, 5]))
    """
    if isinstance(machine, KernelSVC | KernelSVR):
        return machine.kkt_report(X, y, tolerance=tolerance)
    from sklearn.svm import SVC, SVR

    if not isinstance(machine, SVC | SVR):
        kind = type(machine).__name__
        raise ConfigError(f"a KKT report is that of a KernelSVC, a KernelSVR or scikit-learn's SVC or SVR, got {kind}")
    if not hasattr(machine, "dual_coef_"):
        raise NotFittedError(f"this {type(machine).__name__} has no parameters yet: call `fit` first")
    if X is None or y is None:
        raise ShapeError("scikit-learn's machines do not remember their training set: pass X and y")
    allowed = max(1e-4, 2 * machine.tol) if tolerance is None else tolerance
    if isinstance(machine, SVR):
        return KKTReport((_regressor(machine, X, y, sample_weight, allowed),))
    table, codes, bounds = _training_set(machine, X, y, sample_weight)
    asked = copy.copy(machine)  # each two classes in a column, whatever the machine itself gives
    asked.decision_function_shape = "ovo"
    decisions = np.asarray(asked.decision_function(X)).reshape(len(codes), -1)
    pairs = itertools.combinations(range(len(machine.classes_)), 2)
    return KKTReport(
        tuple(
            _pair(machine, pair, place, (table, codes, bounds), decisions[:, place], allowed)
            for place, pair in enumerate(pairs)
        )
    )


def _training_set(machine: Any, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X as an array, classes by their places, and the bound of each point; an error where they are others."""
    table = _dense(X)
    labels = read_targets(y, len(table), "SVC")
    expected = np.repeat(np.arange(len(machine.classes_)), machine.n_support_)
    known = np.isin(labels, machine.classes_).all() and len(table) == machine.shape_fit_[0]
    codes = np.searchsorted(machine.classes_, labels) if known else np.empty(0, dtype=int)
    weights = read_weights(sample_weight, len(table))
    bounds = machine.C * machine.class_weight_[codes] if known else np.empty(0)
    bounds = bounds * weights.numpy() if known and weights is not None else bounds
    if not known or not np.array_equal(codes[_support(machine, bounds)], expected):
        raise ShapeError("X and y must be the training set in its order, for multipliers belong to its points")
    return table, codes, bounds


def _support(machine: Any, bounds: np.ndarray) -> np.ndarray:
    """Places of the support vectors: libsvm leaves out points without weight, and counts among the others."""
    return np.flatnonzero(bounds > 0)[machine.support_]


def _pair(
    machine: Any,
    pair: tuple[int, int],
    place: int,
    training: tuple[np.ndarray, np.ndarray, np.ndarray],
    decision: np.ndarray,
    tolerance: float,
) -> PairReport:
    table, codes, bounds = training
    first, second = pair
    signed = np.zeros(len(codes))  # t a, in libsvm's layout: a row for each of the other classes
    dual = _dense(machine.dual_coef_)
    support = _support(machine, bounds)
    held = codes[support]
    signed[support[held == first]] = dual[second - 1, held == first]
    signed[support[held == second]] = dual[first, held == second]
    # Of two classes scikit-learn turns the signs round, so that the second is above 0.
    negative, positive = (first, second) if len(machine.classes_) == 2 else (second, first)
    places = np.flatnonzero(((codes == first) | (codes == second)) & (bounds > 0))
    t = np.where(codes[places] == positive, 1.0, -1.0)
    weights = None
    if machine.kernel == "linear":
        weights = _dense(machine.coef_)[place], signed @ table
    return certify(
        t,
        t * signed[places],
        bounds[places],
        decision[places],
        float(machine.intercept_[place]),
        classes=(machine.classes_.tolist()[negative], machine.classes_.tolist()[positive]),
        places=places,
        weights=weights,
        tolerance=tolerance,
    )


def _regressor(machine: Any, X: Any, y: Any, sample_weight: Any, tolerance: float) -> PairReport:
    table = _dense(X)
    values = np.asarray(read_targets(y, len(table), "SVR"), dtype=np.float64)
    if len(values) != machine.shape_fit_[0]:
        raise ShapeError("X and y must be the training set in its order, for coefficients belong to its points")
    weights = read_weights(sample_weight, len(table))
    bounds = np.full(len(table), float(machine.C)) if weights is None else machine.C * weights.numpy()
    c, used = np.zeros(len(table)), np.flatnonzero(bounds > 0)
    c[_support(machine, bounds)] = _dense(machine.dual_coef_)[0]
    f = np.asarray(machine.predict(X))
    both = (_dense(machine.coef_)[0], c @ table) if machine.kernel == "linear" else None
    how: dict[str, Any] = {"epsilon": machine.epsilon, "places": used, "weights": both, "tolerance": tolerance}
    return certify_regression(values[used], c[used], bounds[used], f[used], float(machine.intercept_[0]), **how)


def _dense(values: Any) -> np.ndarray:
    return values.toarray() if hasattr(values, "toarray") else np.asarray(values)
