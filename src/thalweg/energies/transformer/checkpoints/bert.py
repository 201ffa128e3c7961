"""BERT-to-BERT: an ``EncoderDecoderModel`` of two BERTs, the decoder with cross-attention (Rothe et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.transformer.checkpoints.files import Names
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError

_ALIKE = (
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)
_HEAD = "decoder.cls.predictions"


def shape(config: Mapping[str, Any], names: Names) -> TransformerConfig:
    """The checkpoint's shape in our words; what has none is an error that names the key."""
    encoder, decoder = config["encoder"], config["decoder"]
    for name, side in (("encoder", encoder), ("decoder", decoder)):
        for key, value in (("model_type", "bert"), ("hidden_act", "gelu")):
            if side.get(key) != value:
                raise ConfigError(
                    f"config.json: `{key}` of the {name} must be {value}, got {side.get(key)!r}; no other is built"
                )
    for key in _ALIKE:
        if encoder.get(key) != decoder.get(key):
            raise ConfigError(
                f"config.json: `{key}` must be alike on both sides, got {encoder.get(key)} and {decoder.get(key)}"
            )
    return TransformerConfig(
        width=decoder["hidden_size"],
        heads=decoder["num_attention_heads"],
        feedforward=decoder["intermediate_size"],
        encoder_layers=encoder["num_hidden_layers"],
        decoder_layers=decoder["num_hidden_layers"],
        norm="post",
        norm_eps=decoder["layer_norm_eps"],
        positions="learned",
        max_positions=decoder["max_position_embeddings"],
        activation="gelu",
        dropout=float(decoder.get("hidden_dropout_prob") or 0.0),
        attention_dropout=float(decoder.get("attention_probs_dropout_prob") or 0.0),
        tied=_same(_output(names), _words("decoder.bert", names)),
        shared=_same(_words("encoder", names), _words("decoder.bert", names)),
        embedding_norm=True,
        embedding_scale=False,
        output_block=True,
    )


def tensors(shape: TransformerConfig, config: Mapping[str, Any], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Our names of all parameters, with the checkpoint's values."""
    for ours, side in (("source", "encoder"), ("target", "decoder.bert")):
        yield f"{ours}_embedding.weight", _words(side, names)
        # Every symbol is of the first type: its vector is part of every position's.
        types = names[f"{side}.embeddings.token_type_embeddings.weight"][0]
        yield f"{ours}_positions.weight", names[f"{side}.embeddings.position_embeddings.weight"] + types
        yield from names.linear(f"{ours}_norm", f"{side}.embeddings.LayerNorm")
    yield "output.weight", _output(names)
    yield "output.bias", names.get(f"{_HEAD}.bias", f"{_HEAD}.decoder.bias")
    yield from names.linear("block.0", f"{_HEAD}.transform.dense")
    yield from names.linear("block.2", f"{_HEAD}.transform.LayerNorm")
    for side, theirs, layers in (
        ("encoder", "encoder", shape.encoder_layers),
        ("decoder", "decoder.bert", shape.decoder_layers),
    ):
        for number in range(layers):
            yield from _layer(f"{side}.layers.{number}", f"{theirs}.encoder.layer.{number}", names)
    # A second name of the output's bias, and what no decoder reads.
    names.taken |= {f"{_HEAD}.decoder.bias", f"{_HEAD}.decoder.weight", f"{_HEAD}.bias"}
    names.taken |= {name for name in names.weights if ".pooler." in name or name.endswith("position_ids")}


def _layer(at: str, theirs: str, names: Names) -> Iterator[tuple[str, Tensor]]:
    own, other = f"{theirs}.attention", f"{theirs}.crossattention"
    yield from names.linear(f"{at}.attention.project", *(f"{own}.self.{part}" for part in ("query", "key", "value")))
    yield from names.linear(f"{at}.attention.out", f"{own}.output.dense")
    yield from names.linear(f"{at}.attention_norm", f"{own}.output.LayerNorm")
    if at.startswith("decoder"):
        yield from names.linear(f"{at}.cross.query", f"{other}.self.query")
        yield from names.linear(f"{at}.cross.memory", f"{other}.self.key", f"{other}.self.value")
        yield from names.linear(f"{at}.cross.out", f"{other}.output.dense")
        yield from names.linear(f"{at}.cross_norm", f"{other}.output.LayerNorm")
    yield from names.linear(f"{at}.feedforward.up", f"{theirs}.intermediate.dense")
    yield from names.linear(f"{at}.feedforward.down", f"{theirs}.output.dense")
    yield from names.linear(f"{at}.feedforward_norm", f"{theirs}.output.LayerNorm")


def _words(side: str, names: Names) -> Tensor:
    return names[f"{side}.embeddings.word_embeddings.weight"]


def _output(names: Names) -> Tensor:
    """The output matrix; written once where it is the embedding."""
    return names.get(f"{_HEAD}.decoder.weight", "decoder.bert.embeddings.word_embeddings.weight")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
