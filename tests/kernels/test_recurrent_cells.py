"""Operations of recurrent cells, called one by one: numbers beside those of the oracle."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

from oracles import gates

pytest.importorskip("numba")
cells: Any = pytest.importorskip("thalweg.kernels.cpu.recurrent_cells")
encoders: Any = pytest.importorskip("thalweg.kernels.cpu.recurrent_encoder")
WIDTHS = (1, 7, 8, 20)


def call(kind: Any, rows: int, t: int, *words: Any) -> None:
    """One operation in one part, on arrays and whole numbers."""
    from thalweg.kernels.cpu.plain import compile_plain

    op = np.zeros(24, np.int64)
    op[2 : 2 + len(words)] = [word.ctypes.data if isinstance(word, np.ndarray) else word for word in words]
    ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 5)(compile_plain(kind))(op.ctypes.data, rows, t, 0, 1)


def numbers(*shape: int, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def tanh(x: np.ndarray) -> np.ndarray:
    out, width = np.zeros_like(x), x.shape[1] * 4
    call(encoders.copy, len(x), 0, x, width, out, width, x.shape[1], 1, np.arange(len(x)))
    return out


def test_tanh_everywhere() -> None:
    """Far out, at both infinities, at 0 and where it is nearly linear."""
    for x in (np.linspace(-100, 100, 4001), np.linspace(-1e-3, 1e-3, 101), np.array([0.0, math.inf, -math.inf, 3e38])):
        x = x.astype(np.float32)[None]
        np.testing.assert_allclose(tanh(x), np.tanh(x.astype(np.float64)), rtol=0, atol=2e-7)
    assert tanh(np.zeros((1, 3), np.float32)).tolist() == [[0.0, 0.0, 0.0]]


def test_not_a_number_stays_so_and_touches_nobody_else() -> None:
    x = numbers(2, 11)
    x[0, 9] = x[1, 2] = math.nan
    out = tanh(x)
    assert np.array_equal(np.isnan(out), np.isnan(x))


def test_rows_are_read_where_they_are_said_to_stand() -> None:
    x, out, order = numbers(5, 9), np.zeros((5, 9), np.float32), np.array([3, 0, 4, 1, 2])
    call(encoders.copy, 5, 0, x, 36, out, 36, 9, 0, order)
    assert np.array_equal(out, x[order])


def step(kind: str, x: np.ndarray, past: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A first step of all rows: the outputs and the states that are carried on."""
    rows, width = old.shape
    states, out = np.stack([np.zeros_like(old), old]), np.zeros_like(old)
    fed = (x, x.shape[1] * 4, 0, past, past.shape[1] * 4, states, old.nbytes)
    call(getattr(cells, kind), rows, 0, *fed, np.zeros(rows, np.int64), 1, np.arange(rows), out, width)
    return out, states[0]


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["near", "far"])
@pytest.mark.parametrize("width", WIDTHS)
def test_lstm_is_the_oracles(width: int, scale: float) -> None:
    x, past, old = (numbers(6, n * width, scale=scale, seed=n) for n in (4, 4, 1))
    out, new = step("lstm", x, past, old)
    for row in range(6):
        h, cell = gates.lstm(*(part[row].tolist() for part in (x, past, old)))
        np.testing.assert_allclose(out[row], h, rtol=0, atol=3e-7)
        np.testing.assert_allclose(new[row], cell, rtol=4e-7, atol=3e-7)


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["near", "far"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gru_is_the_oracles(width: int, scale: float) -> None:
    x, past, old = (numbers(6, n * width, scale=scale, seed=n) for n in (3, 3, 1))
    out, new = step("gru", x, past, old)
    assert np.array_equal(out, new)
    for row in range(6):
        h = gates.gru(*(part[row].tolist() for part in (x, past, old)))
        np.testing.assert_allclose(out[row], h, rtol=4e-7, atol=2e-6)


def test_the_oracle_can_fail() -> None:
    """Gates in another order give other numbers."""
    x, past, old = (numbers(1, n * 8, seed=n) for n in (4, 4, 1))
    turned = np.concatenate([x[:, 8:], x[:, :8]], axis=1)
    h, _ = gates.lstm(*(part[0].tolist() for part in (turned, past, old)))
    assert np.abs(step("lstm", x, past, old)[0][0] - h).max() > 1e-2
