"""Entmax of rows on the CPU: weights, values and gradients, each in one compiled call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thalweg import _kernels


def _alphas(alpha: Tensor | float, rows: Tensor) -> np.ndarray:
    """alpha as float64, one for each row."""
    if isinstance(alpha, Tensor):
        return alpha.detach().double().reshape(-1).expand(len(rows)).contiguous().numpy()
    return np.full(len(rows), alpha, np.float64)


def entmax(scores: Tensor, alpha: Tensor | float) -> Tensor:
    """Weights of rows ``(R, N)``, N > 0, of float32 or float64; alpha a number or ``(R, 1)``."""
    scores = scores.detach().contiguous()
    out = torch.empty_like(scores)
    _kernels.entmax(scores.numpy(), _alphas(alpha, scores), None, out.numpy(), None, torch.get_num_threads())
    return out


def entmax_value(scores: Tensor, alpha: Tensor | float, gold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Conjugates ``(R,)``, or losses for gold ``(R,)`` int64, and their gradient ``(R, N)``, in one pass."""
    scores = scores.detach().contiguous()
    out, values = torch.empty_like(scores), scores.new_empty(len(scores))
    labels = None if gold is None else gold.contiguous().numpy()
    arrays = scores.numpy(), _alphas(alpha, scores), labels, out.numpy(), values.numpy()
    _kernels.entmax(*arrays, torch.get_num_threads())
    return values, out


def entmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor | float) -> Tensor:
    """The gradient in the scores ``(R, N)`` from the weights and the gradient in them."""
    weights, grad = weights.detach().contiguous(), grad.detach().contiguous()
    out = torch.empty_like(weights)
    _kernels.entmax_vjp(weights.numpy(), grad.numpy(), _alphas(alpha, weights), out.numpy(), torch.get_num_threads())
    return out
