"""Losses of energies compared on the same data: what each makes of an energy surface, and how well it classifies."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.data.images.digits import load_digit_images
from thalweg.learning import losses
from thalweg.limits import check_choice
from thalweg.recipes.experiments.findings import Findings, Say, Table, check_positive
from thalweg.recipes.experiments.losses_plots import draw_answers, draw_gibbs, draw_surfaces

# The losses that are compared, the one without a contrast first.
LOSSES = (
    *("energy", "perceptron", "nll", "hinge", "log", "simple", "square_square", "square_exponential", "mce"),
    *("softmax_margin", "fenchel_young", "label_smoothing"),
)

# The seeds that learning rates are chosen on start here, far from those that are reported.
TUNING = 1000

# Two-sided 95 % points of Student's t with 1, 2, ... degrees of freedom; beyond them the normal's.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True, kw_only=True)
class LossesSettings:
    """Settings of the experiment.

    Attributes:
        losses: names, of :data:`LOSSES`.
        rates: learning rates that are tried for each loss on digits, on tuning seeds.
        tuning_seeds: how many.
        epochs: over the digits that are trained on, half of all.
        batch: digits a step.
        hidden: units of the network on digits.
        margin: of the losses that have one.
        surface_steps: steps on the curve.
        answers: points of the grid over y.
        near: answers nearer than this to the right one are no contrasts.

    >>> LossesSettings().margin
    1.0
    """

    losses: tuple[str, ...] = LOSSES
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    tuning_seeds: int = 2
    epochs: int = 30
    batch: int = 64
    hidden: int = 32
    margin: float = 1.0
    surface_steps: int = 1000
    answers: int = 61
    near: float = 0.2

    def __post_init__(self) -> None:
        check_positive(self, "rates", "tuning_seeds", "epochs", "batch", "hidden", "margin")
        check_positive(self, "surface_steps", "answers", "near")
        for name in self.losses:
            check_choice("loss", name, LOSSES)


class TwoTowers(nn.Module):
    r"""E(x, y) = 1/2 ||g(x) - h(y)||^2 with g a network of x and h one of y: never below 0, and flat if g = h = 0.

    Args:
        inputs: size of x.
        answers: size of y; for a finite set of answers y is one-hot, and h(y) a place for each.
        hidden: units of the hidden layer of each; 0 leaves h linear.
        code: size of what g and h give.

    >>> towers = TwoTowers(2, 1, hidden=(8, 8), code=4)
    >>> towers(torch.zeros(5, 2), torch.zeros(3, 1)).shape
    torch.Size([5, 3])
    """

    def __init__(self, inputs: int, answers: int, *, hidden: tuple[int, int], code: int):
        super().__init__()
        self.inputs = _tower([inputs, hidden[0], code] if hidden[0] else [inputs, code])
        self.answers = _tower([answers, hidden[1], code] if hidden[1] else [answers, code])

    def forward(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """Energies of x ``(B, X)`` with y ``(C, Y)``, ``(B, C)``."""
        differences = self.inputs(inputs).unsqueeze(1) - self.answers(answers)
        return differences.square().sum(dim=2) / 2


def _tower(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def loss_of(name: str, energies: Tensor, gold: Tensor, *, margin: float = 1.0, near: Tensor | None = None) -> Tensor:
    """A loss by its name; pair losses contrast the right answer with the most offending wrong one.

    The losses over all answers look at every one, near or not.

    Args:
        name: of :data:`LOSSES`.
        energies: ``(B, C)``.
        gold: ``(B,)``.
        margin: of the losses that have one.
        near: ``(B, C)`` bool, answers so like the right one that they are no contrasts.
    Returns:
        ``(B,)``.

    >>> loss_of("hinge", torch.tensor([[0.0, 0.25, 3.0]]), torch.tensor([0]))
    tensor([0.7500])
    """
    right = energies.gather(1, gold.unsqueeze(1)).squeeze(1)
    if name == "energy":
        return right
    own = nn.functional.one_hot(gold, energies.size(1)).bool()
    wrong = energies.masked_fill(own if near is None else own | near, torch.inf)
    match name:
        case "hinge" | "simple" | "square_square":
            return getattr(losses, name)(right, wrong, margin)
        case "log" | "square_exponential" | "mce":
            return getattr(losses, name)(right, wrong)
        case "softmax_margin":
            return losses.softmax_margin(energies, gold, margin)
        case "fenchel_young":
            return losses.fenchel_young(energies, gold, "sparsemax")
    return getattr(losses, name)(energies, gold)


def curve_pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of a curve y = 0.8 sin(3 x) with a little noise, ``(count, 1)`` each.

    >>> x, y = curve_pairs(100, 0)
    >>> bool((y - 0.8 * (3 * x).sin()).abs().max() < 0.25)
    True
    """
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    return x, 0.8 * (3 * x).sin() + 0.05 * torch.randn(count, 1, generator=generator)


class SideBySide:
    """Towers of several seeds that are trained side by side, each as if alone: Adam looks at each weight by itself.

    Args:
        make: a fresh model; called once for each seed, after seeding torch.
        seeds: one model each.
        rate: learning rate.

    >>> towers = SideBySide(lambda: TwoTowers(2, 1, hidden=(4, 4), code=3), (0, 1), 0.01)
    >>> towers.energies(torch.zeros(2, 5, 2), torch.zeros(3, 1)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, make: Callable[[], TwoTowers], seeds: tuple[int, ...], rate: float):
        self.models = []
        for seed in seeds:
            torch.manual_seed(seed)
            self.models.append(make())
        weights, _ = torch.func.stack_module_state(self.models)  # pyright: ignore[reportArgumentType]
        self.weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        self.optimiser = torch.optim.Adam(list(self.weights.values()), lr=rate)

    def energies(self, inputs: Tensor, answers: Tensor) -> Tensor:
        """Of x ``(S, B, X)``, each model its own, with y ``(C, Y)``: ``(S, B, C)``."""

        def of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.models[0], weights, (x, answers))

        return torch.func.vmap(of)(self.weights, inputs)

    def step(self, losses: Tensor) -> None:
        """One step on losses ``(S * B,)``, of which each model has its mean."""
        self.optimiser.zero_grad()
        (losses.view(len(self.models), -1).mean(dim=1).sum()).backward()
        self.optimiser.step()

    def trained(self) -> list[TwoTowers]:
        """The models as they are now."""
        made = [copy.deepcopy(model) for model in self.models]
        for place, model in enumerate(made):
            model.load_state_dict({name: weight[place].detach() for name, weight in self.weights.items()})
        return made


def train_surfaces(settings: LossesSettings, name: str, seeds: tuple[int, ...]) -> tuple[TwoTowers, list[TwoTowers]]:
    """Energies of one x and one y that learn the curve: the first before, and all after.

    >>> len(train_surfaces(LossesSettings(surface_steps=1), "nll", (0, 1))[1])
    2
    """
    towers = SideBySide(lambda: TwoTowers(1, 1, hidden=(32, 32), code=8), seeds, 0.01)
    grid = answer_grid(settings)
    pairs = [curve_pairs(400, seed) for seed in seeds]
    x, y = (torch.stack(each) for each in zip(*pairs, strict=True))  # (S, 400, 1)
    gold = (y - grid.T).abs().argmin(dim=2)
    generator = torch.Generator().manual_seed(seeds[0])
    for _ in range(settings.surface_steps):
        chosen = torch.randint(400, (64,), generator=generator)
        energies = towers.energies(x[:, chosen], grid).flatten(0, 1)
        right = gold[:, chosen].flatten()
        near = (grid.T - grid[right]).abs() < settings.near
        towers.step(loss_of(name, energies, right, margin=settings.margin, near=near))
    return towers.models[0], towers.trained()


def answer_grid(settings: LossesSettings) -> Tensor:
    """The values of y that are answers, ``(C, 1)``.

    >>> answer_grid(LossesSettings(answers=3)).flatten()
    tensor([-1.5000,  0.0000,  1.5000])
    """
    return torch.linspace(-1.5, 1.5, settings.answers).unsqueeze(1)


def _digits(seeds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The digits in an order of each seed, (S, 1797, 64) and (S, 1797); the first half is learned from."""
    images, labels = (torch.from_numpy(each) for each in load_digit_images())
    orders = torch.stack([torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    return images.float()[orders] / 16, labels.long()[orders]


def train_digits(settings: LossesSettings, name: str, rate: float, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train on half of the digits; of each seed the accuracy on the other half, and more.

    ``spread`` is the largest less the least energy over the ten answers, ``sure`` the right answer's probability in the
    Gibbs distribution with beta = 1, both means over test digits; ``before`` and ``after`` are the energies of the
    first test digit, whose label is ``gold``.

    >>> sorted(train_digits(LossesSettings(epochs=1), "nll", 0.003, (0,))[0])
    ['accuracy', 'after', 'before', 'gold', 'spread', 'sure']
    """
    x, y = _digits(seeds)
    half, answers = y.size(1) // 2, torch.eye(10)
    towers = SideBySide(lambda: TwoTowers(64, 10, hidden=(settings.hidden, 0), code=16), seeds, rate)
    with torch.no_grad():
        before = towers.energies(x[:, half : half + 1], answers)[:, 0]
    generator = torch.Generator().manual_seed(seeds[0])
    for _ in range(settings.epochs):
        for chosen in torch.randperm(half, generator=generator).split(settings.batch):
            energies = towers.energies(x[:, chosen], answers).flatten(0, 1)
            towers.step(loss_of(name, energies, y[:, chosen].flatten(), margin=settings.margin))
    with torch.no_grad():
        energies = towers.energies(x[:, half:], answers)
    tested = y[:, half:]
    accuracy = (energies.argmin(dim=2) == tested).double().mean(dim=1)
    spread = (energies.max(dim=2).values - energies.min(dim=2).values).mean(dim=1)
    sure = losses.gibbs(energies).gather(2, tested.unsqueeze(2)).squeeze(2).mean(dim=1)
    each = {"accuracy": accuracy, "spread": spread, "sure": sure, "before": before, "after": energies[:, 0]}
    each["gold"] = tested[:, 0]
    return [{key: value[place].tolist() for key, value in each.items()} for place in range(len(seeds))]


def half_interval(values: list[float]) -> float:
    """Half of the 95 % interval of a mean of independent runs, by Student's t; 0 for a single run.

    >>> round(half_interval([0.9, 0.92, 0.94]), 4)
    0.0497
    """
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    point = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.4 / freedom
    return point * statistics.stdev(values) / math.sqrt(len(values))


def run_losses(settings: LossesSettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Surfaces of a curve for each loss, then accuracy on digits with learning rates chosen on other seeds."""
    figures: dict[str, Any] = {"surfaces": {}, "digits": {}, "rates": {}}
    surfaces = {}
    for name in settings.losses:
        before, after = train_surfaces(settings, name, seeds)
        surfaces |= {"before": before, name: after[0]}
        figures["surfaces"][name] = [_measure(towers, answer_grid(settings)) for towers in after]
        say(f"curve, {name}: range {figures['surfaces'][name][0]['range']:.3g}")
    tuning = tuple(range(TUNING, TUNING + settings.tuning_seeds))
    for name in settings.losses:
        tried = {rate: _accuracies(train_digits(settings, name, rate, tuning)) for rate in settings.rates}
        figures["rates"][name] = max(tried, key=lambda rate: statistics.fmean(tried[rate]))
        figures["digits"][name] = train_digits(settings, name, figures["rates"][name], seeds)
        found = _accuracies(figures["digits"][name])
        say(f"digits, {name}: {statistics.fmean(found):.4f} ± {half_interval(found):.4f}")
    shown = "nll" if "nll" in surfaces else settings.losses[-1]
    pictures = [
        draw_surfaces(surfaces, curve_pairs(400, seeds[0])),
        draw_answers({name: runs[0] for name, runs in figures["digits"].items()}),
        draw_gibbs(surfaces[shown], answer_grid(settings), 0.5),
    ]
    return Findings(_tables(settings, figures, len(seeds)), pictures, figures)


def _accuracies(runs: list[dict[str, Any]]) -> list[float]:
    return [run["accuracy"] for run in runs]


def _measure(towers: TwoTowers, grid: Tensor) -> dict[str, float]:
    """How far the least energy lies from the curve, and how much the energy varies over y."""
    x = torch.linspace(-1, 1, 201).unsqueeze(1)
    with torch.no_grad():
        energies = towers(x, grid)
    answers = grid[energies.argmin(dim=1)]
    error = float((answers - 0.8 * (3 * x).sin()).abs().mean())
    return {"error": error, "range": float((energies.max(dim=1).values - energies.min(dim=1).values).mean())}


def _tables(settings: LossesSettings, figures: dict[str, Any], runs: int) -> list[Table]:
    rows = []
    for name in settings.losses:
        found = figures["digits"][name]
        accuracy = _accuracies(found)
        surface = figures["surfaces"][name]
        rows.append(
            {
                "loss": name,
                "accuracy": f"{statistics.fmean(accuracy):.4f}",
                "95 % interval": f"± {half_interval(accuracy):.4f}",
                "rate": f"{figures['rates'][name]:g}",
                "P(right), β = 1": f"{statistics.fmean(run['sure'] for run in found):.3f}",
                "spread of energies": f"{statistics.fmean(run['spread'] for run in found):.3g}",
                "curve: error of y": f"{statistics.fmean(each['error'] for each in surface):.3f}",
                "curve: range of E": f"{statistics.fmean(each['range'] for each in surface):.3g}",
            }
        )
    note = (
        f"Accuracy on half of scikit-learn's digits after learning from the other half: mean over {runs} seeds (split, "
        "start and order of batches) and its 95 % interval by Student's t. Rate: the learning rate that was best on "
        f"{settings.tuning_seeds} other seeds. P(right): mean over test digits. Spread: largest less least energy of "
        f"the ten answers, mean over test digits. Curve: {settings.answers} answers in [-1.5, 1.5], "
        f"{settings.surface_steps:,} steps; error: |y* - y|, mean over x; range: largest less least energy over y, "
        "mean over x."
    )
    return [Table("Losses", rows, note)]
