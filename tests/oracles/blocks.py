"""Residual, highway and recurrent blocks in numpy float64, one sequence and one position at a time."""

import numpy as np

EPS = 1e-5


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": sigmoid,
    "silu": lambda z: z * sigmoid(z),
    "identity": lambda z: z,
}


def residual_jacobian(W, x):
    """I + diag(s'(z)) W of y = x + tanh(Wx)."""
    slope = 1 - np.tanh(W @ x) ** 2
    return np.eye(len(x)) + slope[:, None] * W


def highway_jacobian(W, b, W_g, b_g, x):
    """diag(1 - i) + diag(i s'(z)) W + diag((s(z) - x) i (1 - i)) W_g of y = (1 - i) x + i tanh(z)."""
    i, s = sigmoid(W_g @ x + b_g), np.tanh(W @ x + b)
    return np.diag(1 - i) + (i * (1 - s**2))[:, None] * W + ((s - x) * i * (1 - i))[:, None] * W_g


def differences(f, x, step=1e-6):
    """Jacobian of f by central differences."""
    columns = [(f(x + step * e) - f(x - step * e)) / (2 * step) for e in np.eye(len(x))]
    return np.stack(columns, axis=1)


def post_activation(W, U, b, s, g, xs):
    """g_t = s(W g_{t-1} + U x_t + b), every t."""
    states = []
    for x in xs:
        g = s(W @ g + U @ x + b)
        states.append(g)
    return np.array(states)


def pre_activation(W, U, b, s, h, xs):
    """h_t = W s(h_{t-1}) + U x_t + b, every t."""
    states = []
    for x in xs:
        h = W @ s(h) + U @ x + b
        states.append(h)
    return np.array(states)


def matrix(w, name):
    """A matrix by its name, or g_i u_i / |u_i| where it is weight-normalised."""
    if name in w:
        return w[name]
    place, leaf = name.rsplit(".", 1)
    lengths, rows = (w[f"{place}.parametrizations.{leaf}.original{n}"] for n in (0, 1))
    return np.array([g[0] * u / np.sqrt((u * u).sum()) for g, u in zip(lengths, rows, strict=True)])


def lstm(w, place, end, x, state):
    h, c = state
    z = matrix(w, f"{place}.weight_ih_l0{end}") @ x + w[f"{place}.bias_ih_l0{end}"]
    z = z + matrix(w, f"{place}.weight_hh_l0{end}") @ h + w[f"{place}.bias_hh_l0{end}"]
    i, f, g, o = np.split(z, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), (sigmoid(o) * np.tanh(c), c)


def gru(w, place, end, x, state):
    (h,) = state
    a = np.split(matrix(w, f"{place}.weight_ih_l0{end}") @ x + w[f"{place}.bias_ih_l0{end}"], 3)
    b = np.split(matrix(w, f"{place}.weight_hh_l0{end}") @ h + w[f"{place}.bias_hh_l0{end}"], 3)
    r, z = sigmoid(a[0] + b[0]), sigmoid(a[1] + b[1])
    h = z * h + (1 - z) * np.tanh(a[2] + r * b[2])
    return h, (h,)


def gru_reset_before(w, place, end, x, state):
    (h,) = state
    end = "0_1" if end else "0_0"
    a = np.split(matrix(w, f"{place}.input_{end}") @ x + w[f"{place}.bias_{end}"], 3)
    u = np.split(matrix(w, f"{place}.gates_{end}") @ h, 2)
    i_f, i_o = sigmoid(a[0] + u[0]), sigmoid(a[1] + u[1])
    h = i_o * h + (1 - i_o) * np.tanh(a[2] + matrix(w, f"{place}.candidate_{end}") @ (i_f * h))
    return h, (h,)


def plain(w, place, end, x, state, activation, pre):
    (h,) = state
    s = ACTIVATIONS[activation]
    z = matrix(w, f"{place}.weight_hh_l0{end}") @ (s(h) if pre else h) + w[f"{place}.bias_hh_l0{end}"]
    z = z + matrix(w, f"{place}.weight_ih_l0{end}") @ x + w[f"{place}.bias_ih_l0{end}"]
    return s(z), (z if pre else s(z),)


def step(cell, w, place, end, x, state):
    """Output and new state of one layer in one direction at one position."""
    if cell.startswith("rnn-"):
        _, activation, *pre = cell.split("-")
        return plain(w, f"{place}.core" if pre else place, end, x, state, activation, bool(pre))
    return {"lstm": lstm, "gru": gru, "gru-reset-before": gru_reset_before}[cell](w, place, end, x, state)


def normalised(kind, w, place, batch, training):
    """A list of (T, D) arrays, normalised."""
    if kind in ("none", "weight"):
        return batch
    scale, shift = w[f"{place}.layer.weight"], w.get(f"{place}.layer.bias", 0.0)
    if kind == "rms":
        return [x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * scale for x in batch]
    if kind == "batch" and not training:
        mean, variance = w[f"{place}.layer.running_mean"], w[f"{place}.layer.running_var"]
        moments = [(mean, variance)] * len(batch)
    elif kind == "batch":
        rows = np.concatenate(batch)
        moments = [(rows.mean(axis=0), rows.var(axis=0))] * len(batch)
    else:
        axis = 1 if kind == "layer" else 0
        moments = [(x.mean(axis=axis, keepdims=True), x.var(axis=axis, keepdims=True)) for x in batch]
    return [(x - m) / np.sqrt(v + EPS) * scale + shift for x, (m, v) in zip(batch, moments, strict=True)]


def blocks(w, batch, *, cell, hidden, layers, bidirectional, residual, norm, training=False):
    """Outputs and last states (layers * directions, H) of every sequence; ``w``: arrays by parameter name."""
    parts = 2 if cell == "lstm" else 1
    finals = [[] for _ in batch]
    for n in range(layers):
        place = f"core.blocks.{n}"
        inner, changes = normalised(norm, w, f"{place}.norm", batch, training), []
        for number, xs in enumerate(inner):
            sides = []
            for end in ("", "_reverse") if bidirectional else ("",):
                state = tuple(np.zeros(hidden) for _ in range(parts))
                ys = []
                for x in xs[::-1] if end else xs:
                    y, state = step(cell, w, f"{place}.block.inner.core", end, x, state)
                    ys.append(y)
                sides.append(np.array(ys[::-1] if end else ys))
                finals[number].append(state)
            changes.append(np.concatenate(sides, axis=1))
        batch = [joined(w, place, residual, x, y) for x, y in zip(batch, changes, strict=True)]
    return normalised(norm if residual != "none" else "none", w, "core.last", batch, training), finals


def joined(w, place, residual, x, change):
    if residual == "none":
        return change
    carried = x @ w[f"{place}.block.shortcut.weight"].T if f"{place}.block.shortcut.weight" in w else x
    if residual == "residual":
        return carried + change
    i = sigmoid(x @ w[f"{place}.block.gate.weight"].T + w[f"{place}.block.gate.bias"])
    return (1 - i) * carried + i * change
