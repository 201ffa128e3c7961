"""Search that follows each row to its end, and the simplest of its kind: the greedy choice.

A row keeps one partial sequence, is given one symbol a step, and is dropped when it ends, so that no work is done
for what is finished. :func:`~thalweg.inference.sample_sequences` chooses at random what :func:`greedy` chooses by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thalweg.inference.search.compiled import compiled_search
from thalweg.inference.search.constraints import Allowed, Rules, check_called
from thalweg.inference.search.graph_replay import Request, captured_search
from thalweg.inference.search.protocol import (
    Autoregressive,
    Hypotheses,
    batch_size,
    check_at_least_one,
    check_log_probs,
    device_of,
    joined,
    raise_not_a_number,
)
from thalweg.inference.search.streaming import Partial
from thalweg.limits import enough_memory

# Given log-probabilities (R, V), the numbers of the rows (R,) and the step: symbols (R,) and their
# log-probabilities (R,), which are -inf where nothing can follow and NaN or +inf where the model failed.
Choice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

# Log-probabilities held at once; a batch with more (rows times V) is followed in pieces.
_ROOM = 1 << 24


def greedy(
    model: Autoregressive,
    inputs: Any,
    *,
    max_length: int,
    min_length: int = 0,
    prefix: Tensor | None = None,
    allowed: Allowed | None = None,
    on_step: Callable[[Partial], object] | None = None,
) -> Hypotheses:
    """The most probable symbol at every step: y_t = argmax_v log p(v | y_<t, x).

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        max_length: most symbols of a hypothesis, eos counted.
        min_length: fewest symbols of a hypothesis, eos counted: eos is forbidden at steps before it, so that 0 and 1
            forbid nothing and 2 forbids the empty answer.
        prefix: ``(B, P)`` int64, -1 past each item's end: symbols every hypothesis must begin with. They are part of
            its tokens, length and score.
        allowed: mask of symbols that may follow; see :class:`Allowed`.
        on_step: called after every step with the rows as they stand; see :class:`Partial`.
    Returns:
        :class:`Hypotheses` with K = 1. Where the best symbol has probability 0 the hypothesis is missing.
        Equal to ``beam_search(..., width=1)``.

    Time O(T R V) beside the model's, for R rows not yet ended.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel.markov([[-9.0, -0.1, -2.0], [-9.0, -2.0, -0.2], [0.0, 0.0, 0.0]], bos=0, eos=2)
    >>> greedy(model, torch.zeros(1, dtype=torch.long), max_length=10).tokens
    tensor([[[1, 2]]])
    >>> greedy(model, torch.zeros(1, dtype=torch.long), max_length=10, min_length=4).tokens
    tensor([[[1, 1, 1, 2]]])
    """
    check_at_least_one("max_length", max_length)
    rules = Rules.check(model, inputs, max_length, min_length, prefix, allowed)
    check_called(on_step=on_step)

    def choose(log_probs: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        best, tokens = log_probs.max(dim=1)
        return tokens, best

    with torch.no_grad(), enough_memory(0, max_length=max_length):
        if prefix is None and allowed is None and on_step is None:
            request = Request(1, 1, max_length, min_length, 0.0)
            found = captured_search(model, inputs, request) or compiled_search(model, inputs, request)
            if found is not None:
                return replace(found, optimal=torch.zeros_like(found.optimal))
        return Follower(model, 1, max_length, choose, rules, on_step).run(inputs)


@dataclass(frozen=True)
class Follower:
    """Follows n rows for each item, each to its eos or ``max_length``, with one choice a step.

    Args:
        model: any :class:`Autoregressive`.
        n: rows for each item. The first step is taken once for all of them.
        max_length: most symbols, eos counted.
        choose: the symbols, given log-probabilities ``(R, V)``, the numbers of the rows (item * n + copy), the step.
        rules: what the hypotheses must satisfy; None for nothing.
        on_step: called after every step; see :class:`Partial`.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel.markov([[-0.7, -0.7], [-0.7, -0.7]], bos=0)
    >>> last = lambda log_probs, rows, step: (torch.ones_like(rows), log_probs[:, 1])
    >>> Follower(model, 1, 3, last).run(torch.zeros(1, dtype=torch.long)).sequences()
    [[[1, 1, 1]]]
    """

    model: Autoregressive
    n: int
    max_length: int
    choose: Choice
    rules: Rules | None = None
    on_step: Callable[[Partial], object] | None = None

    def run(self, inputs: Any) -> Hypotheses:
        """The rows of every item, in the order they were begun; of a large batch one piece after the other."""
        B, device = batch_size(inputs), device_of(self.model, inputs)
        if B == 0:
            return Hypotheses.none(B, self.n, device)
        state = self.model.begin(inputs)
        size = max(1, _ROOM // (self.n * self.model.vocab_size))
        if size >= B:
            return self.follow(state, 0, B, device)
        pieces = [torch.arange(first, min(first + size, B), device=device) for first in range(0, B, size)]
        parts = []
        for number, items in enumerate(pieces):
            parts.append(self.follow(self.model.select(state, items), number * size, items.numel(), device))
        return joined(parts)

    def follow(self, state: Any, first: int, count: int, device: torch.device) -> Hypotheses:
        """Items ``first`` ... ``first + count - 1``, whose rows ``state`` holds."""
        walk = _Walk(self, state, first, count, device)
        for step in range(1, self.max_length + 1):
            if not walk.advance(step):
                break
        return walk.paths.hypotheses()


class _Walk:
    """The rows of some items that are still going: their numbers, last symbols and scores, and the model's state."""

    def __init__(self, search: Follower, state: Any, first: int, count: int, device: torch.device) -> None:
        self.search, self.state, self.first = search, state, first
        self.paths = _Paths(count, search.n, device)
        self.rows = torch.arange(count * search.n, device=device)
        self.scores = torch.zeros(count * search.n, device=device)
        self.tokens = torch.full((count,), search.model.bos, dtype=torch.long, device=device)
        # Only who asks for partial sequences pays for putting them together.
        watched = search.on_step is not None or (search.rules is not None and search.rules.allowed is not None)
        self.past = torch.empty((count, 0), dtype=torch.long, device=device) if watched else None

    def items(self) -> Tensor:
        return self.rows // self.search.n + self.first

    def advance(self, step: int) -> bool:
        """Give each row one more symbol and drop those that end; whether any goes on."""
        search, n = self.search, self.search.n
        log_probs = self.ask(step)
        offset = self.first * n
        self.tokens, chosen = search.choose(log_probs, self.rows + offset if offset else self.rows, step)
        self.scores = self.scores + chosen  # float32 at least, the model's type where that is wider
        self.paths.history.append((self.rows, self.tokens))
        if self.past is not None:
            self.past = torch.cat([self.past, self.tokens.unsqueeze(1)], dim=1)
        # All rows of an item start from the one row of its first step.
        parents = self.rows // n if step == 1 and n > 1 else None
        # NaN is not above -inf, so it stops its row; +inf stays in the score until its row stops.
        usable, last = self.scores > -math.inf, step == search.max_length
        eos = search.model.eos
        ended = torch.full_like(usable, last) if eos is None else self.tokens == eos
        stopped = torch.ones_like(ended) if last else ended | ~usable
        some = bool(stopped.any())
        if some:
            raise_not_a_number(~(self.scores < math.inf), self.items(), step)
            self.paths.stop(stopped, self.rows, self.scores, usable, ended, step)
        if search.on_step is not None:
            self.report(search.on_step, usable, ended, step)
        if some:
            going = (~stopped).nonzero().squeeze(1)
            if going.numel() == 0:
                return False
            self.rows, self.tokens, self.scores = self.rows[going], self.tokens[going], self.scores[going]
            self.past = None if self.past is None else self.past[going]
            parents = going if parents is None else parents[going]
        if parents is not None:
            self.state = search.model.select(self.state, parents)
        return True

    def ask(self, step: int) -> Tensor:
        """What may follow each row, (R, V); the first step is taken once for all rows of an item."""
        search, n = self.search, self.search.n
        log_probs, self.state = search.model.step(self.tokens, self.state)
        check_log_probs(log_probs, self.tokens.size(0), search.model.vocab_size)
        if search.rules is not None:
            items = self.items()[::n] if step == 1 else self.items()
            log_probs = search.rules.forbid(log_probs.clone(), step, items, self.past)
        if step == 1 and n > 1:
            log_probs = log_probs.repeat_interleave(n, dim=0)
            self.past = None if self.past is None else self.past.repeat_interleave(n, dim=0)
        return log_probs

    def report(self, on_step: Callable[[Partial], object], usable: Tensor, ended: Tensor, step: int) -> None:
        assert self.past is not None
        partial = Partial(step, self.items(), self.past, self.scores, ended)
        if not bool(usable.all()):
            partial = Partial(step, *(part[usable] for part in partial[1:]))
        on_step(partial)


class _Paths:
    """Where each of B n rows ended, and the symbols chosen at each step by the rows that were still going."""

    def __init__(self, batch: int, n: int, device: torch.device) -> None:
        self.shape = (batch, n)
        self.lengths = torch.zeros(batch * n, dtype=torch.long, device=device)
        self.finished = torch.zeros(batch * n, dtype=torch.bool, device=device)
        self.scores = torch.zeros(batch * n, device=device)
        self.history: list[tuple[Tensor, Tensor]] = []

    def stop(self, which: Tensor, rows: Tensor, scores: Tensor, usable: Tensor, ended: Tensor, step: int) -> None:
        """Record the end of those of ``rows`` that go no further; what is not usable has no length."""
        stopped = rows[which]
        self.scores = self.scores.to(scores.dtype)
        self.scores[stopped] = scores[which]
        self.lengths[stopped] = usable[which] * step
        self.finished[stopped] = (ended & usable)[which]

    def hypotheses(self) -> Hypotheses:
        """All rows, grouped by item, in the order they were begun."""
        T, device = int(self.lengths.max()), self.lengths.device
        tokens = torch.full((self.lengths.size(0), T), -1, dtype=torch.long, device=device)
        for position, (rows, column) in enumerate(self.history[:T]):
            tokens[rows, position] = column
        tokens.masked_fill_(torch.arange(T, device=device) >= self.lengths.unsqueeze(1), -1)
        return Hypotheses(
            tokens.view(*self.shape, T),
            self.lengths.view(self.shape),
            self.scores.view(self.shape),
            self.finished.view(self.shape),
            torch.zeros(self.shape[0], dtype=torch.bool, device=device),
        )
