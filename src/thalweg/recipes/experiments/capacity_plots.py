"""Pictures of capacity."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, colour_of, tidy, to_png

if TYPE_CHECKING:
    from thalweg.recipes.experiments.capacity import CapacitySettings

__all__ = ["draw_breakdown", "draw_growth"]

# Patterns a neuron that the classical network holds in theory, for many neurons.
THEORY = 0.138


def draw_growth(settings: CapacitySettings, figures: dict[str, Any]) -> Picture:
    """Patterns held against dimension, modern and classical, on a logarithmic scale."""
    figure, axes = canvas(1, 1, (6.4, 3.8))
    ax = axes[0, 0]
    top = max(settings.dimensions)
    for name, found in figures["modern"].items():
        colour, growth = colour_of(name, settings.separations), figures["growth"][name]
        for size, counts in found.items():
            ax.plot([size] * len(counts), counts, "o", markersize=4.5, color=colour, alpha=0.8)
        label = name
        if growth:
            label = f"{name}: x {2 ** growth['bits_per_dimension']:.2f} a dimension"
            ends = [min(found), max(found)]
            ax.plot(
                ends,
                [2 ** (growth["start"] + growth["bits_per_dimension"] * x) for x in ends],
                color=colour,
                label=label,
            )
    load = figures["limit"] or statistics.fmean(figures["classical"][max(figures["classical"])]["load"])
    ax.plot(
        [min(settings.dimensions), top],
        [load * min(settings.dimensions), load * top],
        color=MUTED,
        linestyle=(0, (4, 3)),
        label=f"classical: {load:.3f} D",
    )
    ax.set_yscale("log")
    ax.set_xlabel("dimension D")
    ax.set_ylabel("patterns held")
    tidy(ax)
    ax.legend(fontsize=8, loc="upper left")
    caption = (
        f"Random patterns held against dimension: modern memories (beta {settings.beta:g}) and the classical network."
    )
    return Picture("growth", caption, to_png(figure))


def draw_breakdown(settings: CapacitySettings, figures: dict[str, Any]) -> Picture:
    """How a classical network breaks down as its load rises."""
    figure, axes = canvas(1, 1, (6.4, 3.6))
    ax = axes[0, 0]
    for place, (size, found) in enumerate(figures["classical"].items()):
        means = [statistics.fmean(each) for each in zip(*found["rates"], strict=True)]
        ax.plot(
            settings.loads,
            means,
            marker="o",
            markersize=4,
            color=COLOURS[place % len(COLOURS)],
            label=f"{size:,} neurons",
        )
    ax.axvline(THEORY, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
    ax.annotate(
        "0.138", (THEORY, 1.02), xytext=(4, 0), textcoords="offset points", color=MUTED, va="bottom", fontsize=8
    )
    ax.set_ylim(-0.02, 1.02)
    ax.set_xlabel("patterns a neuron")
    ax.set_ylabel("patterns kept")
    tidy(ax)
    ax.legend(fontsize=8, loc="lower left")
    caption = "Classical network: the share of stored patterns that are kept, against the load, and the theory's 0.138."
    return Picture("breakdown", caption, to_png(figure))
