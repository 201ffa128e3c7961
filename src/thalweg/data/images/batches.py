"""Batches of images: chosen, changed and normalised as whole tensors, the same for a seed, epoch and batch number."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from thalweg.data.images.augmentation import DRAWS, Augmentation, augment, normalisation_of
from thalweg.data.images.reading import ImageSplit
from thalweg.errors import ConfigError, ShapeError

# Of a GPU's free memory that the images may take; the model needs the rest.
_SHARE = 0.25

# Batches that a GPU makes at once, and how many bytes they may have.
_TOGETHER, _GROUP_BYTES = 16, 2**27

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """B images with their classes.

    Attributes:
        images: ``(B, C, H, W)`` float32, normalised.
        labels: ``(B,)`` int64.
        rows: for each image its index in the split.
        mixed: ``(labels2, weight)``, each ``(B,)``, where images are mixed: the loss of one is ``weight`` times that
            for ``labels`` plus ``1 - weight`` times that for ``labels2``.

    >>> ImageBatch(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), [5, 3]).size
    2
    """

    images: Tensor
    labels: Tensor
    rows: list[int]
    mixed: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Number of images B."""
        return len(self.rows)

    def to(self, device: torch.device | str) -> ImageBatch:
        """The same on another device."""
        if torch.device(device) == self.images.device:
            return self
        images, labels = (value.to(device, non_blocking=True) for value in (self.images, self.labels))
        mixed = self.mixed and (self.mixed[0].to(device), self.mixed[1].to(device))
        return ImageBatch(images, labels, self.rows, mixed)


class ImageBatches:
    r"""The batches of every epoch, in an order and with changes that seed, epoch and batch number fix.

    Images are drawn as bytes, changed by :func:`thalweg.data.images.augmentation.augment`, mixed and normalised, each
    step one operation on the whole batch. Mixing (Zhang et al., 2018) replaces image :math:`x_b` by
    :math:`w_b x_b + (1 - w_b) x_{\pi(b)}` with :math:`w_b \sim \mathrm{Beta}(\alpha, \alpha)` and a random
    permutation of the batch.

    On a GPU the bytes of all images stay in its memory where they take less than a quarter of what is free, and
    nothing but a few numbers a batch crosses over; otherwise a thread gathers the next batches in pinned memory. The
    changes happen on the device either way.

    Args:
        split: the images.
        size: images in a batch; the last of an epoch may have fewer. A single image that would be left over when
            shuffling joins the batch before, for batch norm cannot be trained on one.
        seed: from 0.
        shuffle: ``False`` keeps the order of the split: for evaluation.
        augment: none leaves the images as they are.
        mean, std: ``(C,)`` in [0, 1], those of :func:`thalweg.data.channel_statistics` of the training images.
        mixup: :math:`\alpha`; 0 mixes nothing.
        device: where batches are made.
        workers: threads that make batches ahead on the CPU; 0 makes each when it is asked for. On a GPU that does not
            hold the images there is at least one.

    >>> split = ImageSplit("train", torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.zeros(5).long(), list("abcde"))
    >>> batches = ImageBatches(split, size=2, mean=[0.5], std=[0.25], shuffle=False)
    >>> len(batches), [batch.rows for batch in batches.iterate(0)]
    (3, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        size: int,
        mean: Tensor | Sequence[float],
        std: Tensor | Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        augment: Augmentation | None = None,
        mixup: float = 0.0,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ) -> None:
        for name, value, least in (("size", size, 1), ("seed", seed, 0), ("mixup", mixup, 0), ("workers", workers, 0)):
            if not value >= least:
                raise ConfigError(f"`{name}` of image batches must be at least {least}, got {value}")
        if not len(split):
            raise ShapeError("expected at least one image to batch, got none")
        self.split, self.size, self.seed, self.shuffle, self.workers = split, size, seed, shuffle, workers
        self.augment = augment if augment is not None and augment.active else None
        self.mixup = mixup
        self._mean = torch.as_tensor(mean, dtype=torch.float32).cpu()
        self._std = torch.as_tensor(std, dtype=torch.float32).cpu()
        channels = split.images.shape[1]
        if self._mean.shape != (channels,) or self._std.shape != (channels,):
            raise ShapeError(
                f"`mean` and `std` must be ({channels},), one for each channel of the images, "
                f"got {tuple(self._mean.shape)} and {tuple(self._std.shape)}"
            )
        self._cuts = self._make_cuts()
        self.stay(device)

    def _make_cuts(self) -> list[int]:
        count = len(self.split)
        cuts = [*range(0, count, self.size), count]
        if self.shuffle and self.size > 1 and count > 1 and count % self.size == 1:
            del cuts[-2]
        return cuts

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._cuts) - 1

    def stay(self, device: torch.device | str) -> ImageBatches:
        """Make batches on this device from now on; the bytes move there where they fit. Returns itself.

        >>> split = ImageSplit("train", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1).long(), ["a"])
        >>> ImageBatches(split, size=1, mean=[0.0], std=[1.0]).stay("cpu").resident
        True
        """
        self.device = torch.device(device)
        self.resident = self.device.type == "cpu" or _fits(self.split.images, self.device)
        self._images = self.split.images.to(self.device) if self.resident else self.split.images
        # The class of an image is read wherever its bytes are.
        self._labels = self.split.labels.to(self._images.device)
        self._mean, self._std = self._mean.to(self.device), self._std.to(self.device)
        self._scales: dict[bool, tuple[Tensor, Tensor]] = {}
        # A GPU starts an operation in the time of some small batches, so it makes several at once; caches are small.
        bytes_each = 4 * self.size * self.split.images[0].numel()
        self._group = max(1, min(_TOGETHER, _GROUP_BYTES // bytes_each)) if self.device.type == "cuda" else 1
        return self

    def epoch(self, n: int) -> Tensor:
        """The rows of epoch ``n`` (from 0) in their order, ``(N,)`` on the CPU.

        >>> split = ImageSplit("train", torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3).long(), ["a"] * 3)
        >>> ImageBatches(split, size=1, mean=[0.0], std=[1.0]).epoch(0).sort().values
        tensor([0, 1, 2])
        """
        if n < 0:
            raise ConfigError(f"epochs count from 0, got {n}")
        if not self.shuffle:
            return torch.arange(len(self.split))
        return torch.from_numpy(np.random.default_rng([self.seed, n]).permutation(len(self.split)))

    def iterate(self, n: int, start: int = 0) -> Iterator[ImageBatch]:
        """The batches of epoch ``n`` from number ``start`` on; those before are not made.

        >>> split = ImageSplit("train", torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3).long(), ["a"] * 3)
        >>> [b.rows for b in ImageBatches(split, size=2, mean=[0.0], std=[1.0], shuffle=False).iterate(0, start=1)]
        [[2]]
        """
        if not 0 <= start <= len(self):
            raise ConfigError(f"`start` must be in 0..{len(self)}, the batches of an epoch, got {start}")
        return self._iterate(n, start)

    def _iterate(self, n: int, start: int) -> Iterator[ImageBatch]:
        order = self.epoch(n)
        placed = order.to(self._images.device)
        # Groups begin at the same numbers wherever the reader begins, so that a resumed epoch computes the same.
        groups = [range(k, min(k + self._group, len(self))) for k in range(0, len(self), self._group)]
        groups = groups[start // self._group :]

        def take(group: int) -> tuple[Tensor, Tensor]:
            return self._take(placed[self._cuts[groups[group][0]] : self._cuts[groups[group][-1] + 1]])

        def make(group: int, taken: tuple[Tensor, Tensor]) -> list[ImageBatch]:
            images, labels = (value.to(self.device, non_blocking=True) for value in taken)
            return self._make(n, groups[group], order, images, labels)

        numbers = range(len(groups))
        if not self.resident:
            made = (make(g, taken) for g, taken in enumerate(_ahead(take, numbers, max(1, self.workers))))
        elif self.workers and self.device.type == "cpu":
            made = _ahead(lambda g: make(g, take(g)), numbers, self.workers)
        else:
            made = (make(g, take(g)) for g in numbers)
        for group, batches in zip(groups, made, strict=True):
            yield from batches[max(0, start - group[0]) :]

    def _take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes and classes of some rows; in pinned memory where they are to cross over to a device."""
        if self.resident:
            return self._images.index_select(0, rows), self._labels.index_select(0, rows)
        images = torch.empty((len(rows), *self._images.shape[1:]), dtype=torch.uint8, pin_memory=True)
        labels = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
        torch.index_select(self._images, 0, rows, out=images)
        torch.index_select(self._labels, 0, rows, out=labels)
        return images, labels

    def _make(self, n: int, group: range, order: Tensor, images: Tensor, labels: Tensor) -> list[ImageBatch]:
        """Some batches in a row, changed together but with the random numbers of each alone."""
        first = self._cuts[group[0]]
        cuts = [self._cuts[k] - first for k in (*group, group[-1] + 1)]
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        rngs = [np.random.default_rng([self.seed, n, k]) for k in group]
        if self.augment is not None:
            drawn = [rng.random((size, DRAWS), dtype=np.float32) for rng, size in zip(rngs, sizes, strict=True)]
            images = augment(images, self.augment, torch.from_numpy(np.concatenate(drawn)), fill=self._mean)
        slope, offset = self._scale(images)
        images = (images * slope).add_(offset)
        others = weights = None
        if self.mixup:
            shares = [rng.beta(self.mixup, self.mixup, size) for rng, size in zip(rngs, sizes, strict=True)]
            partners = [a + rng.permutation(size) for a, rng, size in zip(cuts, rngs, sizes, strict=False)]
            weights = torch.from_numpy(np.concatenate(shares).astype(np.float32)).to(self.device, non_blocking=True)
            other = torch.from_numpy(np.concatenate(partners)).to(self.device, non_blocking=True)
            # Mixing and normalising commute, because the weights add up to one.
            images = torch.lerp(images[other], images, weights.view(-1, 1, 1, 1))
            others = labels[other]
        made = []
        for a, b in itertools.pairwise(cuts):
            mixed = None if others is None or weights is None else (others[a:b], weights[a:b])
            made.append(ImageBatch(images[a:b], labels[a:b], order[first + a : first + b].tolist(), mixed))
        return made

    def _scale(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What images are multiplied by and what is added, to normalise bytes or numbers; worked out once for each."""
        kind = images.is_floating_point()
        if kind not in self._scales:
            self._scales[kind] = normalisation_of(self._mean, self._std, in_bytes=not kind)
        return self._scales[kind]


def _fits(images: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # memory is shared with the CPU, or nothing tells how much there is
    free = torch.cuda.mem_get_info(device)[0]
    return images.numel() < _SHARE * free


def _ahead(make: Callable[[int], T], numbers: Sequence[int], threads: int) -> Iterator[T]:
    """What ``make`` gives for each number in order, made by threads a little ahead of the reader."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="thalweg-images")
    waiting: deque[Future[T]] = deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(make, number))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
