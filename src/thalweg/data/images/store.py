"""The images of a listing as one tensor of bytes: from the cache, or decoded now and put there."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thalweg.data.images.cache import CacheEntry, map_bytes, reserve
from thalweg.data.images.decoding import FileSource, Form, Look, decode_files, look
from thalweg.data.images.files import ImageFile, Listing
from thalweg.errors import ConfigError, DataError, MissingDependencyError
from thalweg.limits import SIDE, check_memory

# Changes whenever the same file would be decoded to other bytes.
_RULES = 1

# Images whose headers are looked at to choose a size and the number of channels.
_LOOKS = 256

# The largest side that is chosen where the images are of many sizes.
_LARGEST = 256

# Files that are worth a worker process, and the most processes.
_WORTH, _MOST = 256, 16


@dataclass(frozen=True)
class Wish:
    """How images are wanted.

    Attributes:
        size: height and width, or one number for both; 0 leaves it to the images.
        colour: ``rgb``, ``grey`` or ``auto``.

    >>> Wish(48).pair
    (48, 48)
    """

    size: int | tuple[int, int] = 0
    colour: str = "auto"

    def __post_init__(self) -> None:
        if self.colour not in ("auto", "rgb", "grey"):
            raise ConfigError(f"`colour` of images must be one of auto, rgb, grey, got {self.colour!r}")
        pair = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        if len(pair) != 2 or min(pair) < 0 or (min(pair) == 0 and max(pair) > 0) or max(pair) > SIDE:
            raise ConfigError(
                f"`size` of images must be 0, a number of pixels, or height and width, at most {SIDE:,}, "
                f"got {self.size!r}"
            )

    @property
    def pair(self) -> tuple[int, int]:
        """Height and width, both 0 where they are left to the images."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, eq=False)
class Decoded:
    """Images in the order of their listing, without those that could not be read.

    Attributes:
        pixels: ``(N, C, H, W)`` uint8.
        kept: their files.
        skipped: the others, each with the reason.
        entry: where they are cached, if they are.

    >>> Decoded(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), [], [("a.png", "empty file")]).entry is None
    True
    """

    pixels: Tensor
    kept: list[ImageFile]
    skipped: list[tuple[str, str]]
    entry: CacheEntry | None = None


def decode_listing(
    listing: Listing,
    files: Sequence[ImageFile],
    wish: Wish,
    *,
    folder: Path | None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """Every file of ``files``, which are those of ``listing`` in the order and with the splits that they are to have.

    Args:
        folder: of the cache; none keeps them in memory, as does one that cannot be written.
        workers: processes; ``None`` is one for each core where there are files enough.

    >>> decode_listing(Listing(Path(), False, (), frozenset(), ()), [], Wish(8, "grey"), folder=None).pixels.shape
    torch.Size([0, 1, 8, 8])
    """
    _need_pillow()
    entry = CacheEntry(folder, _key(listing, files, wish)) if folder is not None else None
    facts = entry.load() if entry is not None else None
    if entry is not None and facts is not None:
        shape = tuple(facts["shape"])
        pixels = torch.from_numpy(map_bytes(entry.data, shape)) if shape[0] else torch.zeros(shape, dtype=torch.uint8)
        return _decoded(pixels, files, {int(row): reason for row, reason in facts["bad"]}, entry)
    with FileSource(str(listing.path), archive=listing.archive) as source:
        names = [file.name for file in files]
        form = choose_form(source, names, wish)
        work = _Work(source, names, form, _workers(workers, len(names)), progress)
        if entry is not None:
            try:
                return work.cached(files, entry)
            except OSError:  # no place, or no right to write: what follows needs neither
                pass
        return work.kept_in_memory(files)


def choose_form(source: FileSource, names: Sequence[str], wish: Wish) -> Form:
    """The size and number of channels for images that were not told them, by the headers of up to 256 of them.

    >>> choose_form(FileSource("", archive=False), [], Wish(8, "rgb"))
    Form(channels=3, height=8, width=8)
    """
    height, width = wish.pair
    if height and wish.colour != "auto":
        return Form(1 if wish.colour == "grey" else 3, height, width)
    looks: list[Look] = []
    step = -(-len(names) // _LOOKS) or 1
    for name in names[::step]:
        try:
            looks.append(look(source.read(name)))
        except Exception:  # decoding will say why
            continue
    channels = 1 if wish.colour == "grey" or (wish.colour == "auto" and looks and all(x.grey for x in looks)) else 3
    if height:
        return Form(channels, height, width)
    if not looks:
        raise DataError(
            f"{source.path}: no image can be read, so none says the size; check the files, or give `size` to see why"
        )
    (common, count), *_ = Counter((x.height, x.width) for x in looks).most_common(1)
    if 2 * count >= len(looks):
        return Form(channels, *common)
    side = min(_LARGEST, int(statistics.median_low(min(x.height, x.width) for x in looks)))
    return Form(channels, side, side)


@dataclass(frozen=True)
class _Work:
    source: FileSource
    names: list[str]
    form: Form
    workers: int
    progress: Callable[[int, int], None] | None

    def cached(self, files: Sequence[ImageFile], entry: CacheEntry) -> Decoded:
        """Decode into the cache and read from there."""
        with entry.writing(len(self.names) * self.form.bytes) as target:
            bad = self._to_file(target)
            shape = (len(self.names) - len(bad), *self.form)
            entry.publish(target, {"shape": shape, "bad": list(bad.items())})
        pixels = torch.from_numpy(map_bytes(entry.data, shape)) if shape[0] else torch.zeros(shape, dtype=torch.uint8)
        return _decoded(pixels, files, bad, entry)

    def kept_in_memory(self, files: Sequence[ImageFile]) -> Decoded:
        shape = (len(self.names), *self.form)
        what = f"{len(self.names):,} images of {self.form.height} x {self.form.width}"
        check_memory(len(self.names) * self.form.bytes, what, "lower data.size, or make room for a cache")
        if self.workers:
            try:
                with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
                    target = Path(folder) / "images"
                    reserve(target, len(self.names) * self.form.bytes)
                    bad = self._to_file(target)
                    pixels = np.fromfile(target, dtype=np.uint8).reshape(-1, *self.form)
                return _decoded(torch.from_numpy(pixels), files, bad)
            except OSError:  # no temporary files either
                pass
        pixels = np.zeros(shape, dtype=np.uint8)
        bad = decode_files(self.source, self.names, self.form, pixels, progress=self.progress)
        kept = np.delete(pixels, list(bad), axis=0) if bad else pixels
        return _decoded(torch.from_numpy(kept), files, bad)

    def _to_file(self, target: Path) -> dict[int, str]:
        """Decode all, then close the gaps that bad images leave."""
        bad = decode_files(self.source, self.names, self.form, target, workers=self.workers, progress=self.progress)
        if bad:
            rows = np.delete(np.arange(len(self.names)), list(bad))
            data = np.memmap(target, dtype=np.uint8, mode="r+", shape=(len(self.names), *self.form))
            step = max(1, 2**24 // self.form.bytes)
            for first in range(0, len(rows), step):
                # The right side is copied before it is written, and rows only ever move towards the front.
                data[first : first + step][: len(rows[first : first + step])] = data[rows[first : first + step]]
            data.flush()
            del data
            os.truncate(target, len(rows) * self.form.bytes)
        return bad


def _decoded(
    pixels: Tensor, files: Sequence[ImageFile], bad: dict[int, str], entry: CacheEntry | None = None
) -> Decoded:
    kept = [file for row, file in enumerate(files) if row not in bad]
    return Decoded(pixels, kept, [(files[row].name, reason) for row, reason in bad.items()], entry)


def _key(listing: Listing, files: Sequence[ImageFile], wish: Wish) -> str:
    import PIL

    # The checksums of an archive tell its contents; of a folder sizes and times do, wherever names are its own.
    place = "" if listing.archive else str(listing.path.resolve())
    facts = [_RULES, PIL.__version__, place, wish.pair, wish.colour]
    facts.append([(file.name, file.split, file.size, file.stamp) for file in files])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("images need the package `pillow`; run: pip install pillow") from error


def _workers(asked: int | None, files: int) -> int:
    if asked is not None:
        if asked < 0:
            raise ConfigError(f"`workers` must be 0 or more, got {asked}")
        return min(asked, files)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, _MOST, files // _WORTH)
    return count if count > 1 else 0
