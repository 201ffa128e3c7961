"""Where a memory's retrievals end: single patterns, metastable mixtures, the average of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.energies.hopfield.analysis import present_count, present_norms, shared_patterns
from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.errors import ShapeError

_HELD = 1 << 24  # weights held at once
_SHOWN = 12  # lines of a printed table


@dataclass(frozen=True)
class FixedPoints:
    """States of a memory and what they are made of.

    Attributes:
        state: ``(F, D)``.
        energies: ``(F,)``.
        residuals: ``(F,)``, how far an update moves the state: near 0 at a fixed point.
        kinds: F strings, ``"single"``, ``"metastable"`` or ``"global"``.
        members: F lists of the patterns that make up the state, the largest weight first.
        shares: F lists of their weights, relative to the sum of all.
        found_from: ``(F,)``, how many starts led there; ones for :func:`classify_states`.
        names: as in the memory.

    >>> print(classify_states(HopfieldMemory(torch.eye(2), beta=9.0), torch.tensor([[1.0, 0.0]])))
    1 state: 1 single, 0 metastable, 0 global
    energy  from  kind        patterns (shares)
    0.077   1     single      0 (1.00)
    """

    state: Tensor
    energies: Tensor
    residuals: Tensor
    kinds: list[str]
    members: list[list[int]]
    shares: list[list[float]]
    found_from: Tensor
    names: list[str] | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in ("single", "metastable", "global"))
        lines = [f"{len(self)} state{'' if len(self) == 1 else 's'}: {counts}"]
        lines += [f"{'energy':7} {'from':5} {'kind':11} patterns (shares)"] if len(self) else []
        for row in range(min(len(self), _SHOWN)):
            pairs = list(zip(self.members[row], self.shares[row], strict=True))
            made = ", ".join(f"{self._name(place)} ({share:.2f})" for place, share in pairs[:6])
            more = f", {len(pairs) - 6} more" if len(pairs) > 6 else ""
            energy, starts = float(self.energies[row]), int(self.found_from[row])
            lines.append(f"{energy:<7.4g} {starts:<5} {self.kinds[row]:11} {made}{more}")
        if len(self) > _SHOWN:
            lines.append(f"... {len(self) - _SHOWN} more")
        return "\n".join(lines)

    def _name(self, place: int) -> str:
        return str(place) if self.names is None else self.names[place]


def classify_states(memory: HopfieldMemory, state: Tensor, *, mass: float = 0.9, spread: float = 0.1) -> FixedPoints:
    """Say of each state ``(F, D)`` whether it is a single pattern, a metastable mixture of some, or the average of all.

    By its weights p, relative to their sum: ``"single"`` where one is at least ``mass``; otherwise ``"global"`` where
    the total variation distance from equal weights, sum |p_i - 1/N| / 2, is at most ``spread``; otherwise
    ``"metastable"``. The members are the fewest patterns whose weights reach ``mass``. Nothing checks that a state is a
    fixed point; ``residuals`` say it. Time O(F N (D + log N)), weights in blocks.

    >>> far_apart = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.0, 3.9]])
    >>> memory = HopfieldMemory(far_apart, beta=1.0)
    >>> classify_states(memory, memory.retrieve(far_apart).state).members
    [[0], [1, 2], [1, 2]]
    """
    if state.dim() != 2:
        raise ShapeError(f"`state` must be (F, D), got {tuple(state.shape)}")
    shared_patterns(memory)
    kinds: list[str] = []
    members: list[list[int]] = []
    shares: list[list[float]] = []
    with torch.no_grad():
        for part in state.split(max(1, _HELD // len(memory))):
            weights = memory.weights(part)
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            ordered, places = weights.sort(dim=1, descending=True)
            # A sum that is the mass but for rounding has reached it.
            sizes = ((ordered.cumsum(1) < mass - 1e-6).sum(1) + 1).clamp(max=len(memory)).tolist()
            even = (weights - 1 / present_count(memory)).abs()
            even = even if memory.mask is None else even.masked_fill(~memory.mask, 0.0)
            is_even = (even.sum(1) / 2 <= spread).tolist()
            kinds += [
                "single" if s == 1 else "global" if e else "metastable" for s, e in zip(sizes, is_even, strict=True)
            ]
            widest = max(sizes, default=0)
            pairs = zip(places[:, :widest].tolist(), ordered[:, :widest].tolist(), sizes, strict=True)
            for place, share, size in pairs:
                members.append(place[:size])
                shares.append(share[:size])
        residuals = (memory.update(state) - state).norm(dim=1)
        starts = torch.ones(len(state), dtype=torch.long, device=state.device)
        return FixedPoints(state, memory.energy(state), residuals, kinds, members, shares, starts, memory.names)


def fixed_points(
    memory: HopfieldMemory,
    starts: Tensor | None = None,
    *,
    max_steps: int = 1000,
    tol: float = 1e-5,
    merge: float = 1e-2,
    mass: float = 0.9,
    spread: float = 0.1,
) -> FixedPoints:
    """The different states in which retrieval ends, classified, by rising energy.

    Args:
        memory: with (N, D) patterns.
        starts: ``(S, D)``; by default all patterns that are present, and their mean.
        max_steps: as in ``retrieve``.
        tol: as in ``retrieve``.
        merge: states no further apart than this times the largest norm of a pattern count as one.
        mass: as in :func:`classify_states`.
        spread: as in :func:`classify_states`.
    Returns:
        :class:`FixedPoints`. Only what the starts lead to: minima that none of them finds are not listed.

    Time that of S retrievals and O(S^2 D).

    >>> patterns = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.0, 3.9]])
    >>> fixed_points(HopfieldMemory(patterns, beta=1.0)).kinds
    ['metastable', 'single']
    """
    patterns = shared_patterns(memory)
    with torch.no_grad():
        if starts is None:
            present = patterns if memory.mask is None else patterns[memory.mask]
            starts = torch.cat([present, present.mean(0, keepdim=True)])
        state = memory.retrieve(starts, max_steps, tol).state
        near = (
            torch.cdist(state, state, compute_mode="donot_use_mm_for_euclid_dist")
            <= merge * present_norms(memory).amax()
        )
        first = near.int().argmax(1)  # each state goes with the first that is near
        kept, counts = first.unique(return_counts=True)
        order = memory.energy(state[kept]).argsort(stable=True)
        found = classify_states(memory, state[kept[order]], mass=mass, spread=spread)
    return replace(found, found_from=counts[order])
