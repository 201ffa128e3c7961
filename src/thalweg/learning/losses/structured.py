r"""Losses of structures: energies whose answers are too many to list, by exact inference.

They ask of a :class:`~thalweg.inference.Structure` what its contract has, and work for every one.

A cost is a sum over parts: that of y is :math:`\Delta(y) = \sum_{p \in y} c_p - \sum_{p \in gold} c_p`,
with c of the shape of the marginals. A number w is the Hamming cost, w for each part of y that gold has not; for a
chain the number of wrong labels times w. Each loss costs one inference and its gradient, O(B T C^2) for chains.

>>> from thalweg.inference import LinearChain
>>> chain = LinearChain(torch.tensor([[[2.0, 0.0], [0.0, 0.5]]]), torch.zeros(2, 2))
>>> structured_hinge(chain, torch.tensor([[0, 1]]))  # the second label leads by half of what it costs
tensor([0.5000])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.inference.structures.base import Structure
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.sparsemap import sparse_map_loss

_MAPS = ("softmax", "sparsemap")


def cost_augmented(structure: Structure, gold: Tensor, cost: Tensor | float = 1.0) -> Structure:
    """The structure in which every y scores its cost more: its mode is the most offending y.

    Args:
        structure: B items.
        gold: the right structures, (B, ...).
        cost: of each part, as the marginals; or a number, what each part costs that gold has not.

    >>> chain = LinearChain(torch.tensor([[[0.5, 0.0]]]), torch.zeros(2, 2))
    >>> cost_augmented(chain, torch.tensor([[0]])).max_score
    tensor([1.])
    """
    if not isinstance(cost, Tensor):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"`cost` must be 0 or more and finite, got {cost}")
        cost = cost * (1 - structure.parts_of(gold))
    return structure.plus(cost)


def nll(structure: Structure, gold: Tensor, beta: float = 1.0) -> Tensor:
    r"""-log p(y) / beta under p(y) ~ exp(beta score(y)), (B,); the loss of conditional random fields.

    The gradient in the scores of the parts is the marginals less the parts of gold. Lafferty et al. (2001).

    >>> nll(LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2)), torch.tensor([[0, 1, 0]])) / math.log(2)
    tensor([3.])
    """
    return -_tempered(structure, beta).log_prob(gold) / beta


def perceptron(structure: Structure, gold: Tensor) -> Tensor:
    r"""max_y score(y) - score(gold), (B,): zero where gold is the mode.

    The gradient is the parts of the mode less those of gold: the structured perceptron's step. Collins (2002).

    >>> perceptron(LinearChain(torch.tensor([[[0.0, 3.0]]]), torch.zeros(2, 2)), torch.tensor([[0]]))
    tensor([3.])
    """
    # Strictly above: where gold ties with the mode, up to rounding, there is nothing to learn.
    return (structure.max_score - structure.score(gold)).relu()


def structured_hinge(structure: Structure, gold: Tensor, cost: Tensor | float = 1.0) -> Tensor:
    r"""max_y (score(y) + cost(y)) - score(gold), (B,): zero where gold leads every y by its cost.

    The mode of the cost-augmented structure gives it exactly. Taskar et al. (2003), Tsochantaridis et al. (2005).
    Arguments as in :func:`cost_augmented`.

    >>> structured_hinge(LinearChain(torch.tensor([[[0.25, 0.0]]]), torch.zeros(2, 2)), torch.tensor([[0]]))
    tensor([0.7500])
    """
    return perceptron(cost_augmented(structure, gold, cost), gold)


def softmax_margin(structure: Structure, gold: Tensor, cost: Tensor | float = 1.0, beta: float = 1.0) -> Tensor:
    r"""(1 / beta) log sum_y exp(beta (score(y) + cost(y))) - score(gold), (B,).

    The log-partition of the cost-augmented structure gives it exactly. Gimpel and Smith (2010). Arguments as in
    :func:`cost_augmented`; beta: inverse temperature, towards infinity it is :func:`structured_hinge`.

    >>> softmax_margin(LinearChain(torch.tensor([[[1.0, 0.0]]]), torch.zeros(2, 2)), torch.tensor([[0]]))
    tensor([0.6931])
    """
    return nll(cost_augmented(structure, gold, cost), gold, beta)


def fenchel_young(structure: Structure, gold: Tensor, map: str | float = "softmax") -> Tensor:
    r"""The Fenchel-Young loss of a map from scores to expected parts, (B,).

    ``softmax`` regularises by the entropy of the distribution over structures: the conjugate is log Z, the map the
    marginals, the loss :func:`nll`. ``sparsemap`` regularises by half the square of the unary marginals, and is zero
    where gold leads every y by the number of parts in which they differ (chains;
    :func:`~thalweg.inference.structures.sparsemap.sparse_map_loss`). Blondel, Martins and Niculae (2020).

    >>> chain = LinearChain(torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), torch.zeros(2, 2))
    >>> fenchel_young(chain, torch.tensor([[0], [1]]), "sparsemap")
    tensor([0.0000, 0.2500])
    """
    if map == "softmax":
        return nll(structure, gold)
    if map != "sparsemap":
        raise ConfigError(f"map `{map}` is not one of structures; {nearest(str(map), _MAPS)}")
    if not isinstance(structure, LinearChain):
        raise ConfigError(f"map `sparsemap` is for a LinearChain, got {type(structure).__name__}; use `softmax`")
    return sparse_map_loss(structure, gold)


def risk(structure: Structure, gold: Tensor, cost: Tensor | float = 1.0, beta: float = 1.0) -> Tensor:
    r"""The expected cost under p(y) ~ exp(beta score(y)), (B,): for chains the expected number of wrong labels.

    A sum over parts of marginal times cost, differentiable through the marginals. Arguments as in
    :func:`cost_augmented`.

    >>> risk(LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2)), torch.tensor([[0, 1, 0]]))
    tensor([1.5000])
    """
    gold_parts = structure.parts_of(gold)
    marginals = _tempered(structure, beta).marginals
    costs = cost * (1 - gold_parts) if not isinstance(cost, Tensor) else cost.to(marginals.dtype)
    if costs.shape != marginals.shape:
        raise ShapeError(
            f"`cost` must be as the marginals, {tuple(marginals.shape)}, or a number, got {tuple(costs.shape)}"
        )
    # What has no probability may cost anything, padding above all.
    seen = (marginals.detach() > 0) | (gold_parts > 0)
    return ((marginals - gold_parts) * torch.where(seen, costs, 0.0)).flatten(1).sum(dim=1)


def _tempered(structure: Structure, beta: float) -> Structure:
    if not 0 < beta < math.inf:
        raise ConfigError(f"`beta` must be above 0 and finite, got {beta}")
    return structure if beta == 1 else structure.tempered(1 / beta)
