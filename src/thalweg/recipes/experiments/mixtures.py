"""EM on points in the plane: the climb, where it ends from several starts, and how many components there are."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.mixture.model import DegenerateComponentWarning, GaussianMixture
from thalweg.energies.selection import choose_size
from thalweg.errors import ConfigError
from thalweg.recipes.experiments.findings import Findings, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.mixtures_plots import draw_climb, draw_criteria, draw_steps

__all__ = ["MixturesSettings", "climb_from", "long_gaussians", "random_start", "run_mixtures", "scikit_learn_score"]


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
