"""Stochastic beam search: samples without replacement, and what can be estimated from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ShapeError
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
from thalweg.inference.search.sampling import check_temperature, ranking
from thalweg.limits import enough_memory

# Perturbed scores held at once; a batch with more is searched in pieces.
_ROOM = 1 << 22


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawn(Hypotheses):
    r"""Hypotheses drawn without replacement, with what makes sums over them estimates of sums over all sequences.

    Attributes:
        perturbed: ``(B, n)`` G(y), log-probability in the sampled distribution q plus Gumbel noise; -inf where there is
        no sequence. Hypotheses are sorted by score as always; in falling order of ``perturbed`` they stand as drawn
        one after the other.
        threshold: ``(B,)`` kappa, the perturbed score of what would have been drawn next; -inf where nothing is left.
        log_weights: ``(B, n)`` log p(y) - log P(G(y) > kappa), with P(G(y) > kappa) = 1 - exp(-exp(log q(y) - kappa))
        and p the model itself, whatever the temperature; -inf where missing.

    >>> from thalweg.inference import TableModel
    >>> die = TableModel.markov(torch.full((6, 6), 1 / 6).double(), bos=0, logarithms=False)
    >>> generator = torch.Generator().manual_seed(0)
    >>> rolls = stochastic_beam_search(die, torch.zeros(1, dtype=torch.long), n=6, max_length=1, generator=generator)
    >>> rolls.estimate(rolls.tokens[:, :, 0] + 1.0)  # all six were drawn, so this is no estimate
    tensor([3.5000], dtype=torch.float64)
    """

    perturbed: Tensor
    threshold: Tensor
    log_weights: Tensor

    def estimate(self, values: Tensor, *, normalised: bool = False) -> Tensor:
        r"""Estimates ``(B,)`` of sum_y p(y) f(y) over all sequences from ``values`` (B, n), f at those drawn.

        .. math:: \sum_i w_i f(y_i), \quad w_i = p(y_i) / P(G(y_i) > \kappa)

        Unbiased. With ``normalised``, divided by sum_i w_i: biased, but less variable and exact for a constant. Values
        at missing hypotheses count for nothing. Gradients flow to ``values``. O(B n); Kool et al. (2019).
        """
        if values.shape != self.scores.shape:
            expected = tuple(self.scores.shape)
            raise ShapeError(
                f"`values` must be (B, n) = {expected}, one for each hypothesis, got {tuple(values.shape)}"
            )
        weights = self.log_weights.exp()
        total = (weights * values.masked_fill(weights == 0, 0)).sum(dim=1)
        return total / weights.sum(dim=1) if normalised else total

    def entropy(self, *, normalised: bool = False) -> Tensor:
        """Estimates ``(B,)`` of -sum_y p(y) log p(y); see :meth:`estimate`.

        >>> from thalweg.inference import TableModel
        >>> coin = TableModel.markov(torch.full((2, 2), 0.5).double(), bos=0, logarithms=False)
        >>> which = torch.zeros(1, dtype=torch.long)
        >>> bits = stochastic_beam_search(coin, which, n=8, max_length=3).entropy() / math.log(2)
        >>> round(bits.item(), 6)
        3.0
        """
        return self.estimate(-self.scores.double(), normalised=normalised)

    def to(self, device: torch.device | str) -> Drawn:
        """The same on another device."""
        names = ("tokens", "lengths", "scores", "finished", "optimal", "perturbed", "threshold", "log_weights")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def stochastic_beam_search(
    model: Autoregressive,
    inputs: Any,
    *,
    n: int,
    max_length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Drawn:
    r"""n different samples for each item: drawn one after the other, each from what the ones before it have left.

    Add independent Gumbel noise to the log-probability of every sequence; the n greatest sums are a sample without
    replacement. A beam finds them without looking at all sequences, because the maximum below a partial sequence is
    itself Gumbel: with phi the log-probability and G the perturbed score of a partial sequence, those of its
    continuations are drawn on condition that their maximum is G,

    .. math:: G_c = -\log(e^{-G} - e^{-Z} + e^{-\tilde G_c}), \quad
        \tilde G_c \sim \mathrm{Gumbel}(\phi_c), \; Z = \max_c \tilde G_c

    and the n + 1 greatest are kept; the last is the threshold that the estimators need.

    Args:
        model: any :class:`Autoregressive`.
        inputs: what its ``begin`` takes, B items.
        n: samples for each item.
        max_length: most symbols of a sample, eos counted. A sequence cut here is a sample like others, unfinished.
        temperature: of the sampled q(v) \propto p(v | y_<t, x)^{1 / temperature}.
        generator: source of randomness; torch's own when None.
    Returns:
        :class:`Drawn`, K = n, no sequence twice in an item; ``scores`` are log-probabilities under the model itself.
        Where fewer than n sequences exist the rest is missing, and so is a sample that comes to where nothing can
        follow.

    Noise is a hash of (a number drawn for the item, step, row, symbol): one call for B items gives what B calls in
    a row with the same generator give, on any device. Time O(T B n V) beside the model's, in float64; memory
    O(B n T). Kool, van Hoof and Welling (2019).

    >>> from thalweg.inference import TableModel
    >>> coin = TableModel.markov([[0.5, 0.5], [0.5, 0.5]], bos=0, logarithms=False)
    >>> generator = torch.Generator().manual_seed(0)
    >>> flips = stochastic_beam_search(coin, torch.zeros(1, dtype=torch.long), n=4, max_length=2, generator=generator)
    >>> sorted(flips.sequences()[0])
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    check_at_least_one("n", n)
    check_at_least_one("max_length", max_length)
    check_temperature(temperature)
    B, device = batch_size(inputs), device_of(model, inputs)
    if B == 0:
        none, empty = Hypotheses.none(0, n, device), torch.empty((0, n), dtype=torch.float64, device=device)
        parts = (none.tokens, none.lengths, none.scores, none.finished, none.optimal)
        return Drawn(*parts, perturbed=empty, threshold=empty[:, 0], log_weights=empty)
    source = device if generator is None else generator.device
    seeds = torch.empty(B, dtype=torch.long, device=source).random_(generator=generator).to(device)
    search = _Stochastic(model, n + 1, max_length, temperature)
    with torch.no_grad(), enough_memory(max((n + 1) * model.vocab_size, B * n), n=n, max_length=max_length):
        state = model.begin(inputs)
        size = max(1, _ROOM // ((n + 1) * model.vocab_size))
        parts = []
        for first in range(0, B, size):
            items = torch.arange(first, min(first + size, B), device=device)
            piece = state if size >= B else model.select(state, items)
            parts.append(search.run(piece, seeds[items], first).drawn(n, max_length, model.eos))
        return parts[0] if len(parts) == 1 else _joined(parts)


@dataclass(frozen=True)
class _Stochastic:
    model: Autoregressive
    slots: int
    max_length: int
    temperature: float

    def run(self, state: Any, seeds: Tensor, first: int) -> _Beam:
        """The ``slots`` sequences of each item with the greatest perturbed scores; items count from ``first``."""
        model, V = self.model, self.model.vocab_size
        beam = _Beam.root(seeds)
        rows = torch.arange(len(seeds), device=seeds.device)  # item * W + slot of each row that the model holds
        tokens = torch.full_like(rows, model.bos)
        for step in range(1, self.max_length + 1):
            log_probs, state = model.step(tokens, state)
            check_log_probs(log_probs, len(rows), V)
            W = beam.phi.size(1)
            raise_not_a_number(~(log_probs.amax(dim=1) < math.inf), rows // W + first, step)
            noise = _gumbel(seeds[rows // W], (step * self.slots + rows % W) * V, V)
            beam, parents = beam.grow(rows, log_probs, noise, self)
            rows = beam.live.view(-1).nonzero().squeeze(1)
            if step == self.max_length or len(rows) == 0:
                break
            tokens = beam.tokens[:, :, -1].reshape(-1)[rows]
            state = model.select(state, parents.view(-1)[rows])
        return beam


class _Beam(NamedTuple):
    """W partial sequences and leaves of each item, by falling perturbed score."""

    phi: Tensor  # (A, W) log q in float64
    perturbed: Tensor  # (A, W) G; -inf where a slot is empty
    scores: Tensor  # (A, W) log p; -inf for an empty slot and for a dead end, a leaf that is no sequence
    tokens: Tensor  # (A, W, t) -1 past the length
    ended: Tensor  # (A, W) with eos
    live: Tensor  # (A, W) can go on

    @classmethod
    def root(cls, seeds: Tensor) -> _Beam:
        zero = torch.zeros((len(seeds), 1), device=seeds.device)
        nothing = torch.empty((len(seeds), 1, 0), dtype=torch.long, device=seeds.device)
        noise = _gumbel(seeds, torch.zeros_like(seeds), 1)
        return cls(zero.double(), noise, zero, nothing, zero.bool(), ~zero.bool())

    def grow(self, rows: Tensor, log_probs: Tensor, noise: Tensor, search: _Stochastic) -> tuple[_Beam, Tensor]:
        """One symbol more, given what the model says of the live ``rows``; and which of these each slot continues."""
        (A, W), V = self.phi.shape, log_probs.size(1)
        log_q = (
            (log_probs.double() / search.temperature).log_softmax(dim=1).nan_to_num_(nan=-math.inf, neginf=-math.inf)
        )
        stuck = torch.zeros_like(self.live).view(-1).index_copy_(0, rows, log_probs.amax(dim=1) == -math.inf)
        scores = self.scores.masked_fill(stuck.view(A, W), -math.inf)
        # Leaves compete as they are, in a column of their own.
        stays = ~self.live | stuck.view(A, W)
        total = self.phi.new_full((A * W, V + 1), -math.inf)
        total[:, V] = self.perturbed.masked_fill(~stays, -math.inf).view(-1)
        phi = self.phi.view(-1)[rows].unsqueeze(1) + log_q
        total[rows, :V] = _conditioned(phi + noise, self.perturbed.view(-1)[rows].unsqueeze(1))
        perturbed, code = total.view(A, -1).topk(min(search.slots, W * (V + 1)), dim=1)

        slot, symbol = code // (V + 1), code % (V + 1)
        stay, exists = symbol == V, perturbed > -math.inf
        row = torch.zeros_like(stuck, dtype=torch.long).index_copy_(
            0, rows, torch.arange(len(rows), device=rows.device)
        )
        row = row.view(A, W).gather(1, slot)
        column = symbol.clamp(max=V - 1)
        gain = log_probs[row, column].masked_fill(stay, 0.0)
        tokens = self.tokens.gather(1, slot.unsqueeze(2).expand(-1, -1, self.tokens.size(2)))
        ended = torch.where(
            stay, self.ended.gather(1, slot), symbol == (-1 if search.model.eos is None else search.model.eos)
        )
        beam = _Beam(
            torch.where(stay, self.phi.gather(1, slot), phi[row, column]),
            perturbed,
            (scores.gather(1, slot) + gain).masked_fill(~exists, -math.inf),
            torch.cat([tokens, symbol.masked_fill(stay, -1).unsqueeze(2)], dim=2),
            ended,
            exists & ~stay & ~ended,
        )
        return beam, row

    def drawn(self, n: int, max_length: int, eos: int | None) -> Drawn:
        """The first n, sorted as hypotheses are; the next gives the threshold."""
        more = max(0, n + 1 - self.phi.size(1))
        phi, perturbed, scores = (
            nn.functional.pad(part, (0, more), value=-math.inf) for part in (self.phi, self.perturbed, self.scores)
        )
        tokens = nn.functional.pad(self.tokens, (0, 0, 0, more), value=-1)
        threshold, missing = perturbed[:, n], scores[:, :n] == -math.inf
        lengths = (tokens[:, :n] >= 0).sum(dim=2).masked_fill_(missing, 0)
        finished = (
            lengths == max_length if eos is None else nn.functional.pad(self.ended, (0, more))[:, :n]
        ) & ~missing
        order = ranking(scores[:, :n], finished)
        missing, lengths, phi, scores = (part.gather(1, order) for part in (missing, lengths, phi, scores))
        T = int(lengths.max())
        tokens = tokens.gather(1, order.unsqueeze(2).expand(-1, -1, tokens.size(2)))[:, :, :T]
        # -expm1(-x) is x for small x, where 1 - exp(-x) would be 0.
        kept = torch.log(-torch.expm1(-torch.exp(phi - threshold.unsqueeze(1))))
        return Drawn(
            tokens.masked_fill(missing.unsqueeze(2), -1),
            lengths,
            scores,
            finished.gather(1, order),
            torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device),
            perturbed=perturbed.gather(1, order).masked_fill(missing, -math.inf),
            threshold=threshold,
            log_weights=(scores - kept).masked_fill(missing, -math.inf),
        )


def _conditioned(noisy: Tensor, greatest: Tensor) -> Tensor:
    """Perturbed scores ``noisy`` (R, V) moved so that the greatest of a row is ``greatest`` (R, 1); no overflow."""
    below = noisy - noisy.amax(dim=1, keepdim=True)  # NaN in rows without any symbol
    # log(1 - exp(below)), by whichever form loses no digits.
    rest = torch.where(below > -math.log(2), torch.log(-torch.expm1(below)), torch.log1p(-torch.exp(below)))
    v = greatest - noisy + rest
    moved = greatest - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
    return moved.nan_to_num_(nan=-math.inf, neginf=-math.inf)


def _gumbel(seeds: Tensor, counters: Tensor, number: int) -> Tensor:
    """Gumbel noise (R, number) in float64: the splitmix64 streams of ``seeds`` (R,) from their ``counters`` (R,) on."""
    z = counters.unsqueeze(1) + torch.arange(1, number + 1, device=seeds.device)
    z = seeds.unsqueeze(1) + z * _signed(0x9E3779B97F4A7C15)
    # Arithmetic wraps around in int64; shifts must not bring in the sign.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    uniform = (((z >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # never 0 nor 1
    return uniform.log_().neg_().log_().neg_()


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit ``word``."""
    return word - (1 << 64) if word >> 63 else word


def _joined(parts: list[Drawn]) -> Drawn:
    whole = joined(parts)
    return Drawn(
        whole.tokens,
        whole.lengths,
        whole.scores,
        whole.finished,
        whole.optimal,
        perturbed=torch.cat([part.perturbed for part in parts]),
        threshold=torch.cat([part.threshold for part in parts]),
        log_weights=torch.cat([part.log_weights for part in parts]),
    )
