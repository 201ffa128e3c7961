"""A tagger taught in three ways with the same features: maximum margin, likelihood, averaged perceptron."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.tagger import LinearTagger
from thalweg.learning.losses.structured import nll, perceptron
from thalweg.learning.structural_svm.solver import StructuralSVM
from thalweg.metrics.bootstrap import draws
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive
from thalweg.recipes.experiments.plots import COLOURS, canvas, colour_of, tidy, to_png
from thalweg.recipes.experiments.tagged_sentences import Corpus, Tagged, read_tagged

Batches = list[tuple[tuple[Tensor, Tensor], Tensor]]
Watch = Callable[[int, float], None]
"""Takes the passes and the seconds so far, whenever the tagger can be looked at."""

Teacher = Callable[[LinearTagger, Batches, float, int, Watch, int], list[dict[str, float]]]
"""Teaches a tagger: batches, regularisation, passes, watch, seed; returns certificates, where there are any."""

METHODS = {"svm": "structural SVM", "crf": "CRF", "perceptron": "averaged perceptron"}


@dataclass(frozen=True, kw_only=True)
class TaggingSettings:
    """Settings of the experiment.

    Attributes:
        data: ``ud/atis``, or ``made`` for sentences of a small grammar.
        sentences: to learn from, where they are made.
        batch: sentences of a block, and of a step of the perceptron.
        svm_regularisations: lambda of lambda / 2 |w|^2 beside the mean hinge loss of a sentence; the best on a held-out
            tenth of the sentences to learn from is taken.
        crf_regularisations: the same beside the mean negative log-likelihood.
        svm_passes, crf_passes, perceptron_passes: over the sentences to learn from; a trial has half as many.

    >>> TaggingSettings().data
    'ud/atis'
    """

    data: str = "ud/atis"
    sentences: int = 300
    batch: int = 32
    svm_regularisations: tuple[float, ...] = (0.001, 0.003, 0.01)
    crf_regularisations: tuple[float, ...] = (0.00002, 0.0001, 0.0005)
    svm_passes: int = 30
    crf_passes: int = 160
    perceptron_passes: int = 15

    def __post_init__(self) -> None:
        check_positive(self, "sentences", "batch", "svm_regularisations", "crf_regularisations")
        check_positive(self, "svm_passes", "crf_passes", "perceptron_passes")


def teach_svm(
    tagger: LinearTagger, batches: Batches, regularisation: float, passes: int, watch: Watch, seed: int
) -> list[dict[str, float]]:
    """Maximum margin; the certificates of the duality gap."""
    every = max(1, passes // 15)
    svm = StructuralSVM(tagger, regularisation=regularisation, passes=passes, gap_every=every, tol=0.0, seed=seed)
    svm.fit(batches, watch=lambda point: watch(point.passes, point.seconds))
    return [point._asdict() | {"gap": point.gap} for point in svm.gap_curve]


def teach_crf(
    tagger: LinearTagger, batches: Batches, regularisation: float, passes: int, watch: Watch, seed: int
) -> list[dict[str, float]]:
    """Likelihood with an L2 penalty by L-BFGS on all sentences; it needs no seed, and ``passes`` are evaluations.

    The objective is strongly convex, so its gradient g bounds how far it is from the optimum: by |g|^2 / (2 lambda).
    """
    count = sum(len(gold) for _, gold in batches)
    weights = list(tagger.parameters())
    optimiser = torch.optim.LBFGS(
        weights, max_iter=5, history_size=10, line_search_fn="strong_wolfe", tolerance_change=0.0
    )
    evaluated, seconds = 0, 0.0

    def closure() -> float:
        nonlocal evaluated
        evaluated += 1
        optimiser.zero_grad()
        penalty = regularisation / 2 * torch.stack([weight.square().sum() for weight in weights]).sum()
        penalty.backward()
        value = penalty.item()
        for inputs, gold in batches:
            loss = nll(tagger(inputs), gold).sum() / count
            loss.backward()
            value += loss.item()
        return value

    while evaluated < passes:
        began, before = time.perf_counter(), evaluated
        optimiser.step(closure)  # pyright: ignore[reportArgumentType]
        seconds += time.perf_counter() - began
        watch(evaluated, seconds)
        if evaluated - before < 2:  # it looked once, and there was nothing left to do
            break
    primal = closure()
    slope = sum(float(weight.grad.square().sum()) for weight in weights if weight.grad is not None)
    return [{"passes": evaluated - 1, "primal": primal, "gap": slope / (2 * regularisation)}]


def teach_perceptron(
    tagger: LinearTagger, batches: Batches, regularisation: float, passes: int, watch: Watch, seed: int
) -> list[dict[str, float]]:
    """A step of the structured perceptron for every batch, in random order; the answer is the mean of all weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = list(tagger.parameters())
    # Where all structures tie, as at weights of 0, none is wrong and nothing is learnt.
    _put(weights, [1e-6 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for weight in weights])
    sums, steps, seconds = [torch.zeros_like(weight) for weight in weights], 0, 0.0
    for done in range(1, passes + 1):
        began = time.perf_counter()
        for number in torch.randperm(len(batches), generator=generator).tolist():
            inputs, gold = batches[number]
            slopes = torch.autograd.grad(perceptron(tagger(inputs), gold).sum(), weights)
            steps += 1
            with torch.no_grad():
                for weight, slope, total in zip(weights, slopes, sums, strict=True):
                    total += weight.sub_(slope)
        seconds += time.perf_counter() - began
        own = [weight.detach().clone() for weight in weights]
        _put(weights, [total / steps for total in sums])
        watch(done, seconds)
        if done < passes:
            _put(weights, own)
    return []


def _put(weights: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


TEACHERS: dict[str, Teacher] = {"svm": teach_svm, "crf": teach_crf, "perceptron": teach_perceptron}


def right_words(tagger: LinearTagger, batches: Batches) -> np.ndarray:
    """Of every sentence the number of its words and how many have the right tag, ``(N, 2)``.

    >>> from thalweg.recipes.experiments.tagged_sentences import Corpus, made_sentences
    >>> corpus = Corpus.of(made_sentences(20, 0))
    >>> tagger = LinearTagger(len(corpus.indicators), len(corpus.tags))
    >>> right_words(tagger, corpus.batches(made_sentences(9, 1), 4)).shape
    (9, 2)
    """
    found = []
    with torch.no_grad():
        for (features, lengths), gold in batches:
            inside = torch.arange(gold.shape[1]) < lengths.unsqueeze(1)
            right = ((tagger((features, lengths)).mode == gold) & inside).sum(dim=1)
            found.append(torch.stack([lengths, right], dim=1))
    return torch.cat(found).numpy().astype(np.float64)


def with_interval(counts: np.ndarray) -> tuple[float, float, float]:
    """Accuracy of words from :func:`right_words`, and its 95 % bootstrap interval over sentences.

    >>> with_interval(np.array([[4.0, 3.0], [4.0, 3.0]]))
    (0.75, 0.75, 0.75)
    """
    totals = np.concatenate([times @ counts for times in draws(len(counts), 1000, 0)])
    low, high = np.quantile(totals[:, 1] / totals[:, 0], (0.025, 0.975))
    return float(counts[:, 1].sum() / counts[:, 0].sum()), float(low), float(high)


def run_tagging(settings: TaggingSettings, seeds: tuple[int, ...], say: Say, root: Path | None = None) -> Findings:
    """Choose each penalty on a held-out tenth, then teach on all; measured on sentences that nobody learnt from."""
    runs = []
    for seed in seeds:
        train, dev = read_tagged(settings.data, settings.sentences, seed, root)
        chosen = {name: _choose(settings, name, train, seed, say) for name in METHODS}
        runs.append({name: _teach(settings, name, train, dev, chosen[name], seed) for name in METHODS})
        for name, run in runs[-1].items():
            say(f"seed {seed}, {METHODS[name]}: {run['accuracy']:.4f} after {run['seconds']:.1f} s")
    first = runs[0]
    pictures = [draw_gap(first["svm"]["certificates"]), draw_accuracy({METHODS[name]: first[name] for name in METHODS})]
    return Findings(_tables(runs), pictures, {"runs": runs})


def _teach(
    settings: TaggingSettings,
    name: str,
    train: Tagged,
    dev: Tagged,
    regularisation: float,
    seed: int,
    trial: bool = False,
) -> dict[str, Any]:
    corpus = Corpus.of(train)
    batches, held_out = corpus.batches(train, settings.batch), corpus.batches(dev, 128)
    tagger = LinearTagger(len(corpus.indicators), len(corpus.tags))
    curve: list[dict[str, float]] = []

    def watch(done: int, seconds: float) -> None:
        counts = right_words(tagger, held_out).sum(axis=0)
        curve.append({"passes": done, "seconds": seconds, "accuracy": float(counts[1] / counts[0])})

    passes = getattr(settings, f"{name}_passes")
    certificates = TEACHERS[name](tagger, batches, regularisation, -(-passes // 2) if trial else passes, watch, seed)
    counts = right_words(tagger, held_out)
    accuracy, low, high = with_interval(counts)
    return {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "sentences": float((counts[:, 0] == counts[:, 1]).mean()),
        "right": counts[:, 1].tolist(),
        "words": counts[:, 0].tolist(),
        "seconds": curve[-1]["seconds"],
        "passes": curve[-1]["passes"],
        "regularisation": regularisation,
        "features": len(corpus.indicators),
        "curve": curve,
        "certificates": certificates,
    }


def _choose(settings: TaggingSettings, name: str, train: Tagged, seed: int, say: Say) -> float:
    """The penalty with the most words right on the last tenth of the sentences, which the trial does not learn from."""
    if name == "perceptron":
        return 0.0
    tried: dict[float, float] = {}
    cut = max(1, len(train) * 9 // 10)
    for regularisation in getattr(settings, f"{name}_regularisations"):
        run = _teach(settings, name, train[:cut], train[cut:], regularisation, seed, trial=True)
        tried[regularisation] = run["accuracy"]
        say(f"seed {seed}, {METHODS[name]}, penalty {regularisation:g}: {run['accuracy']:.4f} held out")
    return max(tried, key=lambda each: tried[each])


def _tables(runs: list[dict[str, Any]]) -> list[Table]:
    rows = []
    for name, title in METHODS.items():
        found = [run[name] for run in runs]
        mean = {key: float(np.mean([each[key] for each in found])) for key in ("accuracy", "low", "high", "sentences")}
        rows.append(
            {
                "training": title,
                "penalty": ", ".join(sorted({f"{each['regularisation']:g}" for each in found}))
                if found[0]["regularisation"]
                else "",
                "words right": f"{mean['accuracy']:.4f}",
                "95 % interval": f"{mean['low']:.4f} to {mean['high']:.4f}",
                "less the SVM's": _difference(runs, name),
                "sentences right": f"{mean['sentences']:.4f}",
                "passes": str(round(found[0]["passes"])),
                "gap": _gap(found[0]["certificates"]),
                "seconds": f"{np.median([each['seconds'] for each in found]):.1f}",
            }
        )
    first = runs[0]["svm"]
    note = (
        f"{len(first['words'])} sentences with {round(sum(first['words']))} words that nobody learnt from; "
        f"{first['features']} indicators. Intervals: bootstrap over sentences, for the difference paired. Passes of "
        "the CRF are evaluations of likelihood and gradient. Gap: how far the "
        "objective may lie above its optimum at most. Seconds are of teaching alone: choosing the penalty, "
        "certificates and curves are not counted."
    )
    last = [
        {key: f"{point[key]:.4g}" for key in ("passes", "seconds", "primal", "dual", "gap")}
        for point in first["certificates"]
        if math.log2(max(1, point["passes"])).is_integer() or point is first["certificates"][-1]
    ]
    said = (
        "The optimum lies between dual and primal; primal is that of the better of the last and the averaged weights."
    )
    return [Table("Three ways to teach a tagger", rows, note), Table("The duality gap", last, said)]


def _gap(certificates: list[dict[str, float]]) -> str:
    """How far the objective may be from its optimum at most, as a share of it."""
    return f"{certificates[-1]['gap'] / certificates[-1]['primal']:.1%}" if certificates else ""


def _difference(runs: list[dict[str, Any]], name: str) -> str:
    """Accuracy less that of the SVM on the same sentences, of the first seed, with its interval."""
    ours, theirs = runs[0][name], runs[0]["svm"]
    if name == "svm":
        return ""
    apart = np.stack([np.array(ours["words"]), np.array(ours["right"]) - np.array(theirs["right"])], axis=1)
    value, low, high = with_interval(apart)
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def draw_gap(certificates: list[dict[str, float]]) -> Picture:
    """Primal and dual objective against passes, and the gap between them on a logarithmic axis."""
    figure, axes = canvas(1, 2, (9.2, 3.6))
    passes = [point["passes"] for point in certificates]
    primal, last, dual = ([point[key] for point in certificates] for key in ("primal", "last", "dual"))
    left, right = axes[0]
    left.plot(passes, last, color=COLOURS[1], linewidth=1.0, alpha=0.6, label="primal, last weights")
    left.plot(passes, primal, "o-", color=COLOURS[1], markersize=3, label="primal, better of last and averaged")
    left.plot(passes, dual, "o-", color=COLOURS[0], markersize=3, label="dual")
    left.fill_between(passes, dual, primal, color=COLOURS[0], alpha=0.1, linewidth=0, label="where the optimum lies")
    left.set(xlabel="passes", ylabel="objective", ylim=(0, None))
    right.plot(passes, [point["gap"] / point["primal"] for point in certificates], "o-", color=COLOURS[2], markersize=3)
    right.set(xlabel="passes", ylabel="gap / primal", yscale="log")
    for ax in (left, right):
        tidy(ax)
    left.legend(fontsize=8)
    caption = (
        "Block-coordinate Frank-Wolfe on the tagger: the dual never falls, the optimum lies between it and the primal, "
        "and their gap, here as a share of the primal, bounds how far the weights are from the optimum."
    )
    return Picture("gap", caption, to_png(figure))


def draw_accuracy(runs: dict[str, dict[str, Any]]) -> Picture:
    """Share of words right on sentences that nobody learnt from, against passes and against seconds."""
    figure, axes = canvas(1, 2, (9.2, 3.6), sharey=True)
    names = list(runs)
    ends = [point["accuracy"] for run in runs.values() for point in run["curve"]]
    best = max(ends)
    for ax, key in zip(axes[0], ("passes", "seconds"), strict=True):
        for name, run in runs.items():
            x, y = [point[key] for point in run["curve"]], [point["accuracy"] for point in run["curve"]]
            ax.plot(x, y, "o-", color=colour_of(name, names), markersize=3, label=name)
        ax.set(xlabel=key, xscale="log")
        tidy(ax)
    axes[0, 0].set(ylabel="words right", ylim=(max(min(ends), best - 0.025), best + 0.0025))
    axes[0, 1].legend(fontsize=8, loc="lower right")
    caption = "Accuracy while teaching, with the penalties that were chosen; the axis begins where curves matter."
    return Picture("accuracy", caption, to_png(figure))
