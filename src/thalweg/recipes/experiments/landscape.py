"""The energy of a memory of points in the plane, and the paths on which queries descend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.hopfield.fixed_points import FixedPoints, fixed_points
from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ConfigError
from thalweg.layers.hopfield.separation_maps import separation as named_separation
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive
from thalweg.recipes.experiments.plots import panels, to_png

_MARKS = {"single": "#f2c14e", "metastable": "#e4572e", "global": "#c77dff"}


@dataclass(frozen=True, kw_only=True)
class LandscapeSettings:
    """Settings of the experiment.

    Attributes:
        patterns: points of the plane.
        panels: pairs of a separation and a beta, a picture each.
        starts: points along each side of the square from which queries start.
        reach: half the side of the square.
        grid: points along each side for which the energy is computed.
        max_steps: updates of a query, at most.

    >>> len(LandscapeSettings().panels)
    6
    """

    patterns: tuple[tuple[float, float], ...] = ((1.25, 0.6), (0.75, 1.2), (-1.2, 0.5), (-0.6, -1.1), (0.9, -0.9))
    panels: tuple[tuple[str, float], ...] = (
        ("softmax", 0.2),
        ("softmax", 2.0),
        ("softmax", 4.0),
        ("softmax", 20.0),
        ("sparsemax", 0.5),
        ("sparsemax", 4.0),
    )
    starts: int = 9
    reach: float = 1.8
    grid: int = 161
    max_steps: int = 200

    def __post_init__(self) -> None:
        check_positive(self, "starts", "reach", "grid", "max_steps")
        if len(self.patterns) < 2 or not self.panels or self.grid < 2 or self.starts < 2:
            raise ConfigError("two `patterns`, `grid` points and `starts` or more, and a panel, are needed")
        for name, beta in self.panels:
            named_separation(name)
            if not beta > 0:
                raise ConfigError(f"the beta of a panel must be more than 0, got {beta}")


def _square(reach: float, points: int) -> Tensor:
    """The points of a grid over the square, ``(points^2, 2)``, row by row from below."""
    side = torch.linspace(-reach, reach, points, dtype=torch.float64)
    y, x = torch.meshgrid(side, side, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def descent_paths(memory: HopfieldMemory, starts: Tensor, steps: int) -> Tensor:
    """Where each start ``(S, D)`` goes, update by update: ``(S, steps + 1, D)``.

    >>> descent_paths(HopfieldMemory(torch.eye(2), beta=9.0), torch.tensor([[0.9, 0.2]]), 3).shape
    torch.Size([1, 4, 2])
    """
    path = [starts]
    for _ in range(steps):
        path.append(memory.update(path[-1]))
    return torch.stack(path, dim=1)


def run_landscape(settings: LandscapeSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Contours, paths and classified fixed points of each panel; nothing is random, seeds do nothing."""
    patterns = torch.tensor(settings.patterns, dtype=torch.float64)
    starts = torch.cat([_square(settings.reach, settings.starts), patterns])
    rows, figures, panels = [], [], []
    for name, beta in settings.panels:
        memory = HopfieldMemory(patterns, beta=beta, separation=name)
        found = memory.retrieve(starts, max_steps=settings.max_steps, tol=1e-7)
        points = fixed_points(memory, starts, max_steps=settings.max_steps, tol=1e-7)
        rows.append(_row(name, beta, points, found.steps))
        figures.append(
            {
                "separation": name,
                "beta": beta,
                "kinds": points.kinds,
                "members": points.members,
                "states": points.state.tolist(),
                "energies": points.energies.tolist(),
                "rises": int((found.energies.diff(dim=1) > 1e-12).sum()),
            }
        )
        panels.append((memory, points))
        say(f"{name}, beta {beta:g}: {rows[-1]['fixed points']}")
    note = (
        f"From {len(starts)} starts; a state is a single pattern where one weight is at least 0.9, the global average "
        "where the weights are equal to within 0.1, otherwise metastable. Steps until an update moves a state by at "
        "most 1e-7."
    )
    return Findings([Table("Where retrieval ends", rows, note)], [_draw(settings, panels)], {"panels": figures})


def _row(name: str, beta: float, points: FixedPoints, steps: Tensor) -> dict[str, str]:
    kinds = ("single", "metastable", "global")
    said = ", ".join(f"{points.kinds.count(kind)} {kind}" for kind in kinds if kind in points.kinds)
    low, middle, high = int(steps.min()), float(steps.double().median()), int(steps.max())
    return {
        "separation": name,
        "beta": f"{beta:g}",
        "fixed points": said,
        "steps (least, median, most)": f"{low}, {middle:g}, {high}",
    }


def _draw(settings: LandscapeSettings, memories: list[tuple[HopfieldMemory, FixedPoints]]) -> Picture:
    names = [f"{memory.separation}, beta {memory.beta_value:g}" for memory, _ in memories]
    figure, _, each = panels(names, 3, (3.3, 3.45), sharex=True, sharey=True)
    for ax, (memory, points) in zip(each, memories, strict=True):
        _panel(ax, settings, memory, points)
    _legend(figure)
    caption = (
        "Energy of patterns in the plane (dark is low) with descent paths of CCCP, an update each dot; patterns are "
        "white squares, the states in which the paths end coloured by their kind."
    )
    return Picture("landscape", caption, to_png(figure, colours=256))


def _panel(ax: Any, settings: LandscapeSettings, memory: HopfieldMemory, points: FixedPoints) -> None:
    grid = _square(settings.reach, settings.grid)
    energy = memory.energy(grid).view(settings.grid, settings.grid).numpy()
    side = grid[: settings.grid, 0].numpy()
    # Levels by quantile: the walls of the square are far higher than all that happens inside.
    levels = torch.quantile(torch.from_numpy(energy).flatten(), torch.linspace(0, 1, 21, dtype=torch.float64) ** 1.3)
    levels = levels.unique().tolist()
    ax.contourf(side, side, energy, levels=levels, cmap="YlGnBu_r")
    paths = descent_paths(memory, _square(settings.reach, settings.starts), 40)
    for path in paths:
        ax.plot(path[:, 0], path[:, 1], color="#14262b", linewidth=0.55, marker="o", markersize=1.3, alpha=0.75)
    ax.plot(memory.patterns[:, 0], memory.patterns[:, 1], "s", color="white", markeredgecolor="#14262b", markersize=6)
    for state, kind in zip(points.state.tolist(), points.kinds, strict=True):
        ax.plot(*state, "o", color=_MARKS[kind], markeredgecolor="#14262b", markersize=8, markeredgewidth=0.8)
    reach = (-settings.reach, settings.reach)
    ax.set(aspect="equal", xlim=reach, ylim=reach)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", markeredgecolor="#14262b", label=label, **look)

    names = {"single": "single pattern", "metastable": "metastable mixture", "global": "global average"}
    marks = [mark("pattern", marker="s", color="white")]
    marks += [mark(label, marker="o", markersize=8, color=_MARKS[kind]) for kind, label in names.items()]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8.5)
