"""Networks of Hugging Face: from a checkpoint, from an architecture's settings, or as a run has stored them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.hub import check_place, package, reading
from thalweg.errors import CheckpointError, ConfigError, nearest
from thalweg.limits import check_choice

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
        return package().AutoConfig.from_pretrained(name)


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
    if not getattr(told, "is_encoder_decoder", False):
        return pair_network(name, config.decoder or name, share=config.share_weights, pickled=pickled)
    if config.decoder:
        raise ConfigError(f"model.decoder goes with an encoder, got {name}, which has a decoder; leave it out")
    with reading(name):
        network, info = package().AutoModelForSeq2SeqLM.from_pretrained(
            name, use_safetensors=not pickled, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{name}: expected all weights of {told.model_type}, got none for {missing[0]} and {len(missing) - 1} "
            "others; the weights are of another model than config.json"
        )
    return network


def pair_network(encoder: str, decoder: str, *, share: bool = False, pickled: bool = False) -> nn.Module:
    """Two BERT-like encoders as an encoder-decoder, cross-attention added (Rothe et al., 2020).

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
    told = read_config(decoder)
    if not hasattr(told, "add_cross_attention") or getattr(told, "is_encoder_decoder", False):
        raise ConfigError(f"{decoder}: expected a BERT-like encoder, got {told.model_type}; no decoder is made of it")
    safe = {f"{side}_use_safetensors": not pickled for side in ("encoder", "decoder")}
    with reading(f"{encoder}" if encoder == decoder else f"{encoder} and {decoder}"):
        network = package().EncoderDecoderModel.from_encoder_decoder_pretrained(encoder, decoder, **safe).float()
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
    check_choice("model.architecture", config.architecture, _FRESH)
    transformers = package()
    ids = {"pad_token_id": special["pad"], "bos_token_id": special["bos"], "eos_token_id": special["eos"]}
    start = {"decoder_start_token_id": special["bos"]}
    if config.architecture == "bert":
        shape = _checked(transformers.BertConfig, config)
        halves = [transformers.BertConfig(vocab_size=size, **ids, **shape, **more) for more in ({}, _AS_DECODER)]
        both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, **ids, **start)
        network = transformers.EncoderDecoderModel(config=both)
        if config.share_weights:
            share_halves(network)
    else:
        kind = type(transformers.AutoConfig.for_model(config.architecture))
        shape = _checked(kind, config)
        more = {"decoder_vocab_size": size} if config.architecture == "marian" else {}
        forced = {} if "t5" in config.architecture else {"forced_eos_token_id": None}
        told = kind(**{"vocab_size": size, **more, **ids, **start, **forced, **shape})
        network = transformers.AutoModelForSeq2SeqLM.from_config(told)
    generation = network.generation_config
    for key, value in {**ids, **start}.items():
        setattr(generation, key, value)
    return network


def build_encoder(config: PretrainedConfig, size: int, special: Mapping[str, int]) -> Any:
    """A BERT of ``config.shape`` with fresh weights and a head that tells symbols: what masking trains.

    >>> small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = PretrainedConfig(architecture="bert", shape=small)
    >>> build_encoder(config, 9, {"pad": 1, "bos": 2, "eos": 3}).config.vocab_size
    9
    """
    transformers = package()
    ids = {"pad_token_id": special["pad"], "bos_token_id": special["bos"], "eos_token_id": special["eos"]}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=size, **ids, **_checked(transformers.BertConfig, config))
    )


_AS_DECODER = {"is_decoder": True, "add_cross_attention": True}


def _checked(kind: type, config: PretrainedConfig) -> dict[str, Any]:
    """``model.shape`` where every key is a setting of that architecture, with the dropout that is asked for."""
    known = set(vars(kind())) | set(getattr(kind, "attribute_map", {}))
    for key in config.shape:
        if key not in known:
            raise ConfigError(f"model.shape.{key} is not a setting of {config.architecture}; {nearest(key, known)}")
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
