"""Which symbols are mistaken for which, and which items are furthest from right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.errors import ConfigError
from thalweg.metrics.strings import Codes, check_items, closest_reference


@dataclass(frozen=True)
class Confusion:
    """A gold symbol, what stood in its place, and how often.

    Attributes:
        gold: the symbol of the reference; ``None`` where the prediction has one too many.
        predicted: the symbol of the prediction; ``None`` where one is missing.
        count: occurrences over all items.
        examples: the first few items, as indices, in which it occurs.

    >>> Confusion("AE", "AH", 3, (0, 4)).predicted
    'AH'
    """

    gold: str | None
    predicted: str | None
    count: int
    examples: tuple[int, ...]


@dataclass(frozen=True)
class Mistake:
    """An item whose best hypothesis is wrong.

    Attributes:
        item: index of the item.
        edits: edit distance to ``reference``.
        hypothesis: the best hypothesis; empty where there was none.
        reference: the closest reference.

    >>> Mistake(7, 1, ("K", "AH", "T"), ("K", "AE", "T")).edits
    1
    """

    item: int
    edits: int
    hypothesis: tuple[str, ...]
    reference: tuple[str, ...]


def align(hypothesis: Sequence[str], reference: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """An alignment with the fewest edits: pairs (gold, predicted), ``None`` for a gap, matches included.

    The gold sides that are not ``None`` spell the reference, the predicted sides the hypothesis, and the
    number of unequal pairs is :func:`~thalweg.metrics.edit_distance`. Where several alignments are as short,
    it is always the same one. Time O(len(hypothesis) len(reference) / 64), rapidfuzz.

    >>> align(("K", "AH", "T", "S"), ("K", "AE", "T"))
    [('K', 'K'), ('AE', 'AH'), ('T', 'T'), (None, 'S')]
    """
    from rapidfuzz.distance import Levenshtein

    codes = Codes()
    pairs: list[tuple[str | None, str | None]] = []
    for step in Levenshtein.opcodes(codes.encode(reference), codes.encode(hypothesis)):
        gold = reference[step.src_start : step.src_end]
        predicted = hypothesis[step.dest_start : step.dest_end]
        if step.tag == "insert":
            pairs += [(None, symbol) for symbol in predicted]
        elif step.tag == "delete":
            pairs += [(symbol, None) for symbol in gold]
        else:
            pairs += zip(gold, predicted, strict=True)
    return pairs


def confusions(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    *,
    examples: int = 3,
) -> list[Confusion]:
    """Edits between best hypotheses and closest references, counted by symbol pair; matches are left out.

    Takes the items of :func:`~thalweg.metrics.score_strings`. Most frequent first, then by code point of gold
    and predicted, gaps last. The counts add up to the edits in the CER. Time: one alignment for each item.

    >>> found = confusions([[("a", "b")], [("a",)]], [[("a", "c")], [("a", "c")]])
    >>> [(c.gold, c.predicted, c.count) for c in found]
    [('c', 'b', 1), ('c', None, 1)]
    """
    if examples < 0:
        raise ConfigError(f"`examples` must be 0 or more, got {examples}; 3 is usual")
    counts: Counter[tuple[str | None, str | None]] = Counter()
    seen: dict[tuple[str | None, str | None], list[int]] = {}
    for mistake in _mistakes(hypotheses, references):
        wrong = [pair for pair in align(mistake.hypothesis, mistake.reference) if pair[0] != pair[1]]
        counts.update(wrong)
        for pair in dict.fromkeys(wrong):
            items = seen.setdefault(pair, [])
            if len(items) < examples:
                items.append(mistake.item)
    found = [Confusion(*pair, count, tuple(seen[pair])) for pair, count in counts.items()]
    return sorted(found, key=lambda c: (-c.count, c.gold is None, c.gold or "", c.predicted is None, c.predicted or ""))


def worst(
    hypotheses: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[Sequence[str]]],
    *,
    limit: int | None = None,
) -> list[Mistake]:
    """The wrong items, most edits first, then the shorter reference, then in order.

    ``limit`` keeps the first few.
    Takes the items of :func:`~thalweg.metrics.score_strings`. Time: one edit distance for each reference.

    >>> [m.item for m in worst([[("a",)], [("b",)], []], [[("a",)], [("a",)], [("a", "b")]])]
    [2, 1]
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"`limit` must be 0 or more, got {limit}; None keeps all")
    return sorted(_mistakes(hypotheses, references), key=lambda m: (-m.edits, len(m.reference), m.item))[:limit]


def _mistakes(
    hypotheses: Sequence[Sequence[Sequence[str]]], references: Sequence[Sequence[Sequence[str]]]
) -> list[Mistake]:
    check_items(hypotheses, references)
    found = []
    for item, (candidates, answers) in enumerate(zip(hypotheses, references, strict=True)):
        best = tuple(candidates[0]) if candidates else ()
        index, edits = closest_reference(best, answers)
        if edits:
            found.append(Mistake(item, edits, best, tuple(answers[index])))
    return found
