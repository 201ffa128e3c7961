"""What kernels tell the host in passing: numbers in its own memory, which a GPU can write and it need only read."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Letter", "Mailbox", "mailbox_of"]

_SLOTS = 64  # of pinned memory that is asked for at a time
_LOOKS = 5000  # before the host gives up its turn, some tenths of a millisecond


class _Slot(NamedTuple):
    tensor: Tensor  # two numbers, so that each begins at a multiple of 16 bytes; the first is the word
    word: ctypes.c_int64


class Letter:
    """One number, 0 or more, that a kernel is to write: a place of its own until it was written and nobody wants it.

    So one that comes late, for a caller who was interrupted, is taken for no other.

    >>> letter = mailbox_of(torch.device("cpu")).letter()
    >>> letter.tensor[0] = 7  # as a kernel would
    >>> letter.read()
    7
    """

    __slots__ = ("_box", "_slot", "tensor")

    def __init__(self, box: Mailbox, slot: _Slot) -> None:
        self._box, self._slot, self.tensor = box, slot, slot.tensor

    def read(self) -> int:
        """What was written: seen at once, and after a while by a wait that lets other threads go on.

        The current stream must be the one that the kernel was launched in. Below 0 if it never was.
        """
        word = self._slot.word
        for _ in range(_LOOKS):
            if (found := word.value) >= 0:
                return found
        torch.cuda.current_stream(self._box.device).synchronize()  # also says so if the device has failed
        return word.value

    def __del__(self) -> None:
        """The place is for others: at once, or as soon as it is written."""
        box, slot = self._box, self._slot
        (box.late if slot.word.value < 0 else box.free).append(slot)


class Mailbox:
    """Places for letters of a device, as many as are under way. Threads may share it: a queue's ends are safe.

    >>> box = Mailbox(torch.device("cpu"))
    >>> box.letter().tensor.tolist()[0]
    -1
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: deque[_Slot] = deque()
        self.late: deque[_Slot] = deque()  # nobody waits for these any more, but they may still be written

    def letter(self) -> Letter:
        """One that nothing has been written to.

        >>> box = Mailbox(torch.device("cpu"))
        >>> box.letter().tensor.data_ptr() % 16
        0
        """
        try:
            slot = self.free.popleft()
        except IndexError:
            slot = self._more()
        slot.word.value = -1
        return Letter(self, slot)

    def _more(self) -> _Slot:
        if len(self.late) >= _SLOTS and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is not written by then never will be: it was never launched
            self._sort(everything=True)
        else:
            self._sort(everything=False)
        try:
            return self.free.popleft()
        except IndexError:
            first, *others = self._made()
            self.free.extend(others)
            return first

    def _sort(self, *, everything: bool) -> None:
        for _ in range(len(self.late)):
            try:
                slot = self.late.popleft()
            except IndexError:  # another thread is at it, too
                return
            (self.free if everything or slot.word.value >= 0 else self.late).append(slot)

    def _made(self) -> list[_Slot]:
        memory = torch.empty((_SLOTS, 2), dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        return [_Slot(x, ctypes.c_int64.from_address(x.data_ptr())) for x in memory.unbind(0)]


_boxes: dict[torch.device, Mailbox] = {}


def mailbox_of(device: torch.device) -> Mailbox:
    """The one of a device.

    >>> mailbox_of(torch.device("cpu")) is mailbox_of(torch.device("cpu"))
    True
    """
    found = _boxes.get(device)
    return _boxes.setdefault(device, Mailbox(device)) if found is None else found
