"""The queue: who is answered with whom, who is turned away, and who is never asked for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from thalweg.serve.batching import Batcher, ClosedError, FullError, Size


class Gate:
    """Doubles numbers once it is opened, and notes each batch."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, numbers: Any) -> list[int]:
        self.entered.set()
        assert self.open.wait(60)
        self.batches.append(list(numbers))
        if 13 in numbers:
            raise ValueError("13")
        return [2 * n for n in numbers]


async def held(batcher: Batcher, gate: Gate) -> asyncio.Future[Any]:
    """A first job that is being answered until the gate opens: all others wait."""
    first = batcher.submit(gate, [0])
    while not gate.entered.is_set():
        await asyncio.sleep(0.001)
    return first


def run(test: Any, size: Size = Size()) -> Any:  # noqa: B008
    gate, batcher = Gate(), Batcher(size)

    async def main() -> Any:
        first = await held(batcher, gate)
        try:
            return await test(batcher, gate)
        finally:
            gate.open.set()
            await first
            await asyncio.to_thread(batcher.close)

    return asyncio.run(main()), gate.batches[1:]


def test_equal_keys_go_together_in_order() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        jobs = [batcher.submit(gate, [n], key="ab"[n % 2]) for n in range(1, 7)]
        jobs.append(batcher.submit(gate, [7, 8], key="b"))
        gate.open.set()
        return await asyncio.gather(*jobs)

    found, batches = run(test)
    assert found == [[2], [4], [6], [8], [10], [12], [14, 16]]
    assert batches == [[1, 3, 5, 7, 8], [2, 4, 6]]


def test_without_a_key_each_is_alone() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        jobs = [batcher.submit(gate, [n]) for n in (1, 2)]
        gate.open.set()
        return await asyncio.gather(*jobs)

    assert run(test) == ([[2], [4]], [[1], [2]])


def test_a_batch_is_bounded_by_number_and_weight() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        jobs = [batcher.submit(gate, [n, n], key="a") for n in range(3)]
        jobs += [batcher.submit(gate, [n], key="b", weight=5) for n in range(3)]
        gate.open.set()
        return await asyncio.gather(*jobs)

    _, batches = run(test, Size(waiting=100, batch=5, weight=10))
    assert batches == [[0, 0, 1, 1], [2, 2], [0, 1], [2]]


def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        jobs = [batcher.submit(gate, [n], key="a") for n in range(4)]
        with pytest.raises(FullError) as refused:
            batcher.submit(gate, [9], key="a")
        assert 1 <= refused.value.seconds <= 60
        jobs.pop().cancel()
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        jobs.append(batcher.submit(gate, [5], key="a"))
        gate.open.set()
        return await asyncio.gather(*jobs)

    found, _ = run(test, Size(waiting=4))
    assert found == [[0], [2], [4], [10]]


def test_who_is_cancelled_is_never_asked_for() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        stays, goes = (batcher.submit(gate, [n], key="a") for n in (1, 2))
        goes.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return await stays

    assert run(test) == ([2], [[1]])


def test_an_error_is_its_own_callers_alone() -> None:
    async def test(batcher: Batcher, gate: Gate) -> Any:
        jobs = [batcher.submit(gate, [n], key="a") for n in (1, 13, 2)]
        gate.open.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    (one, error, two), _ = run(test)
    assert (one, two) == ([2], [4])
    assert isinstance(error, ValueError)


async def asking(batcher: Batcher, gate: Gate) -> None:
    """Ask until no more is taken: another thread closes the queue, some time."""
    while True:
        batcher.submit(gate, [3])
        await asyncio.sleep(0.001)


def test_closing_answers_what_was_accepted_and_takes_no_more() -> None:
    async def main() -> Any:
        gate, batcher = Gate(), Batcher()
        await held(batcher, gate)
        jobs = [batcher.submit(gate, [n], key="a") for n in (1, 2)]
        closing = asyncio.ensure_future(asyncio.to_thread(batcher.close))
        with pytest.raises(ClosedError):
            await asking(batcher, gate)
        gate.open.set()
        await closing
        return await asyncio.gather(*jobs)

    assert asyncio.run(main()) == [[2], [4]]


def test_a_request_larger_than_the_queue_is_taken_when_it_is_empty() -> None:
    async def main() -> Any:
        batcher = Batcher(Size(waiting=2, batch=2))
        found = await batcher.submit(lambda numbers: numbers, list(range(5)), key="a")
        await asyncio.to_thread(batcher.close)
        return found

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
