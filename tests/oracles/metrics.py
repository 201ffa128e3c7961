"""String metrics from their definitions, in plain Python; slow, and sharing nothing with the library."""

from __future__ import annotations

import math
import random
from fractions import Fraction


def levenshtein(a, b):
    """The full dynamic programme, row by row."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            if i == 0 or j == 0:
                table[i][j] = i + j
            else:
                table[i][j] = min(
                    table[i - 1][j] + 1,
                    table[i][j - 1] + 1,
                    table[i - 1][j - 1] + (a[i - 1] != b[j - 1]),
                )
    return table[len(a)][len(b)]


def closest(hypothesis, references):
    """(edits, length) of the reference with the lowest rate, then fewest edits, then greatest length."""
    options = [(levenshtein(hypothesis, r), len(r)) for r in references]
    return min(options, key=lambda o: (Fraction(o[0], max(o[1], 1)), o[0], -o[1]))


def error_rate(hypotheses, references):
    """Edits to the closest reference over that reference's length, summed before dividing."""
    pairs = [closest(h, r) for h, r in zip(hypotheses, references, strict=True)]
    return sum(e for e, _ in pairs) / max(sum(n for _, n in pairs), 1)


def split_words(symbols):
    """Words between `" "` symbols, as tuples of symbols."""
    words, word = [], []
    for symbol in symbols:
        if symbol == " ":
            words.append(tuple(word))
            word = []
        else:
            word.append(symbol)
    words.append(tuple(word))
    return [w for w in words if w]


def ngrams(tokens, order):
    return [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]


def corpus_bleu(hypotheses, references):
    """Papineni et al. (2002) with exponential smoothing of orders without a match (NIST mteval)."""
    length = reference_length = 0
    matches, totals = [0] * 4, [0] * 4
    for h, answers in zip(hypotheses, references, strict=True):
        length += len(h)
        reference_length += min((abs(len(r) - len(h)), len(r)) for r in answers)[1]
        for order in range(1, 5):
            mine = ngrams(h, order)
            totals[order - 1] += len(mine)
            for gram in set(mine):
                allowed = max(ngrams(r, order).count(gram) for r in answers)
                matches[order - 1] += min(mine.count(gram), allowed)
    if not any(matches) or not all(totals):
        return 0.0
    precisions, halvings = [], 0
    for match, total in zip(matches, totals, strict=True):
        if match:
            precisions.append(match / total)
        else:
            halvings += 1
            precisions.append(1 / (2**halvings * total))
    penalty = 1.0 if length >= reference_length else math.exp(1 - reference_length / length)
    return 100 * penalty * math.prod(precisions) ** 0.25


def all_scores(hypotheses, references, ks=(), words="item"):
    """Every figure of one corpus by its definition."""
    n = len(hypotheses)
    lists = [list(h) or [()] for h in hypotheses]
    best = [h[0] for h in lists]

    def errors_within(k):
        return sum(not any(h in refs for h in hyps[:k]) for hyps, refs in zip(lists, references, strict=True)) / n

    scores = {"accuracy": 1 - errors_within(1), "cer": error_rate(best, references)}
    if words == "space":
        tokens = [split_words(h) for h in best]
        gold = [[split_words(r) for r in refs] for refs in references]
        scores["wer"] = error_rate(tokens, gold)
    else:
        tokens, gold = best, references
        scores["wer"] = errors_within(1)
    scores |= {f"wer@{k}": errors_within(k) for k in ks}
    scores["bleu"] = corpus_bleu(tokens, gold)
    return scores


def quantile(values, q):
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def bootstrap(score, hypotheses, references, draws, level=0.95):
    """Percentile interval of every figure of `score(hypotheses, references)` over lists of drawn indices."""
    found = [score([hypotheses[i] for i in rows], [references[i] for i in rows]) for rows in draws]
    tail = (1 - level) / 2
    return {
        key: (quantile([f[key] for f in found], tail), quantile([f[key] for f in found], 1 - tail)) for key in found[0]
    }


def random_draws(n, resamples, seed):
    """Index lists from the standard library's own generator."""
    generator = random.Random(seed)
    return [[generator.randrange(n) for _ in range(n)] for _ in range(resamples)]
