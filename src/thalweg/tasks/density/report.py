"""What a report shows of a density: how dense it is where the rows lie, where that is, and which are unusual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thalweg.tasks.report.page import chart_card
from thalweg.tasks.report.part import ReportPart
from thalweg.tasks.report.plots import COLOURS, style_axes, svg_of
from thalweg.tasks.report.run import EvaluationRecord
from thalweg.tasks.report.tables import row_of, table_of
from thalweg.tasks.report.text import as_list, as_number, figure, foreign, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes


UNUSUAL = 0.01
SIZE = (4.4, 3.2)


class DensityReport(ReportPart):
    """What a report shows of a density.

    >>> dict(DensityReport().facts({"columns": ["height", "weight"]}))
    {'Columns': '2: height, weight'}
    """

    def facts(self, start: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The columns."""
        names = [str(name) for name in as_list(start.get("columns"))]
        if names:
            yield "Columns", f"{len(names)}: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"

    def section(self, evaluation: EvaluationRecord, place: int) -> str:
        """A histogram, the points, the least usual items."""
        shown = evaluation.pictures or {}
        values = [value for each in as_list(shown.get("log_densities")) if (value := as_number(each)) is not None]
        charts = ""
        if values:
            charts += chart_card(
                "Log density of each item",
                svg_of(lambda axes: _histogram(axes, values), prefix=f"h{place}-", size=SIZE),
            )
        points = [
            row for row in as_list(shown.get("points")) if len(as_list(row)) == 3 and None not in map(as_number, row)
        ]
        names = [str(name) for name in as_list(shown.get("axes"))]
        if points and len(names) == 2:
            drawn = svg_of(lambda axes: _scatter(axes, points, names), prefix=f"p{place}-", size=SIZE)
            charts += chart_card("Where they lie; unusual ones are marked", drawn)
        body = f'<div class="charts">{charts}</div>' if charts else note("pictures.json holds no densities.")
        title = f"Densities on {foreign(evaluation.name)}"
        return f'<section id="evaluation-{place}"><h2>{title}</h2>{body}<h3>Least usual</h3>{_listed(shown)}</section>'


def _histogram(axes: Axes, values: list[float]) -> None:
    # A few far below the rest would leave it one bar: they share the first.
    low = sorted(values)[len(values) // 100]
    axes.hist([max(value, low) for value in values], bins=40, color=COLOURS["first"])
    style_axes(axes, "log density; the lowest hundredth in the first bar")


def _scatter(axes: Axes, points: list[list[float]], names: list[str]) -> None:
    for unusual, colour, size in ((False, "first", 3), (True, "best", 14)):
        chosen = [point for point in points if (point[2] < UNUSUAL) == unusual]
        if chosen:
            axes.scatter([p[0] for p in chosen], [p[1] for p in chosen], s=size, color=COLOURS[colour], linewidths=0)
    style_axes(axes, names[0], grid="both")
    axes.set_ylabel(names[1], color=COLOURS["muted"])


def _listed(shown: dict[str, Any]) -> str:
    rows = [row for row in as_list(shown.get("listed")) if isinstance(row, dict)]
    if not rows:
        return note("No items.")
    figures = [[figure(as_number(row.get(key))) for key in ("log_density", "rank")] for row in rows]
    body = [row_of(str(row.get("source", "")), *cells) for row, cells in zip(rows, figures, strict=True)]
    return table_of(("item", "#log density", "#rank"), body)
