"""Modern Hopfield networks in numpy float64, one query at a time; maps by bisection, written apart from the library.

Weights: p(s) = argmax <p, s> - Omega(p). Conjugates are the value of that maximum. Nothing is imported from thalweg.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a falling function."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def softmax(s: Array) -> Array:
    e = np.exp(s - s.max())
    return e / e.sum()


def entmax(s: Array, alpha: float) -> Array:
    """p_i = max((alpha - 1) s_i - t, 0)^(1 / (alpha - 1)) with t by bisection."""
    z = (alpha - 1) * s
    weights = lambda t: np.maximum(z - t, 0.0) ** (1 / (alpha - 1))  # noqa: E731
    return weights(bisect(lambda t: weights(t).sum() - 1, z.max() - 1, z.max()))


def normmax(s: Array, alpha: float) -> Array:
    """p = max(s - t, 0)^(1 / (alpha - 1)), normalised, with the alpha-conjugate norm of max(s - t, 0) equal to 1."""
    q = alpha / (alpha - 1)
    t = bisect(lambda t: (np.maximum(s - t, 0.0) ** q).sum() - 1, s.max() - 1, s.max())
    raw = np.maximum(s - t, 0.0) ** (1 / (alpha - 1))
    return raw / raw.sum()


def k_subsets(s: Array, k: int) -> Array:
    t = bisect(lambda t: np.clip(s - t, 0, 1).sum() - k, s.min() - 2, s.max() + 1)
    return np.clip(s - t, 0, 1)


def regulariser(p: Array, name: str, parameter: float) -> float:
    if name == "softmax":
        return float(sum(x * math.log(x) for x in p if x > 0))
    if name == "entmax":
        return float((np.sum(p**parameter) - 1) / (parameter * (parameter - 1)))
    if name == "normmax":
        return float(np.sum(p**parameter) ** (1 / parameter))
    return float(np.sum(p * p) / 2)  # k-subsets


def chain(s: Array, gain: float) -> tuple[Array, float]:
    """Marginals and log Z of choices y in {0, 1}^N, by listing them; two neighbours that are chosen gain something."""
    choices = [np.array(y) for y in itertools.product((0, 1), repeat=len(s))]
    scores = np.array([y @ s + gain * float(y[:-1] @ y[1:]) for y in choices])
    p = softmax(scores)
    return sum(w * y for w, y in zip(p, choices, strict=True)), float(scores.max() - math.log(p.max()))


def weights(s: Array, name: str, parameter: float) -> Array:
    if name == "chain":
        return chain(s, parameter)[0]
    if name == "softmax":
        return softmax(s)
    if name == "entmax":
        return entmax(s, parameter)
    return normmax(s, parameter) if name == "normmax" else k_subsets(s, int(parameter))


def conjugate(s: Array, name: str, parameter: float) -> float:
    if name == "chain":
        return chain(s, parameter)[1]
    p = weights(s, name, parameter)
    return float(p @ s) - regulariser(p, name, parameter)


def post(z: Array, name: str) -> Array:
    if name == "identity":
        return z
    z = z if name == "l2" else z - z.mean()
    return z / np.linalg.norm(z) * (1.0 if name == "l2" else math.sqrt(len(z)))


def post_conjugate(z: Array, name: str) -> float:
    if name == "identity":
        return float(z @ z) / 2
    return float(np.linalg.norm(z)) if name == "l2" else math.sqrt(len(z)) * float(np.linalg.norm(z - z.mean()))


def post_value(q: Array, name: str) -> float:
    """Psi of a state that is allowed; outside it is infinite."""
    if name == "identity":
        return float(q @ q) / 2
    radius = 1.0 if name == "l2" else math.sqrt(len(q))
    centred = name == "l2" or abs(q.mean()) < 1e-9
    return 0.0 if centred and np.linalg.norm(q) <= radius + 1e-9 else math.inf


def energy(X: Array, q: Array, beta: float, name: str, parameter: float, how: str) -> float:
    value = -conjugate(beta * (X @ q), name, parameter) / beta + post_value(q, how)
    level = conjugate(np.zeros(len(X)), name, parameter) / beta
    return value + level + max(post_conjugate(x, how) for x in X)


def update(X: Array, q: Array, beta: float, name: str, parameter: float, how: str) -> Array:
    return post(X.T @ weights(beta * (X @ q), name, parameter), how)


def retrieve(X: Array, q: Array, beta: float, name: str, parameter: float, how: str, max_steps: int, tol: float):
    """The state, the energies from the start on, and whether the last step was no longer than the tolerance."""
    energies = [energy(X, q, beta, name, parameter, how)]
    for _ in range(max_steps):
        new = update(X, q, beta, name, parameter, how)
        length, q = np.linalg.norm(new - q), new
        energies.append(energy(X, q, beta, name, parameter, how))
        if length <= tol:
            return q, energies, True
    return q, energies, False


def separation(X: Array) -> list[float]:
    """Delta_i by looking at every pair."""
    gaps = [[math.inf] for _ in X]
    for i, j in itertools.permutations(range(len(X)), 2):
        gaps[i].append(float(X[i] @ X[i] - X[i] @ X[j]))
    return [min(gap) for gap in gaps]


def firm_threshold(y: float, penalty: float, gamma: float) -> float:
    """The minimiser of (x - y)^2 / 2 plus the minimax concave penalty, gamma > 1 (Gao and Bruce, 1997)."""
    if abs(y) <= penalty:
        return 0.0
    if abs(y) >= gamma * penalty:
        return y
    return math.copysign((abs(y) - penalty) * gamma / (gamma - 1), y)
