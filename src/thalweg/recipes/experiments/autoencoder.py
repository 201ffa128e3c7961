"""Digits through a bottleneck: variational autoencoders, their bounds, and what they make of noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.data.images.digits import load_digit_images
from thalweg.energies.variational.config import Annealing, Network, VAEConfig, VAETraining
from thalweg.energies.variational.model import VAE
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.findings import (
    Findings,
    Picture,
    Say,
    Table,
    check_positive,
    mean_and_spread,
)
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, show_image, tidy, to_png

# Epochs between two looks at the bounds.
LOOK_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class AutoencoderSettings:
    """Settings of the experiment.

    Attributes:
        latents: sizes of z, a model each; one of size 2 has its plane drawn.
        hidden, network: as in :class:`~thalweg.energies.VAEConfig`.
        epochs, batch_size, learning_rate, samples, annealing, free_bits: as in
            :class:`~thalweg.energies.VAETraining`; an annealing takes a quarter of the epochs.
        held_out: digits that are not learned from, of 1,797.
        importance: samples of z in the importance-weighted bound.

    >>> AutoencoderSettings().latents
    (2, 8)
    """

    latents: tuple[int, ...] = (2, 8)
    hidden: tuple[int, ...] = (128, 64)
    network: Network = "dense"
    epochs: int = 80
    batch_size: int = 64
    learning_rate: float = 2e-3
    samples: int = 1
    annealing: Annealing = "none"
    free_bits: float = 0.0
    held_out: int = 360
    importance: int = 64

    def __post_init__(self) -> None:
        check_positive(self, "latents", "held_out", "importance")
        if self.held_out > 1700:
            raise ConfigError(f"`held_out` must leave some of the 1,797 digits to learn from, got {self.held_out}")
        _ = self.training, [self.config(latent) for latent in self.latents]

    @property
    def training(self) -> VAETraining:
        """How each model is trained."""
        return VAETraining(
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            samples=self.samples,
            annealing=self.annealing,
            annealing_epochs=max(1, self.epochs // 4),
            free_bits=self.free_bits,
        )

    def config(self, latent: int) -> VAEConfig:
        """The model with that latent."""
        return VAEConfig(shape=(8, 8), latent=latent, network=self.network, hidden=self.hidden)


def binary_digits(held_out: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits to learn from and held-out ones, ``(N, 8, 8)`` of 0 and 1, then the labels of both.

    >>> [len(each) for each in binary_digits(360, 0)]
    [1437, 360, 1437, 360]
    """
    images, labels = (torch.from_numpy(each) for each in load_digit_images())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = (images[order] >= 8).float().view(-1, 8, 8), labels[order]
    return images[held_out:], images[:held_out], labels[held_out:], labels[:held_out]


def fit_digits(settings: AutoencoderSettings, latent: int, seed: int) -> tuple[VAE, list[dict[str, float]]]:
    """A trained model, and the bounds of learned and held-out digits every few epochs.

    >>> model, curve = fit_digits(AutoencoderSettings(epochs=1, hidden=(4,), importance=2), 2, 0)
    >>> list(curve[0])
    ['epoch', 'train elbo', 'train iwae', 'test elbo', 'test iwae']
    """
    train, test, *_ = binary_digits(settings.held_out, seed)
    parts = {"train": train[: len(test)], "test": test}
    curve: list[dict[str, float]] = []

    def look(event: dict[str, Any]) -> None:
        if event["epoch"] % LOOK_EVERY == 0 or event["epoch"] in (1, settings.epochs):
            row = {"epoch": float(event["epoch"])}
            for part, images in parts.items():
                row[f"{part} elbo"] = float(model.score_samples(images, 1).mean())
                row[f"{part} iwae"] = float(model.score_samples(images, settings.importance).mean())
            curve.append(row)

    model = VAE(settings.config(latent), fitting=settings.training, random_state=seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads longer than it works
    try:
        return model.fit(train, listener=look), curve
    finally:
        torch.set_num_threads(threads)


def run_autoencoder(settings: AutoencoderSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Train a model of each size on each seed; pictures are of the first."""
    found: dict[str, Any] = {"latents": {}}
    models: dict[int, VAE] = {}
    for latent in settings.latents:
        runs = []
        for seed in seeds:
            model, curve = fit_digits(settings, latent, seed)
            models.setdefault(latent, model)
            runs.append({"curve": curve} | _measures(settings, model, seed))
        found["latents"][latent] = runs
        reached = mean_and_spread([run["curve"][-1]["test iwae"] for run in runs], 2)
        say(f"latent {latent}: held-out bound {reached} nats")
    found["independent pixels"] = [_independent(settings, seed) for seed in seeds]
    train, test, train_labels, labels = binary_digits(settings.held_out, seeds[0])
    pictures = [draw_curves({latent: runs[0]["curve"] for latent, runs in found["latents"].items()}, settings)]
    pictures += [draw_reconstructions(models, test, labels), draw_samples(models, train)]
    if 2 in models:
        pictures.append(draw_map(models[2], torch.cat([train, test]), torch.cat([train_labels, labels])))
    return Findings([_table(settings, found)], pictures, found)


def _measures(settings: AutoencoderSettings, model: VAE, seed: int) -> dict[str, float]:
    """Nats that z carries, dimensions that carry some, and how often the nearest learned z has the right label."""
    train, test, train_labels, test_labels = binary_digits(settings.held_out, seed)
    with torch.no_grad():
        nats = model.divergences(test).mean(0)
    nearest = torch.cdist(model.transform(test), model.transform(train)).argmin(1)
    return {
        "nats": float(nats.sum()),
        "used": float((nats > 0.01).sum()),
        "nearest": float((train_labels[nearest] == test_labels).double().mean()),
    }


def _independent(settings: AutoencoderSettings, seed: int) -> float:
    """The held-out log-likelihood of pixels by themselves: each is on as often as it was among the learned ones."""
    train, test, *_ = binary_digits(settings.held_out, seed)
    on = (train.sum(0) + 1) / (len(train) + 2)
    return float(torch.distributions.Bernoulli(on).log_prob(test).sum((1, 2)).mean())


def _table(settings: AutoencoderSettings, found: dict[str, Any]) -> Table:
    rows = []
    for latent, runs in found["latents"].items():
        last = {key: [run["curve"][-1][key] for run in runs] for key in runs[0]["curve"][-1]}
        row = {"model": f"VAE, latent {latent}"}
        for key in ("train elbo", "test elbo", "train iwae", "test iwae"):
            row[key.replace("elbo", "ELBO").replace("iwae", f"IWAE-{settings.importance}")] = mean_and_spread(
                last[key], 2
            )
        row["nats in z"] = mean_and_spread([run["nats"] for run in runs], 2)
        row["dimensions used"] = mean_and_spread([run["used"] for run in runs], 0)
        row["nearest z right"] = mean_and_spread([run["nearest"] for run in runs], 3)
        rows.append(row)
    alone = mean_and_spread(found["independent pixels"], 2)
    rows.append(dict.fromkeys(rows[0], "–") | {"model": "independent pixels (exact)", list(rows[0])[4]: alone})
    note = (
        f"Nats of a binary 8 x 8 image after {settings.epochs} epochs; {settings.held_out} digits held out. Both are "
        "lower bounds of log p(x), the second with more samples and therefore tighter. Dimensions used carry more than "
        "0.01 nats. Nearest z right: the held-out digit's nearest learned neighbour in z has its label."
    )
    return Table("Bounds of held-out digits", rows, note)


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


def draw_map(model: VAE, images: Tensor, labels: Tensor) -> Picture:
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
    _show_tiles(right, model.latent_map(14))
    right.set_title("What is decoded from the plane")
    right.set_xlabel("$z_1$, in steps of equal probability")
    right.set_ylabel("$z_2$")
    caption = (
        "The plane of a latent of size 2. Left: the posterior's means of all digits, coloured by class, which the "
        "model never saw. Right: mean images over the plane."
    )
    return Picture("map", caption, to_png(figure))


def _show_tiles(ax: Any, tiles: Tensor) -> None:
    """Images (rows, columns, H, W) side by side, a white pixel apart."""
    tiles = torch.nn.functional.pad(tiles.detach(), (0, 1, 0, 1))
    rows, columns, height, width = tiles.shape
    whole = tiles.permute(0, 2, 1, 3).reshape(rows * height, columns * width)
    ax.imshow(whole[:-1, :-1].numpy(), cmap="gray_r", vmin=0, vmax=1)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_color(MUTED)
