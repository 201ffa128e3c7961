"""Pictures of taggers that are taught: the duality gap, and accuracy against time."""

from __future__ import annotations

from typing import Any

from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, canvas, colour_of, tidy, to_png

__all__ = ["draw_accuracy", "draw_gap"]


def draw_gap(certificates: list[dict[str, float]]) -> Picture:
    """Primal and dual objective against passes, and the gap between them on a logarithmic axis."""
    figure, axes = canvas(1, 2, (9.2, 3.6))
    passes = [point["passes"] for point in certificates]
    primal, last, dual = ([point[key] for point in certificates] for key in ("primal", "last", "dual"))
    left, right = axes[0]
    left.plot(passes, last, color=COLOURS[1], linewidth=1.0, alpha=0.6, label="primal, last weights")
    left.plot(passes, primal, "o-", color=COLOURS[1], markersize=3, label="primal, better of last and averaged")
    left.plot(passes, dual, "o-", color=COLOURS[0], markersize=3, label="dual")
    left.fill_between(passes, dual, primal, color=COLOURS[0], alpha=0.1, linewidth=0, label="where the optimum lies")
    left.set(xlabel="passes", ylabel="objective", ylim=(0, None))
    right.plot(passes, [point["gap"] / point["primal"] for point in certificates], "o-", color=COLOURS[2], markersize=3)
    right.set(xlabel="passes", ylabel="gap / primal", yscale="log")
    for ax in (left, right):
        tidy(ax)
    left.legend(fontsize=8)
    caption = (
        "Block-coordinate Frank-Wolfe on the tagger: the dual never falls, the optimum lies between it and the primal, "
        "and their gap, here as a share of the primal, bounds how far the weights are from the optimum."
    )
    return Picture("gap", caption, to_png(figure))


def draw_accuracy(runs: dict[str, dict[str, Any]]) -> Picture:
    """Share of words right on sentences that nobody learnt from, against passes and against seconds."""
    figure, axes = canvas(1, 2, (9.2, 3.6), sharey=True)
    names = list(runs)
    ends = [point["accuracy"] for run in runs.values() for point in run["curve"]]
    best = max(ends)
    for ax, key in zip(axes[0], ("passes", "seconds"), strict=True):
        for name, run in runs.items():
            x, y = [point[key] for point in run["curve"]], [point["accuracy"] for point in run["curve"]]
            ax.plot(x, y, "o-", color=colour_of(name, names), markersize=3, label=name)
        ax.set(xlabel=key, xscale="log")
        tidy(ax)
    axes[0, 0].set(ylabel="words right", ylim=(max(min(ends), best - 0.025), best + 0.0025))
    axes[0, 1].legend(fontsize=8, loc="lower right")
    caption = "Accuracy while teaching, with the penalties that were chosen; the axis begins where curves matter."
    return Picture("accuracy", caption, to_png(figure))
