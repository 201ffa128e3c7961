"""Search on the CPU in one compiled call, for models that offer it (``model.compiled``).

Results are those of :func:`~thalweg.inference.beam_search`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from thalweg.errors import ConfigError
from thalweg.inference.search.graph_replay import Request
from thalweg.inference.search.protocol import Hypotheses, joined, raise_not_a_number
from thalweg.kernels.fixed_beam import Beam

__all__ = ["CompiledPlan", "CompiledSearch", "compiled_search"]

ROOM = 1 << 27  # bytes that the past of all rows may take; a larger batch is searched in pieces
MOST_ROOM = 1 << 30  # that of one item; more is made as it is needed, by the ordinary search
MOST_SHAPES = 8  # searches kept ready for each model


class CompiledSearch(Protocol):
    """A whole search in one call, in buffers of its own; see :mod:`thalweg.energies.transformer.compiled`."""

    @property
    def beam(self) -> Beam:
        """Where the search stands."""
        ...

    def load(self, inputs: Any, /) -> None:
        """Put the inputs where they are read."""
        ...

    def run(self, count: int, bos: int, **request: Any) -> None:
        """Search the first ``count`` items."""
        ...


class CompiledPlan(NamedTuple):
    """How a model would search B inputs, as ``model.compiled(inputs)`` says it.

    Attributes:
        size: number of inputs B.
        shape: what else decides the shape, as a key: searches are kept under it.
        most_steps: steps that the model can take.
        bytes: what is kept of a row's step.
        make: a :class:`CompiledSearch` of so many items, rows an item, steps and answers an item.
        part: the inputs first ... last - 1.

    >>> CompiledPlan(1, (), 10, 8, lambda items, width, steps, k: None, lambda first, last: None).size
    1
    """

    size: int
    shape: tuple[Any, ...]
    most_steps: float
    bytes: int
    make: Callable[[int, int, int, int], Any]
    part: Callable[[int, int], Any]


class _Kept(NamedTuple):
    search: CompiledSearch
    lock: Lock  # its buffers serve one search at a time


_kept: WeakKeyDictionary[Any, OrderedDict[Any, _Kept]] = WeakKeyDictionary()
_lock = Lock()


def compiled_search(model: Any, inputs: Any, request: Request) -> Hypotheses | None:
    """The search in one call, or None where the model has no such form for it.

    >>> compiled_search(object(), None, Request(5, 1, 20, 0, 0.0)) is None
    True
    """
    offer = getattr(model, "compiled", None)
    plan: CompiledPlan | None = None if offer is None else offer(inputs)
    if plan is None or not plan.size or request.max_length > plan.most_steps:
        return None
    own = plan.bytes * request.max_length * request.width
    if own > MOST_ROOM:
        return None
    for name, symbol in (("bos", model.bos), ("eos", model.eos)):
        if symbol is not None and not 0 <= symbol < model.vocab_size:
            raise ConfigError(f"`model.{name}` must be 0 ... {model.vocab_size - 1} (vocab_size - 1), got {symbol}")
    fitting = max(1, ROOM // own)
    most = 1 << (fitting.bit_length() - 1)
    # Buffers outlive the call: whether the caller records gradients, or nothing at all, must not cling to them.
    with torch.inference_mode(False), torch.no_grad():
        pieces = ((first, min(first + most, plan.size)) for first in range(0, plan.size, most))
        return joined([_run(model, plan, *piece, request) for piece in pieces])


def _run(model: Any, plan: CompiledPlan, first: int, last: int, request: Request) -> Hypotheses:
    count = last - first
    kept = _prepared(model, plan, 1 << (count - 1).bit_length(), request)
    with kept.lock:
        kept.search.load(plan.part(first, last))
        kept.search.run(
            *(count, model.bos),
            eos=model.eos,
            max_length=request.max_length,
            min_length=request.min_length,
            penalty=request.penalty,
        )
        return _answers(kept.search.beam, first, count, model.vocab_size, request.penalty)


def _prepared(model: Any, plan: CompiledPlan, items: int, request: Request) -> _Kept:
    key = (items, plan.shape, request.width, request.k, request.max_length)
    with _lock:
        kept = _kept.setdefault(model, OrderedDict())
        if key not in kept:
            made = plan.make(items, request.width, request.max_length, request.k)
            kept[key] = _Kept(made, Lock())
            while len(kept) > MOST_SHAPES:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]


def _answers(beam: Beam, start: int, count: int, V: int, penalty: float) -> Hypotheses:
    """The hypotheses of the first ``count`` items, each walked back from its end; the first has number ``start``.

    All are walked together in NumPy: at these sizes a call of torch costs more than what it does.
    """
    width = beam.live.shape[1]
    live, rank, done = beam.live[:count].numpy(), beam.rank[:count].numpy(), beam.done[:count].numpy()
    history = beam.history.numpy()
    bad = ~((live[:, 0] < math.inf) & (rank[:, 0] < math.inf))
    if bad.any():
        raise_not_a_number(torch.from_numpy(bad), torch.arange(start, start + count), int(done[bad][0]))
    scores, codes = beam.score[:count].numpy().copy(), beam.code[:count].numpy().copy()
    finished = scores > -math.inf
    if not finished.all():  # what is missing is filled up with live rows, in order
        items, slots = np.nonzero(~finished)
        spare = slots - finished.sum(axis=1)[items]
        there = spare < width
        there[there] = live[items[there], spare[there]] > -math.inf
        codes[~finished] = 0
        items, slots, spare = items[there], slots[there], spare[there]
        scores[items, slots] = live[items, spare]
        codes[items, slots] = history[done[items] - 1, items, spare] + done[items].astype(np.int64) * width * V
    lengths, places = np.divmod(codes, width * V)
    longest = int(lengths.max())
    tokens = np.full((longest, *codes.shape), -1)
    rows = np.arange(count)[:, None]
    for step in range(longest - 1, -1, -1):
        on = lengths > step
        parents, symbols = np.divmod(places, V)
        tokens[step] = np.where(on, symbols, -1)
        if step:
            places = np.where(on, history[step - 1, rows, parents], places)
    proved = (rank[:, 0] >= beam.dropped[:count].numpy()) & finished[:, 0] & (penalty == 0)
    every = tokens.transpose(1, 2, 0).copy()
    every, lengths, scores, finished, proved = map(torch.from_numpy, (every, lengths, scores, finished, proved))
    return Hypotheses(every, lengths, scores, finished, proved)
