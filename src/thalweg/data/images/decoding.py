"""Image files as arrays of bytes, decoded in worker processes.

A worker is this file run as a script: it needs neither torch nor the caller's main module, so it starts in a tenth of
a second whatever the platform's way of starting processes, and a file that crashes the decoder takes it alone down.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from thalweg.processes import Worker


# An image of more pixels is refused: a small file can claim a size that fills the memory.
MAX_PIXELS = 100_000_000

# A longer file is refused unread, in an archive by the size that it declares.
MAX_BYTES = 2**28

# What Pillow may take a file for; it knows many more formats, some with a long record of holes.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# Files that a worker decodes at a time.
_CHUNK = 32


class Form(NamedTuple):
    """What every image becomes: ``channels`` is 1 (grey) or 3 (RGB).

    >>> Form(3, 48, 48).bytes
    6912
    """

    channels: int
    height: int
    width: int

    @property
    def bytes(self) -> int:
        """Of one image."""
        return self.channels * self.height * self.width


class Look(NamedTuple):
    """What the header of an image says, its orientation taken into account.

    >>> Look(48, 64, grey=False).height
    48
    """

    height: int
    width: int
    grey: bool


class FileSource:
    """Files of a folder or of a zip archive, read by name; nothing is ever unpacked to the disk.

    Args:
        path: the folder, or the archive; empty where names are whole paths.
        archive: which of the two it is.

    >>> with FileSource("", archive=False) as source:
    ...     source.read("absent.png")
    Traceback (most recent call last):
        ...
    FileNotFoundError: [Errno 2] No such file or directory: 'absent.png'
    """

    def __init__(self, path: str, *, archive: bool):
        self.path, self.archive = path, archive
        self._zip = zipfile.ZipFile(path) if archive else None

    def read(self, name: str) -> bytes:
        """The whole file."""
        if self._zip is None:
            full = os.path.join(self.path, name)
            if os.path.getsize(full) > MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES:,} bytes, got {os.path.getsize(full):,}")
            with open(full, "rb") as file:
                data = file.read(MAX_BYTES + 1)  # a device has no size and no end
            if len(data) > MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES:,} bytes, got more")
            return data
        member = self._zip.getinfo(name)
        if member.file_size > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES:,} bytes, got {member.file_size:,}")
        if member.flag_bits & 1:
            raise ValueError("encrypted in the archive")
        return self._zip.read(member)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *error: object) -> None:
        if self._zip is not None:
            self._zip.close()


def look(data: bytes) -> Look:
    """Size and kind of an image from its header; ``ValueError`` says why it is none.

    >>> look(b"")
    Traceback (most recent call last):
        ...
    ValueError: empty file
    """
    with _opened(data) as image:
        width, height = image.size
        if _orientation(image) >= 5:
            width, height = height, width
        return Look(height, width, image.mode in ("1", "L", "LA", "La", "I") or image.mode.startswith("I;16"))


def decode(data: bytes, form: Form) -> np.ndarray:
    """An image file as ``(C, H, W)`` uint8; ``ValueError`` says why it cannot be read.

    JPEG, PNG, WebP, BMP, GIF and TIFF (the first frame), PPM. The orientation that EXIF gives is applied. What is
    transparent lies on white. 16-bit grey is scaled to 8 bits; CMYK becomes RGB without its colour profile; grey is
    the luma of ITU-R BT.601. Another size is scaled (bicubic, antialiased) until it covers height and width, then cut
    at the centre.

    >>> from PIL import Image
    >>> Image.new("RGB", (4, 2), "red").save(file := io.BytesIO(), "png")
    >>> decode(file.getvalue(), Form(3, 1, 1)).ravel().tolist()
    [255, 0, 0]
    """
    with _opened(data) as image:
        most = 2 * max(form.height, form.width)
        if image.format == "JPEG" and min(image.size) >= 2 * most:
            image.draft(None, (most, most))  # decodes at a half, a quarter or an eighth, still twice the size asked for
        image.load()
        turned = _turned(image, _orientation(image))
        fitted = _fitted(_plain(turned, "L" if form.channels == 1 else "RGB"), form)
        return np.asarray(fitted).reshape(form.height, form.width, form.channels).transpose(2, 0, 1)


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    from PIL import Image

    if not data:
        raise ValueError("empty file")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            # Pillow's warnings of odd metadata would come in the middle of a progress bar.
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"expected at most {MAX_PIXELS:,} pixels, got {image.width:,} x {image.height:,}")
            yield image
    except Image.UnidentifiedImageError:
        raise ValueError("not an image of a known format") from None
    except ValueError:
        raise
    # Damaged files come as OSError, SyntaxError, struct.error, IndexError and more, as the plugin has it.
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(reason[0] if reason else type(error).__name__) from None


def _orientation(image: Any) -> int:
    try:
        found = image.getexif().get(0x0112, 1)
    except Exception:  # damaged metadata do not spoil the picture
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    # The numbers of EXIF from 2 on; 1 is upright.
    turns = (
        *(Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE),
        *(Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90),
    )
    return image if orientation == 1 else image.transpose(turns[orientation - 2])


def _plain(image: Any, mode: str) -> Any:
    """As 8-bit grey (``L``) or ``RGB`` without transparency."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("floating-point pixels have no range that is known; expected 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if values.size and not 0 <= values.min() <= values.max() <= 65535:
            raise ValueError("32-bit pixels have no range that is known; expected 8 or 16 bits")
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def _fitted(image: Any, form: Form) -> Any:
    from PIL.Image import Resampling

    if image.size == (form.width, form.height):
        return image
    scale = min(image.width / form.width, image.height / form.height)
    width, height = min(scale * form.width, image.width), min(scale * form.height, image.height)
    left, top = (image.width - width) / 2, (image.height - height) / 2
    box = (left, top, left + width, top + height)
    return image.resize((form.width, form.height), Resampling.BICUBIC, box=box, reducing_gap=3.0)


def _decode_names(source: FileSource, names: Sequence[str], form: Form) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """``(len(names), C, H, W)``, and by index why some could not be read."""
    out, bad = np.zeros((len(names), *form), dtype=np.uint8), []
    for place, name in enumerate(names):
        try:
            out[place] = decode(source.read(name), form)
        except (ValueError, OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            bad.append((place, _reason(error)))
        except EOFError:
            bad.append((place, "truncated in the archive"))
    return out, bad


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip("\"'")
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


def decode_files(
    source: FileSource,
    names: Sequence[str],
    form: Form,
    target: Path | np.ndarray,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, str]:
    """Decode files into ``(len(names), C, H, W)`` bytes.

    Args:
        target: an array of that shape, or a file of that many bytes; an image that cannot be read stays zero.
        workers: processes that fill a file; 0 decodes here.
        progress: told how many are done of how many.
    Returns:
        Why some could not be read, by their index.

    >>> with FileSource("", archive=False) as source:
    ...     decode_files(source, ["absent.png"], Form(1, 1, 1), np.zeros((1, 1, 1, 1), dtype=np.uint8))
    {0: 'No such file or directory'}
    """
    chunks = [(first, names[first : first + _CHUNK]) for first in range(0, len(names), _CHUNK)]
    bad: dict[int, str] = {}
    done = 0

    def note(count: int, found: Sequence[tuple[int, str]]) -> None:
        nonlocal done
        done += count
        bad.update(found)
        if progress is not None:
            progress(done, len(names))

    if isinstance(target, np.ndarray):
        for first, part in chunks:
            target[first : first + len(part)], found = _decode_names(source, part, form)
            note(len(part), [(first + place, reason) for place, reason in found])
    elif workers and sys.executable and not getattr(sys, "frozen", False):
        with _Crew(source, form, target) as crew, ThreadPoolExecutor(workers) as pool:
            waiting = {pool.submit(crew.decode, first, part): len(part) for first, part in chunks}
            try:
                for future in as_completed(waiting):
                    note(waiting[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    else:
        with target.open("r+b") as file:
            for first, part in chunks:
                note(len(part), _write(file, source, first, part, form))
    return dict(sorted(bad.items()))


def _write(file: Any, source: FileSource, first: int, names: Sequence[str], form: Form) -> list[tuple[int, str]]:
    images, bad = _decode_names(source, names, form)
    file.seek(first * form.bytes)
    file.write(images.data)
    file.flush()
    return [(first + place, reason) for place, reason in bad]


class _DiedError(Exception):
    """A worker ended without an answer."""


def _ask(worker: Worker, what: Any) -> Any:
    worker.tell(what)
    answer = worker.hear()
    if answer is None:
        raise _DiedError
    return answer


class _Crew:
    """A worker for each thread that asks; a dead one is replaced, and the file that kills it is found."""

    def __init__(self, source: FileSource, form: Form, target: Path):
        self.task = {"path": source.path, "archive": source.archive, "form": list(form), "target": str(target)}
        self.source, self.form, self.target = source, form, target
        self.local = threading.local()
        self.hired: list[Worker] = []

    def decode(self, first: int, names: Sequence[str]) -> list[tuple[int, str]]:
        try:
            worker = self._worker()
        except (_DiedError, OSError):  # no process can be started here, so this thread does the work
            with FileSource(self.source.path, archive=self.source.archive) as own, self.target.open("r+b") as file:
                return _write(file, own, first, names, self.form)
        try:
            return [(place, reason) for place, reason in _ask(worker, {"first": first, "names": list(names)})]
        except _DiedError:
            self.local.worker = None
        if len(names) == 1:
            return [(first, "it crashed the decoder")]
        return [found for place, name in enumerate(names) for found in self.decode(first + place, [name])]

    def _worker(self) -> Worker:
        from thalweg.processes import Worker

        if getattr(self.local, "worker", None) is None:
            # Not the folder of this file but the usual places: modules beside it must not hide others of the same name.
            worker = Worker(["-P", str(Path(__file__).resolve())])
            self.hired.append(worker)
            _ask(worker, self.task)
            self.local.worker = worker
        return self.local.worker

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.hired:
            worker.end()


def _serve() -> None:
    """The life of a worker; it ends when nobody writes to it any more."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    task = json.loads(sys.stdin.readline())
    form = Form(*task["form"])
    with FileSource(task["path"], archive=task["archive"]) as source, open(task["target"], "r+b") as file:
        print("true", flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(_write(file, source, job["first"], job["names"], form)), flush=True)


if __name__ == "__main__":
    _serve()
