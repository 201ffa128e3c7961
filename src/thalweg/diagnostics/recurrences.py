"""What the matrix of a recurrence says before it is run: a bound on gradients, and growth by eigenvalues."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.errors import ShapeError

__all__ = ["EigenvalueGroup", "LinearRecurrence", "VanishingBound", "linear_recurrence", "vanishing_bound"]

# Eigenvalues closer than this (relative to the norm) are taken together: an m-fold one that lacks eigenvectors is
# split by rounding into m that lie eps^(1/m) apart, 1e-4 for m = 4.
_TOGETHER = 3e-4
# Singular values below this, relative to the norm, count as zero when ranks are counted.
_ZERO = 1e-9


@dataclass(frozen=True)
class VanishingBound:
    r"""Whether :math:`\|\partial h_T / \partial h_0\| \le \delta^T` makes gradients vanish.

    Attributes:
        norm: :math:`\sqrt{\lambda_1(W'W)}`, the largest singular value of the recurrent matrix.
        slope: :math:`\gamma`, at least the norm of the activation's derivative.
        delta: :math:`\gamma \|W\|`.

    >>> print(vanishing_bound(torch.tensor([[0.5, 0.0], [0.0, 0.2]])))
    delta = 1 * 0.5 = 0.5 < 1: gradients vanish, at most 0.5^T after T steps
    """

    norm: float
    slope: float
    delta: float

    @property
    def vanishes(self) -> bool:
        """delta < 1. Where it is not, gradients may still vanish: delta > 1 is necessary for explosion, not enough."""
        return self.delta < 1

    def at(self, steps: int) -> float:
        """delta^T, infinite where that overflows."""
        try:
            return self.delta**steps
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        """One line."""
        head = f"delta = {self.slope:.4g} * {self.norm:.4g} = {self.delta:.4g}"
        if self.vanishes:
            return f"{head} < 1: gradients vanish, at most {self.delta:.4g}^T after T steps"
        return f"{head} >= 1: the bound says nothing; gradients may explode, or vanish all the same"


def vanishing_bound(weight: Tensor, *, slope: float = 1.0) -> VanishingBound:
    r"""The bound on gradients through time of :math:`h_t = W s(h_{t-1}) + U x_t + b`, or with the activation outside.

    If :math:`\|Ds\| \le \gamma` and :math:`\lambda_1(W'W) \le \delta^2 / \gamma^2` with :math:`\delta < 1`, then every
    step's Jacobian has norm at most :math:`\gamma\|W\| \le \delta`, and :math:`\|\partial h_T/\partial h_0\| \le
    \delta^T`. The reverse inequality is necessary for explosion, not sufficient: saturated units, or directions that
    the next step loses, can keep the product small (Pascanu et al., 2013).

    Args:
        weight: ``(D, D)`` W.
        slope: :math:`\gamma`: 1 for tanh and relu, 1/4 for the sigmoid.

    >>> vanishing_bound(2 * torch.eye(3), slope=0.25).at(2)
    0.25
    """
    _check_square(weight)
    if not slope >= 0:
        raise ShapeError(f"`slope` must be 0 or more, got {slope}")
    norm = float(torch.linalg.matrix_norm(weight.detach().double(), 2))
    return VanishingBound(norm, slope, slope * norm)


@dataclass(frozen=True)
class EigenvalueGroup:
    """An eigenvalue: its ``value``, how often it counts (``algebraic``), and its eigenvectors (``geometric``).

    ``block`` is the size of its largest Jordan block: the powers grow as t^(block - 1) |value|^t.

    >>> linear_recurrence(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).groups
    (EigenvalueGroup(value=(1+0j), algebraic=2, geometric=1, block=2),)
    """

    value: complex
    algebraic: int
    geometric: int
    block: int


@dataclass(frozen=True)
class LinearRecurrence:
    r"""What :math:`h_t = W h_{t-1}` does: :math:`h_t = Q \Lambda^t Q^{-1} h_0 \approx \lambda_1^t\, q_1 v_1' h_0`.

    Attributes:
        weight: ``(D, D)`` W, float64.
        eigenvalues: ``(D,)`` complex, largest modulus first.
        right: ``(D, D)`` Q, an eigenvector a column; left: ``(D, D)`` :math:`Q^{-1}`, a row each, NaN where there is
            none.
        groups: distinct eigenvalues, with how many eigenvectors each has.
        condition: of Q; where it is large, eigenvalues say little about the first steps.
        defective: whether there are fewer eigenvectors than dimensions, to working precision: Q is then no basis.

    >>> print(linear_recurrence(torch.tensor([[1.1, 0.0], [0.0, 0.9]])))
    |lambda| = 1.1: explodes, as 1.1^t
    lambda       |lambda|   algebraic  geometric   after 10   after 100
    1.1           1.1            1          1        2.59    1.38e+04
    0.9           0.9            1          1       0.349    2.66e-05
    """

    weight: Tensor
    eigenvalues: Tensor
    right: Tensor
    left: Tensor
    groups: tuple[EigenvalueGroup, ...]
    condition: float
    defective: bool

    @property
    def radius(self) -> float:
        """The largest modulus of an eigenvalue."""
        return abs(self.groups[0].value)

    @property
    def verdict(self) -> str:
        """``explodes``, ``vanishes`` or ``stays``; on the circle a Jordan block of more than one grows (explodes)."""
        tolerance = 1e-9 if not self.defective else 1e-7
        if self.radius > 1 + tolerance:
            return "explodes"
        if self.radius < 1 - tolerance:
            return "vanishes"
        rim = [group for group in self.groups if abs(group.value) > 1 - tolerance]
        return "explodes" if any(group.block > 1 for group in rim) else "stays"

    def at(self, state: Tensor, steps: int) -> Tensor:
        r""":math:`h_t` from ``state (..., D)``: by eigenvectors, or by powers of W where they are no basis."""
        state = state.double()
        if self.defective:
            return state @ torch.linalg.matrix_power(self.weight, steps).T
        coefficients = state.to(self.left.dtype) @ self.left.T
        return ((coefficients * self.eigenvalues**steps) @ self.right.T).real

    def leading(self, state: Tensor, steps: int) -> Tensor:
        r""":math:`\lambda^t q v'h_0` summed over eigenvalues of the largest modulus (a complex pair is two)."""
        if self.defective:
            raise ShapeError("the leading term needs a basis of eigenvectors, got a defective matrix; use `at`")
        first = self.eigenvalues.abs() >= self.radius * (1 - 1e-9)
        coefficients = state.to(self.left.dtype) @ self.left[first].T
        return ((coefficients * self.eigenvalues[first] ** steps) @ self.right[:, first].T).real

    def norms(self, steps: int) -> Tensor:
        r"""``(steps + 1,)`` measured :math:`\|W^t\|_2`, t = 0, 1, ...: what really happens, first steps included."""
        power, found = torch.eye(len(self.weight), dtype=torch.float64, device=self.weight.device), []
        for _ in range(steps + 1):
            found.append(torch.linalg.matrix_norm(power, 2))
            power = self.weight @ power
        return torch.stack(found)

    def __str__(self) -> str:
        """The verdict, then a row for each of the ten largest eigenvalues."""
        leading = max((g for g in self.groups if abs(g.value) >= self.radius * (1 - 1e-6)), key=lambda g: g.block)
        times = f"t^{leading.block - 1} " if leading.block > 1 else ""
        how = "" if self.verdict == "stays" else f", as {times}{self.radius:.4g}^t"
        lines = [f"|lambda| = {self.radius:.4g}: {self.verdict}{how}"]
        if self.defective:
            lines.append("defective: fewer eigenvectors than dimensions, the powers themselves are used")
        elif self.condition > 100:
            lines.append(f"condition of the eigenvectors {self.condition:.1e}: W^t first grows far beyond |lambda|^t")
        lines.append(f"{'lambda':<13}{'|lambda|':<11}{'algebraic':<11}{'geometric':<12}{'after 10':<11}after 100")
        for group in self.groups[:10]:
            size = abs(group.value)
            value = f"{group.value.real:.4g}" + (f"{group.value.imag:+.4g}i" if abs(group.value.imag) > 1e-12 else "")
            grown = [math.comb(t, group.block - 1) * size ** (t - group.block + 1) if size else 0.0 for t in (10, 100)]
            lines.append(
                f"{value:<14}{size:<11.4g}{group.algebraic:>5}{group.geometric:>11}{grown[0]:>12.3g}{grown[1]:>12.3g}"
            )
        return "\n".join(lines)


def linear_recurrence(weight: Tensor) -> LinearRecurrence:
    r"""Takes a linear recurrence apart by its eigenvalues; explodes for :math:`|\lambda| > 1`, vanishes for < 1.

    A matrix without a basis of eigenvectors is said to be defective, found by counting ranks of
    :math:`(W - \lambda I)^m` (blocks of up to four; larger ones are split further by rounding than eigenvalues can be
    told apart). Then :math:`\|W^t\|` grows as :math:`t^{m-1} |\lambda|^t` for a block of m.

    Args:
        weight: ``(D, D)`` W, real; taken to float64. O(D^3), and O(D^3) more for each repeated eigenvalue.

    >>> turn = linear_recurrence(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> turn.verdict, turn.at(torch.tensor([1.0, 0.0]), 3)
    ('stays', tensor([ 0., -1.], dtype=torch.float64))
    """
    _check_square(weight)
    W = weight.detach().double()
    values, right = torch.linalg.eig(W)
    order = values.abs().argsort(descending=True, stable=True)
    values, right = values[order], right[:, order]
    groups = _groups(W, values)
    singular = torch.linalg.svdvals(right)
    condition = float(singular[0] / singular[-1]) if float(singular[-1]) else math.inf
    defective = any(group.geometric < group.algebraic for group in groups) or condition > 1e12
    left = torch.full_like(right, math.nan) if defective else torch.linalg.inv(right)
    return LinearRecurrence(W, values, right, left, groups, condition, defective)


def _groups(W: Tensor, values: Tensor) -> tuple[EigenvalueGroup, ...]:
    """Eigenvalues that lie together, each with the ranks of the powers of W - lambda."""
    scale = float(torch.linalg.matrix_norm(W, 2)) or 1.0
    left, groups = values.tolist(), []
    while left:
        members = [left.pop(0)]
        grew = True
        while grew:  # chains of near ones: rounding puts them on a circle
            near = [z for z in left if min(abs(z - m) for m in members) < _TOGETHER * scale]
            left = [z for z in left if z not in near]
            members += near
            grew = bool(near)
        value = complex(sum(members) / len(members))
        geometric, block = (1, 1) if len(members) == 1 else _structure(W, value, len(members), scale)
        if geometric == len(members) > 1 or len(members) == 1:
            value = members[0] if len(members) == 1 else value
        groups.append(EigenvalueGroup(complex(value), len(members), geometric, block))
    return tuple(groups)


def _structure(W: Tensor, value: complex, algebraic: int, scale: float) -> tuple[int, int]:
    """How many eigenvectors an eigenvalue has, and its largest Jordan block, from the kernels of powers."""
    D = len(W)
    shifted = W.to(torch.complex128) - value * torch.eye(D, dtype=torch.complex128, device=W.device)
    power, kernels = torch.eye(D, dtype=torch.complex128, device=W.device), [0]
    while len(kernels) <= algebraic:
        power = power @ shifted / scale
        kernels.append(int((torch.linalg.svdvals(power) < _ZERO).sum()))
        if kernels[-1] <= kernels[-2] or kernels[-1] >= algebraic:
            break
    if kernels[1] == 0:  # near but different eigenvalues, each with its own vector
        return algebraic, 1
    block = max(n for n in range(1, len(kernels)) if kernels[n] > kernels[n - 1])
    return min(kernels[1], algebraic), block


def _check_square(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or not weight.numel() or weight.is_complex():
        raise ShapeError(f"`weight` must be (D, D), real, with D at least 1, got {tuple(weight.shape)} {weight.dtype}")
