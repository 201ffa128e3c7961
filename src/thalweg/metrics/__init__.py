"""Is it good? Error rates of predicted strings with intervals, and which symbols are mistaken for which."""

from __future__ import annotations

from thalweg.metrics.bootstrap import Means, Measure, Score, Tally, scored
from thalweg.metrics.classification import (
    ClassScore,
    Reliability,
    class_scores,
    confusion_matrix,
    reliability,
    score_classes,
    temperature_scale,
)
from thalweg.metrics.comparison import Difference, compare_tallies
from thalweg.metrics.confusions import Confusion, Mistake, align, confusions, worst
from thalweg.metrics.strings import (
    METRICS,
    closest_reference,
    edit_distance,
    metric_direction,
    score_strings,
)

__all__ = [
    "METRICS",
    "ClassScore",
    "Confusion",
    "Difference",
    "Means",
    "Measure",
    "Mistake",
    "Reliability",
    "Score",
    "Tally",
    "align",
    "class_scores",
    "closest_reference",
    "compare_tallies",
    "confusion_matrix",
    "confusions",
    "edit_distance",
    "metric_direction",
    "reliability",
    "score_classes",
    "score_strings",
    "scored",
    "temperature_scale",
    "worst",
]
