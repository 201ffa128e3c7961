"""Attention of decoder states over encoder outputs."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.kernels import on_cpu
from thalweg.layers.hopfield.separation_maps import Separation, Softmax, separation
from thalweg.limits import check_choice

AttentionScore = Literal["dot", "general", "additive"]
"""How a query meets a key: ``q'k``, ``q'Wk``, or ``v' tanh(Wq + Uk)``."""


# The names of maps from scores to attention weights; a number is the alpha of entmax.
ATTENTION_MAPS = ("softmax", "sparsemax", "entmax15")


def attention_map(name: str | float, *, setting: str = "attention map") -> Separation:
    """The map from scores to attention weights of a name or of an alpha of at least 1.

    Sparse maps give most entries the weight 0 (Martins and Astudillo, 2016; Peters et al., 2019).

    Args:
        name: one of ``ATTENTION_MAPS``, or alpha: 1 is softmax, 1.5 entmax15, 2 sparsemax.
        setting: what an error calls it.

    >>> print(attention_map("entmax15"), attention_map(1.3), attention_map(1.0))
    entmax15 entmax(1.3) softmax
    """
    if isinstance(name, str) and name not in ATTENTION_MAPS:
        raise ConfigError(f"{setting} `{name}` is no known map and no alpha; {nearest(name, ATTENTION_MAPS)}")
    if not isinstance(name, str) and not 1 <= name < float("inf"):
        raise ConfigError(f"{setting} must be a name ({', '.join(ATTENTION_MAPS)}) or an alpha from 1 on, got {name}")
    return separation(name)


class Memory(NamedTuple):
    """What can be attended to for B sources: values ``(B, S, M)``, keys ``(B, S, Q)``, mask ``(B, S)``.

    Made by :meth:`Attention.memorise`, once per source.

    >>> memory = Attention("dot", queries=4, memory=4).memorise(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    >>> memory.rows(torch.tensor([0, 0, 1])).values.shape
    torch.Size([3, 3, 4])
    """

    values: Tensor
    keys: Tensor
    mask: Tensor

    def rows(self, index: Tensor) -> Memory:
        """The memories of the given rows, repeated or dropped as asked."""
        return Memory(*(part[index] for part in self))


class Attention(nn.Module):
    r"""Weighted reading of a memory, padding excluded exactly.

    .. math:: a_{ts} = \mathrm{softmax}_s\, f(q_t, m_s), \qquad c_t = \sum_s a_{ts} m_s

    or with another map in place of the softmax; ``f`` is the dot product, the general bilinear form (Luong et al.,
    2015) or the additive network (Bahdanau et al., 2015). Keys depend on the memory alone: :meth:`memorise` computes
    them once per source.

    Args:
        score: ``dot``, ``general`` or ``additive``.
        queries: width of a query; memory: width of a memory entry (equal for ``dot``).
        map: from scores to weights, as in :func:`attention_map`.

    >>> attention = Attention("general", queries=4, memory=6)
    >>> memory = attention.memorise(torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool))
    >>> context, weights = attention(torch.randn(2, 3, 4), memory)
    >>> context.shape, weights.shape
    (torch.Size([2, 3, 6]), torch.Size([2, 3, 5]))
    """

    def __init__(self, score: AttentionScore, *, queries: int, memory: int, map: str | float = "softmax"):
        super().__init__()
        check_choice("attention", score, get_args(AttentionScore))
        if score == "dot" and queries != memory:
            raise ShapeError(
                f"dot attention needs queries and memory of one width, got {queries} and {memory}; use `general`"
            )
        self.score, self.map = score, attention_map(map)
        if score == "general":
            self.key = nn.Linear(memory, queries, bias=False)
        elif score == "additive":
            self.key = nn.Linear(memory, queries)
            self.query = nn.Linear(queries, queries, bias=False)
            self.combine = nn.Linear(queries, 1, bias=False)

    def memorise(self, values: Tensor, mask: Tensor) -> Memory:
        """Values ``(B, S, M)`` with their keys; ``mask (B, S)`` is true on real entries.

        Padding is zeroed here, once, so that whatever stood there (NaN included) reaches neither value nor gradient.
        """
        values = values.masked_fill(~mask.unsqueeze(2), 0.0)
        return Memory(values, values if self.score == "dot" else self.key(values), mask)

    def forward(self, queries: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Read the memory for ``queries (B, T, Q)``.

        Returns contexts ``(B, T, M)`` and weights ``(B, T, S)``, zero on padding. Time and memory O(B T S); the
        additive score needs O(B T S Q).
        """
        if self.score == "additive":
            scores = self._additive(self.query(queries), memory.keys)
        else:
            scores = queries @ memory.keys.transpose(1, 2)
        scores = scores.masked_fill(~memory.mask.unsqueeze(1), -torch.inf)
        weights = scores.softmax(dim=2) if isinstance(self.map, Softmax) else self.map.weights(scores)
        return weights @ memory.values, weights

    def _additive(self, queries: Tensor, keys: Tensor) -> Tensor:
        """v' tanh(q + k) for ``queries (B, T, Q)`` and ``keys (B, S, Q)`` -> ``(B, T, S)``.

        Without gradients, tanh(q + k) = 1 - 2 / (1 + e^{2q} e^{2k}) needs B (T + S) Q exponentials in place of B T S Q
        hyperbolic tangents; it is exact while both exponents stay in range, which is checked.
        """
        cheap = on_cpu(queries) and not torch.is_grad_enabled()
        if cheap and max(_reach(queries), _reach(keys)) <= _REACH:
            met = (2 * queries).exp().unsqueeze(2) * (2 * keys).exp().unsqueeze(1)
            weight = self.combine.weight[0]
            return weight.sum() - 2 * (met.add_(1).reciprocal_() @ weight)
        return self.combine(torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))).squeeze(3)


# e^(2 * 20) squared is still far below the largest float32.
_REACH = 20.0


def _reach(x: Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0
