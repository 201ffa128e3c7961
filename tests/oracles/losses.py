"""Losses of energies by their formulas, one item at a time; the standard library alone, float64.

Energies are lists of floats with inf for an answer that is not there. A *weighted list* of structures is that of
``oracles.chains``. Gradients are written down as the formulas have them, not computed from the values.
"""

from __future__ import annotations

import itertools
import math

INF = math.inf


# Vectors: energies F[y], the right answer y = gold.


def gibbs(energies, beta=1.0):
    least = min(energies)
    weights = [0.0 if f == INF else math.exp(-beta * (f - least)) for f in energies]
    return [w / math.fsum(weights) for w in weights]


def nll(energies, gold, beta=1.0):
    least = min(energies)
    total = math.fsum(math.exp(-beta * (f - least)) for f in energies if f != INF)
    return energies[gold] - least + math.log(total) / beta


def nll_gradient(energies, gold, beta=1.0):
    """dF(x, y) - sum P dF: one at gold less the probabilities."""
    return [(y == gold) - p for y, p in enumerate(gibbs(energies, beta))]


def perceptron(energies, gold):
    return energies[gold] - min(energies)


def structured_hinge(energies, gold, costs):
    """Costs are those of each answer less the right one's own."""
    return max(energies[gold] - f + costs[y] - costs[gold] for y, f in enumerate(energies))


def softmax_margin(energies, gold, costs, beta=1.0):
    return nll([f - costs[y] + costs[gold] for y, f in enumerate(energies)], gold, beta)


def label_smoothing(energies, gold, epsilon, beta=1.0):
    present = [y for y, f in enumerate(energies) if f != INF]
    even = math.fsum(nll(energies, y, beta) for y in present) / len(present)
    return (1 - epsilon) * nll(energies, gold, beta) + epsilon * even


def risk(energies, costs, beta=1.0):
    return math.fsum(p * c for p, c in zip(gibbs(energies, beta), costs, strict=True) if p)


def sparsemax_loss(energies, gold):
    """max over supports of <p, s> - |p|^2 / 2, by trying every support, plus 1/2 - s_gold."""
    scores = [-f for f in energies]
    present = [y for y, s in enumerate(scores) if s != -INF]
    best = -INF
    for size in range(1, len(present) + 1):
        for support in itertools.combinations(present, size):
            tau = (math.fsum(scores[y] for y in support) - 1) / size
            p = {y: scores[y] - tau for y in support}
            if min(p.values()) >= 0:
                best = max(best, math.fsum(p[y] * scores[y] - p[y] ** 2 / 2 for y in support))
    return best + 0.5 - scores[gold]


# Pairs: F of the right answer, G of one contrast; (value, dF, dG).


def positive(x):
    return x if x > 0 else 0.0


def simple(f, g, m):
    return positive(f) + positive(m - g), float(f > 0), -float(g < m)


def hinge(f, g, m):
    active = float(f - g + m > 0)
    return positive(f - g + m), active, -active


def log(f, g, m=0.0):
    d = f - g
    value = math.log1p(math.exp(d)) if d < 0 else d + math.log1p(math.exp(-d))
    share = 1 / (1 + math.exp(-d)) if d > -700 else 0.0
    return value, share, -share


def square_square(f, g, m):
    return positive(f) ** 2 + positive(m - g) ** 2, 2 * f * (f > 0), -2 * (m - g) * (g < m)


def square_exponential(f, g, gamma):
    return positive(f) ** 2 + gamma * math.exp(-g), 2 * f * (f > 0), -gamma * math.exp(-g)


def mce(f, g, beta):
    x = beta * (f - g)
    s = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return s, beta * s * (1 - s), -beta * s * (1 - s)


# Structures: a weighted list [(y, score)], cost(y) with cost(gold) = 0.


def structure_hinge(weighted, gold, cost):
    own = dict(weighted)[gold]
    return max(s + cost(y) for y, s in weighted) - own


def structure_soft(weighted, gold, cost, beta=1.0):
    """(1 / beta) log sum exp(beta (score + cost)) - score(gold)."""
    values = [beta * (s + cost(y)) for y, s in weighted]
    top = max(values)
    return (top + math.log(math.fsum(math.exp(v - top) for v in values))) / beta - dict(weighted)[gold]


def structure_risk(weighted, cost, beta=1.0):
    top = max(s for _, s in weighted)
    weights = [math.exp(beta * (s - top)) for _, s in weighted]
    return math.fsum(w * cost(y) for w, (y, _) in zip(weights, weighted, strict=True)) / math.fsum(weights)


def most_offending(weighted, gold, k):
    """The k best that are not gold."""
    return sorted(((y, s) for y, s in weighted if y != gold), key=lambda pair: -pair[1])[:k]


# Sequences.


def edit_distance(a, b, *, broken=False):
    """By the recursion over ends; ``broken`` forgets that symbols may be replaced."""
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return edit_distance(a[:-1], b[:-1], broken=broken)
    ways = [edit_distance(a[:-1], b, broken=broken), edit_distance(a, b[:-1], broken=broken)]
    ways += [] if broken else [edit_distance(a[:-1], b[:-1])]
    return 1 + min(ways)


def sequences(symbols, eos, most):
    """Every sequence of at most ``most`` symbols that ends with eos."""
    for length in range(most):
        for body in itertools.product([s for s in symbols if s != eos], repeat=length):
            yield (*body, eos)


def markov_log_prob(logits, sequence, bos):
    """log p of a sequence where row i of ``logits`` says what follows symbol i."""
    total, before = 0.0, bos
    for symbol in sequence:
        row = [v for v in logits[before] if v != -INF]
        top = max(row)
        total += logits[before][symbol] - top - math.log(math.fsum(math.exp(v - top) for v in row))
        before = symbol
    return total
