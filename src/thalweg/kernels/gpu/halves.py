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
from thalweg.kernels.gpu.decode_linear import Fed, Norm, embedded
from thalweg.kernels.gpu.launching import overlapped

__all__ = ["Halves", "Matrices", "Matrix", "halve", "normalise", "scale_of", "split", "store_halves"]


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
    """Rows of matrices in two halves: ``table`` (rows, 3) has the address, length and first place of each."""
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
def store_halves(entries, at, within, high, low, scales, row, rows, first, blocks, BP: tl.constexpr):
    """Rows (RP, DP) in two halves: one scale for all that is given, written for blocks ``first`` ... of ``blocks``."""
    scale, inverse = scale_of(tl.max(tl.abs(entries), axis=1))  # pyright: ignore[reportGeneralTypeIssues]
    upper, lower = halve(entries, inverse[:, None])  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(high + at, upper, mask=within)
    tl.store(low + at, lower, mask=within)
    block = first + tl.arange(0, BP)
    there = (row < rows)[:, None] & (block < blocks)[None, :]
    spread = scale[:, None] + tl.zeros((scale.shape[0], BP), tl.float32)
    tl.store(scales + row[:, None] * blocks + block[None, :], spread, mask=there)


@triton.jit
def _normalise(
    x,
    gain,
    shift,
    out,
    high,
    low,
    scales,
    tokens,
    table,
    positions,
    position,
    rows,
    width,
    blocks,
    part_step,
    eps,
    factor,
    FED: tl.constexpr,  # 0: rows of x; 1: embeddings of symbols; 2: of positions, too
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
    within = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    if FED:
        entries = embedded(tokens, table, positions, position, factor, row, column, within, width, FED == 2)
    else:
        entries = tl.load(x + at, mask=within, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            entries += tl.load(x + part * part_step + at, mask=within, other=0.0)
    if (PARTS > 1 or FED) and KEEP == 0:
        tl.store(out + at, entries, mask=within)
    if NORM:
        mean = tl.sum(entries, axis=1) / width
        away = tl.where(within, entries - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(away * away, axis=1) / width + eps)
        g = tl.load(gain + column, mask=column < width, other=0.0)
        s = tl.load(shift + column, mask=column < width, other=0.0)
        entries = away * inverse[:, None] * g[None, :] + s[None, :]
    if KEEP:
        tl.store(out + at, entries, mask=within)
    store_halves(entries, at, within, high, low, scales, row, rows, 0, blocks, BP)


def _rows_and_warps(rows: int, whole: int) -> tuple[int, int]:
    """Of a program that normalises, by measurement."""
    each = max(1, min(4, 4096 // whole)) if rows > 1024 else 1
    return each, max(1, min(8, each * whole // 256))


def normalise(x: Tensor, norm: Norm | None, to: Halves, *, keep: bool = False, fed: Fed | None = None) -> Halves:
    """LayerNorm of the rows of ``x`` (R, D), or x as it is, in two halves; kept in ``x`` too if so asked.

    With x (P, R, D) of their sum, which takes the place of the first of them. What is ``fed`` takes the place of x.
    """
    (rows, width), blocks = x.shape[-2:], to.scales.shape[1]
    gain, shift, eps = norm or (x, x, 0.0)
    whole: Any = triton.next_power_of_2(width)
    each, warps = _rows_and_warps(rows, whole)
    launched = overlapped(x)
    kernel: Any = _normalise
    kernel[(-(-rows // each),)](
        *(x, gain, shift, x, *to, *((x, x, x, x) if fed is None else fed.pointers)),
        *(rows, width, blocks, rows * width, eps, 1.0 if fed is None else float(fed.scale)),
        FED=0 if fed is None else 1 if fed.positions is None else 2,
        NORM=norm is not None,
        KEEP=keep and norm is not None,
        PARTS=len(x) if x.dim() == 3 else 1,
        RP=each,
        DP=whole,
        BP=triton.next_power_of_2(blocks),
        WAIT=bool(launched),
        num_warps=warps,
        **launched,
    )
    return to
