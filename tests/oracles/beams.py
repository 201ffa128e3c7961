"""Beam search by the book with groups, least lengths and a record of everything, over tables as in search.py."""

from __future__ import annotations

import math
from collections import Counter

INF = math.inf


class Book:
    """A textbook run without any early stop.

    ``hypotheses`` [(symbols, log-probability, finished)], ``partials`` {step: [(symbols, score, finished)]},
    ``candidates`` {step: [(symbols, score, fate)]}, ``dropped`` the best score that was let go of and could
    still have become a finished hypothesis (of the first group).
    """

    def __init__(
        self,
        table,
        *,
        eos,
        width,
        k,
        max_length,
        min_length=0,
        penalty=0.0,
        groups=1,
        diversity=0.0,
        permitted=None,
        broken=False,
    ):
        self.table, self.eos, self.max_length, self.min_length = table, eos, max_length, min_length
        self.permitted, self.size = permitted, width // groups
        self.partials, self.candidates, self.dropped = {}, {}, -INF
        live, finished = [[((), 0.0)] for _ in range(groups)], [[] for _ in range(groups)]
        for step in range(1, max_length + 1):
            taken = Counter()
            self.partials[step], self.candidates[step] = [], []
            for g in range(groups):
                live[g], ended = self.step(live[g], step, taken, 0.0 if broken else diversity, g)
                finished[g] += ended
        if eos is None:
            live = [[] for _ in range(groups)]

        def rank(c):
            return -c[1] / len(c[0]) ** penalty

        limit = k if groups == 1 else self.size
        every = []
        for ended, alive in zip(finished, live, strict=True):
            every += ([(*c, True) for c in sorted(ended, key=rank)] + [(*c, False) for c in alive])[:limit]
        every.sort(key=lambda c: (not c[2], rank(c) if c[2] else -c[1]))
        self.hypotheses = list(dict.fromkeys(every))[:k]
        best = self.hypotheses[0] if self.hypotheses and self.hypotheses[0][2] else None
        self.proved = penalty == 0 and best is not None and best[1] >= self.dropped

    def continuations(self, live, step):
        for words, score in live:
            for symbol, value in self.table.get(words, {}).items():
                early = symbol == self.eos and step < self.min_length
                if value > -INF and not early and (self.permitted is None or self.permitted(words, symbol)):
                    yield (*words, symbol), score + value

    def step(self, live, step, taken, diversity, group):
        last = step == self.max_length
        every = sorted(self.continuations(live, step), key=lambda c: diversity * taken[c[0][-1]] - c[1])
        ended = [
            c for n, c in enumerate(every) if n < self.size and (c[0][-1] == self.eos or (self.eos is None and last))
        ]
        others = [c for c in every if c[0][-1] != self.eos]
        kept = others[: self.size] if self.eos is not None or not last else []
        lost = [c for c in every if c not in kept and c not in ended]
        if group == 0:
            could = [c[1] for c in lost if not last or c[0][-1] == self.eos]
            self.dropped = max([self.dropped, *could])
        taken.update(c[0][-1] for c in kept + ended)
        self.partials[step] += [(*c, False) for c in kept] + [(*c, True) for c in ended]
        self.candidates[step] += [
            (*c, "finished" if c in ended else "kept" if c in kept else "dropped") for c in every[: 2 * self.size + 1]
        ]
        return kept, ended


def begins(lexicon, words, symbol, eos):
    """Whether some sequence of the lexicon, closed with eos, begins with these words and then the symbol."""
    start = (*words, symbol)
    return any((*s, eos)[: len(start)] == start for s in lexicon)


def edit_distance(a, b):
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            change = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, change)
    return table[len(a), len(b)]
