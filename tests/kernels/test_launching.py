"""Recorded launches are repeated with the pointers of the tensors that are given then, whatever they were before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from thalweg.kernels.gpu import launching
from thalweg.kernels.gpu.launching import Layout, Room, launch, replayed

LAYOUT = Layout.of((torch.float32, (4, 4)), (torch.int32, (3,)))


class Compiled:
    """Stands in for a compiled kernel: remembers what each launch by itself was given."""

    def __init__(self, kernel: str, starts: list[Any]) -> None:
        self.kernel, self.starts = kernel, starts

    def __getitem__(self, grid: tuple[int, int, int]):
        def start(*given: Any, stream: int) -> None:
            assert stream == 7
            self.starts.append((self.kernel, grid, given))

        return start


class Kernel:
    """Stands in for a kernel of Triton: what is launched the ordinary way."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine, self.arg_names = name, machine, [*"abcdefghij"]

    def __getitem__(self, grid: tuple[int, ...]):
        def start(*arguments: Any, **options: Any) -> Compiled | None:
            self.machine.ordinary.append((self.name, grid, len(arguments)))
            self.arg_names = [*"abcdefghij"[: len(arguments)], *options]
            return Compiled(self.name, self.machine.repeats)

        return start


class Machine:
    """Stands in for Triton and a driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "3.7.1"):
        self.bodies, self.repeats, self.ordinary = 0, [], []
        self.one, self.two = Kernel("one", self), Kernel("two", self)
        monkeypatch.setattr(launching, "_stream", lambda device: 7)
        monkeypatch.setattr(launching, "_tapes", {})
        monkeypatch.setattr(launching, "_known", {})
        monkeypatch.setattr(launching, "import_module", lambda name: SimpleNamespace(__version__=version))
        launching._direct.cache_clear()

    def call(self, first: Tensor, second: Tensor, before: Room | None = None, key: str = "key") -> Room:
        def body(launch, inputs, parts, others=()):
            self.bodies += 1
            launch(self.one, (5,), inputs[0], 3, inputs[1], parts[1], BLOCK=16)
            launch(self.two, (2, 3), parts[0], inputs[1], 9, 4, *others[1:], FLAG=True, KIND="ieee")

        return replayed(key, (first, second), LAYOUT, body, before)


@pytest.fixture(autouse=True)
def real_version() -> Iterator[None]:
    """What is known of a version that was made up is forgotten."""
    yield
    launching._direct.cache_clear()


def at(room: Room, index: int) -> int:
    return room.part(index).data_ptr()


def test_a_second_call_repeats_the_launches_with_its_own_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    same = torch.zeros(8)
    machine.call(same, same)  # recorded with one tensor in two places
    assert (machine.bodies, machine.repeats) == (1, [])
    first, second = torch.zeros(8), torch.zeros(8)
    room = machine.call(first, second)
    assert machine.bodies == 1
    assert machine.repeats == [
        ("one", (5, 1, 1), (first.data_ptr(), 3, second.data_ptr(), at(room, 1), 16)),
        ("two", (2, 3, 1), (at(room, 0), second.data_ptr(), 9, 4, True, "ieee")),
    ]


def test_parts_of_an_earlier_room_are_pointed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    x = torch.zeros(8)
    machine.call(x, x, Room.like(x, LAYOUT))
    before = Room.like(x, LAYOUT)
    room = machine.call(x, x, before)
    assert machine.repeats[1][2] == (at(room, 0), x.data_ptr(), 9, 4, at(before, 1), True, "ieee")


def test_tensors_that_begin_anywhere_are_recorded_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    even, odd = torch.zeros(8), torch.zeros(9)[1:]
    machine.call(odd, even)
    machine.call(odd, even)
    machine.call(even, even)
    assert (machine.bodies, len(launching._tapes)) == (3, 1)
    machine.call(even, even)
    machine.call(even, odd)
    assert machine.bodies == 4


def test_a_launch_that_looks_like_an_earlier_one_is_started_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, numbers that are 1 or multiples of 16, large numbers, addresses and options tell launches apart."""
    machine, x = Machine(monkeypatch), torch.zeros(9)
    given = [(x, 3, 2.5), (x, 16, 2.5), (x, 1, 2.5), (x, 1 << 40, 2.5), (x[1:], 3, 2.5), (x.int(), 3, 2.5), (x, 3, 2)]
    for one in given:
        launch(machine.one, (5,), *one, BLOCK=16)
    launch(machine.one, (5,), *given[0], BLOCK=32)
    launch(machine.two, (5,), *given[0], BLOCK=16)
    assert (len(machine.ordinary), machine.repeats) == (9, [])
    other = torch.zeros(8)
    launch(machine.one, (2, 3), other, 5, 1.0, BLOCK=16)
    assert (len(machine.ordinary), len(machine.repeats)) == (9, 1)
    assert machine.repeats[0] == ("one", (2, 3, 1), (other, 5, 1.0, 16))


def test_keys_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    x = torch.zeros(8)
    machine.call(x, x)
    machine.call(x, x, key="other")
    assert machine.bodies == 2


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0+git1"])
def test_with_another_triton_all_launches_are_ordinary(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, version)
    x = torch.zeros(8)
    for _ in range(3):
        machine.call(x, x)
    assert (machine.bodies, machine.repeats) == (3, [])
    assert len(machine.ordinary) == 6


def test_what_is_kept_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(launching, "MOST", 4)
    x = torch.zeros(8)
    for n in range(10):
        machine.call(x, x, key=str(n))
        machine.call(x, x, key=str(n))
        assert len(launching._tapes) <= 4
        assert len(launching._known) <= 4
    assert machine.bodies == 10


def test_parts_lie_apart_and_keep_their_shapes() -> None:
    layout = Layout.of((torch.uint8, (257,)), (torch.float64, (2, 3)), (torch.int32, (0,)), (torch.float32, (1,)))
    assert [first for first, _, _ in layout.places] == [0, 512, 768, 768]
    assert layout.size == 1024
    parts = Room.like(torch.zeros(1), layout).parts()
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.sum().item() for part in parts] == [0, 6, 0, 3]
