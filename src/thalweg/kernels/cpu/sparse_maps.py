r"""Entmax of rows on the CPU: thresholds by Newton's iteration on shrinking candidates, no sorting.

With d = alpha - 1, z_i = d (s_i - max s) and u the largest weight to the power d, the weights are
:math:`(z_i + u)_+^{1/d}`, and for d <= 1 the norm :math:`\|(z + u)_+\|_{1/d}`, which must be 1, is convex and rises in
u. Newton's iteration from above therefore falls towards the answer, never past it, and an entry that has lost its
weight on the way never regains it. Solving for some of the entries gives a u that is large enough for all: the largest
of every 64 entries are solved first, so that few candidates are left of a long row. Every weight rises in u, hence the
weights differ from the exact ones by |sum - 1| in all, which is what ends the iteration. For d > 1 the iteration is
held in a bracket that is halved where it would not shrink by itself.

Sums are kept in float64. A row is read once for the largest entries and once for candidates.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.cpu.emitter import INDEX, LANES, Emitter, intrinsic
from thalweg.kernels.cpu.threads import run

__all__ = ["backward_rows", "entmax", "entmax_value", "entmax_vjp", "forward_rows"]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_sums: dict[str, Any] = {**_options, "fastmath": {"reassoc", "contract"}}  # sums in any order; NaN keeps its meaning
_LEAST_WORK = 200_000  # entries a thread; with fewer, waking another costs more than it saves
_BLOCK = 64
_FEW = 8 * _BLOCK  # entries in a row that are not worth two rounds
_SQUARE, _LINEAR, _ANY = 1, 2, 0  # 1 / d is 2, 1, or anything
_STEPS = 100
_NO_GOLD = np.empty(0, np.int64)


@intrinsic
def _survey(typing_context, row, count, tops):
    """The largest of every block of ``row`` into ``tops``; +inf for a block with NaN or +inf."""
    element = row.dtype

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, element), builder
        row, tops = (emitter.data(signature.args[k], arguments[k]) for k in (0, 2))
        count = arguments[1]
        bests = {w: emitter.variable(emitter.constant(-math.inf, w)) for w in (LANES, 1)}
        with emitter.loop(emitter.size(0), count, _BLOCK) as begin:
            left = b.sub(count, begin)
            length = b.select(b.icmp_signed("<", left, emitter.size(_BLOCK)), left, emitter.size(_BLOCK))
            first = emitter.at(row, begin)
            for width, best in bests.items():
                b.store(emitter.constant(-math.inf, width), best)

            def body(place: Any, width: int, first: Any = first) -> None:
                values, most = emitter.load(emitter.at(first, place), width), emitter.constant(math.inf, width)
                values = b.select(b.fcmp_unordered(">=", values, most), most, values)
                b.store(emitter.larger(values, b.load(bests[width])), bests[width])

            emitter.blocks(length, (LANES, 1), body)
            wide, single = (emitter.reduce(b.load(best), emitter.larger) for best in bests.values())
            b.store(emitter.larger(wide, single), emitter.at(tops, b.sdiv(begin, emitter.size(_BLOCK))))

    return types.void(row, types.int64, tops), codegen


def _log(emitter: Emitter, x: Any) -> Any:
    """log of normal positive numbers: 2 artanh((m - 1) / (m + 1)) + e log 2 for x = m 2^e with m near 1."""
    b, width = emitter.builder, x.type.count
    whole = ir.VectorType(INDEX, width)
    bits = b.bitcast(x, whole)
    low = ir.Constant(whole, [0x3FE6A09E667F3BCD] * width)  # the bits of 1 / sqrt(2)
    shift = ir.Constant(whole, [52] * width)
    power = b.ashr(b.sub(bits, low), shift)
    m = b.bitcast(b.sub(bits, b.shl(power, shift)), x.type)
    one = emitter.constant(1.0, width)
    f = b.fdiv(b.fsub(m, one), b.fadd(m, one))
    square = b.fmul(f, f)
    series = emitter.constant(1 / 21, width)
    for k in range(19, 0, -2):
        series = emitter.call("fma", series, square, emitter.constant(1 / k, width))
    near = b.fmul(b.fadd(f, f), series)
    exponent = b.sitofp(b.trunc(power, ir.VectorType(ir.IntType(32), width)), x.type)
    return emitter.call("fma", exponent, emitter.constant(math.log(2), width), near)


@intrinsic
def _powers(typing_context, z, count, growth, inverse, c, sums, out):
    """``out`` p = exp(log(1 + growth z) inverse - c), 0 where there is no logarithm, for a count that LANES divides.

    Into ``sums``: sum p, sum p / (1 + growth z), and how many are not 0.
    """

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float64), builder
        z, sums, out = (emitter.data(signature.args[k], arguments[k]) for k in (0, 5, 6))
        growth, inverse, c = (emitter.splat(x, LANES) for x in arguments[2:5])
        zero, one = (emitter.constant(x, LANES) for x in (0.0, 1.0))
        totals = [emitter.variable(zero) for _ in range(3)]
        with emitter.loop(emitter.size(0), arguments[1], LANES) as place:
            change = b.fmul(growth, emitter.load(emitter.at(z, place), LANES))
            inside = b.fadd(one, change)
            on = b.fcmp_ordered(">", inside, zero)
            change, inside = b.select(on, change, zero), b.select(on, inside, one)
            # What 1 + change rounds off is put back, as small changes need.
            left = b.fsub(inside, one)
            flat = b.fcmp_ordered("==", left, zero)
            ratio = b.fdiv(change, b.select(flat, one, left))
            log1p = b.select(flat, change, b.fmul(_log(emitter, inside), ratio))
            p = b.select(on, emitter.exp(b.fsub(b.fmul(log1p, inverse), c)), zero)
            emitter.store(p, emitter.at(out, place))
            for total, term in zip(totals, (p, b.fdiv(p, inside), b.select(on, one, zero)), strict=True):
                b.store(b.fadd(b.load(total), term), total)
        for k, total in enumerate(totals):
            b.store(emitter.reduce(b.load(total), b.fadd), emitter.at(sums, emitter.size(k)))

    numbers = (types.float64,) * 3
    return types.void(z, types.int64, *numbers, sums, out), codegen


@intrinsic
def _raise(typing_context, x, count, exponent):
    """x ** exponent in place for 0 < x <= 1 and exponent >= 0, for a count that LANES divides."""

    def codegen(context, builder, signature, arguments):
        emitter, b = Emitter(context, builder, types.float64), builder
        x, exponent = emitter.data(signature.args[0], arguments[0]), emitter.splat(arguments[2], LANES)
        with emitter.loop(emitter.size(0), arguments[1], LANES) as place:
            here = emitter.at(x, place)
            emitter.store(emitter.exp(b.fmul(exponent, _log(emitter, emitter.load(here, LANES)))), here)

    return types.void(x, types.int64, types.float64), codegen


@njit(**_options)
def _whole(x, count, filler):
    """``count`` rounded up to whole vectors, with ``filler`` in the places that are added."""
    size = -(-count // LANES) * LANES
    for i in range(count, size):
        x[i] = filler
    return size


@njit(**_options)
def _newton(z, places, count, kind, u, tolerance):
    """The u of ``count`` entries z for 1 / d = 1 or 2, from a u that is large enough, and how many keep weight.

    Those are moved to the front of ``z`` and ``places``.
    """
    for _ in range(_STEPS):
        kept, total, slope = 0, 0.0, 0.0
        for i in range(count):
            v = z[i]
            z[kept], places[kept] = v, places[i]
            v = max(v + u, 0.0)
            kept += v > 0.0
            slope += v
            total += v * v
        if kind == _LINEAR:
            total, slope, root = slope, float(kept), 1.0
        else:
            root = math.sqrt(total)
        count = kept
        moved = u - (total - root) / slope
        if abs(total - 1.0) <= tolerance or moved == u:
            break
        u = moved
    return u, count


@njit(**_options)
def _growth(d, c):
    """e^(dc), short of infinity, which times the 0 of the largest entry would be no number."""
    return math.exp(min(d * c, 690.0))


@njit(**_options)
def _bracketed(z, places, count, d, c, tolerance, sums, out):
    """The c of ``count`` entries z, from one that is small enough, and how many may have weight, moved to the front.

    u = e^(-dc); in c the steps stay exact as d goes to 0. Up to d = 1 they are those of Newton's iteration on the norm
    and leave the bracket by rounding alone.
    """
    low, high, width, done = c, math.log(count) + 1e-9, math.inf, False
    for step in range(_STEPS):
        growth = _growth(d, c)
        _powers(z, _whole(z, count, -math.inf), growth, 1.0 / d, c, sums, out)
        total, slope, kept = sums[0], sums[1], sums[2]
        if done or abs(total - 1.0) <= tolerance:
            break
        if total < 1.0:
            high = c
        else:
            low = c
            if kept < count:
                front = 0
                for i in range(count):
                    z[front], places[front] = z[i], places[i]
                    front += growth * z[i] > -1.0
                count = front
        change = total * math.expm1(-d * math.log(total)) / slope
        moved = c - math.log1p(change) / d if change > -1.0 else math.inf
        # What is left is rounding; the weights must be computed once more, as candidates may have moved.
        done = abs(moved - c) <= 1e-15 * c or high - low <= 1e-15 * high or step == _STEPS - 2
        if not done and ((d > 1.0 and high - low > 0.5 * width) or not low < moved < high):
            moved = 0.5 * (low + high)
        width = high - low
        c = moved if not done else c
    return c, count


@njit(**_options)
def _candidates(row, tops, top, d, least, z, places):
    """d (s - top) of the entries above ``least`` and where they are; how many."""
    count, size = 0, len(row)
    for block in range(len(tops)):
        if tops[block] > least:
            for i in range(block * _BLOCK, min(size, (block + 1) * _BLOCK)):
                s = np.float64(row[i])
                z[count], places[count] = d * (s - top), i
                count += s > least
    return count


@njit(**_options)
def _solve(row, tops, top, kind, d, tolerance, z, places, sums, out):
    """u of a row (c where 1 / d is neither 1 nor 2) and how many candidates have been put into z and places."""
    solved, largest, rounds = 0.0 if kind == _ANY else 1.0, 1.0, 2 if len(row) > _FEW else 1
    count = 0
    for again in range(rounds):
        # A little lower, against rounding: a candidate too many does no harm.
        least = top - largest / d - 1e-14 * (abs(top) + 1.0 / d)
        if again + 1 < rounds:
            for block in range(len(tops)):
                z[count], places[count] = d * (np.float64(tops[block]) - top), block
                count += tops[block] > least
        else:
            count = _candidates(row, tops, top, d, least, z, places)
        bound = tolerance if again + 1 == rounds else 1e-3
        if kind == _ANY:
            solved, count = _bracketed(z, places, count, d, solved, bound, sums, out)
            if again + 1 < rounds:  # the sum may be below 1; its logarithm falls at least as fast as c rises
                solved = max(solved + min(math.log(sums[0]), 0.0), 0.0)
                largest = math.exp(-d * solved)
        else:
            solved, count = _newton(z, places, count, kind, solved, bound)
            largest = solved
    return solved, count


@njit(**_options)
def _spread(z, count, kind, solved, sums, out):
    """Weights of the candidates in ``out``; for any alpha the last sum has left them there."""
    total = sums[0]
    if kind != _ANY:
        total = 0.0
        for i in range(count):
            p = max(z[i] + solved, 0.0)
            p = p * p if kind == _SQUARE else p
            out[i] = p
            total += p
    factor = 1.0 / total
    for i in range(count):
        out[i] *= factor


@njit(**_options)
def _value(row, p, places, count, kind, d, gold):
    """<p, s> - Omega(p), less the gold score where gold >= 0."""
    pivot = np.float64(row[gold]) if gold >= 0 else 0.0
    if pivot == -math.inf:
        return math.inf
    omega, value = 0.0, 0.0
    for i in range(count):
        if p[i] > 0.0:
            value += p[i] * (np.float64(row[places[i]]) - pivot)
            if kind == _LINEAR:
                omega += p[i] * (p[i] - 1.0)
            elif kind == _SQUARE:
                omega += p[i] * (math.sqrt(p[i]) - 1.0)
            else:
                omega += p[i] * math.expm1(d * math.log(p[i]))
    return value - omega / (d * (1.0 + d))


@njit(**_options)
def _fill(x, value):
    for i in range(len(x)):
        x[i] = value


@njit(**_options)
def forward_rows(scores, alphas, kind, gold, out, values, part, low, high):
    """Weights of rows low..high into ``out``; where there is room in ``values``, conjugates too, or losses for gold.

    With gold, ``out`` is the gradient of the losses: the gold entry of each row is less by 1.
    """
    size = scores.shape[1]
    tops = np.empty(-(-size // _BLOCK), scores.dtype)
    z, places, p, sums = np.empty(size + LANES), np.empty(size, np.int32), np.empty(size + LANES), np.empty(3)
    tolerance = 1e-9 if scores.itemsize == 4 else 1e-14
    for r in range(low, high):
        row, weights = scores[r], out[r]
        label = gold[r] if len(gold) else -1
        _survey(row, size, tops)
        top = np.float64(tops[0])
        for block in range(1, len(tops)):
            top = max(top, np.float64(tops[block]))
        d = max(alphas[r if len(alphas) > 1 else 0] - 1.0, 1e-15)
        _fill(weights, 0.0)
        if not (-math.inf < top < math.inf and d < math.inf):
            if top > -math.inf:
                _fill(weights, math.nan)
            if len(values):
                values[r] = math.nan if top > -math.inf else math.inf if label >= 0 else -math.inf
            continue
        solved, count = _solve(row, tops, top, kind, d, tolerance, z, places, sums, p)
        _spread(z, count, kind, solved, sums, p)
        for i in range(count):
            weights[places[i]] = p[i]
        if len(values):
            values[r] = _value(row, p, places, count, kind, d, label)
            if label >= 0 and row[label] > -math.inf:
                weights[label] -= 1


@njit(**_sums)
def _backward_simple(weights, grad, square, out):
    """w (g - <w, g> / sum w) where w is p^(1/2) or 1 on the support."""
    total, product = 0.0, 0.0
    zero, one = weights.dtype.type(0), weights.dtype.type(1)
    for i in range(len(weights)):
        p = weights[i]
        w = (np.sqrt(p) if square else one) if p > 0 else zero
        total += np.float64(w)
        product += np.float64(w) * np.float64(grad[i]) if p > 0 else 0.0
    mean = weights.dtype.type(product / total) if total > 0 else zero
    for i in range(len(weights)):
        p = weights[i]
        w = np.sqrt(p) if square else one
        out[i] = w * (grad[i] - mean) if p > 0 else zero


@njit(**_options)
def _backward_any(weights, grad, d, most, out, powers, places):
    """The same where w is p^(1 - d) on the support, at most ``most``."""
    total, product, count = 0.0, 0.0, 0
    for i in range(len(weights)):
        out[i] = 0.0
        powers[count], places[count] = weights[i], i
        count += weights[i] > 0
    if d <= 1.0:
        _raise(powers, _whole(powers, count, 1.0), 1.0 - d)
    else:
        for j in range(count):
            powers[j] = min(math.exp((1.0 - d) * math.log(powers[j])), most)
    for j in range(count):
        total += powers[j]
    for j in range(count):
        product += powers[j] / total * grad[places[j]]
    for j in range(count):
        i = places[j]
        out[i] = powers[j] * (np.float64(grad[i]) - product)


@njit(**_options)
def backward_rows(weights, grad, alphas, kind, most, out, part, low, high):
    """The gradient in the scores of rows low..high from that in the weights."""
    size = weights.shape[1]
    powers, places = np.empty(size + LANES), np.empty(size, np.int32)
    for r in range(low, high):
        if kind == _ANY:
            d = max(alphas[r if len(alphas) > 1 else 0] - 1.0, 0.0)
            _backward_any(weights[r], grad[r], d, most, out[r], powers, places)
        elif kind == _SQUARE:
            _backward_simple(weights[r], grad[r], True, out[r])
        else:
            _backward_simple(weights[r], grad[r], False, out[r])


_KINDS = {1.5: (_SQUARE, np.array([1.5])), 2.0: (_LINEAR, np.array([2.0]))}


def _kind(alpha: Tensor | float) -> tuple[int, np.ndarray]:
    """Which iteration, and alpha as float64: one number, or one for each row."""
    if isinstance(alpha, Tensor):
        return _ANY, alpha.detach().double().reshape(-1).numpy()
    return _KINDS.get(alpha) or (_ANY, np.array([float(alpha)]))


def _ranges(rows: int, size: int) -> list[tuple[int, int]]:
    """Rows in equal parts, one for each thread that pays."""
    count = min(torch.get_num_threads(), rows, rows * size // _LEAST_WORK)
    if count < 2:
        return [(0, rows)]
    bounds = [rows * part // count for part in range(count + 1)]
    return list(pairwise(bounds))


_NO_VALUES = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def entmax(scores: Tensor, alpha: Tensor | float) -> Tensor:
    """Weights of rows ``(R, N)``, N > 0, of float32 or float64; alpha a number or ``(R, 1)``.

    >>> entmax(torch.tensor([[1.0, 0.5, -3.0]]), 2.0)
    tensor([[0.7500, 0.2500, 0.0000]])
    """
    scores = scores.detach().contiguous()
    out = torch.empty_like(scores)
    kind, alphas = _kind(alpha)
    run(
        forward_rows,
        _ranges(*scores.shape),
        *(scores.numpy(), alphas, kind, _NO_GOLD, out.numpy(), _NO_VALUES[scores.dtype]),
    )
    return out


def entmax_value(scores: Tensor, alpha: Tensor | float, gold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Conjugates ``(R,)``, or losses for gold ``(R,)`` int64, and their gradient ``(R, N)``, in one pass.

    >>> entmax_value(torch.tensor([[1.0, 0.5, -3.0]]), 2.0, torch.tensor([1]))
    (tensor([0.5625]), tensor([[ 0.7500, -0.7500,  0.0000]]))
    """
    scores = scores.detach().contiguous()
    rows, size = scores.shape
    out, values = torch.empty_like(scores), scores.new_empty(rows)
    labels = _NO_GOLD
    if gold is not None:
        labels = gold.contiguous().numpy()
        if rows and not (labels.min() >= 0 and labels.max() < size):
            raise ShapeError(f"`gold` must lie in 0..{size - 1}, got {labels.min()}..{labels.max()}")
    kind, alphas = _kind(alpha)
    run(
        forward_rows,
        _ranges(rows, size),
        *(scores.numpy(), alphas, kind, labels, out.numpy(), values.numpy()),
    )
    return values, out


def entmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor | float) -> Tensor:
    """The gradient in the scores ``(R, N)`` from the weights and the gradient in them.

    >>> entmax_vjp(torch.tensor([[0.75, 0.25, 0.0]]), torch.tensor([[1.0, 0.0, 5.0]]), 2.0)
    tensor([[ 0.5000, -0.5000,  0.0000]])
    """
    weights, grad = weights.detach(), grad.detach().contiguous()
    out = torch.empty_like(weights)
    kind, alphas = _kind(alpha)
    most = torch.finfo(weights.dtype).max / weights.shape[1]
    run(
        backward_rows,
        _ranges(*weights.shape),
        *(weights.numpy(), grad.numpy(), alphas, kind, most, out.numpy()),
    )
    return out
