"""Search with rows that never change in number: the launches of one step, recorded once and repeated by the GPU itself.

The host of a GPU spends longer on starting the kernels of a small model than the GPU on running them. Here a step of
model and search is captured as a graph for every shape that comes up (sizes rounded up, so that few do), and a search
is as many replays. Results are those of :func:`~thalweg.inference.beam_search`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thalweg.inference.search.protocol import Hypotheses, joined, raise_not_a_number
from thalweg.kernels import dispatch

MOST_PLACES = 1 << 20  # rows of an item times steps; a longer past is made as it is needed, by the ordinary search
MOST_ROWS = 8192  # rows at a time; larger batches are searched piece by piece
MOST_SHAPES = 16  # shapes kept ready for each model
LEAD = 3  # steps the host may be ahead of what it knows of the search


class FixedDecoder(Protocol):
    """A decoder whose rows never change in number; see :class:`thalweg.energies.transformer.fixed.FixedTransformer`.

    >>> sorted(name for name in vars(FixedDecoder) if not name.startswith("_"))
    ['encode', 'lineage', 'load', 'step']
    """

    @property
    def lineage(self) -> Tensor | None:
        """(R, T) int32, reordered by the search: the row in which each row's past steps were written."""
        ...

    def load(self, inputs: Any, count: Tensor, /) -> None:
        """Put at most A inputs where :meth:`encode` finds them, and how many they are to ``count`` (1,) int32."""
        ...

    def encode(self) -> None:
        """All that comes before the first step."""
        ...

    def step(self, tokens: Tensor, position: Tensor, /) -> Tensor:
        """Logits (R, V) after each row was fed a symbol."""
        ...


class Request(NamedTuple):
    """What is asked of a search; part of the key under which its graphs are kept.

    >>> Request(5, 1, 20, 0, 0.0).width
    5
    """

    width: int
    k: int
    max_length: int
    min_length: int
    penalty: float


class _Captured:
    """The graphs of one model, shape and request, and the buffers they work on."""

    def __init__(self, model: Any, decoder: FixedDecoder, items: int, request: Request, device: torch.device):
        self.kernels: Any = dispatch.fixed_kernels(device)
        self.decoder, self.request, self.vocab_size = decoder, request, model.vocab_size
        self.eos, self.bos = model.eos, model.bos
        self.beam = self.kernels.Beam.empty(items, request.width, request.k, request.max_length, device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.graphs: tuple[Any, Any] | None = None
        on_gpu = device.type == "cuda"
        self.summary = torch.zeros(
            2, dtype=torch.long, device="cpu", pin_memory=on_gpu
        )  # the longest answer, and if any is none
        self.seen: Tensor | None = None
        if on_gpu:
            self.seen = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
            self.events = [torch.cuda.Event() for _ in range(LEAD + 1)]
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiled, and libraries set up, before anything is recorded
            self.count.fill_(1)
            self.begin()
            self.step()
            self.beam.done.fill_(1)  # answers of one symbol
            self._trace()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for work in (self.begin, self.step):
            graph = torch.cuda.CUDAGraph()
            # What other threads do to the device meanwhile is no part of it.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            graphs.append(graph)
        self.graphs = graphs[0], graphs[1]

    def begin(self) -> None:
        self.decoder.encode()
        self.kernels.start(self.beam, self.count, self.bos, self.decoder.lineage)

    def step(self) -> None:
        beam, request = self.beam, self.request
        logits = self.decoder.step(beam.tokens, beam.position)
        self.kernels.advance(
            *(beam, logits, self.decoder.lineage),
            eos=self.eos,
            max_length=request.max_length,
            min_length=request.min_length,
            penalty=request.penalty,
            seen=self.seen,
        )

    def run(self, inputs: Any, first: int, count: int) -> Hypotheses:
        """Answers for ``count`` inputs, the batch's from number ``first`` on."""
        self.decoder.load(inputs, self.count)
        if self.graphs is None:
            self.begin()
            for _ in range(self.request.max_length):
                self.step()
                if not int(self.beam.remaining):
                    break
            found = self._trace()
        else:
            found = self._replay(*self.graphs)
        return self._answers(found, first, count)

    def _replay(self, begin: Any, step: Any) -> Any:
        assert self.seen is not None
        self.seen.fill_(1)
        stream, events = torch.cuda.current_stream(), self.events
        try:
            begin.replay()
            for n in range(self.request.max_length):
                step.replay()
                events[n % (LEAD + 1)].record(stream)
                if n >= LEAD:
                    events[(n - LEAD) % (LEAD + 1)].synchronize()
                    if not int(self.seen):
                        break
            return self._trace()  # the host makes room for the answers while the GPU still looks for them
        finally:  # whoever comes next, in another stream perhaps, finds nothing at work on the buffers
            stream.synchronize()

    def _trace(self) -> Any:
        """The answers in tensors of their own; what the host must know of them goes to the summary."""
        found = self.kernels.trace(self.beam, self.vocab_size, self.count, self.summary)
        if self.request.penalty != 0:
            found.optimal.zero_()
        return found

    def _not_numbers(self) -> Tensor:
        """(A,) the items whose best is NaN or +inf; none of those that are not there."""
        return ~((self.beam.live[:, 0] < math.inf) & (self.beam.rank[:, 0] < math.inf))

    def _answers(self, found: Any, number: int, count: int) -> Hypotheses:
        longest, wrong = self.summary.tolist()
        if wrong:
            bad = self._not_numbers()[:count]
            items = torch.arange(number, number + count, device=bad.device)
            raise_not_a_number(bad, items, int(self.beam.done[:count][bad][0]))
        tokens = found.tokens[:count, :, :longest].contiguous()
        return Hypotheses(tokens, *(part[:count] for part in found[1:]))


class FixedPlan(NamedTuple):
    """How a model would be decoded in fixed shape, as ``model.fixed(inputs)`` says it.

    Attributes:
        size: number of inputs B.
        shape: what else decides the shape, as a key: graphs are kept under it.
        device: where.
        make: a :class:`FixedDecoder` for so many items, rows an item and steps.
        part: the inputs first ... last - 1.
        most_steps: how many steps it can take.

    >>> FixedPlan(1, (), torch.device("cpu"), lambda items, width, steps: None, lambda first, last: None).size
    1
    """

    size: int
    shape: tuple[Any, ...]
    device: torch.device
    make: Callable[[int, int, int], Any]
    part: Callable[[int, int], Any]
    most_steps: float = math.inf


_kept: WeakKeyDictionary[Any, OrderedDict[Any, _Captured]] = WeakKeyDictionary()
_alone = RLock()  # searches of a model share buffers, graphs are recorded by one thread at a time: each in its turn


def captured_search(model: Any, inputs: Any, request: Request) -> Hypotheses | None:
    """The search by replayed graphs, or None where the model has no fixed form for it: ``model.fixed`` is not there or
    gives no :class:`FixedPlan`.

    >>> captured_search(object(), None, Request(5, 1, 20, 0, 0.0)) is None
    True
    """
    fixed = getattr(model, "fixed", None)
    plan: FixedPlan | None = None if fixed is None else fixed(inputs)
    kernels: Any = None if plan is None else dispatch.fixed_kernels(plan.device)
    if plan is None or kernels is None or not kernels.fits(request.width, model.vocab_size):
        return None
    # Autocast keeps copies of weights for as long as it lasts; a graph would read them for longer.
    if request.max_length > plan.most_steps or torch.is_autocast_enabled(plan.device.type):
        return None
    if request.max_length * request.width > MOST_PLACES:
        return None
    most = max(1, MOST_ROWS // request.width)
    # Buffers outlive the call: whether the caller records gradients, or nothing at all, must not cling to them.
    with _alone, torch.inference_mode(False), torch.no_grad(), _on(plan.device):
        pieces = ((first, min(first + most, plan.size)) for first in range(0, plan.size, most))
        return joined([_run(model, plan, *piece, request) for piece in pieces])


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches and graphs go to the current device, so it must be that of the model."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _run(model: Any, plan: FixedPlan, first: int, last: int, request: Request) -> Hypotheses:
    size = last - first
    items = 1 << max(0, size - 1).bit_length()
    # A graph has the precision of products that was set when it was recorded.
    key = (items, plan.shape, request, torch.get_float32_matmul_precision())
    kept = _kept.setdefault(model, OrderedDict())
    captured = kept.pop(key, None)
    if captured is None:
        decoder = plan.make(items, request.width, request.max_length)
        captured = _Captured(model, decoder, items, request, plan.device)
        while len(kept) >= MOST_SHAPES:
            kept.popitem(last=False)
    kept[key] = captured  # used last
    return captured.run(plan.part(first, last), first, size)
