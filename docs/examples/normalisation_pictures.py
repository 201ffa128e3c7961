"""The pictures of docs/normalisation.md: which entries share statistics, and what the Jacobians do.

python docs/examples/normalisation_pictures.py FOLDER
"""

import sys
from pathlib import Path

import torch
from matplotlib import pyplot

from thalweg.diagnostics.normalisation import layer_norm_jacobian, normalisation_statistics

TENSOR = torch.tensor(
    [[[1, 3, 2], [1, 2, 3]], [[3, 3, 2], [2, 4, 4]], [[4, 2, 2], [1, 2, 4]], [[3, 3, 2], [3, 3, 2]]]
).double()
COLOURS = ["#cfe3e8", "#f3d9c6", "#d3e6da", "#e4d6ea", "#f0cfc9", "#ebe5c4", "#d9dfe1", "#c7d8f0"]
# For each scheme the number of an entry's group, by item and channel.
GROUPS = {"batch": lambda b, c: c, "layer": lambda b, c: b, "instance": lambda b, c: 2 * b + c}


def draw_groups(path: Path) -> None:
    """The same tensor three times, coloured by group."""
    figure, axes = pyplot.subplots(1, 3, figsize=(8.4, 2.1), layout="constrained")
    for axis, (scheme, group) in zip(axes, GROUPS.items(), strict=True):
        found = normalisation_statistics(TENSOR, scheme)
        for b in range(4):
            for c in range(2):
                for f in range(3):
                    place = (3 * c + f + 0.3 * c, 3 - b)
                    colour = COLOURS[group(b, c)]
                    axis.add_patch(pyplot.Rectangle(place, 1, 1, facecolor=colour, edgecolor="white"))
                    axis.text(place[0] + 0.5, place[1] + 0.5, f"{TENSOR[b, c, f]:.0f}", ha="center", va="center")
        axis.set(xlim=(0, 6.3), ylim=(0, 4), aspect="equal", xticks=[1.5, 4.8], yticks=[3.5, 2.5, 1.5, 0.5])
        axis.set_xticklabels(["channel 1", "channel 2"])
        axis.set_yticklabels([f"item {b + 1}" for b in range(4)])
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
        axis.set_title(f"{scheme}: {found.mean.numel()} means, of {int(found.count.max())} entries", fontsize=10)
    figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})


def draw_jacobians(path: Path) -> None:
    """Two matrices and their singular values."""
    row = torch.tensor([1.0, 3, 2, 7, 4]).double()
    sigma = row.std(correction=0)
    matrices = {"centring: I - 11'/n": torch.eye(5) - 1 / 5, "layer norm, times σ": layer_norm_jacobian(row) * sigma}
    figure, axes = pyplot.subplots(1, 3, figsize=(8.4, 2.8), layout="constrained")
    for axis, (title, matrix) in zip(axes, matrices.items(), strict=False):
        axis.imshow(matrix, cmap="RdBu", vmin=-1.6, vmax=1.6)
        for i in range(5):
            for j in range(5):
                axis.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=7.5)
        axis.set(xticks=[], yticks=[])
        axis.set_title(title, fontsize=10)
    places = torch.arange(1, 6)
    for shift, (title, matrix), colour in zip((-0.18, 0.18), matrices.items(), ("#0b6e82", "#c2611f"), strict=True):
        values = torch.linalg.svdvals(matrix)
        axes[2].bar(places + shift, values, width=0.34, color=colour, label=title)
    axes[2].set_title("singular values", fontsize=10)
    axes[2].set(ylim=(0, 1.45), yticks=[0, 0.5, 1])
    axes[2].legend(fontsize=8, frameon=False, loc="upper right")
    axes[2].spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    draw_groups(folder / "normalisation-groups.png")
    draw_jacobians(folder / "normalisation-jacobians.png")
