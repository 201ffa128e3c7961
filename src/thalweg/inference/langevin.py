"""Langevin sampling: walks that follow an energy downhill, shaken so that they visit answers as often as exp(-b E)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError, ThalwegError

Energy = Callable[[Tensor], Tensor]


class DivergedError(ThalwegError, ArithmeticError):
    """A walk left the finite numbers: its steps are too long for the energy."""


class Walk(NamedTuple):
    """Where B walks ended, and how they got there; nothing here carries a gradient.

    Attributes:
        state: ``(B, ...)``, the shape and type of the start.
        accepted: ``(B,)`` float, the share of proposals that were taken: 1 without adjustment, and after no steps.
        trace: ``(S + 1, B, ...)``, the start and every so many steps the state; None unless asked for.

    >>> Walk(torch.zeros(2, 1), torch.ones(2), None).state.shape
    torch.Size([2, 1])
    """

    state: Tensor
    accepted: Tensor
    trace: Tensor | None


def langevin(
    energy: Energy,
    start: Tensor,
    *,
    steps: int,
    step_size: float,
    noise: float | None = None,
    adjust: bool = False,
    clip: float | None = None,
    trace: int = 0,
    generator: torch.Generator | None = None,
) -> Walk:
    r"""Sample from exp(-E) by its gradient, B walks at a time.

    .. math:: x_{t+1} = x_t - \eta \nabla E(x_t) + \sigma \xi_t, \qquad \xi_t \sim N(0, I), \quad \sigma = \sqrt{2\eta}

    with the step size eta. As it stands (unadjusted) the walk settles near exp(-E), off by O(eta): of a Gaussian with
    precision a it finds the variance 1 / (a (1 - eta a / 2)). With ``adjust`` each step is a proposal x', taken with
    probability

    .. math:: \min\Big(1, \frac{\exp(-b E(x'))\, q(x \mid x')}{\exp(-b E(x))\, q(x' \mid x)}\Big), \qquad
              q(x' \mid x) = N(x - \eta \nabla E(x), \sigma^2 I),

    and the walk settles at exp(-b E) exactly; a share of about 0.57 accepted is best in many dimensions (Roberts and
    Rosenthal, 1998). Other noise means another temperature: b = 2 eta / sigma^2. Without noise it is plain descent,
    which finds the least energy near the start.

    Args:
        energy: ``(B, ...) -> (B,)``, each row by itself, differentiable. Where it is +inf an adjusted walk does not go.
        start: ``(B, ...)`` floating point. Half precision is walked in float32, the energy sees its own type.
        steps: 0 or more.
        step_size: eta, above 0.
        noise: sigma, 0 or more; by default that of b = 1.
        adjust: accept or refuse each step (Metropolis).
        clip: the longest gradient of a row (Euclidean norm) that is followed, for energies still being learned. It
            changes what is sampled, so it does not go with ``adjust``.
        trace: keep the state of every so many steps; 0 keeps none.
        generator: the source of randomness, on the device of ``start``; torch's own by default.
    Returns:
        :class:`Walk`.

    One gradient a step. The energy's parameters are left without gradients. Rossky, Doll and Friedman (1978); Roberts
    and Tweedie (1996).

    >>> walks = langevin(lambda x: 2 * x.square().sum(1), torch.zeros(2000, 1), steps=200, step_size=0.1, adjust=True,
    ...                  generator=torch.Generator().manual_seed(0))
    >>> abs(float(walks.state.var()) - 0.25) < 0.02
    True
    >>> langevin(lambda x: (x - 3).square().sum(1), torch.zeros(1, 1), steps=1, step_size=0.5, noise=0.0).state
    tensor([[3.]])
    """
    sigma = _check(start, steps, step_size, noise, adjust, clip, trace)
    dtype = torch.promote_types(start.dtype, torch.float32)
    # Walks are constants to whoever asks for them; the gradient in x is needed even where gradients are off.
    with torch.inference_mode(False), torch.enable_grad():
        state = start.detach().to(dtype, copy=True)
        slope = _Slope(energy, start.dtype, clip)
        kept = [state]
        taken = state.new_zeros(len(state))
        here = slope(state) if steps else None
        for step in range(1, steps + 1):
            assert here is not None
            shake = torch.randn(state.shape, dtype=dtype, device=state.device, generator=generator)
            proposal = state - step_size * here.gradient + sigma * shake
            if adjust:
                chance = torch.rand(len(state), dtype=dtype, device=state.device, generator=generator)
                there = slope(proposal)
                moves = chance.log() < _log_ratio(state, here, proposal, there, shake, step_size, sigma)
                state = torch.where(_rows(moves, state), proposal, state)
                here = there.where(moves, here)
                taken += moves
            else:
                state = proposal
                here = slope(state) if step < steps else None
            if trace and step % trace == 0:
                kept.append(state)
    _check_finite(state, step_size)
    share = taken / steps if adjust and steps else torch.ones_like(taken)
    return Walk(state.to(start.dtype), share, torch.stack(kept).to(start.dtype) if trace else None)


class _Place(NamedTuple):
    """The energies (B,) of states and their gradients (B, ...)."""

    energy: Tensor
    gradient: Tensor

    def where(self, chosen: Tensor, other: _Place) -> _Place:
        """These rows where chosen, else the other's."""
        gradient = torch.where(_rows(chosen, self.gradient), self.gradient, other.gradient)
        return _Place(torch.where(chosen, self.energy, other.energy), gradient)


class _Slope:
    """Energies and gradients of states, in the type of the walk."""

    def __init__(self, energy: Energy, dtype: torch.dtype, clip: float | None):
        self.energy, self.dtype, self.clip = energy, dtype, clip

    def __call__(self, state: Tensor) -> _Place:
        point = state.detach().requires_grad_()
        values = self.energy(point.to(self.dtype))
        if values.shape != state.shape[:1]:
            raise ShapeError(f"`energy` must give (B,) = ({len(state)},), got {tuple(values.shape)}")
        gradient = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), point, allow_unused=True)
        gradient = torch.zeros_like(state) if gradient is None else gradient
        if self.clip is not None:
            norms = gradient.flatten(1).norm(dim=1).clamp(min=self.clip)
            gradient = gradient * _rows(self.clip / norms, gradient)
        return _Place(values.detach().to(state.dtype), gradient)


def _log_ratio(
    state: Tensor, here: _Place, proposal: Tensor, there: _Place, shake: Tensor, step_size: float, sigma: float
) -> Tensor:
    """The logarithm of Metropolis' ratio, (B,); NaN, which is below nothing, where the proposal's energy is."""
    beta = 2 * step_size / sigma**2
    back = (state - proposal + step_size * there.gradient) / sigma
    likelier = (shake.square() - back.square()).flatten(1).sum(dim=1) / 2
    return beta * (here.energy - there.energy) + likelier


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, ...)."""
    return values.view(-1, *([1] * (like.dim() - 1)))


def _check(
    start: Tensor,
    steps: int,
    step_size: float,
    noise: float | None,
    adjust: bool,
    clip: float | None,
    trace: int,
) -> float:
    """The standard deviation of the noise."""
    if start.dim() < 2 or not start.is_floating_point():
        raise ShapeError(
            f"`start` must be floating point (B, ...) with one walk in each row, got {tuple(start.shape)} "
            f"{start.dtype}; give numbers as (B, 1)"
        )
    for name, count in (("steps", steps), ("trace", trace)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"`{name}` must be an integer of at least 0, got {count!r}")
    if not 0 < step_size < math.inf:
        raise ConfigError(f"`step_size` must be above 0 and finite, got {step_size}")
    sigma = math.sqrt(2 * step_size) if noise is None else noise
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"`noise` must be 0 or more and finite, got {noise}")
    if adjust and not sigma:
        raise ConfigError("`adjust` needs `noise` above 0: without any, nothing is sampled; use adjust=False")
    if clip is not None and (adjust or not clip > 0):
        raise ConfigError(f"`clip` must be above 0 and needs adjust=False, got clip={clip} and adjust={adjust}")
    return sigma


def _check_finite(state: Tensor, step_size: float) -> None:
    lost = ~torch.isfinite(state).flatten(1).all(dim=1)
    if lost.any():
        raise DivergedError(
            f"walk {int(lost.nonzero()[0])} left the finite numbers (so did {int(lost.sum())} of {len(lost)}); "
            f"use a step_size below {step_size:g}, clip=, or adjust=True"
        )
