"""Large margins in the plane: exclusive or, a hard margin, and two half circles at several prices of slack."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thalweg.energies.kernel_machine.certificate import KKTReport
from thalweg.energies.kernel_machine.classification import KernelSVC
from thalweg.energies.kernel_machine.functions import Kernel
from thalweg.energies.kernel_machine.vectors import RBF, Linear, Polynomial
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.plots import COLOURS, MUTED, panels, to_png


@dataclass(frozen=True, kw_only=True)
class LargeMarginSettings:
    """Settings of the experiment.

    Attributes:
        points: of the two half circles, drawn for each seed; noise: their standard deviation.
        prices: C of each machine on them; gamma: of their kernel.
        held_out: further points, on which machines are measured.
        tolerance: when the solver ends.
        grid: points along each side of a picture.

    >>> LargeMarginSettings().points
    120
    """

    points: int = 120
    noise: float = 0.25
    prices: tuple[float, ...] = (0.1, 10.0, 1000.0)
    gamma: float = 2.0
    held_out: int = 2000
    tolerance: float = 1e-5
    grid: int = 241

    def __post_init__(self) -> None:
        check_positive(self, "points", "noise", "prices", "gamma", "held_out", "tolerance", "grid")
        if self.points < 10 or self.grid < 2 or self.tolerance > 1:
            raise ConfigError(
                "`points` must be 10 or more, `grid` 2 or more and `tolerance` at most 1, "
                f"got {self.points}, {self.grid} and {self.tolerance}"
            )


def worked_examples(tolerance: float = 1e-5) -> dict[str, Panel]:
    """Two machines that can be found by hand: exclusive or by products, and a hard margin of six points.

    >>> [panel.machine.kernel_ for panel in worked_examples().values()]
    [Polynomial(degree=2, offset=1.0, scale=1.0), Linear()]
    """
    given: dict[str, tuple[Kernel, Any, Any]] = {
        "exclusive or": (Polynomial(degree=2, offset=1.0), [[1, 1], [-1, -1], [-1, 1], [1, -1]], [1, 1, -1, -1]),
        "hard margin": (Linear(), [[1, 1], [2, 2], [2, 0], [0, 0], [1, 0], [0, 1]], [1, 1, 1, -1, -1, -1]),
    }
    return {
        name: _fit(kernel, math.inf, tolerance, np.array(X, dtype=float), np.array(y))
        for name, (kernel, X, y) in given.items()
    }


def half_circles(count: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two half circles that reach into one another, as even in number as can be: points ``(N, 2)``, classes -1 and 1.

    >>> half_circles(7, 0.1, 0)[1].sum()
    np.int64(-1)
    """
    rng = np.random.default_rng(seed)
    classes = np.where(np.arange(count) < (count + 1) // 2, -1, 1)
    angle = rng.uniform(0, math.pi, size=count)
    upper = np.column_stack([np.cos(angle), np.sin(angle)])
    lower = np.column_stack([1 - np.cos(angle), 0.5 - np.sin(angle)])
    return np.where(classes[:, None] < 0, upper, lower) + rng.normal(0, noise, size=(count, 2)), classes


def run_large_margin(settings: LargeMarginSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """The worked examples, which are not random, and the half circles of each seed; pictures are of the first."""
    worked = worked_examples(settings.tolerance)
    runs, circles = [], {}
    for seed in seeds:
        X, y = half_circles(settings.points, settings.noise, seed)
        others = half_circles(settings.held_out, settings.noise, seed + 1_000_000)
        panels = {f"C = {C:g}": _fit(RBF(settings.gamma), C, settings.tolerance, X, y) for C in settings.prices}
        circles = circles or panels
        found = {name: _figures(panel, others) for name, panel in panels.items()}
        runs.append({"seed": seed, **found})
        said = ", ".join(f"{each['error']:.3f} at {name}" for name, each in found.items())
        say(f"seed {seed}: error {said}")
    shown = {**worked, **{f"half circles, {name}": panel for name, panel in circles.items()}}
    tables = [_prices(list(circles), runs, settings), _machines(shown), *_certificates(shown)]
    pictures = [
        draw_boundaries("worked", worked, settings.grid, "By hand: exclusive or is x1 x2 > 0, and the widest street "
                        "between six points has w = (2, 2), b = -3. Where f(x) is -1, 0 and 1; support vectors ringed, "
                        "dotted where a point on the margin needs no multiplier."),
        draw_boundaries("circles", circles, settings.grid, "Two half circles: a low price of slack gives a wide margin "
                        "with many points inside, a high one a narrow margin that follows single points."),
    ]  # fmt: skip
    figures = {name: _figures(panel, None) for name, panel in worked.items()}
    return Findings(tables, pictures, {"worked": figures, "runs": runs})


def _fit(kernel: Kernel, C: float, tolerance: float, X: np.ndarray, y: np.ndarray) -> Panel:
    machine = KernelSVC(kernel, C=C, tolerance=tolerance).fit(X, y)
    return Panel(machine, machine.kkt_report(), X, y)


def _figures(panel: Panel, others: tuple[np.ndarray, np.ndarray] | None) -> dict[str, Any]:
    """The numbers of a machine as plain values."""
    pair = panel.report.only
    found = {
        "support vectors": len(pair.support),
        "margin": pair.margin,
        "primal": pair.primal,
        "dual": pair.dual,
        "conditions": {each.name: each.residual for each in pair.conditions},
        "holds": panel.report.holds,
    }
    return found if others is None else found | {"error": 1.0 - panel.machine.score(*others)}


def _prices(names: list[str], runs: list[dict[str, Any]], settings: LargeMarginSettings) -> Table:
    rows = [
        {
            "price": name,
            "error on new points": mean_and_spread([run[name]["error"] for run in runs]),
            "support vectors": mean_and_spread([run[name]["support vectors"] for run in runs], 1),
            "margin 2/|w|": mean_and_spread([run[name]["margin"] for run in runs]),
        }
        for name in names
    ]
    note = (
        f"Two half circles, RBF(gamma={settings.gamma:g}): {settings.points} points to fit, {settings.held_out:,} new "
        f"ones to measure; mean and standard deviation over {len(runs)} draws."
    )
    return Table("The price of slack", rows, note)


def _machines(panels: dict[str, Panel]) -> Table:
    rows = []
    for name, panel in panels.items():
        pair = panel.report.only
        rows.append(
            {
                "machine": name,
                "kernel": repr(panel.machine.kernel_),
                "margin 2/|w|": f"{pair.margin:.6g}",
                "primal": f"{pair.primal:.6g}",
                "dual": f"{pair.dual:.6g}",
                "gap": f"{pair.gap:.2g}",
                "support vectors": f"{len(pair.support)} of {len(panel.X)}",
                "all conditions hold": "yes" if panel.report.holds else "NO",
            }
        )
    return Table("Machines", rows, "Half circles of the first seed. A gap of 0 proves the optimum, up to rounding.")


def _certificates(panels: dict[str, Panel]) -> list[Table]:
    note = "By how much each condition is missed, and at which point most; allowed is what counts as holding."
    return [Table(f"KKT certificate: {name}", _rows(panel.report), note) for name, panel in panels.items()]


def _rows(report: KKTReport) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "classes"} for row in report.rows()]


_INK = "#14262b"


class Panel(NamedTuple):
    """A fitted classifier of two classes, its report and its training set, points ``(N, 2)``.

    >>> from thalweg.energies import KernelSVC
    >>> X, y = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([-1, 1])
    >>> machine = KernelSVC("linear").fit(X, y)
    >>> len(Panel(machine, machine.kkt_report(), X, y).X)
    2
    """

    machine: Any
    report: KKTReport
    X: np.ndarray
    y: np.ndarray


def draw_boundary(ax: Any, panel: Panel, grid: int = 241) -> None:
    """f(x) in shades, the boundary f = 0 and the margins f = -1 and 1, the points, and rings around support vectors.

    >>> from thalweg.energies import KernelSVC
    >>> from thalweg.recipes.experiments.plots import canvas
    >>> X, y = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([-1, 1])
    >>> machine = KernelSVC("linear").fit(X, y)
    >>> draw_boundary(canvas(1, 1, (2, 2))[1][0, 0], Panel(machine, machine.kkt_report(), X, y), grid=5)
    """
    from matplotlib.colors import LinearSegmentedColormap

    pair, points = panel.report.only, panel.X
    low, high = points.min(axis=0), points.max(axis=0)
    reach = 0.18 * (high - low).max()
    sides = [np.linspace(low[axis] - reach, high[axis] + reach, grid) for axis in (0, 1)]
    plane = np.stack(np.meshgrid(*sides), axis=-1)
    f = panel.machine.decision_function(plane.reshape(-1, 2)).reshape(grid, grid)
    shades = LinearSegmentedColormap.from_list("sides", [COLOURS[1], "#ffffff", COLOURS[0]])
    extent = (sides[0][0], sides[0][-1], sides[1][0], sides[1][-1])
    ax.imshow(f.clip(-2.5, 2.5), extent=extent, origin="lower", cmap=shades, vmin=-5, vmax=5, aspect="equal")
    looks = {"colors": _INK, "linestyles": ["dashed", "solid", "dashed"], "linewidths": [0.9, 1.6, 0.9]}
    ax.contour(*sides, f, levels=[-1.0, 0.0, 1.0], **looks)
    for label, colour, mark in ((pair.classes[0], COLOURS[1], "s"), (pair.classes[1], COLOURS[0], "o")):
        some = points[panel.y == label]
        ax.scatter(*some.T, s=16, c=colour, marker=mark, edgecolors="white", linewidths=0.5, zorder=3)
    idle = np.setdiff1d(pair.on_margin, pair.support)
    for places, style in ((pair.support, "solid"), (idle, "dotted")):
        ring = {"facecolors": "none", "edgecolors": _INK, "linewidths": 0.9, "linestyles": style}
        ax.scatter(*points[places].T, s=52, zorder=4, **ring)
    ax.set(xlim=extent[:2], ylim=extent[2:])


def draw_boundaries(name: str, given: dict[str, Panel], grid: int, caption: str) -> Picture:
    """A panel for each machine, with its margin and how many support vectors it has."""
    titles = [
        f"{title}: margin {panel.report.only.margin:.3g}, {len(panel.report.only.support)} support vectors"
        for title, panel in given.items()
    ]
    figure, _, axes = panels(titles, 3, (3.9, 3.5))
    for ax, panel in zip(axes, given.values(), strict=True):
        draw_boundary(ax, panel, grid)
    _legend(figure)
    return Picture(name, caption, to_png(figure, colours=256))


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], linestyle="none", marker="o", color=COLOURS[0], label="f above 0"),
        Line2D([], [], linestyle="none", marker="s", color=COLOURS[1], label="f below 0"),
        Line2D([], [], linestyle="none", marker="o", markerfacecolor="none", color=_INK, label="support vector"),
        Line2D([], [], color=_INK, linewidth=1.6, label="f = 0"),
        Line2D([], [], color=_INK, linewidth=0.9, linestyle="dashed", label="f = -1 and 1"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=5, fontsize=8.5, labelcolor=MUTED)
