"""Choosing contrasts: the wrong answers whose energies a loss pushes up.

Each function gives a :class:`Contrast`, whose energies are what the pair losses of :mod:`thalweg.learning.losses` take.
A place without a contrast has the energy +inf, which those losses do not see.

>>> from thalweg.learning.losses import hinge
>>> energies = torch.tensor([[0.0, 0.5, 3.0]], requires_grad=True)
>>> hinge(energies[:, 0], most_offending(energies, torch.tensor([0])).energies)
tensor([0.5000], grad_fn=<SumBackward1>)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import Hypotheses
from thalweg.inference.structures.base import Structure
from thalweg.layers.padded import Padded
from thalweg.learning.losses import gibbs


class Contrast(NamedTuple):
    """K wrong answers for each of B items.

    >>> Contrast(torch.tensor([[0.5]]), torch.tensor([[2]])).answers
    tensor([[2]])
    """

    energies: Tensor
    """``(B, K)``, +inf where there is none; differentiable unless said otherwise."""
    answers: Tensor
    """``(B, K)`` of vectors, ``(B, K, ...)`` of structures and sequences; -1 where there is none."""


def most_offending(energies: Tensor | Structure, gold: Tensor, k: int = 1) -> Contrast:
    r"""The k wrong answers of lowest energy, lowest first.

    Args:
        energies: ``(B, C)``, or a structure, whose k + 1 best are searched (``top_k``).
        gold: ``(B,)`` int64, or structures ``(B, ...)``.
        k: at least 1.

    Time O(B C log k) of vectors. Of equal energies the first answer comes first.

    >>> most_offending(torch.tensor([[0.0, 2.0, 1.0, torch.inf]]), torch.tensor([0]), k=3)
    Contrast(energies=tensor([[1., 2., inf]]), answers=tensor([[ 2,  1, -1]]))
    """
    if k < 1:
        raise ConfigError(f"`k` must be at least 1, got {k}")
    if isinstance(energies, Structure):
        return _best_structures(energies, gold, k)
    wrong = _wrong(energies, gold)
    kept = min(k, wrong.size(1))
    # Stable, so that equal energies keep their order.
    order = wrong.detach().sort(dim=1, stable=True).indices[:, :kept]
    chosen = wrong.gather(1, order)
    answers = order.masked_fill(torch.isposinf(chosen), -1)
    missing = (0, k - kept)
    return Contrast(
        torch.nn.functional.pad(chosen, missing, value=torch.inf), torch.nn.functional.pad(answers, missing, value=-1)
    )


def _best_structures(structure: Structure, gold: Tensor, k: int) -> Contrast:
    scores, found = structure.top_k(k + 1)
    right = _same_structures(found, gold.unsqueeze(1))
    energies = (-scores).masked_fill(right, torch.inf)
    # Gold is among the k + 1 at most once: without it, or without the last, k are left in their order.
    order = (right | torch.isposinf(energies.detach())).long().sort(dim=1, stable=True).indices[:, :k]
    chosen = energies.gather(1, order)
    shape = (len(order), k, *([1] * (found.dim() - 2)))
    answers = found.gather(1, order.view(shape).expand(-1, -1, *found.shape[2:]))
    return Contrast(chosen, answers.masked_fill(torch.isposinf(chosen.detach()).view(shape), -1))


def sampled(
    energies: Tensor | Structure,
    gold: Tensor,
    n: int = 1,
    *,
    beta: float = 1.0,
    generator: torch.Generator | None = None,
) -> Contrast:
    r"""n draws, with replacement, from the Gibbs distribution over the wrong answers.

    .. math:: P(y' \mid y' \ne y) \propto \exp(-\beta F(x, y'))

    Args:
        energies: ``(B, C)``, or a structure. A structure is sampled as it is, and a draw that is gold counts as none:
            fewer than n may be left.
        gold: ``(B,)`` int64, or structures ``(B, ...)``.
        n: at least 1.
        beta: inverse temperature, 0 or more (above 0 for structures).
        generator: the source of randomness; torch's own by default.

    >>> sampled(torch.tensor([[0.0, torch.inf, 1.0]]), torch.tensor([0]), n=2)
    Contrast(energies=tensor([[1., 1.]]), answers=tensor([[2, 2]]))
    """
    if n < 1:
        raise ConfigError(f"`n` must be at least 1, got {n}")
    if isinstance(energies, Structure):
        return _drawn_structures(energies, gold, n, beta, generator)
    wrong = _wrong(energies, gold)
    none = torch.isposinf(wrong.detach()).all(dim=1, keepdim=True)
    shares = gibbs(wrong.detach().masked_fill(none, 0.0), beta)  # where there is no wrong answer, any draw will do
    draws = _draw(shares, n, generator)
    return Contrast(wrong.gather(1, draws), draws.masked_fill(none, -1))


def _draw(shares: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    if not len(shares):
        return torch.zeros(0, n, dtype=torch.long, device=shares.device)
    return torch.multinomial(shares, n, replacement=True, generator=generator)


def _drawn_structures(structure: Any, gold: Tensor, n: int, beta: float, generator: torch.Generator | None) -> Contrast:
    if not 0 < beta < math.inf:
        raise ConfigError(f"`beta` must be above 0 and finite, got {beta}")
    flatter = structure if beta == 1 else structure.tempered(1 / beta)
    with torch.no_grad():
        found = flatter.sample((n,), generator=generator)  # (n, B, ...)
    energies = structure.energy(found).transpose(0, 1)
    found = found.transpose(0, 1)
    right = _same_structures(found, gold.unsqueeze(1))
    answers = found.masked_fill(right.view(*right.shape, *([1] * (found.dim() - 2))), -1)
    return Contrast(energies.masked_fill(right, torch.inf), answers)


def from_hypotheses(found: Hypotheses, gold: Padded | Tensor) -> Contrast:
    """The finished hypotheses of a search that are not the right answer, with energy -log p as the search scored them.

    The energies carry no gradient: :mod:`thalweg.learning.losses.sequences` computes them anew with one.

    Args:
        found: the k best of a search.
        gold: ``(B, T)`` the right symbols with their end, as :class:`Padded` or with -1 as padding.

    >>> from thalweg.inference import TableModel, beam_search
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> found = beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=4)
    >>> from_hypotheses(found, torch.tensor([[2, -1]])).energies
    tensor([[ inf, 1.2000]], dtype=torch.float64)
    """
    tokens = gold.tokens.masked_fill(~gold.mask, -1) if isinstance(gold, Padded) else gold
    none = ~found.finished | (found.lengths == 0) | same_sequences(found.tokens, tokens)
    energies = (-found.scores).masked_fill(none, torch.inf)
    return Contrast(energies, found.tokens.masked_fill(none.unsqueeze(2), -1))


def same_sequences(tokens: Tensor, gold: Tensor) -> Tensor:
    """Which of the sequences ``(B, K, T)`` are gold's ``(B, T')``, both padded with -1; ``(B, K)`` bool.

    >>> same_sequences(torch.tensor([[[5, 3, -1], [5, -1, -1]]]), torch.tensor([[5, 3]]))
    tensor([[ True, False]])
    """
    width = max(tokens.size(2), gold.size(1))
    tokens, gold = (torch.nn.functional.pad(x, (0, width - x.size(-1)), value=-1) for x in (tokens, gold))
    return (tokens == gold.unsqueeze(1)).all(dim=2)


def from_sampler(
    energy: Callable[[Tensor], Tensor],
    start: Tensor,
    sampler: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> Contrast:
    """Contrasts for continuous answers: what a sampler such as Langevin's makes of ``start``.

    The answers are constants to the loss, the energies are not: their gradient goes to the energy's parameters alone
    (contrastive divergence where ``start`` is the data; persistent where it is what the last call gave).

    Args:
        energy: answers ``(B, ...)`` to energies ``(B,)``.
        start: ``(B, ...)``.
        sampler: ``(energy, start) -> answers`` of the shape of ``start``.

    >>> downhill = lambda energy, y: y - 0.5 * torch.func.grad(lambda z: energy(z).sum())(y)
    >>> from_sampler(lambda y: y.square().sum(dim=1), torch.tensor([[2.0, 0.0]]), downhill)
    Contrast(energies=tensor([[0.]]), answers=tensor([[[0., 0.]]]))
    """
    found = sampler(energy, start.detach())
    if found.shape != start.shape:
        raise ShapeError(
            f"`sampler` must give answers of the shape of `start`, {tuple(start.shape)}, got {tuple(found.shape)}"
        )
    found = found.detach()
    energies = energy(found)
    if energies.shape != found.shape[:1]:
        raise ShapeError(f"`energy` must give (B,) = ({len(found)},), got {tuple(energies.shape)}")
    return Contrast(energies.unsqueeze(1), found.unsqueeze(1))


def _wrong(energies: Tensor, gold: Tensor) -> Tensor:
    """The energies with +inf at the right answer."""
    if energies.dim() != 2 or gold.shape != energies.shape[:1] or gold.is_floating_point():
        raise ShapeError(
            f"`energies` must be (B, C) and `gold` (B,) int64, got {tuple(energies.shape)} and {tuple(gold.shape)}"
        )
    own = torch.arange(energies.size(1), device=energies.device) == gold.unsqueeze(1)
    return energies.masked_fill(own, torch.inf)


def _same_structures(found: Tensor, gold: Tensor) -> Tensor:
    """Which structures (B, K, ...) are gold's; they have -1 past their length, where gold may hold anything."""
    same = (found == gold) | (found < 0)
    return same.flatten(2).all(dim=2)
