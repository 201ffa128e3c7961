"""What a search asks of a model and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, ThalwegError
from thalweg.inference.search.beam.tree import BeamTree


class Autoregressive(Protocol):
    r"""A model of sequences given symbol by symbol: log p(y | x) = \sum_t log p(y_t | y_{<t}, x).

    A search holds R rows (partial sequences) and never looks into the state: it feeds ``bos`` first, then the
    symbol each row was given, and asks for rows to be reordered, repeated or dropped. Every entry of
    ``log_probs`` is at most 0 (``-inf`` forbids a symbol); they need not sum to one. A row's answer must
    not depend on the other rows, or the result of a batch would depend on what else is in it. A model may
    have an attribute ``device``; without it, symbols are put where the first tensor of ``inputs`` is.

    Anything with these members will do, a lookup table too (:class:`~thalweg.inference.TableModel`):

    >>> import torch
    >>> from thalweg.inference import greedy
    >>> class Countdown:  # says n, n - 1, ..., 0 with certainty; 0 ends
    ...     bos, eos, vocab_size = 9, 0, 10
    ...     def begin(self, inputs):
    ...         return inputs
    ...     def step(self, tokens, state):
    ...         certain = torch.nn.functional.one_hot(state, 10)
    ...         return certain.double().log(), state - 1
    ...     def select(self, state, rows):
    ...         return state[rows]
    >>> greedy(Countdown(), torch.tensor([2, 0]), max_length=5).tokens.tolist()
    [[[2, 1, 0]], [[0, -1, -1]]]
    """

    @property
    def bos(self) -> int:
        """Symbol fed at the first step; never part of a hypothesis."""
        ...

    @property
    def eos(self) -> int | None:
        """Symbol that ends a sequence; None where all sequences have ``max_length`` symbols."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of symbols V; they are 0 ... V - 1."""
        ...

    def begin(self, inputs: Any, /) -> Any:
        """State of B rows, one for each item of ``inputs``, before ``bos`` is fed."""
        ...

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Any]:
        """Feed each row one symbol, ``(R,)``; log-probabilities of the next, ``(R, V)``, and the state."""
        ...

    def select(self, state: Any, rows: Tensor, /) -> Any:
        """State whose row r is row ``rows[r]`` of the old one; ``rows`` (R',) may repeat and leave out."""
        ...


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """K answers for each of B items, best first.

    Attributes:
        tokens: ``(B, K, T)`` int64 without bos, with the final eos, -1 past the length; T is the longest
        length.
        lengths: ``(B, K)`` int64, number of symbols, eos counted; 0 where a hypothesis is missing.
        scores: ``(B, K)`` log-probabilities; ``-inf`` where missing.
        finished: ``(B, K)`` bool; false where ``max_length`` cut the hypothesis. Those follow the finished
        ones.
        optimal: ``(B,)`` bool, true where the first hypothesis is proved to be the most probable of all
        sequences.
        gap: ``(B,)`` how much more log-probability any other sequence can have than the first hypothesis, proved by
        :func:`exact_search`; 0 where ``optimal``. None from searches that prove nothing.
        tree: what the beam kept at every step, where it was asked for.

    >>> from thalweg.inference import TableModel, beam_search
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> best = beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=4)
    >>> best.sequences()
    [[[2], [1, 2]]]
    >>> best.scores
    tensor([[-1.0000, -1.2000]], dtype=torch.float64)
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    finished: Tensor
    optimal: Tensor
    gap: Tensor | None = None
    tree: BeamTree | None = None

    @property
    def size(self) -> int:
        """Number of items B."""
        return self.tokens.size(0)

    def sequences(self) -> list[list[list[int]]]:
        """Symbols of the hypotheses that exist, as plain lists: item, hypothesis, position."""
        return [
            [row[:length] for row, length in zip(rows, lengths, strict=True) if length]
            for rows, lengths in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        ]

    def probabilities(self) -> Tensor:
        """``(B, K)`` share of each hypothesis in the mass of its item's K: softmax of scores, 0 where missing."""
        best = self.scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(self.scores.dtype).min)
        mass = (self.scores - best).exp()
        return mass / mass.sum(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)

    def to(self, device: torch.device | str) -> Hypotheses:
        """The same on another device; a tree stays where it is."""
        parts = (self.tokens, self.lengths, self.scores, self.finished, self.optimal)
        gap = None if self.gap is None else self.gap.to(device)
        return Hypotheses(*(part.to(device) for part in parts), gap=gap, tree=self.tree)

    @classmethod
    def none(cls, batch: int, k: int, device: torch.device) -> Hypotheses:
        """All of ``batch`` times ``k`` hypotheses missing."""
        return cls(
            torch.full((batch, k, 0), -1, dtype=torch.long, device=device),
            torch.zeros((batch, k), dtype=torch.long, device=device),
            torch.full((batch, k), -torch.inf, device=device),
            torch.zeros((batch, k), dtype=torch.bool, device=device),
            torch.zeros(batch, dtype=torch.bool, device=device),
        )


def joined(parts: Sequence[Hypotheses]) -> Hypotheses:
    """The items of several answers, one after the other, all with the same K.

    ``gap`` stays where every part has one; the layers of the parts' trees follow one another.

    >>> one = Hypotheses.none(2, 3, torch.device("cpu"))
    >>> joined([one, one]).tokens.shape
    torch.Size([4, 3, 0])
    """
    if len(parts) == 1:
        return parts[0]
    T = max(part.tokens.size(2) for part in parts)
    tokens = [nn.functional.pad(part.tokens, (0, T - part.tokens.size(2)), value=-1) for part in parts]
    gaps = [part.gap for part in parts if part.gap is not None]
    trees = [part.tree for part in parts if part.tree is not None]
    return Hypotheses(
        torch.cat(tokens),
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("lengths", "scores", "finished", "optimal")),
        gap=torch.cat(gaps) if len(gaps) == len(parts) else None,
        tree=BeamTree(tuple(chain.from_iterable(tree.layers for tree in trees))) if trees else None,
    )


def batch_size(inputs: Any) -> int:
    """Number of items B in what a model's ``begin`` takes.

    Size of the first dimension of a tensor; that of the first part of a tuple or mapping of parts; else
    ``len``.

    >>> batch_size(torch.zeros(3, 7)), batch_size((torch.zeros(2, 5), None)), batch_size(["one", "two"])
    (3, 2, 2)
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() == 0:
            raise ShapeError("`inputs` must have the batch as its first dimension, got a scalar; add a dimension")
        return inputs.size(0)
    if isinstance(inputs, Mapping) and inputs:
        return batch_size(next(iter(inputs.values())))
    if isinstance(inputs, tuple) and inputs and isinstance(inputs[0], Tensor | tuple | list | Mapping):
        return batch_size(inputs[0])
    try:
        return len(inputs)
    except TypeError:
        raise ShapeError(
            f"`inputs` must be a tensor, or a tuple, mapping or list of them, got {type(inputs).__name__}"
        ) from None


def device_of(model: Any, inputs: Any) -> torch.device:
    """Where symbols are put: the model's ``device`` if it has one, else the first tensor's, else the CPU.

    >>> device_of(None, [torch.zeros(2)])
    device(type='cpu')
    """
    device = getattr(model, "device", None)
    if device is not None:
        return torch.device(device)
    while not isinstance(inputs, Tensor):
        if isinstance(inputs, Mapping):
            inputs = tuple(inputs.values())
        if not isinstance(inputs, tuple | list) or not inputs:
            return torch.device("cpu")
        inputs = inputs[0]
    return inputs.device


def check_at_least_one(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer of at least 1.

    >>> check_at_least_one("width", 5)
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise ConfigError(f"`{name}` must be an integer of at least 1, got {value!r}; pass {name}=1 or more")


def real(value: object) -> float:
    """``value`` as a float; NaN, which no range contains, for what is not one number.

    >>> real(2), real("2"), real(None)
    (2.0, nan, nan)
    """
    if isinstance(value, bool | str | bytes):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def check_log_probs(log_probs: Tensor, rows: int, vocab_size: int) -> Tensor:
    """The model's answer, if it has the shape it must have.

    >>> check_log_probs(torch.zeros(2, 3), 2, 3).shape
    torch.Size([2, 3])
    """
    if log_probs.shape != (rows, vocab_size):
        raise ShapeError(
            f"`model.step` must give log-probabilities of shape (R, V) = ({rows}, {vocab_size}), "
            f"got {tuple(log_probs.shape)}; compare `model.vocab_size` with the width of the output layer"
        )
    return log_probs


def raise_not_a_number(wrong: Tensor, items: Tensor, step: int) -> None:
    """Raise if ``wrong`` (A,) is true anywhere, naming the first such batch item.

    >>> raise_not_a_number(torch.tensor([False]), torch.tensor([0]), 1)
    """
    if bool(wrong.any()):
        item = int(items[wrong][0])
        raise ThalwegError(
            f"`model.step` must give log-probabilities, got NaN or +inf for batch item {item} by step "
            f"{step}; look for NaN in the model's weights and inputs"
        )
