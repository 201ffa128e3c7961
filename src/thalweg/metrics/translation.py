"""BLEU and chrF by sacrebleu, as counts of each item that may be added up and drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from thalweg.metrics.bootstrap import Floats


class CorpusMetric:
    """A metric of sacrebleu whose score is a function of sums of counts.

    >>> metric = corpus_metric("none")
    >>> metric.counts("a b c d e", ["a b c d x"])  # lengths of answer and reference, matches, n-grams
    [5, 5, 4, 3, 2, 1, 5, 4, 3, 2]
    """

    def __init__(self, metric: Any, width: int):
        self.width = width
        self._metric = metric
        self._references: set[int] = set()

    # sacrebleu's own significance tests go by these two methods; no public one gives the counts of chrF.
    def counts(self, hypothesis: str, references: Sequence[str]) -> list[int]:
        """``width`` counts of an answer."""
        self._references.add(len(references))
        return self._metric._extract_corpus_statistics([hypothesis], [[each] for each in references])[0]

    def scores(self, totals: Floats) -> Floats:
        """Scores of sums of counts, ``(R, width)`` to ``(R,)``, between 0 and 100."""
        rows: list[list[int]] = totals.astype(np.int64).tolist()
        return np.array([self._metric._compute_score_from_stats(row).score for row in rows])

    @property
    def signature(self) -> str:
        """All that others need to get the same figure: references, case, tokens, smoothing, version.

        >>> metric = corpus_metric("13a")
        >>> _ = metric.counts("a", ["a", "b"])
        >>> metric.signature.split("|version")[0]
        'nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp'
        """
        self._metric.num_refs = next(iter(self._references)) if len(self._references) == 1 else -1
        return self._metric.get_signature().format()


def corpus_metric(name: Literal["none", "13a", "chrf"]) -> CorpusMetric:
    """BLEU of tokens between spaces (``none``), BLEU of text that is cut as WMT does (``13a``), or chrF of text.

    BLEU: four orders, exponential smoothing, closest reference length. chrF: six orders of characters, recall twice as
    important. Papineni et al. (2002), Popović (2015), Post (2018).

    >>> corpus_metric("chrf").width
    18
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    # `force` silences the advice about text that looks tokenised: where it is, both figures are given.
    return CorpusMetric(CHRF(), 18) if name == "chrf" else CorpusMetric(BLEU(tokenize=name, force=True), 10)
