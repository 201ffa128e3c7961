"""How many random patterns a memory holds: modern ones against dimension, beside the classical network."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ConfigError
from thalweg.layers.hopfield.separation_maps import separation as named_separation
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, colour_of, tidy, to_png


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """Settings of the experiment. All patterns are random signs.

    Attributes:
        separations: modern memories that are measured.
        beta: their inverse temperature.
        dimensions: theirs; the number of patterns rises by factors of ``factor`` to ``most``.
        flipped: probability that a sign of a query to a modern memory is turned; the classical network gets the pattern
            itself, as in the theory of its capacity.
            Retrieved are those where all signs of the state are right.
        wrong: a classical network keeps a pattern where at most this share of the signs is wrong at the end.
        queries: patterns that are asked for in a modern memory, at most.
        sizes: of classical networks.
        loads: patterns over neurons, for the classical network.
        asked: patterns that a rate of the classical network is measured on, at least, in as many networks as it takes.
        sweeps: updates of all its neurons, one after the other, at most.

    >>> CapacitySettings().beta
    1.0
    """

    separations: tuple[str, ...] = ("softmax", "sparsemax")
    beta: float = 1.0
    dimensions: tuple[int, ...] = (12, 14, 16, 18, 20, 22, 24)
    flipped: float = 0.1
    factor: float = 2.0
    most: int = 40_000
    wrong: float = 0.05
    queries: int = 200
    sizes: tuple[int, ...] = (125, 250, 500, 1000)
    loads: tuple[float, ...] = (0.1, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.2, 0.22, 0.25)
    asked: int = 200
    sweeps: int = 20

    def __post_init__(self) -> None:
        check_positive(self, "beta", "dimensions", "most", "wrong", "queries", "sizes", "loads", "asked", "sweeps")
        if not 0 <= self.flipped < 0.5:
            raise ConfigError(f"`flipped` must be in [0, 0.5), got {self.flipped}")
        if not self.factor > 1 or len(self.dimensions) < 2:
            raise ConfigError(
                f"`factor` must be more than 1 and `dimensions` two or more, got {self.factor} and {self.dimensions}"
            )
        for name in self.separations:
            named_separation(name)


def random_signs(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random patterns of -1 and 1, ``(count, size)`` float32.

    >>> random_signs(2, 3, torch.Generator().manual_seed(0)).abs().sum()
    tensor(6.)
    """
    return torch.randint(0, 2, (count, size), generator=generator).float() * 2 - 1


def _queries(patterns: Tensor, flipped: float, generator: torch.Generator) -> Tensor:
    turned = torch.rand(patterns.shape, generator=generator) < flipped
    return torch.where(turned, -patterns, patterns)


def modern_rate(settings: CapacitySettings, name: str, size: int, count: int, seed: int) -> float:
    """The share of patterns that a modern memory of ``count`` patterns retrieves.

    >>> modern_rate(CapacitySettings(), "softmax", 16, 4, 0)
    1.0
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = random_signs(count, size, generator)
    asked = patterns[: settings.queries]
    memory = HopfieldMemory(patterns, beta=settings.beta, separation=name)
    found = memory.retrieve(_queries(asked, settings.flipped, generator), max_steps=20, tol=1e-3)
    return float((found.state.sign() == asked).all(1).double().mean())


def classical_rate(settings: CapacitySettings, size: int, count: int, seed: int) -> float:
    """The share of patterns that a classical network keeps: Hebbian weights, sign updates until nothing changes.

    W = X'X / D with a diagonal of 0; from each pattern the neurons are updated one after the other, in a new random
    order each sweep. As many networks as it takes to ask for ``settings.asked`` patterns. Hopfield (1982); that it
    holds 0.138 patterns a neuron: Amit, Gutfreund and Sompolinsky (1985).

    >>> classical_rate(CapacitySettings(asked=10), 100, 5, 0)
    1.0
    """
    generator = torch.Generator().manual_seed(seed)
    networks = -(-settings.asked // count)
    patterns = random_signs(networks * count, size, generator).view(networks, count, size)
    weights = patterns.mT @ patterns  # (G, D, D); without the 1 / D, so that ties are exact
    weights.diagonal(dim1=1, dim2=2).zero_()
    state = patterns.mT.contiguous()  # (G, D, N): a neuron is a row
    for _ in range(settings.sweeps):
        before = state.clone()
        for neuron in torch.randperm(size, generator=generator).tolist():
            field = torch.bmm(weights[:, neuron : neuron + 1], state).squeeze(1)
            state[:, neuron] = torch.where(field == 0, state[:, neuron], field.sign())
        if torch.equal(before, state):
            break
    wrong = (state != patterns.mT).double().mean(1)
    return float((wrong <= settings.wrong).double().mean())


def crossing(xs: list[float], rates: list[float]) -> float:
    """Where falling rates first cross a half, by interpolation; the last x where they never do.

    >>> crossing([1.0, 2.0, 3.0], [1.0, 0.75, 0.25])
    2.5
    """
    for place in range(1, len(xs)):
        left, right = rates[place - 1], rates[place]
        if right < 0.5 <= left:
            return xs[place - 1] + (left - 0.5) / (left - right) * (xs[place] - xs[place - 1])
    return xs[-1] if rates[0] >= 0.5 else xs[0]


def run_capacity(settings: CapacitySettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Measure where retrieval breaks down for each memory, and fit the growth of the modern ones."""
    modern = {name: _modern(settings, name, seeds) for name in settings.separations}
    for name, found in modern.items():
        say(f"{name}: " + ", ".join(f"{size} -> {statistics.geometric_mean(each):.0f}" for size, each in found.items()))
    classical = {size: _classical(settings, size, seeds) for size in settings.sizes}
    for size, found in classical.items():
        say(f"classical, {size} neurons: breaks down at {statistics.fmean(found['load']):.4f} patterns a neuron")
    growth = {name: _growth(found) for name, found in modern.items()}
    figures: dict[str, Any] = {"modern": modern, "growth": growth, "classical": classical, "limit": _limit(classical)}
    pictures = [draw_growth(settings, figures), draw_breakdown(settings, figures)]
    return Findings(_tables(settings, figures), pictures, figures)


def _modern(settings: CapacitySettings, name: str, seeds: tuple[int, ...]) -> dict[int, list[float]]:
    """For each dimension and seed the number of patterns at which half are no longer retrieved."""
    found: dict[int, list[float]] = {}
    for size in settings.dimensions:
        found[size] = []
        for seed in seeds:
            counts, rates, count = [1.0], [1.0], 2.0
            # Two rates below one half in a row: one alone may be chance.
            while count <= settings.most and not (len(rates) > 1 and max(rates[-2:]) < 0.5):
                rates.append(modern_rate(settings, name, size, round(count), seed))
                counts.append(round(count))
                count *= settings.factor
            if min(rates) < 0.5:
                found[size].append(math.exp(crossing([math.log(count) for count in counts], rates)))
        if len(found[size]) < len(seeds):
            del found[size]  # some hold more than `most` in this dimension
    return found


def _growth(found: dict[int, list[float]]) -> dict[str, float]:
    """The least-squares line log2 N = a + g D over all seeds; g in bits a dimension."""
    points = [(float(size), math.log2(count)) for size, counts in found.items() for count in counts]
    if len({size for size, _ in points}) < 2:
        return {}
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return {"bits_per_dimension": slope, "start": start}


def _classical(settings: CapacitySettings, size: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    rates = [
        [classical_rate(settings, size, max(1, round(load * size)), seed) for load in settings.loads] for seed in seeds
    ]
    return {"rates": rates, "load": [crossing(list(settings.loads), each) for each in rates]}


def _limit(classical: dict[int, dict[str, Any]]) -> float | None:
    """The load at which endless networks break down: those of each size extrapolated in 1 / sqrt(D)."""
    points = [(size**-0.5, load) for size, found in classical.items() for load in found["load"]]
    if len(classical) < 2:
        return None
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).intercept


def _tables(settings: CapacitySettings, figures: dict[str, Any]) -> list[Table]:
    rows = []
    for name, found in figures["modern"].items():
        growth = figures["growth"][name].get("bits_per_dimension")
        grows = "–" if growth is None else f"x {2**growth:.3f} a dimension"
        for size, counts in found.items():
            held = f"{statistics.geometric_mean(counts):,.0f}"
            rows.append({"memory": name, "dimension": str(size), "patterns held": held, "growth": grows})
    for size, found in figures["classical"].items():
        load, held = mean_and_spread(found["load"]), f"{statistics.fmean(found['load']) * size:,.0f}"
        rows.append({"memory": "classical", "dimension": f"{size:,}", "patterns held": held, "growth": f"{load} D"})
    if figures["limit"] is not None:
        last = {"memory": "classical", "dimension": "endless", "patterns held": "–"}
        rows.append({**last, "growth": f"{figures['limit']:.3f} D"})
    note = (
        f"Patterns stored when half of them are no longer retrieved. Modern memories: beta {settings.beta:g}, queries "
        f"with {settings.flipped:.0%} of the signs turned, all signs right. Classical network: from the pattern, "
        f"at most {settings.wrong:.0%} of the signs wrong; endless: extrapolated in 1 / sqrt(D); theory: 0.138."
    )
    return [Table("Capacity", rows, note)]


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
