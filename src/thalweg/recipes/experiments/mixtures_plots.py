"""Pictures of EM."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.mixture.model import GaussianMixture
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png

__all__ = ["draw_climb", "draw_criteria", "draw_steps"]


def draw_steps(points: Tensor, models: dict[str, GaussianMixture]) -> Picture:
    """The points, and the ellipses of two standard deviations of each component, a panel for each model."""
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, axes = canvas(rows, columns, (3.1 * columns, 2.55 * rows), sharex=True, sharey=True)
    limits = [(float(column.min()) - 0.8, float(column.max()) + 0.8) for column in points.T]
    for ax, (name, model) in zip(axes.flat, models.items(), strict=False):
        shades = model.predict(points).tolist()
        colours = [COLOURS[component % len(COLOURS)] for component in shades]
        ax.scatter(points[:, 0], points[:, 1], s=4, c=colours, alpha=0.45, linewidths=0)
        for component, (mean, covariance) in enumerate(zip(model.means_, model.covariances_, strict=True)):
            _ellipse(ax, mean.detach(), covariance.detach(), COLOURS[component % len(COLOURS)])
        ax.set_title(f"{name}: {model.score(points):.3f} nats", fontsize=9)
        ax.set(aspect="equal", xlim=limits[0], ylim=limits[1])
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes.flat)[len(models) :]:
        ax.set_visible(False)
    caption = (
        "EM from means at random points: each component's ellipse of two standard deviations, the points in the colour "
        "of their most probable component, and the mean log p(x), which never falls."
    )
    return Picture("steps", caption, to_png(figure))


def draw_climb(run: dict[str, Any]) -> Picture:
    """The likelihood against the step from every start, and where scikit-learn's EM ends from the first."""
    figure, axes = canvas(1, 1, (6.6, 3.8))
    ax = axes[0, 0]
    for start, history in enumerate(run["climbs"]):
        first = start == 0
        colour, width = (COLOURS[0], 2.2) if first else (MUTED, 0.9)
        label = {0: "the start that is drawn", 1: "other starts"}.get(start)
        ax.plot(range(len(history)), history, color=colour, linewidth=width, label=label, zorder=3 if first else 2)
        ax.plot(len(history) - 1, history[-1], "o", color=colour, markersize=4, zorder=4)
    end = run["scikit-learn"][0]
    ax.axhline(end, color=COLOURS[1], linestyle=(0, (4, 3)), linewidth=1.2, label="scikit-learn, from the drawn start")
    ax.axhline(run["truth"], color=COLOURS[2], linestyle=(0, (1, 2)), linewidth=1.2, label="where the points come from")
    ax.set(xlabel="step", ylabel="mean log p(x), nats", xlim=(-2, min(80, max(map(len, run["climbs"])) + 2)))
    tidy(ax)
    ax.legend(fontsize=8, loc="lower right")
    caption = (
        "The likelihood from several starts, up to step 80. Every climb rises at every step; not all reach the same "
        "maximum. The best lies a little above the mixture that the points come from, for it fits these points."
    )
    return Picture("climb", caption, to_png(figure))


def draw_criteria(criteria: dict[int, float], chosen: int) -> Picture:
    """BIC against the number of components."""
    figure, axes = canvas(1, 1, (5.6, 3.2))
    ax = axes[0, 0]
    ax.plot(list(criteria), list(criteria.values()), "o-", color=COLOURS[0], markersize=4)
    ax.plot(chosen, criteria[chosen], "o", color=COLOURS[1], markersize=9, label=f"lowest: {chosen} components")
    ax.set(xlabel="components", ylabel="BIC")
    ax.set_xticks(list(criteria))
    tidy(ax)
    ax.legend(fontsize=8, loc="upper right")
    caption = "The Bayesian information criterion, -2 log p(X) + (free numbers) log B: lower is better."
    return Picture("bic", caption, to_png(figure))


def _ellipse(ax: Any, mean: Tensor, covariance: Tensor, colour: str) -> None:
    from matplotlib.patches import Ellipse

    variances, directions = torch.linalg.eigh(covariance)
    angle = math.degrees(math.atan2(float(directions[1, 1]), float(directions[0, 1])))
    short, long = (4 * variances.clamp(min=0).sqrt()).tolist()
    ax.add_patch(
        Ellipse((float(mean[0]), float(mean[1])), long, short, angle=angle, fill=False, edgecolor=colour, linewidth=1.8)
    )
