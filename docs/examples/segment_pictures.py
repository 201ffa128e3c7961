"""The picture of docs/segments.md: a small lattice with its best segmentation, and a signal whose states last.

python docs/examples/segment_pictures.py docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.energies import HMM, GaussianEmission
from thalweg.inference import SemiMarkov

COLOURS = ("#2b6777", "#d1495b")


def lattice(axes: plt.Axes) -> None:
    """Every segment of a sequence of six positions as an arc, as wide as it is probable; the mode in full colour."""
    generator = torch.Generator().manual_seed(3)
    content = torch.randn(1, 6, 2, generator=generator)
    p = SemiMarkov(content, torch.tensor([[0.0, 0.0], [0.8, 0.2], [0.2, 1.0]]), torch.zeros(2, 2))
    best = p.segments(p.mode)[0]
    draws = [tuple(each) for y in p.sample((2000,), generator=generator) for each in p.segments(y)[0]]
    for first, past, label in sorted(set(draws)):
        share = draws.count((first, past, label)) / 2000
        turn = np.linspace(0, np.pi, 40)
        x = (first + past) / 2 - np.cos(turn) * (past - first) / 2
        y = np.sin(turn) * (past - first) / 2 * (1 if label == 0 else -1)
        chosen = (first, past, label) in best
        axes.plot(x, y, color=COLOURS[label], lw=0.6 + 7 * share, alpha=0.95 if chosen else 0.3, solid_capstyle="butt")
    axes.plot(range(7), [0] * 7, "o", color="black", ms=5)
    axes.set(
        xticks=range(7), yticks=[], xlabel="cut between positions", title="segments of up to 3 positions, 2 labels"
    )
    axes.text(-0.4, 1.2, "label 0", color=COLOURS[0])
    axes.text(-0.4, -1.35, "label 1", color=COLOURS[1])
    axes.spines[["left", "right", "top"]].set_visible(False)


def stays(axes: tuple[plt.Axes, plt.Axes]) -> None:
    """A noisy signal of two states that last 6 and 14 positions: who is where, by a chain and by segments."""
    lasting = torch.full((2, 20), 1e-3)
    lasting[0, 5] = lasting[1, 13] = 1.0
    moves = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    true = HMM([0.5, 0.5], moves, GaussianEmission([[0.0], [1.0]]), durations=lasting / lasting.sum(1, keepdim=True))
    z, x = true.sample(100, generator=torch.Generator().manual_seed(5))
    stay = torch.tensor([[5 / 6, 1 / 6], [1 / 14, 13 / 14]])
    chain = HMM([0.5, 0.5], stay, GaussianEmission([[0.0], [1.0]]))
    axes[0].plot(x[0, :, 0], ".", color="0.4", ms=4)
    axes[0].step(range(100), z[0], where="mid", color="black", lw=1)
    axes[0].set(ylabel="signal", title="a state that lasts 6 positions, one that lasts 14, noise as large as the step")
    for model, name, style in ((chain, "chain", ":"), (true, "segments", "-")):
        axes[1].plot(model.smooth(x)[0, :, 1], style, label=name, color=COLOURS[style == "-"])
        right = float((model.viterbi(x)[1] == z).float().mean())
        print(f"{name}: {right:.0%} of the positions right")
    axes[1].step(range(100), z[0], where="mid", color="black", lw=0.6)
    axes[1].set(ylabel="p(state 1)", xlabel="position")
    axes[1].legend(loc="center left", fontsize=8)


def main(folder: Path) -> None:
    """Draw and write ``segments.png``."""
    figure = plt.figure(figsize=(9, 7), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1.5, 1, 1))
    lattice(figure.add_subplot(grid[0]))
    upper = figure.add_subplot(grid[1])
    stays((upper, figure.add_subplot(grid[2], sharex=upper)))
    figure.savefig(folder / "segments.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
