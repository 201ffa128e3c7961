"""Tables and lines of charts that the pages of diagnoses share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.tasks.report.text import escape

__all__ = ["Line", "row_of", "table_of"]


@dataclass(frozen=True)
class Line:
    """One line of a chart; points with a value that is not positive are left out, the scale being logarithmic.

    >>> Line("encoder", ((1, 0.1), (2, 1.0))).points[0]
    (1, 0.1)
    """

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def table_of(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table of rows that are HTML already; heads that begin with ``#`` stand over numbers.

    >>> table_of(("layer", "#size"), [row_of("encoder 1", "64")]).count("<th")
    4
    """
    head = "".join(
        f"<th{' class=number' if name.startswith('#') else ''}>{escape(name.lstrip('#'))}</th>" for name in heads
    )
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row_of(name: str, *cells: str) -> str:
    """A row: its name, then numbers as they are written.

    >>> row_of("a<b", "1")
    '<tr><th scope="row">a&lt;b</th><td class="number">1</td></tr>'
    """
    return f'<tr><th scope="row">{escape(name)}</th>' + "".join(f'<td class="number">{c}</td>' for c in cells) + "</tr>"
