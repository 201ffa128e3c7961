"""What machines that are sums of kernels share: reading items, the kernel they settle on, and the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.estimator import Estimator
from thalweg.energies.kernel_machine.functions import Kernel, Prepared, check_alike
from thalweg.energies.kernel_machine.vectors import Linear, kernel_named
from thalweg.energies.rows import as_table
from thalweg.errors import ConfigError, ShapeError

# Entries of the kernel that are computed together for an answer: 32 MB of float64.
_TOGETHER = 2**22


class KernelMachine(Estimator):
    """An estimator whose answer is a sum of kernels with the points that it keeps: f(x) = sum_i c_i k(x, x_i) + b.

    Attributes:
        kernel_: the kernel with all that it takes from the training set.
        support_: ``(S,)``, places of the points that are kept in the training set.
        dual_coef_, intercept_: c ``(P, S)`` and b ``(P,)`` of P functions.

    >>> from thalweg.energies import KernelSVR
    >>> KernelSVR("linear", epsilon=0.0).fit([[0.0], [1.0]], [0.0, 0.5]).support_
    array([0, 1], dtype=int32)
    """

    kernel: Kernel | str
    kernel_: Kernel
    support_: np.ndarray
    dual_coef_: np.ndarray
    intercept_: np.ndarray
    _support: Prepared
    _weights: Tensor

    def __sklearn_is_fitted__(self) -> bool:
        return "_weights" in self.__dict__

    @property
    def support_vectors_(self) -> np.ndarray:
        """The points that are kept, ``(S, D)``, of a kernel of vectors."""
        if self._lacking("support_vectors_"):
            raise AttributeError
        return self._support.table.double().numpy()

    @property
    def coef_(self) -> np.ndarray:
        """w of f(x) = w'x + b, ``(P, D)``, of the linear kernel."""
        if self._lacking("coef_"):
            raise AttributeError
        return self._weights.numpy().T @ self.support_vectors_

    def __getattr__(self, name: str) -> Any:
        # What a property refuses is asked for here once more: the place to say why.
        why = self._lacking(name)
        if why:
            raise AttributeError(why)
        return super().__getattr__(name)

    def _lacking(self, name: str) -> str | None:
        """Why an attribute is not there, of those that are there at times."""
        if name not in ("coef_", "support_vectors_"):
            return None
        if not self.__sklearn_is_fitted__():
            return f"this {type(self).__name__} has no parameters yet: call `fit` first"
        if name == "coef_" and not isinstance(self.kernel_, Linear):
            return f"`coef_` is that of the linear kernel, this is {self.kernel_!r}; use `dual_coef_`"
        if not self.kernel_.vectors:
            return (
                f"there are no support vectors of {self.kernel_!r}, whose items are no rows of numbers; use `support_`"
            )
        return None

    def _begin(self, X: Any, *, double: bool = True) -> Prepared:
        """Settle the kernel by the training set, and prepare it."""
        kernel = kernel_named(self.kernel)
        if kernel.vectors:
            rows = self._read(X, fitting=True)
            X = rows.block(0, len(rows), dtype=torch.float64 if double else rows.dtype)
        else:
            for name in ("n_features_in_", "feature_names_in_"):
                self.__dict__.pop(name, None)
        self.kernel_ = kernel.settled(X)
        items = self.kernel_.prepare(X)
        return items.to(dtype=torch.float64) if double else items

    def _keep(self, items: Prepared, places: np.ndarray, coefficients: np.ndarray, intercepts: np.ndarray) -> None:
        """Take over P sums ``(P, S)`` of the points at S places of the training set."""
        self.support_ = places.astype(np.int32)
        self._support = items[torch.from_numpy(places).to(items.device)].to("cpu")
        self._weights = torch.from_numpy(np.ascontiguousarray(coefficients.T))  # (S, P)
        self._intercepts = torch.from_numpy(np.asarray(intercepts, dtype=np.float64))

    def _sums(self, X: Any) -> tuple[Tensor, Any]:
        """f(x) of each item, ``(N, P)`` float64, and a function that gives answers as X was given."""
        self._check_fitted()
        kernel = self.kernel_
        if kernel.vectors:
            rows = self._read(X)
            items, like = kernel.prepare(rows.block(0, len(rows))), rows.like
        else:
            items = kernel.prepare(X)
            like = (lambda answer: answer.cpu().numpy()) if items.array else (lambda answer: answer)
        check_alike(items, self._support)
        kept = self._support.to(items.device)
        double = any(each.dtype is torch.float64 for each in _floats(kept)) or not list(_floats(kept))
        items = items.to(dtype=torch.float64 if double else torch.float32)
        weights, intercepts = self._weights.to(items.device), self._intercepts.to(items.device)
        size = max(1, _TOGETHER // max(1, len(kept)))
        with torch.no_grad():
            blocks = [
                kernel.block(items[start : start + size], kept).to(weights.dtype) @ weights
                for start in range(0, len(items), size)
            ]
            return torch.cat(blocks) + intercepts, like


def _floats(items: Prepared) -> list[Tensor]:
    found = [each for each in items.tensors if each.is_floating_point()]
    return found + [each for inner in items.inner for each in _floats(inner)]


def read_targets(y: Any, count: int, kind: str) -> np.ndarray:
    """One label or number for each of ``count`` items, ``(N,)``.

    >>> read_targets([1, 2], 2, "KernelSVC")
    array([1, 2])
    """
    if y is None:
        raise ShapeError(f"this {kind} requires y to be passed, but the target y is None")
    from sklearn.utils import column_or_1d

    y = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
    try:
        labels = column_or_1d(y, warn=True)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"y must be (N,), a label for each item: {error}".splitlines()[0]) from None
    if len(labels) != count:
        raise ShapeError(f"y must be (N,) with N = {count} as in X, got {len(labels)}: inconsistent numbers of samples")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ShapeError(f"y contains NaN or infinity at place {int(np.flatnonzero(~np.isfinite(labels))[0])}")
    return labels


def read_bound(C: Any, *, hard: bool) -> float:
    """C as a number above 0; infinity where a hard margin is offered.

    >>> read_bound(1, hard=False)
    1.0
    """
    number = float(as_table([C], "C")[0]) if isinstance(C, int | float | np.number) and not isinstance(C, bool) else 0.0
    if not number > 0 or (number == np.inf and not hard):
        raise ConfigError(f"`C` must be above 0{', infinity for a hard margin' if hard else ' and finite'}, got {C!r}")
    return number
