"""The page of a diagnosis: findings in words, then the measurements they rest on."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.files import write_text
from thalweg.tasks.report.page import bar, chart_card, command_lines, sectioned, write_page
from thalweg.tasks.report.plots import COLOURS, style_axes, svg_of
from thalweg.tasks.report.tables import Line, row_of, table_of
from thalweg.tasks.report.text import escape, foreign, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from thalweg.diagnostics.gradient_flow import Site
    from thalweg.diagnostics.saturation import Saturation
    from thalweg.tasks.diagnosis.findings import Finding
    from thalweg.tasks.diagnosis.measures import Diagnosis


# Lines of a chart that the page has colours for; further ones are muted.
ROLES = ("first", "second", "best", "muted")
# Rows of a long table that are shown at once.
WORST = 12
MARKS = {"problem": ("bad", "✗"), "warning": ("cut", "!"), "note": ("muted", "·"), "good": ("ok", "✓")}


def write_diagnosis(
    diagnosis: Diagnosis, found: Sequence[Finding], out: Path, *, command: str = ""
) -> tuple[Path, Path]:
    """Writes the page and, beside it, the same as JSON; returns both paths.

    The page loads nothing from elsewhere and runs no script. About a second, for the charts.
    """
    write_page(out, f"{diagnosis.subject.name}, diagnosis", _body(diagnosis, found, command))
    record = {**diagnosis.to_json(), "findings": [asdict(finding) for finding in found]}
    beside = out.with_suffix(".json")
    write_text(beside, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    return out, beside


def _body(diagnosis: Diagnosis, found: Sequence[Finding], command: str) -> str:
    sections = [
        ("findings", "Findings", _findings(found, command)),
        ("depth", "Depth", _depth(diagnosis)),
        *diagnosis.sections(),
        ("saturation", "Saturation", _saturation(diagnosis)),
        ("weights", "Weights", _weights(diagnosis)),
        ("normalisation", "Normalisation", diagnosis.own_norms() + _norms(diagnosis)),
    ]
    return _header(diagnosis, found) + sectioned(sections)


def _header(diagnosis: Diagnosis, found: Sequence[Finding]) -> str:
    subject, reading, words = diagnosis.subject, diagnosis.reading, diagnosis.subject.words
    worst = sum(finding.severity == "problem" for finding in found)
    tiles = [
        ("problems", str(worst), "that keep it from training"),
        ("loss", f"{reading.loss:.3f}", f"nats {words.per}; {words.frequencies} alone {reading.frequencies:.3f}"),
        (f"other {words.given}", f"{reading.shuffled:.3f}", f"the loss beside {words.other}"),
        ("gradient", f"{diagnosis.gradient:.2e}", "norm of the whole"),
    ]
    tiles[1:1] = diagnosis.tiles()
    cells = "".join(
        f'<div class="tile"><span class="muted">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="muted">{escape(about)}</span></div>'
        for name, value, about in tiles
    )
    rows, *sizes = diagnosis.batch
    kind = "the trained model" if subject.trained else "the model as it starts"
    about = f"{kind}, on {rows} {words.items} of {subject.data}: {words.shape.format(*sizes)}"
    return (
        f'<header><p class="brand">Thalweg diagnosis</p><h1>{foreign(subject.name)}</h1>'
        f'<div class="tiles">{cells}</div><p class="muted">{foreign(about)}</p></header>'
    )


def _findings(found: Sequence[Finding], command: str) -> str:
    rows = []
    for finding in found:
        kind, mark = MARKS[finding.severity]
        change = f"<pre>{escape(' '.join(finding.change))}</pre>" if finding.change else ""
        rows.append(
            f'<tr><td class="{kind}" style="white-space:nowrap">{mark} {finding.severity}</td>'
            f"<td>{escape(finding.about)}</td>"
            f"<td>{escape(finding.text)}{change}</td></tr>"
        )
    table = table_of(("", "about", "what was found, and what to try"), rows)
    changes = list(dict.fromkeys(word for f in found if f.severity == "problem" for word in f.change))
    if not changes or not command:
        return table
    return table + command_lines([("Train it with what is suggested", [*shlex.split(command), *changes])])


def _figure(title: str, svg: str, lines: Sequence[Line]) -> str:
    keys = "".join(f'<span class="key {ROLES[min(n, 3)]}">{escape(line.label)}</span>' for n, line in enumerate(lines))
    return chart_card(title, svg, keys)


def _depth(diagnosis: Diagnosis) -> str:
    stacks = {name or "stack": sites for name, sites in diagnosis.flow.stacks().items()}
    deep = {name: [s for s in sites if not s.name.endswith("backward")] for name, sites in stacks.items()}
    deep = {name: sites for name, sites in deep.items() if len(sites) > 1}
    charts: list[tuple[str, list[Line]]] = []
    gradients = [Line(name, tuple((s.depth, s.gradient) for s in sites)) for name, sites in deep.items()]
    charts.append(("Gradient of the loss in each layer's states", gradients))
    spread = [Line(name, tuple((s.depth, s.spread) for s in sites)) for name, sites in deep.items()]
    charts.append(("How much states differ between inputs, of their size", spread))
    lines = []
    for name in dict.fromkeys(row.stack for row in diagnosis.depth):
        rows = [row for row in diagnosis.depth if row.stack == name]
        lines.append(Line(f"{name or 'stack'}, largest", tuple((row.depth, row.largest) for row in rows)))
        lines.append(Line(f"{name or 'stack'}, mean", tuple((row.depth, row.mean) for row in rows), dashed=True))
    charts.append(("Jacobian from a layer to the last: singular values", lines))
    charts += diagnosis.charts()
    drawn = [
        _figure(title, chart(lines, prefix=f"depth{n}-", xlabel="layer"), lines)
        for n, (title, lines) in enumerate(charts)
        if any(line.points for line in lines)
    ]
    rows = [
        row_of(s.name, f"{s.gradient:.2e}", f"{s.activation:.3f}", f"{s.spread:.2g}")
        for sites in stacks.values()
        for s in sites
    ]
    body = f'<div class="charts">{"".join(drawn)}</div>' if drawn else note("There is one layer a stack: no depth.")
    return body + table_of(("states", "#gradient", "#size", "#differ between inputs"), rows)


def time_section(diagnosis: Diagnosis) -> str:
    """Gradients at each position, and singular values of Jacobians over spans of time."""
    maps = "".join(
        _heat(f"{name or 'stack'}: gradient of the loss in the state at each position", sites)
        for name, sites in diagnosis.flow.stacks().items()
    )
    stacks = dict.fromkeys(layer.stack for layer in diagnosis.spans)
    charts = []
    for place, stack in enumerate(stacks):
        layers = [layer for layer in diagnosis.spans if layer.stack == stack]
        picked = [layers[0], layers[-1]] if len(layers) > 1 else layers
        lines = []
        for layer in picked:
            report = layer.report
            points = zip(report.spans, report.largest.median(1).values.tolist(), strict=True)
            lines.append(Line(f"{layer.name}, largest", tuple(points)))
            if report.bound is not None:
                points = zip(report.spans, report.bound.tolist(), strict=True)
                lines.append(Line(f"{layer.name}, delta^span", tuple(points), dashed=True))
        title = f"{stack or 'stack'}: Jacobian over spans of time"
        charts.append(_figure(title, chart(lines, prefix=f"time{place}-", xlabel="steps"), lines))
    body = f'<div class="charts">{"".join(charts)}</div>' if charts else note("No recurrent layers, or too wide ones.")
    return f'<div class="maps">{maps}</div>{body}'


def _heat(title: str, sites: Sequence[Site]) -> str:
    """Layers down, positions across, last layer on top; the shade is logarithmic, six powers of ten deep."""
    values = [value for site in sites for value in site.by_time if value > 0]
    if not values or max(len(site.by_time) for site in sites) < 2:
        return ""
    top = math.log10(max(values))
    rows = []
    for site in reversed(sites):
        cells = []
        for t, value in enumerate(site.by_time[:40], start=1):
            shade = max(0.0, 1 + (math.log10(value) - top) / 6) if value > 0 else 0.0
            cells.append(f'<td style="--w:{shade:.3g}" title="{escape(site.name)}, position {t}: {value:.2e}"></td>')
        rows.append(f'<tr><th scope="row">{escape(site.name)}</th>{"".join(cells)}</tr>')
    caption = f"<b>{escape(title)}</b> <span class=muted>darkest {max(values):.1e}, white a millionth of it</span>"
    return (
        f'<figure class="card map"><figcaption>{caption}</figcaption><div class="scroll">'
        f'<table class="heat"><tbody>{"".join(rows)}</tbody></table></div></figure>'
    )


def _saturation(diagnosis: Diagnosis) -> str:
    report = diagnosis.saturation
    if not report.rows:
        return note("No gates or activations that can be looked at.")
    heads = ("layer", "gate", "", "#low", "#high", "#units stuck", "#mean", "at an end")
    worst = table_of(heads, [_gate(row) for row in report.worst(WORST)])
    if len(report.rows) <= WORST:
        return worst
    every = table_of(heads, [_gate(row) for row in report.rows])
    return f"{worst}<details><summary>All {len(report.rows)} gates and activations</summary>{every}</details>"


def _gate(row: Saturation) -> str:
    cells = f'<td>{escape(row.gate)}</td><td class="muted">{row.kind}</td>' + "".join(
        f'<td class="number">{value:.1%}</td>' for value in (row.low, row.high, row.stuck)
    )
    return (
        f'<tr><th scope="row">{escape(row.name)}</th>{cells}<td class="number">{row.mean:.2f}</td>'
        f'<td class="wide">{bar(row.share)}</td></tr>'
    )


def _weights(diagnosis: Diagnosis) -> str:
    rows = [
        row_of(row.name, f"{row.size:,}", f"{row.gradient:.2e}", f"{row.weight:.2e}", f"{row.update:.2e}")
        for row in diagnosis.flow.layers
    ]
    first = table_of(("parameters", "#numbers", "#gradient (rms)", "#weight (rms)", "#relative step"), rows)
    decay = diagnosis.decay
    rows = [
        row_of(
            row.name,
            *(f"{value:.2e}" for value in (row.rule, row.measured, row.small, row.large)),
            f"{row.half_life:,.0f}",
        )
        for row in decay.groups
    ]
    heads = ("decay a step", "#by rule", "#measured", "#small gradients", "#large gradients", "#half-life (steps)")
    about = f"<p>{escape(decay.optimiser)}, {decay.steps} steps on a copy: {escape(decay.advice)}.</p>"
    return f"{first}<h3>Weight decay</h3>{about}{table_of(heads, rows)}"


def _norms(diagnosis: Diagnosis) -> str:
    parts = []
    for stack, report in diagnosis.norms.items():
        rows = [
            row_of(
                row.scheme,
                f"{row.groups:,}",
                *(f"{a:.3g} to {b:.3g}" for a, b in (row.mean, row.deviation, row.gain)),
                f"{row.dead:.1%}",
            )
            for row in report.rows
        ]
        title = f"<h3>What norms would measure on the last {escape(stack or 'layer')} layer</h3>"
        parts.append(title + table_of(("scheme", "#groups", "#mean", "#deviation", "#gradient gain", "#dead"), rows))
    return "".join(parts) or note("No layers whose states could be looked at.")


def chart(lines: Sequence[Line], *, prefix: str, xlabel: str) -> str:
    """Lines over layers or steps on a logarithmic scale, as an `<svg>` element in the page's colours.

    >>> chart([Line("a", ((1, 0.1), (2, 1.0)))], prefix="a-", xlabel="layer").startswith("<svg")
    True
    """
    from matplotlib.ticker import LogLocator, NullLocator

    def draw(axes: Axes) -> None:
        for n, line in enumerate(lines):
            points = [(x, y) for x, y in line.points if y > 0 and math.isfinite(y)]
            look: dict[str, Any] = {"color": COLOURS[ROLES[min(n, 3)]], "linestyle": ":" if line.dashed else "-"}
            axes.plot([x for x, _ in points], [y for _, y in points], linewidth=1.8, marker="o", markersize=3.5, **look)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if not 0.001 <= value <= 1000 else f"{value:g}")
        style_axes(axes, xlabel, whole=True)

    return svg_of(draw, prefix=prefix)
