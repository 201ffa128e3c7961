"""What a transducer is asked and what it answers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from thalweg.inference import Hypotheses, Loop, loop_at_end
from thalweg.tasks.transduce.codec import Codec, Piece


class Joins(Protocol):
    """A way of writing symbols as one text."""

    def join(self, symbols: Iterable[str], /) -> str:
        """The text that symbols spell."""
        ...


class Source(NamedTuple):
    """A text, the tags it comes with where a model reads them, and where it stands, ``file:line``, for errors.

    >>> Source("run", ("V", "PST")).features
    ('V', 'PST')
    """

    text: str
    features: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Answer:
    """One predicted text with its log-probability.

    Attributes:
        text, symbols: the answer, whole and cut.
        log_prob: log p(answer | source).
        finished: false for one cut at the length limit.
        attention: weights per answer symbol (end included) and source symbol, where they were asked for.
        share: its probability over that of all answers given beside it, itself included.
        optimal: whether it is proved to be the most probable of all; None from searches that prove nothing.
        votes: how many runs of a jury gave it; None where none voted.
        origin: who gave it, where that is not always the model.

    >>> Answer("k æ t", ("k", "æ", "t"), 0.0, True).probability
    1.0
    """

    text: str
    symbols: tuple[str, ...]
    log_prob: float
    finished: bool
    attention: list[list[float]] | None = None
    share: float = 1.0
    optimal: bool | None = None
    votes: int | None = None
    origin: str | None = None

    @property
    def probability(self) -> float:
        """exp(log_prob)."""
        return math.exp(self.log_prob)

    @property
    def loop(self) -> Loop | None:
        """The cycle of symbols that the answer ends in, where it goes round in circles.

        >>> Answer("nononono", tuple("nononono"), -9.0, False).loop
        Loop(cycle=('n', 'o'), times=4)
        """
        return loop_at_end(self.symbols)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; what was not asked for, cannot be told, or is not there (a loop) is left out.

        >>> sorted(Answer("a", ("a",), 0.0, True).to_json())
        ['finished', 'log_prob', 'probability', 'share', 'text']
        """
        fields: dict[str, Any] = {
            "text": self.text,
            "log_prob": self.log_prob,
            "probability": self.probability,
            "share": self.share,
            "finished": self.finished,
        }
        loop = self.loop
        round_and_round = None if loop is None else {"cycle": list(loop.cycle), "times": loop.times}
        more = {"from": self.origin, "optimal": self.optimal, "votes": self.votes, "loop": round_and_round}
        more |= {"attention": self.attention}
        return fields | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True)
class Prediction:
    """The answers for one source, best first.

    Attributes:
        source: the text; features: the tags it came with.
        unknown: its symbols that the model has never seen; unknown_features: its tags likewise.

    >>> Prediction("cat", ()).unknown
    ()
    """

    source: str
    answers: tuple[Answer, ...]
    unknown: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    unknown_features: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        tags = {"features": list(self.features)} if self.features else {}
        answers = [answer.to_json() for answer in self.answers]
        return {"source": self.source, **tags, "answers": answers, "unknown": list(self.unknown)}

    def tsv(self) -> Iterator[str]:
        """A line an answer: source, answer, log-probability, probability, and the tags where there are some.

        >>> list(Prediction("cat", (Answer("k æ t", ("k", "æ", "t"), 0.0, True),)).tsv())
        ['cat\\tk æ t\\t0.000000\\t1']
        """
        tags = f"\t{';'.join(self.features)}" if self.features else ""
        if not self.answers:
            yield f"{self.source}\t\t\t{tags}"
        for answer in self.answers:
            yield f"{self.source}\t{answer.text}\t{answer.log_prob:.6f}\t{answer.probability:.6g}{tags}"


def read_answers(found: Hypotheses, target: Codec, *, proving: bool) -> list[tuple[Answer, ...]]:
    """Hypotheses as texts, for each item; ``proving`` says whether the search's ``optimal`` means anything.

    >>> import torch
    >>> from thalweg.data import Alphabet, Symbols
    >>> one = torch.ones(1, 1, dtype=torch.long)
    >>> found = Hypotheses(torch.tensor([[[4, 3]]]), 2 * one, -one.double(), one.bool(), one[0].bool())
    >>> read_answers(found, Codec(Symbols(), Alphabet(["a"])), proving=True)[0][0].text
    'a'
    """
    tokens, lengths = found.tokens.tolist(), found.lengths.tolist()
    scores, finished, optimal = found.scores.tolist(), found.finished.tolist(), found.optimal.tolist()
    rows, decode, join = [], target.alphabet.decode, target.symbols.join
    for b in range(found.size):
        if len(lengths[b]) == 1 and lengths[b][0]:  # alone, it has all of the probability
            symbols, proved = decode(tokens[b][0][: lengths[b][0]]), optimal[b] if proving else None
            rows.append((Answer(join(symbols), symbols, scores[b][0], finished[b][0], optimal=proved),))
            continue
        there = [j for j, length in enumerate(lengths[b]) if length]
        pieces = [decode(tokens[b][j][: lengths[b][j]]) for j in there]
        shares = _shares([(symbols, finished[b][j], scores[b][j]) for symbols, j in zip(pieces, there, strict=True)])
        rows.append(
            tuple(
                Answer(
                    join(symbols),
                    symbols,
                    scores[b][j],
                    finished[b][j],
                    share=share,
                    optimal=optimal[b] and j == 0 if proving else None,
                )
                for symbols, j, share in zip(pieces, there, shares, strict=True)
            )
        )
    return rows


def _shares(answers: Sequence[tuple[Piece, bool, float]]) -> list[float]:
    """What each has of the probability of all: its symbols, whether it is finished, its log-probability."""
    if not answers:
        return []
    best = max(score for _, _, score in answers)
    powers = [math.exp(score - best) for _, _, score in answers]
    total = sum({answer[:2]: power for answer, power in zip(answers, powers, strict=True)}.values())
    return [power / total for power in powers]


def with_shares(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """The answers with their shares of the probability of all; equal ones count once.

    >>> [round(a.share, 2) for a in with_shares([Answer("a", ("a",), -1.0, True), Answer("b", ("b",), -2.0, True)])]
    [0.73, 0.27]
    """
    shares = _shares([(answer.symbols, answer.finished, answer.log_prob) for answer in answers])
    return tuple(dataclasses.replace(a, share=share) for a, share in zip(answers, shares, strict=True))


def with_attention(
    rows: Sequence[Sequence[Answer]], looks: Iterable[list[list[float]] | None]
) -> list[tuple[Answer, ...]]:
    """The answers with where each looked, one matrix for each answer of each row in order.

    >>> with_attention([[Answer("a", ("a",), -1.0, True)]], [[[1.0]]])[0][0].attention
    [[1.0]]
    """
    each = iter(looks)
    return [tuple(dataclasses.replace(answer, attention=next(each)) for answer in row) for row in rows]


def cut_at(symbols: Piece, strange: set[str], tags: Piece = ()) -> list[tuple[bool, Piece]]:
    """Runs of known symbols (True), the tags before each, and of unknown ones (False).

    >>> cut_at(tuple("ab!c"), {"!"}, ("<V> ",))
    [(True, ('<V> ', 'a', 'b')), (False, ('!',)), (True, ('<V> ', 'c'))]
    """
    if not strange:
        return [(True, (*tags, *symbols))] if symbols else []
    runs = itertools.groupby(symbols, key=lambda symbol: symbol not in strange)
    return [(known, (*tags, *run) if known else tuple(run)) for known, run in runs]


def join_answers(row: Sequence[tuple[Answer, ...]], target: Joins, k: int) -> tuple[Answer, ...]:
    """The k best joint answers of independent pieces: log-probabilities add; equal texts count once, at their best.

    >>> from thalweg.data import Symbols
    >>> pieces = [(Answer("a", ("a",), -1.0, True),), (Answer("!", ("!",), 0.0, True),)]
    >>> join_answers(pieces, Symbols(), 1)[0].text
    'a!'
    """
    best: list[Answer] = [Answer("", (), 0.0, True, optimal=True)] if row else []
    for options in row:
        joined = [_both(a, b) for a in best for b in options]
        joined.sort(key=lambda answer: (answer.finished, answer.log_prob), reverse=True)
        first = {answer.symbols: answer for answer in reversed(joined)}
        best = [answer for answer in joined if first[answer.symbols] is answer][:k]
    return with_shares([dataclasses.replace(answer, text=target.join(answer.symbols)) for answer in best])


def _both(a: Answer, b: Answer) -> Answer:
    optimal = None if a.optimal is None or b.optimal is None else a.optimal and b.optimal
    return Answer("", a.symbols + b.symbols, a.log_prob + b.log_prob, a.finished and b.finished, optimal=optimal)
