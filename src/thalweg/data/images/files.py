"""Which image files there are, of which class and split: folders and zip archives alike."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thalweg.errors import ConfigError, DataError, nearest

# Endings of the files that count as images, whatever their case.
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

# The parts of a data set, and what their folders may be called, whatever their case.
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing")}

_SPLIT_OF = {alias: split for split, aliases in SPLITS.items() for alias in aliases}


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One image that has not been read.

    Attributes:
        name: its path inside the folder or archive.
        inner: its path below its class, by which it is split off.
        label: its class; empty where it has none.
        split: ``train``, ``val``, ``test``, or empty where the folders do not say.
        size, stamp: bytes, and the time of change or the archive's checksum: they tell whether it is still the same.

    >>> ImageFile("train/cat/1.png", "1.png", "cat", "train", 10, 0).label
    'cat'
    """

    name: str
    inner: str
    label: str
    split: str
    size: int
    stamp: int


@dataclass(frozen=True)
class Listing:
    """The images of a folder or archive.

    Attributes:
        files: sorted by split, class and name.
        folders: every class folder as ``(split, class)``, the empty ones too.
        refused: files that are not touched, with the reason.

    >>> Listing(Path("x.zip"), True, (), frozenset(), ()).archive
    True
    """

    path: Path
    archive: bool
    files: tuple[ImageFile, ...]
    folders: frozenset[tuple[str, str]]
    refused: tuple[tuple[str, str], ...]

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that exist as folders, in the order train, val, test.

        >>> Listing(Path("x"), False, (), frozenset({("test", "cat"), ("train", "cat")}), ()).splits
        ('train', 'test')
        """
        found = {split for split, _ in self.folders}
        return tuple(split for split in SPLITS if split in found)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    parts: tuple[str, ...]
    size: int
    stamp: int


def list_images(path: Path) -> Listing:
    """The images of a folder or zip archive with ``train/val/test/<class>/*``, or with ``<class>/*`` alone.

    Folders around all of these are passed through; what lies deeper than a class belongs to it. Hidden files,
    ``__MACOSX`` and other kinds of files are ignored. A member of an archive whose path is absolute or leads outside
    is refused, and so are the second of one name and a file whose name is not UTF-8; a class must have such a name.

    >>> list_images(Path("absent"))
    Traceback (most recent call last):
        ...
    thalweg.errors.DataError: absent: expected a folder or a .zip with images, got no such file; check the path
    """
    archive = path.is_file()
    if archive:
        entries, folders, refused = _of_zip(path)
    elif path.is_dir():
        entries, folders, refused = _of_folder(path)
    else:
        raise DataError(f"{path}: expected a folder or a .zip with images, got no such file; check the path")
    entries, folders = _unwrapped(entries, folders)
    by_split = any(len(entry.parts) >= 3 and _split_of(entry.parts[0]) for entry in entries)
    depth = 1 if by_split else 0
    files: list[ImageFile] = []
    for entry in entries:
        split = _split_of(entry.parts[0]) if by_split else ""
        if by_split and not split:
            continue
        placed = len(entry.parts) > depth + 1
        label, inner = (entry.parts[depth], "/".join(entry.parts[depth + 1 :])) if placed else ("", entry.parts[-1])
        if _readable(label) != label:
            raise DataError(f"{path}: expected folders named in UTF-8, got `{_readable(label)}`; rename it")
        if _readable(entry.name) != entry.name:
            refused.append((_readable(entry.name), "its name is not UTF-8"))
            continue
        files.append(ImageFile(entry.name, inner, label, split, entry.size, entry.stamp))
    stray = sorted(file.name for file in files if not file.label)
    if stray and len(stray) < len(files):
        refused += [(name, "in no class's folder") for name in stray]
        files = [file for file in files if file.label]
    classes = {(_split_of(p[0]) if by_split else "", p[depth]) for p in folders if len(p) == depth + 1}
    classes = {(split, label) for split, label in classes if split or not by_split}
    classes |= {(file.split, file.label) for file in files if file.label}
    return Listing(path, archive, tuple(sorted(files, key=_order)), frozenset(classes), tuple(sorted(refused)))


def split_off(
    files: Sequence[ImageFile], shares: dict[str, float], *, seed: int = 0, where: str = "images"
) -> list[ImageFile]:
    """Some files of every class go from ``train`` to other splits, by a hash of seed, class and name.

    Of the n files of a class, those with the lowest hashes go to the first split, the next to the second and so on:
    each takes its share of n, rounded, at least one. So a folder and its archive are split alike on every machine,
    and every class is in every split.

    Args:
        files: those without a split count as ``train``.
        shares: by split, from 0 (nothing) up, together below 1.

    >>> files = [ImageFile(f"cat/{n}.png", f"{n}.png", "cat", "", 10, 0) for n in range(10)]
    >>> Counter(file.split for file in split_off(files, {"val": 0.2, "test": 0.1}))
    Counter({'train': 7, 'val': 2, 'test': 1})
    """
    if not all(0 <= share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        given = ", ".join(f"{share:g} for {split}" for split, share in shares.items())
        raise ConfigError(f"the shares held out must be from 0 up and together below 1, got {given}")
    ours: dict[str, list[ImageFile]] = {}
    for file in files:
        if file.split in ("", "train"):
            ours.setdefault(file.label, []).append(file)
    out = [file for file in files if file.split not in ("", "train")]
    for label, members in ours.items():
        members.sort(key=lambda file: _hash(seed, file))
        counts = {split: max(1, round(share * len(members))) for split, share in shares.items() if share}
        if sum(counts.values()) >= len(members):
            raise DataError(
                f"{where}: class `{label}` has {len(members)} images, too few to hold out "
                f"{' and '.join(f'{count} for {split}' for split, count in counts.items())}; add images, or give the "
                "splits as folders"
            )
        goes = [split for split, count in counts.items() for _ in range(count)]
        goes += ["train"] * (len(members) - len(goes))
        out += [replace(file, split=split) for file, split in zip(members, goes, strict=True)]
    return sorted(out, key=_order)


def check_classes(listing: Listing) -> tuple[str, ...]:
    """The classes in alphabetical order, or the error that says what is wrong with them.

    There must be two or more, each with images in every split that there is.

    >>> check_classes(Listing(Path("x"), False, (), frozenset(), ()))
    Traceback (most recent call last):
        ...
    thalweg.errors.DataError: x: expected images (.bmp, .gif, ...) in a folder for each class, got none; check the path
    """
    where, files = listing.path, listing.files
    if not files:
        raise DataError(
            f"{where}: expected images ({', '.join(sorted(EXTENSIONS))}) in a folder for each class, got none; "
            "check the path"
        )
    if not any(file.label for file in files):
        raise DataError(
            f"{where}: expected a folder for each class, got {len(files)} images in none; put the images of each "
            "class in a folder that has its name"
        )
    splits = {file.split for file in files} | set(listing.splits)
    if splits != {""} and "train" not in splits:
        raise DataError(f"{where}: expected a folder `train`, got {', '.join(sorted(splits))} alone; add it")
    counts = Counter((file.split, file.label) for file in files)
    classes = sorted({label for _, label in [*counts, *listing.folders]})
    for split, label in sorted(listing.folders):
        if not counts[split, label]:
            place = f"{split}/{label}" if split else label
            raise DataError(f"{where}: class folder `{place}` has no images; put some there or remove it")
    if len(classes) < 2:
        raise DataError(
            f"{where}: expected two classes or more, a folder for each, got `{classes[0]}` alone; add another class"
        )
    for split in sorted(splits):
        missing = [label for label in classes if not counts[split, label]]
        if missing:
            raise DataError(
                f"{where}: class `{missing[0]}` is missing in `{split}`"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
                + "; every class must be in every split: add its images or remove the class"
            )
    return tuple(classes)


def check_known(files: Iterable[ImageFile], classes: Sequence[str], where: Path) -> None:
    """The error that names a class which is none of those that a model knows.

    >>> check_known([ImageFile("cta/1.png", "1.png", "cta", "", 10, 0)], ["cat", "dog"], Path("x"))
    Traceback (most recent call last):
        ...
    thalweg.errors.DataError: x: class `cta` is none that the model knows; did you mean `cat`?
    """
    for label in sorted({file.label for file in files} - set(classes)):
        raise DataError(f"{where}: class `{label}` is none that the model knows; {nearest(label, classes)}")


def _order(file: ImageFile) -> tuple[int, str, str]:
    return (list(SPLITS).index(file.split) if file.split else -1, file.label, file.name)


def _hash(seed: int, file: ImageFile) -> bytes:
    return hashlib.sha256(f"{seed}:{file.label}/{file.inner}".encode("utf-8", "surrogateescape")).digest()


def _readable(name: str) -> str:
    """The name with its bytes written out where they are no text, as a folder may have them."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _split_of(folder: str) -> str:
    return _SPLIT_OF.get(folder.lower(), "")


def _ignored(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


Found = tuple[list[_Entry], list[tuple[str, ...]], list[tuple[str, str]]]


def _of_folder(path: Path) -> Found:
    entries: list[_Entry] = []
    folders: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for here, below, names in os.walk(path, followlinks=True):
        # Linked folders are followed, but not round in circles.
        real = os.path.realpath(here)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not _ignored([name]))
        relative = os.path.relpath(here, path)
        parts = () if relative == "." else tuple(relative.split(os.sep))
        if parts:
            folders.append(parts)
        for name in names:
            full = os.path.join(here, name)
            if _is_image(name) and not _ignored([name]) and os.path.isfile(full):
                facts = os.stat(full)
                entries.append(_Entry("/".join((*parts, name)), (*parts, name), facts.st_size, facts.st_mtime_ns))
    return entries, folders, []


def _of_zip(path: Path) -> Found:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise DataError(f"{path}: expected a zip archive, got {error}; get or make it again") from None
    entries: list[_Entry] = []
    folders: set[tuple[str, ...]] = set()
    refused: list[tuple[str, str]] = []
    seen: set[str] = set()
    for member in members:
        name = member.filename.replace("\\", "/")
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        outside = name.startswith("/") or ".." in parts or (parts and parts[0].endswith(":"))
        if not parts or (_ignored(parts) and not outside) or not (member.is_dir() or _is_image(name)):
            continue
        if outside or name in seen:
            refused.append((member.filename, "its path leads outside" if outside else "twice in the archive"))
            continue
        seen.add(name)
        depth = len(parts) if member.is_dir() else len(parts) - 1
        folders |= {parts[:n] for n in range(1, depth + 1)}
        if not member.is_dir():
            entries.append(_Entry(member.filename, parts, member.file_size, member.CRC))
    return entries, sorted(folders), refused


def _unwrapped(entries: list[_Entry], folders: list[tuple[str, ...]]) -> tuple[list[_Entry], list[tuple[str, ...]]]:
    """Without the folders that everything lies in."""
    while entries:
        tops = {entry.parts[0] for entry in entries} | {parts[0] for parts in folders}
        shallow = any(len(entry.parts) <= 2 for entry in entries)
        if shallow or len(tops) > 1 or _split_of(next(iter(tops))):
            break
        entries = [replace(entry, parts=entry.parts[1:]) for entry in entries]
        folders = [parts[1:] for parts in folders if len(parts) > 1]
    return entries, folders
