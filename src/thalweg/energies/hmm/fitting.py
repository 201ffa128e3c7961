"""Learning from observations alone: Baum-Welch (EM), or the gradient of the likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from thalweg.energies.hmm.emissions import Emission, Limits, Trouble
from thalweg.energies.hmm.sequences import Known
from thalweg.energies.hmm.states import States
from thalweg.errors import ThalwegError
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.semi_markov import SemiMarkov
from thalweg.kernels.potentials import SparseTransitions


class Parts(NamedTuple):
    """What a hidden Markov model is made of.

    Attributes:
        states: pi and P.
        emission: what its K kinds emit.
        kinds: ``(C,)``, the kind of each state; None where each is its own.
        backend: of the chain.

    >>> from thalweg.energies.hmm.emissions import CategoricalEmission
    >>> coin = Parts(States(torch.zeros(1), torch.zeros(1, 1)), CategoricalEmission([[0.5, 0.5]]))
    >>> coin.densities(coin.emission.parts((torch.tensor([0]),))).exp().detach()
    tensor([[0.5000]])
    """

    states: States
    emission: Emission
    kinds: Tensor | None = None
    backend: str = "auto"

    def densities(self, parts: Tensor) -> Tensor:
        """log p(x | z), (M, C), from the log-densities (M, P) of the emission's parts."""
        scores = self.emission.combine(parts)
        return scores if self.kinds is None else scores[:, self.kinds]

    def posterior(
        self, evidence: Tensor, lengths: Any, scores: Sequence[Any] | None = None, *, validate_args: bool | None = None
    ) -> LinearChain | SemiMarkov:
        """p(z | x) from log p(x_t | z_t), (B, T, C): a chain, or segments where states have durations.

        ``scores`` are log pi, log P and the durations (C, K), where they are not those of the states.
        """
        states = self.states
        start, moves, lasting = scores or (states.log_initial, states.log_transition, states.log_duration)
        settings = {"start": start, "lengths": lengths, "backend": self.backend, "validate_args": validate_args}
        if lasting is None:
            return LinearChain(evidence, moves, **settings)
        return SemiMarkov(
            evidence, lasting.t(), moves.dense() if isinstance(moves, SparseTransitions) else moves, **settings
        )


class Data(NamedTuple):
    """What is learned from.

    Attributes:
        known: the observations that are there; prepared: what the emission makes of them.
        lengths: ``(B,)`` on the host, or None.

    >>> from thalweg.energies.hmm.sequences import known_of
    >>> Data(known_of(torch.tensor([[0, 1]]), None, None), (torch.tensor([0, 1]),), None).size
    2
    """

    known: Known
    prepared: tuple[Tensor, ...]
    lengths: Tensor | None

    @property
    def size(self) -> int:
        """How many observations there are."""
        return len(self.known.values)


class Schedule(NamedTuple):
    """When to stop, and what to keep from extremes: ``tol`` is the least gain of log-likelihood an observation.

    >>> Schedule(max_iter=10).limits.pseudo_count
    0.0
    """

    max_iter: int = 100
    tol: float = 1e-5
    limits: Limits = Limits()


@dataclass
class Progress:
    """How a fit went.

    Attributes:
        history: log p(x) of all data before each step.
        converged: whether the last gain was below the tolerance.
        troubles: degenerate states.

    >>> Progress().history
    []
    """

    history: list[float] = field(default_factory=list)
    converged: bool = False
    troubles: list[Trouble] = field(default_factory=list)


class Expected(NamedTuple):
    """What an E-step gives.

    Attributes:
        values: ``(B,)``, log p(x) of each sequence.
        parts: ``(M, P)``, the posterior of each observation's part.
        moves: ``(C, C)`` or ``(E,)``, expected numbers of moves; first: ``(C,)``, of first states.
        durations: ``(C, K)``, expected numbers of segments of each duration; None where states have none.

    >>> Expected(*torch.zeros(4, 1)).first
    tensor([0.])
    """

    values: Tensor
    parts: Tensor
    moves: Tensor
    first: Tensor
    durations: Tensor | None = None


def expect(model: Parts, data: Data) -> Expected:
    r"""The E-step, as one gradient of one number.

    .. math::
        \frac{\partial \log p(x)}{\partial \log P(i, j)} = \mathbb{E}[\#\, i \to j], \quad
        \frac{\partial \log p(x)}{\partial \log \pi(i)} = p(z_1 = i | x), \quad
        \frac{\partial \log p(x)}{\partial \log p(x_t | k)} = p(k_t | x)

    and likewise for durations, so nothing of size T C^2 is ever made. Time O(B T C^2), or O(B T (K C + C^2)) with
    durations, memory O(B T C); nothing waits for a GPU.

    >>> from thalweg.energies.hmm.emissions import CategoricalEmission
    >>> from thalweg.energies.hmm.sequences import known_of
    >>> coin = Parts(States(torch.zeros(1), torch.zeros(1, 1)), CategoricalEmission([[0.5, 0.5]]))
    >>> rolls = torch.tensor([[0, 1, 1]])
    >>> expect(coin, Data(known_of(rolls, None, None), (rolls[0],), None)).moves
    tensor([[2.]])
    """
    with torch.no_grad():
        parts = model.emission.parts(data.prepared)
        start, moves, lasting = model.states.log_initial, model.states.log_transition, model.states.log_duration
    sparse = isinstance(moves, SparseTransitions)
    scores = moves.scores if sparse else moves
    given = (parts, cast(Tensor, scores), start, *(() if lasting is None else (lasting,)))
    inputs = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        chain = (
            inputs[2],
            moves._replace(scores=inputs[1]) if sparse else inputs[1],
            None if lasting is None else inputs[3],
        )
        values = _chain(model, data, inputs[0], chain)
        found = torch.autograd.grad(values.sum(), inputs, materialize_grads=True)
    return Expected(values.detach(), *found)


def _chain(model: Parts, data: Data, parts: Tensor, scores: Sequence[Any] | None = None) -> Tensor:
    evidence = data.known.place(model.densities(parts))
    return model.posterior(evidence, data.lengths, scores, validate_args=False).log_partition


def expectation_maximisation(model: Parts, data: Data, schedule: Schedule) -> Progress:
    """Baum-Welch: posteriors of the states under the present parameters, then the best parameters under them.

    No step lowers the likelihood (with pseudo-counts: its product with their prior); one that does by more than
    rounding is an error that names the iteration. Baum et al. (1970), Dempster et al. (1977).

    >>> from thalweg.energies.hmm.emissions import CategoricalEmission
    >>> from thalweg.energies.hmm.sequences import known_of
    >>> coin = Parts(States(torch.zeros(1), torch.zeros(1, 1)), CategoricalEmission([[0.5, 0.5]]))
    >>> rolls = torch.tensor([[0, 1, 1, 1]])
    >>> how = expectation_maximisation(coin, Data(known_of(rolls, None, None), (rolls[0],), None), Schedule())
    >>> how.converged, coin.emission.log_table.exp().detach()
    (True, tensor([[0.2500, 0.7500]]))
    """
    progress, before = Progress(), -math.inf
    statistics: tuple[Tensor, ...] = ()
    for iteration in range(schedule.max_iter):
        found = expect(model, data)
        total = _total(model, data, found.values, iteration)
        objective = total + _prior(model, schedule.limits)
        if objective < before - _rounding(found.values.dtype, schedule.limits) * (abs(total) + data.size):
            raise ThalwegError(
                f"the likelihood must not fall, got {objective:.10g} after {before:.10g} at iteration {iteration}; "
                "fit in float64, or raise `floor`"
            )
        model.states.maximise(found.first, found.moves, schedule.limits.pseudo_count, found.durations)
        statistics = model.emission.statistics(data.prepared, found.parts)
        with torch.no_grad():
            model.emission.maximise(statistics, schedule.limits)
        progress.history.append(total)
        if objective - before < schedule.tol * data.size:
            progress.converged = True
            break
        before = objective
    with torch.no_grad():
        progress.troubles = model.emission.troubles(statistics, schedule.limits) if statistics else []
    return progress


def _rounding(dtype: torch.dtype, limits: Limits) -> float:
    """By how much of itself a likelihood may seem to fall: densities at the floor have lost digits to its inverse."""
    wide = torch.finfo(torch.float64).eps / limits.floor
    return 64 * max(torch.finfo(dtype).eps, min(wide, 1e-8))


def _total(model: Parts, data: Data, values: Tensor, iteration: int) -> float:
    """The sum of log-likelihoods; the one time in an iteration that anything waits for a GPU."""
    total = float(values.double().sum())
    if math.isfinite(total):
        return total
    with torch.no_grad():  # whichever sequence has none is named
        evidence = data.known.place(model.densities(model.emission.parts(data.prepared)))
        _ = model.posterior(evidence, data.lengths).log_partition
    raise ThalwegError(
        f"the likelihood became {total} at iteration {iteration}; expected a finite number: fit in float64, raise "
        "`floor`, or begin elsewhere (`random_state`)"
    )


def _prior(model: Parts, limits: Limits) -> float:
    if not limits.pseudo_count:
        return 0.0
    with torch.no_grad():
        return float(model.states.log_prior(limits.pseudo_count) + model.emission.log_prior(limits))


def climb(model: Parts, data: Data, schedule: Schedule) -> Progress:
    """Raise the likelihood along its gradient by L-BFGS with a line search, over logits, means and log-scales.

    For what EM cannot re-estimate, and where EM creeps. Nothing holds variances above the floor. Liu and Nocedal
    (1989).

    >>> from thalweg.energies.hmm.emissions import CategoricalEmission
    >>> from thalweg.energies.hmm.sequences import known_of
    >>> coin = Parts(States(torch.zeros(1), torch.zeros(1, 1)), CategoricalEmission([[0.5, 0.5]]))
    >>> rolls = torch.tensor([[0, 1, 1, 1]])
    >>> _ = climb(coin, Data(known_of(rolls, None, None), (rolls[0],), None), Schedule(tol=1e-7))
    >>> coin.emission.log_table.exp().detach()
    tensor([[0.2500, 0.7500]])
    """
    progress, before, count = Progress(), -math.inf, max(1, data.size)
    chosen = [*model.states.parameters(), *model.emission.parameters()]
    optimiser = torch.optim.LBFGS(chosen, max_iter=1, line_search_fn="strong_wolfe")
    totals: list[Tensor] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        with torch.enable_grad():
            parts = model.emission.parts(data.prepared)
            values = _chain(model, data, parts)
            totals.append(values.detach())
            prior = model.states.log_prior(schedule.limits.pseudo_count) + model.emission.log_prior(schedule.limits)
            loss = -(values.double().sum() + prior) / count
            loss.backward()
        return loss

    for iteration in range(schedule.max_iter):
        totals.clear()
        objective = -float(optimiser.step(closure).detach()) * count
        progress.history.append(_total(model, data, totals[0], iteration))
        if objective - before < schedule.tol * count:
            progress.converged = True
            break
        before = objective
    optimiser.zero_grad()
    with torch.no_grad():
        statistics = model.emission.statistics(data.prepared, expect(model, data).parts)
        progress.troubles = model.emission.troubles(statistics, schedule.limits)
    return progress
