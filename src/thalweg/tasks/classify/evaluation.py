"""Measure a trained classifier: scores with intervals, classes, confusions, calibration, pictures of what it sees."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import thalweg
from thalweg.data.images.files import SPLITS
from thalweg.data.images.reading import ImageSplit, read_labelled
from thalweg.errors import DataError, ThalwegError
from thalweg.files import write_text
from thalweg.metrics.bootstrap import scored
from thalweg.metrics.classification import (
    ClassScore,
    ClassTally,
    class_scores,
    confusion_matrix,
    reliability,
    score_classes,
    temperature_scale,
)
from thalweg.tasks.base import Evaluation, Measured, Table
from thalweg.tasks.classify.classifier import Classifier, load_classifier
from thalweg.tasks.classify.config import ClassifyConfig
from thalweg.tasks.classify.pictures import draw_confusion, draw_mistakes, draw_reliability, pictures
from thalweg.tasks.classify.training import open_images, told
from thalweg.tasks.config import config_from
from thalweg.tasks.names import evaluation_folder
from thalweg.tasks.runs import Listener


@dataclass(frozen=True)
class ClassEvaluation(Evaluation):
    """Scores of one run on some images.

    Attributes:
        classes: precision, recall and F1 of each.
        confusion: ``(C, C)`` counts, the right class down, the predicted across.
        temperature: fitted on the run's validation images, None where these cannot be read.
        calibrated: NLL and ECE with energies divided by it; empty without one.

    >>> ClassEvaluation(Path("runs/x/evaluation/test"), "test", {}, 100, 2000.0).said()
    'test: 100 images, 2,000 a second'
    """

    FILES = {  # noqa: RUF012
        "metrics.json": "all figures",
        "predictions.jsonl": "best classes of every image",
        "confusion.png": "what is taken for what",
        "mistakes.png": "most confident mistakes",
        "reliability.png": "confidence against accuracy",
        "pictures.json": "pictures of the report",
    }

    classes: list[ClassScore] = field(default_factory=list)
    confusion: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 0)))
    temperature: float | None = None
    calibrated: dict[str, float] = field(default_factory=dict)

    def said(self) -> str:
        """What was done, in a line."""
        return f"{self.data}: {self.items:,} images, {self.speed:,.0f} a second"

    def tables(self) -> list[Table]:
        """Scores, and those of each class."""
        rows = [
            {"class": each.name, "precision": f"{each.precision:.4f}", "recall": f"{each.recall:.4f}"}
            | {"F1": f"{each.f1:.4f}", "images": f"{each.support:,}", "predicted": f"{each.predicted:,}"}
            for each in self.classes
        ]
        return [*super().tables(), Table(rows, ("precision", "recall", "F1", "images", "predicted"))]

    def remarks(self) -> list[str]:
        """What the temperature does."""
        if self.temperature is None:
            return []
        before, after = self.scores["ece"].value, self.calibrated["ece"]
        return [f"temperature {self.temperature:.3f}, fitted on val: ECE {before:.4f} -> {after:.4f}"]

    def to_json(self) -> dict[str, Any]:
        """All figures as ``json`` can write them."""
        return {
            "file": self.data,
            "items": self.items,
            "scores": {key: score.to_json() for key, score in self.scores.items()},
            "classes": [each.to_json() for each in self.classes],
            "confusion": self.confusion.tolist(),
            "temperature": self.temperature,
            "calibrated": self.calibrated,
            "images_per_second": self.speed,
        }


def evaluate(
    run: str | Path,
    spec: str = "test",
    *,
    k: int = 5,
    name: str | None = None,
    device: str = "auto",
    root: Path | None = None,
    listener: Listener | None = None,
) -> ClassEvaluation:
    """Predict every image, compare with its class, write ``RUN/evaluation/NAME/``.

    Args:
        spec: ``test``, ``val`` or ``train`` of the run's own data; or a folder, a zip or a known data set, whose
            ``test`` is taken unless ``:val`` or ``:train`` follows. Of a folder without splits all images count.
        k: most probable classes kept of each image; accuracy within the first k is given for k' <= k among 2, 3, 5, k.

    Others as those of :meth:`~thalweg.tasks.base.Task.evaluate`.

    >>> evaluate("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    classifier = load_classifier(run, device=device)
    split, label = named_images(classifier, spec, root=root, listener=listener)
    directory = evaluation_folder(run, name, label.replace("/", "-"))
    began = time.perf_counter()
    log_probs = classifier.log_probs(split)
    speed = len(split) / (time.perf_counter() - began)
    if not torch.isfinite(log_probs.exp().sum()):
        raise DataError(f"{run}: expected a model with finite energies, got one without; train it again, more slowly")
    ks = sorted({n for n in (2, 3, 5, k) if 1 < n <= k and n < len(classifier.classes)})
    tally = ClassTally(log_probs, split.labels, ks=ks)
    matrix = confusion_matrix(log_probs.argmax(1), split.labels, len(classifier.classes))
    temperature, calibrated, tables = _calibration(classifier, split, log_probs, root, is_val=label == "val")
    result = ClassEvaluation(
        directory,
        spec,
        scored(tally),
        len(split),
        speed,
        class_scores(matrix, classifier.classes),
        matrix,
        temperature,
        calibrated,
        measured=_measured(classifier.classes, split, log_probs, tally),
    )
    facts = {
        **result.to_json(),
        "task": "classify",
        "names": list(classifier.classes),
        "reliability": tables,
        "version": thalweg.__version__,
    }
    write_text(directory / "metrics.json", json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    _write_predictions(directory, classifier, split, log_probs, k)
    shown = pictures(classifier, split, log_probs)
    write_text(directory / "pictures.json", json.dumps(shown, ensure_ascii=False) + "\n")
    draw_confusion(directory / "confusion.png", matrix, classifier.classes)
    draw_mistakes(directory / "mistakes.png", split, log_probs, classifier.classes)
    draw_reliability(directory / "reliability.png", tables)
    return result


def _measured(classes: tuple[str, ...], split: ImageSplit, log_probs: Tensor, tally: ClassTally) -> Measured:
    return Measured(
        sources=tuple(split.files),
        references=tuple((classes[label],) for label in split.labels.tolist()),
        answers=tuple(classes[best] for best in log_probs.argmax(1).tolist()),
        tally=tally,
    )


def named_images(
    classifier: Classifier, spec: str, *, root: Path | None = None, listener: Listener | None = None
) -> tuple[ImageSplit, str]:
    """The images to measure on, and what to call them.

    Args:
        classifier: whose classes, size and colours they get; its own data are those of ``meta["config"]``.
        spec, root: as in :func:`evaluate`.

    >>> from thalweg.energies.convnet.model import ConvNet
    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=()), classes=10, channels=1, size=(8, 8))
    >>> split, name = named_images(Classifier(net, "0123456789", [0.5], [0.25]), "digits:val")
    >>> name, len(split)
    ('digits-val', 179)
    """
    if spec in SPLITS and not Path(spec).exists():
        return _own(classifier, spec, root, listener), spec
    place, colon, which = spec.rpartition(":")
    place, which = (place, which) if colon and which in SPLITS else (spec, "test")
    split, skipped = read_labelled(
        place,
        classifier.classes,
        split=which,
        size=classifier.size,
        colour=classifier.colour,
        root=root,
        progress=told(listener),
    )
    if listener is not None:
        for file, reason in skipped[:10]:
            listener({"event": "skipped", "message": f"skipped {file}: {reason}"})
    stem = Path(place).resolve().stem if Path(place).exists() else place
    return split, f"{stem}-{which}"


def _own(classifier: Classifier, which: str, root: Path | None, listener: Listener | None = None) -> ImageSplit:
    """A split of the data that the run was trained on, cut as it was then."""
    config = config_from(classifier.meta["config"], ClassifyConfig, where="checkpoint")
    data = open_images(config.data, root=root, listener=listener)
    found = {split.name: split for split in data.splits()}.get(which)
    if data.classes != classifier.classes or found is None:
        raise DataError(
            f"{config.data.path}: expected the data that the run was trained on with a split `{which}`, got other "
            "classes or splits; name the images to measure on"
        )
    return found


def _calibration(
    classifier: Classifier, split: ImageSplit, log_probs: Tensor, root: Path | None, *, is_val: bool
) -> tuple[float | None, dict[str, float], dict[str, Any]]:
    """A temperature that makes the validation images most likely, and what it does to the images measured on."""
    tables: dict[str, Any] = {"before": reliability(log_probs, split.labels).to_json()}
    try:
        val = split if is_val else _own(classifier, "val", root)
        temperature = temperature_scale(log_probs if is_val else classifier.log_probs(val), val.labels)
    except (ThalwegError, OSError):
        return None, {}, tables
    scaled = torch.log_softmax(log_probs.double() / temperature, dim=1)
    tables["after"] = reliability(scaled, split.labels).to_json()
    scores = score_classes(scaled, split.labels, resamples=0)
    return temperature, {key: scores[key].value for key in ("nll", "brier", "ece")}, tables


def _write_predictions(directory: Path, classifier: Classifier, split: ImageSplit, log_probs: Tensor, k: int) -> None:
    lines = []
    for file, label, answers in zip(split.files, split.labels.tolist(), classifier.answers(log_probs, k), strict=True):
        gold = classifier.classes[label]
        record = {
            "source": file,
            "references": [gold],
            "answers": [answer.to_json() for answer in answers],
            "correct": answers[0].text == gold,
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_text(directory / "predictions.jsonl", "".join(lines))
