"""Names of files and folders that are made from other names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from thalweg.errors import ConfigError

# Bytes of a name: file systems take 255, and endings and marks of unfinished files come on top.
_LONGEST = 200


def file_name(text: str) -> str:
    """The text as part of a file's name; one that is too long is cut, and a digest keeps it apart from others.

    >>> file_name("test"), len(file_name("x" * 255))
    ('test', 200)
    """
    whole = text.encode("utf-8", "surrogateescape")
    if len(whole) <= _LONGEST:
        return text
    mark = hashlib.sha256(whole).hexdigest()[:8]
    return whole[: _LONGEST - 9].decode("utf-8", "ignore") + "-" + mark


def check_name(name: str, what: str) -> str:
    """The name, which must be fit for a folder.

    >>> check_name("../x", "--name")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: --name must be a plain name of at most 200 bytes, without `/`, got `../x`; ...
    """
    length = len(name.encode("utf-8", "surrogateescape"))
    if name in ("", ".", "..") or length > _LONGEST or any(mark in name for mark in "/\\\0"):
        raise ConfigError(
            f"{what} must be a plain name of at most {_LONGEST} bytes, without `/`, got `{name}`; choose another"
        )
    return name


def evaluation_folder(run: str | Path, name: str | None, data: str) -> Path:
    """Where the evaluation of a run, or of the file of a model, is written; named after its data by default.

    >>> evaluation_folder("runs/names", None, "test").as_posix()
    'runs/names/evaluation/test'
    """
    home = Path(run).parent if Path(run).is_file() else Path(run)
    return home / "evaluation" / (file_name(data) if name is None else check_name(name, "the name of an evaluation"))
