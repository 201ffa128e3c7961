r"""Energies with latent variables: E(x, y, z), where z says which of several answers to x this is.

A latent variable is not observed, so inference is over y and z together: the answer is the least of

.. math:: F(x, y) = -\frac1b \log \sum_z \exp(-b E(x, y, z)) \qquad \text{or} \qquad F(x, y) = \min_z E(x, y, z).

An energy that is a single bowl around one f(x) must put it between two right answers; with z there is a bowl for each.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError

# How a latent variable is got rid of: summed over, or at its least energy.
Elimination: TypeAlias = Literal["sum", "minimum"]


def free_energy(energies: Tensor, beta: float = 1.0, *, over: Elimination = "sum", dim: int = -1) -> Tensor:
    r"""The energy of an answer without its latent variable.

    .. math:: F = -\frac1b \log \sum_z \exp(-b E_z) \qquad \text{or} \qquad F = \min_z E_z

    The sum lies below the minimum by at most (log Z) / b with Z the number of values of z, and reaches it towards
    b = infinity. Its gradient is <dE>, each z in proportion to P(z | x, y) = exp(-b E_z) / sum exp(-b E_z'); the
    minimum's is that of the least E_z alone (of equal ones the first).

    Args:
        energies: ``(..., Z)`` along ``dim``; +inf is no such z. A row of nothing else is +inf.
        beta: b, above 0; the minimum does not look at it.
        over: ``sum`` or ``minimum``.
        dim: where z is.
    Returns:
        ``(...)``.

    >>> energies = torch.tensor([[0.0, 0.0, torch.inf], [0.0, 3.0, 5.0]])
    >>> free_energy(energies), free_energy(energies, over="minimum")
    (tensor([-0.6931, -0.0550]), tensor([0., 0.]))
    """
    _check_elimination(beta, over)
    if not energies.dim() or not energies.size(dim) or not energies.is_floating_point():
        raise ShapeError(
            f"`energies` must be floating point with at least one z in dimension {dim}, "
            f"got {tuple(energies.shape)} {energies.dtype}"
        )
    if over == "minimum":
        return energies.gather(dim, energies.detach().argmin(dim=dim, keepdim=True)).squeeze(dim)
    none = torch.isposinf(energies.detach()).all(dim=dim, keepdim=True)
    # logsumexp of nothing but -inf is right, but its gradient is none.
    total = (-beta * energies.masked_fill(none, 0.0)).logsumexp(dim=dim) / -beta
    return total.masked_fill(none.squeeze(dim), torch.inf)


class Answers(NamedTuple):
    """The answers to B inputs, best first.

    Attributes:
        answers: ``(B, K, D)``.
        energies: ``(B, K)`` free energies, rising; +inf past the last answer of an item.

    >>> Answers(torch.zeros(1, 2, 1), torch.tensor([[0.0, torch.inf]])).energies.isfinite().sum(1)
    tensor([1])
    """

    answers: Tensor
    energies: Tensor


class LatentEnergy(nn.Module):
    """An energy E(x, y, z) with a latent z of Z values; a subclass gives :meth:`joint` and :meth:`proposals`.

    Args:
        beta: inverse temperature of the sum over z, above 0.
        over: how z is got rid of, ``sum`` or ``minimum``.

    >>> class Fork(LatentEnergy):  # y is x or -x
    ...     def joint(self, inputs, answers):
    ...         return (answers - inputs * torch.tensor([1.0, -1.0])).square()
    >>> Fork(over="minimum")(torch.tensor([[2.0]]), torch.tensor([[-2.0]]))
    tensor([0.])
    """

    def __init__(self, *, beta: float = 1.0, over: Elimination = "sum"):
        super().__init__()
        _check_elimination(beta, over)
        self.beta = beta
        self.over: Elimination = over

    def joint(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """E(x, y, z) for every z: x ``(..., X)`` and y ``(..., D)`` to ``(..., Z)``."""
        raise NotImplementedError(f"{type(self).__name__} must define `joint`")

    def proposals(self, inputs: Tensor) -> Tensor:
        """For each z the y of least E(x, y, z): x ``(B, X)`` to ``(B, Z, D)``."""
        raise NotImplementedError(f"{type(self).__name__} must define `proposals`")

    def forward(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """The free energy F(x, y): ``(..., X)`` and ``(..., D)`` to ``(...)``."""
        return free_energy(self.joint(inputs, answers), self.beta, over=self.over)

    def posterior(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """P(z | x, y), ``(..., Z)``; all on the least energy (the first of equal ones) where z is minimised over."""
        energies = self.joint(inputs, answers)
        if self.over == "sum":
            return (-self.beta * energies).softmax(dim=-1)
        return nn.functional.one_hot(energies.argmin(dim=-1), energies.size(-1)).to(energies.dtype)

    def on_grid(self, inputs: Tensor, grid: Tensor) -> Tensor:
        """F of each x ``(B, X)`` with each y ``(G, D)`` of a grid, ``(B, G)``: a vector over answers."""
        return self(inputs.unsqueeze(1).expand(-1, len(grid), -1), grid.expand(len(inputs), -1, -1))

    def infer(self, inputs: Tensor, *, steps: int = 200, apart: float = 0.1) -> Answers:
        r"""Descend F(x, y) in y from every z's proposal f_z(x); what arrives at the same place is one answer.

        .. math:: y \leftarrow \sum_z P(z \mid x, y)\, f_z(x)

        For bowls of one width, E(x, y, z) = c(x) ||y - f_z(x)||^2 + a_z(x), no such step raises F: the sum over z lies
        below the bowl that touches it at y, whose floor the step goes to (as in EM). Other energies need their own.

        Args:
            inputs: ``(B, X)``.
            steps: at most so many.
            apart: answers nearer than this to a better one are left out, 0 or more.
        Returns:
            :class:`Answers` with K = Z.

        >>> branches = BranchEnergy(1, 1, branches=2, hidden=(4,), scale=0.2)
        >>> branches.infer(torch.zeros(3, 1)).answers.shape
        torch.Size([3, 2, 1])
        """
        if not 0 <= apart < math.inf or steps < 0:
            raise ConfigError(f"`apart` and `steps` must be 0 or more, got {apart} and {steps}")
        with torch.no_grad():
            places = self.proposals(inputs)  # (B, Z, D)
            repeated = inputs.unsqueeze(1).expand(-1, places.size(1), -1)
            ends = places
            for _ in range(steps):
                moved = self.posterior(repeated, ends) @ places
                if torch.equal(moved, ends):
                    break
                ends = moved
            energies, ends = _by_energy(self(repeated, ends), ends)
            kept = _distinct(ends, apart)
            energies, ends = _by_energy(energies.masked_fill(~kept, torch.inf), ends)
            return Answers(ends, energies)


class BranchEnergy(LatentEnergy):
    r"""A learned answer for each value of z, and how much better one z is than another.

    .. math:: E(x, y, z) = \frac{\lVert y - f_z(x) \rVert^2}{2 s^2} + a_z(x)

    with f and a the outputs of one network (tanh). With b = 1, summed over z and normalised over y, it is a mixture of
    Gaussians whose weights are the softmax of -a, and so a mixture density network (Bishop, 1994).

    Args:
        inputs: X, the size of x.
        answers: D, the size of y.
        branches: Z.
        hidden: units of each hidden layer.
        scale: s, above 0: a fixed width, so that only contrast between answers teaches where they are.
        beta, over: as in :class:`LatentEnergy`.

    >>> energy = BranchEnergy(1, 1, branches=3)
    >>> energy(torch.zeros(5, 1), torch.zeros(5, 1)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        inputs: int,
        answers: int,
        *,
        branches: int = 2,
        hidden: tuple[int, ...] = (64, 64),
        scale: float = 0.1,
        beta: float = 1.0,
        over: Elimination = "sum",
    ):
        super().__init__(beta=beta, over=over)
        if min(inputs, answers, branches) < 1 or not 0 < scale < math.inf:
            raise ConfigError(
                "`inputs`, `answers` and `branches` must be at least 1 and `scale` above 0, "
                f"got {inputs}, {answers}, {branches} and {scale}"
            )
        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.places = nn.Linear(widths[-1], branches * answers)
        self.heights = nn.Linear(widths[-1], branches)
        self.shape, self.scale = (branches, answers), scale

    def joint(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """E(x, y, z) for every z, ``(..., Z)``."""
        features = self.body(inputs)
        places = self.places(features).unflatten(-1, self.shape)
        distances = (answers.unsqueeze(-2) - places).square().sum(dim=-1)
        return distances / (2 * self.scale**2) + self.heights(features)

    def on_grid(self, inputs: Tensor, grid: Tensor) -> Tensor:
        """F of each x with each y of a grid, ``(B, G)``; the network runs once for each x."""
        return free_energy(self.joint(inputs.unsqueeze(1), grid), self.beta, over=self.over)

    def proposals(self, inputs: Tensor) -> Tensor:
        """f_z(x), ``(B, Z, D)``."""
        return self.places(self.body(inputs)).unflatten(-1, self.shape)


def _by_energy(energies: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Energies (B, K) rising, and the answers (B, K, D) with them; equal ones keep their order."""
    order = energies.argsort(dim=1, stable=True)
    return energies.gather(1, order), answers.gather(1, order.unsqueeze(2).expand_as(answers))


def _distinct(sorted_answers: Tensor, apart: float) -> Tensor:
    """Which answers (B, K, D) are not near a better one that is kept, (B, K)."""
    near = torch.cdist(sorted_answers, sorted_answers) < apart
    kept = torch.ones_like(near[:, 0])
    for place in range(1, near.size(1)):  # whether one is kept depends on those before it
        kept[:, place] = ~(near[:, place, :place] & kept[:, :place]).any(dim=1)
    return kept


def _check_elimination(beta: float, over: str) -> None:
    if not 0 < beta < math.inf:
        raise ConfigError(f"`beta` must be above 0 and finite, got {beta}")
    if over not in get_args(Elimination):
        raise ConfigError(f"`over` must be `sum` or `minimum`, got `{over}`")
