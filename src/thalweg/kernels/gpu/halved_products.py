"""Products of matrices in halves (:mod:`thalweg.kernels.gpu.halves`), and what becomes of them, in one launch each."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.gpu.arithmetic import pending
from thalweg.kernels.gpu.decode_linear import ACTIVATIONS, FEW, activate
from thalweg.kernels.gpu.halves import Halves, Matrix, store_halves
from thalweg.kernels.gpu.launching import overlapped

__all__ = ["Tiles", "multiply", "parts_of", "suits"]

# What becomes of a product: it is stored; added to a stream; shared out to queries and a cache; halved.
_STORE, _ADD, _CACHE, _HALVE = (tl.constexpr(n) for n in range(4))


@triton.jit
def _three(high, low, upper, lower, APART: tl.constexpr):
    """The product of two matrices in halves; apart, three sums that need not wait for one another."""
    part = tl.dot(low, upper)
    if APART:
        return part + tl.dot(high, lower) + tl.dot(high, upper)
    else:
        part = tl.dot(high, lower, part)
        return tl.dot(high, upper, part)


@triton.jit
def _fetch(source, at, mask, first, k, BOXED: tl.constexpr):
    """A tile of some rows and GP columns: by a descriptor, or by addresses."""
    if BOXED:
        return source.load([first, k])
    else:
        return tl.load(source + at + k, mask=mask, other=0.0)


@triton.jit
def _multiply(
    x_high,
    x_low,
    x_scales,
    w_high,
    w_low,
    w_scales,
    bias,
    g_high,
    g_low,
    g_scales,
    g_bias,
    residual,
    out,
    out_low,
    out_scales,
    cache,
    position,
    rows,
    inner,
    outer,
    width,
    part_step,
    END: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles end where the columns do
    BOXED: tl.constexpr,  # whether halves are given by descriptors, of which the hardware copies whole tiles
    EARLY: tl.constexpr,  # whether registers suffice to fetch what is added before the product
    GP: tl.constexpr,
    MP: tl.constexpr,
    NP: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of terms between two waits
    APART: tl.constexpr,
    WAIT: tl.constexpr,
):
    row = tl.program_id(0) * MP + tl.arange(0, MP)
    column = tl.program_id(1) * NP + tl.arange(0, NP)
    k = tl.arange(0, GP)
    within, there = row < rows, column < outer
    long = row.to(tl.int64)  # entries may be more than 2^31
    here = long[:, None] * inner + k[None, :]
    tile = column[:, None] * inner + k[None, :]
    corner, edge = tl.program_id(0) * MP, tl.program_id(1) * NP
    inside = there[:, None] | EVEN
    total = tl.zeros((MP, NP), tl.float32)
    gated = tl.zeros((MP, NP), tl.float32)
    share = inner // GP // PARTS  # blocks of terms of this program
    which = tl.program_id(2)
    begin = which * share
    weight_scale = tl.load(w_scales + column, mask=there, other=0.0)
    added = tl.load(bias + column, mask=there & (which == 0), other=0.0)
    pending(WAIT)
    # What is not multiplied is fetched a block ahead: it is there when the product is.
    scales_row = x_scales + row * (inner // GP)
    scale = tl.load(scales_row + begin, mask=within, other=0.0)
    mask = within[:, None] & there[None, :]
    at = long[:, None] * outer + column[None, :]
    if END == _ADD and EARLY:
        before = tl.load(residual + at, mask=mask & (which == 0), other=0.0)
    for first in range(begin, begin + share, STEPS):
        for step in tl.static_range(STEPS):
            block = first + step
            high = _fetch(x_high, here, within[:, None], corner, block * GP, BOXED)
            low = _fetch(x_low, here, within[:, None], corner, block * GP, BOXED)
            upper = _fetch(w_high, tile, inside, edge, block * GP, BOXED).T
            lower = _fetch(w_low, tile, inside, edge, block * GP, BOXED).T
            next_scale = tl.load(scales_row + block + 1, mask=within & (block + 1 < begin + share), other=0.0)
            total += _three(high, low, upper, lower, APART) * scale[:, None]
            if ACTIVATION == 4:
                upper = _fetch(g_high, tile, inside, edge, block * GP, BOXED).T
                lower = _fetch(g_low, tile, inside, edge, block * GP, BOXED).T
                gated += _three(high, low, upper, lower, APART) * scale[:, None]
            scale = next_scale
    total = total * weight_scale[None, :] + added[None, :]
    if ACTIVATION == 4:
        gated *= tl.load(g_scales + column, mask=there, other=0.0)[None, :]
        gated += tl.load(g_bias + column, mask=there, other=0.0)[None, :]
    total = activate(total, gated, ACTIVATION)
    if END == _STORE:
        tl.store(out + at, total, mask=mask)
    if END == _ADD:
        if not EARLY:
            before = tl.load(residual + at, mask=mask & (which == 0), other=0.0)
        total += before
        tl.store(out + which * part_step + at, total, mask=mask)
    if END == _CACHE:  # queries to `out`, keys and values of this step to where later steps look for them
        if tl.program_id(1) * NP < width:
            tl.store(out + long[:, None] * width + column[None, :], total, mask=mask)
        else:
            slab = cache + tl.load(position) * rows * 2 * width
            tl.store(slab + long[:, None] * 2 * width + (column - width)[None, :], total, mask=mask)
    if END == _HALVE:
        first_block = tl.program_id(1) * (NP // GP)
        store_halves(total, at, mask, out, out_low, out_scales, row, rows, first_block, outer // GP, NP // GP)


class Tiles(NamedTuple):
    """Rows and columns of a tile, warps, stages, blocks of terms between two waits, whether tiles are copied whole.

    >>> Tiles(16, 64, 2, 4).steps
    1
    """

    rows: int
    columns: int
    warps: int
    stages: int
    steps: int = 1
    boxed: bool = False


def _tiles(size: int, halved: bool) -> Tiles:
    """By measurement, for so many sums in all: the more there are, the larger the tiles that keep all units busy."""
    if size <= 300_000 and halved:
        return Tiles(16, 64, 4, 3, 2) if size <= 150_000 else Tiles(32, 64, 4, 3)
    if size <= 300_000:
        return Tiles(16, 32, 4, 3, 2) if size <= 80_000 else Tiles(64, 16 if size <= 150_000 else 32, 4, 3)
    if size <= 600_000:
        return Tiles(64, 64, 4, 3)
    columns = 128 if 1_600_000 < size <= 2_200_000 else 64
    return Tiles(64, columns, 4, 3 if size <= 1_100_000 else 2, boxed=True)


def suits(rows: int) -> bool:
    """Whether so many rows are worth a product by matrix units.

    >>> suits(1), suits(100)
    (False, True)
    """
    return rows > 2 * FEW


def parts_of(rows: int, inner: int) -> int:
    """Into how many sums of fewer terms a product is best cut: programs that add up for long are few.

    >>> parts_of(64, 1024), parts_of(64, 256), parts_of(2048, 1024), parts_of(8192, 1024)
    (8, 1, 2, 1)
    """
    if inner < 512:
        return 1
    parts = 8 if rows <= 128 else 4 if rows <= 512 else 2 if rows <= 4096 else 1
    while inner % (64 * parts):
        parts //= 2
    return max(1, parts)


def _copies_tiles(x: Tensor) -> bool:
    """Whether the hardware copies tiles by descriptors: as it is known to since kernels may overlap."""
    return bool(overlapped(x))


def _described(halves: Halves | Matrix, rows: int, columns: int) -> tuple[Any, ...]:
    """High and low as descriptors of tiles; the rest as it is."""
    return *(TensorDescriptor.from_tensor(half, [rows, columns]) for half in halves[:2]), *halves[2:]


def multiply(
    x: Halves,
    matrix: Matrix,
    out: Tensor | Halves,
    *,
    activation: str = "none",
    gate: Matrix | None = None,
    residual: Tensor | None = None,
    cache: Tensor | None = None,
    position: Tensor | None = None,
) -> None:
    """``out = f(x W' + b) + residual``: x (R, K), W (N, K), out (R, N), halved if that is what ``out`` is.

    With a residual ``out`` may be (P, R, N): the sums over each P-th of the terms, bias and residual in the first.
    With ``cache`` (T, R, 2, D) and ``position`` W is (3 D, D): ``out`` gets the queries, ``cache[position]`` keys and
    values. ``swiglu`` is (x W' + b) silu(x G' + g) with ``gate`` G.
    """
    (rows, inner), outer, block = x.high.shape, len(matrix.high), x.block
    width = outer // 3
    first, low, scales = out if isinstance(out, Halves) else (out, out, out)
    parts = len(first) if first.dim() == 3 else 1
    MP, NP, warps, stages, steps, boxed = _tiles(rows * outer * parts, isinstance(out, Halves))
    whole: Any = triton.next_power_of_2(outer)
    NP = min(NP, max(16, whole))
    if isinstance(out, Halves):
        NP = max(block, NP)  # a scale is of whole blocks
    if cache is not None:
        NP = min(NP, width & -width)  # a tile is of queries, or of keys and values, alone
    end = _HALVE if isinstance(out, Halves) else _ADD if residual is not None else _STORE if cache is None else _CACHE
    launched, both = overlapped(x.high), (x, matrix, gate or matrix)
    boxed = boxed and _copies_tiles(x.high)
    if boxed:
        both = tuple(_described(one, size, block) for one, size in zip(both, (MP, NP, NP), strict=True))
    kernel: Any = _multiply
    kernel[-(-rows // MP), -(-outer // NP), parts](
        *(*both[0], *both[1], *both[2], first if residual is None else residual, first, low, scales),
        *(first if cache is None else cache, first if position is None else position),
        *(rows, inner, outer, width, first[0].numel()),
        END=end.value,
        ACTIVATION=ACTIVATIONS[activation],
        EVEN=outer % NP == 0,
        BOXED=boxed,
        EARLY=not boxed,
        GP=block,
        MP=MP,
        NP=NP,
        PARTS=parts,
        STEPS=steps if inner // block // parts % steps == 0 else 1,
        APART=MP < 64,
        WAIT=bool(launched),
        num_warps=warps,
        num_stages=stages,
        **launched,
    )
