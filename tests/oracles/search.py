"""Search over tables by the book: lists, dicts and enumeration.

A model is a dict: prefix (tuple of symbols) -> {symbol: log-probability}. A prefix that is not there can be
followed by nothing. A hypothesis is (symbols, log-probability, finished).
"""

from __future__ import annotations

import itertools
import math
import random

INF = math.inf

WORDS = ["<s>", "the", "a", "red", "green", "blue", "rectangle", "circle", "ellipse", "square"]
JOINT = {
    "the": -1.5,
    "the red": -4.5,
    "the red rectangle": -9.1,
    "the red circle": -9.4,
    "the green": -4.9,
    "the green rectangle": -8.2,
    "the green ellipse": -8.5,
    "a": -1.8,
    "a blue": -4.3,
    "a blue square": -9.3,
    "a blue ellipse": -9.7,
    "a red": -4.6,
    "a red circle": -9.4,
    "a red square": -9.6,
}


def tree_language_model():
    """Joint log-probabilities of the tree turned into conditional ones."""
    joint = {tuple(WORDS.index(word) for word in words.split()): value for words, value in JOINT.items()}
    joint[()] = 0.0
    table = {}
    for prefix, value in joint.items():
        if prefix:
            table.setdefault(prefix[:-1], {})[prefix[-1]] = value - joint[prefix[:-1]]
    return table


def random_table(seed, *, vocab, eos, depth, impossible=0.0):
    """Random conditional distributions after every prefix shorter than ``depth``; some symbols impossible."""
    rng = random.Random(seed)
    symbols = [v for v in range(vocab) if v != eos]
    table = {}
    for length in range(depth):
        for prefix in itertools.product(symbols, repeat=length):
            weights = {v: rng.expovariate(1.0) for v in range(vocab) if rng.random() >= impossible}
            total = sum(weights.values())
            table[prefix] = {v: math.log(w / total) for v, w in weights.items()}
    return table


def all_sequences(table, *, eos, max_length):
    """Every sequence that the model can say, best first; those without eos at the end."""
    found = []

    def extend(prefix, score):
        if prefix and prefix[-1] == eos:
            found.append((prefix, score, True))
        elif len(prefix) == max_length:
            found.append((prefix, score, eos is None))
        else:
            for symbol, value in table.get(prefix, {}).items():
                if value > -INF:
                    extend((*prefix, symbol), score + value)

    extend((), 0.0)
    return sorted(found, key=lambda h: (not h[2], -h[1]))


def greedy(table, *, eos, max_length):
    prefix, score = (), 0.0
    while len(prefix) < max_length and (not prefix or prefix[-1] != eos):
        following = {v: p for v, p in table.get(prefix, {}).items() if p > -INF}
        if not following:
            return []
        symbol = max(following, key=lambda v: following[v])
        prefix, score = (*prefix, symbol), score + following[symbol]
    return [(prefix, score, eos is None or prefix[-1] == eos)]


def beam(table, *, eos, width, k, max_length, penalty=0.0, prefix=(), allowed=None, broken=False):
    """Textbook beam search without any early stop; ``broken`` forgets to add up the scores."""
    live, finished = [((), 0.0)], []
    for step in range(1, max_length + 1):
        candidates = []
        for words, score in live:
            for symbol, value in table.get(words, {}).items():
                forced = step <= len(prefix) and symbol != prefix[step - 1]
                if value > -INF and not forced and (allowed is None or allowed(words, symbol)):
                    candidates.append(((*words, symbol), value if broken else score + value))
        candidates.sort(key=lambda c: -c[1])
        if eos is None:
            live = candidates[:width]
            if step == max_length:
                finished, live = live, []
        else:
            finished += [c for c in candidates[:width] if c[0][-1] == eos]
            live = [c for c in candidates if c[0][-1] != eos][:width]
    finished.sort(key=lambda c: -c[1] / len(c[0]) ** penalty)
    return ([(*c, True) for c in finished] + [(*c, False) for c in live])[:k]


def filtered(following, *, temperature=1.0, top_k=None, top_p=None):
    """The distribution a step is sampled from: temperature, then the k best, then the nucleus."""
    weights = {v: math.exp(p / temperature) for v, p in following.items() if p > -INF}
    ranked = sorted(weights, key=lambda v: -weights[v])[:top_k]
    total, kept, mass = sum(weights[v] for v in ranked), [], 0.0
    for v in ranked:
        if top_p is not None and mass >= top_p * total and kept:
            break
        kept.append(v)
        mass += weights[v]
    return {v: weights[v] / mass for v in kept}


def distribution(table, *, eos, max_length, **filters):
    """Probability of each sampled sequence."""
    result = {}

    def extend(prefix, probability):
        if len(prefix) == max_length or (prefix and prefix[-1] == eos):
            result[prefix] = probability
        else:
            for symbol, p in filtered(table[prefix], **filters).items():
                extend((*prefix, symbol), probability * p)

    extend((), 1.0)
    return result


def chi_square_accepts(counts, probabilities, *, z=4.0):
    """Whether observed counts are within about z standard deviations of what the probabilities predict."""
    total = sum(counts.values())
    if any(probabilities.get(outcome, 0.0) == 0.0 for outcome in counts):
        return False
    statistic, cells, rare_expected, rare_seen = 0.0, 0, 0.0, 0
    for outcome, p in probabilities.items():
        expected, seen = total * p, counts.get(outcome, 0)
        if expected < 5:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
        else:
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rare_expected >= 5:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    degrees = cells - 1
    if degrees <= 0:
        return True
    # Wilson-Hilferty: the cube root of chi-square / degrees is nearly normal.
    deviation = (statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))
    return deviation / math.sqrt(2 / (9 * degrees)) < z
