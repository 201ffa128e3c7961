"""BART, mBART and Marian."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from thalweg.energies.transformer.checkpoints.files import Names
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError
from thalweg.layers.transformer import Activation

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu"}


def shape(config: Mapping[str, Any], names: Names) -> TransformerConfig:
    """The checkpoint's shape in our words; what has none is an error that names the key."""
    family = config.get("model_type")
    for key in ("attention_heads", "ffn_dim"):
        encoder, decoder = config[f"encoder_{key}"], config[f"decoder_{key}"]
        if encoder != decoder:
            raise ConfigError(
                f"config.json: `decoder_{key}` must equal `encoder_{key}` = {encoder}, got {decoder}; no other is built"
            )
    activation = config.get("activation_function", "gelu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"config.json: `activation_function` must be one of {known}, got {activation!r}")
    pre = family == "mbart"
    # Of old configs; transformers itself no longer reads these keys and computes what the family stands for.
    usual = {"normalize_before": pre, "add_final_layer_norm": pre, "normalize_embedding": family != "marian"}
    for key, value in {**usual, "static_position_embeddings": family == "marian"}.items():
        if bool(config.get(key, value)) != value:
            raise ConfigError(
                f"config.json: `{key}` must be {value} for {family}, got {config[key]}; no other is built"
            )
    return TransformerConfig(
        kind="encoder-decoder",
        width=config["d_model"],
        heads=config["encoder_attention_heads"],
        feedforward=config["encoder_ffn_dim"],
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        norm="pre" if pre else "post",
        positions="sinusoidal" if family == "marian" else "learned",
        activation=_ACTIVATIONS[activation],
        dropout=float(config.get("dropout") or 0.0),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        tied=bool(config.get("tie_word_embeddings", True)),
        shared=names.shared,
        embedding_norm=family != "marian",
        embedding_scale=bool(config.get("scale_embedding", False)),
        max_positions=config.get("max_position_embeddings", 1024),
        output_bias=True,
    )


def tensors(shape: TransformerConfig, config: Mapping[str, Any], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Our names of all parameters, with the checkpoint's values."""
    yield "source_embedding.weight", names.embedding("encoder")
    embedding = names.embedding("decoder")
    yield "target_embedding.weight", embedding
    yield "output.weight", embedding if shape.tied else names["lm_head.weight"]
    bias = names.weights.get("final_logits_bias")
    yield "output.bias", embedding.new_zeros(embedding.size(0)) if bias is None else bias.reshape(-1)
    for ours, theirs in (("source", "encoder"), ("target", "decoder")):
        if shape.positions == "learned":
            # Two rows before the first position are a relic of the library in which BART was trained.
            yield f"{ours}_positions.weight", names[f"{theirs}.embed_positions.weight"][2:]
        if shape.embedding_norm:
            yield from names.linear(f"{ours}_norm", f"{theirs}.layernorm_embedding")
        if shape.norm == "pre":
            yield from names.linear(f"{theirs}.norm", f"{theirs}.layer_norm")
    for side, layers in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        for number in range(layers):
            yield from _layer(f"{side}.layers.{number}", names, cross=side == "decoder")


def _layer(at: str, names: Names, *, cross: bool) -> Iterator[tuple[str, Tensor]]:
    own, other = f"{at}.self_attn", f"{at}.encoder_attn"
    yield from names.linear(f"{at}.attention.project", *(f"{own}.{part}_proj" for part in "qkv"))
    yield from names.linear(f"{at}.attention.out", f"{own}.out_proj")
    yield from names.linear(f"{at}.attention_norm", f"{own}_layer_norm")
    if cross:
        yield from names.linear(f"{at}.cross.query", f"{other}.q_proj")
        yield from names.linear(f"{at}.cross.memory", f"{other}.k_proj", f"{other}.v_proj")
        yield from names.linear(f"{at}.cross.out", f"{other}.out_proj")
        yield from names.linear(f"{at}.cross_norm", f"{other}_layer_norm")
    yield from names.linear(f"{at}.feedforward.up", f"{at}.fc1")
    yield from names.linear(f"{at}.feedforward.down", f"{at}.fc2")
    yield from names.linear(f"{at}.feedforward_norm", f"{at}.final_layer_norm")
