"""Scores and lengths as a caller gives them to a chain, checked and in one type on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = ["checked_lengths", "potentials_of", "whole_lengths"]


@lru_cache(maxsize=64)
def whole_lengths(batch: int, steps: int, device: torch.device) -> Tensor:
    """Lengths of items without padding; made once, since on a GPU a small kernel costs as much as a large one.

    >>> whole_lengths(2, 5, torch.device("cpu"))
    tensor([5, 5])
    """
    return torch.full((batch,), steps, dtype=torch.long, device=device)


def checked_lengths(lengths: Tensor | Sequence[int] | None, emissions: Tensor) -> Tensor:
    """(B,) int64 on the device of the emissions, each in 1 ... T, or a ShapeError.

    >>> checked_lengths([1, 2], torch.zeros(2, 2, 3))
    tensor([1, 2])
    """
    batch, steps, _ = emissions.shape
    if lengths is None:
        return whole_lengths(batch, steps, emissions.device)
    lengths = torch.as_tensor(lengths)
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ShapeError(
            f"`lengths` must be integers (B,) with B = {batch} as in `emissions`, "
            f"got {tuple(lengths.shape)} {lengths.dtype}"
        )
    if batch:
        low, high = lengths.aminmax()
        if int(low) < 1 or int(high) > steps:
            bad = int(((lengths < 1) | (lengths > steps)).nonzero()[0])
            raise ShapeError(
                f"`lengths` must lie in 1..T with T = {steps}, got {int(lengths[bad])} at batch item {bad}"
            )
    if lengths.dtype != torch.long or lengths.device != emissions.device:
        lengths = lengths.to(device=emissions.device, dtype=torch.long)
    return lengths.contiguous()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the microseconds that this takes where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def potentials_of(
    emissions: Tensor,
    transitions: Tensor | SparseTransitions,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor,
) -> Chain:
    """The potentials in one floating type and on one device, or a ShapeError.

    >>> potentials_of(torch.zeros(1, 2, 3), torch.zeros(3, 3), None, None, torch.tensor([2])).start
    tensor([0., 0., 0.])
    """
    batch, steps, size = emissions.shape
    dtype = emissions.dtype if emissions.dtype in (torch.float32, torch.float64) else torch.float32
    moves: Tensor | SparseTransitions
    if isinstance(transitions, SparseTransitions):
        if transitions.size != size:
            raise ShapeError(
                f"sparse `transitions` must have size C = {size} as in `emissions`, got {transitions.size}"
            )
        moves = transitions._replace(scores=transitions.scores.to(dtype))
        device = moves.scores.device
    else:
        shape = tuple(transitions.shape)
        if shape != (size, size) and shape not in ((batch, size, size), (batch, steps - 1, size, size)):
            raise ShapeError(
                f"`transitions` must be (C, C), (B, C, C) or (B, T-1, C, C) with B = {batch}, T = {steps}, C = {size} "
                f"as in `emissions`, got {tuple(transitions.shape)}"
            )
        moves = _as(transitions, dtype)
        device = moves.device
    here = emissions.device
    start, end = _edge("start", start, size, dtype, here), _edge("end", end, size, dtype, here)
    if device != here:
        raise ShapeError(f"`transitions` must lie on {here} as `emissions` does, got {device}")
    return Chain(_as(emissions, dtype), moves, start, end, lengths)


def _edge(name: str, scores: Tensor | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scores of first or last labels; zeros where none are given."""
    if scores is None:
        return torch.zeros(size, dtype=dtype, device=device)
    if scores.shape != (size,):
        raise ShapeError(f"`{name}` must be (C,) with C = {size} as in `emissions`, got {tuple(scores.shape)}")
    if scores.device != device:
        raise ShapeError(f"`{name}` must lie on {device} as `emissions` does, got {scores.device}")
    return _as(scores, dtype)
