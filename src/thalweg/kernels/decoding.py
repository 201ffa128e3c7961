"""One decoding step of a Transformer: attention over caches that are read where they lie, never copied.

Compiled kernels where they exist and no gradient is asked for, plain PyTorch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.dispatch import decoding_kernels
from thalweg.kernels.reference import decoding as reference

__all__ = ["add_norm", "attend_past", "attend_source", "linear", "linear_map"]

_STORED = (torch.float32, torch.bfloat16, torch.int8)  # what compiled kernels read weights from
_FEW_ROWS = 8


def _backend(first: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> Any:
    """The kernels for these tensors of numbers, the first of which decides; the reference for any other layout.

    Written for few instructions, as the checks here are: at one row they are a good part of the time.
    """
    kernels = decoding_kernels(first)
    if kernels is None or first.stride(-1) != 1:
        return reference
    kind, device = first.dtype, first.device
    if second is not None and (second.dtype is not kind or second.stride(-1) != 1 or second.device != device):
        return reference
    if third is not None and (third.dtype is not kind or third.stride(-1) != 1 or third.device != device):
        return reference
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (first, second, third)):
        return reference
    return kernels


def _check_queries(queries: Tensor, stored: Tensor, heads: int, name: str) -> None:
    shape, asked = stored.shape, queries.shape
    if len(shape) != 4 or shape[2] != 2 or len(asked) != 2 or asked[1] != shape[3]:
        raise ShapeError(
            f"`queries` must be (R, D) and `{name}` (.., .., 2, D) with keys and values, "
            f"got {tuple(asked)} and {tuple(shape)}"
        )
    if type(heads) is not int or heads < 1 or shape[3] % heads:
        raise ShapeError(f"`heads` must divide the width {shape[3]}, got {heads}")


def attend_past(queries: Tensor, cache: Tensor, lineage: Tensor, heads: int) -> Tensor:
    r"""Attention of R decoding rows over the t steps of their own past, found through their ancestors.

    .. math:: y_{rh} = \sum_{s<t} p_{rhs}\, v_{s, l_{rs}, h}, \qquad
        p_{rh\cdot} = \mathrm{softmax}_s\big(q_{rh} \cdot k_{s, l_{rs}, h}\big)

    Args:
        queries: ``(R, D)``, scaled already; H heads lie side by side.
        cache: ``(T, N, 2, D)`` with T >= t: ``cache[s, n, 0]`` is the key that row n of step s wrote, ``[s, n, 1]``
            its value; steps from t on may hold anything.
        lineage: ``(R, t)`` int64: ``lineage[r, s]`` is the row that r's ancestor had at step s, so that a search
            reorders integers and leaves the cache where it is.
        heads: H; divides D.
    Returns:
        ``(R, D)``; differentiable, in which case plain PyTorch gathers the past.

    Time O(R t D); memory O(R D) with kernels, O(R t D) without.

    >>> cache = torch.tensor([[[[0.0], [1.0]], [[0.0], [2.0]]], [[[0.0], [3.0]], [[0.0], [5.0]]]])
    >>> attend_past(torch.ones(2, 1), cache, torch.tensor([[1, 0], [1, 1]]), 1)
    tensor([[2.5000],
            [3.5000]])
    """
    _check_queries(queries, cache, heads, "cache")
    shape = lineage.shape
    if len(shape) != 2 or shape[0] != queries.shape[0] or not 0 < shape[1] <= cache.shape[0]:
        raise ShapeError(
            f"`lineage` must be (R, t) with R = {queries.shape[0]} rows and 1 <= t <= {cache.shape[0]} steps, "
            f"got {tuple(shape)}"
        )
    if lineage.dtype != torch.int64:
        raise ShapeError(f"`lineage` must be int64, got {lineage.dtype}; use lineage.long()")
    backend = _backend(queries, cache)
    if lineage.stride(1) != 1:
        lineage = lineage.contiguous()
    return backend.attend_past(queries, cache, lineage, heads)


def attend_source(queries: Tensor, memory: Tensor, lengths: Tensor, items: Tensor, heads: int) -> Tensor:
    r"""Attention of R decoding rows over the encoded source that each belongs to.

    .. math:: y_{rh} = \sum_{s<n} p_{rhs}\, v_{i_r, s, h}, \qquad
        p_{rh\cdot} = \mathrm{softmax}_s\big(q_{rh} \cdot k_{i_r, s, h}\big), \qquad n = \mathrm{lengths}[i_r]

    Args:
        queries: ``(R, D)``, scaled already; H heads lie side by side.
        memory: ``(B, S, 2, D)`` keys and values of the sources; anything past a length, NaN included.
        lengths: ``(B,)`` int64 with 0 <= length <= S; a source of length 0 gives zeros.
        items: ``(R,)`` int64, the source i of every row.
        heads: H; divides D.
    Returns:
        ``(R, D)``; differentiable, in which case plain PyTorch gathers the memory.

    Time O(R S D); memory O(R D) with kernels, O(R S D) without.

    >>> memory = torch.tensor([[[[0.0], [1.0]], [[0.0], [3.0]]]])
    >>> attend_source(torch.ones(2, 1), memory, torch.tensor([2]), torch.tensor([0, 0]), 1)
    tensor([[2.],
            [2.]])
    """
    _check_queries(queries, memory, heads, "memory")
    if lengths.shape != memory.shape[:1] or items.shape != queries.shape[:1]:
        raise ShapeError(
            f"`lengths` must be (B,) with B = {memory.shape[0]} and `items` (R,) with R = {queries.shape[0]}, "
            f"got {tuple(lengths.shape)} and {tuple(items.shape)}"
        )
    if lengths.dtype != torch.int64 or items.dtype != torch.int64:
        raise ShapeError(f"`lengths` and `items` must be int64, got {lengths.dtype} and {items.dtype}; use .long()")
    backend = _backend(queries, memory)
    return backend.attend_source(queries, memory, lengths.contiguous(), items.contiguous(), heads)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    r"""A residual connection and the LayerNorm after it, in one pass over the rows.

    .. math:: s = x + r, \qquad y = \frac{s - \mathrm{mean}(s)}{\sqrt{\mathrm{var}(s) + \epsilon}} \odot w + b

    Args:
        x: ``(R, D)``, what a block gave.
        residual: ``(R, D)``, what went into it.
        weight: ``(D,)``; ``bias`` ``(D,)`` or none.
        eps: added to the variance.
    Returns:
        y and s, both ``(R, D)``.

    Time and memory O(R D).

    >>> add_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(2), torch.zeros(2), 0.0)
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    shape = x.shape
    if len(shape) != 2 or residual.shape != shape:
        raise ShapeError(f"`x` and `residual` must be (R, D) alike, got {tuple(shape)} and {tuple(residual.shape)}")
    size = (shape[1],)
    if weight.shape != size or (bias is not None and bias.shape != size):
        raise ShapeError(f"`weight` and `bias` must be (D,) with D = {shape[1]}, got `weight` {tuple(weight.shape)}")
    # With a few rows both ways cost what the calls do.
    backend = reference if shape[0] < _FEW_ROWS else _backend(x, residual, weight)
    if bias is not None and backend is not reference and _backend(bias, x) is reference:
        backend = reference
    return backend.add_norm(x, residual, weight, bias, eps)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    r"""An affine map of a few rows, whose cost is that of reading the weights once.

    .. math:: y_{rn} = s_n \sum_i x_{ri} W_{ni} + b_n, \text{ then } \max(y, 0) \text{ if asked}

    Args:
        x: ``(R, in)``.
        weight: ``(out, in)``, in the type of ``x`` or stored as bfloat16 or int8; sums are kept in the type of ``x``.
        bias: ``(out,)`` or none.
        scale: ``(out,)``, what the stored weights of an output are multiplied by; none is 1.
        relu: whether negative outputs become 0.
    Returns:
        ``(R, out)``; differentiable, in which case plain PyTorch computes it. From some dozens of rows on it is
        PyTorch's matrix product in any case, with stored weights restored for the call.

    Time O(R in out); memory O(R out), and O(in out) where weights are restored.

    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [-3.0, 0.0]]), torch.tensor([0.5, 0.5]), relu=True)
    tensor([[3.5000, 0.0000]])
    """
    shape, size = x.shape, weight.shape
    if len(shape) != 2 or len(size) != 2 or shape[1] != size[1]:
        raise ShapeError(f"`x` must be (R, in) and `weight` (out, in), got {tuple(shape)} and {tuple(size)}")
    outer = (size[0],)
    if bias is not None and bias.shape != outer:
        raise ShapeError(f"`bias` must be (out,) with out = {size[0]}, got {tuple(bias.shape)}")
    if scale is not None and scale.shape != outer:
        raise ShapeError(f"`scale` must be (out,) with out = {size[0]}, got {tuple(scale.shape)}")
    backend = _backend(x, bias, scale)
    if backend is not reference:
        readable = weight.dtype in _STORED and weight.is_contiguous() and weight.device == x.device
        if not readable or (weight.requires_grad and torch.is_grad_enabled()):
            backend = reference
    return backend.linear(x, weight, bias, scale, relu=relu)


def linear_map(
    weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, relu: bool = False
) -> Callable[[Tensor], Tensor]:
    """:func:`linear` of these weights as a function of x alone: what can be checked once is checked here.

    At one row the checks of a call cost as much as a small product. The function reads the weights where they lie now;
    changes in place are seen, other tensors put in their place are not.

    >>> double = linear_map(2 * torch.eye(2))
    >>> double(torch.ones(1, 2))
    tensor([[2., 2.]])
    """
    linear(weight.new_zeros((0, weight.shape[1]), dtype=torch.float32), weight, bias, scale)  # raises what it must

    def plain(x: Tensor) -> Tensor:
        return linear(x, weight, bias, scale, relu=relu)

    numbers = [x for x in (bias, scale) if x is not None]
    kernels = decoding_kernels(weight if weight.dtype == torch.float32 else weight.new_ones(1, dtype=torch.float32))
    taken = any(x.requires_grad for x in (weight, *numbers)) and torch.is_grad_enabled()
    if kernels is None or taken or weight.dtype not in _STORED or not weight.is_contiguous():
        return plain
    if any(x.dtype is not torch.float32 or not x.is_contiguous() or x.device != weight.device for x in numbers):
        return plain
    fast = kernels.linear_map(weight, bias, scale, relu)

    def apply(x: Tensor) -> Tensor:
        y = fast(x)
        return plain(x) if y is None else y

    return apply
