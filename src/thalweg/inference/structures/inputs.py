"""What callers give to structures: tensors, lengths and structures, looked at before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ShapeError

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def require_tensor(name: str, x: object) -> None:
    """Raise a ShapeError for what is no tensor of real numbers.

    >>> require_tensor("start", torch.zeros(1))
    """
    if not isinstance(x, Tensor) or x.is_complex() or x.is_sparse or x.layout != torch.strided:
        got = f"{x.dtype} {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"`{name}` must be a dense tensor of real numbers, got {got}")


def counted(name: str, given: Tensor | Sequence[int] | None, batch: int, low: int, high: int) -> Tensor:
    """Lengths as (B,) int64 on the CPU, each in low..high, all ``high`` where none are given; or a ShapeError.

    >>> counted("lengths", [1, 2], 2, 1, 3)
    tensor([1, 2])
    """
    if given is None:
        return torch.full((batch,), high, dtype=torch.long)
    try:
        lengths = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"`{name}` must be integers (B,) with B = {batch}, got {type(given).__name__}") from error
    if not lengths.numel() and not batch:
        return torch.zeros(0, dtype=torch.long)
    if lengths.shape != (batch,) or lengths.dtype not in INTEGERS:
        raise ShapeError(f"`{name}` must be integers (B,) with B = {batch}, got {tuple(lengths.shape)} {lengths.dtype}")
    lengths = lengths.to("cpu", torch.long, copy=True)
    host = lengths.tolist()
    if not low <= min(host) <= max(host) <= high:
        item = next(n for n, length in enumerate(host) if not low <= length <= high)
        raise ShapeError(f"`{name}` must lie in {low}..{high}, got {host[item]} at batch item {item}")
    return lengths


def require_integers(name: str, value: Any, axes: str, sizes: dict[str, int], last: tuple[int, ...]) -> None:
    """Raise a ShapeError for structures that are no tensor of integers whose last axes have these sizes.

    >>> require_integers("labels", torch.tensor([[1, 2]]), "(.., B, T)", {"B": 1, "T": 2}, (1, 2))
    """
    if isinstance(value, Tensor) and value.dtype in INTEGERS and value.shape[-len(last) :] == last:
        return
    got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    told = " and ".join(f"{axis} = {size}" for axis, size in sizes.items())
    raise ShapeError(f"{name} must be integers {axes} with {told}, got {got}")
