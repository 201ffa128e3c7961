"""Training curves as inline SVG whose text stays text and whose colours follow the page's colour scheme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# matplotlib knows no CSS variables: it draws in these stand-ins, which are exchanged in the finished SVG.
COLOURS = {
    "muted": "#020202",
    "line": "#030303",
    "first": "#040404",
    "second": "#050505",
    "best": "#060606",
}
LARGEST = 1e30
"""Beyond this a diverged run's values are drawn at the edge: margins around them would overflow."""

# The look of all charts.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "thalweg",  # the same run gives the same bytes
    "axes.linewidth": 0.8,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.usetex": False,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart: `points` are (epoch, value), both finite; `role`, "first" or "second", its colour.

    >>> Curve("training", "first", ((1, 2.5), (2, 1.75))).points[-1]
    (2, 1.75)
    """

    label: str
    role: str
    points: tuple[tuple[float, float], ...]


def curve_svg(curves: Sequence[Curve], *, prefix: str, best: int | None = None, resumed: Sequence[int] = ()) -> str:
    """A chart of values over epochs as an `<svg>` element for use inside a page.

    Args:
        curves: at least one, each with at least one point.
        prefix: put before every id in the SVG, so that several charts can share a page.
        best: the epoch to mark, None for none.
        resumed: epochs before which training was resumed, shown as faint dotted lines.

    The last curve carries the mark of the best epoch. The page defines the CSS colours ``--muted``,
    ``--line``, ``--first``, ``--second`` and ``--best``. Cost: about 30 ms.

    >>> svg = curve_svg([Curve("loss", "first", ((1, 2.0), (2, 1.0)))], prefix="a-", best=2)
    >>> svg.startswith("<svg"), "var(--first)" in svg, ">epoch 2</text>" in svg
    (True, True, True)
    """

    def draw(axes: Axes) -> None:
        for curve in curves:
            xs = [epoch for epoch, _ in curve.points]
            ys = [_drawable(value) for _, value in curve.points]
            # a lone point has no line to show
            marker = "o" if len(xs) < 2 else ""
            axes.plot(xs, ys, color=COLOURS[curve.role], linewidth=1.8, marker=marker, markersize=5)
        epochs = [epoch for curve in curves for epoch, _ in curve.points]
        margin = max(0.5, 0.03 * (max(epochs) - min(epochs)))
        axes.set_xlim(min(epochs) - margin, max(epochs) + margin)
        style_axes(axes, "epoch", whole=True, ticks=7)
        _scale(axes, [_drawable(value) for curve in curves for _, value in curve.points])
        for epoch in resumed:
            axes.axvline(epoch - 0.5, color=COLOURS["muted"], linewidth=0.9, linestyle=":", zorder=0)
        if best is not None and min(epochs) <= best <= max(epochs):
            _mark_best(axes, curves[-1], best, left=best > (min(epochs) + max(epochs)) / 2)

    return svg_of(draw, prefix=prefix)


def svg_of(draw: Callable[[Axes], None], *, prefix: str, size: tuple[float, float] = (4.4, 2.5)) -> str:
    """What ``draw`` puts on axes, as an `<svg>` element for use inside a page; the size is in inches.

    >>> svg_of(lambda axes: axes.set_title("a"), prefix="a-").startswith("<svg")
    True
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(buffer.getvalue(), prefix)


def _drawable(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST)


def style_axes(axes: Axes, xlabel: str = "", *, whole: bool = False, ticks: int = 8, grid: Any = "y") -> None:
    """A faint grid and no box, in the page's colours; ``whole``: marks stand at some whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))
    axes.set_xlabel(xlabel, color=COLOURS["muted"])
    axes.grid(axis=grid, color=COLOURS["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=COLOURS["line"], labelcolor=COLOURS["muted"], length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["line"])


def _scale(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if low > 1 / LARGEST and high / low > 50:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_ylim(low / 1.6, high * 2.5)
        return
    room = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
    # extra room above for the mark of the best epoch; never below zero for what cannot be negative
    axes.set_ylim(max(0.0, low - room) if low >= 0 else low - room, high + 2 * room)


def _mark_best(axes: Axes, curve: Curve, best: int, *, left: bool) -> None:
    axes.axvline(best, color=COLOURS["best"], linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"epoch {best}",
        xy=(best, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        color=COLOURS["best"],
        fontsize=8,
    )
    value = dict(curve.points).get(best)
    if value is not None:
        axes.plot([best], [_drawable(value)], "o", color=COLOURS["best"], markersize=5.5, zorder=5)


def inline_svg(svg: str, prefix: str) -> str:
    """An SVG file as an element of a page: without what only a file needs, ids unique, colours the page's.

    >>> inline_svg('<svg viewBox="0 0 1 1"><path id="a" fill="#040404"/></svg>', "x-")
    '<svg viewBox="0 0 1 1" aria-hidden="true"><path id="x-a" fill="var(--first)"/></svg>'
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # would apply to the whole page
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    viewbox = re.search(r'viewBox="[^"]*"', head)
    svg = f'<svg {viewbox.group() if viewbox else ""} aria-hidden="true">{rest}'
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    for name, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)
