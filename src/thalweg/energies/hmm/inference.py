"""What can be asked of a hidden Markov model that has parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.emissions import CategoricalEmission, Emission, SymbolError, carries_graph
from thalweg.energies.hmm.fitting import Parts
from thalweg.energies.hmm.probabilities import log_of
from thalweg.energies.hmm.sequences import Known, known_of
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.semi_markov import SemiMarkov
from thalweg.kernels.potentials import SparseTransitions
from thalweg.limits import enough_memory

Lengths = Tensor | Sequence[int] | None


def prepared_of(emission: Emission, known: Known) -> tuple[Tensor, ...]:
    """What an emission makes of what is known; one line names the item and the position of what it cannot emit.

    >>> prepared_of(CategoricalEmission([[1.0]]), known_of(torch.tensor([[0, 3]]), None, None))
    Traceback (most recent call last):
    ...
    thalweg.errors.ShapeError: `observations` must be symbols 0 ... 0, got 3 at position 1 of batch item 0; ...
    """
    values = known.values
    if values.is_floating_point() and known.present is None and not bool(values.detach().sum().isfinite()):
        wrong = ~values.detach().flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.detach().isfinite()
        if bool(wrong.any()):
            item, step = known.at(int(wrong.nonzero()[0]))
            bad = values[wrong][0].flatten()
            bad = bad[~bad.isfinite()][0]
            what = "NaN" if bool(bad.isnan()) else "infinity (inf)"
            raise ShapeError(
                f"X contains {what} at position {step} of batch item {item}; mark what is missing in `observed`"
            )
    try:
        return emission.prepare(values, known.present)
    except SymbolError as error:
        item, step = known.at(error.which)
        raise ShapeError(
            f"{error} at position {step} of batch item {item}; mark what is missing in `observed`"
        ) from None


class Inference(nn.Module):
    """Likelihood, states and what is to come, by the chain of the states given the observations.

    >>> from thalweg.energies import HMM
    >>> HMM([1.0], [[1.0]], [[0.5, 0.5]]).log_likelihood(torch.tensor([[0, 1, 1]])).exp().detach()
    tensor([0.1250])
    """

    backend: str

    @property
    def parts(self) -> Parts:
        """States and emissions; a NotFittedError before there are any."""
        raise NotImplementedError

    @property
    def num_states(self) -> int:
        """C."""
        return self.parts.states.size

    @property
    def log_initial(self) -> Tensor:
        """log pi, ``(C,)``."""
        return self.parts.states.log_initial

    @property
    def log_transition(self) -> Tensor | SparseTransitions:
        """log P, ``(C, C)``, or along its edges."""
        return self.parts.states.log_transition

    @property
    def log_duration(self) -> Tensor | None:
        """log p(d | state), ``(C, K)`` for d = 1 .. K positions; None where states have no durations."""
        return self.parts.states.log_duration

    @property
    def log_emission(self) -> Tensor | None:
        """log p(symbol | state), ``(C, V)``; None where states emit no symbols of a table."""
        _, emission, kinds, _ = self.parts
        if not isinstance(emission, CategoricalEmission):
            return None
        return emission.log_table if kinds is None else emission.log_table[kinds]

    def _plain(self) -> torch.set_grad_enabled:
        """Answers about states follow the caller's tensors that are part of a graph, not the model's own parameters."""
        states, emission = self.parts[:2]
        return torch.set_grad_enabled(torch.is_grad_enabled() and (carries_graph(states) or carries_graph(emission)))

    def chain(
        self, observations: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None
    ) -> LinearChain | SemiMarkov:
        """p(z | x) as a chain of C labels: emissions log p(x_t | z_t), log Z = log p(x); segments with durations.

        >>> from thalweg.energies import HMM
        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.chain(torch.tensor([[0, 0, 1]])).mode
        tensor([[0, 0, 0]])
        """
        model = self.parts
        observations = torch.as_tensor(observations)
        event = tuple(observations.shape[2:])
        if observations.dim() != 2 + model.emission.event_dim:
            expected = "(B, T, D)" if model.emission.event_dim else "(B, T)"
            short = observations.dim() == 1 + model.emission.event_dim
            remedy = "; add the batch with unsqueeze(0)" if short else ""
            raise ShapeError(f"`observations` must be {expected}, got {tuple(observations.shape)}{remedy}")
        model.emission.check(event)
        known = known_of(observations, lengths, observed)
        scores = model.densities(model.emission.parts(prepared_of(model.emission, known)))
        scores = scores.to(torch.promote_types(scores.dtype, self.log_initial.dtype))
        return model.posterior(known.place(scores), lengths)

    def posterior(
        self, x: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None
    ) -> LinearChain | SemiMarkov:
        """p(z | x), the same as :meth:`chain`: marginals, mode, samples, entropy ..."""
        return self.chain(x, lengths, observed=observed)

    def energy(self, x: Tensor, z: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None) -> Tensor:
        """E(x, z) = -log p(x, z) of states ``(..., B, T)``, as ``(..., B)``.

        >>> from thalweg.energies import HMM
        >>> HMM([1.0], [[1.0]], [[0.5, 0.5]]).energy(torch.tensor([[0, 1]]), torch.tensor([[0, 0]])).detach()
        tensor([1.3863])
        """
        return self.chain(x, lengths, observed=observed).energy(z)

    def free_energy(self, x: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None) -> Tensor:
        """F(x) = -log p(x) = -log sum_z exp(-E(x, z)), ``(B,)``."""
        return -self.log_likelihood(x, lengths, observed=observed)

    def forward(self, x: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None) -> Tensor:
        """The free energy, ``(B,)``."""
        return self.free_energy(x, lengths, observed=observed)

    def log_likelihood(
        self, observations: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None
    ) -> Tensor:
        """log p(x_1..x_L) of each item, ``(B,)``; time O(B T C^2).

        >>> from thalweg.energies import HMM
        >>> coin = HMM([1.0], [[1.0]], [[0.5, 0.5]])
        >>> coin.log_likelihood(torch.tensor([[0, 1, 1]])).exp().detach()
        tensor([0.1250])
        """
        return self.chain(observations, lengths, observed=observed).log_partition

    def filter(self, observations: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None) -> Tensor:
        r"""p(z_t | x_1..x_t), what is known of a state when its observation arrives: ``(B, T, C)``, 0 past a length.

        .. math:: \alpha_t(j) \propto p(x_t | z_t = j) \sum_i \alpha_{t-1}(i) P(i, j)

        In logarithms throughout, so that no state is lost to underflow. T steps of O(B C^2) time and memory.

        >>> from thalweg.energies import HMM
        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.filter(torch.tensor([[0, 1]]))
        tensor([[[0.8000, 0.2000],
                 [0.4157, 0.5843]]])
        """
        with self._plain():
            chain = self.chain(observations, lengths, observed=observed)
            if isinstance(chain, SemiMarkov):
                raise ConfigError("`filter` needs states without durations, got `durations`; ask `smooth`")
            probabilities = log_filter(chain).exp()
        steps = torch.arange(probabilities.size(1), device=probabilities.device)
        return torch.where((steps < chain.lengths.unsqueeze(1)).unsqueeze(2), probabilities, 0)

    def smooth(self, observations: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None) -> Tensor:
        """p(z_t | x_1..x_L), what is known of a state in the end: ``(B, T, C)``, 0 past a length.

        >>> from thalweg.energies import HMM
        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.smooth(torch.tensor([[0, 1]]))
        tensor([[[0.5843, 0.4157],
                 [0.4157, 0.5843]]])
        """
        with self._plain():
            chain = self.chain(observations, lengths, observed=observed)
            return chain.marginals[:, :, 0] if isinstance(chain, SemiMarkov) else chain.marginals

    def viterbi(
        self, observations: Tensor, lengths: Lengths = None, *, observed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The most probable states: log p(z, x), ``(B,)``, and z, ``(B, T)`` with -1 past a length.

        >>> from thalweg.energies import HMM
        >>> model = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.viterbi(torch.tensor([[0, 1]]))[1]
        tensor([[0, 1]])
        """
        with self._plain():
            chain = self.chain(observations, lengths, observed=observed)
            best = chain.mode
            if isinstance(chain, SemiMarkov):
                return chain.score(best), torch.where(best < 0, best, best % self.num_states)
            return chain.max_score, best

    def sample(self, length: int, n: int = 1, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """n independent sequences: states ``(n, length)`` and observations ``(n, length, ...)``.

        >>> from thalweg.energies import HMM
        >>> model = HMM([1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.sample(4)
        (tensor([[0, 1, 0, 1]]), tensor([[0, 1, 0, 1]]))
        """
        for name, value in (("length", length), ("n", n)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` must be an integer of at least 1, got {value!r}")
        _, emission, kinds, _ = self.parts
        with torch.no_grad(), enough_memory(n * length * self.num_states, length=length, n=n):
            nothing = self.log_initial.new_zeros(()).expand(1, length, self.num_states)
            prior = self.parts.posterior(nothing, None)
            states = prior.sample((n,), generator=generator).squeeze(1)
            if isinstance(prior, SemiMarkov):
                states = torch.where(states < 0, states, states % self.num_states)
            if bool((states < 0).any()):
                raise ShapeError("probabilities of states must be finite, got NaN; fit the model again")
            flat = states.flatten() if kinds is None else kinds[states.flatten()]
            return states, emission.draw(flat, generator).unflatten(0, (n, length))


def log_filter(chain: LinearChain) -> Tensor:
    """log p(z_t | x_1..x_t), (B, T, C); past a length what the prior alone says.

    >>> log_filter(LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2))).exp()[0, 1]
    tensor([0.5000, 0.5000])
    """
    with torch.no_grad():
        _ = chain.log_partition  # what cannot be observed has no posterior: this raises and names the item
    evidence, transitions, start, _, _ = chain.potentials
    scores = (start + evidence[:, 0]).log_softmax(-1)
    every = [scores]
    for t in range(1, evidence.size(1)):
        scores = (advance(scores, transitions) + evidence[:, t]).log_softmax(-1)
        every.append(scores)
    return torch.stack(every, dim=1)


def advance(scores: Tensor, transitions: Tensor | SparseTransitions) -> Tensor:
    """log sum_i exp(scores[b, i] + transitions[i, j]), (B, C), with finite gradients where nothing leads to j.

    >>> advance(torch.zeros(1, 2), torch.tensor([[0.0, float("-inf")], [0.0, float("-inf")]])).exp()
    tensor([[2., 0.]])
    """
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
    return log_of(total) + top
