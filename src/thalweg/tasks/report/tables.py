"""Tables and lines of charts that pages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.tasks.report.text import closest, difference, escape, foreign

FIRST = 10
"""Answers shown beside their references."""


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


def outputs_table(names: Sequence[str], items: Sequence[tuple[str, Sequence[str], Sequence[str]]]) -> str:
    """Answers beside what is right, one column a model; what differs from the closest reference is marked.

    Args:
        names: of the models; items: source, references (none where nothing is right) and the answer of each model.

    >>> table = outputs_table(["first"], [("cat", ["k æ t"], ["k ʌ t"])])
    >>> "<mark>ʌ</mark>" in table
    True
    """
    judged = any(gold for _, gold, _ in items)
    rows = []
    for source, gold, answers in items:
        cells = [foreign(source), *([" <i>or</i> ".join(foreign(each) for each in gold)] if judged else [])]
        cells += [_output(answer, gold) for answer in answers]
        rows.append("<tr>" + "".join(f'<td dir="auto">{cell}</td>' for cell in cells) + "</tr>")
    return table_of(["source", *(["reference"] if judged else []), *names], rows)


def _output(answer: str, references: Sequence[str]) -> str:
    if not answer or not references:
        return foreign(answer or "∅")
    if answer in references:
        return f'{foreign(answer)} <span class="ok" title="right">✓</span>'
    return difference(answer, closest(answer, references) or "")
