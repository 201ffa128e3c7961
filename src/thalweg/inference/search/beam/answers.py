"""What a beam search has finished: the best hypotheses so far, and their way back to the first symbol."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.inference.search.protocol import Hypotheses, raise_not_a_number


class Pool(NamedTuple):
    """The k best finished hypotheses of each item so far, best first; rank -inf where there is none.

    >>> none = torch.full((1, 2), -torch.inf)
    >>> pool = Pool(none, none, torch.zeros(1, 2, dtype=torch.long))
    >>> score = torch.tensor([[-3.0, -1.0]])
    >>> pool.merge(score, score, torch.tensor([[7, 8]])).code
    tensor([[8, 7]])
    """

    rank: Tensor  # (A, k)
    score: Tensor  # (A, k) log-probabilities
    code: Tensor  # (A, k) length * span + where the last symbol was chosen: row * V + symbol

    def at(self, items: Tensor) -> Pool:
        """Those of some items."""
        return Pool(self.rank[items], self.score[items], self.code[items])

    def merge(self, rank: Tensor, score: Tensor, code: Tensor) -> Pool:
        """The k best of these and more, ``(A, n)`` each."""
        best, order = torch.cat([self.rank, rank], dim=1).topk(self.rank.size(1), dim=1)
        code = torch.cat([self.code, code], dim=1).gather(1, order)
        if rank is score:  # no length penalty
            return Pool(best, best, code)
        score = torch.cat([self.score, score], dim=1).gather(1, order)
        return Pool(best, score, code)


class Answers:
    """The hypotheses of items that are done, and for each step and slot the code of what was chosen there.

    Args:
        first: batch number of the first of ``batch`` items.
        k: hypotheses of each item.
        span: more than any code; see :class:`Pool`.

    >>> answers = Answers(0, 1, 1, span=6, vocab_size=3, device=torch.device("cpu"))
    >>> one, score = torch.tensor([0]), torch.tensor([[-0.5]])
    >>> pool = Pool(score, score, torch.tensor([[1 * 6 + 2]]))  # length 1, symbol 2
    >>> answers.write(one, pool, score, torch.tensor([-2.0]), 1)
    >>> answers.hypotheses().sequences()
    [[[2]]]
    """

    def __init__(self, first: int, batch: int, k: int, *, span: int, vocab_size: int, device: torch.device) -> None:
        self.first, self.span, self.V = first, span, vocab_size
        self.scores = torch.full((batch, k), -math.inf, device=device)
        self.codes = torch.zeros((batch, k), dtype=torch.long, device=device)
        self.finished = torch.zeros((batch, k), dtype=torch.bool, device=device)
        self.optimal = torch.zeros(batch, dtype=torch.bool, device=device)
        self.history: list[tuple[Tensor, Tensor]] = []

    def write(self, items: Tensor, pool: Pool, live: Tensor, dropped: Tensor | None, step: int) -> None:
        """Items that are done after ``step``; ``dropped`` (A,) is the best score the beam ever let go of."""
        raise_not_a_number(~((live[:, 0] < math.inf) & (pool.rank[:, 0] < math.inf)), items, step)
        items = items - self.first
        self.scores = self.scores.to(live.dtype)
        self.scores[items] = pool.score.to(live.dtype)
        self.codes[items] = pool.code
        self.finished[items] = pool.score > -math.inf
        if dropped is not None:
            # What lives on at an early stop is below the k-th in the pool, so below the first.
            self.optimal[items] = (pool.rank[:, 0] >= dropped) & self.finished[items, 0]

    def last(self, items: Tensor, pool: Pool, live: Tensor, code: Tensor, dropped: Tensor | None, step: int) -> None:
        """Items at the last step: what is missing in the pool is filled up with live rows, in order."""
        self.write(items, pool, live, dropped, step)
        items = items - self.first
        count = (pool.score > -math.inf).sum(dim=1, keepdim=True)
        slot = torch.arange(pool.score.size(1), device=items.device) - count
        fill = (slot >= 0) & (slot < live.size(1))
        slot = slot.clamp(0, live.size(1) - 1)
        self.scores[items] = torch.where(fill, live.gather(1, slot), pool.score)
        self.codes[items] = torch.where(fill, code.gather(1, slot) + step * self.span, pool.code)

    def hypotheses(self) -> Hypotheses:
        """Trace every hypothesis back from its last symbol."""
        lengths = (self.codes // self.span).masked_fill_(self.scores == -math.inf, 0)
        last = self.codes % self.span
        T, (B, k) = int(lengths.max()), lengths.shape
        slot = torch.zeros_like(last)
        columns = []
        for step in range(T, 0, -1):
            code = last
            if step <= len(self.history):
                items, codes = self.history[step - 1]
                if items.size(0) < B:
                    codes = codes.new_zeros((B, codes.size(1))).index_copy_(0, items - self.first, codes)
                code = torch.where(lengths == step, last, codes.gather(1, slot))
            columns.append(code)
            slot = code // self.V
        positions = torch.arange(T, device=last.device)
        tokens = torch.stack(columns[::-1], dim=2) % self.V if T else last.new_empty((B, k, 0))
        tokens.masked_fill_(positions >= lengths.unsqueeze(2), -1)
        return Hypotheses(tokens, lengths, self.scores, self.finished, self.optimal)


def distinct(found: Hypotheses, k: int) -> Hypotheses:
    """The first k different hypotheses of each item: of equal ones the first stays.

    >>> tokens, ones = torch.tensor([[[1, 2], [1, 2], [2, -1]]]), torch.ones(1, 3)
    >>> same = Hypotheses(tokens, torch.tensor([[2, 2, 1]]), -ones, ones.bool(), ones[:, 0].bool())
    >>> distinct(same, 2).sequences()
    [[[1, 2], [2]]]
    """
    K = found.lengths.size(1)
    equal = (found.tokens.unsqueeze(2) == found.tokens.unsqueeze(1)).all(dim=3)  # (B, K, K)
    before = torch.ones(K, K, dtype=torch.bool, device=equal.device).tril_(-1)
    gone = (equal & before).any(dim=2) | (found.lengths == 0)
    order = gone.to(torch.uint8).argsort(dim=1, stable=True)[:, :k]
    gone = gone.gather(1, order)
    lengths = found.lengths.gather(1, order).masked_fill_(gone, 0)
    longest = int(lengths.max()) if lengths.numel() else 0
    tokens = found.tokens.gather(1, order.unsqueeze(2).expand(-1, -1, found.tokens.size(2)))
    return Hypotheses(
        tokens.masked_fill_(gone.unsqueeze(2), -1)[:, :, :longest],
        lengths,
        found.scores.gather(1, order).masked_fill_(gone, -math.inf),
        found.finished.gather(1, order) & ~gone,
        found.optimal,
        tree=found.tree,
    )
