"""Search that proves its answer: the most probable of all sequences, by branch and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.inference.search.agenda import Agenda, Nodes, positions
from thalweg.inference.search.beam.search import beam_search
from thalweg.inference.search.constraints import Allowed, Rules
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

# Rows of one item that are expanded together, items searched together, and log-probabilities held at once.
_TOGETHER = 32
_ITEMS = 64
_ROOM = 1 << 24


def exact_search(
    model: Autoregressive,
    inputs: Any,
    *,
    max_length: int,
    max_expansions: int | None = None,
    width: int = 5,
    min_length: int = 0,
    prefix: Tensor | None = None,
    allowed: Allowed | None = None,
) -> Hypotheses:
    r"""The most probable finished sequence, proved: argmax_y log p(y | x) over all y of at most ``max_length`` symbols.

    A beam search gives a first answer, the *incumbent*, and often its proof. Log-probabilities only fall as a sequence
    grows, so a partial sequence whose score is not above the incumbent's can be left with all that begins with it.
    What is above it is expanded best first; a finished sequence that is better becomes the incumbent; when nothing
    above it is open, it is the optimum. Stahlberg and Byrne (2019) do the same depth first.

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        max_length: most symbols of a sequence, eos counted. Without eos, all have exactly so many.
        max_expansions: most partial sequences of an item whose continuations are asked of the model, beside the
            beam's; None for as many as the proof takes.
        width: of the beam that gives the first answer; a better one leaves less to search.
        min_length: fewest symbols, eos counted: eos is forbidden at steps before it.
        prefix: ``(B, P)`` int64, -1 past each item's end: symbols every sequence must begin with.
        allowed: mask of symbols that may follow; see :class:`Allowed`.
    Returns:
        :class:`Hypotheses` with K = 1. ``optimal`` is true where the answer is proved. Where ``max_expansions`` ran
        out, ``gap`` is the best open score minus the answer's: no sequence has more log-probability than the answer's
        plus ``gap``. Where no finished sequence was found, the answer is the beam's best unfinished one (missing if
        there is none), ``optimal`` is false and ``gap`` is inf.

    Of the sequences that are tied for the optimum one is given. The nodes to expand are at least all partial sequences
    more probable than the optimum: few for a confident model, exponentially many in ``max_length`` for a flat one or
    one that never says eos, so give ``max_expansions`` where a model is unknown. One step of the model serves up to
    32 rows of each of up to 64 items, yet each item's search is what it would be alone. Memory: O(expansions x V)
    scores and the states they came from, but once an item has 32,768 open nodes the deepest come first, so that no
    more than O(max_length x V) are added.

    >>> from thalweg.inference import TableModel, greedy
    >>> table = {(): {1: -0.9, 2: -0.6}, (1,): {3: -0.1}, (2,): {1: -1.0, 3: -1.1}, (2, 1): {3: 0.0}}
    >>> model = TableModel(table, vocab_size=4, bos=0, eos=3)
    >>> which = torch.zeros(1, dtype=torch.long)
    >>> greedy(model, which, max_length=5).scores
    tensor([[-1.6000]], dtype=torch.float64)
    >>> best = exact_search(model, which, max_length=5)
    >>> best.sequences(), best.scores, best.optimal, best.gap
    ([[[1, 3]]], tensor([[-1.]], dtype=torch.float64), tensor([True]), tensor([0.], dtype=torch.float64))
    """
    check_at_least_one("max_length", max_length)
    check_at_least_one("width", width)
    if max_expansions is not None:
        check_at_least_one("max_expansions", max_expansions)
    rules = Rules.check(model, inputs, max_length, min_length, prefix, allowed)
    first = beam_search(
        model, inputs, width=width, k=1, max_length=max_length, min_length=min_length, prefix=prefix, allowed=allowed
    )
    with torch.no_grad():
        return _improve(_Exact(model, max_length, max_expansions, rules), inputs, first)


@dataclass(frozen=True)
class OptimalityReport:
    """How good a beam is, measured by exact search; counts of items.

    >>> OptimalityReport(items=4, width=5, proved=3, beam_optimal=2, beam_beaten=1, empty=0, mean_gap=0.25)
    OptimalityReport(items=4, width=5, proved=3, beam_optimal=2, beam_beaten=1, empty=0, mean_gap=0.25)
    """

    items: int
    width: int
    """Of the beam."""
    proved: int
    """Items whose optimum is known; the others ran out of expansions or have no finished sequence."""
    beam_optimal: int
    """Items whose beam answer is proved to be the optimum (or tied with it)."""
    beam_beaten: int
    """Items for which a more probable sequence than the beam's answer was found."""
    empty: int
    """Items whose proved optimum is eos alone."""
    mean_gap: float
    """Mean over the unproved items with a finished answer of what its score may lack; 0 where there are none."""

    @classmethod
    def compare(cls, best: Hypotheses, beam: Hypotheses, *, width: int, ends: bool = True) -> OptimalityReport:
        """What exact search says about a beam of ``width``, both of the same items; ``ends``: whether there is an eos.

        >>> none = Hypotheses.none(2, 1, torch.device("cpu"))
        >>> OptimalityReport.compare(none, none, width=5).proved
        0
        """
        # Rounding may differ between two runs of the model; that is no better answer.
        better = best.scores[:, 0] > beam.scores[:, 0] + 1e-5
        beaten = best.finished[:, 0] & (better | ~beam.finished[:, 0])
        gaps = best.scores.new_zeros(0) if best.gap is None else best.gap[~best.optimal & best.gap.isfinite()]
        return cls(
            items=best.size,
            width=width,
            proved=int(best.optimal.sum()),
            beam_optimal=int((best.optimal & ~beaten).sum()),
            beam_beaten=int(beaten.sum()),
            empty=int((best.optimal & (best.lengths[:, 0] == 1)).sum()) if ends else 0,
            mean_gap=float(gaps.mean()) if gaps.numel() else 0.0,
        )


def optimality_report(
    model: Autoregressive, inputs: Any, *, max_length: int, width: int = 5, max_expansions: int | None = 10_000
) -> OptimalityReport:
    """How often a beam of ``width`` finds the most probable sequence, and how often that is the empty one.

    Args and cost as for :func:`exact_search`.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel.markov([[-9.0, -0.1, -2.0], [-9.0, -2.0, -0.2], [0.0, 0.0, 0.0]], bos=0, eos=2)
    >>> report = optimality_report(model, torch.zeros(2, dtype=torch.long), max_length=9)
    >>> report.proved, report.beam_optimal, report.empty
    (2, 2, 0)
    """
    check_at_least_one("width", width)
    beam = beam_search(model, inputs, width=width, k=1, max_length=max_length)
    if max_expansions is not None:
        check_at_least_one("max_expansions", max_expansions)
    with torch.no_grad():
        best = _improve(_Exact(model, max_length, max_expansions, None), inputs, beam)
    return OptimalityReport.compare(best, beam, width=width, ends=model.eos is not None)


@dataclass(frozen=True)
class _Exact:
    model: Autoregressive
    max_length: int
    max_expansions: int | None
    rules: Rules | None


def _improve(search: _Exact, inputs: Any, first: Hypotheses) -> Hypotheses:
    """The optimum, or the best found, for what a beam gave; a large batch in pieces."""
    model, B, device = search.model, batch_size(inputs), device_of(search.model, inputs)
    if B == 0:
        return replace(first, gap=first.scores.new_zeros(0))
    state = model.begin(inputs)
    size = max(1, min(_ITEMS, _ROOM // (_TOGETHER * model.vocab_size)))
    parts = []
    for a in range(0, B, size):
        items = torch.arange(a, min(a + size, B), device=device)
        piece = state if size >= B else model.select(state, items)
        parts.append(_Piece(search, items, first).run(piece))
    return joined(parts)


class _Piece:
    """Items searched together: their incumbents, and what is open. Items are numbered from 0 within the piece."""

    def __init__(self, search: _Exact, items: Tensor, first: Hypotheses) -> None:
        self.search, self.items = search, items
        a, b = int(items[0]), int(items[-1]) + 1
        self.first = tuple(part[a:b, 0] for part in (first.tokens, first.lengths, first.scores, first.finished))
        tokens, lengths, scores, finished = self.first
        self.proved = first.optimal[a:b]
        self.found = finished.clone()
        self.score = scores.masked_fill(~finished, -math.inf)
        self.tokens = tokens.clone()
        self.lengths = lengths.clone()
        budget = search.max_expansions
        self.budget = None if budget is None else torch.full_like(lengths, budget)
        self.open = torch.full_like(self.score, -math.inf)  # best score that was given up for want of expansions

    def run(self, state: Any) -> Hypotheses:
        """Expand until nothing is open that could be better."""
        N, device = len(self.items), self.items.device
        rows = (~self.proved).nonzero().squeeze(1)
        start = torch.full_like(rows, self.search.model.bos)
        nothing = torch.empty((N, 0), dtype=torch.long, device=device)
        agenda = Agenda(N, _TOGETHER, device, self.score.dtype)
        agenda.add(Nodes(state, nothing, rows, start, self.score.new_zeros(len(rows)), rows, root=True))
        while (nodes := agenda.take(self.score)) is not None:
            agenda.add(self.expand(self.afford(nodes)))
            if self.budget is not None:
                self.open = torch.maximum(self.open, agenda.give_up(self.budget == 0))
        return self.hypotheses()

    def afford(self, nodes: Nodes) -> Nodes:
        """What the items' budgets still allow of ``nodes``, which are sorted by item and score."""
        if self.budget is None:
            return nodes
        within = positions(nodes.items, len(self.items)) < self.budget[nodes.items]
        over = ~within
        self.open.scatter_reduce_(0, nodes.items[over], nodes.scores[over], "amax")
        nodes = nodes.at(within)
        self.budget = self.budget - torch.bincount(nodes.items, minlength=len(self.items))
        return nodes

    def expand(self, nodes: Nodes) -> Nodes:
        """Ask the model for the continuations; take note of the finished ones and give back the others above bound."""
        model, step = self.search.model, nodes.depth + 1
        log_probs, state = model.step(nodes.symbols, model.select(nodes.state, nodes.rows))
        check_log_probs(log_probs, len(nodes.rows), model.vocab_size)
        raise_not_a_number(~(log_probs.amax(dim=1) < math.inf), self.items[nodes.items], step)
        tokens = nodes.tokens()
        if self.search.rules is not None:
            log_probs = self.search.rules.forbid(log_probs.clone(), step, self.items[nodes.items], tokens)
        total = log_probs.to(self.score.dtype) + nodes.scores.unsqueeze(1)
        last = step == self.search.max_length
        if model.eos is not None:
            self.finish(nodes.items, tokens, total[:, model.eos], model.eos)
            total[:, model.eos] = -math.inf
        elif last:
            best, symbols = total.max(dim=1)
            self.finish(nodes.items, tokens, best, symbols)
        above = torch.zeros_like(total, dtype=torch.bool) if last else total > self.score[nodes.items].unsqueeze(1)
        rows, symbols = above.nonzero().unbind(1)
        return Nodes(state, tokens, rows, symbols, total[rows, symbols], nodes.items[rows])

    def finish(self, items: Tensor, tokens: Tensor, scores: Tensor, symbols: Tensor | int) -> None:
        """Make the best of these finished sequences, one for each row, the incumbent of its item where it is better."""
        best = self.score.scatter_reduce(0, items, scores, "amax")
        better = (scores == best[items]) & (best > self.score)[items]
        # The first of tied rows, whatever the order in which a device writes.
        winner = torch.full_like(self.lengths, len(items))
        winner.scatter_reduce_(0, items[better], better.nonzero().squeeze(1), "amin")
        which = (winner < len(items)).nonzero().squeeze(1)
        row, t = winner[which], tokens.size(1)
        self.score = best
        if t + 1 > self.tokens.size(1):
            self.tokens = nn.functional.pad(self.tokens, (0, t + 1 - self.tokens.size(1)), value=-1)
        self.found[which] = True
        self.lengths[which] = t + 1
        self.tokens[which, :t] = tokens[row]
        self.tokens[which, t] = symbols if isinstance(symbols, int) else symbols[row]
        self.tokens[which, t + 1 :] = -1

    def hypotheses(self) -> Hypotheses:
        """The incumbents, with what is known about them."""
        scores = torch.where(self.found, self.score, self.first[2])
        optimal = self.found & ~(self.open > self.score)
        gap = torch.where(self.found, (self.open - self.score).clamp(min=0), math.inf)
        T = int(self.lengths.max())
        return Hypotheses(
            self.tokens[:, :T].unsqueeze(1),
            self.lengths.unsqueeze(1),
            scores.unsqueeze(1),
            self.found.unsqueeze(1),
            optimal,
            gap=gap,
        )
