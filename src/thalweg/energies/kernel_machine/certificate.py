"""The certificate of a large-margin machine: the residual of every condition of its optimum, and the duality gap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Condition:
    """One condition of the optimum and by how much it is missed.

    Attributes:
        name: what is called for; at: the point that misses it most, or None where it is one of all points.
        residual: 0 where it holds exactly; allowed: the largest that still counts as holding.

    >>> Condition("sum a t = 0", 1e-9, 1e-3).holds
    True
    """

    name: str
    residual: float
    allowed: float
    at: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the residual is allowed; NaN is not."""
        return self.residual <= self.allowed


@dataclass(frozen=True)
class PairReport:
    """What one boundary between two classes is worth, or one regressor.

    Attributes:
        classes: the class below 0 and the one above; of a regressor where y lies.
        conditions: dual and primal feasibility, both complementary slacknesses, the balance of multipliers, and for a
            linear kernel w itself.
        support: ``(S,)``, places in the training set of the points with a multiplier above 0.
        on_margin: ``(M,)``, of those on the margin, whether they have a multiplier or not.
        margin: 2 / |w|, the width between f(x) = -1 and f(x) = 1; of a regressor 2 epsilon / |w|.
        primal, dual: |w|^2 / 2 + sum C slack, and sum a - |w|^2 / 2.

    >>> import numpy as np
    >>> report = certify(np.array([1.0, -1.0]), np.array([0.5, 0.5]), np.full(2, np.inf), np.array([1.0, -1.0]), 0.0)
    >>> report.margin, report.gap, report.holds
    (2.0, 0.0, True)
    """

    classes: tuple[Any, Any]
    conditions: tuple[Condition, ...]
    support: np.ndarray
    on_margin: np.ndarray
    margin: float
    primal: float
    dual: float

    @property
    def gap(self) -> float:
        """Primal less dual objective: how far from the optimum either can be."""
        return self.primal - self.dual

    @property
    def holds(self) -> bool:
        """Whether every condition does."""
        return all(condition.holds for condition in self.conditions)


@dataclass(frozen=True)
class KKTReport:
    """The conditions of Karush, Kuhn and Tucker at a fitted machine, a :class:`PairReport` for each two classes.

    Printed, it is a table. Of two classes, the report has the attributes of its only pair.

    >>> from thalweg.energies import KernelSVC
    >>> points = [[1, 1], [2, 2], [2, 0], [0, 0], [1, 0], [0, 1]]
    >>> print(KernelSVC("linear", C=math.inf).fit(points, [1, 1, 1, -1, -1, -1]).kkt_report())
    -1 | 1: margin 0.707107, primal 4, dual 4, gap 0; 3 support vectors, 4 points on the margin
      condition                       residual  allowed   at  holds
      a >= 0                          0         0.008     -   yes
      t f(x) >= 1                     0         0.002     -   yes
      a (t f(x) - 1) = 0              0         0.008     -   yes
      sum a t = 0                     0         0.008     -   yes
      w = sum a t x                   0         0.008     -   yes
    """

    pairs: tuple[PairReport, ...]

    @property
    def holds(self) -> bool:
        """Whether every condition of every pair does."""
        return all(pair.holds for pair in self.pairs)

    @property
    def gap(self) -> float:
        """The largest gap of a pair."""
        return max(pair.gap for pair in self.pairs)

    @property
    def worst(self) -> Condition:
        """The condition that is missed most, measured by what is allowed."""
        conditions = [condition for pair in self.pairs for condition in pair.conditions]
        return max(conditions, key=lambda each: each.residual / each.allowed)

    @property
    def only(self) -> PairReport:
        """The pair of a machine of two classes."""
        if len(self.pairs) != 1:
            raise ValueError(f"{len(self.pairs)} pairs of classes: look at `pairs`")
        return self.pairs[0]

    def rows(self) -> list[dict[str, str]]:
        """The conditions of all pairs as rows of a table of words."""
        return [
            {
                "classes": f"{pair.classes[0]} | {pair.classes[1]}",
                "condition": each.name,
                "residual": f"{each.residual:.3g}",
                "allowed": f"{each.allowed:.3g}",
                "at": "-" if each.at is None else str(each.at),
                "holds": "yes" if each.holds else "NO",
            }
            for pair in self.pairs
            for each in pair.conditions
        ]

    def __str__(self) -> str:
        lines = []
        for pair in self.pairs:
            lines.append(
                f"{pair.classes[0]} | {pair.classes[1]}: margin {pair.margin:.6g}, primal {pair.primal:.6g}, "
                f"dual {pair.dual:.6g}, gap {pair.gap:.3g}; {len(pair.support)} support vectors, "
                f"{len(pair.on_margin)} points on the margin"
            )
            lines.append(f"  {'condition':<32}{'residual':<10}{'allowed':<10}{'at':<4}holds")
            for row in KKTReport((pair,)).rows():
                lines.append(
                    f"  {row['condition']:<32}{row['residual']:<10}{row['allowed']:<10}{row['at']:<4}{row['holds']}"
                )
        return "\n".join(lines)


def certify(
    t: np.ndarray,
    alpha: np.ndarray,
    C: np.ndarray,
    decision: np.ndarray,
    intercept: float,
    *,
    classes: tuple[Any, Any] = (-1, 1),
    places: np.ndarray | None = None,
    weights: tuple[np.ndarray, np.ndarray] | None = None,
    tolerance: float = 1e-3,
) -> PairReport:
    r"""Check the optimum of a soft margin, or of a hard one where C is infinite.

    .. math::
        \min_{w, b, \xi} \tfrac12 |w|^2 + \sum_i C_i \xi_i
        \quad\text{with}\quad t_i f(x_i) \ge 1 - \xi_i,\; \xi_i \ge 0, \qquad f(x) = w' \phi(x) + b

    At the optimum there are multipliers a with :math:`w = \sum_i a_i t_i \phi(x_i)` that satisfy all conditions listed.
    The slack is :math:`\xi_i = \max(0, 1 - t_i f(x_i))`; |w|^2 is :math:`\sum_i a_i t_i (f(x_i) - b)`, so that nothing
    but the decisions is needed of the kernel. A hard margin leaves no slack: its primal objective is that of w scaled
    up until every point keeps the margin, infinite where none does that.

    Args:
        t: ``(N,)`` of -1 and 1; alpha, C, decision: multipliers, their bounds and f(x), ``(N,)``.
        intercept: b.
        classes: names of -1 and 1; places: ``(N,)``, of these points in the training set.
        weights: w as the machine has it, and the sum of a t x.
        tolerance: allowed residual of a margin; times the largest multiplier, of a condition of multipliers.

    >>> t, alpha = np.array([1.0, -1.0]), np.array([0.5, 0.4])
    >>> [each.name for each in certify(t, alpha, np.ones(2), t, 0.0).conditions if not each.holds]
    ['sum a t = 0']
    """
    places = np.arange(len(t)) if places is None else places
    margins, soft = t * decision, not np.isinf(C).all()
    slack = np.maximum(0.0, 1.0 - margins) if soft else np.zeros(len(t))
    size = max(float(alpha.max(initial=0.0)), np.finfo(float).tiny)
    missed = {
        "a >= 0": (-alpha, size),
        "a <= C": (alpha - C, size),
        # Points below C have no slack.
        "t f(x) >= 1 where a < C": (np.where(alpha < C * (1 - 1e-9), 1.0 - margins, 0.0), 1.0),
        "a (t f(x) - 1 + slack) = 0": (alpha * np.abs(margins - 1.0 + slack), size),
        "(C - a) slack = 0": (np.where(slack > 0, C - alpha, 0.0) * slack, float(C.max())),
        "sum a t = 0": (abs(float(np.sum(alpha * t))), size),
    }
    if not soft:
        missed = {_HARD.get(name, name): each for name, each in missed.items() if name not in _SOFT}
    if weights is not None:
        missed["w = sum a t x"] = (float(np.abs(weights[0] - weights[1]).max()), size)
    squared = max(0.0, float(np.sum(alpha * t * (decision - intercept))))
    least = min(1.0, float(margins.min(initial=1.0)))
    hard = squared / 2 / least**2 if least > 0 else math.inf
    return PairReport(
        classes,
        tuple(_condition(name, each, tolerance * scale, places) for name, (each, scale) in missed.items()),
        places[alpha > 0],
        places[np.abs(margins - 1.0) <= 10 * tolerance],
        2.0 / math.sqrt(squared) if squared else math.inf,
        squared / 2 + float(np.sum(C * slack)) if soft else hard,
        float(np.sum(alpha)) - squared / 2,
    )


def certify_regression(
    y: np.ndarray,
    c: np.ndarray,
    C: np.ndarray,
    decision: np.ndarray,
    intercept: float,
    *,
    epsilon: float,
    places: np.ndarray | None = None,
    weights: tuple[np.ndarray, np.ndarray] | None = None,
    tolerance: float = 1e-3,
) -> PairReport:
    r"""Check the optimum of support vector regression.

    .. math:: \min_{w, b} \tfrac12 |w|^2 + \sum_i C_i \xi_i, \qquad
        \xi_i = \max(0, |y_i - f(x_i)| - \epsilon), \qquad f(x) = w' \phi(x) + b

    At the optimum there are c with :math:`w = \sum_i c_i \phi(x_i)` that satisfy all conditions listed.

    Args:
        y, c, C, decision: numbers, coefficients, their bounds and f(x), ``(N,)``; intercept: b.
        epsilon: as the machine has it; places: ``(N,)``, of these points in the training set.
        weights: w as the machine has it, and the sum of c x.
        tolerance: allowed residual of f; times the largest coefficient, of a condition of coefficients.

    >>> y, c = np.array([0.0, 1.0]), np.array([-0.8, 0.8])
    >>> certify_regression(y, c, np.ones(2), np.array([0.1, 0.9]), 0.1, epsilon=0.1).holds
    True
    """
    missing = y - decision
    slack = np.maximum(0.0, np.abs(missing) - epsilon)
    size = max(float(np.abs(c).max(initial=0.0)), np.finfo(float).tiny)
    inside = np.abs(c) < C * (1 - 1e-9)
    missed: dict[str, tuple[Any, float]] = {
        "|c| <= C": (np.abs(c) - C, size),
        "|y - f| <= eps. where |c| < C": (np.where(inside, slack, 0.0), 1.0),
        "c (|y - f| - eps. - slack) = 0": (np.abs(c * (np.sign(c) * missing - epsilon - slack)), size),
        "(C - |c|) slack = 0": ((C - np.abs(c)) * slack, float(C.max())),
        "sum c = 0": (abs(float(c.sum())), size),
    }
    if weights is not None:
        missed["w = sum c x"] = (float(np.abs(weights[0] - weights[1]).max()), size)
    squared = max(0.0, float(np.sum(c * (decision - intercept))))
    places = np.arange(len(y)) if places is None else places
    return PairReport(
        ("y below f", "y above f"),
        tuple(_condition(name, each, tolerance * scale, places) for name, (each, scale) in missed.items()),
        places[c != 0],
        places[np.abs(np.abs(missing) - epsilon) <= 10 * tolerance],
        2.0 * epsilon / math.sqrt(squared) if squared else math.inf,
        squared / 2 + float(np.sum(C * slack)),
        float(y @ c) - epsilon * float(np.abs(c).sum()) - squared / 2,
    )


# A hard margin has no slack: two of the conditions say nothing, two are shorter.
_SOFT = ("a <= C", "(C - a) slack = 0")
_HARD = {"t f(x) >= 1 where a < C": "t f(x) >= 1", "a (t f(x) - 1 + slack) = 0": "a (t f(x) - 1) = 0"}


def _condition(name: str, missed: np.ndarray | float, allowed: float, places: np.ndarray) -> Condition:
    """The point that misses a condition most, or the condition of all points together."""
    if not isinstance(missed, np.ndarray):
        return Condition(name, missed, allowed)
    at = int(missed.argmax())
    # Not "more than 0", so that NaN is missed too.
    return (
        Condition(name, 0.0, allowed)
        if missed[at] <= 0
        else Condition(name, float(missed[at]), allowed, int(places[at]))
    )
