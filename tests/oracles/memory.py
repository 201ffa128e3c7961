"""Associative memories in float64 with all weights at hand, one query at a time. Imports nothing from thalweg."""

from __future__ import annotations

import numpy as np

__all__ = ["associate", "energy", "nearest", "settle"]


def _scores(query: np.ndarray, keys: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    scores = np.full(len(keys), -np.inf)
    present = np.ones(len(keys), dtype=bool) if mask is None else mask
    scores[present] = keys[present] @ query
    return scores


def associate(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, beta: float, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(beta q k') v and (1/beta) log sum exp(beta q k'), query by query."""
    mixed, lse = np.zeros((len(queries), values.shape[1])), np.full(len(queries), -np.inf)
    for row, query in enumerate(queries):
        scores = beta * _scores(query, keys, mask)
        top = scores.max(initial=-np.inf)
        if top == -np.inf:
            continue
        weights = np.exp(scores - top)
        mixed[row] = weights[weights > 0] / weights.sum() @ values[weights > 0]
        lse[row] = (top + np.log(weights.sum())) / beta
    return mixed, lse


def energy(query: np.ndarray, patterns: np.ndarray, beta: float, mask: np.ndarray | None = None) -> float:
    """-lse(X q) + (1/beta) log N + q'q / 2 + M^2 / 2."""
    kept = patterns if mask is None else patterns[mask]
    _, lse = associate(query[None], patterns, np.zeros((len(patterns), 1)), beta, mask)
    largest = max((float(x @ x) for x in kept), default=0.0)
    return float(-lse[0] + np.log(max(len(kept), 1)) / beta + query @ query / 2 + largest / 2)


def settle(
    queries: np.ndarray,
    patterns: np.ndarray,
    beta: float,
    max_steps: int,
    tol: float,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, list[int], list[bool]]:
    """State, energies, steps and whether at rest, of every query by itself."""
    states, traces, steps, still = [], [], [], []
    for query in queries:
        trace, state, count, rests = [energy(query, patterns, beta, mask)], query, 0, False
        while count < max_steps and not rests:
            new = associate(state[None], patterns, patterns, beta, mask)[0][0]
            rests, state, count = bool(np.sqrt(((new - state) ** 2).sum()) <= tol), new, count + 1
            trace.append(energy(state, patterns, beta, mask))
        states.append(state)
        traces.append(trace + [trace[-1]] * (max_steps + 1 - len(trace)))
        steps.append(count)
        still.append(rests)
    shape = queries.shape
    return np.array(states).reshape(shape), np.array(traces).reshape(len(queries), max_steps + 1), steps, still


def nearest(
    queries: np.ndarray, keys: np.ndarray, k: int, mask: np.ndarray | None = None
) -> list[list[tuple[float, int]]]:
    """The k best (score, index) of every query, best first; fewer where fewer are present."""
    found = []
    for query in queries:
        scores = _scores(query, keys, mask)
        ranked = sorted(((float(s), i) for i, s in enumerate(scores) if s > -np.inf), reverse=True)
        found.append(ranked[:k])
    return found
