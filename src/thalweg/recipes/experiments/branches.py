"""A pitchfork: one answer for some x, two for others, learned by energies with and without a latent variable."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.energies.latent import BranchEnergy, Elimination
from thalweg.inference.langevin import langevin
from thalweg.learning.losses import nll, square_square
from thalweg.learning.losses.contrasts import from_sampler
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import panels, shade, to_png

# Energies that are compared: values of z, the loss, and how z is got rid of.
BRANCHES: dict[str, tuple[int, str, Elimination]] = {
    "one branch, nll": (1, "nll", "sum"),
    "sum, nll": (2, "nll", "sum"),
    "minimum, nll": (2, "nll", "minimum"),
    "sum, contrast": (2, "contrast", "sum"),
    "minimum, contrast": (2, "contrast", "minimum"),
}

# Answers lie between -EDGE and EDGE.
EDGE = 1.5


def fork_pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of the fork, ``(count, 1)`` each: y = 0 up to x = 0, then sqrt(x) or -sqrt(x), with a little noise.

    >>> x, y = fork_pairs(100, 0)
    >>> bool((y.square() - x.clamp(min=0)).abs().max() < 0.5)
    True
    """
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    signs = torch.randint(0, 2, (count, 1), generator=generator) * 2 - 1
    return x, signs * x.clamp(min=0).sqrt() + 0.05 * torch.randn(count, 1, generator=generator)


def train_branches(name: str, steps: int, seed: int) -> BranchEnergy:
    """Learn the fork by the likelihood over a grid of answers, or by contrast with Langevin walks from anywhere.

    >>> train_branches("sum, contrast", 1, 0).over
    'sum'
    """
    branches, loss, over = BRANCHES[name]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    energy = BranchEnergy(1, 1, branches=branches, hidden=(32,), scale=0.2, over=over)
    x, y = fork_pairs(1000, seed)
    grid = torch.linspace(-EDGE, EDGE, 61).unsqueeze(1)
    gold = (y - grid.T).abs().argmin(dim=1)
    optimiser = torch.optim.Adam(energy.parameters(), lr=0.01)
    for _ in range(steps):
        chosen = torch.randint(len(x), (128,), generator=generator)
        if loss == "nll":
            values = nll(energy.on_grid(x[chosen], grid), gold[chosen])
        else:
            values = _contrast(energy, x[chosen], y[chosen], generator)
        optimiser.zero_grad()
        values.mean().backward()
        optimiser.step()
    return energy


def _contrast(energy: BranchEnergy, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Right answers down to -1, where walks end up to at least 1."""
    anywhere = EDGE * (2 * torch.rand(y.shape, generator=generator) - 1)

    def walk(of, start: Tensor) -> Tensor:
        return langevin(of, start, steps=5, step_size=0.01, generator=generator).state

    wrong = from_sampler(lambda at: energy(x, at), anywhere, walk)
    return square_square(energy(x, y) + 1, wrong.energies, margin=1.0)


def measure_branches(energy: BranchEnergy) -> dict[str, float]:
    """How many answers there are on either side of the fork, and how far those found and the right ones are apart.

    >>> measured = measure_branches(BranchEnergy(1, 1, hidden=(4,)))
    >>> list(measured)
    ['answers at x = -0.5', 'answers at x = 0.7', 'missed', 'astray']
    """
    x = torch.linspace(-1, 1, 81).unsqueeze(1)
    found = energy.infer(x, apart=0.15)
    roots = x.clamp(min=0).sqrt()
    right = torch.cat([roots, -roots], dim=1).unsqueeze(2)
    distances = (right - found.answers.mT).abs()  # (81, 2, K)
    there = torch.isfinite(found.energies)
    missed = distances.masked_fill(~there.unsqueeze(1), torch.inf).min(dim=2).values.mean()
    astray = distances.min(dim=1).values[there].mean()
    asked = torch.isfinite(energy.infer(torch.tensor([[-0.5], [0.7]]), apart=0.15).energies).sum(dim=1).tolist()
    return {
        "answers at x = -0.5": float(asked[0]),
        "answers at x = 0.7": float(asked[1]),
        "missed": float(missed),
        "astray": float(astray),
    }


def draw_branches(energies: dict[str, BranchEnergy], seed: int) -> Picture:
    """The free energy over x and y, the data, and the answers that inference gives."""
    figure, axes, each = panels(list(energies), len(energies), (2.3, 2.5), 0.7, sharey=True)
    pairs = fork_pairs(150, seed)
    x, y = torch.linspace(-1, 1, 121).unsqueeze(1), torch.linspace(-EDGE, EDGE, 121).unsqueeze(1)
    asked = torch.linspace(-0.95, 0.95, 20).unsqueeze(1)
    image = None
    for ax, energy in zip(each, energies.values(), strict=True):
        with torch.no_grad():
            surface = energy.on_grid(x, y)
        surface = (surface - surface.min(dim=1, keepdim=True).values).T.numpy()
        image = shade(ax, surface, (-1, 1, -EDGE, EDGE), 6)
        ax.set_aspect("auto")
        ax.plot(*(part[:, 0].numpy() for part in pairs), ".", markersize=2, color="white", alpha=0.7)
        found = energy.infer(asked, apart=0.15)
        for place in range(found.energies.size(1)):
            there = torch.isfinite(found.energies[:, place])
            at, answer = asked[there, 0].numpy(), found.answers[there, place, 0].numpy()
            ax.plot(at, answer, "o", markersize=3.5, color="#ff8c3b", markeredgewidth=0)
        ax.set_xlabel("x", fontsize=8)
    axes[0, 0].set_ylabel("y", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=axes, label="F(x, y) above its least", shrink=0.8)
    caption = (
        "Free energy of the fork, above its least for each x: data (white) and the answers that inference finds "
        "(orange). A single bowl stands between the two right answers; with a latent variable each has its own."
    )
    return Picture("branches", caption, to_png(figure))
