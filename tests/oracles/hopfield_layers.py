"""Hopfield layers in plain numpy, one item, head and query at a time; imports nothing from thalweg."""

import numpy as np


def softmax(scores):
    e = np.exp(scores - scores.max())
    return e / e.sum()


def sparsemax(scores):
    """Projection onto the simplex: the threshold by trying every size of the support."""
    ordered = np.sort(scores)[::-1]
    for size in range(len(scores), 0, -1):
        threshold = (ordered[:size].sum() - 1) / size
        if ordered[size - 1] > threshold:
            return np.maximum(scores - threshold, 0)
    raise AssertionError("the largest score is always in the support")


def entmax(scores, alpha):
    """[(alpha - 1) s - tau]_+^(1 / (alpha - 1)), the threshold by bisection."""
    x = (alpha - 1) * scores
    low, high = x.max() - 1, x.max()
    for _ in range(200):
        tau = (low + high) / 2
        total = (np.maximum(x - tau, 0) ** (1 / (alpha - 1))).sum()
        low, high = (tau, high) if total > 1 else (low, tau)
    p = np.maximum(x - tau, 0) ** (1 / (alpha - 1))
    return p / p.sum()


MAPS = {"softmax": softmax, "sparsemax": sparsemax, "entmax15": lambda s: entmax(s, 1.5), 1.3: lambda s: entmax(s, 1.3)}


def conjugate(name, scores):
    """max over the simplex of <p, s> - Omega(p), from the maximiser."""
    if name == "softmax":
        return scores.max() + np.log(np.exp(scores - scores.max()).sum())
    alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name, name)
    p = MAPS[name](scores)
    return float(p @ scores - ((p**alpha).sum() - 1) / (alpha * (alpha - 1)))


def layer_norm(x, norm):
    if norm is None:
        return x
    weight, bias, eps = norm
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def linear(x, layer):
    return x @ layer[0].T + layer[1]


def of_ours(state, eps=1e-5):
    """Parts from the state dict of a layer of thalweg: projections and norms by name."""
    parts = {}
    for name in ("query", "key", "value", "out"):
        if f"{name}.weight" in state:
            parts[name] = (state[f"{name}.weight"], state.get(f"{name}.bias", 0.0))
    for name in ("stored_norm", "state_norm", "values_norm", "space_norm"):
        if f"{name}.weight" in state:
            parts[name] = (state[f"{name}.weight"], state[f"{name}.bias"], eps)
    return parts


def of_hflayers(state, *, static=(), eps=1e-5):
    """Parts from a state dict in the naming of hflayers (Ramsauer et al.), of the inner `Hopfield`."""
    core = {name.removeprefix("association_core."): value for name, value in state.items()}
    parts, rows, bias_at = {}, 0, 0
    bias = core.get("in_proj_bias")
    present = [
        name for name, what in (("query", "state"), ("key", "stored"), ("value", "values")) if what not in static
    ]
    for name in present:
        weight = core.get(f"{name[0]}_proj_weight")
        if weight is None:
            each = len(core["in_proj_weight"]) // len(present)
            weight = core["in_proj_weight"][rows : rows + each]
            rows += each
        parts[name] = (weight, 0.0 if bias is None else bias[bias_at : bias_at + len(weight)])
        bias_at += len(weight)
    if "out_proj.weight" in core:
        parts["out"] = (core["out_proj.weight"], core.get("out_proj.bias", 0.0))
    names = {"stored_norm": "norm_stored_pattern", "state_norm": "norm_state_pattern"}
    names["values_norm"] = "norm_pattern_projection"
    for ours, theirs in names.items():
        if f"{theirs}.weight" in state:
            parts[ours] = (state[f"{theirs}.weight"], state[f"{theirs}.bias"], eps)
    if "p_norm_weight" in core:
        parts["space_norm"] = (core["p_norm_weight"], core["p_norm_bias"], eps)
    return parts


def head_of(x, layer, head, heads):
    if layer is None:
        return x
    projected = linear(x, layer)
    width = projected.shape[-1] // heads
    return projected[:, head * width : (head + 1) * width]


def associate(
    parts, stored, state, values, *, heads, beta, steps=1, tolerance=None, map="softmax", added=None,
    connected=False, zero=False,
):  # fmt: skip
    """Outputs ``(T, output)``, weights ``(H, T, N)`` and energies ``(H, T)`` lists over the states passed through.

    ``added`` is ``(H, T, N)``, -inf where a query cannot see a pattern.
    """
    stored, state = layer_norm(stored, parts.get("stored_norm")), layer_norm(state, parts.get("state_norm"))
    values = layer_norm(values, parts.get("values_norm"))
    if connected:
        values = linear(values, parts["key"])
    readings, weights, energies = [], [], []
    for h in range(heads):
        q, k = head_of(state, parts.get("query"), h, heads), head_of(stored, parts.get("key"), h, heads)
        v = head_of(values, parts.get("value"), h, heads)
        q, k = layer_norm(q, parts.get("space_norm")), layer_norm(k, parts.get("space_norm"))
        if zero:
            k, v = np.vstack([k, 0 * k[:1]]), np.vstack([v, 0 * v[:1]])
        rows = []
        for t in range(len(q)):
            extra = np.zeros(len(k)) if added is None else np.append(added[h, t], [0.0] * zero)
            rows.append(_settle(q[t], k, v, beta[h], steps, tolerance, map, extra))
        reading, weight, energy = zip(*rows, strict=True)
        readings.append(np.array(reading))
        weights.append(np.array(weight))
        energies.append(list(energy))
    output = np.concatenate(readings, axis=1)
    return (linear(output, parts["out"]) if "out" in parts else output), np.array(weights), energies


def _settle(q, k, v, beta, steps, tolerance, name, extra):
    """One query: its reading, the last weights, and the energy of every state it was in."""
    seen = np.isfinite(extra)
    if not seen.any():
        return np.zeros(v.shape[1]), np.zeros(len(k)), [q @ q / 2]

    def weigh(state):
        p = np.zeros(len(k))
        p[seen] = MAPS[name](beta * (k[seen] @ state) + extra[seen])
        return p

    def energy(state):
        patterns = k[seen]
        flat = conjugate(name, np.zeros(len(patterns)))
        met = conjugate(name, beta * (patterns @ state) + extra[seen])
        return (flat - met) / beta + state @ state / 2 + (patterns**2).sum(1).max() / 2

    energies = [energy(q)]
    for _ in range(steps - 1):
        new = k.T @ weigh(q)
        moved, q = np.linalg.norm(new - q), new
        energies.append(energy(q))
        if tolerance is not None and moved <= tolerance:
            break
    p = weigh(q)
    return v.T @ p, p, energies
