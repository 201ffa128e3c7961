"""The convex-concave procedure: minimise a convex plus a concave function by linearising the concave one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError, ThalwegError, nearest

# Which rows the callbacks of `cccp` are given: those still moving, those with their indices, or always all.
Rows: TypeAlias = Literal["active", "indexed", "all"]


class NotMonotoneError(ThalwegError, ArithmeticError):
    """An energy rose, or is NaN, where the convex-concave procedure makes that impossible: the parts are wrong."""


class Descent(NamedTuple):
    """Where each row came to rest, and how.

    S is the largest number of steps that a row made.

    Attributes:
        state: ``(B, ...)``, the shape of the start.
        energies: ``(B, S + 1)`` from the start on; past a row's own steps its last energy is repeated. None where
            no energy was given.
        steps: ``(B,)`` int64, the steps of each row.
        converged: ``(B,)`` bool, whether the last step was no longer than the tolerance.

    >>> Descent(torch.zeros(1, 2), torch.tensor([[1.0, 0.5]]), torch.tensor([1]), torch.tensor([True])).steps
    tensor([1])
    """

    state: Tensor
    energies: Tensor | None
    steps: Tensor
    converged: Tensor


def cccp(
    start: Tensor,
    *,
    minimise: Callable[..., Tensor],
    concave_gradient: Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None,
    concave: Callable[..., Tensor] | None = None,
    energy: Callable[..., Tensor] | None = None,
    max_steps: int = 100,
    tol: float = 1e-6,
    rows: Rows = "active",
    check: bool = True,
    slack: Tensor | float | None = None,
) -> Descent:
    r"""Minimise E = E1 + E2 of each row, E1 convex and E2 concave, from a start (Yuille and Rangarajan, 2003).

    .. math:: x_{t+1} = \arg\min_x E_1(x) + \langle \nabla E_2(x_t), x \rangle

    E2 lies below its tangent, so E(x_{t+1}) <= E(x_t): the energy never rises, whatever the start and without a step
    size. Each row stops by itself, when ||x_{t+1} - x_t|| <= tol or after ``max_steps``. Under autograd the answer is
    differentiable through the steps that were made; otherwise nothing is kept of them.

    Args:
        start: ``(B, ...)``, one problem in each row.
        minimise: the slope ``(A, ...)`` of the concave part -> the minimiser ``(A, ...)`` of E1(x) + <slope, x>.
        concave_gradient: x ``(A, ...)`` -> the gradient of E2 there, ``(A, ...)``; or a pair of it and the energies
            ``(A,)``, where one piece of work gives both.
        concave: instead of the gradient, E2 itself, ``(A, ...) -> (A,)``, which autograd differentiates.
        energy: x ``(A, ...)`` -> E, ``(A,)``, for the trace and the check; without it, or the pair, there is neither.
        max_steps: at most so many steps, 0 or more.
        tol: the longest step, in Euclidean norm, that counts as rest; with 0 a row must stop exactly.
        rows: ``"active"``: the callbacks get the A rows that still move. ``"indexed"``: and as second argument their
            indices ``(A,)``, or None for all, for problems whose data differ by row. ``"all"``: they get all B
            rows every time, for data that are dear to select from; what they say of finished rows is not used.
        check: raise a :class:`NotMonotoneError` that names row and step where an energy rises beyond rounding or is
            NaN.
        slack: the rise that is put down to rounding, a number or ``(B,)``; by default 64 machine epsilons of the row's
            largest finite energy (at least 1). Give more where an energy is a small difference of large terms.
    Returns:
        :class:`Descent`.

    At most S + 1 evaluations for each row. An example: regression with the minimax concave penalty of Zhang (2010),
    1/2 (x - y)^2 + |x| - h(x) with h(x) = x^2 / 4 up to |x| = 2 and |x| - 1 beyond. The convex part is the lasso's,
    whose linearised minimum is a soft threshold, and large coefficients come out without its bias.

    >>> y = torch.tensor([[0.5], [1.5], [3.0]])
    >>> slope = lambda x: -torch.where(x.abs() <= 2, x / 2, x.sign())
    >>> def soft_threshold(slope, rows):
    ...     pull = (y if rows is None else y[rows]) - slope
    ...     return pull.sign() * (pull.abs() - 1).clamp(min=0)
    >>> found = cccp(torch.zeros(3, 1), minimise=soft_threshold, concave_gradient=lambda x, rows: slope(x),
    ...              rows="indexed")
    >>> found.state.round(decimals=4).flatten(), found.converged.all()
    (tensor([0., 1., 3.]), tensor(True))
    """
    _check_arguments(start, concave_gradient, concave, max_steps, tol, rows)
    evaluate = _evaluation(concave_gradient, concave, energy)
    run = _Run(start, rows)
    slope, values = run.call(evaluate, start)
    run.record(values)
    for _ in range(max_steps):
        if run.is_over:
            break
        moved = run.call(minimise, slope)
        if moved.shape != slope.shape:
            raise ShapeError(f"`minimise` must keep the shape {tuple(slope.shape)} of its slope, got {moved.shape}")
        run.advance(moved, tol)
        slope, values = run.call(evaluate, run.current)
        run.record(values)
        slope = run.retire(slope)
    descent = run.result()
    if check and descent.energies is not None:
        _check_monotone(descent.energies.detach(), slack)
    return descent


def _check_arguments(start: Tensor, gradient: object, concave: object, max_steps: int, tol: float, rows: str) -> None:
    if start.dim() < 2 or not start.is_floating_point():
        raise ShapeError(
            f"`start` must be floating point (B, ...) with one problem in each row, got {tuple(start.shape)} "
            f"{start.dtype}; give numbers as (B, 1)"
        )
    if (gradient is None) == (concave is None):
        given = "neither" if gradient is None else "both"
        raise ConfigError(f"give one of `concave_gradient` and `concave`, got {given}")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0:
        raise ConfigError(f"`max_steps` must be an integer of at least 0, got {max_steps!r}")
    if not tol >= 0:
        raise ConfigError(f"`tol` must be a number of at least 0, got {tol!r}")
    if rows not in get_args(Rows):
        raise ConfigError(f"unknown `rows` `{rows}`; {nearest(rows, get_args(Rows))}")


def _evaluation(
    gradient: Callable[..., Tensor | tuple[Tensor, Tensor]] | None,
    concave: Callable[..., Tensor] | None,
    energy: Callable[..., Tensor] | None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Slope of the concave part and energy, or None, at a point."""

    def differentiated(x: Tensor, *rows: Any) -> Tensor:
        assert concave is not None
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x if keep and x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(concave(x, *rows).sum(), x, create_graph=keep)[0]

    def evaluate(x: Tensor, *rows: Any) -> tuple[Tensor, Tensor | None]:
        found = differentiated(x, *rows) if gradient is None else gradient(x, *rows)
        slope, values = found if isinstance(found, tuple) else (found, None)
        if slope.shape != x.shape:
            raise ShapeError(f"the slope must have the shape of x, {tuple(x.shape)}, got {tuple(slope.shape)}")
        values = energy(x, *rows) if energy is not None else values
        if values is not None and values.shape != x.shape[:1]:
            raise ShapeError(f"energies must be (A,) = ({len(x)},), one for each row, got {tuple(values.shape)}")
        return slope, values

    return evaluate


class _Run:
    """What is known of all rows while some still move.

    ``current`` holds the rows that the callbacks are given; ``alive`` says which they are, None for all.
    """

    def __init__(self, start: Tensor, rows: Rows) -> None:
        self.rows = rows
        self.current = start
        self.state = start
        self.alive: Tensor | None = None
        self.trace: list[Tensor] = []
        self.steps = torch.zeros(len(start), dtype=torch.long, device=start.device)
        self.converged = torch.zeros(len(start), dtype=torch.bool, device=start.device)
        self.arrived = self.converged  # of the rows in `current`
        self.is_over = len(start) == 0

    def call(self, function: Callable[..., Any], x: Tensor) -> Any:
        return function(x, self.alive) if self.rows == "indexed" else function(x)

    def advance(self, moved: Tensor, tol: float) -> None:
        """Take a step; the rows that come to rest by it are left in until :meth:`retire`."""
        length = (moved.detach() - self.current.detach()).flatten(1).norm(dim=1)
        if self.rows == "all":
            moving = ~self.converged
            self.current = torch.where(moving.view(-1, *[1] * (moved.dim() - 1)), moved, self.current)
            self.steps = self.steps + moving
            self.converged = self.arrived = self.converged | (length <= tol)
            self.state = self.current
            return
        self.current, self.arrived = moved, length <= tol
        if self.alive is None:
            self.state, self.steps, self.converged = moved, self.steps + 1, self.arrived
        else:
            self.state = self.state.index_copy(0, self.alive, moved.to(self.state.dtype))
            self.steps[self.alive] += 1
            self.converged = self.converged.index_copy(0, self.alive, self.arrived)

    def record(self, values: Tensor | None) -> None:
        if values is None:
            return
        self.trace.append(values if self.alive is None else self.trace[-1].index_copy(0, self.alive, values))

    def retire(self, slope: Tensor) -> Tensor:
        """Drop the rows that have come to rest; the slope of those that remain."""
        if self.rows == "all":
            self.is_over = bool(self.converged.all())
            return slope
        moving = (~self.arrived).nonzero().flatten()  # the one wait for the device in a step
        self.is_over = len(moving) == 0
        if self.is_over or len(moving) == len(self.current):
            return slope
        self.alive = moving if self.alive is None else self.alive[moving]
        self.current = self.current[moving]
        return slope[moving]

    def result(self) -> Descent:
        energies = torch.stack(self.trace, dim=1) if self.trace else None
        return Descent(self.state, energies, self.steps, self.converged)


def _check_monotone(energies: Tensor, slack: Tensor | float | None) -> None:
    if slack is None:
        finite = torch.where(energies.isfinite(), energies.abs(), 0.0)
        slack = 64 * torch.finfo(energies.dtype).eps * finite.amax(1).clamp(min=1.0)
    allowed = slack.detach().view(-1, 1) if isinstance(slack, Tensor) else slack
    before, after = energies[:, :-1], energies[:, 1:]
    # Infinity is where a start lies outside the domain of the convex part: nothing can rise from it.
    bad = energies.isnan()
    bad[:, 1:] |= (after > before + allowed) & (before != torch.inf)
    if not bool(bad.any()):
        return
    row, step = bad.nonzero()[0].tolist()
    value = energies[row, step].item()
    if value != value:
        raise NotMonotoneError(f"the energy of row {row} is NaN at step {step}; look at its start and at the callbacks")
    raise NotMonotoneError(
        f"the energy must not rise, got {energies[row, step - 1].item():.9g} and then {value:.9g} at step {step} of "
        f"row {row}; `minimise` or the slope does not belong to this energy (or give a larger `slack`)"
    )
