"""What the matrix of a recurrence says before it is run: a bound on gradients, and growth by eigenvalues."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.errors import ShapeError

# Eigenvectors whose matrix has a larger condition are no basis: rounding tears an m-fold eigenvalue that lacks vectors
# into m that lie eps^(1/m) apart, with vectors as near to one another.
_DEFECTIVE = 1e7


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
class LinearRecurrence:
    r"""What :math:`h_t = W h_{t-1}` does: :math:`h_t = Q \Lambda^t Q^{-1} h_0 \approx \lambda_1^t\, q_1 v_1' h_0`.

    Attributes:
        weight: ``(D, D)`` W, float64.
        eigenvalues: ``(D,)`` complex, largest modulus first.
        right: ``(D, D)`` Q, an eigenvector a column; left: ``(D, D)`` :math:`Q^{-1}`, a row each, NaN where there is
            none.
        condition: of Q; where it is large, eigenvalues say little about the first steps.
        defective: whether there are fewer eigenvectors than dimensions, to working precision: Q is then no basis.

    >>> print(linear_recurrence(torch.tensor([[1.1, 0.0], [0.0, 0.9]])))
    |lambda| = 1.1: explodes, as 1.1^t
    lambda          |lambda|    after 10   after 100
    1.1                  1.1        2.59    1.38e+04
    0.9                  0.9       0.349    2.66e-05
    """

    weight: Tensor
    eigenvalues: Tensor
    right: Tensor
    left: Tensor
    condition: float
    defective: bool

    @property
    def radius(self) -> float:
        """The largest modulus of an eigenvalue."""
        return float(self.eigenvalues[0].abs())

    @property
    def verdict(self) -> str:
        """``explodes``, ``vanishes`` or ``stays``; on the circle powers of a defective matrix grow (explode)."""
        tolerance = 1e-9 if not self.defective else 1e-7
        if self.radius > 1 + tolerance:
            return "explodes"
        if self.radius < 1 - tolerance:
            return "vanishes"
        return "explodes" if self.defective else "stays"

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
        how = "" if self.verdict == "stays" else f", as {self.radius:.4g}^t"
        lines = [f"|lambda| = {self.radius:.4g}: {self.verdict}{how}"]
        if self.defective:
            lines.append("defective: fewer eigenvectors than dimensions, W^t grows by powers of t beside |lambda|^t")
        elif self.condition > 100:
            lines.append(f"condition of the eigenvectors {self.condition:.1e}: W^t first grows far beyond |lambda|^t")
        lines.append(f"{'lambda':<14}{'|lambda|':>10}{'after 10':>12}{'after 100':>12}")
        for value in self.eigenvalues[:10].tolist():
            said = f"{value.real:.4g}" + (f"{value.imag:+.4g}i" if abs(value.imag) > 1e-12 else "")
            size = abs(value)
            lines.append(f"{said:<14}{size:>10.4g}{size**10:>12.3g}{size**100:>12.3g}")
        return "\n".join(lines)


def linear_recurrence(weight: Tensor) -> LinearRecurrence:
    r"""Takes a linear recurrence apart by its eigenvalues; explodes for :math:`|\lambda| > 1`, vanishes for < 1.

    A matrix whose eigenvectors are no basis, to working precision, is said to be defective: :math:`\|W^t\|` then grows
    as :math:`t^{m-1} |\lambda|^t` for a Jordan block of m.

    Args:
        weight: ``(D, D)`` W, real; taken to float64. O(D^3).

    >>> turn = linear_recurrence(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> turn.verdict, turn.at(torch.tensor([1.0, 0.0]), 3)
    ('stays', tensor([ 0., -1.], dtype=torch.float64))
    """
    _check_square(weight)
    W = weight.detach().double()
    values, right = torch.linalg.eig(W)
    order = values.abs().argsort(descending=True, stable=True)
    values, right = values[order], right[:, order]
    singular = torch.linalg.svdvals(right)
    condition = float(singular[0] / singular[-1]) if float(singular[-1]) else math.inf
    defective = condition > _DEFECTIVE
    left = torch.full_like(right, math.nan) if defective else torch.linalg.inv(right)
    return LinearRecurrence(W, values, right, left, condition, defective)


def _check_square(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or not weight.numel() or weight.is_complex():
        raise ShapeError(f"`weight` must be (D, D), real, with D at least 1, got {tuple(weight.shape)} {weight.dtype}")
