"""Error rates of predicted symbol sequences against one or several references, with bootstrap intervals.

An *item* is a list of hypotheses, best first (it may be empty), and a list of one or more references; each is
a sequence of symbols (``tuple[str, ...]``), never a plain string, so that a phone of several letters counts
as one symbol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.errors import ConfigError, DataError, ShapeError, nearest

__all__ = [
    "METRICS",
    "Codes",
    "Score",
    "as_score",
    "check_items",
    "check_options",
    "closest_reference",
    "draws",
    "edit_distance",
    "metric_direction",
    "score_strings",
]

METRICS: dict[str, bool] = {"accuracy": True, "cer": False, "wer": False, "bleu": True}
"""The scores of :func:`score_strings` and whether higher is better; ``wer@k`` comes on request."""

# The scores of classes, whose home is `classification`; here, so that one function knows the direction of all.
_OF_CLASSES = {"f1": True, "nll": False, "brier": False, "ece": False}

# Counts drawn at once by the bootstrap: 8 MiB of float64 whatever the number of items.
_CHUNK = 1 << 20

# Columns of the per-item statistics; the errors within the first k follow, one column for each k.
_CORRECT, _EDITS, _LENGTH, _WORD_EDITS, _WORDS, _BLEU = range(6)
_AT_K = _BLEU + 10  # BLEU has two lengths, four match counts and four n-gram counts

Distance = Callable[[Sequence[int], Sequence[int]], int]


class Codes(dict[Hashable, int]):
    """Numbers symbols in the order in which they are first seen: 0, 1, 2, ...

    Equal symbols get equal numbers and different ones different numbers. rapidfuzz compares hashes and
    sacrebleu splits at white space; numbers make both exact for any symbol, even a space or an empty string.

    >>> Codes().encode(("ʃ", " ", "ʃ"))
    (0, 1, 0)
    """

    def __missing__(self, symbol: Hashable) -> int:
        return self.setdefault(symbol, len(self))

    def encode(self, symbols: Sequence[Hashable]) -> tuple[int, ...]:
        """The numbers of a sequence of symbols; O(length)."""
        return tuple([self[symbol] for symbol in symbols])


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    r"""Levenshtein distance: the fewest insertions, deletions and substitutions that turn a into b.

    .. math:: d_{ij} = \min(d_{i-1,j} + 1,\; d_{i,j-1} + 1,\; d_{i-1,j-1} + [a_i \ne b_j])

    Time O(len(a) len(b) / 64) (bit-parallel, rapidfuzz). Levenshtein (1966).

    >>> edit_distance(("K", "AE", "T"), ("K", "AH", "T", "S"))
    2
    """
    codes = Codes()
    return _distance()(codes.encode(a), codes.encode(b))


def closest_reference(hypothesis: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The reference that a hypothesis is charged against: its index and the edits to it.

    The one with the smallest ``edits / max(length, 1)``; among equals the fewest edits, then the longer, then
    the first. There must be at least one reference. Time: one edit distance for each reference.

    >>> closest_reference(tuple("ab"), [tuple("xy"), tuple("abc")])
    (1, 1)
    """
    if not references:
        raise DataError("`references` must hold at least one reference, got none; drop the item")
    codes = Codes()
    return _closest(codes.encode(hypothesis), [codes.encode(r) for r in references], _distance())


@dataclass(frozen=True)
class Score:
    """One figure with its interval.

    Attributes:
        name: for display (``"CER"``; use ``dataclasses.replace(score, name="PER")`` for phones).
        value: the figure on all items; rates are fractions (0.2 is 20 %), BLEU is 0..100.
        low: lower end of the bootstrap interval.
        high: upper end; equal to ``low`` and ``value`` where nothing was resampled.
        n: number of items.
        higher_is_better: the direction.

    Printing leaves out an interval of no width.

    >>> print(Score("CER", 0.20717, 0.199, 0.21512, 1000, higher_is_better=False))
    CER 0.2072 [0.1990, 0.2151]
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    higher_is_better: bool

    def __str__(self) -> str:
        digits = 2 if self.name == "BLEU" else 4
        text = f"{self.name} {self.value:.{digits}f}"
        return text if self.low == self.high else f"{text} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def to_json(self) -> dict[str, Any]:
        """The attributes as a dictionary that ``json`` can write; ``Score(**d)`` reads it back."""
        return asdict(self)


def metric_direction(name: str) -> bool:
    """Whether a higher value of a metric is better: ``METRICS``, ``wer@k``, ``loss``, and those of classes.

    The latter are the keys of :func:`~thalweg.metrics.classification.score_classes`.

    >>> metric_direction("accuracy"), metric_direction("wer@3"), metric_direction("loss"), metric_direction("f1")
    (True, False, False, True)
    """
    known = METRICS | _OF_CLASSES
    if name in known:
        return known[name]
    if found := re.fullmatch(r"(wer|accuracy)@[1-9][0-9]*", name, re.ASCII):
        return found[1] == "accuracy"
    if name == "loss":
        return False
    remedy = nearest(name, [*known, "loss", "wer@3"])
    raise ConfigError(f"metric must be one that is measured, got `{name}`; {remedy}")


def score_strings(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    *,
    ks: Sequence[int] = (),
    words: Literal["item", "space"] = "item",
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Score]:
    r"""Accuracy, CER, WER, WER@k and BLEU of k-best lists, each with a percentile bootstrap interval.

    With N items, :math:`h_i` the best hypothesis (the empty sequence if there is none), :math:`r_i` its
    :func:`closest_reference` and d the edit distance over symbols:

    * ``accuracy``: share of items whose best hypothesis equals any reference;
    * ``cer``: :math:`\sum_i d(h_i, r_i) / \max(1, \sum_i |r_i|)`; on phones people call it PER;
    * ``wer``: with ``words="item"`` each item is one word, so 1 - accuracy; with ``words="space"`` symbols
      between ``" "`` symbols form words and it is the same ratio as ``cer`` over words;
    * ``wer@k`` for k in ``ks``: share of items with none of the first k hypotheses equal to any reference;
    * ``bleu``: sacrebleu's corpus BLEU (0..100; four orders, exponential smoothing, closest reference
      length), over symbols or, with ``words="space"``, words. It is 0 where no hypothesis has four tokens.

    Args:
        hypotheses: N lists, best first.
        references: N lists of one or more.
        resamples: bootstrap draws of N items with replacement, shared by all scores; 0 gives no intervals.
        seed: of the draws; the same seed gives the same intervals.
        level: coverage of the interval between the ``(1 ± level) / 2`` quantiles.

    Time O(N) edit distances and n-gram counts, then O(resamples N); memory O(N), since only sums of per-item
    counts are resampled, in pieces. Papineni et al. (2002), Efron (1979), Post (2018).

    >>> hypotheses = [[tuple("cat"), tuple("cot")], [tuple("dig"), tuple("dog")]]
    >>> scores = score_strings(hypotheses, [[tuple("cat")], [tuple("dog")]], ks=(2,), resamples=0)
    >>> print(scores["accuracy"], scores["cer"], scores["wer@2"], sep="; ")
    accuracy 0.5000; CER 0.1667; WER@2 0.0000
    """
    check_options(ks, resamples, level)
    if words not in ("item", "space"):
        raise ConfigError(f"`words` must be item or space, got `{words}`; {nearest(words, ['item', 'space'])}")
    check_items(hypotheses, references)
    n = len(hypotheses)
    statistics = np.array(list(_item_rows(hypotheses, references, ks, words)), dtype=np.float64)  # (N, M)
    values = _scores(statistics.sum(axis=0, keepdims=True), n, ks)
    if resamples:
        tail = (1 - level) / 2
        drawn = _scores(_resampled_totals(statistics, resamples, seed), n, ks)
        ends = {key: np.quantile(of_draws, (tail, 1 - tail)) for key, of_draws in drawn.items()}
    else:
        ends = {key: np.repeat(value, 2) for key, value in values.items()}
    names = {key: key if key == "accuracy" else key.upper() for key in values}
    return {key: as_score(key, names[key], value, ends[key], n) for key, value in values.items()}


def as_score(key: str, name: str, value: NDArray[Any], ends: NDArray[Any], n: int) -> Score:
    """A metric of n items by its key: its first value, and the two ends of its interval."""
    return Score(name, float(value[0]), float(ends[0]), float(ends[1]), n, metric_direction(key))


def check_items(hypotheses: Sequence[Sequence[Sequence[str]]], references: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise unless there are as many k-best lists as reference lists, at least one, and all hold sequences.

    >>> check_items([[("a",)], []], [[("a",)], [("b",), ("c",)]])
    """
    if len(hypotheses) != len(references):
        raise ShapeError(
            "`hypotheses` and `references` must have one list for each item, "
            f"got {len(hypotheses)} and {len(references)}; pass an empty list where nothing was predicted"
        )
    if not hypotheses:
        raise DataError("there must be at least one item to score, got none; check that the file is not empty")
    for item, answers in enumerate(references):
        if not answers:
            raise DataError(f"item {item} must have at least one reference, got none; drop the item")
    for name, lists in (("hypotheses", hypotheses), ("references", references)):
        for item, sequences in enumerate(lists):
            # A string is a sequence of strings as well, so this mistake would give figures rather than fail.
            if isinstance(sequences, str) or any(isinstance(sequence, str) for sequence in sequences):
                raise ShapeError(
                    f"`{name}[{item}]` must be a list of symbol sequences, got {sequences!r:.60}; "
                    "split it first, e.g. [tuple(text)]"
                )


def check_options(ks: Sequence[int], resamples: int, level: float) -> None:
    """Raise unless the ranks, the number of draws and the coverage of scores make sense."""
    for k in ks:
        if k != int(k) or k < 1:
            raise ConfigError(f"`ks` must hold whole numbers of at least 1, got {k}; e.g. ks=(1, 5)")
    if resamples < 0:
        raise ConfigError(f"`resamples` must be 0 or more, got {resamples}; 1000 is usual, 0 gives no intervals")
    if not 0 < level < 1:
        raise ConfigError(f"`level` must lie between 0 and 1, got {level}; 0.95 is usual")


def _distance() -> Distance:
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance


def _closest(hypothesis: tuple[int, ...], references: Sequence[tuple[int, ...]], distance: Distance) -> tuple[int, int]:
    if hypothesis in references:
        return references.index(hypothesis), 0
    edits = [distance(hypothesis, reference) for reference in references]
    # `max(length, 1)` keeps an empty reference finite; the last key makes the order irrelevant.
    best = min(
        range(len(edits)),
        key=lambda i: (edits[i] / max(len(references[i]), 1), edits[i], -len(references[i])),
    )
    return best, edits[best]


def _split_words(symbols: Sequence[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    start = 0
    for end, symbol in enumerate([*symbols, " "]):
        if symbol == " ":
            if end > start:
                found.append(tuple(symbols[start:end]))
            start = end + 1
    return found


def _item_rows(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    ks: Sequence[int],
    words: str,
) -> Iterator[list[int]]:
    """One row of sufficient statistics per item: every score is a function of the sum of these rows."""
    distance, bleu_counts = _distance(), _bleu_counter()
    symbol_codes, word_codes = Codes(), Codes()
    for candidates, answers in zip(hypotheses, references, strict=True):
        coded = [symbol_codes.encode(candidate) for candidate in candidates or [()]]
        gold = [symbol_codes.encode(answer) for answer in answers]
        index, edits = _closest(coded[0], gold, distance)
        rank = next((i for i, candidate in enumerate(coded) if candidate in gold), len(coded))
        row = [int(edits == 0), edits, len(gold[index])]
        if words == "item":
            row += [int(edits > 0), 1]
            row += bleu_counts(coded[0], gold)
        else:
            best = word_codes.encode(_split_words(candidates[0] if candidates else ()))
            gold_words = [word_codes.encode(_split_words(answer)) for answer in answers]
            index, edits = _closest(best, gold_words, distance)
            row += [edits, len(gold_words[index])]
            row += bleu_counts(best, gold_words)
        yield row + [int(rank >= min(k, len(coded))) for k in ks]


def _bleu_counter() -> Callable[[tuple[int, ...], Sequence[tuple[int, ...]]], list[int]]:
    from sacrebleu.metrics.bleu import BLEU

    # `effective_order` only silences the advice about single sentences; the counts do not depend on it.
    scorer = BLEU(tokenize="none", effective_order=True)

    def counts(hypothesis: tuple[int, ...], references: Sequence[tuple[int, ...]]) -> list[int]:
        """System length, reference length, matches of orders 1..4, n-grams of orders 1..4."""
        texts = [" ".join(map(str, sequence)) for sequence in (hypothesis, *references)]
        found = scorer.sentence_score(texts[0], texts[1:])
        return [found.sys_len, found.ref_len, *found.counts, *found.totals]

    return counts


def _resampled_totals(statistics: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Sums over draws of N items, ``(N, M)`` to ``(resamples, M)``; exact, since counts are whole."""
    return np.concatenate([times @ statistics for times in draws(len(statistics), resamples, seed)])


def draws(n: int, resamples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each of N items is drawn in each of so many draws with replacement, ``(some, N)`` at a time."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // n)
    for done in range(0, resamples, at_once):
        count = min(at_once, resamples - done)
        rows = generator.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
        yield np.bincount(rows.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


def _scores(totals: NDArray[np.float64], n: int, ks: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Every score from summed statistics: ``(R, M)`` to ``(R,)`` each."""
    from sacrebleu.metrics.bleu import BLEU

    def bleu(row: list[int]) -> float:
        return BLEU.compute_bleu(row[2:6], row[6:10], row[0], row[1], smooth_method="exp").score

    scores = {
        "accuracy": totals[:, _CORRECT] / n,
        "cer": totals[:, _EDITS] / np.maximum(totals[:, _LENGTH], 1),
        "wer": totals[:, _WORD_EDITS] / np.maximum(totals[:, _WORDS], 1),
    }
    scores |= {f"wer@{k}": totals[:, _AT_K + i] / n for i, k in enumerate(ks)}
    counts: list[list[int]] = totals[:, _BLEU:_AT_K].astype(np.int64).tolist()
    return scores | {"bleu": np.array([bleu(row) for row in counts])}
