"""Densities of points in the plane learned in several ways, and energies with several answers to one question."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.energies.densities import POINTS, MLPEnergy, draw_points, grid_log_partition, grid_points
from thalweg.errors import ConfigError, nearest
from thalweg.inference.langevin import langevin
from thalweg.learning.losses.densities import (
    PersistentWalks,
    contrastive_divergence,
    denoising_score_matching,
    persistent_contrastive_divergence,
    score_matching,
)
from thalweg.recipes.experiments.branches import BRANCHES, draw_branches, measure_branches, train_branches
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.plots import COLOURS, canvas, shade, to_png

# Ways to learn a density; the first is the likelihood with its sum over a grid, which only few dimensions allow.
METHODS = ("grid", "cd", "pcd", "score matching", "denoising")

# The half side of the square that holds the points; sums over it, and fresh walks in it, leave a margin.
EDGE = 4.0


@dataclass(frozen=True, kw_only=True)
class DensitiesSettings:
    """Settings of the experiment.

    Attributes:
        points: sets of points, of :data:`~thalweg.energies.densities.POINTS`.
        methods: of :data:`METHODS`.
        count: points to learn from, and as many to test on.
        steps: of learning; batch: points in each.
        rate: learning rate at the start; it falls to 0 along a cosine.
        hidden: units of each of the two hidden layers.
        walk_steps, walk_size: k and the step size of (persistent) contrastive divergence, whose walks are adjusted.
        walks: that are kept; restart: the probability that one begins anew; magnitude: what holds energies near 0 while
            walks persist, without which they may freeze in holes that grow.
        noise: of denoising score matching.
        samples: drawn from each learned energy, for the picture.
        branch_steps: of learning energies with several answers.

    >>> DensitiesSettings().walk_steps
    8
    """

    points: tuple[str, ...] = POINTS
    methods: tuple[str, ...] = METHODS
    count: int = 5000
    steps: int = 1000
    batch: int = 128
    rate: float = 0.006
    hidden: int = 64
    walk_steps: int = 8
    walk_size: float = 0.01
    walks: int = 2000
    restart: float = 0.05
    magnitude: float = 0.01
    noise: float = 0.15
    samples: int = 800
    branch_steps: int = 400

    def __post_init__(self) -> None:
        check_positive(self, "count", "steps", "batch", "rate", "hidden", "walk_steps", "walk_size", "walks", "noise")
        check_positive(self, "samples", "branch_steps")
        for given, known in ((self.points, POINTS), (self.methods, METHODS)):
            for name in given:
                if name not in known:
                    raise ConfigError(f"`{name}` is not known; {nearest(name, known)}")


class Learned(NamedTuple):
    """An energy, what it was learned from, and the mean negative log-likelihood of other points, in nats.

    >>> Learned(MLPEnergy(2, (4,)), torch.zeros(3, 2), 2.0).nll
    2.0
    """

    energy: MLPEnergy
    data: Tensor
    nll: float


def learn_density(settings: DensitiesSettings, points: str, method: str, seed: int) -> Learned:
    """Learn the energy of a set of points.

    >>> learn_density(DensitiesSettings(steps=1, count=50), "moons", "denoising", 0).data.shape
    torch.Size([50, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    data, tested = (draw_points(points, settings.count, generator=generator) for _ in range(2))
    energy = MLPEnergy(2, (settings.hidden, settings.hidden), bowl=0.2)
    optimiser = torch.optim.Adam(energy.parameters(), lr=settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
    loss = _loss(settings, method, generator)
    for _ in range(settings.steps):
        chosen = torch.randint(len(data), (settings.batch,), generator=generator)
        optimiser.zero_grad()
        loss(energy, data[chosen]).mean().backward()
        torch.nn.utils.clip_grad_norm_(energy.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        nll = energy(tested).mean() + grid_log_partition(energy, -EDGE - 1, EDGE + 1, 250)
    return Learned(energy, data, float(nll))


def _loss(
    settings: DensitiesSettings, method: str, generator: torch.Generator
) -> Callable[[MLPEnergy, Tensor], Tensor]:
    walk: dict[str, Any] = {
        "steps": settings.walk_steps,
        "step_size": settings.walk_size,
        "adjust": True,
        "generator": generator,
    }

    def anywhere(count: int, source: torch.Generator | None) -> Tensor:
        return EDGE * (2 * torch.rand(count, 2, generator=source) - 1)

    match method:
        case "grid":
            return lambda energy, x: energy(x) + grid_log_partition(energy, -EDGE, EDGE, 50)
        case "cd":
            return lambda energy, x: contrastive_divergence(energy, x, **walk)
        case "pcd":
            walks = PersistentWalks(anywhere, size=settings.walks, restart=settings.restart, generator=generator)
            return lambda energy, x: persistent_contrastive_divergence(
                energy, x, walks, magnitude=settings.magnitude, **walk
            )
        case "score matching":
            return score_matching
        case _:
            return lambda energy, x: denoising_score_matching(energy, x, noise=settings.noise, generator=generator)


def sample_energy(energy: MLPEnergy, count: int, seed: int) -> Tensor:
    """Points drawn by adjusted Langevin walks that begin anywhere and cool down, ``(count, 2)``.

    Hot walks cross from one valley to another; each temperature starts where the one before ended.

    >>> sample_energy(MLPEnergy(2, (4,)), 3, 0).shape
    torch.Size([3, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    state = EDGE * (2 * torch.rand(count, 2, generator=generator) - 1)
    for beta in (0.1, 0.2, 0.4, 0.7, 1.0):
        size = 0.02 / beta
        noise = (2 * size / beta) ** 0.5
        state = langevin(energy, state, steps=100, step_size=size, noise=noise, adjust=True, generator=generator).state
    return state


def run_densities(settings: DensitiesSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Learn every set of points in every way, and the branches."""
    figures: dict[str, Any] = {"nll": {}, "branches": {}}
    learned: dict[str, dict[str, Learned]] = {}
    for points in settings.points:
        learned[points], figures["nll"][points] = {}, {}
        for method in settings.methods:
            found = [learn_density(settings, points, method, seed) for seed in seeds]
            learned[points][method] = found[0]
            figures["nll"][points][method] = [each.nll for each in found]
            say(f"{points}, {method}: {mean_and_spread([each.nll for each in found])} nats")
    branches = {}
    for name in BRANCHES:
        made = [train_branches(name, settings.branch_steps, seed) for seed in seeds]
        branches[name] = made[0]
        figures["branches"][name] = [measure_branches(energy) for energy in made]
        say(f"branches, {name}: {figures['branches'][name][0]}")
    shown = {points: {name: each.energy for name, each in row.items()} for points, row in learned.items()}
    drawn = {
        points: {name: sample_energy(energy, settings.samples, seeds[0]) for name, energy in row.items()}
        for points, row in shown.items()
    }
    data = {points: next(iter(row.values())).data[: settings.samples] for points, row in learned.items()}
    pictures = [draw_energies(data, shown), draw_samples(data, drawn), draw_branches(branches, seeds[0])]
    return Findings([_table(settings, figures), _branch_table(figures)], pictures, figures)


def _table(settings: DensitiesSettings, figures: dict[str, Any]) -> Table:
    rows = [
        {"method": method, **{points: mean_and_spread(figures["nll"][points][method], 2) for points in settings.points}}
        for method in settings.methods
    ]
    note = (
        f"Mean negative log-likelihood, in nats, of {settings.count:,} points that were not learned from, after "
        f"{settings.steps:,} steps of {settings.batch} points; the sum over the plane by a grid. `grid` learns that "
        "likelihood itself, which only few dimensions allow; the others never see the sum."
    )
    return Table("Densities", rows, note)


def _branch_table(figures: dict[str, Any]) -> Table:
    rows = []
    for name, found in figures["branches"].items():
        row = {"energy": name}
        for key in ("answers at x = -0.5", "answers at x = 0.7", "missed", "astray"):
            row[key] = f"{statistics.fmean(each[key] for each in found):.3f}".removesuffix(".000")
        rows.append(row)
    note = (
        "Data: y = 0 up to x = 0, then sqrt(x) or -sqrt(x). Missed: distance from a right answer to the nearest that "
        "was found, astray: from a found one to the nearest right one; means over 81 x."
    )
    return Table("Several answers", rows, note)


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
