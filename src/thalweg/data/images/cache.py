"""Decoded images in files that are mapped into memory, found by what they were decoded from."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.files import write_text

# Blocks that are looked at to tell a damaged file, and their bytes: a whole file up to 256 MiB.
_BLOCKS, _BLOCK = 256, 2**20

# Seconds after which an unfinished file is taken for one that a killed process left behind.
_ABANDONED = 86400.0

_VERSION = 1


def cache_folder() -> Path | None:
    """Where decoded images are kept: ``images`` in the folder that ``THALWEG_CACHE`` names, or in the user's cache.

    An empty ``THALWEG_CACHE`` keeps nothing: None.

    >>> os.environ["THALWEG_CACHE"] = "kept"
    >>> cache_folder().as_posix()
    'kept/images'
    >>> del os.environ["THALWEG_CACHE"]
    """
    named = os.environ.get("THALWEG_CACHE")
    if named is not None:
        return Path(named) / "images" if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "thalweg" / "images"
    except RuntimeError:  # no home
        return None


def map_bytes(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A file as an array of bytes; what is written to it stays in memory.

    >>> Path("four").write_bytes(b"abcd")
    4
    >>> map_bytes(Path("four"), (2, 2)).tolist()
    [[97, 98], [99, 100]]
    """
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="c", shape=shape))


def reserve(path: Path, size: int) -> None:
    """A new file of zeros whose place on the disk is sure; ``OSError`` where there is none.

    Writing through a map to a full disk would end the process.

    >>> reserve(Path("zeros"), 3)
    >>> Path("zeros").read_bytes()
    b'\\x00\\x00\\x00'
    """
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


@dataclass(frozen=True)
class CacheEntry:
    """One set of decoded images: ``KEY.bin`` with the bytes, ``KEY.json`` with what is known of them.

    Both are written beside and then renamed, the bytes first, so that a reader finds a whole entry or none, and of two
    writers the last wins. An entry that is not as its index says counts as none.

    >>> entry = CacheEntry(Path("cache"), "k")
    >>> entry.load() is None
    True
    >>> with entry.writing(2) as file:
    ...     _ = file.write_bytes(b"ab")
    ...     entry.publish(file, {"shape": [2, 1, 1, 1]})
    >>> entry.load()["shape"]
    [2, 1, 1, 1]
    """

    folder: Path
    key: str

    @property
    def data(self) -> Path:
        """The file of bytes."""
        return self.folder / f"{self.key}.bin"

    @property
    def index(self) -> Path:
        """The file of facts."""
        return self.folder / f"{self.key}.json"

    def load(self, *, check: bool = True) -> dict[str, Any] | None:
        """The index; none where there is no entry, or a damaged one. ``check`` reads the bytes to tell."""
        try:
            facts = json.loads(self.index.read_text(encoding="utf-8"))
            if facts["version"] != _VERSION or facts["key"] != self.key:
                return None
            whole = self.data.stat().st_size == int(np.prod(facts["shape"]))
            whole = whole and (not check or _digest(self.data) == facts["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return facts if whole else None

    @contextlib.contextmanager
    def writing(self, size: int) -> Iterator[Path]:
        """A new file of ``size`` bytes beside the entry, removed if it was not published."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        file = self.folder / f"{self.key}.{uuid.uuid4().hex}.bin.part"
        try:
            reserve(file, size)
            yield file
        finally:
            file.unlink(missing_ok=True)

    def publish(self, file: Path, facts: Mapping[str, Any]) -> None:
        """Make ``file`` the bytes of this entry and ``facts`` its index."""
        facts = {**facts, "version": _VERSION, "key": self.key, "digest": _digest(file)}
        os.replace(file, self.data)
        self._put(facts)

    def add(self, name: str, values: Mapping[str, Any]) -> None:
        """Put more facts under ``name`` of the index, where it can be written."""
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self.index.read_text(encoding="utf-8"))
            self._put({**facts, name: {**facts.get(name, {}), **values}})

    def _put(self, facts: Mapping[str, Any]) -> None:
        write_text(self.index, json.dumps(facts))

    def _tidy(self) -> None:
        for file in (*self.folder.glob("*.part"), *self.folder.glob(".*.tmp")):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _ABANDONED:
                    file.unlink()


def _digest(path: Path) -> int:
    """A checksum of the file, or of blocks spread over it where it is large."""
    size = path.stat().st_size
    step = max(_BLOCK, size // _BLOCKS)
    value = zlib.crc32(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            value = zlib.crc32(file.read(_BLOCK), value)
    return value
