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
    for name, found in figures["modern"].items():
        colour, growth = colour_of(name, settings.separations), figures["growth"][name]
        for size, counts in found.items():
            ax.plot([size] * len(counts), counts, "o", markersize=4.5, color=colour, alpha=0.8)
        label = name
        if growth:
            label = f"{name}: x {2 ** growth['bits_per_dimension']:.2f} a dimension"
            ends = [min(found), max(found)]
            heights = [2 ** (growth["start"] + growth["bits_per_dimension"] * x) for x in ends]
            ax.plot(ends, heights, color=colour, label=label)
    load = figures["limit"] or statistics.fmean(figures["classical"][max(figures["classical"])]["load"])
    ends = [min(settings.dimensions), max(settings.dimensions)]
    heights = [load * x for x in ends]
    ax.plot(ends, heights, color=MUTED, linestyle=(0, (4, 3)), label=f"classical: {load:.3f} D")
    ax.set(yscale="log", xlabel="dimension D", ylabel="patterns held")
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
        colour = COLOURS[place % len(COLOURS)]
        ax.plot(settings.loads, means, marker="o", markersize=4, color=colour, label=f"{size:,} neurons")
    ax.axvline(THEORY, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
    ax.annotate(
        "0.138", (THEORY, 1.02), xytext=(4, 0), textcoords="offset points", color=MUTED, va="bottom", fontsize=8
    )
    ax.set(ylim=(-0.02, 1.02), xlabel="patterns a neuron", ylabel="patterns kept")
    tidy(ax)
    ax.legend(fontsize=8, loc="lower left")
    caption = "Classical network: the share of stored patterns that are kept, against the load, and the theory's 0.138."
    return Picture("breakdown", caption, to_png(figure))
