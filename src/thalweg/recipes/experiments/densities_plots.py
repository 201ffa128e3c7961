"""Pictures of learned densities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.densities import grid_points
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, canvas, shade, to_png

__all__ = ["draw_energies", "draw_samples"]

# Half the side of the square that is drawn, and how far above its least an energy is drawn.
SIDE = 4.0
DEPTH = 8.0


def _panels(rows: list[str], columns: list[str]) -> tuple[Any, Any]:
    size = (1.75 * len(columns) + 0.9, 1.75 * len(rows) + 0.3)
    figure, axes = canvas(len(rows), len(columns), size, sharex=True, sharey=True)
    for ax in axes.flat:
        ax.set(xlim=(-SIDE, SIDE), ylim=(-SIDE, SIDE), aspect="equal", xticks=[], yticks=[])
    for ax, name in zip(axes[0], columns, strict=True):
        ax.set_title(name, fontsize=9, loc="center")
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name, fontsize=9)
    return figure, axes


def _dots(ax: Any, points: Tensor) -> None:
    ax.plot(points[:, 0].numpy(), points[:, 1].numpy(), ".", markersize=1.6, color=COLOURS[0], alpha=0.6)


def draw_energies(data: dict[str, Tensor], energies: dict[str, dict[str, Callable[[Tensor], Tensor]]]) -> Picture:
    """Each set of points beside the energies that were learned from it."""
    methods = list(next(iter(energies.values())))
    figure, axes = _panels(list(energies), ["data", *methods])
    size, image = 120, None
    points = grid_points(-SIDE, SIDE, size)
    for row, (name, learned) in zip(axes, energies.items(), strict=True):
        _dots(row[0], data[name])
        for ax, energy in zip(row[1:], learned.values(), strict=True):
            with torch.no_grad():
                values = energy(points).view(size, size).T
            image = shade(ax, (values - values.min()).numpy(), (-SIDE, SIDE, -SIDE, SIDE), DEPTH)
    if image is not None:
        figure.colorbar(image, ax=axes, label=f"energy above its least, {DEPTH:g} and more alike", shrink=0.5)
    caption = "Points and the energies learned from them: dark valleys should lie where the points are, and only there."
    return Picture("energies", caption, to_png(figure))


def draw_samples(data: dict[str, Tensor], samples: dict[str, dict[str, Tensor]]) -> Picture:
    """Each set of points beside samples from the energies that were learned from it."""
    methods = list(next(iter(samples.values())))
    figure, axes = _panels(list(samples), ["data", *methods])
    for row, (name, drawn) in zip(axes, samples.items(), strict=True):
        _dots(row[0], data[name])
        for ax, points in zip(row[1:], drawn.values(), strict=True):
            _dots(ax, points)
    caption = "Points and samples from the learned energies: adjusted Langevin walks that begin anywhere and cool down."
    return Picture("samples", caption, to_png(figure))
