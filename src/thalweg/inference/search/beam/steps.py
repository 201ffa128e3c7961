"""A beam's steps: rank all continuations, keep the best, drop items that are done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.inference.search.beam.answers import Answers, Pool
from thalweg.inference.search.beam.tree import DROPPED, FINISHED, BeamTree, Layer
from thalweg.inference.search.constraints import Rules
from thalweg.inference.search.protocol import Autoregressive, Hypotheses, check_log_probs
from thalweg.inference.search.streaming import Partial


@dataclass(frozen=True)
class Settings:
    """How hypotheses are ranked, what they must be, and who watches.

    >>> Settings(0, 5, 0.0).max_length
    5
    """

    min_length: int
    max_length: int
    penalty: float
    rules: Rules | None = None
    on_step: Callable[[Partial], None] | None = None
    return_tree: bool = False


class Lost(NamedTuple):
    """Scores (A, n) of continuations that were let go of; ``but`` (A, n) marks others among them.

    >>> Lost(torch.zeros(1, 2)).but is None
    True
    """

    scores: Tensor
    but: Tensor | None = None


class Chosen(NamedTuple):
    """What one step made of all continuations of A items. A code is row * V + symbol.

    >>> Chosen._fields[1:3]
    ('live', 'code')
    """

    pool: Pool
    live: Tensor  # (A, w) scores of the rows that live on, best first
    code: Tensor  # (A, w)
    lost: list[Lost]  # the best of what was let go of, where a beam of all sequences could have finished it
    top: Tensor  # (A, C) scores of the candidates, best first
    codes: Tensor  # (A, C)
    order: Tensor  # (A, w) which candidates live on
    ended: Tensor | None  # (A, C) which became finished hypotheses, if their score is not -inf; where watched


class Search:
    """A beam's run over B items, which are dropped as they are done.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> search = Search(model, 2, 1, Settings(0, 5, 0.0))
    >>> search.run(model.begin(torch.tensor([0])), 0, 1, torch.device("cpu")).sequences()
    [[[2]]]
    """

    def __init__(self, model: Autoregressive, width: int, k: int, settings: Settings) -> None:
        self.model, self.V, self.width, self.k, self.settings = model, model.vocab_size, width, k, settings
        self.marked = self.watched = settings.on_step is not None or settings.return_tree
        asked = settings.rules is not None and settings.rules.allowed is not None
        self.followed = settings.on_step is not None or asked

    def run(self, state: Any, first: int, B: int, device: torch.device) -> Hypotheses:
        """Hypotheses of the B items whose rows ``state`` holds; ``first`` is the batch number of the first."""
        self.state = state
        self.answers = Answers(first, B, self.k, span=self.width * self.V, vocab_size=self.V, device=device)
        self.layers: list[Layer] = []
        self.items = torch.arange(first, first + B, device=device)
        self.live = torch.zeros((B, 1), device=device)  # float32 at least, the model's type where that is wider
        none = torch.full((B, self.k), -math.inf, device=device)
        self.pool = Pool(none, none, torch.zeros((B, self.k), dtype=torch.long, device=device))
        self.dropped = none[:, 0]  # best score that was let go of; what is in `lost` is not counted yet
        self.lost: list[Lost] = []
        self.tokens = torch.full((B,), self.model.bos, dtype=torch.long, device=device)
        self.sequences = torch.empty((B, 0), dtype=torch.long, device=device)
        self.firsts, self.firsts_apart = self.tokens[:0], 0
        for step in range(1, self.settings.max_length + 1):
            before = self.live.shape
            code = self.advance(step)
            if step == self.settings.max_length:
                self.count_lost()
                self.answers.last(self.items, *self.settle(self.pool, self.live, code), self.proof(), step)
                break
            going = self.retire(code, step)
            if going is not None:
                if going.numel() == 0:
                    break
                code = code[going]
            self.follow(code, going, before)
        found = self.answers.hypotheses()
        return replace(found, tree=BeamTree(tuple(self.layers))) if self.settings.return_tree else found

    def advance(self, step: int) -> Tensor:
        """Take one step with the model; pool and live rows after it, and the codes of those rows (A, w)."""
        log_probs, self.state = self.model.step(self.tokens, self.state)
        (A, W), V, rules = self.live.shape, self.V, self.settings.rules
        total = check_log_probs(log_probs, A * W, V).reshape(A, W, V) + self.live.unsqueeze(2)
        if rules is not None and rules.binds(step):
            rules.forbid(total.view(A * W, V), step, self.items.repeat_interleave(W), self.sequences)
        chosen = self.choose(total, self.pool, step)
        self.lost.extend(chosen.lost)
        if self.watched:
            self.report(chosen, step)
        self.pool, self.live = chosen.pool, chosen.live
        return chosen.code

    def choose(self, total: Tensor, pool: Pool, step: int) -> Chosen:
        """Rank the continuations (A, W, V) of each item."""
        return self.rank(total.flatten(1), pool, step, self.width)

    def rank(
        self, total: Tensor, pool: Pool, step: int, width: int, charge: Tensor | None = None, first: int = 0
    ) -> Chosen:
        """Rank the continuations (A, W V) of rows ``first`` and up by ``total - charge`` (of a beam among several).

        The finished go into the pool, the best others live on. One more than is kept is looked at: it is the
        best of what is let go of.
        """
        eos = self.model.eos
        if eos is None:
            return self.rank_endless(total, pool, step, width, charge, first)
        ranked = total if charge is None else total - charge
        # A row has one eos continuation, so twice the width always holds `width` others.
        top, codes = ranked.topk(min(2 * width + 1, total.size(1)), dim=1)
        others = codes % self.V != eos
        live, order = top.masked_fill(~others, -math.inf).topk(min(width + 1, top.size(1)), dim=1)
        if charge is not None:
            top, codes = total.gather(1, codes), codes + first * self.V
            live = top.masked_fill(~others, -math.inf).gather(1, order)
        finished = top[:, :width].masked_fill(others[:, :width], -math.inf)
        pool = self.finish(pool, finished, codes[:, :width], step)
        lost = []
        if charge is None and step == self.settings.max_length:
            # Here eos alone makes a hypothesis, wherever it stands; none of those kept is better than the best.
            lost.append(Lost(total.unflatten(1, (-1, self.V))[:, :, eos]))
        elif charge is None and top.size(1) > width:
            lost.append(Lost(top[:, width:], others[:, width:]))
            lost.append(Lost(live[:, width:]))
        ended = None
        if self.marked:
            ended = ~others & (torch.arange(top.size(1), device=top.device) < width)
        live, order = live[:, :width], order[:, :width]
        return Chosen(pool, live, codes.gather(1, order), lost, top, codes, order, ended)

    def rank_endless(
        self, total: Tensor, pool: Pool, step: int, width: int, charge: Tensor | None, first: int
    ) -> Chosen:
        """The same for a model without eos: all live on, until all finish at the last step."""
        ranked = total if charge is None else total - charge
        size = 2 * width + 1 if self.settings.return_tree else width + 1  # a tree shows more of what is let go of
        top, codes = ranked.topk(min(size, total.size(1)), dim=1)
        if charge is not None:
            top, codes = total.gather(1, codes), codes + first * self.V
        lost = [Lost(top[:, width:])] if charge is None else []
        live, code = top[:, :width], codes[:, :width]
        order = torch.arange(live.size(1), device=top.device).expand_as(code)
        last = step == self.settings.max_length
        ended = None
        if self.marked:
            ended = (torch.arange(top.size(1), device=top.device) < width).expand_as(top) & last
        if last:
            pool = self.finish(pool, live, code, step)
            live = torch.full_like(live, -math.inf)
        return Chosen(pool, live, code, lost, top, codes, order, ended)

    def finish(self, pool: Pool, score: Tensor, code: Tensor, step: int) -> Pool:
        """The pool with these finished ones, ranked by the length penalty."""
        rank = score if self.settings.penalty == 0 else score / step**self.settings.penalty
        return pool.merge(rank, score, code + step * self.width * self.V)

    def bound(self, live: Tensor, step: int) -> Tensor:
        """The best rank that rows with scores ``live`` can still reach."""
        penalty = self.settings.penalty
        if penalty == 0:
            return live
        return live / (self.settings.max_length if penalty > 0 else max(step + 1, self.settings.min_length)) ** penalty

    def done(self, step: int) -> Tensor:
        """Items (A,) whose k-th finished hypothesis no live row can overtake; also those with NaN."""
        return ~(self.pool.rank[:, -1] < self.bound(self.live[:, 0], step))

    def settle(self, pool: Pool, live: Tensor, code: Tensor) -> tuple[Pool, Tensor, Tensor]:
        """The k best finished and the live rows, each best first."""
        return pool, live, code

    def retire(self, code: Tensor, step: int) -> Tensor | None:
        """Write down the items that are done; which of the A go on, or None for all."""
        done = self.done(step)
        if not bool(done.any()):
            return None
        self.count_lost()
        pool, live, _ = self.settle(self.pool.at(done), self.live[done], code[done])
        proof = self.proof()
        self.answers.write(self.items[done], pool, live, None if proof is None else proof[done], step)
        going = (~done).nonzero().squeeze(1)
        self.items, self.pool, self.live = self.items[going], self.pool.at(going), self.live[going]
        self.dropped = self.dropped[going]
        return going

    def count_lost(self) -> None:
        """Count what was let go of since the last time; rarely, so that a step is spared the work."""
        plain = [lost.scores for lost in self.lost if lost.but is None]
        mixed = [(lost.scores, lost.but) for lost in self.lost if lost.but is not None]
        if mixed:
            scores, but = (torch.cat(part, dim=1) for part in zip(*mixed, strict=True))
            plain.append(scores.masked_fill(but, -math.inf))
        self.dropped = torch.cat([self.dropped.unsqueeze(1), *plain], dim=1).amax(dim=1)
        self.lost.clear()

    def proof(self) -> Tensor | None:
        """What a finished hypothesis must not fall short of to be the most probable; None with a length penalty."""
        return self.dropped if self.settings.penalty == 0 else None

    def follow(self, code: Tensor, going: Tensor | None, before: torch.Size) -> None:
        """Let the model's rows be those that live on; ``before`` is (A, W) of the step."""
        A, W = before
        # A dead slot follows a live row, so that the model is never asked about an impossible sequence.
        code = torch.where(self.live > -math.inf, code, self.alive(code))
        self.answers.history.append((self.items, code))
        self.tokens = (code % self.V).view(-1)
        if going is not None or code.size(1) > 1 or W > 1:  # else every row follows itself
            rows = (code // self.V + self.first_rows(A, W, going)).view(-1)
            self.state = self.model.select(self.state, rows)
            self.sequences = self.sequences[rows] if self.followed else self.sequences
        if self.followed:
            self.sequences = torch.cat([self.sequences, self.tokens.unsqueeze(1)], dim=1)

    def first_rows(self, A: int, W: int, going: Tensor | None) -> Tensor:
        """Number (A, 1) of each going item's first row, of A times W."""
        if going is not None:
            return going.unsqueeze(1) * W
        if self.firsts.size(0) != A or self.firsts_apart != W:
            self.firsts, self.firsts_apart = torch.arange(0, A * W, W, device=self.items.device).unsqueeze(1), W
        return self.firsts

    def alive(self, code: Tensor) -> Tensor:
        """Code (A, 1) of a live row of each item."""
        return code[:, :1]

    def report(self, chosen: Chosen, step: int) -> None:
        """Tell whoever watches."""
        assert chosen.ended is not None
        ended = chosen.ended & (chosen.top > -math.inf)
        if self.settings.return_tree:
            self.layers.append(self.layer(chosen, ended, step))
        if self.settings.on_step is not None:
            self.settings.on_step(self.partial(chosen, ended, step))

    def layer(self, chosen: Chosen, ended: Tensor, step: int) -> Layer:
        """The candidates of this step and what became of each."""
        slots = torch.arange(chosen.live.size(1), device=ended.device)
        slots = torch.where(chosen.live > -math.inf, slots, DROPPED)
        fate = torch.full_like(chosen.codes, DROPPED).scatter_(1, chosen.order, slots).masked_fill_(ended, FINISHED)
        return Layer(step, self.items, chosen.codes // self.V, chosen.codes % self.V, chosen.top, fate)

    def partial(self, chosen: Chosen, ended: Tensor, step: int) -> Partial:
        """The rows that live after this step and the hypotheses that it finished."""
        A, W = self.live.shape
        scores = torch.cat([chosen.live, chosen.top], dim=1)
        shown = torch.cat([chosen.live > -math.inf, ended], dim=1)
        codes = torch.cat([chosen.code, chosen.codes], dim=1)
        rows = (codes // self.V + torch.arange(A, device=codes.device).unsqueeze(1) * W)[shown]
        tokens = torch.cat([self.sequences[rows], (codes % self.V)[shown].unsqueeze(1)], dim=1)
        finished = torch.arange(codes.size(1), device=codes.device).expand_as(codes) >= chosen.live.size(1)
        items = self.items.unsqueeze(1).expand_as(codes)[shown]
        return Partial(step, items, tokens, scores[shown], finished[shown])


class Grouped(Search):
    """Groups of rows, each a beam with a pool of its own; rows, pools and candidates stand group by group.

    Gives the hypotheses of all beams; the same one may be there more than once.
    """

    def __init__(self, model: Autoregressive, width: int, settings: Settings, groups: int, diversity: float) -> None:
        super().__init__(model, width, width, settings)
        self.marked = True
        self.groups, self.diversity = groups, diversity

    def choose(self, total: Tensor, pool: Pool, step: int) -> Chosen:
        """One group after the other, each charged for the symbols that earlier ones took."""
        (A, W, V), G = total.shape, self.groups
        size = W // G if W > 1 else 1  # at the first step there is one row for all
        taken = total.new_zeros((A, V))
        groups: list[Chosen] = []
        for g in range(G):
            first = g * size if W > 1 else 0
            own = total[:, first : first + size].flatten(1)
            charge = (self.diversity * taken).repeat(1, size) if g else None
            part = Pool(*(column.chunk(G, dim=1)[g] for column in pool))
            chosen = self.rank(own, part, step, self.width // G, charge, first)
            assert chosen.ended is not None
            taken.scatter_add_(1, chosen.code % V, (chosen.live > -math.inf).to(taken.dtype))
            taken.scatter_add_(1, chosen.codes % V, (chosen.ended & (chosen.top > -math.inf)).to(taken.dtype))
            groups.append(chosen)
        size = groups[0].top.size(1)
        return Chosen(
            Pool(*(torch.cat(column, dim=1) for column in zip(*(c.pool for c in groups), strict=True))),
            torch.cat([c.live for c in groups], dim=1),
            torch.cat([c.code for c in groups], dim=1),
            groups[0].lost,  # the first beam is charged nothing: what it proves holds for all
            torch.cat([c.top for c in groups], dim=1),
            torch.cat([c.codes for c in groups], dim=1),
            torch.cat([c.order + g * size for g, c in enumerate(groups)], dim=1),
            torch.cat([c.ended for c in groups if c.ended is not None], dim=1),
        )

    def done(self, step: int) -> Tensor:
        """Items all of whose beams are done: a beam goes on as long as others are charged for what it takes."""
        best = self.live.unflatten(1, (self.groups, -1)).amax(dim=2)
        rank = self.pool.rank.unflatten(1, (self.groups, -1))[:, :, -1]
        return (~(rank < self.bound(best, step))).all(dim=1) | best.isnan().any(dim=1)

    def settle(self, pool: Pool, live: Tensor, code: Tensor) -> tuple[Pool, Tensor, Tensor]:
        """Those of all beams in one order; of a beam's live rows as many as it lacks finished ones."""
        size = (self.groups, -1)
        count = (pool.rank.unflatten(1, size) > -math.inf).sum(dim=2, keepdim=True)
        spare = torch.arange(self.width // self.groups, device=count.device) >= self.width // self.groups - count
        spare = spare[:, :, : live.size(1) // self.groups].flatten(1)
        # What is not a number stays to be found.
        live = live.masked_fill(spare & (live < math.inf), -math.inf)
        rank, order = pool.rank.sort(dim=1, descending=True, stable=True)
        pool = Pool(rank, pool.score.gather(1, order), pool.code.gather(1, order))
        live, order = live.sort(dim=1, descending=True, stable=True)
        return pool, live, code.gather(1, order)

    def alive(self, code: Tensor) -> Tensor:
        """Any beam's best row."""
        return code.gather(1, self.live.argmax(dim=1, keepdim=True))
