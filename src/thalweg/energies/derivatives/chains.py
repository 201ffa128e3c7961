"""Derivatives for sequences that a hidden Markov model emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from thalweg.energies.derivatives.blocks import in_blocks, inside_of
from thalweg.energies.derivatives.gaussians import Gaussians, in_logits
from thalweg.energies.hmm.emissions import CategoricalEmission, SymbolError
from thalweg.energies.hmm.gaussian import GaussianEmission
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.sequences import known_of
from thalweg.energies.mixture.covariances import SHAPES
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions


class Posteriors(NamedTuple):
    """What is known of the states of a batch once its sequences are seen.

    Attributes:
        evidence: log p(x_t | z_t), ``(B, T, C)``.
        states: p(z_t | x), ``(B, T, C)``, 0 past a length.
        moves: expected numbers of moves, ``(B, C, C)``.
        parts: p(part | x_t, z_t) of the emission's P parts, ``(B, T, C, P)``; None where they are the states.

    >>> Posteriors(*torch.ones(3, 1, 2, 2), None).shares.shape
    torch.Size([1, 2, 2])
    """

    evidence: Tensor
    states: Tensor
    moves: Tensor
    parts: Tensor | None

    @property
    def shares(self) -> Tensor:
        """p(part | x) at each position, ``(B, T, P)``."""
        return self.states if self.parts is None else torch.einsum("btc,btcp->btp", self.states, self.parts)


class ChainDerivatives:
    """Of sequences that a hidden Markov model emitted: vectors from Gaussians or mixtures of them, or symbols.

    >>> coin = HMM([1.0], [[1.0]], [[0.5, 0.5]])
    >>> ChainDerivatives(coin)(torch.tensor([[0, 1, 1, 1]]), None, ["emissions"])
    tensor([[-1.,  1.]], dtype=torch.float64)
    """

    def __init__(self, model: HMM):
        self.parts, emission = model.parts, model.parts.emission
        if model.parts.states.lasting:
            raise ConfigError("`model` must be an HMM whose states have no `durations`, got one with them")
        self.start, self.moves = wide(self.parts.states.log_initial), log_moves(self.parts.states.log_transition)
        if isinstance(emission, GaussianEmission):
            self.gaussians = _gaussians(emission)
            own = ("means", "variances", "weights") if isinstance(emission, MixtureEmission) else ("means", "variances")
            self.offered, self.width = (*own, "initial", "transitions"), self.gaussians.means.size(1)
        elif isinstance(emission, CategoricalEmission):
            self.offered, self.width = ("emissions", "initial", "transitions"), 1
        else:
            raise ConfigError(
                f"`model` must be an HMM with Gaussian, mixture or categorical emissions, got {type(emission).__name__}"
            )
        self.event_dim = emission.event_dim

    @torch.no_grad()
    def __call__(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int = 1) -> Tensor:
        """Of padded observations ``(B, T)`` or ``(B, T, D)``: those parameters one after the other, (B, F) float64.

        One gradient of log p(x) gives the posteriors of states and the expected moves of each sequence: time
        O(B T C^2), memory O(B T C + B C^2). Second derivatives: see :meth:`_twice`.
        """
        self._check(values, lengths)
        C, P = len(self.start), cast(int, self.parts.emission.size) * getattr(self.parts.emission, "n_mix", 1)
        wider = P * self.width
        apart = C != P or self.parts.kinds is not None or isinstance(self.parts.emission, MixtureEmission)

        def numbers(T: int) -> int:
            return max(T * (C * P if apart else C * self.width), C * max(C, wider), wider**2 if order == 2 else 1)

        try:
            return in_blocks(lambda seen, counts: self._some(seen, counts, of, order), values, lengths, numbers)
        except InfeasibleError:
            self._posteriors(values, lengths)  # raises the same, naming the place of a sequence in the whole batch
            raise

    def _check(self, values: Tensor, lengths: Tensor | None) -> None:
        """A ShapeError that names the place of a symbol there is none of; sequences are reordered later."""
        known = known_of(values, lengths, None)
        try:
            self.parts.emission.prepare(known.values)
        except SymbolError as error:
            item, step = known.at(error.which)
            raise ShapeError(f"{error} at position {step} of sequence {item}; leave it out") from None

    def _some(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int) -> Tensor:
        emission, found = self.parts.emission, self._posteriors(values, lengths)
        seen, _ = inside_of(values, lengths)
        shares = found.shares
        ways: dict[str, Callable[[], Tensor]] = {
            "means": lambda: self.gaussians.in_means(seen.double(), shares),
            "variances": lambda: self.gaussians.in_variances(seen.double(), shares),
            "weights": lambda: _in_weights(shares, cast(MixtureEmission, emission)),
            "emissions": lambda: _in_table(seen, shares, cast(CategoricalEmission, emission)),
            "initial": lambda: in_logits(found.states[:, 0], self.start.exp()),
            "transitions": lambda: self._along_edges(in_logits(found.moves, self.moves.exp())),
        }
        answers = [ways[name]().flatten(1) for name in of]
        if order == 2:
            answers.append(self._twice(seen.double(), found))
        return torch.cat(answers, dim=1)

    def _posteriors(self, values: Tensor, lengths: Tensor | None) -> Posteriors:
        known, emission = known_of(values, lengths, None), self.parts.emission
        scores = emission.parts(emission.prepare(known.values))
        evidence = known.place(self.parts.densities(scores)).double()
        inputs = [evidence, self.moves.expand(len(values), -1, -1).clone()]
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in inputs]
            chain = LinearChain(*inputs, start=self.start, lengths=lengths, backend=self.parts.backend)
            states, moves = torch.autograd.grad(chain.log_partition.sum(), inputs, materialize_grads=True)
        return Posteriors(evidence, states, moves, self._parts(known.place(scores.double())))

    def _parts(self, scores: Tensor) -> Tensor | None:
        """p(part | x_t, z_t), ``(B, T, C, P)`` from log-densities of the parts ``(B, T, P)``; None: each is a state."""
        emission, kinds = self.parts.emission, self.parts.kinds
        size, own = cast(int, emission.size), getattr(emission, "n_mix", 1)
        if kinds is None and own == 1:
            return None
        within = scores.unflatten(2, (size, own)).softmax(dim=3).nan_to_num(0.0)  # 0 where a symbol cannot be
        whose = torch.eye(size, dtype=scores.dtype, device=scores.device)[slice(None) if kinds is None else kinds]
        return (whose.unsqueeze(2) * within.unsqueeze(2)).flatten(3)

    def _twice(self, points: Tensor, found: Posteriors) -> Tensor:
        r"""Second derivatives in all means: the expected curvature and the covariance of the slopes, given x.

        .. math:: \nabla^2 \log p(x) = \mathbb{E}[\nabla^2 \log p(x, z)] + \operatorname{Cov}[\nabla \log p(x, z)]

        The slope is a sum S over positions, so its second moment has all pairs of positions. Given z_t, what came
        before does not depend on what comes after: a pass from left to right with E[S_t | z_t, x] takes them all, in
        time O(T (C^2 M + C D M)) for M = P D means. Louis (1982).
        """
        pulls = self.gaussians.pulls(points)  # (B, T, P, D)
        B, T, P, D = pulls.shape
        shares = found.shares
        own = self.gaussians.own_curvature(shares, pulls)
        expected = (shares.unsqueeze(3) * pulls).sum(dim=1).flatten(1)
        pairs = torch.zeros(B, P * D, P * D, dtype=pulls.dtype, device=pulls.device)
        alpha = self.start + found.evidence[:, 0]
        before = self._slopes(found, pulls, 0)  # E[S_t | z_t], (B, C, P D)
        for t in range(1, T):
            joint = alpha.unsqueeze(2) + self.moves
            came_from = joint.softmax(dim=1).nan_to_num(0.0)  # a state that cannot be reached comes from nowhere
            past = came_from.mT @ before
            weights = found.states[:, t].unsqueeze(2) * self._within(found, t)  # (B, C, P)
            pairs += (pulls[:, t].unsqueeze(3) * (weights.mT @ past).unsqueeze(2)).flatten(1, 2)
            alpha = joint.logsumexp(dim=1) + found.evidence[:, t]
            before = past + self._slopes(found, pulls, t)
        return self.gaussians.triangle(own + pairs + pairs.mT - expected.unsqueeze(2) * expected.unsqueeze(1))

    def _within(self, found: Posteriors, t: int) -> Tensor:
        """p(part | x_t, z_t) at one position, ``(B, C, P)``."""
        if found.parts is not None:
            return found.parts[:, t]
        return torch.eye(len(self.start), dtype=found.states.dtype, device=found.states.device).expand(
            len(found.states), -1, -1
        )

    def _slopes(self, found: Posteriors, pulls: Tensor, t: int) -> Tensor:
        """What a position adds to the slope in the means, given its state, ``(B, C, P D)``."""
        return (self._within(found, t).unsqueeze(3) * pulls[:, t].unsqueeze(1)).flatten(2)

    def _along_edges(self, found: Tensor) -> Tensor:
        """What belongs to a move that there is, where transitions are sparse."""
        states = self.parts.states
        return found[:, states.sources, states.targets] if states.sparse else found


def _gaussians(emission: GaussianEmission) -> Gaussians:
    means, shape = cast(Tensor, emission.means), emission.covariance_type
    covariances = emission.covariances.detach().double()
    factors = SHAPES[shape].factors(covariances)
    if shape == "tied" and emission.groups > 1:
        factors = factors.repeat_interleave(len(means) // emission.groups, dim=0)
    return Gaussians.of(shape, means, factors)._replace(groups=emission.groups)


def _in_weights(shares: Tensor, emission: MixtureEmission) -> Tensor:
    """In the logits of each kind's weights, ``(B, K, J)``."""
    return in_logits(shares.sum(dim=1).unflatten(1, (-1, emission.n_mix)), wide(emission.log_weights).exp())


def _in_table(symbols: Tensor, shares: Tensor, emission: CategoricalEmission) -> Tensor:
    """In the logits of each kind's symbols, ``(B, K, V)``."""
    table = wide(emission.log_table).exp()
    counts = shares.new_zeros(len(shares), table.size(1), table.size(0))
    counts = counts.scatter_add(1, symbols.long().unsqueeze(2).expand_as(shares), shares)
    return in_logits(counts.mT, table)


def log_moves(moves: Tensor | SparseTransitions) -> Tensor:
    """log P, ``(C, C)`` float64.

    >>> log_moves(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()).exp()
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    if not isinstance(moves, SparseTransitions):
        return wide(moves)
    whole = moves.scores.new_full((moves.size, moves.size), float("-inf"), dtype=torch.float64)
    whole[moves.sources, moves.targets] = moves.scores.detach().double()
    return wide(whole)


def wide(logarithms: Tensor) -> Tensor:
    """In float64, where rows sum to one once more: then no derivative moves all logits of a row together.

    >>> wide(torch.tensor([1.0, 1.0]).log()).exp()
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return logarithms.detach().double().log_softmax(dim=-1)
