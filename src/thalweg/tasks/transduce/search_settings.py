"""How answers are searched: one frozen, checked set of settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thalweg.errors import ConfigError
from thalweg.limits import ANSWERS, COMPARED, COUNT, LENGTH, SEED, check_choices, check_numbers, check_shares

SearchName = Literal["greedy", "beam", "diverse", "nucleus", "typical", "min-p", "sample", "stochastic", "exact", "mbr"]
"""The searches; see :class:`SearchConfig`."""

SAMPLING = ("nucleus", "typical", "min-p", "sample", "stochastic", "mbr")
"""Searches that draw random numbers."""

UNCONSTRAINED = ("stochastic",)
"""Searches that take neither prefix nor lexicon nor least length."""

# Of lengths: a float32 holds the tenth power of some thousands.
_EXPONENT = 10

# Of temperatures: a float32 holds scores divided by anything between this and its inverse.
_HOTTEST = 1e6


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How answers are searched.

    Attributes:
        search: ``greedy`` takes the best symbol at each step; ``beam`` keeps the ``width`` best beginnings;
            ``diverse`` is a beam in ``groups`` that avoid one another's symbols; ``exact`` proves its answer the best
            of all; ``sample`` draws, ``nucleus``, ``typical`` and ``min-p`` after cutting off improbable symbols;
            ``stochastic`` draws distinct answers; ``mbr`` takes, of ``samples`` draws, those nearest to the others.
        width: beam width.
        length_penalty: exponent of the length that divides a finished hypothesis' score; 0 is none.
        max_length: symbols at most, end included; 0 means twice the longest training target plus 10.
        min_length: symbols at least, end included.
        groups, diversity: of ``diverse``; groups 0 means one for each of the ``width`` hypotheses.
        temperature: of sampling. top_k: symbols that sampling keeps; 0 is all.
        top_p: mass that ``nucleus`` keeps. typical: mass that ``typical`` keeps. min_p: ``min-p`` keeps symbols with
            at least this share of the best symbol's probability.
        sampling_seed: of sampling.
        max_expansions: steps that ``exact`` may take for each source before it gives the best found; 0 is no limit.
        samples: drawn by ``mbr``.
        lexicon: a file, one answer a line: nothing else is given. prefix: text that every answer begins with.

    >>> SearchConfig(search="beam").width
    5
    """

    search: SearchName = "greedy"
    width: int = 5
    length_penalty: float = 0.0
    max_length: int = 0
    min_length: int = 0
    groups: int = 0
    diversity: float = 0.5
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.9
    typical: float = 0.95
    min_p: float = 0.05
    sampling_seed: int = 0
    max_expansions: int = 10_000
    samples: int = 32
    lexicon: str = ""
    prefix: str = ""

    def __post_init__(self) -> None:
        check_choices(self, "search")
        check_numbers(self, "search", 1, ANSWERS, "width")
        check_numbers(self, "search", 1, COMPARED, "samples")
        check_numbers(self, "search", 0, LENGTH, "max_length", "min_length")
        check_numbers(self, "search", 0, COUNT, "top_k", "groups", "max_expansions")
        check_numbers(self, "search", 0, SEED, "sampling_seed")
        check_numbers(self, "search", 0, math.inf, "diversity", whole=False)
        check_shares(self, "search", "(0, 1]", "top_p", "typical", "min_p")
        if not 1 / _HOTTEST <= self.temperature <= _HOTTEST:  # NaN too
            raise ConfigError(
                f"search.temperature must be positive, got {self.temperature}; {1 / _HOTTEST:g} to {_HOTTEST:g} can be"
            )
        if not abs(self.length_penalty) <= _EXPONENT:  # NaN too
            raise ConfigError(
                f"search.length_penalty must be from -{_EXPONENT} to {_EXPONENT}, got {self.length_penalty}; 1 is usual"
            )
        self._check_together()

    def _check_together(self) -> None:
        if self.max_length and self.min_length > self.max_length:
            raise ConfigError(
                f"search.min_length must be at most search.max_length = {self.max_length}, got {self.min_length}"
            )
        if self.groups > self.width:
            raise ConfigError(f"search.groups must be at most search.width = {self.width}, got {self.groups}")
        if self.groups and self.width % self.groups:
            raise ConfigError(f"search.groups must divide search.width = {self.width}, got {self.groups}")
        for name in ("lexicon", "prefix", "min_length"):
            if getattr(self, name) and self.search in UNCONSTRAINED:
                raise ConfigError(f"search.{name} does not go with `{self.search}` search; use another such as `beam`")

    @property
    def draws(self) -> bool:
        """Whether the answers are random.

        >>> SearchConfig(search="typical").draws, SearchConfig(search="exact").draws
        (True, False)
        """
        return self.search in SAMPLING

    @property
    def proves(self) -> bool:
        """Whether the search can tell that its first answer is the most probable of all.

        >>> SearchConfig(search="exact").proves, SearchConfig(search="greedy").proves
        (True, False)
        """
        return self.search in ("beam", "exact")
