"""What scikit-learn asks of an estimator, for a module: grids, pipelines and clones take it as one of their own.

Nothing of scikit-learn is imported before it asks (tags), or before an error must be one of its own.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from thalweg.energies.rows import Rows, read_rows
from thalweg.errors import ConfigError, NotFittedError, ShapeError, nearest


class Estimator(nn.Module):
    """A module with scikit-learn's manners: ``get_params``, ``set_params``, clones, tags, feature names.

    A subclass names every setting in its ``__init__``, without ``*args``, and stores each under its own name exactly as
    given; what it learns ends with ``_``. It says in :meth:`__sklearn_is_fitted__` whether it can be asked, calls
    :meth:`_read` on every X, and answers with ``rows.like(answer)``.

    >>> class Centre(Estimator):
    ...     def __init__(self, *, scale=1.0):
    ...         super().__init__()
    ...         self.scale = scale
    ...
    ...     def __sklearn_is_fitted__(self):
    ...         return hasattr(self, "centre_")
    ...
    ...     def fit(self, X, y=None):
    ...         rows = self._read(X, fitting=True)
    ...         self.centre_ = rows.block(0, len(rows)).mean(dim=0)
    ...         return self
    ...
    ...     def transform(self, X):
    ...         rows = self._read(X)
    ...         return rows.like(self.scale * (rows.block(0, len(rows)) - self.centre_))
    >>> centre = Centre(scale=2.0).fit(np.array([[1.0], [3.0]]))
    >>> centre, centre.get_params(), centre.n_features_in_, centre.transform([[4.0]])
    (Centre(scale=2.0), {'scale': 2.0}, 1, array([[4.]]))
    """

    n_features_in_: int
    feature_names_in_: np.ndarray

    def __setattr__(self, name: str, value: Any) -> None:
        # A setting stays what it was given as: a Parameter among the settings is not one of this module's own.
        if isinstance(value, Tensor) and name in _settings(type(self)):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name; with ``deep`` also those of settings that are estimators, as ``name__setting``."""
        found: dict[str, Any] = {}
        for name in _settings(type(self)):
            found[name] = value = getattr(self, name)
            if deep and hasattr(value, "get_params") and not isinstance(value, type):
                found |= {f"{name}__{inner}": each for inner, each in value.get_params().items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Change settings by name, those of inner estimators as ``name__setting``; returns itself."""
        inner: dict[str, dict[str, Any]] = {}
        for name, value in params.items():
            name, nested, rest = name.partition("__")
            if name not in _settings(type(self)):
                remedy = nearest(name, _settings(type(self)))
                raise ConfigError(f"`{name}` is no setting of {type(self).__name__}; {remedy}")
            if nested:
                inner.setdefault(name, {})[rest] = value
            else:
                setattr(self, name, value)
        for name, values in inner.items():
            getattr(self, name).set_params(**values)
        return self

    def __repr__(self) -> str:
        settings = _settings(type(self))
        said = [
            f"{name}={_in_short(value)}"
            for name, value in self.get_params(deep=False).items()
            if not _same(value, settings[name].default)
        ]
        return f"{type(self).__name__}({', '.join(said)})"

    def __sklearn_is_fitted__(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must say whether it is fitted")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=False))

    def _read(self, X: Any, *, fitting: bool = False, missing: bool = False) -> Rows:
        """X as rows; ``fitting`` notes how many features there are and their names, otherwise they must be those."""
        if not fitting:
            self._check_fitted()
        rows = read_rows(X, missing=missing)
        if fitting:
            self.n_features_in_ = rows.width
            self.__dict__.pop("feature_names_in_", None)
            if rows.names is not None:
                self.feature_names_in_ = np.array(rows.names, dtype=object)
            return rows
        if rows.width != self.n_features_in_:
            raise ShapeError(
                f"X has {rows.width} features, but {type(self).__name__} is expecting {self.n_features_in_} features "
                "as input; pass as many as in `fit`"
            )
        names = self.__dict__.get("feature_names_in_")
        if names is not None and rows.names is not None and list(names) != rows.names:
            raise ShapeError(
                "the feature names of X must be those of `fit` in the same order, "
                f"expected {_some(names)}, got {_some(rows.names)}"
            )
        return rows

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise _not_fitted()(f"this {type(self).__name__} has no parameters yet: call `fit` first")


@cache
def _settings(kind: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class by name."""
    given = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in given):
        raise TypeError(f"{kind.__name__} must name every setting in its __init__, without *args")
    return {each.name: each for each in given if each.kind is not inspect.Parameter.VAR_KEYWORD}


@cache
def _not_fitted() -> type[NotFittedError]:
    """Our error that is scikit-learn's as well."""
    from sklearn import exceptions

    return type("NotFittedError", (NotFittedError, exceptions.NotFittedError), {"__module__": __name__})


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not hasattr(value, "shape") and value == default)


def _in_short(value: Any) -> str:
    """A value in a line; arrays by their shape."""
    if isinstance(value, np.ndarray | Tensor):
        return f"<{'tensor' if isinstance(value, Tensor) else 'array'} {'x'.join(map(str, value.shape))}>"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


def _some(names: Any) -> str:
    listed = [str(name) for name in names]
    return ", ".join(listed[:5]) + (f" ... ({len(listed)})" if len(listed) > 5 else "")
