"""Pictures of energy surfaces under different losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thalweg.learning.losses import gibbs
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, panels, shade, tidy, to_png

if TYPE_CHECKING:
    from thalweg.recipes.experiments.losses import TwoTowers


# What lies above this energy is drawn alike: far from the valley only the direction matters.
TOP = 3.0


def _surface(towers: TwoTowers) -> Any:
    """E above its least over y, for x in [-1, 1] and y in [-1.5, 1.5], (y, x): many losses leave the level free."""
    with torch.no_grad():
        energies = towers(torch.linspace(-1, 1, 121).unsqueeze(1), torch.linspace(-1.5, 1.5, 121).unsqueeze(1))
    return (energies - energies.min(dim=1, keepdim=True).values).T.numpy()


def draw_surfaces(surfaces: dict[str, TwoTowers], pairs: tuple[Tensor, Tensor]) -> Picture:
    """E(x, y) before training and after it with each loss, one scale for all."""
    figure, axes, each = panels(list(surfaces), 4, (2.25, 2.0), 0.7, sharex=True, sharey=True)
    image = None
    for ax, towers in zip(each, surfaces.values(), strict=True):
        image = shade(ax, _surface(towers), (-1, 1, -1.5, 1.5), TOP)
        ax.set_aspect("auto")
        ax.plot(*(part[:120, 0].numpy() for part in pairs), ".", markersize=2, color="white", alpha=0.7)
    for ax in axes[-1]:
        ax.set_xlabel("x", fontsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("y", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=axes, label=f"energy above the least at that x, {TOP:g} and more alike", shrink=0.6)
    caption = (
        "Energy over x and y, above the least at each x, before training and after it with each loss, on one scale; "
        "dots: the data. Without a contrast the surface becomes flat."
    )
    return Picture("surfaces", caption, to_png(figure))


def draw_answers(runs: dict[str, dict[str, Any]]) -> Picture:
    """The energies of the ten answers to one test digit, before and after."""
    figure, axes, each = panels(list(runs), 4, (2.25, 1.65), sharex=True)
    digits = range(10)
    for ax, run in zip(each, runs.values(), strict=True):
        colours = [COLOURS[1] if digit == run["gold"] else COLOURS[0] for digit in digits]
        ax.bar(digits, run["after"], width=0.7, color=colours)
        ax.plot(digits, run["before"], "_", color=MUTED, markersize=7, markeredgewidth=1.5)
        tidy(ax)
        ax.set_xticks(list(digits))
        ax.set_ylim(bottom=0)
    for ax in axes[:, 0]:
        ax.set_ylabel("energy", fontsize=8)
    caption = (
        "Energies of the ten answers to one test digit: after training (bars; the right answer in orange) and before "
        "(dashes). The scales differ."
    )
    return Picture("answers", caption, to_png(figure))


def draw_gibbs(towers: TwoTowers, grid: Tensor, x: float) -> Picture:
    """The Gibbs distribution over the answers to one x, at several inverse temperatures."""
    with torch.no_grad():
        energies = towers(torch.tensor([[x]]), grid)
    figure, axes = canvas(1, 2, (7.2, 2.7))
    answers = grid[:, 0].numpy()
    axes[0, 0].plot(answers, (energies[0] - energies.min()).numpy(), color=COLOURS[0])
    axes[0, 0].set_title(f"energy above its least, x = {x:g}")
    for place, beta in enumerate((0.1, 0.3, 1.0, 3.0)):
        shares = gibbs(energies, beta)[0].numpy()
        axes[0, 1].plot(answers, shares, color=COLOURS[place], label=f"β = {beta:g}")
    axes[0, 1].set_title("Gibbs distribution")
    axes[0, 1].legend(fontsize=8)
    for ax in axes.flat:
        ax.set_xlabel("y")
        tidy(ax)
    caption = "One row of a learned surface, and its Gibbs distribution: flat when hot, on the least energy when cold."
    return Picture("gibbs", caption, to_png(figure))
