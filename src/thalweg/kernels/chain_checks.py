"""What a compiled kernel would follow or pass over in silence, looked at before it is called."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels.potentials import Chain


def check_lengths(lengths: Tensor, steps: int) -> None:
    """Raise a ShapeError unless every length lies in 1 ... T."""
    found = lengths.tolist()  # quicker than any look at a few numbers by torch
    if found and (min(found) < 1 or max(found) > steps):
        bad = next(item for item, length in enumerate(found) if not 1 <= length <= steps)
        raise ShapeError(f"`lengths` must lie in 1..T with T = {steps}, got {found[bad]} at batch item {bad}")


def named(chain: Chain) -> tuple[tuple[str, Tensor], ...]:
    """The scores of a chain by the names that a caller gives them."""
    given = {"emissions": chain.emissions, "transitions": chain.moves, "start": chain.start, "end": chain.end}
    return tuple((name, scores.detach()) for name, scores in given.items())


def counted(chain: Chain) -> Iterator[tuple[str, Tensor]]:
    """Names and scores, with 0 for what lies past a length."""
    inside = torch.arange(chain.steps, device=chain.lengths.device) < chain.lengths.unsqueeze(1)
    for name, scores in named(chain):
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
    return all(_highest(x) < math.inf for _, x in counted(chain))


def _highest(scores: Tensor) -> float:
    return np.maximum.reduce(scores.detach().numpy(), axis=None, initial=-math.inf)
