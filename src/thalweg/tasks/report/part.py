"""A task's part of a run's report; this one suits any task, and each may draw its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thalweg.tasks.report.text import figure, foreign, note

if TYPE_CHECKING:
    from thalweg.tasks.report.run import EvaluationRecord, RunRecord


class ReportPart:
    """What a report shows that only the task knows.

    >>> ReportPart().conditions({})
    []
    """

    def facts(self, start: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """Facts about the data of a run, from the first line of its log."""
        return ()

    def shape(self, model: dict[str, Any]) -> dict[str, Any]:
        """A model's settings without those that do nothing in it."""
        return model

    def conditions(self, metrics: dict[str, Any]) -> list[str]:
        """How something was measured, as pieces of HTML."""
        return []

    def remarks(self, metrics: dict[str, Any]) -> str:
        """What else was found out, as HTML before the scores."""
        return ""

    def section(self, evaluation: EvaluationRecord, place: int) -> str:
        """All that one evaluation shows beside its scores; ``place`` numbers it in the page."""
        counted = f"{figure(evaluation.correct)} of {figure(evaluation.items)} are right."
        body = note("predictions.jsonl is absent." if evaluation.items is None else counted)
        return f'<section id="evaluation-{place}"><h2>Answers on {foreign(evaluation.name)}</h2>{body}</section>'

    def commands(self, run: str, record: RunRecord) -> list[tuple[str, list[str]]]:
        """Commands that evaluate and predict, each with what it does."""
        done = [str((each.metrics or {}).get("file") or each.name) for each in record.evaluations] or ["DATA"]
        lines = [("Evaluate", ["thalweg", "evaluate", run, data]) for data in done]
        return [*lines, ("Predict", ["thalweg", "predict", run, "DATA"])]
