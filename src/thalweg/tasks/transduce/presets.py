"""Families of models, what each learns with, and presets by name."""

from __future__ import annotations

from typing import Any

from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.seq2seq.model import Seq2SeqConfig
from thalweg.energies.transformer.model import TransformerConfig

__all__ = ["FAMILIES", "FAMILY_TRAINING", "PRESETS", "ModelConfig"]

ModelConfig = Seq2SeqConfig | TransformerConfig | PretrainedConfig
"""Shape of a model of any family."""

FAMILIES: dict[str, type[Seq2SeqConfig] | type[TransformerConfig] | type[PretrainedConfig]] = {
    "recurrent": Seq2SeqConfig,
    "transformer": TransformerConfig,
    "pretrained": PretrainedConfig,
}
"""The settings of each family's models, by the name that ``model.family`` has; the first is the default."""

FAMILY_TRAINING: dict[str, dict[str, Any]] = {
    "recurrent": {},
    # Wu et al. (2021), who found a large batch, much dropout and a slow start to be what small data need, and who take
    # the usual second beta of Transformers. By tokens: about 400 words with their transcriptions.
    "transformer": {
        "batch_tokens": 8000,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "beta2": 0.98,
        "schedule": "inverse_sqrt",
        "warmup": 4000,
        "label_smoothing": 0.1,
    },
    # The usual settings of fine-tuning: few passes at a low rate, and the epoch with the fewest errors is kept.
    "pretrained": {
        "batch_size": 4,
        "epochs": 10,
        "learning_rate": 2e-5,
        "weight_decay": 0.0,
        "schedule": "constant",
        "warmup": 0,
        "label_smoothing": 0.0,
        "average": 0.0,
        "patience": 3,
        "metric": "cer",
    },
}
"""Training settings that models of a family learn with; they stand where nothing else is said."""

PRESETS: dict[str, dict[str, Any]] = {
    "lstm-attention": {"model": {"family": "recurrent", "cell": "lstm", "attention": "additive"}},
    "gru-attention": {"model": {"family": "recurrent", "cell": "gru", "attention": "additive"}},
    "lstm": {"model": {"family": "recurrent", "cell": "lstm", "attention": "none"}},
    "gru": {"model": {"family": "recurrent", "cell": "gru", "attention": "none"}},
    "transformer": {"model": {"family": "transformer"}},
    "transformer-rotary": {"model": {"family": "transformer", "positions": "rotary"}},
    "transformer-pointer": {"model": {"family": "transformer", "pointer": True}},
    "causal": {"model": {"family": "transformer", "kind": "causal"}},
    "pretrained": {"model": {"family": "pretrained"}},
    # Adapters start at nothing and take a higher rate; T5 and its kin were trained with one, too.
    "lora": {"model": {"family": "pretrained", "lora": 8}, "training": {"learning_rate": 1e-3, "batch_size": 16}},
    "t5": {
        "data": {"source_symbols": "subwords", "target_symbols": "subwords"},
        "model": {
            "family": "pretrained",
            "architecture": "t5",
            "shape": {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.3},
        },
        "training": {
            "batch_tokens": 8000,
            "epochs": 0,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "beta2": 0.98,
            "schedule": "inverse_sqrt",
            "warmup": 4000,
            "label_smoothing": 0.1,
            "average": 0.999,
            "patience": 0,
        },
    },
}
"""Settings by the name given to ``--model``, or to ``model`` in YAML and Python; anything in them can be overridden."""
