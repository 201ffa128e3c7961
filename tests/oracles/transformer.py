"""A Transformer in plain numpy, one unpadded sequence at a time; imports nothing from thalweg."""

import math

import numpy as np


def layer_norm(x, w, name):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def normed(x, w, name, kind, *, broken=False):
    """A norm of the decoders and encoders of one unpadded sequence ``(T, D)``; ``broken``: a twin, with T - 1."""
    if kind == "layer":
        return layer_norm(x, w, name)
    if kind in ("none", "weight"):
        return x
    name = f"{name}.layer"
    if kind == "rms":
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]
    if kind == "batch":
        mean, variance = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    else:
        mean = x.mean(0)
        variance = ((x - mean) ** 2).sum(0) / max(1, len(x) - (1 if broken else 0))
    return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def normed_together(rows, w, name, count=None):
    """Batch norm while training: a list of ``(T, D)``, all of whose positions share their statistics."""
    every = np.concatenate(rows)
    mean = every.mean(0)
    variance = ((every - mean) ** 2).sum(0) / (count or len(every))
    name = f"{name}.layer"
    return [(x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"] for x in rows]


def batch_normed_stack(w, layers, heads, kind, rows, *, pre, count=None):
    """An encoder of batch-normed layers on a list of ``(T, D)`` while training; ``count``: of a broken twin."""

    def attention(x, name):
        q, k, v = np.split(linear(x, w, f"{name}.project"), 3, axis=1)
        return linear(attend(q, k, v, heads)[0], w, f"{name}.out")

    def block(rows, norm, function):
        inner = normed_together(rows, w, norm, count) if pre else rows
        rows = [x + function(y) for x, y in zip(rows, inner, strict=True)]
        return rows if pre else normed_together(rows, w, norm, count)

    for n in range(layers):
        at = f"layers.{n}"
        rows = block(rows, f"{at}.attention_norm", lambda x, at=at: attention(x, f"{at}.attention"))
        rows = block(rows, f"{at}.feedforward_norm", lambda x, at=at: feedforward(w, f"{at}.feedforward", kind, x))
    return normed_together(rows, w, "norm", count) if pre else rows


def norm_kind(c, side):
    """The kind of norm of a side; configs of old have none."""
    kind = c.get("encoder_norm", "layer")
    if side == "encoder":
        return kind
    other = c.get("decoder_norm", "auto")
    if other != "auto":
        return other
    return "layer" if kind in ("batch", "instance") else kind


def matrix(w, name):
    if f"{name}.weight" in w:
        return w[f"{name}.weight"]
    lengths, rows = (w[f"{name}.parametrizations.weight.original{n}"] for n in (0, 1))
    return lengths * rows / np.sqrt((rows * rows).sum(1, keepdims=True))


def linear(x, w, name):
    return x @ matrix(w, name).T + w.get(f"{name}.bias", 0.0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activation(kind, x):
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    return x / (1 + np.exp(-x))


def feedforward(w, name, kind, x):
    inner = linear(x, w, f"{name}.up")
    inner = activation("silu", linear(x, w, f"{name}.gate")) * inner if kind == "swiglu" else activation(kind, inner)
    return linear(inner, w, f"{name}.down")


def sinusoids(positions, width):
    rows = []
    for p in positions:
        angles = [p / 10000 ** (2 * i / width) for i in range(width // 2)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return np.array(rows)


def turn(x, positions):
    """Rotary positions as multiplication of complex numbers x_i + i x_{i + d/2}."""
    half = x.shape[-1] // 2
    angles = np.array([[p / 10000 ** (2 * i / x.shape[-1]) for i in range(half)] for p in positions])
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=1)


def attend(q, k, v, heads, *, causal=False, turned=None):
    """Contexts ``(T, D)`` and weights ``(H, T, S)``."""
    d = q.shape[1] // heads
    outputs, weights = [], []
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        qh, kh = q[:, part], k[:, part]
        if turned is not None:
            qh, kh = turn(qh, turned), turn(kh, turned)
        scores = qh @ kh.T / math.sqrt(d)
        if causal:
            scores[np.triu_indices(len(scores), 1)] = -np.inf
        weights.append(softmax(scores))
        outputs.append(weights[-1] @ v[:, part])
    return np.concatenate(outputs, axis=1), np.array(weights)


def layer(w, name, c, x, *, memory=None, causal=False, turned=None):
    """One layer: its output, the last attention's output and weights."""

    def block(x, norm, function):
        kind, broken = norm_kind(c, name.split(".")[0]), c.get("broken", False)
        if c["norm"] == "pre":
            return x + function(normed(x, w, norm, kind, broken=broken))
        return normed(x + function(x), w, norm, kind, broken=broken)

    seen = {}

    def own(x):
        q, k, v = np.split(linear(x, w, f"{name}.attention.project"), 3, axis=1)
        read, seen["weights"] = attend(q, k, v, c["heads"], causal=causal, turned=turned)
        seen["context"] = linear(read, w, f"{name}.attention.out")
        return seen["context"]

    def cross(x):
        k, v = np.split(linear(memory, w, f"{name}.cross.memory"), 2, axis=1)
        read, seen["weights"] = attend(linear(x, w, f"{name}.cross.query"), k, v, c["heads"])
        seen["context"] = linear(read, w, f"{name}.cross.out")
        return seen["context"]

    x = block(x, f"{name}.attention_norm", own)
    if memory is not None:
        x = block(x, f"{name}.cross_norm", cross)
    x = block(x, f"{name}.feedforward_norm", lambda x: feedforward(w, f"{name}.feedforward", c["activation"], x))
    return x, seen["context"], seen["weights"]


def stack(w, side, c, x, **options):
    context = weights = None
    for n in range(c[f"{side}_layers"]):
        x, context, weights = layer(w, f"{side}.layers.{n}", c, x, **options)
    if c["norm"] == "pre":
        x = normed(x, w, f"{side}.norm", norm_kind(c, side), broken=c.get("broken", False))
    return x, context, weights


def embed(w, side, c, tokens, positions, features=()):
    x = w[f"{side}_embedding.weight"][tokens]
    x = x + np.array([w["feature_type"] * (t in features) if features else 0 * x[0] for t in tokens])
    if c["embedding_scale"]:
        x = x * math.sqrt(c["width"])
    if c["positions"] == "sinusoidal":
        x = x + sinusoids(positions, c["width"])
    elif c["positions"] == "learned":
        table = "target" if c["kind"] == "causal" else side
        x = x + w[f"{table}_positions.weight"][positions]
    return layer_norm(x, w, f"{side}_norm") if c["embedding_norm"] else x


def source_positions(source, features):
    if not features:
        return list(range(len(source))), len(source)
    positions, count = [], 0
    for symbol in source:
        count += symbol not in features
        positions.append(0 if symbol in features else count)
    return positions, count + 1


def plain_log_probs(w, c, source, target, *, features=(), copies=None, bos=2, never=(1, 2), unread=(0,)):
    """``(T, V)`` log-probabilities after each prefix of the target; ``w`` arrays by name, ``c`` the config's fields.

    Returns them and the weights ``(T, S)`` of the last attention to the source, averaged over heads.
    """
    fed = [bos, *target[:-1]]
    here, start = source_positions(source, features)
    turned = c["positions"] == "rotary"
    x = embed(w, "source", c, source, here, features)
    if c["kind"] == "causal":
        there = [start + t for t in range(len(fed))]
        y = embed(w, "target", c, fed, there)
        row = np.concatenate([x, y])
        out, context, weights = stack(w, "decoder", c, row, causal=True, turned=here + there if turned else None)
        out, context = out[len(source) :], context[len(source) :]
        weights = weights[:, len(source) :, : len(source)]
        weights = (weights / weights.sum(-1, keepdims=True)).mean(0)
    else:
        memory, _, _ = stack(w, "encoder", c, x, turned=here if turned else None)
        there = list(range(len(fed)))
        y = embed(w, "target", c, fed, there)
        out, context, weights = stack(w, "decoder", c, y, memory=memory, causal=True, turned=there if turned else None)
        weights = weights.mean(0)
    logits = linear(out, w, "output")
    logits[:, list(never)] = -np.inf
    p = softmax(logits)
    if c["pointer"]:
        p = mixture(w, p, out, context, y, weights, [copies[s] for s in source])
    p[:, list(unread)] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum(-1, keepdims=True)), weights


def mixture(w, p, states, contexts, inputs, weights, copied):
    """Enumeration of saying and copying, symbol by symbol."""
    mixed = np.zeros_like(p)
    for t in range(len(p)):
        z = linear(np.concatenate([states[t], contexts[t], inputs[t]]), w, "pointer.gate")[0]
        total = sum(a for a, symbol in zip(weights[t], copied, strict=True) if symbol >= 0)
        gate = 1 / (1 + math.exp(-z)) if total > 0 else 1.0
        mixed[t] = gate * p[t]
        for a, symbol in zip(weights[t], copied, strict=True):
            if symbol >= 0:
                mixed[t, symbol] += (1 - gate) * a / total
    return mixed
