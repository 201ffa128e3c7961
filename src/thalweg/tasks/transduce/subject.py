"""Transducers to diagnose: a run's best model, or one as it starts, with pairs to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import nn

from thalweg.data import Example
from thalweg.data.text.named_pairs import open_pairs
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.errors import ConfigError, DataError
from thalweg.tasks.config import config_from
from thalweg.tasks.diagnosis.subject import Subject, Words, planned_steps
from thalweg.tasks.runs import as_begun
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.measures import PairDiagnosis, diagnose_pairs
from thalweg.tasks.transduce.models import build_model
from thalweg.tasks.transduce.training import batches_of, examples_of, prepare
from thalweg.tasks.transduce.transducer import load


@dataclass(frozen=True)
class PairSubject(Subject):
    """A transducer with pairs to run it on.

    >>> PairSubject.words.per
    'a symbol'
    """

    words: ClassVar[Words] = Words(
        items="pairs",
        given="source",
        other="another pair's source",
        per="a symbol",
        reads="read its source",
        frequencies="symbol frequencies",
        sizes=("rows", "source", "target"),
        shape="sources of up to {}, targets of up to {} symbols",
    )

    config: TransduceConfig
    examples: tuple[Example, ...]
    target: Codec

    def measure(self, rows: int, steps: int) -> PairDiagnosis:
        """All that applies to a transducer."""
        return diagnose_pairs(self, rows=rows, steps=steps)


def open_pairs_subject(
    config: TransduceConfig | None,
    trained: Path | None = None,
    *,
    data: str | None = None,
    root: Path | None = None,
    device: str = "cpu",
    name: str = "config",
) -> PairSubject:
    """A run's best model on its dev pairs, or one as it starts on its training pairs.

    >>> from thalweg.tasks.transduce.config import DataConfig
    >>> data = DataConfig(train="cmudict:dev", dev="cmudict:dev")
    >>> open_pairs_subject(TransduceConfig(data=data)).steps > 0
    True
    """
    if trained is not None:
        run = load(trained, device=device)
        config = config_from(as_begun(run.meta["config"], TransduceConfig), TransduceConfig, where=str(trained))
        _check_own(config)
        spec = data or config.data.dev or config.data.train
        examples = _examples(spec, root, run.source, run.target)
        steps = planned_steps(trained)
        return PairSubject(name, True, cast(nn.Module, run.model), config, steps, spec, examples, run.target)
    assert config is not None
    _check_own(config)
    ready = prepare(config, root)
    config = ready.config
    torch.manual_seed(config.training.seed)
    model = build_model(config, ready.source, ready.target).to(device)
    sizes = {"size": config.training.batch_size, "tokens": config.training.batch_tokens}
    batches = batches_of(ready.examples, ready.target, **sizes)
    steps = config.training.planned(len(batches)).epochs * len(batches)
    spec = data or config.data.train
    examples = _examples(data, root, ready.source, ready.target) if data else tuple(ready.examples)
    return PairSubject(name, False, model, config, steps, spec, examples, ready.target)


def _check_own(config: TransduceConfig) -> None:
    if isinstance(config.model, PretrainedConfig):
        raise ConfigError("a diagnosis looks into models of our own, got a pretrained one; `thalweg show` counts it")


def _examples(spec: str, root: Path | None, source: Codec, target: Codec) -> tuple[Example, ...]:
    try:
        pairs = open_pairs(spec, root, features=bool(source.features))
    except DataError as error:
        raise DataError(f"{error}; give the pairs to look at with --data FILE") from None
    return tuple(examples_of(pairs, source, target))
