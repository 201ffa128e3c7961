"""What can be said of a memory without asking it: separation, margins, error bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ConfigError
from thalweg.kernels import memory as kernels
from thalweg.layers.hopfield.separation_maps import Entmax, KSubsets, NormMax, Separation, Softmax


def pattern_separation(patterns: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""How far each pattern stands out: Delta_i = min_{j != i} (x_i'x_i - x_i'x_j), ``(N,)``.

    Args:
        patterns: ``(N, D)``.
        mask: ``(N,)`` bool, true where a pattern is present.
    Returns:
        Delta, without gradient: infinite for a single pattern, at most 0 for one that others outdo, NaN for an absent
        one.

    Time O(N^2 D) in blocks. Ramsauer et al. (2021), definition 2.

    >>> pattern_separation(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    tensor([2., 0.])
    """
    scores, places = kernels.nearest(patterns, patterns, 2, mask=mask)
    itself = places[:, 0] == torch.arange(len(patterns), device=patterns.device)
    rival = torch.where(itself, scores[:, 1], scores[:, 0])
    wide = patterns.to(rival.dtype)
    found = (wide * wide).sum(1) - rival
    return found if mask is None else found.masked_fill(~mask, math.nan)


def margin(separation: Separation) -> float:
    """The margin m of a separation: a score that leads all others by at least m, and only such a one, gets weight 1.

    1 / (alpha - 1) for alpha-entmax (1 for sparsemax), 1 for norm-max, infinite for the softmax. For k-subsets it is 1,
    by which the k-th largest score leads the next, and the k patterns get weight 1 each. Blondel, Martins and Niculae
    (2020), "Learning with Fenchel-Young losses"; Santos et al. (2024).

    >>> from thalweg.layers.hopfield.separation_maps import Entmax
    >>> margin(Entmax(1.5))
    2.0
    """
    if isinstance(separation, Softmax):
        return math.inf
    if isinstance(separation, Entmax):
        alpha = float(torch.as_tensor(separation.alpha).min())
        return 1.0 / (alpha - 1.0) if alpha > 1.0 else math.inf
    if isinstance(separation, NormMax | KSubsets):
        return 1.0
    raise ConfigError(
        f"no margin is known for {type(separation).__name__}; give softmax, entmax, norm-max or k-subsets"
    )


class ExactRetrieval(NamedTuple):
    """Which patterns a query gives in one step, and whether it gives them exactly.

    Attributes:
        indices: ``(B, k)``, the best patterns by score, k the size of the subsets or 1.
        gap: ``(B,)``, by how much their least score q'x leads the next.
        exact: ``(B,)`` bool, whether the gap is at least m / b.

    >>> ExactRetrieval(torch.tensor([[1]]), torch.tensor([2.0]), torch.tensor([True])).exact
    tensor([True])
    """

    indices: Tensor
    gap: Tensor
    exact: Tensor


def exact_retrieval(memory: HopfieldMemory, q: Tensor) -> ExactRetrieval:
    """Whether one step from each query ``(B, D)`` gives a pattern exactly: q'(x_i - x_j) >= m / b for all j != i.

    Sufficient and necessary, with m the separation's :func:`margin`; what is given exactly is the mixture X'p = x_i, on
    which the post-transform acts. Santos et al. (2024), "Sparse and structured Hopfield networks". Time O(B N D), in
    blocks.

    >>> memory = HopfieldMemory(torch.eye(2), beta=2.0, separation="sparsemax")
    >>> exact_retrieval(memory, torch.tensor([[0.9, 0.1], [0.6, 0.4]])).exact
    tensor([ True, False])
    """
    shared_patterns(memory)
    needed, k = margin(memory.separation), getattr(memory.separation, "k", 1)
    scores, index, _ = memory.nearest(q, k + 1)
    gap = scores[..., k - 1] - scores[..., k]
    return ExactRetrieval(index[..., :k], gap, memory.beta_value * gap >= needed)


@dataclass(frozen=True)
class MemoryReport:
    r"""What holds for each pattern of a memory; M is the largest norm, N the number of patterns present.

    Attributes:
        beta: b.
        count: N.
        radius: M.
        separation: ``(N,)`` Delta_i; NaN for absent patterns, which are never True below.
        required: 2 / (b N) + log(2 (N - 1) N b M^2) / b, the separation that makes a pattern well separated.
        well_separated: ``(N,)`` Delta_i >= required. Then a softmax step maps the ball of radius 1 / (b N M) around x_i
            into itself and contracts there: it holds exactly one fixed point, to which queries in it converge
            (Ramsauer et al., 2021, appendix). None for other separations.
        ball: 1 / (b N M).
        error_bound: ``(N,)``, 2 (N - 1) exp(-b Delta_i) M and 2 M at most, which ||x_i - X' softmax(b X x_i)|| does not
            exceed: each other weight is at most the exponential (theorem 5 there); None for other separations.
        margin: m of the separation, infinite where one step can never be exact.
        stationary: ``(N,)`` Delta_i >= m / b, exactly when x_i retrieves itself in one step.
        exact_within: ``(N,)`` epsilon_i = (Delta_i - m / b) / (2 M): every query at most so far from x_i gives x_i
            exactly in one step, for Delta_i >= m / b + 2 M epsilon_i; NaN where x_i itself does not.

    >>> print(analyse_memory(HopfieldMemory(4.0 * torch.eye(3), beta=1.0, separation="sparsemax")))
    memory: 3 patterns, beta 1, largest norm 4, sparsemax
    separation: least 16, median 16, largest 16
    exact in one step (separation at least 1): 3 of 3 patterns, within a distance of 1.875 to 1.875
    """

    beta: float
    count: int
    radius: float
    separation: Tensor
    required: float
    well_separated: Tensor | None
    ball: float
    error_bound: Tensor | None
    margin: float
    stationary: Tensor
    exact_within: Tensor
    title: str = ""

    def __str__(self) -> str:
        known = self.separation[~self.separation.isnan()]
        least, median, largest = (float(value) for value in (known.min(), known.median(), known.max()))
        lines = [
            f"memory: {self.count} patterns, beta {self.beta:.4g}, largest norm {self.radius:.4g}, {self.title}",
            f"separation: least {least:.4g}, median {median:.4g}, largest {largest:.4g}",
        ]
        if self.well_separated is not None and self.error_bound is not None:
            worst = self.error_bound[~self.separation.isnan()].max()
            lines += [
                f"well separated (separation at least {self.required:.4g}): {int(self.well_separated.sum())} of "
                f"{self.count} patterns, each alone within a distance of {self.ball:.4g}",
                f"error of one step from a pattern: at most {float(worst):.4g}",
            ]
        if math.isfinite(self.margin):
            within = self.exact_within[self.stationary]
            reach = (
                f", within a distance of {float(within.min()):.4g} to {float(within.max()):.4g}" if len(within) else ""
            )
            lines.append(
                f"exact in one step (separation at least {self.margin / self.beta:.4g}): {len(within)} of {self.count} "
                f"patterns{reach}"
            )
        return "\n".join(lines)


def analyse_memory(memory: HopfieldMemory) -> MemoryReport:
    """Separation, well-separation, error bounds and exact retrieval of each pattern of a memory with (N, D) patterns.

    The statements are about the mixture X'p, the state under the identity. Subsets of k > 1 are not single patterns:
    their report says nothing of exactness. Time O(N^2 D), in blocks.

    >>> analyse_memory(HopfieldMemory(4.0 * torch.eye(3), beta=1.0)).well_separated
    tensor([True, True, True])
    """
    patterns = shared_patterns(memory)
    with torch.no_grad():
        delta = pattern_separation(patterns, memory.mask)
        count, beta, radius = present_count(memory), memory.beta_value, float(present_norms(memory).amax())
        single = not isinstance(memory.separation, KSubsets) or memory.separation.k == 1
        gap = margin(memory.separation) if single else math.inf
        spread = 2 * (count - 1) * count * beta * radius**2
        required = 2 / (beta * count) + math.log(spread) / beta if spread > 0 else -math.inf
        soft = isinstance(memory.separation, Softmax)
        bound = 2 * (count - 1) * torch.exp(-beta * delta) * radius
        stationary = (delta >= gap / beta) & ~delta.isnan()
        room = (delta - gap / beta) / (2 * radius) if radius > 0 else torch.full_like(delta, math.inf)
        return MemoryReport(
            beta=beta,
            count=count,
            radius=radius,
            separation=delta,
            required=required,
            well_separated=delta >= required if soft else None,
            ball=1 / (beta * count * radius) if radius > 0 else math.inf,
            error_bound=torch.where(delta == math.inf, 0.0, bound).clamp(max=2 * radius) if soft else None,
            margin=gap,
            stationary=stationary,
            exact_within=room.masked_fill(~stationary, math.nan),
            title=str(memory.separation),
        )


def shared_patterns(memory: HopfieldMemory) -> Tensor:
    """The patterns (N, D), without gradient; an error for a batched memory.

    >>> shared_patterns(HopfieldMemory(torch.eye(2))).shape
    torch.Size([2, 2])
    """
    if memory.is_batched:
        raise ConfigError("a memory with patterns (N, D) is needed, got (B, N, D); analyse the items one by one")
    return memory.patterns.detach()


def present_count(memory: HopfieldMemory) -> int:
    """How many patterns are present.

    >>> present_count(HopfieldMemory(torch.eye(2), mask=torch.tensor([True, False])))
    1
    """
    return len(memory) if memory.mask is None else int(memory.mask.sum())


def present_norms(memory: HopfieldMemory) -> Tensor:
    """||x_i|| ``(N,)``, 0 for absent patterns.

    >>> present_norms(HopfieldMemory(torch.eye(2)))
    tensor([1., 1.])
    """
    norms = memory.patterns.detach().norm(dim=1)
    return norms if memory.mask is None else norms.masked_fill(~memory.mask, 0.0)
