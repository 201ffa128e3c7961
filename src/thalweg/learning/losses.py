"""Losses; each returns one value per item, reduction is the trainer's business."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.errors import ShapeError

__all__ = ["sequence_nll"]


def sequence_nll(logits: Tensor, gold: Tensor, mask: Tensor, *, smoothing: float = 0.0) -> Tensor:
    r"""Negative log-likelihood of symbol sequences, with label smoothing.

    .. math:: \ell_b = -\sum_{t \le T_b} \Big[(1 - \epsilon) \log p_t(y_t)
              + \frac{\epsilon}{|A|} \sum_{v \in A} \log p_t(v)\Big]

    Args:
        logits: ``(B, T, V)``; -inf marks symbols that can never stand; A is the set of all others.
        gold: ``(B, T)`` int64.
        mask: ``(B, T)`` bool, true on real positions; padding changes neither value nor gradient.
        smoothing: epsilon in [0, 1).
    Returns:
        ``(B,)`` summed over positions: dividing by the number of positions is left to the caller.

    >>> sequence_nll(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]), torch.tensor([[True, True]]))
    tensor([2.7726])
    """
    if logits.dim() != 3 or gold.shape != logits.shape[:2] or mask.shape != gold.shape:
        raise ShapeError(
            f"`logits` must be (B, T, V) with `gold` and `mask` (B, T), got {tuple(logits.shape)}, "
            f"{tuple(gold.shape)} and {tuple(mask.shape)}"
        )
    # Padding is cut out before anything is computed: what stands there may be -inf or NaN, and so would its gradient.
    log_probs = logits.masked_fill(~mask.unsqueeze(2), 0.0).log_softmax(dim=2)
    loss = -log_probs.gather(2, gold.unsqueeze(2)).squeeze(2).masked_fill(~mask, 0.0)
    if smoothing:
        reachable = ~torch.isinf(logits)
        spread = log_probs.masked_fill(~(reachable & mask.unsqueeze(2)), 0.0).sum(dim=2)
        even = -spread / reachable.sum(dim=2).clamp(min=1)
        loss = (1 - smoothing) * loss + smoothing * even  # lerp would make NaN of an infinite loss
    return loss.sum(dim=1)
