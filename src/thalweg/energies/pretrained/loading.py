"""Networks of Hugging Face: from a checkpoint, from an architecture's settings, or as a run has stored them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.decoding import positions_of
from thalweg.energies.pretrained.hub import SAFELY, WEIGHTS, check_place, located, package, quietly, reading
from thalweg.errors import CheckpointError, ConfigError, ThalwegError, nearest
from thalweg.limits import check_choice, within_memory

_FRESH = ("t5", "mt5", "bart", "mbart", "marian", "bert")
# How each architecture calls its dropout.
_DROPOUT = ("dropout_rate", "dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")


def read_config(name: str) -> Any:
    """The config of a checkpoint folder or hub name, as transformers has it.

    >>> read_config("./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    check_place(name, pickled=True)
    with reading(name):
        return package().AutoConfig.from_pretrained(located(name), **SAFELY)


def read_encoder(name: str) -> Any:
    """The config of a BERT-like encoder, of which a decoder can be made.

    >>> read_encoder("./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    told = read_config(name)
    if not hasattr(told, "add_cross_attention") or getattr(told, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: expected a BERT-like encoder, got {told.model_type}; no decoder is made of it")
    return told


def load_network(config: PretrainedConfig) -> nn.Module:
    """The encoder-decoder of a checkpoint, float32; a BERT-like encoder becomes a pair.

    Weights come from safetensors, or from a pickle that was asked for. What the file lacks is an error, except the
    cross-attention of a pair, which starts at random.

    >>> load_network(PretrainedConfig(checkpoint="./absent"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    name, pickled = config.named(), config.weights == "pickle"
    check_place(name, pickled=pickled)
    told = read_config(name)
    if not has_decoder(told, config):
        return pair_network(name, config.decoder or name, share=config.share_weights, pickled=pickled)
    return _read(package().AutoModelForSeq2SeqLM, name, told.model_type, pickled=pickled)


def has_decoder(told: Any, config: PretrainedConfig) -> bool:
    """Whether a checkpoint is an encoder-decoder by its config; settings that go with an encoder are then refused.

    >>> from types import SimpleNamespace
    >>> has_decoder(SimpleNamespace(is_encoder_decoder=True), PretrainedConfig(checkpoint="t5", decoder="bert"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model.decoder goes with an encoder, got t5, which has a decoder; leave it out
    """
    if not getattr(told, "is_encoder_decoder", False):
        return False
    for key in ("decoder", "share_weights"):
        if getattr(config, key):
            raise ConfigError(
                f"model.{key} goes with an encoder, got {config.checkpoint}, which has a decoder; leave it out"
            )
    return True


def _read(kind: Any, name: str, what: str, *, pickled: bool, fresh: tuple[str, ...] = (), **more: Any) -> Any:
    """A network of transformers with all the weights of a checkpoint, float32.

    Args:
        kind: the class that reads it; more: what it is told; what: the model's type, for the error.
        fresh: parts of names of parameters that the checkpoint need not have.
    """
    with reading(name, "pickled weights" if pickled else WEIGHTS):
        network, info = kind.from_pretrained(
            located(name),
            use_safetensors=not pickled,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below, in words of ours
            **more,
            **SAFELY,
        )
    if other := sorted(info["mismatched_keys"]):
        key, got, expected = other[0]
        raise CheckpointError(
            f"{name}: expected {key} to have the shape {tuple(expected)} of config.json, got {tuple(got)}; the weights "
            "are of another model"
        )
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in fresh))
    if missing:
        raise CheckpointError(
            f"{name}: expected all weights of {what}, got none for {missing[0]} and {len(missing) - 1} others; the "
            "weights are of another model than config.json"
        )
    # Heads of other tasks may be left; a layer may not.
    if left := sorted(key for key in info["unexpected_keys"] if _LAYER.search(key)):
        raise CheckpointError(
            f"{name}: expected the weights of {what} and no more, got {left[0]} and {len(left) - 1} others; the "
            "weights are of another model than config.json"
        )
    return network


_LAYER = re.compile(r"\b(?:layers?|block)\.\d+\.")


def pair_network(encoder: str, decoder: str, *, share: bool = False, pickled: bool = False) -> nn.Module:
    """Two BERT-like encoders as an encoder-decoder, cross-attention added (Rothe et al., 2020).

    What they need not hold, and what then starts at random: cross-attention, the output layer, the pooler, which
    nothing reads.

    Args:
        encoder, decoder: folders or hub names, the same or two.
        share: one set of weights for both, all but the cross-attention and the output layer.

    >>> pair_network("./absent", "./absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: ./absent: expected a checkpoint folder, got no such folder; check the path
    """
    for name in (encoder, decoder):
        check_place(name, pickled=pickled)
    transformers, one, told = package(), read_config(encoder), read_encoder(decoder)
    reads = {key: False for key in _AS_DECODER if hasattr(one, key)}
    first = _read(transformers.AutoModel, encoder, one.model_type, pickled=pickled, fresh=("pooler.",), **reads)
    parts = ("crossattention", "cls.", "lm_head.", "predictions.", "pooler.")
    second = _read(
        transformers.AutoModelForCausalLM, decoder, told.model_type, pickled=pickled, fresh=parts, **_AS_DECODER
    )
    with reading(decoder):
        network = transformers.EncoderDecoderModel(encoder=first, decoder=second)
    if share:
        share_halves(network)
    return network


def share_halves(network: Any) -> None:
    """Give the decoder of a pair the encoder's own weights, wherever both have one of that name and shape."""
    inner = network.decoder.base_model
    theirs, ours = dict(network.encoder.named_parameters()), dict(inner.named_parameters())
    common = [name for name, value in theirs.items() if name in ours and ours[name].shape == value.shape]
    layers = [name for name in common if "layer" in name]
    if not layers:
        raise ConfigError("model.share_weights needs two encoders of one shape, got different ones; leave it out")
    for name in common:
        home, _, leaf = name.rpartition(".")
        setattr(inner.get_submodule(home), leaf, theirs[name])
    network.decoder.tie_weights()


def build_network(config: PretrainedConfig, size: int, special: Mapping[str, int]) -> nn.Module:
    """A network of ``config.architecture`` with fresh weights for ``size`` symbols of both sides.

    Args:
        special: numbers of ``unk``, ``pad``, ``bos`` and ``eos``.

    >>> build_network(PretrainedConfig(architecture="t6"), 9, {"unk": 0, "pad": 1, "bos": 2, "eos": 3})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model.architecture `t6` is not known; ...
    """
    kind = _kind(config)
    shape = _checked(kind, config)
    ids = {f"{name}_token_id": special[name] for name in ("pad", "bos", "eos")}
    ids["decoder_start_token_id"] = special["bos"]
    with _built(config):
        if config.architecture == "bert":
            network = _fresh_pair(kind, {"vocab_size": size, **shape}, ids)
        else:
            more = {"decoder_vocab_size": size} if config.architecture == "marian" else {}
            forced = {} if "t5" in config.architecture else {"forced_eos_token_id": None}
            told = kind(vocab_size=size, **more, **ids, **forced, **shape)
            network = package().AutoModelForSeq2SeqLM.from_config(told)
        _try(network, decoder_input_ids=torch.tensor([[special["bos"]] * 2]))
    if config.share_weights:
        share_halves(network)
    for key, value in ids.items():
        setattr(network.generation_config, key, value)
    return network


def _fresh_pair(kind: Any, shape: dict[str, Any], ids: dict[str, int]) -> Any:
    transformers = package()
    own = {key: value for key, value in ids.items() if not key.startswith("decoder")}
    halves = [kind(**own, **shape, **more) for more in ({}, _AS_DECODER)]
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, **ids)
    return transformers.EncoderDecoderModel(config=both)


def _try(network: Any, **target: Tensor) -> None:
    """Read two symbols, which some shapes that can be built cannot; draws nothing at random."""
    with torch.no_grad():
        network.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long), **target)
    network.train()


@contextmanager
def _built(config: PretrainedConfig) -> Iterator[None]:
    """Inside, transformers builds an architecture; a shape that it cannot build is one line."""
    try:
        with quietly(), within_memory("lower the sizes in model.shape"):
            yield
    except ThalwegError:
        raise
    except Exception as error:  # values of any kind go into code of others
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(
            f"model.shape must be a shape that {config.architecture} can have, got {config.shape} ({reason})"
        ) from None


def _kind(config: PretrainedConfig) -> type:
    """The class of the settings of ``config.architecture``."""
    check_choice("model.architecture", config.architecture, _FRESH)
    return type(package().AutoConfig.for_model(config.architecture))


def fresh_reach(config: PretrainedConfig) -> int | None:
    """Most symbols of a source or target that an architecture with fresh weights has positions for.

    >>> fresh_reach(PretrainedConfig(architecture="bart", shape={"max_position_embeddings": 30}))
    30
    """
    kind = _kind(config)
    with _built(config):
        return positions_of(kind(**_checked(kind, config)))


def build_encoder(config: PretrainedConfig, size: int, special: Mapping[str, int]) -> Any:
    """A BERT of ``config.shape`` with fresh weights and a head that tells symbols: what masking trains.

    >>> small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = PretrainedConfig(architecture="bert", shape=small)
    >>> build_encoder(config, 9, {"pad": 1, "bos": 2, "eos": 3}).config.vocab_size
    9
    """
    kind = _kind(config)
    ids = {f"{name}_token_id": special[name] for name in ("pad", "bos", "eos")}
    with _built(config):
        network = package().BertForMaskedLM(kind(vocab_size=size, **ids, **_checked(kind, config)))
        _try(network)
    return network


_DATA = ("vocab_size", "decoder_vocab_size", "is_encoder_decoder", "architectures", "model_type")
_AS_DECODER = {"is_decoder": True, "add_cross_attention": True}


def _checked(kind: type, config: PretrainedConfig) -> dict[str, Any]:
    """``model.shape`` where every key is a setting of that architecture, with the dropout that is asked for."""
    known = set(vars(kind())) | set(getattr(kind, "attribute_map", {}))
    for key in config.shape:
        if key not in known:
            raise ConfigError(f"model.shape.{key} is not a setting of {config.architecture}; {nearest(key, known)}")
        if key in _DATA or key in _AS_DECODER or key.endswith("_token_id"):
            raise ConfigError(f"model.shape.{key} follows from the data and the architecture; leave it out")
    shape = dict(config.shape)
    if config.dropout is not None:
        shape |= {name: config.dropout for name in _DROPOUT if name in known}
    return shape


def set_dropout(network: Any, dropout: float) -> None:
    """Every dropout of a loaded network, in its config and its layers."""
    for told in (network.config, *(getattr(network.config, side, None) for side in ("encoder", "decoder"))):
        for name in _DROPOUT:
            if told is not None and hasattr(told, name):
                setattr(told, name, dropout)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = dropout


def store_network(network: Any) -> dict[str, Any]:
    """A network's settings, without its weights, as plain JSON values."""
    generation = getattr(network, "generation_config", None)
    return {
        "config": json.loads(network.config.to_json_string(use_diff=False)),
        "generation": {} if generation is None else json.loads(generation.to_json_string()),
    }


def restore_network(stored: Mapping[str, Any]) -> nn.Module:
    """A network of stored settings; its weights are whatever they start with.

    >>> restore_network({"config": {"model_type": "absent"}})
    Traceback (most recent call last):
    ...
    ValueError: the stored model type absent is not known
    """
    transformers = package()
    config = dict(stored["config"])
    model_type = str(config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(f"the stored model type {model_type} is not known")
    told = transformers.CONFIG_MAPPING[model_type].from_dict(config)
    network = transformers.AutoModelForSeq2SeqLM.from_config(told)
    if stored.get("generation"):
        network.generation_config = transformers.GenerationConfig.from_dict(dict(stored["generation"]))
    return network
