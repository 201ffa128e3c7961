"""Several runs as one: the mean of their probabilities, or a vote."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError
from thalweg.inference import Ensemble
from thalweg.inference.search.ensemble import count_votes
from thalweg.layers.padded import Padded
from thalweg.tasks.boxed.models import boxed
from thalweg.tasks.registry import task_of_run
from thalweg.tasks.transduce.answers import Answer, Prediction, Source
from thalweg.tasks.transduce.models import SequenceModel
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.transducer import Transducer, load, members_of


class AttentiveEnsemble(Ensemble):
    """An :class:`Ensemble` of models that also says where the members looked, on average.

    >>> from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
    >>> models = [Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7) for _ in range(2)]
    >>> AttentiveEnsemble(models).vocab_size
    7
    """

    def __init__(self, members: Sequence[SequenceModel]) -> None:
        super().__init__(members)
        self.members = tuple(members)

    def attention_weights(self, source: Padded, target: Padded) -> Tensor | None:
        """``(B, T, S)`` mean over the members that have attention; None where none has."""
        found = [member.attention_weights(source, target) for member in self.members]
        weights = [each for each in found if each is not None]
        return torch.stack(weights).mean(dim=0) if weights else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of all members."""
        return itertools.chain.from_iterable(member.parameters() for member in self.members)


class VotingTransducer(Transducer):
    """Runs that each answer on their own; the answer that most give comes first.

    Args:
        members: trained on whatever they were; each reads the text in its own way. The first says where answers looked.
    """

    def __init__(self, members: Sequence[Transducer]) -> None:
        first = members[0]
        super().__init__(first.model, first.source, first.target, longest=first.longest, meta=first.meta)
        self.members = tuple(members)

    def predict(self, texts: Iterable[str | Source], *, k: int = 1, **options: Any) -> Iterator[Prediction]:
        """At most k answers for each text, by votes; of as many votes, the more probable first.

        Options as :meth:`Transducer.predict`; each member gives its best answer.
        """
        copies = itertools.tee(texts, len(self.members))
        streams = [member.predict(copy, k=1, **options) for member, copy in zip(self.members, copies, strict=True)]
        for predictions in zip(*streams, strict=True):
            yield dataclasses.replace(predictions[0], answers=_count(predictions)[:k])

    def stream(self, text: str, **options: Any) -> Iterator[Answer]:
        """A vote does not grow."""
        raise ConfigError("a vote has no answer that grows, got several runs that vote; stream one, or their mean")

    def draw_tree(self, source: Source, path: Path, *, how: SearchConfig) -> None:
        """A vote has no tree."""
        raise ConfigError("--tree draws one beam, got several that vote; leave out --vote or --tree")


def open_runs(
    runs: Sequence[str | Path], *, vote: bool = False, precision: str = "float32", device: str = "auto"
) -> Transducer:
    """One run as it is, several as the mean of their probabilities or as a vote.

    Args:
        runs: run directories, each with its members if it is of an ensemble; for the mean their alphabets must be
            equal, for a vote the way of writing targets.
        vote: each run gives its own answer, and the answer of most is taken.
        precision, device: as for :func:`load`.

    >>> open_runs(["absent"])
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    runs = [member for run in runs for member in members_of(run)]
    members = [_open(run, precision=precision, device=device) for run in runs]
    first = members[0]
    if len(members) == 1:
        return first
    for run, member in zip(runs[1:], members[1:], strict=True):
        _check_alike(runs[0], first, run, member, vote=vote)
    if vote:
        return VotingTransducer(members)
    longest = max(member.longest for member in members)
    together = AttentiveEnsemble([member.model for member in members])
    return Transducer(together, first.source, first.target, longest=longest, meta=first.meta)


def _open(run: str | Path, **options: str) -> Transducer:
    """A run's transducer; of a model in the box the one that its own task makes."""
    return load(run, **options) if boxed(run) is None else task_of_run(run).load(run, **options)


def _check_alike(first: str | Path, one: Transducer, run: str | Path, other: Transducer, *, vote: bool) -> None:
    """Refuse runs that cannot answer together."""
    if one.featured != other.featured:
        raise ConfigError(f"{run}: expected a run with{'' if one.featured else 'out'} features as {first}, got another")
    if vote:
        if one.target.symbols != other.target.symbols:
            raise ConfigError(
                f"{run}: expected targets cut as in {first} ({one.target.symbols}), got {other.target.symbols}"
            )
        return
    for name in ("source", "target"):
        here, there = getattr(one, name), getattr(other, name)
        if here.symbols != there.symbols:
            raise ConfigError(
                f"{run}: expected {name} symbols as in {first} ({here.symbols}), got {there.symbols}; "
                "train it alike, or use --vote"
            )
        if here.alphabet != there.alphabet:
            differing = sorted(set(here.alphabet.symbols) ^ set(there.alphabet.symbols))
            raise ConfigError(
                f"{run}: expected the {name} alphabet of {first}, got another ({len(differing)} symbols differ: "
                f"`{differing[0]}` ...); train it on the same data, or use --vote"
            )


def _count(predictions: Sequence[Prediction]) -> tuple[Answer, ...]:
    """The first answers of several predictions by votes, each as its first voter gave it; its ``share`` is of votes."""
    first = [prediction.answers[0] for prediction in predictions if prediction.answers]
    given = {answer.text: answer for answer in reversed(first)}
    return tuple(
        dataclasses.replace(given[vote.answer], votes=vote.votes, share=vote.votes / len(first), optimal=None)
        for vote in count_votes((answer.text, answer.probability) for answer in first)
    )
