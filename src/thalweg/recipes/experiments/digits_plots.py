"""Pictures of retrieved digits."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.recipes.experiments.digit_patterns import as_pixels, corrupted, stored_digits
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import MUTED, canvas, colour_of, show_image, tidy, to_png

if TYPE_CHECKING:
    from thalweg.recipes.experiments.digits import DigitsSettings

__all__ = ["draw_beta", "draw_rates", "draw_steps"]


def draw_rates(found: dict[str, Any], settings: DigitsSettings) -> Picture:
    """Rates of exact retrieval against noise and against hidden rows, mean over seeds with their spread."""
    figure, axes = canvas(1, 2, (9.0, 3.4), sharey=True)
    parts = (
        ("noise", settings.noise, "norm of the noise / norm of the pattern"),
        ("hidden", settings.hidden_rows, "rows hidden, of 8"),
    )
    for place, (kind, levels, label) in enumerate(parts):
        ax = axes[0, place]
        ceiling = [statistics.fmean(row) for row in found[kind]["nearest neighbour"]]
        ax.plot(levels, ceiling, color=MUTED, linestyle=(0, (4, 3)), label="nearest neighbour of the query")
        for name in settings.separations:
            each = [[one["exact"] for one in row] for row in found[kind][name]["shared"]]
            means = [statistics.fmean(row) for row in each]
            spread = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in each]
            colour = colour_of(name, settings.separations)
            ax.errorbar(levels, means, yerr=spread, color=colour, marker="o", markersize=4, capsize=2, label=name)
            own = [statistics.fmean(one["exact"] for one in row) for row in found[kind][name]["own"]]
            ax.plot(levels, own, color=colour, linestyle="none", marker="x", markersize=5)
        ax.set_xlabel(label)
        ax.set_ylim(-0.02, 1.02)
        tidy(ax)
    axes[0, 0].set(ylabel="retrieved exactly", title="Gaussian noise")
    axes[0, 1].set_title("Occlusion")
    axes[0, 1].legend(fontsize=8, loc="lower left")
    return Picture(
        "rates",
        f"How often one of {settings.stored} stored digits is retrieved exactly, from noise and from occlusion, at the "
        f"shared beta of {settings.shared_beta:g}; crosses: each separation at the beta chosen for it.",
        to_png(figure),
    )


def draw_beta(found: dict[str, Any], settings: DigitsSettings, seed: int) -> Picture:
    """The rate on the tuning seeds against beta, and how the energy falls from step to step."""
    figure, axes = canvas(1, 2, (9.0, 3.2))
    left, right = axes[0]
    patterns = stored_digits(settings.stored, seed)
    queries = corrupted(patterns, "noise", 1.0, seed)
    for name in settings.separations:
        curve, colour = found["rate_against_beta"][name], colour_of(name, settings.separations)
        left.plot(list(curve), list(curve.values()), marker="o", markersize=4, color=colour, label=name)
        memory = HopfieldMemory(patterns.double(), beta=settings.shared_beta, separation=name)
        energies = memory.retrieve(queries.double(), max_steps=1000, tol=1e-9).energies
        gap = (energies - energies[:, -1:]).mean(0)[:31]
        gap = gap[gap > 1e-9].tolist()
        right.plot(range(len(gap)), gap, marker="o", markersize=3, color=colour, label=name)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set(xlabel="beta", ylabel="retrieved exactly, tuning seeds", ylim=(-0.02, 1.02))
    left.set_title("Which beta")
    right.set(yscale="log", xlabel="step", ylabel="energy above its end, mean")
    right.set_title(f"Convergence at beta {settings.shared_beta:g}, noise 1")
    for ax in (left, right):
        tidy(ax)
    left.legend(fontsize=8, loc="upper left")
    caption = (
        "Left: exact retrieval against beta, mean over all levels of noise and occlusion; sparse maps need a smaller "
        "beta. Right: how far the energy is above where it ends, in the first 30 steps."
    )
    return Picture("beta", caption, to_png(figure))


def draw_steps(settings: DigitsSettings, seed: int) -> Picture:
    """Query and state after each update, for noise and for occlusion, with the energies, at the shared beta."""
    patterns = stored_digits(settings.stored, seed)
    columns = 7
    figure, axes = canvas(2 * len(settings.separations), columns + 1, (9.0, 2.5 * len(settings.separations)))
    for place, (kind, level) in enumerate((("noise", 1.0), ("hidden", 4))):
        query = corrupted(patterns, kind, level, seed)[place]
        for row, name in enumerate(settings.separations, place * len(settings.separations)):
            memory = HopfieldMemory(patterns, beta=settings.shared_beta, separation=name)
            states = [query]
            for _ in range(columns - 1):
                states.append(memory.update(states[-1]))
            energies = memory.energy(torch.stack(states)).tolist()
            shown = as_pixels(torch.stack([patterns[place], *states]), settings.stored, seed, place)
            _strip(axes[row], shown, energies, name)
    caption = (
        f"A stored digit, a query, and the state after each update with its energy, at beta {settings.shared_beta:g}: "
        "from noise, and from the upper half."
    )
    return Picture("steps", caption, to_png(figure))


def _strip(axes: Any, shown: Tensor, energies: list[float], name: str) -> None:
    show_image(axes[0], shown[0], "stored")
    axes[0].set_ylabel(name, fontsize=9)
    for step, ax in enumerate(axes[1:]):
        show_image(ax, shown[step + 1], "query" if step == 0 else f"step {step}")
        ax.set_xlabel(f"E = {energies[step]:.4f}", fontsize=8)
