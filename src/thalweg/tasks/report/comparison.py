"""The page of a comparison: scores of several runs with their differences, and their first answers side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.tasks.report.page import command_lines, fact_list, sectioned, write_page
from thalweg.tasks.report.run import read_run
from thalweg.tasks.report.tables import FIRST, outputs_table, table_of
from thalweg.tasks.report.text import escape, foreign

if TYPE_CHECKING:
    from thalweg.tasks.comparison import Comparison


SURE = 0.05
"""A difference with a p-value below this is printed bold."""


def comparison_page(path: Path, comparison: Comparison) -> Path:
    """Writes the page and returns its path; like a run's report it loads nothing from elsewhere."""
    facts = [("Data", comparison.data), ("Items", f"{comparison.items:,}")]
    facts += zip(comparison.names, comparison.runs, strict=True)
    header = (
        f'<header><p class="brand">Thalweg · comparison</p><h1>{foreign(" · ".join(comparison.names))}</h1>'
        f"{fact_list(facts)}</header>"
    )
    remarks = "<br>".join(escape(line) for line in comparison.remarks())
    scores = f'{_scores(comparison)}<p class="muted">{remarks}</p>'
    parts = [
        ("scores", "Scores", scores),
        ("outputs", "First answers", _outputs(comparison)),
        ("commands", "Use it again", command_lines([("Compare again", _again(comparison))])),
    ]
    return write_page(path, f"Comparison on {comparison.data}", header + sectioned(parts))


def _again(comparison: Comparison) -> list[str]:
    """The command that measured the first run, as its own report has it, with the other runs beside it."""
    folder = comparison.evaluations[0].directory
    record = read_run(folder.parents[1])
    record.evaluations = [each for each in record.evaluations if each.name == folder.name]
    _, words = record.part.commands(comparison.runs[0], record)[0]
    place = words.index(comparison.runs[0])
    return [*words[:place], *comparison.runs, *words[place + 1 :]]


def _scores(comparison: Comparison) -> str:
    table = comparison.tables()[0]
    heads = [f"#{name}" if name in table.right else name for name in table.rows[0]]
    return table_of(heads, list(_score_rows(table.rows, table.right)))


def _score_rows(rows: Sequence[Mapping[str, str]], right: Sequence[str]) -> Iterable[str]:
    before = ""
    for row in rows:
        p = row.get("p (Holm)", row["p"])
        sure = bool(p) and float(p) < SURE
        cells = []
        for name, value in row.items():
            shown = foreign(value) if name == "run" else escape("" if name == "metric" and value == before else value)
            shown = f"<b>{shown}</b>" if sure and name in ("difference", "p", "p (Holm)") else shown
            cells.append(f"<td{' class=number' if name in right else ''}>{shown}</td>")
        before = row["metric"]
        yield f"<tr>{''.join(cells)}</tr>"


def _outputs(comparison: Comparison) -> str:
    first = comparison.measured[0]
    answers = [each.answers for each in comparison.measured]
    items = list(zip(first.sources, first.references, *answers, strict=True))[:FIRST]
    chosen = f'<p class="muted">The first {len(items)} of {comparison.items:,} items; all are in answers.tsv.</p>'
    return chosen + outputs_table(comparison.names, [(source, gold, own) for source, gold, *own in items])
