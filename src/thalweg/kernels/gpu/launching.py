"""Starting Triton kernels with few microseconds of the host: for small problems that is what a user waits for.

Triton looks at every argument of a launch to find the compiled variant, which takes longer than a small kernel. Here a
variant that was found is started by itself from then on, ``compiled[grid](*arguments)``: one by one (:func:`launch`),
or on addresses as a recorded sequence (:func:`replayed`). That is done with the versions of Triton that are known to
take it, :data:`TESTED`; with any other, and in the interpreter, all that is launched is ``kernel[grid](...)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, reduce
from importlib import import_module
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "Room", "ceiling", "launch", "on_device_of", "overlapped", "replayed"]

TESTED = ((3, 6), (3, 7))  # versions of Triton, those of torch 2.11 to 2.13
MOST = 4096  # of anything that is kept; sizes that change with every call would fill the memory

Launch = Callable[..., Any]
"""What starts a kernel: ``launch(kernel, grid, *arguments, **options)``."""

_APART = 256  # bytes; parts begin at multiples of it, as tensors of their own would


def ceiling(size: int) -> int:
    """The power of two from ``size`` on.

    >>> ceiling(5)
    8
    """
    return 1 << (size - 1).bit_length()


class Layout(NamedTuple):
    """Where tensors lie in one allocation: bytes in all, and of each its first byte, its type and its shape.

    >>> Layout.of((torch.float64, (2,)), (torch.float32, (3, 4))).places[1]
    (256, torch.float32, (3, 4))
    """

    size: int
    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    firsts: tuple[int, ...]  # of the places, by themselves

    @classmethod
    def of(cls, *parts: tuple[torch.dtype, tuple[int, ...]]) -> Layout:
        """Parts one after another."""
        size, places = 0, []
        for dtype, shape in parts:
            places.append((size, dtype, shape))
            size += -(-math.prod(shape) * dtype.itemsize // _APART) * _APART
        return cls(size, tuple(places), tuple(place[0] for place in places))


class Room(NamedTuple):
    """Several tensors in one allocation; a view of one is made when asked for, since many are only pointed at.

    >>> room = Room.like(torch.zeros(1), Layout.of((torch.int32, (2,)), (torch.float32, (3, 4))))
    >>> room.part(1).shape, room.part(0).dtype
    (torch.Size([3, 4]), torch.int32)
    """

    memory: Tensor
    layout: Layout

    @classmethod
    def like(cls, x: Tensor, layout: Layout) -> Room:
        """A room on the device of x."""
        return cls(x.new_empty(layout.size, dtype=torch.uint8), layout)

    def part(self, index: int) -> Tensor:
        """The tensor at a place of the layout."""
        first, dtype, shape = self.layout.places[index]
        return self.memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def parts(self) -> tuple[Tensor, ...]:
        """All tensors of the room."""
        return tuple(self.part(index) for index in range(len(self.layout.places)))


class _Variant(NamedTuple):
    """A kernel compiled for certain types and numbers, and the constants that come after its arguments."""

    compiled: Any
    constants: tuple[Any, ...]


_known: dict[tuple[Any, ...], _Variant] = {}
_tapes: dict[Hashable, _Tape] = {}


def _keep(kept: dict[Any, Any], key: Hashable, value: Any) -> None:
    """All is forgotten where it becomes too much: what is asked for again is found again."""
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value


@cache
def _direct() -> bool:
    """Whether this Triton is one that takes numbers and addresses."""
    version = import_module("triton").__version__
    return tuple(int(part) for part in version.split(".")[:2]) in TESTED


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> _Variant | None:
    """Start a Triton kernel; gives what can be started by itself, None where nothing can.

    What Triton looks at is summed up in a key, under which the variant that it found is kept.
    """
    device = next(x for x in arguments if isinstance(x, Tensor)).device.index
    looks = tuple(
        (x.dtype, x.data_ptr() % 16 == 0)
        if isinstance(x, Tensor)
        else float
        if isinstance(x, float)
        else (x == 1, x % 16 == 0, x.bit_length() > 31)
        for x in arguments
    )
    key = (kernel, device, looks, *options.values())
    variant = _known.get(key)
    if variant is not None:
        variant.compiled[(*grid, 1, 1)[:3]](*arguments, *variant.constants, stream=_stream(device))
        return variant
    compiled = kernel[grid](*arguments, **options)
    if compiled is None or not _direct():  # nothing is compiled in the interpreter
        return None
    variant = _Variant(compiled, tuple(options[name] for name in kernel.arg_names[len(arguments) :]))
    _keep(_known, key, variant)
    return variant


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, so it must be that of x."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin while kernels before it end, none where GPUs cannot.

    Such a kernel must wait (``arithmetic.pending``) before it looks at what others wrote.

    >>> overlapped(torch.zeros(1))
    {}
    """
    return {"launch_pdl": True} if x.is_cuda and _overlaps(x.device) else {}


class _Tape(NamedTuple):
    """Recorded launches: each takes some of the addresses that a call gives, and of the numbers that stay."""

    steps: tuple[tuple[Callable[..., object], Callable[[Sequence[Any]], tuple[Any, ...]]], ...]
    numbers: tuple[Any, ...]

    def play(self, addresses: list[int], stream: int) -> None:
        given = (*addresses, *self.numbers)
        for start, pick in self.steps:
            start(*pick(given), stream=stream)


def replayed(
    key: Hashable,
    inputs: tuple[Tensor, ...],
    layout: Layout,
    body: Callable[..., None],
    before: Room | None = None,
) -> Room:
    """A room in which ``body(launch, inputs, parts)`` has worked: called once, its launches repeated from then on.

    Args:
        key: what decides every number, type and option of the launches, and their order.
        inputs: all tensors that the body gives to kernels beside the parts of the room, of the same types and shapes
            under the same key; it is handed aliases of them, so that one tensor given twice is two.
        layout: of the room.
        body: launches and nothing else.
        before: a room filled earlier, of the same layout under the same key; its parts are the body's last argument.

    A repeated launch looks at no argument: addresses go to the driver as they are. A tensor that does not begin at a
    multiple of 16 bytes takes the ordinary way.

    >>> room = replayed("doc", (torch.zeros(1),), Layout.of((torch.float32, (2,))), lambda *given: None)
    >>> room.part(0).shape
    torch.Size([2])
    """
    room = Room.like(inputs[0], layout) if layout.places else Room(inputs[0], layout)
    addresses = [x.data_ptr() for x in inputs]
    aligned, device = not reduce(or_, addresses) & 15, inputs[0].device.index
    tape = _tapes.get((key, device)) if aligned else None
    if tape is None:
        tape = _recorded(inputs, room, body, before)
        if aligned and tape.steps:
            _keep(_tapes, (key, device), tape)
        return room
    for filled in (room,) if before is None else (room, before):
        base = filled.memory.data_ptr()
        addresses += [base + first for first in filled.layout.firsts]
    tape.play(addresses, _stream(device))  # type: ignore[arg-type]
    return room


def _recorded(inputs: tuple[Tensor, ...], room: Room, body: Callable[..., None], before: Room | None) -> _Tape:
    """Run the body; its launches as a tape, which is empty where nothing can be started by itself."""
    inputs = tuple(x.view_as(x) for x in inputs)
    parts, others = room.parts(), () if before is None else before.parts()
    slots = {id(x): slot for slot, x in enumerate((*inputs, *parts, *others))}
    steps, numbers = [], []

    def slot(x: Any) -> int:
        if isinstance(x, Tensor):
            return slots[id(x)]
        numbers.append(x)
        return len(slots) + len(numbers) - 1

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        variant = launch(kernel, grid, *arguments, **options)
        if variant is not None:
            pick = itemgetter(*map(slot, (*arguments, *variant.constants)))
            steps.append((variant.compiled[(*grid, 1, 1)[:3]], pick))

    body(record, inputs, parts, *([] if before is None else [others]))
    return _Tape(tuple(steps), tuple(numbers))
