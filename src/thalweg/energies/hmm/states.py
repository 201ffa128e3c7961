"""The Markov chain of states: where it begins and how it moves, as parameters."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.emissions import hold
from thalweg.energies.hmm.probabilities import floats, from_counts, row_logarithms
from thalweg.errors import ConfigError, ShapeError
from thalweg.kernels.potentials import SparseTransitions


class States(nn.Module):
    """pi and P of C states as logits: a softmax over each row makes them probabilities, whatever an optimiser does.

    A logit of -inf is structure: its gradient is 0, so it stays. Tensors that are part of a graph already are used as
    they are, so that derivatives reach the caller's own.

    Args:
        log_initial: ``(C,)``; log_transition: ``(C, C)``, or :class:`~thalweg.inference.SparseTransitions`.
        log_duration: ``(C, K)``, of how long a state lasts; None where each position is a move of its own.

    >>> chain = States(torch.zeros(1), torch.zeros(1, 1))
    >>> [name for name, _ in chain.named_parameters()]
    ['initial', 'transition']
    """

    sources: Tensor
    targets: Tensor

    def __init__(
        self, log_initial: Tensor, log_transition: Tensor | SparseTransitions, log_duration: Tensor | None = None
    ) -> None:
        super().__init__()
        self.size = len(log_initial)
        self.sparse = isinstance(log_transition, SparseTransitions)
        if isinstance(log_transition, SparseTransitions):
            self.register_buffer("sources", log_transition.sources)
            self.register_buffer("targets", log_transition.targets)
            log_transition = log_transition.scores
        hold(self, "initial", log_initial)
        hold(self, "transition", log_transition)
        self.lasting = log_duration is not None
        if log_duration is not None:
            hold(self, "duration", log_duration)

    @property
    def log_initial(self) -> Tensor:
        """log pi, ``(C,)``."""
        initial = cast(Tensor, self.initial)
        return initial.log_softmax(-1) if isinstance(initial, nn.Parameter) else initial

    @property
    def log_transition(self) -> Tensor | SparseTransitions:
        """log P, ``(C, C)`` or along its edges."""
        logits = cast(Tensor, self.transition)
        if not self.sparse:
            return logits.log_softmax(-1) if isinstance(logits, nn.Parameter) else logits
        if isinstance(logits, nn.Parameter):
            top = torch.full_like(logits[:1], float("-inf")).expand(self.size)
            top = top.scatter_reduce(0, self.sources, logits.detach(), "amax")[self.sources]
            total = logits.new_zeros(self.size).index_add(0, self.sources, (logits - top).exp())
            logits = logits - top - total.log()[self.sources]
        return SparseTransitions(self.sources, self.targets, logits, self.size)

    @property
    def log_duration(self) -> Tensor | None:
        """log p(d | state), ``(C, K)`` for d = 1 .. K positions, or None."""
        if not self.lasting:
            return None
        duration = cast(Tensor, self.duration)
        return duration.log_softmax(-1) if isinstance(duration, nn.Parameter) else duration

    @torch.no_grad()
    def maximise(self, first: Tensor, moves: Tensor, pseudo_count: float, durations: Tensor | None = None) -> None:
        """The M-step: expected counts of first states ``(C,)``, moves ``(C, C)`` or ``(E,)``, durations ``(C, K)``."""
        if durations is not None:
            duration = cast(Tensor, self.duration)
            duration.copy_(from_counts(durations.double(), duration, pseudo_count))
        initial, transition = cast(Tensor, self.initial), cast(Tensor, self.transition)
        if self.sparse:
            initial.copy_(from_counts(first.double(), initial, pseudo_count))
            transition.copy_(from_counts(moves.double(), transition, pseudo_count, self.sources))
            return
        # One more row of the same kind: what is small costs a GPU as much for one table as for two.
        counts, rows = torch.cat([first[None], moves]), torch.cat([initial[None], transition])
        found = from_counts(counts.double(), rows, pseudo_count)
        initial.copy_(found[0])
        transition.copy_(found[1:])

    def log_prior(self, pseudo_count: float) -> Tensor:
        """The logarithm of what the pseudo-counts multiply the likelihood by, up to a constant; float64."""
        moves = self.log_transition
        moves = moves.scores if isinstance(moves, SparseTransitions) else moves
        lasting = self.log_duration
        every = [self.log_initial, moves.flatten(), *([] if lasting is None else [lasting.flatten()])]
        both = torch.cat(every).detach().double()
        return pseudo_count * torch.where(torch.isneginf(both), 0.0, both).sum()

    @property
    def free_parameters(self) -> int:
        """Probabilities that are not fixed by structure or by a row's sum."""
        moves = self.log_transition
        scores = moves.scores if isinstance(moves, SparseTransitions) else moves
        lasting = self.log_duration
        more = 0 if lasting is None else int((~torch.isneginf(lasting)).sum()) - self.size
        return int((~torch.isneginf(self.log_initial)).sum() + (~torch.isneginf(scores)).sum()) - 1 - self.size + more


def left_to_right(n: int, *, skip: int = 0, stay: float = 0.5) -> tuple[Tensor, Tensor]:
    """pi ``(n,)`` and P ``(n, n)`` of states that are passed in order: begin in the first, stay or go on, never back.

    Args:
        n: C, at least 1.
        skip: how many states may be left out at once, 0 or more.
        stay: the probability to stay, above 0 and below 1; the moves on share the rest alike.

    What is 0 here stays 0 in :meth:`HMM.fit`. Bakis (1976).

    >>> left_to_right(3)[1]
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 1.0000]])
    """
    for name, value, least in (("n", n, 1), ("skip", skip, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"`{name}` must be an integer of at least {least}, got {value!r}")
    if not 0 < stay < 1:
        raise ConfigError(f"`stay` must lie between 0 and 1, got {stay!r}")
    moves = torch.zeros(n, n)
    for state in range(n):
        ahead = min(skip + 1, n - 1 - state)
        moves[state, state] = stay if ahead else 1.0
        moves[state, state + 1 : state + 1 + ahead] = (1 - stay) / max(1, ahead)
    return torch.eye(n)[0], moves


def lasting_of(given: Any, size: int | None, dtype: torch.dtype, logarithms: bool) -> Tensor | None:
    """log p(d | state), ``(C, K)``, from such a table or from K alone, all alike; None for None, or an error.

    >>> lasting_of(2, 1, torch.float32, False).exp()
    tensor([[0.5000, 0.5000]])
    """
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ConfigError(f"`durations` must be (C, K), or K of at least 1, got {given}")
        return torch.full((size or 1, given), -math.log(given), dtype=dtype)
    table = floats("durations", given)
    if table.dim() != 2 or not table.size(1) or table.size(0) != (size or table.size(0)):
        raise ShapeError(f"`durations` must be (C, K) with C = {size} states, or K, got {tuple(table.shape)}")
    return row_logarithms("durations", table.to(dtype), logarithms)


def kinds_of(tied: Any) -> Tensor:
    """The number of each state's emission, ``(C,)`` int64, or a ShapeError.

    >>> kinds_of([0, 0, 1])
    tensor([0, 0, 1])
    """
    try:
        kinds = torch.as_tensor(tied)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"`tied` must be (C,) integers, got {type(tied).__name__}") from error
    if kinds.dim() != 1 or not len(kinds) or kinds.is_floating_point() or kinds.dtype == torch.bool:
        raise ShapeError(f"`tied` must be (C,) integers, got {tuple(kinds.shape)} {kinds.dtype}")
    if sorted(set(kinds.tolist())) != list(range(int(kinds.max()) + 1)):
        raise ShapeError(f"`tied` must use every number from 0 to its largest, got {kinds.tolist()}")
    return kinds.long()


def moved(given: Any, device: torch.device) -> Any:
    """A tensor or transitions along edges on another device; None stays None.

    >>> moved(torch.zeros(1), torch.device("cpu"))
    tensor([0.])
    """
    if isinstance(given, SparseTransitions):
        return SparseTransitions(
            given.sources.to(device), given.targets.to(device), given.scores.to(device), given.size
        )
    return given if given is None else given.to(device)
