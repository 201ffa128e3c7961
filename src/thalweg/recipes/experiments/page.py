"""An experiment as one self-contained HTML page, in the look of the reports of runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from thalweg.recipes.experiments.findings import Picture, Table
from thalweg.tasks.report.text import describe, escape

__all__ = ["experiment_page"]

# Pages of runs hold no images, and their policy forbids them; these hold PNGs inside the page.
_POLICY = ("default-src 'none';", "default-src 'none'; img-src data:;")


def experiment_page(
    title: str,
    note: str,
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    command: str,
) -> str:
    """The page; it loads nothing from elsewhere and runs no script.

    >>> page = experiment_page("Digits", "", {"seeds": [0]}, [Table("Rates", [{"noise": "1"}])], [], "thalweg")
    >>> "<h2>Rates</h2>" in page, "http:" in page
    (True, False)
    """
    template = files("thalweg.tasks.report").joinpath("page.html").read_text(encoding="utf-8").replace(*_POLICY)
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(describe(value))}</dd></div>" for name, value in facts.items()
    )
    header = f'<header><p class="brand">Thalweg · experiment</p><h1>{escape(title)}</h1><p>{escape(note)}</p></header>'
    body = "".join([*map(_table, tables), *map(_picture, pictures)])
    again = (
        f'<section><h2>Settings</h2><dl class="facts card">{listed}</dl>'
        f'<div class="card commands"><p>Run it again</p><pre>{escape(command)}</pre></div></section>'
    )
    return Template(template).substitute(title=escape(title), body=f"{header}<main>{body}{again}</main>")


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f'<th class="{_align(table, name)}">{escape(name)}</th>' for name in table.rows[0])
    rows = "".join(
        "<tr>"
        + "".join(f'<td class="{_align(table, name)}">{escape(value)}</td>' for name, value in row.items())
        + "</tr>"
        for row in table.rows
    )
    said = f'<p class="muted">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{said}</div></section>"
    )


def _align(table: Table, name: str) -> str:
    """Columns whose entries begin like numbers stand to the right."""
    return "number" if all(row[name][:1] in "0123456789-–" for row in table.rows) else ""


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure class="card" style="margin:0 0 1rem"><img alt="{escape(picture.caption)}" '
        f'style="display:block;width:100%;max-width:62rem;margin:auto;height:auto;background:#fff;border-radius:.4rem" '
        f'src="data:image/png;base64,{data}"><figcaption class="muted" style="margin:.6rem 0 0">'
        f"{escape(picture.caption)}</figcaption></figure>"
    )
