"""Is it good? Error rates of predicted strings with intervals, and which symbols are mistaken for which."""

from __future__ import annotations

from thalweg.metrics.classification import (
    ClassScore,
    Reliability,
    class_scores,
    confusion_matrix,
    reliability,
    score_classes,
    temperature_scale,
)
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
    "ClassScore",
    "Confusion",
    "Mistake",
    "Reliability",
    "Score",
    "align",
    "class_scores",
    "closest_reference",
    "confusion_matrix",
    "confusions",
    "edit_distance",
    "metric_direction",
    "reliability",
    "score_classes",
    "score_strings",
    "temperature_scale",
    "worst",
]
