"""Digits as lists of dark pixels: a mixture for each digit alone, and as a score space for a large-margin machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thalweg.data.images.digits import load_digit_images
from thalweg.energies.kernel_machine.classification import KernelSVC
from thalweg.energies.kernel_machine.vectors import Linear
from thalweg.energies.mixture.model import DegenerateComponentWarning, GaussianMixture
from thalweg.energies.score_space import ScoreSpace
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.findings import Findings, Say, Table, check_positive
from thalweg.recipes.experiments.score_space_plots import draw_accuracies, draw_pulls

ALONE = "mixtures, Bayes' rule"
METHODS: dict[str, tuple[str, ...]] = {
    "order 1, means": ("means",),
    "order 2, means": ("means", "second"),
    "order 1, all": ("means", "variances", "weights"),
    "order 2, all": ("means", "variances", "weights", "second"),
}
"""Score spaces by name: in which parameters; second derivatives are those in the means."""
_BEFORE = {"order 2, means": "order 1, means", "order 2, all": "order 1, all"}


@dataclass(frozen=True, kw_only=True)
class ScoreSpaceSettings:
    """Settings of the experiment.

    Attributes:
        threshold: the least ink of a dark pixel, of 16.
        train, dev: digits to learn from and to choose settings by; all others are test digits.
        alone: numbers of components of the mixtures that are used alone; the best on dev is taken.
        components: of those whose score spaces are used; the Bayesian information criterion of the training points
            chooses, as it would for mixtures that nobody classifies with.
        floor: the least variance of a component as a share of that of all points. Points lie on a grid, where narrow
            components would collapse: 0.2 is a standard deviation of about a pixel, the best tried for mixtures alone.
        prices: of slack in the support vector machine, where the mean of the squared norms is 1.
        resamples: of the digits, for intervals.

    >>> ScoreSpaceSettings().components
    (2, 4, 6, 8, 16)
    """

    threshold: int = 4
    train: int = 600
    dev: int = 500
    alone: tuple[int, ...] = (2, 4, 6, 8, 16, 32)
    components: tuple[int, ...] = (2, 4, 6, 8, 16)
    floor: float = 0.2
    prices: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    resamples: int = 2000

    def __post_init__(self) -> None:
        check_positive(self, "threshold", "train", "dev", "alone", "components", "floor", "prices", "resamples")
        if self.threshold > 16:
            raise ConfigError(f"`threshold` must be at most 16, the darkest ink, got {self.threshold}")
        if self.train < 100 or self.train + self.dev >= 1797:
            raise ConfigError(
                "`train` must be at least 100, and with `dev` leave some of the 1,797 digits, "
                f"got {self.train} and {self.dev}"
            )


class Split(NamedTuple):
    """Which digits are for learning, choosing and testing.

    >>> Split.drawn(1797, 600, 500, 0).test.shape
    (697,)
    """

    train: np.ndarray
    dev: np.ndarray
    test: np.ndarray

    @classmethod
    def drawn(cls, count: int, train: int, dev: int, seed: int) -> Split:
        """At random."""
        order = np.random.default_rng(seed).permutation(count)
        return cls(*np.split(order, [train, train + dev]))


class Answers(NamedTuple):
    """What a number of components gave: the share of right answers on dev, and which test answers are right.

    >>> Answers(4, 0.9, np.array([True, False])).right.mean()
    np.float64(0.5)
    """

    components: int
    dev: float
    right: np.ndarray


class Trial(NamedTuple):
    """All answers of one split: for each method those of each number of components, and the number that BIC chose."""

    split: Split
    answers: dict[str, list[Answers]]
    chosen: int

    def best(self, method: str) -> Answers:
        """Mixtures alone: of the best number on dev; a score space: of the number that BIC chose."""
        each = self.answers[method]
        if method == ALONE:
            return max(each, key=lambda answers: answers.dev)
        return next(answers for answers in each if answers.components == self.chosen)


def dark_pixels(images: np.ndarray, threshold: int) -> list[np.ndarray]:
    """The places of dark pixels row by row, ``(T, 2)`` for each image ``(64,)``, the middle of the image at 0.

    >>> dark_pixels(np.eye(64)[[0, 9]] * 16, 4)
    [array([[-3.5, -3.5]]), array([[-2.5, -2.5]])]
    """
    return [np.argwhere(image.reshape(8, 8) >= threshold) - 3.5 for image in images]


def fit_mixtures(
    sequences: Sequence[np.ndarray], labels: np.ndarray, components: int, floor: float
) -> list[GaussianMixture]:
    """A mixture with diagonal covariances of the points of each class."""
    found = []
    for points in _by_class(sequences, labels):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateComponentWarning)  # that the floor is reached is meant
            found.append(GaussianMixture(components, "diagonal", floor=floor, random_state=0).double().fit(points))
    return found


def _by_class(sequences: Sequence[np.ndarray], labels: np.ndarray) -> list[np.ndarray]:
    """All points of each class."""
    return [
        np.concatenate([x for x, own in zip(sequences, labels, strict=True) if own == label])
        for label in np.unique(labels)
    ]


def by_bayes(models: Sequence[GaussianMixture], sequences: Sequence[np.ndarray]) -> np.ndarray:
    """The class whose mixture makes each sequence most probable, all classes being as frequent."""
    begins = np.cumsum([0, *map(len, sequences[:-1])])
    points = np.concatenate(sequences)
    return np.stack([np.add.reduceat(model.score_samples(points), begins) for model in models], axis=1).argmax(axis=1)


def scores_of(models: Sequence[GaussianMixture], sequences: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Derivatives under the mixture of every class, side by side, ``(B, F)`` by parameter; ``second`` in the means."""
    found: dict[str, list[np.ndarray]] = {"means": [], "variances": [], "weights": [], "second": []}
    for model in models:
        scores = ScoreSpace(model, 2, of=("means", "variances", "weights")).fit_transform(sequences)
        N, D = model.means_.shape
        for each, part in zip(found.values(), np.split(scores, np.cumsum([N * D, N * D, N]), axis=1), strict=True):
            each.append(part)
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}


class Scaled(NamedTuple):
    """Features with mean 0 and variance 1 on those of the training set; what does not vary there is left out.

    >>> Scaled.to(np.array([[1.0, 5.0], [3.0, 5.0]]))(np.array([[2.0, 7.0], [4.0, 5.0]]))
    array([[0.],
           [2.]])
    """

    mean: np.ndarray
    deviation: np.ndarray
    kept: np.ndarray

    @classmethod
    def to(cls, features: np.ndarray) -> Scaled:
        """From a training set ``(B, F)``."""
        deviation = features.std(axis=0)
        kept = deviation > 1e-9 * deviation.max(initial=0.0)
        return cls(features.mean(axis=0)[kept], deviation[kept], kept)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Of other features ``(B, F)``."""
        return (features[:, self.kept] - self.mean) / self.deviation


def run_score_space(settings: ScoreSpaceSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Mixtures alone and four score spaces on each seed; intervals are over digits and seeds together."""
    images, labels = load_digit_images()
    sequences = dark_pixels(images, settings.threshold)
    trials, certificate = [], {}
    for seed in seeds:
        split = Split.drawn(len(labels), settings.train, settings.dev, seed)
        trial, machine = _try(settings, sequences, labels, split)
        trials.append(trial)
        certificate = certificate or _certificate(machine)
        shares = {method: trial.best(method).right.mean() for method in trial.answers}
        said = ", ".join(f"{method} {share:.3f}" for method, share in shares.items())
        say(f"seed {seed}: {trial.chosen} components; {said}")
    figures = _figures(settings, trials, len(labels)) | {"certificate": certificate}
    figures["lengths"] = [min(map(len, sequences)), max(map(len, sequences))]
    split = trials[0].split
    models = fit_mixtures([sequences[place] for place in split.train], labels[split.train], 4, settings.floor)
    shown = [next(place for place in split.test if labels[place] == digit) for digit in (3, 7, 0)]
    pulls = draw_pulls([(sequences[place], int(labels[place])) for place in shown], models, (8, 9, 6))
    return Findings(_tables(settings, figures, len(seeds)), [draw_accuracies(figures), pulls], figures)


def _try(
    settings: ScoreSpaceSettings, sequences: list[np.ndarray], labels: np.ndarray, split: Split
) -> tuple[Trial, KernelSVC]:
    """Every method with every number of components, and the machine of second order in the means that BIC chose."""
    parts = [[sequences[place] for place in places] for places in split]
    truth = [labels[places] for places in split]
    found: dict[str, list[Answers]] = {ALONE: []} | {name: [] for name in METHODS}
    criteria, machines = dict[int, float](), dict[int, KernelSVC]()
    for components in sorted({*settings.alone, *settings.components}):
        models = fit_mixtures(parts[0], truth[0], components, settings.floor)
        if components in settings.alone:
            dev, test = (by_bayes(models, part) == right for part, right in zip(parts[1:], truth[1:], strict=True))
            found[ALONE].append(Answers(components, float(dev.mean()), test))
        if components not in settings.components:
            continue
        criteria[components] = _criterion(models, parts[0], truth[0])
        scores = [scores_of(models, part) for part in parts]
        for name, of in METHODS.items():
            features = [np.concatenate([part[each] for each in of], axis=1) for part in scores]
            answers, machine = _machine(settings, features, truth, components)
            found[name].append(answers)
            if name == "order 2, means":
                machines[components] = machine
    chosen = min(criteria, key=lambda components: criteria[components])
    return Trial(split, found, chosen), machines[chosen]


def _criterion(models: Sequence[GaussianMixture], sequences: Sequence[np.ndarray], labels: np.ndarray) -> float:
    """The Bayesian information criterion of all classes together."""
    each = _by_class(sequences, labels)
    return sum(model.bic(points) for model, points in zip(models, each, strict=True))


def _machine(
    settings: ScoreSpaceSettings, features: list[np.ndarray], labels: list[np.ndarray], components: int
) -> tuple[Answers, KernelSVC]:
    """A machine for each price; the answers of the one that is best on dev, the cheapest of equals."""
    scaled = Scaled.to(features[0])
    train, dev, test = map(scaled, features)
    kernel = Linear() * (1 / train.shape[1])  # the mean of squared norms is 1 whatever the number of features
    machines = [KernelSVC(kernel, C=price).fit(train, labels[0]) for price in settings.prices]
    shares = [float((machine.predict(dev) == labels[1]).mean()) for machine in machines]
    best = int(np.argmax(shares))
    return Answers(components, shares[best], machines[best].predict(test) == labels[2]), machines[best]


def _certificate(machine: KernelSVC) -> dict[str, Any]:
    report = machine.kkt_report()
    return {
        "pairs": len(report.pairs),
        "holds": bool(report.holds),
        "condition": report.worst.name,
        "residual": float(report.worst.residual),
        "allowed": float(report.worst.allowed),
        "gap": max(pair.gap / pair.primal for pair in report.pairs),
    }


def intervals(hits: np.ndarray, counts: np.ndarray, resamples: int) -> np.ndarray:
    """Shares of right answers and their 95 % bootstrap intervals over digits, and so of all differences.

    Args:
        hits: ``(M, B)``, how often each method was right about each digit; counts: ``(B,)``, how often it was asked.

    Returns:
        ``(M, M + 1, 3)``: of method i the share, low and high end at ``[i, M]``, and of its share less that of method
        j at ``[i, j]``. Digits are drawn again together with all answers about them.

    >>> intervals(np.array([[1, 0, 1, 1]]), np.ones(4), 100)[0, 1, 0]
    np.float64(0.75)
    """
    draws = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), resamples)
    shares = np.concatenate([(hits.sum(axis=1) / counts.sum())[None], draws @ hits.T / (draws @ counts)[:, None]])
    both = np.concatenate([shares[:, :, None] - shares[:, None], shares[:, :, None]], axis=2)
    return np.stack([both[0], *np.quantile(both[1:], [0.025, 0.975], axis=0)], axis=2)


def _figures(settings: ScoreSpaceSettings, trials: list[Trial], count: int) -> dict[str, Any]:
    """All that is told: the chosen settings with intervals, and each number of components."""
    counts = np.zeros(count)
    for trial in trials:
        counts[trial.split.test] += 1

    def hits(chosen: list[Answers]) -> np.ndarray:
        total = np.zeros(count)
        for trial, answers in zip(trials, chosen, strict=True):
            total[trial.split.test] += answers.right
        return total

    names = [ALONE, *METHODS]
    best = {name: [trial.best(name) for trial in trials] for name in names}
    told = intervals(np.stack([hits(best[name]) for name in names]), counts, settings.resamples)
    figures: dict[str, Any] = {"methods": {}, "by components": {}, "gains": {}}
    every: dict[str, np.ndarray] = {}
    for place, name in enumerate(names):
        figures["methods"][name] = {
            "components": [answers.components for answers in best[name]],
            "accuracy": told[place, -1].tolist(),
            "over": {other: told[place, there].tolist() for there, other in enumerate(names) if other != name},
        }
        sizes = [answers.components for answers in trials[0].answers[name]]
        every[name] = np.stack([hits([trial.answers[name][at] for trial in trials]) for at in range(len(sizes))])
        ends = intervals(every[name], counts, settings.resamples)[:, -1]
        figures["by components"][name] = {str(size): end.tolist() for size, end in zip(sizes, ends, strict=True)}
    for name, before in _BEFORE.items():
        pairs = zip(every[name], every[before], strict=True)
        gains = [intervals(np.stack(pair), counts, settings.resamples)[0, 1].tolist() for pair in pairs]
        figures["gains"][name] = dict(zip(figures["by components"][name], gains, strict=True))
    return figures


def _tables(settings: ScoreSpaceSettings, figures: dict[str, Any], seeds: int) -> list[Table]:
    rows = []
    for name, told in figures["methods"].items():
        rows.append(
            {
                "classifier": name if name == ALONE else f"score space, {name}",
                "components": " ".join(map(str, told["components"])),
                "accuracy": _ends(told["accuracy"]),
                "more than mixtures alone": "" if name == ALONE else _ends(told["over"][ALONE]),
                "more than order 1": _ends(told["over"][_BEFORE[name]]) if name in _BEFORE else "",
            }
        )
    note = (
        f"Test digits of {seeds} splits, {settings.train} to learn from and {settings.dev} to choose by; sequences of "
        f"{figures['lengths'][0]} to {figures['lengths'][1]} points. In brackets 95 % bootstrap intervals over digits, "
        "differences paired. Components of mixtures alone were chosen on dev, of score spaces by BIC, for each seed. "
        "All: means, variances and weights."
    )
    by = [
        {"components": size}
        | {name: _ends(figures["by components"][name][size]) for name in METHODS}
        | {"gain of order 2, means": _ends(figures["gains"]["order 2, means"][size])}
        for size in figures["by components"]["order 2, means"]
    ]
    return [
        Table("Accuracy", rows, note),
        Table("By the number of components", by, "Price of slack chosen on dev; test digits of all splits."),
        _held(figures["certificate"]),
    ]


def _held(kkt: dict[str, Any]) -> Table:
    row = {
        "boundaries": str(kkt["pairs"]),
        "all conditions hold": "yes" if kkt["holds"] else "no",
        "nearest to its limit": f"{kkt['condition']}: {kkt['residual']:.1e} of {kkt['allowed']:.1e}",
        "largest gap / primal": f"{kkt['gap']:.1e}",
    }
    said = "The machine of the first seed on second order in the means: is it the optimum that it should be?"
    return Table("Certificate of Karush, Kuhn and Tucker", [row], said)


def _ends(told: Sequence[float]) -> str:
    middle, low, high = told
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
