"""Pictures of what decay does."""

from __future__ import annotations

import statistics
from typing import Any

from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png

__all__ = ["draw_letters", "draw_shrinkage"]

_TITLES = {"adam_l2": "Adam, L2 in the gradient", "adamw": "AdamW, decoupled", "sgd": "SGD, momentum 0.9"}


def draw_shrinkage(runs: dict[str, dict[str, Any]]) -> Picture:
    """Shrinkage against gradient size, a line an optimiser; each over its mean, so that shapes compare."""
    figure, axes = canvas(1, 1, (6.4, 3.8))
    ax = axes[0, 0]
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        bins = [(gradient, rate) for gradient, rate in run["by_gradient"] if gradient > 0 and rate > 0]
        if not bins:
            continue
        gradients, rates = zip(*bins, strict=True)
        middle = statistics.median(rates)
        ax.plot(gradients, [rate / middle for rate in rates], "o-", markersize=4, color=colour, label=_TITLES[name])
    ax.set(xscale="log", yscale="log")
    ax.axhline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    ax.set_xlabel("gradient of a weight (root mean square over the run)")
    ax.set_ylabel("shrinkage a step, over its median")
    tidy(ax)
    ax.legend(fontsize=8, loc="upper right", frameon=False)
    caption = (
        "Relative shrinkage by decay against the size of a weight's gradients: Adam with L2 spares large gradients."
    )
    return Picture("shrinkage", caption, to_png(figure))


def draw_letters(found: dict[str, list[dict[str, Any]]], letters: str) -> Picture:
    """Shrinkage of the embedding of each letter against how often it was read, for the two Adams."""
    names = [name for name in ("adam_l2", "adamw") if name in found]
    figure, axes = canvas(1, len(names), (8.4, 3.6), sharex=True, sharey=True)
    for ax, name, colour in zip(axes[0], names, COLOURS, strict=False):
        for place, letter in enumerate(letters, start=1):
            counts = [run["letters"][place]["count"] for run in found[name]]
            rates = [run["letters"][place]["rate"] for run in found[name]]
            if min(counts) <= 0:
                continue
            x, y = statistics.fmean(counts), statistics.fmean(rates)
            ax.plot(x, y, "o", markersize=3, color=colour)
            ax.annotate(letter, (x, y), xytext=(3, 3), textcoords="offset points", color=colour, fontsize=8.5)
        ax.set_xscale("log")
        ax.set_title(_TITLES[name], fontsize=10, loc="left")
        ax.set_xlabel("times the letter was read")
        tidy(ax)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("shrinkage of its embedding, a step")
    caption = "Rare letters have small gradients: Adam with L2 shrinks their embeddings most, AdamW all alike."
    return Picture("letters", caption, to_png(figure))
