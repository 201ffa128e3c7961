"""Pairs by the name that people give them: a file, or ``NAME:SPLIT`` of a data set."""

from __future__ import annotations

import os
from pathlib import Path

from thalweg.data.datasets import load_dataset
from thalweg.data.text.readers import PairFile, read_pairs
from thalweg.errors import DataError


def open_pairs(spec: str, root: Path | None = None, *, features: bool | None = False) -> PairFile:
    """Pairs of a TSV file, or of a data set named ``NAME:SPLIT``.

    Args:
        root: folder of known data sets.
        features: whether there is a third column of tags; None means just when the first line has one.

    >>> len(open_pairs("cmudict:dev")) > 1000
    True
    """
    name, colon, split = spec.rpartition(":")
    if colon and not os.path.exists(spec) and os.sep not in split and "\\" not in split and len(name) > 1:
        if features:
            raise DataError(
                f"{spec}: expected pairs with tags, which this run reads, got a data set without; give a file"
            )
        return load_dataset(name, split, root=root)
    return read_pairs(spec, features=features)
