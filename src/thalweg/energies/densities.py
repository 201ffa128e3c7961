"""Energies of points: small ones to learn densities with, and points to learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest

# The sets of points that `draw_points` knows.
POINTS = ("moons", "rings", "checkerboard", "blobs")


class MLPEnergy(nn.Module):
    r"""A multilayer perceptron that gives each point an energy, in a wide bowl.

    .. math:: E(x) = f(x) + \frac{c}{2} \lVert x \rVert^2, \qquad p(x) = \frac{\exp(-E(x))}{Z}

    f's hidden units are SiLU, so E can be differentiated as often as wanted, and f grows no faster than linearly:
    with c > 0 the sum Z exists whatever the weights.

    Args:
        size: D, the dimension of the points.
        hidden: units of each hidden layer.
        bowl: c, 0 or more.

    >>> energy = MLPEnergy(2, hidden=(8,))
    >>> energy(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    def __init__(self, size: int = 2, hidden: Sequence[int] = (128, 128), *, bowl: float = 0.1):
        super().__init__()
        if size < 1 or not 0 <= bowl < math.inf:
            raise ConfigError(f"`size` must be at least 1 and `bowl` 0 or more, got {size} and {bowl}")
        widths = [size, *hidden]
        layers: list[nn.Module] = []
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.size, self.bowl = size, bowl

    def forward(self, points: Tensor) -> Tensor:
        """E of points ``(..., D)``, ``(...)``."""
        _check_points(points, self.size)
        return self.layers(points).squeeze(-1) + self.bowl / 2 * points.square().sum(dim=-1)


def draw_points(name: str, count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Points in the plane, ``(count, 2)`` float32, between about -3 and 3.

    Args:
        name: ``moons``, two half circles of radius 1.5 that reach into one another; ``rings``, circles of radius 1 and
            2.4, both evenly dense along the line; ``checkerboard``, the dark squares of a board of 4 x 4 squares of
            side 1.5; ``blobs``, eight Gaussians on a circle of radius 2. Lines have Gaussian noise of 0.1 across.
        count: how many.
        generator: the source of randomness; torch's own by default.

    >>> draw_points("rings", 1000, generator=torch.Generator().manual_seed(0)).norm(dim=1).max() < 3
    tensor(True)
    """
    if name not in POINTS:
        raise ConfigError(f"points `{name}` are not known; {nearest(name, POINTS)}")
    along = torch.rand(count, generator=generator)
    which = torch.rand(count, generator=generator)
    noise = torch.randn(count, 2, generator=generator)
    if name == "moons":
        upper = which < 0.5
        angle = math.pi * torch.where(upper, along, along + 1)
        line = 1.5 * torch.stack([angle.cos(), angle.sin()], dim=1)
        shift = torch.tensor([0.75, -0.375])
        return line + torch.where(upper.unsqueeze(1), -shift, shift) + 0.1 * noise
    if name == "rings":
        radius = torch.where(which < 1 / 3.4, 1.0, 2.4) + 0.1 * noise[:, 0]
        return radius.unsqueeze(1) * _circle(along)
    if name == "blobs":
        return 2 * _circle((which * 8).floor() / 8) + 0.2 * noise
    place = (which * 8).floor()  # the k-th dark square: two in each of four rows
    row, column = (place / 2).floor(), 2 * (place % 2)
    corner = torch.stack([column + row % 2, row], dim=1)
    return 1.5 * (corner + torch.stack([along, torch.rand(count, generator=generator)], dim=1)) - 3


def grid_points(low: float, high: float, size: int, dimensions: int = 2) -> Tensor:
    """The centres of the cells of a grid over a square or its like, ``(size ** D, D)`` float32, the last axis fastest.

    >>> grid_points(0.0, 1.0, 2).tolist()
    [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    """
    if size < 1 or dimensions < 1 or not low < high:
        raise ConfigError(
            f"a grid needs low < high, `size` and `dimensions` at least 1, got {low}, {high}, {size} and {dimensions}"
        )
    centres = low + (torch.arange(size) + 0.5) * (high - low) / size
    return torch.cartesian_prod(*[centres] * dimensions).view(-1, dimensions)


def grid_log_partition(
    energy: Callable[[Tensor], Tensor],
    low: float,
    high: float,
    size: int = 200,
    dimensions: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""log Z of exp(-E) over a square, by the midpoint rule; of shape (), differentiable in E's parameters.

    .. math:: \log Z \approx \log \sum_g \exp(-E(x_g)) + D \log \frac{h - l}{n}

    For D up to 3 or so: n^D energies. What lies outside the square is left out.

    >>> grid_log_partition(lambda points: points.square().sum(dim=-1) / 2, -6.0, 6.0)  # log 2 pi
    tensor(1.8379)
    """
    points = grid_points(low, high, size, dimensions).to(device=device, dtype=dtype)
    return (-energy(points)).logsumexp(dim=0) + dimensions * math.log((high - low) / size)


def _circle(turns: Tensor) -> Tensor:
    angle = 2 * math.pi * turns
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def _check_points(points: Tensor, size: int) -> None:
    if points.dim() < 1 or points.size(-1) != size or not points.is_floating_point():
        raise ShapeError(
            f"points must be floating point (..., D) with D = {size}, got {tuple(points.shape)} {points.dtype}"
        )
