"""The large-margin regressor."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from thalweg.energies.kernel_machine.certificate import KKTReport, certify_regression
from thalweg.energies.kernel_machine.dual import fitted, libsvm_given
from thalweg.energies.kernel_machine.functions import Kernel
from thalweg.energies.kernel_machine.machine import KernelMachine, read_bound, read_targets
from thalweg.energies.kernel_machine.vectors import Linear
from thalweg.energies.rows import as_table, read_weights
from thalweg.errors import NotFittedError, ShapeError
from thalweg.limits import COUNT, check_numbers


class KernelSVR(KernelMachine):
    r"""Support vector regression with any kernel: the flattest function that misses few numbers by more than epsilon.

    .. math:: \min_{w, b} \tfrac12 |w|^2 + \sum_i C_i \max(0, |y_i - f(x_i)| - \epsilon), \qquad
        f(x) = \sum_i c_i k(x, x_i) + b, \quad -C_i \le c_i \le C_i

    The exact dual by libsvm. E(x, y) = max(0, |y - f(x)| - epsilon). Drucker et al. (1997);
    scikit-learn's ``SVR`` gives the same.

    Args:
        kernel: as of :class:`KernelSVC`.
        C: price of a unit beyond epsilon, above 0 and finite.
        epsilon: what is not counted as a miss, 0 or more.
        tolerance: when libsvm ends; max_iter: its steps, -1 without limit.

    Attributes:
        support_, dual_coef_, intercept_: places of the points with c other than 0; c ``(1, S)``; b ``(1,)``.
        n_iter_: steps of libsvm.
        coef_, support_vectors_: w ``(1, D)`` of the linear kernel; the points ``(S, D)`` of kernels of vectors.

    >>> line = KernelSVR("linear", C=100.0, epsilon=0.01).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> line.coef_.round(2), line.predict([[3.0]]).round(2)
    (array([[1.99]]), array([6.98]))
    """

    def __init__(
        self,
        kernel: Kernel | str = "rbf",
        C: float = 1.0,
        *,
        epsilon: float = 0.1,
        tolerance: float = 1e-3,
        max_iter: int = -1,
    ):
        super().__init__()
        self.kernel, self.C, self.epsilon = kernel, C, epsilon
        self.tolerance, self.max_iter = tolerance, max_iter

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags

        tags = super().__sklearn_tags__()
        tags.estimator_type = "regressor"
        tags.regressor_tags = RegressorTags()
        tags.target_tags.required = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Find the function; ``sample_weight`` ``(N,)`` are factors of C, and points with 0 are left out."""
        from sklearn.svm import SVR

        C = read_bound(self.C, hard=False)
        name = type(self).__name__
        check_numbers(self, name, 0, 1e300, "epsilon", whole=False)
        check_numbers(self, name, 0, 1, "tolerance", whole=False, strict=True)
        check_numbers(self, name, -1, COUNT, "max_iter")
        items = self._begin(X)
        values = _numbers(y, len(items), name)
        weights = read_weights(sample_weight, len(items))
        bounds = np.full(len(items), C) if weights is None else C * weights.cpu().numpy()
        places = np.flatnonzero(bounds > 0)
        given = libsvm_given(self.kernel_, items)
        machine = SVR(C=1.0, epsilon=self.epsilon, tol=self.tolerance, max_iter=self.max_iter, **given.settings)
        fitted(machine, given.part(places), values[places], bounds[places])
        self.dual_coef_, self.intercept_ = np.asarray(machine.dual_coef_), np.asarray(machine.intercept_)
        self.n_iter_ = int(machine.n_iter_)
        self._training, self._values, self._bounds = X, values, bounds
        self._keep(items, places[machine.support_], self.dual_coef_, self.intercept_)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_training"}

    def kkt_report(self, X: Any = None, y: Any = None, *, tolerance: float | None = None) -> KKTReport:
        """The residual of every condition of the optimum, and the duality gap; :class:`KKTReport`.

        Args:
            X, y: the training set in its order; by default the one given to ``fit``, as it is now.
            tolerance: what counts as holding, see :func:`~thalweg.energies.certify_regression`; by default twice the
                solver's, but no less than 1e-4: libsvm keeps kernel values in float32.
        """
        self._check_fitted()
        if X is not None and not np.array_equal(_numbers(y, len(X), type(self).__name__), self._values):
            raise ShapeError("X and y must be the training set in its order, for coefficients belong to its points")
        if X is None and "_training" not in self.__dict__:
            raise NotFittedError("this machine was copied without its training set: call `kkt_report(X, y)` with it")
        X = self._training if X is None else X
        f, c, weights = self._sums(X)[0][:, 0].cpu().numpy(), np.zeros(len(self._values)), None
        c[self.support_] = self.dual_coef_[0]
        if isinstance(self.kernel_, Linear):
            weights = self.coef_[0], c @ self.kernel_.prepare(X).table.double().cpu().numpy()
        used = self._bounds > 0
        allowed = max(1e-4, 2 * self.tolerance) if tolerance is None else tolerance
        how: dict[str, Any] = {"epsilon": self.epsilon, "weights": weights, "tolerance": allowed}
        given = self._values[used], c[used], self._bounds[used], f[used], float(self.intercept_[0])
        return KKTReport((certify_regression(*given, places=np.flatnonzero(used), **how),))

    def predict(self, X: Any) -> Any:
        """f(x) of each item, ``(N,)`` float64."""
        sums, like = self._sums(X)
        return like(sums[:, 0])

    def energy(self, X: Any, y: Any) -> Any:
        """By how much f(x) misses y beyond epsilon, ``(N,)``. Lower is better."""
        sums, like = self._sums(X)
        values = torch.from_numpy(_numbers(y, len(sums), type(self).__name__)).to(sums)
        return like(((values - sums[:, 0]).abs() - self.epsilon).clamp(min=0.0))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The coefficient of determination, R^2: 1 at best."""
        from sklearn.metrics import r2_score

        found = self._sums(X)[0][:, 0].cpu().numpy()
        weights = read_weights(sample_weight, len(found))
        values = _numbers(y, len(found), type(self).__name__)
        return float(r2_score(values, found, sample_weight=None if weights is None else weights.cpu().numpy()))


def _numbers(y: Any, count: int, kind: str) -> np.ndarray:
    values = as_table(read_targets(y, count, kind), "y")
    values = np.array(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ShapeError(f"y contains NaN or infinity at place {int(np.flatnonzero(~np.isfinite(values))[0])}")
    return values
