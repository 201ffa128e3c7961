"""Is it good? Error rates of predicted strings with intervals, and which symbols are mistaken for which."""

from __future__ import annotations

from thalweg.metrics.confusions import Confusion, Mistake, align, confusions, worst
from thalweg.metrics.strings import (
    METRICS,
    Score,
    closest_reference,
    edit_distance,
    metric_direction,
    score_strings,
)

__all__ = [
    "METRICS",
    "Confusion",
    "Mistake",
    "Score",
    "align",
    "closest_reference",
    "confusions",
    "edit_distance",
    "metric_direction",
    "score_strings",
    "worst",
]
