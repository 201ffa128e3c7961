"""Sampling sequences symbol by symbol, with the usual ways of leaving out what is improbable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.search.constraints import Allowed, Rules
from thalweg.inference.search.greedy import Follower
from thalweg.inference.search.protocol import (
    Autoregressive,
    Hypotheses,
    batch_size,
    check_at_least_one,
    device_of,
    real,
)
from thalweg.inference.search.streaming import Partial
from thalweg.limits import enough_memory


def sample_sequences(
    model: Autoregressive,
    inputs: Any,
    *,
    n: int,
    max_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    typical: float | None = None,
    min_p: float | None = None,
    min_length: int = 0,
    prefix: Tensor | None = None,
    allowed: Allowed | None = None,
    generator: torch.Generator | None = None,
    on_step: Callable[[Partial], object] | None = None,
) -> Hypotheses:
    r"""Independent samples, with replacement: y_t ~ q, q(v) \propto p(v | y_<t, x)^{1 / temperature} over what is kept.

    Symbols are left out in the order of the arguments: those that ``min_length``, ``prefix`` and ``allowed`` forbid,
    then by ``top_k``, ``top_p``, ``typical`` and ``min_p``. Each looks at the distribution, after ``temperature`` and
    normalised anew, that those before it have left, and never leaves fewer than one symbol.

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        n: samples for each item.
        max_length: most symbols of a sample, eos counted.
        temperature: above 0; below 1 sharpens, above 1 flattens q.
        top_k: keep the k most probable symbols; exactly k, also when some are tied.
        top_p: keep the smallest set of most probable symbols with at least this share of the mass, in (0, 1].
        typical: keep the smallest set with at least this share of the mass, in (0, 1], of the symbols whose surprisal
            -log q(v) is nearest to its mean, the entropy of q; of two as near, the more probable first.
        min_p: keep the symbols with q(v) >= min_p max_u q(u), in [0, 1].
        min_length: fewest symbols of a sample, eos counted: eos is forbidden at steps before it.
        prefix: ``(B, P)`` int64, -1 past each item's end: symbols every sample begins with, part of its score.
        allowed: mask of symbols that may follow; see :class:`Allowed`.
        generator: source of randomness; torch's own when None.
        on_step: called after every step with the rows as they stand; see :class:`Partial`.
    Returns:
        :class:`Hypotheses` with K = n, sorted; ``scores`` are log-probabilities under the model itself,
        whatever the temperature and filters. A sample that comes to where nothing can follow is missing.

    Symbols are drawn by inverting the cumulative distribution in float64, with uniform numbers drawn
    beforehand for (item, sample, step): on the CPU one call for B items gives what B calls in a row with
    the same generator give. Time O(T R V), with a filter that ranks O(T R V log V); memory O(B n max_length).
    Holtzman et al. (2020) for top_p, Meister et al. (2023) for typical, Nguyen et al. (2024) for min_p.

    >>> from thalweg.inference import TableModel
    >>> fair = TableModel.markov([[0.5, 0.5], [0.5, 0.5]], bos=0, logarithms=False)
    >>> which = torch.zeros(2, dtype=torch.long)
    >>> flips = sample_sequences(fair, which, n=3, max_length=4, generator=torch.Generator().manual_seed(1))
    >>> flips.tokens.shape, round(flips.scores[0, 0].exp().item(), 4)
    (torch.Size([2, 3, 4]), 0.0625)
    """
    check_at_least_one("n", n)
    check_at_least_one("max_length", max_length)
    filters = _Filters(temperature, top_k, top_p, typical, min_p)
    rules = Rules.check(model, inputs, max_length, min_length, prefix, allowed)
    device = device_of(model, inputs)
    size = (batch_size(inputs) * n, max_length)

    def choose(log_probs: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return filters.draw(log_probs, uniform[rows, step - 1])

    with torch.no_grad(), enough_memory(max(size[0] * max_length, n * model.vocab_size), n=n, max_length=max_length):
        source = device if generator is None else generator.device
        uniform = torch.rand(size, dtype=torch.float64, generator=generator, device=source).to(device)
        found = Follower(model, n, max_length, choose, rules, on_step).run(inputs)
        return found if n == 1 else _sorted(found)


def check_temperature(temperature: float) -> None:
    """Raise :class:`ConfigError` unless ``temperature`` is above 0 and finite.

    >>> check_temperature(0.5)
    """
    if not (0 < real(temperature) < math.inf):
        raise ConfigError(f"`temperature` must be above 0 and finite, got {temperature!r}; for the limit 0 use greedy")


@dataclass(frozen=True)
class _Filters:
    """What is left of a distribution over symbols, and a draw from it."""

    temperature: float
    top_k: int | None
    top_p: float | None
    typical: float | None
    min_p: float | None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_k is not None:
            check_at_least_one("top_k", self.top_k)
        for name, share in (("top_p", self.top_p), ("typical", self.typical)):
            if share is not None and not 0 < real(share) <= 1:
                raise ConfigError(f"`{name}` must be above 0 and at most 1, got {share!r}; None keeps every symbol")
        if self.min_p is not None and not 0 <= real(self.min_p) <= 1:
            raise ConfigError(f"`min_p` must be 0 ... 1, got {self.min_p!r}; 0 or None keeps every symbol")

    def draw(self, log_probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """A symbol for each row of log-probabilities (R, V) by its uniform number (R,), and its log-probability."""
        top = log_probs.amax(dim=1, keepdim=True)
        weights = ((log_probs.double() - top) / self.temperature).exp()  # NaN in rows that are wrong or all -inf
        order = None
        if self.top_k is not None:
            weights, order = weights.topk(min(self.top_k, weights.size(1)), dim=1)
        elif self.top_p is not None or self.typical is not None:
            weights, order = weights.sort(dim=1, descending=True)
        if self.top_p is not None:
            weights = weights * _nucleus(weights, self.top_p)
        if self.typical is not None:
            weights = weights * _typical(weights, self.typical)
        if self.min_p is not None:
            weights = weights * (weights >= self.min_p * weights.amax(dim=1, keepdim=True))
        cumulative = weights.cumsum(dim=1)
        # rand() is below 1, so the target is below the whole mass and a symbol without mass is never met.
        target = uniform.unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.size(1) - 1)
        if order is not None:
            tokens = order.gather(1, tokens)
        chosen = torch.where(top < math.inf, log_probs.gather(1, tokens), top)
        return tokens.squeeze(1), chosen.squeeze(1)


def _nucleus(weights: Tensor, share: float) -> Tensor:
    """Of ranked ``weights`` (R, V), the fewest first ones with that share of the mass."""
    cumulative = weights.cumsum(dim=1)
    # A symbol stays while the mass before it is still short of the share; the first always does.
    return cumulative - weights < share * cumulative[:, -1:]


def _typical(weights: Tensor, share: float) -> Tensor:
    """The fewest symbols nearest to the entropy in surprisal that have that share of the mass."""
    probabilities = weights / weights.sum(dim=1, keepdim=True)
    entropy = torch.special.entr(probabilities).sum(dim=1, keepdim=True)
    distance = (probabilities.log() + entropy).abs()  # inf where there is no mass
    order = distance.argsort(dim=1, stable=True)
    kept = _nucleus(weights.gather(1, order), share)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def ranking(scores: Tensor, finished: Tensor) -> Tensor:
    """Order (B, K) in which hypotheses are given: finished ones first, then by score.

    >>> ranking(torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[False, True, True]]))
    tensor([[2, 1, 0]])
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    late = finished.gather(1, order).logical_not().to(torch.uint8)
    return order.gather(1, late.argsort(dim=1, stable=True))


def _sorted(found: Hypotheses) -> Hypotheses:
    order = ranking(found.scores, found.finished)
    tokens = found.tokens.gather(1, order.unsqueeze(2).expand_as(found.tokens))
    lengths, scores = found.lengths.gather(1, order), found.scores.gather(1, order)
    return Hypotheses(tokens, lengths, scores, found.finished.gather(1, order), found.optimal)
