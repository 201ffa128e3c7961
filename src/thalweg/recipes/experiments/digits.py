"""Digits retrieved from noise and from occlusion, by memories that differ in their separation alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ConfigError
from thalweg.layers.hopfield.separation_maps import separation as named_separation
from thalweg.recipes.experiments.digit_patterns import as_pixels, corrupted, stored_digits
from thalweg.recipes.experiments.findings import (
    Findings,
    Picture,
    Say,
    Table,
    check_positive,
    mean_and_spread,
)
from thalweg.recipes.experiments.plots import MUTED, canvas, colour_of, show_image, tidy, to_png

# The seeds that settings are chosen on start here, far from those that are reported.
TUNING = 1000


@dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """Settings of the experiment.

    Attributes:
        stored: patterns in the memory, drawn for each seed.
        separations: names of the maps that are compared.
        noise: norm of the Gaussian noise over that of a pattern.
        hidden_rows: rows of the image, of 8, that are hidden from below.
        shared_beta: one that all separations are also measured at.
        betas: those that are tried for each separation, on tuning seeds.
        tuning_seeds: how many.
        tolerance: a retrieval is exact where state and pattern differ by no more than this part of the pattern's norm.
        max_steps: updates at most.

    >>> DigitsSettings().stored
    100
    """

    stored: int = 100
    separations: tuple[str, ...] = ("softmax", "entmax15", "sparsemax")
    noise: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    hidden_rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    shared_beta: float = 8.0
    betas: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    tuning_seeds: int = 2
    tolerance: float = 0.01
    max_steps: int = 50

    def __post_init__(self) -> None:
        check_positive(
            self, "stored", "noise", "hidden_rows", "shared_beta", "betas", "tuning_seeds", "tolerance", "max_steps"
        )
        if self.stored > 1797 or max(self.hidden_rows) > 7:
            raise ConfigError(
                f"there are 1,797 digits of 8 rows, got stored={self.stored} and hidden_rows={self.hidden_rows}"
            )
        for name in self.separations:
            named_separation(name)


class Rates(NamedTuple):
    """How well a memory retrieved its patterns from corrupted ones; numbers are means over the queries.

    >>> Rates(1.0, 1.0, 2.0, 1.0).exact
    1.0
    """

    exact: float
    nearest: float
    steps: float
    support: float


def retrieval_rates(memory: HopfieldMemory, queries: Tensor, tolerance: float, max_steps: int) -> Rates:
    """Retrieve pattern i from query i, for all N.

    >>> memory = HopfieldMemory(torch.eye(2), beta=9.0, separation="sparsemax")
    >>> retrieval_rates(memory, torch.eye(2), 0.01, 10)
    Rates(exact=1.0, nearest=1.0, steps=1.0, support=1.0)
    """
    found = memory.retrieve(queries, max_steps=max_steps)
    patterns = memory.patterns
    own = torch.arange(len(patterns))
    error = (found.state - patterns).norm(dim=1) / patterns.norm(dim=1)
    nearest = torch.cdist(found.state, patterns).argmin(1) == own
    support = (found.weights > 1e-3).sum(1).double()
    exact = (error <= tolerance).double()
    return Rates(
        float(exact.mean()), float(nearest.double().mean()), float(found.steps.double().mean()), float(support.mean())
    )


def run_digits(settings: DigitsSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Choose beta for each separation on tuning seeds, then measure on the others."""
    tuning = tuple(range(TUNING, TUNING + settings.tuning_seeds))
    curves = {name: _against_beta(settings, name, tuning) for name in settings.separations}
    chosen = {name: max(curve, key=lambda beta: curve[beta]) for name, curve in curves.items()}
    say("beta chosen: " + ", ".join(f"{name} {beta:g}" for name, beta in chosen.items()))
    found: dict[str, Any] = {"tuning_seeds": list(tuning), "beta": chosen, "rate_against_beta": curves}
    for kind, levels in (("noise", settings.noise), ("hidden", settings.hidden_rows)):
        found[kind] = {
            name: {
                "own": _sweep(settings, name, chosen[name], kind, levels, seeds),
                "shared": _sweep(settings, name, settings.shared_beta, kind, levels, seeds),
            }
            for name in settings.separations
        }
        found[kind]["nearest neighbour"] = _neighbours(settings, kind, levels, seeds)
        say(f"{kind}: {len(levels)} levels, {len(seeds)} seeds")
    pictures = [draw_rates(found, settings), draw_beta(found, settings, seeds[0]), draw_steps(settings, seeds[0])]
    return Findings(_tables(settings, found), pictures, found)


def _memory(settings: DigitsSettings, name: str, beta: float, seed: int) -> HopfieldMemory:
    return HopfieldMemory(stored_digits(settings.stored, seed), beta=beta, separation=name)


def _against_beta(settings: DigitsSettings, name: str, seeds: tuple[int, ...]) -> dict[float, float]:
    """For each beta the rate of exact retrieval, over all levels of both corruptions."""
    rates = {}
    for beta in settings.betas:
        each = []
        for seed in seeds:
            memory = _memory(settings, name, beta, seed)
            for kind, levels in (("noise", settings.noise), ("hidden", settings.hidden_rows)):
                queries = torch.cat([corrupted(memory.patterns, kind, level, seed) for level in levels])
                found = memory.retrieve(queries, max_steps=settings.max_steps)
                error = (found.state - memory.patterns.repeat(len(levels), 1)).norm(dim=1)
                each.append(float((error <= settings.tolerance).double().mean()))
        rates[beta] = sum(each) / len(each)
    return rates


def _sweep(
    settings: DigitsSettings, name: str, beta: float, kind: str, levels: tuple[float, ...], seeds: tuple[int, ...]
) -> list[list[dict[str, float]]]:
    """Rates for each level and seed."""
    rows: list[list[dict[str, float]]] = [[] for _ in levels]
    for seed in seeds:
        memory = _memory(settings, name, beta, seed)
        for row, level in zip(rows, levels, strict=True):
            queries = corrupted(memory.patterns, kind, level, seed)
            row.append(retrieval_rates(memory, queries, settings.tolerance, settings.max_steps)._asdict())
    return rows


def _neighbours(
    settings: DigitsSettings, kind: str, levels: tuple[float, ...], seeds: tuple[int, ...]
) -> list[list[float]]:
    """How often the stored pattern nearest to the query is the right one: what no memory can be expected to beat."""
    rows: list[list[float]] = [[] for _ in levels]
    for seed in seeds:
        patterns = stored_digits(settings.stored, seed)
        own = torch.arange(len(patterns))
        for row, level in zip(rows, levels, strict=True):
            scores = corrupted(patterns, kind, level, seed) @ patterns.T
            row.append(float((scores.argmax(1) == own).double().mean()))
    return rows


def _tables(settings: DigitsSettings, found: dict[str, Any]) -> list[Table]:
    places = {
        "noise": min(range(len(settings.noise)), key=lambda place: abs(settings.noise[place] - 1.0)),
        "hidden": min(range(len(settings.hidden_rows)), key=lambda place: abs(settings.hidden_rows[place] - 4)),
    }
    names = {
        "noise": f"noise {settings.noise[places['noise']]:g}",
        "hidden": f"{settings.hidden_rows[places['hidden']]} of 8 rows hidden",
    }
    rows = []
    for name in settings.separations:
        for which, beta in (("shared", settings.shared_beta), ("own", found["beta"][name])):
            cells = {kind: found[kind][name][which][place] for kind, place in places.items()}
            every = [one for cell in cells.values() for one in cell]
            row = {"separation": name, "beta": f"{beta:g}{' (chosen)' if which == 'own' else ''}"}
            row |= {title: mean_and_spread([one["exact"] for one in cells[kind]]) for kind, title in names.items()}
            row |= {
                "steps": f"{statistics.fmean(one['steps'] for one in every):.1f}",
                "patterns in a state": f"{statistics.fmean(one['support'] for one in every):.2f}",
            }
            rows.append(row)
    rows.sort(key=lambda row: "chosen" in row["beta"])
    best = [mean_and_spread(found[kind]["nearest neighbour"][place]) for kind, place in places.items()]
    rows.append(dict(zip(rows[0], ["nearest neighbour of the query", "–", *best, "–", "–"], strict=True)))
    note = (
        f"Rate of exact retrieval among {settings.stored} stored digits: the state differs from the pattern by at most "
        f"{settings.tolerance:g} of its norm. Chosen: the beta that is best on {settings.tuning_seeds} other seeds. "
        "Patterns in a state: those with a weight above 0.001."
    )
    return [Table("Retrieval of digits", rows, note)]


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
