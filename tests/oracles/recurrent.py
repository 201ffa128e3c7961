"""A recurrent encoder-decoder in plain Python lists, one layer each side; imports nothing but the standard library."""

import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def linear(weight, x, bias=None):
    rows = [dot(row, x) for row in weight]
    return [r + b for r, b in zip(rows, bias, strict=True)] if bias is not None else rows


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def lstm(w, p, x, state):
    h, c = state
    n = len(h)
    z = add(linear(w[p["ih"]], x, w[p["bih"]]), linear(w[p["hh"]], h, w[p["bhh"]]))
    i, f = [sigmoid(v) for v in z[:n]], [sigmoid(v) for v in z[n : 2 * n]]
    g, o = [math.tanh(v) for v in z[2 * n : 3 * n]], [sigmoid(v) for v in z[3 * n :]]
    c = [f[j] * c[j] + i[j] * g[j] for j in range(n)]
    return [o[j] * math.tanh(c[j]) for j in range(n)], c


def gru(w, p, x, state):
    (h,) = state
    n = len(h)
    a, b = linear(w[p["ih"]], x, w[p["bih"]]), linear(w[p["hh"]], h, w[p["bhh"]])
    r = [sigmoid(a[j] + b[j]) for j in range(n)]
    z = [sigmoid(a[n + j] + b[n + j]) for j in range(n)]
    c = [math.tanh(a[2 * n + j] + r[j] * b[2 * n + j]) for j in range(n)]
    return ([(1 - z[j]) * c[j] + z[j] * h[j] for j in range(n)],)


def gru_before(w, p, x, state):
    (h,) = state
    n = len(h)
    a, b = linear(w[p["input"]], x, w[p["bias"]]), linear(w[p["gates"]], h)
    r = [sigmoid(a[j] + b[j]) for j in range(n)]
    keep = [sigmoid(a[n + j] + b[n + j]) for j in range(n)]
    u = linear(w[p["candidate"]], [r[j] * h[j] for j in range(n)])
    c = [math.tanh(a[2 * n + j] + u[j]) for j in range(n)]
    return ([keep[j] * h[j] + (1 - keep[j]) * c[j] for j in range(n)],)


CELL = {"lstm": lstm, "gru": gru, "gru-reset-before": gru_before}


def names(side, direction, cell):
    if cell == "gru-reset-before":
        return {n: f"{side}.core.{n}_0_{direction}" for n in ("input", "gates", "candidate", "bias")}
    end = "l0_reverse" if direction else "l0"
    short = {"ih": "weight_ih", "hh": "weight_hh", "bih": "bias_ih", "bhh": "bias_hh"}
    return {k: f"{side}.core.{v}_{end}" for k, v in short.items()}


def run(w, side, direction, cell, xs, state):
    outputs = []
    for x in xs if direction == 0 else xs[::-1]:
        state = CELL[cell](w, names(side, direction, cell), x, state)
        outputs.append(state[0])
    return (outputs if direction == 0 else outputs[::-1]), state


def attend(w, kind, h, memory):
    if kind == "dot":
        scores = [dot(h, m) for m in memory]
    elif kind == "general":
        scores = [dot(h, linear(w["attention.key.weight"], m)) for m in memory]
    else:
        q = linear(w["attention.query.weight"], h)
        keys = [linear(w["attention.key.weight"], m, w["attention.key.bias"]) for m in memory]
        scores = [dot(w["attention.combine.weight"][0], [math.tanh(v) for v in add(q, k)]) for k in keys]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights)
    width = len(memory[0])
    return [sum(a / total * m[j] for a, m in zip(weights, memory, strict=True)) for j in range(width)]


def plain_log_probs(w, source, target, *, cell, attention, bidirectional, bos=2, never=(0, 1, 2)):
    """log p of each target symbol; parameters ``w`` as nested lists by name."""
    n = len(w[names("decoder", 0, cell).get("candidate", names("decoder", 0, cell).get("hh"))][0])
    parts = 2 if cell == "lstm" else 1
    zero = tuple([0.0] * n for _ in range(parts))
    xs = [w["source_embedding.weight"][s] for s in source]
    outputs, state = run(w, "encoder", 0, cell, xs, zero)
    if bidirectional:
        backward, other = run(w, "encoder", 1, cell, xs, zero)
        merge = add if attention == "dot" else (lambda a, b: a + b)
        outputs = [merge(a, b) for a, b in zip(outputs, backward, strict=True)]
        mapped = [
            linear(w[f"bridge.{i}.weight"], a + b, w[f"bridge.{i}.bias"])
            for i, (a, b) in enumerate(zip(state, other, strict=True))
        ]
        mapped[0] = [math.tanh(v) for v in mapped[0]]
        state = tuple(mapped)
    previous, result = bos, []
    for symbol in target:
        state = CELL[cell](w, names("decoder", 0, cell), w["target_embedding.weight"][previous], state)
        h = state[0]
        if attention != "none":
            h = [
                math.tanh(v)
                for v in linear(w["combine.weight"], h + attend(w, attention, h, outputs), w["combine.bias"])
            ]
        logits = linear(w["output.weight"], h, w["output.bias"])
        allowed = [v for v in range(len(logits)) if v not in never]
        top = max(logits[v] for v in allowed)
        norm = top + math.log(sum(math.exp(logits[v] - top) for v in allowed))
        result.append(logits[symbol] - norm)
        previous = symbol
    return result
