"""Images of several classes from folders, zip archives and scikit-learn, decoded once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thalweg.data.datasets import IMAGE_FILES, find_data
from thalweg.data.images.cache import CacheEntry, cache_folder
from thalweg.data.images.digits import load_digit_images
from thalweg.data.images.files import (
    SPLITS,
    ImageFile,
    Listing,
    check_classes,
    check_known,
    list_images,
    split_off,
)
from thalweg.data.images.store import Decoded, Wish, decode_listing
from thalweg.errors import ConfigError, DataError, ShapeError, nearest
from thalweg.limits import check_memory

Colour = Literal["auto", "rgb", "grey"]
OnBad = Literal["skip", "fail"]
Progress = Callable[[int, int], None]
Skipped = list[tuple[str, str]]

# Shares of scikit-learn's digits for validation and test.
_DIGITS = {"val": 0.1, "test": 0.2}

# Bytes of images that are counted at a time.
_BLOCK = 2**26


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """N images of one size with their classes.

    Attributes:
        name: ``train``, ``val`` or ``test``.
        images: ``(N, C, H, W)`` uint8; pages of a file where they are cached.
        labels: ``(N,)`` int64, indices of the classes; -1 where unknown.
        files: the path of each inside its folder or archive.
        entry: where they are cached, if they are.

    >>> split = ImageSplit("train", torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([0]), ["a/1.png"])
    >>> len(split)
    1
    """

    name: str
    images: Tensor
    labels: Tensor
    files: list[str]
    entry: CacheEntry | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        N = len(self.files)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or len(self.images) != N:
            raise ShapeError(
                f"`images` must be ({N}, C, H, W) uint8 as there are {N} files, "
                f"got {tuple(self.images.shape)} {self.images.dtype}"
            )
        if self.labels.shape != (N,):
            raise ShapeError(f"`labels` must be ({N},) as there are {N} files, got {tuple(self.labels.shape)}")

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True, eq=False)
class ImageData:
    """The splits of one data set; all images have one size and the classes are those of ``train``.

    Attributes:
        classes: names in alphabetical order; a label is an index here.
        val, test: none where nothing is held out.
        skipped: files that could not be read or are no part of it, each with the reason.

    >>> data = read_images("digits")
    >>> len(data.classes), data.shape, [len(split) for split in data.splits()]
    (10, (1, 8, 8), [1259, 179, 359])
    """

    classes: tuple[str, ...]
    train: ImageSplit
    val: ImageSplit | None = None
    test: ImageSplit | None = None
    skipped: Skipped = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image.

        >>> read_images("digits", size=(4, 6)).shape
        (1, 4, 6)
        """
        C, H, W = self.train.images.shape[1:]
        return C, H, W

    def splits(self) -> tuple[ImageSplit, ...]:
        """Those that there are, in the order train, val, test."""
        return tuple(split for split in (self.train, self.val, self.test) if split is not None)


def read_images(
    path: str | Path,
    *,
    size: int | tuple[int, int] = 0,
    colour: Colour = "auto",
    on_bad: OnBad = "skip",
    held_out: float = 0.1,
    held_out_test: float = 0.1,
    seed: int = 0,
    cache: Path | Literal[False] | None = None,
    workers: int | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
) -> ImageData:
    """Images in folders by class, all decoded to one size.

    Args:
        path: a folder or .zip archive with ``train/val/test/<class>/*``, or with ``<class>/*`` alone; or ``digits``
            (scikit-learn, 8 x 8 grey, fixed split); or the name of another known data set.
        size: height and width in pixels, or one number for both; 0 takes the size that most images have or, where no
            half of them agree, a square of their median shorter side, at most 256.
        colour: ``rgb``, ``grey``, or ``auto`` for grey just where all images looked at are.
        on_bad: files that cannot be read are skipped and named, or an error.
        held_out: the share of ``train`` that becomes ``val`` where there is no such folder (``valid``, ``validation``
            or ``dev``); see :func:`thalweg.data.images.files.split_off`.
        held_out_test: the same for ``test``.
        seed: of that choice.
        cache: the folder where decoded images are kept; ``None`` is :func:`thalweg.data.images.cache.cache_folder`,
            ``False`` keeps them in memory alone, as does a folder that cannot be written.
        workers: processes that decode; ``None`` is one for each core where that pays, 0 decodes here.
        root: the folder of known data sets, as in :func:`thalweg.data.find_data`.
        progress: told how many images are decoded of how many.

    See :func:`thalweg.data.images.decoding.decode` for what becomes of grey, transparent, 16-bit, CMYK and turned
    images and of other sizes. Decoding happens once: the bytes go to a file in the cache that is mapped into memory,
    and is found again as long as the names, sizes and times (in an archive the checksums) of all files are the same.

    >>> data = read_images("digits")
    >>> data.train.images.shape, data.classes[:3], data.train.files[0]
    (torch.Size([1259, 1, 8, 8]), ('0', '1', '2'), 'digits/0/0000')
    """
    wish = _wish(size, colour, on_bad)
    if _is_digits(path):
        return _digits(wish)
    listing = list_images(_locate(path, root))
    classes = check_classes(listing)
    shares = {"val": held_out, "test": held_out_test}
    shares = {split: share for split, share in shares.items() if split not in listing.splits}
    files = split_off(listing.files, shares, seed=seed, where=str(path))
    decoded = decode_listing(listing, files, wish, folder=_folder(cache), workers=workers, progress=progress)
    skipped = _skipped(listing, decoded, on_bad)
    parts = {name: _part(decoded, name, classes) for name in SPLITS if any(file.split == name for file in files)}
    _check_parts(parts, classes, skipped, path)
    return ImageData(classes, parts["train"], parts.get("val"), parts.get("test"), skipped)


def read_labelled(
    path: str | Path,
    classes: Sequence[str],
    *,
    split: str = "test",
    size: int | tuple[int, int] = 0,
    colour: Colour = "auto",
    root: Path | None = None,
    progress: Progress | None = None,
) -> tuple[ImageSplit, Skipped]:
    """Images to measure a model on, which need not have all of its classes.

    Args:
        path: as in :func:`read_images`; of a folder without splits all images are read.
        classes: those of the model, in its order.
        split: which to read where there are several.
    Returns:
        The images, and which files were skipped.

    >>> split, _ = read_labelled("digits", [str(n) for n in range(10)])
    >>> split.name, len(split)
    ('test', 359)
    """
    wish = Wish(size, colour)
    if split not in SPLITS:
        raise ConfigError(f"no split is called {split!r}; {nearest(split, SPLITS)}")
    if _is_digits(path):
        data = _digits(wish)
        if tuple(classes) != data.classes:
            raise DataError("digits: expected a model of the classes 0 to 9, got another; give data of its classes")
        return next(part for part in data.splits() if part.name == split), []
    listing = list_images(_locate(path, root))
    if listing.splits and split not in listing.splits:
        raise DataError(f"{path}: expected a folder `{split}`, got {', '.join(listing.splits)}; name one of these")
    files = [replace(file, split=split) for file in listing.files if file.split in ("", split)]
    if not files or not files[0].label:
        found = f"{len(files)} images in none" if files else "none"
        raise DataError(f"{path}: expected images in a folder for each class, got {found}; check the path")
    check_known(files, classes, listing.path)
    decoded = decode_listing(listing, files, wish, folder=_folder(None), progress=progress)
    skipped = _skipped(listing, decoded, "skip")
    if not decoded.kept:
        raise DataError(f"{path}: no image can be read; the first: {skipped[0][0]}: {skipped[0][1]}")
    return _part(decoded, split, classes), skipped


def read_unlabelled(
    paths: Sequence[str | Path],
    *,
    size: int | tuple[int, int],
    colour: Literal["rgb", "grey"],
    on_bad: OnBad = "fail",
    progress: Progress | None = None,
) -> tuple[ImageSplit, Skipped]:
    """Images to predict, in the order given; folders and archives with all that lies in them. Nothing is cached.

    Returns:
        The images with labels -1, and which files were skipped; files inside folders and archives are named
        ``PATH/file``.

    >>> read_unlabelled(["absent.png"], size=8, colour="rgb")
    Traceback (most recent call last):
        ...
    thalweg.errors.DataError: absent.png: No such file or directory; expected an image, a folder or a .zip
    """
    wish = _wish(size, colour, on_bad)
    if not size:
        raise ConfigError("`size` must be given, that which the model was trained on, got 0")
    pixels, names, skipped = [], [], []
    for listing, prefix in _given(paths):
        decoded = decode_listing(listing, listing.files, wish, folder=None, progress=progress)
        bad = [(prefix + name, reason) for name, reason in (*listing.refused, *decoded.skipped)]
        if bad and on_bad == "fail":
            raise DataError(f"{bad[0][0]}: {bad[0][1]}; expected an image, a folder or a .zip")
        skipped += bad
        pixels.append(decoded.pixels)
        names += [prefix + file.name for file in decoded.kept]
    if not names:
        reason = f"; the first: {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise DataError(f"expected images, got none in {', '.join(map(str, paths)) or 'no path'}{reason}")
    return ImageSplit("given", torch.cat(pixels), torch.full((len(names),), -1), names), skipped


def channel_statistics(split: ImageSplit) -> tuple[Tensor, Tensor]:
    r"""Mean and standard deviation of every channel over all pixels, in units of [0, 1].

    .. math:: \mu_c = \frac{1}{n} \sum_{v=0}^{255} h_c(v) \frac{v}{255}, \qquad
        \sigma_c^2 = \frac{1}{n} \sum_{v=0}^{255} h_c(v) \Big(\frac{v}{255} - \mu_c\Big)^2

    with :math:`h_c(v)` how many of the n pixels have value v; exact but for rounding. The images are counted block by
    block, and the result is kept in the index of the cache. Time O(N C H W), memory O(1).

    Returns:
        Two float32 tensors ``(C,)``.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> channel_statistics(ImageSplit("train", pixels, torch.tensor([0, 1]), ["a", "b"]))
    (tensor([0.5000]), tensor([0.5000]))
    """
    facts = (split.entry and split.entry.load(check=False)) or {}
    known = facts.get("statistics", {}).get(split.name)
    if known is None:
        known = _count(split.images)
        if split.entry is not None:
            split.entry.add("statistics", {split.name: known})
    return torch.tensor(known["mean"]), torch.tensor(known["std"])


def _count(images: Tensor) -> dict[str, list[float]]:
    N, C = images.shape[:2]
    histogram = torch.zeros(C, 256, dtype=torch.float64)
    step = max(1, _BLOCK // max(1, images[:1].numel()))
    for first in range(0, N, step):
        block = images[first : first + step]
        histogram += torch.stack([torch.bincount(block[:, c].flatten(), minlength=256) for c in range(C)])
    values = torch.arange(256, dtype=torch.float64) / 255
    count = histogram.sum(1).clamp(min=1)
    mean = histogram @ values / count
    variance = (histogram * (values - mean[:, None]) ** 2).sum(1) / count
    return {"mean": mean.tolist(), "std": variance.sqrt().tolist()}


def _wish(size: int | tuple[int, int], colour: str, on_bad: str) -> Wish:
    if on_bad not in ("skip", "fail"):
        raise ConfigError(f"`on_bad` of images must be skip or fail, got {on_bad!r}")
    return Wish(size, colour)


def _locate(path: str | Path, root: Path | None) -> Path:
    """The folder or archive of a path or of a data set's name; what exists here goes before a name."""
    if str(path) in IMAGE_FILES and not Path(path).exists():
        return find_data(IMAGE_FILES[str(path)], root)
    if not Path(path).exists():
        name = str(path)
        bare = Path(name).name == name and "." not in name
        remedy = nearest(name, ["digits", *IMAGE_FILES]) if bare else "check the path"
        raise DataError(f"{name}: expected a folder or a .zip with images, got no such file; {remedy}")
    return Path(path)


def _folder(cache: Path | Literal[False] | None) -> Path | None:
    if cache is False:
        return None
    return cache_folder() if cache is None else Path(cache)


def _skipped(listing: Listing, decoded: Decoded, on_bad: str) -> Skipped:
    skipped = [*listing.refused, *decoded.skipped]
    if skipped and on_bad == "fail":
        name, reason = skipped[0]
        more = f" (and {len(skipped) - 1} more files)" if len(skipped) > 1 else ""
        raise DataError(f"{listing.path}: {name}: {reason}{more}; mend or remove it, or skip such files")
    return skipped


def _part(decoded: Decoded, name: str, classes: Sequence[str]) -> ImageSplit:
    """The images of one split, which lie together."""
    rows = [row for row, file in enumerate(decoded.kept) if file.split == name]
    first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
    number = {label: n for n, label in enumerate(classes)}
    files = decoded.kept[first:last]
    labels = torch.tensor([number[file.label] for file in files], dtype=torch.int64)
    return ImageSplit(name, decoded.pixels[first:last], labels, [file.name for file in files], decoded.entry)


def _check_parts(parts: dict[str, ImageSplit], classes: Sequence[str], skipped: Skipped, path: str | Path) -> None:
    """Files that cannot be read must not have been all of a class."""
    for name, part in parts.items():
        count = torch.bincount(part.labels, minlength=len(classes))
        if not count.all():
            label = classes[int(count.argmin())]
            file, reason = next((pair for pair in skipped if label in pair[0].split("/")), skipped[0])
            raise DataError(
                f"{path}: class `{label}` has no image in `{name}` that can be read ({file}: {reason}); "
                "mend its files or remove the class"
            )


def _given(paths: Sequence[str | Path]) -> list[tuple[Listing, str]]:
    """Listings in the order of the paths, neighbouring single files as one, with what goes before their names."""
    found: list[tuple[Listing, str]] = []
    alone: list[ImageFile] = []

    def close() -> None:
        if alone:
            found.append((Listing(Path(), False, tuple(alone), frozenset(), ()), ""))
            alone.clear()

    for path in paths:
        if os.path.isdir(path) or (os.path.isfile(path) and str(path).lower().endswith(".zip")):
            close()
            found.append((list_images(Path(path)), f"{path}/"))
        else:
            alone.append(ImageFile(str(path), str(path), "", "", 0, 0))
    close()
    return found


def _is_digits(path: str | Path) -> bool:
    return str(path) == "digits" and not Path(path).exists()


def _digits(wish: Wish) -> ImageData:
    values, targets = load_digit_images()
    labels = [str(label) for label in targets]
    files = [ImageFile(f"digits/{label}/{n:04d}", f"{n:04d}", label, "", 64, n) for n, label in enumerate(labels)]
    kept = split_off(files, _DIGITS, where="digits")
    order = torch.tensor([file.stamp for file in kept])
    # Counts of 0 to 16 black pixels of a 4 x 4 block.
    images = torch.from_numpy(np.rint(values * (255 / 16))).to(torch.uint8)[order].view(-1, 1, 8, 8)
    height, width = wish.pair
    check_memory(4 * len(images) * height * width, f"{len(images):,} images of {height} x {width}", "lower data.size")
    if height and (height, width) != (8, 8):
        scaled = F.interpolate(images.float(), (height, width), mode="bicubic", antialias=True, align_corners=False)
        images = scaled.round_().clamp_(0, 255).to(torch.uint8)
    if wish.colour == "rgb":
        images = images.expand(-1, 3, -1, -1).contiguous()
    decoded = Decoded(images, kept, [])
    classes = tuple(str(n) for n in range(10))
    train, val, test = (_part(decoded, name, classes) for name in SPLITS)
    return ImageData(classes, train, val, test)
