"""EM on points in the plane: the climb, where it ends from several starts, and how many components there are."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.mixture.model import DegenerateComponentWarning, GaussianMixture
from thalweg.energies.selection import choose_size
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png


@dataclass(frozen=True, kw_only=True)
class MixturesSettings:
    """Settings of the experiment.

    Attributes:
        points: drawn for each seed from four Gaussians.
        components: of the mixture whose climb is shown.
        shown: after how many steps its ellipses are drawn; the end comes last by itself.
        starts: climbs from other random points.
        counts: numbers of components that are compared, each the best of as many starts.
        max_iter, tol: when a climb ends, as in :class:`~thalweg.energies.GaussianMixture`.

    >>> MixturesSettings().components
    4
    """

    points: int = 800
    components: int = 4
    shown: tuple[int, ...] = (0, 1, 3, 5, 7)
    starts: int = 8
    counts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    max_iter: int = 1000
    tol: float = 1e-9

    def __post_init__(self) -> None:
        check_positive(self, "points", "components", "starts", "counts", "max_iter", "tol")
        if self.points < 10 * max(self.components, *self.counts) or min(self.shown, default=0) < 0:
            raise ConfigError(
                "`points` must be at least ten for each component and `shown` 0 or more, "
                f"got {self.points} and {self.shown}"
            )


def long_gaussians() -> GaussianMixture:
    """The mixture that the points come from: four long Gaussians, two of which cross.

    >>> long_gaussians().means_.shape
    torch.Size([4, 2])
    """
    places = torch.tensor([[-2.0, 1.5], [1.8, 1.6], [1.8, 1.6], [-0.5, -1.8]], dtype=torch.float64)
    lengths = torch.tensor([[0.9, 0.25], [1.3, 0.2], [1.1, 0.25], [1.6, 0.35]], dtype=torch.float64)
    angles = torch.tensor([1.2, 0.6, 2.3, -0.1], dtype=torch.float64)
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=1).view(-1, 2, 2)
    covariances = turns @ lengths.square().diag_embed() @ turns.mT
    return GaussianMixture(4, weights=[0.3, 0.2, 0.2, 0.3], means=places, covariances=covariances)


def random_start(points: Tensor, components: int, seed: int) -> dict[str, Any]:
    """Even weights, means at random points, all covariances those of the whole.

    >>> random_start(torch.randn(9, 2), 3, 0)["covariances"].shape
    torch.Size([3, 2, 2])
    """
    chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:components]
    even = torch.full((components,), 1 / components, dtype=points.dtype)
    return {"weights": even, "means": points[chosen], "covariances": points.T.cov().expand(components, -1, -1)}


def climb_from(points: Tensor, start: dict[str, Any], *, max_iter: int, tol: float) -> GaussianMixture:
    """EM from a start, at most so many steps; with none the start itself.

    >>> points = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> history = climb_from(points, random_start(points, 2, 0), max_iter=9, tol=1e-9).history_
    >>> history == sorted(history)
    True
    """
    model = GaussianMixture(len(start["means"]), **start, max_iter=max(1, max_iter), tol=tol)
    return model.fit(points) if max_iter else model


def scikit_learn_score(points: Tensor, start: dict[str, Any], settings: MixturesSettings) -> float:
    """The mean log p(x) where scikit-learn's EM ends from the same start."""
    from sklearn.mixture import GaussianMixture as Theirs

    model = Theirs(
        len(start["means"]),
        weights_init=start["weights"].numpy(),
        means_init=start["means"].numpy(),
        precisions_init=start["covariances"].inverse().numpy(),
        max_iter=settings.max_iter,
        tol=settings.tol,
    )
    return float(model.fit(points.numpy()).score(points.numpy()))


def run_mixtures(settings: MixturesSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Climb from several starts and compare numbers of components on each seed; pictures are of the first."""
    found: dict[str, Any] = {"runs": []}
    for seed in seeds:
        points = long_gaussians().sample(settings.points, generator=torch.Generator().manual_seed(seed))
        found["runs"].append(_run(settings, points, seed))
        say(f"seed {seed}: BIC prefers {found['runs'][-1]['chosen']} components")
    first = found["runs"][0]
    points = long_gaussians().sample(settings.points, generator=torch.Generator().manual_seed(seeds[0]))
    start = random_start(points, settings.components, seeds[0])
    at = [step for step in settings.shown if step < len(first["climbs"][0])]
    ends = {f"after {step} step{'s' * (step > 1)}" if step else "start": step for step in at} | {
        "end": settings.max_iter
    }
    models = {
        name: climb_from(points, start, max_iter=step, tol=settings.tol if name == "end" else 0.0)
        for name, step in ends.items()
    }
    pictures = [draw_steps(points, models), draw_climb(first), draw_criteria(first["criteria"], first["chosen"])]
    return Findings(_tables(settings, found["runs"]), pictures, found)


def _run(settings: MixturesSettings, points: Tensor, seed: int) -> dict[str, Any]:
    how: dict[str, Any] = {"max_iter": settings.max_iter, "tol": settings.tol}
    begun = [random_start(points, settings.components, seed + 1000 * start) for start in range(settings.starts)]
    climbs = [climb_from(points, start, **how) for start in begun]
    with warnings.catch_warnings():
        # Of too many components one may shrink to a few points: that is what the criterion is to find out.
        warnings.simplefilter("ignore", DegenerateComponentWarning)
        model = GaussianMixture(n_restarts=settings.starts, random_state=seed, **how)
        chosen = choose_size(model, points, settings.counts)
    return {
        "climbs": [[*model.history_, model.score(points)] for model in climbs],
        "scikit-learn": [scikit_learn_score(points, start, settings) for start in begun],
        "truth": long_gaussians().score(points),
        "criteria": chosen.criteria,
        "chosen": chosen.best,
    }


def _tables(settings: MixturesSettings, runs: list[dict[str, Any]]) -> list[Table]:
    rows = []
    for start in range(settings.starts):
        ends, theirs = ([run[name][start] for run in runs] for name in ("climbs", "scikit-learn"))
        rows.append(
            {
                "start": str(start + 1),
                "log p(x) at the start": mean_and_spread([each[0] for each in ends], 4),
                "at the end": mean_and_spread([each[-1] for each in ends], 4),
                "scikit-learn": mean_and_spread(theirs, 4),
                "steps": mean_and_spread([float(len(each) - 1) for each in ends], 0),
                "largest fall": f"{max(_fall(each) for each in ends):.0e}",
            }
        )
    note = (
        f"Mean log p(x) in nats of {settings.points} points, {settings.components} components; scikit-learn from the "
        f"same start. The mixture that the points come from has {mean_and_spread([run['truth'] for run in runs], 4)}. "
        "Largest fall: of any step; only rounding can make it more than 0."
    )
    counts = [
        {
            "components": str(count),
            "BIC": mean_and_spread([run["criteria"][count] for run in runs], 1),
            "chosen": str(sum(run["chosen"] == count for run in runs)),
        }
        for count in settings.counts
    ]
    said = f"Each the best of {settings.starts} starts; chosen: on how many seeds it has the lowest BIC."
    return [Table("Climbs", rows, note), Table("How many components", counts, said)]


def _fall(history: list[float]) -> float:
    """By how much a climb falls in its worst step."""
    return max((max(0.0, a - b) for a, b in itertools.pairwise(history)), default=0.0)


def draw_steps(points: Tensor, models: dict[str, GaussianMixture]) -> Picture:
    """The points, and the ellipses of two standard deviations of each component, a panel for each model."""
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, axes = canvas(rows, columns, (3.1 * columns, 2.55 * rows), sharex=True, sharey=True)
    limits = [(float(column.min()) - 0.8, float(column.max()) + 0.8) for column in points.T]
    for ax, (name, model) in zip(axes.flat, models.items(), strict=False):
        shades = model.predict(points).tolist()
        colours = [COLOURS[component % len(COLOURS)] for component in shades]
        ax.scatter(points[:, 0], points[:, 1], s=4, c=colours, alpha=0.45, linewidths=0)
        for component, (mean, covariance) in enumerate(zip(model.means_, model.covariances_, strict=True)):
            _ellipse(ax, mean.detach(), covariance.detach(), COLOURS[component % len(COLOURS)])
        ax.set_title(f"{name}: {model.score(points):.3f} nats", fontsize=9)
        ax.set(aspect="equal", xlim=limits[0], ylim=limits[1])
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes.flat)[len(models) :]:
        ax.set_visible(False)
    caption = (
        "EM from means at random points: each component's ellipse of two standard deviations, the points in the colour "
        "of their most probable component, and the mean log p(x), which never falls."
    )
    return Picture("steps", caption, to_png(figure))


def draw_climb(run: dict[str, Any]) -> Picture:
    """The likelihood against the step from every start, and where scikit-learn's EM ends from the first."""
    figure, axes = canvas(1, 1, (6.6, 3.8))
    ax = axes[0, 0]
    for start, history in enumerate(run["climbs"]):
        first = start == 0
        colour, width = (COLOURS[0], 2.2) if first else (MUTED, 0.9)
        label = {0: "the start that is drawn", 1: "other starts"}.get(start)
        ax.plot(range(len(history)), history, color=colour, linewidth=width, label=label, zorder=3 if first else 2)
        ax.plot(len(history) - 1, history[-1], "o", color=colour, markersize=4, zorder=4)
    end = run["scikit-learn"][0]
    ax.axhline(end, color=COLOURS[1], linestyle=(0, (4, 3)), linewidth=1.2, label="scikit-learn, from the drawn start")
    ax.axhline(run["truth"], color=COLOURS[2], linestyle=(0, (1, 2)), linewidth=1.2, label="where the points come from")
    ax.set(xlabel="step", ylabel="mean log p(x), nats", xlim=(-2, min(80, max(map(len, run["climbs"])) + 2)))
    tidy(ax)
    ax.legend(fontsize=8, loc="lower right")
    caption = (
        "The likelihood from several starts, up to step 80. Every climb rises at every step; not all reach the same "
        "maximum. The best lies a little above the mixture that the points come from, for it fits these points."
    )
    return Picture("climb", caption, to_png(figure))


def draw_criteria(criteria: dict[int, float], chosen: int) -> Picture:
    """BIC against the number of components."""
    figure, axes = canvas(1, 1, (5.6, 3.2))
    ax = axes[0, 0]
    ax.plot(list(criteria), list(criteria.values()), "o-", color=COLOURS[0], markersize=4)
    ax.plot(chosen, criteria[chosen], "o", color=COLOURS[1], markersize=9, label=f"lowest: {chosen} components")
    ax.set(xlabel="components", ylabel="BIC")
    ax.set_xticks(list(criteria))
    tidy(ax)
    ax.legend(fontsize=8, loc="upper right")
    caption = "The Bayesian information criterion, -2 log p(X) + (free numbers) log B: lower is better."
    return Picture("bic", caption, to_png(figure))


def _ellipse(ax: Any, mean: Tensor, covariance: Tensor, colour: str) -> None:
    from matplotlib.patches import Ellipse

    variances, directions = torch.linalg.eigh(covariance)
    angle = math.degrees(math.atan2(float(directions[1, 1]), float(directions[0, 1])))
    short, long = (4 * variances.clamp(min=0).sqrt()).tolist()
    ax.add_patch(
        Ellipse((float(mean[0]), float(mean[1])), long, short, angle=angle, fill=False, edgecolor=colour, linewidth=1.8)
    )
