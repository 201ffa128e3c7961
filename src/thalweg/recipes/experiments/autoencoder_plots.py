"""Pictures of what variational autoencoders make of digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thalweg.energies.variational.model import VAE
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, show_image, tidy, to_png

if TYPE_CHECKING:
    from thalweg.recipes.experiments.autoencoder import AutoencoderSettings

__all__ = ["draw_curves", "draw_map", "draw_reconstructions", "draw_samples"]

# A colour for each of the ten digits, apart from its neighbours; the digits stand beside them too.
TEN = (*COLOURS, "#d98cb3", "#1f3b73", "#6fb7a8")


def draw_curves(curves: dict[int, list[dict[str, float]]], settings: AutoencoderSettings) -> Picture:
    """The bounds of learned and held-out digits against the epoch, a panel for each latent size."""
    figure, axes = canvas(1, len(curves), (4.5 * len(curves), 3.4), sharey=True)
    for ax, (latent, curve) in zip(axes[0], curves.items(), strict=True):
        epochs = [row["epoch"] for row in curve]
        for part, colour in (("train", COLOURS[0]), ("test", COLOURS[1])):
            for kind, style in (("iwae", "-"), ("elbo", (0, (3, 2)))):
                name = f"IWAE-{settings.importance}" if kind == "iwae" else "ELBO"
                label = f"{'learned' if part == 'train' else 'held out'}, {name}"
                ax.plot(epochs, [row[f"{part} {kind}"] for row in curve], color=colour, linestyle=style, label=label)
        ax.set_xlabel("epoch")
        ax.set_title(f"latent {latent}")
        tidy(ax)
    highest = max(row["train iwae"] for curve in curves.values() for row in curve)
    axes[0, 0].set_ylim(highest - 12, highest + 0.5)
    axes[0, 0].set_ylabel("nats of an image")
    axes[0, -1].legend(fontsize=8, loc="lower right")
    caption = (
        "The bounds during training, of learned and of held-out digits: the importance-weighted one lies above the "
        "other, and the distance between the colours is what was learned by heart."
    )
    return Picture("curves", caption, to_png(figure))


def draw_reconstructions(models: dict[int, VAE], images: Tensor, labels: Tensor) -> Picture:
    """A held-out digit of each class above what each model makes of it."""
    first = [int((labels == digit).nonzero()[0, 0]) for digit in range(10) if bool((labels == digit).any())]
    rows = {"held out": images[first]}
    rows |= {f"latent {latent}": model.reconstruct(images[first]) for latent, model in models.items()}
    figure, axes = canvas(len(rows), len(first), (9.0, 0.95 * len(rows) + 0.1))
    for line, (name, shown) in zip(axes, rows.items(), strict=True):
        for ax, image in zip(line, shown, strict=True):
            show_image(ax, 16 * image.flatten())
        line[0].set_ylabel(name, fontsize=8)
    caption = "Held-out digits, and the mean image that each model decodes from the posterior's mean."
    return Picture("reconstructions", caption, to_png(figure))


def draw_samples(models: dict[int, VAE], train: Tensor, rows: int = 4, columns: int = 8) -> Picture:
    """Digits that were learned from, beside mean images of z drawn from its prior."""
    draw = torch.Generator().manual_seed(0)
    panels = {"digits learned from": train[: rows * columns]}
    for latent, model in models.items():
        panels[f"samples, latent {latent}"] = model.sample(rows * columns, means=True, generator=draw)
    figure, axes = canvas(1, len(panels), (3.4 * len(panels), 1.97))
    for ax, (name, images) in zip(axes[0], panels.items(), strict=True):
        _show_tiles(ax, images.view(rows, columns, 8, 8))
        ax.set_title(name, fontsize=9)
    caption = "Digits, and mean images p(x | z) of z drawn from its prior: new ones, some between two digits."
    return Picture("samples", caption, to_png(figure))


def draw_map(model: VAE, images: Tensor, labels: Tensor, side: int = 14) -> Picture:
    """The latent plane: where digits lie, and what is decoded from it."""
    figure, axes = canvas(1, 2, (9.4, 4.6))
    left, right = axes[0]
    places = model.transform(images)
    for digit in labels.unique().tolist():
        own = places[labels == digit]
        left.plot(own[:, 0], own[:, 1], "o", color=TEN[digit], markersize=2.6, alpha=0.7, markeredgewidth=0)
        middle = own.median(0).values.tolist()
        left.text(
            *middle,
            str(digit),
            color=TEN[digit],
            fontsize=9,
            weight="bold",
            ha="center",
            va="center",
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": TEN[digit], "linewidth": 0.8},
        )
    left.set(xlabel="mean of $z_1$", ylabel="mean of $z_2$", aspect="equal", adjustable="datalim")
    left.set_title("Where digits lie")
    left.spines[["top", "right"]].set_visible(False)
    _show_tiles(right, model.latent_map(side))
    right.set_title("What is decoded from the plane")
    right.set_xlabel("$z_1$, in steps of equal probability")
    right.set_ylabel("$z_2$")
    caption = (
        "The plane of a latent of size 2. Left: the posterior's means of all digits, coloured by class, which the "
        "model never saw. Right: mean images over the plane."
    )
    return Picture("map", caption, to_png(figure))


def _show_tiles(ax: Any, tiles: Tensor, gap: int = 1) -> None:
    """Images (rows, columns, H, W) side by side, so many white pixels apart."""
    tiles = torch.nn.functional.pad(tiles.detach(), (0, gap, 0, gap))
    rows, columns, height, width = tiles.shape
    whole = tiles.permute(0, 2, 1, 3).reshape(rows * height, columns * width)
    ax.imshow(whole[: rows * height - gap, : columns * width - gap].numpy(), cmap="gray_r", vmin=0, vmax=1)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_color(MUTED)
