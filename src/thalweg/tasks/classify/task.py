"""The task of telling what images show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thalweg.errors import ConfigError
from thalweg.limits import SIDE
from thalweg.tasks.base import Shown, Task
from thalweg.tasks.classify.classifier import Classifier, ClassPrediction, build_classifier, load_classifier
from thalweg.tasks.classify.config import DEFAULT_PRESET, IMAGE_PRESETS, ClassifyConfig
from thalweg.tasks.runs import Listener, RunLog, TrainResult

if TYPE_CHECKING:
    from thalweg.tasks.classify.evaluation import ClassEvaluation
    from thalweg.tasks.classify.report import ImageReport
    from thalweg.tasks.classify.serving import ImageServant
    from thalweg.tasks.classify.subject import ImageSubject


class Classification(Task):
    """Images to classes, from folders; methods that are not described are as :class:`~thalweg.tasks.base.Task` says.

    >>> TASK.configure({}) == TASK.configure({"model": "convnet-norm"})
    True
    """

    name = "classify"
    about = "images to classes, from folders of images"
    noun = "classification"
    items = "images"
    kind = ClassifyConfig
    data = "data.path"
    missing = "no images; give a folder, a zip or `digits`, or a config file with `data: {path: ...}`"
    presets = IMAGE_PRESETS
    default_model = DEFAULT_PRESET
    takes = frozenset({"temperature"})
    refusal = "is for runs on strings; a run that classifies images has no use for it"

    def data_settings(self, data: str | None, dev: str | None) -> dict[str, str]:
        """Where the images are."""
        if dev is not None:
            raise ConfigError("--dev is for pairs; validation images lie in the folder `val`, or are kept apart")
        return super().data_settings(data, None)

    def recognises(self, word: str) -> bool:
        """Folders, zips, and the digits that are always there."""
        return Path(word).is_dir() or word.endswith(".zip") or word == "digits"

    def fit(self, config: ClassifyConfig, log: RunLog, root: Path | None) -> TrainResult:
        """Train on images."""
        from thalweg.tasks.classify.training import fit

        return fit(config, log, root)

    def load(self, run: str | Path, *, device: str = "auto", **options: Any) -> Classifier:
        """The best network with its classes."""
        self.check_options(options)
        return load_classifier(run, device=device)

    def evaluate(self, run: str | Path, data: str | None = None, **options: Any) -> ClassEvaluation:
        """Measure on images, the run's own test images by default."""
        from thalweg.tasks.classify.evaluation import evaluate

        self.check_options(options.keys() - {"k", "name", "device", "root", "listener"})
        return evaluate(run, data or "test", **options)

    def predict(
        self,
        run: str | Path,
        inputs: Any = (),
        *,
        k: int = 1,
        device: str = "auto",
        listener: Listener | None = None,
        **options: Any,
    ) -> Iterator[ClassPrediction]:
        """The most probable classes of the images in files, folders and zips; ``temperature`` flattens or sharpens."""
        from thalweg.data.images.reading import read_unlabelled
        from thalweg.tasks.classify.training import told

        self.check_options(options)
        temperature = options.get("temperature", 1.0)
        if not 1e-6 <= temperature <= 1e6:  # NaN too
            raise ConfigError(f"search.temperature must be positive, got {temperature}; 1e-06 to 1e+06 can be")
        if not inputs:
            raise ConfigError("no images; name files, folders or zips: `thalweg predict RUN image.png`")
        paths = [path.rstrip("/") or path for path in inputs]
        classifier = load_classifier(run, device=device)
        images, skipped = read_unlabelled(
            paths,
            size=classifier.size,
            colour=classifier.colour,
            on_bad="skip" if any(Path(path).is_dir() or path.endswith(".zip") for path in paths) else "fail",
            progress=told(listener),
        )
        for file, reason in skipped:
            if listener is not None:
                listener({"event": "skipped", "message": f"skipped {file}: {reason}"})
        yield from classifier.predict(images, k=k, temperature=temperature)

    def serving(self, run: str | Path, *, device: str = "auto") -> ImageServant:
        """Images as they come."""
        from thalweg.tasks.classify.serving import ImageServant

        return ImageServant(self.load(run, device=device), run)

    def after_training(self, result: TrainResult, root: Path | None = None) -> None:
        """The validation images are looked at closely, for the report."""
        if result.best_epoch:
            self.evaluate(result.run, "val", root=root)

    def next_steps(self, run: str) -> list[str]:
        """The run's own test images, an image, and a page to drop images on."""
        return [f"thalweg evaluate {run}", f"thalweg predict {run} --k 3 IMAGE.png", f"thalweg serve {run}"]

    def report(self) -> ImageReport:
        """Classes, confusions, calibration, mistakes, what the network sees."""
        from thalweg.tasks.classify.report import ImageReport

        return ImageReport()

    def subject(self, config: ClassifyConfig | None, run: Path | None = None, **options: Any) -> ImageSubject:
        """A network with images to run it on."""
        from thalweg.tasks.classify.subject import open_image_subject

        return open_image_subject(config, run, **options)

    def example(self, config: ClassifyConfig, run: Path | None = None, **sizes: Any) -> Shown:
        """A network with one image; of a config one of ``image``, channels x height x width, and ``classes``."""
        from thalweg.tasks.classify.costs import flattening_costs

        if run is not None:
            net = load_classifier(run, device="cpu").model
        else:
            channels, height, width = _image_shape(sizes.get("image", "3x48x48"))
            net = build_classifier(config, sizes.get("classes", 6), channels, (height, width))
        image = torch.zeros(1, net.channels, *net.size)
        about = f"one image of {' x '.join(str(side) for side in image.shape[1:])}"
        return Shown(net, (image,), about, lambda table: flattening_costs(net, table))


def _image_shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", text, re.ASCII)
    sides = [int(number) for number in found.groups()] if found else [SIDE + 1]
    if max(sides) > SIDE:
        raise ConfigError(f"--image must be channels, height and width such as 3x48x48, up to {SIDE:,}, got `{text}`")
    return sides[0], sides[1], sides[2]


TASK = Classification()
"""The task."""
