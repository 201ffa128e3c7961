"""Association of states with stored patterns in several heads: one step, several, and the energy they lower."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ShapeError
from thalweg.kernels.tracing import traced
from thalweg.layers.hopfield.separation_maps import Separation, Softmax


class Association(NamedTuple):
    r"""States and patterns of H heads in the space where they meet, and how they meet there.

    .. math:: p = \hat y_\Omega(\beta K q + m), \qquad q \leftarrow K^\top p \ \text{(a step)}, \qquad
              V^\top p \ \text{(a reading)}

    Attributes:
        queries: ``(B, H, T, D)`` the states q.
        keys: ``(B, H, N, D)`` the patterns, rows of K.
        beta: inverse temperature, a number or ``(H, 1, 1)``.
        separation: the map from scores to weights.
        mask: m, broadcast to ``(B, H, T, N)``: bool, true on what can be seen, or numbers that are added to the scores;
            None hides nothing.

    A query that can see no pattern has weights 0 and reads 0. With the softmax every step is one call of torch's
    ``scaled_dot_product_attention`` and the (T, N) weights are not held; the other maps hold them.

    >>> patterns = torch.eye(2).view(1, 1, 2, 2)
    >>> Association(torch.tensor([[[[1.0, 0.0]]]]), patterns, 50.0, Softmax(), None).read(patterns).round()
    tensor([[[[1., 0.]]]])
    """

    queries: Tensor
    keys: Tensor
    beta: float | Tensor
    separation: Separation
    mask: Tensor | None

    def scores(self) -> Tensor:
        """beta K q + m, ``(B, H, T, N)``, in float32 at least."""
        scores = self.beta * (self.queries @ self.keys.transpose(2, 3))
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if self.mask is None:
            return scores
        return scores.masked_fill(~self.mask, -torch.inf) if self.mask.dtype == torch.bool else scores + self.mask

    def weights(self) -> Tensor:
        """How much of each pattern a query takes, ``(B, H, T, N)``; exactly 0 where it cannot be seen."""
        return self.separation.weights(self.scores()).to(self.queries.dtype)

    def read(self, values: Tensor, dropout: float = 0.0) -> Tensor:
        """Values ``(B, H, N, E)`` weighted by the associations, ``(B, H, T, E)``; dropout falls on the weights."""
        if not isinstance(self.separation, Softmax) or traced():  # that attention has no forward derivative
            weights = self.weights()
            return (nn.functional.dropout(weights, dropout) if dropout else weights) @ values
        queries, scale = (self.queries * self.beta, 1.0) if isinstance(self.beta, Tensor) else (self.queries, self.beta)
        return nn.functional.scaled_dot_product_attention(
            queries, self.keys, values, attn_mask=self.mask, dropout_p=dropout, scale=scale
        )

    def settle(self, steps: int, tolerance: float | None = None) -> Association:
        """The same after ``steps`` steps; with a tolerance each query rests once a step moves it by no more than that.

        The gradient goes through the steps that were made. Looking whether all rest waits for a GPU, once a step.
        """
        now = self
        moving = None
        for _ in range(steps):
            states = now.read(self.keys)
            if tolerance is None:
                now = now._replace(queries=states)
                continue
            moved = (states - now.queries).detach().float().norm(dim=3, keepdim=True) > tolerance
            now = now._replace(queries=states if moving is None else torch.where(moving, states, now.queries))
            moving = moved if moving is None else moving & moved
            if not bool(moving.any()):
                break
        return now

    def energy(self) -> Tensor:
        r"""E(q) of every query, ``(B, H, T)``, which no step raises.

        .. math:: E(q) = -\tfrac1\beta \Omega^*(\beta K q + m) + \tfrac1\beta \Omega^*(0 + m_0) + \tfrac12 q^\top q
                  + \tfrac12 M^2

        with M the greatest norm of a pattern that the query sees and m_0 = 0 on those and -inf elsewhere: with the
        softmax, -lse + (1/beta) log N. A query that sees none has energy q'q/2.
        """
        scores, norms = self.scores(), self.keys.square().sum(dim=3).unsqueeze(2)  # (B, H, 1, N)
        own = self.queries.square().sum(dim=3).to(scores.dtype)
        hidden = torch.isneginf(scores)
        blind = hidden.all(dim=3)
        scores, hidden = scores.masked_fill(blind.unsqueeze(3), 0.0), hidden & ~blind.unsqueeze(3)
        flat = torch.zeros_like(scores).masked_fill(hidden, -torch.inf)
        beta = self.beta.squeeze(2) if isinstance(self.beta, Tensor) else self.beta
        gap = (self.separation.conjugate(flat) - self.separation.conjugate(scores)) / beta
        reach = norms.to(scores.dtype).expand_as(scores).masked_fill(hidden, 0.0).amax(dim=3) / 2
        return own / 2 + (gap + reach).masked_fill(blind, 0.0)


def merge_masks(
    padding: Tensor | None, attention: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """One mask for :class:`Association` from those of ``nn.MultiheadAttention``, where true means left out.

    Args:
        padding: ``(B, N)`` bool, true on patterns that are not there.
        attention: ``(T, N)``, ``(B * H, T, N)`` or broadcast to ``(B, H, T, N)``; bool, true where a query may not see
            a pattern, or numbers that are added to the scores.
        shape: B, H, T and N; dtype: of the scores.

    >>> merge_masks(torch.tensor([[False, True]]), None, (1, 1, 1, 2), torch.float32)
    tensor([[[[ True, False]]]])
    """
    B, H, T, N = shape
    if padding is not None and (padding.dtype != torch.bool or padding.shape not in ((B, N), (1, N))):
        raise ShapeError(
            f"`key_padding_mask` must be bool (B, N) = ({B}, {N}), true on padding, "
            f"got {padding.dtype} {tuple(padding.shape)}"
        )
    absent = None if padding is None else padding[:, None, None, :]
    if attention is None:
        return None if absent is None else ~absent
    full = attention.view(B, H, T, N) if attention.dim() == 3 and attention.shape == (B * H, T, N) else attention
    fits = full.dim() in (2, 4) and all(
        size in (1, whole) for size, whole in zip(reversed(full.shape), reversed(shape), strict=False)
    )
    if not fits or not (full.dtype == torch.bool or full.is_floating_point()):
        raise ShapeError(
            f"`attention_mask` must be bool or floating, (T, N), (B * H, T, N) or (B, H, T, N) with B, H, T, N = "
            f"{B}, {H}, {T}, {N}, got {attention.dtype} {tuple(attention.shape)}"
        )
    full = full if full.dim() == 4 else full[None, None]
    if full.dtype == torch.bool:
        return ~full if absent is None else ~(full | absent)
    full = full.to(dtype)
    return full if absent is None else torch.where(absent, full.new_tensor(-torch.inf), full)
