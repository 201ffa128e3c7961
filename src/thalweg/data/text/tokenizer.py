"""Tokenizers of Hugging Face as a way of cutting text and numbering its pieces, beside symbols and alphabets."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thalweg.data.text.alphabet import Alphabet
from thalweg.energies.pretrained.hub import SAFELY, check_place, located, package, quietly, reading
from thalweg.errors import CheckpointError, ConfigError, DataError


class Vocabulary(Alphabet):
    """The pieces of a tokenizer and their numbers, wherever the special ones stand.

    Args:
        pieces: ``pieces[i]`` has the number i; an empty one is a gap.
        unk, pad, bos, eos: numbers of the special symbols, as the model's config has them.
        special: numbers that stand for no text.

    >>> vocabulary = Vocabulary(["<pad>", "</s>", "<unk>", "▁a", "b"], unk=2, pad=0, bos=0, eos=1, special=(0, 1))
    >>> vocabulary.encode(["▁a", "b", "c"]), vocabulary.decode([0, 3, 4, 1, 0]), len(vocabulary)
    ([3, 4, 2], ('▁a', 'b'), 5)
    """

    def __init__(
        self, pieces: Sequence[str], *, unk: int, pad: int, bos: int, eos: int, special: Collection[int] = ()
    ) -> None:
        self._symbols = tuple(pieces)
        self._ids = {piece: number for number, piece in enumerate(self._symbols) if piece}
        self._special = frozenset(special)
        self.unk, self.pad, self.bos, self.eos = unk, pad, bos, eos

    @property
    def names(self) -> tuple[str, ...]:
        """What is shown for each number."""
        return self._symbols

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """The number of each piece, that of the unknown one for what is none."""
        return [self._ids.get(symbol, self.unk) for symbol in symbols]

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """The pieces of ``ids`` up to the first end; special ones, -1 and numbers without a piece are passed over."""
        result = []
        for number in map(int, ids):
            if number == self.eos:
                break
            if 0 <= number < len(self._symbols) and number not in self._special and self._symbols[number]:
                result.append(self._symbols[number])
        return tuple(result)

    def unknown(self, symbols: Iterable[str]) -> tuple[str, ...]:
        """None: a tokenizer reads any text, what it does not know as its unknown piece."""
        return ()

    def __len__(self) -> int:
        return len(self._symbols)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} pieces)"


@dataclass(frozen=True, eq=False)
class TokenizerSymbols:
    """How a tokenizer cuts one side of the pairs.

    A source has the tokenizer's special pieces in it (``</s>``, ``[CLS]``, a language); a target those before its text
    that are not the one the decoder starts from, and no end, which batches add.

    Attributes:
        tokenizer: of transformers.
        side: ``source`` or ``target``; prefix: text before every source.
        start, end: numbers of the symbols that start the decoder and end a target.
        limit: pieces that the model has positions for; None where any number will do.
        truncate: whether longer texts are cut; else they are a :class:`~thalweg.errors.DataError`.
    """

    tokenizer: Any
    side: Literal["source", "target"]
    start: int
    end: int
    prefix: str = ""
    limit: int | None = None
    truncate: bool = False
    kind: str = field(default="tokenizer", init=False)
    normalise: str = field(default="none", init=False)

    def split(self, text: str) -> tuple[str, ...]:
        """The pieces of a text; an empty one has none."""
        if not text.strip():
            return ()
        if self.side == "source":
            ids = self._ids(lambda **cut: self.tokenizer(self.prefix + text, **cut), text)
        else:
            ids = self._ids(lambda **cut: self.tokenizer(text_target=text, **cut), text)
            ids = ids[: len(ids) - 1 - ids[::-1].index(self.end)] if self.end in ids else ids
            ids = ids[1:] if ids and ids[0] == self.start else ids
            if self.end in ids:
                end = self.tokenizer.convert_ids_to_tokens(self.end)
                raise DataError(f"expected a target without `{end}`, which ends it, got `{_cut(text)}`; take it out")
        return tuple(self.tokenizer.convert_ids_to_tokens(ids))

    def _ids(self, call: Any, text: str) -> list[int]:
        limit = self.limit
        with quietly():
            ids = list(call()["input_ids"])
            if limit is None or len(ids) <= limit:
                return ids
            if self.truncate:
                return list(call(truncation=True, max_length=limit)["input_ids"])
        raise DataError(
            f"expected a {self.side} of at most {limit} pieces, as far as the model's positions reach, got {len(ids)} "
            f"(`{_cut(text)}`); shorten or split it, or train with model.truncate=true"
        )

    def join(self, symbols: Iterable[str]) -> str:
        """The text that pieces spell."""
        ids = self.tokenizer.convert_tokens_to_ids(list(symbols))
        with quietly():
            return self.tokenizer.decode(ids, skip_special_tokens=True).strip() if ids else ""

    def to_json(self) -> dict[str, Any]:
        """All but the tokenizer as a JSON object."""
        keys = ("kind", "side", "start", "end", "prefix", "limit", "truncate")
        return {key: getattr(self, key) for key in keys}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizerSymbols) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.side, self.start, self.end))

    def __str__(self) -> str:
        prefix = f", after `{self.prefix}`" if self.prefix else ""
        return f"{type(self.tokenizer).__name__}{prefix}"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]} ..."


def load_tokenizer(name: str, *, source_language: str = "", target_language: str = "") -> Any:
    """The tokenizer of a checkpoint folder or hub name.

    Args:
        source_language, target_language: codes, of tokenizers that take them.

    >>> load_tokenizer("./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    check_place(name, tokenizer=True)
    with reading(name, "a tokenizer"):
        tokenizer = package().AutoTokenizer.from_pretrained(located(name), **SAFELY)
    # Where its files are absent transformers makes one of special pieces alone, perhaps with a mark of white space.
    if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)) < 2:
        raise CheckpointError(
            f"{name}: expected a tokenizer, got one without a vocabulary; download its files beside config.json, or "
            "name the folder that has them by model.tokenizer"
        )
    for attribute, code in (("src_lang", source_language), ("tgt_lang", target_language)):
        if not code:
            continue
        if not hasattr(tokenizer, attribute):
            kind = type(tokenizer).__name__
            raise ConfigError(
                f"{name}: model.source_language and target_language do not go with {kind}; leave them out"
            )
        if code not in tokenizer.get_vocab():
            raise ConfigError(f"{name}: expected a language that the tokenizer knows, got `{code}`; check its list")
        setattr(tokenizer, attribute, code)
    return tokenizer


def pack_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The files of a tokenizer as JSON values: text as it is, bytes in base 64 after ``base64:``."""
    with tempfile.TemporaryDirectory() as folder:
        with quietly():
            tokenizer.save_pretrained(folder)
        return {path.name: _text(path.read_bytes()) for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def unpack_tokenizer(files: Mapping[str, str]) -> Any:
    """The tokenizer that :func:`pack_tokenizer` took apart."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if Path(name).name != name:
                raise ValueError(f"a tokenizer's file must be a plain name, got {name[:40]}")
            data = base64.b64decode(text[7:]) if text.startswith("base64:") else text.encode()
            (Path(folder) / name).write_bytes(data)
        with reading(folder, "a tokenizer"):
            return package().AutoTokenizer.from_pretrained(folder, **SAFELY)
