"""The scores of a linear chain as every backend takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ShapeError


class SparseTransitions(NamedTuple):
    """The permitted moves of a chain as a list of E edges; every move not listed is impossible (score -inf).

    Edge e goes from label ``sources[e]`` to ``targets[e]`` with score ``scores[e]``. Edges are distinct and sorted by
    target, then source; :meth:`of_edges` sees to both. Work and memory follow E, never C^2.

    >>> moves = SparseTransitions.of_edges([0, 0, 1], [1, 0, 1], torch.tensor([1.0, 2.0, 3.0]), size=2)
    >>> moves.dense()
    tensor([[2., 1.],
            [-inf, 3.]])
    """

    sources: Tensor  # (E,) int64
    targets: Tensor  # (E,) int64
    scores: Tensor  # (E,)
    size: int  # C

    @classmethod
    def of_edges(cls, sources: Tensor | list[int], targets: Tensor | list[int], scores: Tensor, *, size: int):
        """Edges in any order, each at most once; differentiable in ``scores``.

        >>> SparseTransitions.of_edges([1], [0], torch.zeros(1), size=2).sources
        tensor([1])
        """
        ends = [torch.as_tensor(x, dtype=torch.long, device=scores.device) for x in (sources, targets)]
        given = cls._make((*ends, scores, size))
        keys, order = given._keys().sort()
        twice = keys[1:][keys[1:] == keys[:-1]]
        if len(twice):
            pair = f"{int(twice[0]) % size} -> {int(twice[0]) // size}"
            raise ShapeError(f"each edge may be listed once, got {pair} twice; add the scores up first")
        return cls(given.sources[order], given.targets[order], scores[order], size)

    def checked(self):
        """The same with indices of its own, or a ShapeError: kernels follow them, and anyone can build this directly.

        >>> SparseTransitions(torch.tensor([7]), torch.tensor([0]), torch.zeros(1), 2).checked()
        Traceback (most recent call last):
        ...
        thalweg.errors.ShapeError: labels of edges must lie in 0..1, got 7 -> 0 at edge 0
        """
        own = self._make((*(x.clone() if isinstance(x, Tensor) else x for x in self[:2]), *self[2:]))
        keys = own._keys()
        if bool((keys[1:] <= keys[:-1]).any()):
            raise ShapeError(
                "edges must be distinct and sorted by target, then source; make them by SparseTransitions.of_edges"
            )
        return own

    def _keys(self) -> Tensor:
        """The place of each edge in a matrix by target, then source; a ShapeError for what cannot be edges."""
        sources, targets, scores, size = self
        flat = all(isinstance(x, Tensor) and x.dim() == 1 for x in self[:3])
        if not flat or not len(sources) == len(targets) == len(scores):
            shapes = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in self[:3])
            raise ShapeError(f"`sources`, `targets` and `scores` must be tensors (E,) with the same E, got {shapes}")
        if not sources.dtype == targets.dtype == torch.long or not scores.is_floating_point():
            found = f"{sources.dtype}, {targets.dtype} and {scores.dtype}"
            raise ShapeError(f"`sources` and `targets` must be int64 and `scores` of a floating type, got {found}")
        if not sources.device == targets.device == scores.device:
            found = f"{sources.device} and {targets.device}"
            raise ShapeError(f"`sources` and `targets` must lie on {scores.device} as `scores` does, got {found}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(f"`size` must be an integer of at least 1, got {size!r}")
        outside = (sources < 0) | (sources >= size) | (targets < 0) | (targets >= size)
        if bool(outside.any()):
            edge = int(outside.nonzero()[0])
            pair = f"{int(sources[edge])} -> {int(targets[edge])}"
            raise ShapeError(f"labels of edges must lie in 0..{size - 1}, got {pair} at edge {edge}")
        return targets * size + sources

    @classmethod
    def of_dense(cls, transitions: Tensor):
        """The entries of a (C, C) matrix that are not -inf.

        >>> SparseTransitions.of_dense(torch.tensor([[0.0, float("-inf")], [1.0, 2.0]])).scores
        tensor([0., 1., 2.])
        """
        if transitions.dim() != 2 or transitions.shape[0] != transitions.shape[1]:
            raise ShapeError(f"`transitions` must be (C, C), got {tuple(transitions.shape)}")
        targets, sources = torch.isneginf(transitions).logical_not().t().nonzero(as_tuple=True)
        return cls(sources.contiguous(), targets.contiguous(), transitions[sources, targets], len(transitions))

    @classmethod
    def banded(cls, diagonals: Tensor, *, lower: int):
        """A band: ``diagonals[i, d]`` scores the move from label i to label i - lower + d, (C, lower + upper + 1).

        >>> left_to_right = SparseTransitions.banded(torch.zeros(3, 2), lower=0)  # stay, or go one on
        >>> left_to_right.dense()
        tensor([[0., 0., -inf],
                [-inf, 0., 0.],
                [-inf, -inf, 0.]])
        """
        if diagonals.dim() != 2 or not 0 <= lower < diagonals.shape[1]:
            raise ShapeError(
                f"`diagonals` must be (C, lower + upper + 1) with lower = {lower}, got {tuple(diagonals.shape)}"
            )
        size, width = diagonals.shape
        sources = torch.arange(size, device=diagonals.device).unsqueeze(1).expand(size, width)
        targets = sources - lower + torch.arange(width, device=diagonals.device)
        inside = (targets >= 0) & (targets < size)
        return cls.of_edges(sources[inside], targets[inside], diagonals[inside], size=size)

    def dense(self) -> Tensor:
        """The (C, C) matrix with -inf where there is no edge; for looking at, not for computing.

        >>> SparseTransitions.of_edges([0], [0], torch.ones(1), size=1).dense()
        tensor([[1.]])
        """
        self.checked()  # an index of -1 would be followed to the other end
        matrix = self.scores.new_full((self.size, self.size), float("-inf"))
        return matrix.index_put((self.sources, self.targets), self.scores)


class Chain(NamedTuple):
    """Scores of B chains: score(y) = start[y_1] + sum_t emissions[t, y_t] + sum_t transitions[y_t, y_t+1] + end[y_L].

    All tensors share one floating type and one device. Nothing is checked here: `LinearChain` does that.
    """

    emissions: Tensor  # (B, T, C)
    transitions: Tensor | SparseTransitions  # (C, C), (B, C, C) or (B, T-1, C, C); [.., i, j] scores i -> j
    start: Tensor  # (C,)
    end: Tensor  # (C,)
    lengths: Tensor  # (B,) int64, 1 <= length <= T

    @property
    def steps(self) -> int:
        """T, the longest length that fits."""
        return self.emissions.shape[-2]

    @property
    def moves(self) -> Tensor:
        """The scores of transitions: themselves, or (E,) of edges."""
        moves = self.transitions
        return moves.scores if isinstance(moves, SparseTransitions) else moves

    @property
    def size(self) -> int:
        """C, the number of labels."""
        return self.emissions.shape[-1]
