"""Gates of recurrent cells in float64, from sums of inputs and past, one number at a time."""

import math


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def lstm(x, past, cell):
    """Gates i, f, g, o one after the other in ``x`` and ``past``: the new h and the new cell."""
    width = len(cell)
    total = [a + b for a, b in zip(x, past, strict=True)]
    i, f, g, o = (total[n * width : (n + 1) * width] for n in range(4))
    new = [sigmoid(f[n]) * cell[n] + sigmoid(i[n]) * math.tanh(g[n]) for n in range(width)]
    return [sigmoid(o[n]) * math.tanh(new[n]) for n in range(width)], new


def gru(x, past, h):
    """Gates r, z, n likewise; r weighs the past of n alone."""
    width = len(h)
    new = []
    for k in range(width):
        r, z = (sigmoid(x[n * width + k] + past[n * width + k]) for n in range(2))
        n = math.tanh(x[2 * width + k] + r * past[2 * width + k])
        new.append((1 - z) * n + z * h[k])
    return new
