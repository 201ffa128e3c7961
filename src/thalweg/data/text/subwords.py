"""Subwords: pieces of words, learnt from the text that is to be cut (byte-pair encoding or a unigram model)."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from thalweg.errors import ConfigError, MissingDependencyError

SubwordKind = Literal["bpe", "unigram"]
"""``bpe`` joins the most frequent pairs (Sennrich et al., 2016); ``unigram`` keeps the likeliest ones (Kudo, 2018)."""

_SPACE, _UNKNOWN = "▁", "<unk>"


@dataclass(frozen=True, eq=False)
class Subwords:
    """A rule that cuts text into pieces of words; a piece that begins a word begins with ``▁``.

    Punctuation stands alone, and pieces joined again are the text, but for repeated spaces. A character that training
    never saw is its own piece.

    Attributes:
        model: the pieces and how they are found, as the JSON object of the package ``tokenizers``.

    >>> rule = train_subwords(["the cat", "the dog", "the cow"], size=15)
    >>> rule.split("the dot"), rule.join(rule.split("the dot!"))
    (('▁the', '▁', 'd', 'o', 't'), 'the dot!')
    """

    model: dict[str, Any]
    kind: str = field(default="subwords", init=False)
    normalise: str = field(default="nfc", init=False)

    @cached_property
    def _tokenizer(self) -> Any:
        return _package().Tokenizer.from_str(json.dumps(self.model))

    @property
    def pieces(self) -> tuple[str, ...]:
        """All pieces, in the order of their code points."""
        return tuple(sorted(set(self._tokenizer.get_vocab()) - {_UNKNOWN}))

    def split(self, text: str) -> tuple[str, ...]:
        """The pieces of a text, in order."""
        text = " ".join(unicodedata.normalize("NFC", text).split())
        if not text:
            return ()
        found = self._tokenizer.encode(text)
        return tuple(
            text[start:end] or piece if piece == _UNKNOWN else piece
            for piece, (start, end) in zip(found.tokens, found.offsets, strict=True)
        )

    def join(self, symbols: Iterable[str]) -> str:
        """The text that pieces spell."""
        return "".join(symbols).replace(_SPACE, " ").strip()

    def to_json(self) -> dict[str, Any]:
        """The rule as a JSON object."""
        return {"kind": self.kind, "model": self.model}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Subwords:
        """The rule that :meth:`to_json` wrote; anything else is a ``ConfigError``.

        >>> rule = train_subwords(["the cat"], size=9)
        >>> Subwords.from_json(rule.to_json()) == rule
        True
        """
        model = data.get("model")
        if data.get("kind") != "subwords" or not isinstance(model, dict):
            raise ConfigError("subwords must be an object with `kind` and `model`, got something else")
        rule = cls(model)
        try:
            _ = rule._tokenizer
        except MissingDependencyError:
            raise
        except Exception as error:  # what the package raises is no kind of its own
            raise ConfigError(f"subwords must hold a model that tokenizers reads, got an error ({error})") from None
        return rule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subwords) and self.model == other.model

    def __hash__(self) -> int:
        return hash(len(json.dumps(self.model)))

    def __str__(self) -> str:
        return f"subwords ({str(self.model.get('model', {}).get('type', '')).lower()}), NFC"


def train_subwords(texts: Iterable[str], *, size: int = 8000, how: SubwordKind = "bpe") -> Subwords:
    """Learn at most ``size`` pieces from texts; the same texts give the same pieces.

    Time near O(total length) a merge for ``bpe``, some seconds for a million words.

    >>> train_subwords(["low lower lowest"], size=12).split("lowest")[0]
    '▁low'
    """
    package = _package()
    models, trainers = package.models, package.trainers
    common = {"vocab_size": size, "show_progress": False, "special_tokens": [_UNKNOWN]}
    if how == "bpe":
        tokenizer = package.Tokenizer(models.BPE(unk_token=_UNKNOWN))
        trainer = trainers.BpeTrainer(**common)
    elif how == "unigram":
        tokenizer = package.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token=_UNKNOWN, **common)
    else:
        raise ConfigError(f"subwords must be `bpe` or `unigram`, got `{how}`")
    cut = package.pre_tokenizers
    alone = cut.Split(package.Regex(r"[\p{P}\p{S}]"), "isolated")
    tokenizer.pre_tokenizer = cut.Sequence([alone, cut.Metaspace(replacement=_SPACE, prepend_scheme="first")])
    tokenizer.train_from_iterator((" ".join(unicodedata.normalize("NFC", text).split()) for text in texts), trainer)
    return Subwords(json.loads(tokenizer.to_str()))


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MissingDependencyError(
            "subwords need the package tokenizers; run: pip install 'thalweg[pretrained]'"
        ) from None
    return tokenizers
