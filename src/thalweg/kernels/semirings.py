r"""Algebras for sums over paths: one recursion, one algebra for each quantity.

A sum over all paths of a product over the parts of each path is computed by the same recursion whatever "sum" and
"product" mean, as long as the product distributes over the sum. With log-sum-exp and + the result is log Z; with
max and + the best score; with pairs it is an entropy or an expectation.

**Elements are tensors.** The last axes of an element belong to the caller; an algebra whose elements have several
components keeps these in one axis *before* all others, so that axes counted from the end, masks and indices mean the
same in every algebra:

============  ==========================================  ============================  ======================
algebra       element of weight w                         product                       sum
============  ==========================================  ============================  ======================
`Log`         ``(...)``: log w                            +                             log-sum-exp
`Max`         ``(...)``: score                            +                             max
`KMax`        ``(k, ...)``: the k best scores, falling    best k of all pairwise sums   best k of all
`Sample`      ``(...)``: log w                            +                             log-sum-exp, then a draw
`Draw`        ``(...)``: log w                            +                             the same, as its gradient
`Entropy`     ``(2, ...)``: log w, entropy                + on both                     see the class
`Expectation` ``(2, ...)``: log w, expected value         + on both                     see the class
============  ==========================================  ============================  ======================

``-inf`` is the log of 0 and is exact: values and gradients of every order stay free of NaN, and an empty sum (all
terms ``-inf``) passes gradient 0 to its terms.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ShapeError


class Axis:
    """What a sum runs over: one axis, counted from the end."""

    def __init__(self, dim: int) -> None:
        if dim >= 0:
            raise ShapeError(f"axes of elements are counted from the end: `dim` must be negative, got {dim}")
        self.dim = dim

    def amax(self, x: Tensor) -> Tensor:
        """The greatest entry of each sum."""
        return x.amax(self.dim)

    def total(self, x: Tensor) -> Tensor:
        """The plain sum."""
        return x.sum(self.dim)

    def spread(self, y: Tensor) -> Tensor:
        """What was reduced, broadcast back against what was summed."""
        return y.unsqueeze(self.dim)

    def best(self, x: Tensor, k: int) -> Tensor:
        """The k greatest of each sum over this axis and the first, merged: ``(n, ..)`` to ``(k, ..)``, falling."""
        lists = x.movedim(self.dim, -1).movedim(0, -1).flatten(-2)  # the caller's axis outside, the list inside
        values = lists.topk(k).values.movedim(-1, 0)
        return torch.where(values == -math.inf, -math.inf, values)

    def first(self, x: Tensor) -> Tensor:
        """The greatest of each sum; its gradient goes to the first of equal ones."""
        values = x.max(self.dim).values
        return torch.where(values == -math.inf, -math.inf, values)


class Segments:
    """What a sum runs over: entries of the last axis with the same index, ``(.., E)`` to ``(.., size)``.

    ``index`` (E,) int64, E >= 1; :meth:`best` wants it sorted rising. Segments without entries give the empty sum.
    Cost O(E), nothing of size^2.
    """

    def __init__(self, index: Tensor, size: int) -> None:
        self.index, self.size = index, size

    def amax(self, x: Tensor) -> Tensor:
        """The greatest entry of each segment; -inf where there is none."""
        low = x.new_full((*x.shape[:-1], self.size), -math.inf)
        return low.scatter_reduce(-1, self.index.expand(x.shape), x, "amax")

    def total(self, x: Tensor) -> Tensor:
        """The plain sum."""
        return x.new_zeros((*x.shape[:-1], self.size)).index_add(-1, self.index, x)

    def spread(self, y: Tensor) -> Tensor:
        """What was reduced, at each entry of its segment."""
        return y.index_select(-1, self.index)

    def best(self, x: Tensor, k: int) -> Tensor:
        """The k greatest of each segment, the lists of the first axis merged: ``(n, .., E)`` to ``(k, .., size)``."""
        lists = x.movedim(0, -1).flatten(-2)  # (.., E n), still sorted by segment
        owner = self.index.repeat_interleave(x.shape[0])
        falling, order = lists.sort(dim=-1, descending=True)
        # Falling first, then stably by segment: within each segment the values still fall.
        ordered = falling.gather(-1, owner[order].argsort(dim=-1, stable=True))
        count = torch.bincount(owner, minlength=self.size)
        first = count.cumsum(0) - count
        rank = torch.arange(k, device=x.device).unsqueeze(-1)  # (k, 1)
        there = rank < count  # (k, size)
        place = torch.where(there, first + rank, 0).flatten()
        taken = ordered.index_select(-1, place).unflatten(-1, (k, self.size))
        return torch.where(there & (taken > -math.inf), taken, -math.inf).movedim(-2, 0)

    def first(self, x: Tensor) -> Tensor:
        """The greatest of each segment, -inf where there is none; its gradient goes to the first of equal ones."""
        edges = x.shape[-1]
        with torch.no_grad():
            top = self.amax(x)
            place = torch.where(x == self.spread(top), torch.arange(edges, device=x.device), edges)
            none = place.new_full(top.shape, edges)
            place = none.scatter_reduce(-1, self.index.expand(x.shape), place, "amin")
        values = torch.cat((x, x.new_full((*x.shape[:-1], 1), -math.inf)), -1).gather(-1, place)
        return torch.where(values == -math.inf, -math.inf, values)


def _log_sum(x: Tensor, over: Axis | Segments) -> Tensor:
    """Log-sum-exp; derivatives of every order are right since the shift is a constant that cancels."""
    with torch.no_grad():
        top = over.amax(x)
        top = torch.where(top == -math.inf, 0.0, top)
    total = over.total((x - over.spread(top)).exp())
    empty = total == 0  # otherwise it is at least 1
    return torch.where(empty, -math.inf, torch.where(empty, 1.0, total).log() + top)


class Semiring:
    """The interface. ``over`` is a negative axis, an :class:`Axis` or :class:`Segments`."""

    def lift(self, scores: Tensor) -> Tensor:
        """The element of weight exp(scores); -inf gives the algebra's zero, 0 its one."""
        return scores

    def weight(self, x: Tensor) -> Tensor:
        """The log-weight of elements (the greatest, where an element is a list), without a component axis."""
        return x

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """The product, broadcast."""
        return a + b

    def act(self, x: Tensor, scores: Tensor) -> Tensor:
        """``times(x, lift(scores))``, cheaper where it can be."""
        return self.times(x, self.lift(scores))

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """The sum over an axis or over segments."""
        raise NotImplementedError

    def zero(self, scores: Tensor) -> Tensor:
        """Zeros of the algebra, shaped as ``lift(scores)``."""
        return self.lift(torch.full_like(scores, -math.inf))

    def one(self, scores: Tensor) -> Tensor:
        """Ones of the algebra, shaped as ``lift(scores)``."""
        return self.lift(torch.zeros_like(scores))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of matrices: ``(.., I, J)`` and ``(.., J, K)`` give ``(.., I, K)``; memory I J K."""
        return self.sum(self.times(a.unsqueeze(-1), b.unsqueeze(-3)), -2)

    def split(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Vectors (.., B, C) as (vectors near 0, scores (B,) taken off): ``x = act(vectors, *scores)``.

        Keeps long recursions near 0, where floating point is finest. What is taken off counts as a constant, which
        leaves every derivative as it is.
        """
        taken = self._peak(x.detach())
        return self.act(x, *(-each for each in taken)), tuple(each.squeeze(-1) for each in taken)

    def _peak(self, x: Tensor) -> tuple[Tensor, ...]:
        """What to take off, (.., 1); always finite."""
        top = self.weight(x).amax(-1, keepdim=True)
        return (torch.where(top == -math.inf, 0.0, top),)


def _over(over: int | Axis | Segments) -> Axis | Segments:
    return Axis(over) if isinstance(over, int) else over


class Log(Semiring):
    """Weights as their logarithms: the sum over paths is log Z, and its gradient the probability of each part.

    >>> Log().sum(torch.tensor([0.0, 0.0, -math.inf]), -1).exp()
    tensor(2.)
    """

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """Log-sum-exp."""
        return _log_sum(x, _over(over))


class Max(Semiring):
    """Scores of best paths; the gradient of the sum over paths marks the parts of a best path.

    Between equal ones the first wins, in the gradient and in :meth:`choose`.

    >>> Max().sum(torch.tensor([0.0, 2.0, 1.0]), -1)
    tensor(2.)
    """

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """The greatest."""
        return _over(over).first(x)

    def choose(self, x: Tensor, rank: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first of the greatest along the last axis, ``(.., C)`` to ``(..)``; ``rank`` comes back unused."""
        return x.argmax(-1), rank


class KMax(Semiring):
    """Scores of the k best paths, ``(k, ...)`` falling; -inf fills the list where there are fewer.

    >>> KMax(2).sum(KMax(2).lift(torch.tensor([0.0, 2.0, 1.0])), -1)
    tensor([2., 1.])
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ShapeError(f"`k` must be at least 1, got {k}")
        self.k = k

    def lift(self, scores: Tensor) -> Tensor:
        """A list with one entry."""
        missing = scores.new_full((self.k - 1, *scores.shape), -math.inf)
        return torch.cat((scores.unsqueeze(0), missing))

    def weight(self, x: Tensor) -> Tensor:
        """The best score."""
        return x[0]

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """The k best sums of one entry of each."""
        dims = max(a.dim(), b.dim()) - 1
        a, b = (x.reshape(len(x), *(1,) * (dims - x.dim() + 1), *x.shape[1:]) for x in (a, b))
        return Axis(-dims - 1).best(a.unsqueeze(1) + b.unsqueeze(0), self.k)

    def act(self, x: Tensor, scores: Tensor) -> Tensor:
        """Adding one score to every entry keeps the order."""
        return x.reshape(len(x), *(1,) * (scores.dim() - x.dim() + 1), *x.shape[1:]) + scores

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """The k best of all lists."""
        return _over(over).best(x, self.k)

    def choose(self, x: Tensor, rank: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Where the entry of a given rank of the sum over the last axis comes from.

        ``x`` is (k, .., C) and ``rank`` (..) in 0..k-1; gives the place in 0..C-1 and the rank in the list there.
        Of equal entries the one of the first place goes first, so that different ranks come from different entries.
        """
        order = x.movedim(0, -1).flatten(-2).sort(dim=-1, descending=True, stable=True)[1]
        order = order.expand(*rank.shape, -1)
        found = order.gather(-1, rank.unsqueeze(-1)).squeeze(-1)
        return found // len(x), found % len(x)


class Sample(Log):
    """Exact sampling as an algebra: each sum also keeps one of its terms, with probability weight / total.

    The structure that a whole recursion ends with has probability exp(score) / Z: the draws at the nested sums
    multiply, and all inner totals cancel. Only the draws along the structure that is kept matter, so the recursion runs
    over the weights alone, as :class:`Log`, and :meth:`choose` draws afterwards, from the outermost sum inwards.

    >>> Sample().choose(torch.tensor([0.0, 0.0]), torch.tensor(0), torch.tensor(0.7))[0]
    tensor(1)
    """

    def choose(self, x: Tensor, rank: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A place along the last axis by inverse cumulative probability; ``rank`` comes back unused.

        ``x`` is (.., C) log-weights and ``uniforms`` (..) in [0, 1). The place is the number of entries of the
        cumulative probabilities that are <= the uniform, at most the last place with positive probability.
        """
        if uniforms is None:
            raise ShapeError("a sample needs `uniforms`, one for each draw, got none")
        probabilities = (x - self.sum(x, -1).clamp(min=torch.finfo(x.dtype).min).unsqueeze(-1)).exp()
        below = (probabilities.cumsum(-1) <= uniforms.unsqueeze(-1)).sum(-1)
        places = torch.arange(x.shape[-1], device=x.device)
        last = torch.where(probabilities > 0, places, 0).amax(-1)
        return torch.minimum(below, last), rank


class _DrawnSum(torch.autograd.Function):
    """Log-sum-exp whose gradient goes to one of the terms, drawn anew in each backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Axis | Segments, generator: torch.Generator | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = over, generator
        return _log_sum(x, over)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        (x,), (over, generator) = ctx.saved_tensors, ctx.rest
        noise = torch.empty_like(x).exponential_(generator=generator).clamp_(min=torch.finfo(x.dtype).tiny).log_()
        with torch.enable_grad():
            # The greatest of log w_i plus Gumbel noise is i with probability w_i / sum.
            noisy = (x - noise).detach().requires_grad_()
            return torch.autograd.grad(over.first(noisy), noisy, weights[0])[0], None, None


class Draw(Log):
    """:class:`Sample` for any recursion: the gradient of the sum over structures marks the parts of one, drawn exactly.

    Axes before the batch are independent draws.

    >>> x = torch.tensor([0.0, 9.0, -math.inf], requires_grad=True)
    >>> torch.autograd.grad(Draw(torch.Generator().manual_seed(0)).sum(x, -1), x)[0]
    tensor([0., 1., 0.])
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """Log-sum-exp."""
        return _DrawnSum.apply(x, _over(over), self.generator)  # type: ignore[return-value]


class _Pair(Semiring):
    """Elements (log w, v) where products add both; a stack (2, ..)."""

    def lift(self, scores: Tensor, values: Tensor | None = None) -> Tensor:
        if values is None:
            return torch.stack((scores, torch.zeros_like(scores)))
        return torch.stack(torch.broadcast_tensors(scores, values))

    def weight(self, x: Tensor) -> Tensor:
        return x[0]

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a[0] + b[0], a[1] + b[1]))

    def act(self, x: Tensor, scores: Tensor, values: Tensor | None = None) -> Tensor:
        added = x[1] if values is None else x[1] + values
        return torch.stack(torch.broadcast_tensors(x[0] + scores, added))

    def _peak(self, x: Tensor) -> tuple[Tensor, ...]:
        top, place = x[0].max(-1, keepdim=True)
        value = x[1].gather(-1, place)
        return torch.where(top == -math.inf, 0.0, top), torch.where(value == -math.inf, 0.0, value)


def _shares(w: Tensor, over: Axis | Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sum-exp, which terms have weight, their log-shares of the sum (0 for the others) and their shares."""
    total = _log_sum(w, over)
    alive = w > -math.inf
    log_shares = torch.where(alive, w - over.spread(total), 0.0)
    return total, alive, log_shares, torch.where(alive, log_shares.exp(), 0.0)


class Entropy(_Pair):
    r"""Pairs (log w, H): a set of paths with total weight w and the entropy H of its normalised distribution.

    Paths of independent parts: entropies add. A union of disjoint sets with shares :math:`p_i = w_i / \sum w` has
    :math:`H = \sum_i p_i (H_i - \log p_i)`, a sum of terms >= 0: nothing cancels, and a set of weight 0 adds 0.

    >>> Entropy().sum(Entropy().lift(torch.tensor([0.0, 0.0, -math.inf])), -1)[1].exp()
    tensor(2.)
    """

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """The union of disjoint sets."""
        over = _over(over)
        total, _, log_shares, shares = _shares(x[0], over)
        return torch.stack((total, over.total(shares * (x[1] - log_shares))))


class Expectation(_Pair):
    r"""Pairs (log w, v): a set of paths with total weight w and the mean v over it of a second additive score.

    Products add both; a union of disjoint sets with shares :math:`p_i` has the mean :math:`\sum_i p_i v_i`, where a
    set of weight 0 adds 0 whatever its v. A v of -inf in a set of weight > 0 makes the mean -inf, with gradient 0.

    >>> algebra = Expectation()
    >>> algebra.sum(algebra.lift(torch.zeros(2), torch.tensor([1.0, 2.0])), -1)[1]
    tensor(1.5000)
    """

    def sum(self, x: Tensor, over: int | Axis | Segments) -> Tensor:
        """The union of disjoint sets."""
        over = _over(over)
        total, alive, _, shares = _shares(x[0], over)
        lost = x[1] == -math.inf
        mean = over.total(shares * torch.where(lost | ~alive, 0.0, x[1]))
        low = over.total((lost & alive).to(mean.dtype)) > 0
        return torch.stack((total, torch.where(low, -math.inf, mean)))
