"""Pictures of large margins in the plane."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from thalweg.energies.kernel_machine.certificate import KKTReport
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, panels, to_png

__all__ = ["Panel", "draw_boundaries", "draw_boundary"]

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
