"""Structures that are paths through a grid: what alignments and CTC share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.inference.structures.base import Structure
from thalweg.kernels import lattice as ops
from thalweg.kernels.dispatch import lattice_kernels
from thalweg.kernels.lattice import Lattice
from thalweg.kernels.semirings import Semiring
from thalweg.kernels.tracing import uncompiled
from thalweg.limits import enough_memory


@uncompiled
class PathStructure(Structure):
    """Paths through the grids of a :class:`~thalweg.kernels.lattice.Lattice`; its only scores are those of the parts.

    A subclass gives ``inside``, ``parts_of`` and ``structure_of``, and :meth:`of_moves`, which reads a path written as
    the moves it takes.
    """

    def __init__(self, lattice: Lattice, event: tuple[int, ...], backend: str, validate_args: bool | None):
        super().__init__(torch.Size((len(lattice.rows),)), torch.Size(event), validate_args=validate_args)
        self.lattice, self.backend = lattice, backend
        if backend != "auto":
            lattice_kernels(backend, lattice.scores)  # an unknown or unusable backend is told of here

    def of_moves(self, moves: Tensor) -> Tensor:
        """Structures (.., B, \\*event) of paths (.., B, S)."""
        raise NotImplementedError

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The scores of the parts."""
        return (self.lattice.scores,)

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> Structure:
        """The same paths under other scores of the same shape and type."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.lattice = self.lattice._replace(scores=inputs[0])
        return other

    def fold(self, semiring: Semiring, *inputs: tuple[Tensor, ...]) -> Tensor:
        """The recursion over sweeps of cells; see :mod:`thalweg.kernels.reference.lattice`."""
        return ops.fold(self.lattice, semiring, *(each[0] for each in inputs))

    def _kernels(self, name: str = "log_partition") -> Any:
        """The kernels that may be asked for something, or None."""
        kernels = ops.trusted_kernels(self.backend, self.lattice)
        return kernels if hasattr(kernels, name) else None

    @property
    def log_partition(self) -> Tensor:
        """log Z of each item, (B,); its gradient are the marginals."""
        kernels = self._kernels()
        return super().log_partition if kernels is None else self._feasible(ops.value(self.lattice, kernels))

    @property
    def marginals(self) -> Tensor:
        """The probability of each part, (B, \\*parts), 0 outside of an item; differentiable."""
        kernels = self._kernels()
        if kernels is None:
            return super().marginals
        values, found = ops.value_and_marginals(self.lattice, kernels)
        self._feasible(values.detach())
        return found

    def _best(self, kernels: Any, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), differentiable, and their structures (B, k, \\*event), by a kernel."""
        steps = ops.longest(self.lattice)
        cells = self.lattice.height * self.lattice.width
        with enough_memory(k * (len(self.lattice.rows) * steps + 2 * cells), k=k):
            scores, moves = kernels.top_k(ops.plain(self.lattice), k, steps)
        self._feasible(scores[:, 0])
        found = self.of_moves(moves.transpose(0, 1))  # (k, B, *event)
        if self._carries_graph():
            scores = torch.where(torch.isneginf(scores), scores, self.score(found).t())
        return scores, found.transpose(0, 1)

    @property
    def mode(self) -> Tensor:
        """A structure with the highest score, (B, \\*event)."""
        kernels = self._kernels("top_k")
        return super().mode if kernels is None else self._best(kernels, 1)[1][:, 0]

    @property
    def max_score(self) -> Tensor:
        """The highest score, (B,), differentiable: its gradient are the parts of the mode."""
        kernels = self._kernels("top_k")
        return super().max_score if kernels is None else self._best(kernels, 1)[0][:, 0]

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), falling and differentiable, and their structures (B, k, \\*event).

        Where fewer than k exist the rest has score -inf and is -1 throughout.
        """
        self._positive("k", k)
        kernels = self._kernels("top_k")
        return super().top_k(k) if kernels is None else self._best(kernels, k)

    def sample(
        self, sample_shape: Sequence[int] | torch.Size = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact samples, (\\*sample_shape, B, \\*event): sums forward, then moves drawn from the end backward."""
        kernels = self._kernels("sample")
        if kernels is None:
            return super().sample(sample_shape, generator=generator)
        shape, scores = torch.Size(sample_shape), self.lattice.scores
        size = (shape.numel(), len(scores), ops.longest(self.lattice) + 2)
        uniforms = torch.rand(size, generator=generator, dtype=scores.dtype, device=scores.device)
        values, moves = kernels.sample(ops.plain(self.lattice), uniforms)
        self._feasible(values)
        return self.of_moves(moves).view(*shape, len(scores), *self.event_shape)
