"""How good predicted classes and their probabilities are: scores with intervals, confusions, calibration.

A prediction is a row of log-probabilities over C classes; the predicted class is its first largest entry and its
confidence the largest probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thalweg.errors import ConfigError, DataError, ShapeError
from thalweg.metrics.bootstrap import Floats, Measure, Score, Tally, check_options, scored
from thalweg.metrics.strings import metric_direction

Ints = NDArray[np.int64]
Rows = Tensor | NDArray[Any] | Sequence[Sequence[float]]
Labels = Tensor | NDArray[Any] | Sequence[int]

# Temperatures are sought between these; data that is all right, or no better than chance, has its optimum at an end.
TEMPERATURES = (1e-2, 1e2)


@dataclass(frozen=True)
class ClassScore:
    """How one class is recognised.

    Attributes:
        name: of the class; support: items of it; predicted: items taken for it.
        precision: share right of those taken for it; recall: share found of those that are; f1: their harmonic mean,
            2 right / (support + predicted). 0 where there is nothing to share.

    >>> ClassScore("sea", 0.5, 1.0, 2 / 3, 3, 6).support
    3
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int

    def to_json(self) -> dict[str, Any]:
        """The attributes as a dictionary that ``json`` can write; ``ClassScore(**d)`` reads it back."""
        return asdict(self)


@dataclass(frozen=True)
class Reliability:
    r"""Predictions grouped by confidence into equal bins of (0, 1].

    Attributes:
        edges: ``(bins + 1,)``; counts: ``(bins,)`` items.
        confidence, accuracy: ``(bins,)`` means of each bin; NaN where it is empty.

    >>> reliability(np.log([[0.9, 0.1], [0.6, 0.4]]), [0, 1], bins=2).accuracy.tolist()
    [nan, 0.5]
    """

    edges: Floats
    counts: Ints
    confidence: Floats
    accuracy: Floats

    @property
    def gaps(self) -> Floats:
        """``(bins,)`` of |accuracy - confidence|; 0 where a bin is empty."""
        return np.nan_to_num(np.abs(self.accuracy - self.confidence))

    @property
    def ece(self) -> float:
        """Expected calibration error: the gaps' mean over items."""
        return float((self.gaps * self.counts).sum() / max(1, self.counts.sum()))

    @property
    def largest(self) -> float:
        """Largest gap of any bin that holds items, the maximum calibration error.

        >>> round(reliability(np.log([[0.9, 0.1], [0.6, 0.4]]), [0, 1], bins=10).largest, 6)
        0.6
        """
        return float(self.gaps.max())

    def to_json(self) -> dict[str, Any]:
        """Lists that ``json`` can write; None where a bin is empty.

        >>> reliability(np.log([[0.9, 0.1], [0.6, 0.4]]), [0, 1], bins=2).to_json()["accuracy"]
        [None, 0.5]
        """
        filled = self.counts > 0

        def listed(values: Floats) -> list[float | None]:
            return [float(value) if there else None for value, there in zip(values, filled, strict=True)]

        return {
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "confidence": listed(self.confidence),
            "accuracy": listed(self.accuracy),
            "ece": self.ece,
        }


def score_classes(
    log_probs: Rows,
    labels: Labels,
    *,
    ks: Sequence[int] = (),
    bins: int = 15,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Score]:
    r"""Accuracy, top-k accuracy, macro F1, NLL, Brier score and ECE, each with a percentile bootstrap interval.

    With N items, p_i the probabilities of item i and y_i its class:

    * ``accuracy``: share of items whose predicted class is y_i; ``accuracy@k`` for k in ``ks``: share with fewer than k
      classes more probable than y_i (of equals, the class with the lower number counts as the more probable);
    * ``f1``: mean over classes of 2 right / (items of it + items taken for it); classes with neither are left out;
    * ``nll``: :math:`-\frac1N \sum_i \log p_i(y_i)`, in nats; infinite where a right class has probability 0;
    * ``brier``: :math:`\frac1N \sum_i \sum_c (p_i(c) - [c = y_i])^2`, between 0 and 2;
    * ``ece``: :math:`\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|` over equal bins of confidence. It cannot
      be negative, so its resamples lie above it on average; the interval shows spread, not a test against 0.

    Args:
        log_probs: ``(N, C)``, rows that are normalised.
        labels: ``(N,)``, from 0.
        resamples: bootstrap draws of N items with replacement, shared by all scores; 0 gives no intervals.
        seed: of the draws; level: coverage of the interval between the ``(1 ± level) / 2`` quantiles.

    Time O(N C), then O(resamples N) whatever C is; memory O(N C). Brier (1950), Guo et al. (2017), Efron (1979).

    >>> scores = score_classes(np.log([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]), [0, 1], ks=(2,), resamples=0)
    >>> print(scores["accuracy"], scores["accuracy@2"], scores["nll"], scores["brier"], sep="; ")
    accuracy 0.5000; accuracy@2 1.0000; NLL 0.7803; Brier 0.5000
    """
    check_options(ks, resamples, level)
    tally = ClassTally(log_probs, labels, ks=ks, bins=bins)
    return scored(tally, resamples=resamples, seed=seed, level=level)


_DISPLAY = {"f1": "macro F1", "nll": "NLL", "brier": "Brier", "ece": "ECE"}


class ClassTally(Tally):
    """What :func:`score_classes` counts of each item; arguments and keys as there.

    >>> tally = ClassTally(np.log([[0.7, 0.3], [0.6, 0.4]]), [0, 1])
    >>> tally.scores(np.array([[1.0, 1.0], [2.0, 0.0]]))["accuracy"].tolist()
    [0.5, 1.0]
    """

    def __init__(self, log_probs: Rows, labels: Labels, *, ks: Sequence[int] = (), bins: int = 15):
        logs, gold = _checked(log_probs, labels)
        self.classes = logs.shape[1]
        self.gold, self.predicted = gold, logs.argmax(1)
        self.right = (self.predicted == gold).astype(np.float64)
        own = logs[np.arange(len(gold)), gold]
        rank = (logs > own[:, None]).sum(1)
        rank += ((logs == own[:, None]) & (np.arange(self.classes) < gold[:, None])).sum(1)
        probs = np.exp(logs)
        self.confidence = probs.max(1)
        self.bins, self.bin_of = bins, _bin_of(self.confidence, bins)
        self.impossible = np.isneginf(own)
        self.means = {"accuracy": self.right} | {f"accuracy@{k}": (rank < k).astype(np.float64) for k in ks}
        self.nll = -np.where(self.impossible, 0.0, own)
        self.brier = (probs**2).sum(1) - 2 * np.exp(own) + 1
        keys = (*self.means, "f1", "nll", "brier", "ece")
        self.measures = {key: Measure(_DISPLAY.get(key, key), metric_direction(key)) for key in keys}

    def __len__(self) -> int:
        return len(self.gold)

    def scores(self, times: Floats) -> dict[str, Floats]:
        """Every score of items that lie so often in a data set, ``(R, N)`` to ``(R,)`` each; O(R N)."""
        n = times.shape[1]
        found = {key: times @ values / n for key, values in self.means.items()}
        held = _grouped(times, self.gold, self.classes)
        taken = _grouped(times, self.predicted, self.classes)
        right = _grouped(times * self.right, self.gold, self.classes)
        either = held + taken
        f1 = np.divide(2 * right, either, out=np.zeros_like(right), where=either > 0)
        found["f1"] = f1.sum(1) / (either > 0).sum(1)
        infinite = times @ self.impossible.astype(np.float64) > 0
        found["nll"] = np.where(infinite, np.inf, times @ self.nll / n)
        found["brier"] = times @ self.brier / n
        away = _grouped(times * (self.right - self.confidence), self.bin_of, self.bins)
        found["ece"] = np.abs(away).sum(1) / n
        return found


def _grouped(weights: Floats, groups: Ints, count: int) -> Floats:
    """Sums of columns of ``weights (R, N)`` by group: ``(R, count)``, in O(R N)."""
    order = np.argsort(groups, kind="stable")
    present, starts = np.unique(groups[order], return_index=True)
    sums = np.zeros((len(weights), count))
    # Only groups that are present: of an empty one `reduceat` would give a neighbour's number.
    sums[:, present] = np.add.reduceat(weights[:, order], starts, axis=1)
    return sums


def confusion_matrix(predicted: Labels, labels: Labels, classes: int) -> Ints:
    """``(C, C)``: how many items of class i (row) were taken for class j (column); O(N + C^2).

    >>> confusion_matrix([0, 1, 1], [0, 0, 1], classes=2).tolist()
    [[1, 1], [0, 1]]
    """
    gold, answers = _labels(labels, classes, "labels"), _labels(predicted, classes, "predicted")
    if len(gold) != len(answers):
        raise ShapeError(f"`predicted` must have one class for each of {len(gold)} labels, got {len(answers)}")
    return np.bincount(gold * classes + answers, minlength=classes * classes).reshape(classes, classes)


def class_scores(matrix: NDArray[Any], names: Sequence[str] | None = None) -> list[ClassScore]:
    """Precision, recall and F1 of every class from a :func:`confusion_matrix`, in order; O(C^2).

    >>> [(c.name, c.precision, c.recall) for c in class_scores(np.array([[1, 1], [0, 1]]), ["sea", "street"])]
    [('sea', 1.0, 0.5), ('street', 0.5, 1.0)]
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"`matrix` must be (C, C), got {matrix.shape}")
    names = [str(number) for number in range(len(matrix))] if names is None else names
    if len(names) != len(matrix):
        raise ShapeError(f"`names` must name each of {len(matrix)} classes, got {len(names)}")
    found = []
    for number, name in enumerate(names):
        right, held, taken = (int(x) for x in (matrix[number, number], matrix[number].sum(), matrix[:, number].sum()))
        precision, recall, f1 = (
            top / bottom if bottom else 0.0
            for top, bottom in ((right, taken), (right, held), (2 * right, held + taken))
        )
        found.append(ClassScore(name, precision, recall, f1, held, taken))
    return found


def reliability(log_probs: Rows, labels: Labels, *, bins: int = 15) -> Reliability:
    """How often predictions of each confidence are right; O(N C).

    Args:
        log_probs: ``(N, C)``; labels: ``(N,)``; bins: of equal width, each with its upper edge.

    >>> table = reliability(np.log([[0.9, 0.1], [0.6, 0.4]]), [0, 1], bins=2)
    >>> table.counts.tolist(), float(table.confidence[1])
    ([0, 2], 0.75)
    """
    logs, gold = _checked(log_probs, labels)
    confidence = np.exp(logs.max(1))
    bin_of = _bin_of(confidence, bins)
    counts = np.bincount(bin_of, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(bin_of, weights=each, minlength=bins) / counts
            for each in (confidence, (logs.argmax(1) == gold).astype(np.float64))
        ]
    return Reliability(np.linspace(0, 1, bins + 1), counts, means[0], means[1])


def _bin_of(confidence: Floats, bins: int) -> Ints:
    if bins < 1:
        raise ConfigError(f"`bins` must be at least 1, got {bins}; 15 is usual")
    # Bins hold their upper edge. The rounding keeps a confidence of 0.6 that was once a logarithm in the bin of 0.6.
    return np.clip(np.ceil(np.round(confidence * bins, 9)).astype(np.int64) - 1, 0, bins - 1)


def temperature_scale(log_probs: Rows, labels: Labels) -> float:
    r"""The temperature that makes probabilities most likely, fitted on data kept apart (Guo et al., 2017).

    .. math:: T = \arg\min_T -\sum_i \log \frac{\exp(\ell_i(y_i) / T)}{\sum_c \exp(\ell_i(c) / T)}

    Probabilities become ``softmax(log_probs / T)``; the predicted classes stay as they are. In b = 1/T the sum is
    convex, so the optimum is found exactly: Newton's method on its derivative, kept inside a bracket. The answer lies
    in :data:`TEMPERATURES`. Time O(N C) a step, about ten steps.

    >>> round(temperature_scale(np.log([[0.9, 0.1]] * 3), [0, 0, 1]), 3)  # right 2 times of 3: log 9 / log 2
    3.17
    """
    logs, gold = _checked(log_probs, labels)
    impossible = np.isneginf(logs)
    if impossible[np.arange(len(gold)), gold].any():
        raise DataError("every right class must have a probability above 0 to fit a temperature, got 0 for some item")
    scores = torch.from_numpy(logs)
    shut = torch.from_numpy(impossible)
    finite = scores.masked_fill(shut, 0.0)
    right = scores.gather(1, torch.from_numpy(gold)[:, None])[:, 0]

    def slopes(b: float) -> tuple[float, float]:
        p = torch.softmax((b * finite).masked_fill(shut, -torch.inf), 1)
        mean = (p * finite).sum(1)
        variance = (p * (finite - mean[:, None]).square()).sum(1)
        return float((mean - right).mean()), float(variance.mean())

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    if slopes(high)[0] <= 0:
        return TEMPERATURES[0]
    if slopes(low)[0] >= 0:
        return TEMPERATURES[1]
    b = 1.0
    for _ in range(100):
        slope, curvature = slopes(b)
        low, high = (b, high) if slope < 0 else (low, b)
        step = b - slope / curvature if curvature > 0 else high
        after = step if low < step < high else (low * high) ** 0.5
        if abs(after - b) <= 1e-12 * b:
            break
        b = after
    return 1 / b


def _checked(log_probs: Rows, labels: Labels) -> tuple[Floats, Ints]:
    if isinstance(log_probs, Tensor):
        log_probs = log_probs.detach().double().cpu().numpy()
    logs = np.asarray(log_probs, dtype=np.float64)
    if logs.ndim != 2 or logs.shape[1] < 1:
        raise ShapeError(f"`log_probs` must be (N, C), got {logs.shape}")
    gold = _labels(labels, logs.shape[1], "labels")
    if len(gold) != len(logs):
        raise ShapeError(f"`labels` must be ({len(logs)},) as `log_probs` has rows, got ({len(gold)},)")
    if not len(gold):
        raise DataError("there must be at least one item to score, got none; check that the split is not empty")
    with np.errstate(over="ignore"):
        sums = np.exp(logs).sum(1)
    if np.isnan(sums).any():
        raise ShapeError("`log_probs` must be numbers, got NaN; a model that diverged learns at a lower learning rate")
    off = np.abs(sums - 1) > 1e-2  # half precision is off by less
    if off.any():
        row = int(off.argmax())
        raise ShapeError(
            f"`log_probs` must hold log-probabilities, whose exponentials add up to 1, got {sums[row]:.4g} in row "
            f"{row}; apply log_softmax to negative energies"
        )
    return logs, gold


def _labels(labels: Labels, classes: int, name: str) -> Ints:
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ShapeError(f"`{name}` must be (N,) whole numbers, got shape {array.shape} of {array.dtype}")
    array = array.astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= classes):
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise ShapeError(f"`{name}` must be classes from 0 to {classes - 1}, got {wrong}")
    return array
