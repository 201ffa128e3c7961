"""Numbers, tables and the first lines of a result file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.declaration import Facts


def number(value: float) -> str:
    """Three figures, no exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def spread(facts: dict[str, float]) -> str:
    return f"{number(facts['median'])} [{number(facts['low'])}, {number(facts['high'])}]"


def times(ratio: dict[str, float] | None) -> str:
    """``, **12.3x**``, which follows a spread; nothing where there is no ratio."""
    return f", **{number(ratio['median'])}x**" if ratio else ""


def mebibytes(count: float) -> str:
    return number(count / 2**20)


def sizes(values: Sequence[int]) -> str:
    return f"({', '.join(map(str, values))})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """With an empty line after it."""
    lines = [" | ".join(head), *(" | ".join(row) for row in rows)]
    first, *others = (f"| {line} |" for line in lines)
    return [first, "|" + "---|" * len(head), *others, ""]


def comparison(
    cells: Sequence[dict[str, Any]], head: Sequence[str], label: Callable[[dict[str, Any]], Sequence[str]]
) -> list[str]:
    """A row for each case: its label, then milliseconds of every job, in bold its ratio."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["jobs"]))
    rows = []
    for cell in cells:
        row = list(label(cell))
        for name in names:
            job = cell["jobs"].get(name, {})
            note = job.get("note")
            if "ms" in job:
                row.append(spread(job["ms"]) + (f" ({note})" if note else "") + times(cell["ratios"].get(name)))
            else:
                row.append(note or "none")
        rows.append(row)
    return table([*head, *names], rows)


def heading(facts: Facts, how: str = "") -> list[str]:
    """Machine, versions, how it was measured, and who was left out."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    runs = "One run" if facts["one_run"] else "Parts from several runs, sides of a table from one"
    return [
        f"{facts['machine']['title']}, {facts['threads']} threads. {versions}. {runs}, alternating rounds (up to "
        f"{facts['rounds']}){how}.",
        "",
        *(f"- {line}" for line in facts.get("left_out", [])),
        "",
    ]
