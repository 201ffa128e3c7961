"""Letters from kernels to the host: each has a place of its own for as long as anything may be written there."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from thalweg.kernels.gpu import mailbox
from thalweg.kernels.gpu.mailbox import Letter, Mailbox, mailbox_of

CPU = torch.device("cpu")


def place(letter: Letter) -> int:
    return letter.tensor.data_ptr()


def test_a_letter_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks for a while, then waits; what was meant for an earlier call lies elsewhere."""
    box, waits = Mailbox(CPU), []
    before, now = box.letter(), box.letter()
    before.tensor[0] = 7

    def arrive() -> None:
        waits.append(now)
        now.tensor[0] = 9

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=arrive))
    assert now.read() == 9
    assert now.read() == 9
    assert waits == [now]
    assert before.read() == 7


def test_one_that_was_never_written_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    assert Mailbox(CPU).letter().read() < 0


def test_places_are_apart_and_as_many_as_are_needed() -> None:
    box = Mailbox(CPU)
    letters = [box.letter() for _ in range(3 * mailbox._SLOTS + 1)]
    places = {place(letter) for letter in letters}
    assert len(places) == len(letters)
    assert all(where % 16 == 0 for where in places)
    for value in range(len(letters)):
        letters[value].tensor[0] = value
    assert [letter.read() for letter in letters] == list(range(len(letters)))
    count = len(letters) + len(box.free)
    letters.clear()
    assert len(box.free) == count
    assert not box.late


def test_a_written_place_is_used_again_and_is_clear() -> None:
    box, seen = Mailbox(CPU), set()
    for _ in range(3 * mailbox._SLOTS):
        letter = box.letter()
        assert letter.tensor[0] == -1
        letter.tensor[0] = 5
        assert letter.read() == 5
        seen.add(place(letter))
        del letter
    assert len(seen) == mailbox._SLOTS


def test_a_place_that_may_still_be_written_is_not_given_to_others() -> None:
    """Its owner is gone: by an exception between, say."""
    box = Mailbox(CPU)

    def interrupted() -> None:
        letter = box.letter()
        held.append(letter.tensor)
        raise ValueError

    held: list[torch.Tensor] = []
    with pytest.raises(ValueError):  # noqa: PT011 (it is raised here)
        interrupted()
    gc.collect()
    assert len(box.late) == 1
    others = [box.letter() for _ in range(2 * mailbox._SLOTS)]
    assert held[0].data_ptr() not in {place(letter) for letter in others}
    held[0][0] = 1  # now it has come
    more = [box.letter() for _ in range(len(box.free) + 1)]
    assert place(more[-1]) == held[0].data_ptr()
    assert more[-1].tensor[0] == -1
    assert not box.late


def test_places_of_launches_that_never_were_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    box, waits = Mailbox(torch.device("cuda", 0)), []
    monkeypatch.setattr(box, "_made", Mailbox(CPU)._made)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for _ in range(5 * mailbox._SLOTS):
        box.letter()
    assert len(box.free) + len(box.late) == mailbox._SLOTS
    assert waits == [box.device] * 4


def test_threads_do_not_share_their_letters() -> None:
    box = Mailbox(CPU)

    def calls(number: int) -> int:
        right = 0
        for turn in range(300):
            letter, other = box.letter(), box.letter()
            letter.tensor[0], other.tensor[0] = 1000 * number + turn, 5
            right += letter.read() == 1000 * number + turn
        return right

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(calls, range(8))) == [300] * 8


def test_devices_have_boxes_of_their_own() -> None:
    assert mailbox_of(CPU) is mailbox_of(torch.device("cpu"))
    assert mailbox_of(torch.device("cuda", 0)) is not mailbox_of(torch.device("cuda", 1))
