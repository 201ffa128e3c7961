r"""The Fisher information of a sequence, :math:`I = \mathbb{E}[U U^\top]` for scores U, where it is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from thalweg.energies.derivatives.chains import ChainDerivatives, wide
from thalweg.energies.derivatives.gaussians import Gaussians
from thalweg.energies.derivatives.mixtures import MixtureDerivatives
from thalweg.energies.hmm.emissions import CategoricalEmission
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.errors import ConfigError

# Quadrature in pieces of half a standard deviation of each component, up to where nothing is left of it.
_PIECES, _FARTHEST, _NODES = 0.5, 12.0, 16


def exact_information(
    ways: MixtureDerivatives | ChainDerivatives, of: Sequence[str], lengths: Tensor, scales: Tensor
) -> Tensor:
    """The mean of scale^2 I(length) over sequences ``(B,)`` of given lengths, ``(F, F)`` float64.

    - One Gaussian, as a mixture or a chain of one state: in closed form.
    - A mixture of numbers (D = 1): the integral over x by Gauss-Legendre quadrature, to about ten digits in float64.
    - A chain of symbols each of which one state alone emits, a Markov chain among them: in closed form, from the
      expected number of visits of each state.

    Anything else is a ConfigError: no closed form is known, and the integral has as many dimensions as the data.

    >>> from thalweg.energies.hmm.model import HMM
    >>> coin = ChainDerivatives(HMM([1.0], [[1.0]], [[0.5, 0.5]]))
    >>> exact_information(coin, ["emissions"], torch.tensor([4.0]), torch.ones(1))
    tensor([[ 1., -1.],
            [-1.,  1.]], dtype=torch.float64)
    """
    lengths, squares = lengths.double(), scales.double().square()
    if isinstance(ways, MixtureDerivatives):
        return _of_mixture(ways, of) * (lengths * squares).mean().to(ways.weights.device)
    emission, blocks = ways.parts.emission, dict[str, Tensor]()
    if isinstance(emission, CategoricalEmission) and _told(ways, emission):
        blocks = _of_told_chain(ways, emission, lengths, squares)
    elif len(ways.start) == 1 and hasattr(ways, "gaussians") and not isinstance(emission, MixtureEmission):
        blocks = _of_gaussian(ways.gaussians, (lengths * squares).mean())
        blocks |= {"initial": torch.zeros(1, 1), "transitions": torch.zeros(1, 1)}
    if not blocks:
        raise _unknown(f"an HMM of {len(ways.start)} states with {type(emission).__name__}")
    return torch.block_diag(*(blocks[name].to(ways.start) for name in of))


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        "the information is known exactly for one Gaussian, for a mixture in one dimension and for a chain whose "
        f"symbols tell its states, not for {what}; use `whiten` `empirical` or `diagonal`"
    )


def _of_mixture(ways: MixtureDerivatives, of: Sequence[str]) -> Tensor:
    """Of one point."""
    N, D = ways.gaussians.means.shape
    if N == 1:
        blocks = {"weights": torch.zeros(1, 1)} | _of_gaussian(ways.gaussians, torch.ones(()))
        return torch.block_diag(*(blocks[name].to(ways.weights) for name in of))
    if D > 1:
        raise _unknown(f"{N} components in {D} dimensions")
    places, widths = _quadrature(ways.gaussians)
    points = places.view(-1, 1, 1)
    density = ways.log_joint(points[:, 0]).logsumexp(dim=1).exp()
    scores = ways(points, None, of)
    return scores.mT @ (scores * (density * widths).unsqueeze(1))


def _of_gaussian(gaussians: Gaussians, count: Tensor) -> dict[str, Tensor]:
    """Of so many points of one Gaussian; means and variances tell nothing of one another."""
    precision, D = gaussians.precisions[0], gaussians.means.size(1)
    if precision.dim() == 1:
        halves = 0.5 * precision.square()
        spread = halves.sum().view(1, 1) if gaussians.shape == "spherical" else halves.diag()
        return {"means": count * precision.diag(), "variances": count * spread}
    rows, columns = torch.tril_indices(D, D, device=precision.device)
    unit = torch.eye(D, dtype=precision.dtype, device=precision.device)
    # The symmetric matrices along which the lower triangle moves.
    steps = unit[rows].unsqueeze(2) * unit[columns].unsqueeze(1)
    steps = torch.where((rows == columns).view(-1, 1, 1), steps, steps + steps.mT)
    moved = precision @ steps
    return {"means": count * precision, "variances": count * 0.5 * torch.einsum("aij,bji->ab", moved, moved)}


def _quadrature(gaussians: Gaussians) -> tuple[Tensor, Tensor]:
    """Places and widths over the line, fine where any of the components is narrow."""
    import numpy as np

    means, deviations = gaussians.means, gaussians.precisions.view(-1, 1).rsqrt()
    marks = torch.arange(-_FARTHEST, _FARTHEST + _PIECES, _PIECES, dtype=torch.float64, device=means.device)
    ends = (means + deviations * marks).flatten().unique()
    nodes, weights = (torch.from_numpy(each).to(ends) for each in np.polynomial.legendre.leggauss(_NODES))
    half = ends.diff().unsqueeze(1) / 2
    return (ends[:-1].unsqueeze(1) + half * (1 + nodes)).flatten(), (half * weights).flatten()


def _told(ways: ChainDerivatives, emission: CategoricalEmission) -> bool:
    """Whether each symbol is emitted by one state alone."""
    possible = wide(emission.log_table).exp() > 0
    return ways.parts.kinds is None and bool((possible.sum(dim=0) <= 1).all())


def _of_told_chain(
    ways: ChainDerivatives, emission: CategoricalEmission, lengths: Tensor, squares: Tensor
) -> dict[str, Tensor]:
    """Choices are independent once the state is known: each row's information counts as often as it is visited."""
    start, moves, table = ways.start.exp(), ways.moves.exp(), wide(emission.log_table).exp()
    longest = int(lengths.max())
    here, visits = start, [torch.zeros_like(start)]
    for _ in range(longest):
        visits.append(visits[-1] + here)
        here = here @ moves
    total = torch.stack(visits)  # (T + 1, C)
    until = lengths.long().to(total.device)
    squares = squares.to(total).unsqueeze(1)
    left, seen = ((squares * total[places]).mean(dim=0) for places in (until - 1, until))
    transitions = _of_choices(moves, left)
    states = ways.parts.states
    if states.sparse:
        chosen = cast(Tensor, states.sources) * len(start) + cast(Tensor, states.targets)
        transitions = transitions[chosen][:, chosen]
    first = _of_choices(start.unsqueeze(0), squares.mean().view(1))
    return {"initial": first, "transitions": transitions, "emissions": _of_choices(table, seen)}


def _of_choices(rows: Tensor, counts: Tensor) -> Tensor:
    """Of so many draws from each row of probabilities ``(K, V)``, in its logits: ``(K V, K V)``."""
    each = rows.diag_embed() - rows.unsqueeze(2) * rows.unsqueeze(1)
    return torch.block_diag(*(counts.view(-1, 1, 1) * each))
