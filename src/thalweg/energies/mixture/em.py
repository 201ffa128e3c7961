r"""EM for mixtures of Gaussians: expect who made each point, then take the parameters that fit best.

.. math:: \log p(x) \ge \sum_z q(z) \log \frac{p(x, z)}{q(z)}

The first half of a step makes this an equality with q = p(z | x), the second raises the right-hand side, so no step
lowers the likelihood. Dempster, Laird and Rubin (1977).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.energies.mixture.covariances import SHAPES, Covariances, Moments
from thalweg.energies.mixture.missing import expect_missing
from thalweg.energies.rows import Rows
from thalweg.errors import ThalwegError

# Numbers in the largest array of a block: on a CPU it should stay near the cache, on a GPU give it enough to do.
_BLOCK = {"cpu": 2**20, "cuda": 2**26}

# A component with less than so much of a mean point's weight is empty.
_EMPTY = 1e-6


class LikelihoodFellError(ThalwegError, ArithmeticError):
    """A step of EM lowered the likelihood by more than rounding explains."""


class State(NamedTuple):
    """The parameters during EM, in float64.

    Attributes:
        weights: ``(N,)``.
        means: ``(N, D)``.
        factors: of the precisions, in the shape of the covariances.
        shape: the name of that shape.
        floored: ``(N,)`` bool, where the floor was needed.
        empty: ``(N,)`` bool, which components no point belongs to.
    """

    weights: Tensor
    means: Tensor
    factors: Tensor
    shape: str
    floored: Tensor
    empty: Tensor

    @property
    def covariances(self) -> Covariances:
        """What there is to know of that shape."""
        return SHAPES[self.shape]

    def joint(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """log p(x, z) as a function of many blocks of points ``(B, D)``, ``(B, N)``.

        In the given type for full covariances. The others are cheap, but expand squares: float64 keeps what is small.
        """
        dtype = dtype if self.shape == "full" else torch.float64
        squared = self.covariances.distances(self.means.to(dtype), self.factors.to(dtype))
        D = self.means.size(1)
        normal = self.covariances.log_det(self.factors, D) - D / 2 * math.log(2 * math.pi)
        constants = (self.weights.log() + normal).to(dtype)
        return lambda points: squared(points.to(dtype)).mul_(-0.5).add_(constants)


class Expected(NamedTuple):
    """What the points say under a state.

    Attributes:
        likelihood: the sum over points of weight times log p(x), ().
        moments: of the points, with p(z | x).
    """

    likelihood: Tensor
    moments: Moments


class Climb(NamedTuple):
    """Where EM came to.

    Attributes:
        state: the parameters after the last step.
        history: the mean log p(x) before each step.
        converged: the last step gained less than the tolerance.
    """

    state: State
    history: list[float]
    converged: bool


def expect(rows: Rows, sample_weight: Tensor | None, state: State, *, missing: bool = False) -> Expected:
    """Sum over all points, block by block: memory does not grow with their number, nor does a GPU wait between blocks.

    Args:
        rows: ``(B, D)``.
        sample_weight: ``(B,)`` on the state's device, or none.
        missing: NaN stands for a missing value.
    """
    N, D = state.means.shape
    device = state.means.device
    centre = state.weights @ state.means
    likelihood = centre.new_zeros(())
    mass, first = centre.new_zeros(N), centre.new_zeros(N, D)
    second = torch.zeros_like(state.covariances.reduced(centre.new_zeros(N, D, D)))
    joint = state.joint(rows.dtype)
    budget = _BLOCK.get(device.type, _BLOCK["cpu"])
    for place, points in rows.blocks(max(64, budget // (N * D + D * D)), device=device):
        weight = None if sample_weight is None else sample_weight[place]
        if missing:
            value, part = expect_missing(points.double(), weight, state.means, _matrices(state), state.weights, centre)
            part = part._replace(second=state.covariances.reduced(part.second))
        else:
            value, part = _expect_block(points, weight, joint, centre, state.covariances)
        likelihood += value
        mass += part.mass
        first += part.first
        second += part.second
    return Expected(likelihood, Moments(mass, first, second, centre))


def _expect_block(
    points: Tensor, weight: Tensor | None, joint: Callable[[Tensor], Tensor], centre: Tensor, covariances: Covariances
) -> Expected:
    shares = joint(points)
    # logsumexp and softmax at the price of one of them.
    top = shares.amax(dim=1, keepdim=True)
    total = shares.sub_(top).exp_().sum(dim=1, keepdim=True)
    values = (total.log() + top).squeeze(1).double()
    shares = shares.div_(total).double()
    if weight is not None:
        shares, values = shares.mul_(weight.unsqueeze(1)), values * weight
    centred = points.double() - centre
    second = covariances.second(centred, shares)
    return Expected(values.sum(), Moments(shares.sum(dim=0), shares.mT @ centred, second, centre))


def _matrices(state: State) -> Tensor:
    covariances = state.covariances
    return covariances.matrices(covariances.covariances(state.factors), *state.means.shape)


def maximise(state: State, moments: Moments, *, floor: float, count: float) -> State:
    """The parameters that fit best what was expected of ``count`` points; an empty component keeps what it had."""
    total = moments.mass.sum()
    tiny = _EMPTY * total / count
    empty = moments.mass < tiny
    covariances, floored = state.covariances.update(moments, floor, tiny)
    factors = state.covariances.factors(covariances)
    if floored.dim():  # tied covariances have no empty ones
        factors = torch.where(empty.view(-1, *[1] * (factors.dim() - 1)), state.factors, factors)
    return State(
        # Above 0, so that its logarithm is a number.
        weights=(moments.mass / total).clamp(min=torch.finfo(torch.float32).tiny),
        means=moments.means(state.means, empty),
        factors=factors,
        shape=state.shape,
        floored=floored.expand_as(empty) & ~empty,
        empty=empty,
    )


def climb(
    rows: Rows,
    sample_weight: Tensor | None,
    state: State,
    *,
    floor: float,
    max_iter: int,
    tol: float,
    missing: bool = False,
) -> Climb:
    """Steps of EM until one gains less than ``tol`` in the mean log p(x), at most ``max_iter``.

    Time O(B N D^2) a step for full and tied covariances, O(B N D) for the others.
    """
    total = float(len(rows) if sample_weight is None else sample_weight.sum())
    # Rounding moves a mean of logarithms by far less than this.
    noise = math.sqrt(torch.finfo(rows.dtype if state.shape == "full" else torch.float64).eps)
    history: list[float] = []
    for step in range(max_iter):
        expected = expect(rows, sample_weight, state, missing=missing)
        state = maximise(state, expected.moments, floor=floor, count=len(rows))
        history.append(float(expected.likelihood) / total)  # a GPU is waited for once a step, not for each block
        if not math.isfinite(history[-1]):
            raise LikelihoodFellError(
                f"the likelihood is {history[-1]} after {step} steps of EM; raise `floor` or scale X"
            )
        gain = history[-1] - history[-2] if step else math.inf
        if gain < -noise * (1 + abs(history[-1])):
            raise LikelihoodFellError(
                f"step {step} of EM lowered the mean log-likelihood from {history[-2]:.9g} to {history[-1]:.9g}, "
                "which no rounding explains; scale the columns of X alike, or use float64"
            )
        if gain < tol:
            return Climb(state, history, True)
    return Climb(state, history, False)


def mix(state: State, batch: Moments, step: float) -> Moments:
    """The moments of the model itself, about the batch's centre, with so much of the batch's mixed in."""
    centred = state.means - batch.centre
    around = state.covariances.matrices(state.covariances.covariances(state.factors), *state.means.shape)
    around = around + centred.unsqueeze(2) * centred.unsqueeze(1)
    total = batch.mass.sum()
    first, second = state.weights.unsqueeze(1) * centred, state.weights.view(-1, 1, 1) * around
    return Moments(
        mass=(1 - step) * state.weights + step * batch.mass / total,
        first=(1 - step) * first + step * batch.first / total,
        second=(1 - step) * state.covariances.reduced(second) + step * batch.second / total,
        centre=batch.centre,
    )
