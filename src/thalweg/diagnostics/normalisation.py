"""What each kind of normalisation measures and does: statistics, directions it removes, Jacobians, a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.limits import check_choice

Scheme = Literal["batch", "layer", "instance", "position"]
"""Which entries of ``(B, C, F)`` share a mean and a variance; ``position`` is layer norm of a sequence."""

# The axis (of batch, channels, features) that each scheme keeps: what remains has a statistic each.
_KEPT: dict[str, tuple[int, ...]] = {"batch": (1,), "layer": (0,), "instance": (0, 1), "position": (0, 2)}


@dataclass(frozen=True)
class Statistics:
    """Means and population variances of groups of entries, and how many entries each group has.

    >>> normalisation_statistics(torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]]), "batch")
    Statistics(mean=tensor([2.]), variance=tensor([0.5000]), count=tensor([4.]))
    """

    mean: Tensor
    variance: Tensor
    count: Tensor


def normalisation_statistics(x: Tensor, scheme: Scheme, *, mask: Tensor | None = None) -> Statistics:
    r"""Mean and population variance :math:`\frac1n \sum (x - \mu)^2` of every group that a scheme normalises.

    Args:
        x: ``(B, C, F)``: batch, channels, features of a channel (of a sequence: its positions); ``(B, C)`` is F = 1.
        scheme: ``batch`` gives ``(C,)``, over batch and features; ``layer`` ``(B,)``, over channels and features;
            ``instance`` ``(B, C)``, over features; ``position`` ``(B, F)``, over channels.
        mask: ``(B, F)`` bool: only these count; a group without any has mean and variance NaN.

    >>> x = torch.tensor([[[1.0, 3, 2], [1, 2, 3]], [[3, 3, 2], [2, 4, 4]]])
    >>> normalisation_statistics(x, "layer").mean
    tensor([2., 3.])
    """
    check_choice("scheme", scheme, get_args(Scheme))
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ShapeError(f"`x` must be (B, C, F) or (B, C) and floating, got {tuple(x.shape)} {x.dtype}")
    x = x.unsqueeze(-1) if x.dim() == 2 else x
    if mask is not None and mask.shape != (x.shape[0], x.shape[2]):
        raise ShapeError(f"`mask` must be (B, F) = {(x.shape[0], x.shape[2])} as in `x`, got {tuple(mask.shape)}")
    real = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.unsqueeze(1).expand_as(x)
    x = torch.where(real, x, 0).to(torch.promote_types(x.dtype, torch.float32))
    over = [axis for axis in range(3) if axis not in _KEPT[scheme]]
    count = real.sum(over, keepdim=True).to(x.dtype)
    mean = x.sum(over, keepdim=True) / count
    variance = torch.where(real, x - mean, 0).square().sum(over, keepdim=True) / count
    shape = [x.shape[axis] for axis in _KEPT[scheme]]
    return Statistics(mean.view(shape), variance.view(shape), count.view(shape))


def layer_norm_jacobian(x: Tensor, *, eps: float = 0.0) -> Tensor:
    r"""Jacobian :math:`\frac1\sigma (I - \frac1n 11' - \frac1n yy')` of :math:`y = (x - \mu) / \sigma`.

    With :math:`\sigma = \sqrt{\mathrm{var} + \epsilon}` it is exact for every :math:`\epsilon`. For
    :math:`\epsilon = 0` it is :math:`1/\sigma` times a projection: the directions 1 and y are lost, all others are
    stretched alike. Batch and instance norm have the same Jacobian over the entries that share a statistic.

    Args:
        x: ``(..., n)``, the entries normalised together. With ``eps=0`` they must not all be equal.
    Returns:
        ``(..., n, n)``, symmetric.

    >>> layer_norm_jacobian(torch.tensor([1.0, 3.0]))
    tensor([[0., 0.],
            [0., 0.]])
    """
    away = x - x.mean(-1, keepdim=True)
    sigma = (away.square().mean(-1, keepdim=True) + eps).sqrt()
    y = away / sigma
    n = x.shape[-1]
    eye = torch.eye(n, dtype=x.dtype, device=x.device)
    return (eye - 1 / n - y.unsqueeze(-1) * y.unsqueeze(-2) / n) / sigma.unsqueeze(-1)


@dataclass(frozen=True)
class SchemeSummary:
    """One row of a :class:`NormalisationReport`.

    Attributes:
        scheme: which.
        groups: how many means and variances it takes; smallest: entries in the smallest group.
        mean: least and greatest mean; deviation: least and greatest standard deviation.
        gain: least and greatest 1/sqrt(variance + eps), by which a group's gradients are multiplied.
        dead: share of groups whose variance is below eps, in which differences are lost or noise is blown up.
        lost: directions of the input that the output does not see, of ``entries`` in all: two a group.
        entries: numbers normalised.

    >>> compare_normalisations(torch.tensor([[[1.0], [3.0]]])).rows[0].scheme
    'batch'
    """

    scheme: str
    groups: int
    smallest: int
    mean: tuple[float, float]
    deviation: tuple[float, float]
    gain: tuple[float, float]
    dead: float
    lost: int
    entries: int


@dataclass(frozen=True)
class NormalisationReport:
    """What each scheme would measure on the same activations; ``str`` is a table.

    >>> print(compare_normalisations(torch.tensor([[[1.0, 4.0], [3.0, 0.0]]]), schemes=["layer", "instance"]))
    scheme    groups  smallest            mean       deviation    gradient gain   dead   lost
    layer          2         2      1.5 to 2.5      1.5 to 1.5   0.667 to 0.667   0.0%   100%
    instance       2         2          2 to 2          1 to 2         0.5 to 1   0.0%   100%
    """

    rows: tuple[SchemeSummary, ...]

    def __str__(self) -> str:
        """A table, a row a scheme."""
        head = f"{'scheme':<9}{'groups':>7}{'smallest':>10}{'mean':>16}{'deviation':>16}{'gradient gain':>17}"
        lines = [head + f"{'dead':>7}{'lost':>7}"]
        for row in self.rows:
            spans = [f"{low:.3g} to {high:.3g}" for low, high in (row.mean, row.deviation, row.gain)]
            share = row.lost / row.entries if row.entries else 0.0
            lines.append(
                f"{row.scheme:<9}{row.groups:>7}{row.smallest:>10}{spans[0]:>16}{spans[1]:>16}{spans[2]:>17}"
                f"{row.dead:>7.1%}{share:>7.0%}"
            )
        return "\n".join(lines)


def compare_normalisations(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    eps: float = 1e-5,
    schemes: Sequence[Literal["batch", "layer", "instance"]] = ("batch", "layer", "instance"),
) -> NormalisationReport:
    """What batch, layer and instance norm would find in the activations of a model.

    Args:
        x: ``(B, T, D)`` or ``(B, D)``: features last, as layers here have them.
        mask: ``(B, T)`` bool, true at real positions; the rest may hold anything.
        eps: below this a variance counts as none.
        schemes: ``layer`` is over the features of a position, as :func:`thalweg.layers.norms.normalisation` has it.

    O(B T D) for each scheme.

    >>> rows = compare_normalisations(torch.randn(4, 7, 8)).rows
    >>> [(row.scheme, row.groups, row.smallest, row.lost) for row in rows]
    [('batch', 8, 28, 16), ('layer', 28, 8, 56), ('instance', 32, 7, 64)]
    """
    if x.dim() not in (2, 3):
        raise ShapeError(f"`x` must be (B, T, D) or (B, D), got {tuple(x.shape)}")
    flipped = x.detach().unsqueeze(-1) if x.dim() == 2 else x.detach().transpose(1, 2)
    real = mask if mask is None or mask.dim() == 2 else mask.unsqueeze(1)
    return NormalisationReport(tuple(_summary(flipped, real, scheme, eps) for scheme in schemes))


def _summary(x: Tensor, mask: Tensor | None, scheme: str, eps: float) -> SchemeSummary:
    statistics = normalisation_statistics(x, "position" if scheme == "layer" else scheme, mask=mask)  # type: ignore[arg-type]
    there = statistics.count > 0
    mean, variance, count = (part[there] for part in (statistics.mean, statistics.variance, statistics.count))
    if not mean.numel():
        none = (math.nan, math.nan)
        return SchemeSummary(scheme, 0, 0, none, none, none, 0.0, 0, 0)
    # A group of one entry has one direction only, and loses it.
    lost = int(torch.minimum(count, torch.full_like(count, 2)).sum())
    deviation, gain = variance.sqrt(), (variance + eps).rsqrt()
    return SchemeSummary(
        scheme=scheme,
        groups=mean.numel(),
        smallest=int(count.amin()),
        mean=_span(mean),
        deviation=_span(deviation),
        gain=_span(gain),
        dead=float((variance < eps).double().mean()),
        lost=lost,
        entries=int(count.sum()),
    )


def _span(values: Tensor) -> tuple[float, float]:
    return float(values.amin()), float(values.amax())
