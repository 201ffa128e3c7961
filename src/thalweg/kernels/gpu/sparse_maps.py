r"""Entmax of rows on a GPU: a launch for the weights and one for the gradient.

A program has one row, or several short ones, and finds their thresholds by the iterations of the CPU's kernels:
Newton's on the norm in u for 1 / d = 1 and 2, in a bracket and in c for any other alpha. A row of up to ``_ONE``
entries stays in registers; a longer one is read again at every step. All is computed in the type of the scores: float32
weights are right to some 1e-7 up to alpha = 2; beyond, where the slope at 0 is infinite, to 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.launching import ceiling, launch, on_device_of

__all__ = ["entmax", "entmax_value", "entmax_vjp"]

_ONE = 8192  # entries in registers
_TILE = 1024  # entries of several rows

if TYPE_CHECKING:  # who checks types knows no members of constants
    constexpr = Any
else:
    constexpr = tl.constexpr


class Cut(NamedTuple):
    """What kernels know when they are compiled."""

    KIND: int  # 2 for alpha = 2, 1 for alpha = 1.5, 0 for any other
    ROWS: int  # of a program
    BLOCK: int  # entries that are read together
    ONE: bool  # a row is one block
    GOLD: bool = False  # the loss of a gold entry is wanted
    VALUE: bool = False  # values beside weights


@triton.jit
def _log1p(x):
    """log(1 + x) for x > -1, to the last digits also near 0: 2 artanh(x / (2 + x))."""
    f = x / (2.0 + x)
    s = f * f
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))))))
    # 1 + x is rounded by no more than the last digit of the result where x is not small
    return tl.where(tl.abs(x) < 0.2, 2.0 * f * series, tl.log(tl.where(tl.abs(x) < 0.2, 1.0, 1.0 + x)))


@triton.jit
def _expm1(x):
    """exp(x) - 1, to the last digits also near 0."""
    small = tl.where(tl.abs(x) < 0.2, x, 0.0)
    series = 1.0 + small / 10 * (1.0 + small / 11)
    for k in tl.static_range(9, 1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        series = 1.0 + small / k * series
    return tl.where(tl.abs(x) < 0.2, small * series, tl.exp(x) - 1.0)


@triton.jit
def _exponents(alphas, each, row, rows, like, KIND: tl.constexpr):
    """d = alpha - 1 of every row, in the type of ``like``; alphas are those of the rows (each = 1) or one."""
    if KIND == 2:
        return tl.zeros_like(like) + 1.0
    elif KIND == 1:
        return tl.zeros_like(like) + 0.5
    else:
        return (tl.load(alphas + row * each, mask=row < rows, other=2.0) - 1.0).to(like.dtype)


@triton.jit
def _weigh(x, top, d, at, most, KIND: tl.constexpr):
    """Weights before they are made to sum to 1, and what the slope is a sum of, for entries x (ROWS, BLOCK)."""
    z = (x - top[:, None]) * d[:, None]
    if KIND == 2:
        p = tl.maximum(z + at[:, None], 0.0)
        slope = tl.where(p > 0.0, 1.0, 0.0).to(p.dtype)
    elif KIND == 1:
        slope = tl.maximum(z + at[:, None], 0.0)
        p = slope * slope
    else:
        change = z * tl.exp(tl.minimum(d * at, most))[:, None]
        on = change > -1.0
        change = tl.where(on, change, 0.0)
        p = tl.where(on, tl.exp(_log1p(change) / d[:, None] - at[:, None]), 0.0)
        slope = p / (1.0 + change)
    return p, slope


@triton.jit
def _load(base, row, column, begin, rows, size, missing):
    """Entries (ROWS, BLOCK) from column ``begin`` on; ``missing`` where there are none."""
    inside = (row < rows)[:, None] & (begin + column < size)[None, :]
    offset = row.to(tl.int64)[:, None] * size + (begin + column)[None, :]
    return tl.load(base + offset, mask=inside, other=missing), offset, inside


@triton.jit
def _sweep(x, base, row, column, rows, size, top, d, at, most, CUT: constexpr):
    """Sums of weights and slopes of every row."""
    if CUT.ONE:
        p, slope = _weigh(x, top, d, at, most, CUT.KIND)  # pyright: ignore[reportGeneralTypeIssues]
        return tl.sum(p, axis=1), tl.sum(slope, axis=1)
    total, slopes = tl.zeros_like(top), tl.zeros_like(top)
    for begin in range(0, size, CUT.BLOCK):
        x, _, _ = _load(base, row, column, begin, rows, size, -float("inf"))
        p, slope = _weigh(x, top, d, at, most, CUT.KIND)  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.sum(p, axis=1)
        slopes += tl.sum(slope, axis=1)
    return total, slopes


@triton.jit
def _largest(x, base, row, column, rows, size, CUT: constexpr):
    """The largest entry of every row, and whether there is NaN or +inf."""
    top, wrong = tl.max(x, axis=1), tl.max(tl.where(x < float("inf"), 0, 1), axis=1)
    if not CUT.ONE:
        for begin in range(CUT.BLOCK, size, CUT.BLOCK):
            x, _, _ = _load(base, row, column, begin, rows, size, -float("inf"))
            top = tl.maximum(top, tl.max(x, axis=1))
            wrong = tl.maximum(wrong, tl.max(tl.where(x < float("inf"), 0, 1), axis=1))
    return top, wrong


@triton.jit
def _threshold(x, base, row, column, rows, size, top, live, d, most, CUT: constexpr):
    """Where the weights of every row that is ``live`` sum to 1, and to what they sum there."""
    eps = 2e-15 if x.dtype == tl.float64 else 2.4e-7
    at, least = tl.zeros_like(top) + (1.0 if CUT.KIND > 0 else 0.0), tl.zeros_like(top)
    bracket = tl.zeros_like(top) + 1e-5 + tl.log(tl.zeros_like(top) + size)
    width, total = bracket * 4.0, tl.zeros_like(top) + 1.0
    step, moving = 0, 1
    while moving > 0:
        total, slope = _sweep(x, base, row, column, rows, size, top, d, at, most, CUT)
        total, slope = tl.where(live, total, 1.0), tl.where(live, slope, 1.0)
        if CUT.KIND > 0:
            power = total if CUT.KIND == 2 else tl.sqrt(total)
            moved = at - (total - (1.0 if CUT.KIND == 2 else power)) / slope
            far = (total - 1.0 > eps) & (moved < at)
        else:
            least = tl.where(total > 1.0, at, least)
            bracket = tl.where(total > 1.0, bracket, at)
            change = total * _expm1(-d * _log1p(total - 1.0)) / slope
            moved = at - _log1p(tl.maximum(change, -0.999)) / d
            far = (tl.abs(total - 1.0) > eps) & (tl.abs(moved - at) > eps * at) & (bracket - least > eps * bracket)
            halve = (
                ((d > 1.0) & (bracket - least > 0.5 * width)) | (moved <= least) | (moved >= bracket) | (change < -0.9)
            )
            width = bracket - least
            moved = tl.where(halve, 0.5 * (least + bracket), moved)
        at = tl.where(far, moved, at)
        step += 1
        moving = tl.where(step < 100, tl.max(tl.where(far, 1, 0), axis=0), 0)
    return at, total


@triton.jit
def _entmax_rows(alphas, each, scores, gold, out, values, rows, size, CUT: constexpr):
    row, column = tl.program_id(0) * CUT.ROWS + tl.arange(0, CUT.ROWS), tl.arange(0, CUT.BLOCK)
    x, offset, inside = _load(  # pyright: ignore[reportGeneralTypeIssues]
        scores, row, column, 0, rows, size, -float("inf")
    )
    kind = scores.dtype.element_ty
    most = 690.0 if kind == tl.float64 else 80.0
    top, wrong = _largest(x, scores, row, column, rows, size, CUT)
    live = (top > -float("inf")) & (wrong == 0)
    top = tl.where(live, top, 0.0)
    d = tl.maximum(_exponents(alphas, each, row, rows, top, CUT.KIND), 1e-15 if kind == tl.float64 else 1e-7)
    at, total = _threshold(x, scores, row, column, rows, size, top, live, d, most, CUT)
    pivot, label, seen = tl.zeros_like(top), tl.zeros_like(row) - 1, row < rows
    if CUT.GOLD:
        label = tl.load(gold + row, mask=row < rows, other=-1).to(tl.int32)
        known = (label >= 0) & (row < rows)
        pivot = tl.load(scores + row.to(tl.int64) * size + label, mask=known, other=0.0)
        seen = pivot > -float("inf")
        label, pivot = tl.where(seen, label, -1), tl.where(seen, pivot, 0.0)
    value = tl.zeros_like(top)
    for begin in range(0, size, CUT.BLOCK):
        if not CUT.ONE:
            x, offset, inside = _load(scores, row, column, begin, rows, size, -float("inf"))
        p, _ = _weigh(x, top, d, at, most, CUT.KIND)
        p = p / total[:, None]
        if CUT.VALUE:
            value += _value(x, p, d, pivot, CUT.KIND)
        p = tl.where(live[:, None], p, tl.where(wrong > 0, float("nan"), 0.0)[:, None])
        if CUT.GOLD:
            p = tl.where(((begin + column)[None, :] == label[:, None]) & live[:, None], p - 1.0, p)
        tl.store(out + offset, p.to(kind), mask=inside)
    if CUT.VALUE:
        empty = -float("inf")
        if CUT.GOLD:
            empty = float("inf")
            value = tl.where(seen, value, float("inf"))
        value = tl.where(live, value, tl.where(wrong > 0, float("nan"), empty))
        tl.store(values + row, value.to(kind), mask=row < rows)


@triton.jit
def _value(x, p, d, pivot, KIND: tl.constexpr):
    """The part of these entries in <p, s - pivot> - Omega(p)."""
    on = p > 0.0
    gain = tl.where(on, p * (tl.where(on, x, 0.0) - pivot[:, None]), 0.0)
    if KIND == 2:
        omega = p * (p - 1.0)
    elif KIND == 1:
        omega = p * (tl.sqrt(p) - 1.0)
    else:
        omega = tl.where(on, p * _expm1(d[:, None] * tl.log(tl.where(on, p, 1.0))), 0.0)
    return tl.sum(gain, axis=1) - tl.sum(omega, axis=1) / (d * (1.0 + d))


@triton.jit
def _local(p, d, most, KIND: tl.constexpr):
    """w = p^(1 - d) on the support."""
    on = p > 0.0
    if KIND == 2:
        w = tl.where(on, 1.0, 0.0).to(p.dtype)
    elif KIND == 1:
        w = tl.sqrt(p)
    else:
        w = tl.where(on, tl.minimum(tl.exp((1.0 - d)[:, None] * tl.log(tl.where(on, p, 1.0))), most), 0.0)
    return w


@triton.jit
def _vjp_rows(alphas, each, weights, grad, out, rows, size, CUT: constexpr):
    row, column = tl.program_id(0) * CUT.ROWS + tl.arange(0, CUT.ROWS), tl.arange(0, CUT.BLOCK)
    kind = weights.dtype.element_ty
    p, offset, inside = _load(weights, row, column, 0, rows, size, 0.0)  # pyright: ignore[reportGeneralTypeIssues]
    g, _, _ = _load(grad, row, column, 0, rows, size, 0.0)
    total, product = tl.full((CUT.ROWS,), 0, kind), tl.full((CUT.ROWS,), 0, kind)
    d, most = _exponents(alphas, each, row, rows, total, CUT.KIND), 3.4e38 / size
    for begin in range(0, size, CUT.BLOCK):
        if not CUT.ONE:
            p, _, _ = _load(weights, row, column, begin, rows, size, 0.0)
            g, _, _ = _load(grad, row, column, begin, rows, size, 0.0)
        w = _local(p, d, most, CUT.KIND)
        total += tl.sum(w, axis=1)
        product += tl.sum(tl.where(p > 0.0, w * g, 0.0), axis=1)
    mean = tl.where(total > 0.0, product / tl.where(total > 0.0, total, 1.0), 0.0)
    for begin in range(0, size, CUT.BLOCK):
        if not CUT.ONE:
            p, offset, inside = _load(weights, row, column, begin, rows, size, 0.0)
            g, _, _ = _load(grad, row, column, begin, rows, size, 0.0)
        w = _local(p, d, most, CUT.KIND)
        tl.store(out + offset, tl.where(p > 0.0, w * (g - mean[:, None]), 0.0).to(kind), mask=inside)


def _start(kernel: Any, alpha: Tensor | float, *tensors: Tensor, **wanted: bool) -> None:
    """A launch over the rows of the first of its tensors."""
    x = tensors[0]
    rows, size = x.shape
    each = isinstance(alpha, Tensor)
    kind = 0 if each else {1.5: 1, 2.0: 2}.get(alpha, 0)
    if each:
        alphas = alpha.detach().reshape(-1).contiguous()
    else:  # in float64, for the sake of what is left when 1 is taken off; known kinds do not look at it
        alphas = x if kind else x.new_full((1,), alpha, dtype=torch.float64)
    block = min(ceiling(size), _ONE if x.dtype == torch.float32 else _ONE // 2)
    several = max(1, min(_TILE // block, ceiling(rows)))
    cut = Cut(kind, several, block, size <= block, **wanted)
    warps = max(1, min(16, block * several // 256))
    with on_device_of(x):
        launch(kernel, (-(-rows // several),), alphas, int(each), *tensors, rows, size, CUT=cut, num_warps=warps)


def entmax(scores: Tensor, alpha: Tensor | float) -> Tensor:
    """Weights of rows ``(R, N)``, N > 0, of float32 or float64; alpha a number or ``(R, 1)``."""
    scores = scores.detach().contiguous()
    out = torch.empty_like(scores)
    _start(_entmax_rows, alpha, scores, scores, out, scores)
    return out


def entmax_value(scores: Tensor, alpha: Tensor | float, gold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Conjugates ``(R,)``, or losses for gold ``(R,)`` int64, and their gradient ``(R, N)``, in one launch."""
    scores = scores.detach().contiguous()
    out, values = torch.empty_like(scores), scores.new_empty(len(scores))
    labels = scores if gold is None else gold.contiguous()
    _start(_entmax_rows, alpha, scores, labels, out, values, GOLD=gold is not None, VALUE=True)
    return values, out


def entmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor | float) -> Tensor:
    """The gradient in the scores ``(R, N)`` from the weights and the gradient in them."""
    weights = weights.detach().contiguous()
    out = torch.empty_like(weights)
    _start(_vjp_rows, alpha, weights, grad.detach().contiguous(), out)
    return out
