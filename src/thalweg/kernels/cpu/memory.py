"""Associative memories on the CPU in float32: one compiled call for a whole retrieval, weights never held."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg import _kernels
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled

nearest = reference.nearest
LEAST = 1  # patterns from which PyTorch's attention takes longer


def _present(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows that are present, one after the other."""
    return (rows if mask is None else rows[mask]).detach().contiguous()


def associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, mask: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`thalweg.kernels.memory.associate` in one call."""
    same = keys is values
    queries, keys = _present(queries, None), _present(keys, mask)
    values = keys if same else _present(values, mask)
    count = len(queries)
    mixed, lse = queries.new_empty(count, values.shape[1]), queries.new_empty(count)
    if not len(keys):
        return mixed.zero_(), lse.fill_(-torch.inf)
    arrays = queries.numpy(), keys.numpy(), values.numpy()
    _kernels.associate(*arrays, float(beta), mixed.numpy(), lse.numpy(), torch.get_num_threads())
    return mixed, lse


def settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None, block: int | None
) -> Settled:
    """:func:`thalweg.kernels.memory.settle` in one call."""
    queries, patterns = _present(queries, None), _present(patterns, mask)
    if not len(patterns):
        return reference.settle(queries, patterns, beta, max_steps, tol, None, block)
    count = len(queries)
    found = Settled(
        torch.empty_like(queries),
        queries.new_empty(count, max_steps + 1),
        *(queries.new_empty(count, dtype=kind) for kind in (torch.int64, torch.bool)),
    )
    arrays = (x.numpy() for x in found)
    _kernels.settle(queries.numpy(), patterns.numpy(), beta, tol, *arrays, torch.get_num_threads())
    return found
