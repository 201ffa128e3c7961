"""float32 matrices as two of half precision each, which matrix units multiply six times as fast as float32 itself.

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
from thalweg.kernels.gpu.decode_linear import ACTIVATIONS, FEW, Norm, activate
from thalweg.kernels.gpu.launching import overlapped

__all__ = [
    "Halves",
    "Matrices",
    "Matrix",
    "Tiles",
    "halve",
    "multiply",
    "normalise",
    "parts_of",
    "scale_of",
    "split",
    "suits",
]


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
        """Zeros, with a scale for every ``block`` columns."""
        high, low = torch.zeros(2, rows, columns, dtype=torch.float16, device=device)
        return cls(high, low, torch.zeros(rows, columns // block, device=device))

    @property
    def block(self) -> int:
        """G, the columns that share a scale."""
        return self.high.shape[1] // self.scales.shape[1]


class Matrix(NamedTuple):
    """Weights (N, K) in half precision, a scale for every row, and their bias in float32.

    >>> Matrix._fields
    ('high', 'low', 'scales', 'bias')
    """

    high: Tensor  # (N, K) float16
    low: Tensor  # (N, K) float16
    scales: Tensor  # (N,) float32
    bias: Tensor  # (N,) float32


@triton.jit
def scale_of(peak):
    """The power of two that brings ``peak`` to between 2^13 and 2^14, upside down: scale, and its inverse."""
    exponent = tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) & 255, 14)
    scale = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return scale, ((267 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halve(x, inverse):
    """High and low of x times the inverse of its scale."""
    scaled = x * inverse
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _split(table, high, low, scales, KP: tl.constexpr, WAIT: tl.constexpr):
    """A row of some matrix; the table says where it lies, how long it is and where it goes."""
    pending(WAIT)
    row = tl.program_id(0)
    source = tl.load(table + 3 * row).to(tl.pointer_type(tl.float32))
    size = tl.load(table + 3 * row + 1).to(tl.int32)
    to = tl.load(table + 3 * row + 2)
    k = tl.arange(0, KP)
    peak = 0.0
    for begin in range(0, size, KP):
        entries = tl.load(source + begin + k, mask=begin + k < size, other=0.0)
        peak = tl.maximum(peak, tl.max(tl.abs(entries), axis=0))
    scale, inverse = scale_of(peak)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(scales + row, scale)
    for begin in range(0, size, KP):
        there = begin + k < size
        entries = tl.load(source + begin + k, mask=there, other=0.0)
        upper, lower = halve(entries, inverse)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(high + to + begin + k, upper, mask=there)
        tl.store(low + to + begin + k, lower, mask=there)


class Matrices:
    """Room for matrices in half precision; :meth:`refresh` reads the weights anew, all in one launch.

    Args:
        layers: weight (N, K), contiguous, and bias (N,) of each, float32; they are read where they are.

    >>> Matrices([(torch.zeros(2, 16), torch.zeros(2))])[0].high.shape
    torch.Size([2, 16])
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]]):
        device = layers[0][0].device
        self._weights = [weight for weight, _ in layers]  # known by their addresses: they must stay
        sizes = [-(-weight.numel() // 128) * 128 for weight, _ in layers]  # tensors begin at whole cache lines
        self._high, self._low = torch.zeros(2, sum(sizes), dtype=torch.float16, device=device)
        self._scales = torch.zeros(sum(-(-len(weight) // 32) * 32 for weight, _ in layers), device=device)
        self._found: list[Matrix] = []
        rows: list[tuple[int, int, int]] = []
        first = 0
        for (weight, bias), size in zip(layers, sizes, strict=True):
            N, K = weight.shape
            high, low = (part[first : first + N * K].view(N, K) for part in (self._high, self._low))
            self._found.append(Matrix(high, low, self._scales[len(rows) : len(rows) + N], bias))
            begin, step = weight.data_ptr(), weight.element_size() * K
            rows += [(begin + step * n, K, first + n * K) for n in range(N)]
            rows += [(begin, 0, first)] * (-N % 32)  # so that scales, too, begin where loads are wide
            first += size
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        self._longest = max(weight.shape[1] for weight, _ in layers)

    def __getitem__(self, n: int) -> Matrix:
        return self._found[n]

    def refresh(self) -> None:
        """Split the weights as they are now."""
        split(self._table, self._high, self._low, self._scales, self._longest)


def split(table: Tensor, high: Tensor, low: Tensor, scales: Tensor, longest: int) -> None:
    """Rows of matrices in two halves: ``table`` (rows, 3) has the address, length and first place of each.

    >>> split.__name__
    'split'
    """
    kernel: Any = _split
    launched = overlapped(high)
    kernel[(len(table),)](
        *(table, high, low, scales),
        KP=min(1024, max(16, triton.next_power_of_2(longest))),
        WAIT=bool(launched),
        num_warps=2,
        **launched,
    )


@triton.jit
def _normalise(
    x,
    gain,
    shift,
    out,
    high,
    low,
    scales,
    rows,
    width,
    blocks,
    part_step,
    eps,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    PARTS: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    BP: tl.constexpr,
    WAIT: tl.constexpr,
):
    pending(WAIT)
    row = tl.program_id(0) * RP + tl.arange(0, RP)
    column = tl.arange(0, DP)
    known = column < width
    within = (row < rows)[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    entries = tl.load(x + at, mask=within, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            entries += tl.load(x + part * part_step + at, mask=within, other=0.0)
        if NORM == 0 or KEEP == 0:
            tl.store(out + at, entries, mask=within)
    if NORM:
        mean = tl.sum(entries, axis=1) / width
        away = tl.where(within, entries - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(away * away, axis=1) / width + eps)
        g = tl.load(gain + column, mask=known, other=0.0)
        s = tl.load(shift + column, mask=known, other=0.0)
        entries = away * inverse[:, None] * g[None, :] + s[None, :]
    if KEEP:
        tl.store(out + at, entries, mask=within)
    scale, inverse = scale_of(tl.max(tl.abs(entries), axis=1))  # pyright: ignore[reportGeneralTypeIssues]
    upper, lower = halve(entries, inverse[:, None])  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(high + at, upper, mask=within)
    tl.store(low + at, lower, mask=within)
    block = tl.arange(0, BP)
    to = row[:, None] * blocks + block[None, :]
    there = (row < rows)[:, None] & (block < blocks)[None, :]
    tl.store(scales + to, scale[:, None] + tl.zeros((RP, BP), tl.float32), mask=there)


def normalise(x: Tensor, norm: Norm | None, to: Halves, *, keep: bool = False) -> Halves:
    """LayerNorm of the rows of ``x`` (R, D), or x as it is, in two halves; kept in ``x`` too if so asked.

    With x (P, R, D) of their sum, which takes the place of the first of them.

    >>> normalise.__name__
    'normalise'
    """
    (rows, width), blocks = x.shape[-2:], to.scales.shape[1]
    gain, shift, eps = norm or (x, x, 0.0)
    whole: Any = triton.next_power_of_2(width)
    each = max(1, min(4, 4096 // whole)) if rows > 1024 else 1
    launched = overlapped(x)
    kernel: Any = _normalise
    kernel[(-(-rows // each),)](
        *(x, gain, shift, x, *to, rows, width, blocks, rows * width, eps),
        NORM=norm is not None,
        KEEP=keep and norm is not None,
        PARTS=len(x) if x.dim() == 3 else 1,
        RP=each,
        DP=whole,
        BP=triton.next_power_of_2(blocks),
        WAIT=bool(launched),
        num_warps=max(1, min(8, each * whole // 256)),
        **launched,
    )
    return to


# What becomes of a product: it is stored; added to a stream; shared out to queries and a cache; halved.
_STORE, _ADD, _CACHE, _HALVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


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
    part_step,
    END: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles end where the columns do
    GP: tl.constexpr,
    MP: tl.constexpr,
    NP: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of terms between two waits
    APART: tl.constexpr,
    WAIT: tl.constexpr,
):
    pending(WAIT)
    row = tl.program_id(0) * MP + tl.arange(0, MP)
    column = tl.program_id(1) * NP + tl.arange(0, NP)
    k = tl.arange(0, GP)
    within, there = row < rows, column < outer
    long = row.to(tl.int64)  # entries may be more than 2^31
    here = long[:, None] * inner + k[None, :]
    tile = column[None, :] * inner + k[:, None]
    inside = there[None, :] | EVEN
    total = tl.zeros((MP, NP), tl.float32)
    gated = tl.zeros((MP, NP), tl.float32)
    share = inner // GP // PARTS  # blocks of terms of this program
    which = tl.program_id(2)
    for first in range(which * share, which * share + share, STEPS):
        for step in tl.static_range(STEPS):
            block = first + step
            high = tl.load(x_high + here + block * GP, mask=within[:, None], other=0.0)
            low = tl.load(x_low + here + block * GP, mask=within[:, None], other=0.0)
            scale = tl.load(x_scales + row * (inner // GP) + block, mask=within, other=0.0)
            upper = tl.load(w_high + tile + block * GP, mask=inside, other=0.0)
            lower = tl.load(w_low + tile + block * GP, mask=inside, other=0.0)
            total += _three(high, low, upper, lower, APART) * scale[:, None]
            if ACTIVATION == 4:
                upper = tl.load(g_high + tile + block * GP, mask=inside, other=0.0)
                lower = tl.load(g_low + tile + block * GP, mask=inside, other=0.0)
                gated += _three(high, low, upper, lower, APART) * scale[:, None]
    total *= tl.load(w_scales + column, mask=there, other=0.0)[None, :]
    total += tl.load(bias + column, mask=there & (which == 0), other=0.0)[None, :]
    if ACTIVATION == 4:
        gated *= tl.load(g_scales + column, mask=there, other=0.0)[None, :]
        gated += tl.load(g_bias + column, mask=there, other=0.0)[None, :]
    total = activate(total, gated, ACTIVATION)
    mask = within[:, None] & there[None, :]
    at = long[:, None] * outer + column[None, :]
    if END == _STORE:
        tl.store(out + at, total, mask=mask)
    if END == _ADD:
        total += tl.load(residual + at, mask=mask & (which == 0), other=0.0)
        tl.store(out + which * part_step + at, total, mask=mask)
    if END == _CACHE:  # queries to `out`, keys and values of this step to where later steps look for them
        width = outer // 3
        query = mask & (column < width)[None, :]
        tl.store(out + long[:, None] * width + column[None, :], total, mask=query)
        slab = cache + tl.load(position) * rows * 2 * width
        tl.store(slab + long[:, None] * 2 * width + (column - width)[None, :], total, mask=mask & ~query)
    if END == _HALVE:
        scale, inverse = scale_of(tl.max(tl.abs(total), axis=1))  # pyright: ignore[reportGeneralTypeIssues]
        upper, lower = halve(total, inverse[:, None])  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(out + at, upper, mask=mask)
        tl.store(out_low + at, lower, mask=mask)
        block = tl.program_id(1) * (NP // GP) + tl.arange(0, NP // GP)
        to = row[:, None] * (outer // GP) + block[None, :]
        mask = within[:, None] & (block < outer // GP)[None, :]
        tl.store(out_scales + to, scale[:, None] + tl.zeros((MP, NP // GP), tl.float32), mask=mask)


class Tiles(NamedTuple):
    """Rows and columns of a tile, warps, stages, blocks of terms between two waits.

    >>> Tiles(16, 64, 2, 4).steps
    1
    """

    rows: int
    columns: int
    warps: int
    stages: int
    steps: int = 1


def _tiles(size: int, halved: bool) -> Tiles:
    """By measurement, for so many sums in all: the more there are, the larger the tiles that keep all units busy."""
    if size <= 300_000 and halved:
        return Tiles(16, 64, 4, 3, 2) if size <= 150_000 else Tiles(32, 64, 4, 3)
    if size <= 300_000:
        return Tiles(16, 32, 4, 3, 2) if size <= 80_000 else Tiles(64, 16 if size <= 150_000 else 32, 4, 3)
    if size <= 1_100_000:
        return Tiles(64, 64, 4, 3)
    return Tiles(128, 64, 8, 2) if 1_600_000 < size <= 2_200_000 else Tiles(64, 64, 4, 2)


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

    >>> multiply.__name__
    'multiply'
    """
    (rows, inner), outer, block = x.high.shape, len(matrix.high), x.block
    first, low, scales = out if isinstance(out, Halves) else (out, out, out)
    parts = len(first) if first.dim() == 3 else 1
    MP, NP, warps, stages, steps = _tiles(rows * outer * parts, isinstance(out, Halves))
    whole: Any = triton.next_power_of_2(outer)
    NP = min(NP, max(16, whole))
    if isinstance(out, Halves):
        NP = max(block, NP)  # a scale is of whole blocks
    end = _HALVE if isinstance(out, Halves) else _ADD if residual is not None else _STORE if cache is None else _CACHE
    launched = overlapped(x.high)
    kernel: Any = _multiply
    kernel[-(-rows // MP), -(-outer // NP), parts](
        *(*x, *matrix, *(gate or matrix), first if residual is None else residual, first, low, scales),
        *(
            first if cache is None else cache,
            first if position is None else position,
            rows,
            inner,
            outer,
            first[0].numel(),
        ),
        END=end.value,
        ACTIVATION=ACTIVATIONS[activation],
        EVEN=outer % NP == 0,
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
