"""Minimum Bayes risk: the answer that is best on average over what the answer may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import Hypotheses

__all__ = ["BatchUtility", "Choice", "edit_similarity", "minimum_bayes_risk"]

Symbols: TypeAlias = tuple[int, ...]


class BatchUtility(Protocol):
    """Utilities of many pairs in one call: candidates (N) and references (M) -> ``(N, M)``.

    >>> def same_length(candidates, references):
    ...     return [[float(len(a) == len(b)) for b in references] for a in candidates]
    >>> rule: BatchUtility = same_length
    """

    def __call__(
        self, candidates: Sequence[Symbols], references: Sequence[Symbols], /
    ) -> Tensor | Sequence[Sequence[float]]:
        """The matrix."""
        ...


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
    batch_utility: BatchUtility | None = None,
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
        batch_utility: instead of ``utility``, all pairs of an item in one call.
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
    if utility is not None and batch_utility is not None:
        raise ConfigError("`utility` and `batch_utility` must not both be given, got two; leave one out")
    candidates = hypotheses if candidates is None else candidates
    if candidates.size != hypotheses.size:
        raise ShapeError(f"`candidates` must be of B = {hypotheses.size} items as the pool, got {candidates.size}")
    table = batch_utility if batch_utility is not None else edit_similarity if utility is None else _pairwise(utility)
    choices = []
    for pool, own in zip(_merged(hypotheses, weights), _merged(candidates, weights), strict=True):
        choices.append(_choose(list(own), list(pool), torch.tensor(list(pool.values()), dtype=torch.float64), table))
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


def _pairwise(utility: Callable[[Symbols, Symbols], float]) -> BatchUtility:
    def table(candidates: Sequence[Symbols], references: Sequence[Symbols]) -> list[list[float]]:
        return [[float(utility(candidate, reference)) for reference in references] for candidate in candidates]

    return table


def _choose(candidates: list[Symbols], pool: list[Symbols], mass: Tensor, table: BatchUtility) -> Choice:
    if not candidates or not pool:
        return Choice(candidates, [0.0] * len(candidates))
    utilities = torch.as_tensor(table(candidates, pool), dtype=torch.float64).cpu()
    if utilities.shape != (len(candidates), len(pool)):
        expected = f"({len(candidates)}, {len(pool)})"
        raise ShapeError(f"`batch_utility` must give shape (N, M) = {expected}, got {tuple(utilities.shape)}")
    if bool(utilities.isnan().any()):
        raise ConfigError("`utility` must give numbers, got NaN; look at what it does with empty sequences")
    expected = utilities @ (mass / mass.sum())
    order = expected.argsort(descending=True, stable=True)
    return Choice([candidates[n] for n in order.tolist()], expected[order].tolist())


def edit_similarity(candidates: Sequence[Symbols], references: Sequence[Symbols]) -> Tensor:
    """Minus the edit distance of every pair, ``(N, M)``: fewest insertions, deletions and substitutions.

    All pairs advance together, row by row of the usual table: O(N M T) operations on vectors of length T.

    >>> edit_similarity([(1, 2, 3), ()], [(1, 3), (4,)])
    tensor([[-1., -3.],
            [-2., -1.]], dtype=torch.float64)
    """
    a, a_lengths = _padded(candidates, fill=-1)
    b, b_lengths = _padded(references, fill=-2)
    N, M, S = len(candidates), len(references), b.size(1)
    positions = torch.arange(S + 1, dtype=torch.float64)
    row = positions.expand(N, M, S + 1)  # distance of the empty beginning of a to each beginning of b
    result = row.clone()  # of all of a to each beginning of b
    for t in range(a.size(1)):
        differs = (a[:, t].view(N, 1, 1) != b.unsqueeze(0)).double()  # (N, M, S)
        changed = torch.minimum(row[:, :, 1:] + 1, row[:, :, :-1] + differs)
        fresh = torch.cat([row[:, :, :1] + 1, changed], dim=2)
        # Insertions: d_j = min over i <= j of fresh_i + (j - i), a running minimum of fresh_i - i.
        row = (fresh - positions).cummin(dim=2).values + positions
        result = torch.where((a_lengths == t + 1).view(N, 1, 1), row, result)
    ends = b_lengths.view(1, M, 1).expand(N, M, 1)
    return -result.gather(2, ends).squeeze(2)


def _padded(sequences: Sequence[Symbols], fill: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
    width = int(lengths.max()) if len(sequences) else 0
    rows = [[*sequence, *[fill] * (width - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.long).view(len(sequences), width), lengths
