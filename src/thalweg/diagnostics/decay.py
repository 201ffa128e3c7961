"""What weight decay does in a step: the shrinkage of weights by the rule, and as measured beside a twin without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Shrinkage:
    """How fast a parameter, or all of a group together, is shrunk by the decay. Rates are relative, a step.

    Attributes:
        name, group: of the parameter; a group's own row is named like the group.
        size: numbers in it.
        weight, gradient: root mean squares, over its numbers and all steps.
        rule: rate by :func:`shrinkage_by_rule`; NaN for optimisers whose rule is not known here.
        measured: rate measured beside the twin.
        small, large: the same for the tenth of the numbers with the smallest gradients, and with the largest.

    A rate over several numbers weighs each by its square: the rate of the squared norm is twice it.

    >>> Shrinkage("w", "matrices", 6, 0.5, 0.1, 1e-4, 1e-4, 1e-4, 1e-4).half_life
    6931
    """

    name: str
    group: str
    size: int
    weight: float
    gradient: float
    rule: float
    measured: float
    small: float
    large: float

    @property
    def half_life(self) -> float:
        """Steps after which decay alone would have halved the weights: log 2 / rate, infinite without."""
        return round(math.log(2) / self.measured) if self.measured > 0 else math.inf


@dataclass(frozen=True)
class DecayReport:
    """What decay did in a run, by group and by parameter; ``str`` is a table.

    Attributes:
        optimiser: class of torch's optimiser.
        steps: measured.
        groups, parameters: a row each.
        gradients, rates: by parameter name, of its shape: root mean square of the gradient, relative shrinkage a step.

    >>> layer = nn.Linear(3, 2).double()
    >>> optimiser = torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=0.5)
    >>> report = measure_decay(layer, optimiser, lambda m: m(torch.ones(1, 3).double()).square().sum(), steps=3)
    >>> [(row.name, round(row.rule, 6), round(row.measured, 6)) for row in report.parameters]
    [('weight', 0.005, 0.005), ('bias', 0.005, 0.005)]
    """

    optimiser: str
    steps: int
    groups: tuple[Shrinkage, ...]
    parameters: tuple[Shrinkage, ...]
    gradients: dict[str, Tensor]
    rates: dict[str, Tensor]

    def by_gradient(self, bins: int = 10) -> list[tuple[float, float]]:
        """Numbers of decaying groups in bins by gradient, as many in each: (root mean square gradient, median rate)."""
        decaying = {row.name for row in self.groups if row.measured}
        names = [row.name for row in self.parameters if row.group in decaying]
        if not names:
            return []
        gradients = torch.cat([self.gradients[name].flatten() for name in names])
        rates = torch.cat([self.rates[name].flatten() for name in names])
        chunks = gradients.argsort(stable=True).tensor_split(min(bins, len(gradients)))
        return [(float(gradients[c].square().mean().sqrt()), float(rates[c].median())) for c in chunks]

    @property
    def advice(self) -> str:
        """One line: whether all weights shrink alike, and what to choose where they do not."""
        decaying = [row for row in self.groups if row.measured]
        if not decaying:
            return "no decay: nothing shrinks"
        worst = max(decaying, key=lambda row: row.small / max(row.large, 1e-300))
        ratio = worst.small / max(worst.large, 1e-300)
        if ratio > 2:
            return (
                f"weights of `{worst.name}` with small gradients shrink {ratio:.3g} times as fast as those with large "
                "ones; choose `optimiser=adamw` where all should shrink alike"
            )
        fastest = min(row.half_life for row in decaying)
        return f"all weights that decay shrink at about one rate; decay alone would halve them in {fastest:,.0f} steps"

    def __str__(self) -> str:
        """A table: a row a group, then a row a parameter, then the advice."""
        widest = max(len(row.name) for row in (*self.groups, *self.parameters))
        head = (
            f"{'':<{widest + 2}}{'group':<10}{'size':>9}{'weight':>10}{'gradient':>10}{'by rule':>10}{'measured':>10}"
        )
        lines = [
            f"{self.optimiser}, {self.steps} steps: relative shrinkage a step",
            head + f"{'small g':>10}{'large g':>10}{'half-life':>11}",
        ]
        for row in (*self.groups, *self.parameters):
            rates = "".join(f"{value:>10.2e}" for value in (row.rule, row.measured, row.small, row.large))
            lines.append(
                f"{row.name:<{widest + 2}}{row.group:<10}{row.size:>9,}{row.weight:>10.2e}{row.gradient:>10.2e}"
                f"{rates}{row.half_life:>11,.0f}"
            )
        return "\n".join([*lines, self.advice])


def shrinkage_by_rule(optimiser: torch.optim.Optimizer) -> dict[nn.Parameter, Tensor]:
    r"""The relative shrinkage that decay causes in a step, number by number, from the rule and the present state.

    With learning rate :math:`\eta` and decay :math:`\lambda` of the parameter's group:

    - ``AdamW``: :math:`\eta\lambda`, exactly, in every step (Loshchilov and Hutter, 2019);
    - ``SGD``: :math:`\eta\lambda`, exactly; with momentum :math:`\mu` the decay of earlier steps acts again, and the
      sum goes to :math:`\eta\lambda / (1 - \mu)` within some :math:`1 / (1 - \mu)` steps while weights move slowly;
    - ``Adam`` (L2 in the gradient): :math:`\eta\lambda / (\sqrt{\hat v} + \epsilon)`, the share of the decay in the
      step's numerator where weights moved little while the first mean was taken. The second mean
      :math:`\hat v` holds the squared gradients, decay included: the larger the gradients, the less decay.

    Returns:
        For every parameter a tensor of its shape; NaN for other optimisers, and for ``Adam`` before its first step.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> shrinkage_by_rule(torch.optim.SGD([weight], lr=0.1, momentum=0.5, weight_decay=0.02))[weight]
    tensor([0.0040, 0.0040])
    """
    inner = getattr(optimiser, "optimizer", optimiser)
    return {p: _rule(inner, group, p) for group in inner.param_groups for p in group["params"]}


def _rule(optimiser: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> Tensor:
    rate = group["lr"] * group.get("weight_decay", 0.0)
    if not rate:
        return torch.zeros_like(p)
    if isinstance(optimiser, torch.optim.AdamW):
        return torch.full_like(p, float(rate))
    if isinstance(optimiser, torch.optim.SGD):
        return torch.full_like(p, float(rate * (1 - group["dampening"]) / (1 - group["momentum"])))
    state = optimiser.state.get(p)
    if not isinstance(optimiser, torch.optim.Adam) or not state:
        return torch.full_like(p, math.nan)
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    steps = state["step"].to(second.device, torch.float64)  # in float32 the first corrections would be rough
    corrected = second / (1 - group["betas"][1] ** steps)
    return (rate / (corrected.sqrt() + group["eps"])).to(p.dtype)


class _Sums(NamedTuple):
    """Sums over steps, each of a parameter's shape, float64."""

    squares: Tensor  # θ²
    taken: Tensor  # θ (step without decay - step with it)
    ruled: Tensor  # θ² times the rate by rule
    gradients: Tensor  # g²


class DecayMeter:
    r"""Steps an optimiser and measures what decay does in each step.

    Beside the optimiser runs a twin of the same class and settings without decay: in every step it gets the same
    gradients and starts from the same weights :math:`\theta_t`, but it keeps its own state (momentum, means), which has
    never seen decay. What the decay did is the difference of the two steps, and the relative shrinkage its part along
    the weights, over all steps and any set of numbers:

    .. math:: \frac{\sum_t \langle \theta_t, \theta_{t+1}^{\text{without}} - \theta_{t+1} \rangle}
        {\sum_t \langle \theta_t, \theta_t \rangle}

    The run itself is not changed. Extra cost: a second optimiser step, and memory for its state and four sums. An
    optimiser that has taken steps before lends the twin its state, decay included; a fresh one is measured exactly.

    Args:
        model: whose parameter names the report has.
        optimiser: of some of its parameters; Fabric's wrapper will do.

    >>> layer = nn.Linear(3, 1).double()
    >>> meter = DecayMeter(layer, torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.2))
    >>> for _ in range(3):
    ...     layer(torch.ones(2, 3).double()).sum().backward()
    ...     meter.step()
    >>> round(meter.report().groups[0].measured, 6)
    0.02
    """

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer):
        self.optimiser = optimiser
        self._inner: torch.optim.Optimizer = getattr(optimiser, "optimizer", optimiser)
        named = {p: name for name, p in model.named_parameters()}
        self.steps, self._names, self._groups = 0, {}, {}
        self._sums: dict[nn.Parameter, _Sums] = {}
        shadows = []
        for number, group in enumerate(self._inner.param_groups):
            own = [nn.Parameter(p.detach().clone()) for p in group["params"]]
            settings = {key: value for key, value in group.items() if key != "params"}
            shadows.append({**settings, "params": own, "weight_decay": 0.0})
            for p in group["params"]:
                if p not in named:
                    raise ConfigError(
                        "the optimiser must have parameters of the model alone, got another; give its model"
                    )
                self._names[p], self._groups[p] = named[p], group.get("name", f"group {number}")
                self._sums[p] = _Sums(*(torch.zeros_like(p, dtype=torch.float64) for _ in _Sums._fields))
        # Every setting comes with the groups; the rate here is only a default that torch asks for.
        self._twin = type(self._inner)(shadows, lr=1.0)  # type: ignore[call-arg]
        self._twin.load_state_dict(copy.deepcopy(self._inner.state_dict()))
        self._pairs = [
            (p, shadow)
            for real, twin in zip(self._inner.param_groups, self._twin.param_groups, strict=True)
            for p, shadow in zip(real["params"], twin["params"], strict=True)
        ]

    def step(self) -> None:
        """Take the optimiser's step with the gradients that are there."""
        for real, twin in zip(self._inner.param_groups, self._twin.param_groups, strict=True):
            twin["lr"], twin["weight_decay"] = real["lr"], 0.0
        before = {}
        with torch.no_grad():
            for p, shadow in self._pairs:
                before[p] = p.detach().clone()
                shadow.copy_(p)
                shadow.grad = p.grad
        self.optimiser.step()
        self._twin.step()
        rules = shrinkage_by_rule(self._inner)
        with torch.no_grad():
            for p, shadow in self._pairs:
                self._add(p, before[p].double(), shadow.double() - p.double(), rules[p].double())
                shadow.grad = None
        self.steps += 1

    def _add(self, p: nn.Parameter, weight: Tensor, taken: Tensor, rule: Tensor) -> None:
        sums = self._sums[p]
        sums.squares.addcmul_(weight, weight)
        sums.taken.addcmul_(weight, taken)
        # Torch leaves parameters without a gradient alone, decay included.
        if p.grad is not None:
            sums.ruled.addcmul_(weight * weight, rule)
            sums.gradients.addcmul_(p.grad.double(), p.grad.double())

    def report(self) -> DecayReport:
        """What was measured so far."""
        if not self.steps:
            raise ConfigError("nothing was measured yet; take a `step()` first")
        steps = self.steps
        parameters, members = [], {}
        for p, sums in self._sums.items():
            parameters.append(_row(self._names[p], self._groups[p], [sums], steps))
            members.setdefault(self._groups[p], []).append(sums)
        return DecayReport(
            optimiser=type(self._inner).__name__,
            steps=steps,
            groups=tuple(_row(name, name, each, steps) for name, each in members.items()),
            parameters=tuple(parameters),
            gradients={self._names[p]: (sums.gradients / steps).sqrt() for p, sums in self._sums.items()},
            rates={self._names[p]: _ratio(sums.taken, sums.squares) for p, sums in self._sums.items()},
        )


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """0 where there is nothing to shrink."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 0.0)


def _row(name: str, group: str, every: Iterable[_Sums], steps: int) -> Shrinkage:
    squares, taken, ruled, gradients = (torch.cat([s.flatten() for s in column]) for column in zip(*every, strict=True))
    size = len(squares)
    if not size:
        return Shrinkage(name, group, 0, *([0.0] * 6))
    order = gradients.argsort(stable=True)
    tenth = max(1, size // 10)
    picks = (order, order[:tenth], order[-tenth:])
    measured, small, large = (float(_ratio(taken[pick].sum(), squares[pick].sum())) for pick in picks)
    return Shrinkage(
        name=name,
        group=group,
        size=size,
        weight=float(squares.mean() / steps) ** 0.5,
        gradient=float(gradients.mean() / steps) ** 0.5,
        rule=float(_ratio(ruled.sum(), squares.sum())),
        measured=measured,
        small=small,
        large=large,
    )


def measure_decay(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Loss, *, steps: int) -> DecayReport:
    """Train a copy of model and optimiser for so many steps and report what decay did; nothing given is changed.

    Args:
        loss: of the model it is called with; called once a step, on the next batch where it has several.
        steps: at least 1.

    Torch's random state is put back afterwards. O(steps) training steps.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)
    >>> measure_decay(net, adam, lambda m: m(torch.tensor([[9.0, 0.1]])).square().sum(), steps=20).advice
    'weights of `group 0` with small gradients shrink ... times as fast as those with large ones; ...'
    """
    if steps < 1:
        raise ConfigError(f"`steps` must be at least 1, got {steps}")
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        twin, own = copy.deepcopy((model, getattr(optimiser, "optimizer", optimiser)))
        meter = DecayMeter(twin, own)
        for _ in range(steps):
            own.zero_grad(set_to_none=True)
            with torch.enable_grad():
                loss(twin).backward()
            meter.step()
    return meter.report()
