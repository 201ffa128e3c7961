r"""Learning with continuous answers, where the sum over them in the likelihood cannot be written down.

For p(x) = exp(-E(x)) / Z the gradient of the negative log-likelihood is dE(x) - <dE>_p: the data down, the model's own
samples up. Contrastive divergence replaces those samples by short walks; score matching needs none, for the score
-dE/dx does not know Z. Every loss here takes an energy ``(B, ...) -> (B,)``, each row by itself, and data ``(B, ...)``,
and returns ``(B,)``; data are constants to it.

>>> precision, data = torch.ones((), requires_grad=True), torch.tensor([[-2.0], [2.0]])
>>> score_matching(lambda x: precision * x.square().sum(-1) / 2, data).mean().backward()
>>> precision.grad  # it is 1, but the data's variance is 4: the precision is too large
tensor(3.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.langevin import langevin

Energy = Callable[[Tensor], Tensor]


def contrastive_divergence(
    energy: Energy,
    data: Tensor,
    *,
    steps: int = 1,
    step_size: float,
    noise: float | None = None,
    adjust: bool = False,
    clip: float | None = None,
    magnitude: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""E(x) - E(x~) with x~ what k Langevin steps make of x (CD-k).

    .. math:: \ell = E(x) - E(\tilde x) + a\,(E(x)^2 + E(\tilde x)^2), \qquad
              \partial\ell = \partial E(x) - \partial E(\tilde x) \quad (a = 0)

    The walk is a constant to the gradient. Its value is no likelihood and may fall below 0; what it teaches is the
    gradient: a valley where the data are, and hills where the walks leave them. Regions that no walk reaches are not
    taught: for these see :func:`persistent_contrastive_divergence`. With unadjusted steps what is learned is off by
    their bias: a Gaussian's precision solves a (1 - eta a / 2) = 1 / variance. Hinton (2002).

    Args:
        energy: ``(B, ...) -> (B,)``.
        data: ``(B, ...)``.
        steps: k, at least 1.
        step_size, noise, adjust, clip, generator: as in :func:`~thalweg.inference.langevin`.
        magnitude: a, which holds energies near 0; 0 or more.
    Returns:
        ``(B,)``.

    >>> half_square = lambda x: x.square().sum(-1) / 2
    >>> contrastive_divergence(half_square, torch.tensor([[2.0]]), step_size=0.5, noise=0.0)  # from 2 to 1: 2 - 1/2
    tensor([1.5000])
    """
    _check_data(data)
    _check_steps(steps)
    walked = langevin(
        energy, data, steps=steps, step_size=step_size, noise=noise, adjust=adjust, clip=clip, generator=generator
    ).state
    return _contrast(energy, data, walked, magnitude)


class PersistentWalks:
    """Walks that go on from one call to the next: a replay buffer of states.

    Each call takes some of the states, at random, begins a share of them anew, and puts back where they came to.

    Args:
        fresh: ``(count, generator) -> states (count, ...)``: where walks begin.
        size: how many states are kept, at least 1.
        restart: the probability that a walk begins anew, in [0, 1].
        generator: the source of randomness; torch's own by default.

    >>> walks = PersistentWalks(lambda n, generator: torch.zeros(n, 2), size=100, restart=0.0)
    >>> rows, states = walks.take(10)
    >>> walks.put(rows, states + 1)
    >>> walks.states.sum()
    tensor(20.)
    """

    def __init__(
        self,
        fresh: Callable[[int, torch.Generator | None], Tensor],
        *,
        size: int = 10_000,
        restart: float = 0.05,
        generator: torch.Generator | None = None,
    ):
        if size < 1 or not 0 <= restart <= 1:
            raise ConfigError(f"`size` must be at least 1 and `restart` in [0, 1], got {size} and {restart}")
        self.fresh, self.restart, self.generator = fresh, restart, generator
        self.states = fresh(size, generator).detach()
        """``(size, ...)``"""
        if len(self.states) != size:
            raise ShapeError(f"`fresh` must give ({size}, ...), got {tuple(self.states.shape)}")

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows ``(count,)``, no two equal where there are enough, and their states ``(count, ...)`` or new ones."""
        device, size = self.states.device, len(self.states)
        order = torch.randperm(size, device=device, generator=self.generator)
        rows = order.repeat(-(-count // size) or 1)[:count]
        states = self.states[rows]
        if self.restart:
            anew = torch.rand(count, device=device, generator=self.generator) < self.restart
            begun = self.fresh(count, self.generator).to(states)
            states = torch.where(anew.view(-1, *([1] * (states.dim() - 1))), begun, states)
        return rows, states

    def put(self, rows: Tensor, states: Tensor) -> None:
        """Keep the states ``(count, ...)`` in those rows."""
        self.states[rows] = states.detach().to(self.states)

    def state_dict(self) -> dict[str, Tensor]:
        """What is needed to go on later."""
        return {"states": self.states.clone()}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        if saved["states"].shape != self.states.shape:
            raise ShapeError(f"`states` must be {tuple(self.states.shape)}, got {tuple(saved['states'].shape)}")
        self.states = saved["states"].to(self.states)


def persistent_contrastive_divergence(
    energy: Energy,
    data: Tensor,
    walks: PersistentWalks,
    *,
    steps: int = 1,
    step_size: float,
    noise: float | None = None,
    adjust: bool = False,
    clip: float | None = None,
    magnitude: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Contrastive divergence whose walks go on where they stopped, instead of beginning at the data.

    Over many small changes of the energy a walk has time to reach places where there are no data, and raises them. The
    gradient is that of :func:`contrastive_divergence` with x~ from ``walks``, which moves on. Tieleman (2008); a buffer
    with restarts: Du and Mordatch (2019). Arguments as there.

    >>> from thalweg.energies.densities import MLPEnergy
    >>> walks = PersistentWalks(lambda n, g: torch.rand(n, 2, generator=g), size=64)
    >>> persistent_contrastive_divergence(MLPEnergy(2), torch.zeros(16, 2), walks, steps=5, step_size=0.01).shape
    torch.Size([16])
    """
    _check_data(data)
    _check_steps(steps)
    rows, states = walks.take(len(data))
    if states.shape != data.shape:
        raise ShapeError(
            f"`walks` must hold states of the shape {tuple(data.shape[1:])}, got {tuple(states.shape[1:])}"
        )
    start = states.to(data)
    walked = langevin(
        energy, start, steps=steps, step_size=step_size, noise=noise, adjust=adjust, clip=clip, generator=generator
    ).state
    walks.put(rows, walked)
    return _contrast(energy, data, walked, magnitude)


def score_matching(energy: Energy, data: Tensor) -> Tensor:
    r"""Hyvarinen's objective: how far the score is from that of the data's density, up to a constant, without Z.

    .. math:: \ell = \frac12 \lVert \nabla E(x) \rVert^2 - \nabla^2 E(x), \qquad
              \nabla^2 E = \operatorname{tr}\Big(\frac{\partial^2 E}{\partial x\, \partial x'}\Big)

    Its mean is 1/2 <||dE/dx + s(x)||^2> - 1/2 <||s(x)||^2> with s the data's score; it may be below 0. A Gaussian
    energy has its minimum at the data's mean and inverse covariance. E needs two derivatives in x, so no ReLU.

    Args:
        energy: ``(B, ...) -> (B,)``.
        data: ``(B, ...)`` with D numbers a row.
    Returns:
        ``(B,)``.

    D + 1 gradients. Hyvarinen (2005).

    >>> data = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> score_matching(lambda x: 2 * x.square().sum(1), data).detach()  # -tr 4I, + 4^2/2
    tensor([-8.,  0.])
    """
    _check_data(data)
    with torch.enable_grad():
        point, slope = _slope(energy, data)
        flat = slope.flatten(1)
        curvature = torch.zeros_like(flat[:, 0]) if flat.size(1) else flat.sum(dim=1)
        for column in range(flat.size(1)):
            curvature = curvature + _derivative(flat[:, column].sum(), point).flatten(1)[:, column]
        loss = flat.square().sum(dim=1) / 2 - curvature
    return _as_asked(loss)


def denoising_score_matching(
    energy: Energy, data: Tensor, *, noise: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    r"""The energy's slope at a point with noise should lead back to the point.

    .. math:: \ell = \frac12 \lVert \sigma\, \nabla E(x + \sigma \xi) - \xi \rVert^2, \qquad \xi \sim N(0, I)

    which is sigma^2 times Vincent's objective, so that levels of noise count alike. It is least for the energy of the
    data's density after noise, p * N(0, sigma^2 I), not of p itself: a Gaussian's precision comes out as
    (covariance + sigma^2 I)^-1. Two gradients, whatever D.

    Args:
        energy: ``(B, ...) -> (B,)``.
        data: ``(B, ...)``.
        noise: sigma, above 0; a number, or one for each row, ``(B,)``.
        generator: the source of randomness, on the device of ``data``.
    Returns:
        ``(B,)`` >= 0.

    Vincent (2011); several levels: Song and Ermon (2019).

    >>> near = denoising_score_matching(lambda x: x.square().sum(1) / 2, torch.zeros(4, 2), noise=1.0)
    >>> near.detach()  # the data have no spread, so the energy of the noise is the best
    tensor([0., 0., 0., 0.])
    """
    _check_data(data)
    levels = torch.as_tensor(noise, dtype=data.dtype, device=data.device)
    if levels.dim() and levels.shape != data.shape[:1]:
        raise ShapeError(f"`noise` must be a number or (B,) = ({len(data)},), got {tuple(levels.shape)}")
    if not isinstance(noise, Tensor) and not 0 < noise < math.inf:
        raise ConfigError(f"`noise` must be above 0 and finite, got {noise}")
    levels = levels.view(-1, *([1] * (data.dim() - 1)))
    shake = torch.randn(data.shape, dtype=data.dtype, device=data.device, generator=generator)
    with torch.enable_grad():
        _, slope = _slope(energy, data + levels * shake)
        loss = (levels * slope - shake).square().flatten(1).sum(dim=1) / 2
    return _as_asked(loss)


def _contrast(energy: Energy, data: Tensor, walked: Tensor, magnitude: float) -> Tensor:
    if not 0 <= magnitude < math.inf:
        raise ConfigError(f"`magnitude` must be 0 or more and finite, got {magnitude}")
    right, wrong = _energies(energy, data), _energies(energy, walked.detach())
    loss = right - wrong
    return loss + magnitude * (right.square() + wrong.square()) if magnitude else loss


def _energies(energy: Energy, points: Tensor) -> Tensor:
    values = energy(points)
    if values.shape != points.shape[:1]:
        raise ShapeError(f"`energy` must give (B,) = ({len(points)},), got {tuple(values.shape)}")
    return values


def _slope(energy: Energy, data: Tensor) -> tuple[Tensor, Tensor]:
    """The points, and dE/dx there, which can be differentiated again."""
    point = data.detach().requires_grad_()
    return point, _derivative(_energies(energy, point).sum(), point)


def _as_asked(loss: Tensor) -> Tensor:
    """Without a graph where the caller has gradients off: the slope needs them on."""
    return loss if torch.is_grad_enabled() else loss.detach()


def _derivative(value: Tensor, point: Tensor) -> Tensor:
    """Zero where the value does not depend on the point."""
    found: Any = None
    if value.requires_grad:
        (found,) = torch.autograd.grad(value, point, create_graph=True, allow_unused=True)
    return torch.zeros_like(point) if found is None else found


def _check_data(data: Tensor) -> None:
    if data.dim() < 2 or not data.is_floating_point():
        raise ShapeError(
            f"`data` must be floating point (B, ...), got {tuple(data.shape)} {data.dtype}; give numbers as (B, 1)"
        )


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ConfigError(
            f"`steps` must be at least 1, got {steps}: without any, the walk is the data and teaches nothing"
        )
