"""Convolutional networks from their definitions, one number at a time, in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np


def convolve(x, weight, bias=None, *, stride=1, groups=1):
    """(B, C, H, W) by (C', C / groups, K, K), padded by K // 2."""
    B, _, H, W = x.shape
    outputs, per, K, _ = weight.shape
    pad = K // 2
    height, width = (math.floor((n + 2 * pad - K) / stride) + 1 for n in (H, W))
    y = np.zeros((B, outputs, height, width))
    for b, o, i, j in itertools.product(range(B), range(outputs), range(height), range(width)):
        first = o // (outputs // groups) * per
        total = 0.0 if bias is None else float(bias[o])
        for c, p, q in itertools.product(range(per), range(K), range(K)):
            row, column = i * stride + p - pad, j * stride + q - pad
            if 0 <= row < H and 0 <= column < W:
                total += x[b, first + c, row, column] * weight[o, c, p, q]
        y[b, o, i, j] = total
    return y


def windows(x, size, choose, *, partial=False):
    """``choose`` of each window; windows that do not fit are left out, or cut where ``partial``."""
    B, C, H, W = x.shape
    height, width = (math.ceil(n / size) if partial else n // size for n in (H, W))
    y = np.zeros((B, C, height, width))
    for b, c, i, j in itertools.product(range(B), range(C), range(height), range(width)):
        y[b, c, i, j] = choose(x[b, c, i * size : (i + 1) * size, j * size : (j + 1) * size])
    return y


def normalise(x, groups_of, weight, bias, eps=1e-5):
    """Each value less the mean of its group over the square root of its variance; ``groups_of(b, c)`` names it."""
    B, C = x.shape[:2]
    members: dict = {}
    for b, c in itertools.product(range(B), range(C)):
        members.setdefault(groups_of(b, c), []).append((b, c))
    y = np.zeros_like(x)
    for places in members.values():
        values = np.concatenate([x[b, c].ravel() for b, c in places])
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
        for b, c in places:
            y[b, c] = weight[c] * (x[b, c] - mean) / math.sqrt(variance + eps) + bias[c]
    return y


def relu(x):
    return np.where(x > 0, x, 0.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def squeeze_excite(x, down, down_bias, up, up_bias):
    y = np.zeros_like(x)
    for b in range(len(x)):
        means = np.array([channel.mean() for channel in x[b]])
        gate = sigmoid(up @ relu(down @ means + down_bias) + up_bias)
        for c, g in enumerate(gate):
            y[b, c] = g * x[b, c]
    return y


def flat_network(x, w):
    """The published network at any width: convolution, ReLU, max-pool; flatten; hidden layers; energies."""
    for block in itertools.count():
        if f"blocks.{block}.convolution.weight" not in w:
            break
        x = convolve(x, w[f"blocks.{block}.convolution.weight"], w[f"blocks.{block}.convolution.bias"])
        x = windows(relu(x), 2, np.max)
    h = x.reshape(len(x), -1)
    for layer in ("hidden1", "hidden2"):
        h = relu(h @ w[f"classifier.{layer}.weight"].T + w[f"classifier.{layer}.bias"])
    return -(h @ w["classifier.output.weight"].T + w["classifier.output.bias"])
