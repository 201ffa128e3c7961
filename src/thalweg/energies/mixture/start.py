"""Where EM begins: k-means++ and a few steps of k-means, for whatever is not given."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.energies.mixture.covariances import SHAPES
from thalweg.energies.mixture.em import State
from thalweg.energies.rows import Rows
from thalweg.errors import ShapeError

# Points that the start looks at; of more, so many drawn at random.
_LOOKED_AT = 20_000
_STEPS = 10


def k_means_plus_plus(points: Tensor, weight: Tensor, N: int, *, generator: torch.Generator | None = None) -> Tensor:
    """N of the points ``(B, D)``, each drawn in proportion to its squared distance from those before, ``(N, D)``.

    Args:
        weight: ``(B,)``, how much each point counts.
        generator: on the CPU; torch's own by default.

    Arthur and Vassilvitskii (2007).

    >>> points = torch.tensor([[0.0], [0.0], [9.0]])
    >>> k_means_plus_plus(points, torch.ones(3), 2).sort(dim=0).values.flatten()
    tensor([0., 9.])
    """
    chosen = [_draw(weight, generator)]
    nearest = torch.full_like(weight, torch.inf)
    for _ in range(N - 1):
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).square().sum(dim=1))
        far = nearest * weight
        # Where every point is already chosen, any will do.
        chosen.append(_draw(far if bool(far.any()) else weight, generator))
    return points[torch.tensor(chosen, device=points.device)]


def begin(
    rows: Rows,
    sample_weight: Tensor | None,
    given: dict[str, Tensor],
    N: int,
    shape: str,
    *,
    floor: float,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> State:
    """The state that EM begins with: what is given of ``weights``, ``means`` and ``covariances``, else from k-means.

    Covariances begin as the one within clusters, the same for all components: no cluster is too small for that.
    """
    given = {name: value.to(device=device, dtype=torch.float64) for name, value in given.items()}
    points, weight = _some(rows, sample_weight, device, generator)
    if not bool((points.square() * weight.unsqueeze(1)).sum().isfinite()):
        raise ShapeError(
            f"X must have squares that float64 holds, got numbers up to {points.abs().amax():.3g}; scale X"
        )
    means = given.get("means")
    if means is None:
        means = _k_means(points, weight, k_means_plus_plus(points, weight, N, generator=generator))
    labels = torch.cdist(points, means).argmin(dim=1)
    shares = torch.nn.functional.one_hot(labels, N).double() * weight.unsqueeze(1)
    mass = shares.sum(dim=0)
    covariances = given.get("covariances")
    if covariances is None:
        around = points - means[labels]
        pooled = (around * (weight / weight.sum()).unsqueeze(1)).mT @ around
        covariances = SHAPES[shape].shared(pooled, N)
    covariances, floored = SHAPES[shape].raised(covariances, floor)
    weights = given.get("weights", 0.99 * mass / mass.sum() + 0.01 / N)  # no component begins empty
    no = torch.zeros(N, dtype=torch.bool, device=device)
    return State(weights, means, SHAPES[shape].factors(covariances), shape, floored.expand(N), no)


def distinct(rows: Rows, weight: Tensor | None) -> bool:
    """Whether two rows that count differ; most tables say so at once."""
    first: Tensor | None = None
    for place, block in rows.blocks(4096):
        counted = block if weight is None else block[weight[place].to(block.device) > 0]
        if not len(counted):
            continue
        first = counted[0] if first is None else first
        if bool(((counted != first) & ~(counted.isnan() & first.isnan())).any()):
            return True
    return False


def _k_means(points: Tensor, weight: Tensor, means: Tensor) -> Tensor:
    """A few steps of k-means; a cluster without points keeps its mean."""
    for _ in range(_STEPS):
        labels = torch.cdist(points, means).argmin(dim=1)
        shares = torch.nn.functional.one_hot(labels, len(means)).double() * weight.unsqueeze(1)
        mass = shares.sum(dim=0).unsqueeze(1)
        moved = torch.where(mass > 0, shares.mT @ points / mass.clamp(min=1e-300), means)
        if torch.equal(moved, means):
            break
        means = moved
    return means


def _some(
    rows: Rows, sample_weight: Tensor | None, device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """All points or enough of them, in float64, and their weights; a missing value is the mean of its column."""
    if len(rows) <= _LOOKED_AT:
        points, weight = rows.block(0, len(rows)), sample_weight
    else:
        # Drawn with replacement: without is a permutation of all rows, which may be too many.
        places = torch.randint(len(rows), (_LOOKED_AT,), generator=generator).unique()
        points = rows.pick(places)
        weight = None if sample_weight is None else sample_weight[places.to(sample_weight.device)]
    points = points.to(device=device, dtype=torch.float64)
    weight = points.new_ones(len(points)) if weight is None or not bool(weight.any()) else weight
    there = ~points.isnan()
    if not bool(there.all()):
        if not bool(there.any(dim=0).all()):
            column = int((~there.any(dim=0)).nonzero()[0, 0])
            raise ShapeError(f"column {column} of X has no observed value; leave the column out")
        points = torch.where(there, points, points.nanmean(dim=0))
    return points, weight


def _draw(weight: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weight.cpu(), 1, generator=generator))
