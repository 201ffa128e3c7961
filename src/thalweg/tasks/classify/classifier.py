"""A trained classifier with everything it needs: from images to classes with probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from thalweg.data.images.batches import ImageBatches
from thalweg.data.images.reading import ImageSplit
from thalweg.energies.convnet.model import ConvNet
from thalweg.learning.trainer import resolve_device
from thalweg.limits import check_fits
from thalweg.tasks.classify.config import ClassifyConfig
from thalweg.tasks.runs import check_size, opened

# Images that a network sees at once outside training.
AT_ONCE = 256


@dataclass(frozen=True)
class ClassAnswer:
    """One class with its log-probability.

    >>> round(ClassAnswer("sea", -0.1).probability, 3)
    0.905
    """

    text: str
    log_prob: float

    @property
    def probability(self) -> float:
        """exp of the log-probability."""
        return float(torch.tensor(self.log_prob, dtype=torch.float64).exp())

    def to_json(self) -> dict[str, Any]:
        """What ``json`` can write.

        >>> ClassAnswer("sea", 0.0).to_json()
        {'text': 'sea', 'log_prob': 0.0, 'probability': 1.0}
        """
        return {"text": self.text, "log_prob": self.log_prob, "probability": self.probability}


@dataclass(frozen=True)
class ClassPrediction:
    """The best classes of one image, most probable first.

    >>> ClassPrediction("a.png", (ClassAnswer("sea", -0.1),)).answers[0].text
    'sea'
    """

    source: str
    answers: tuple[ClassAnswer, ...]

    def to_json(self) -> dict[str, Any]:
        """What ``json`` can write."""
        return {"source": self.source, "answers": [answer.to_json() for answer in self.answers]}

    def tsv(self) -> Iterator[str]:
        """A line a class: source, class, log-probability, probability.

        >>> list(ClassPrediction("a.png", (ClassAnswer("sea", 0.0),)).tsv())
        ['a.png\\tsea\\t0.000000\\t1']
        """
        for answer in self.answers:
            yield f"{self.source}\t{answer.text}\t{answer.log_prob:.6f}\t{answer.probability:.6g}"


class Classifier:
    """A network with its classes and the statistics that images are normalised by.

    Args:
        model: gives energies ``(B, C)`` of normalised images.
        classes: their names.
        mean, std: of each channel of the training images, in [0, 1].
        meta: of the checkpoint it comes from.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=()), classes=2, channels=1, size=(8, 8))
    >>> classifier = Classifier(net, ("dark", "light"), [0.5], [0.25])
    >>> classifier.log_probs(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        model: ConvNet,
        classes: Sequence[str],
        mean: Tensor | Sequence[float],
        std: Tensor | Sequence[float],
        *,
        meta: dict[str, Any] | None = None,
    ):
        self.model, self.classes, self.meta = model, tuple(classes), meta or {}
        self.mean, self.std = (torch.as_tensor(value, dtype=torch.float32) for value in (mean, std))

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images that it was trained on."""
        return self.model.size

    @property
    def colour(self) -> Literal["grey", "rgb"]:
        """``grey`` or ``rgb``."""
        return "grey" if self.model.channels == 1 else "rgb"

    def batches(self, split: ImageSplit, size: int = AT_ONCE) -> ImageBatches:
        """The images of a split, normalised, in order."""
        return ImageBatches(split, size=size, mean=self.mean, std=self.std, shuffle=False, device=self.device)

    def log_probs(self, images: Tensor | ImageSplit, *, temperature: float = 1.0) -> Tensor:
        """log p(y | x) of every image, on the CPU.

        Args:
            images: ``(N, C, H, W)`` uint8, or a split.
            temperature: what energies are divided by; above 1 flattens.
        Returns:
            ``(N, classes)`` float32.
        """
        split = images if isinstance(images, ImageSplit) else _nameless(images)
        if not len(split):
            return torch.zeros(0, len(self.classes))
        with torch.no_grad():
            found = [self.model.log_probs(batch.images).cpu() for batch in self.batches(split).iterate(0)]
        rows = torch.cat(found)
        return rows if temperature == 1 else torch.log_softmax(rows / temperature, dim=1)

    def answers(self, log_probs: Tensor, k: int = 1) -> list[tuple[ClassAnswer, ...]]:
        """The k most probable classes of each row ``(N, C)``, best first."""
        best = log_probs.topk(min(k, len(self.classes)), dim=1)
        return [
            tuple(ClassAnswer(self.classes[n], value) for n, value in zip(numbers, values, strict=True))
            for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def predict(
        self, images: Tensor | ImageSplit, *, k: int = 1, temperature: float = 1.0
    ) -> Iterator[ClassPrediction]:
        """The k most probable classes of each image."""
        split = images if isinstance(images, ImageSplit) else _nameless(images)
        for start in range(0, len(split), 4 * AT_ONCE):
            end = start + 4 * AT_ONCE
            part = ImageSplit(split.name, split.images[start:end], split.labels[start:end], split.files[start:end])
            found = self.answers(self.log_probs(part, temperature=temperature), k)
            for file, answers in zip(part.files, found, strict=True):
                yield ClassPrediction(file, answers)


def _nameless(images: Tensor) -> ImageSplit:
    labels = torch.zeros(len(images), dtype=torch.int64)
    return ImageSplit("images", images, labels, [str(n) for n in range(len(images))])


def build_classifier(
    config: ClassifyConfig, classes: int, channels: int, size: tuple[int, int], *, trained: bool = False
) -> ConvNet:
    """A fresh network of the config's shape.

    One that the memory cannot hold, with what training adds where it is to be ``trained`` there, is an
    :class:`~thalweg.errors.OutOfMemoryError` before anything is allocated.

    >>> build_classifier(ClassifyConfig(), 6, 3, (48, 48)).classes
    6
    """
    build = partial(ConvNet, config.model, classes=classes, channels=channels, size=size)
    check_fits(
        build,
        trained=trained,
        remedy="lower model.channels, model.hidden or the size of the images, or set model.head=average",
    )
    return build()


def load_classifier(run: str | Path, *, device: str = "auto") -> Classifier:
    """The best model of a run directory (or the ``model.safetensors`` itself), ready to predict.

    >>> load_classifier("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    with opened(run, "classification", ClassifyConfig) as (checkpoint, config):
        meta = checkpoint.meta
        height, width = (int(side) for side in meta["size"])
        classes, channels = tuple(meta["classes"]), int(meta["channels"])
        build = partial(ConvNet, config.model, classes=len(classes), channels=channels, size=(height, width))
        check_size(build, checkpoint.tensors)
        model = build()
        model.load_state_dict(checkpoint.tensors)
        mean, std = torch.tensor(meta["mean"]), torch.tensor(meta["std"])
    return Classifier(model.to(resolve_device(device)).eval(), classes, mean, std, meta=meta)
