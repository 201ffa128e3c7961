"""T5, ByT5 and mT5 (Raffel et al., 2020; Xue et al., 2021, 2022).

No bias anywhere, norms by root mean square, positions as learnt biases of self-attention that all layers share. Scores
are not scaled there and are here by the root of a head's width, so that queries are made larger by it; outputs that
are scaled before a tied output matrix are so by the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.transformer.checkpoints.files import Names
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError
from thalweg.layers.transformer import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}


def shape(config: Mapping[str, Any], names: Names) -> TransformerConfig:
    """The checkpoint's shape in our words; what has none is an error that names the key."""
    activation = config.get("feed_forward_proj", "relu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"config.json: `feed_forward_proj` must be one of {known}, got {activation!r}")
    dropout = float(config.get("dropout_rate", 0.1))
    return TransformerConfig(
        width=config["d_model"],
        heads=config["num_heads"],
        head_width=config["d_kv"],
        feedforward=config["d_ff"],
        encoder_layers=config["num_layers"],
        decoder_layers=config.get("num_decoder_layers") or config["num_layers"],
        encoder_norm="rms",
        norm_eps=config.get("layer_norm_epsilon", 1e-6),
        positions="relative",
        relative_buckets=config.get("relative_attention_num_buckets", 32),
        relative_reach=config.get("relative_attention_max_distance", 128),
        activation=_ACTIVATIONS[activation],
        dropout=dropout,
        attention_dropout=dropout,
        tied=_output(names) is names.embedding("decoder"),
        shared=names.shared,
        embedding_scale=False,
        output_bias=False,
    )


def tensors(shape: TransformerConfig, config: Mapping[str, Any], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Our names of all parameters, with the checkpoint's values."""
    yield "source_embedding.weight", names.embedding("encoder")
    yield "target_embedding.weight", names.embedding("decoder")
    yield "output.weight", _output(names)
    for ours, side in (("source", "encoder"), ("target", "decoder")):
        yield f"{ours}_bias.weight", names[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        scale = shape.width**-0.5 if side == "decoder" and _scaled(config) else 1.0
        yield f"{side}.norm.layer.weight", names[f"{side}.final_layer_norm.weight"] * scale
    # Old checkpoints hold one that nothing reads.
    names.taken.add("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    for side, layers in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        for number in range(layers):
            yield from _layer(f"{side}.layers.{number}", f"{side}.block.{number}.layer", shape, names)


def _scaled(config: Mapping[str, Any]) -> bool:
    """Whether outputs are scaled before the output matrix: in T5, not in 1.1, whose configs say that it is not tied."""
    usual = config.get("tie_word_embeddings", True) is not False
    return config.get("model_type") == "t5" and bool(config.get("scale_decoder_outputs", usual))


def _output(names: Names) -> Tensor:
    """The output matrix; the target embedding itself where both are the same."""
    embedding, own = names.embedding("decoder"), names.get("lm_head.weight", "shared.weight")
    return embedding if own.shape == embedding.shape and bool((own == embedding).all()) else own


def _layer(at: str, theirs: str, shape: TransformerConfig, names: Names) -> Iterator[tuple[str, Tensor]]:
    own, scale = f"{theirs}.0.SelfAttention", (shape.attention_width // shape.heads) ** 0.5
    query, key, value = (names[f"{own}.{part}.weight"] for part in "qkv")
    yield from _linear(f"{at}.attention.project", query * scale, key, value)
    yield from _linear(f"{at}.attention.out", names[f"{own}.o.weight"])
    yield f"{at}.attention_norm.layer.weight", names[f"{theirs}.0.layer_norm.weight"]
    last = 1
    if at.startswith("decoder"):
        own, last = f"{theirs}.1.EncDecAttention", 2
        query, key, value = (names[f"{own}.{part}.weight"] for part in "qkv")
        yield from _linear(f"{at}.cross.query", query * scale)
        yield from _linear(f"{at}.cross.memory", key, value)
        yield from _linear(f"{at}.cross.out", names[f"{own}.o.weight"])
        yield f"{at}.cross_norm.layer.weight", names[f"{theirs}.1.layer_norm.weight"]
    block, gated = f"{theirs}.{last}.DenseReluDense", shape.activation in ("geglu", "swiglu")
    yield from _linear(f"{at}.feedforward.up", names[f"{block}.{'wi_1' if gated else 'wi'}.weight"])
    if gated:
        yield from _linear(f"{at}.feedforward.gate", names[f"{block}.wi_0.weight"])
    yield from _linear(f"{at}.feedforward.down", names[f"{block}.wo.weight"])
    yield f"{at}.feedforward_norm.layer.weight", names[f"{theirs}.{last}.layer_norm.weight"]


def _linear(ours: str, *weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One of our maps, which may be several of theirs on top of one another; theirs have no bias."""
    weight = torch.cat([part.float() for part in weights])
    yield f"{ours}.weight", weight
    yield f"{ours}.bias", weight.new_zeros(weight.size(0))
