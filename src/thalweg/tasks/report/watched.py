"""Charts of what ``thalweg train --watch gradients`` logged."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from thalweg.tasks.report.plots import Curve
from thalweg.tasks.report.run import TrainingLog
from thalweg.tasks.report.text import as_number

__all__ = ["watched_curves"]


def watched_curves(log: TrainingLog) -> Iterator[tuple[str, list[Curve]]]:
    """Titles and curves over epochs: gradients at the first layer of a stack over its last, and steps over weights.

    Of a log without profiles, nothing.

    >>> layers = {"encoder 1": [0.1, 1.0, 0.01], "encoder 2": [0.2, 1.0, 0.03]}
    >>> log = TrainingLog(epochs=[{"epoch": 1, "step": 10}], profiles=[{"step": 5, "layers": layers}])
    >>> for title, (curve,) in watched_curves(log):
    ...     print(title, curve.label, curve.points)
    Gradient, first layer over last encoder ((0.5, 0.5),)
    Step over weights median ((0.5, 0.02),)
    """
    each = as_number(log.epochs[-1].get("step")) if log.epochs else None
    if not log.profiles or not each:
        return
    each /= log.epochs[-1]["epoch"]
    ratios: dict[str, list[tuple[float, float]]] = {}
    steps: list[tuple[float, float]] = []
    for profile in log.profiles:
        layers = profile.get("layers")
        rows = {name: row for name, row in (layers if isinstance(layers, dict) else {}).items() if _is_row(row)}
        epoch = profile["step"] / each
        for stack, (first, last) in _ends(rows).items():
            if first and last:
                ratios.setdefault(stack, []).append((epoch, first / last))
        if rows:
            steps.append((epoch, statistics.median(row[2] for row in rows.values())))
    roles = ("first", "second")
    curves = [Curve(name, roles[n], tuple(points)) for n, (name, points) in enumerate(list(ratios.items())[:2])]
    if curves:
        yield "Gradient, first layer over last", curves
    if steps:
        yield "Step over weights", [Curve("median", "first", tuple(steps))]


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(as_number(value) is not None for value in row)


def _ends(rows: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Gradients at the first and the last layer of each stack that has several."""
    stacks: dict[str, dict[int, float]] = {}
    for name, row in rows.items():
        stack, _, number = name.rpartition(" ")
        if number.isdigit():
            stacks.setdefault(stack, {})[int(number)] = row[0]
    return {stack: (found[min(found)], found[max(found)]) for stack, found in stacks.items() if len(found) > 1}
