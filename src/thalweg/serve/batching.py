"""Questions of many callers, answered together: a bounded queue and one thread for each model.

A thread takes the oldest waiting request and with it all others that are to be answered in the same way, as many as one
batch may hold. It never waits for company: a lone request is answered at once, and while a batch is computed the next
one gathers. So batches grow with the load by themselves.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class FullError(Exception):
    """There is no room in the queue; ``seconds`` is when there will probably be some."""

    def __init__(self, seconds: int):
        super().__init__(f"the queue is full; try again in {seconds} s")
        self.seconds = seconds


class ClosedError(Exception):
    """The queue takes no more requests, for the service ends."""


class Size(NamedTuple):
    """How much a queue holds and a batch takes.

    Attributes:
        waiting: questions in the queue at most; a request that would be one too many is refused.
        batch: questions in a batch at most, but for a single request of more; a computed batch is sent while the next
            one is computed.
        weight: of a batch at most, likewise.

    >>> Size().waiting
    1024
    """

    waiting: int = 1024
    batch: int = 32
    weight: int = 8192


@dataclass(eq=False)
class _Job:
    """Questions of one caller, what answers them, and where the answers go."""

    answer: Callable[[Sequence[Any]], Sequence[Any]]
    questions: Sequence[Any]
    key: Hashable  # jobs with equal keys may be answered together; None is alone
    weight: int
    future: asyncio.Future[Any] = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future = self.loop.create_future()


class Batcher:
    """A queue and the thread that works it off.

    Args:
        size: bounds.
        observe: told of each batch: questions in it, and seconds that it took.

    >>> async def both():
    ...     batcher = Batcher()
    ...     double = lambda numbers: [2 * n for n in numbers]
    ...     found = [await each for each in [batcher.submit(double, [n], key="double") for n in (1, 2)]]
    ...     batcher.close()
    ...     return found
    >>> asyncio.run(both())
    [[2], [4]]
    """

    def __init__(self, size: Size = Size(), observe: Callable[[int, float], None] = lambda count, seconds: None):  # noqa: B008
        self.size, self._observe = size, observe
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed, self._thread = False, None
        self._waiting, self._pace = 0, 0.01  # questions in the queue; seconds that one takes, smoothed

    @property
    def waiting(self) -> int:
        """Questions in the queue."""
        return self._waiting

    def submit(
        self,
        answer: Callable[[Sequence[Any]], Sequence[Any]],
        questions: Sequence[Any],
        *,
        key: Hashable = None,
        weight: int = 1,
    ) -> asyncio.Future[Sequence[Any]]:
        """What will be the answers to some questions, an answer each, or what ``answer`` raised.

        A future that is cancelled leaves the queue: its questions cost nothing unless they are being answered already.

        Args:
            answer: called in the queue's thread with the questions of this request, or of several with an equal
                ``key``; None is never equal to another.
            weight: of each question.
        """
        job = _Job(answer, questions, key, weight)
        self._put(job)
        job.future.add_done_callback(lambda future: self._withdraw(job) if future.cancelled() else None)
        return job.future

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError
            # A request larger than the queue may wait alone: size is refused elsewhere.
            if self._waiting and self._waiting + len(job.questions) > self.size.waiting:
                raise FullError(max(1, min(60, round(self._waiting * self._pace))))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self._waiting += len(job.questions)
            self._changed.notify()

    def _withdraw(self, job: _Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                self._waiting -= len(job.questions)

    def close(self) -> None:
        """Take no more; what was accepted is answered first."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while batch := self._take():
            _answer(batch, self._note)

    def _note(self, count: int, seconds: float) -> None:
        self._pace = 0.9 * self._pace + 0.1 * seconds / max(1, count)
        self._observe(count, seconds)

    def _take(self) -> list[_Job]:
        """The oldest job and those that go with it; waits for one, and gives none when all is over."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if not self._jobs:
                return []
            first = self._jobs.popleft()
            batch, count, weight = [first], len(first.questions), first.weight * len(first.questions)
            if first.key is not None and self._jobs:
                left: deque[_Job] = deque()
                for job in self._jobs:
                    more = len(job.questions)
                    fits = count + more <= self.size.batch and weight + job.weight * more <= self.size.weight
                    if fits and job.key == first.key:
                        batch.append(job)
                        count, weight = count + more, weight + job.weight * more
                    else:
                        left.append(job)
                self._jobs = left
            self._waiting -= count
            return batch


def _answer(batch: list[_Job], note: Callable[[int, float], None]) -> None:
    """Answer all questions of a batch in one call and share the answers out.

    Where that fails, each request is asked on its own, so that only those that cannot be answered fail.
    """
    import time

    questions = [question for job in batch for question in job.questions]
    began = time.perf_counter()
    outcomes: list[tuple[_Job, Any, BaseException | None]] = []
    try:
        answers = batch[0].answer(questions)
        start = 0
        for job in batch:
            outcomes.append((job, answers[start : start + len(job.questions)], None))
            start += len(job.questions)
    except Exception as error:
        if len(batch) > 1:
            for job in batch:
                _answer([job], note)
            return
        outcomes = [(batch[0], None, error)]
    note(len(questions), time.perf_counter() - began)
    loops = {job.loop for job in batch}
    for loop in loops:
        try:
            loop.call_soon_threadsafe(_settle, [each for each in outcomes if each[0].loop is loop])
        except RuntimeError:  # the loop is closed, and with it all callers are gone
            continue


def _settle(outcomes: Sequence[tuple[_Job, Any, BaseException | None]]) -> None:
    for job, answers, error in outcomes:
        if job.future.done():
            continue
        if error is None:
            job.future.set_result(answers)
        else:
            job.future.set_exception(error)
