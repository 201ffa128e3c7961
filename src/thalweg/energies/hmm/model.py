"""The hidden Markov model: a Markov chain of states, each of which emits an observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

__all__ = ["HMM", "Prediction"]

_TOLERANCE = 1e-5  # by which a row of probabilities may miss one


class Prediction(NamedTuple):
    """What comes after what was observed.

    Attributes:
        states: ``(B, C)``, the probabilities of the state to come.
        observation: its observation, a ``torch.distributions.Distribution`` with batch shape (B,): a ``Categorical``
            over symbols, or a mixture of the states' distributions.

    >>> model = HMM([1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]])
    >>> soon = model.predict(torch.tensor([[0, 1]]))
    >>> soon.states, soon.observation.probs
    (tensor([[1., 0.]]), tensor([[0.5000, 0.5000]]))
    """

    states: Tensor
    observation: Distribution


class HMM:
    r"""States z_1..z_T (a Markov chain) and observations x_1..x_T, each drawn given its state.

    .. math:: p(z, x) = \pi(z_1) \prod_{t<T} P(z_t, z_{t+1}) \prod_t p(x_t | z_t)

    Given observations the states are a linear chain, whose log Z is log p(x): :meth:`chain` gives it, and smoothing,
    Viterbi decoding and the likelihood are its marginals, mode and log-partition. Every result is differentiable in the
    parameters. Probabilities of 0 are exact and part of the structure: their gradient is 0. Rabiner (1989).

    Observations are ``(B, T)``, or ``(B, T, D)`` where one is a vector. Two arguments go with them everywhere:
    ``lengths`` (B,) where sequences differ in length (what lies past one counts for nothing), and ``observed`` (B, T)
    bool, false where an observation is missing and so gives no evidence; what stands there is not looked at.

    Args:
        initial: ``(C,)``, pi; sums to one.
        transition: ``(C, C)``, ``transition[i, j]`` the probability of j after i; rows sum to one. Or
            :class:`~thalweg.inference.SparseTransitions` holding the same, of which only the edges cost.
        emission: ``(C, V)``, the probability of each of V symbols in each state; rows sum to one. Or a
            ``torch.distributions.Distribution`` with batch shape (C,): Normal, MultivariateNormal, mixtures ...
        logarithms: the three (a distribution apart) are log-probabilities.
        backend: as in :class:`~thalweg.inference.LinearChain`.

    >>> fair_or_loaded = HMM([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]], [[1 / 6] * 6, [0.1] * 5 + [0.5]])
    >>> rolls = torch.tensor([[0, 3, 1, 4, 5, 5, 5, 5]])
    >>> fair_or_loaded.viterbi(rolls)[1]
    tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    """

    def __init__(
        self,
        initial: Tensor | Sequence[float],
        transition: Tensor | SparseTransitions | Sequence[Sequence[float]],
        emission: Tensor | Distribution | Sequence[Sequence[float]],
        *,
        logarithms: bool = False,
        backend: str = "auto",
    ) -> None:
        self.backend = backend
        initial = _floats(initial)
        if initial.dim() != 1 or len(initial) == 0:
            raise ShapeError(f"`initial` must be (C,) with C at least 1, got {tuple(initial.shape)}")
        self.num_states = len(initial)
        moves = transition if isinstance(transition, SparseTransitions) else _floats(transition)
        self.emission = emission if isinstance(emission, Distribution) else None
        table = None if isinstance(emission, Distribution) else _floats(emission)
        self._check_shapes(moves, table)
        scores = moves.scores if isinstance(moves, SparseTransitions) else moves
        dtype = torch.promote_types(initial.dtype, scores.dtype)
        dtype = dtype if table is None else torch.promote_types(dtype, table.dtype)
        self.log_initial = _logarithms("initial", initial.to(dtype), logarithms)
        self.log_transition = (
            _sparse_logarithms(moves._replace(scores=moves.scores.to(dtype)), logarithms)
            if isinstance(moves, SparseTransitions)
            else _logarithms("transition", moves.to(dtype), logarithms)
        )
        self.log_emission = None if table is None else _logarithms("emission", table.to(dtype), logarithms)

    def _check_shapes(self, moves: Tensor | SparseTransitions, table: Tensor | None) -> None:
        C = self.num_states
        shape = (moves.size, moves.size) if isinstance(moves, SparseTransitions) else tuple(moves.shape)
        if shape != (C, C):
            raise ShapeError(f"`transition` must be (C, C) with C = {C} as in `initial`, got {shape}")
        if self.emission is not None and self.emission.batch_shape != (C,):
            raise ShapeError(
                f"`emission` must have batch shape (C,) = ({C},) as `initial`, one distribution for each state, got "
                f"{tuple(self.emission.batch_shape)}; see torch.distributions.Independent"
            )
        if table is not None and (table.dim() != 2 or len(table) != C or table.size(1) == 0):
            raise ShapeError(f"`emission` must be (C, V) with C = {C} as in `initial`, got {tuple(table.shape)}")

    def chain(
        self,
        observations: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        observed: Tensor | None = None,
    ) -> LinearChain:
        """p(z | x) as a chain of C labels: emissions log p(x_t | z_t), log Z = log p(x).

        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.chain(torch.tensor([[0, 0, 1]])).marginals.argmax(-1)
        tensor([[0, 0, 0]])
        """
        evidence = self._evidence(observations, lengths, observed)
        return LinearChain(evidence, self.log_transition, start=self.log_initial, lengths=lengths, backend=self.backend)

    def log_likelihood(
        self, observations: Tensor, lengths: Tensor | Sequence[int] | None = None, *, observed: Tensor | None = None
    ) -> Tensor:
        """log p(x_1..x_L) of each item, ``(B,)``; time O(B T C^2).

        >>> coin = HMM([1.0], [[1.0]], [[0.5, 0.5]])
        >>> coin.log_likelihood(torch.tensor([[0, 1, 1]])).exp()
        tensor([0.1250])
        """
        return self.chain(observations, lengths, observed=observed).log_partition

    def filter(
        self, observations: Tensor, lengths: Tensor | Sequence[int] | None = None, *, observed: Tensor | None = None
    ) -> Tensor:
        r"""p(z_t | x_1..x_t), what is known of a state when its observation arrives: ``(B, T, C)``, 0 past a length.

        .. math:: \alpha_t(j) \propto p(x_t | z_t = j) \sum_i \alpha_{t-1}(i) P(i, j)

        In logarithms throughout, so that no state is lost to underflow. T steps of O(B C^2) time and memory.

        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.filter(torch.tensor([[0, 1]]))
        tensor([[[0.8000, 0.2000],
                 [0.4157, 0.5843]]])
        """
        chain = self.chain(observations, lengths, observed=observed)
        probabilities = _log_filter(chain).exp()
        steps = torch.arange(probabilities.size(1), device=probabilities.device)
        return torch.where((steps < chain.lengths.unsqueeze(1)).unsqueeze(2), probabilities, 0)

    def smooth(
        self, observations: Tensor, lengths: Tensor | Sequence[int] | None = None, *, observed: Tensor | None = None
    ) -> Tensor:
        """p(z_t | x_1..x_L), what is known of a state in the end: ``(B, T, C)``, 0 past a length.

        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.smooth(torch.tensor([[0, 1]]))
        tensor([[[0.5843, 0.4157],
                 [0.4157, 0.5843]]])
        """
        return self.chain(observations, lengths, observed=observed).marginals

    def viterbi(
        self, observations: Tensor, lengths: Tensor | Sequence[int] | None = None, *, observed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The most probable states: log p(z, x), ``(B,)``, and z, ``(B, T)`` with -1 past a length.

        >>> model = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.viterbi(torch.tensor([[0, 1]]))[1]
        tensor([[0, 1]])
        """
        chain = self.chain(observations, lengths, observed=observed)
        return chain.max_score, chain.mode

    def predict(
        self,
        observations: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        observed: Tensor | None = None,
        steps: int = 1,
    ) -> Prediction:
        """p(z_{L+steps} | x_1..x_L) and p(x_{L+steps} | x_1..x_L) after each item's length L.

        >>> still = HMM([0.5, 0.5], [[1.0, 0.0], [0.0, 1.0]], [[0.9, 0.1], [0.1, 0.9]])
        >>> still.predict(torch.tensor([[0]]), steps=7).states
        tensor([[0.9000, 0.1000]])
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"`steps` must be an integer of at least 1, got {steps!r}")
        chain = self.chain(observations, lengths, observed=observed)
        last = (chain.lengths - 1).view(-1, 1, 1).expand(-1, 1, self.num_states)
        scores = _log_filter(chain).gather(1, last).squeeze(1)
        for _ in range(steps):
            scores = _advance(scores, chain.potentials.transitions)
        states = scores.exp()
        if self.log_emission is not None:
            return Prediction(states, Categorical(probs=states @ self.log_emission.exp().to(states)))
        assert self.emission is not None
        return Prediction(states, MixtureSameFamily(Categorical(probs=states), self.emission.expand(states.shape)))

    def sample(self, length: int, n: int = 1, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """n independent sequences: states ``(n, length)`` and observations ``(n, length, ...)``.

        Time and memory O(n T C) for a table of symbols, and for a distribution C times its own.

        >>> model = HMM([1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.sample(4)
        (tensor([[0, 1, 0, 1]]), tensor([[0, 1, 0, 1]]))
        """
        for name, value in (("length", length), ("n", n)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` must be an integer of at least 1, got {value!r}")
        if generator is not None and self.emission is not None:
            raise ConfigError("`generator` must be None here: torch.distributions draw from torch's own; seed that one")
        nothing = self.log_initial.new_zeros(()).expand(1, length, self.num_states)
        prior = LinearChain(nothing, self.log_transition, start=self.log_initial, backend=self.backend)
        states = prior.sample((n,), generator=generator).squeeze(1)
        if self.log_emission is not None:
            rows = self.log_emission.detach().exp()[states.flatten()]
            return states, rows.multinomial(1, generator=generator).view(n, length)
        assert self.emission is not None
        every = self.emission.sample((n, length))  # (n, T, C, ...)
        at = states.view(n, length, 1, *[1] * (every.dim() - 3)).expand(n, length, 1, *every.shape[3:])
        return states, every.gather(2, at).squeeze(2)

    def _evidence(
        self, observations: Tensor, lengths: Tensor | Sequence[int] | None, observed: Tensor | None
    ) -> Tensor:
        """log p(x_t | z_t = c), (B, T, C); 0 where nothing was observed."""
        event = () if self.emission is None else tuple(self.emission.event_shape)
        if observations.dim() != 2 + len(event) or tuple(observations.shape[2:]) != event:
            expected = ", ".join(["B", "T", *map(str, event)])
            remedy = "; add the batch with unsqueeze(0)" if observations.dim() == 1 + len(event) else ""
            raise ShapeError(f"`observations` must be ({expected}), got {tuple(observations.shape)}{remedy}")
        shape = observations.shape[:2]
        known = torch.ones(shape, dtype=torch.bool, device=observations.device)
        if observed is not None:
            if observed.shape != shape or observed.dtype != torch.bool:
                raise ShapeError(
                    f"`observed` must be bool (B, T) = {tuple(shape)}, got {tuple(observed.shape)} {observed.dtype}"
                )
            known = observed.to(known.device)
        if lengths is not None:
            counts = torch.as_tensor(lengths, device=known.device)
            if counts.shape != shape[:1]:
                raise ShapeError(f"`lengths` must be (B,) with B = {shape[0]}, got {tuple(counts.shape)}")
            known = known & (torch.arange(shape[1], device=known.device) < counts.unsqueeze(1))
        # Only what is known is looked at: what is missing may lie outside the support, or be NaN.
        scores = self._log_density(observations[known], known)
        return scores.new_zeros(*shape, self.num_states).index_put((known,), scores)

    def _log_density(self, values: Tensor, known: Tensor) -> Tensor:
        """log p(x | z = c) of the M known observations, (M, C)."""
        if self.emission is not None:
            scores = self.emission.log_prob(values.unsqueeze(1))
            return scores.to(torch.promote_types(scores.dtype, self.log_initial.dtype))
        assert self.log_emission is not None
        V = self.log_emission.size(1)
        if values.is_floating_point() or values.dtype == torch.bool:
            raise ShapeError(f"`observations` must be integers, symbols 0 ... {V - 1}, got {values.dtype}")
        wrong = (values < 0) | (values >= V)
        if bool(wrong.any()):
            which = int(wrong.nonzero()[0])
            item, step = known.nonzero()[which].tolist()
            raise ShapeError(
                f"`observations` must be symbols 0 ... {V - 1}, got {int(values[which])} at position {step} of "
                f"batch item {item}; mark what is missing in `observed`"
            )
        return self.log_emission.t()[values.long()]


def _log_filter(chain: LinearChain) -> Tensor:
    """log p(z_t | x_1..x_t), (B, T, C); past a length what the prior alone says."""
    with torch.no_grad():
        _ = chain.log_partition  # what cannot be observed has no posterior: this raises and names the item
    evidence, transitions, start, _, _ = chain.potentials
    scores = (start + evidence[:, 0]).log_softmax(-1)
    every = [scores]
    for t in range(1, evidence.size(1)):
        scores = (_advance(scores, transitions) + evidence[:, t]).log_softmax(-1)
        every.append(scores)
    return torch.stack(every, dim=1)


def _advance(scores: Tensor, transitions: Tensor | SparseTransitions) -> Tensor:
    """log sum_i exp(scores[b, i] + transitions[i, j]), (B, C), with finite gradients where nothing leads to j."""
    if isinstance(transitions, SparseTransitions):
        moved = scores[:, transitions.sources] + transitions.scores  # (B, E)
        targets = transitions.targets.expand_as(moved)
        top = torch.full_like(scores, float("-inf")).scatter_reduce(1, targets, moved.detach(), "amax")
        top = torch.where(torch.isneginf(top), 0, top)
        total = torch.zeros_like(scores).scatter_add(1, targets, (moved - top.gather(1, targets)).exp())
    else:
        moved = scores.unsqueeze(2) + transitions  # (B, C, C)
        top = moved.detach().amax(1)
        top = torch.where(torch.isneginf(top), 0, top)
        total = (moved - top.unsqueeze(1)).exp().sum(1)
    return _log(total) + top


def _floats(values: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    values = torch.as_tensor(values)
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _log(probabilities: Tensor) -> Tensor:
    """The logarithm, with gradient 0 where it is -inf."""
    positive = probabilities > 0
    return torch.where(positive, torch.where(positive, probabilities, 1).log(), float("-inf"))


def _logarithms(name: str, values: Tensor, logarithms: bool) -> Tensor:
    """The logarithms of rows that are distributions, or a ShapeError that names the first row that is none."""
    given = torch.atleast_2d(values.detach())
    sums = (given.exp() if logarithms else given).sum(-1)
    negative = (given < 0).any(-1) & (not logarithms)
    _check_rows(name, sums, negative, logarithms)
    return values if logarithms else _log(values)


def _sparse_logarithms(moves: SparseTransitions, logarithms: bool) -> SparseTransitions:
    given = moves.scores.detach()
    sums = given.new_zeros(moves.size).index_add(0, moves.sources, given.exp() if logarithms else given)
    negative = torch.zeros_like(sums, dtype=torch.bool)
    if not logarithms:
        negative[moves.sources[given < 0]] = True
    _check_rows("transition", sums, negative, logarithms)
    return moves if logarithms else moves._replace(scores=_log(moves.scores))


def _check_rows(name: str, sums: Tensor, negative: Tensor, logarithms: bool) -> None:
    wrong = ~((sums - 1).abs() <= _TOLERANCE) | negative  # true for NaN too
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    got = "a negative entry" if bool(negative[row]) else f"the sum {float(sums[row]):.6g}"
    where = f"row {row} of `{name}`" if name != "initial" else "`initial`"
    remedy = "normalise with log_softmax(-1)" if logarithms else "divide by its sum"
    if not logarithms and bool(negative[row]):
        remedy = "pass logarithms=True if these are log-probabilities"
    raise ShapeError(f"{where} must be probabilities that sum to one, got {got}; {remedy}")
