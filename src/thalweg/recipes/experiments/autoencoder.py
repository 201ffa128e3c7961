"""Digits through a bottleneck: variational autoencoders, their bounds, and what they make of noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.variational.config import Annealing, Network, VAEConfig, VAETraining
from thalweg.energies.variational.model import VAE
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.autoencoder_plots import draw_curves, draw_map, draw_reconstructions, draw_samples
from thalweg.recipes.experiments.findings import (
    Findings,
    Say,
    Table,
    check_positive,
    load_digit_images,
    mean_and_spread,
)

__all__ = ["AutoencoderSettings", "binary_digits", "fit_digits", "run_autoencoder"]

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
