r"""Entmax of rows on a GPU: a launch for the weights and one for the gradient.

A program has one row, or several short ones, and finds their thresholds by the iterations of
``kernels.cpu.sparse_maps``: Newton's on the norm in u for 1 / d = 1 and 2, in a bracket and in c for any other alpha. A
row of up to ``_ONE`` entries stays in registers; a longer one is read again at every step. All is computed in the type
of the scores: float32 weights are right to some 1e-7 up to alpha = 2; beyond, where the slope at 0 is infinite, to
1e-5.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.launching import launch, on_device_of

__all__ = ["entmax", "entmax_value", "entmax_vjp"]

_ONE = 8192  # entries in registers
_TILE = 1024  # entries of several rows
_SQUARE, _LINEAR, _ANY = 1, 2, 0  # 1 / d is 2, 1, or anything


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
def _sweep(
    x, base, row, column, rows, size, top, d, at, most, KIND: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of weights and slopes of every row."""
    if ONE:
        p, slope = _weigh(x, top, d, at, most, KIND)  # pyright: ignore[reportGeneralTypeIssues]
        return tl.sum(p, axis=1), tl.sum(slope, axis=1)
    total = tl.zeros_like(top)
    slopes = tl.zeros_like(top)
    for begin in range(0, size, BLOCK):
        x, _, _ = _load(base, row, column, begin, rows, size, -float("inf"))
        p, slope = _weigh(x, top, d, at, most, KIND)
        total += tl.sum(p, axis=1)
        slopes += tl.sum(slope, axis=1)
    return total, slopes


@triton.jit
def _largest(x, base, row, column, rows, size, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest entry of every row, and whether there is NaN or +inf."""
    if ONE:
        return tl.max(x, axis=1), tl.max(tl.where(x < float("inf"), 0, 1), axis=1)
    top = tl.max(x, axis=1)
    wrong = tl.max(tl.where(x < float("inf"), 0, 1), axis=1)
    for begin in range(BLOCK, size, BLOCK):
        x, _, _ = _load(base, row, column, begin, rows, size, -float("inf"))
        top = tl.maximum(top, tl.max(x, axis=1))
        wrong = tl.maximum(wrong, tl.max(tl.where(x < float("inf"), 0, 1), axis=1))
    return top, wrong


@triton.jit
def _entmax_rows(
    scores, alphas, high, low, gold, out, values, rows, size, bound, eps, most,
    KIND: tl.constexpr, EACH: tl.constexpr, GOLD: tl.constexpr, VALUE: tl.constexpr, ONE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x, offset, inside = _load(scores, row, column, 0, rows, size, -float("inf"))  # pyright: ignore[reportGeneralTypeIssues]
    top, wrong = _largest(x, scores, row, column, rows, size, ONE, BLOCK)
    kind = scores.dtype.element_ty
    d = tl.zeros_like(top) + high + low
    if EACH:
        d = (tl.load(alphas + row, mask=row < rows, other=2.0) - 1.0).to(kind)
    d = tl.maximum(d, 1e-15 if kind == tl.float64 else 1e-7)
    live = (top > -float("inf")) & (wrong == 0)
    top = tl.where(live, top, 0.0)
    at = tl.zeros_like(top)
    if KIND > 0:
        at += 1.0
    least = tl.zeros_like(top)
    bracket = tl.zeros_like(top) + bound  # the logarithm of the size, and a little
    width = bracket * 4.0
    total = tl.zeros_like(top) + 1.0
    step = 0
    moving = 1
    while moving > 0:
        total, slope = _sweep(x, scores, row, column, rows, size, top, d, at, most, KIND, ONE, BLOCK)
        total, slope = tl.where(live, total, 1.0), tl.where(live, slope, 1.0)
        if KIND == 2:
            moved = at - (total - 1.0) / slope
            far = (total - 1.0 > eps) & (moved < at)
        elif KIND == 1:
            moved = at - (total - tl.sqrt(total)) / slope
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
    pivot = tl.zeros_like(top)
    label = tl.zeros_like(row) - 1
    seen = row < rows
    if GOLD:
        label = tl.load(gold + row, mask=row < rows, other=-1).to(tl.int32)
        known = (label >= 0) & (row < rows)
        pivot = tl.load(scores + row.to(tl.int64) * size + label, mask=known, other=0.0)
        seen = pivot > -float("inf")
        label, pivot = tl.where(seen, label, -1), tl.where(seen, pivot, 0.0)
    value = tl.zeros_like(top)
    for begin in range(0, size, BLOCK):
        if not ONE:
            x, offset, inside = _load(scores, row, column, begin, rows, size, -float("inf"))
        p, _ = _weigh(x, top, d, at, most, KIND)
        p = p / total[:, None]
        if VALUE:
            value += _value(x, p, d, pivot, KIND)
        p = tl.where(live[:, None], p, tl.where(wrong > 0, float("nan"), 0.0)[:, None])
        if GOLD:
            p = tl.where(((begin + column)[None, :] == label[:, None]) & live[:, None], p - 1.0, p)
        tl.store(out + offset, p.to(kind), mask=inside)
    if VALUE:
        empty = -float("inf")
        if GOLD:
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
def _vjp_rows(
    weights, grad, alphas, high, low, out, rows, size, most,
    KIND: tl.constexpr, EACH: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    kind = weights.dtype.element_ty
    p, offset, inside = _load(weights, row, column, 0, rows, size, 0.0)  # pyright: ignore[reportGeneralTypeIssues]
    g, _, _ = _load(grad, row, column, 0, rows, size, 0.0)
    total = tl.zeros((ROWS,), kind)
    product = tl.zeros((ROWS,), kind)
    d = total + high + low
    if EACH:
        d = (tl.load(alphas + row, mask=row < rows, other=2.0) - 1.0).to(kind)
    for begin in range(0, size, BLOCK):
        if not ONE:
            p, _, _ = _load(weights, row, column, begin, rows, size, 0.0)
            g, _, _ = _load(grad, row, column, begin, rows, size, 0.0)
        w = _local(p, d, most, KIND)
        total += tl.sum(w, axis=1)
        product += tl.sum(tl.where(p > 0.0, w * g, 0.0), axis=1)
    mean = tl.where(total > 0.0, product / tl.where(total > 0.0, total, 1.0), 0.0)
    for begin in range(0, size, BLOCK):
        if not ONE:
            p, offset, inside = _load(weights, row, column, begin, rows, size, 0.0)
            g, _, _ = _load(grad, row, column, begin, rows, size, 0.0)
        w = _local(p, d, most, KIND)
        tl.store(out + offset, tl.where(p > 0.0, w * (g - mean[:, None]), 0.0).to(kind), mask=inside)


def _power(size: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << (size - 1).bit_length()


def _shape(rows: int, size: int, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """How many programs, and the settings that a launch shares."""
    room = _ONE if dtype == torch.float32 else _ONE // 2
    block = min(_power(size), room)
    several = max(1, min(_TILE // block, _power(rows)))
    warps = max(1, min(16, block * several // 256))
    return -(-rows // several), {"ONE": size <= block, "ROWS": several, "BLOCK": block, "num_warps": warps}


def _alpha(alpha: Tensor | float, like: Tensor) -> tuple[int, Tensor, float, float, bool]:
    """Which iteration, the alpha of each row if there is one, and d as the sum of two float32, which a launch takes."""
    if isinstance(alpha, Tensor):
        return _ANY, alpha.detach().reshape(-1).contiguous(), 0.0, 0.0, True
    kind = {1.5: _SQUARE, 2.0: _LINEAR}.get(alpha, _ANY)
    d = float(alpha) - 1.0
    high = float(np.float32(d))
    return kind, like, high, d - high, False


def _launch(scores: Tensor, alpha: Tensor | float, gold: Tensor | None, valued: bool) -> tuple[Tensor, Tensor]:
    scores = scores.detach().contiguous()
    rows, size = scores.shape
    out = torch.empty_like(scores)
    values = scores.new_empty(rows if valued else 0)
    kind, alphas, high, low, each = _alpha(alpha, scores)
    programs, settings = _shape(rows, size, scores.dtype)
    single = scores.dtype == torch.float32
    bound = math.log(size) + 1e-5
    launch(
        *(_entmax_rows, (programs,)),
        *(scores, alphas, high, low, scores if gold is None else gold.contiguous(), out, values, rows, size),
        *(bound, 2.4e-7 if single else 2e-15, 80.0 if single else 690.0),
        KIND=kind,
        EACH=each,
        GOLD=gold is not None,
        VALUE=valued,
        **settings,
    )
    return values, out


def entmax(scores: Tensor, alpha: Tensor | float) -> Tensor:
    """Weights of rows ``(R, N)``, N > 0, of float32 or float64; alpha a number or ``(R, 1)``."""
    with on_device_of(scores):
        return _launch(scores, alpha, None, False)[1]


def entmax_value(scores: Tensor, alpha: Tensor | float, gold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Conjugates ``(R,)``, or losses for gold ``(R,)`` int64, and their gradient ``(R, N)``, in one launch."""
    with on_device_of(scores):
        return _launch(scores, alpha, gold, True)


def entmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor | float) -> Tensor:
    """The gradient in the scores ``(R, N)`` from the weights and the gradient in them."""
    weights, grad = weights.detach(), grad.detach().contiguous()
    rows, size = weights.shape
    out = torch.empty_like(weights)
    kind, alphas, high, low, each = _alpha(alpha, weights)
    programs, settings = _shape(rows, size, weights.dtype)
    most = torch.finfo(weights.dtype).max / size if weights.dtype == torch.float32 else 1e38
    given = (weights, grad, alphas, high, low, out, rows, size, most)
    with on_device_of(weights):
        launch(_vjp_rows, (programs,), *given, KIND=kind, EACH=each, **settings)
    return out
