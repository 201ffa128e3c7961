"""Linear layers of a decoding step: normalisation before, activation and residual after, all in one launch.

A step of a small Transformer has little to compute and much to launch. The stream between the sublayers is therefore
kept as it comes out of an addition, and whoever reads it normalises what it reads: a LayerNorm is never a kernel of its
own. float32 products are taken with three TF32 products each, which loses nothing that float32 keeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.arithmetic import pending
from thalweg.kernels.gpu.launching import launch, overlapped

__all__ = ["ACTIVATIONS", "FEW", "Fed", "Norm", "activate", "embed", "embedded", "linear", "place", "project"]

# Numbers of the activations, as the kernels take them.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}


class Norm(NamedTuple):
    """The weights of a LayerNorm over the last axis.

    >>> Norm(torch.ones(4), torch.zeros(4), 1e-5).eps
    1e-05
    """

    weight: Tensor
    bias: Tensor
    eps: float


@triton.jit
def _statistics(x, row, inside, size, eps, SP: tl.constexpr, KP: tl.constexpr):
    """Mean and inverse deviation of rows of ``size`` entries, (MP,) each; deviations are taken from the mean itself.

    Where a whole row fits (SP > 0) it is read once: what counts here is how often one waits for memory.
    """
    if SP > 0:
        column = tl.arange(0, SP)
        mask = inside & (column < size)[None, :]
        entries = tl.load(x + row * size + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(entries, axis=1) / size
        away = tl.where(mask, entries - mean[:, None], 0.0)
        square = tl.sum(away * away, axis=1)
    else:
        column = tl.arange(0, KP)
        total = tl.sum(row.to(tl.float32) * 0.0, axis=1)
        for k in range(0, size, KP):
            mask = inside & (k + column < size)[None, :]
            total += tl.sum(tl.load(x + row * size + k + column[None, :], mask=mask, other=0.0).to(tl.float32), axis=1)
        mean = total / size
        square = total * 0.0
        for k in range(0, size, KP):
            mask = inside & (k + column < size)[None, :]
            entries = tl.load(x + row * size + k + column[None, :], mask=mask, other=0.0).to(tl.float32)
            away = tl.where(mask, entries - mean[:, None], 0.0)
            square += tl.sum(away * away, axis=1)
    return mean, 1.0 / tl.sqrt(square / size + eps)


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
def activate(total, gated, ACTIVATION: tl.constexpr):
    """The activation of that number."""
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
def _finish(
    total,
    gated,
    row,
    column,
    within,
    bias,
    gate_bias,
    residual,
    residual_gain,
    residual_shift,
    mean,
    inverse,
    out,
    cache,
    position,
    rows,
    outer,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CACHE: tl.constexpr,
):
    """What comes after the product: bias, activation, residual, and where it all goes."""
    inside = within & (column < outer)[None, :]
    total += tl.load(bias + column, mask=column < outer, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == 4:
        gated += tl.load(gate_bias + column, mask=column < outer, other=0.0).to(tl.float32)[None, :]
    total = activate(total, gated, ACTIVATION)
    if RESIDUAL > 0:
        own = tl.load(residual + row * outer + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL == 2:
            g = tl.load(residual_gain + column, mask=column < outer, other=0.0).to(tl.float32)
            s = tl.load(residual_shift + column, mask=column < outer, other=0.0).to(tl.float32)
            own = (own - mean[:, None]) * inverse[:, None] * g[None, :] + s[None, :]
        total += own
    kind = out.dtype.element_ty
    if CACHE:  # queries to `out`, keys and values of this step to where later steps look for them
        width = outer // 3
        query = inside & (column < width)[None, :]
        tl.store(out + row * width + column[None, :], total.to(kind), mask=query)
        slab = cache + tl.load(position) * rows * 2 * width
        tl.store(slab + row * 2 * width + (column - width)[None, :], total.to(kind), mask=inside & ~query)
    else:
        tl.store(out + row * outer + column[None, :], total.to(kind), mask=inside)


@triton.jit
def _product(a, b, total, EXACT: tl.constexpr):
    return tl.dot(a, b, total, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def _linear(
    x,
    weight,
    bias,
    gate,
    gate_bias,
    gain,
    shift,
    residual,
    residual_gain,
    residual_shift,
    out,
    cache,
    position,
    rows,
    inner,
    outer,
    eps,
    residual_eps,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CACHE: tl.constexpr,
    EXACT: tl.constexpr,
    MP: tl.constexpr,
    NP: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Tiles of the product by matrix units."""
    pending(WAIT)
    row = tl.program_id(0) * MP + tl.arange(0, MP)[:, None]
    column = tl.program_id(1) * NP + tl.arange(0, NP)
    k = tl.arange(0, KP)
    within = row < rows
    mean = tl.zeros((MP,), tl.float32)
    inverse, own_mean, own_inverse = mean, mean, mean
    if NORM:
        mean, inverse = _statistics(x, row, within, inner, eps, SP, KP)
    if RESIDUAL == 2:
        own_mean, own_inverse = _statistics(residual, row, within, outer, residual_eps, SP, KP)
    total = tl.zeros((MP, NP), tl.float32)
    gated = tl.zeros((MP, NP), tl.float32)
    for begin in range(0, inner, KP):
        place = begin + k
        entries = tl.load(x + row * inner + place[None, :], mask=within & (place < inner)[None, :], other=0.0)
        if NORM:
            g = tl.load(gain + place, mask=place < inner, other=0.0).to(tl.float32)
            s = tl.load(shift + place, mask=place < inner, other=0.0).to(tl.float32)
            scaled = (entries.to(tl.float32) - mean[:, None]) * inverse[:, None] * g[None, :] + s[None, :]
            entries = scaled.to(x.dtype.element_ty)
        tile = column[None, :] * inner + place[:, None]
        mask = (column < outer)[None, :] & (place < inner)[:, None]
        matrix = tl.load(weight + tile, mask=mask, other=0.0)
        total = _product(entries, matrix, total, EXACT)
        if ACTIVATION == 4:
            matrix = tl.load(gate + tile, mask=mask, other=0.0)
            gated = _product(entries, matrix, gated, EXACT)
    _finish(
        *(total, gated, row, column, within, bias, gate_bias, residual, residual_gain, residual_shift),
        *(own_mean, own_inverse, out, cache, position, rows, outer, ACTIVATION, RESIDUAL, CACHE),
    )


@triton.jit
def _few(
    x,
    weight,
    bias,
    gate,
    gate_bias,
    gain,
    shift,
    residual,
    residual_gain,
    residual_shift,
    out,
    cache,
    position,
    rows,
    inner,
    outer,
    eps,
    residual_eps,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CACHE: tl.constexpr,
    EXACT: tl.constexpr,
    MP: tl.constexpr,
    NP: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
    WAIT: tl.constexpr,
):
    """All of a few rows against some columns: nothing but reading the matrix, which matrix units cannot hasten."""
    pending(WAIT)
    row = tl.arange(0, MP)[:, None]
    column = tl.program_id(1) * NP + tl.arange(0, NP)
    k = tl.arange(0, KP)
    within = row < rows
    mean = tl.zeros((MP,), tl.float32)
    inverse, own_mean, own_inverse = mean, mean, mean
    if NORM:
        mean, inverse = _statistics(x, row, within, inner, eps, SP, KP)
    if RESIDUAL == 2:
        own_mean, own_inverse = _statistics(residual, row, within, outer, residual_eps, SP, KP)
    total = tl.zeros((MP, NP), tl.float32)
    gated = tl.zeros((MP, NP), tl.float32)
    for begin in range(0, inner, KP):
        place = begin + k
        tile = column[:, None] * inner + place[None, :]
        mask = (column < outer)[:, None] & (place < inner)[None, :]
        matrix = tl.load(weight + tile, mask=mask, other=0.0).to(tl.float32)
        entries = tl.load(x + row * inner + place[None, :], mask=within & (place < inner)[None, :], other=0.0)
        entries = entries.to(tl.float32)
        if NORM:
            g = tl.load(gain + place, mask=place < inner, other=0.0).to(tl.float32)
            s = tl.load(shift + place, mask=place < inner, other=0.0).to(tl.float32)
            entries = (entries - mean[:, None]) * inverse[:, None] * g[None, :] + s[None, :]
        total += tl.sum(entries[:, None, :] * matrix[None, :, :], axis=2)
        if ACTIVATION == 4:
            matrix = tl.load(gate + tile, mask=mask, other=0.0).to(tl.float32)
            gated += tl.sum(entries[:, None, :] * matrix[None, :, :], axis=2)
    _finish(
        *(total, gated, row, column, within, bias, gate_bias, residual, residual_gain, residual_shift),
        *(own_mean, own_inverse, out, cache, position, rows, outer, ACTIVATION, RESIDUAL, CACHE),
    )


# Rows up to which the matrix units do not pay; twice as many where there are few columns.
FEW = 8
_WHOLE = 8192  # entries of rows that a program may hold to take their statistics


def _tiles(rows: int, inner: int, outer: int) -> tuple[Any, ...]:
    """The kernel, rows and columns of its tiles, how much of the sum at a time, warps, stages: by measurement."""
    if rows <= FEW or (rows <= 2 * FEW and outer <= 256):
        most = max(16, triton.next_power_of_2(inner))
        if inner > 512:
            return _few, triton.next_power_of_2(rows), 2, 512, 4, 3
        return _few, triton.next_power_of_2(rows), 2 if rows > FEW else 4, min(256, most), 4 if outer <= 256 else 2, 3
    if rows <= 128:
        return _linear, 16, 32, 128, 4, 3
    if rows <= 1024:
        stages = 3 if inner > 512 or outer <= 256 else 2
        return _linear, 16 if rows * outer <= 400_000 else 32, 64, 64, 4, stages
    if inner > 512:
        return _linear, 64, 64, 64, 4, 3
    if outer <= 512:
        return _linear, 64, 64, 64, 4, 2
    return _linear, *((128, 128, 32, 8, 3) if outer <= 768 else (64, 64, 64, 4, 2))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    norm: Norm | None = None,
    activation: str = "none",
    gate: tuple[Tensor, Tensor] | None = None,
    residual: Tensor | None = None,
    residual_norm: Norm | None = None,
) -> Tensor:
    """``out = f(norm(x) W' + b) + residual``: x (R, K), W (N, K), out (R, N); the residual normalised if so asked.

    ``swiglu`` is (x W' + b) silu(x G' + g) with ``gate`` = (G, g).
    """
    return _start(x, weight, bias, out, norm, activation, gate, residual, residual_norm, None, None)


def project(
    x: Tensor, weight: Tensor, bias: Tensor, queries: Tensor, cache: Tensor, position: Tensor, norm: Norm | None
) -> None:
    """Queries, keys and values of a step at once: W (3 D, D); keys and values go to ``cache[position]`` (R, 2, D)."""
    _start(x, weight, bias, queries, norm, "none", None, None, None, cache, position)


def _start(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    norm: Norm | None,
    activation: str,
    gate: tuple[Tensor, Tensor] | None,
    residual: Tensor | None,
    residual_norm: Norm | None,
    cache: Tensor | None,
    position: Tensor | None,
) -> Tensor:
    (rows, inner), outer = x.shape, weight.shape[0]
    gain, shift, eps = norm or (bias, bias, 0.0)
    residual_gain, residual_shift, residual_eps = residual_norm or (bias, bias, 0.0)
    kernel, MP, NP, KP, warps, stages = _tiles(rows, inner, outer)
    measured = max(0 if norm is None else inner, 0 if residual_norm is None else outer)  # longest row with statistics
    whole: Any = triton.next_power_of_2(measured)
    launched = overlapped(x)
    kernel[-(-rows // MP), -(-outer // NP)](
        *(x, weight, bias, *(gate or (weight, bias)), gain, shift),
        *(x if residual is None else residual, residual_gain, residual_shift, out),
        *(x if cache is None else cache, x if position is None else position),
        *(rows, inner, outer, eps, residual_eps),
        NORM=norm is not None,
        ACTIVATION=ACTIVATIONS[activation],
        RESIDUAL=0 if residual is None else 1 if residual_norm is None else 2,
        CACHE=cache is not None,
        # As torch's own products: float32 is kept unless the user asked for less.
        EXACT=x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest",
        MP=MP,
        NP=NP,
        KP=KP,
        SP=whole if kernel is _few and whole * MP <= _WHOLE else 0,
        WAIT=bool(launched),
        num_warps=warps,
        num_stages=stages,
        **launched,
    )
    return out


class Fed(NamedTuple):
    """What a step feeds to a model: symbols (R,), their embeddings (V, D) and what these are multiplied by, and the
    embeddings (T, D) of positions, if any, with the position (1,) that all rows have.

    >>> Fed._fields
    ('tokens', 'table', 'scale', 'positions', 'position')
    """

    tokens: Tensor
    table: Tensor
    scale: float
    positions: Tensor | None
    position: Tensor

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels take them; what is not there is something else."""
        return self.tokens, self.table, self.table if self.positions is None else self.positions, self.position


@triton.jit
def embedded(tokens, table, positions, position, scale, row, column, within, width, PLACED: tl.constexpr):
    """Rows (RP, DP) of ``scale table[tokens] + positions[position]``, 0 where they are not ``within``."""
    token = tl.load(tokens + row, mask=tl.sum(within.to(tl.int32), axis=1) > 0, other=0)
    entries = tl.load(table + token[:, None] * width + column[None, :], mask=within, other=0.0).to(tl.float32) * scale
    if PLACED:
        place = positions + tl.load(position) * width + column
        entries += tl.load(place, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return entries


@triton.jit
def _embed(
    tokens, table, positions, position, out, width, scale, PLACED: tl.constexpr, DP: tl.constexpr, WAIT: tl.constexpr
):
    pending(WAIT)
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, DP)
    within = (row >= 0)[:, None] & (column < width)[None, :]
    entries = embedded(tokens, table, positions, position, scale, row, column, within, width, PLACED)
    tl.store(out + row[:, None] * width + column[None, :], entries.to(out.dtype.element_ty), mask=within)


def embed(fed: Fed, out: Tensor) -> Tensor:
    """``out[r] = scale table[tokens[r]] + positions[position]``, (R, D)."""
    width, launched = fed.table.shape[1], overlapped(out)
    kernel: Any = _embed
    kernel[(len(fed.tokens),)](
        *(*fed.pointers, out, width, fed.scale),
        PLACED=fed.positions is not None,
        DP=triton.next_power_of_2(width),
        WAIT=bool(launched),
        num_warps=2,
        **launched,
    )
    return out


@triton.jit
def _place(
    tokens,
    mask,
    to,
    to_mask,
    count,
    items,
    size,
    row_step,
    column_step,
    mask_row,
    mask_column,
    places,
    pad,
    PP: tl.constexpr,
):
    item = tl.program_id(0)
    if item == 0:
        tl.store(count, items)
    s = tl.arange(0, PP)
    there = (item < items) & (s < size)
    symbol = tl.load(tokens + item * row_step + s * column_step, mask=there, other=0)
    real = tl.load(mask + item * mask_row + s * mask_column, mask=there, other=0) != 0
    inside = s < places
    tl.store(to + item * places + s, tl.where(there, symbol, pad), mask=inside)
    tl.store(to_mask + item * places + s, tl.where(there, real, s == 0), mask=inside)


def place(tokens: Tensor, mask: Tensor, to: Tensor, to_mask: Tensor, pad: int, count: Tensor) -> None:
    """Sources (B, S) and which symbols are real into larger buffers (A, P); what is left is sources of one symbol.

    ``count`` (1,) int32 gets B.
    """
    steps = (*tokens.stride(), *mask.stride())
    size: Any = triton.next_power_of_2(to.shape[1])
    launch(
        *(_place, (len(to),), tokens, mask, to, to_mask, count, *tokens.shape, *steps, to.shape[1], pad),
        PP=size,
        num_warps=1,
    )
