"""Segmentations on the CPU: the face of ``csrc/segments.cpp``, in float64 whatever the type of the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg import _kernels

__all__ = ["likelihood", "sample", "viterbi"]

Scores = tuple[Tensor, ...]  # parts (B, T, 2, C), durations (K, C) or (B, K, C), moves (C, C) or (B, C, C)


def _given(scores: Scores, lengths: Tensor) -> tuple[Any, ...]:
    wide = [x.detach().double().contiguous() for x in scores]
    tables = [x if x.dim() == 3 else x.unsqueeze(0) for x in wide[1:]]
    return wide[0].numpy(), *(x.numpy() for x in tables), lengths.contiguous().numpy()


def likelihood(scores: Scores, lengths: Tensor, *, gradient: bool) -> tuple[Tensor, Scores]:
    """log Z (B,) and, where asked for, its gradient in parts, durations (B, K, C) and moves (B, C, C), else nothing.

    >>> one = torch.zeros(1, 2, 2, 1), torch.zeros(2, 1), torch.zeros(1, 1)
    >>> likelihood(one, torch.tensor([2]), gradient=True)[1][1].flatten()  # two of one position, or one of two
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    given = _given(scores, lengths)
    batch, shapes = len(given[0]), [x.shape for x in given[:3]]
    values, found = np.empty(batch), tuple(np.empty((batch, *x[1:])) for x in shapes) if gradient else None
    _kernels.segments_likelihood(given, values, found, torch.get_num_threads())
    return torch.from_numpy(values), tuple(map(torch.from_numpy, found or ()))


def viterbi(scores: Scores, lengths: Tensor) -> Tensor:
    """The best segmentation, (B, T): c where a segment begins, C + c where it goes on, -1 past the length.

    >>> viterbi((torch.zeros(1, 2, 2, 1), torch.tensor([[0.0], [1.0]]), torch.zeros(1, 1)), torch.tensor([2]))
    tensor([[0, 1]])
    """
    given = _given(scores, lengths)
    labels = np.empty(given[0].shape[:2], np.int64)
    _kernels.segments_viterbi(given, labels, torch.get_num_threads())
    return torch.from_numpy(labels)


def sample(scores: Scores, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Exact samples (S, B, T) from uniform numbers (S, B, T, 2).

    >>> one = torch.zeros(1, 2, 2, 1), torch.zeros(2, 1), torch.zeros(1, 1)
    >>> sample(one, torch.tensor([2]), torch.full((1, 1, 2, 2), 0.1))
    tensor([[[0, 0]]])
    """
    numbers = uniforms.double().contiguous().numpy()
    labels = np.empty(numbers.shape[:3], np.int64)
    _kernels.segments_sample(_given(scores, lengths), numbers, labels, torch.get_num_threads())
    return torch.from_numpy(labels)
