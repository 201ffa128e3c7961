"""Error rates of predicted symbol sequences against one or several references, with bootstrap intervals.

An *item* is a list of hypotheses, best first (it may be empty), and a list of one or more references; each is
a sequence of symbols (``tuple[str, ...]``), never a plain string, so that a phone of several letters counts
as one symbol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal

import numpy as np

from thalweg.errors import ConfigError, DataError, ShapeError, nearest
from thalweg.metrics.bootstrap import Floats, Measure, Score, Tally, check_options, scored
from thalweg.metrics.translation import CorpusMetric, corpus_metric

Words = Literal["item", "space"]
"""Whether an item is one word, or symbols between ``" "`` symbols are."""

METRICS: dict[str, bool] = {"accuracy": True, "cer": False, "wer": False, "bleu": True}
"""The scores of :func:`score_strings` and whether higher is better; ``wer@k`` comes on request."""

# The scores of classes, whose home is `classification`; here, so that one function knows the direction of all.
_OF_CLASSES = {"f1": True, "nll": False, "brier": False, "ece": False}

# The figures that sacrebleu computes; those of text alone choose no model in training.
_SACREBLEU = {"bleu": "BLEU", "bleu-13a": "BLEU (13a)", "chrf": "chrF"}

# Columns of the per-item statistics; the errors within the first k follow, one column for each k, then the counts of
# sacrebleu's metrics.
_CORRECT, _EDITS, _LENGTH, _WORD_EDITS, _WORDS, _AT_K = range(6)

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
    words: Words = "item",
    text: Callable[[Sequence[str]], str] | None = None,
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
      length), over symbols or, with ``words="space"``, words. It is 0 where no hypothesis has four tokens;
    * with ``text``: ``chrf``, sacrebleu's chrF of the text (0..100), and with ``words="space"`` ``bleu-13a``, its BLEU
      of the text cut into words and punctuation as at WMT (``tokenize="13a"``).

    BLEU and chrF carry sacrebleu's signature, by which others get the same figures.

    Args:
        hypotheses: N lists, best first.
        references: N lists of one or more.
        text: writes symbols as people read them; such text is worth scoring where it is written language.
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
    tally = StringTally(hypotheses, references, ks=ks, words=words, text=text)
    return scored(tally, resamples=resamples, seed=seed, level=level)


class StringTally(Tally):
    """What :func:`score_strings` counts of each item; arguments and keys as there.

    Args:
        unit: what a symbol is, in the plural: error rates over different units are not compared.

    >>> tally = StringTally([[tuple("cat")], [tuple("dig")]], [[tuple("cat")], [tuple("dog")]])
    >>> tally.scores(np.array([[1.0, 1.0], [0.0, 2.0]]))["accuracy"].tolist()
    [0.5, 0.0]
    """

    def __init__(
        self,
        hypotheses: Sequence[Sequence[Sequence[str]]],
        references: Sequence[Sequence[Sequence[str]]],
        *,
        ks: Sequence[int] = (),
        words: Words = "item",
        text: Callable[[Sequence[str]], str] | None = None,
        unit: str = "symbols",
    ):
        check_options(ks, 0, 0.5)
        if words not in ("item", "space"):
            raise ConfigError(f"`words` must be item or space, got `{words}`; {nearest(words, ['item', 'space'])}")
        check_items(hypotheses, references)
        self.ks = ks
        self._metrics: dict[str, CorpusMetric] = {"bleu": corpus_metric("none")}
        rows = [
            _item_rows(hypotheses, references, ks, words),
            _token_rows(hypotheses, references, words, self._metrics["bleu"]),
        ]
        if text is not None:
            # BLEU of words asks for items of several.
            for key in ("bleu-13a", "chrf") if words == "space" else ("chrf",):
                self._metrics[key] = corpus_metric("13a" if key == "bleu-13a" else "chrf")
                rows.append(_text_rows(hypotheses, references, text, self._metrics[key]))
        self._counts = np.concatenate([np.array(list(each), dtype=np.float64) for each in rows], axis=1)  # (N, M)
        self.measures = self._measures(unit, words)

    def _measures(self, unit: str, words: Words) -> dict[str, Measure]:
        names = {"accuracy": "accuracy", "cer": "CER", "wer": "WER"} | {f"wer@{k}": f"WER@{k}" for k in self.ks}
        units = {"cer": unit, "wer": "words" if words == "space" else "items"}
        units |= {"bleu": "words" if words == "space" else unit}
        return {
            key: Measure(name, metric_direction(key), unit=units.get(key, "items")) for key, name in names.items()
        } | {
            key: Measure(_SACREBLEU[key], True, metric.signature, units.get(key, "text"))
            for key, metric in self._metrics.items()
        }

    def __len__(self) -> int:
        return len(self._counts)

    def scores(self, times: Floats) -> dict[str, Floats]:
        """Every score from sums of the counts, which are exact, since counts are whole."""
        totals, n = times @ self._counts, len(self)
        found = {
            "accuracy": totals[:, _CORRECT] / n,
            "cer": totals[:, _EDITS] / np.maximum(totals[:, _LENGTH], 1),
            "wer": totals[:, _WORD_EDITS] / np.maximum(totals[:, _WORDS], 1),
        }
        found |= {f"wer@{k}": totals[:, _AT_K + i] / n for i, k in enumerate(self.ks)}
        start = _AT_K + len(self.ks)
        for key, metric in self._metrics.items():
            found[key] = metric.scores(totals[:, start : start + metric.width])
            start += metric.width
        return found


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
    words: Words,
) -> Iterator[list[int]]:
    """Right or not, edits and length, those in words, and the errors within the first k, of each item."""
    distance = _distance()
    symbol_codes, word_codes = Codes(), Codes()
    for candidates, answers in zip(hypotheses, references, strict=True):
        coded = [symbol_codes.encode(candidate) for candidate in candidates or [()]]
        gold = [symbol_codes.encode(answer) for answer in answers]
        index, edits = _closest(coded[0], gold, distance)
        rank = next((i for i, candidate in enumerate(coded) if candidate in gold), len(coded))
        row = [int(edits == 0), edits, len(gold[index])]
        if words == "item":
            row += [int(edits > 0), 1]
        else:
            best = word_codes.encode(_split_words(candidates[0] if candidates else ()))
            gold_words = [word_codes.encode(_split_words(answer)) for answer in answers]
            index, edits = _closest(best, gold_words, distance)
            row += [edits, len(gold_words[index])]
        yield row + [int(rank >= min(k, len(coded))) for k in ks]


def _token_rows(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    words: Words,
    metric: CorpusMetric,
) -> Iterator[list[int]]:
    """Counts of symbols, or of words, each written as its number."""
    codes = Codes()

    def numbers(symbols: Sequence[str]) -> str:
        return " ".join(map(str, codes.encode(symbols if words == "item" else _split_words(symbols))))

    for candidates, answers in zip(hypotheses, references, strict=True):
        yield metric.counts(numbers(candidates[0] if candidates else ()), [numbers(answer) for answer in answers])


def _text_rows(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    text: Callable[[Sequence[str]], str],
    metric: CorpusMetric,
) -> Iterator[list[int]]:
    """Counts of the text itself."""
    for candidates, answers in zip(hypotheses, references, strict=True):
        yield metric.counts(text(candidates[0] if candidates else ()), [text(answer) for answer in answers])
