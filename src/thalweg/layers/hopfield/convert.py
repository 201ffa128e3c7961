"""The Hopfield layer that torch's multi-head attention is."""

from __future__ import annotations

import torch
from torch import nn

from thalweg.errors import ConfigError
from thalweg.layers.hopfield.layer import Hopfield

__all__ = ["from_attention"]


def from_attention(attention: nn.MultiheadAttention) -> Hopfield:
    """The Hopfield layer of one step that equals multi-head attention: ``layer(k, q, v)`` is ``attention(q, k, v)``.

    >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    >>> torch.allclose(from_attention(attention)(x), attention(x, x, x)[0], atol=1e-6)
    True
    """
    if attention.bias_k is not None:
        raise ConfigError("attention with `add_bias_kv` has no Hopfield layer; build it without")
    layer = Hopfield(
        attention.embed_dim,
        stored=attention.kdim,
        values=attention.vdim,
        heads=attention.num_heads,
        normalise=(),
        zero_pattern=attention.add_zero_attn,
        bias=attention.in_proj_bias is not None,
        dropout=attention.dropout,
        batch_first=attention.batch_first,
    ).to(attention.out_proj.weight)
    given = dict(attention.named_parameters())
    apart = [given.get(f"{letter}_proj_weight") for letter in "qkv"]
    weights = given["in_proj_weight"].chunk(3) if "in_proj_weight" in given else apart
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    parts = zip((layer.query, layer.key, layer.value), weights, biases, strict=True)
    with torch.no_grad():
        for ours, weight, bias in (*parts, (layer.out, attention.out_proj.weight, attention.out_proj.bias)):
            assert ours is not None
            assert weight is not None
            ours.weight.copy_(weight)
            if bias is not None:
                ours.bias.copy_(bias)
    return layer.train(attention.training)
