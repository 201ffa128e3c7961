"""The dual of one boundary between two classes: by libsvm, by the solver that stops on the gap, and the hard margin."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.energies.kernel_machine.gram import check_gram, gram_of, square
from thalweg.energies.kernel_machine.vectors import RBF, Linear, Polynomial
from thalweg.errors import InfeasibleError, ShapeError
from thalweg.limits import check_memory

# A bound that no multiplier of a feasible hard margin reaches.
_UNBOUNDED = 1e100
# Steps of libsvm after which it is asked whether a hard margin can be had at all, and points up to which it is.
_STEPS, _ASKED = 200_000, 3000
# A cache of kernel rows for libsvm, in MB.
_CACHE = 500


@dataclass(frozen=True)
class Boundary:
    """Multipliers ``(N,)`` and the intercept of f(x) = sum a t k(x, x_i) + b, and how many steps they took.

    >>> Boundary(np.array([0.5, 0.5]), 0.0, 3).alpha.sum()
    np.float64(1.0)
    """

    alpha: np.ndarray
    intercept: float
    steps: int


@dataclass(frozen=True)
class Given:
    """What libsvm is given of a training set: the rows of numbers where it knows the kernel, or the Gram matrix.

    >>> given = libsvm_given(RBF(gamma=0.5), RBF(gamma=0.5).prepare([[1.0], [2.0]]))
    >>> given.settings
    {'kernel': 'rbf', 'gamma': 0.5}
    """

    table: np.ndarray
    settings: dict[str, Any]

    def part(self, places: np.ndarray) -> np.ndarray:
        """The same for some of the points."""
        precomputed = self.settings["kernel"] == "precomputed"
        return self.table[np.ix_(places, places)] if precomputed else self.table[places]

    def gram(self, places: np.ndarray) -> np.ndarray | None:
        """Their Gram matrix, where there is one."""
        return self.part(places) if self.settings["kernel"] == "precomputed" else None


def libsvm_given(kernel: Kernel, items: Prepared) -> Given:
    """A training set for libsvm, in float64; a Gram matrix of a kernel of unknown kind is checked.

    >>> libsvm_given(Linear() + Linear(), (Linear() + Linear()).prepare([[1.0], [2.0]])).table
    array([[2., 4.],
           [4., 8.]])
    """
    settings: dict[str, Any] = {}
    match kernel:
        case Linear():
            settings = {"kernel": "linear", "gamma": 1.0}  # not used, but otherwise computed from all of X
        case Polynomial(degree, offset, scale):
            settings = {"kernel": "poly", "degree": degree, "gamma": scale, "coef0": offset}
        case RBF(gamma):
            settings = {"kernel": "rbf", "gamma": gamma}
        case _:
            return Given(_gram(kernel, items), {"kernel": "precomputed"})
    return Given(items.tensors[0].detach().double().cpu().numpy(), settings)


def _gram(kernel: Kernel, items: Prepared) -> np.ndarray:
    if not kernel.positive:
        # All of it, for half of it would hide a kernel that is not symmetric.
        check_gram(gram_of(kernel, items, items, place=torch.device("cpu")))
    # libsvm makes a copy of its own.
    N = len(items)
    check_memory(16 * N * N, f"a Gram matrix of {N:,} points, twice,", "take fewer points, or a kernel of vectors")
    return square(gram_of(kernel, items, None, place=torch.device("cpu"))).double().numpy()


def soft_margin(
    given: np.ndarray, settings: dict[str, Any], t: np.ndarray, C: np.ndarray, *, tolerance: float, max_iter: int = -1
) -> Boundary:
    """The dual by libsvm, with a bound of each multiplier. Chang and Lin (2011).

    >>> points = np.array([[1.0], [-1.0]])
    >>> soft_margin(points, {"kernel": "linear"}, np.array([1.0, -1.0]), np.full(2, 9.0), tolerance=1e-6).alpha
    array([0.5, 0.5])
    """
    from sklearn.svm import SVC

    machine = fitted(SVC(C=1.0, tol=tolerance, cache_size=_CACHE, max_iter=max_iter, **settings), given, t, C)
    alpha = np.zeros(len(t))
    alpha[machine.support_] = np.abs(machine.dual_coef_[0])
    # libsvm gives a dual coefficient of t a, for t = 1 of the class that comes last.
    return Boundary(alpha, float(machine.intercept_[0]), int(machine.n_iter_[0]))


def fitted(machine: Any, given: np.ndarray, y: np.ndarray, C: np.ndarray) -> Any:
    """A machine of scikit-learn after ``fit``; one line where numbers are too large for it.

    >>> from sklearn.svm import SVR
    >>> fitted(SVR(kernel="linear"), np.array([[0.0], [1.0]]), np.array([0.0, 1.0]), np.ones(2)).fit_status_
    0
    """
    try:
        return machine.fit(given, y, sample_weight=C)
    except ValueError as error:
        raise ShapeError(f"libsvm cannot fit this: {str(error).splitlines()[0]}; scale X, or lower C") from None


def hard_margin(
    given: np.ndarray, settings: dict[str, Any], t: np.ndarray, *, tolerance: float, names: tuple[str, str, np.ndarray]
) -> Boundary:
    """The dual without bounds; an InfeasibleError with the points in the way where no boundary has all points right.

    Args:
        names: of the kernel, of the two classes, and places ``(N,)`` of the points in the training set.

    >>> points, labels = np.array([[0.0], [1.0], [2.0]]), np.array([1.0, -1.0, 1.0])
    >>> hard_margin(points, {"kernel": "linear"}, labels, tolerance=1e-3, names=("Linear()", "a and b", np.arange(3)))
    Traceback (most recent call last):
    ...
    thalweg.errors.InfeasibleError: no hard margin: Linear() cannot separate a and b, point 1 is in the way; ...
    """
    bounds = np.full(len(t), _UNBOUNDED)
    for most in (_STEPS, 100 * _STEPS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solver terminated early")
            found = soft_margin(given, settings, t, bounds, tolerance=tolerance, max_iter=most)
        margins = t * _decide(given, settings, t, found)
        if found.steps < most and margins.min() > 1 - max(0.01, 10 * tolerance):
            return found
        slack = least_slack(given, settings, t) if len(t) <= _ASKED else np.maximum(0.0, 1 - margins)
        if slack.max() > 1e-6:
            break
    else:
        slack = np.maximum(0.0, 1 - margins)
    kernel, classes, places = names
    wrong = places[np.argsort(-slack, kind="stable")][: int((slack > 1e-6).sum())]
    listed = ", ".join(map(str, sorted(wrong[:8].tolist()))) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
    points = f"point {listed} is" if len(wrong) == 1 else f"points {listed} are"
    raise InfeasibleError(
        f"no hard margin: {kernel} cannot separate {classes}, {points} in the way; give a finite C, "
        "a kernel with more features, or leave them out"
    )


def least_slack(given: np.ndarray, settings: dict[str, Any], t: np.ndarray) -> np.ndarray:
    """Slacks ``(N,)`` of least sum with which a boundary exists, all 0 where a hard margin does; by linear programming.

    >>> least_slack(np.array([[0.0], [1.0], [2.0]]), {"kernel": "linear"}, np.array([1.0, -1.0, 1.0]))
    array([0., 2., 0.])
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, hstack

    features = given
    if settings["kernel"] != "linear":
        values, vectors = np.linalg.eigh(_kernel_matrix(given, settings))
        kept = values > values.max() * len(t) * np.finfo(float).eps
        features = vectors[:, kept] * np.sqrt(values[kept])
    features = features / max(np.abs(features).max(), np.finfo(float).tiny)
    rows = t[:, None] * np.column_stack([features, np.ones(len(t))])
    width = rows.shape[1]
    found = linprog(
        np.r_[np.zeros(width), np.ones(len(t))],
        A_ub=-hstack([csr_array(rows), eye_array(len(t))]),
        b_ub=-np.ones(len(t)),
        bounds=[(None, None)] * width + [(0, None)] * len(t),
        method="highs",
    )
    return found.x[width:] if found.x is not None else np.zeros(len(t))


def _kernel_matrix(given: np.ndarray, settings: dict[str, Any], other: np.ndarray | None = None) -> np.ndarray:
    if settings["kernel"] == "precomputed":
        return given
    from sklearn.metrics.pairwise import pairwise_kernels

    return pairwise_kernels(given, other, metric=settings["kernel"], filter_params=True, **settings)


def _decide(given: np.ndarray, settings: dict[str, Any], t: np.ndarray, found: Boundary) -> np.ndarray:
    held = found.alpha > 0
    matrix = given[:, held] if settings["kernel"] == "precomputed" else _kernel_matrix(given, settings, given[held])
    return matrix @ (found.alpha * t)[held] + found.intercept
