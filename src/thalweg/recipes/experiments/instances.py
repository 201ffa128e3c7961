"""Multiple-instance learning: are certain digits in the bag? Memory pooling beside mean, maximum and attention."""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.data.images.digits import load_digit_images
from thalweg.errors import ConfigError
from thalweg.limits import check_choice
from thalweg.recipes.experiments.findings import (
    Findings,
    Picture,
    Say,
    Table,
    check_positive,
    mean_and_spread,
)
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png
from thalweg.recipes.experiments.poolings import POOLINGS, BagClassifier


@dataclass(frozen=True, kw_only=True)
class InstancesSettings:
    """Settings of the experiment. A bag is positive where it holds all of some digits; only bags are labelled.

    Attributes:
        digits: a positive bag holds one image of each; a negative bag as many images, all of the same one of them, or
            none where there is only one digit.
        sizes: least and largest number of images in a bag: of training and validation bags and the first test bags,
            and of other test bags.
        train_bags, validation_bags, test_bags: half of them positive. Their images are disjoint.
        poolings: names of ``POOLINGS``.
        states: of a memory, and sets of weights of ``attention, several sets``.
        beta: that of a memory before training, which learns it: small, so that all instances are seen at first.
        width: features of an instance.
        epochs, batch, weight_decay: of training by AdamW.
        learning_rates: each is tried; rate and epoch are those of the least loss on the validation bags.

    >>> InstancesSettings().digits
    (3, 8)
    """

    digits: tuple[int, ...] = (3, 8)
    sizes: tuple[tuple[int, int], ...] = ((5, 15), (30, 60))
    train_bags: int = 400
    validation_bags: int = 150
    test_bags: int = 400
    poolings: tuple[str, ...] = (
        "mean",
        "max",
        "attention",
        "attention, several sets",
        "memory, softmax",
        "memory, entmax15",
        "memory, sparsemax",
    )
    states: int = 4
    beta: float = 0.1
    width: int = 32
    epochs: int = 40
    batch: int = 16
    learning_rates: tuple[float, ...] = (0.001, 0.003)
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        numbers = ("states", "train_bags", "validation_bags", "test_bags", "beta", "width", "epochs", "batch")
        check_positive(self, *numbers, "learning_rates")
        if not self.digits or len(set(self.digits)) < len(self.digits) or not set(self.digits) <= set(range(10)):
            raise ConfigError(f"`digits` must be different ones from 0 to 9, got {self.digits}")
        if not self.sizes or not all(len(self.digits) <= least <= most for least, most in self.sizes):
            raise ConfigError(
                f"`sizes` must be pairs of a least and a largest number, {len(self.digits)} or more, got {self.sizes}"
            )
        for name in self.poolings:
            check_choice("pooling", name, POOLINGS)


class Bags(NamedTuple):
    """Bags of images and their labels.

    Attributes:
        images: ``(N, 64)``, those that the bags are made of.
        bags: ``(B, M)`` indices, -1 past the end of a bag.
        labels: ``(B,)``, 1 where all the digits are in the bag, else 0.

    >>> Bags(torch.zeros(2, 64), torch.tensor([[0, -1]]), torch.tensor([1.0])).labels
    tensor([1.])
    """

    images: Tensor
    bags: Tensor
    labels: Tensor


def make_bags(
    images: Tensor,
    digits: Tensor,
    count: int,
    size: tuple[int, int],
    settings: InstancesSettings,
    generator: torch.Generator,
) -> Bags:
    """Bags drawn with replacement from images that no other split has; every second one is positive.

    >>> images, digits, generator = torch.zeros(20, 64), torch.arange(20) % 10, torch.Generator().manual_seed(0)
    >>> made = make_bags(images, digits, 4, (3, 3), InstancesSettings(digits=(9,)), generator)
    >>> (digits[made.bags] == 9).any(1)
    tensor([False,  True, False,  True])
    """
    by_digit = [(digits == digit).nonzero().flatten() for digit in settings.digits]
    others = (~torch.isin(digits, torch.tensor(settings.digits))).nonzero().flatten()
    (least, most), kinds = size, len(by_digit)

    def draw(pool: Tensor, *shape: int) -> Tensor:
        return pool[torch.randint(len(pool), shape, generator=generator)]

    labels = torch.arange(count) % 2
    bags = draw(others, count, most)
    shown = torch.stack([draw(pool, count, kinds) for pool in by_digit], dim=2)  # (B, K, digit)
    each = shown.diagonal(dim1=1, dim2=2)  # one of every digit
    single = torch.randint(kinds, (count, 1, 1), generator=generator).expand(-1, kinds, 1)
    alike = shown.gather(2, single).squeeze(2) if kinds > 1 else bags[:, :1]
    bags[:, :kinds] = torch.where(labels.unsqueeze(1) == 1, each, alike)
    sizes = torch.randint(least, most + 1, (count,), generator=generator)
    bags = bags.masked_fill(torch.arange(most) >= sizes.unsqueeze(1), -1)
    return Bags(images, bags, labels.float())


def _splits(settings: InstancesSettings, seed: int) -> tuple[Bags, Bags, list[Bags]]:
    """Training, validation and, for each size, test bags; of half, a fifth and the rest of the images."""
    pixels, names = load_digit_images()
    images, digits = torch.from_numpy(pixels).float() / 8 - 1, torch.from_numpy(names).long()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    half, fifth = len(order) // 2, len(order) // 5

    def bags(part: Tensor, count: int, size: tuple[int, int]) -> Bags:
        return make_bags(images[part], digits[part], count, size, settings, generator)

    train = bags(order[:half], settings.train_bags, settings.sizes[0])
    validation = bags(order[half : half + fifth], settings.validation_bags, settings.sizes[0])
    return train, validation, [bags(order[half + fifth :], settings.test_bags, size) for size in settings.sizes]


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """The probability that a positive has a higher score than a negative, ties counting half.

    >>> area_under_curve(torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0.0, 1.0, 1.0]))
    1.0
    """
    positive, negative = scores[labels == 1].unsqueeze(1), scores[labels == 0]
    return float((positive > negative).double().mean() + (positive == negative).double().mean() / 2)


def train_classifier(
    name: str, settings: InstancesSettings, train: Bags, validation: Bags, rate: float, seed: int
) -> tuple[BagClassifier, float, int]:
    """Train, and keep the epoch of the least loss on validation bags: model, that loss, that epoch."""
    loss_of = nn.functional.binary_cross_entropy_with_logits
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BagClassifier(name, inputs=64, width=settings.width, states=settings.states, beta=settings.beta)
        optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=settings.weight_decay)
        best: tuple[float, int, dict[str, Any]] = (float("inf"), 0, {})
        for epoch in range(1, settings.epochs + 1):
            for rows in torch.randperm(len(train.labels)).split(settings.batch):
                loss = loss_of(model(train.images, train.bags[rows]), train.labels[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            with torch.no_grad():
                held_out = float(loss_of(model(validation.images, validation.bags), validation.labels))
            if held_out < best[0]:
                best = (held_out, epoch, copy.deepcopy(model.state_dict()))
        if best[2]:  # a training that diverged at once has no best epoch
            model.load_state_dict(best[2])
    return model, best[0], best[1]


def run_instances(settings: InstancesSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Train every pooling on every seed; learning rate and epoch are chosen on validation bags alone."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.poolings}
    for seed in seeds:
        splits = _splits(settings, seed)
        for name in settings.poolings:
            found[name].append(_measure(name, settings, splits, seed))
            said = ", ".join(f"{one['auc']:.3f}" for one in found[name][-1]["test"])
            say(f"seed {seed}, {name}: AUC {said}")
    rows = []
    for name, runs in found.items():
        row = {"pooling": name}
        for place, (least, most) in enumerate(settings.sizes):
            for key, title in (("auc", "AUC"), ("accuracy", "accuracy")):
                row[f"{title}, {least} to {most}"] = mean_and_spread([run["test"][place][key] for run in runs])
        rows.append(row)
    least, most = settings.sizes[0]
    note = (
        f"Does the bag hold {_wanted(settings)}? {settings.train_bags} training bags of {least} to {most} digits; "
        f"{settings.test_bags} test bags of each size, of images that are in no other split. {len(seeds)} seeds; "
        f"learning rate and epoch by the loss on {settings.validation_bags} validation bags."
    )
    return Findings([Table("Multiple-instance learning", rows, note)], [_draw(settings, found)], {"runs": found})


def _wanted(settings: InstancesSettings) -> str:
    return " and ".join(f"a {digit}" for digit in settings.digits)


def _measure(
    name: str, settings: InstancesSettings, splits: tuple[Bags, Bags, list[Bags]], seed: int
) -> dict[str, Any]:
    train, validation, tests = splits
    rates = settings.learning_rates
    tried = [(*train_classifier(name, settings, train, validation, rate, seed), rate) for rate in rates]
    model, loss, epoch, rate = min(tried, key=lambda one: one[1])
    scores = []
    for test in tests:
        with torch.no_grad():
            logits = model(test.images, test.bags)
        accuracy = float(((logits > 0) == (test.labels == 1)).double().mean())
        scores.append({"auc": area_under_curve(logits, test.labels), "accuracy": accuracy})
    return {"test": scores, "validation_loss": loss, "epoch": epoch, "learning_rate": rate}


def _draw(settings: InstancesSettings, found: dict[str, list[dict[str, Any]]]) -> Picture:
    """The area under the curve of every run as a point, the mean as a bar; a panel for each size of test bags."""
    columns = len(settings.sizes)
    figure, axes = canvas(1, columns, (2.0 + 3.5 * columns, 0.38 * len(found) + 1.1), sharey=True)
    for panel, (least, most) in enumerate(settings.sizes):
        ax = axes[0, panel]
        for place, (name, runs) in enumerate(found.items()):
            values = [run["test"][panel]["auc"] for run in runs]
            colour = COLOURS[0] if name.startswith("memory") else COLOURS[1]
            ax.plot([statistics.fmean(values)] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=3)
            ax.plot(values, [place] * len(values), "o", color=colour, alpha=0.55, markersize=6, markeredgewidth=0)
        tidy(ax)
        ax.grid(axis="x", color="#dfe5e3", linewidth=0.8)
        ax.axvline(0.5, color=MUTED, linestyle=":", linewidth=1)
        ax.set_xlim(0.4, 1.02)
        ax.set_xlabel("area under the curve")
        ax.set_title(f"Test bags of {least} to {most} digits" + (", as in training" if panel == 0 else ""))
    axes[0, 0].set_yticks(range(len(found)), list(found))
    axes[0, 0].set_ylim(len(found) - 0.4, -0.6)
    caption = f"Does the bag hold {_wanted(settings)}? Each point is a seed, the bar their mean; 0.5 is chance."
    return Picture("poolings", caption, to_png(figure))
