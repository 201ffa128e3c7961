"""What the dual of a structural SVM knows of one mini-batch: the structures that carry weight, and how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thalweg.errors import DataError, ShapeError
from thalweg.inference.structures.base import Structure

Weights = dict[str, Tensor]
"""The parameters of a model by name."""

Cost = float | Tensor | Callable[[Structure, Tensor], Tensor]
"""What a wrong part costs: see :class:`StructuralSVM`."""

_NOTHING = {torch.float32: 1e-6, torch.float64: 1e-10}  # weights of structures below this are dropped


@dataclass
class Block:
    """B examples: their inputs, their right structures, and K structures each that are mixed with weights.

    Attributes:
        inputs: what the model takes.
        gold: ``(B, *event)``.
        parts: what each part costs, ``(B, *parts)``.
        found: ``(K, B, *event)``; the first is the gold structure when learning begins.
        mixed: ``(K, B)``, 0 or more, 1 in all over K.
        costs: ``(K, B)``, how much each costs more than gold.

    >>> from thalweg.energies import LinearTagger
    >>> tagger = LinearTagger(2, 2)
    >>> block = Block.begin(tagger, (torch.ones(1, 3, 2), torch.tensor([3])), torch.zeros(1, 3).long(), 1.0)
    >>> block.mixed, block.size
    (tensor([[1.]], dtype=torch.float64), 1)
    """

    inputs: Any
    gold: Tensor
    parts: Tensor
    found: Tensor
    mixed: Tensor
    costs: Tensor

    @classmethod
    def begin(cls, model: nn.Module, inputs: Any, gold: Tensor, cost: Cost) -> Block:
        """All weight on gold: the dual's point for weights of 0."""
        structure = structure_of(model, inputs)
        if gold.shape[:1] != structure.batch_shape:
            raise ShapeError(f"gold must have {structure.batch_shape[0]} items as the inputs, got {tuple(gold.shape)}")
        gold = structure.structure_of(structure.parts_of(gold))  # the same past each end, whatever it was
        parts = costs_of_parts(structure, gold, cost)
        ones = parts.new_ones(1, len(gold))
        return cls(inputs, gold, parts, gold.unsqueeze(0).clone(), ones, torch.zeros_like(ones))

    @property
    def size(self) -> int:
        """B."""
        return len(self.gold)

    @property
    def slack(self) -> Tensor:
        """The linear term of the dual: the costs as they are mixed, summed over the block, ()."""
        return (self.mixed * self.costs).sum()

    def with_structures(self, structure: Structure, best: Tensor) -> tuple[Tensor, Tensor]:
        """Take structures ``(B, *event)`` into the mixture with weight 0.

        Returns:
            which of the K each is, ``(B,)``, and which of the K may carry weight ``(K, B)``: one is not held twice.
        """
        held = self.mixed > 0  # the others are left over: not every item holds as many
        same = (self.found == best).flatten(2).all(dim=2) & held  # (K, B)
        known = same.any(dim=0)
        place = torch.where(known, same.int().argmax(dim=0), len(self.found))
        free = torch.cat([held, ~known.unsqueeze(0)])
        self.found = torch.cat([self.found, best.unsqueeze(0)])
        self.mixed = torch.cat([self.mixed, torch.zeros_like(self.mixed[:1])])
        self.costs = torch.cat([self.costs, self._cost_of(structure, best).unsqueeze(0)])
        return place, free

    def _cost_of(self, structure: Structure, chosen: Tensor) -> Tensor:
        """How much structures ``(B, *event)`` cost more than gold, (B,)."""
        extra = structure.parts_of(chosen) - structure.parts_of(self.gold)
        return torch.where(extra != 0, extra * self.parts, 0.0).flatten(1).sum(dim=1)

    def drop(self) -> None:
        """Forget structures without weight; those left are ordered by it."""
        least = _NOTHING.get(self.mixed.dtype, 1e-6)
        order = self.mixed.argsort(dim=0, descending=True, stable=True)
        mixed = self.mixed.gather(0, order)
        kept = max(1, int((mixed > least).sum(dim=0).max()))
        order = order[:kept]
        mixed = torch.where(mixed[:kept] > least, mixed[:kept], 0.0)
        self.mixed, self.costs = mixed / mixed.sum(dim=0), self.costs.gather(0, order)
        spread = order.view(*order.shape, *[1] * (self.found.dim() - 2)).expand(-1, *self.found.shape[1:])
        self.found = self.found.gather(0, spread)


def structure_of(model: nn.Module, inputs: Any, weights: Weights | None = None) -> Structure:
    """The structure of some inputs under the model's own weights, or under others."""
    structure = model(inputs) if weights is None else functional_call(model, weights, (inputs,))
    if not isinstance(structure, Structure):
        raise ShapeError(f"the model must give a Structure, got {type(structure).__name__}")
    return structure


def costs_of_parts(structure: Structure, gold: Tensor, cost: Cost) -> Tensor:
    """What each part costs, ``(B, *parts)``.

    >>> from thalweg.inference import LinearChain
    >>> chain = LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2))
    >>> costs_of_parts(chain, torch.tensor([[0, 1]]), torch.tensor([[0.0, 3.0], [1.0, 0.0]]))
    tensor([[[0., 3.],
             [1., 0.]]])
    """
    right = structure.parts_of(gold)
    if not isinstance(cost, Tensor) and callable(cost):
        parts = cost(structure, gold)
    elif isinstance(cost, Tensor):
        labels = right.shape[-1]
        if cost.shape != (labels, labels):
            raise ShapeError(f"`cost` must be (C, C) with C = {labels} labels, got {tuple(cost.shape)}")
        parts = right @ cost.to(right)
    else:
        parts = cost * (1 - right)
    if not isinstance(parts, Tensor) or parts.shape != right.shape:
        got = tuple(parts.shape) if isinstance(parts, Tensor) else type(parts).__name__
        raise ShapeError(f"`cost` must give {tuple(right.shape)} as the marginals, got {got}")
    inside = structure.inside.expand(parts.shape)
    if not bool(parts[inside].isfinite().all()):
        raise ShapeError("`cost` must be finite for every part of an item, got one that is not")
    return torch.where(inside, parts, 0.0).to(right.dtype)


def offending(structure: Structure, block: Block) -> tuple[Tensor, Tensor]:
    """The structure of greatest cost plus score of each example, and its lead over gold: the hinge loss, (B,)."""
    augmented = structure.plus(block.parts)
    best = augmented.mode
    lead = augmented.score(best) - augmented.score(block.gold)
    return best, lead.clamp(min=0)


def blocks_of(model: nn.Module, batches: Iterable[tuple[Any, Tensor]], cost: Cost) -> list[Block]:
    """A block for each batch of inputs and gold structures."""
    blocks = []
    with torch.no_grad():
        for number, batch in enumerate(batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
                raise DataError(f"batch {number} must be a pair of inputs and a tensor of gold structures, got another")
            if not len(batch[1]):
                raise DataError(f"batch {number} must have examples, got none; leave it out")
            blocks.append(Block.begin(model, *batch, cost))
    if not blocks:
        raise DataError("learning needs batches of examples, got none")
    return blocks
