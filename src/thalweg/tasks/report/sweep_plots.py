"""Charts of a sweep as inline SVG: settings as lines over parallel axes, curves of all runs, one key at a time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.tasks.report.plots import COLOURS, style_axes, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Values of one axis that are written out; of more, some are left out.
LABELS = 7
# Stands for the colour of a card behind words that lines run under.
BACK = "#070707"


@dataclass(frozen=True)
class Axis:
    """A scale from values to [0, 1]: names at even distances, or numbers between two ends.

    >>> Axis("rate", low=0.001, high=0.1, log=True).place(0.01)
    0.5
    >>> axis_of("cell", ["gru", "lstm"]).place("lstm")
    1.0
    """

    title: str
    names: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    marks: tuple[float, ...] = ()

    def place(self, value: Any) -> float:
        """Where a value is, 0 at the bottom."""
        if self.names:
            name = written(value)
            return self.names.index(name) / (len(self.names) - 1) if len(self.names) > 1 else 0.5
        low, high, at = (math.log(x) if self.log else float(x) for x in (self.low, self.high, value))
        return (at - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Places that are written at, with what is written.

        >>> [text for _, text in Axis("rate", low=0.001, high=10.0, log=True).ticks()]
        ['0.001', '0.01', '0.1', '1', '10']
        """
        if self.names:
            every = math.ceil(len(self.names) / LABELS)
            return [(self.place(json.loads(name)), shown(json.loads(name))) for name in self.names[::every]]
        values = [value for value in self.marks or self._round() if self.low <= value <= self.high]
        if len(values) < 2:
            values = [self.low, self.high]
        return [(self.place(value), f"{value:.4g}") for value in dict.fromkeys(values)]

    def _round(self) -> list[float]:
        """Round numbers: powers of ten (with 2 and 5 between where these are few), or even steps."""
        from matplotlib.ticker import MaxNLocator

        if not self.log:
            return [float(value) for value in MaxNLocator(5).tick_values(self.low, self.high)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if len(powers) < 5 else (1,)
        return [float(f"{factor}e{power}") for power in powers for factor in factors]


def written(value: Any) -> str:
    """A value as the name of its place on an axis.

    >>> written([32, 64])
    '[32, 64]'
    """
    return json.dumps(value, ensure_ascii=False)


def shown(value: Any) -> str:
    """A value for reading, short.

    >>> shown([32, 64]), shown(0.00012345678), shown("gru")
    ('32, 64', '0.0001235', 'gru')
    """
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, list):
        text = ", ".join(shown(each) for each in value)
    else:
        text = value if isinstance(value, str) else written(value)
    return text if len(text) <= 18 else text[:17] + "…"


def axis_of(title: str, values: Sequence[Any], *, log: bool = False, listed: bool = False) -> Axis:
    """The axis that holds these values; numbers that span decades are shown by their logarithm.

    ``listed`` writes the values themselves at it where they are few, rather than round numbers.

    >>> axis_of("rate", [0.1, 0.01, 0.001]).log, axis_of("cell", ["gru", "lstm", "gru"]).names
    (True, ('"gru"', '"lstm"'))
    """
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
    if len(numbers) < len(values) or not values:
        return Axis(title, names=tuple(dict.fromkeys(written(value) for value in values)))
    low, high = min(numbers), max(numbers)
    marks = tuple(sorted(set(numbers)))
    return Axis(
        title,
        low=low,
        high=high,
        log=low > 0 and (log or high / low >= 50),
        marks=marks if len(marks) <= LABELS and listed else (),
    )


@dataclass(frozen=True)
class Dot:
    """A trial in a chart: its values by key, its metric, and how it is drawn.

    Attributes:
        rank: 0 for the worst to 1 for the best.
        kind: ``best``, ``complete`` or ``pruned``.

    >>> Dot({"hidden": 8}, 0.5, 1.0, "best").kind
    'best'
    """

    values: dict[str, Any]
    value: float
    rank: float
    kind: str

    @property
    def look(self) -> dict[str, Any]:
        """Colour and strength of its line."""
        if self.kind == "best":
            return {"color": COLOURS["best"], "alpha": 1.0, "linewidth": 2.4, "zorder": 4}
        if self.kind == "pruned":
            return {"color": COLOURS["muted"], "alpha": 0.35, "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1}
        return {"color": COLOURS["first"], "alpha": 0.2 + 0.7 * self.rank**2, "linewidth": 1.3, "zorder": 2 + self.rank}


def parallel_svg(dots: Sequence[Dot], axes: Sequence[Axis], *, prefix: str) -> str:
    """Every trial as a line over one axis for each key, the last axis being the metric.

    >>> dots = [Dot({"hidden": 8}, 0.5, 1.0, "best"), Dot({"hidden": 16}, 0.4, 0.0, "complete")]
    >>> axes = [axis_of("hidden", [8, 16]), axis_of("accuracy", [0.4, 0.5])]
    >>> parallel_svg(dots, axes, prefix="p-").startswith("<svg")
    True
    """

    def draw(plot: Axes) -> None:
        for dot in sorted(dots, key=lambda each: each.look["zorder"]):
            heights = [axis.place(dot.values[axis.title]) for axis in axes[:-1]] + [axes[-1].place(dot.value)]
            plot.plot(*_smooth(heights), **dot.look)
        for place, axis in enumerate(axes):
            _draw_axis(plot, place, axis)
        plot.set_xlim(-0.25, len(axes) - 0.45)
        plot.set_ylim(-0.06, 1.06)
        plot.set_xticks(range(len(axes)), [axis.title for axis in axes])
        plot.xaxis.tick_top()
        plot.tick_params(length=0, labelcolor=COLOURS["muted"])
        plot.set_yticks([])
        plot.spines[:].set_visible(False)

    svg = svg_of(draw, prefix=prefix, size=(max(6.4, 1.5 * len(axes) + 1.0), 3.6))
    return svg.replace(BACK, "var(--card)")


def _draw_axis(plot: Axes, place: int, axis: Axis) -> None:
    plot.plot([place, place], [0, 1], color=COLOURS["muted"], linewidth=1.0, zorder=6)
    for height, text in axis.ticks():
        plot.plot([place - 0.015, place + 0.015], [height, height], color=COLOURS["muted"], linewidth=1.0, zorder=6)
        at = (place + 0.03, height)
        back = {"facecolor": BACK, "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        plot.annotate(text, at, va="center", ha="left", fontsize=7.5, color=COLOURS["muted"], zorder=7, bbox=back)


def _smooth(heights: Sequence[float]) -> tuple[list[float], list[float]]:
    """A line that leaves and reaches every axis level, so that the eye can follow it through a crossing."""
    xs, ys = [0.0], [heights[0]]
    for place, (left, right) in enumerate(itertools.pairwise(heights)):
        for step in range(1, 13):
            t = step / 12
            xs.append(place + t)
            ys.append(left + (right - left) * t * t * (3 - 2 * t))
    return xs, ys


def curves_svg(curves: Sequence[tuple[Dot, Sequence[tuple[int, float]]]], label: str, *, prefix: str) -> str:
    """The metric of every run by epoch; those of the best trial stand out.

    >>> dot = Dot({}, 0.5, 1.0, "best")
    >>> "epoch" in curves_svg([(dot, [(1, 0.2), (2, 0.5)])], "accuracy", prefix="c-")
    True
    """

    def draw(plot: Axes) -> None:
        for dot, points in sorted(curves, key=lambda each: each[0].look["zorder"]):
            xs, ys = [epoch for epoch, _ in points], [value for _, value in points]
            look = {**dot.look, "linewidth": 2.0 if dot.kind == "best" else 1.0}
            plot.plot(xs, ys, marker="o" if len(xs) < 2 else "", markersize=3.5, **look)
        plot.set_ylabel(label, color=COLOURS["muted"])
        _limit(plot, [value for _, points in curves for _, value in points])
        style_axes(plot, "epoch", whole=True)

    return svg_of(draw, prefix=prefix, size=(7.2, 3.2))


def slice_svg(dots: Sequence[Dot], axis: Axis, label: str, *, prefix: str) -> str:
    """The metric of every trial beside its value of one key.

    >>> dots = [Dot({"hidden": 8}, 0.5, 1.0, "best"), Dot({"hidden": 16}, 0.4, 0.0, "complete")]
    >>> slice_svg(dots, axis_of("hidden", [8, 16]), "accuracy", prefix="s-").startswith("<svg")
    True
    """

    def draw(plot: Axes) -> None:
        for dot in dots:
            look = {"color": dot.look["color"], "alpha": max(0.45, dot.look["alpha"]), "zorder": dot.look["zorder"]}
            marker = "x" if dot.kind == "pruned" else "o"
            size = 8 if dot.kind == "best" else 5
            plot.plot([axis.place(dot.values[axis.title])], [dot.value], marker, markersize=size, **look)
        ticks = axis.ticks()
        plot.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
        plot.set_xlim(-0.08, 1.08)
        _limit(plot, [dot.value for dot in dots])
        plot.set_ylabel(label, color=COLOURS["muted"])
        style_axes(plot)

    return svg_of(draw, prefix=prefix)


def _limit(plot: Axes, values: Sequence[float]) -> None:
    """A few values far off must not press all others flat: the chart then ends before them."""
    ordered = sorted(values)
    low, tenth, ninth, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.0, 0.1, 0.9, 1.0))
    width = ninth - tenth
    if width <= 0:
        return
    bottom, top = (low if tenth - low <= 2 * width else tenth), (high if high - ninth <= 2 * width else ninth)
    room = 0.06 * (top - bottom)
    plot.set_ylim(bottom - room, top + room)
