"""What a compiled kernel would follow or pass over in silence, looked at before it is called."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.potentials import Chain, SparseTransitions


def check_lengths(lengths: Tensor, steps: int) -> None:
    """Raise a ShapeError unless every length lies in 1 ... T."""
    found = lengths.tolist()  # quicker than any look at a few numbers by torch
    if found and (min(found) < 1 or max(found) > steps):
        bad = next(item for item, length in enumerate(found) if not 1 <= length <= steps)
        raise ShapeError(f"`lengths` must lie in 1..T with T = {steps}, got {found[bad]} at batch item {bad}")


def _named(chain: Chain) -> tuple[tuple[str, Tensor], ...]:
    given = {"emissions": chain.emissions, "transitions": chain.moves, "start": chain.start, "end": chain.end}
    return tuple((name, scores.detach()) for name, scores in given.items())


def _counted(chain: Chain) -> Iterator[tuple[str, Tensor]]:
    """Names and scores, with 0 for what lies past a length."""
    inside = torch.arange(chain.steps, device=chain.lengths.device) < chain.lengths.unsqueeze(1)
    for name, scores in _named(chain):
        if name == "emissions":
            scores = torch.where(inside.unsqueeze(-1), scores, 0.0)
        elif name == "transitions" and scores.dim() == 4:
            scores = torch.where(inside[:, 1:, None, None], scores, 0.0)
        yield name, scores


def sound(chain: Chain) -> bool:
    """Whether no score of a chain on the CPU that counts is NaN or +inf; -inf is a constraint.

    One look at each number; padding is told apart only where one was found.
    """
    # A maximum is NaN if any number is. NumPy has it in a few microseconds and without a thread to wait for.
    if all(_highest(x) < math.inf for x in (chain.emissions, chain.moves, chain.start, chain.end)):
        return True
    return all(_highest(x) < math.inf for _, x in _counted(chain))


def _highest(scores: Tensor) -> float:
    return np.maximum.reduce(scores.detach().numpy(), axis=None, initial=-math.inf)


def lowest_and_highest(chain: Chain) -> tuple[float, float]:
    """Of all scores, padding included, NaN if any is; one wait for a GPU."""
    ends = [torch.stack(x.aminmax()) for _, x in _named(chain) if x.numel()]
    lowest, highest = torch.stack(ends, 1).tolist()
    return (math.nan, math.nan) if any(map(math.isnan, highest)) else (min(lowest), max(highest))


def refuse_infinite(chain: Chain) -> None:
    """Raise a ShapeError for the first score of +inf that counts, with its place."""
    for name, scores in _counted(chain):
        found = (scores == math.inf).nonzero()
        if len(found):
            where = _place(name, chain.transitions, found[0].tolist())
            raise ShapeError(
                f"scores must be below +inf, got +inf in `{name}` at {where}; a score of +inf makes every "
                "probability undefined: use -inf to forbid the others instead"
            )


def _place(name: str, moves: Tensor | SparseTransitions, at: list[int]) -> str:
    if name == "emissions":
        return f"position {at[1]}, label {at[2]} of batch item {at[0]}"
    if name in ("start", "end"):
        return f"label {at[0]}"
    if isinstance(moves, SparseTransitions):
        return f"edge {at[-1]} ({int(moves.sources[at[-1]])} -> {int(moves.targets[at[-1]])})"
    where = f"{at[-2]} -> {at[-1]}" + (f" from position {at[1]}" if len(at) == 4 else "")
    return where + (f" of batch item {at[0]}" if len(at) > 2 else "")


def nan_items(chain: Chain) -> Tensor:
    """Which items have a score of NaN that counts, (B,) bool."""
    batch = len(chain.emissions)
    found = torch.zeros(batch, dtype=torch.bool, device=chain.emissions.device)
    for name, scores in _counted(chain):
        wrong = torch.isnan(scores)
        own = name == "emissions" or (name == "transitions" and scores.dim() > 2)
        found = found | (wrong.flatten(1).any(1) if own else wrong.any())
    return found
