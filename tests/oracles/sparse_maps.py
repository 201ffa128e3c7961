"""Sparse maps by bisection in pure Python, one row at a time; imports nothing from thalweg."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

INF = math.inf


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, which falls, is 0: halving until the two ends are neighbours."""
    for _ in range(2000):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return high


def softmax(scores: Sequence[float]) -> list[float]:
    """exp(s) / sum exp(s)."""
    top = max(scores)
    if top == -INF:
        return [0.0] * len(scores)
    powers = [math.exp(s - top) for s in scores]
    return [p / math.fsum(powers) for p in powers]


def entmax(scores: Sequence[float], alpha: float) -> list[float]:
    """((alpha - 1) s - tau)_+^(1 / (alpha - 1)) with sum 1."""
    if alpha == 1:
        return softmax(scores)
    top, d = max(scores), alpha - 1
    if top == -INF:
        return [0.0] * len(scores)
    z = [d * (s - top) for s in scores]

    def weights(tau: float) -> list[float]:
        return [max(x - tau, 0.0) ** (1 / d) for x in z]

    found = weights(_root(lambda tau: math.fsum(weights(tau)) - 1, -1.0, 0.0))
    return [p / math.fsum(found) for p in found]


def normmax(scores: Sequence[float], alpha: float) -> list[float]:
    """argmax <p, s> - ||p||_alpha: p in proportion to (s - lambda)_+^(1 / (alpha - 1)), whose alpha-norm is 1."""
    top, d = max(scores), alpha - 1
    if top == -INF:
        return [0.0] * len(scores)

    def parts(tau: float) -> list[float]:
        return [max(s - top - tau, 0.0) ** (1 / d) for s in scores]

    found = parts(_root(lambda tau: math.fsum(t**alpha for t in parts(tau)) - 1, -1.0, 0.0))
    return [t / math.fsum(found) for t in found]


def k_subsets(scores: Sequence[float], k: float) -> list[float]:
    """min(max(s - tau, 0), 1) with sum k; 1 for every score above -inf where these are k or fewer."""
    finite = [s for s in scores if s > -INF]
    if len(finite) <= k:
        return [float(s > -INF) for s in scores]

    def weights(tau: float) -> list[float]:
        return [min(max(s - tau, 0.0), 1.0) for s in scores]

    return weights(_root(lambda tau: math.fsum(weights(tau)) - k, min(finite) - 1, max(finite)))


def tsallis(p: Sequence[float], alpha: float) -> float:
    """(sum p^alpha - 1) / (alpha (alpha - 1)), at 1 sum p log p."""
    if alpha == 1:
        return math.fsum(x * math.log(x) for x in p if x > 0)
    return (math.fsum(x**alpha for x in p) - 1) / (alpha * (alpha - 1))


def entmax_loss(scores: Sequence[float], gold: int, alpha: float) -> float:
    """<p, s> - s_gold - Omega(p)."""
    p = entmax(scores, alpha)
    return math.fsum(x * (s - scores[gold]) for x, s in zip(p, scores, strict=True) if x > 0) - tsallis(p, alpha)


def forgetful_entmax(scores: Sequence[float], alpha: float) -> list[float]:
    """A broken twin: the threshold is found without the power."""
    sparse = entmax(scores, 2.0)
    powers = [p ** (1 / (alpha - 1)) if p else 0.0 for p in sparse]
    return [p / math.fsum(powers) for p in powers]
