"""The large-margin classifier."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.kernel_machine.certificate import KKTReport, certify
from thalweg.energies.kernel_machine.dual import Boundary, Given, hard_margin, libsvm_given, soft_margin
from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.energies.kernel_machine.machine import KernelMachine, read_bound, read_targets
from thalweg.energies.kernel_machine.solver import solve_dual
from thalweg.energies.kernel_machine.vectors import Linear
from thalweg.energies.rows import read_weights
from thalweg.errors import ConfigError, NotFittedError, ShapeError, nearest
from thalweg.limits import COUNT, check_numbers

_SHAPES, _SOLVERS = ("ovr", "ovo"), ("libsvm", "gap")


class _Pair(NamedTuple):
    """One boundary: classes by their places, points by theirs, t, multipliers and bounds ``(n,)``."""

    negative: int
    positive: int
    places: np.ndarray
    t: np.ndarray
    alpha: np.ndarray
    C: np.ndarray


class KernelSVC(KernelMachine):
    r"""A support vector classifier with any kernel: the boundary with the widest margin, by its exact dual.

    .. math:: \max_a \sum_i a_i - \tfrac12 \sum_{ij} a_i a_j t_i t_j k(x_i, x_j)
        \quad\text{with}\quad 0 \le a_i \le C_i,\; \sum_i a_i t_i = 0, \qquad
        f(x) = \sum_i a_i t_i k(x, x_i) + b

    Of two classes, ``classes_[1]`` lies where f is above 0. Of more, each two have a boundary; a class wins by votes,
    and among equal votes by the sum of its f. As an energy, E(x, y) = -t f(x) of two classes (LeCun et al. 2006), and
    minus the votes with that sum of more; ``predict`` gives the class of least energy. Boser, Guyon and Vapnik (1992),
    Cortes and Vapnik (1995); scikit-learn's ``SVC(break_ties=True)`` gives the same answers.

    X is a table of numbers, or whatever the kernel takes: strings, sequences.

    Args:
        kernel: ``linear``, ``poly``, ``rbf`` (see :func:`~thalweg.energies.kernel_named`) or a
            :class:`~thalweg.energies.Kernel`.
        C: price of a unit of slack, above 0; ``math.inf`` is a hard margin: an
            :class:`~thalweg.errors.InfeasibleError` names the points in the way where there is none.
        class_weight: ``"balanced"``, or a factor of C for each class by name.
        probability: also learn ``predict_proba``, by Platt's sigmoid on held-out decisions of up to five folds.
        decision_function_shape: ``ovr``, a column for each class, or ``ovo``, one for each two; two classes have one.
        solver: ``libsvm``, or ``gap``, which stops on the duality gap, never holds the Gram matrix and computes where X
            lies (:func:`~thalweg.energies.solve_dual`): for many points and a C that many multipliers reach.
        tolerance: when the solver ends: by how much margins may be missed, or the relative gap.
        max_iter: steps of libsvm, -1 without limit, or of ``gap``, -1 for 200.
        random_state: the seed of ``gap``.

    Attributes:
        classes_: ``(K,)``.
        support_, n_support_: which points have a multiplier, by class, and how many in each class.
        dual_coef_: t a of two classes, ``(1, S)``; of more ``(K - 1, S)`` in libsvm's order.
        intercept_: ``(P,)`` for the P = K (K - 1) / 2 boundaries.
        n_iter_: ``(P,)``, steps or passes of the solver.
        coef_, support_vectors_: w ``(P, D)`` of the linear kernel; the points ``(S, D)`` of kernels of vectors.

    >>> points, labels = [[1, 1], [-1, -1], [-1, 1], [1, -1]], ["same", "same", "other", "other"]
    >>> from thalweg.energies import Polynomial
    >>> xor = KernelSVC(Polynomial(degree=2, offset=1.0), C=float("inf")).fit(points, labels)
    >>> xor.dual_coef_, xor.decision_function([[0.5, 3.0], [-2.0, 1.0]]).round(6), xor.predict([[0.5, 3.0]])
    (array([[-0.125, -0.125,  0.125,  0.125]]), array([ 1.5, -2. ]), array(['same'], dtype='<U5'))
    """

    classes_: np.ndarray
    n_support_: np.ndarray

    def __init__(
        self,
        kernel: Kernel | str = "rbf",
        C: float = 1.0,
        *,
        class_weight: dict[Any, float] | str | None = None,
        probability: bool = False,
        decision_function_shape: str = "ovr",
        solver: str = "libsvm",
        tolerance: float = 1e-3,
        max_iter: int = -1,
        random_state: int | None = None,
    ):
        super().__init__()
        self.kernel, self.C, self.class_weight, self.probability = kernel, C, class_weight, probability
        self.decision_function_shape, self.solver = decision_function_shape, solver
        self.tolerance, self.max_iter, self.random_state = tolerance, max_iter, random_state

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags

        tags = super().__sklearn_tags__()
        tags.estimator_type = "classifier"
        tags.classifier_tags = ClassifierTags()
        tags.target_tags.required = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_training"}

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Find the boundaries; ``sample_weight`` ``(N,)`` are factors of C, and points with 0 are left out."""
        C = self._checked()
        items = self._begin(X, double=self.solver == "libsvm")
        codes = self._read_classes(y, len(items))
        bounds = self._bounds(C, codes, sample_weight)
        given = libsvm_given(self.kernel_, items) if self.solver == "libsvm" else items
        pairs, found = [], []
        for first, second in itertools.combinations(range(len(self.classes_)), 2):
            # Of more than two classes the first is above 0, as libsvm has it; of two the second, as people do.
            negative, positive = (first, second) if len(self.classes_) == 2 else (second, first)
            places = np.flatnonzero(((codes == first) | (codes == second)) & (bounds > 0))
            t = np.where(codes[places] == positive, 1.0, -1.0)
            pair = _Pair(negative, positive, places, t, np.zeros(len(t)), bounds[places])
            found.append(self._solve(given, pair))
            pairs.append(pair._replace(alpha=found[-1].alpha))
        self._pairs, self._training = pairs, X
        self.n_iter_ = np.array([each.steps for each in found])
        self._gather(items, codes, np.array([each.intercept for each in found]))
        self._calibrate(X, codes, sample_weight)
        return self

    def decision_function(self, X: Any) -> Any:
        """f(x) of two classes, ``(N,)``; of more ``(N, K)``, or ``(N, P)`` with ``ovo``."""
        sums, like = self._sums(X)
        if len(self.classes_) == 2:
            return like(sums[:, 0])
        return like(self._votes(sums) if self.decision_function_shape == "ovr" else sums)

    def energy(self, X: Any, y: Any = None) -> Any:
        """E(x, y) of each item with its class, ``(N,)``; without y with every class, ``(N, K)``. Lower is better."""
        sums, like = self._sums(X)
        energies = torch.cat([sums, -sums], dim=1) if len(self.classes_) == 2 else -self._votes(sums)
        if y is None:
            return like(energies)
        labels = read_targets(y, len(energies), type(self).__name__)
        unknown = ~np.isin(labels, self.classes_)
        if unknown.any():
            raise ShapeError(f"y has a class that was not in `fit`: {labels[unknown][0]!r}")
        codes = torch.from_numpy(np.searchsorted(self.classes_, labels)).to(energies.device)
        return like(energies.gather(1, codes.unsqueeze(1)).squeeze(1))

    def predict(self, X: Any) -> Any:
        """The class of least energy, ``(N,)``."""
        sums, like = self._sums(X)
        best = (sums[:, 0] > 0).long() if len(self.classes_) == 2 else self._votes(sums).argmax(dim=1)
        answer = like(best)
        if isinstance(answer, Tensor) and self.classes_.dtype.kind in "iufb":
            return torch.from_numpy(self.classes_).to(answer.device)[answer]
        return self.classes_[answer.cpu().numpy() if isinstance(answer, Tensor) else answer]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of items whose class is right."""
        labels = self.predict(X)
        labels = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
        right = labels == read_targets(y, len(labels), type(self).__name__)
        weights = read_weights(sample_weight, len(labels))
        return float(np.average(right, weights=None if weights is None else weights.cpu().numpy()))

    @property
    def predict_proba(self) -> Any:
        """``predict_proba(X)``: the probability of each class, ``(N, K)``; there with ``probability=True``."""
        if self._lacking("predict_proba"):
            raise AttributeError
        return self._probabilities

    def _lacking(self, name: str) -> str | None:
        if name == "predict_proba" and not self.probability:
            return "`predict_proba` needs `probability=True` before `fit`"
        return super()._lacking(name)

    def kkt_report(self, X: Any = None, y: Any = None, *, tolerance: float | None = None) -> KKTReport:
        """The residual of every condition of the optimum, the margin and the duality gap; :class:`KKTReport`.

        Args:
            X, y: the training set in its order; by default the one given to ``fit``, as it is now.
            tolerance: what counts as holding, see :func:`~thalweg.energies.certify`; by default twice the solver's,
                but no less than 1e-4: libsvm keeps kernel values in float32.
        """
        self._check_fitted()
        if X is not None:
            self._check_training_set(X, y)
        elif "_training" not in self.__dict__:
            raise NotFittedError("this machine was copied without its training set: call `kkt_report(X, y)` with it")
        X = self._training if X is None else X
        sums, names = self._sums(X)[0].cpu().numpy(), self.classes_.tolist()
        table = self.kernel_.prepare(X).table.double().cpu().numpy() if isinstance(self.kernel_, Linear) else None
        allowed = max(1e-4, 2 * self.tolerance) if tolerance is None else tolerance
        reports = []
        for place, pair in enumerate(self._pairs):
            weights = None if table is None else (self.coef_[place], (pair.t * pair.alpha) @ table[pair.places])
            given = pair.t, pair.alpha, pair.C, sums[pair.places, place], float(self.intercept_[place])
            classes = names[pair.negative], names[pair.positive]
            reports.append(certify(*given, classes=classes, places=pair.places, weights=weights, tolerance=allowed))
        return KKTReport(tuple(reports))

    def _checked(self) -> float:
        """C; a ConfigError for a setting that is none."""
        for name, choices in (("decision_function_shape", _SHAPES), ("solver", _SOLVERS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"`{name}` is unknown: {getattr(self, name)!r}; {nearest(getattr(self, name), choices)}"
                )
        check_numbers(self, type(self).__name__, 0, 1, "tolerance", whole=False, strict=True)
        check_numbers(self, type(self).__name__, -1, COUNT, "max_iter")
        C = read_bound(self.C, hard=True)
        if np.inf == C and self.solver == "gap":
            raise ConfigError('a hard margin (C = inf) needs `solver="libsvm"`')
        return C

    def _read_classes(self, y: Any, count: int) -> np.ndarray:
        from sklearn.utils.multiclass import check_classification_targets

        labels = read_targets(y, count, type(self).__name__)
        try:
            check_classification_targets(labels)
            self.classes_, codes = np.unique(labels, return_inverse=True)
        except (ValueError, TypeError) as error:
            raise ShapeError(f"y must hold classes: {error}".splitlines()[0]) from None
        if len(self.classes_) < 2:
            raise ShapeError(
                f"y must have two classes or more, got 1 class: {self.classes_[0]!s}; nothing can be told apart"
            )
        return codes

    def _check_training_set(self, X: Any, y: Any) -> None:
        """Refuse what cannot be the training set."""
        labels = read_targets(y, len(X), type(self).__name__)
        last = max(int(pair.places[-1]) for pair in self._pairs)
        same = last < len(labels) and np.isin(labels, self.classes_).all()
        codes = np.searchsorted(self.classes_, labels) if same else labels
        if not same or any(((codes[pair.places] == pair.positive) != (pair.t > 0)).any() for pair in self._pairs):
            raise ShapeError("X and y must be the training set in its order, for multipliers belong to its points")

    def _bounds(self, C: float, codes: np.ndarray, sample_weight: Any) -> np.ndarray:
        """C of each point, (N,)."""
        from sklearn.utils import compute_class_weight

        try:
            places = np.arange(len(self.classes_))
            named = self.class_weight
            if isinstance(named, dict):
                named = {int(np.flatnonzero(self.classes_ == name)[0]): each for name, each in named.items()
                         if (self.classes_ == name).any()}  # fmt: skip
            factors = compute_class_weight(named, classes=places, y=codes)[codes]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"`class_weight` must be `balanced` or factors by class: {error}".splitlines()[0]
            ) from None
        weights = read_weights(sample_weight, len(codes))
        factors = factors if weights is None else factors * weights.cpu().numpy()
        if (factors < 0).any():
            raise ConfigError("`class_weight` must be 0 or more for each class")
        # Infinity times 0 is no number: points without weight are left out of a hard margin too.
        bounds = np.where(factors > 0, C, 0.0) if np.inf == C else C * factors
        for code, name in enumerate(self.classes_):
            if not (bounds[codes == code] > 0).any():
                raise ShapeError(f"class {name!s} has no point with a weight above 0; leave the class out")
        return bounds

    def _solve(self, given: Given | Prepared, pair: _Pair) -> Boundary:
        if not isinstance(given, Given):
            return self._solve_by_gap(given, pair)
        part, settings = given.part(pair.places), given.settings
        # With the later class above 0 libsvm takes the same steps as scikit-learn's own machine.
        turn = 1.0 if pair.positive > pair.negative else -1.0
        if np.isinf(pair.C).all():
            classes = f"{self.classes_[pair.negative]!s} and {self.classes_[pair.positive]!s}"
            names = repr(self.kernel_), classes, pair.places
            found = hard_margin(part, settings, turn * pair.t, tolerance=self.tolerance, names=names)
        else:
            how: dict[str, Any] = {"tolerance": self.tolerance, "max_iter": self.max_iter}
            found = soft_margin(part, settings, turn * pair.t, pair.C, **how)
        return replace(found, intercept=turn * found.intercept)

    def _solve_by_gap(self, items: Prepared, pair: _Pair) -> Boundary:
        some = items[torch.from_numpy(pair.places).to(items.device)]
        dtype = torch.float64 if self.tolerance < 1e-5 else torch.float32
        some = some.to(dtype=dtype)
        t, C = (torch.from_numpy(each).to(some.device, dtype) for each in (pair.t, pair.C))
        most = {} if self.max_iter < 0 else {"max_steps": self.max_iter}
        found = solve_dual(self.kernel_, some, t, C, tolerance=self.tolerance, seed=self.random_state or 0, **most)
        if found.gap > self.tolerance * abs(found.objective):
            from sklearn.exceptions import ConvergenceWarning

            relative = found.gap / max(abs(found.objective), np.finfo(float).tiny)
            said = f"the gap is {relative:.1e} of the objective after {found.steps} steps, above {self.tolerance:g}"
            warnings.warn(f"{said}; raise `max_iter` or `tolerance`, or use libsvm", ConvergenceWarning, stacklevel=4)
        return Boundary(found.alpha.double().cpu().numpy(), found.intercept, found.steps)

    def _gather(self, items: Prepared, codes: np.ndarray, intercepts: np.ndarray) -> None:
        """The points that have a multiplier in any pair, by class, and their coefficients."""
        held = np.zeros(len(codes), dtype=bool)
        for pair in self._pairs:
            held[pair.places[pair.alpha > 0]] = True
        kept = np.flatnonzero(held)
        kept = kept[np.argsort(codes[kept], kind="stable")]
        self.n_support_ = np.bincount(codes[kept], minlength=len(self.classes_)).astype(np.int32)
        self.support_, self.intercept_ = kept, intercepts
        coefficients = self._coefficients()
        self._keep(items, kept, coefficients, intercepts)
        K = len(self.classes_)
        self.dual_coef_ = coefficients if K == 2 else np.zeros((K - 1, len(kept)))
        if K > 2:
            for sums, (first, second) in zip(coefficients, itertools.combinations(range(K), 2), strict=True):
                # In the column of a point, row r is its boundary with the r-th of the other classes.
                self.dual_coef_[second - 1, codes[kept] == first] = sums[codes[kept] == first]
                self.dual_coef_[first, codes[kept] == second] = sums[codes[kept] == second]

    def _coefficients(self) -> np.ndarray:
        """t a of each kept point in each pair, (P, S)."""
        column = np.full(1 + max(int(pair.places[-1]) for pair in self._pairs), -1)
        column[self.support_] = np.arange(len(self.support_))
        found = np.zeros((len(self._pairs), len(self.support_)))
        for row, pair in zip(found, self._pairs, strict=True):
            inside = pair.alpha > 0
            row[column[pair.places[inside]]] = (pair.t * pair.alpha)[inside]
        return found

    def _votes(self, sums: Tensor) -> Tensor:
        """A number for each class, (N, K): its votes, and less than half a vote by the sum of its f."""
        votes, sure = (sums.new_zeros(len(sums), len(self.classes_)) for _ in range(2))
        for place, pair in enumerate(self._pairs):
            above, f = (sums[:, place] >= 0).to(sums.dtype), sums[:, place]
            votes[:, pair.positive] += above
            votes[:, pair.negative] += 1 - above
            sure[:, pair.positive] += f
            sure[:, pair.negative] -= f
        return votes + sure / (3 * (sure.abs() + 1))

    def _calibrate(self, X: Any, codes: np.ndarray, sample_weight: Any) -> None:
        """Platt (1999), with the held-out decisions of folds; the machine itself is the one of all points."""
        self.__dict__.pop("_calibrated", None)
        if not self.probability:
            return
        from sklearn.calibration import CalibratedClassifierCV

        folds = min(5, int(np.bincount(codes).min()))
        if folds < 2:
            raise ShapeError("`probability=True` needs two points or more of each class, to hold some out")
        settings = self.get_params(deep=False) | {"probability": False, "decision_function_shape": "ovr"}
        X, sample_weight = (each.cpu().numpy() if isinstance(each, Tensor) else each for each in (X, sample_weight))
        one: Any = False  # one sigmoid of all folds; their machines are not kept
        model = CalibratedClassifierCV(type(self)(**settings), cv=folds, ensemble=one)
        self._calibrated = model.fit(X, self.classes_[codes], sample_weight=sample_weight)

    def _probabilities(self, X: Any) -> Any:
        self._check_fitted()
        if "_calibrated" not in self.__dict__:
            raise NotFittedError("fitted without probabilities: call `fit` again with `probability=True`")
        found = self._calibrated.predict_proba(X.cpu().numpy() if isinstance(X, Tensor) else X)
        return torch.from_numpy(found).to(X.device) if isinstance(X, Tensor) else found
