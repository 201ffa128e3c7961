"""Distributions over the sequences of a table, by enumeration: filtered sampling, and draws without replacement.

Tables and sequences are those of ``oracles.search``.
"""

from __future__ import annotations

import math


def nearest(ranked, key, share):
    """The first of ``ranked`` (symbol -> probability) by ``key`` until they have ``share`` of the mass."""
    kept, mass = {}, 0.0
    for v in sorted(ranked, key=lambda v: (key(v), -ranked[v])):
        if kept and mass >= share:
            break
        kept[v] = ranked[v]
        mass += ranked[v]
    return kept


def normalised(weights):
    total = sum(weights.values())
    return {v: w / total for v, w in weights.items()}


def filtered(following, *, temperature=1.0, top_k=None, top_p=None, typical=None, min_p=None, broken=False):
    """The distribution a step is sampled from; ``broken`` measures surprisal from 0 instead of the entropy."""
    p = normalised({v: math.exp(s / temperature) for v, s in following.items() if s > -math.inf})
    if top_k is not None:
        p = normalised({v: p[v] for v in sorted(p, key=lambda v: -p[v])[:top_k]})
    if top_p is not None:
        p = normalised(nearest(p, lambda v: -p[v], top_p))
    if typical is not None:
        entropy = 0.0 if broken else -sum(q * math.log(q) for q in p.values())
        p = normalised(nearest(p, lambda v: abs(-math.log(p[v]) - entropy), typical))
    if min_p is not None:
        p = normalised({v: q for v, q in p.items() if q >= min_p * max(p.values())})
    return p


def distribution(table, *, eos, max_length, min_length=0, prefix=(), allowed=None, **filters):
    """Probability of each sampled sequence under the rules."""
    result = {}

    def extend(words, probability):
        step = len(words) + 1
        if step > max_length or (words and words[-1] == eos):
            result[words] = probability
            return
        following = {
            v: s
            for v, s in table[words].items()
            if (step > len(prefix) or v == prefix[step - 1])
            and (v != eos or step >= min_length)
            and (allowed is None or allowed(words, v))
        }
        for v, p in filtered(following, **filters).items():
            extend((*words, v), probability * p)

    extend((), 1.0)
    return result


def constrained(table, *, eos, max_length, min_length=0, prefix=(), allowed=None):
    """The part of a table that the rules leave, with its log-probabilities as they are."""
    return {
        words: {
            v: s
            for v, s in following.items()
            if (len(words) >= len(prefix) or v == prefix[len(words)])
            and (v != eos or len(words) + 1 >= min_length)
            and (allowed is None or allowed(words, v))
        }
        for words, following in table.items()
        if len(words) < max_length
    }


def ordered_draws(probabilities, n):
    """Probability of every ordered draw of n outcomes, each from what those before it have left."""
    if n == 0:
        return {(): 1.0}
    draws = {}
    for first, p in probabilities.items():
        rest = {y: q / (1 - p) for y, q in probabilities.items() if y != first}
        if n > 1 and not rest:
            draws[(first,)] = p
            continue
        for tail, q in ordered_draws(rest, n - 1).items():
            draws[(first, *tail)] = p * q
    return draws
