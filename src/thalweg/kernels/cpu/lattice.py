"""Paths through grids on the CPU: log Z with its gradient, samples and the k best, each in one compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg import _kernels
from thalweg.kernels.reference.lattice import Lattice

__all__ = ["gradient_of", "log_partition", "sample", "top_k"]


def _arrays(lattice: Lattice) -> tuple[Any, ...]:
    scores = lattice.scores if lattice.labels is None else lattice.scores.unsqueeze(0)
    labels = None if lattice.labels is None else lattice.labels.contiguous().numpy()
    moves = np.array(lattice.moves, np.int64)
    band = -1 if lattice.band is None else lattice.band
    return scores.numpy(), moves, lattice.rows.numpy(), lattice.columns.numpy(), labels, lattice.ends, band


def log_partition(lattice: Lattice, *, gradient: bool) -> tuple[Tensor, Tensor]:
    """log Z (B,) and, where a gradient is going to be asked for, what :func:`gradient_of` makes it of.

    >>> log_partition(Lattice(torch.zeros(1, 2, 2, 1), ((1, 1),), *[torch.tensor([1])] * 2), gradient=False)[0]
    tensor([0.])
    """
    scores, values = lattice.scores, lattice.scores.new_empty(len(lattice.rows))
    shape = scores.shape if lattice.labels is None else (*scores.shape[:2], lattice.width)
    shares = scores.new_empty(shape if gradient else 0)
    out = (shares if lattice.labels is None else shares.unsqueeze(0)).numpy() if gradient else None
    _kernels.lattice_value(_arrays(lattice), values.numpy(), out, torch.get_num_threads())
    return values, shares


def gradient_of(lattice: Lattice, shares: Tensor, weights: Tensor) -> Tensor:
    """The gradient of sum_b weights[b] log Z[b] in the scores; ``shares`` are as they were.

    >>> grid = Lattice(torch.zeros(1, 2, 2, 1), ((1, 1),), *[torch.tensor([1])] * 2)
    >>> gradient_of(grid, log_partition(grid, gradient=True)[1], torch.tensor([2.0])).flatten()
    tensor([0., 0., 0., 2.])
    """
    if lattice.labels is None:
        return shares * weights.view(-1, 1, 1, 1)
    out = torch.empty_like(lattice.scores)
    arrays = shares.numpy(), lattice.labels.contiguous().numpy(), weights.contiguous().numpy(), out.numpy()
    _kernels.lattice_emitted(*arrays, torch.get_num_threads())
    return out


def sample(lattice: Lattice, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """log Z (B,) and paths (N, B, S) drawn by uniform numbers (N, B, S + 2) in [0, 1).

    >>> sample(Lattice(torch.zeros(1, 2, 2, 1), ((1, 1),), *[torch.tensor([1])] * 2), torch.zeros(1, 1, 3))[1]
    tensor([[[3]]])
    """
    values = lattice.scores.new_empty(len(lattice.rows))
    paths = torch.empty(*uniforms.shape[:2], uniforms.shape[2] - 2, dtype=torch.long)
    arrays = uniforms.contiguous().numpy(), values.numpy(), paths.numpy()
    _kernels.lattice_sample(_arrays(lattice), *arrays, torch.get_num_threads())
    return values, paths


def top_k(lattice: Lattice, k: int, steps: int) -> tuple[Tensor, Tensor]:
    """The k highest scores (B, k), falling, and their paths (B, k, steps); -inf and -1 where there are fewer.

    >>> top_k(Lattice(torch.ones(1, 2, 2, 1), ((1, 1),), *[torch.tensor([1])] * 2), 1, 1)
    (tensor([[1.]]), tensor([[[3]]]))
    """
    values = lattice.scores.new_empty(len(lattice.rows), k)
    paths = torch.empty(*values.shape, steps, dtype=torch.long)
    _kernels.lattice_best(_arrays(lattice), values.numpy(), paths.numpy(), torch.get_num_threads())
    return values, paths
