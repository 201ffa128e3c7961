"""Classification: from folders of images to a trained network that names what it sees."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.data.images.batches import ImageBatches
from thalweg.data.images.reading import ImageData, ImageSplit, channel_statistics, read_images
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, DataError
from thalweg.learning.losses.classes import ClassLoss
from thalweg.learning.trainer import resolve_device
from thalweg.limits import within_memory
from thalweg.metrics.classification import score_classes
from thalweg.tasks.classify.classifier import Classifier, build_classifier
from thalweg.tasks.classify.config import ClassifyConfig, ImageDataConfig
from thalweg.tasks.runs import Listener, RunLog, TrainResult, meta_of

# Of a long list, this many are named.
SHOWN = 10


@within_memory("lower training.batch_size, data.size or the sizes of the model")
def fit(config: ClassifyConfig, log: RunLog, root: Path | None = None) -> TrainResult:
    """Train a network on images; see :meth:`~thalweg.tasks.base.Task.fit`.

    >>> fit(ClassifyConfig(), RunLog("runs/landscapes"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no images: give a folder, a zip or `digits`, or `data.path` in the config
    """
    device = resolve_device(config.training.device)
    data = open_images(config.data, root=root, listener=log.listener)
    training, dev = data.train, data.val
    if dev is None:
        raise DataError(
            f"{config.data.path}: expected validation images to choose the best epoch by, got none; add a folder `val`"
        )
    mean, std = channel_statistics(training)
    batches = _batches(config, training, mean, std, device)
    config = dataclasses.replace(config, training=config.training.planned(len(batches)))
    channels, height, width = data.shape
    torch.manual_seed(config.training.seed)
    model = build_classifier(config, len(data.classes), channels, (height, width), trained=device == "cpu")
    meta = meta_of(
        config,
        classes=list(data.classes),
        channels=channels,
        size=[height, width],
        mean=mean.tolist(),
        std=std.tolist(),
        data=_digest(training, mean, std),
    )
    facts = _facts(data, training, dev, config)
    evaluate = _dev_evaluator(Classifier(model, data.classes, mean, std), dev)
    parts = {"loss": ClassLoss(config.training), "evaluate": evaluate}
    with _fast_convolutions(device):
        return log.train(model, batches, config, meta=meta, facts=facts, told={"lines": _lines(facts)}, **parts)


def _batches(config: ClassifyConfig, training: ImageSplit, mean: Tensor, std: Tensor, device: str) -> ImageBatches:
    return ImageBatches(
        training,
        size=config.training.batch_size,
        seed=config.training.seed,
        augment=config.augment.settle((training.images.shape[2], training.images.shape[3]), config.data.path),
        mean=mean,
        std=std,
        mixup=config.training.mixup,
        device=device,
        workers=1,
    )


def open_images(config: ImageDataConfig, *, root: Path | None = None, listener: Listener | None = None) -> ImageData:
    """The images that a config names.

    Args:
        root: folder of known data sets.
        listener: called with ``{"event": "decoded", "done": n, "of": m}`` where images are decoded.

    >>> open_images(ImageDataConfig(path="digits")).classes[:3]
    ('0', '1', '2')
    """
    if not config.path:
        raise ConfigError("no images: give a folder, a zip or `digits`, or `data.path` in the config")
    return read_images(
        config.path,
        size=config.shape,
        colour=config.colours,
        on_bad=config.on_bad,
        held_out=config.held_out,
        held_out_test=config.held_out_test,
        seed=config.split_seed,
        workers=None if config.workers < 0 else config.workers,
        root=root,
        progress=told(listener),
    )


def told(listener: Listener | None) -> Callable[[int, int], None] | None:
    """What the reader of images tells its progress to: the listener, as ``decoded`` events.

    >>> told(None) is None
    True
    """
    if listener is None:
        return None
    return lambda done, total: listener({"event": "decoded", "done": done, "of": total})


def _digest(training: ImageSplit, mean: Tensor, std: Tensor) -> str:
    """A fingerprint of the training images, so that a run is never resumed on others."""
    digest = hashlib.sha256(repr((tuple(training.images.shape), mean.tolist(), std.tolist())).encode())
    for file, label in zip(training.files, training.labels.tolist(), strict=True):
        digest.update(f"{file}\t{label}\n".encode())
    return digest.hexdigest()[:16]


def dev_metrics(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """What is measured after each epoch: ``loss`` (mean negative log-likelihood), ``accuracy``, macro ``f1``, ``ece``.

    A network whose energies are no numbers any more has no loss and gets nothing right.

    >>> dev_metrics(torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([0, 0]))["accuracy"]
    1.0
    """
    if not torch.isfinite(log_probs.exp().sum()):
        return {"loss": float("nan"), "accuracy": 0.0, "f1": 0.0, "ece": float("nan")}
    scores = score_classes(log_probs, labels, resamples=0)
    return {"loss": scores["nll"].value} | {key: scores[key].value for key in ("accuracy", "f1", "ece")}


def _dev_evaluator(classifier: Classifier, dev: ImageSplit) -> Callable[[nn.Module], dict[str, float]]:
    placed: list[ImageBatches] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        classifier.model = cast(ConvNet, model)
        if not placed:  # once: on an accelerator the images stay there
            placed.append(classifier.batches(dev, 512))
        rows = [cast(ConvNet, model).log_probs(batch.images) for batch in placed[0].iterate(0)]
        return dev_metrics(torch.cat(rows).cpu(), dev.labels)

    return evaluate


def _fast_convolutions(device: str) -> AbstractContextManager[Any]:
    """On CUDA, the fastest algorithm for each shape, found by trying."""
    if device != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True)


def _facts(data: ImageData, training: ImageSplit, dev: ImageSplit, config: ClassifyConfig) -> dict[str, Any]:
    _, channels, height, width = training.images.shape
    return {
        "task": "classify",
        "train": _split_fact(config.data.path, training, len(data.classes)),
        "dev": _split_fact(config.data.path, dev, len(data.classes)),
        "classes": list(data.classes),
        "images": {"channels": channels, "height": height, "width": width},
        "augment": dataclasses.asdict(config.augment.settle((height, width), config.data.path)),
        "skipped": [list(pair) for pair in data.skipped[:100]],
        "skipped_count": len(data.skipped),
    }


def _split_fact(path: str, split: ImageSplit, classes: int) -> dict[str, Any]:
    counts = torch.bincount(split.labels, minlength=classes)
    fewest, most = int(counts.min()), int(counts.max())
    spread = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    summary = f"{path}: {len(split):,} images ({split.name}), {spread} of each class"
    return {"path": path, "split": split.name, "images": len(split), "summary": summary}


def _lines(start: dict[str, Any]) -> list[str]:
    """What a person is told at the start."""
    lines = [f"{split:<7} {start[split]['summary']}" for split in ("train", "dev")]
    lines += [f"skipped {file}: {reason}" for file, reason in start["skipped"][:SHOWN]]
    if start["skipped_count"] > SHOWN:
        lines.append(f"skipped {start['skipped_count'] - SHOWN} more")
    names, shape = start["classes"], start["images"]
    listed = ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
    kind = "grey" if shape["channels"] == 1 else "RGB"
    return [*lines, f"images  {shape['width']} x {shape['height']} {kind}, {len(names)} classes: {listed}"]
