"""The sides: Thalweg's batches and trainer, and the same network written plainly in PyTorch."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from thalweg.data.images.augmentation import Augmentation
from thalweg.data.images.batches import ImageBatch, ImageBatches
from thalweg.data.images.reading import ImageSplit, channel_statistics, read_images
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.learning.losses.classes import ClassLoss
from thalweg.learning.settings import ClassTraining
from thalweg.learning.trainer import Trainer

PADDING = 4
RATE, MOMENTUM = 0.01, 0.9
NETWORKS = {
    "C1": ConvNetConfig(),
    "C2": ConvNetConfig(norm="batch", hidden_norm=True, head="average"),
}


@dataclass(frozen=True)
class Setting:
    """What is trained and how; the same for every side."""

    network: str
    batch: int
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    threads: int = 1

    @property
    def training(self) -> ClassTraining:
        """As the trainer takes it: plain SGD, nothing that the other side has not."""
        return ClassTraining(
            epochs=1,
            batch_size=self.batch,
            optimiser="sgd",
            learning_rate=RATE,
            momentum=MOMENTUM,
            weight_decay=0.0,
            schedule="constant",
            warmup=0,
            label_smoothing=0.0,
            average=0.0,
            precision=self.precision,
            device=self.device,
            threads=self.threads,
            checkpoint_every=10**9,
        )


@dataclass(frozen=True, eq=False)
class Pictures:
    """The same images twice: as files, as a plain loop reads them, and decoded."""

    folder: Path
    files: list[Path]
    split: ImageSplit
    classes: int
    mean: Tensor
    std: Tensor
    seconds: dict[str, float]


def prepare(folder: Path, root: Path | None, count: int) -> Pictures:
    """Unpack the images for the plain side, and read them for ours, with the seconds of the first and second time."""
    seconds = {}
    for name in ("first", "again"):
        began = time.perf_counter()
        data = read_images("intel", root=root, cache=folder / "cache")
        seconds[name] = time.perf_counter() - began
    split = data.train
    if count:
        step = max(1, len(split) // count)
        rows = torch.arange(0, len(split), step)[:count]
        split = ImageSplit("train", split.images[rows], split.labels[rows], [split.files[row] for row in rows.tolist()])
    from thalweg.data.datasets import find_data

    with zipfile.ZipFile(find_data("intel/intel48.zip", root)) as archive:
        archive.extractall(folder / "files", split.files)
    mean, std = channel_statistics(split)
    files = [folder / "files" / name for name in split.files]
    seconds["images"] = float(sum(map(len, data.splits())))
    return Pictures(folder, files, split, len(data.classes), mean, std, seconds)


class ImageFiles(Dataset):
    """Files decoded and changed one by one, as torchvision's ImageFolder and transforms do."""

    def __init__(self, pictures: Pictures, *, change: bool):
        self.files, self.labels = pictures.files, pictures.split.labels.tolist()
        self.mean, self.std, self.change = pictures.mean[:, None, None], pictures.std[:, None, None], change

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        with self.files[row].open("rb") as file:
            image = Image.open(file).convert("RGB")
        if self.change:
            width, height = image.size
            around = ((PADDING, PADDING), (PADDING, PADDING), (0, 0))
            padded = Image.fromarray(np.pad(np.asarray(image), around, mode="reflect"))
            left, top = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
            image = padded.crop((left, top, left + width, top + height))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(self.mean).div_(self.std), self.labels[row]


def plain_network(config: ConvNetConfig, classes: int, size: int = 48) -> nn.Sequential:
    """The published layouts with torch's own layers."""
    layers: list[nn.Module] = []
    width, pooled = 3, config.head == "average"
    for channels in config.channels:
        layers += [nn.Conv2d(width, channels, 3, padding=1)]
        layers += [nn.BatchNorm2d(channels)] if config.norm == "batch" else []
        layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(config.dropout)]
        width, size = channels, size // 2
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if pooled else [nn.Flatten()]
    width = width if pooled else width * size * size
    for hidden in config.hidden:
        layers += [nn.Linear(width, hidden)]
        layers += [nn.BatchNorm1d(hidden)] if config.hidden_norm else []
        layers += [nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))


def networks(name: str, pictures: Pictures, *, dropout: float | None = None) -> tuple[ConvNet, nn.Sequential]:
    """Both forms of one network with the same weights."""
    config = NETWORKS[name] if dropout is None else replace(NETWORKS[name], dropout=dropout)
    torch.manual_seed(0)
    _, C, H, W = pictures.split.images.shape
    ours, plain = ConvNet(config, pictures.classes, C, (H, W)), plain_network(config, pictures.classes, H)
    with torch.no_grad():
        for theirs, mine in zip(plain.parameters(), ours.parameters(), strict=True):
            theirs.copy_(mine)
    return ours, plain


class Constant:
    """One batch again and again: training that never waits for data."""

    def __init__(self, batch: ImageBatch, count: int):
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def iterate(self, n: int, start: int = 0) -> Iterator[ImageBatch]:
        """The batch, as often as an epoch has batches."""
        return (self.batch for _ in range(start, self.count))


class Pinned(ImageBatches):
    """Images that stay outside the GPU, as those of a data set larger than its memory would."""

    def stay(self, device: torch.device | str) -> Pinned:
        """Make batches there, but leave the images here."""
        super().stay(device)
        if self.device.type == "cuda":
            self.resident, self._images, self._labels = False, self.split.images, self.split.labels
        return self


class Ours:
    """Epochs of Thalweg's trainer; ``kind`` says where its batches come from."""

    def __init__(self, pictures: Pictures, setting: Setting, kind: str = "batches"):
        self.pictures, self.setting = pictures, setting
        make = Pinned if kind == "pinned" else ImageBatches
        batches = make(
            pictures.split,
            size=setting.batch,
            mean=pictures.mean,
            std=pictures.std,
            augment=Augmentation(crop=PADDING),
            device=setting.device,
            workers=1,
        )
        self.batches = Constant(next(batches.iterate(0)), len(batches)) if kind == "constant" else batches
        self.waited = 0.0

    def seconds(self, epochs: int = 1) -> float:
        """Of the last of so many epochs, its steps alone."""
        model, _ = networks(self.setting.network, self.pictures)
        taken: list[tuple[float, float]] = []

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "epoch":
                taken.append((event["train_seconds"], event["data_seconds"]))

        config = replace(self.setting.training, epochs=epochs)
        with tempfile.TemporaryDirectory() as folder, _fast(self.setting.device):
            trainer = Trainer(
                model,
                config,
                loss=ClassLoss(config),
                evaluate=lambda model: {"accuracy": 0.0, "loss": 0.0},
                directory=Path(folder),
                meta={},
                listener=listen,
            )
            trainer.fit(self.batches)
        seconds, self.waited = taken[-1]
        return seconds


class Plain:
    """Epochs of a loop as PyTorch's tutorials have it."""

    def __init__(self, pictures: Pictures, setting: Setting, workers: int):
        self.setting, self.device = setting, torch.device(setting.device)
        _, network = networks(setting.network, pictures)
        self.network = network.to(self.device)
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=MOMENTUM)
        self.loader = DataLoader(
            ImageFiles(pictures, change=True),
            batch_size=setting.batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
        )

    def seconds(self, epochs: int = 1) -> float:
        """Of the last of so many epochs; the workers live on between them."""
        taken = 0.0
        with _fast(self.setting.device):
            for _ in range(epochs):
                began = time.perf_counter()
                self.epoch()
                taken = time.perf_counter() - began
        return taken

    def epoch(self) -> float:
        """The sum of the losses."""
        self.network.train()
        total = torch.zeros((), device=self.device)
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16-mixed")
        for images, labels in self.loader:
            images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            with half:
                loss = nn.functional.cross_entropy(self.network(images), labels)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            total += loss.detach() * len(labels)
        return float(total)

    def close(self) -> None:
        """End the workers."""
        del self.loader


def _fast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device != "cuda":
        return contextlib.nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True)


def check_same(pictures: Pictures, name: str, batch: int) -> dict[str, float]:
    """How far apart both sides are on one batch without random changes: the images, the loss, that of the next step."""
    # In float64, where the order of the sums does not matter.
    ours, plain = (network.double() for network in networks(name, pictures, dropout=0.0))
    batches = ImageBatches(pictures.split, size=batch, mean=pictures.mean, std=pictures.std)
    mine = next(batches.iterate(0))
    files = ImageFiles(pictures, change=False)
    images = torch.stack([files[row][0] for row in mine.rows])
    labels = torch.tensor([files[row][1] for row in mine.rows])
    config = Setting(name, batch).training
    loss = ClassLoss(config)
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    optimisers = [torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM) for network in (ours, plain)]
    exact = replace(mine, images=mine.images.double())
    for _ in range(2):
        summed, terms = loss(ours, exact)
        values = (summed / terms, nn.functional.cross_entropy(plain(exact.images), labels))
        for side, value, optimiser in zip(losses, values, optimisers, strict=True):
            losses[side].append(float(value.detach()))
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
    return {
        "images": float((images - mine.images).abs().max()),
        "labels": float((labels != mine.labels).sum()),
        "first_loss": abs(losses["ours"][0] - losses["plain"][0]),
        "second_loss": abs(losses["ours"][1] - losses["plain"][1]),
        "loss": losses["plain"][0],
        "parameters": float(sum(p.numel() for p in ours.parameters())),
    }
