"""A classifier as a service asks it: image files in, classes and what spoke for them out."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thalweg.data.images.decoding import Form, decode
from thalweg.data.images.reading import ImageSplit
from thalweg.diagnostics.saliency import grad_cam, heat, smooth_gradient
from thalweg.errors import ConfigError
from thalweg.tasks.classify.classifier import Classifier, ClassPrediction
from thalweg.tasks.serving import Plan, Servant, measured_scores

_HOTTEST = 1e6


class ImageServant(Servant):
    """Images to classes; an image among the inputs of a request is a file in base64.

    >>> from thalweg.energies.convnet.model import ConvNet, ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), hidden=()), classes=2, channels=1, size=(8, 8))
    >>> servant = ImageServant(Classifier(net, ("dark", "light"), [0.5], [0.25]))
    >>> servant.questions(["no image"])
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: inputs[0] must be an image file in base64, got other text
    """

    view = "images"
    takes = frozenset({"k", "temperature"})
    longest = 8 * 2**20

    def __init__(self, classifier: Classifier, run: str | Path = ""):
        self.classifier, self.run = classifier, run
        height, width = classifier.size
        self.form = Form(classifier.model.channels, height, width)

    def describe(self) -> dict[str, Any]:
        """Classes, size and scores."""
        return {
            "default": {"k": min(5, len(self.classifier.classes))},
            "classes": list(self.classifier.classes),
            "size": list(self.classifier.size),
            "colour": self.classifier.colour,
            "scores": measured_scores(self.run) if self.run else {},
        }

    def plan_of(self, options: Mapping[str, Any]) -> Plan:
        """How many classes, and the temperature of their probabilities."""
        temperature = float(options.get("temperature", 1.0))
        if not 1 / _HOTTEST <= temperature <= _HOTTEST:  # NaN too
            raise ConfigError(
                f"`temperature` must be positive, got {temperature:g}; 1 leaves probabilities as they are"
            )
        return Plan(options.get("k", 5), temperature)

    def questions(self, inputs: Sequence[Any], features: Sequence[str] = ()) -> list[np.ndarray]:
        """Image files in base64, decoded to ``(C, H, W)``."""
        if features:
            raise ConfigError("this model reads no `features`")
        return [self._decoded(_bytes_of(text, place), f"inputs[{place}]") for place, text in enumerate(inputs)]

    def _decoded(self, data: bytes, name: str) -> np.ndarray:
        try:
            return decode(data, self.form)
        except ValueError as error:
            raise ConfigError(f"{name} must be an image file such as PNG or JPEG: {error}") from None

    def answer(self, questions: Sequence[np.ndarray], plan: Plan) -> list[ClassPrediction]:
        """The records of ``thalweg predict``; an image has no name here."""
        temperature: Any = plan.how
        return list(self.classifier.predict(self._split(questions), k=plan.k, temperature=temperature))

    def _split(self, images: Sequence[np.ndarray]) -> ImageSplit:
        pixels = torch.from_numpy(np.stack(images))
        return ImageSplit("given", pixels, torch.full((len(images),), -1), ["image"] * len(images))

    def look(self, image: bytes, plan: Plan) -> dict[str, Any]:
        """The record of a file, and where in it the network looked: Grad-CAM and a smoothed gradient, in [0, 1]."""
        pixels = [self._decoded(image, "the body")]
        normalised = next(iter(self.classifier.batches(self._split(pixels)).iterate(0))).images
        model = self.classifier.model
        maps = {
            "cam": heat(grad_cam(model, normalised), quantile=1.0),
            "gradient": heat(smooth_gradient(model, normalised, samples=8)),
        }
        height, width = self.classifier.size
        shown = {name: [[round(v, 4) for v in row] for row in found[0].tolist()] for name, found in maps.items()}
        return {
            "records": [record.to_json() for record in self.answer(pixels, plan)],
            "saliency": {"height": height, "width": width, "values": shown["cam"], "gradient": shown["gradient"]},
            "image": {"height": height, "width": width, "channels": self.form.channels, "values": pixels[0].tolist()},
        }


def _bytes_of(text: Any, place: int) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (AttributeError, UnicodeEncodeError, binascii.Error):
        raise ConfigError(f"inputs[{place}] must be an image file in base64, got other text") from None
