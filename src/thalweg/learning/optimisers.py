"""Optimisers by names that say what they do, learning-rate schedules, teacher-forcing schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from thalweg.errors import ConfigError, nearest
from thalweg.limits import check_choice

OptimiserName = Literal["sgd", "adam_l2", "adamw", "adafactor"]
"""``sgd`` and ``adam_l2`` add the decay to the gradient (L2), ``adamw`` and ``adafactor`` shrink the weights;
``adafactor`` takes steps in proportion to each matrix, as T5 wants them; Shazeer and Stern (2018)."""

Decayed = Literal["matrices", "all"]
"""What the decay acts on: ``matrices`` leaves out norms, biases and other vectors and scalars; ``all`` nothing."""

ScheduleName = Literal["constant", "plateau", "inverse_sqrt", "cosine"]
"""How the learning rate moves after the warm-up."""

ForcingSchedule = Literal["constant", "linear", "inverse_sigmoid"]
"""How the teacher-forcing probability moves from its first to its last value."""


def build_optimiser(
    name: OptimiserName,
    parameters: nn.Module | Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    decay: Decayed = "matrices",
    momentum: float = 0.0,
    beta2: float = 0.999,
    layer_decay: float = 1.0,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """Torch's own optimiser of that name, over the groups of :func:`decay_groups`.

    Args:
        parameters: a model, whose norms and biases are known by their modules and names, or parameters alone, of
            which only the shape can tell.
        weight_decay: L2 coefficient in the gradient for ``sgd`` and ``adam_l2``; relative shrinkage per unit of
            learning rate for ``adamw`` and ``adafactor``.
        decay: what it acts on.
        momentum: of ``sgd`` alone.
        beta2: of the two Adams: decay of the mean of squared gradients.
        layer_decay: the rate of a layer is that of the one above times this; the model's ``depths()`` tell which. A
            group's share of the rate is its ``scale``.
        fused: one kernel for all parameters of a group.

    >>> build_optimiser("adam_l2", [nn.Parameter(torch.zeros(2))], learning_rate=1e-3).defaults["lr"]
    0.001
    >>> adamw = build_optimiser("adamw", nn.Linear(3, 2), learning_rate=1e-3, weight_decay=0.1)
    >>> [(group["name"], group["weight_decay"]) for group in adamw.param_groups]
    [('matrices', 0.1), ('vectors', 0.0)]
    """
    groups = decay_groups(parameters, weight_decay, decay)
    if layer_decay != 1:
        groups = _by_depth(groups, parameters, layer_decay)
    shared: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, "fused": fused}
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, **shared)
    if name == "adam_l2":
        return torch.optim.Adam(groups, betas=(0.9, beta2), **shared)
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, beta2), **shared)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=learning_rate, weight_decay=weight_decay)
    raise ConfigError(f"optimiser `{name}` is not known; {nearest(name, get_args(OptimiserName))}")


def decay_groups(
    parameters: nn.Module | Iterable[nn.Parameter], weight_decay: float, decay: Decayed = "matrices"
) -> list[dict[str, Any]]:
    """The trainable parameters as groups for torch's optimisers: those that decay, and those that do not.

    With ``"matrices"`` decay acts on what has two axes or more (matrices, embeddings, convolutions), except parameters
    of normalisation modules, the lengths of weight-normalised rows, and what is named ``bias``: the group is called
    ``matrices``, the rest ``vectors``. With ``"all"`` there is one group, ``all``. An empty group is left out.
    ``places`` are the parameters' numbers in the model's own order, so that what is kept of an optimiser does not
    depend on its groups.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    >>> [(group["name"], group["places"], group["weight_decay"]) for group in decay_groups(net, 0.1)]
    [('matrices', [0], 0.1), ('vectors', [1, 2, 3], 0.0)]
    >>> [(group["name"], group["places"]) for group in decay_groups(net, 0.1, "all")]
    [('all', [0, 1, 2, 3])]
    """
    check_choice("decay", decay, get_args(Decayed))
    if isinstance(parameters, nn.Module):
        spared = _spared(parameters)
        named = list(parameters.named_parameters())
    else:
        spared, named = set(), [("", p) for p in parameters]
    kept = [(name, p) for name, p in named if p.requires_grad]
    members: dict[str, list[int]] = {"matrices": [], "vectors": []} if decay == "matrices" else {"all": []}
    for place, (name, p) in enumerate(kept):
        leaf = name.rsplit(".", 1)[-1]
        plain = p.dim() < 2 or id(p) in spared or leaf == "bias" or leaf.startswith("bias_")
        members["all" if decay == "all" else "vectors" if plain else "matrices"].append(place)
    return [
        {
            "name": group,
            "params": [kept[place][1] for place in places],
            "places": places,
            "weight_decay": 0.0 if group == "vectors" else weight_decay,
        }
        for group, places in members.items()
        if places
    ]


def _by_depth(groups: list[dict[str, Any]], model: Any, layer_decay: float) -> list[dict[str, Any]]:
    """The groups cut further, by how deep their parameters are."""
    if not hasattr(model, "depths"):
        raise ConfigError("training.layer_decay is of pretrained models, got another; leave it out")
    named = {id(p): name for name, p in model.named_parameters()}
    depths: dict[str, int] = model.depths()
    result = []
    for group in groups:
        members: dict[int, list[int]] = {}
        for place, p in enumerate(group["params"]):
            members.setdefault(depths[named[id(p)]], []).append(place)
        for depth, places in sorted(members.items()):
            own = {key: [group[key][place] for place in places] for key in ("params", "places")}
            result.append({**group, **own, "name": f"{group['name']} {depth}", "scale": layer_decay**depth})
    return result


def _spared(model: nn.Module) -> set[int]:
    """Ids of parameters of any shape that must not decay: those of norms, and lengths of weight-normalised rows."""
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    spared: set[int] = set()
    for module in model.modules():
        if isinstance(module, norms):
            spared |= {id(p) for p in module.parameters(recurse=False)}
        # Torch's weight norm keeps length and direction as the two originals of one parametrisation.
        elif isinstance(module, ParametrizationList) and type(module[0]).__name__ == "_WeightNorm":
            spared.add(id(module.original0))
    return spared


def learning_rate_factor(schedule: ScheduleName, step: int, *, warmup: int, total: int) -> float:
    """Factor on the base learning rate at ``step`` (from 0).

    A linear warm-up over ``warmup`` steps, then: ``constant`` and ``plateau`` 1 (the plateau's own factor is kept by
    :class:`Plateau`); ``inverse_sqrt`` sqrt(w / step) with w = max(warmup, 1); ``cosine`` half a cosine down to 0 at
    ``total``.

    >>> [round(learning_rate_factor("inverse_sqrt", s, warmup=4, total=100), 2) for s in (0, 3, 4, 15)]
    [0.25, 1.0, 0.89, 0.5]
    """
    check_choice("schedule", schedule, get_args(ScheduleName))
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    if schedule == "cosine":
        share = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return 1.0


class Plateau:
    """Multiply the learning rate by ``factor`` whenever a metric has not improved for ``patience`` epochs.

    >>> plateau = Plateau(factor=0.5, patience=1)
    >>> [plateau.update(improved) for improved in (True, False, False, True)]
    [1.0, 1.0, 0.5, 0.5]
    """

    def __init__(self, *, factor: float, patience: int):
        self.factor, self.patience = factor, patience
        self.current, self.waited = 1.0, 0

    def update(self, improved: bool, epochs: int = 1) -> float:
        """Note the result of so many epochs; returns the factor now in force."""
        self.waited = 0 if improved else self.waited + epochs
        if self.waited > self.patience:
            self.current *= self.factor
            self.waited = 0
        return self.current


def teacher_forcing_at(schedule: ForcingSchedule, start: float, end: float, share: float) -> float:
    """Teacher-forcing probability when ``share`` in [0, 1] of the training is done.

    ``linear`` goes straight from start to end; ``inverse_sigmoid`` stays near start, falls in the middle and stays
    near end (Bengio et al., 2015).

    >>> [round(teacher_forcing_at("linear", 1.0, 0.0, s), 2) for s in (0.0, 0.25, 1.0)]
    [1.0, 0.75, 0.0]
    """
    if schedule == "constant":
        return start
    if schedule == "linear":
        return start + (end - start) * share
    if schedule == "inverse_sigmoid":
        low, high = 1 / (1 + math.exp(6)), 1 / (1 + math.exp(-6))
        fall = (1 / (1 + math.exp(-12 * (share - 0.5))) - low) / (high - low)
        return start + (end - start) * fall
    raise ConfigError(
        f"teacher-forcing schedule `{schedule}` is not known; {nearest(schedule, get_args(ForcingSchedule))}"
    )
