"""Time-homogeneous Markov models of sequences, and their best sequences by dynamic programming."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.inference.search.protocol import Hypotheses, check_at_least_one
from thalweg.inference.search.table import TableModel
from thalweg.inference.structures.chain import LinearChain


class MarkovModel(TableModel):
    r"""Symbols y_1, y_2, ... of which each depends on the one before alone.

    .. math:: \log p(y) = start(y_1) + \sum_{t<T} P(y_t, y_{t+1})

    It is an :class:`~thalweg.inference.Autoregressive`, so every search runs on it, and a linear chain, so that what
    search approximates can be had exactly: the best sequence, the k best, the probability of a length, the marginals
    of each position. A network with a state has no such chain, for there the past matters.

    Args:
        transitions: ``(N, N)`` log-probabilities; ``transitions[i, j]`` of j after i.
        start: ``(N,)`` log-probabilities of the first symbol.
        eos: symbol that ends a sequence; None where all sequences have the length that is asked for.
        logarithms: false if both are probabilities.

    ``bos`` is 0 and stands for nothing: whatever is fed first, ``start`` follows. ``inputs`` of a search are
    ``torch.zeros(B, dtype=torch.long)``. Memory O(N^2).

    >>> from thalweg.inference import greedy
    >>> weather = MarkovModel([[0.9, 0.1], [0.5, 0.5]], [0.4, 0.6], logarithms=False)
    >>> greedy(weather, torch.zeros(1, dtype=torch.long), max_length=3).sequences()
    [[[1, 0, 0]]]
    >>> weather.viterbi(3).sequences()
    [[[0, 0, 0]]]
    """

    def __init__(
        self,
        transitions: Tensor | list[list[float]],
        start: Tensor | list[float],
        eos: int | None = None,
        *,
        logarithms: bool = True,
    ) -> None:
        transitions, start = _log_probabilities(transitions, start, logarithms)
        self.transitions, self.start = transitions, start
        N = len(start)
        # The nodes of the table are the symbols, and one more for the beginning.
        following = torch.arange(N, device=start.device).repeat(N + 1, 1)
        log_probs = torch.cat([transitions, start.unsqueeze(0)]).detach()
        self._set(log_probs, following, torch.tensor([N], device=start.device), 0, eos)

    def chain(self, length: int, *, backend: str = "auto") -> LinearChain:
        """All sequences of ``length`` symbols as a chain, B = 1, differentiable in the log-probabilities.

        With ``eos`` they are those that end with it and hold it nowhere else, so that exp(log Z) is the probability of
        the length. Time O(T N^2), memory O(T N + N^2), of every quantity.

        >>> coin = MarkovModel([[0.5, 0.5], [0.0, 1.0]], [0.5, 0.5], eos=1, logarithms=False)
        >>> coin.chain(3).log_partition.exp()
        tensor([0.1250])
        """
        check_at_least_one("length", length)
        nothing = self.start.new_zeros(()).expand(1, length, self.vocab_size)
        moves, end = self.transitions, None
        if self.eos is not None:
            is_eos = torch.arange(self.vocab_size, device=moves.device) == self.eos
            moves = moves.masked_fill(is_eos.unsqueeze(1), float("-inf"))  # nothing follows it
            end = torch.where(is_eos, 0.0, float("-inf")).to(moves.dtype)
        return LinearChain(nothing, moves, start=self.start, end=end, backend=backend)

    def viterbi(self, length: int, *, k: int = 1, backend: str = "auto") -> Hypotheses:
        """The k most probable of the sequences of :meth:`chain`; see :func:`viterbi`.

        >>> MarkovModel([[0.5, 0.5], [0.0, 1.0]], [0.5, 0.5], eos=1, logarithms=False).viterbi(3).sequences()
        [[[0, 0, 1]]]
        """
        check_at_least_one("k", k)
        with torch.no_grad():
            chain = self.chain(length, backend=backend)
            if k == 1:
                scores, tokens = chain.max_score.unsqueeze(1), chain.mode.unsqueeze(1)
            else:
                scores, tokens = chain.top_k(k)
        exists = ~torch.isneginf(scores)
        return Hypotheses(tokens, exists * length, scores, exists, exists[:, 0])

    def log_prob(self, tokens: Tensor) -> Tensor:
        """log p of sequences ``(..., T)``, as ``(...)``; -1 past the end of a shorter one.

        >>> weather = MarkovModel([[0.9, 0.1], [0.5, 0.5]], [0.4, 0.6], logarithms=False)
        >>> weather.log_prob(torch.tensor([[0, 0, 1], [1, -1, -1]])).exp()
        tensor([0.0360, 0.6000])
        """
        if tokens.dim() < 1 or tokens.size(-1) < 1 or tokens.is_floating_point():
            raise ShapeError(
                f"`tokens` must be integers (..., T), T at least 1, got {tuple(tokens.shape)} {tokens.dtype}"
            )
        if bool((tokens >= self.vocab_size).any()) or bool((tokens < -1).any()) or bool((tokens[..., 0] < 0).any()):
            raise ShapeError(f"`tokens` must be 0 ... {self.vocab_size - 1}, -1 past the end, and not empty")
        before, after = tokens[..., :-1].clamp(min=0), tokens[..., 1:]
        steps = torch.where(after >= 0, self.transitions[before, after.clamp(min=0)], 0)
        return self.start[tokens[..., 0]] + steps.sum(-1)


def viterbi(
    transitions: Tensor | list[list[float]],
    start: Tensor | list[float],
    length: int,
    *,
    k: int = 1,
    logarithms: bool = True,
) -> Hypotheses:
    r"""The k most probable sequences of exactly ``length`` symbols of a time-homogeneous Markov model.

    .. math:: \delta_1(j) = start(j), \quad \delta_t(j) = \max_i \delta_{t-1}(i) + P(i, j)

    with back-pointers to the maximising i: of all N^T sequences the best is found in O(T N^2) time and O(T N + N^2)
    memory, for the k best in k times as much of each.

    Args:
        transitions: ``(N, N)`` log-probabilities; ``transitions[i, j]`` of j after i.
        start: ``(N,)`` log-probabilities of the first symbol, the one after bos.
        length: T, bos not counted.
        k: how many.
        logarithms: false if both are probabilities.
    Returns:
        :class:`~thalweg.inference.Hypotheses` with B = 1 and K = k, sorted, ``optimal`` true. Where fewer than k
        sequences are possible the rest is missing; where none is, ``InfeasibleError``.

    >>> found = viterbi([[0.9, 0.1], [0.5, 0.5]], [0.4, 0.6], 3, k=2, logarithms=False)
    >>> found.tokens
    tensor([[[0, 0, 0],
             [1, 0, 0]]])
    >>> found.scores.exp(), found.optimal
    (tensor([[0.3240, 0.2700]]), tensor([True]))
    """
    return MarkovModel(transitions, start, logarithms=logarithms).viterbi(length, k=k)


def _log_probabilities(
    transitions: Tensor | list[list[float]], start: Tensor | list[float], logarithms: bool
) -> tuple[Tensor, Tensor]:
    """Both as logarithms of one floating type, or a ShapeError."""
    moves, first = torch.as_tensor(transitions), torch.as_tensor(start)
    if moves.dim() != 2 or moves.size(0) != moves.size(1) or moves.size(0) == 0:
        raise ShapeError(f"`transitions` must be (N, N), got {tuple(moves.shape)}")
    if first.shape != moves.shape[:1]:
        raise ShapeError(f"`start` must be (N,) with N = {len(moves)} as in `transitions`, got {tuple(first.shape)}")
    dtype = torch.promote_types(torch.promote_types(moves.dtype, first.dtype), torch.float32)
    moves, first = moves.to(dtype), first.to(dtype)
    for name, given in (("transitions", moves), ("start", first)):
        wrong = ~(given <= 0) if logarithms else ~((given >= 0) & (given <= 1))  # true for NaN too
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            what, other = ("log-probabilities, at most 0", False) if logarithms else ("probabilities in [0, 1]", True)
            raise ShapeError(
                f"`{name}` must be {what}, got {float(given.detach()[tuple(place)]):.6g} at {place}; "
                f"pass logarithms={other} if that is what they are"
            )
    return (moves, first) if logarithms else (moves.log(), first.log())
