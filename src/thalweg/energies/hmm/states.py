"""The Markov chain of states: where it begins and how it moves, as parameters."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.emissions import hold
from thalweg.energies.hmm.probabilities import from_counts
from thalweg.errors import ConfigError, ShapeError
from thalweg.kernels.potentials import SparseTransitions

__all__ = ["States", "kinds_of", "left_to_right", "moved"]


class States(nn.Module):
    """pi and P of C states as logits: a softmax over each row makes them probabilities, whatever an optimiser does.

    A logit of -inf is structure: its gradient is 0, so it stays. Tensors that are part of a graph already are used as
    they are, so that derivatives reach the caller's own.

    Args:
        log_initial: ``(C,)``; log_transition: ``(C, C)``, or :class:`~thalweg.inference.SparseTransitions`.

    >>> chain = States(torch.zeros(1), torch.zeros(1, 1))
    >>> [name for name, _ in chain.named_parameters()]
    ['initial', 'transition']
    """

    sources: Tensor
    targets: Tensor

    def __init__(self, log_initial: Tensor, log_transition: Tensor | SparseTransitions) -> None:
        super().__init__()
        self.size = len(log_initial)
        self.sparse = isinstance(log_transition, SparseTransitions)
        if isinstance(log_transition, SparseTransitions):
            self.register_buffer("sources", log_transition.sources)
            self.register_buffer("targets", log_transition.targets)
            log_transition = log_transition.scores
        hold(self, "initial", log_initial)
        hold(self, "transition", log_transition)

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

    @torch.no_grad()
    def maximise(self, first: Tensor, moves: Tensor, pseudo_count: float) -> None:
        """The M-step: expected counts of first states ``(C,)`` and of moves, ``(C, C)`` or ``(E,)``."""
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
        both = torch.cat([self.log_initial.flatten(), moves.flatten()]).detach().double()
        return pseudo_count * torch.where(torch.isneginf(both), 0.0, both).sum()

    @property
    def free_parameters(self) -> int:
        """Probabilities that are not fixed by structure or by a row's sum."""
        moves = self.log_transition
        scores = moves.scores if isinstance(moves, SparseTransitions) else moves
        return int((~torch.isneginf(self.log_initial)).sum() + (~torch.isneginf(scores)).sum()) - 1 - self.size


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
