"""Jacobians, powers and recurrences in numpy float64, one point and one step at a time; imports nothing of thalweg."""

import numpy as np


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def differences(f, x, step=1e-6):
    """Jacobian of f at x by central differences, (M, D)."""
    columns = [(f(x + step * e) - f(x - step * e)) / (2 * step) for e in np.eye(len(x))]
    return np.stack(columns, axis=1)


def singular_values(matrix):
    """Falling, as square roots of the eigenvalues of the smaller Gram matrix."""
    small = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    return np.sqrt(np.clip(np.linalg.eigvalsh(small)[::-1], 0, None))


def tanh_spans(W, U, b, h, xs):
    """dh_T/dh_{T-s} of h_t = tanh(W h_{t-1} + U x_t + b), s = 1 ... T, as products of the steps' Jacobians."""
    steps = []
    for x in xs:
        h = np.tanh(W @ h + U @ x + b)
        steps.append((1 - h**2)[:, None] * W)
    spans, product = [], np.eye(len(b))
    for step in reversed(steps):
        product = product @ step
        spans.append(product)
    return spans


def broken_spans(W, U, b, h, xs):
    """As :func:`tanh_spans` with the slope forgotten."""
    return [np.linalg.matrix_power(W, n + 1) for n in range(len(xs))]


def power(W, steps):
    """W^t by repeated products."""
    product = np.eye(len(W))
    for _ in range(steps):
        product = W @ product
    return product


def jordan(value, size):
    """A Jordan block."""
    return value * np.eye(size) + np.eye(size, k=1)


def lstm_gates(W, U, b, h, c, xs):
    """Gates i, f, g, o of every step in torch's order, as (T, H) each."""
    gates, H = [], len(h)
    for x in xs:
        z = W @ x + U @ h + b
        i, f, o = sigmoid(z[:H]), sigmoid(z[H : 2 * H]), sigmoid(z[3 * H :])
        g = np.tanh(z[2 * H : 3 * H])
        c = f * c + i * g
        h = o * np.tanh(c)
        gates.append((i, f, g, o))
    return [np.stack(parts) for parts in zip(*gates, strict=True)]


def share(values, low, high):
    """Shares of values below and above, counted."""
    values = values.reshape(-1)
    below = sum(1 for value in values if value < low)
    above = sum(1 for value in values if value > high)
    return below / len(values), above / len(values)
