"""Image classifiers to diagnose: a run's best network, or one as it starts, with images to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from thalweg.data.images.batches import ImageBatches
from thalweg.data.images.reading import ImageSplit, channel_statistics
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import DataError
from thalweg.tasks.classify.classifier import Classifier, build_classifier, load_classifier
from thalweg.tasks.classify.config import ClassifyConfig
from thalweg.tasks.classify.evaluation import named_images
from thalweg.tasks.classify.measures import ImageDiagnosis, diagnose_images
from thalweg.tasks.classify.training import open_images
from thalweg.tasks.config import as_settings, config_from
from thalweg.tasks.diagnosis.subject import Subject, Words, planned_steps
from thalweg.tasks.runs import as_begun


@dataclass(frozen=True)
class ImageSubject(Subject):
    """A network that classifies, with images to run it on.

    Attributes:
        split: the images with their classes; classifier: what knows the names of these, and how images are normalised.

    >>> ImageSubject.words.items
    'images'
    """

    words: ClassVar[Words] = Words(
        items="images",
        given="image",
        other="another image",
        per="an image",
        reads="look at its image",
        frequencies="class frequencies",
        sizes=("rows", "height", "width"),
        shape="{} × {} pixels each",
    )

    model: ConvNet
    config: ClassifyConfig
    split: ImageSplit
    classifier: Classifier

    def measure(self, rows: int, steps: int) -> ImageDiagnosis:
        """All that applies to an image network."""
        return diagnose_images(self, rows=rows, steps=steps)

    def batches(self, size: int, seed: int = 0) -> ImageBatches:
        """The images, shuffled and normalised, on the model's device; not varied.

        >>> subject = open_image_subject(ClassifyConfig(), data="digits", name="net")
        >>> next(subject.batches(8).iterate(0)).images.shape
        torch.Size([8, 1, 8, 8])
        """
        own = self.classifier
        return ImageBatches(self.split, size=size, seed=seed, mean=own.mean, std=own.std, device=own.device)


def open_image_subject(
    config: ClassifyConfig | None,
    trained: Path | None = None,
    *,
    data: str | None = None,
    root: Path | None = None,
    device: str = "cpu",
    name: str = "config",
) -> ImageSubject:
    """A run's best network on its validation images, or one as it starts on its training images.

    Args:
        data: other images: ``train``, ``val`` or ``test`` of its own, or as in
            :func:`thalweg.tasks.classify.evaluation.evaluate`. A config that names no images is built for these.

    Others as those of :meth:`~thalweg.tasks.base.Task.subject`.

    >>> open_image_subject(ClassifyConfig(), data="digits", name="net").split.name
    'train'
    """
    if trained is None:
        return _fresh(config or ClassifyConfig(), data, root, device, name)
    return _trained(trained, data, root, device, name)


def _trained(run: Path, data: str | None, root: Path | None, device: str, name: str) -> ImageSubject:
    classifier = load_classifier(run, device=device)
    config = config_from(as_begun(classifier.meta["config"], ClassifyConfig), ClassifyConfig, where=str(run))
    try:
        split, _ = named_images(classifier, data or "val", root=root)
    except DataError as error:
        raise DataError(f"{error}; give the images to look at with --data PATH") from None
    spec = data or f"{config.data.path} (val)"
    return ImageSubject(name, True, classifier.model, config, planned_steps(run), spec, split, classifier)


def _fresh(config: ClassifyConfig, data: str | None, root: Path | None, device: str, name: str) -> ImageSubject:
    if data is not None and not config.data.path:
        settings = as_settings(config)
        settings["data"] = {**settings["data"], "path": data}
        config, data = config_from(settings, ClassifyConfig), None
    images = open_images(config.data, root=root)
    mean, std = channel_statistics(images.train)
    channels, height, width = images.shape
    torch.manual_seed(config.training.seed)
    model = build_classifier(config, len(images.classes), channels, (height, width)).to(device)
    classifier = Classifier(model, images.classes, mean, std, meta={"config": as_settings(config)})
    split = named_images(classifier, data, root=root)[0] if data else images.train
    batches = ImageBatches(images.train, size=config.training.batch_size, mean=mean, std=std)
    steps = config.training.planned(len(batches)).epochs * len(batches)
    spec = data or f"{config.data.path} (train)"
    return ImageSubject(name, False, model, config, steps, spec, split, classifier)
