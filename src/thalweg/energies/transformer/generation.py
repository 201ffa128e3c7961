"""The rules of a Hugging Face generation config: which symbols may stand where, and how its authors search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.search.constraints import NoRepeat, Without

# What `generate` may be told and a search here is told otherwise, or not at all, with the values that do nothing.
_NOT_TAKEN = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "diversity_penalty": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1, 1.0),
    "early_stopping": (None, False, "never"),
    "do_sample": (None, False),
}


@dataclass(frozen=True, kw_only=True)
class GenerationRules:
    """What ``generation_config.json`` says about which symbols may stand where, and how its authors search.

    Attributes:
        forbidden: symbols that never stand anywhere; words: several symbols that never stand in a row.
        first: symbol that every sequence begins with, at no cost; None where the model chooses.
        last: symbol forced at the length limit, at no cost, where the model's ``last_step`` is set.
        not_first: symbols that never stand first (second, where the first is forced).
        no_repeat: n, where no n-gram may come twice; 0 where they may.
        width, length_penalty, max_length, min_length: of the search; lengths count generated symbols, eos too.
        not_taken: settings in force there that have no counterpart here, such as ``repetition_penalty``.

    >>> GenerationRules(width=5).settings()
    {'width': 5, 'length_penalty': 1.0, 'max_length': 20}
    """

    forbidden: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    first: int | None = None
    last: int | None = None
    not_first: tuple[int, ...] = ()
    no_repeat: int = 0
    width: int = 1
    length_penalty: float = 1.0
    max_length: int = 20
    min_length: int = 0
    not_taken: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Arguments for :func:`thalweg.inference.beam_search`."""
        least = {"min_length": self.min_length} if self.min_length > 1 else {}
        return {"width": self.width, "length_penalty": self.length_penalty, "max_length": self.max_length, **least}

    @property
    def look_back(self) -> bool:
        """Whether what may follow depends on more than the number of symbols."""
        return bool(self.words or self.no_repeat)

    def bind(self, last_step: int | None = None) -> bool:
        """Whether they change what a model gives at any step, eos being forced at ``last_step``."""
        forced = self.first is not None or (self.last is not None and last_step is not None)
        return forced or bool(self.forbidden or self.not_first) or self.look_back

    def check(self, vocab_size: int) -> None:
        """Raise :class:`ConfigError` unless every symbol in the rules is one of the model's 0 ... V - 1.

        >>> GenerationRules(first=3).check(4)
        """
        ones = [symbol for symbol in (self.first, self.last) if symbol is not None]
        for symbol in (*ones, *self.forbidden, *self.not_first, *(symbol for word in self.words for symbol in word)):
            if not 0 <= symbol < vocab_size:
                raise ConfigError(
                    f"generation_config.json: rules must be about symbols 0 ... {vocab_size - 1}, got {symbol}; "
                    "take it out there"
                )

    def apply(self, log_probs: Tensor, step: int, last_step: int | None, said: Tensor | None) -> Tensor:
        """What may be the ``step``-th symbol (from 1): ``log_probs (R, V)`` with the rules kept.

        Forced symbols get 0 and all others -inf; barred ones get -inf and their mass goes to nobody. ``said (R, step)``
        is bos and the symbols after it, looked at where :attr:`look_back`. The argument is left as it is.

        >>> rules = GenerationRules(forbidden=(0,), no_repeat=1)
        >>> rules.apply(torch.zeros(1, 4), 2, None, torch.tensor([[1, 2]]))
        tensor([[-inf, -inf, -inf, 0.]])
        """
        if step == last_step and self.last is not None:
            return _certain(log_probs, self.last)
        if step == 1 and self.first is not None:
            return _certain(log_probs, self.first)
        begins = step == (1 if self.first is None else 2)
        barred = (*self.forbidden, *(self.not_first if begins else ()))
        if barred:
            log_probs = log_probs.index_fill(1, torch.tensor(barred, device=log_probs.device), -math.inf)
        if self.look_back:
            assert said is not None
            rules = (NoRepeat(self.no_repeat, vocab_size=log_probs.size(1)),) if self.no_repeat else ()
            if self.words:
                rules = (*rules, Without(self.words, vocab_size=log_probs.size(1)))
            for rule in rules:
                log_probs = log_probs.masked_fill(~rule(said, said[:, 0]), -math.inf)
        return log_probs


def _certain(log_probs: Tensor, symbol: int) -> Tensor:
    forced = torch.full_like(log_probs, -math.inf)
    forced[:, symbol] = 0.0
    return forced


def one_symbol(told: Mapping[str, Any], key: str) -> int:
    """The symbol that a config gives under this key, alone or in a list of one.

    >>> one_symbol({"eos_token_id": [2]}, "eos_token_id")
    2
    """
    value = told.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"config.json: `{key}` must be one symbol, got {value!r}; set it there")
    return value


def read_rules(told: Mapping[str, Any], eos: int) -> GenerationRules:
    """The rules of a config as :class:`GenerationRules`.

    >>> read_rules({"num_beams": 4, "max_length": 31, "no_repeat_ngram_size": 3}, eos=0).no_repeat
    3
    """
    words = [tuple(word) for word in told.get("bad_words_ids") or [] if list(word) != [eos]]
    if not all(words):
        raise ConfigError("generation_config.json: `bad_words_ids` must hold no empty word, got one; take it out")
    forbidden = {word[0] for word in words if len(word) == 1} | set(told.get("suppress_tokens") or [])
    last = told.get("forced_eos_token_id")
    if last is not None:
        last = one_symbol(told, "forced_eos_token_id")
    longest = told.get("max_new_tokens") or (told.get("max_length") or 21) - 1
    penalty = told.get("length_penalty")
    # `min_length` counts the start symbol, `min_new_tokens` counts no eos: both bar eos before the same step.
    least = max(told.get("min_length") or 0, (told.get("min_new_tokens") or -1) + 1)
    return GenerationRules(
        forbidden=tuple(sorted(forbidden)),
        words=tuple(word for word in words if len(word) > 1),
        first=told.get("forced_bos_token_id"),
        last=last,
        not_first=tuple(told.get("begin_suppress_tokens") or ()),
        no_repeat=told.get("no_repeat_ngram_size") or 0,
        width=told.get("num_beams") or 1,
        length_penalty=1.0 if penalty is None else float(penalty),
        max_length=max(longest, 1),
        min_length=least,
        not_taken=tuple(key for key, nothing in _NOT_TAKEN.items() if told.get(key) not in nothing),
    )
