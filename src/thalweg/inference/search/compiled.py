"""Search on the CPU in one compiled call, for models that offer it (``model.compiled``).

Results are those of :func:`~thalweg.inference.beam_search`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.search.graph_replay import Request
from thalweg.inference.search.protocol import Hypotheses, joined, raise_not_a_number
from thalweg.kernels import dispatch

ROOM = 1 << 27  # bytes that the past of all rows may take; a larger batch is searched in pieces
MOST_ROOM = 1 << 30  # that of one item; more is made as it is needed, by the ordinary search


class CompiledPlan(NamedTuple):
    """How a model would search B inputs, as ``model.compiled(inputs)`` says it.

    Attributes:
        size: number of inputs B.
        most_steps: steps that the model can take.
        bytes: what is kept of a row's step.
        mask: (V,) what is added to logits; barred: (V,) not 0 at symbols that are never said, or None.
        search: from the inputs first ... last - 1 and a request of the kernels to what their search gives.

    >>> CompiledPlan(1, 10, 8, torch.zeros(3), None, lambda first, last, request: ()).size
    1
    """

    size: int
    most_steps: float
    bytes: int
    mask: Tensor
    barred: Tensor | None
    search: Callable[[int, int, Any], tuple[Any, ...]]


_kept: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
_lock = Lock()


def kept(model: Any, key: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gave for this model and key; the last one is kept as long as the model lives.

    >>> owner = torch.nn.Identity()
    >>> kept(owner, 1, list) is kept(owner, 1, list), kept(owner, 2, list) is kept(owner, 1, list)
    (True, False)
    """
    with _lock:
        known, made = _kept.get(model, (None, None))
        if made is None or known != key:
            made = make()
            _kept[model] = (key, made)
        return made


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
    most = max(1, ROOM // own)
    kernels: Any = dispatch.search_kernels(torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad():
        asked = kernels.Request(
            width=request.width,
            k=request.k,
            max_length=request.max_length,
            min_length=request.min_length,
            penalty=request.penalty,
            bos=model.bos,
            eos=model.eos,
            mask=kernels.array(plan.mask),
            barred=kernels.array(plan.barred),
            threads=torch.get_num_threads(),
        )
        pieces = ((first, min(first + most, plan.size)) for first in range(0, plan.size, most))
        return joined([_answers(first, *plan.search(first, last, asked)) for first, last in pieces])


def _answers(start: int, *found: Any) -> Hypotheses:
    """What the kernels gave for items from number ``start`` on."""
    *parts, wrong, step = found
    if wrong >= 0:
        raise_not_a_number(torch.tensor([True]), torch.tensor([start + wrong]), step)
    tokens, lengths, scores, finished, optimal = map(torch.from_numpy, parts)
    return Hypotheses(tokens, lengths, scores, finished, optimal)
