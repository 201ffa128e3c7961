"""Recorded launches are repeated with the pointers of the tensors that are given then, whatever they were before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from thalweg.kernels.gpu import launching
from thalweg.kernels.gpu.launching import Layout, Room, replayed

LAYOUT = Layout.of((torch.float32, (4, 4)), (torch.int32, (3,)))


class Machine:
    """Stands in for a driver: remembers what each launch was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.bodies, self.repeats = 0, []
        monkeypatch.setattr(launching, "launch", self.launch)
        monkeypatch.setattr(launching, "_stream", lambda device: 7)
        monkeypatch.setattr(launching, "_tapes", {})

    def launch(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any):
        def run(x, y, z, stream, function, metadata, *rest):
            assert (stream, function, metadata, rest[:3]) == (7, "function", "packed", (None, None, None))
            self.repeats.append((kernel, (x, y, z), rest[3:]))

        return SimpleNamespace(run=run, function="function", packed_metadata="packed"), tuple(options.values())

    def call(self, first: Tensor, second: Tensor, before: Room | None = None, key: str = "key") -> Room:
        def body(launch, inputs, parts, others=()):
            self.bodies += 1
            launch("one", (5,), inputs[0], 3, inputs[1], parts[1], BLOCK=16)
            launch("two", (2, 3), parts[0], inputs[1], 9, 4, *others[1:], FLAG=True, KIND="ieee")

        return replayed(key, (first, second), LAYOUT, body, before)


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


def test_tensors_that_begin_anywhere_take_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    even, odd = torch.zeros(8), torch.zeros(9)[1:]
    machine.call(odd, even)
    machine.call(odd, even)
    machine.call(even, even)
    assert (machine.bodies, machine.repeats) == (3, [])
    machine.call(even, even)
    machine.call(even, odd)
    assert machine.bodies == 4
    assert len(machine.repeats) == 2


def test_keys_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    x = torch.zeros(8)
    machine.call(x, x)
    machine.call(x, x, key="other")
    assert machine.bodies == 2


def test_parts_lie_apart_and_keep_their_shapes() -> None:
    layout = Layout.of((torch.uint8, (257,)), (torch.float64, (2, 3)), (torch.int32, (0,)), (torch.float32, (1,)))
    assert [first for first, _, _ in layout.places] == [0, 512, 768, 768]
    assert layout.size == 1024
    parts = Room.like(torch.zeros(1), layout).parts()
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.sum().item() for part in parts] == [0, 6, 0, 3]
