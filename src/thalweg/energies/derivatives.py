r"""Derivatives of a sequence's log-likelihood in the parameters of the model that made it, in closed form.

.. math:: \nabla_\theta \log p(x) = \mathbb{E}_{z | x} [\nabla_\theta \log p(x, z)]

so posteriors r of the latent variables are all that is needed, and sums of them over a sequence (Fisher's identity).
Probabilities are differentiated in their logits (w = softmax a), which leaves them probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from thalweg.energies.hmm.emissions import CategoricalEmission, SymbolError
from thalweg.energies.hmm.gaussian import GaussianEmission
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.sequences import known_of
from thalweg.energies.mixture.covariances import SHAPES
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

__all__ = ["ChainDerivatives", "Gaussians", "MixtureDerivatives", "derivatives_of", "in_logits"]

# Numbers of an intermediate result of a mixture, for as many sequences as are done together.
_AT_ONCE = 2**22


def in_logits(counts: Tensor, probabilities: Tensor) -> Tensor:
    r"""Of \sum_v c_v \log w_v in the logits of w, for each row of expected counts ``(B, ..., V)``: c - w \sum_v c_v.

    >>> in_logits(torch.tensor([[3.0, 1.0]]), torch.tensor([0.5, 0.5]))
    tensor([[ 1., -1.]])
    """
    return counts - counts.sum(dim=-1, keepdim=True) * probabilities


class Gaussians(NamedTuple):
    r"""K Gaussians whose parameters are differentiated, with shares r of points ``(B, T, D)``, ``(B, T, K)``.

    .. math::
        \frac{\partial}{\partial m_k} = P_k \sum_t r_{tk} (x_t - m_k), \qquad
        \frac{\partial}{\partial S_k} = \tfrac12 \sum_t r_{tk} \big(P_k (x_t - m_k)(x_t - m_k)^\top P_k - P_k\big)

    Attributes:
        shape: ``full``, ``tied``, ``diagonal`` or ``spherical``.
        means: ``(K, D)``.
        precisions: P, the inverse of S: ``(K, D, D)``, or ``(K, D)`` where S is diagonal or spherical.

    >>> unit = Gaussians("diagonal", torch.zeros(1, 1), torch.ones(1, 1))
    >>> unit.in_means(torch.tensor([[[1.0], [2.0]]]), torch.ones(1, 2, 1))
    tensor([[[3.]]])
    """

    shape: str
    means: Tensor
    precisions: Tensor

    @classmethod
    def of(cls, shape: str, means: Tensor, factors: Tensor) -> Gaussians:
        """From factors F of the precisions, P = FF', in the shape of the covariances; in float64."""
        means, factors = means.detach().double(), factors.detach().double()
        if shape in ("diagonal", "spherical"):
            precisions = factors.square() if shape == "diagonal" else factors.square().unsqueeze(1)
            return cls(shape, means, precisions.expand_as(means))
        factors = factors.triu()
        return cls(shape, means, (factors @ factors.mT).expand(*means.shape, means.size(1)))

    def pulls(self, points: Tensor) -> Tensor:
        """P (x - m) of each point ``(B, T, D)`` for each Gaussian, ``(B, T, K, D)``."""
        apart = points.unsqueeze(-2) - self.means
        if self.precisions.dim() == 2:
            return apart * self.precisions
        return torch.einsum("btkd,kde->btke", apart, self.precisions)

    def in_means(self, points: Tensor, shares: Tensor) -> Tensor:
        """``(B, K, D)``; time O(B T K D)."""
        # About a centre less is lost in the difference of the two sums.
        centre = self.means.mean(dim=0)
        first = shares.mT @ (points - centre) - shares.sum(dim=1).unsqueeze(2) * (self.means - centre)
        if self.precisions.dim() == 2:
            return first * self.precisions
        return torch.einsum("bkd,kde->bke", first, self.precisions)

    def in_variances(self, points: Tensor, shares: Tensor) -> Tensor:
        """``(B, K, D)`` diagonal, ``(B, K)`` spherical; of matrices their lower triangle row by row,
        ``(B, K, D (D + 1) / 2)`` full and ``(B, D (D + 1) / 2)`` tied.

        Both halves of a symmetric matrix move together, so what is not on its diagonal counts twice.
        """
        centre = self.means.mean(dim=0)
        means, points, mass = self.means - centre, points - centre, shares.sum(dim=1).unsqueeze(2)
        first = shares.mT @ points
        if self.precisions.dim() == 2:
            spread = shares.mT @ points.square() - 2 * means * first + mass * means.square()
            found = 0.5 * (spread * self.precisions.square() - mass * self.precisions)
            return found.sum(dim=2) if self.shape == "spherical" else found
        D = points.size(2)
        second = (shares.mT @ (points.unsqueeze(3) * points.unsqueeze(2)).flatten(2)).unflatten(2, (D, D))
        across = means.unsqueeze(2) * first.unsqueeze(2)  # m first'
        spread = second - across - across.mT + mass.unsqueeze(3) * means.unsqueeze(2) * means.unsqueeze(1)
        found = 0.5 * (self.precisions @ spread @ self.precisions - mass.unsqueeze(3) * self.precisions)
        rows, columns = torch.tril_indices(D, D, device=found.device)
        halves = found[..., rows, columns] * torch.where(rows == columns, 1.0, 2.0).to(found)
        return halves.sum(dim=1) if self.shape == "tied" else halves

    def twice_in_means(self, points: Tensor, shares: Tensor) -> Tensor:
        r"""The second derivatives of \sum_t \log p(x_t) in all means of a mixture with posteriors r.

        .. math::
            \frac{\partial^2}{\partial m_i \partial m_j} = -\sum_t r_{ti} r_{tj}\, g_{ti} g_{tj}^\top
            + [i = j] \sum_t r_{ti} (g_{ti} g_{ti}^\top - P_i), \qquad g_{ti} = P_i (x_t - m_i)

        Returns:
            The lower triangle of that matrix of K D rows, row by row: ``(B, K D (K D + 1) / 2)``.
        """
        K, D = self.means.shape
        pulls = self.pulls(points)
        shared = shares.unsqueeze(3) * pulls
        whole = -(shared.flatten(2).mT @ shared.flatten(2))
        precisions = self.precisions.diag_embed() if self.precisions.dim() == 2 else self.precisions
        own = torch.einsum("btkd,btke->bkde", shared, pulls) - shares.sum(dim=1)[..., None, None] * precisions
        blocks = whole.view(-1, K, D, K, D)
        each = torch.arange(K, device=whole.device)
        blocks[:, each, :, each] += own.transpose(0, 1)
        rows, columns = torch.tril_indices(K * D, K * D, device=whole.device)
        return whole[:, rows, columns]


class MixtureDerivatives:
    """Of sequences whose points are independent draws from a mixture of Gaussians.

    >>> model = GaussianMixture(means=[[0.0]], covariances=[[[2.0]]])
    >>> MixtureDerivatives(model)(torch.tensor([[[1.0], [2.0]]]), None, ["means"])
    tensor([[1.5000]], dtype=torch.float64)
    """

    offered = ("means", "variances", "weights")
    event_dim = 1

    def __init__(self, model: GaussianMixture):
        self.model, self.weights = model, model.logits_.detach().double().softmax(dim=0)
        self.gaussians = Gaussians.of(model._shape, model.means_, model.factors_)
        self.width = self.gaussians.means.size(1)

    @torch.no_grad()
    def __call__(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int = 1) -> Tensor:
        """Of padded points ``(B, T, D)``: those parameters one after the other, then second ones; (B, F) float64."""
        N, D = self.gaussians.means.shape
        largest = max(values[0].numel() * max(N, D), (N * D) ** 2 if order == 2 else 1)
        size = max(1, _AT_ONCE // largest)
        counts = [None] * len(values) if lengths is None else list(lengths.split(size))
        found = [self._some(some, count, of, order) for some, count in zip(values.split(size), counts, strict=False)]
        return torch.cat(found)

    def _some(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int) -> Tensor:
        points, inside = _inside(values.double(), lengths)
        shares = (-self.model.joint(points).detach().double()).softmax(dim=-1) * inside.unsqueeze(2)
        ways: dict[str, Callable[[], Tensor]] = {
            "means": lambda: self.gaussians.in_means(points, shares),
            "variances": lambda: self.gaussians.in_variances(points, shares),
            "weights": lambda: in_logits(shares.sum(dim=1), self.weights),
        }
        found = [ways[name]().flatten(1) for name in of]
        if order == 2:
            found.append(self.gaussians.twice_in_means(points, shares))
        return torch.cat(found, dim=1)


class ChainDerivatives:
    """Of sequences that a hidden Markov model emitted: vectors from Gaussians, or symbols.

    >>> coin = HMM([1.0], [[1.0]], [[0.5, 0.5]])
    >>> ChainDerivatives(coin)(torch.tensor([[0, 1, 1, 1]]), None, ["emissions"])
    tensor([[-1.,  1.]], dtype=torch.float64)
    """

    def __init__(self, model: HMM):
        self.parts, emission = model.parts, model.parts.emission
        if isinstance(emission, GaussianEmission) and not isinstance(emission, MixtureEmission):
            means, shape = cast(Tensor, emission.means), emission.covariance_type
            factors = SHAPES[shape].factors(emission.covariances.detach().double())
            self.gaussians = Gaussians.of(shape, means, factors)
            self.offered, self.width = ("means", "variances", "initial", "transitions"), means.size(1)
        elif isinstance(emission, CategoricalEmission):
            self.offered, self.width = ("emissions", "initial", "transitions"), 1
        else:
            raise ConfigError(
                f"`model` must be an HMM with Gaussian or categorical emissions, got {type(emission).__name__}"
            )
        self.event_dim = emission.event_dim

    @torch.no_grad()
    def __call__(self, values: Tensor, lengths: Tensor | None, of: Sequence[str], order: int = 1) -> Tensor:
        """Of padded observations ``(B, T)`` or ``(B, T, D)``: those parameters one after the other, (B, F) float64.

        One gradient of log p(x) gives the posteriors of states and the expected moves of each sequence: time
        O(B T C^2), memory O(B T C + B C^2).
        """
        states, emission = self.parts.states, self.parts.emission
        start, moves = _wide(states.log_initial), _dense(states.log_transition)
        marginals, counts = self._posteriors(values, lengths, start, moves)
        shares, kinds = marginals, self.parts.kinds
        if kinds is not None:
            shares = marginals.new_zeros(*marginals.shape[:2], int(kinds.max()) + 1).index_add(2, kinds, marginals)
        seen, _ = _inside(values, lengths)
        ways: dict[str, Callable[[], Tensor]] = {
            "means": lambda: self.gaussians.in_means(seen.double(), shares),
            "variances": lambda: self.gaussians.in_variances(seen.double(), shares),
            "emissions": lambda: _in_table(seen, shares, cast(CategoricalEmission, emission)),
            "initial": lambda: in_logits(marginals[:, 0], start.exp()),
            "transitions": lambda: self._along_edges(in_logits(counts, moves.exp())),
        }
        return torch.cat([ways[name]().flatten(1) for name in of], dim=1)

    def _posteriors(
        self, values: Tensor, lengths: Tensor | None, start: Tensor, moves: Tensor
    ) -> tuple[Tensor, Tensor]:
        """p(z_t | x), ``(B, T, C)``, and the expected numbers of moves, ``(B, C, C)``."""
        known = known_of(values, lengths, None)
        try:
            prepared = self.parts.emission.prepare(known.values)
        except SymbolError as error:
            item, step = known.at(error.which)
            raise ShapeError(f"{error} at position {step} of sequence {item}; leave it out") from None
        evidence = known.place(self.parts.densities(self.parts.emission.parts(prepared)))
        inputs = [evidence.double(), moves.expand(len(values), -1, -1).clone()]
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in inputs]
            chain = LinearChain(*inputs, start=start, lengths=lengths, backend=self.parts.backend)
            found = torch.autograd.grad(chain.log_partition.sum(), inputs, materialize_grads=True)
        return found[0], found[1]

    def _along_edges(self, found: Tensor) -> Tensor:
        """What belongs to a move that there is, where transitions are sparse."""
        states = self.parts.states
        return found[:, states.sources, states.targets] if states.sparse else found


def derivatives_of(model: Any) -> MixtureDerivatives | ChainDerivatives:
    """What differentiates the likelihoods of a model; a ConfigError for one without, a NotFittedError before a fit.

    >>> derivatives_of(HMM([1.0], [[1.0]], [[0.5, 0.5]])).offered
    ('emissions', 'initial', 'transitions')
    """
    if not isinstance(model, GaussianMixture | HMM):
        raise ConfigError(f"`model` must be a GaussianMixture or an HMM of thalweg, got {type(model).__name__}")
    model._check_fitted()
    return MixtureDerivatives(model) if isinstance(model, GaussianMixture) else ChainDerivatives(model)


def _inside(values: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values with 0 past each length, whatever lay there, and which lie inside, ``(B, T)`` bool."""
    B, T = values.shape[:2]
    if lengths is None:
        return values, torch.ones(B, T, dtype=torch.bool, device=values.device)
    inside = torch.arange(T, device=values.device) < lengths.to(values.device).unsqueeze(1)
    past = ~inside if values.dim() == 2 else ~inside.unsqueeze(2)
    return values.masked_fill(past, 0), inside


def _in_table(symbols: Tensor, shares: Tensor, emission: CategoricalEmission) -> Tensor:
    """In the logits of each kind's symbols, ``(B, K, V)``."""
    table = _wide(emission.log_table).exp()
    counts = shares.new_zeros(len(shares), table.size(1), table.size(0))
    counts = counts.scatter_add(1, symbols.long().unsqueeze(2).expand_as(shares), shares)
    return in_logits(counts.mT, table)


def _dense(moves: Tensor | SparseTransitions) -> Tensor:
    """log P, ``(C, C)`` float64."""
    if not isinstance(moves, SparseTransitions):
        return _wide(moves)
    whole = moves.scores.new_full((moves.size, moves.size), float("-inf"), dtype=torch.float64)
    whole[moves.sources, moves.targets] = moves.scores.detach().double()
    return _wide(whole)


def _wide(logarithms: Tensor) -> Tensor:
    """In float64, where rows sum to one once more: then no derivative moves all logits of a row together."""
    return logarithms.detach().double().log_softmax(dim=-1)
