"""Normalisation by its definition, one number at a time, in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np

# Batch 4, channels 2, features 3.
TENSOR = [
    [[1, 3, 2], [1, 2, 3]],
    [[3, 3, 2], [2, 4, 4]],
    [[4, 2, 2], [1, 2, 4]],
    [[3, 3, 2], [3, 3, 2]],
]


def moments(numbers, *, unbiased=False):
    """Mean and variance of a list."""
    numbers = list(numbers)
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - (1 if unbiased else 0))


def key_of(scheme, b, t, d):
    """Which group an entry of (B, T, D) belongs to."""
    return {"batch": (d,), "layer": (b, t), "rms": (b, t), "instance": (b, d)}[scheme]


def groups_of(x, mask, scheme):
    """Real entries of (B, T, D), by the group they share a mean and variance with."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for b, t, d in itertools.product(*map(range, x.shape)):
        if mask[b, t]:
            groups.setdefault(key_of(scheme, b, t, d), []).append(float(x[b, t, d]))
    return groups


def normalised(x, mask, scheme, scale, shift, *, eps, unbiased=False):
    """(B, T, D) normalised, scaled, shifted; 0 where the mask is false."""
    found = {
        key: (0.0, math.fsum(v * v for v in values) / len(values)) if scheme == "rms" else moments(values)
        for key, values in groups_of(x, mask, scheme).items()
    }
    if unbiased:  # a broken twin
        found = {key: moments(values, unbiased=True) for key, values in groups_of(x, mask, scheme).items()}
    y = np.zeros(x.shape)
    for b, t, d in itertools.product(*map(range, x.shape)):
        if mask[b, t]:
            mean, variance = found[key_of(scheme, b, t, d)]
            y[b, t, d] = scale[d] * (x[b, t, d] - mean) / math.sqrt(variance + eps) + shift[d]
    return y


def differences(function, x, step=1e-5):
    """Jacobian of a function of a vector by central differences, (n, n)."""
    x = np.asarray(x, dtype=np.float64)
    columns = []
    for j in range(len(x)):
        ahead, behind = x.copy(), x.copy()
        ahead[j] += step
        behind[j] -= step
        columns.append((np.asarray(function(ahead)) - np.asarray(function(behind))) / (2 * step))
    return np.stack(columns, axis=1)
