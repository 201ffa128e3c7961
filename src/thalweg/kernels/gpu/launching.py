"""Starting Triton kernels with few microseconds of the host: for small problems that is what a user waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, reduce
from itertools import count
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "NOTHING",
    "Layout",
    "Room",
    "here",
    "launch",
    "numbered",
    "on_device_of",
    "overlapped",
    "repeated",
    "replayed",
    "resumed",
]

Launch = Callable[..., Any]
"""What starts a kernel: ``launch(kernel, grid, *arguments, **options)``."""

_APART = 256  # bytes; parts begin at multiples of it, as tensors of their own would


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
        """Parts one after another.

        >>> Layout.of((torch.uint8, (3,))).size
        256
        """
        size, places = 0, []
        for dtype, shape in parts:
            places.append((size, dtype, shape))
            size += -(-math.prod(shape) * dtype.itemsize // _APART) * _APART
        return cls(size, tuple(places), tuple(place[0] for place in places))


# Of launches that need no room.
NOTHING = Layout.of()


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
        """A room on the device of x.

        >>> Room.like(torch.zeros(1), Layout.of((torch.int32, (2,)))).memory.shape
        torch.Size([256])
        """
        return cls(x.new_empty(layout.size, dtype=torch.uint8), layout)

    def part(self, index: int) -> Tensor:
        """The tensor at a place of the layout.

        >>> Room.like(torch.zeros(1), Layout.of((torch.int32, (0, 5)))).part(0).shape
        torch.Size([0, 5])
        """
        first, dtype, shape = self.layout.places[index]
        return self.memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def parts(self) -> tuple[Tensor, ...]:
        """All tensors of the room.

        >>> len(Room.like(torch.zeros(1), Layout.of((torch.int32, (2,)), (torch.int32, (2,)))).parts())
        2
        """
        return tuple(self.part(index) for index in range(len(self.layout.places)))


_ready: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Start a Triton kernel; gives the compiled variant and its constants, None in the interpreter.

    Triton looks at every argument anew to find the compiled variant, which takes longer than a small kernel. What it
    looks at is summed up in a key here, and the variant it found is started directly the next time.
    """
    if not hasattr(kernel, "device_caches"):  # the interpreter
        kernel[grid](*arguments, **options)
        return None
    device = torch.cuda.current_device()
    looks = tuple(
        (x.dtype, x.data_ptr() % 16 == 0)
        if isinstance(x, Tensor)
        else float
        if isinstance(x, float)
        else (x == 1, x % 16 == 0, x.bit_length() > 31)
        for x in arguments
    )
    key = (kernel, device, looks, *options.values())
    found = _ready.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        _ready[key] = compiled, constants
        return _ready[key]
    compiled, constants = found
    sizes = (*grid, 1, 1)[:3]
    stream = _stream(device)
    compiled.run(*sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants)
    return found


_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_MOST_KNOWN = 4096


def repeated(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, key: Hashable = None, **options: Any
) -> Callable[..., None]:
    """Start a kernel, and give what starts it again, on the same tensors, in a few microseconds.

    Numbers may be given anew by name; Triton must have been told not to specialise on them. ``key``, where given, says
    all that decides types, numbers and options: under a key seen before no argument is looked at but for its address.
    """
    if not hasattr(kernel, "device_caches"):  # the interpreter
        names = list(kernel.arg_names)[: len(arguments)]
        kernel[grid](*arguments, **options)
        return lambda **new: kernel[grid](*(new.get(n, x) for n, x in zip(names, arguments, strict=True)), **options)
    device = torch.cuda.current_device()
    stream, sizes = _stream(device), (*grid, 1, 1)[:3]
    given, bits = [], 0
    for x in arguments:
        if isinstance(x, Tensor):
            bits |= x.data_ptr()
            given.append(x.data_ptr())
        else:
            given.append(x)
    known = None if key is None or bits & 15 else (kernel, device, key)
    found = None if known is None else _known.get(known)
    if found is None:
        found = launch(kernel, grid, *arguments, **options)
        assert found is not None
        if known is not None:
            if len(_known) >= _MOST_KNOWN:  # sizes that change with every call
                _known.clear()
            _known[known] = found
        started = True
    else:
        started = False
    compiled, constants = found
    start, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    places = {name: place for place, name in enumerate(kernel.arg_names)}

    def again(**new: Any) -> None:
        for name, value in new.items():
            given[places[name]] = value
        start(*sizes, stream, function, metadata, None, None, None, *given, *constants)

    if not started:
        again()
    return again


def resumed(
    kernel: Any, grid: tuple[int, int, int], given: Sequence[Any], key: Hashable, place: tuple[int, int]
) -> Callable[[], None] | None:
    """Start a kernel that ``repeated`` has started under the key, and give what starts it again; None if it has not.

    ``given`` are the arguments as the driver takes them, numbers and addresses, which must be multiples of 16 bytes:
    no tensor need be made to point at a part of another. ``place`` says :func:`here`.

    >>> resumed(None, (1, 1, 1), (), "doc", (0, 0)) is None
    True
    """
    device, stream = place
    found = _known.get((kernel, device, key))
    if found is None:
        return None
    compiled, constants = found
    unhooked = (compiled.function, compiled.packed_metadata, None, None, None)
    again = partial(compiled.run, *grid, stream, *unhooked, *given, *constants)
    again()
    return again


def here() -> tuple[int, int]:
    """The current device and its current stream, where launches go."""
    device = torch.cuda.current_device()
    return device, _stream(device)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)  # as Triton asks; torch.cuda makes an object of it first


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, so it must be that of x.

    >>> with on_device_of(torch.zeros(1)):
    ...     pass
    """
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


class _Step(NamedTuple):
    """One recorded launch: what to start, which pointers it takes, in order, and what comes after these."""

    run: Any
    grid: tuple[int, ...]
    function: Any
    metadata: Any
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, ...], given: list[Any], slots: dict[int, int]) -> _Step:
        """Tensors have slots; nearly always they come first."""
        first = 0
        while first < len(given) and isinstance(given[first], Tensor):
            first += 1
        mixed = first < 2 or any(isinstance(x, Tensor) for x in given[first:])
        if mixed:  # also where `itemgetter` would not give a tuple
            order = [slots[id(x)] if isinstance(x, Tensor) else None for x in given]
            fixed = [None if isinstance(x, Tensor) else x for x in given]
            pick, constants = partial(_woven, order, fixed), ()
        else:
            pick, constants = itemgetter(*(slots[id(x)] for x in given[:first])), tuple(given[first:])
        sizes = (*grid, 1, 1)[:3]
        return cls(compiled.run, sizes, compiled.function, compiled.packed_metadata, pick, constants)


def _woven(order: list[int | None], fixed: list[Any], pointers: Sequence[int]) -> tuple[Any, ...]:
    return tuple(x if slot is None else pointers[slot] for slot, x in zip(order, fixed, strict=True))


_tapes: dict[Hashable, list[_Step]] = {}
_numbers: dict[Hashable, int] = {}
_counter = count()


def numbered(key: Hashable) -> int:
    """A number for a key, always the same: found sooner among others than what has many parts.

    >>> numbered(("doc", 1)) == numbered(("doc", 1)) != numbered(("doc", 2))
    True
    """
    return _numbers.setdefault(key, next(_counter))


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

    A repeated launch looks at no argument: pointers go to the driver as they are. A tensor that does not begin at a
    multiple of 16 bytes takes the ordinary way.

    >>> room = replayed("doc", (torch.zeros(1),), Layout.of((torch.float32, (2,))), lambda *given: None)
    >>> room.part(0).shape
    torch.Size([2])
    """
    room = Room.like(inputs[0], layout) if layout.places else Room(inputs[0], layout)
    base = room.memory.data_ptr()
    pointers = [x.data_ptr() for x in inputs]
    bits = reduce(or_, pointers)
    aligned, device = not bits & 15, inputs[0].device.index
    tape = _tapes.get((key, device)) if aligned else None
    if tape is None:
        steps = _recorded(inputs, room, body, before)
        if aligned and steps:
            _tapes[key, device] = steps
        return room
    pointers += [base + first for first in layout.firsts]
    if before is not None:
        base = before.memory.data_ptr()
        pointers += [base + first for first in before.layout.firsts]
    stream = _stream(device)  # type: ignore[arg-type]
    for run, grid, function, metadata, pick, constants in tape:
        run(*grid, stream, function, metadata, None, None, None, *pick(pointers), *constants)
    return room


def _recorded(inputs: tuple[Tensor, ...], room: Room, body: Callable[..., None], before: Room | None) -> list[_Step]:
    """Run the body; its launches as steps, none where the interpreter ran them."""
    inputs = tuple(x.view_as(x) for x in inputs)
    parts, others = room.parts(), () if before is None else before.parts()
    slots = {id(x): slot for slot, x in enumerate((*inputs, *parts, *others))}
    steps: list[_Step] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        found = launch(kernel, grid, *arguments, **options)
        if found is not None:
            compiled, fixed = found
            steps.append(_Step.of(compiled, grid, [*arguments, *fixed], slots))

    body(record, inputs, parts, *([] if before is None else [others]))
    return steps
