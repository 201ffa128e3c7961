"""Families of models, what each learns with, and presets by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thalweg.energies.monotonic.model import MonotonicConfig
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.seq2seq.model import Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """A model that is chosen when the training pairs are known; see :mod:`thalweg.tasks.transduce.choosing`.

    >>> AutoConfig()
    AutoConfig()
    """


ModelConfig = AutoConfig | Seq2SeqConfig | MonotonicConfig | TransformerConfig | PretrainedConfig
"""Shape of a model of any family."""

FAMILIES: dict[str, type[ModelConfig]] = {
    "recurrent": Seq2SeqConfig,
    "monotonic": MonotonicConfig,
    "transformer": TransformerConfig,
    "pretrained": PretrainedConfig,
    "auto": AutoConfig,
}
"""The settings of each family's models, by the name that ``model.family`` has; the first is that of a model about which
something is said, but not its family. Where nothing is said it is ``auto``."""

FAMILY_TRAINING: dict[str, dict[str, Any]] = {
    "recurrent": {},
    # It learns from fewer steps: on 800 pairs its dev loss is lowest after 1,000 to 1,500 and rises from there.
    "monotonic": {"steps": 1500},
    "auto": {},
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
    "auto": {"model": {"family": "auto"}},
    "lstm-attention": {"model": {"family": "recurrent", "cell": "lstm", "attention": "additive"}},
    "gru-attention": {"model": {"family": "recurrent", "cell": "gru", "attention": "additive"}},
    "lstm": {"model": {"family": "recurrent", "cell": "lstm", "attention": "none"}},
    "gru": {"model": {"family": "recurrent", "cell": "gru", "attention": "none"}},
    "monotonic": {"model": {"family": "monotonic", "order": "first"}},
    "monotonic-edits": {"model": {"family": "monotonic", "order": "edits"}},
    "monotonic-zeroth": {"model": {"family": "monotonic", "order": "zeroth"}},
    "transformer": {"model": {"family": "transformer"}},
    "transformer-rotary": {"model": {"family": "transformer", "positions": "rotary"}},
    "transformer-pointer": {"model": {"family": "transformer", "pointer": True}},
    "causal": {"model": {"family": "transformer", "kind": "causal"}},
    "pretrained": {"model": {"family": "pretrained"}},
    # Adapters start at nothing and take a higher rate; T5 and its kin were trained with one, too.
    "lora": {"model": {"family": "pretrained", "lora": 8}, "training": {"learning_rate": 1e-3, "batch_size": 16}},
    # Its embeddings start large: steps in proportion to each matrix are what they learn with.
    "t5": {
        "model": {
            "family": "pretrained",
            "architecture": "t5",
            "shape": {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.2},
        },
        "training": {
            "batch_tokens": 1000,
            "epochs": 0,
            "optimiser": "adafactor",
            "learning_rate": 0.02,
            "schedule": "inverse_sqrt",
            "warmup": 1000,
            "label_smoothing": 0.1,
            "average": 0.999,
            "patience": 0,
        },
    },
}
"""Settings by the name given to ``--model``, or to ``model`` in YAML and Python; anything in them can be overridden."""
