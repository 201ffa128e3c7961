"""Beam search: the best few partial sequences of every item, advanced together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.hypotheses import (
    Autoregressive,
    Hypotheses,
    batch_size,
    check_at_least_one,
    check_log_probs,
    device_of,
    raise_not_a_number,
)

__all__ = ["Allowed", "beam_search"]


class Allowed(Protocol):
    """Which symbols may follow, as a bool mask ``(R, V)``; eos among them where a sequence may end.

    Called at each step with the partial sequences ``(R, t)``, without bos (t is 0 at first), and the batch
    item of each row ``(R,)``.

    >>> def no_repetition(tokens, items):
    ...     mask = torch.ones(tokens.size(0), 5, dtype=torch.bool)
    ...     return mask.scatter(1, tokens, False)
    >>> rule: Allowed = no_repetition
    >>> rule(torch.tensor([[3, 4]]), torch.tensor([0]))
    tensor([[ True,  True,  True, False, False]])
    """

    def __call__(self, tokens: Tensor, items: Tensor, /) -> Tensor:
        """The mask."""
        ...


def beam_search(
    model: Autoregressive,
    inputs: Any,
    *,
    width: int,
    k: int | None = None,
    max_length: int,
    length_penalty: float = 0.0,
    prefix: Tensor | None = None,
    allowed: Allowed | None = None,
) -> Hypotheses:
    r"""The k best sequences among those that stay among the ``width`` best at every step.

    At each step all continuations of an item's live rows are ranked by log-probability. Those that are eos
    and stand among the first ``width`` become finished hypotheses; the best ``width`` of the others live
    on. Finished ones are ranked by

    .. math:: \mathrm{rank}(y) = \log p(y \mid x) / |y|^{\mathrm{length\_penalty}}

    with \|y\| counting eos. An item is done, and its rows dropped, exactly when no live row can still
    overtake its k-th finished hypothesis: log-probabilities only fall, so a live row with score s can reach
    at most s / max_length^penalty (penalty above 0) or s / (t + 1)^penalty (below or at 0).

    Args:
        model: any :class:`Autoregressive`. It sees rows item by item, the same number for every item.
        inputs: what its ``begin`` takes, B items.
        width: live rows kept for each item.
        k: hypotheses returned for each item, at most ``width`` (the default).
        max_length: most symbols of a hypothesis, eos counted. Without eos, all have exactly so many.
        length_penalty: 0 ranks by probability, 1 by mean log-probability; more favours longer ones.
        prefix: ``(B, P)`` int64, -1 past each item's end: symbols every hypothesis must begin with. They
            are part of its tokens, length and score.
        allowed: mask of symbols that may follow; see :class:`Allowed`.
    Returns:
        :class:`Hypotheses` with K = k; ``scores`` are plain log-probabilities, the order is by rank. Where
        fewer than k finish, live ones cut at ``max_length`` follow.

    Time O(T R V) beside the model's, with R = width x items not yet done; memory O(T R).

    >>> from thalweg.inference import TableModel
    >>> p = [[0, 0.6, 0.4, 0], [0, 0.3, 0.3, 0.4], [0, 0.1, 0, 0.9], [0, 0, 0, 1]]
    >>> model = TableModel.markov(p, bos=0, eos=3, logarithms=False)
    >>> best = beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=6)
    >>> best.sequences()
    [[[2, 3], [1, 3]]]
    >>> best.scores.exp()
    tensor([[0.3600, 0.2400]])
    """
    k = width if k is None else k
    for name, value in (("width", width), ("k", k), ("max_length", max_length)):
        check_at_least_one(name, value)
    if k > width:
        raise ConfigError(f"`k` must be at most `width` = {width}, got {k}; raise `width` to {k}")
    if not math.isfinite(length_penalty):
        raise ConfigError(f"`length_penalty` must be finite, got {length_penalty!r}; 0 means none")
    B, device = batch_size(inputs), device_of(model, inputs)
    if prefix is not None:
        prefix = _check_prefix(prefix, B, max_length, model).to(device)
    if B == 0:
        return Hypotheses.none(B, k, device)
    with torch.no_grad():
        return _Search(model, width, k, max_length, length_penalty, prefix, allowed).run(inputs, B, device)


class _Pool(NamedTuple):
    """The k best finished hypotheses of each item so far, best first; rank -inf where there is none."""

    rank: Tensor  # (A, k)
    score: Tensor  # (A, k) log-probabilities
    code: Tensor  # (A, k) length * span + where the last symbol was chosen: row * V + symbol

    def at(self, items: Tensor) -> _Pool:
        return _Pool(self.rank[items], self.score[items], self.code[items])

    def merge(self, rank: Tensor, score: Tensor, code: Tensor) -> _Pool:
        best, order = torch.cat([self.rank, rank], dim=1).topk(self.rank.size(1), dim=1)
        code = torch.cat([self.code, code], dim=1).gather(1, order)
        if rank is score:  # no length penalty
            return _Pool(best, best, code)
        score = torch.cat([self.score, score], dim=1).gather(1, order)
        return _Pool(best, score, code)


@dataclass(frozen=True)
class _Search:
    model: Autoregressive
    width: int
    k: int
    max_length: int
    penalty: float
    prefix: Tensor | None
    allowed: Allowed | None

    def run(self, inputs: Any, B: int, device: torch.device) -> Hypotheses:
        model, V, k = self.model, self.model.vocab_size, self.k
        answers = _Answers(B, k, self.width * V, V, device)
        items = torch.arange(B, device=device)
        live = torch.zeros((B, 1), device=device)  # float32 at least, the model's type where that is wider
        none = torch.full((B, k), -math.inf, device=device)
        pool = _Pool(none, none, torch.zeros((B, k), dtype=torch.long, device=device))
        tokens = torch.full((B,), model.bos, dtype=torch.long, device=device)
        sequences = torch.empty((B, 0), dtype=torch.long, device=device)
        state = model.begin(inputs)
        for step in range(1, self.max_length + 1):
            log_probs, state = model.step(tokens, state)
            A, W = live.shape
            total = check_log_probs(log_probs, A * W, V).reshape(A, W, V) + live.unsqueeze(2)
            self.forbid(total, items, sequences, step)
            pool, live, code = self.advance(total.reshape(A, W * V), pool, step)
            if step == self.max_length:
                answers.last(items, pool, live, code, step)
                break
            done = self.done(pool, live, step)
            going = None
            if bool(done.any()):
                answers.write(items[done], pool.at(done), live[done], step)
                going = (~done).nonzero().squeeze(1)
                if going.numel() == 0:
                    break
                items, pool, live, code = items[going], pool.at(going), live[going], code[going]
            # A dead slot follows the best row, so that the model is never asked about an impossible sequence.
            code = torch.where(live > -math.inf, code, code[:, :1])
            answers.history.append((items, code))
            tokens = (code % V).view(-1)
            if going is not None or code.size(1) > 1 or W > 1:  # else every row follows itself
                first = (torch.arange(A, device=device) if going is None else going) * W
                rows = (code // V + first.unsqueeze(1)).view(-1)
                state = model.select(state, rows)
                sequences = sequences[rows] if self.allowed is not None else sequences
            if self.allowed is not None:
                sequences = torch.cat([sequences, tokens.unsqueeze(1)], dim=1)
        return answers.hypotheses()

    def forbid(self, total: Tensor, items: Tensor, sequences: Tensor, step: int) -> None:
        """Put -inf in ``total`` (A, W, V) at what the prefix and the caller's mask exclude."""
        A, W, V = total.shape
        if self.prefix is not None and step <= self.prefix.size(1):
            forced = self.prefix[items, step - 1].unsqueeze(1)  # (A, 1)
            others = (forced >= 0) & (torch.arange(V, device=total.device) != forced)
            total.masked_fill_(others.unsqueeze(1), -math.inf)
        if self.allowed is not None:
            mask = self.allowed(sequences, items.repeat_interleave(W))
            if mask.shape != (A * W, V) or mask.dtype != torch.bool:
                raise ShapeError(
                    f"`allowed` must give a bool mask of shape (R, V) = ({A * W}, {V}), "
                    f"got {mask.dtype} of shape {tuple(mask.shape)}"
                )
            total.masked_fill_(~mask.view(A, W, V), -math.inf)

    def advance(self, total: Tensor, pool: _Pool, step: int) -> tuple[_Pool, Tensor, Tensor]:
        """Rank all continuations (A, W V): the finished into the pool; scores and codes of the others."""
        V, eos, width = self.model.vocab_size, self.model.eos, self.width
        # A row has one eos continuation, so twice the width always holds `width` others.
        top, code = total.topk(min(width if eos is None else 2 * width, total.size(1)), dim=1)
        if eos is None:
            if step < self.max_length:
                return pool, top, code
            return self.finish(pool, top, code, step), torch.full_like(top, -math.inf), code
        ends = code % V == eos
        finished = top[:, :width].masked_fill(~ends[:, :width], -math.inf)
        pool = self.finish(pool, finished, code[:, :width], step)
        live, order = top.masked_fill(ends, -math.inf).topk(min(width, top.size(1)), dim=1)
        return pool, live, code.gather(1, order)

    def finish(self, pool: _Pool, score: Tensor, code: Tensor, step: int) -> _Pool:
        rank = score if self.penalty == 0 else score / step**self.penalty
        return pool.merge(rank, score, code + step * self.width * self.model.vocab_size)

    def done(self, pool: _Pool, live: Tensor, step: int) -> Tensor:
        """Items (A,) whose k-th finished hypothesis no live row can overtake; also those with NaN."""
        bound = live[:, 0]
        if self.penalty:
            bound = bound / (self.max_length if self.penalty > 0 else step + 1) ** self.penalty
        return ~(pool.rank[:, -1] < bound)


class _Answers:
    """The hypotheses of items that are done, and for each step and slot the code of what was chosen there."""

    def __init__(self, batch: int, k: int, span: int, vocab_size: int, device: torch.device) -> None:
        self.span, self.V = span, vocab_size
        self.scores = torch.full((batch, k), -math.inf, device=device)
        self.codes = torch.zeros((batch, k), dtype=torch.long, device=device)
        self.finished = torch.zeros((batch, k), dtype=torch.bool, device=device)
        self.history: list[tuple[Tensor, Tensor]] = []

    def write(self, items: Tensor, pool: _Pool, live: Tensor, step: int) -> None:
        """Items that are done after ``step``."""
        raise_not_a_number(~((live[:, 0] < math.inf) & (pool.rank[:, 0] < math.inf)), items, step)
        self.scores = self.scores.to(live.dtype)
        self.scores[items] = pool.score.to(live.dtype)
        self.codes[items] = pool.code
        self.finished[items] = pool.score > -math.inf

    def last(self, items: Tensor, pool: _Pool, live: Tensor, code: Tensor, step: int) -> None:
        """Items at the last step: what is missing in the pool is filled up with live rows, in order."""
        self.write(items, pool, live, step)
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
                    codes = codes.new_zeros((B, codes.size(1))).index_copy_(0, items, codes)
                code = torch.where(lengths == step, last, codes.gather(1, slot))
            columns.append(code)
            slot = code // self.V
        positions = torch.arange(T, device=last.device)
        tokens = torch.stack(columns[::-1], dim=2) % self.V if T else last.new_empty((B, k, 0))
        tokens.masked_fill_(positions >= lengths.unsqueeze(2), -1)
        optimal = torch.zeros(B, dtype=torch.bool, device=last.device)
        return Hypotheses(tokens, lengths, self.scores, self.finished, optimal)


def _check_prefix(prefix: Tensor, batch: int, max_length: int, model: Autoregressive) -> Tensor:
    if prefix.dim() != 2 or prefix.size(0) != batch or prefix.is_floating_point():
        got = f"{prefix.dtype} of shape {tuple(prefix.shape)}"
        raise ShapeError(f"`prefix` must be int64 of shape (B, P) with B = {batch} as in `inputs`, got {got}")
    if prefix.numel() == 0:
        return prefix
    if int(prefix.max()) >= model.vocab_size or int(prefix.min()) < -1:
        raise ShapeError(
            f"`prefix` must hold symbols 0 ... {model.vocab_size - 1}, or -1 past an item's end, "
            f"got {int(prefix.min())} ... {int(prefix.max())}"
        )
    if bool(((prefix[:, 1:] >= 0) & (prefix[:, :-1] < 0)).any()):
        raise ShapeError("`prefix` must have -1 only past an item's end, got a symbol after -1; move -1 to the end")
    if model.eos is not None and bool((prefix == model.eos).any()):
        raise ShapeError(f"`prefix` must not hold eos = {model.eos}, got one; a finished sequence needs no search")
    longest = int((prefix >= 0).sum(dim=1).max())
    if longest > max_length:
        raise ConfigError(f"`max_length` must be at least the longest prefix, {longest}, got {max_length}")
    return prefix
