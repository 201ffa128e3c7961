"""The shape of a Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from thalweg.errors import ConfigError
from thalweg.layers.attention import attention_map
from thalweg.layers.norms import Norm
from thalweg.layers.recurrent_blocks import STEPWISE
from thalweg.layers.transformer import Activation, NormPlace
from thalweg.limits import DEPTH, WIDTH, check_choices, check_numbers, check_shares

Kind = Literal["encoder-decoder", "causal"]
"""An encoder and a decoder, or one decoder that reads the source as a prefix."""

Positions = Literal["sinusoidal", "learned", "rotary", "relative"]
"""Fixed vectors, trained vectors, turns of queries and keys, or trained biases by distance; the last two in
self-attention."""

DecoderNorm = Literal["auto", "none", "layer", "rms", "weight"]
"""Norms that look at one position alone; ``auto`` is the encoder's where it is one of them, else ``layer``."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape of a Transformer.

    A decoder has one position at a time, and while training no position may see those after it. Batch and instance
    norm take means over positions, so they stand in the encoder alone, over real positions alone, and the decoder then
    has ``decoder_norm``. Batch norm uses its running statistics at inference, so that answers do not depend on what
    else is in a batch. A causal model is a decoder and takes neither. Searches in one compiled call know ``layer`` and
    ``rms`` in the decoder, those in fixed buffers ``layer``; a decoder with any other is searched in the ordinary way.

    Attributes:
        kind: ``encoder-decoder``, or ``causal``: one decoder that reads source, bos and target in a row.
        width: D, of every vector between blocks; heads: a divisor of it, unless ``head_width`` is given.
        head_width: of one head; None: width / heads.
        feedforward: width inside the feed-forward block.
        encoder_layers, decoder_layers: depth of each side; a causal model has decoder layers alone.
        norm: where norms stand, ``pre`` or ``post``. A kind of norm in its place (``norm=rms``, as in recurrent models)
            is ``encoder_norm`` of that kind with ``norm="pre"``.
        encoder_norm: ``layer``, ``rms``, ``batch``, ``instance``, ``weight`` (of all matrices in the layers) or
            ``none``; in a causal model that of its only stack.
        decoder_norm: ``layer``, ``rms``, ``weight`` or ``none``; ``auto`` is the encoder's, or ``layer`` where that is
            ``batch`` or ``instance``.
        norm_eps: added to variances by ``layer`` and ``rms``.
        activation: ``relu``, ``gelu``, ``silu``, ``swiglu`` or ``geglu``.
        positions: ``sinusoidal``, ``learned`` (up to ``max_positions``), ``rotary`` or ``relative`` (both in
            self-attention alone; the latter one bias a head and bucket of distances for all layers of a side, in
            encoder-decoders).
        relative_buckets, relative_reach: see :class:`~thalweg.layers.positions.RelativeBias`.
        dropout: probability, on embeddings and on what each block adds; attention_dropout: on attention weights.
        attention_map: from scores to weights in every attention: ``softmax``, ``sparsemax``, ``entmax15``, or an alpha.
        tied: the output matrix is the target embedding; shared: the source embedding is the target embedding.
        embedding_norm: LayerNorm after the embeddings, whatever the other norms are.
        embedding_scale: embeddings times sqrt(width).
        max_positions: longest sequence of a model with learned positions.
        output_bias: the output layer has a bias; output_block: norm(gelu(W h + b)) comes before it, as in BERT.
        pointer: mix in copying of source symbols (See et al., 2017).

    >>> TransformerConfig(width=128).norm
    'pre'
    >>> config = TransformerConfig(norm="batch")
    >>> config.norm, config.encoder_norm, config.norm_of_decoder
    ('pre', 'batch', 'layer')
    """

    kind: Kind = "encoder-decoder"
    width: int = 256
    heads: int = 4
    head_width: int | None = None
    feedforward: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    norm: Literal[NormPlace, Norm] = "pre"
    encoder_norm: Norm = "layer"
    decoder_norm: DecoderNorm = "auto"
    norm_eps: float = 1e-5
    positions: Positions = "sinusoidal"
    relative_buckets: int = 32
    relative_reach: int = 128
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
    output_block: bool = False
    pointer: bool = False

    def __post_init__(self) -> None:
        self._settle_norm()
        sizes = ("width", "heads", "feedforward", "max_positions", "relative_buckets", "relative_reach")
        check_numbers(self, "model", 1, WIDTH, *sizes, *(() if self.head_width is None else ("head_width",)))
        check_numbers(self, "model", 1, DEPTH, "encoder_layers", "decoder_layers")
        check_shares(self, "model", "[0, 1)", "dropout", "attention_dropout")
        check_choices(self, "model")
        if self.kind == "causal" and self.encoder_norm not in STEPWISE:
            raise ConfigError(
                f"model.encoder_norm = {self.encoder_norm} looks at later positions too, got a causal model, which "
                "must not; choose layer, rms, weight or none"
            )
        attention_map(self.attention_map, setting="model.attention_map")
        check_shares(self, "model", "(0, 1)", "norm_eps")
        self._check_positions()

    def _check_positions(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(f"model.width must be a multiple of model.heads = {self.heads}, got {self.width}")
        if self.positions == "relative" and self.kind == "causal":
            raise ConfigError(
                "model.positions = relative needs an encoder-decoder, got a causal model; choose rotary positions, "
                "which look at distances too"
            )
        turned = self.attention_width // self.heads if self.positions == "rotary" else self.width
        if self.positions in ("sinusoidal", "rotary") and turned % 2:
            raise ConfigError(
                f"{self.positions} positions need an even width ({'per head' if self.positions == 'rotary' else 'D'}), "
                f"got {turned}; change model.width or choose learned positions"
            )

    def _settle_norm(self) -> None:
        """A kind of norm where its place is expected: both in their own settings."""
        kind = self.norm
        if kind not in get_args(Norm):
            return
        if self.encoder_norm not in ("layer", kind):
            raise ConfigError(
                f"model.norm = {kind} and model.encoder_norm = {self.encoder_norm} name two kinds of norm; keep one"
            )
        object.__setattr__(self, "norm", "pre")
        object.__setattr__(self, "encoder_norm", kind)

    @property
    def norm_of_decoder(self) -> Norm:
        """The decoder's norm, ``auto`` settled.

        >>> TransformerConfig(norm="rms").norm_of_decoder, TransformerConfig(norm="instance").norm_of_decoder
        ('rms', 'layer')
        """
        if self.decoder_norm != "auto":
            return self.decoder_norm
        return self.encoder_norm if self.encoder_norm in STEPWISE else "layer"

    @property
    def attention_width(self) -> int:
        """Width of all heads together.

        >>> TransformerConfig().attention_width, TransformerConfig(heads=6, head_width=64).attention_width
        (256, 384)
        """
        return self.width if self.head_width is None else self.heads * self.head_width

    @property
    def has_softmax(self) -> bool:
        """Whether attention is the softmax's, which fast decoding knows alone.

        >>> TransformerConfig().has_softmax, TransformerConfig(attention_map=1.3).has_softmax
        (True, False)
        """
        return self.attention_map in ("softmax", 1)
