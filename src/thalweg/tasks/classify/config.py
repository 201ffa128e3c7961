"""Settings of image classification: where the images are, the network, the training, how images are varied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from thalweg.data.images.augmentation import Augmentation
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.errors import ConfigError
from thalweg.learning.settings import ClassTraining
from thalweg.limits import PROCESSES, SEED, SIDE, check_choices, check_numbers, check_shares

# Images whose mirror image is another class, or none: a digit.
_ONE_SIDED = ("digits",)

# The side of an image over the pixels that ``crop`` shifts it by: 4 of 48, as is usual for small images.
_CROP_SHARE = 12


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """Where the images are and what is made of them when they are read.

    Attributes:
        path: a folder or zip of ``train/val/test/<class>/*``, or of classes alone; ``digits``; or a known data set.
        size: pixels of a side, one number or ``height, width``; 0 takes that of the images.
        colours: ``rgb``, ``grey``, or ``auto``, which is grey where all images are.
        on_bad: what an unreadable image does: ``skip`` names it and goes on, ``fail`` ends.
        held_out, held_out_test: shares kept apart for validation and test where the data have no such split.
        split_seed: of that choice, which never moves with the seed of the training.
        workers: processes that decode; -1 suits the machine, 0 is none.

    >>> ImageDataConfig(path="digits").colours
    'auto'
    """

    path: str = ""
    size: int | tuple[int, ...] = 0
    colours: Literal["auto", "rgb", "grey"] = "auto"
    on_bad: Literal["skip", "fail"] = "skip"
    held_out: float = 0.1
    held_out_test: float = 0.1
    split_seed: int = 0
    workers: int = -1

    def __post_init__(self) -> None:
        check_choices(self, "data")
        check_shares(self, "data", "(0, 1)", "held_out", "held_out_test")
        sides = (self.size,) if isinstance(self.size, int) else self.size
        if not 1 <= len(sides) <= 2 or min(sides) < 0 or (len(sides) == 2 and min(sides) < 1) or max(sides) > SIDE:
            raise ConfigError(
                f"data.size must be pixels of a side, or height and width, at most {SIDE:,}, got {self.size}"
            )
        check_numbers(self, "data", -1, PROCESSES, "workers")
        check_numbers(self, "data", 0, SEED, "split_seed")

    @property
    def shape(self) -> int | tuple[int, int]:
        """The size as :func:`thalweg.data.images.reading.read_images` takes it.

        >>> ImageDataConfig(size=(32, 48)).shape, ImageDataConfig(size=32).shape
        ((32, 48), 32)
        """
        if isinstance(self.size, int):
            return self.size
        return (self.size[0], self.size[-1])


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How training images are varied; see :class:`thalweg.data.images.augmentation.Augmentation`.

    Attributes:
        flip: mirror half of them; ``auto`` is yes, but for digits.
        crop: shift by up to so many pixels; -1 is a twelfth of the smaller side.
        rotate: turn by up to so many degrees; scale: zoom by up to a factor of ``1 + scale``.
        colour: change brightness, contrast and saturation by up to this share.
        cutout: hide a square of so many pixels a side.

    >>> AugmentConfig().settle((48, 48), "intel").crop, AugmentConfig().settle((8, 8), "digits").flip
    (4, False)
    """

    flip: bool | Literal["auto"] = "auto"
    crop: int = -1
    rotate: float = 0.0
    scale: float = 0.0
    colour: float = 0.0
    cutout: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.flip, bool) and self.flip != "auto":
            raise ConfigError(f"augment.flip must be true, false or auto, got {self.flip}")
        if self.crop < -1:
            raise ConfigError(f"augment.crop must be 0 or more pixels, or -1 to suit the size, got {self.crop}")
        check_numbers(self, "augment", -1, SIDE, "crop")
        self.settle((48, 48), "")

    def settle(self, size: tuple[int, int], data: str) -> Augmentation:
        """What is done to images of this size of this data set."""
        return Augmentation(
            flip=data not in _ONE_SIDED if self.flip == "auto" else self.flip,
            crop=round(min(size) / _CROP_SHARE) if self.crop < 0 else self.crop,
            rotate=self.rotate,
            scale=self.scale,
            colour=self.colour,
            cutout=self.cutout,
        )


# Convolution, norm, activation, pooling and dropout, three times; then each channel's mean.
_NORMED: dict[str, Any] = {"norm": "batch", "hidden_norm": True, "head": "average"}

IMAGE_PRESETS: dict[str, dict[str, Any]] = {
    "convnet": {"task": "classify", "model": {}, "training": {"learning_rate": 1e-3}},
    "convnet-norm": {"task": "classify", "model": _NORMED},
    "convnet-residual": {
        "task": "classify",
        "model": {
            "stem": 36,
            "channels": [36, 72, 144],
            "units": 2,
            "convolutions": 2,
            "norm": "batch",
            "order": "pre",
            "bias": False,
            "skip": "residual",
            "squeeze": 8,
            "pooling": "stride",
            "pool": [1, 2, 2],
            "dropout": 0.0,
            "head": "average",
            "head_dropout": 0.2,
            "hidden": [],
            "initialisation": "he",
        },
        "training": {"batch_size": 128, "mixup": 0.2, "average": 0.999},
        "augment": {"colour": 0.2},
    },
}
"""Settings by the name given to ``--model``, or to ``model`` in YAML and Python; anything in them can be overridden."""

# The preset of a training without config file and ``--model``: fast on a CPU, and small.
DEFAULT_PRESET = "convnet-norm"


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Everything about a classification run.

    >>> ClassifyConfig(data=ImageDataConfig(path="digits")).training.metric
    'accuracy'
    """

    task: Literal["classify"] = "classify"
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    model: ConvNetConfig = field(default_factory=ConvNetConfig)
    training: ClassTraining = field(default_factory=ClassTraining)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    presets = IMAGE_PRESETS
