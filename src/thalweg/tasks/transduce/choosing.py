"""The model where nothing is said about it: by how many pairs there are, how long they are, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from thalweg.data import Example
from thalweg.energies.monotonic.model import MonotonicConfig
from thalweg.energies.seq2seq.model import Seq2SeqConfig
from thalweg.learning.settings import TrainingConfig
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.presets import FAMILY_TRAINING, AutoConfig

# Pairs up to which symbols share vectors and dropout is high: with 800 both help, with 8,000 such dropout costs much
# and sharing gains nothing.
FEW = 2000
# Pairs from which on a wide model that learns where to look is taken: with 33,000 English ones it makes fewer errors.
MANY = 20_000
# Of `order`: monotone data have 0.5 to 1, reversed ones the same with a minus, unrelated ones about 0.
_ALONG = 0.4
# Source symbols times target symbols of a pair, on average: what its training step keeps in memory grows with it.
_CELLS = 400
# Pairs that are looked at.
_LOOKED = 1000


def order_of(examples: Sequence[Example]) -> float:
    r"""How far targets run along their sources: the correlation of the places of symbols that belong together.

    Each target symbol belongs to the source symbol of its pair that it shares most pairs with, by
    :math:`|P_a \cap P_b| / |P_a \cup P_b|`, where :math:`P_a` are the pairs with symbol a; one that could be several
    is passed over. Places count from 0 to 1. Returns a number from -1 (backwards) to 1; 0 where nothing can be told.

    >>> from itertools import product
    >>> words = [tuple(word) for word in product((4, 5, 6), repeat=3) if len(set(word)) == 3]
    >>> round(order_of([Example(word, word) for word in words for _ in range(2)]), 6)
    0.0
    >>> words = [(4, 5), (5, 6), (6, 4), (4, 7), (7, 5)]
    >>> [round(order_of([Example(word, word[::step]) for word in words]), 6) for step in (1, -1)]
    [1.0, -1.0]
    """
    looked = [x for x in examples[:: max(1, len(examples) // _LOOKED)] if len(x.source) > 1 and len(x.target) > 1]
    if not looked:
        return 0.0
    sizes = [1 + max(max(getattr(x, side)) for x in looked) for side in ("source", "target")]
    both, here, there = np.zeros(sizes), np.zeros(sizes[0]), np.zeros(sizes[1])
    for x in looked:
        a, b = np.unique(x.source), np.unique(x.target)
        both[np.ix_(a, b)] += 1
        here[a] += 1
        there[b] += 1
    shared = both / np.maximum(here[:, None] + there - both, 1)
    places: list[tuple[float, float]] = []
    for x in looked:
        found = shared[np.ix_(x.source, x.target)]
        best = found == found.max(axis=0)
        for t in np.flatnonzero(best.sum(axis=0) == 1):
            places.append((int(best[:, t].argmax()) / (len(x.source) - 1), t / (len(x.target) - 1)))
    spread = np.array(places).reshape(-1, 2).std(axis=0) if places else np.zeros(2)
    return float(np.corrcoef(np.array(places).T)[0, 1]) if spread.min() > 0 else 0.0


def choose_model(config: TransduceConfig, examples: Sequence[Example], *, tagged: bool) -> tuple[TransduceConfig, str]:
    """The config with a model in place of ``auto``, and what was picked and why, in a line; others as they are.

    Training settings that stand at their defaults become those that the model's family learns with.

    Args:
        examples: the training pairs as numbers; tagged: whether a third column of tags stands before the sources.

    >>> config, why = choose_model(TransduceConfig(), [Example((4, 5), (4, 5))] * 9, tagged=False)
    >>> config.model.attention, why
    ('additive', 'picked  lstm-attention: no common order of sources and targets (0.00) in 9 pairs; ...')
    """
    if not isinstance(config.model, AutoConfig):
        return config, ""
    cells = sum((len(x.source) + 1) * (len(x.target) + 1) for x in examples) / max(1, len(examples))
    order = 0.0 if tagged else order_of(examples)
    count = f"{len(examples):,} pairs"
    along = f"targets run along their sources ({order:.2f}) in {count}"
    model: Seq2SeqConfig | MonotonicConfig = Seq2SeqConfig()
    if tagged:
        why = f"tags stand before the sources of {count}"
    elif order < _ALONG:
        why = f"no common order of sources and targets ({order:.2f}) in {count}"
    elif cells > _CELLS:
        why = f"{count} are long ({cells:,.0f} cells each)"
    elif len(examples) >= MANY:
        model, why = Seq2SeqConfig(hidden=256, dropout=0.2), f"{count} teach 256 units where to look"
    elif len(examples) > FEW:
        model, why = MonotonicConfig(dropout=0.2, spelling=False), along
    else:
        model, why = MonotonicConfig(), f"{along}, and the pairs are few"
    family, name = ("monotonic", "monotonic") if isinstance(model, MonotonicConfig) else ("recurrent", "lstm-attention")
    usual, how = TrainingConfig(), config.training
    brought = {key: value for key, value in FAMILY_TRAINING[family].items() if getattr(how, key) == getattr(usual, key)}
    config = dataclasses.replace(config, model=model, training=dataclasses.replace(how, **brought))
    return config, f"picked  {name}: {why}; --model takes another"
