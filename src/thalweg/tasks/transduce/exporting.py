"""Our codecs as tokenizers of Hugging Face, so that a model that was trained here is used there."""

from __future__ import annotations

import json
from typing import Any

from thalweg.data import Symbols
from thalweg.data.text.subwords import Subwords
from thalweg.data.text.tokenizer import TokenizerSymbols
from thalweg.energies.pretrained.hub import package
from thalweg.tasks.transduce.codec import Codec

__all__ = ["as_tokenizer"]

_SPECIAL = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}


def as_tokenizer(codec: Codec) -> Any:
    """A transformers tokenizer that gives the same numbers as a codec; its own where it is one's.

    Graphemes of several characters are cut as characters there: no tokenizer knows them.

    >>> from thalweg.data import Alphabet
    >>> codec = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> as_tokenizer(codec)("cab")["input_ids"], codec.encode("cab")
    ([6, 4, 5], (6, 4, 5))
    """
    if isinstance(codec.symbols, TokenizerSymbols):
        return codec.symbols.tokenizer
    tokenizers = package("tokenizers")
    names = {codec.special[key]: name for key, name in _SPECIAL.items()}
    numbers = {names.get(n, piece): n for n, piece in enumerate(codec.alphabet.names)}
    if isinstance(codec.symbols, Subwords):
        tokenizer = _pieces(tokenizers, codec.symbols, numbers)
    else:
        tokenizer = _words(tokenizers, codec.symbols, numbers)
    special = {f"{key}_token": name for key, name in _SPECIAL.items()}
    return package().PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _pieces(tokenizers: Any, symbols: Subwords, numbers: dict[str, int]) -> Any:
    model = json.loads(json.dumps(symbols.model))
    inner = model["model"]
    if inner["type"] == "Unigram":
        scores = dict(inner["vocab"])
        worst = min(scores.values())
        inner["vocab"] = [[piece, scores.get(piece, worst - 10)] for piece in sorted(numbers, key=lambda p: numbers[p])]
        inner["unk_id"] = numbers[_SPECIAL["unk"]]
    else:
        inner["vocab"] = numbers
    model["added_tokens"] = []
    model["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    model["normalizer"] = {"type": "NFC"}
    return tokenizers.Tokenizer.from_str(json.dumps(model))


def _words(tokenizers: Any, symbols: Symbols, numbers: dict[str, int]) -> Any:
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.WordLevel(numbers, unk_token=_SPECIAL["unk"]))
    if symbols.normalise != "none":
        tokenizer.normalizer = normalizers.NFC() if symbols.normalise == "nfc" else normalizers.NFD()
    if symbols.kind == "spaced":
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return tokenizer
