"""Minimum Bayes risk: the answer that is best on average over what the answer may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import Hypotheses

Symbols: TypeAlias = tuple[int, ...]


class Choice(NamedTuple):
    """One item's candidates by falling expected utility.

    >>> Choice([(1, 2)], [0.0]).sequences[0]
    (1, 2)
    """

    sequences: list[Symbols]
    """Different sequences, best first; empty where the pool is."""
    utilities: list[float]
    """The expected utility of each."""


def minimum_bayes_risk(
    hypotheses: Hypotheses,
    utility: Callable[[Symbols, Symbols], float] | None = None,
    *,
    weights: Literal["probability", "uniform"] = "probability",
    candidates: Hypotheses | None = None,
) -> list[Choice]:
    r"""Candidates of each item ordered by their expected utility under a pool of hypotheses.

    .. math:: u(c) = \sum_{y \in \text{pool}} q(y) \, \mathrm{utility}(c, y)

    With ``weights="uniform"`` each hypothesis counts once: for independent samples, where frequent ones come often,
    this estimates the expectation under the model. With ``"probability"`` q(y) is proportional to p(y | x), equal
    sequences counted once: for k-best lists and samples without replacement. Equal sequences are merged before
    utilities are computed: O(N M) calls for an item with N different candidates and M different hypotheses. Ties
    keep the order of the candidates. Kumar and Byrne (2004); Eikema and Aziz (2020).

    Args:
        hypotheses: the pool, of B items.
        utility: (candidate, reference) -> how good the candidate is if the reference is true; symbols as tuples,
            eos included where there is one. Minus the edit distance by default.
        weights: see above.
        candidates: what may be chosen; the pool itself by default.
    Returns:
        B choices, best candidate first.

    >>> from thalweg.inference import TableModel, beam_search
    >>> words = {(): {1: -1.02, 2: -1.08, 3: -1.2}, (1,): {1: 0.0}, (2,): {2: -0.6, 3: -0.8}, (3,): {2: 0.0}}
    >>> model = TableModel(words, vocab_size=4, bos=0)
    >>> pool = beam_search(model, torch.tensor([0]), width=4, max_length=2)
    >>> pool.sequences()[0][0], minimum_bayes_risk(pool)[0].sequences[0]
    ([1, 1], (2, 2))
    """
    if weights not in ("probability", "uniform"):
        raise ConfigError(f"`weights` must be 'probability' or 'uniform', got {weights!r}")
    candidates = hypotheses if candidates is None else candidates
    if candidates.size != hypotheses.size:
        raise ShapeError(f"`candidates` must be of B = {hypotheses.size} items as the pool, got {candidates.size}")
    utility = _edit_similarity if utility is None else utility
    choices = []
    for pool, own in zip(_merged(hypotheses, weights), _merged(candidates, weights), strict=True):
        choices.append(_choose(list(own), list(pool), torch.tensor(list(pool.values()), dtype=torch.float64), utility))
    return choices


def _merged(found: Hypotheses, weights: str) -> list[dict[Symbols, float]]:
    """For each item, its different sequences with their share, in order."""
    items: list[dict[Symbols, float]] = []
    columns = (part.tolist() for part in (found.tokens, found.lengths, found.probabilities().double()))
    for rows in zip(*columns, strict=True):
        item: dict[Symbols, float] = {}
        for tokens, length, share in zip(*rows, strict=True):
            key = tuple(tokens[:length])
            if length == 0:  # missing
                continue
            if weights == "uniform":
                item[key] = item.get(key, 0.0) + 1.0
            else:
                item.setdefault(key, share)
        items.append(item)
    return items


def _choose(
    candidates: list[Symbols], pool: list[Symbols], mass: Tensor, utility: Callable[[Symbols, Symbols], float]
) -> Choice:
    if not candidates or not pool:
        return Choice(candidates, [0.0] * len(candidates))
    pairs = [[float(utility(candidate, reference)) for reference in pool] for candidate in candidates]
    utilities = torch.tensor(pairs, dtype=torch.float64)
    if bool(utilities.isnan().any()):
        raise ConfigError("`utility` must give numbers, got NaN; look at what it does with empty sequences")
    expected = utilities @ (mass / mass.sum())
    order = expected.argsort(descending=True, stable=True)
    return Choice([candidates[n] for n in order.tolist()], expected[order].tolist())


def _edit_similarity(candidate: Symbols, reference: Symbols) -> float:
    """Minus the edit distance: fewest insertions, deletions and substitutions."""
    from rapidfuzz.distance import Levenshtein

    return -float(Levenshtein.distance(candidate, reference))
