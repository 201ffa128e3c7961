"""Beam search: the best few partial sequences of every item, advanced together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.search.beam.answers import distinct
from thalweg.inference.search.beam.steps import Grouped, Search, Settings
from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.constraints import Allowed, Rules, check_called
from thalweg.inference.search.graph_replay import Request, captured_search
from thalweg.inference.search.protocol import (
    Autoregressive,
    Hypotheses,
    batch_size,
    check_at_least_one,
    device_of,
    joined,
    real,
)
from thalweg.inference.search.streaming import Partial
from thalweg.limits import enough_memory

_PENALTY = 16


def beam_search(
    model: Autoregressive,
    inputs: Any,
    *,
    width: int,
    k: int | None = None,
    max_length: int,
    min_length: int = 0,
    length_penalty: float = 0.0,
    prefix: Tensor | None = None,
    allowed: Allowed | None = None,
    groups: int = 1,
    diversity: float = 0.0,
    on_step: Callable[[Partial], None] | None = None,
    return_tree: bool = False,
    rows_at_once: int | None = None,
) -> Hypotheses:
    r"""The k best sequences among those that stay among the ``width`` best at every step.

    At each step all continuations of an item's live rows are ranked by log-probability. Those that are eos
    and stand among the first ``width`` become finished hypotheses; the best ``width`` of the others live
    on. Finished ones are ranked by

    .. math:: \mathrm{rank}(y) = \log p(y \mid x) / |y|^{\mathrm{length\_penalty}}

    with \|y\| counting eos. An item is done, and its rows dropped, exactly when no live row can still
    overtake its k-th finished hypothesis: log-probabilities only fall, so a live row with score s can reach
    at most s / max_length^penalty (penalty above 0) or s / (t + 1)^penalty (below or at 0).

    ``optimal`` is true where the search itself proves its first answer: with no length penalty, nothing it ever
    let go of had a better score, and what continues it can only fall. The proof is over finished sequences of at
    most ``max_length`` symbols that ``min_length``, ``prefix`` and ``allowed`` permit.

    With ``groups`` G above 1 the rows are G beams of width / G that step one after the other, and a beam ranks a
    continuation by y_t = v lower by ``diversity`` times the number of rows of earlier beams that took v at this
    step, eos too (Vijayakumar et al., 2018). Scores stay log-probabilities; each beam gives
    its width / G best, and the k best different ones among them are returned.

    Args:
        model: any :class:`Autoregressive`. It sees rows item by item, the same number for every item.
        inputs: what its ``begin`` takes, B items.
        width: live rows kept for each item.
        k: hypotheses returned for each item, at most ``width`` (the default).
        max_length: most symbols of a hypothesis, eos counted. Without eos, all have exactly so many.
        min_length: fewest symbols of a hypothesis, eos counted.
        length_penalty: 0 ranks by probability, 1 by mean log-probability; more favours longer ones.
        prefix: ``(B, P)`` int64, -1 past each item's end: symbols every hypothesis must begin with. They
            are part of its tokens, length and score.
        allowed: mask of symbols that may follow; see :class:`Allowed`, and :class:`Trie` for a lexicon.
        groups: number of beams; divides ``width``.
        diversity: what a symbol taken by an earlier beam costs, in nats.
        on_step: called with a :class:`Partial` after each step; see :func:`stream`.
        return_tree: record what was kept and dropped at each step as ``tree``, a :class:`BeamTree`.
        rows_at_once: most rows given to the model in one step, at least ``width``. A larger batch is searched in
            pieces, one after the other, with the same answers. The default keeps (R, V) to 2^24 and R to 2^13.
    Returns:
        :class:`Hypotheses` with K = k; ``scores`` are plain log-probabilities, the order is by rank. Where
        fewer than k finish, live ones cut at ``max_length`` follow.

    Time O(T R V) beside the model's, with R = width x items not yet done; memory O(R (V + T)).

    >>> from thalweg.inference import TableModel
    >>> p = [[0, 0.6, 0.4, 0], [0, 0.3, 0.3, 0.4], [0, 0.1, 0, 0.9], [0, 0, 0, 1]]
    >>> model = TableModel.markov(p, bos=0, eos=3, logarithms=False)
    >>> best = beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=6)
    >>> best.sequences()
    [[[2, 3], [1, 3]]]
    >>> best.scores.exp(), best.optimal
    (tensor([[0.3600, 0.2400]]), tensor([True]))
    >>> beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=6, min_length=3).sequences()
    [[[1, 2, 3], [1, 1, 3]]]
    """
    k = width if k is None else k
    for name, value in (("width", width), ("k", k), ("max_length", max_length), ("groups", groups)):
        check_at_least_one(name, value)
    if k > width:
        raise ConfigError(f"`k` must be at most `width` = {width}, got {k}; raise `width` to {k}")
    if not -_PENALTY <= real(length_penalty) <= _PENALTY:
        raise ConfigError(
            f"`length_penalty` must be -{_PENALTY} ... {_PENALTY}, beyond which powers of lengths overflow, "
            f"got {length_penalty!r}; 0 means none"
        )
    _check_groups(groups, diversity, width)
    rules = Rules.check(model, inputs, max_length, min_length, prefix, allowed)
    most_rows = _check_rows(rows_at_once, model.vocab_size)
    B, device = batch_size(inputs), device_of(model, inputs)
    check_called(on_step=on_step)
    if B == 0:
        return Hypotheses.none(B, k, device)
    plain = prefix is None and allowed is None and groups == 1 and on_step is None and not return_tree
    how = Settings(min_length, max_length, length_penalty, rules, on_step, return_tree)
    search = Search(model, width, k, how) if groups == 1 else Grouped(model, width, how, groups, diversity)
    items = max(1, most_rows // width)
    pieces = []
    with torch.no_grad(), enough_memory(max(width * model.vocab_size, B * k), width=width, k=k, max_length=max_length):
        if plain and rows_at_once is None:
            request = Request(width, k, max_length, min_length, length_penalty)
            found = captured_search(model, inputs, request) or compiled_search(model, inputs, request)
            if found is not None:
                return found
        state = model.begin(inputs)
        for first in range(0, B, items):
            rows = torch.arange(first, min(first + items, B), device=device)
            begun = state if items >= B else model.select(state, rows)
            pieces.append(search.run(begun, first, rows.size(0), device))
    return joined(pieces) if groups == 1 else distinct(joined(pieces), k)


def _check_groups(groups: int, diversity: float, width: int) -> None:
    if width % groups:
        raise ConfigError(f"`groups` must divide `width` = {width}, got {groups}; pass width={groups * width}, say")
    if not 0 <= real(diversity) < math.inf:
        raise ConfigError(f"`diversity` must be at least 0 and finite, got {diversity!r}; 0 means none")
    if diversity and groups == 1:
        raise ConfigError(f"`diversity` needs `groups` of at least 2, got 1; pass groups={width} for one row each")


def _check_rows(rows_at_once: int | None, vocab_size: int) -> int:
    if rows_at_once is None:
        return min(2**24 // vocab_size, 2**13)
    check_at_least_one("rows_at_once", rows_at_once)
    return rows_at_once
