"""Which pretrained encoder-decoder, and what of it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from thalweg.errors import ConfigError
from thalweg.limits import COUNT, WIDTH, check_choices, check_numbers, check_shares

_UNSAID = ("", None, False, "safetensors")
_OF_CHECKPOINTS = (
    *("decoder", "tokenizer", "weights", "source_language", "target_language", "task_params", "source_prefix"),
    "truncate",
)


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """A Hugging Face encoder-decoder: from a checkpoint, or of an architecture with fresh weights.

    Attributes:
        checkpoint: folder that ``save_pretrained`` or ``hf download`` wrote, or a name on the hub: T5, ByT5, mT5, BART,
            mBART, Marian, an ``EncoderDecoderModel``, or a BERT-like encoder, of which a pair is made.
        decoder: of such a pair, the encoder that becomes the decoder; the ``checkpoint`` again if empty.
        tokenizer: folder or name of another tokenizer than the checkpoint's.
        share_weights: of a pair: encoder and decoder have one set of weights, all but the cross-attention.
        architecture: ``t5``, ``mt5``, ``bart``, ``mbart``, ``marian`` or ``bert`` with fresh weights, instead of a
            ``checkpoint``; the symbols are then those of the data settings.
        shape: settings of that architecture, by their names there (``d_model``, ``num_layers``, ...).
        masked_epochs: of ``bert``: passes of masked-language-model training over both sides of the pairs, each side
            alone, before the pair is trained; masked_share: of the symbols are then hidden; masked_rate: learning rate.
        weights: ``safetensors``, or ``pickle`` where nothing else is there and its author is trusted: it can run code.
        source_language, target_language: codes of models that are told both (``en_XX``).
        task_params: which of the checkpoint's ``task_specific_params`` to apply; empty: the only one, if there is one;
            ``none``: none of them.
        source_prefix: text before every source; None: what those parameters say.
        truncate: whether a source or target longer than the model's positions is cut; else it is an error.
        freeze: parts that are not trained: ``embeddings``, ``encoder``, ``decoder``, or patterns of parameter names.
        lora: rank of low-rank adapters, which are then trained alone (Hu et al., 2022); 0 trains the weights.
        lora_alpha: their scale times the rank; 0 means twice the rank. lora_dropout: of their inputs.
        lora_targets: linear layers that get one, by the ends of their names; empty: queries and values.
        dropout: of all layers; None: the checkpoint's.
        gradient_checkpointing: less memory, a third more time.

    >>> PretrainedConfig(checkpoint="google/byt5-small").lora
    0
    """

    checkpoint: str = ""
    decoder: str = ""
    tokenizer: str = ""
    share_weights: bool = False
    architecture: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    masked_epochs: int = 0
    masked_share: float = 0.15
    masked_rate: float = 1e-3
    weights: Literal["safetensors", "pickle"] = "safetensors"
    source_language: str = ""
    target_language: str = ""
    task_params: str = ""
    source_prefix: str | None = None
    truncate: bool = False
    freeze: tuple[str, ...] = ()
    lora: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    dropout: float | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "model")
        check_numbers(self, "model", 0, WIDTH, "lora")
        check_numbers(self, "model", 0, COUNT, "masked_epochs")
        check_numbers(self, "model", 0, WIDTH, "lora_alpha", whole=False)
        check_numbers(self, "model", 0, 1, "masked_rate", whole=False, strict=True)
        check_shares(self, "model", "(0, 1)", "masked_share")
        check_shares(self, "model", "[0, 1)", "lora_dropout", *(() if self.dropout is None else ("dropout",)))
        if self.checkpoint and self.architecture:
            raise ConfigError(
                f"model.architecture = {self.architecture} has fresh weights, got model.checkpoint = "
                f"{self.checkpoint} too; keep one"
            )
        if self.architecture and (told := [name for name in _OF_CHECKPOINTS if getattr(self, name) not in _UNSAID]):
            raise ConfigError(
                f"model.{told[0]} goes with a model.checkpoint, got model.architecture = {self.architecture}; leave it "
                "out"
            )
        if self.share_weights and self.architecture not in ("", "bert"):
            raise ConfigError(
                f"model.share_weights is of a pair of encoders, got model.architecture = {self.architecture}; leave it "
                "out"
            )
        if self.shape and not self.architecture:
            raise ConfigError("model.shape is of a model.architecture with fresh weights, got none; set it or leave it")
        if self.masked_epochs and self.architecture != "bert":
            raise ConfigError(
                f"model.masked_epochs needs model.architecture=bert, got `{self.architecture}`; others learn otherwise"
            )

    @property
    def fresh(self) -> bool:
        """Whether the weights start at random, and the symbols come from the data.

        >>> PretrainedConfig(architecture="t5").fresh
        True
        """
        return bool(self.architecture)

    def named(self) -> str:
        """The checkpoint; an error where none is given.

        >>> PretrainedConfig().named()
        Traceback (most recent call last):
        ...
        thalweg.errors.ConfigError: no checkpoint: give `checkpoint=FOLDER` (or a name on the hub), or ...
        """
        if not self.checkpoint:
            raise ConfigError(
                "no checkpoint: give `checkpoint=FOLDER` (or a name on the hub), or `architecture=t5` to train one anew"
            )
        return self.checkpoint
