"""The shape of a Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from thalweg.errors import ConfigError, nearest
from thalweg.layers.attention import attention_map
from thalweg.layers.transformer import Activation, NormPlace

__all__ = ["Kind", "Positions", "TransformerConfig"]

Kind = Literal["encoder-decoder", "causal"]
"""An encoder and a decoder, or one decoder that reads the source as a prefix."""

Positions = Literal["sinusoidal", "learned", "rotary"]
"""Fixed vectors, trained vectors, or turns of queries and keys in self-attention."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape of a Transformer.

    Attributes:
        kind: ``encoder-decoder``, or ``causal``: one decoder that reads source, bos and target in a row.
        width: D, of every vector between blocks; heads: a divisor of it.
        feedforward: width inside the feed-forward block.
        encoder_layers, decoder_layers: depth of each side; a causal model has decoder layers alone.
        norm: ``pre`` or ``post``; activation: ``relu``, ``gelu``, ``silu`` or ``swiglu``.
        positions: ``sinusoidal``, ``learned`` (up to ``max_positions``) or ``rotary`` (in self-attention alone).
        dropout: probability, on embeddings and on what each block adds; attention_dropout: on attention weights.
        attention_map: from scores to weights in every attention: ``softmax``, ``sparsemax``, ``entmax15``, or an alpha.
        tied: the output matrix is the target embedding; shared: the source embedding is the target embedding.
        embedding_norm: LayerNorm after the embeddings; embedding_scale: embeddings times sqrt(width).
        max_positions: longest sequence of a model with learned positions.
        output_bias: the output layer has a bias.
        pointer: mix in copying of source symbols (See et al., 2017).

    >>> TransformerConfig(width=128).norm
    'pre'
    """

    kind: Kind = "encoder-decoder"
    width: int = 256
    heads: int = 4
    feedforward: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    norm: NormPlace = "pre"
    positions: Positions = "sinusoidal"
    activation: Activation = "relu"
    dropout: float = 0.3
    attention_dropout: float = 0.0
    attention_map: str | float = "softmax"
    tied: bool = True
    shared: bool = False
    embedding_norm: bool = False
    embedding_scale: bool = True
    max_positions: int = 1024
    output_bias: bool = True
    pointer: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "heads", "feedforward", "encoder_layers", "decoder_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be in [0, 1), got {getattr(self, name)}")
        for name, choices in (
            ("kind", get_args(Kind)),
            ("norm", get_args(NormPlace)),
            ("positions", get_args(Positions)),
            ("activation", get_args(Activation)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"model.{name} `{value}` is not known; {nearest(value, choices)}")
        attention_map(self.attention_map, setting="model.attention_map")
        if self.width % self.heads:
            raise ConfigError(f"model.width must be a multiple of model.heads = {self.heads}, got {self.width}")
        turned = self.width // self.heads if self.positions == "rotary" else self.width
        if self.positions != "learned" and turned % 2:
            raise ConfigError(
                f"{self.positions} positions need an even width ({'per head' if self.positions == 'rotary' else 'D'}), "
                f"got {turned}; change model.width or choose learned positions"
            )

    @property
    def has_softmax(self) -> bool:
        """Whether attention is the softmax's, which fast decoding knows alone.

        >>> TransformerConfig().has_softmax, TransformerConfig(attention_map=1.3).has_softmax
        (True, False)
        """
        return self.attention_map in ("softmax", 1)
