"""What a task asks of a model, and models made from a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from thalweg.energies.monotonic.model import Monotonic, MonotonicConfig
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.model import Transformer
from thalweg.inference.search.protocol import Autoregressive
from thalweg.layers.low_precision import Precision, reduce_precision
from thalweg.layers.padded import Padded
from thalweg.layers.spelling import spellings
from thalweg.limits import check_fits
from thalweg.tasks.runs import check_size
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.presets import AutoConfig
from thalweg.tasks.transduce.pretrained import build_pretrained, restore_pretrained

M = TypeVar("M", bound=nn.Module)


class SequenceModel(Autoregressive, Protocol):
    """A model of target sequences given a source: what a search asks, and where its answers looked.

    >>> model: SequenceModel = Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7)
    >>> model.vocab_size
    7
    """

    def attention_weights(self, source: Padded, target: Padded) -> Tensor | None:
        """``(B, T, S)`` where each target position looked, or None."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights; they say where the model is."""
        ...


def device_of_model(model: SequenceModel) -> torch.device:
    """Where a model's weights are; the CPU for one without.

    >>> device_of_model(Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7)).type
    'cpu'
    """
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def build_model(
    config: TransduceConfig, source: Codec, target: Codec, *, trained: bool = False, masked: Path | None = None
) -> Seq2Seq | Monotonic | Transformer | Pretrained:
    """A model of the config's family and shape for the two alphabets: fresh, or of a checkpoint.

    One that the memory cannot hold, with what training adds where it is to be ``trained`` there, is an
    :class:`~thalweg.errors.OutOfMemoryError` before anything is allocated. ``masked`` is the folder of an encoder that
    a pretrained family's pair is made of.

    >>> from thalweg.data import Alphabet, Symbols
    >>> from thalweg.tasks.registry import build_config
    >>> side = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> build_model(build_config({"model": {"hidden": 8}}), side, side).vocab_size
    7
    """
    if isinstance(config.model, PretrainedConfig):
        return build_pretrained(config.model, source, target, masked)
    widths = "width, model.feedforward" if isinstance(config.model, TransformerConfig) else "hidden, model.embedding"
    plain = partial(_model, _without_pointer(config), source, target)
    check_fits(plain, trained=trained, remedy=f"lower model.{widths} or the number of layers")
    return _model(config, source, target)


def _model(config: TransduceConfig, source: Codec, target: Codec) -> Seq2Seq | Monotonic | Transformer:
    S, V = len(source.alphabet), len(target.alphabet)
    if isinstance(config.model, AutoConfig):  # without pairs there is nothing to choose by
        return Seq2Seq(Seq2SeqConfig(), source_size=S, target_size=V, **target.special)
    if isinstance(config.model, Seq2SeqConfig):
        return Seq2Seq(config.model, source_size=S, target_size=V, **target.special)
    if isinstance(config.model, MonotonicConfig):
        spelt = (_spelt(source), _spelt(target)) if config.model.spelling else None
        return Monotonic(config.model, source_size=S, target_size=V, spelt=spelt, **target.special)
    assert isinstance(config.model, TransformerConfig)
    copies = None
    if config.model.pointer:
        # A source symbol copies to the target symbol that is written alike.
        shared = [symbol for symbol in source.alphabet.symbols if symbol in target.alphabet]
        copies = torch.full((S,), -1)
        copies[source.alphabet.encode(shared)] = torch.tensor(target.alphabet.encode(shared), dtype=torch.long)
    own = {"features": source.features, "copies": copies, **target.special}
    return Transformer(config.model, source_size=S, target_size=V, **own)


def _spelt(side: Codec) -> Tensor:
    """Of which characters each symbol is written; special symbols and tags are not."""
    unwritten = {*side.special.values(), *side.features}
    return spellings(["" if number in unwritten else name for number, name in enumerate(side.alphabet.names)])


def _without_pointer(config: TransduceConfig) -> TransduceConfig:
    """For building without memory: what a pointer copies is looked at."""
    if not isinstance(config.model, TransformerConfig):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, pointer=False))


def load_model(
    config: TransduceConfig,
    source: Codec,
    target: Codec,
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Any] | None = None,
) -> Seq2Seq | Monotonic | Transformer | Pretrained:
    """The model of :func:`build_model` with the weights of a file.

    Args:
        stored: of the pretrained family, the network's settings beside the weights.

    >>> from thalweg.data import Alphabet, Symbols
    >>> from thalweg.tasks.registry import build_config
    >>> side, config = Codec(Symbols(), Alphabet.build(["abc"])), build_config({"model": {"hidden": 8}})
    >>> load_model(config, side, side, build_model(config, side, side).state_dict()).vocab_size
    7
    """
    if isinstance(config.model, PretrainedConfig):
        restore = partial(restore_pretrained, config.model, stored or {})
        check_size(restore, weights)
        pretrained = restore()
        pretrained.load_state_dict(weights)
        return pretrained
    check_size(partial(_model, _without_pointer(config), source, target), weights)
    model = _model(config, source, target)
    model.load_state_dict(weights)
    return model


def longest_answer(model: Any, longest: int) -> int:
    """Symbols that an answer may have where nothing is said: twice the longest training target and 10.

    A model with learned positions may reach less far.

    >>> longest_answer(None, 20)
    50
    """
    reach = getattr(model, "reach", None)
    return 2 * longest + 10 if reach is None else min(2 * longest + 10, reach)


def with_precision(model: M, precision: str) -> M:
    """The model with smaller numbers in its linear layers, for the CPU; ``float32`` leaves it as it is.

    >>> model = nn.Linear(2, 2)
    >>> with_precision(model, "float32") is model
    True
    """
    if precision == "float32":
        return model
    return cast(M, reduce_precision(model, cast(Precision, precision)))
