"""The energy of a memory as one retrieval sees it: everything in one type, and the descent on it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.energies.hopfield.post import PostTransform
from thalweg.inference.cccp import Descent, cccp
from thalweg.kernels import memory as kernels
from thalweg.layers.hopfield.separation_maps import Entmax, KSubsets, NormMax, Separation, Softmax

# Scores held at once: with more, queries go through the memory in blocks, or the softmax streams over the patterns.
_HELD = 1 << 24


class Landscape(NamedTuple):
    """What :class:`~thalweg.energies.HopfieldMemory` computes with.

    Attributes:
        patterns: ``(N, D)`` or ``(B, N, D)`` in the type of the computation, zeros where absent.
        mask: ``(N,)`` or ``(B, N)`` bool, true where present; None for all.
        beta: inverse temperature, a number or of shape ().
        separation: the map from scores to weights.
        post: the map from mixtures to states.
        has_gradient: whether anything is to be differentiated.

    Queries are rows ``(Q, D)``, or ``(B, Q, D)`` for batched patterns.

    >>> from thalweg.energies.hopfield.post import Identity
    >>> land = Landscape(torch.eye(2), None, 1.0, Softmax(), Identity(), False)
    >>> land.mix(torch.zeros(1, 2), torch.eye(2))
    (tensor([[0.5000, 0.5000]]), tensor([0.6931]))
    """

    patterns: Tensor
    mask: Tensor | None
    beta: float | Tensor
    separation: Separation
    post: PostTransform
    has_gradient: bool

    @property
    def leading(self) -> torch.Size:
        """() or (B,)."""
        return self.patterns.shape[:-2]

    def scores(self, rows: Tensor) -> Tensor:
        """b X q of rows (Q, D) -> (Q, N), or (B, Q, D) -> (B, Q, N); -inf for what is absent."""
        return self._present(self.beta * (rows @ self.patterns.mT))

    def weights(self, rows: Tensor) -> Tensor:
        """p(b X q), the shape of the scores."""
        return self.separation.weights(self.scores(rows))

    def mix(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """V'p and (1/b) Omega*(b X q), in one pass: (..., Q, E) and (..., Q)."""
        N, Q = self.patterns.size(-2), rows.size(-2)
        # Small memories use plain operations, whose gradients can be taken as often as wanted and by torch.func.
        if self.is_plain_softmax and (not self.has_gradient or Q * N > _HELD):
            return kernels.associate(rows, self.patterns, values, beta=self.beta, mask=self.mask)
        block = max(1, _HELD // max(1, N * self.leading.numel()))
        if block >= Q:
            return self._mix(rows, values)
        parts = [self._mix(part, values) for part in rows.split(block, dim=-2)]
        return torch.cat([mixed for mixed, _ in parts], dim=-2), torch.cat([value for _, value in parts], dim=-1)

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the streaming kernels apply."""
        return not self.leading and type(self.separation) is Softmax

    def constant(self) -> Tensor:
        """(1/b) Omega*(0) + max_i Psi*(x_i): () or (B, 1)."""
        bounds = self.post.conjugate(self.patterns)
        bounds = bounds if self.mask is None else bounds.masked_fill(~self.mask, -torch.inf)
        zero = self.patterns.new_zeros(*self.leading, *[1] * len(self.leading), self.patterns.size(-2))
        level = self.separation.conjugate(self._present(zero)) / self.beta
        return level + bounds.amax(-1, keepdim=bool(self.leading))

    def slack(self, rows: Tensor, constant: Tensor) -> Tensor:
        """By how much rounding may raise the energy of each of the rows (..., Q, D): (..., Q)."""
        with torch.no_grad():
            # Maps onto the simplex mix patterns; others add them up, all of them at most.
            one = isinstance(self.separation, Softmax | Entmax | NormMax)
            most = 1 if one else getattr(self.separation, "k", self.patterns.size(-2))
            reach = most * self.patterns.norm(dim=-1).amax(-1, keepdim=bool(self.leading))
            longest = torch.maximum(rows.norm(dim=-1), reach)
            scale = longest * (longest + reach) + constant.abs()
            return (64 + 4 * math.sqrt(rows.size(-1))) * torch.finfo(rows.dtype).eps * scale

    def descend(self, rows: Tensor, max_steps: int, tol: float, check: bool) -> Descent:
        """CCCP from each row, as (Q, D) or (B Q, D)."""
        constant = self.constant()

        def linearise(x: Tensor) -> tuple[Tensor, Tensor]:
            here = x.view(rows.shape) if self.leading else x
            mixed, value = self.mix(here, self.patterns)
            return -mixed.reshape(x.shape), (self.post.value(here) + constant - value).flatten()

        return cccp(
            rows.reshape(-1, rows.size(-1)),
            minimise=lambda slope: self.post(-slope),
            concave_gradient=linearise,
            max_steps=max_steps,
            tol=tol,
            # Each row of a batched memory has patterns of its own: taking some out would copy them.
            rows="all" if self.leading else "active",
            check=check,
            slack=self.slack(rows, constant).flatten(),
        )

    def _mix(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(rows)
        weights = self.separation.weights(scores)
        if self.has_gradient or not isinstance(self.separation, Entmax | NormMax | KSubsets):
            conjugate = self.separation.conjugate(scores)
        else:  # by its definition, from the weights that are there; its own gradient would need a second sort
            conjugate = (weights * scores.masked_fill(weights == 0, 0.0)).sum(-1) - self.separation.regulariser(weights)
        return weights @ values, conjugate / self.beta

    def _present(self, scores: Tensor) -> Tensor:
        if self.mask is None:
            return scores
        return scores.masked_fill(~(self.mask.unsqueeze(-2) if self.leading else self.mask), -torch.inf)
