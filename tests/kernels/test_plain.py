"""Plain functions compiled by way of their syntax trees do what Python does."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from thalweg.kernels.cpu.decode_memory import float_at, put_float, put_index
from thalweg.kernels.cpu.plain import compile_plain
from thalweg.kernels.cpu.unchanged import unchanged

FACTOR = 3
SEVEN = 7


def sums(a, b):
    total, n = 0, 0
    while n < 20:
        n += 1
        if n == a:
            continue
        if (n % 5 == 0 and n > b) or n == 17:
            break
        total += n * FACTOR
    for k in range(b, a, 2):
        total -= k
    return total


def division(a, b):
    return (a // b) * 1000 + a % b if b != 0 else -1


def swapped(a, b):
    a, b = b, a
    small = min(a, b) - max(2 * a, b) + (a << 2) + (b >> 1) + (a & SEVEN) + (a | 1)
    return small if not (a > b and a != 3) else -small


def early(a, b):
    for n in range(a):
        for m in range(0, b, 1):
            if n * m > 6:
                return n
    return -1


def nested(a, b):
    return sums(*(a, b)) + early(b, a) * (1 if a < b < 9 else 2)


def _store(out, a, b):
    put_index(out, 0, sums(a, b))
    put_index(out, 1, division(a, b))
    put_index(out, 2, swapped(a, b))
    put_index(out, 3, early(a, b))
    put_index(out, 4, nested(a, b))


def run(function: Any, *arguments: int) -> None:
    kinds = [ctypes.c_int64] * len(arguments)
    ctypes.CFUNCTYPE(None, *kinds)(compile_plain(function))(*arguments)


@pytest.mark.parametrize(("a", "b"), list(itertools.product((-7, -1, 0, 3, 5, 11), (-4, 1, 2, 3, 8))))
def test_whole_numbers(a: int, b: int) -> None:
    out = np.zeros(5, np.int64)
    run(_store, out.ctypes.data, a, b)
    assert out.tolist() == [f(a, b) for f in (sums, division, swapped, early, nested)]


def _floats(out, x, count):
    total = 0.0
    for n in range(count):
        total += math.exp(np.float64(float_at(x, n))) + n / 4
    put_float(out, 0, np.float32(total))
    put_float(out, 1, np.float32(math.log(total) + 2.0 ** float_at(x, 0)))
    put_float(out, 2, float_at(x, 0) if float_at(x, 0) != float_at(x, 0) else -float_at(x, 0))
    put_index(out, 2, np.int64(total))


def test_floats() -> None:
    x, out = np.array([0.5, -1.25, 3.0], np.float32), np.zeros(6, np.float32)
    run(_floats, out.ctypes.data, x.ctypes.data, 3)
    total = float(np.exp(x.astype(np.float64)).sum()) + 0.75
    np.testing.assert_allclose(out[:3], [total, math.log(total) + 2**0.5, -0.5], rtol=1e-6)
    assert out.view(np.int64)[2] == int(total)


def _pair(out):
    put_index(out, 0, 1)
    unknown = [1, 2]  # noqa: F841


def _changing(out):
    x = 1
    x = 1.5  # noqa: F841


def test_what_it_does_not_understand_is_told() -> None:
    with pytest.raises(NotImplementedError, match="cannot say"):
        compile_plain(_pair)
    with pytest.raises(TypeError, match="`x` is i64"):
        compile_plain(_changing)


def _constant_test(out, a):
    put_index(out, 0, _either(a, True) - _either(a, False))


def _either(a, up):
    if up:
        return a + 1
    return a - 1


def test_constants_decide() -> None:
    out = np.zeros(1, np.int64)
    run(_constant_test, out.ctypes.data, 5)
    assert out[0] == 2


@pytest.mark.parametrize("size", [0, 1, 31, 33, 5000])
def test_unchanged(size: int) -> None:
    x = torch.randn(size)
    if size:
        x[size // 2] = math.nan
    copy = x.clone()
    assert unchanged([x, x], [copy, copy])
    assert not unchanged([x], [torch.zeros(size + 1)])
    for place in {0, size // 2, size - 1} if size else ():
        other = copy.clone()
        other[place] = 4.0
        assert not unchanged([x, x], [copy, other])
    if size > 1:
        assert not unchanged([torch.zeros(size, 2)[:, 0]], [torch.zeros(size)])


def _truths(out, a, b):
    more, same = a > b, a == b
    put_index(out, 0, 10 * more + same)
    put_index(out, 1, more)
    put_index(out, 2, (more | same) & (a > 0))


def _roots(out, a):
    put_float(out, 0, math.sqrt(a) + (a > 2))
    put_float(out, 1, 0.1)


@pytest.mark.parametrize(("a", "b"), [(3, 2), (2, 3), (4, 4), (-1, -1)])
def test_truth_values_are_numbers(a: int, b: int) -> None:
    out = np.zeros(3, np.int64)
    run(_truths, out.ctypes.data, a, b)
    assert out.tolist() == [10 * (a > b) + (a == b), a > b, (a > b or a == b) and a > 0]


@pytest.mark.parametrize("a", [2, 9])
def test_what_an_intrinsic_takes_is_rounded_to_its_type(a: int) -> None:
    out = np.zeros(2, np.float32)
    run(_roots, out.ctypes.data, a)
    assert out.tolist() == [np.float32(math.sqrt(a) + (a > 2)), np.float32(0.1)]
