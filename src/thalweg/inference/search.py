"""Search that follows each row to its end: greedy choice and exact sampling.

Both keep one partial sequence a row, choose one symbol a step, and drop the row when it ends, so that no
work is done for what is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.hypotheses import (
    Autoregressive,
    Hypotheses,
    batch_size,
    check_at_least_one,
    check_log_probs,
    device_of,
    raise_not_a_number,
)

__all__ = ["greedy", "sample_sequences"]

# Given log-probabilities (R, V), the numbers of the rows (R,) and the step: symbols (R,) and their
# log-probabilities (R,), which are -inf where nothing can follow and NaN or +inf where the model failed.
Choice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def greedy(model: Autoregressive, inputs: Any, *, max_length: int) -> Hypotheses:
    """The most probable symbol at every step: y_t = argmax_v log p(v | y_<t, x).

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        max_length: most symbols of a hypothesis, eos counted.
    Returns:
        :class:`Hypotheses` with K = 1. Where the best symbol has probability 0 the hypothesis is missing.
        Equal to ``beam_search(..., width=1)``.

    Time O(T R V) beside the model's, for R rows not yet ended.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel.markov([[-9.0, -0.1, -2.0], [-9.0, -2.0, -0.2], [0.0, 0.0, 0.0]], bos=0, eos=2)
    >>> greedy(model, torch.zeros(1, dtype=torch.long), max_length=10).tokens
    tensor([[[1, 2]]])
    """
    check_at_least_one("max_length", max_length)

    def choose(log_probs: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        best, tokens = log_probs.max(dim=1)
        return tokens, best

    with torch.no_grad():
        return _follow(model, inputs, 1, max_length, choose)


def sample_sequences(
    model: Autoregressive,
    inputs: Any,
    *,
    n: int,
    max_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Hypotheses:
    r"""Independent samples, with replacement: y_t ~ q, q(v) \propto p(v | y_<t, x)^{1 / temperature}.

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        n: samples for each item.
        max_length: most symbols of a sample, eos counted.
        temperature: above 0; below 1 sharpens, above 1 flattens q.
        top_k: keep the k most probable symbols; exactly k, also when some are tied.
        top_p: keep the smallest set of most probable symbols with at least this share of the mass, in (0, 1],
            after ``temperature`` and ``top_k``; never fewer than one.
        generator: source of randomness; torch's own when None.
    Returns:
        :class:`Hypotheses` with K = n, sorted; ``scores`` are log-probabilities under the model itself,
        whatever the temperature and filters. A sample that comes to where nothing can follow is missing.

    Symbols are drawn by inverting the cumulative distribution in float64, with uniform numbers drawn
    beforehand for (item, sample, step): on the CPU one call for B items gives what B calls in a row with
    the same generator give. Time O(T R V), with a filter O(T R V log V); memory O(B n max_length). Holtzman
    et al. (2020) for top_p.

    >>> from thalweg.inference import TableModel
    >>> fair = TableModel.markov([[0.5, 0.5], [0.5, 0.5]], bos=0, logarithms=False)
    >>> which = torch.zeros(2, dtype=torch.long)
    >>> flips = sample_sequences(fair, which, n=3, max_length=4, generator=torch.Generator().manual_seed(1))
    >>> flips.tokens.shape, round(flips.scores[0, 0].exp().item(), 4)
    (torch.Size([2, 3, 4]), 0.0625)
    """
    check_at_least_one("n", n)
    check_at_least_one("max_length", max_length)
    if not (0 < temperature < math.inf):
        raise ConfigError(f"`temperature` must be above 0 and finite, got {temperature!r}; for the limit 0 use greedy")
    if top_k is not None:
        check_at_least_one("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"`top_p` must be above 0 and at most 1, got {top_p!r}; None keeps every symbol")
    device = device_of(model, inputs)
    source = device if generator is None else generator.device
    size = (batch_size(inputs) * n, max_length)
    uniform = torch.rand(size, dtype=torch.float64, generator=generator, device=source).to(device)

    def choose(log_probs: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return _draw(log_probs, uniform[rows, step - 1], temperature, top_k, top_p)

    with torch.no_grad():
        return _sorted(_follow(model, inputs, n, max_length, choose))


def _draw(
    log_probs: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor]:
    top = log_probs.amax(dim=1, keepdim=True)
    weights = ((log_probs.double() - top) / temperature).exp()  # NaN in rows that are wrong or all -inf
    order = None
    if top_k is not None:
        weights, order = weights.topk(min(top_k, weights.size(1)), dim=1)
    elif top_p is not None:
        weights, order = weights.sort(dim=1, descending=True)
    cumulative = weights.cumsum(dim=1)
    if top_p is not None:
        # A symbol stays while the mass before it is still short of the share; the first always does.
        short = cumulative - weights < top_p * cumulative[:, -1:]
        cumulative = (weights * short).cumsum(dim=1)
    # rand() is below 1, so the target is below the whole mass and a symbol without mass is never met.
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.size(1) - 1)
    if order is not None:
        tokens = order.gather(1, tokens)
    chosen = torch.where(top < math.inf, log_probs.gather(1, tokens), top)
    return tokens.squeeze(1), chosen.squeeze(1)


def _follow(model: Autoregressive, inputs: Any, n: int, max_length: int, choose: Choice) -> Hypotheses:
    """Follow n rows for each item, each to its eos or ``max_length``."""
    B, V, eos = batch_size(inputs), model.vocab_size, model.eos
    device = device_of(model, inputs)
    if B == 0:
        return Hypotheses.none(B, n, device)
    paths = _Paths(B, n, device)
    rows = torch.arange(B * n, device=device)
    running = torch.zeros(B * n, device=device)
    tokens = torch.full((B,), model.bos, dtype=torch.long, device=device)
    state = model.begin(inputs)
    for step in range(1, max_length + 1):
        log_probs, state = model.step(tokens, state)
        check_log_probs(log_probs, tokens.size(0), V)
        if step == 1 and n > 1:
            log_probs = log_probs.repeat_interleave(n, dim=0)
        tokens, chosen = choose(log_probs, rows, step)
        running = running + chosen  # float32 at least, the model's type where that is wider
        paths.history.append((rows, tokens))
        usable = chosen.isfinite()
        ended = torch.full_like(usable, step == max_length) if eos is None else tokens == eos
        stopped = ended | ~usable if step < max_length else torch.ones_like(ended)
        # All rows of an item start from the one row of its first step.
        parents = rows // n if step == 1 and n > 1 else None
        if bool(stopped.any()):
            raise_not_a_number(~(chosen < math.inf), rows // n, step)
            paths.stop(rows[stopped], running[stopped], usable[stopped] * step, (ended & usable)[stopped])
            going = (~stopped).nonzero().squeeze(1)
            if going.numel() == 0:
                break
            rows, tokens, running = rows[going], tokens[going], running[going]
            parents = going if parents is None else parents[going]
        if parents is not None:
            state = model.select(state, parents)
    return paths.hypotheses()


class _Paths:
    """Where each of B n rows ended, and the symbols chosen at each step by the rows that were still going."""

    def __init__(self, batch: int, n: int, device: torch.device) -> None:
        self.shape = (batch, n)
        self.lengths = torch.zeros(batch * n, dtype=torch.long, device=device)
        self.finished = torch.zeros(batch * n, dtype=torch.bool, device=device)
        self.scores = torch.zeros(batch * n, device=device)
        self.history: list[tuple[Tensor, Tensor]] = []

    def stop(self, rows: Tensor, scores: Tensor, lengths: Tensor, finished: Tensor) -> None:
        """Record the end of ``rows``."""
        self.scores = self.scores.to(scores.dtype)
        self.scores[rows] = scores
        self.lengths[rows] = lengths
        self.finished[rows] = finished

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


def _sorted(found: Hypotheses) -> Hypotheses:
    """Finished ones first, then by score."""
    order = found.scores.argsort(dim=1, descending=True, stable=True)
    late = found.finished.gather(1, order).logical_not().to(torch.uint8)
    order = order.gather(1, late.argsort(dim=1, stable=True))
    tokens = found.tokens.gather(1, order.unsqueeze(2).expand_as(found.tokens))
    lengths, scores = found.lengths.gather(1, order), found.scores.gather(1, order)
    return Hypotheses(tokens, lengths, scores, found.finished.gather(1, order), found.optimal)
