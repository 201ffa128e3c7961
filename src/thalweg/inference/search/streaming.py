"""Partial hypotheses as they grow, by callback or as an iterator."""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.inference.search.protocol import Autoregressive, Hypotheses


class Partial(NamedTuple):
    """What a search holds after one step: the rows that go on, and those that ended with this step.

    >>> Partial(1, torch.tensor([0]), torch.tensor([[4]]), torch.tensor([-0.1]), torch.tensor([False])).step
    1
    """

    step: int
    """t, 1 after the first symbol."""
    items: Tensor
    """``(R,)`` int64, the batch item of each row."""
    tokens: Tensor
    """``(R, t)`` int64, without bos."""
    scores: Tensor
    """``(R,)`` log-probabilities so far."""
    finished: Tensor
    """``(R,)`` bool, true where the row is a finished hypothesis."""


class _AbandonedError(Exception):
    """Raised inside a search whose reader has gone away."""


def stream(
    search: Callable[..., Hypotheses], model: Autoregressive, inputs: Any, **options: Any
) -> Iterator[Partial | Hypotheses]:
    """Partial hypotheses step by step, and at the end what ``search(model, inputs, **options)`` returns.

    Works with every search that takes ``on_step``. The search runs in a thread of its own and waits at each
    step until the next partial is asked for, so nothing runs ahead; leaving the loop ends it. The current CUDA
    device, autocast and inference mode are those of the caller at the first partial.

    Args:
        search: :func:`beam_search`, :func:`greedy` or another with an ``on_step`` callback.
        model, inputs, options: what it takes.
    Returns:
        An iterator over :class:`Partial`; the last object it gives is the :class:`Hypotheses`.

    >>> from thalweg.inference import TableModel, beam_search
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> *growing, best = stream(beam_search, model, torch.zeros(1, dtype=torch.long), width=2, max_length=4)
    >>> [part.tokens.tolist() for part in growing]
    [[[1], [2]], [[1, 2]]]
    >>> best.sequences()
    [[[2], [1, 2]]]
    """
    if "on_step" not in inspect.signature(search).parameters:
        name = getattr(search, "__name__", str(search))
        raise ConfigError(f"`search` must take `on_step`, got {name}, whose answers do not grow; use beam_search")
    partials: queue.SimpleQueue[Partial | Hypotheses | BaseException] = queue.SimpleQueue()
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: nobody will ask again
    modes = _thread_modes()

    def on_step(partial: Partial) -> None:
        partials.put(partial)
        if not asked.get():
            raise _AbandonedError

    def work() -> None:
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                partials.put(search(model, inputs, on_step=on_step, **options))
        except BaseException as error:  # handed to the reader, who raises it
            partials.put(error)

    worker = threading.Thread(target=work, name="thalweg-stream", daemon=True)
    worker.start()
    try:
        while isinstance(partial := partials.get(), Partial):
            yield partial
            asked.put(True)
        if isinstance(partial, BaseException):
            raise partial
        yield partial
    finally:
        asked.put(False)
        worker.join()


def _thread_modes() -> list[Callable[[], Any]]:
    """What torch keeps for each thread separately, to be entered again in another."""
    inference = torch.is_inference_mode_enabled()
    modes: list[Callable[[], Any]] = [lambda: torch.inference_mode(inference)]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype=dtype))
    if torch.cuda.is_initialized():
        current = torch.cuda.current_device()
        modes.append(lambda: torch.cuda.device(current))
    return modes
