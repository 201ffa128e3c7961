"""Scores and lengths as a caller gives them to a chain, checked and in one type on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.inference.structures.inputs import require_tensor
from thalweg.kernels.chain_checks import check_lengths, counted, named
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.reference.recursion import looked_up


@lru_cache(maxsize=64)
def whole_lengths(batch: int, steps: int, device: torch.device) -> Tensor:
    """Lengths of items without padding; made once, since on a GPU a small kernel costs as much as a large one.

    >>> whole_lengths(2, 5, torch.device("cpu"))
    tensor([5, 5])
    """
    return torch.full((batch,), steps, dtype=torch.long, device=device)


def checked_lengths(lengths: Tensor | Sequence[int] | None, emissions: Tensor) -> Tensor:
    """(B,) int64 on the device of the emissions, each in 1 ... T, or a ShapeError.

    >>> checked_lengths([1, 2], torch.zeros(2, 2, 3))
    tensor([1, 2])
    """
    batch, steps, _ = emissions.shape
    if lengths is None:
        return whole_lengths(batch, steps, emissions.device)
    try:
        lengths = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"`lengths` must be integers (B,) with B = {batch}, got {type(lengths).__name__}") from error
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ShapeError(
            f"`lengths` must be integers (B,) with B = {batch} as in `emissions`, "
            f"got {tuple(lengths.shape)} {lengths.dtype}"
        )
    check_lengths(lengths, steps)
    # A copy: kernels follow lengths, and the caller's tensor may change.
    return lengths.to(device=emissions.device, dtype=torch.long, copy=True, memory_format=torch.contiguous_format)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the microseconds that this takes where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def potentials_of(
    emissions: Tensor,
    transitions: Tensor | SparseTransitions,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor,
) -> Chain:
    """The potentials in one floating type and on one device, or a ShapeError.

    >>> potentials_of(torch.zeros(1, 2, 3), torch.zeros(3, 3), None, None, torch.tensor([2])).start
    tensor([0., 0., 0.])
    """
    batch, steps, size = emissions.shape
    dtype = emissions.dtype if emissions.dtype in (torch.float32, torch.float64) else torch.float32
    moves: Tensor | SparseTransitions
    if isinstance(transitions, SparseTransitions):
        if transitions.size != size:
            raise ShapeError(
                f"sparse `transitions` must have size C = {size} as in `emissions`, got {transitions.size}"
            )
        moves = transitions.checked()
        moves = moves._replace(scores=_as(moves.scores, dtype))
        device = moves.scores.device
    else:
        require_tensor("transitions", transitions)
        shape = tuple(transitions.shape)
        if shape != (size, size) and shape not in ((batch, size, size), (batch, steps - 1, size, size)):
            raise ShapeError(
                f"`transitions` must be (C, C), (B, C, C) or (B, T-1, C, C) with B = {batch}, T = {steps}, C = {size} "
                f"as in `emissions`, got {tuple(transitions.shape)}"
            )
        moves = _as(transitions, dtype)
        device = moves.device
    here = emissions.device
    start, end = _edge("start", start, size, dtype, here), _edge("end", end, size, dtype, here)
    if device != here:
        raise ShapeError(f"`transitions` must lie on {here} as `emissions` does, got {device}")
    return Chain(_as(emissions, dtype), moves, start, end, lengths)


def _edge(name: str, scores: Tensor | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scores of first or last labels; zeros where none are given."""
    if scores is None:
        return torch.zeros(size, dtype=dtype, device=device)
    require_tensor(name, scores)
    if scores.shape != (size,):
        raise ShapeError(f"`{name}` must be (C,) with C = {size} as in `emissions`, got {tuple(scores.shape)}")
    if scores.device != device:
        raise ShapeError(f"`{name}` must lie on {device} as `emissions` does, got {scores.device}")
    return _as(scores, dtype)


def difference(q: Chain, p: Chain) -> Chain:
    """The scores of q less those of p, -inf where q alone forbids, 0 where p forbids; along the edges of p if sparse.

    >>> p = potentials_of(torch.zeros(1, 2, 3), torch.ones(3, 3), None, None, torch.tensor([2]))
    >>> difference(p, p).transitions.abs().sum()
    tensor(0.)
    """

    def less(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(torch.isneginf(y), 0.0, x - torch.where(torch.isneginf(y), 0.0, y))

    ours, theirs = p.transitions, q.transitions
    if isinstance(ours, SparseTransitions) and isinstance(theirs, SparseTransitions):
        moves = ours._replace(scores=less(looked_up(theirs, ours.sources, ours.targets), ours.scores))
    else:
        ours, theirs = (x.dense() if isinstance(x, SparseTransitions) else x for x in (ours, theirs))
        if {ours.dim(), theirs.dim()} == {3, 4}:  # one of them by item, the other by step
            ours, theirs = (x.unsqueeze(1) if x.dim() == 3 else x for x in (ours, theirs))
        moves = less(theirs, ours)
    return Chain(less(q.emissions, p.emissions), moves, less(q.start, p.start), less(q.end, p.end), p.lengths)


def lowest_and_highest(chain: Chain) -> tuple[float, float]:
    """Of all scores, padding included, NaN if any is; one wait for a GPU."""
    ends = [torch.stack(x.aminmax()) for _, x in named(chain) if x.numel()]
    lowest, highest = torch.stack(ends, 1).tolist()
    return (math.nan, math.nan) if any(map(math.isnan, highest)) else (min(lowest), max(highest))


def refuse_infinite(chain: Chain) -> None:
    """Raise a ShapeError for the first score of +inf that counts, with its place."""
    for name, scores in counted(chain):
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
    for name, scores in counted(chain):
        wrong = torch.isnan(scores)
        own = name == "emissions" or (name == "transitions" and scores.dim() > 2)
        found = found | (wrong.flatten(1).any(1) if own else wrong.any())
    return found
