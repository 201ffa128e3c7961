"""Files that Thalweg writes: whole or not at all, tensors with JSON beside them, one error where it cannot."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.errors import CheckpointError, MissingDependencyError, OutOfMemoryError, WriteError

if TYPE_CHECKING:
    from torch import Tensor


_REMEDIES = {
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room and try again",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, an ``OSError`` becomes a :class:`~thalweg.errors.WriteError`: one line that names ``path`` and a remedy.

    >>> with writing(Path("runs/x")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    ...
    thalweg.errors.WriteError: runs/x: cannot be written (No space left on device); make room and try again
    """
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "choose another place or mend this one")
        raise WriteError(f"{path}: cannot be written ({reason}); {remedy}", path) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader, or a kill at any moment, sees the old file or the new one, whole.

    What cannot be written is a :class:`~thalweg.errors.WriteError`; the old file is then as it was.

    >>> write_atomically(Path(tempfile.mkdtemp()) / "x.json", b"{}")
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A part of the name is enough, and leaves room for the rest where it is as long as names may be.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
        try:
            # mkstemp makes the file private; a run directory's files follow the user's umask like any other.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(handle, 0o666 & ~umask)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """:func:`write_atomically` with text, as UTF-8.

    >>> write_text(Path(tempfile.mkdtemp()) / "x.txt", "ʃ")
    """
    write_atomically(path, text.encode())


def append(path: Path, text: str) -> None:
    """Add text to the end of a file, which is made where it is not there.

    >>> log = Path(tempfile.mkdtemp()) / "runs" / "log.jsonl"
    >>> append(log, "{}\\n")
    >>> log.read_text()
    '{}\\n'
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(text.encode())


@dataclass(frozen=True)
class TensorFormat:
    """One kind of safetensors file: what its header says, and what messages call it.

    Attributes:
        kind: the mark in the header.
        version: of the layout that is written; files with a higher one are refused.
        name: what a file of it is, with the article; ``other``: the remedy where a file is something else.
        absent, damaged: remedies where there is no file, and where it cannot be read.

    >>> TensorFormat("thalweg-x", 1, "an x", "make one", "make another", "name another file").version
    1
    """

    kind: str
    version: int
    name: str
    absent: str
    damaged: str
    other: str

    @property
    def noun(self) -> str:
        """The last word of the name.

        >>> TensorFormat("thalweg-x", 1, "a saved x", "", "", "").noun
        'x'
        """
        return self.name.rpartition(" ")[2]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], form: TensorFormat) -> None:
    """Write tensors and JSON metadata as one safetensors file, atomically; tensors may share storage.

    >>> import torch
    >>> form = TensorFormat("thalweg-x", 1, "an x", "make one", "make another", "name another file")
    >>> path = Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> write_tensors(path, {"weight": torch.ones(2)}, {"epoch": 3}, form)
    >>> read_tensors(path, form)
    ({'weight': tensor([1., 1.])}, {'epoch': 3})
    """
    from safetensors.torch import save

    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(meta, ensure_ascii=False)
    header = {"kind": form.kind, "format": str(form.version), "meta": text, "checksum": _checksum(own, text)}
    write_atomically(path, _serialised(lambda: save(own, metadata=header), path))


def _serialised(save: Callable[[], bytes], path: Path) -> bytes:
    """The bytes of a file; safetensors panics, outside of all errors of Python, where there is no memory for them."""
    try:
        return save()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise OutOfMemoryError(f"expected enough memory to write {path}, got less; lower the model's sizes") from error


def read_tensors(path: Path, form: TensorFormat, *, values: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, on the CPU, and metadata of such a file; :class:`CheckpointError` says what is wrong with any other.

    Nothing in the file is executed, and nothing larger than the file is allocated. A checksum tells damage; files
    of format 1, from before there was one, are taken as they are. Without ``values`` the metadata alone are read,
    unchecked, and there are no tensors.

    >>> read_tensors(Path("absent"), TensorFormat("thalweg-x", 1, "an x", "make one", "make another", "name another"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent: expected an x, got no such file; make one
    """
    while True:
        before = _version(path)
        try:
            return _read_once(path, form, values)
        except CheckpointError:
            # safetensors opens a file again for each tensor: one that a training replaced meanwhile is read anew.
            if _version(path) == before:
                raise


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced; nothing where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_once(path: Path, form: TensorFormat, values: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: expected {form.name}, got no such file; {form.absent}")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, header, form)
            names = file.keys() if values else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except CheckpointError:
        raise
    except Exception as error:  # safetensors raises many kinds for files that are not what they should be
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, got one that cannot be read ({reason}); {form.damaged}"
        ) from None
    try:
        text = header["meta"]
        meta = dict(json.loads(text).items())
    except (KeyError, ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: the {form.noun}'s metadata is damaged; {form.damaged}") from None
    # Files of format 1 have none; in any other a lost name of the field must not pass for its absence.
    summed = values and (header.get("format") != "1" or "checksum" in header)
    if summed and header.get("checksum") != _checksum(tensors, text):
        raise CheckpointError(f"{path}: the {form.noun} is damaged, its checksum is another; {form.damaged}")
    return tensors, meta


@contextmanager
def making_sense(path: Path, complaint: str, remedy: str) -> Iterator[None]:
    """Inside, what a file's contents are used for; whatever is wrong with them becomes a :class:`CheckpointError`.

    >>> with making_sense(Path("x.safetensors"), "expected an x, got something else", "make another"):
    ...     int("three")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: x.safetensors: expected an x, got something else (invalid literal for ...); ...
    """
    try:
        yield
    except (CheckpointError, MissingDependencyError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        reason = f"{reason[:200]} ..." if len(reason) > 200 else reason
        raise CheckpointError(f"{path}: {complaint} ({reason}); {remedy}") from None


def _check_header(path: Path, header: Mapping[str, str], form: TensorFormat) -> None:
    if header.get("kind") != form.kind:
        raise CheckpointError(f"{path}: expected {form.name}, got a safetensors file of another kind; {form.other}")
    version = header.get("format", "0")
    if not version.isascii() or not version.isdigit() or len(version) > 9 or int(version) > form.version:
        raise CheckpointError(
            f"{path}: expected {form.noun} format {form.version} or older, got {version[:20]}; "
            "upgrade thalweg to read it"
        )


def _checksum(tensors: Mapping[str, Tensor], meta: str) -> str:
    """Of names, types, shapes, values and metadata."""
    import torch

    value = zlib.crc32(meta.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8", "surrogatepass"), value)
        value = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
