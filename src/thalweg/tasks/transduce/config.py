"""Settings of transduction: where the pairs are, the model, the training, the search on dev data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from thalweg.data.text.subwords import SubwordKind
from thalweg.learning.settings import TrainingConfig
from thalweg.limits import WIDTH, check_choices, check_numbers, check_shares
from thalweg.tasks.config import learnt_with
from thalweg.tasks.transduce.presets import FAMILIES, FAMILY_TRAINING, PRESETS, AutoConfig, ModelConfig
from thalweg.tasks.transduce.search_settings import SearchConfig

Splitting = Literal["auto", "characters", "graphemes", "spaced", "subwords"]
Normalising = Literal["auto", "nfc", "nfd", "none"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs are and how each side is cut into symbols.

    Attributes:
        train, dev: a TSV file (``.gz`` too), or ``NAME:SPLIT`` of an embedded or known data set (``cmudict:train``).
        held_out: without ``dev``, this share of the training sources is kept apart as dev data.
        source_symbols, target_symbols: ``auto``, ``characters``, ``graphemes``, ``spaced`` or ``subwords``, which are
            learnt from the training pairs.
        vocabulary: subwords at most; subwords: ``bpe`` or ``unigram``.
        source_normalise, target_normalise: Unicode form ``nfc``, ``nfd`` or ``none``; ``auto`` is NFC except where
            composition would hide the letters (Korean syllables).
        features: ``auto`` reads a third column of tags (``V;PST``) where the training file has one; ``none`` expects
            two columns.

    >>> DataConfig(train="train.tsv").source_symbols
    'auto'
    """

    train: str = ""
    dev: str = ""
    held_out: float = 0.1
    source_symbols: Splitting = "auto"
    source_normalise: Normalising = "auto"
    target_symbols: Splitting = "auto"
    target_normalise: Normalising = "auto"
    features: Literal["auto", "none"] = "auto"
    vocabulary: int = 8000
    subwords: SubwordKind = "bpe"

    def __post_init__(self) -> None:
        check_numbers(self, "data", 1, WIDTH, "vocabulary")
        check_shares(self, "data", "(0, 1)", "held_out")
        check_choices(self, "data")


@dataclass(frozen=True, kw_only=True)
class TransduceConfig:
    """Everything about a transduction run; ``search`` is the one used to measure on the dev data while training.

    In plain settings ``model`` may be the name of a preset (``model: causal``), or a section that names its ``family``:
    ``recurrent``, which it is without a name, ``monotonic``, ``transformer`` or ``pretrained``. What ``training`` does
    not say is what the family learns with. Where nothing is said of the model it is chosen by the training pairs.

    >>> TransduceConfig(data=DataConfig(train="train.tsv")).model
    AutoConfig()
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=AutoConfig)
    training: TrainingConfig = field(default=cast(TrainingConfig, None))  # its family's, which only an instance knows
    search: SearchConfig = field(default_factory=SearchConfig)

    task = "transduce"
    presets = PRESETS
    families = FAMILIES
    learns_with = FAMILY_TRAINING
    aliases = {"attention.map": "model.attention_map", "model.attention.map": "model.attention_map"}  # noqa: RUF012

    def __post_init__(self) -> None:
        if self.training is None:
            family = next(name for name, kind in FAMILIES.items() if isinstance(self.model, kind))
            object.__setattr__(self, "training", TrainingConfig(**learnt_with(type(self), family, {})))
