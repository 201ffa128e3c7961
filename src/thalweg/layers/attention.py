"""Attention of decoder states over encoder outputs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest

__all__ = ["Attention", "AttentionScore"]

AttentionScore = Literal["dot", "general", "additive"]
"""How a query meets a key: ``q'k``, ``q'Wk``, or ``v' tanh(Wq + Uk)``."""


class Attention(nn.Module):
    r"""Weighted reading of a memory, padding excluded exactly.

    .. math:: a_{ts} = \mathrm{softmax}_s\, f(q_t, m_s), \qquad c_t = \sum_s a_{ts} m_s

    with ``f`` the dot product, the general bilinear form (Luong et al., 2015) or the additive network (Bahdanau et
    al., 2015). Keys depend on the memory alone: :meth:`keys` computes them once per source.

    Args:
        score: ``dot``, ``general`` or ``additive``.
        queries: width of a query; memory: width of a memory entry (equal for ``dot``).

    >>> attention = Attention("general", queries=4, memory=6)
    >>> memory, mask = torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    >>> context, weights = attention(torch.randn(2, 3, 4), memory, attention.keys(memory), mask)
    >>> context.shape, weights.shape
    (torch.Size([2, 3, 6]), torch.Size([2, 3, 5]))
    """

    def __init__(self, score: AttentionScore, *, queries: int, memory: int):
        super().__init__()
        if score not in get_args(AttentionScore):
            raise ConfigError(f"attention `{score}` is not known; {nearest(score, get_args(AttentionScore))}")
        if score == "dot" and queries != memory:
            raise ShapeError(
                f"dot attention needs queries and memory of one width, got {queries} and {memory}; use `general`"
            )
        self.score = score
        if score == "general":
            self.key = nn.Linear(memory, queries, bias=False)
        elif score == "additive":
            self.key = nn.Linear(memory, queries)
            self.query = nn.Linear(queries, queries, bias=False)
            self.combine = nn.Linear(queries, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Keys ``(B, S, Q)`` of a memory ``(B, S, M)``."""
        return memory if self.score == "dot" else self.key(memory)

    def forward(self, queries: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Read ``memory (B, S, M)`` for ``queries (B, T, Q)``; ``mask (B, S)`` true on real entries.

        Returns contexts ``(B, T, M)`` and weights ``(B, T, S)``, zero on padding. Time and memory O(B T S); the
        additive score needs O(B T S Q).
        """
        if self.score == "additive":
            scores = self.combine(torch.tanh(self.query(queries).unsqueeze(2) + keys.unsqueeze(1))).squeeze(3)
        else:
            scores = queries @ keys.transpose(1, 2)
        weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(dim=2)
        return weights @ memory, weights
