"""An experiment as one self-contained HTML page, in the look of the reports of runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.recipes.experiments.findings import Picture, Table
from thalweg.tasks.report.page import command_lines, fact_list, page_of
from thalweg.tasks.report.tables import table_of
from thalweg.tasks.report.text import describe, escape


def experiment_page(
    title: str,
    note: str,
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    command: Sequence[str],
) -> str:
    """The page; it loads nothing from elsewhere and runs no script.

    >>> page = experiment_page("Digits", "", {"seeds": [0]}, [Table("Rates", [{"noise": "1"}])], [], ["thalweg"])
    >>> "<h2>Rates</h2>" in page, "http:" in page
    (True, False)
    """
    header = f'<header><p class="brand">Thalweg · experiment</p><h1>{escape(title)}</h1><p>{escape(note)}</p></header>'
    body = "".join([*map(_table, tables), *map(_picture, pictures)])
    listed = fact_list(((name, describe(value)) for name, value in facts.items()), "facts card")
    again = f"<section><h2>Settings</h2>{listed}{command_lines([('Run it again', command)])}</section>"
    return page_of(title, f"{header}<main>{body}{again}</main>", images=True)


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    # Columns whose entries begin like numbers stand to the right.
    kinds = {name: all(row[name][:1] in "0123456789-–" for row in table.rows) for name in table.rows[0]}
    heads = [f"#{name}" if number else name for name, number in kinds.items()]
    rows = (
        "".join(f"<td{' class=number' if kinds[name] else ''}>{escape(value)}</td>" for name, value in row.items())
        for row in table.rows
    )
    said = f'<p class="muted">{escape(table.note)}</p>' if table.note else ""
    body = table_of(heads, [f"<tr>{row}</tr>" for row in rows])
    return f"<section><h2>{escape(table.title)}</h2>{body}{said}</section>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure class="card" style="margin:0 0 1rem"><img alt="{escape(picture.caption)}" '
        f'style="display:block;width:100%;max-width:62rem;margin:auto;height:auto;background:#fff;border-radius:.4rem" '
        f'src="data:image/png;base64,{data}"><figcaption class="muted" style="margin:.6rem 0 0">'
        f"{escape(picture.caption)}</figcaption></figure>"
    )
