"""float32 products of a decoding step by matrix units, which multiply half precision many times as fast as float32.

A row is scaled by a power of two so that its largest entry lies between 2^13 and 2^14, and written as high + low, each
with 11 bits: 22 bits of every entry that is not 2^16 times smaller than the largest. A product of two such rows is
three of halves, low x high + high x low + high x high; what is left out, low x low, is 2^-22 of the largest. Matrix
units drop bits where they add for long: sums of a block of columns are therefore added up outside of them.

Activations have a scale for every block of columns, so that whoever writes a block needs to know no other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import pending
from thalweg.kernels.gpu.launching import ceiling, overlapped

__all__ = ["ACTIVATIONS", "Halves", "multiply", "normalise", "suits", "write"]

# Numbers of the activations, as the kernel takes them.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
_FEW = 16  # rows up to which reading the matrix takes longer than multiplying
_MANY = 1024  # rows from which a program that normalises has more than one


def suits(rows: int) -> bool:
    """Whether so many rows are worth products of halves.

    >>> suits(1), suits(100)
    (False, True)
    """
    return rows > _FEW


class Halves(NamedTuple):
    """A matrix (R, K) in half precision: scales (R, K / G) times high + low.

    >>> Halves.empty(2, 32, 16, torch.device("cpu")).scales.shape
    torch.Size([2, 2])
    """

    high: Tensor  # (R, K) float16
    low: Tensor  # (R, K) float16
    scales: Tensor  # (R, K / G) float32, powers of two

    @classmethod
    def empty(cls, rows: int, columns: int, block: int, device: torch.device) -> Halves:
        """Room for one, with a scale for every ``block`` columns."""
        high, low = torch.empty(2, rows, columns, dtype=torch.float16, device=device)
        return cls(high, low, torch.empty(rows, columns // block, device=device))

    @property
    def block(self) -> int:
        """G, the columns that share a scale."""
        return self.high.shape[1] // self.scales.shape[1]


@triton.jit
def write(out, entries, within, row, first, limit, width, GP: tl.constexpr):
    """Entries (RP, NP) into columns ``first`` ... ``limit`` - 1 of rows ``width`` wide; as they are where GP is 0.

    Else in halves, with one scale for all of a row that is given, which stands for every GP columns of it.
    """
    NP: tl.constexpr = entries.shape[1]
    at = row.to(tl.int64)[:, None] * width + (first + tl.arange(0, NP))[None, :]
    if GP == 0:
        tl.store(out.high + at, entries.to(out.high.dtype.element_ty), mask=within)
    else:
        entries = tl.where(within, entries, 0.0)
        peak = tl.max(tl.abs(entries), axis=1)
        exponent = tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) & 255, 14)
        scale = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        scaled = entries * ((267 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        high = scaled.to(tl.float16)
        tl.store(out.high + at, high, mask=within)
        tl.store(out.low + at, (scaled - high.to(tl.float32)).to(tl.float16), mask=within)
        block = first // GP + tl.arange(0, NP // GP)
        there = (tl.max(within.to(tl.int32), axis=1) > 0)[:, None] & (block < limit // GP)[None, :]
        to = out.scales + row[:, None] * (width // GP) + block[None, :]
        tl.store(to, scale[:, None] + tl.zeros((1, NP // GP), tl.float32), mask=there)


@triton.jit
def _normalise(
    x, gain, shift, out, rows, width, eps,
    NORM: tl.constexpr, KEEP: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    pending(WAIT)
    row = tl.program_id(0) * RP + tl.arange(0, RP)
    column = tl.arange(0, DP)
    within = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    entries = tl.load(x + at, mask=within, other=0.0)
    if NORM:
        mean = tl.sum(entries, axis=1) / width
        away = tl.where(within, entries - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(away * away, axis=1) / width + eps)
        g = tl.load(gain + column, mask=column < width, other=0.0)
        s = tl.load(shift + column, mask=column < width, other=0.0)
        entries = away * inverse[:, None] * g[None, :] + s[None, :]
    if KEEP:
        tl.store(x + at, entries, mask=within)
    write(out, entries, within, row, 0, width, width, GP)


def normalise(x: Tensor, norm: tuple[Tensor, Tensor, float] | None, to: Halves, *, keep: bool = False) -> Halves:
    """LayerNorm (weight, bias, eps) of the rows of ``x`` (R, D), or x as it is, in halves; with ``keep`` in x too."""
    rows, width = x.shape
    gain, shift, eps = norm or (x, x, 0.0)
    whole = ceiling(width)
    each = max(1, 256 // whole, min(4, 4096 // whole) if rows > _MANY else 1)
    launched = overlapped(x)
    kernel: Any = _normalise
    kernel[(-(-rows // each),)](
        x, gain, shift, to, rows, width, eps,
        NORM=norm is not None, KEEP=keep, GP=to.block, RP=each, DP=whole, WAIT=bool(launched),
        num_warps=max(1, min(8, each * whole // 256)), **launched,
    )  # fmt: skip
    return to


@triton.jit
def _gelu(x):
    """x Phi(x) by Phi(-a) = erfc(a / sqrt 2) / 2 = 2^q(a) for a = |x|, q a polynomial fitted up to a = 5.94.

    Off by less than 2e-7 |x|. A library's erf chooses between two formulas, entry by entry, and takes three times as
    long as a product.
    """
    a = tl.minimum(tl.abs(x), 5.939697)
    q = -1.9016728e-06 * a + 2.9611107e-05
    q = q * a - 0.000146217312
    q = q * a - 0.000218554921
    q = q * a + 0.0071514156
    q = q * a - 0.0525447685
    q = q * a - 0.459196056
    q = q * a - 1.15110618
    q = q * a - 1
    tail = tl.exp2(q)
    return x * tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _activate(total, gated, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        total = tl.where(total <= 0, 0.0, total)  # NaN stays NaN
    if ACTIVATION == 2:
        total = _gelu(total)
    if ACTIVATION == 3:
        total = total / (1.0 + tl.exp(-total))
    if ACTIVATION == 4:
        total = total * gated / (1.0 + tl.exp(-gated))
    return total


@triton.jit
def _three(high, low, matrix, at, there):
    """A block of terms of the product of two matrices in halves."""
    upper = tl.load(matrix.high + at, mask=there[:, None], other=0.0).T
    lower = tl.load(matrix.low + at, mask=there[:, None], other=0.0).T
    part = tl.dot(high, lower, tl.dot(low, upper))
    return tl.dot(high, upper, part)


@triton.jit
def _unscaled(total, matrix, bias, column, there, blocks):
    """A product with the scales of the matrix, and a bias. All blocks of a row of the matrix have one scale."""
    scale = tl.load(matrix.scales + column * blocks, mask=there, other=0.0)
    return total * scale[None, :] + tl.load(bias + column, mask=there, other=0.0)[None, :]


@triton.jit
def _multiply(
    x, weight, bias, gate, gate_bias, residual, out, rows, inner, outer,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, GP: tl.constexpr, OUT: tl.constexpr,
    MP: tl.constexpr, NP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    pending(WAIT)
    row = tl.program_id(0) * MP + tl.arange(0, MP)
    column = tl.program_id(1) * NP + tl.arange(0, NP)
    k = tl.arange(0, GP)
    within, there = row < rows, column < outer
    long = row.to(tl.int64)[:, None]  # entries may be more than 2^31
    here = long * inner + k[None, :]
    tile = column[:, None] * inner + k[None, :]
    total = tl.zeros((MP, NP), tl.float32)
    gated = tl.zeros((MP, NP), tl.float32)
    blocks = inner // GP
    scale = tl.load(x.scales + row * blocks, mask=within, other=0.0)
    for block in range(blocks):
        high = tl.load(x.high + here + block * GP, mask=within[:, None], other=0.0)
        low = tl.load(x.low + here + block * GP, mask=within[:, None], other=0.0)
        # A block ahead: it is there when the product is.
        ahead = tl.load(x.scales + row * blocks + block + 1, mask=within & (block + 1 < blocks), other=0.0)
        total += _three(high, low, weight, tile + block * GP, there) * scale[:, None]
        if ACTIVATION == 4:
            gated += _three(high, low, gate, tile + block * GP, there) * scale[:, None]
        scale = ahead
    total = _unscaled(total, weight, bias, column, there, blocks)
    if ACTIVATION == 4:
        gated = _unscaled(gated, gate, gate_bias, column, there, blocks)
    total = _activate(total, gated, ACTIVATION)
    mask = within[:, None] & there[None, :]
    if ADD:
        total += tl.load(residual + long * outer + column[None, :], mask=mask, other=0.0)
    write(out, total, mask, row, tl.program_id(1) * NP, outer, outer, OUT)


def _tile(rows: int, outer: int, block: int) -> tuple[int, int]:
    """Rows and columns of a tile: the more sums there are, the larger the tiles that keep all units busy.

    Of the columns a whole block where they are written in halves.
    """
    size = rows * outer
    tall, wide = (16, 32) if size <= 80_000 else (64, 16 if size <= 150_000 else 32 if size <= 300_000 else 64)
    wide = min(wide, max(16, ceiling(outer)))
    return (max(16, tall * wide // block), block) if wide < block else (tall, wide)


def multiply(
    x: Halves,
    weight: Halves,
    bias: Tensor,
    *,
    activation: str = "none",
    gate: tuple[Halves, Tensor] | None = None,
    residual: Tensor | None = None,
    halved: bool = False,
    out: Tensor | None = None,
) -> Any:
    """``f(x W' + b) + residual`` (R, N) of x (R, K) and W (N, K): float32, in ``out`` if given, or :class:`Halves`.

    ``swiglu`` is (x W' + b) silu(x G' + g) with ``gate`` = (G, g).
    """
    (rows, inner), outer, block = x.high.shape, len(weight.high), x.block
    if halved:
        to = Halves.empty(rows, outer, block, bias.device)
    else:
        out = bias.new_empty(rows, outer) if out is None else out
        to = Halves(out, out, out)
    MP, NP = _tile(rows, outer, block if halved else 0)
    launched = overlapped(bias)
    kernel: Any = _multiply
    kernel[-(-rows // MP), -(-outer // NP)](
        x, weight, bias, *(gate or (weight, bias)), bias if residual is None else residual, to, rows, inner, outer,
        ACTIVATION=ACTIVATIONS[activation], ADD=residual is not None, GP=block, OUT=block if halved else 0,
        MP=MP, NP=NP, WAIT=bool(launched), num_warps=4,
        num_stages=3 if rows * outer <= 1_100_000 else 2,  # of many tiles more then fit on a multiprocessor
        **launched,
    )  # fmt: skip
    return to if halved else out
