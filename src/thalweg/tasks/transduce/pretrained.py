"""Pretrained encoder-decoders in a transduction: their tokenizers as codecs, their networks as models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.data import Symbols
from thalweg.data.text.subwords import Subwords
from thalweg.data.text.tokenizer import TokenizerSymbols, load_tokenizer
from thalweg.energies.pretrained.adapting import merged
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.decoding import halves_of, positions_of
from thalweg.energies.pretrained.hub import SAFELY, is_folder, located, package, quietly, reading
from thalweg.energies.pretrained.loading import (
    build_network,
    has_decoder,
    load_network,
    pair_network,
    read_config,
    read_encoder,
    restore_network,
    store_network,
)
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.pretrained.task_parameters import TaskParameters
from thalweg.energies.transformer.checkpoints.files import read_json
from thalweg.errors import CheckpointError, ConfigError
from thalweg.tasks.transduce.codec import Codec

FOLDER = "pretrained"
"""Folder of a run with its best model in transformers' format."""
TARGETS = "target_tokenizer"
"""Folder in it with the tokenizer of targets, where sources have another."""


@dataclass(frozen=True)
class Sides:
    """Both codecs of a model, and what its checkpoint, if it has one, says of its use.

    >>> from thalweg.data import Alphabet, Symbols
    >>> side = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> Sides(side, side).task.search()
    {}
    """

    source: Codec
    target: Codec
    task: TaskParameters = field(default_factory=TaskParameters)


def open_checkpoint(config: PretrainedConfig) -> Sides:
    """The codecs of a checkpoint, with special symbols as its config has them, and its task parameters.

    >>> open_checkpoint(PretrainedConfig(checkpoint="./absent"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    name = config.named()
    told = read_config(name)
    with reading(name):  # whatever its files hold
        return _sides(name, told, config)


def _sides(name: str, told: Any, config: PretrainedConfig) -> Sides:
    generation = _generation(name)
    paired = not has_decoder(told, config)
    halves = (told, read_encoder(config.decoder or name)) if paired else halves_of(told)
    first, second = _tokenizers(name, config)
    ids = _specials(told, generation, second, config, paired=paired)
    for tokenizer, half, special in ((first, halves[0], None), (second, halves[1], ids)):
        _check_fits(config, tokenizer, half, special)
    if config.tokenizer:
        _check_kin(name, config.tokenizer, first)
    task = TaskParameters.read(told.to_dict(), generation, config.task_params)
    prefix = task.prefix if config.source_prefix is None else config.source_prefix
    own = {**ids, "pad": _pad(first, halves[0], ids["pad"])}
    reach = [{"limit": positions_of(half), "truncate": config.truncate} for half in halves]
    source = Codec.of_tokenizer(first, **own, side="source", prefix=prefix, **reach[0])
    return Sides(source, Codec.of_tokenizer(second, **ids, side="target", **reach[1]), task)


def _tokenizers(name: str, config: PretrainedConfig) -> tuple[Any, Any]:
    """Those of source and target, mostly the same; what :func:`save_network` wrote may hold two."""
    languages = {"source_language": config.source_language, "target_language": config.target_language}
    first = load_tokenizer(config.tokenizer or name, **languages)
    if getattr(first, "separate_vocabs", False):
        raise ConfigError(f"{name}: expected one vocabulary for both sides, got two; no such model is read")
    own = Path(name) / TARGETS
    other = str(own) if own.is_dir() and not (config.decoder or config.tokenizer) else config.decoder or name
    return first, load_tokenizer(other) if other != name else first


def _check_kin(name: str, other: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose pieces have other numbers than in the checkpoint's own, where it has one."""
    try:
        own = load_tokenizer(name).get_vocab()
    except CheckpointError:
        return
    pieces = tokenizer.get_vocab()
    alike = sum(own.get(piece) == number for piece, number in pieces.items())
    if alike * 2 < len(pieces):
        raise CheckpointError(
            f"{other}: expected a tokenizer with the pieces of {name}, got {len(pieces) - alike:,} of {len(pieces):,} "
            "other ones; it is of another model: leave model.tokenizer out"
        )


def _generation(name: str) -> dict[str, Any]:
    if is_folder(name):
        path = Path(name) / "generation_config.json"
        return read_json(path) if path.is_file() else {}
    with quietly():
        try:
            return package().GenerationConfig.from_pretrained(located(name), **SAFELY).to_dict()
        except (OSError, ValueError):
            return {}


def _specials(
    told: Any, generation: Mapping[str, Any], tokenizer: Any, config: PretrainedConfig, *, paired: bool
) -> dict[str, int]:
    """Numbers of the special symbols of targets: the model's config's, else its tokenizer's."""

    def number(key: str, *others: Any) -> int:
        found = generation.get(key) if generation.get(key) is not None else getattr(told, key, None)
        found = found[0] if isinstance(found, (list, tuple)) else found
        for other in (found, *others):
            if other is not None:
                return int(other)
        raise CheckpointError(f"{config.checkpoint}: expected config.json to hold `{key}`, got none; set it there")

    if paired:  # a BERT has no decoder of its own: a target begins and ends as its sentences do
        ends = {"bos": tokenizer.cls_token_id, "eos": tokenizer.sep_token_id, "pad": tokenizer.pad_token_id}
        if None in ends.values():
            raise CheckpointError(
                f"{config.checkpoint}: expected a tokenizer with begin, end and padding, got "
                f"{', '.join(name for name, value in ends.items() if value is None)} without a number"
            )
    else:
        start = number("decoder_start_token_id", tokenizer.bos_token_id, tokenizer.cls_token_id)
        if config.target_language and told.model_type == "mbart":
            start = _start_of_language(tokenizer, config.target_language, start)
        ends = {
            "bos": start,
            "eos": number("eos_token_id", tokenizer.eos_token_id, tokenizer.sep_token_id),
            "pad": number("pad_token_id", tokenizer.pad_token_id),
        }
    unk = tokenizer.unk_token_id
    return {"unk": ends["pad"] if unk is None else unk, **ends}


def _start_of_language(tokenizer: Any, language: str, start: int) -> int:
    """mBART's decoder starts from the language; that of mBART-50 from the end symbol, the language being first."""
    return start if start == tokenizer.eos_token_id else tokenizer.convert_tokens_to_ids(language)


def _pad(tokenizer: Any, half: Any, other: int) -> int:
    for found in (getattr(half, "pad_token_id", None), tokenizer.pad_token_id):
        if found is not None:
            return int(found)
    return other


def _check_fits(config: PretrainedConfig, tokenizer: Any, half: Any, ids: Mapping[str, int] | None) -> None:
    """Refuse a tokenizer with more pieces than the model has rows for, or with other special symbols.

    Args:
        ids: numbers of the special symbols; None for a source.
    """
    name = config.tokenizer or config.named()
    remedy = "it is of another model: " + (
        "leave model.tokenizer out" if config.tokenizer else "give its own by model.tokenizer"
    )
    size = getattr(half, "vocab_size", None)
    most = max(tokenizer.get_vocab().values())
    if isinstance(size, int) and most >= size:
        raise CheckpointError(
            f"{name}: expected a tokenizer of at most {size:,} pieces, as the model's vocab_size, got number {most:,}; "
            f"{remedy}"
        )
    for key, number in (ids or {}).items():
        if isinstance(size, int) and not 0 <= number < size:
            raise CheckpointError(
                f"{name}: expected special symbols among the model's {size:,} rows, got {key} = {number}; correct "
                "config.json or generation_config.json"
            )
    for key in ("pad", "eos"):
        theirs = getattr(tokenizer, f"{key}_token_id")
        ours = (ids or {}).get(key)
        if theirs is not None and ours is not None and theirs != ours:
            raise CheckpointError(
                f"{name}: expected the model's own tokenizer, with {key} = {ours}, got one with {key} = {theirs}; "
                f"{remedy}"
            )


def build_pretrained(config: PretrainedConfig, source: Codec, target: Codec, masked: Path | None = None) -> Pretrained:
    """A model of a checkpoint, or of an architecture with fresh weights, for two codecs.

    Args:
        masked: folder of an encoder that masked-language-model training has begun, of which a pair is made.
    """
    if not config.fresh:
        network = load_network(config)
        _rule(network, config, target)
    elif masked is not None:
        network = pair_network(str(masked), str(masked), share=config.share_weights)
    else:
        network = build_network(config, len(target.alphabet), target.special)
    _settle(network, source, target)
    return Pretrained(network, config)


def _rule(network: Any, config: PretrainedConfig, target: Codec) -> None:
    """What the task's parameters and the language say of single symbols, as rules of the network's own."""
    told = network.generation_config
    task = TaskParameters.read(network.config.to_dict(), told.to_dict(), config.task_params)
    if task.no_repeat:
        told.no_repeat_ngram_size = task.no_repeat
    if config.target_language and isinstance(target.symbols, TokenizerSymbols):
        language = target.symbols.tokenizer.convert_tokens_to_ids(config.target_language)
        if language != target.alphabet.bos:  # mBART-50 says its language first rather than starting from it
            told.forced_bos_token_id = language


def _settle(network: Any, source: Codec, target: Codec) -> None:
    """The special symbols of the codecs in the configs of a network, where its own leave them open."""
    told = {"decoder_start_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad"}
    for key, name in told.items():
        value = target.special[name]
        setattr(network.config, key, value)
        setattr(network.generation_config, key, value)
    if source.special["pad"] != target.special["pad"] and hasattr(network.config, "encoder"):
        network.config.encoder.pad_token_id = source.special["pad"]


def restore_pretrained(config: PretrainedConfig, stored: Mapping[str, Any]) -> Pretrained:
    """A model of the settings that a run has stored, with whatever weights it starts with."""
    return Pretrained(restore_network(stored), dataclasses.replace(config, freeze=(), dropout=None))


def save_network(model: Pretrained, source: Codec, target: Codec, folder: Path) -> None:
    """Write a model and its tokenizer as transformers reads them: ``from_pretrained(folder)``; adapters are merged."""
    network = merged(model.network).cpu()
    state = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
    tied = set(getattr(network, "all_tied_weights_keys", None) or ())
    state = {name: value for name, value in state.items() if name not in tied}
    try:
        with quietly():
            network.save_pretrained(folder, state_dict=state)
            for side, codec in (("", source), (TARGETS, target)):
                if side and (codec.symbols is source.symbols or _one_tokenizer(source, target)):
                    continue
                as_tokenizer(codec).save_pretrained(folder / side if side else folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror or error}); choose another place") from None


def _one_tokenizer(source: Codec, target: Codec) -> bool:
    one, other = source.symbols, target.symbols
    if isinstance(one, TokenizerSymbols) and isinstance(other, TokenizerSymbols):
        return one.tokenizer is other.tokenizer
    return one == other and source.alphabet == target.alphabet


def stored(model: Pretrained) -> dict[str, Any]:
    """A model's settings as a run stores them."""
    return store_network(model.network)


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
