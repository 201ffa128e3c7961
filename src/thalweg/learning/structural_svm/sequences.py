"""A structural SVM for sequences of labels, with the manners of scikit-learn: lists of arrays in, labels out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from thalweg.data.text.indicators import Indicators
from thalweg.energies.estimator import Estimator
from thalweg.energies.tagger import LinearTagger
from thalweg.errors import DataError
from thalweg.learning.structural_svm.solver import GapPoint, StructuralSVM
from thalweg.limits import COUNT, check_numbers

__all__ = ["SequenceSVM"]


class SequenceSVM(Estimator):
    """Labels every position of sequences by a linear chain of maximum margin: see :class:`StructuralSVM`.

    Args:
        regularisation: lambda, above 0; None is 1/n for n sequences.
        cost: what a wrong label costs; or an array (C, C), ``cost[i, j]`` for label j where i is right, in the order of
            ``classes_``.
        passes, tol: when learning ends: after so many passes, or with a gap of at most ``tol`` times the objective.
        transitions: score pairs of neighbouring labels; without them each position is by itself.
        batch: sequences of a block.
        warm_start: a second ``fit`` on the same sequences goes on where the first ended.
        random_state: seed of the order of blocks.

    Attributes:
        classes_: the labels, sorted.
        tagger_: the :class:`~thalweg.energies.LinearTagger` that was learnt.
        gap_curve_: a :class:`GapPoint` for every certificate of the last ``fit``.

    >>> X = [np.eye(3)[[0, 1, 2]], np.eye(3)[[2, 0]]]
    >>> svm = SequenceSVM(regularisation=0.01).fit(X, [["a", "b", "b"], ["b", "a"]])
    >>> svm.predict([np.eye(3)[[1, 0, 2]]]), svm.score(X, [["a", "b", "b"], ["b", "a"]])
    ([['b', 'a', 'b']], 1.0)

    Positions may have names of features in the place of numbers:

    >>> SequenceSVM().fit([[["word=a"], ["word=b", "end"]]], [[0, 1]]).predict([[["word=b"]]])
    [[1]]
    """

    def __init__(
        self,
        *,
        regularisation: float | None = None,
        cost: Any = 1.0,
        passes: int = 100,
        tol: float = 1e-2,
        transitions: bool = True,
        batch: int = 32,
        warm_start: bool = False,
        random_state: int = 0,
    ):
        super().__init__()
        self.regularisation, self.cost, self.passes, self.tol = regularisation, cost, passes, tol
        self.transitions, self.batch, self.warm_start, self.random_state = transitions, batch, warm_start, random_state

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "gap_curve_")

    def fit(
        self, X: Sequence[Any], y: Sequence[Sequence[Hashable]], watch: Callable[[GapPoint], object] | None = None
    ) -> Self:
        """Learn from sequences: X of arrays (T_i, D), or of lists of each position's feature names; y of labels.

        ``watch`` gets every certificate; ``watch=print`` shows the progress.
        """
        check_numbers(self, "svm", 1, COUNT, "batch")
        _check_pairs(X, y)
        earlier = self._svm.dual_ if self.warm_start and self.__sklearn_is_fitted__() else None
        if earlier is None:
            self._learn_names(X, y)
        batches = self._batches(X, y)
        if earlier is not None and not _same_gold(
            [block.gold for block in earlier.blocks], [gold for _, gold in batches]
        ):
            raise DataError("`warm_start` goes on with the same sequences, got others; set it to False to begin anew")
        cost = self.cost if isinstance(self.cost, int | float) else torch.as_tensor(self.cost, dtype=torch.float64)
        settings: dict[str, Any] = {"passes": self.passes, "tol": self.tol, "seed": self.random_state, "cost": cost}
        svm = StructuralSVM(self.tagger_, regularisation=self.regularisation, **settings)
        self._svm = svm.fit(batches, start=earlier, watch=watch)
        self.gap_curve_ = svm.gap_curve
        return self

    def predict(self, X: Sequence[Any]) -> list[list[Any]]:
        """The labels of every position of every sequence."""
        self._check_fitted()
        found: list[list[Any]] = []
        for at in range(0, len(X), self.batch):
            some = X[at : at + self.batch]
            best = self._svm.predict(self._inputs(some, at)).tolist()
            found += [[self.classes_[label] for label in row[: len(x)]] for row, x in zip(best, some, strict=True)]
        return found

    def score(self, X: Sequence[Any], y: Sequence[Sequence[Hashable]]) -> float:
        """The share of positions whose label is right."""
        _check_pairs(X, y)
        pairs = [pair for ours, right in zip(self.predict(X), y, strict=True) for pair in zip(ours, right, strict=True)]
        return sum(ours == right for ours, right in pairs) / len(pairs)

    def _learn_names(self, X: Sequence[Any], y: Sequence[Sequence[Hashable]]) -> None:
        labels: set[Any] = {label for row in y for label in row}
        if len(labels) < 2:
            raise DataError(f"labels must be of two kinds at least, got {', '.join(map(repr, labels))} alone")
        try:
            self.classes_ = sorted(labels)
        except TypeError:
            raise DataError("labels must be alike, all text or all numbers, got a mixture") from None
        self.indicators_ = Indicators.build(X) if _named(X[0]) else None
        if self.indicators_ is None:
            first = _numbers(X[0], 0)
            self.n_features_in_ = first.shape[1]
        else:
            self.n_features_in_ = len(self.indicators_)
        self.tagger_ = LinearTagger(self.n_features_in_, len(labels), transitions=self.transitions)

    def _batches(self, X: Sequence[Any], y: Sequence[Sequence[Hashable]]) -> list[tuple[Any, Tensor]]:
        """Blocks of sequences of like length, so that there is little padding."""
        numbers = {label: number for number, label in enumerate(self.classes_)}
        order = sorted(range(len(X)), key=lambda place: len(X[place]))
        found = []
        for at in range(0, len(X), self.batch):
            chosen = order[at : at + self.batch]
            inputs = self._inputs([X[place] for place in chosen], chosen)
            gold = torch.full((len(chosen), int(inputs[1].max())), -1)
            for row, place in enumerate(chosen):
                wrong = next((label for label in y[place] if label not in numbers), None)
                if wrong is not None:
                    raise DataError(
                        f"label {wrong!r} of sequence {place} is not one of `classes_`; fit again without warm_start"
                    )
                gold[row, : len(y[place])] = torch.tensor([numbers[label] for label in y[place]])
            found.append((inputs, gold))
        return found

    def _inputs(self, X: Sequence[Any], places: Sequence[int] | int) -> tuple[Tensor, Tensor]:
        """Features and lengths of some sequences; ``places`` are their numbers, or that of the first."""
        numbers = list(range(places, places + len(X))) if isinstance(places, int) else places
        if self.indicators_ is not None:
            if not all(map(_named, X)):
                raise DataError("sequences must be lists of feature names as in `fit`, got numbers")
            return self.indicators_.batch(X)
        rows = [_numbers(x, place) for x, place in zip(X, numbers, strict=True)]
        for row, place in zip(rows, numbers, strict=True):
            if row.shape[1] != self.n_features_in_:
                raise DataError(f"sequence {place} must be (T, {self.n_features_in_}) as in `fit`, got {row.shape}")
        features = torch.zeros(len(rows), max(map(len, rows)), self.n_features_in_, dtype=torch.float64)
        for place, row in enumerate(rows):
            features[place, : len(row)] = torch.from_numpy(row)
        return features, torch.tensor([len(row) for row in rows])


def _named(x: Any) -> bool:
    """Whether a sequence has names of features at its positions."""
    return (
        isinstance(x, list | tuple)
        and len(x) > 0
        and isinstance(x[0], list | tuple)
        and all(isinstance(n, str) for n in x[0])
    )


def _numbers(x: Any, place: int) -> np.ndarray:
    try:
        row = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"sequence {place} must be numbers (T, D), got what is not") from None
    if row.ndim != 2 or 0 in row.shape:
        raise DataError(f"sequence {place} must be (T, D) with at least one position and feature, got {row.shape}")
    if not np.isfinite(row).all():
        raise DataError(
            f"sequence {place} must be finite, got NaN or inf at position {int(np.argwhere(~np.isfinite(row))[0, 0])}"
        )
    return row


def _check_pairs(X: Sequence[Any], y: Sequence[Sequence[Hashable]]) -> None:
    if len(X) != len(y) or not len(X):
        raise DataError(f"X and y must have as many sequences, at least one, got {len(X)} and {len(y)}")
    for place, (x, labels) in enumerate(zip(X, y, strict=True)):
        if len(x) != len(labels) or not len(x):
            raise DataError(f"sequence {place} must have as many positions as labels, got {len(x)} and {len(labels)}")


def _same_gold(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
