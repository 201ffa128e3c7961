"""What a report shows of a run that classifies images: classes, confusions, calibration, mistakes, what it sees."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.tasks.report.page import bar, chart_card
from thalweg.tasks.report.part import ReportPart
from thalweg.tasks.report.plots import COLOURS, style_axes, svg_of
from thalweg.tasks.report.run import EvaluationRecord, RunRecord
from thalweg.tasks.report.text import as_list, as_number, escape, figure, foreign, note, probability

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Only what an evaluation writes itself is shown as a picture.
PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")

# Classes of a matrix that still fits a page; of more, the commonest confusions are listed.
SIDE = 30
LISTED = 25


class ImageReport(ReportPart):
    """What a report shows of a run that classifies images."""

    def facts(self, start: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Facts about the images of a run, from the first line of its log.

        >>> start = {"classes": ["sea"], "images": {"channels": 1, "height": 8, "width": 8}}
        >>> dict(ImageReport().facts(start))["Images"]
        '8 × 8 grey'
        """
        classes = start.get("classes")
        if isinstance(classes, list):
            names = ", ".join(str(name) for name in classes[:12]) + (" …" if len(classes) > 12 else "")
            yield "Classes", f"{len(classes)}: {names}"
        shape = start.get("images")
        if isinstance(shape, dict):
            kind = {1: "grey", 3: "RGB"}.get(shape.get("channels", 0), f"{shape.get('channels')} channels")
            yield "Images", f"{figure(shape.get('width'))} × {figure(shape.get('height'))} {kind}"
        varied = start.get("augment")
        if isinstance(varied, dict):
            parts = [name if value is True else f"{name} {value:g}" for name, value in varied.items() if value]
            yield "Varied by", " · ".join(parts) or "nothing"
        if start.get("skipped_count"):
            yield "Skipped", f"{figure(start['skipped_count'])} unreadable files"

    def shape(self, model: dict[str, Any]) -> dict[str, Any]:
        """A network's settings without those that do nothing in it.

        >>> ImageReport().shape({"channels": [8], "norm": "none", "stem": 0, "stem_kernel": 3, "hidden": []})
        {'channels': [8], 'hidden': 'none'}
        """
        stem, pooled = model.get("stem"), model.get("pooling") != "none"
        idle = {
            "stem_kernel": not stem,
            "stem_stride": not stem,
            "pool": not pooled,
            "hidden_norm": not model.get("hidden"),
        }
        kept = {}
        for key, value in model.items():
            if idle.get(key) or (key != "hidden" and value in (0, 0.0, "none", False, "default")):
                continue
            kept[key] = value if value != [] else "none"
        return kept

    def commands(self, run: str, record: RunRecord) -> list[tuple[str, list[str]]]:
        """The commands that evaluate and predict.

        >>> from pathlib import Path
        >>> ImageReport().commands("runs/x", RunRecord(path=Path("runs/x"), name="x"))[0][1]
        ['thalweg', 'evaluate', 'runs/x', 'test']
        """
        done = [str((each.metrics or {}).get("file") or each.name) for each in record.evaluations]
        wanted = [*done, *([] if "test" in done else ["test"])]
        lines = [("Evaluate", ["thalweg", "evaluate", run, spec]) for spec in wanted]
        lines.append(("Predict images", ["thalweg", "predict", run, "image.png", "folder/", "--k", "3"]))
        return [*lines, ("Parameters and cost of each layer", ["thalweg", "show", run])]

    def section(self, evaluation: EvaluationRecord, place: int) -> str:
        """All that one evaluation shows of classes and single images; ``place`` numbers it in the page."""
        metrics, shown = evaluation.metrics or {}, evaluation.pictures or {}
        names = [str(name) for name in as_list(metrics.get("names"))]
        matrix = _matrix(metrics.get("confusion"), len(names))
        parts = [
            f"<h3>Classes</h3>{_classes(metrics.get('classes'))}",
            f"<h3>What is taken for what</h3>{_confusion(matrix, names)}",
            f"<h3>Calibration</h3>{_calibration(metrics, place)}",
            f"<h3>Most confident mistakes</h3>{_mistakes(shown.get('mistakes'))}",
            f"<h3>What it looks at</h3>{_saliency(shown.get('saliency'))}",
            f"<h3>First filters</h3>{_filters(shown.get('filters'))}",
            f"<h3>Maps</h3>{_maps(shown.get('maps'))}",
        ]
        title = f"Classes on {foreign(evaluation.name)}"
        return f'<section id="evaluation-{place}"><h2>{title}</h2>{"".join(parts)}</section>'


def _picture(value: object, about: str) -> str:
    if not isinstance(value, str) or not PICTURE.fullmatch(value):
        return ""
    return f'<img class="pixels" src="{value}" alt="{escape(about)}">'


def _classes(rows: object) -> str:
    found = [row for row in as_list(rows) if isinstance(row, dict)]
    if not found:
        return note("metrics.json holds no classes.")
    body = ""
    for row in found:
        f1 = as_number(row.get("f1")) or 0.0
        cells = "".join(
            f'<td class="number">{figure(as_number(row.get(k)))}</td>' for k in ("precision", "recall", "f1")
        )
        counts = "".join(f'<td class="number">{figure(row.get(key))}</td>' for key in ("support", "predicted"))
        name = foreign(row.get("name", ""))
        body += f'<tr><th scope="row">{name}</th>{cells}{counts}<td class="wide">{bar(f1)}</td></tr>'
    head = "".join(f'<th class="number">{name}</th>' for name in ("precision", "recall", "F1", "images", "predicted"))
    return (
        f'<div class="card scroll"><table class="classes"><thead><tr><th>class</th>{head}<th class="wide">F1</th>'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _matrix(value: object, side: int) -> list[list[int]]:
    rows = [[int(as_number(cell) or 0) for cell in as_list(row)] for row in as_list(value)]
    return rows if side and len(rows) == side and all(len(row) == side for row in rows) else []


def _confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    if not matrix:
        return note("metrics.json holds no confusions.")
    listed = _commonest(matrix, names)
    if len(names) > SIDE:
        return listed
    head = "".join(f'<th scope="col">{foreign(name)}</th>' for name in names)
    body = ""
    for i, row in enumerate(matrix):
        cells = "".join(_cell(count, sum(row), names[i], names[j], i == j) for j, count in enumerate(row))
        body += f'<tr><th scope="row">{foreign(names[i])}</th>{cells}</tr>'
    legend = '<p class="muted">Rows are the right class, columns the predicted one; colours are shares of a row.</p>'
    return (
        f'<div class="card"><div class="pair"><div class="scroll">{legend}<table class="matrix"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div><div>{listed}</div></div></div>"
    )


def _cell(count: int, total: int, gold: str, predicted: str, right: bool) -> str:
    share = count / total if total else 0.0
    kind = ("" if right else "wrong ") + ("strong" if share > 0.55 else "")
    # A small share of errors is what one looks for: its square root can be seen.
    weight = share if right else share**0.5
    title = f"{gold} taken for {predicted}: {count} of {total}"
    return f'<td class="{kind.strip()}" style="--w:{weight:.3f}" title="{escape(title)}">{count or ""}</td>'


def _commonest(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    pairs = [
        (count, sum(row), names[i], names[j])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs.sort(key=lambda pair: -pair[0])
    if not pairs:
        return note("No class was taken for another.")
    body = "".join(
        f'<tr><td>{foreign(gold)}</td><td>{foreign(taken)}</td><td class="number">{figure(count)}</td>'
        f'<td class="number">{count / total:.1%}</td></tr>'
        for count, total, gold, taken in pairs[: LISTED if len(names) > SIDE else 10]
    )
    return (
        '<table><thead><tr><th>right</th><th>taken for</th><th class="number">images</th><th class="number">of class'
        f"</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _calibration(metrics: dict[str, Any], place: int) -> str:
    tables = metrics.get("reliability")
    before = tables.get("before") if isinstance(tables, dict) else None
    if not isinstance(before, dict):
        return note("metrics.json holds no calibration.")
    after = tables.get("after") if isinstance(tables, dict) else None
    lines = ["Where confidence can be believed, the points lie on the diagonal."]
    temperature, scaled = as_number(metrics.get("temperature")), metrics.get("calibrated")
    if temperature is not None and isinstance(scaled, dict) and isinstance(after, dict):
        sure = "about as sure as it may be" if abs(temperature - 1) < 0.05 else "less sure than it may be"
        way = "too sure of itself" if temperature >= 1.05 else sure
        lines.append(
            f"A temperature of {temperature:.3f}, fitted on the validation images, says that the network is {way}: "
            f"with it the ECE goes from {figure(before.get('ece'))} to {figure(scaled.get('ece'))}, and the NLL is "
            f"{figure(scaled.get('nll'))}."
        )
    svg = _reliability_svg(before, after if isinstance(after, dict) else None, f"reliability{place}-")
    keys = '<span class="key second">as trained</span>'
    keys += '<span class="key first">with temperature</span>' if isinstance(after, dict) else ""
    words = "".join(f"<p>{escape(line)}</p>" for line in lines)
    chart = chart_card("Accuracy against confidence", svg, keys)
    return f'<div class="charts">{chart}<div class="card">{words}</div></div>'


def _reliability_svg(before: dict[str, Any], after: dict[str, Any] | None, prefix: str) -> str:
    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=COLOURS["line"], linewidth=1)
        for table, role in ((before, "second"), (after, "first")):
            if table is not None:
                pairs = zip(as_list(table.get("confidence")), as_list(table.get("accuracy")), strict=False)
                points = [(x, y) for x, y in pairs if as_number(x) is not None and as_number(y) is not None]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                axes.plot(xs, ys, color=COLOURS[role], marker="o", markersize=4, linewidth=1.6)
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
        style_axes(axes, "confidence", grid="both")

    return svg_of(draw, prefix=prefix, size=(4.4, 3.4))


def _verdict(item: dict[str, Any]) -> str:
    gold, predicted = str(item.get("gold", "")), str(item.get("predicted", ""))
    chance = escape(probability(as_number(item.get("probability"))))
    if gold == predicted:
        return f'<p><span class="ok">✓</span> <b>{foreign(predicted)}</b> <span class="muted">{chance}</span></p>'
    own = escape(probability(as_number(item.get("gold_probability"))))
    return (
        f'<p><span class="bad">✗</span> <b>{foreign(predicted)}</b> <span class="muted">{chance}</span></p>'
        f'<p><span class="muted">is</span> {foreign(gold)} <span class="muted">{own}</span></p>'
    )


def _mistakes(items: object) -> str:
    if items is None:
        return note("pictures.json is absent.")
    cards = [
        f'<figure class="card shot" title="{escape(item.get("file", ""))}">'
        f"{_picture(item.get('image'), str(item.get('file', '')))}{_verdict(item)}</figure>"
        for item in as_list(items)
        if isinstance(item, dict)
    ]
    return f'<div class="shots">{"".join(cards)}</div>' if cards else note("There is none.")


def _saliency(items: object) -> str:
    found = [item for item in as_list(items) if isinstance(item, dict)]
    if not found:
        return note("pictures.json holds none.")
    kinds = (("image", "image"), ("smooth", "SmoothGrad"), ("integrated", "integrated gradients"), ("cam", "Grad-CAM"))
    cards = ""
    for item in found:
        four = "".join(f"<div>{_picture(item.get(key), name)}<span>{name}</span></div>" for key, name in kinds)
        cards += f'<figure class="card look"><div class="four">{four}</div>{_verdict(item)}</figure>'
    legend = '<p class="muted">Bright pixels are those that the energy of the predicted class depends on.</p>'
    return f'{legend}<div class="looks">{cards}</div>'


def _filters(item: object) -> str:
    if not isinstance(item, dict) or not (picture := _picture(item.get("image"), "filters")):
        return note("pictures.json holds none.")
    count, rem = figure(item.get("count")), 2.6 * (as_number(item.get("columns")) or 16)
    legend = f'<p class="muted">{count} kernels of the first convolution, each stretched from dark to light.</p>'
    return f'{legend}<div class="card"><div style="max-width:{rem:.1f}rem">{picture}</div></div>'


def _maps(item: object) -> str:
    blocks = [
        block for block in as_list(item.get("blocks") if isinstance(item, dict) else None) if isinstance(block, dict)
    ]
    if not isinstance(item, dict) or not blocks:
        return note("pictures.json holds none.")
    shown = ""
    for block in blocks:
        channels, height, width = (*as_list(block.get("shape")), 0, 0, 0)[:3]
        caption = (
            f'<b>{escape(block.get("name", ""))}</b> <span class="muted">{figure(channels)} maps of {figure(height)} × '
            f"{figure(width)}, the first {figure(block.get('shown'))} shown</span>"
        )
        picture = _picture(block.get("image"), str(block.get("name", "")))
        shown += f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"
    first = f'<figure><div style="width:8rem">{_picture(item.get("image"), "image")}</div>{_verdict(item)}</figure>'
    return f'<div class="card blocks">{first}{shown}</div>'
