"""What a branch-and-bound search has still to look at, for many items at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Open nodes of an item above which the deepest come first: depth first holds no more than O(max_length V) more.
_CROWDED = 1 << 15


@dataclass(frozen=True, eq=False)
class Nodes:
    """M partial sequences: continuations by one symbol of the R rows of a state.

    >>> root = torch.empty(1, 0, dtype=torch.long)
    >>> one = torch.tensor([0])
    >>> Nodes(None, root, one, torch.tensor([7]), torch.tensor([-0.5]), one).depth
    1
    """

    state: Any
    """The model's, of R rows, before ``symbols`` are fed."""
    past: Tensor
    """``(R, t - 1)`` symbols of those rows."""
    rows: Tensor
    """``(M,)`` row of the state that each node continues."""
    symbols: Tensor
    """``(M,)`` the symbol it continues it with; bos at the root."""
    scores: Tensor
    """``(M,)`` log-probabilities, the symbol's included."""
    items: Tensor
    """``(M,)`` item of each node."""
    root: bool = False
    """True where ``symbols`` are bos, which is no part of a sequence."""

    @property
    def depth(self) -> int:
        """Symbols t of each partial sequence."""
        return 0 if self.root else self.past.size(1) + 1

    def tokens(self) -> Tensor:
        """The partial sequences ``(M, t)``, without bos."""
        past = self.past[self.rows]
        return past if self.root else torch.cat([past, self.symbols.unsqueeze(1)], dim=1)

    def at(self, which: Tensor) -> Nodes:
        """Some of the nodes, by mask or number; the state is shared."""
        return replace(
            self,
            rows=self.rows[which],
            symbols=self.symbols[which],
            scores=self.scores[which],
            items=self.items[which],
        )


class Agenda:
    """Open nodes in blocks, because a model can only step rows of one state together.

    A block is what one step has left open of all items. An item's next nodes are the best of its block with the best
    score, whatever other items do, so that a search of many items is for each what it would be alone. Of all blocks
    the one that is next for most items is taken, and from it those items' nodes.

    Args:
        items: number of items; they are 0 ... items - 1.
        together: most nodes of an item that are taken at once.
        device, dtype: of the scores.

    Adding M nodes costs O(M log M), taking some O(E + M) for E pairs of a block and an item in it.

    >>> agenda = Agenda(1, 2, torch.device("cpu"), torch.float32)
    >>> zero = torch.tensor([0, 0, 0])
    >>> past = torch.empty(1, 0, dtype=torch.long)
    >>> agenda.add(Nodes(None, past, zero, torch.tensor([4, 5, 6]), torch.tensor([-3.0, -1.0, -2.0]), zero))
    >>> bound = torch.tensor([-2.5])
    >>> agenda.take(bound).symbols, agenda.take(bound)
    (tensor([5, 6]), None)
    """

    def __init__(self, items: int, together: int, device: torch.device, dtype: torch.dtype) -> None:
        self.together = together
        self.blocks: dict[int, Nodes] = {}
        self.made = 0
        self.none = torch.full((items,), -math.inf, dtype=dtype, device=device)
        self.zero = torch.zeros(items, dtype=torch.long, device=device)
        # One entry for each pair of a block and an item that has nodes in it.
        self.item = torch.empty(0, dtype=torch.long, device=device)
        self.block, self.depth, self.count = self.item, self.item, self.item
        self.best = torch.empty(0, dtype=dtype, device=device)

    def add(self, nodes: Nodes) -> None:
        """Open ``nodes``, a block of their own."""
        if len(nodes.rows) == 0:
            return
        by_score = nodes.scores.argsort(descending=True, stable=True)
        nodes = nodes.at(by_score[nodes.items[by_score].argsort(stable=True)])
        self.blocks[self.made] = nodes
        self._enter(self.made, nodes.depth, nodes.items, nodes.scores)
        self.made += 1

    def take(self, bound: Tensor) -> Nodes | None:
        """The next nodes, sorted by item and score, of those above ``bound`` (items,); None when there are none."""
        self._keep(self.best > bound[self.item])
        if len(self.item) == 0:
            return None
        chosen = self._next()
        number = int(torch.bincount(chosen, minlength=self.made + 1)[: self.made].argmax())
        taken = chosen == number  # (items,)
        block = self.blocks[number]
        block = block.at(block.scores > bound[block.items])
        mine = taken[block.items]
        picked = mine & (positions(block.items, len(taken)) < self.together)
        # What is left of a block stays, and its items' entries are written anew.
        here = (self.block == number) & taken[self.item]
        left = mine & ~picked
        self.blocks[number] = block.at(~picked)
        self._enter(number, block.depth, block.items[left], block.scores[left])
        self._keep(torch.cat([~here, here.new_ones(len(self.item) - len(here))]))
        return block.at(picked)

    def give_up(self, which: Tensor) -> Tensor:
        """Forget the nodes of the items ``which`` (items,); the best score of each, -inf where it had none."""
        best = self.none.scatter_reduce(0, self.item, self.best, "amax").masked_fill(~which, -math.inf)
        self._keep(~which[self.item])
        return best

    def _next(self) -> Tensor:
        """The block (items,) from which each item goes on; ``made`` for an item with none."""
        crowded = self.zero.scatter_add(0, self.item, self.count) > _CROWDED
        deepest = self.zero.scatter_reduce(0, self.item, self.depth, "amax")
        waits = crowded[self.item] & (self.depth < deepest[self.item])
        key = self.best.masked_fill(waits, -math.inf)
        first = key == self.none.scatter_reduce(0, self.item, key, "amax")[self.item]
        # Of an item's tied blocks, the one made first.
        chosen = torch.full_like(self.zero, self.made)
        return chosen.scatter_reduce_(0, self.item[first], self.block[first], "amin")

    def _enter(self, number: int, depth: int, items: Tensor, scores: Tensor) -> None:
        item, count = torch.unique_consecutive(items, return_counts=True)
        self.item = torch.cat([self.item, item])
        self.count = torch.cat([self.count, count])
        self.best = torch.cat([self.best, scores[count.cumsum(0) - count]])
        self.block = torch.cat([self.block, torch.full_like(item, number)])
        self.depth = torch.cat([self.depth, torch.full_like(item, depth)])

    def _keep(self, which: Tensor) -> None:
        """Drop all other entries, and the blocks that no entry is left for, with their states."""
        before = len(self.item)
        self.item, self.block, self.depth = self.item[which], self.block[which], self.depth[which]
        self.count, self.best = self.count[which], self.best[which]
        if len(self.item) < before:
            alive = set(self.block.unique().tolist())
            for number in [number for number in self.blocks if number not in alive]:
                del self.blocks[number]


def positions(items: Tensor, number: int) -> Tensor:
    """How many earlier entries of ``items`` (M,), which rise from 0 to below ``number``, are equal to each.

    >>> positions(torch.tensor([0, 0, 2, 2, 2]), 3)
    tensor([0, 1, 0, 1, 2])
    """
    counts = torch.bincount(items, minlength=number)
    return torch.arange(len(items), device=items.device) - (counts.cumsum(0) - counts)[items]
