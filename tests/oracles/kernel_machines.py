"""Kernels by their definitions and the dual of a large margin by a general solver; imports nothing from the library."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np


def spectrum(s: Sequence, t: Sequence, n: int) -> float:
    """Pairs of equal n-grams, counted one by one."""
    pieces = [[tuple(each[i : i + n]) for i in range(len(each) - n + 1)] for each in (s, t)]
    return float(sum(a == b for a, b in itertools.product(*pieces)))


def subsequence(s: Sequence, t: Sequence, n: int, decay: float) -> float:
    """Every choice of n rising places in both strings."""

    def weights(text: Sequence) -> Counter:
        found: Counter = Counter()
        for places in itertools.combinations(range(len(text)), n):
            found[tuple(text[place] for place in places)] += decay ** (places[-1] - places[0] + 1)
        return found

    one, other = weights(s), weights(t)
    return sum(one[u] * other[u] for u in one)


def polynomial(x: Sequence[float], z: Sequence[float], degree: int, offset: float, scale: float) -> float:
    """The power of a shifted inner product."""
    return (offset + scale * sum(a * b for a, b in zip(x, z, strict=True))) ** degree


def rbf(x: Sequence[float], z: Sequence[float], gamma: float) -> float:
    """By the distance itself."""
    return math.exp(-gamma * sum((a - b) ** 2 for a, b in zip(x, z, strict=True)))


def gram(kernel: Callable, items: Sequence, others: Sequence | None = None) -> np.ndarray:
    """Entry by entry."""
    others = items if others is None else others
    return np.array([[kernel(a, b) for b in others] for a in items])


def dual(K: np.ndarray, t: np.ndarray, C: np.ndarray) -> tuple[np.ndarray, float]:
    """Multipliers and objective of the soft margin, by sequential quadratic programming."""
    from scipy.optimize import minimize

    Q = K * np.outer(t, t)
    found = minimize(
        lambda a: 0.5 * a @ Q @ a - a.sum(),
        np.zeros(len(t)),
        jac=lambda a: Q @ a - 1,
        bounds=[(0, bound if np.isfinite(bound) else None) for bound in C],
        constraints={"type": "eq", "fun": lambda a: a @ t, "jac": lambda a: t},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    return found.x, -found.fun


def regression_dual(K: np.ndarray, y: np.ndarray, C: float, epsilon: float) -> float:
    """The objective of support vector regression, by the same."""
    from scipy.optimize import minimize

    N = len(y)

    def split(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return v[:N], v[N:]

    def objective(v: np.ndarray) -> float:
        up, down = split(v)
        c = up - down
        return 0.5 * c @ K @ c - y @ c + epsilon * v.sum()

    def slope(v: np.ndarray) -> np.ndarray:
        up, down = split(v)
        gradient = K @ (up - down) - y
        return np.r_[gradient + epsilon, -gradient + epsilon]

    signs = np.r_[np.ones(N), -np.ones(N)]
    found = minimize(
        objective,
        np.zeros(2 * N),
        jac=slope,
        bounds=[(0, C)] * (2 * N),
        constraints={"type": "eq", "fun": lambda v: signs @ v, "jac": lambda v: signs},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    return -found.fun
